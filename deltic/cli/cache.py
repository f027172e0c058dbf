"""Models and conversations on disk: `deltic pull`, `ls` and `rm`, and `deltic cache`."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltic.cli import options
from deltic.cli.output import confirmed, date, grid, mib, table
from deltic.cli.parser import UsageError, path_name, text, whole

if TYPE_CHECKING:
    from deltic.cache.offload.directory import CacheDirectory, ModelLabel, StoredRow

_ACTIONS = {"ls": "list the prefixes, last used first", "stats": "show totals for each model",
            "clear": "delete the contents, of all models"}
_SHORT, _DAY = 12, 86400


def add_pull(parser: argparse.ArgumentParser) -> None:
    parser.description = ("Download a model from the Hugging Face hub, or its missing files. The checksum of every "
                          "file is compared.")
    parser.add_argument("model", metavar="MODEL", type=text,
                        help="a Hugging Face name such as Qwen/Qwen3.5-0.8B, or with one of its GGUF files, such as "
                             "unsloth/Qwen3.5-0.8B-GGUF:Q8_0")
    options.add_revision(parser)


def run_pull(args: argparse.Namespace) -> int:
    from deltic.loader.hub import is_below, place, resolve

    path = resolve(args.model, args.revision, progress=sys.stderr.isatty())
    if not is_below(place(), path):
        raise UsageError(f"{args.model} is on this machine, at {path}: there is nothing to download")
    print(path)
    return 0


def add_ls(parser: argparse.ArgumentParser) -> None:
    parser.description = "List the models that were downloaded from the Hugging Face hub, last used first."
    options.add_json(parser)


def run_ls(args: argparse.Namespace) -> int:
    from deltic.loader.disk import size_of
    from deltic.loader.hub import downloads, place

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
    from deltic.loader.disk import size_of
    from deltic.loader.hub import delete, downloads, place

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
    from deltic.cache.offload.directory import CacheDirectory, root_of

    root = root_of(args.directory)
    if not root.parent.is_dir():
        raise UsageError(f"there is no directory {args.directory!r}")
    if root.is_symlink():
        raise UsageError(f"{root} is a link, which deltic never makes: name the directory that it points to")
    directory = CacheDirectory(args.directory) if root.is_dir() else None
    rows = directory.rows() if directory else []
    if args.action == "clear":
        return _clear(directory, rows, args)
    labels = directory.models() if directory else []
    models = [(label, [row for row in rows if row.model == label.model]) for label in labels]
    listing = args.action == "ls"
    facts = {"directory": str(root.parent), **(_listing(models) if listing else _stats(models, root.parent))}
    if args.json:
        print(json.dumps(facts, ensure_ascii=False))
    elif not rows:
        print(f"nothing kept in {args.directory}")
    else:
        print(_listing_text(facts) if listing else _stats_text(facts))
    return 0


def _facts(label: ModelLabel) -> dict[str, Any]:
    from deltic.cache.offload.directory import VERSION

    return {"model": label.label or None, "about": label.about or None, "fingerprint": label.model, "version": VERSION}


def _listing(models: Sequence[tuple[ModelLabel, list[StoredRow]]]) -> dict[str, Any]:
    prefixes = list[dict[str, Any]]()
    for label, rows in models:
        by_key: dict[str, list[StoredRow]] = defaultdict(list)
        for row in rows:
            if row.kind != "record":
                by_key[row.key].append(row)
        for key, items in by_key.items():
            prefixes.append({"key": key, "tokens": max(row.done for row in items),
                             "kinds": sorted({row.kind for row in items}), "bytes": sum(row.size for row in items),
                             "used": max(row.used for row in items), **_facts(label)})
    return {"prefixes": sorted(prefixes, key=lambda prefix: -prefix["used"])}


def _listing_text(facts: dict[str, Any]) -> str:
    return grid([{"key": prefix["key"][:_SHORT], "tokens": prefix["tokens"], "kind": "+".join(prefix["kinds"]),
                  "mib": round(prefix["bytes"] / (1 << 20), 1), "last_used": date(prefix["used"]),
                  "model": f"{prefix['model'] or '?'} ({prefix['fingerprint'][:_SHORT]})"}
                 for prefix in facts["prefixes"]])


def _stats(models: Sequence[tuple[ModelLabel, list[StoredRow]]], directory: Path) -> dict[str, Any]:
    """Returns figures by model. prefixes: resumable. tokens: with K/V, each counted once. notes: answer records."""
    found = []
    for label, rows in models:
        items, used = [row for row in rows if row.kind != "record"], [row.used for row in rows]
        found.append({**_facts(label), "items": len(items),
                      "prefixes": len({item.key for item in items if item.kind != "kv"}),
                      "tokens": sum(item.done - item.start for item in items if item.kind == "kv"),
                      "notes": len(rows) - len(items), "bytes": sum(row.size for row in rows),
                      "oldest": min(used, default=None), "newest": max(used, default=None)})
    return {"bytes": sum(model["bytes"] for model in found), "disk_free": shutil.disk_usage(directory).free,
            "models": found}


def _stats_text(facts: dict[str, Any]) -> str:
    shown: dict[str, Any] = {"directory": facts["directory"], "size": mib(facts["bytes"]),
                             "disk_free": mib(facts["disk_free"])}
    for model in facts["models"]:
        counts = {name: model[name] for name in ("items", "prefixes", "tokens", "notes")}
        about = (model["about"], model["fingerprint"][:_SHORT], f"version {model['version']}")
        shown[f"{model['model'] or '?'} ({', '.join(filter(None, about))})"] = {
            **counts, "oldest": date(model["oldest"]), "newest": date(model["newest"]), "size": mib(model["bytes"])}
    return table(shown)


def _clear(directory: CacheDirectory | None, rows: Sequence[StoredRow], args: argparse.Namespace) -> int:
    from deltic.cache.offload.directory import root_of

    days = args.older_than
    before = float("inf") if days is None else time.time() - days * _DAY
    doomed = [row for row in rows if row.used < before]
    noun = "entry" if len(doomed) == 1 else "entries"
    what = f"{len(doomed):,} {noun} ({mib(sum(row.size for row in doomed))}) below {root_of(args.directory)}"
    if not doomed:
        print(f"nothing kept in {args.directory}" + (f" is older than {days} days" if days is not None else ""))
    elif not args.yes and not confirmed(f"Delete {what}? [y/N] "):
        print("nothing was deleted")
        return 1
    if directory and days is None:
        directory.remove_version_1()
    if directory:
        directory.remove_unused(before)
    if doomed:
        print(f"deleted {what}")
    return 0
