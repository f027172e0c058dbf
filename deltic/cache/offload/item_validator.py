"""Checks items of the tiers before they reach the pools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deltic.cache.offload.types import StoredItem, Tensors
from deltic.errors import show
from deltic.ops.kv import PACKED, is_finite

if TYPE_CHECKING:
    from deltic.cache.tensors import CachePools

_LARGEST_VOCABULARY = 1 << 22
_Form = tuple[torch.dtype, tuple[int, ...] | None]
"""Dtype and shape of a tensor; None: any shape."""


@dataclass(frozen=True, slots=True, eq=False)
class PoolItemValidator:
    """Accepts items that fit these pools: checks names, shapes, dtypes and that all numbers are finite."""

    pools: CachePools

    def most(self, item: StoredItem) -> int:
        """Returns the maximum number of bytes of an item's tensors."""
        if item.kind == "kv":
            return max(item.done - item.start, 0) * (self.pools.sizes.token_bytes + torch.int64.itemsize)
        logits = (self.pools.vocabulary or _LARGEST_VOCABULARY) * torch.float32.itemsize
        return self.pools.sizes.slot_bytes + logits

    def refuse(self, item: StoredItem, tensors: Tensors, trusted: bool = False) -> str:
        """Returns the reason why these cannot be the item's tensors; empty if they can. trusted: skip the numbers."""
        expected = self._run(item) if item.kind == "kv" else self._state(item)
        if set(tensors) != set(expected):
            return f"it has {show(sorted(tensors))} instead of {', '.join(sorted(expected))}"
        for name, (dtype, shape) in expected.items():
            found = tensors[name]
            if found.dtype != dtype or shape not in (None, tuple(found.shape)):
                return f"its {name} are {found.dtype} {show(list(found.shape))}"
            unused = name == "conv" and item.done < found.shape[1]  # some places were never written
            numbers = found.is_floating_point() or found.dtype in PACKED
            if numbers and not (trusted or unused) and not is_finite(found):
                return f"its {name} are not all finite"
        return "" if trusted else self._nonsense(tensors)

    def _run(self, item: StoredItem) -> dict[str, _Form]:
        length = max(item.done - item.start, 0)
        pools = zip(("keys", "values"), self.pools.page_tensors, strict=True)
        return {"tokens": (torch.int64, (length,)),
                **{name: (pool.dtype, (len(pool), length, *pool.shape[3:])) for name, pool in pools}}

    def _state(self, item: StoredItem) -> dict[str, _Form]:
        looks: dict[str, _Form] = {name: (pool.dtype, tuple(pool[:, 0].shape))
                                    for name, pool in self.pools.named_slots.items()}
        if item.kind == "final":
            vocabulary = self.pools.vocabulary
            looks["logits"] = torch.float32, None if vocabulary is None else (vocabulary,)
        return looks

    def _nonsense(self, tensors: Tensors) -> str:
        tokens, logits, vocabulary = tensors.get("tokens"), tensors.get("logits"), self.pools.vocabulary
        if vocabulary is None:
            return ""
        if tokens is not None and len(tokens) and int(tokens.max()) >= vocabulary:
            return "its tokens are outside of the vocabulary"
        if logits is not None and bool((logits == logits[0]).all()):
            return "its logits are all equal"
        return ""
