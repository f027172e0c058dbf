"""`deltic export`: a model as a program for phones and for programs without Python."""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltic.cli.parser import UsageError, path_name, text, whole
from deltic.cli.table import table
from deltic.export.program import require_extra, sidecar_files

if TYPE_CHECKING:
    from deltic.loader.hub import ModelFiles

HELP = "Export a model as a program for phones, and for programs without Python."
_FORMATS = ("pte",)
_TYPES = ("fp32", "bf16", "8da4w")
_OPERATORS = ("executorch", "deltic")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="MODEL", type=text,
                        help="a directory, a GGUF file, a Hugging Face name such as Qwen/Qwen3.5-0.8B, or tiny")
    parser.add_argument("-o", "--output", metavar="FILE.pte", type=path_name, required=True,
                        help="the program to write; its config and tokenizer go to the directory FILE.files beside it")
    parser.add_argument("--format", choices=_FORMATS, default="pte",
                        help="pte: an ExecuTorch program on XNNPACK (default)")
    parser.add_argument("--type", choices=_TYPES, default="fp32",
                        help="how products are computed. fp32: as they are (default); bf16: in bfloat16, on processors "
                             "that have it; 8da4w: int8 inputs, int4 weights in groups of 32, int8 embeddings")
    parser.add_argument("--operators", choices=_OPERATORS, default="executorch",
                        help="what computes recurrent layers and attention. executorch: operators of its own packages, "
                             "also those for phones (default); deltic: deltic's kernels, which read prompts faster, "
                             "and which an app has to bring along")
    parser.add_argument("--static", action="store_true",
                        help="take exactly one token a call, instead of up to 128: for backends without dynamic shapes")
    parser.add_argument("--max-context", metavar="TOKENS", type=whole(2), default=2048,
                        help="tokens that a sequence may have; their K/V is planned into the program (default: 2048, "
                             "or the model's own limit)")
    parser.add_argument("--force", action="store_true", help="replace FILE.pte and FILE.files if they exist")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a Hugging Face model")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    path = _target(args)
    require_extra("executorch")
    from deltic.export.executorch.export import CHUNK, ExportForm, export_files
    from deltic.loader.hub import open_model

    files, steps = open_model(args.source, args.revision), Steps()
    context = min(args.max_context, files.config.max_position_embeddings)
    form = ExportForm(args.type, context, 1 if args.static else min(CHUNK, context), args.operators)
    try:
        size = export_files(files, path, form, steps.begin)
    finally:
        steps.end()
    facts = {**_facts(args, path, size, form.max_context, steps.seconds), **_library(args)}
    print(json.dumps(facts, ensure_ascii=False) if args.json else table(facts))
    _say_what_is_left_out(files)
    return 0


class Steps:
    """Says on stderr which step has begun, and how long the one before took: some take minutes."""

    def __init__(self) -> None:
        self._began = self._step_began = time.perf_counter()
        self._name: str | None = None

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.perf_counter() - self._began

    def begin(self, name: str) -> None:
        self.end()
        self._name, self._step_began = name, time.perf_counter()
        with suppress(OSError):
            print(f"deltic: {name} ...", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._name is not None:
            with suppress(OSError):
                print(f" {time.perf_counter() - self._step_began:.1f} s", file=sys.stderr, flush=True)
        self._name = None


def _target(args: argparse.Namespace) -> Path:
    from deltic.export.executorch.runtime import sidecar_of

    path = Path(args.output)
    if path.suffix.lower() != ".pte":
        raise UsageError(f"{args.output} must end in .pte, so that it is known as a program")
    if not path.parent.is_dir():
        raise UsageError(f"there is no directory {str(path.parent)!r}")
    if path.is_dir():
        raise UsageError(f"{args.output} is a directory; name a file")
    beside = sidecar_of(path)
    if beside.is_file():
        raise UsageError(f"{beside} is a file, and the config and tokenizer go to a directory of that name; give "
                         "another name")
    for each in (path, *sidecar_files(beside)):
        if each.exists() and not args.force:
            raise UsageError(f"{each} exists; give --force to replace it, or another name")
    return path


def _library(args: argparse.Namespace) -> dict[str, Any]:
    """The operator library that such a program needs on this machine, if it can be had."""
    if args.operators != "deltic":
        return {}
    from deltic.errors import ModelError
    from deltic.export.executorch.library import library_path

    try:
        return {"library": str(library_path())}
    except ModelError as error:
        print(f"deltic: the program cannot be run here: {error}", file=sys.stderr)
        return {"library": None}


def _say_what_is_left_out(files: ModelFiles) -> None:
    left = ["the multi-token-prediction head"] if files.config.num_mtp_layers else []
    left += ["the vision tower"] if files.vision is not None else []
    if left:
        print(f"deltic: left out: {' and '.join(left)}, which programs do not have", file=sys.stderr)


def _facts(args: argparse.Namespace, path: Path, size: int, max_context: int, seconds: float) -> dict[str, Any]:
    from deltic.export.executorch.runtime import sidecar_of

    return {"path": str(path), "files": str(sidecar_of(path)), "format": args.format, "type": args.type,
            "operators": args.operators, "bytes": size, "tokens_per_call": "1" if args.static else "any",
            "max_context": max_context, "seconds": round(seconds, 2)}
