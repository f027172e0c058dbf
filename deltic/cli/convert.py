"""Converts models: `deltic convert` (GGUF), `mtp` (draft head), `export` (ExecuTorch), `compile` (TVM)."""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltic.cli import options
from deltic.cli.output import Bar, bytes_bar, note, print_facts
from deltic.cli.parser import UsageError, check_absent, check_target, path_name, text, whole
from deltic.config.reading import FORMATS, GENERATIONS, canonical, find
from deltic.errors import ModelError
from deltic.export.program import LIBRARIES, OBJECTS, require_extra

if TYPE_CHECKING:
    from deltic.embeddings.directory import StoredEncoder
    from deltic.export.tvm.compiler import Compiled
    from deltic.loader.gguf.convert import Written
    from deltic.loader.gguf.tokenizer import TokenizerTexts
    from deltic.loader.lora_merge import LoraMerge
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
    parser.add_argument("--imatrix", metavar="FILE", type=path_name,
                        help="importance matrix of llama-imatrix, which weights the errors of quantization by the "
                             "activations; no effect on Q8_0 and unquantized types")
    parser.add_argument("--lora", metavar="PATH", type=path_name,
                        help="directory of an adapter (LoRA, rsLoRA or DoRA in the format of peft) to merge into the "
                             "weights")
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
            options.refuse({"--lora": args.lora, "--imatrix": args.imatrix},
                           "{} is for language models: leave it out with an encoder")
            written = _convert_encoder(args, encoder, place, path, bar)
        else:
            written, tower = _convert_model(args, open_model(args.source, args.revision), path, bar)
    facts = {"path": str(path), "type": args.type, "bytes": written.nbytes, "weights": written.weights,
             "bits_per_weight": round(written.bits_per_weight, 2), "tensors": dict(written.tensors),
             "seconds": round(time.perf_counter() - started, 2), **tower}
    print_facts(facts, args.json, tensors=_counted(written.tensors))
    return 0


def _convert_encoder(args: argparse.Namespace, encoder: StoredEncoder, place: Path, path: Path, bar: Bar) -> Written:
    from deltic.embeddings.gguf import convert_encoder
    from deltic.loader.model_files import only_gguf

    source = place if place.is_file() else only_gguf(place) or place
    _refuse_source(path, [source])
    name = args.name or Path(args.source).resolve().name
    return convert_encoder(encoder, name, path, args.type, bar.update)


def _convert_model(args: argparse.Namespace, files: ModelFiles, path: Path, bar: Bar
                   ) -> tuple[Written, dict[str, Any]]:
    """Writes the vision tower first, so that no model exists without it. Removes the tower if the model fails."""
    from deltic.config.families import FAMILIES
    from deltic.embeddings.gguf import vector_keys
    from deltic.loader.gguf.config import model_name
    from deltic.loader.gguf.convert import convert
    from deltic.loader.gguf.imatrix import read_imatrix

    _refuse_source(path, files.weight_files(True))
    tokenizer = files.tokenizer() or _read_tokenizer(files.path)
    name = args.name or (model_name(files.gguf) if files.gguf else Path(args.source).resolve().name)
    existed = _mmproj(path).exists()
    imatrix = read_imatrix(Path(args.imatrix)) if args.imatrix else None
    files = replace(files, lora=_lora(args.lora, files), imatrix=imatrix)
    tower = _write_tower(args, files, name, path)
    try:
        written = convert(files, tokenizer, name, path, args.type, bar.update, args.mtp,
                          vector_keys(files.path, FAMILIES[files.config.architecture].gguf))
    except BaseException:
        if tower and not existed:
            _mmproj(path).unlink(missing_ok=True)
        raise
    return written, tower


def _lora(path: str | None, files: ModelFiles) -> LoraMerge | None:
    """Returns an adapter that is merged into a model while it is converted."""
    if path is None:
        return None
    from deltic.loader.lora import open_lora
    from deltic.loader.lora_merge import LoraMerge

    return LoraMerge(open_lora(path, files.config))


def _write_tower(args: argparse.Namespace, files: ModelFiles, name: str, path: Path) -> dict[str, Any]:
    """Writes the vision tower if there is one. Returns facts about it."""
    from deltic.loader.vision import TYPES, write_mmproj

    kind = args.mmproj or (args.type if args.type in TYPES else "Q8_0")
    if files.vision is None or kind == "NONE":
        return {}
    target = _mmproj(path)
    size = write_mmproj(target, files.vision, name, kind, files.read_tower)
    return {"mmproj": str(target), "mmproj_type": kind, "mmproj_bytes": size}


def _mmproj(path: Path) -> Path:
    return path.with_name(f"mmproj-{path.name}")


def _target(args: argparse.Namespace) -> Path:
    path = check_target(args.target, ".gguf")
    check_absent([path] if args.mmproj == "NONE" else [path, _mmproj(path)], args.force)
    return path


def _refuse_source(path: Path, sources: Iterable[Path]) -> None:
    """Raises UsageError if a target is also a source file: the source's precision would be lost."""
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


# The draft head


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
    path = check_target(str(target / _HEAD_FILE if target.is_dir() else target), ".safetensors")
    check_absent([path], args.force)
    from deltic.loader.checkpoint import open_checkpoint
    from deltic.loader.mtp_head import extract_head

    source = Path(args.source).resolve().name if Path(args.source).exists() else args.source
    if args.revision:
        source = f"{source}@{args.revision}"
    with bytes_bar("extracting") as bar:
        written = extract_head(open_checkpoint(args.source, args.revision), path, source, bar.update)
    facts = {"path": str(path), "bytes": written.nbytes, "weights": written.weights, "tensors": dict(written.tensors)}
    print_facts(facts, args.json, tensors=_counted(written.tensors))
    return 0


# ExecuTorch


def add_export(parser: argparse.ArgumentParser) -> None:
    parser.description = ("Export a model as an ExecuTorch program on XNNPACK, for phones and for programs without "
                          "Python.")
    parser.add_argument("source", metavar="MODEL", type=text,
                        help="a directory, a GGUF file, a Hugging Face name such as Qwen/Qwen3.5-0.8B, or tiny")
    parser.add_argument("-o", "--output", metavar="FILE.pte", type=path_name, required=True,
                        help="the program to write; its config and tokenizer go to the directory FILE.files beside it")
    parser.add_argument("--type", choices=("fp32", "bf16", "8da4w"), default="fp32",
                        help="type of the products. fp32 (default); bf16, on processors that have it; 8da4w: int8 "
                             "inputs, int4 weights in groups of 32, int8 embeddings")
    parser.add_argument("--operators", choices=("executorch", "deltic"), default="executorch",
                        help="operators for recurrent layers and attention. executorch: those of its own packages, "
                             "also for phones (default); deltic: deltic's kernels, which are faster in prefill, and "
                             "which an app has to ship")
    parser.add_argument("--static", action="store_true",
                        help="take exactly one token a call instead of up to 128, for backends without dynamic shapes")
    parser.add_argument("--max-context", metavar="TOKENS", type=whole(2), default=2048,
                        help="tokens of a sequence, for which the program reserves K/V (default: 2048, or the model's "
                             "own limit)")
    options.add_force(parser)
    options.add_revision(parser)
    options.add_json(parser)


def run_export(args: argparse.Namespace) -> int:
    path = _program(args)
    require_extra("executorch")
    from deltic.export.executorch.export import CHUNK, ExportForm, export_files
    from deltic.export.executorch.runtime import sidecar_of
    from deltic.loader.model_files import open_model

    started = time.perf_counter()
    files = open_model(args.source, args.revision)
    context = min(args.max_context, files.config.max_position_embeddings)
    form = ExportForm(args.type, context, 1 if args.static else min(CHUNK, context), args.operators)
    size = export_files(files, path, form, lambda step: note(f"deltic: {step} ..."))
    facts = {"path": str(path), "files": str(sidecar_of(path)), "format": "pte", "type": args.type,
             "operators": args.operators, "bytes": size, "tokens_per_call": "1" if args.static else "any",
             "max_context": form.max_context, "seconds": round(time.perf_counter() - started, 2), **_library(args)}
    print_facts(facts, args.json)
    _warn_about_omissions(files)
    return 0


def _program(args: argparse.Namespace) -> Path:
    from deltic.export.executorch.runtime import sidecar_of
    from deltic.export.program import sidecar_files

    path = check_target(args.output, ".pte")
    directory = sidecar_of(path)
    if directory.is_file():
        raise UsageError(f"{directory} is a file, and the config and tokenizer go to a directory of that name; give "
                         "another name")
    check_absent([path, *sidecar_files(directory)], args.force)
    return path


def _library(args: argparse.Namespace) -> dict[str, Any]:
    """Returns facts about the operator library for this machine, which a program with deltic's operators needs."""
    if args.operators != "deltic":
        return {}
    from deltic.export.executorch.library import library_path

    try:
        return {"library": str(library_path())}
    except ModelError as error:
        note(f"deltic: the program cannot be run here: {error}")
        return {"library": None}


def _warn_about_omissions(files: ModelFiles) -> None:
    omitted = ["the multi-token-prediction head"] if files.config.num_mtp_layers else []
    if files.vision is not None:
        omitted.append("the vision tower")
    if omitted:
        note(f"deltic: left out: {' and '.join(omitted)}, which programs do not have")


# TVM


def add_compile(parser: argparse.ArgumentParser) -> None:
    parser.description = "Compile a model with TVM into a directory that `deltic run`, `chat` and `serve` take."
    parser.add_argument("source", metavar="MODEL", type=text,
                        help="a directory, a GGUF file, a Hugging Face name such as Qwen/Qwen3.5-0.8B, or tiny: dense "
                             "Qwen3.5 or Qwen3, or an encoder of the BERT family such as BAAI/bge-m3")
    parser.add_argument("-o", "--output", metavar="DIR", type=path_name,
                        help="the directory to make (default: ~/.cache/deltic/compiled/MODEL--TARGET--DEVICE)")
    parser.add_argument("--target", default="llvm", metavar="TARGET", type=text,
                        help='the processor or GPU: llvm, this processor (default); "llvm -mcpu=x86-64-v3"; '
                             '"llvm -mtriple=aarch64-linux-android"; "cuda -arch=sm_90", metal, opencl, rocm, vulkan, '
                             'where TVM supports it')
    parser.add_argument("--dtype", default="float32", type=_format, metavar="DTYPE",
                        help="dtype of matrices: float32 (default) or float16; all else is float32")
    parser.add_argument("--generation", type=_generation, metavar="GEN",
                        help="v1 (ndarray-cache.json; attention alone) or v2 (tensor-cache.json; recurrent layers "
                             "too). Default: v2")
    parser.add_argument("--max-context", type=whole(1), metavar="N",
                        help="maximum tokens of prompt and answer (default: the model's own)")
    parser.add_argument("--prefill-chunk", type=whole(1, 1 << 16), default=512, metavar="N",
                        help="maximum tokens of a prompt in one step (default: 512)")
    parser.add_argument("--force", action="store_true", help="replace the compiled model in DIR")
    options.add_revision(parser)
    options.add_json(parser)


def run_compile(args: argparse.Namespace) -> int:
    require_extra("tvm")
    folder = _folder(args)
    from deltic.embeddings.compiled import encoder_files
    from deltic.export.program import sidecar_files
    from deltic.export.tvm.compiler import parse_target
    from deltic.loader.disk import check_room, replacing_files

    goal = parse_target(args.target)  # checked before anything is downloaded
    started = time.perf_counter()
    size, write = _compiler(args)
    check_room(folder, size, "make room, or choose another place")
    with replacing_files(folder, lambda place: [*_compiled(place), *sidecar_files(place), *encoder_files(place)]
                         ) as made:
        written = write(made)
    facts = {"path": str(folder), "library": goal.library, "device": goal.device, "library_bytes": written.library,
             "parameter_bytes": written.parameters, "seconds": round(time.perf_counter() - started, 2)}
    print_facts(facts, args.json)
    return 0


def _compiler(args: argparse.Namespace) -> tuple[int, Callable[[Path], Compiled]]:
    """Returns the minimum size of the parameters, and a function that compiles the model into a directory."""
    from deltic.embeddings.compiled import compile_encoder, encoder_bytes
    from deltic.embeddings.open import open_stored
    from deltic.export.tvm.compiler import compile_model, parameter_bytes
    from deltic.loader.hub import resolve
    from deltic.loader.model_files import open_model

    common = {"dtype": args.dtype, "target": args.target}
    encoder = open_stored(resolve(args.source, args.revision))
    if encoder is not None:
        if args.generation or args.max_context:
            raise UsageError("--generation and --max-context are for language models: leave them out")
        return encoder_bytes(encoder, args.dtype), partial(compile_encoder, encoder, **common)
    files = open_model(args.source, args.revision)
    compile_to = partial(compile_model, files, generation=args.generation, max_context=args.max_context,
                         chunk=args.prefill_chunk, **common)
    return parameter_bytes(files.config, args.dtype), compile_to


def cache_folder(model: str, target: str) -> Path:
    """Returns the default directory: MODEL--TARGET--DEVICE, with two dashes in place of the slash of a hub name."""
    from deltic.export.tvm.compiler import KINDS

    base = os.environ.get("XDG_CACHE_HOME")
    name = model if model.count("/") == 1 and not os.path.exists(model) else Path(model).resolve().name
    device = KINDS.get(target.partition(" ")[0], "cpu")
    parts = [re.sub(r"[^\w.=-]+", "_", part.replace("/", "--")) for part in (name, target.strip(), device)]
    return (Path(base) if base else Path.home() / ".cache") / "deltic" / "compiled" / "--".join(parts)


def _folder(args: argparse.Namespace) -> Path:
    """Returns the directory to write. It must be absent, empty or, with --force, contain a compiled model."""
    folder = Path(args.output) if args.output is not None else cache_folder(args.source, args.target)
    if os.path.lexists(folder) and not folder.is_dir():
        raise UsageError(f"{folder} is not a directory; name one")
    compiled = _compiled(folder)
    if folder.is_dir() and os.listdir(folder) and not (args.force and compiled):
        remedy = "give --force to replace the compiled model in it" if compiled else "name another directory"
        raise UsageError(f"{folder} is not empty; {remedy}")
    return folder


def _compiled(folder: Path) -> list[Path]:
    """Returns the files of a compiled model in a directory."""
    patterns = (*LIBRARIES, OBJECTS, "params_shard_*.bin", "*-cache.json")
    return [path for pattern in patterns for path in folder.glob(pattern)]


def _format(given: str) -> str:
    found = find(FORMATS, given)
    if found not in ("float32", "float16"):
        raise UsageError(f"must be float32 or float16, not {given[:40]!r}")
    return found


def _generation(given: str) -> str:
    try:
        return canonical(GENERATIONS, given, "generation")
    except ModelError as error:
        raise UsageError(str(error)) from error
