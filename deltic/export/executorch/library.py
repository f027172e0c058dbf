"""Calls ExecuTorch programs from Python, through deltic's library or through ExecuTorch's own binding.

The library also registers deltic's operators. It is compiled on first use, because it depends on the headers of the
installed executorch. Other Python threads run while it computes; with ExecuTorch's binding they wait.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import weakref
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_float, c_int64, c_void_p
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, Protocol

from deltic.errors import ModelError
from deltic.export.program import require_extra

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SOURCES: Final = tuple(Path(__file__).with_name(f"{name}.cpp") for name in ("operators", "program"))
KERNELS: Final = Path(__file__).parents[2] / "ops" / "cpu" / "libdeltic.so"
"""deltic's compiled kernels; their header is in the same directory."""
_FLAGS: Final = ("-std=c++20", "-O2", "-fPIC", "-shared", "-DNDEBUG", "-DC10_USING_CUSTOM_GENERATED_MACROS")


class ProgramCalls(Protocol):
    """A loaded program. Both methods raise RuntimeError with ExecuTorch's error."""

    def buffer(self, name: str) -> NDArray[np.float32]:
        """Returns a view of a buffer."""

    def run(self, tokens: Sequence[int], position: int) -> NDArray[np.float32]:
        """Appends tokens at a position. Returns the logits [V] of the last token."""


class BindingCalls:
    """Calls a method object of ExecuTorch's Python binding."""

    def __init__(self, method: Any, vocabulary: int) -> None:
        self._method, self._vocabulary = method, vocabulary

    def buffer(self, name: str) -> NDArray[np.float32]:
        content: NDArray[np.float32] = self._method.get_attribute(name).numpy()
        return content

    def run(self, tokens: Sequence[int], position: int) -> NDArray[np.float32]:
        import torch

        inputs = [torch.tensor([[*tokens]], dtype=torch.int64), torch.tensor([position], dtype=torch.int64)]
        (logits,) = self._method(inputs)
        last: NDArray[np.float32] = logits.reshape(-1, self._vocabulary)[-1].float().numpy()
        return last


class LibraryCalls:
    """Loads a program through deltic's library and calls it. Raises RuntimeError if it cannot be loaded."""

    def __init__(self, library: ctypes.CDLL, path: Path, vocabulary: int) -> None:
        self._library, self._vocabulary = library, vocabulary
        library.deltic_program_close.restype = None
        library.deltic_program_close.argtypes = (c_void_p,)
        library.deltic_program_open.argtypes = (c_char_p, POINTER(c_void_p))
        library.deltic_program_buffer.argtypes = (
            c_void_p, c_char_p, POINTER(c_void_p), POINTER(c_int64), POINTER(c_int64))
        library.deltic_program_run.argtypes = (c_void_p, POINTER(c_int64), c_int64, c_int64, POINTER(c_float), c_int64)
        self._program = c_void_p()
        _check(library.deltic_program_open(bytes(path), byref(self._program)))
        weakref.finalize(self, library.deltic_program_close, self._program)

    def buffer(self, name: str) -> NDArray[np.float32]:
        import numpy as np

        content, sizes, dimensions = c_void_p(), (c_int64 * 8)(), c_int64()
        _check(self._library.deltic_program_buffer(
            self._program, name.encode(), byref(content), sizes, byref(dimensions)))
        shape = tuple(sizes[:dimensions.value])
        assert content.value, "a buffer has an address"
        numbers = (c_float * int(np.prod(shape))).from_address(content.value)
        return np.ctypeslib.as_array(numbers).reshape(shape)

    def run(self, tokens: Sequence[int], position: int) -> NDArray[np.float32]:
        import numpy as np

        logits = np.empty(self._vocabulary, np.float32)
        _check(self._library.deltic_program_run(
            self._program, (c_int64 * len(tokens))(*tokens), len(tokens), position,
            logits.ctypes.data_as(POINTER(c_float)), self._vocabulary))
        return logits


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"ExecuTorch's error 0x{status:x}")


# The library


def load() -> ctypes.CDLL:
    """Loads the library, which registers deltic's operators. Raises ModelError if it cannot be built or loaded."""
    path = library_path()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise ModelError(f"deltic's library for ExecuTorch, {path}, cannot be loaded: {error}") from error


def library_path() -> Path:
    """Returns the library's path; compiles the library first if needed. Raises ModelError naming what is missing."""
    require_extra("executorch", "executorch")
    if not KERNELS.is_file():
        raise ModelError("deltic's operators for ExecuTorch need its compiled kernels, which are not installed: "
                         "install g++ and then deltic again, or export the model with --operators executorch")
    path = _cache_folder() / f"{_digest()}.so"
    try:
        if not path.is_file():
            _compile(path)
    except OSError as error:
        raise ModelError(f"deltic's operators for ExecuTorch cannot be compiled to {path.parent}: {error}") from error
    return path


def _compile(path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise ModelError("deltic's operators for ExecuTorch have to be compiled once, and there is no C++ compiler: "
                         "install g++, or export the model with --operators executorch")
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent) as temporary:
        output = Path(temporary) / path.name
        done = subprocess.run([compiler, *_compiler_arguments(), "-o", output], capture_output=True, text=True,
                              check=False)
        if done.returncode:
            reason = done.stderr.strip()[-400:] or f"exit status {done.returncode}"
            raise ModelError(f"deltic's operators for ExecuTorch cannot be compiled: {compiler} failed: {reason}")
        output.replace(path)


def _compiler_arguments() -> list[str]:
    spec = find_spec("executorch")
    assert spec is not None and spec.submodule_search_locations, "require_extra has found it"
    package = Path(next(iter(spec.submodule_search_locations)))
    headers = package / "include"
    folders = (KERNELS.parent, package / "lib")
    return [*_FLAGS,
            "-isystem", f"{headers}", "-isystem", f"{headers}/executorch/runtime/core/portable_type/c10",
            f"-I{KERNELS.parent}", *map(str, SOURCES),
            *(f"-L{folder}" for folder in folders), *(f"-Wl,-rpath,{folder}" for folder in folders),
            f"-l:{KERNELS.name}", "-lexecutorch"]


def _digest() -> str:
    """Returns a digest of the sources, the executorch version and the compiler's arguments."""
    parts = [file.read_bytes() for file in (*SOURCES, KERNELS.with_name("deltic.h"))]
    parts += [version("executorch").encode(), "\0".join(_compiler_arguments()).encode()]
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "deltic" / "executorch"
