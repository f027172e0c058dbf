"""Describes the part of each tensor that each device loads for tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Ranges of rows (of matrices, for a stack) or of columns of a tensor. None: the whole tensor."""

    ranges: tuple[slice, ...] | None = None
    columns: bool = False

    @property
    def size(self) -> int:
        """Number of rows or columns of a part that is not the whole tensor."""
        return sum(part.stop - part.start for part in self.ranges or ())

    def shape(self, whole: Shape) -> Shape:
        if self.ranges is None:
            return whole
        return (*whole[:-1], self.size) if self.columns else (self.size, *whole[1:])

    def of(self, whole: Tensor) -> Tensor:
        """Returns this part of `whole`: a view for one range of rows, otherwise a copy."""
        if self.ranges is None:
            return whole
        axis = whole.dim() - 1 if self.columns else 0
        found = [whole.narrow(axis, part.start, part.stop - part.start) for part in self.ranges]
        return found[0] if len(found) == 1 and not self.columns else torch.cat(found, axis)


WHOLE: Final = Part()


@dataclass(frozen=True, slots=True)
class Split:
    """The devices that share a model. parts(canonical name, shape): each device's part of a tensor, or None."""

    devices: tuple[torch.device, ...]
    parts: Callable[[str, Shape], Sequence[Part | None]]

    def own(self, name: str, shape: Shape) -> Iterator[tuple[int, Part]]:
        """Yields (device index, part) for the devices that have a part of a tensor."""
        for index, part in enumerate(self.parts(name, shape)):
            if part is not None:
                yield index, part

    def cut(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[int, str, Tensor]]:
        """Yields (device index, name, contiguous part) for tensors that are whole in memory. Keeps no reference to a
        tensor after its last part, so that the caller can free it."""
        for name, tensor in tensors:
            own, whole = [*self.own(name, tuple(tensor.shape))], [tensor]
            del tensor
            while own:
                index, part = own.pop(0)
                yield index, name, _alone(part.of(whole[0] if own else whole.pop()), self.devices[index])


def _alone(tensor: Tensor, device: torch.device) -> Tensor:
    """Moves a tensor to a device. On a GPU it returns no view, which would keep the whole tensor in GPU memory."""
    found = tensor.contiguous().to(device)
    return found.clone() if device.type != "cpu" and found.untyped_storage().nbytes() > found.nbytes else found


def one_device(device: str | torch.device) -> Split:
    """Returns a split that puts all tensors on one device."""
    return Split((torch.device(device),), lambda name, shape: (WHOLE,))
