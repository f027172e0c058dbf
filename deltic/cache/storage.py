"""The tensors behind the ledgers: K/V pages of the attention layers, state slots of the recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deltic.config import ModelConfig
from deltic.ops.memory import reserve
from deltic.ops.records import PAGE, KvView, StateView

STATE_LAYOUT = 1
"""Grows when the meaning of what lies in pages or slots changes, so that older files are not taken for new ones."""


def page_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one page: K and V of PAGE tokens in every attention layer."""
    return 2 * len(config.attention_layers) * PAGE * config.num_key_value_heads * config.head_dim * dtype.itemsize


def slot_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one slot: recurrent state (float32) and convolution ring in every recurrent layer."""
    linear = config.linear
    if linear is None:
        return 0
    state = linear.num_value_heads * linear.key_head_dim * linear.value_head_dim * 4
    return len(config.linear_layers) * (state + linear.conv_kernel * config.conv_dim * dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Storage:
    """keys, values [A, pages, PAGE, kv_heads, head_dim]; recurrent [G, slots, Hv, Dk, Dv] float32;
    conv [G, slots, conv_kernel, C], for A attention and G recurrent layers.

    Memory is not initialised: a slot is read only after a write (rows with done = 0 start from zero), a K/V entry
    only below its sequence's cursor. Pages that are never used are never touched, so they cost no real memory.
    """

    keys: Tensor
    values: Tensor
    recurrent: Tensor
    conv: Tensor

    @property
    def page_tensors(self) -> tuple[Tensor, ...]:
        return self.keys, self.values

    @property
    def slot_tensors(self) -> tuple[Tensor, ...]:
        return self.recurrent, self.conv

    @property
    def slot_tokens(self) -> float:
        """What a slot costs, in tokens of K/V."""
        slot = sum(t[:, :1].numel() * t.itemsize for t in self.slot_tensors)
        page = sum(t[:, :1].numel() * t.itemsize for t in self.page_tensors)
        return PAGE * slot / max(page, 1)

    @property
    def device(self) -> torch.device:
        return self.keys.device

    def kv_views(self) -> tuple[KvView, ...]:
        return tuple(KvView(keys, values) for keys, values in zip(self.keys, self.values, strict=True))

    def state_views(self) -> tuple[StateView, ...]:
        return tuple(StateView(state, conv) for state, conv in zip(self.recurrent, self.conv, strict=True))


def allocate(config: ModelConfig, pages: int, slots: int, dtype: torch.dtype, device: str = "cpu") -> Storage:
    """Reserve address space for the pools."""
    attention, recurrent = len(config.attention_layers), len(config.linear_layers)
    kv = (attention, pages, PAGE, config.num_key_value_heads, config.head_dim)
    linear = config.linear
    heads = (linear.num_value_heads, linear.key_head_dim, linear.value_head_dim) if linear else (1, 1, 1)
    conv = (linear.conv_kernel, config.conv_dim) if linear else (1, 1)
    return Storage(
        keys=reserve(kv, dtype, device),
        values=reserve(kv, dtype, device),
        recurrent=reserve((recurrent, slots, *heads), torch.float32, device),
        conv=reserve((recurrent, slots, *conv), dtype, device),
    )
