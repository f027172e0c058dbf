"""`deltic export` and `deltic compile`: a model as a program of ExecuTorch, and as a directory for TVM's runtime."""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltic.cli import options
from deltic.cli.files import check_absent, check_target
from deltic.cli.output import note, print_facts
from deltic.cli.parser import UsageError, path_name, text, whole
from deltic.config.aliases import FORMATS, GENERATIONS, canonical, find
from deltic.errors import ModelError
from deltic.export.program import LIBRARIES, OBJECTS, require_extra

if TYPE_CHECKING:
    from deltic.export.tvm.compiler import Compiled
    from deltic.loader.model_files import ModelFiles


def add_export(parser: argparse.ArgumentParser) -> None:
    parser.description = "Export a model as a program for phones, and for programs without Python."
    parser.add_argument("source", metavar="MODEL", type=text,
                        help="a directory, a GGUF file, a Hugging Face name such as Qwen/Qwen3.5-0.8B, or tiny")
    parser.add_argument("-o", "--output", metavar="FILE.pte", type=path_name, required=True,
                        help="the program to write; its config and tokenizer go to the directory FILE.files beside it")
    parser.add_argument("--format", choices=("pte",), default="pte",
                        help="pte: an ExecuTorch program on XNNPACK (default)")
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
    facts = {"path": str(path), "files": str(sidecar_of(path)), "format": args.format, "type": args.type,
             "operators": args.operators, "bytes": size, "tokens_per_call": "1" if args.static else "any",
             "max_context": form.max_context, "seconds": round(time.perf_counter() - started, 2), **_library(args)}
    print_facts(facts, args.json)
    _warn_about_omissions(files)
    return 0


def _program(args: argparse.Namespace) -> Path:
    from deltic.export.executorch.runtime import sidecar_of
    from deltic.export.program import sidecar_files

    path = check_target(args.output, ".pte", "a program")
    directory = sidecar_of(path)
    if directory.is_file():
        raise UsageError(f"{directory} is a file, and the config and tokenizer go to a directory of that name; give "
                         "another name")
    check_absent([path, *sidecar_files(directory)], args.force)
    return path


def _library(args: argparse.Namespace) -> dict[str, Any]:
    """The operator library for this machine, which a program with deltic's operators needs."""
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


# compile


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
    from deltic.loader.writing import check_room, replacing_files

    goal = parse_target(args.target)  # before anything is downloaded
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
    """The default directory: MODEL--TARGET--DEVICE, with two dashes for the slash of a hub name."""
    from deltic.export.tvm.compiler import KINDS

    base = os.environ.get("XDG_CACHE_HOME")
    name = model if model.count("/") == 1 and not os.path.exists(model) else Path(model).resolve().name
    device = KINDS.get(target.partition(" ")[0], "cpu")
    parts = [re.sub(r"[^\w.=-]+", "_", part.replace("/", "--")) for part in (name, target.strip(), device)]
    return (Path(base) if base else Path.home() / ".cache") / "deltic" / "compiled" / "--".join(parts)


def _folder(args: argparse.Namespace) -> Path:
    """The directory to write: absent, empty or, with --force, one with a compiled model."""
    folder = Path(args.output) if args.output is not None else cache_folder(args.source, args.target)
    if os.path.lexists(folder) and not folder.is_dir():
        raise UsageError(f"{folder} is not a directory; name one")
    compiled = _compiled(folder)
    if folder.is_dir() and os.listdir(folder) and not (args.force and compiled):
        remedy = "give --force to replace the compiled model in it" if compiled else "name another directory"
        raise UsageError(f"{folder} is not empty; {remedy}")
    return folder


def _compiled(folder: Path) -> list[Path]:
    """The files of a compiled model in a directory."""
    patterns = (*LIBRARIES, OBJECTS, "params_shard_*.bin", "*-cache.json")
    return [path for pattern in patterns for path in folder.glob(pattern)]


def _format(given: str) -> str:
    found = find(FORMATS, given)
    if found not in ("float32", "float16"):
        raise argparse.ArgumentTypeError(f"must be float32 or float16, not {given[:40]!r}")
    return found


def _generation(given: str) -> str:
    try:
        return canonical(GENERATIONS, given, "generation")
    except ModelError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
