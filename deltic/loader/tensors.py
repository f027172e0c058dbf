"""Tensors on disk, or in memory in place of files: where their bytes are, and how to read them."""

from __future__ import annotations

import ctypes
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

import torch
from torch import Tensor

from deltic.config.quantization import Quantization
from deltic.errors import ModelError
from deltic.loader.gguf.blocks import BlockType

IN_MEMORY: Final = Path("<weights in memory>")
"""Path of a tensor that is not in a file."""
DTYPES: Final = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64",
    torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL"}
"""torch dtype -> safetensors dtype."""
TORCH_TYPES: Final[Mapping[str, torch.dtype]] = {
    **{name: dtype for dtype, name in DTYPES.items()}, "F8_E8M0": torch.uint8}
"""safetensors dtype -> torch dtype. Powers of two (F8_E8M0) are read as their uint8 exponents."""
ITEM_BYTES: Final[Mapping[str, int]] = {name: dtype.itemsize for name, dtype in TORCH_TYPES.items()}
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor on disk: `nbytes` bytes at `offset` of `path`, row-major, of safetensors dtype `dtype`.

    data: the tensor itself if it is in memory.
    """

    path: Path
    dtype: str
    shape: Shape
    offset: int
    nbytes: int
    data: Tensor | None = field(default=None, compare=False)

    def open(self) -> BinaryIO | _TensorReader:
        """Opens the tensor's file, or a file-like reader of a tensor in memory."""
        return self.path.open("rb", buffering=0) if self.data is None else _TensorReader(self.data)

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """Returns the tensor itself, as the only part."""
        return (self,)

    @property
    def stored(self) -> tuple[StoredTensor, ...]:
        """Returns the tensor itself, as the only stored tensor."""
        return (self,)

    def shaped(self, shape: Shape) -> StoredTensor:
        """Returns the tensor unchanged: its shape is known from the file."""
        return self

    def rows(self, first: int, end: int) -> StoredTensor:
        """Locates the entries [first, end) of the first axis."""
        size = self.nbytes // max(1, self.shape[0])
        data = None if self.data is None else self.data.reshape(self.shape)[first:end]
        return replace(self, shape=(end - first, *self.shape[1:]), nbytes=(end - first) * size, data=data,
                       offset=self.offset + first * size if data is None else 0)

    def read(self) -> Tensor:
        """Reads the tensor in its stored dtype. Raises ModelError naming a file that is truncated or cannot be read."""
        if self.data is not None:
            return self.data.detach().cpu().reshape(self.shape)
        raw = torch.empty(self.nbytes, dtype=torch.uint8)
        try:
            with self.open() as file:
                file.seek(self.offset)
                fill(file, raw, self)
        except OSError as error:
            raise ModelError(f"{self.path} cannot be read: {error.strerror}") from error
        return raw.view(TORCH_TYPES[self.dtype]).reshape(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """Rows of a weight in the in-memory form of its format; the fields are tensors or settings."""

    def numbers(self) -> Tensor:
        """Returns the values, float32 [rows, ...]."""
        raise NotImplementedError

    def blocks(self) -> Tensor:
        """Returns the rows in the blocks of `WeightFormat.blocks`, uint8 [rows, bytes]. Raises InexactError with the
        reason if these blocks cannot hold them without rounding."""
        raise NotImplementedError

    def to(self, device: torch.device) -> Self:
        """Returns the same rows on a device."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return replace(self, **{name: value.to(device) for name, value in found.items() if isinstance(value, Tensor)})


@dataclass(frozen=True, slots=True)
class Role:
    """A tensor that a format stores for each weight.

    suffixes: possible ends of the tensor's name, exactly one per file; `weight` is the suffix of a plain weight.
    dtypes: safetensors dtypes that the tensor may have.
    """

    suffixes: tuple[str, ...]
    dtypes: tuple[str, ...]
    required: bool = True


Plan = tuple[Shape, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class WeightFormat:
    """A format of weights (see `deltic.loader.formats`).

    name: the name in messages, and `PackedTensor.dtype`.
    roles: the tensors of a weight. The role `codes` identifies the weights that may have this format.
    plan(tensors, quantization, module): returns the weight's shape and what `read` needs to know, from shapes and the
        config alone. Raises ValueError with the reason why the weight cannot be read.
    read(tensor, first, end): reads the entries [first, end) of the first axis of a weight.
    methods: values of quant_method that select this format where its tensors look like another format's.
    blocks(tensor): returns the type of blocks that hold a weight without rounding, for kernels that multiply in this
        type; None if there is none.
    by_rows: True if rows of the weight are rows of each stored tensor. If not, the tensors are read whole, once.
    matrices: True if a weight of three axes is a stack of experts.
    """

    name: str
    roles: Mapping[str, Role]
    plan: Callable[[Mapping[str, StoredTensor], Quantization, str], Plan]
    read: Callable[[PackedTensor, int, int], PackedRows]
    methods: tuple[str, ...] = ()
    blocks: Callable[[PackedTensor], BlockType | None] = lambda tensor: None
    by_rows: bool = True
    matrices: bool = True


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A weight that a format stores in several tensors, or rows of it.

    shape: shape of the weight, or of its rows. first: index of the first of these rows.
    tensors: the stored tensors of the whole weight, by role.
    settings: the settings that the format's `plan` returned.
    """

    format: WeightFormat
    shape: Shape
    tensors: Mapping[str, StoredTensor]
    settings: Mapping[str, Any]
    first: int = 0

    @property
    def path(self) -> Path:
        return self.tensors["codes"].path

    @property
    def dtype(self) -> str:
        """Returns the name of the format."""
        return self.format.name

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def parts(self) -> tuple[PackedTensor, ...]:
        """Returns the weight itself, as the only part."""
        return (self,)

    @property
    def stored(self) -> tuple[StoredTensor, ...]:
        """Returns the stored tensors of the weight."""
        return tuple(self.tensors.values())

    def rows(self, first: int, end: int) -> PackedTensor:
        """Locates the entries [first, end) of the first axis."""
        return replace(self, shape=(end - first, *self.shape[1:]), first=self.first + first)

    def shaped(self, shape: Shape) -> PackedTensor:
        """Returns the weight in `shape` if its format knows only the number of values (rounded up to an even one)."""
        fits = len(self.shape) == 1 < len(shape) and self.shape[0] == prod(shape) + prod(shape) % 2
        return replace(self, shape=shape) if fits else self

    def loaded(self) -> PackedTensor:
        """Reads the tensors that cannot be read by rows."""
        if self.format.by_rows:
            return self
        tensors = {role: stored if stored.data is not None else replace(stored, data=stored.read(), offset=0)
                   for role, stored in self.tensors.items()}
        return replace(self, tensors=tensors)

    def read(self, first: int, end: int) -> PackedRows:
        """Reads the entries [first, end) of the first axis. Raises ModelError like `StoredTensor.read`."""
        return self.format.read(self, self.first + first, self.first + end)


@dataclass(frozen=True, slots=True)
class Stack:
    """A tensor whose entries along the first axis are stored separately, all of one dtype and shape."""

    parts: tuple[StoredTensor | PackedTensor, ...]

    @property
    def path(self) -> Path:
        return self.parts[0].path

    @property
    def dtype(self) -> str:
        return self.parts[0].dtype

    @property
    def shape(self) -> Shape:
        return (len(self.parts), *self.parts[0].shape)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def stored(self) -> tuple[StoredTensor, ...]:
        """Returns the stored tensors of all entries."""
        return tuple(stored for part in self.parts for stored in part.stored)

    def shaped(self, shape: Shape) -> Stack:
        """Returns the stack with each part in the shape of an entry, like `PackedTensor.shaped`."""
        return Stack(tuple(part.shaped(shape[1:]) for part in self.parts))

    def rows(self, first: int, end: int) -> Stack:
        """Locates the entries [first, end) of the stack."""
        return Stack(self.parts[first:end])


Source = StoredTensor | PackedTensor | Stack


class _TensorReader(io.RawIOBase):
    """Reads a tensor's bytes like a file."""

    def __init__(self, tensor: Tensor) -> None:
        self._bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        self._position = 0

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset
        return offset

    def readinto(self, buffer: Any) -> int:
        piece = self._bytes[self._position:self._position + len(buffer)]
        buffer[:len(piece)] = piece
        self._position += len(piece)
        return len(piece)


def fill(file: Any, tensor: Tensor, stored: StoredTensor) -> None:
    """Reads the next bytes of a file into a contiguous tensor. Raises ModelError if the file ends."""
    size = tensor.numel() * tensor.element_size()
    target = memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
    done = 0
    while done < size:
        count = file.readinto(target[done:])
        if not count:
            raise ModelError(f"{stored.path} ended while it was read; is it still being downloaded?")
        done += count
