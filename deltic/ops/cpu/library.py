"""The compiled kernels (csrc/deltic.h), loaded once."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

_ABI = 1
_SIGNATURES = {
    "deltic_linear_bf16": [c_void_p] * 3 + [c_int64] * 4,
    "deltic_add_norm": [c_void_p] * 5 + [c_int64] * 2 + [c_float, c_int],
    "deltic_silu_mul": [c_void_p] * 2 + [c_int64] * 2 + [c_int],
    "deltic_gdn_step": [c_void_p],
}


class GdnStep(ctypes.Structure):
    """`deltic_gdn` of csrc/deltic.h."""

    _fields_ = (
        *((name, c_int64) for name in ("rows", "key_heads", "value_heads", "key_dim", "value_dim", "kernel", "ring",
                                       "proj_stride")),
        ("type", c_int), ("eps", c_float),
        *((name, c_void_p) for name in ("proj", "conv", "decay", "dt_bias", "norm", "slots", "done", "states", "inputs",
                                        "out")),
    )


@cache
def load() -> ctypes.CDLL | str:
    """The library, or why it cannot be used."""
    path = Path(__file__).parent / "libdeltic.so"
    if not path.exists():
        return "the native kernels were not compiled: install g++, then reinstall deltic"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"the native kernels cannot be loaded: {error}"
    if library.deltic_abi() != _ABI:
        return "the native kernels are of another version: reinstall deltic"
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library
