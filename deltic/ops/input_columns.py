"""Declares the int64 input columns of a step. The host packs them; tensors and kernels refer to them by name.

A layout lists its columns in memory order. `InputBatch` (runner) fills them. `cuda_struct` generates the pointers that
CUDA kernels include, so that each offset is defined only once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

SCHEDULER, PAGE_TABLE, DEVICE_TOKENS = "scheduler", "page table", "device tokens"
"""Sources of a column: the planned rows; the page table, which is kept from step to step; or the places of tokens that
only the device has."""


class Extents(NamedTuple):
    """The sizes of a step. pages: width of the page table."""

    rows: int
    tokens: int
    pages: int = 0
    logits: int = 0
    checkpoints: int = 0

    @property
    def one(self) -> int:
        return 1

    @property
    def table(self) -> int:
        return self.rows * self.pages


class Column(NamedTuple):
    """A column of times * extent + plus integers. extent: name of a field of `Extents`."""

    name: str
    extent: str
    times: int = 1
    plus: int = 0
    set_by: str = SCHEDULER

    def size(self, extents: Extents) -> int:
        return self.times * int(getattr(extents, self.extent)) + self.plus


COLUMNS = {column.name: column for column in (
    Column("count", "one"),  # number of real rows; padding rows fill the bucket
    Column("ids", "tokens"),
    Column("positions", "tokens", times=3),
    Column("starts", "rows", plus=1),
    Column("done", "rows"),
    Column("source", "rows"),
    Column("target", "rows"),
    Column("base", "rows"),
    Column("delta_log", "rows"),
    Column("append", "rows"),
    Column("store", "tokens"),
    Column("adapter_entries", "tokens"),
    Column("logit_tokens", "tokens"),
    Column("pages", "table", set_by=PAGE_TABLE),
    Column("draws", "tokens", set_by=DEVICE_TOKENS),
)}
"""The columns of buckets, with their names in `Batch`. draws: index of each input token in the device's drawn tokens,
if the host does not have the tokens yet."""


@dataclass(frozen=True, slots=True)
class ColumnLayout:
    """Columns in memory order."""

    columns: tuple[Column, ...]

    def size(self, extents: Extents) -> int:
        return sum(column.size(extents) for column in self.columns)

    def offset(self, name: str, extents: Extents) -> int:
        """Returns the index of a column's first integer."""
        names = [column.name for column in self.columns]
        return sum(column.size(extents) for column in self.columns[:names.index(name)])

    def views(self, numbers: Tensor, extents: Extents) -> dict[str, Any]:
        """Returns the columns that the model reads, by name, as views of `numbers` [N]."""
        columns = [column for column in self.columns if column.set_by != DEVICE_TOKENS]
        sizes = [column.size(extents) for column in columns]
        return dict(zip([column.name for column in columns], numbers.split(sizes), strict=True))

    def pack(self, values: Mapping[str, Iterable[int]], extents: Extents) -> array[int]:
        """Concatenates the columns that the scheduler sets. Raises ValueError if a column is missing or has a wrong
        size."""
        numbers = array("q")
        for column in self.columns:
            if column.set_by != SCHEDULER:
                continue
            if column.name not in values:
                raise ValueError(f"column {column.name!r} of a step is missing")
            begin, size = len(numbers), column.size(extents)
            numbers.extend(values[column.name])
            if len(numbers) != begin + size:
                raise ValueError(f"column {column.name!r} of a step must have {size} integers, not "
                                 f"{len(numbers) - begin}")
        return numbers


def _layout(names: str) -> ColumnLayout:
    return ColumnLayout(tuple(COLUMNS[name] for name in names.split()))


DECODE = _layout("count ids positions starts done store source target adapter_entries pages draws")
"""A bucket of steps in which every row decodes one token and writes its state."""
VERIFY = _layout("count ids positions starts done source target base delta_log append store logit_tokens pages draws")
"""A bucket of steps with drafts, or with tokens in state delta logs."""
RAGGED = ColumnLayout((
    *_layout("ids positions starts done base store source target delta_log").columns,
    Column("logit_tokens", "logits"),
    Column("emit_row", "checkpoints"),
    Column("emit_length", "checkpoints"),
    Column("emit_slot", "checkpoints"),
))
"""A step of any shape. Its page table and `append` are tensors of their own."""

IDS_OFFSET = 1
"""The index of the first token id in every bucket."""
assert all(layout.offset("ids", Extents(1, 1)) == IDS_OFFSET for layout in (DECODE, VERIFY))


def cuda_struct(name: str, layout: ColumnLayout) -> str:
    """Returns the CUDA source of a struct with a pointer to each column of a bucket."""
    lines = [f"struct {name} {{", "    const int rows, tokens, width;"]
    begin = ""
    for column in layout.columns:
        lines.append(f"    long long *const {column.name}{begin};")
        begin = f" = {column.name} + {column.times} * {_CUDA_EXTENTS[column.extent]} + {column.plus}"
    first = layout.columns[0].name
    lines.append(f"    __device__ {name}(long long *numbers, int rows, int tokens, int width)")
    lines.append(f"        : rows(rows), tokens(tokens), width(width), {first}(numbers) {{}}")
    return "\n".join([*lines, "};\n"])


_CUDA_EXTENTS = {"one": "1", "rows": "rows", "tokens": "tokens", "table": "(long long)rows * width"}


def cuda_header() -> str:
    """Returns the CUDA source of the columns that `numbers.cuh` uses."""
    return f"constexpr int IDS_OFFSET = {IDS_OFFSET};\n{cuda_struct('VerifyColumns', VERIFY)}"
