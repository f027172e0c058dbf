"""`deltic cache`: shows and clears what a cache directory keeps."""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from deltic.cache.offload.directory import VERSION, CacheDirectory, ModelLabel, StoredRow, root_of
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
    """A model and what is kept for it."""

    label: ModelLabel
    rows: list[StoredRow]

    @property
    def facts(self) -> dict[str, Any]:
        return {"model": self.label.label or None, "about": self.label.about or None, "fingerprint": self.label.model,
                "version": VERSION}

    @property
    def items(self) -> list[StoredRow]:
        return [row for row in self.rows if row.kind != "record"]


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
    directory = CacheDirectory(args.directory) if root.is_dir() else None
    rows = directory.rows() if directory else []
    labels = directory.models() if directory else []
    models = [_Model(label, [row for row in rows if row.model == label.model]) for label in labels]
    if args.action == "clear":
        return _clear(directory, rows, args)
    listing = args.action == "ls"
    facts = {"directory": str(root.parent), **(_listing(models) if listing else _stats(models))}
    if args.json:
        facts |= {} if listing else {"disk_free": shutil.disk_usage(root.parent).free}
        print(json.dumps(facts, ensure_ascii=False))
    elif not rows:
        print(f"nothing kept in {args.directory}")
    else:
        print(_listing_text(facts) if listing else _stats_text(facts, shutil.disk_usage(root.parent).free))
    return 0


# ls


def _listing(models: Iterable[_Model]) -> dict[str, Any]:
    prefixes = list[dict[str, Any]]()
    for model in models:
        by_key: dict[str, list[StoredRow]] = {}
        for row in model.items:
            by_key.setdefault(row.key, []).append(row)
        prefixes += [_prefix(model, found) for found in by_key.values()]
    return {"prefixes": sorted(prefixes, key=lambda prefix: -prefix["used"])}


def _prefix(model: _Model, items: Sequence[StoredRow]) -> dict[str, Any]:
    """Describes the items of one key."""
    return {"key": items[0].key, "tokens": max(item.done for item in items),
            "kinds": sorted({item.kind for item in items}), "bytes": sum(item.size for item in items),
            "used": max(item.used for item in items), **model.facts}


def _listing_text(facts: dict[str, Any]) -> str:
    return grid([{"key": prefix["key"][:_SHORT], "tokens": prefix["tokens"], "kind": "+".join(prefix["kinds"]),
                  "mib": round(prefix["bytes"] / (1 << 20), 1), "last_used": date(prefix["used"]),
                  "model": f"{prefix['model'] or '?'} ({prefix['fingerprint'][:_SHORT]})"}
                 for prefix in facts["prefixes"]])


# stats


def _stats(models: Sequence[_Model]) -> dict[str, Any]:
    return {"bytes": sum(row.size for model in models for row in model.rows),
            "models": [_totals(model) for model in models]}


def _totals(model: _Model) -> dict[str, Any]:
    """prefixes: those that can be resumed; tokens: whose K/V is kept, counted once; notes: records of answers."""
    items = model.items
    used = [row.used for row in model.rows]
    return {**model.facts, "items": len(items), "prefixes": len({item.key for item in items if item.kind != "kv"}),
            "tokens": sum(item.done - item.start for item in items if item.kind == "kv"),
            "notes": len(model.rows) - len(items), "bytes": sum(row.size for row in model.rows),
            "oldest": min(used, default=None), "newest": max(used, default=None)}


def _stats_text(facts: dict[str, Any], free: int) -> str:
    shown: dict[str, Any] = {"directory": facts["directory"], "size": _size(facts["bytes"]), "disk_free": _size(free)}
    for model in facts["models"]:
        totals = {**model, "size": _size(model["bytes"]), "oldest": date(model["oldest"]),
                  "newest": date(model["newest"])}
        for name in ("model", "about", "bytes", "fingerprint"):
            del totals[name]
        about = (model["about"], model["fingerprint"][:_SHORT], f"version {totals.pop('version')}")
        shown[f"{model['model'] or '?'} ({', '.join(filter(None, about))})"] = totals
    return table(shown)


# clear


def _clear(directory: CacheDirectory | None, rows: Sequence[StoredRow], args: argparse.Namespace) -> int:
    days = args.older_than
    before = float("inf") if days is None else time.time() - days * _DAY
    doomed = [row for row in rows if row.used < before]
    noun = "entry" if len(doomed) == 1 else "entries"
    what = f"{len(doomed):,} {noun} ({_size(sum(row.size for row in doomed))}) below {root_of(args.directory)}"
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


def _size(count: int) -> str:
    return f"{count / (1 << 20):,.1f} MiB"
