"""`deltic compile`: a model as a directory that TVM's runtime runs."""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deltic.cli.parser import UsageError, path_name, text, whole
from deltic.cli.table import table
from deltic.config.aliases import FORMATS, GENERATIONS, canonical, find
from deltic.errors import ModelError
from deltic.export.program import LIBRARIES, OBJECTS, require_extra, sidecar_files

if TYPE_CHECKING:
    from deltic.export.tvm.compiler import Compiled

HELP = "Compile a model with TVM into a directory that `deltic run`, `chat` and `serve` take."


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="MODEL", type=text,
                        help="a directory, a GGUF file, a Hugging Face name such as Qwen/Qwen3.5-0.8B, or tiny: dense "
                             "Qwen3.5 or Qwen3, or an encoder of the BERT family such as BAAI/bge-m3")
    parser.add_argument("-o", "--output", metavar="DIR", type=path_name,
                        help="the directory to make (default: ~/.cache/deltic/compiled/MODEL--TARGET--DEVICE)")
    parser.add_argument("--target", default="llvm", metavar="TARGET", type=text,
                        help='for which processor or GPU: llvm, this processor (default); "llvm -mcpu=x86-64-v3"; '
                             '"llvm -mtriple=aarch64-linux-android"; "cuda -arch=sm_90", metal, opencl, rocm, vulkan, '
                             'where TVM can')
    parser.add_argument("--dtype", default="float32", type=_format, metavar="DTYPE",
                        help="how matrices are stored: float32 (default) or float16; all else is float32")
    parser.add_argument("--generation", type=_generation, metavar="GEN",
                        help="v1 (ndarray-cache.json; attention alone) or v2 (tensor-cache.json; recurrent layers "
                             "too). Default: v2")
    parser.add_argument("--max-context", type=whole(1), metavar="N",
                        help="most tokens of prompt and answer (default: the model's own)")
    parser.add_argument("--prefill-chunk", type=whole(1, 1 << 16), default=512, metavar="N",
                        help="most tokens of a prompt that are read at once (default: 512)")
    parser.add_argument("--force", action="store_true", help="replace what DIR holds of a compiled model")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a Hugging Face model")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    require_extra("tvm")
    folder = _folder(args)
    from deltic.embeddings.compiled import encoder_files
    from deltic.export.tvm.targets import parse_target
    from deltic.loader.writing import check_room, replacing_files

    target = parse_target(args.target)  # before anything is downloaded
    started = time.perf_counter()
    size, write = _opened(args)
    check_room(folder, size, "make room, or choose another place")
    with replacing_files(folder, lambda place: [*_compiled(place), *sidecar_files(place), *encoder_files(place)]
                         ) as made:
        written = write(made)
    facts = {"path": str(folder), "library": target.library, "device": target.device, "library_bytes": written.library,
             "parameter_bytes": written.parameters, "seconds": round(time.perf_counter() - started, 2)}
    print(json.dumps(facts, ensure_ascii=False) if args.json else table(facts))
    return 0


def _opened(args: argparse.Namespace) -> tuple[int, Callable[[Path], Compiled]]:
    """Bytes of the parameters, at least, and what compiles the model into a directory."""
    from deltic.embeddings.compiled import compile_encoder, encoder_bytes
    from deltic.embeddings.open import open_stored
    from deltic.export.tvm.compiler import compile_model, parameter_bytes
    from deltic.loader.hub import open_model, resolve

    common = {"dtype": args.dtype, "target": args.target}
    stored = open_stored(resolve(args.source, args.revision))
    if stored is not None:
        if args.generation or args.max_context:
            raise UsageError("--generation and --max-context are for language models: leave them out")
        return encoder_bytes(stored, args.dtype), partial(compile_encoder, stored, **common)
    files = open_model(args.source, args.revision)
    return parameter_bytes(files.config, args.dtype), partial(
        compile_model, files, generation=args.generation, max_context=args.max_context, chunk=args.prefill_chunk,
        **common)


def cache_folder(model: str, target: str) -> Path:
    """Where what is compiled goes if nobody says where: MODEL--TARGET--DEVICE, a hub name's slash written as two
    dashes."""
    from deltic.export.tvm.targets import KINDS

    base = os.environ.get("XDG_CACHE_HOME")
    name = model if model.count("/") == 1 and not os.path.exists(model) else Path(model).resolve().name
    device = KINDS.get(target.partition(" ")[0], "cpu")
    kept = (re.sub(r"[^\w.=-]+", "_", part.replace("/", "--")) for part in (name, target.strip(), device))
    return (Path(base) if base else Path.home() / ".cache") / "deltic" / "compiled" / "--".join(kept)


def _folder(args: argparse.Namespace) -> Path:
    """The directory to write to: absent, empty or, with --force, that of a compiled model."""
    folder = Path(args.output) if args.output is not None else cache_folder(args.source, args.target)
    if os.path.lexists(folder) and not folder.is_dir():
        raise UsageError(f"{folder} is no directory; name one")
    old = _compiled(folder)
    if folder.is_dir() and os.listdir(folder) and not (args.force and old):
        raise UsageError(f"{folder} is not empty; " + (
            "give --force to replace the compiled model in it" if old else "name another directory"))
    return folder


def _compiled(folder: Path) -> list[Path]:
    """What a directory holds of a compiled model."""
    return [path for name in (*LIBRARIES, OBJECTS, "params_shard_*.bin", "*-cache.json") for path in folder.glob(name)]


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
