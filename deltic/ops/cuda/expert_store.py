"""Experts in bfloat16 that are not all on the card, of which a part may be the host's to compute (`share`): where these
are not on the card, their pointers are null."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltic.ops.cuda.card_store import STACKS, GpuExpertCache, pinned
from deltic.ops.cuda.cpu_experts import HostExperts
from deltic.ops.cuda.driver import tensor_map
from deltic.ops.cuda.layout import BOX_COLUMNS, BOX_ROWS

_SPREADS = 2654435761
"""Multiples of it, of which eight of the lowest 32 bits count, spread evenly: 2**32 over the golden ratio."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the experts of a layer lie. gate, down [E + 1] int64: pointers to their matrices, the last ones for the
    shared expert; null where `host` computes, if there is one, which knows the layer by its number. gate_maps,
    down_maps [E + 1, 128] uint8: how the tensor memory accelerator finds boxes of them. wanted [E] int64: the steps
    that wanted each; None: nobody asks."""

    gate: Tensor
    down: Tensor
    gate_maps: Tensor
    down_maps: Tensor
    wanted: Tensor | None
    host: HostExperts | None = None
    layer: int = 0


class PinnedExpertStore(GpuExpertCache):
    """The experts of a model's layers in bfloat16, `count` in each; gate [size, hidden]."""

    def __init__(self, layers: int, count: int, size: int, hidden: int, device: torch.device, refresh: int) -> None:
        """refresh: of so many steps one may exchange experts. ModelError if the host has no room for them."""
        self.hidden, self.size = hidden, size
        rows = [pinned(count, 3 * size * hidden * 2) for _ in range(layers)]
        self._host = [own.view(torch.bfloat16) for own in rows]
        super().__init__([(own,) for own in rows], (1, 1, 16, 16), device, refresh)

    def take(self, name: str, tensor: Tensor) -> bool:
        """Keep the tensor [E, rows, columns] if it is a part of all experts of a layer, of our names."""
        prefix, _, rest = name.partition(".mlp.experts.")
        if not rest or not prefix.startswith("model.layers."):
            return False
        part, each = STACKS.index(rest.removesuffix("_proj.weight")), self.size * self.hidden
        for own, expert in zip(self._host[int(prefix.rpartition(".")[2])], tensor, strict=True):
            own[part * each:(part + 1) * each].copy_(expert.flatten(), non_blocking=True)
        torch.cuda.synchronize(self._device)
        return True

    @property
    def matrices(self) -> list[Tensor]:
        """Of each layer [E, 3 * size * hidden] bfloat16 of the host: of an expert gate and up [2 size, hidden], then
        [hidden, size]."""
        return self._host

    def share(self, host: HostExperts, share: float) -> None:
        """Have the host compute so many of the experts that are not on the card, from 0 to 1, where there are few
        tokens. Who belongs to it is fixed, so that a token's bits do not depend on others. To be called once, before
        any step is made."""
        self.host = host
        self._hosted = hosted_experts(len(self._host), self.count, share)
        self._write(*np.nonzero(self._hosted))

    def addresses(self, layer: int, shared: tuple[Tensor, Tensor] | None) -> Addresses:
        """Where the experts of a layer lie, from now on. shared: the matrices of the one that all tokens pass."""
        if shared:
            self._write_shared(layer, np.concatenate((_pointers(shared), *(
                _words(tensor_map(part, rows, BOX_COLUMNS)) for part, rows in zip(shared, BOX_ROWS, strict=True)))))
        gate, down, *maps = (part[layer] for part in self._tables.parts)
        gate_maps, down_maps = (part.view(torch.uint8) for part in maps)
        return Addresses(gate[:, 0], down[:, 0], gate_maps, down_maps, self._wanted[layer], self.host, layer)

    def _parts(self, expert: Tensor) -> tuple[Tensor, Tensor]:
        """Its matrices: gate and up [2 I, H], down [H, I]."""
        both = 2 * self.size * self.hidden
        return expert[:both].view(-1, self.hidden), expert[both:].view(self.hidden, -1)

    def _entries(self, parts: Sequence[Tensor]) -> NDArray[np.int64]:
        """[n, 2 + 2 * 16]: both pointers, then both maps."""
        experts = [self._parts(expert.view(torch.bfloat16)) for expert in parts[0]]
        gate, down = (_words(b"".join(tensor_map(own[index], rows, BOX_COLUMNS) for own in experts)).reshape(-1, 16)
                      for index, rows in enumerate(BOX_ROWS))
        return np.concatenate((np.stack([_pointers(own) for own in experts]), gate, down), 1)


def hosted_experts(layers: int, count: int, share: float) -> NDArray[np.bool_]:
    """Which experts are the host's to compute where they are not on the card: [layers, count], spread evenly."""
    numbers = np.arange(layers * count, dtype=np.int64).reshape(layers, count)
    return (numbers * _SPREADS >> 24 & 0xff) < round(share * 256)


def _pointers(parts: tuple[Tensor, Tensor]) -> NDArray[np.int64]:
    return np.array([part.data_ptr() for part in parts], np.int64)


def _words(maps: bytes) -> NDArray[np.int64]:
    return np.frombuffer(maps, np.int64)
