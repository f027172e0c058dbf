"""`deltic mtp`: the multi-token-prediction head of a model as a file of its own."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from deltic.cli.parser import UsageError, path_name, text
from deltic.cli.table import table

HELP = ("Take the multi-token-prediction head out of a model. Put beside a copy of the model that lacks it, fine-tuned "
        "or in a GGUF file, it is found there.")
_ACTIONS = {"extract": "write the head of SRC to DST, bit for bit; of a model on the Hugging Face hub, nothing else is "
                       "downloaded"}
_FILE = "mtp.safetensors"


def add(parser: argparse.ArgumentParser) -> None:
    actions = "; ".join(f"{name}: {line}" for name, line in _ACTIONS.items())
    parser.add_argument("action", metavar="ACTION", choices=tuple(_ACTIONS), type=text, help=actions)
    parser.add_argument("source", metavar="SRC", type=text,
                        help="a directory, or a Hugging Face name such as Qwen/Qwen3.5-0.8B")
    parser.add_argument("target", metavar="DST", type=path_name,
                        help=f"the file to write, ending in .safetensors, or a directory to write {_FILE} into")
    parser.add_argument("--force", action="store_true", help="replace DST if it exists")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a Hugging Face model")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    path = _target(args)
    from deltic.loader.hub import open_checkpoint
    from deltic.loader.mtp_head import extract_head

    bar = _bar()
    try:
        written = extract_head(open_checkpoint(args.source, args.revision), path, _source(args), bar.update)
    finally:
        bar.close()
    facts: dict[str, Any] = {"path": str(path), "bytes": written.nbytes, "weights": written.weights,
                             "tensors": dict(written.tensors)}
    counted = [f"{count} {dtype}" for dtype, count in written.tensors.items()]
    print(json.dumps(facts) if args.json else table({**facts, "tensors": counted}))
    return 0


def _target(args: argparse.Namespace) -> Path:
    path = Path(args.target)
    if path.is_dir():
        path /= _FILE
    if path.suffix != ".safetensors":
        raise UsageError(f"{args.target} must end in .safetensors, or be a directory that is there")
    if not path.parent.is_dir():
        raise UsageError(f"there is no directory {str(path.parent)!r}")
    if path.is_dir():
        raise UsageError(f"{path} is a directory itself; give another name")
    if path.exists() and not args.force:
        raise UsageError(f"{path} exists; give --force to replace it, or another name")
    return path


def _source(args: argparse.Namespace) -> str:
    """What the file says of its origin."""
    name = Path(args.source).resolve().name if Path(args.source).exists() else args.source
    return f"{name}@{args.revision}" if args.revision else name


def _bar() -> Any:
    from deltic.cli.terminal import Bar

    return Bar("extracting", 1 << 20, "MiB", 0.5)
