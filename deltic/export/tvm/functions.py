"""The functions of a compiled library, by the convention that it was compiled by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from deltic.errors import ModelError
from deltic.export.tvm.device import Device
from deltic.export.tvm.metadata import Convention

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Functions:
    """convention: deltic: embeddings are [n, hidden], and a prefill takes the position of the token whose logits are
    wanted; mlc: embeddings are [1, n, hidden], and `batch_prefill` alone takes that position.

    find: gives a function of the library by its name, None if it has none of it.
    """

    device: Device
    convention: Convention
    find: Callable[[str], Any]

    def paged_cache(self) -> Any:
        """The function that makes the K/V cache."""
        return self._first("create_tir_paged_kv_cache", "create_paged_kv_cache")

    def logits(self, tokens: Sequence[int], caches: Sequence[Any], parameters: Any) -> NDArray[np.float32]:
        """The logits [1, width] of the last of these tokens, which are appended to the sequence that has begun."""
        count, embed = len(tokens), self._first("embed")
        embedded, last = embed(self.device.integers(tokens), parameters), self.device.integers([count - 1])
        if self.convention == "mlc":
            reshape = self.device.ffi.get_global_func("vm.builtin.reshape")
            embedded = reshape(embedded, self.device.ffi.Shape([1, *embedded.shape[-2:]]))
            batched = self.find("batch_prefill" if count > 1 else "batch_decode")
            run = batched or self._first("prefill" if count > 1 else "decode")
            positions = [last] if batched and count > 1 else []
            found = run(embedded, *positions, *caches, parameters)
        elif count == 1:
            found = self._first("decode")(embedded, *caches, parameters)
        else:
            found = self._first("prefill")(embedded, last, *caches, parameters)
        rows = self.device.numpy(found[0])
        return rows.reshape(1, rows.shape[-1])

    def _first(self, *names: str) -> Any:
        found = next(filter(None, map(self.find, names)), None)
        if found is None:
            raise ModelError(f"the library has no function {names[0]}: it is no language model that deltic or mlc-llm "
                             "compiled")
        return found
