"""Compiles with NVRTC, which torch's packages contain, in child processes: a process compiles one program at a time.

A child runs this file alone, without torch: `nvrtc.py LIBRARY ARCHITECTURE`, with the source on standard input.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_char_p, c_size_t, c_void_p
from functools import cache
from pathlib import Path


class CompileError(Exception):
    """The source has an error, or there is no compiler."""


@cache
def library() -> ctypes.CDLL:
    """Returns the NVRTC library of the package that torch depends on, or of a CUDA toolkit."""
    found = sorted(path for entry in sys.path for path in Path(entry or ".").glob("nvidia/*/lib/libnvrtc.so.*"))
    for name in (*map(str, reversed(found)), "libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"):
        try:
            return _opened(name)
        except OSError:
            continue
    raise CompileError("NVRTC is not installed: a CUDA build of torch brings it along")


def _opened(name: str) -> ctypes.CDLL:
    for builtins in Path(name).parent.glob("libnvrtc-builtins.so.*") if "/" in name else ():
        ctypes.CDLL(str(builtins))  # NVRTC 13.0 opens this library by name, without a search in its own directory
    return ctypes.CDLL(name)


def version() -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    library().nvrtcVersion(byref(major), byref(minor))
    return f"{major.value}.{minor.value}"


def compile_all(sources: Sequence[str], architecture: str) -> list[bytes]:
    """Returns the machine code or PTX of each source, as `compile_here`. Compiles as many sources at once as there are
    processors."""
    if len(sources) < 2:
        return [compile_here(library(), source, architecture) for source in sources]
    with ThreadPoolExecutor(min(len(sources), os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda source: _compile_apart(source, architecture), sources))


def _compile_apart(source: str, architecture: str) -> bytes:
    """Runs `compile_here` in another process."""
    # -P: files of this directory do not replace modules of Python's library
    command = [sys.executable, "-P", __file__, library()._name, architecture]
    try:
        ended = subprocess.run(command, input=source.encode(), capture_output=True, check=False)
    except OSError:  # no process can be started
        return compile_here(library(), source, architecture)
    if ended.returncode:
        raise CompileError(ended.stderr.decode(errors="replace"))
    return ended.stdout


def compile_here(nvrtc: ctypes.CDLL, source: str, architecture: str) -> bytes:
    """Returns machine code for an architecture such as sm_90, or PTX for one such as compute_90, which the driver then
    compiles."""
    program, size = c_void_p(), c_size_t()
    _check(nvrtc.nvrtcCreateProgram(byref(program), source.encode(), b"deltic.cu", 0, None, None))
    try:
        options = [f"--gpu-architecture={architecture}".encode(), b"-std=c++17", b"-default-device"]
        failed = nvrtc.nvrtcCompileProgram(program, len(options), (c_char_p * len(options))(*options))
        if failed:
            nvrtc.nvrtcGetProgramLogSize(program, byref(size))
            text = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, text)
            raise CompileError(text.value.decode(errors="replace"))
        kind = "CUBIN" if architecture.startswith("sm_") else "PTX"
        _check(nvrtc[f"nvrtcGet{kind}Size"](program, byref(size)))
        code = ctypes.create_string_buffer(size.value)
        _check(nvrtc[f"nvrtcGet{kind}"](program, code))
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))


def _check(result: int) -> None:
    if result:
        raise CompileError(f"NVRTC error {result}")


def main() -> None:
    name, architecture = sys.argv[1:]
    try:
        sys.stdout.buffer.write(compile_here(_opened(name), sys.stdin.buffer.read().decode(), architecture))
    except (CompileError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
