"""Which part of a tensor each device reads if a model is split over several (tensor parallel)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Ranges of the rows of a tensor (of the matrices, if it is a stack), or of its columns. None: all of it."""

    ranges: tuple[slice, ...] | None = None
    columns: bool = False

    @property
    def size(self) -> int:
        """Rows or columns, if it is not all."""
        return sum(part.stop - part.start for part in self.ranges or ())

    def shape(self, whole: Shape) -> Shape:
        if self.ranges is None:
            return whole
        return (*whole[:-1], self.size) if self.columns else (self.size, *whole[1:])

    def of(self, whole: Tensor) -> Tensor:
        """Returns a view if it is one range of rows, otherwise a copy."""
        if self.ranges is None:
            return whole
        axis = whole.dim() - 1 if self.columns else 0
        found = [whole.narrow(axis, part.start, part.stop - part.start) for part in self.ranges]
        return found[0] if len(found) == 1 and not self.columns else torch.cat(found, axis)


WHOLE: Final = Part()


@dataclass(frozen=True, slots=True)
class Split:
    """The devices that share a model. parts(canonical name, shape): each device's part of a tensor; None: none."""

    devices: tuple[torch.device, ...]
    parts: Callable[[str, Shape], Sequence[Part | None]]

    def own(self, name: str, shape: Shape) -> Iterator[tuple[int, Part]]:
        """Yields the devices that have a part of a tensor."""
        for index, part in enumerate(self.parts(name, shape)):
            if part is not None:
                yield index, part

    def cut(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[int, str, Tensor]]:
        """Yields device, name and part of tensors that are whole in memory."""
        for name, tensor in tensors:
            for index, part in self.own(name, tuple(tensor.shape)):
                yield index, name, part.of(tensor).to(self.devices[index])
            del tensor  # so that the next one can be made without it


def one_device(device: str | torch.device) -> Split:
    """Returns a split of all tensors to one device."""
    return Split((torch.device(device),), lambda name, shape: (WHOLE,))
