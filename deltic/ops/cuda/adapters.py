"""Adapters (LoRA) in decode steps of few tokens: the table of their terms, and the kernels that compute the terms."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from deltic.ops.adapters import Adapter, AdapterLayer, LowRank, LowRanks
from deltic.ops.cuda import arguments as args
from deltic.ops.cuda.driver import Module, entry, headers, load_module
from deltic.ops.cuda.kernel_config import ADD, Shapes
from deltic.ops.cuda.staging import on_device

log = logging.getLogger("deltic")

SERVED: Final = ("mix_in", "mix_out", "gate_up", "down")
"""The products of a layer that may have terms, in the table's order. The product of the logits follows all layers."""
HEAD: Final = "head"
ENTRIES: Final = 64
"""Number of adapters in the table."""
MAX_TERMS: Final = 4
"""Largest number of terms per product, as in kernels/lora.cuh."""
_TERM_WORDS: Final = 4
"""int64 words per term."""
_RANK_UNIT: Final = 8
"""Ranks are padded with zeros to a multiple of this number."""
_MAX_RANK: Final = 512
_ROOM: Final = MAX_TERMS * _MAX_RANK
"""Largest number of a token's sums between `shrink` and `expand`."""
SHRINK_THREADS, EXPAND_THREADS = 256, 512


def source(shapes: Shapes) -> str:
    """Returns the CUDA source of the kernels for adapters, and of the products that add the terms."""
    products = [product for product in shapes.products if not product.head and (product.norm or product.out == ADD)]
    own = replace(shapes, products=tuple([replace(product, terms=True) for product in products]))
    files = ["input", "product", "sliced", "product_many", "small", *["packed"] * bool(shapes.kinds), "lora"]
    return "".join([
        headers(*files),
        *own.product_sources(),
        entry("shrink_norm", "Shrink", f"{SHRINK_THREADS}, 4", "shrink<true>"),
        entry("shrink_plain", "Shrink", f"{SHRINK_THREADS}, 4", "shrink<false>"),
        entry("expand", "Expand", f"{EXPAND_THREADS}, 4", "expand"),
    ])


def term_words(a: int, b: int, first: int, rows: int, rank: int, offset: int) -> tuple[int, ...]:
    """Returns a `Term` of kernels/lora.cuh as int64 words. a, b: addresses of the factors."""
    return a, b, first | rows << 32, rank | offset << 32


@dataclass(frozen=True, slots=True, eq=False)
class _TableEntry:
    """An adapter in the format of the table.

    words [products, MAX_TERMS, words per term] int64 on the host; None: the kernels do not serve the adapter.
    factors: the tensors that the words point to.
    key: identifies the adapter in the table. The table does not keep the adapter alive.
    """

    words: Tensor | None = None
    factors: Sequence[tuple[Tensor, Tensor]] = ()
    key: object = field(default_factory=object)


class AdapterTable:
    """The terms of recently used adapters, at a fixed address that CUDA graphs read."""

    def __init__(self, layers: int, device: torch.device) -> None:
        self._layers, self._device = layers, device
        shape = (ENTRIES, layers * len(SERVED) + 1, MAX_TERMS, _TERM_WORDS)
        with torch.inference_mode(False):  # written by steps inside and outside of inference mode
            self.terms = torch.zeros(shape, dtype=torch.int64, device=device)
        self._keys = [object() for _ in range(ENTRIES)]
        self._used, self._turn = [0] * ENTRIES, 0

    @property
    def stride(self) -> int:
        """Number of terms per entry."""
        return self.terms.shape[1] * MAX_TERMS

    def product(self, layer: int, name: str) -> Tensor:
        """Returns the first entry's terms of a product; those of the other entries follow at multiples of `stride`."""
        place = self._layers * len(SERVED) if name == HEAD else layer * len(SERVED) + SERVED.index(name)
        return self.terms[0, place]

    def entries_of(self, adapters: Sequence[Adapter]) -> list[int | None]:
        """Returns the table entries of a step's adapters. New adapters overwrite the least recently used ones, in the
        order of the device's stream. None for an adapter that the kernels do not serve, or that finds no free entry.
        """
        own = [self._entry_of(adapter) for adapter in adapters]
        self._turn += 1
        for each in own:
            if each.key in self._keys:
                self._used[self._keys.index(each.key)] = self._turn
        return [None if each.words is None else self._place(each.key, each.words) for each in own]

    def _place(self, key: object, words: Tensor) -> int | None:
        if key in self._keys:
            return self._keys.index(key)
        place = self._used.index(min(self._used))
        if self._used[place] == self._turn:
            return None
        self._keys[place], self._used[place] = key, self._turn
        self.terms[place] = on_device(words, self._device)
        return place

    def _entry_of(self, adapter: Adapter) -> _TableEntry:
        found = adapter.kept.get(self)
        if found is None:
            found = adapter.kept[self] = self._new_entry(adapter)
        assert isinstance(found, _TableEntry)
        return found

    def _new_entry(self, adapter: Adapter) -> _TableEntry:
        products = [*_products(adapter.layers), adapter.head]
        if not all(map(_is_served, products)) or any(map(_has_others, adapter.layers)):
            log.info("the adapter %s has terms that torch adds on the GPU", adapter.name)
            return _TableEntry()
        words = torch.zeros(self.terms.shape[1:], dtype=torch.int64)
        kept = list[tuple[Tensor, Tensor]]()
        for place, terms in enumerate(products):
            offset = 0
            for index, term in enumerate(terms):
                a, b = _factors(term)
                kept.append((a, b))
                own = term_words(a.data_ptr(), b.data_ptr(), term.first, term.rows, len(a), offset)
                words[place, index] = torch.tensor(own)
                offset += len(a)
        return _TableEntry(words, kept)


def _factors(term: LowRank) -> tuple[Tensor, Tensor]:
    """Returns a [rank, columns] and b [rows, rank], padded to a rank that the kernels serve."""
    missing = -len(term.a) % _RANK_UNIT
    if not missing:
        return term.a, term.b.contiguous()
    return F.pad(term.a, (0, 0, 0, missing)), F.pad(term.b, (0, missing))


def _products(layers: Iterable[AdapterLayer]) -> Iterator[LowRanks]:
    for layer in layers:
        for name in SERVED:
            yield layer.products.get(name, ())


def _is_served(terms: LowRanks) -> bool:
    return len(terms) <= MAX_TERMS and all(
        term.a.dtype == torch.bfloat16 and len(term.a) <= _MAX_RANK for term in terms)


def _has_others(layer: AdapterLayer) -> bool:
    return bool(layer.experts) or any(terms for name, terms in layer.products.items() if name not in SERVED)


@dataclass(frozen=True, slots=True)
class ProductTerms:
    """The terms that adapters add to a product.

    module: contains the kernels of the products that add terms.
    terms [T, rows] float32: undefined for tokens with a negative entry.
    entries [T] int64: as in `Batch.adapter_entries`.
    """

    module: Module
    terms: Tensor
    entries: Tensor

    def arguments(self, part: slice) -> dict[str, Any]:
        """Returns the kernel arguments of a product with these tokens."""
        return {"terms": self.terms[part], "entries": self.entries[part]}


class AdapterKernels:
    """The kernels for the adapters of one model. blocks: number of blocks of a kernel."""

    def __init__(self, shapes: Shapes, layers: int, blocks: int, device: torch.device) -> None:
        self._module, self._blocks = load_module(source(shapes), device), blocks
        self.table = AdapterTable(layers, device)

    def begin(self, entries: Tensor, eps: float) -> StepAdapters:
        """Begins a step. entries [T] int64: the tokens' table entries, or -1. eps: epsilon of the model's norms."""
        return StepAdapters(self._module, self.table, self._blocks, entries, eps)


class StepAdapters:
    """Computes the terms that adapters add to the products of one step of few tokens."""

    def __init__(self, module: Module, table: AdapterTable, blocks: int, entries: Tensor, eps: float) -> None:
        self._module, self._table, self._blocks = module, table, blocks
        self._entries, self._eps = entries, eps
        self._sums = torch.empty(len(entries), _ROOM, device=entries.device)

    def of(self, layer: int, name: str, x: Tensor, rows: int, columns: int, norm: Tensor | None = None) -> ProductTerms:
        """Launches the kernels for a product with `rows` rows. x: the inputs of all tokens, one after another, with
        `columns` columns each; float32 if a norm with scale `norm` is applied first, else bfloat16."""
        table, tokens, entries = self._table.product(layer, name), len(self._entries), self._entries
        terms = torch.empty(tokens, rows, device=entries.device)
        self._module.launch(f"k_shrink_{'plain' if norm is None else 'norm'}", (self._blocks,), SHRINK_THREADS,
                            args.ShrinkArgs(x=x, scale=norm, table=table, entries=entries, sums=self._sums,
                                            eps=self._eps, tokens=tokens, columns=columns, stride=self._table.stride,
                                            room=_ROOM))
        self._module.launch("k_expand", (self._blocks,), EXPAND_THREADS, args.ExpandArgs(
            table=table, entries=entries, sums=self._sums, terms=terms, tokens=tokens, rows=rows,
            stride=self._table.stride, room=_ROOM))
        return ProductTerms(self._module, terms, entries)


def terms_of(adapters: StepAdapters | None, layer: int, name: str, x: Tensor, rows: int, columns: int,
             norm: Tensor | None = None) -> ProductTerms | None:
    """Returns the terms as `StepAdapters.of`; None without adapters."""
    return adapters.of(layer, name, x, rows, columns, norm) if adapters else None
