"""`deltic cache`: what a cache directory keeps, and how to be rid of it."""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltic.cache.offload.item_folder import (
    FolderLabel,
    StoredFile,
    files,
    folders,
    prune,
    prune_root,
    read_label,
    remove,
    root_of,
    split_folder,
)
from deltic.cli.parser import UsageError, path_name, text, whole
from deltic.cli.table import date, grid, table
from deltic.cli.terminal import confirmed

HELP = "Show or clear the prefixes of conversations that a cache directory keeps."
_ACTIONS = {"ls": "list the prefixes, last used first", "stats": "show totals per model",
            "clear": "delete what is kept, of all models"}
_OWN = {"json": ("ls", "stats"), "yes": ("clear",), "older_than": ("clear",)}
_SHORT, _DAY = 12, 86400


@dataclass(frozen=True, slots=True)
class _Model:
    """A model's folder: what it keeps was computed in one way."""

    folder: Path
    label: FolderLabel
    files: list[StoredFile]

    @property
    def facts(self) -> dict[str, Any]:
        version, fingerprint = split_folder(self.folder.name)
        return {"model": self.label.model or None, "about": self.label.about or None, "fingerprint": fingerprint,
                "version": version}


def add(parser: argparse.ArgumentParser) -> None:
    actions = "; ".join(f"{name}: {line}" for name, line in _ACTIONS.items())
    parser.add_argument("action", metavar="ACTION", choices=tuple(_ACTIONS), type=text, help=actions)
    parser.add_argument("directory", metavar="DIR", type=path_name, help="the directory, as given to --cache-dir")
    parser.add_argument("--json", action="store_true", help="ls, stats: print one JSON object instead of a table")
    parser.add_argument("--yes", action="store_true", help="clear: do not ask")
    parser.add_argument("--older-than", type=whole(0, 36500), metavar="DAYS",
                        help="clear: only what was not used for so many days")


def run(args: argparse.Namespace) -> int:
    for option, actions in _OWN.items():
        given = getattr(args, option)
        if given is not None and given is not False and args.action not in actions:
            raise UsageError(f"--{option.replace('_', '-')} is for {' and '.join(actions)}, not for {args.action}")
    root = root_of(args.directory)
    if not root.parent.is_dir():
        raise UsageError(f"there is no directory {args.directory!r}")
    if root.is_symlink():
        raise UsageError(f"{root} is a link, which deltic never makes: name the directory that it leads into")
    models = [_Model(folder, read_label(folder), list(files(folder))) for folder in folders(root)]
    if args.action == "clear":
        return _clear(root, models, args)
    facts = {"ls": _listing, "stats": _stats}[args.action](root, models)
    if args.json:
        print(json.dumps(facts, ensure_ascii=False))
    elif not facts["prefixes" if args.action == "ls" else "bytes"]:
        print(f"nothing kept in {args.directory}")
    else:
        print({"ls": _listing_text, "stats": _stats_text}[args.action](facts))
    return 0


# ls


def _listing(root: Path, models: Iterable[_Model]) -> dict[str, Any]:
    prefixes = [_prefix(model, found) for model in models for found in _by_key(model).values()]
    prefixes.sort(key=lambda prefix: -prefix["used"])
    return {"directory": str(root.parent), "prefixes": prefixes}


def _by_key(model: _Model) -> dict[str, list[StoredFile]]:
    found: dict[str, list[StoredFile]] = {}
    for file in model.files:
        if file.item:
            found.setdefault(file.item.key, []).append(file)
    return found


def _prefix(model: _Model, found: Sequence[StoredFile]) -> dict[str, Any]:
    """All items of one key."""
    items = [file.item for file in found if file.item]
    return {"key": items[0].key, "tokens": max(item.done for item in items),
            "kinds": sorted({item.kind for item in items}), "bytes": sum(file.size for file in found),
            "used": max(file.used for file in found), **model.facts}


def _listing_text(facts: dict[str, Any]) -> str:
    return grid([{"key": prefix["key"][:_SHORT], "tokens": prefix["tokens"], "kind": "+".join(prefix["kinds"]),
                  "mib": round(prefix["bytes"] / (1 << 20), 1), "last_used": date(prefix["used"]),
                  "model": f"{prefix['model'] or '?'} ({prefix['fingerprint'][:_SHORT]})"}
                 for prefix in facts["prefixes"]])


# stats


def _stats(root: Path, models: Iterable[_Model]) -> dict[str, Any]:
    models = list(models)
    return {"directory": str(root.parent), "bytes": sum(file.size for model in models for file in model.files),
            "disk_free": shutil.disk_usage(root.parent).free, "models": [_totals(model) for model in models]}


def _totals(model: _Model) -> dict[str, Any]:
    """prefixes: those that can be resumed; tokens: whose K/V is kept, counted once; others: notes and leftovers."""
    items = [file.item for file in model.files if file.item]
    used = [file.used for file in model.files]
    return {**model.facts, "items": len(items), "prefixes": len({item.key for item in items if item.kind != "kv"}),
            "tokens": sum(item.done - item.start for item in items if item.kind == "kv"),
            "notes": sum(file.note for file in model.files),
            "other_files": sum(file.item is None and not file.note for file in model.files),
            "bytes": sum(file.size for file in model.files),
            "oldest": min(used, default=None), "newest": max(used, default=None)}


def _stats_text(facts: dict[str, Any]) -> str:
    shown: dict[str, Any] = {"directory": facts["directory"], "size": _size(facts["bytes"]),
                             "disk_free": _size(facts["disk_free"])}
    for model in facts["models"]:
        totals = {**model, "size": _size(model["bytes"]), "oldest": date(model["oldest"]),
                  "newest": date(model["newest"])}
        for name in ("model", "about", "bytes", "fingerprint"):
            del totals[name]
        about = (model["about"], model["fingerprint"][:_SHORT], f"version {totals.pop('version')}")
        shown[f"{model['model'] or '?'} ({', '.join(filter(None, about))})"] = totals
    return table(shown)


# clear


def _clear(root: Path, models: Sequence[_Model], args: argparse.Namespace) -> int:
    now, least = time.time(), args.older_than
    doomed = [(model.folder, file) for model in models for file in model.files
              if least is None or now - file.used > least * _DAY]
    what = (f"{len(doomed):,} file{'s' * (len(doomed) != 1)} ({_size(sum(file.size for _, file in doomed))}) "
            f"below {root}")
    if not doomed:
        print(f"nothing kept in {args.directory}" + (f" is older than {least} days" if least is not None else ""))
    elif not args.yes and not confirmed(f"Delete {what}? [y/N] "):
        print("nothing was deleted")
        return 1
    for folder, file in doomed:
        remove(folder, file.path)
    for model in models:
        prune(model.folder)
    prune_root(root)
    if doomed:
        print(f"deleted {what}")
    return 0


# words


def _size(count: int) -> str:
    return f"{count / (1 << 20):,.1f} MiB"
