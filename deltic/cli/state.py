"""`deltic state`: saves and loads prefixes of conversations as files."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from deltic.cli import options
from deltic.cli.options import open_llm
from deltic.cli.output import bytes_bar, date, grid, mib
from deltic.cli.parser import UsageError, existing_file, json_file, read_text, text

if TYPE_CHECKING:
    from deltic.cache.offload.state_manifest import SavedState

_ACTIONS = {
    "export": "read the prompt in the file SOURCE, and save it in the directory TARGET",
    "import": "put saved states of the directory SOURCE into the cache directory TARGET",
    "push": "copy saved states from the directory SOURCE to TARGET, a directory or a URL",
    "pull": "copy saved states from SOURCE, a directory or a URL, to the directory TARGET",
    "ls": "list the saved states of SOURCE, a directory or a URL",
}
_SHORT = 12


def add_state(parser: argparse.ArgumentParser) -> None:
    parser.description = ("Save what a model has read of a prompt as files, and use it on other machines. URLs are of "
                          "HTTP servers, or what fsspec opens, such as s3://bucket/folder.")
    actions = "; ".join(f"{name}: {line}" for name, line in _ACTIONS.items())
    parser.add_argument("action", metavar="ACTION", choices=tuple(_ACTIONS), type=text, help=actions)
    parser.add_argument("source", metavar="SOURCE", type=text,
                        help="for export: text, a system prompt, or JSON with messages and tools as clients send them")
    parser.add_argument("target", metavar="TARGET", type=text, nargs="?", help="for all actions but ls")
    parser.add_argument("--model", metavar="MODEL", type=text, help=f"export, import: {options.MODEL} (default)")
    options.add_revision(parser)
    parser.set_defaults(random=None, layers=None)
    parser.add_argument("--raw", action="store_true", help="export: the file is a prompt without a chat template")
    parser.add_argument("--name", type=text, default="", help="export: a name for people")
    parser.add_argument("--id", action="append", type=text, default=[], metavar="ID",
                        help="the saved state, by its id or the beginning of it; may be repeated (default: all)")
    options.add_json(parser)
    options.add_engine(parser)


def run_state(args: argparse.Namespace) -> int:
    _check(args)
    if args.action == "ls":
        return _list(args)
    found = {"export": _export, "import": _import, "push": _copy, "pull": _copy}[args.action](args)
    if args.json:
        print(json.dumps({"states": [asdict(saved) for saved in found]}))
    else:
        print(grid([_row(saved) for saved in found]))
    return 0


def _check(args: argparse.Namespace) -> None:
    if (args.target is None) != (args.action == "ls"):
        raise UsageError(f"write deltic state {args.action} SOURCE" + (" TARGET" if args.action != "ls" else ""))
    given = options.engine_options(args)
    if args.action not in ("export", "import"):
        options.refuse({"--model": args.model, "--revision": args.revision, "engine options": given or None},
                       f"{args.action} loads no model: leave out {{}}")
    if args.action != "export":
        options.refuse({"--raw": args.raw, "--name": args.name or None}, f"{{}} is for export, not for {args.action}")
    if args.action in ("export", "ls"):
        options.refuse({"--id": args.id}, f"{{}} is not for {args.action}")
    if args.action == "import":
        options.refuse({"--cache-dir": given.get("cache_dir")}, "the cache directory is TARGET: leave out {}")


def _export(args: argparse.Namespace) -> list[SavedState]:
    prompt, more = _prompt(args)
    with open_llm(args) as llm:
        return [llm.save_state(prompt, args.target, args.name or args.source, **more)]


def _prompt(args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """Returns the prompt in a file, and options of `LLM.save_state`."""
    path = existing_file(args.source)
    if args.raw:
        return read_text(path), {}
    if path.suffix != ".json":
        return [{"role": "system", "content": read_text(path)}], {}
    body = json_file(args.source)
    messages = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise UsageError(f'{args.source} must be JSON of the form {{"messages": [...], "tools": [...]}}')
    return messages, {"tools": body.get("tools"), "variables": body.get("chat_template_kwargs")}


def _import(args: argparse.Namespace) -> list[SavedState]:
    from deltic.cache.offload.state_stores import StateDirectory, chosen_ids

    ids = chosen_ids(StateDirectory(args.source), args.id)
    with open_llm(args, cache_dir=args.target) as llm:
        if not any(tier.name == "disk" and tier.store.writable for tier in llm.runtime.cache.tiers):
            raise UsageError(f"{args.target} cannot be used as a cache directory: see the warning above")
        return [llm.load_state(args.source, id) for id in ids]


def _copy(args: argparse.Namespace) -> list[SavedState]:
    from deltic.cache.offload.state_stores import StateDirectory, chosen_ids, open_states, pull, push

    found = list["SavedState"]()
    with bytes_bar("copying") as bar:
        if args.action == "push":
            local, target = StateDirectory(args.source), open_states(args.target)
            found += [push(local, id, target, bar.update) for id in chosen_ids(local, args.id)]
        else:
            source, local = open_states(args.source), StateDirectory(args.target)
            found += [pull(source, id, local, bar.update) for id in chosen_ids(source, args.id)]
    return found


def _list(args: argparse.Namespace) -> int:
    from deltic.cache.offload.state_stores import list_states, open_states

    found = list_states(open_states(args.source))
    if args.json:
        print(json.dumps({"states": [{**asdict(saved), "problem": problem or None} for saved, problem in found]}))
    elif not found:
        print(f"no saved states in {args.source}")
    else:
        damaged = any(problem for _, problem in found)
        print(grid([{**_row(saved), **({"problem": problem} if damaged else {})} for saved, problem in found]))
    return 0


def _row(saved: SavedState) -> dict[str, Any]:
    exact = {} if saved.exact is None else {"bits": "same" if saved.exact else "converted"}
    return {"id": saved.id[:_SHORT], "name": saved.name, "tokens": saved.tokens, "size": mib(saved.bytes),
            "created": date(saved.created), "model": f"{saved.model} ({saved.about})", **exact}
