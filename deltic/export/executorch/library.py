"""deltic's library for ExecuTorch's runtime, with its operators and with what calls programs. It is compiled on this
machine when it is first wanted, because it depends on the headers of the executorch that is installed here."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from deltic.errors import ModelError
from deltic.export.extras import need

SOURCES: Final = tuple(Path(__file__).with_name(f"{name}.cpp") for name in ("operators", "program"))
KERNELS: Final = Path(__file__).parents[2] / "ops" / "cpu" / "libdeltic.so"
"""deltic's compiled kernels, with their header beside them."""
_FLAGS: Final = ("-std=c++20", "-O2", "-fPIC", "-shared", "-DNDEBUG", "-DC10_USING_CUSTOM_GENERATED_MACROS")


def load() -> ctypes.CDLL:
    """Have ExecuTorch's runtime know deltic's operators; returns the library. ModelError if it cannot be had."""
    path = built()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise ModelError(f"deltic's library for ExecuTorch, {path}, cannot be loaded: {error}") from error


def built() -> Path:
    """The library, which is compiled unless that was done before. ModelError saying what is missing."""
    need("executorch", "executorch")
    if not KERNELS.is_file():
        raise ModelError("deltic's operators for ExecuTorch need its compiled kernels, which are not installed: "
                         "install g++ and then deltic again, or export the model with --operators executorch")
    place = _folder() / f"{_digest()}.so"
    try:
        if not place.is_file():
            _compile(place)
    except OSError as error:
        raise ModelError(f"deltic's operators for ExecuTorch cannot be compiled to {place.parent}: {error}") from error
    return place


def _compile(place: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise ModelError("deltic's operators for ExecuTorch have to be compiled once, and there is no C++ compiler: "
                         "install g++, or export the model with --operators executorch")
    place.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=place.parent) as temporary:
        fresh = Path(temporary) / place.name
        done = subprocess.run([compiler, *_arguments(), "-o", fresh], capture_output=True, text=True, check=False)
        if done.returncode:
            raise ModelError(f"deltic's operators for ExecuTorch cannot be compiled: {compiler} failed: "
                             f"{done.stderr.strip()[-400:] or f'exit status {done.returncode}'}")
        fresh.replace(place)


def _arguments() -> list[str]:
    """Of the compiler."""
    package = _package()
    headers, folders = package / "include", (KERNELS.parent, package / "lib")
    return [*_FLAGS, "-isystem", f"{headers}", "-isystem", f"{headers}/executorch/runtime/core/portable_type/c10",
            f"-I{KERNELS.parent}", *map(str, SOURCES), *(f"-L{folder}" for folder in folders),
            *(f"-Wl,-rpath,{folder}" for folder in folders), f"-l:{KERNELS.name}", "-lexecutorch"]


def _package() -> Path:
    spec = find_spec("executorch")
    assert spec is not None and spec.submodule_search_locations, "it was looked for before"
    return Path(next(iter(spec.submodule_search_locations)))


def _digest() -> str:
    """Of all that the library is made of, and of where its libraries lie."""
    files = (*SOURCES, KERNELS.with_name("deltic.h"))
    parts = (*(file.read_bytes() for file in files), version("executorch").encode(), "\0".join(_arguments()).encode())
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "deltic" / "executorch"
