"""`deltic convert` and `deltic mtp`: a model as a GGUF file, and its draft head as a file of its own."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltic.cli import options
from deltic.cli.files import check_absent, check_target
from deltic.cli.output import Bar, bytes_bar, print_facts
from deltic.cli.parser import UsageError, path_name, text

if TYPE_CHECKING:
    from deltic.embeddings.directory import StoredEncoder
    from deltic.loader.gguf.convert import Written
    from deltic.loader.gguf.tokenizer import TokenizerTexts
    from deltic.loader.model_files import ModelFiles

_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_1", "Q5_0", "Q4_K_M", "Q4_1", "Q4_0")
_MTP = ("q8_0", "same", "none")
_MMPROJ = ("F32", "F16", "BF16", "Q8_0", "NONE")
_HEAD_FILE = "mtp.safetensors"


def add_convert(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write a model as a GGUF file, which llama.cpp can read, too."
    parser.add_argument("source", metavar="SRC", type=text,
                        help="a directory, a GGUF file, a Hugging Face name such as Qwen/Qwen3.5-0.8B or "
                             "BAAI/bge-m3, or tiny")
    parser.add_argument("target", metavar="DST.gguf", type=path_name, help="the file to write")
    parser.add_argument("--type", choices=_TYPES, type=str.upper, default="Q8_0",
                        help="type of the weights; norms and other small tensors stay F32, and the head of a "
                             "four- or five-bit file has six bits (default: Q8_0, about half of a BF16 checkpoint)")
    parser.add_argument("--mtp", choices=_MTP, default="q8_0",
                        help="type of the multi-token-prediction head, if SRC has one. q8_0: eight bits or more, as "
                             "drafts suffer from fewer (default); same: as most weights; none: leave it out")
    parser.add_argument("--mmproj", choices=_MMPROJ, type=str.upper,
                        help="type of the vision tower, if SRC has one; it is written to mmproj-DST. NONE: leave it "
                             "out (default: --type if possible, else Q8_0)")
    parser.add_argument("--name", metavar="NAME", type=text, help="the model's name in the file (default: SRC's)")
    options.add_force(parser)
    options.add_revision(parser)
    options.add_json(parser)


def run_convert(args: argparse.Namespace) -> int:
    path = _target(args)
    from deltic.embeddings.open import open_stored
    from deltic.loader.hub import resolve
    from deltic.loader.model_files import open_model

    started = time.perf_counter()
    tower = dict[str, Any]()
    with bytes_bar("converting") as bar:
        place = resolve(args.source, args.revision)
        if encoder := open_stored(place):
            written = _convert_encoder(args, encoder, place, path, bar)
        else:
            written, tower = _convert_model(args, open_model(args.source, args.revision), path, bar)
    facts = {"path": str(path), "type": args.type, "bytes": written.nbytes, "weights": written.weights,
             "bits_per_weight": round(written.bits_per_weight, 2), "tensors": dict(written.tensors),
             "seconds": round(time.perf_counter() - started, 2), **tower}
    print_facts(facts, args.json, tensors=_counted(written.tensors))
    return 0


def _convert_encoder(args: argparse.Namespace, encoder: StoredEncoder, place: Path, path: Path, bar: Bar) -> Written:
    from deltic.embeddings.convert import convert_encoder
    from deltic.loader.model_files import only_gguf

    source = place if place.is_file() else only_gguf(place) or place
    _refuse_source(path, [source])
    name = args.name or Path(args.source).resolve().name
    return convert_encoder(encoder, name, path, args.type, bar.update)


def _convert_model(args: argparse.Namespace, files: ModelFiles, path: Path, bar: Bar
                   ) -> tuple[Written, dict[str, Any]]:
    """Writes the vision tower first: a model never exists without it, and a tower is removed if the model fails."""
    from deltic.embeddings.convert import vector_keys
    from deltic.loader.gguf.config import model_name
    from deltic.loader.gguf.convert import convert
    from deltic.loader.gguf.metadata import ARCHITECTURES

    _refuse_source(path, files.weight_files(True))
    tokenizer = files.tokenizer() or _read_tokenizer(files.path)
    name = args.name or (model_name(files.gguf) if files.gguf else Path(args.source).resolve().name)
    existed = _mmproj(path).exists()
    tower = _write_tower(args, files, name, path)
    try:
        written = convert(files, tokenizer, name, path, args.type, bar.update, args.mtp,
                          vector_keys(files.path, ARCHITECTURES[files.config.architecture]))
    except BaseException:
        if tower and not existed:
            _mmproj(path).unlink(missing_ok=True)
        raise
    return written, tower


def _write_tower(args: argparse.Namespace, files: ModelFiles, name: str, path: Path) -> dict[str, Any]:
    """Writes the vision tower, if there is one, and returns facts about it."""
    from deltic.loader.gguf.mmproj import TYPES, write_mmproj

    kind = args.mmproj or (args.type if args.type in TYPES else "Q8_0")
    if files.vision is None or kind == "NONE":
        return {}
    target = _mmproj(path)
    size = write_mmproj(target, files.vision, name, kind, files.read_tower)
    return {"mmproj": str(target), "mmproj_type": kind, "mmproj_bytes": size}


def _mmproj(path: Path) -> Path:
    return path.with_name(f"mmproj-{path.name}")


def _target(args: argparse.Namespace) -> Path:
    path = check_target(args.target, ".gguf", "a model")
    check_absent([path] if args.mmproj == "NONE" else [path, _mmproj(path)], args.force)
    return path


def _refuse_source(path: Path, sources: Iterable[Path]) -> None:
    """Raises UsageError if a target is a file that is read: its precision would be lost."""
    sources = list(sources)
    for target in (path, _mmproj(path)):
        if target.exists() and any(source.samefile(target) for source in sources):
            raise UsageError(f"{target} is a file of SRC and would be overwritten: give another name")


def _read_tokenizer(directory: Path) -> TokenizerTexts:
    from deltic.chat.tokenizer import read_tokenizer_files
    from deltic.loader.gguf.tokenizer import TokenizerTexts

    files = read_tokenizer_files(directory)
    return TokenizerTexts(files.tokenizer, files.special_tokens, files.templates)


def _counted(tensors: Any) -> list[str]:
    return [f"{count} {name}" for name, count in tensors.items()]


# mtp


def add_mtp(parser: argparse.ArgumentParser) -> None:
    parser.description = ("Extract the multi-token-prediction head of a model. It is found beside a copy of the model "
                          "that lacks it, such as a fine-tuned one or a GGUF file.")
    parser.add_argument("action", metavar="ACTION", choices=("extract",), type=text,
                        help="extract: write the head of SRC to DST, bit for bit; from the Hugging Face hub, only the "
                             "head is downloaded")
    parser.add_argument("source", metavar="SRC", type=text,
                        help="a directory, or a Hugging Face name such as Qwen/Qwen3.5-0.8B")
    parser.add_argument("target", metavar="DST", type=path_name,
                        help=f"the file to write, ending in .safetensors, or a directory, which gets {_HEAD_FILE}")
    options.add_force(parser)
    options.add_revision(parser)
    options.add_json(parser)


def run_mtp(args: argparse.Namespace) -> int:
    target = Path(args.target)
    path = check_target(str(target / _HEAD_FILE if target.is_dir() else target), ".safetensors", "a draft head")
    check_absent([path], args.force)
    from deltic.loader.hub import open_checkpoint
    from deltic.loader.mtp_head import extract_head

    source = Path(args.source).resolve().name if Path(args.source).exists() else args.source
    if args.revision:
        source = f"{source}@{args.revision}"
    with bytes_bar("extracting") as bar:
        written = extract_head(open_checkpoint(args.source, args.revision), path, source, bar.update)
    facts = {"path": str(path), "bytes": written.nbytes, "weights": written.weights, "tensors": dict(written.tensors)}
    print_facts(facts, args.json, tensors=_counted(written.tensors))
    return 0
