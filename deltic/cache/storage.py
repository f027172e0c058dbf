"""The tensors behind the ledgers: K/V pages of the attention layers, state slots and replay rings of the recurrent
layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deltic.config import ModelConfig
from deltic.ops.memory import memory_for, reserve
from deltic.ops.records import PAGE, RING, KvView, RingView, StateView

STATE_LAYOUT = 1
"""Grows when the meaning of what lies in pages or slots changes, so that older files are not taken for new ones."""


@dataclass(frozen=True, slots=True)
class Extras:
    """What speculation needs beside the plain cache. rings: sequences that may have a replay ring at the same time.
    head: the model's draft head runs, which has K/V of its own and reads the last hidden state. tiled: as in
    `GdnSpec`."""

    rings: int = 0
    head: bool = False
    tiled: bool = False


PLAIN = Extras()


def page_bytes(config: ModelConfig, dtype: torch.dtype, head: bool = False) -> int:
    """Bytes of one page: K and V of PAGE tokens in every attention layer, the draft head's among them."""
    layers = len(config.attention_layers) + head
    return 2 * layers * PAGE * config.num_key_value_heads * config.head_dim * dtype.itemsize


def slot_bytes(config: ModelConfig, dtype: torch.dtype, head: bool = False) -> int:
    """Bytes of one slot: recurrent state (float32) and convolution ring in every recurrent layer; for a draft head
    the last hidden state (float32)."""
    linear, hidden = config.linear, 4 * config.hidden_size * head
    if linear is None:
        return hidden
    state = linear.num_value_heads * linear.key_head_dim * linear.value_head_dim * 4
    return hidden + len(config.linear_layers) * (state + linear.conv_kernel * config.conv_dim * dtype.itemsize)


def ring_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one sequence's replay ring: inputs of the convolution, keys, updates and decays (float32)."""
    linear = config.linear
    if linear is None:
        return 0
    keys, values = linear.num_key_heads * linear.key_head_dim, linear.num_value_heads * linear.value_head_dim
    entry = config.conv_dim * dtype.itemsize + 4 * (keys + values + linear.num_value_heads)
    return len(config.linear_layers) * RING * entry


@dataclass(frozen=True, slots=True)
class Storage:
    """keys, values [A, pages, PAGE, kv_heads, head_dim]; recurrent [G, slots, Hv, Dk, Dv] float32;
    conv [G, slots, conv_kernel, C], for A attention layers (the draft head's last) and G recurrent layers.
    hidden [1, slots, H] float32: the hidden state of a slot's last token after the final norm; None without a draft
    head. rings: inputs, keys, updates, decays of `RingView`, each with a leading dimension G; None without rings.
    tiled: as in `GdnSpec`. vocabulary: of the logits that are kept with states; None: anything is.

    Memory is not initialised: a slot is read only after a write (rows with done = 0 start from zero), a K/V entry
    only below its sequence's cursor. Pages that are never used are never touched, so they cost no real memory.
    """

    keys: Tensor
    values: Tensor
    recurrent: Tensor
    conv: Tensor
    hidden: Tensor | None = None
    rings: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    tiled: bool = False
    vocabulary: int | None = None

    @property
    def page_tensors(self) -> tuple[Tensor, ...]:
        return self.keys, self.values

    @property
    def named_slots(self) -> dict[str, Tensor]:
        """What a slot consists of, [layers, slots, ...] each."""
        named = {"recurrent": self.recurrent, "conv": self.conv}
        return named if self.hidden is None else {**named, "hidden": self.hidden}

    @property
    def slot_tensors(self) -> tuple[Tensor, ...]:
        return tuple(self.named_slots.values())

    @property
    def ring_units(self) -> int:
        """How many sequences may have a replay ring."""
        return self.rings[0].shape[1] if self.rings else 0

    @property
    def cost(self) -> tuple[int, int]:
        """Bytes of a token's K/V, and of a slot."""
        page = sum(t[:, :1].numel() * t.itemsize for t in self.page_tensors)
        return page // PAGE, sum(t[:, :1].numel() * t.itemsize for t in self.slot_tensors)

    @property
    def slot_tokens(self) -> float:
        """What a slot costs, in tokens of K/V."""
        token, slot = self.cost
        return PAGE * slot / max(PAGE * token, 1)

    @property
    def device(self) -> torch.device:
        return self.keys.device

    def kv_views(self) -> tuple[KvView, ...]:
        return tuple(KvView(keys, values) for keys, values in zip(self.keys, self.values, strict=True))

    def state_views(self) -> tuple[StateView, ...]:
        rings: list[RingView | None] = [None] * len(self.recurrent)
        if self.rings:
            rings = [RingView(*layer, self.tiled) for layer in zip(*self.rings, strict=True)]
        return tuple(map(StateView, self.recurrent, self.conv, rings))


def allocate(config: ModelConfig, pages: int, slots: int, dtype: torch.dtype, device: str = "cpu",
             extras: Extras = PLAIN) -> Storage:
    """Reserve address space for the pools; ConfigError naming what makes them smaller if that is refused."""
    size = (pages * page_bytes(config, dtype, extras.head) + slots * slot_bytes(config, dtype, extras.head)
            + extras.rings * ring_bytes(config, dtype))
    with memory_for(f"the cache, {size / (1 << 20):,.0f} MiB in {pages:,} pages and {slots:,} states",
                    "choose a smaller --memory, which --max-context and --max-batch must then fit", "memory"):
        return _allocate(config, pages, slots, dtype, device, extras)


def _allocate(config: ModelConfig, pages: int, slots: int, dtype: torch.dtype, device: str, extras: Extras) -> Storage:
    attention, recurrent = len(config.attention_layers) + extras.head, len(config.linear_layers)
    kv = (attention, pages, PAGE, config.num_key_value_heads, config.head_dim)
    linear = config.linear
    heads = (linear.num_value_heads, linear.key_head_dim, linear.value_head_dim) if linear else (1, 1, 1)
    conv = (linear.conv_kernel, config.conv_dim) if linear else (1, 1)
    return Storage(
        keys=reserve(kv, dtype, device),
        values=reserve(kv, dtype, device),
        recurrent=reserve((recurrent, slots, *heads), torch.float32, device),
        conv=reserve((recurrent, slots, *conv), dtype, device),
        hidden=reserve((1, slots, config.hidden_size), torch.float32, device) if extras.head else None,
        rings=_rings(config, extras.rings, dtype, device), tiled=extras.tiled,
        vocabulary=config.vocab_size,
    )


def _rings(config: ModelConfig, units: int, dtype: torch.dtype,
           device: str) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    linear = config.linear
    if linear is None or not units:
        return None
    lead = (len(config.linear_layers), units, RING)
    return (reserve((*lead, config.conv_dim), dtype, device),
            reserve((*lead, linear.num_key_heads, linear.key_head_dim), torch.float32, device),
            reserve((*lead, linear.num_value_heads, linear.value_head_dim), torch.float32, device),
            reserve((*lead, linear.num_value_heads), torch.float32, device))
