"""The device that a compiled library runs on: whether it is here, and its tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deltic.errors import ModelError
from deltic.export.tvm.library import load_device
from deltic.export.tvm.parameters import aligned

if TYPE_CHECKING:
    from numpy.typing import NDArray

_EXISTS = 0
"""TVM's number of the attribute that says whether a device is there."""
_POOLED = 2
_NEEDS = {"cuda": "an NVIDIA GPU with its driver", "rocm": "an AMD GPU with ROCm", "metal": "a GPU of Apple's",
          "opencl": "a GPU with an OpenCL driver", "vulkan": "a GPU with a Vulkan driver"}


@dataclass(frozen=True, slots=True)
class Device:
    """A device of TVM's by its name, such as cpu or cuda."""

    ffi: Any
    kind: str

    @property
    def types(self) -> tuple[int, ...]:
        """The arguments that initialise TVM's virtual machine: the device, and the CPU behind it."""
        kinds = dict.fromkeys((self.kind, "cpu"))
        return tuple(number for kind in kinds for number in (self._type(kind), 0, _POOLED))

    def put(self, array: NDArray[Any]) -> Any:
        """A tensor with these numbers on the device; on a CPU the array itself."""
        if self.kind == "cpu":
            return self.ffi.from_dlpack(array)
        tensor = self.ffi.get_global_func("runtime.TVMTensorAllocWithScope")(
            self.ffi.Shape(array.shape), self.ffi.dtype(str(array.dtype)), self.ffi.device(self.kind, 0), None)
        self.ffi.get_global_func("runtime.TVMTensorCopyFromBytes")(
            tensor, ctypes.c_void_p(array.ctypes.data), array.nbytes)
        return tensor

    def integers(self, numbers: Sequence[int] | NDArray[Any]) -> Any:
        """A tensor of int32."""
        content = np.ascontiguousarray(numbers, np.int32).view(np.uint8)
        return self.put(aligned(content).view(np.int32))

    def numpy(self, tensor: Any) -> NDArray[np.float32]:
        """The numbers of a float32 tensor; on a CPU where they lie."""
        if self.kind == "cpu":
            return np.asarray(np.from_dlpack(tensor), np.float32)
        found = np.empty(tuple(tensor.shape), str(tensor.dtype))
        self.ffi.get_global_func("runtime.TVMTensorCopyToBytes")(
            tensor, ctypes.c_void_p(found.ctypes.data), found.nbytes)
        return found.astype(np.float32, copy=False)

    def _type(self, kind: str) -> int:
        number: int = self.ffi.device(kind, 0).dlpack_device_type()
        return number


def open_device(ffi: Any, kind: str, folder: Path) -> Device:
    """The device that a directory was compiled for. ModelError if the GPU or TVM's runtime for it is missing."""
    device = Device(ffi, kind)
    if kind == "cpu":
        return device
    needs = f"{folder} was compiled for {kind}, which needs {_NEEDS.get(kind, f'a {kind} device')}"
    remedy = "run it on a machine that has one, or compile the model for this processor with --target llvm"
    load_device(ffi, kind, f"{needs}: {remedy}")
    if not ffi.get_global_func("runtime.GetDeviceAttr")(device.types[0], 0, _EXISTS):
        raise ModelError(f"{needs}, and there is none here: {remedy}")
    return device


