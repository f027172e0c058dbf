"""From CUDA C++ to machine code, with the compiler that torch's own packages bring along: no toolkit is needed."""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import tempfile
from ctypes import byref, c_char_p, c_size_t, c_void_p
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "kernels"


class CompileError(Exception):
    """What is to be compiled is wrong, or nothing is there to compile it."""


def headers(*names: str) -> str:
    """The text of these kernel files, what all share before them."""
    return "".join((FOLDER / f"{name}.cuh").read_text(encoding="utf-8") for name in ("common", *names))


def compile_source(source: str, architecture: str) -> bytes:
    """Machine code for `architecture` (sm_90, ...). What was compiled once is kept in the user's cache directory."""
    library = _library()
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(byref(major), byref(minor))
    name = hashlib.sha256(f"{major.value}.{minor.value} {architecture} {source}".encode()).hexdigest()[:32]
    kept = _folder() / f"{name}.cubin"
    try:
        return kept.read_bytes()
    except OSError:
        pass
    code = _compile(library, source, architecture)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as fresh:
            fresh.write(code)
        os.replace(fresh.name, kept)
    except OSError:
        pass  # it is compiled again next time
    return code


def _compile(library: ctypes.CDLL, source: str, architecture: str) -> bytes:
    program, size = c_void_p(), c_size_t()
    _check(library.nvrtcCreateProgram(byref(program), source.encode(), b"deltic.cu", 0, None, None))
    try:
        options = [f"--gpu-architecture={architecture}".encode(), b"-std=c++17", b"-default-device"]
        failed = library.nvrtcCompileProgram(program, len(options), (c_char_p * len(options))(*options))
        if failed:
            library.nvrtcGetProgramLogSize(program, byref(size))
            text = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, text)
            raise CompileError(text.value.decode(errors="replace"))
        _check(library.nvrtcGetCUBINSize(program, byref(size)))
        code = ctypes.create_string_buffer(size.value)
        _check(library.nvrtcGetCUBIN(program, code))
        return code.raw
    finally:
        library.nvrtcDestroyProgram(byref(program))


def _check(result: int) -> None:
    if result:
        raise CompileError(f"NVRTC error {result}")


@cache
def _library() -> ctypes.CDLL:
    """NVRTC of the package that torch depends on, or of a toolkit."""
    found = sorted(path for entry in sys.path for path in Path(entry or ".").glob("nvidia/*/lib/libnvrtc.so.*"))
    for name in (*map(str, reversed(found)), "libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CompileError("NVRTC is not installed: a CUDA build of torch brings it along")


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "deltic" / "cuda"
