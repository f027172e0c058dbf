"""`deltic convert`: a model as one GGUF file, smaller where a smaller type is asked for."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltic.cli.parser import UsageError, path_name, text
from deltic.cli.table import table

if TYPE_CHECKING:
    from deltic.loader.gguf.convert import Written
    from deltic.loader.gguf.tokenizer import TokenizerTexts
    from deltic.loader.model_files import ModelFiles

HELP = "Write a model as a GGUF file, which llama.cpp reads too."
_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_1", "Q5_0", "Q4_K_M", "Q4_1", "Q4_0")

_MTP = ("q8_0", "same", "none")
_MMPROJ = ("F32", "F16", "BF16", "Q8_0", "NONE")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", type=text,
                        help="a directory, a GGUF file, a Hugging Face name such as Qwen/Qwen3.5-0.8B or "
                             "BAAI/bge-m3, or tiny")
    parser.add_argument("target", metavar="DST.gguf", type=path_name, help="the file to write")
    parser.add_argument("--type", choices=_TYPES, type=str.upper, default="Q8_0",
                        help="how weights are stored; norms and other small tensors stay F32, and the head of a "
                             "four- or five-bit file has six bits (default: Q8_0, about half of a BF16 checkpoint)")
    parser.add_argument("--mtp", choices=_MTP, default="q8_0",
                        help="the multi-token-prediction head, if SRC has one. q8_0: with eight bits or more, because "
                             "its drafts suffer from fewer (default); same: as most weights; none: leave it out")
    parser.add_argument("--mmproj", choices=_MMPROJ, type=str.upper,
                        help="how the vision tower is stored, if SRC has one: in a file beside DST, whose name begins "
                             "with mmproj. NONE: leave it out (default: --type, if it is among these, else Q8_0)")
    parser.add_argument("--name", metavar="NAME", type=text, help="the model's name in the file (default: SRC's)")
    parser.add_argument("--force", action="store_true", help="replace DST.gguf if it exists")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a Hugging Face model")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    path = _target(args)
    from deltic.embeddings.convert import convert_encoder, vector_keys
    from deltic.embeddings.open import open_stored
    from deltic.loader.gguf.convert import convert
    from deltic.loader.gguf.metadata import ARCHITECTURES
    from deltic.loader.hub import resolve
    from deltic.loader.model_files import only_gguf, open_model

    started, bar = time.perf_counter(), _bar()
    tower = dict[str, Any]()
    try:
        if encoder := open_stored(place := resolve(args.source, args.revision)):
            _keep_source(path, [only_gguf(place) or place if place.is_dir() else place])
            written = convert_encoder(encoder, args.name or Path(args.source).resolve().name, path, args.type,
                                      bar.update)
        else:
            files = open_model(args.source, args.revision)
            _keep_source(path, files.weight_files(True))
            tokenizer, name = files.tokenizer() or _tokenizer_of(files.path), args.name or _name(args.source, files)
            was_there = _beside(path).exists()
            tower = _write_tower(args, files, name, path)
            try:
                written = convert(files, tokenizer, name, path, args.type, bar.update, args.mtp,
                                  vector_keys(files.path, ARCHITECTURES[files.config.architecture]))
            except BaseException:  # a tower without its model is of no use
                if tower and not was_there:
                    _beside(path).unlink(missing_ok=True)
                raise
    finally:
        bar.close()
    facts = {**_facts(path, args.type, written, time.perf_counter() - started), **tower}
    print(json.dumps(facts, ensure_ascii=False) if args.json else table({**facts, "tensors": _counted(written)}))
    return 0


def _write_tower(args: argparse.Namespace, files: ModelFiles, name: str, path: Path) -> dict[str, Any]:
    """Write the vision tower beside the model, if there is one and it is wanted; what is to be said of it.

    It comes first: a model is never there without its tower, and there is room for it beside that.
    """
    from deltic.loader.gguf.mmproj import TYPES, write_mmproj

    kind = args.mmproj or (args.type if args.type in TYPES else "Q8_0")
    if files.vision is None or kind == "NONE":
        return {}
    beside = _beside(path)
    return {"mmproj": str(beside), "mmproj_type": kind,
            "mmproj_bytes": write_mmproj(beside, files.vision, name, kind, files.read_tower)}


def _beside(path: Path) -> Path:
    return path.with_name(f"mmproj-{path.name}")


def _target(args: argparse.Namespace) -> Path:
    path = Path(args.target)
    if path.suffix.lower() != ".gguf":
        raise UsageError(f"{args.target} must end in .gguf, so that it is known as a model")
    if not path.parent.is_dir():
        raise UsageError(f"there is no directory {str(path.parent)!r}")
    if path.is_dir():
        raise UsageError(f"{args.target} is a directory; name a file")
    for each in (path, _beside(path)):
        if each.exists() and not args.force and not (each != path and args.mmproj == "NONE"):
            raise UsageError(f"{each} exists; give --force to replace it, or another name")
    return path


def _keep_source(path: Path, sources: Iterable[Path]) -> None:
    """Refuse to write over what is read: the weights would be gone with their precision."""
    for target in (path, _beside(path)):
        if target.exists() and any(source.samefile(target) for source in sources):
            raise UsageError(f"{target} is a file of SRC, which would be gone: give another name")


def _tokenizer_of(directory: Path) -> TokenizerTexts:
    from deltic.chat.tokenizer_files import read_tokenizer_files
    from deltic.loader.gguf.tokenizer import TokenizerTexts

    files = read_tokenizer_files(directory)
    return TokenizerTexts(files.tokenizer, files.special_tokens, files.templates)


def _name(source: str, files: ModelFiles) -> str:
    """What the file says of itself, else the last part of a path or hub name."""
    from deltic.loader.gguf.config import model_name

    return model_name(files.gguf) if files.gguf is not None else Path(source).resolve().name


def _bar() -> Any:
    from deltic.cli.terminal import Bar

    return Bar("converting", 1 << 20, "MiB", 0.5)


def _counted(written: Written) -> list[str]:
    return [f"{count} {name}" for name, count in written.tensors.items()]


def _facts(path: Path, type: str, written: Written, seconds: float) -> dict[str, Any]:
    return {"path": str(path), "type": type, "bytes": written.nbytes, "weights": written.weights,
            "bits_per_weight": round(written.bits_per_weight, 2), "tensors": dict(written.tensors),
            "seconds": round(seconds, 2)}
