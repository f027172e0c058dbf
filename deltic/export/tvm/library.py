"""TVM's runtime in this process: found in the wheel and loaded without its compiler, once.

`import tvm` would load the compiler (250 MB) and take seconds. The package `tvm_ffi` and the libraries libtvm_runtime
and libtvm_runtime_extra, which lie in the wheel, are all that a compiled model needs.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from deltic.config.aliases import BACKENDS, canonical
from deltic.errors import ModelError
from deltic.export.extras import need

PLACE: Final = "DELTIC_TVM_LIBRARY_PATH"
"""Environment variable: the directory with the runtime's libraries, where it is not that of the package `tvm`."""
_LIBRARIES: Final = ("libtvm_runtime", "libtvm_runtime_extra")
_SUFFIX: Final = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
CONSTRUCTOR: Final = "vm.builtin.paged_attention_kv_cache_create"


@cache
def runtime() -> Any:
    """The package `tvm_ffi`, with TVM's runtime loaded and older names of attention kernels accepted. ModelError saying
    what to install.

    Who has imported `tvm`, or loaded the runtime in another way, has it already: then nothing is loaded, because a
    second copy would register the same names and end the process.
    """
    need("tvm", "tvm_ffi")
    with _without_torch():
        import tvm_ffi
    if tvm_ffi.get_global_func(CONSTRUCTOR, allow_missing=True) is None:
        for path in _libraries():
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # for artifacts, which do not name it
    constructor = tvm_ffi.get_global_func(CONSTRUCTOR, allow_missing=True)
    if constructor is None:
        raise ModelError(f"TVM's runtime does not know {CONSTRUCTOR}: it is too old; pip install 'deltic[tvm]'")

    tvm_ffi.register_global_func(CONSTRUCTOR, accepting_older_names(constructor), override=True)
    return tvm_ffi


def load_device(ffi: Any, kind: str, needs: str) -> None:
    """Load the part of TVM's runtime that drives a device, unless it is there. ModelError if it cannot be. needs: what
    the artifact needs, and what to do."""
    if ffi.get_global_func(f"device_api.{kind}", allow_missing=True) is not None:
        return
    name = f"libtvm_runtime_{kind}{_SUFFIX}"
    found = next((path for place in _places() if (path := place / name).is_file()), None)
    if found is None:
        raise ModelError(f"{needs}. TVM's runtime here has no {name}, and cannot drive such a device")
    try:
        ctypes.CDLL(str(found), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ModelError(f"{needs}. TVM's runtime for {kind} cannot be loaded: {error}") from error


def accepting_older_names(constructor: Callable[..., Any]) -> Callable[..., Any]:
    """The constructor of the paged cache, for kernels that are tagged by any name of their backend: each kernel is
    given as a list that begins with it, whether it serves prompts (paged, ragged), decoding or trees. ModelError for
    others."""
    def create(*arguments: Any) -> Any:
        return constructor(*map(_renamed, arguments))
    return create


def _renamed(argument: Any) -> Any:
    if isinstance(argument, str) or not isinstance(argument, Sequence) or not argument:
        return argument
    tag, *kernel = argument
    if not isinstance(tag, str):
        return argument
    return [canonical(BACKENDS, tag, "attention backend"), *kernel]


def _places() -> list[Path]:
    """Where the runtime's libraries may lie."""
    given, package = os.environ.get(PLACE), find_spec("tvm")
    return [Path(given)] if given else [Path(place) / "lib" for place in (
        package.submodule_search_locations or () if package else ())]


def _libraries() -> Iterator[Path]:
    places = _places()
    if not places:
        raise ModelError("TVM's runtime is not here: pip install 'deltic[tvm]', or set "
                         f"{PLACE} to the directory with {_LIBRARIES[0]}{_SUFFIX}")
    for name in _LIBRARIES:
        found = next((path for place in places if (path := place / (name + _SUFFIX)).is_file()), None)
        if found is None:
            raise ModelError(f"{places[0]} has no {name}{_SUFFIX}: pip install 'deltic[tvm]', or set {PLACE} to the "
                             "directory that has it")
        yield found


@contextmanager
def _without_torch() -> Iterator[None]:
    """Have tvm_ffi not import torch, which it does if it can, and which takes longer than all else."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]
