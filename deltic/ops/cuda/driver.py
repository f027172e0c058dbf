"""Compiles CUDA C++ and launches the kernels in torch's streams."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import re
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import Structure, byref, c_float, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p, cast
from functools import cache, partial
from itertools import permutations
from pathlib import Path
from threading import get_ident
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from deltic.ops.cuda import nvrtc
from deltic.ops.cuda.card import card_of
from deltic.ops.cuda.nvrtc import CompileError
from deltic.ops.memory import guard

_Result = TypeVar("_Result")
FOLDER = Path(__file__).parent / "kernels"


def headers(*names: str) -> str:
    """Returns the source of these kernel files, preceded by common.cuh."""
    return "".join((FOLDER / f"{name}.cuh").read_text(encoding="utf-8") for name in ("common", *names))


def entry(name: str, type: str, bounds: str, call: str) -> str:
    """Returns the source of a kernel that calls a function of the kernel files."""
    inner = call if "<" in call else f"::{call}"
    return (f'extern "C" __global__ void __launch_bounds__({bounds}) k_{name}(const __grid_constant__ {type} a) '
            f"{{ {inner}(a); }}\n")


_PARTS, _KERNELS = 8, 3
"""A source is compiled in up to _PARTS parts with at least _KERNELS kernels each."""


def compile_source(source: str, architecture: str) -> list[bytes]:
    """Returns the machine code of each part of a source, from `nvrtc.compile_all` or the user's cache directory."""
    version, codes, missing = nvrtc.version(), dict[Path, bytes](), dict[Path, str]()
    places = list[Path]()
    for part in parts_of(source):
        name = hashlib.sha256(f"{version} {architecture} {part}".encode()).hexdigest()[:32]
        places.append(_cache_folder() / f"{name}.cubin")
        try:
            codes[places[-1]] = places[-1].read_bytes()
        except OSError:
            missing[places[-1]] = part
    for place, code in zip(missing, nvrtc.compile_all([*missing.values()], architecture), strict=True):
        codes[place] = code
        _keep(place, code)
    return [codes[place] for place in places]


def parts_of(source: str) -> list[str]:
    """Splits a source into sources with a part of its kernels each. After its first kernel it has only kernels."""
    begin, *kernels = re.split(r'^(?=extern "C" __global__)', source, flags=re.MULTILINE)
    count = max(1, min(_PARTS, -(-len(kernels) // _KERNELS)))
    return [begin + "".join(kernels[first::count]) for first in range(count)]


def _keep(place: Path, code: bytes) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as fresh:
            fresh.write(code)
        os.replace(fresh.name, place)
    except OSError:
        pass  # compiled again next time


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "deltic" / "cuda"


_PROGRAMMATIC, _SHARED_BYTES, _CARVEOUT = 6, 8, 9
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT."""

_NOT_FOUND = 500
"""CUDA_ERROR_NOT_FOUND."""

_BFLOAT16, _SWIZZLE_128, _PROMOTE = 9, 3, 2
"""CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B."""


class _Attribute(Structure):
    _fields_ = [("id", c_int), ("pad", c_int), ("value", c_int * 16)]


class _Launch(Structure):
    _fields_ = [("x", c_uint), ("y", c_uint), ("z", c_uint), ("block", c_uint * 3), ("shared", c_uint),
                ("stream", c_void_p), ("attributes", c_void_p), ("count", c_uint)]


class KernelArguments(Structure):
    """A kernel's parameter: a struct of pointers (given as tensors or addresses), floats and ints, passed by name."""

    names: ClassVar[tuple[str, ...]]

    def __init__(self, **values: Any) -> None:
        super().__init__(*[value.data_ptr() if isinstance(value, Tensor) else value
                           for value in map(values.__getitem__, self.names)])
        assert len(values) == len(self.names), f"{type(self).__name__} has no {values.keys() - {*self.names}}"

    def __init_subclass__(cls) -> None:
        cls.names = tuple(name for name, *_ in cls._fields_)


def fields(pointers: str, floats: str = "", integers: str = "") -> list[tuple[str, Any]]:
    """Returns the `_fields_` of a `KernelArguments`, in this order. Names are separated by blanks."""
    return [(name, kind) for names, kind in ((pointers, c_void_p), (floats, c_float), (integers, c_int))
            for name in names.split()]


class Module:
    """Machine code on one device, and its kernels by name. That device must be torch's current one at a launch."""

    def __init__(self, source: str, device: torch.device) -> None:
        self.device, card = device, card_of(device)
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._overlaps, codes = card.overlaps, compile_source(source, card.target)
        self._modules = [c_void_p() for _ in codes]
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # torch makes the context current
            for module, code in zip(self._modules, codes, strict=True):
                _check(_driver().cuModuleLoadData(byref(module), code))
        self._functions: dict[str, c_void_p] = {}
        self._shared: dict[str, int] = {}
        self._calls: dict[tuple[str, int, int, bool, int], _KernelCall] = {}

    def launch(self, name: str, grid: tuple[int, ...], block: int, arguments: KernelArguments, shared: int = 0,
               overlap: bool = True) -> None:
        """Launches a kernel in torch's current stream. overlap: the kernel may start before the previous one ends,
        because it waits for the previous one itself (programmatic dependent launch)."""
        key = (name, block, shared, overlap, get_ident())
        call = self._calls.get(key)
        if call is None:
            if shared > self._shared.get(name, 0):  # the attribute is the maximum of all launches
                _check(_driver().cuFuncSetAttribute(self._function(name), _SHARED_BYTES, shared))
                self._shared[name] = shared
            call = self._calls[key] = _KernelCall(self._function(name), self._index, block, shared,
                                                 overlap and self._overlaps)
        call(grid, arguments)

    def prepare(self, name: str, grid: tuple[int, ...], block: int, arguments: KernelArguments, shared: int = 0,
                overlap: bool = False) -> Callable[[], None]:
        """Returns a function that launches a kernel repeatedly. The tensors in the arguments must stay allocated."""
        call = _KernelCall(self._function(name), self._index, block, shared, overlap and self._overlaps)
        return partial(call, grid, arguments)

    def _function(self, name: str) -> c_void_p:
        if name not in self._functions:
            function = self._find(name)
            # kernels with different carve-outs cannot run on a multiprocessor at the same time
            _check(_driver().cuFuncSetAttribute(function, _CARVEOUT, 100))
            self._functions[name] = function
        return self._functions[name]

    def _find(self, name: str) -> c_void_p:
        """Returns the handle of a kernel. Raises ValueError if no part of the machine code has the kernel."""
        function = c_void_p()
        for module in self._modules:
            result = _driver().cuModuleGetFunction(byref(function), module, name.encode())
            if result != _NOT_FOUND:  # if nothing is found, the driver sets the handle to null
                _check(result)
                return function
        raise ValueError(f"no kernel is called {name}")


@cache
def load_module(source: str, device: torch.device) -> Module:
    """Returns the module of a source. It is loaded once per device and shared by all copies of a model."""
    return Module(source, device)


def module_or_none(source: str, device: torch.device) -> Module | None:
    """Returns the module of a source; None if the source cannot be compiled."""
    return None if why_not_compiled(source, device) else load_module(source, device)


@cache
def why_not_compiled(source: str, device: torch.device) -> str | None:
    """Returns the reason why the source cannot be compiled; None if it can."""
    try:
        compile_source(source, card_of(device).target)
    except CompileError as error:
        return f"the kernels cannot be compiled: {error}"
    return None


class _KernelCall:
    """A kernel with all parameters of a launch except grid and arguments. Used by one thread only."""

    def __init__(self, function: c_void_p, device: int, block: int, shared: int, overlap: bool) -> None:
        self._device = device
        self._function, self._parameters, self._go = function, (c_void_p * 1)(), _launcher().cuLaunchKernelEx
        wanted = [(_PROGRAMMATIC, (1,))] * overlap
        self._attributes = (_Attribute * len(wanted))(*[_Attribute(id, 0, (c_int * 16)(*values))
                                                        for id, values in wanted])
        self._launch = _Launch(1, 1, 1, (c_uint * 3)(block, 1, 1), shared, None,
                               cast(self._attributes, c_void_p), len(wanted))
        self._reference = byref(self._launch)

    def __call__(self, grid: tuple[int, ...], arguments: KernelArguments) -> None:
        launch = self._launch
        launch.x, launch.y, launch.z = (*grid, 1, 1)[:3]
        # takes a tenth of the time of torch.cuda.current_stream
        launch.stream = torch._C._cuda_getCurrentRawStream(self._device)
        self._parameters[0] = ctypes.addressof(arguments)
        _check(self._go(self._reference, self._function, self._parameters, None))


def record(launch: Callable[[], _Result], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, _Result]:
    """Records the launches of `launch` as a graph without running them. Returns the graph and the result of `launch`.
    pool: memory pool of an earlier graph, which the new one may share."""
    graph = torch.cuda.CUDAGraph()
    with recording(), torch.cuda.graph(graph, pool=pool, stream=_capture_stream(torch.cuda.current_device()),
                                       capture_error_mode="thread_local"):
        result = launch()
    return graph, result


@contextmanager
def recording() -> Iterator[None]:
    """Context for recording a graph. Other threads may copy meanwhile. Old graphs are not collected as garbage."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with guard().inside():
            yield
    finally:
        if collects:
            gc.enable()


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Returns a capture stream of the device. Torch's own capture stream belongs to the first device that records."""
    return torch.cuda.Stream(device)


def make_current(device: torch.device) -> None:
    """Makes the device's context current in this thread, as torch would."""
    current, context = c_void_p(), c_void_p()
    _check(_driver().cuCtxGetCurrent(byref(current)))
    if not current:
        _check(_driver().cuDevicePrimaryCtxRetain(byref(context), device.index or 0))
        _check(_driver().cuCtxSetCurrent(context))


_ALREADY_REACHED = 704
"""CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED."""


def reach_peers(devices: Sequence[torch.device]) -> bool:
    """Lets kernels on each of these devices access the memory of the others. Returns False if a device cannot reach
    another one."""
    numbers = sorted({device.index or 0 for device in devices})
    contexts, reached = dict[int, c_void_p](), c_int()
    for number in numbers:
        contexts[number] = c_void_p()
        _check(_driver().cuDevicePrimaryCtxRetain(byref(contexts[number]), number))
    for number, peer in permutations(numbers, 2):
        _check(_driver().cuDeviceCanAccessPeer(byref(reached), number, peer))
        if not reached:
            return False
    for number, peer in permutations(numbers, 2):
        with torch.cuda.device(number):
            torch.cuda.synchronize()  # torch makes the context current
            result = _driver().cuCtxEnablePeerAccess(contexts[peer], 0)
        if result != _ALREADY_REACHED:
            _check(result)
    return True


class DeviceMemory:
    """Memory of a device that its peers can access. They cannot access torch's memory in expandable segments."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._device, self._at = device, c_uint64()
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            _check(_driver().cuMemAlloc_v2(byref(self._at), c_size_t(nbytes)))
        self._nbytes = nbytes

    def fill_(self, byte: int) -> None:
        """Sets all bytes. Waits for the device before and afterwards."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            _check(_driver().cuMemsetD8_v2(self._at, c_ubyte(byte), c_size_t(self._nbytes)))
            torch.cuda.synchronize()

    def data_ptr(self) -> int:
        return self._at.value

    def __del__(self) -> None:
        if self._at.value:
            with torch.cuda.device(self._device):
                _driver().cuMemFree_v2(self._at)
            self._at.value = 0


def tensor_map(matrix: Tensor, rows: int, columns: int) -> bytes:
    """Returns the 128-byte descriptor of a bfloat16 matrix for the tensor memory accelerator, which copies boxes. Box
    rows of 128 bytes (64 columns) are swizzled. Without this unit: the descriptor that kernels/grouped.cuh reads."""
    if not card_of(matrix.device).bulk_copies:
        words = (matrix.data_ptr(), matrix.stride(0) * 2, matrix.shape[0], matrix.shape[1])
        return struct.pack("16Q", *words, *[0] * 12)
    room = (c_uint64 * 24)()
    map = ctypes.addressof(room) + -ctypes.addressof(room) % 64
    _check(_driver().cuTensorMapEncodeTiled(
        c_void_p(map), _BFLOAT16, 2, c_void_p(matrix.data_ptr()), (c_uint64 * 2)(matrix.shape[1], matrix.shape[0]),
        (c_uint64 * 1)(matrix.stride(0) * 2), (c_uint * 2)(columns, rows), (c_uint * 2)(1, 1), 0, _SWIZZLE_128,
        _PROMOTE, 0))
    return ctypes.string_at(map, 128)


def _check(result: int) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(result, byref(text))
        raise RuntimeError(f"CUDA driver: {(text.value or b'').decode()} ({result})")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _launcher() -> ctypes.PyDLL:
    """Returns the driver library for calls that keep Python's GIL. A launch takes microseconds, and a prefill step has
    hundreds of them. If they released the GIL, another thread would take it each time for longer than that."""
    return ctypes.PyDLL("libcuda.so.1")
