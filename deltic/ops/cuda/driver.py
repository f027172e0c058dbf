"""The little of the CUDA driver that is needed to load machine code and to launch it in torch's streams."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import Structure, byref, c_float, c_int, c_uint, c_void_p, cast
from functools import cache
from typing import Any

import torch

from deltic.ops.cuda.nvrtc import compile_source

_CLUSTER, _PROGRAMMATIC, _SHARED_BYTES, _CARVEOUT, _MOST_SHARED = 4, 6, 8, 9, 97
"""CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN."""


class _Attribute(Structure):
    _fields_ = [("id", c_int), ("pad", c_int), ("value", c_int * 16)]


class _Launch(Structure):
    _fields_ = [("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("stream", c_void_p),
                ("attributes", c_void_p), ("count", c_uint)]


class Arguments(Structure):
    """A kernel's parameter: a struct of pointers (tensors), floats and ints, given by name."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**{name: _plain(value) for name, value in values.items()})
        missing = {name for name, *_ in self._fields_} - values.keys()
        assert not missing, f"{type(self).__name__} lacks {missing}"


def fields(pointers: str, floats: str, integers: str) -> list[tuple[str, Any]]:
    """The members of an `Arguments`, in this order; names separated by blanks."""
    return [(name, kind) for names, kind in ((pointers, c_void_p), (floats, c_float), (integers, c_int))
            for name in names.split()]


def _plain(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


class Module:
    """Machine code on one device, and its kernels by name. They are to be launched while torch's current device is
    that one."""

    def __init__(self, source: str, device: torch.device) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        self.device, self._overlaps = device, major >= 9
        self._code, self._module = compile_source(source, f"sm_{major}{minor}"), c_void_p()
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # torch makes the context current
            _check(_driver().cuModuleLoadData(byref(self._module), self._code))
        self._functions: dict[str, c_void_p] = {}

    def launch(self, name: str, grid: tuple[int, ...], block: int, arguments: Arguments, shared: int = 0,
               overlap: bool = True, cluster: int = 1) -> None:
        """Launch a kernel in torch's current stream. overlap: it waits itself for what came before, so that it may
        start earlier. cluster: blocks beside each other that can reach each other's shared memory."""
        function = self._function(name)
        if shared:
            _check(_driver().cuFuncSetAttribute(function, _SHARED_BYTES, shared))
        self.prepare(name, grid, block, arguments, shared, overlap, cluster)()

    def prepare(self, name: str, grid: tuple[int, ...], block: int, arguments: Arguments, shared: int = 0,
                overlap: bool = False, cluster: int = 1) -> Callable[[], None]:
        """A launch to be made again and again; what the arguments point to must stay where it is."""
        function, attributes = self._function(name), list[_Attribute]()
        if overlap and self._overlaps:
            attributes.append(_Attribute(_PROGRAMMATIC, 0, (c_int * 16)(1)))
        if cluster > 1:
            attributes.append(_Attribute(_CLUSTER, 0, (c_int * 16)(cluster, 1, 1)))
        sizes, given = (c_uint * 3)(*grid, *(1,) * (3 - len(grid))), (_Attribute * len(attributes))(*attributes)
        launch = _Launch(sizes, (c_uint * 3)(block, 1, 1), shared, None, cast(given, c_void_p), len(attributes))
        parameters, by_reference, call = (c_void_p * 1)(ctypes.addressof(arguments)), byref(launch), _driver()

        def run(_kept: tuple[object, ...] = (arguments, given)) -> None:
            launch.stream = torch.cuda.current_stream().cuda_stream
            _check(call.cuLaunchKernelEx(by_reference, function, parameters, None))

        return run

    def _function(self, name: str) -> c_void_p:
        if name not in self._functions:
            function = c_void_p()
            _check(_driver().cuModuleGetFunction(byref(function), self._module, name.encode()))
            # kernels that split a multiprocessor's memory differently cannot be on it at the same time
            _check(_driver().cuFuncSetAttribute(function, _CARVEOUT, 100))
            self._functions[name] = function
        return self._functions[name]


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block may have."""
    if torch.cuda.get_device_capability(device) == (9, 0):
        return 227 << 10
    found = c_int()
    _check(_driver().cuDeviceGetAttribute(byref(found), _MOST_SHARED, device.index or 0))
    return found.value


def _check(result: int) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(result, byref(text))
        raise RuntimeError(f"CUDA driver: {(text.value or b'').decode()} ({result})")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
