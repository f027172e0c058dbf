"""Models and conversations on disk: `deltic pull`, `ls` and `rm`, and `deltic cache`."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deltic.cli import options
from deltic.cli.output import confirmed, date, grid, mib, table
from deltic.cli.parser import UsageError, path_name, text, whole

_ACTIONS = {"ls": "list the prefixes, last used first", "stats": "show totals for each model",
            "clear": "delete the contents, of all models"}
_SHORT, _DAY = 12, 86400


# Models


def add_pull(parser: argparse.ArgumentParser) -> None:
    parser.description = ("Download a model from the Hugging Face hub, or its missing files. The checksum of every "
                          "file is compared.")
    parser.add_argument("model", metavar="MODEL", type=text,
                        help="a Hugging Face name such as Qwen/Qwen3.5-0.8B, or with one of its GGUF files, such as "
                             "unsloth/Qwen3.5-0.8B-GGUF:Q8_0")
    options.add_revision(parser)


def run_pull(args: argparse.Namespace) -> int:
    from deltic.loader.downloads import is_below, place
    from deltic.loader.hub import resolve

    path = resolve(args.model, args.revision, progress=sys.stderr.isatty())
    if not is_below(place(), path):
        raise UsageError(f"{args.model} is on this machine, at {path}: there is nothing to download")
    print(path)
    return 0


def add_ls(parser: argparse.ArgumentParser) -> None:
    parser.description = "List the models that were downloaded from the Hugging Face hub, last used first."
    options.add_json(parser)


def run_ls(args: argparse.Namespace) -> int:
    from deltic.loader.downloads import downloads, place
    from deltic.loader.writing import size_of

    models = downloads()
    if args.json:
        print(json.dumps({"directory": str(place()), "models": [asdict(model) for model in models]}, default=str))
    elif not models:
        print(f"nothing was downloaded to {place()}")
    else:
        print(grid([{"model": model.name, "size": size_of(model.bytes), "last_used": date(model.used),
                     "revisions": ", ".join(revision.name for revision in model.revisions)} for model in models]))
    return 0


def add_rm(parser: argparse.ArgumentParser) -> None:
    parser.description = "Delete a model that was downloaded. A program that has loaded it is not affected."
    parser.add_argument("model", metavar="MODEL", type=text, help="its name, as deltic ls shows it")
    parser.add_argument("--revision", metavar="REV", help="only this branch, tag or commit (default: all)")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def run_rm(args: argparse.Namespace) -> int:
    from deltic.loader.catalog import repository_of
    from deltic.loader.downloads import delete, downloads, place
    from deltic.loader.writing import size_of

    model = next((model for model in downloads() if model.name == repository_of(args.model)), None)
    if model is None:
        raise UsageError(f"{args.model} is not among the models in {place()}, which deltic ls lists")
    doomed = [revision for revision in model.revisions if args.revision is None or revision.is_called(args.revision)]
    if not doomed:
        known = ", ".join(revision.name for revision in model.revisions)
        raise UsageError(f"{args.model} has no revision {args.revision!r} here; it has {known}")
    revisions = "" if len(doomed) == len(model.revisions) else f" at {args.revision}"
    if not args.yes and not confirmed(f"Delete {args.model}{revisions} ({size_of(model.bytes)})? [y/N] "):
        print("nothing was deleted")
        return 1
    print(f"deleted {args.model}{revisions}: {size_of(delete(doomed))} are free again")
    return 0


# Conversations


def add_cache(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show or clear the prefixes of conversations in a cache directory."
    actions = "; ".join(f"{name}: {line}" for name, line in _ACTIONS.items())
    parser.add_argument("action", metavar="ACTION", choices=tuple(_ACTIONS), type=text, help=actions)
    parser.add_argument("directory", metavar="DIR", type=path_name, help="the directory, as given to --cache-dir")
    parser.add_argument("--json", action="store_true", help="ls, stats: print one JSON object")
    parser.add_argument("--yes", action="store_true", help="clear: do not ask")
    parser.add_argument("--older-than", type=whole(0, 36500), metavar="DAYS",
                        help="clear: only what was not used for so many days")


def run_cache(args: argparse.Namespace) -> int:
    if args.action == "clear":
        options.refuse({"--json": args.json}, "{} is for ls and stats, not for clear")
    else:
        options.refuse({"--yes": args.yes, "--older-than": args.older_than},
                       f"{{}} is for clear, not for {args.action}")
    from deltic.cache.offload.item_folder import root_of

    root = root_of(args.directory)
    if not root.parent.is_dir():
        raise UsageError(f"there is no directory {args.directory!r}")
    if root.is_symlink():
        raise UsageError(f"{root} is a link, which deltic never makes: name the directory that it points to")
    models = _models(root)
    if args.action == "clear":
        return _clear(root, models, args)
    listing = args.action == "ls"
    facts = _listing(root, models) if listing else _stats(root, models)
    if args.json:
        print(json.dumps(facts, ensure_ascii=False))
    elif not facts["prefixes" if listing else "bytes"]:
        print(f"nothing kept in {args.directory}")
    else:
        print(_listing_text(facts) if listing else _stats_text(facts))
    return 0


@dataclass(frozen=True, slots=True)
class _ModelFolder:
    """The folder of a model, as it was computed in one way."""

    path: Path
    facts: dict[str, Any]
    files: list[Any]

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)


def _models(root: Path) -> list[_ModelFolder]:
    from deltic.cache.offload.item_folder import files, folders, read_label, split_folder

    found = []
    for folder in folders(root):
        label = read_label(folder)
        version, fingerprint = split_folder(folder.name)
        facts = {"model": label.model or None, "about": label.about or None, "fingerprint": fingerprint,
                 "version": version}
        found.append(_ModelFolder(folder, facts, list(files(folder))))
    return found


def _listing(root: Path, models: Sequence[_ModelFolder]) -> dict[str, Any]:
    prefixes = []
    for model in models:
        by_key: dict[str, list[Any]] = {}
        for file in model.files:
            if file.item:
                by_key.setdefault(file.item.key, []).append(file)
        for key, files in by_key.items():
            prefixes.append({"key": key, "tokens": max(file.item.done for file in files),
                             "kinds": sorted({file.item.kind for file in files}),
                             "bytes": sum(file.size for file in files), "used": max(file.used for file in files),
                             **model.facts})
    prefixes.sort(key=lambda prefix: -prefix["used"])
    return {"directory": str(root.parent), "prefixes": prefixes}


def _listing_text(facts: dict[str, Any]) -> str:
    rows = []
    for prefix in facts["prefixes"]:
        rows.append({"key": prefix["key"][:_SHORT], "tokens": prefix["tokens"], "kind": "+".join(prefix["kinds"]),
                     "mib": round(prefix["bytes"] / (1 << 20), 1), "last_used": date(prefix["used"]),
                     "model": f"{prefix['model'] or '?'} ({prefix['fingerprint'][:_SHORT]})"})
    return grid(rows)


def _stats(root: Path, models: Sequence[_ModelFolder]) -> dict[str, Any]:
    return {"directory": str(root.parent), "bytes": sum(model.bytes for model in models),
            "disk_free": shutil.disk_usage(root.parent).free, "models": [_totals(model) for model in models]}


def _totals(model: _ModelFolder) -> dict[str, Any]:
    """prefixes: how many can be resumed. tokens: how many have K/V, each counted once."""
    items = [file.item for file in model.files if file.item]
    used = [file.used for file in model.files]
    return {**model.facts, "items": len(items), "prefixes": len({item.key for item in items if item.kind != "kv"}),
            "tokens": sum(item.done - item.start for item in items if item.kind == "kv"),
            "notes": sum(file.note for file in model.files),
            "other_files": sum(file.item is None and not file.note for file in model.files),
            "bytes": model.bytes, "oldest": min(used, default=None), "newest": max(used, default=None)}


def _stats_text(facts: dict[str, Any]) -> str:
    shown: dict[str, Any] = {"directory": facts["directory"], "size": mib(facts["bytes"]),
                             "disk_free": mib(facts["disk_free"])}
    for model in facts["models"]:
        counts = {name: model[name] for name in ("items", "prefixes", "tokens", "notes", "other_files")}
        about = (model["about"], model["fingerprint"][:_SHORT], f"version {model['version']}")
        shown[f"{model['model'] or '?'} ({', '.join(filter(None, about))})"] = {
            **counts, "oldest": date(model["oldest"]), "newest": date(model["newest"]), "size": mib(model["bytes"])}
    return table(shown)


def _clear(root: Path, models: Sequence[_ModelFolder], args: argparse.Namespace) -> int:
    from deltic.cache.offload.item_folder import prune, prune_root, remove

    now, days = time.time(), args.older_than
    doomed = [(model.path, file) for model in models for file in model.files
              if days is None or now - file.used > days * _DAY]
    size = mib(sum(file.size for _, file in doomed))
    what = f"{len(doomed):,} file{'s' * (len(doomed) != 1)} ({size}) below {root}"
    if not doomed:
        print(f"nothing kept in {args.directory}" + (f" is older than {days} days" if days is not None else ""))
    elif not args.yes and not confirmed(f"Delete {what}? [y/N] "):
        print("nothing was deleted")
        return 1
    for folder, file in doomed:
        remove(folder, file.path)
    for model in models:
        prune(model.path)
    prune_root(root)
    if doomed:
        print(f"deleted {what}")
    return 0
