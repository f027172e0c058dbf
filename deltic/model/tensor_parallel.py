"""Tensor parallel: splits a model over N devices.

Attention is split by query heads, with their K/V heads (if there are fewer K/V heads than devices, several devices have
the same one); Gated DeltaNet by key heads, with their value heads; a feed-forward by its inner columns, at slice ends
(`ops.slices`); experts by their numbers; the matrix of logits by tokens. Norms, routers and the embedding are whole on
every device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch

from deltic.config import ModelConfig
from deltic.errors import ConfigError
from deltic.ops.parts import WHOLE, Part, Shape, Split
from deltic.ops.quantized import PANEL
from deltic.ops.slices import PLAIN_UNIT, slice_ends, slice_unit

DEGREES: Final = (1, 2, 4, 8)
"""Supported numbers of devices. The slices of a device are a subtree of the sum."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` devices. config: the config of the whole model. tiled: as in `GdnSpec`."""

    config: ModelConfig
    index: int = 0
    count: int = 1
    tiled: bool = False

    def share(self, total: int) -> slice:
        """Returns the device's part of `total` units, which divide evenly."""
        size = total // self.count
        return slice(self.index * size, (self.index + 1) * size)

    def inner(self, columns: int, unit: int) -> slice:
        """Returns the device's part of columns that are split at slice ends."""
        ends = [0, *slice_ends(columns, unit, self.count)]
        return slice(ends[self.index], ends[self.index + 1])

    @property
    def heads(self) -> slice:
        return self.share(self.config.num_attention_heads)

    @property
    def kv_heads(self) -> slice:
        """The device's K/V heads. If there are fewer K/V heads than devices, several devices have the same head."""
        total = self.config.num_key_value_heads
        if total % self.count == 0:
            return self.share(total)
        first = self.index * total // self.count
        return slice(first, first + 1)

    @property
    def experts(self) -> slice:
        assert self.config.experts is not None
        return self.inner(self.config.experts.count, 1)

    @property
    def tokens(self) -> slice:
        """The device's rows of the matrix of logits."""
        return self.inner(self.config.vocab_size, PANEL)

    @property
    def value_heads(self) -> list[slice]:
        """The device's value heads, which belong to its key heads."""
        linear = self.config.linear
        assert linear is not None
        if not self.tiled:
            return [self.share(linear.num_value_heads)]
        keys, total = self.share(linear.num_key_heads), linear.num_key_heads
        return [slice(first + keys.start, first + keys.stop) for first in range(0, linear.num_value_heads, total)]


def check_degree(config: ModelConfig, count: int, packed: bool = False, tiled: bool = False) -> None:
    """Raises ConfigError if a model cannot be split over `count` devices. packed: matrices consist of quantized
    blocks."""
    if why := _obstacle(config, count, packed, tiled):
        possible = [str(degree) for degree in DEGREES if not _obstacle(config, degree, packed, tiled)]
        raise ConfigError(f"tp={count} is not possible with this model: {why}; use tp={' or '.join(possible)}", "tp")


def splits(config: ModelConfig, count: int, packed: bool = False) -> bool:
    """True if a model can be split over `count` devices. packed: as in `check_degree`."""
    return _obstacle(config, count, packed, False) is None


def _obstacle(config: ModelConfig, count: int, packed: bool, tiled: bool) -> str | None:
    """Returns the reason why a model cannot be split over `count` devices; None if it can."""
    if count == 1:
        return None
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    if config.attention_layers or config.num_mtp_layers:
        if heads % count or (kv_heads % count and count % kv_heads):
            return f"its {heads} query heads and {kv_heads} K/V heads do not divide over {count} devices"
        if not _even(heads * dim, count, packed):
            return f"{count} parts of its {heads * dim} query columns would not end at ends of slices"
    if config.linear_layers and (linear := config.linear) is not None:
        if linear.num_key_heads % count:
            return f"its {linear.num_key_heads} key heads of Gated DeltaNet do not divide over {count} devices"
        runs = linear.num_value_heads // linear.num_key_heads if tiled else 1
        if not _even(linear.value_dim, count, packed, runs):
            return f"{count} parts of its {linear.value_dim} value columns would not end at ends of slices"
    inner, experts = config.intermediate_size, config.experts
    if experts is None and not _divides(inner, count, packed, empty=False):
        return f"{count} parts of its {inner} inner columns would not end at ends of slices, or would be empty"
    if experts is not None and experts.count < count:
        return f"it has {experts.count} experts"
    if experts is not None and not _divides(experts.shared_size, count, packed):
        return f"{count} parts of {experts.shared_size} columns of the shared expert would not end at ends of slices"
    return None if all(_sizes(config.vocab_size, PANEL, count)) else f"its vocabulary has {config.vocab_size} tokens"


def _sizes(columns: int, unit: int, count: int) -> list[int]:
    return [end - start for start, end in pairwise([0, *slice_ends(columns, unit, count)])]


def _even(columns: int, count: int, packed: bool, runs: int = 1) -> bool:
    """True if all devices get the same number of columns. runs: as in `column_slices`."""
    width, units = columns // runs, _units(columns, packed)
    even = all(len({*_sizes(width, unit, count)}) == 1 and (runs == 1 or width % unit == 0) for unit in units)
    return even and _divides(columns, count, packed, runs)


def _divides(columns: int, count: int, packed: bool, runs: int = 1, empty: bool = True) -> bool:
    """True if every device slices its columns in the units of a single device. empty: a device may have no columns."""
    for unit in _units(columns, packed):
        sizes = [runs * size for size in _sizes(columns // runs, unit, count)]
        if not (empty or all(sizes)) or any(size and unit not in _units(size, packed) for size in sizes):
            return False
    return True


def _units(columns: int, packed: bool) -> set[int]:
    """Returns the possible slice units of matrices with this number of columns. Packed models have plain ones, too."""
    return {PLAIN_UNIT, slice_unit("Q8_0", columns)} if packed else {PLAIN_UNIT}


class WeightSplitter:
    """Computes the part of each canonical tensor (`loader.names`) that each device has.

    units: by name of each `down` that is not plain, the number of columns that divides its slices.
    copies: True if every device has a copy of embedding and top of a draft head, not only the first one.
    """

    def __init__(self, config: ModelConfig, count: int = 1, tiled: bool = False, units: Mapping[str, int] | None = None,
                 copies: bool = False) -> None:
        self.shards = [Shard(config, index, count, tiled) for index in range(count)]
        self._units, self._copies = units or {}, copies

    def over(self, devices: Sequence[str]) -> Split:
        """Returns the split of the model over these devices."""
        return Split(tuple(map(torch.device, devices)), self.parts)

    def parts(self, name: str, shape: Shape) -> list[Part | None]:
        """Returns each device's part; None if a device has no columns of a shared expert, or if only the first device
        has the tensor."""
        if len(self.shards) == 1:
            return [WHOLE]
        if ".layers." not in name and name not in ("model.norm.weight", "lm_head.weight") and not self._copies:
            return [WHOLE, *[None] * (len(self.shards) - 1)]
        return [self._part(shard, name, shape) for shard in self.shards]

    def _part(self, shard: Shard, name: str, shape: Shape) -> Part | None:
        if ".experts." in name:
            return Part((shard.experts,))
        if name == "lm_head.weight":
            return Part((shard.tokens,))
        unit = self._units.get(re.sub(r"\.(gate|up)_proj\.weight$", ".down_proj.weight", name), PLAIN_UNIT)
        rows, columns = _rows(shard, name, shape[0], unit), _columns(shard, name, shape[-1], unit)
        if not rows and not columns:
            return WHOLE
        part = Part(tuple(rows or columns), bool(columns))
        return part if part.size else None


def _rows(shard: Shard, name: str, rows: int, unit: int) -> list[slice]:
    """Returns a device's rows of a tensor that is split by rows. unit: slice unit of the feed-forward's `down`."""
    config, linear = shard.config, shard.config.linear
    match re.sub(r"\.(weight|bias)$", "", name).rpartition(".")[2]:
        case "q_proj":
            return _scaled([shard.heads], config.head_dim * (2 if config.attention_output_gate else 1))
        case "k_proj" | "v_proj":
            return _scaled([shard.kv_heads], config.head_dim)
        case "in_proj_qkv" | "conv1d":
            assert linear
            keys = shard.share(linear.key_dim)
            return [keys, *_moved([keys], linear.key_dim),
                    *_moved(_scaled(shard.value_heads, linear.value_head_dim), 2 * linear.key_dim)]
        case "in_proj_z":
            assert linear
            return _scaled(shard.value_heads, linear.value_head_dim)
        case "in_proj_b" | "in_proj_a" | "A_log" | "dt_bias":
            return shard.value_heads
        case "gate_proj" | "up_proj":
            return [shard.inner(rows, unit)]
    return []


def _columns(shard: Shard, name: str, columns: int, unit: int) -> list[slice]:
    """Returns a device's columns of a matrix that is split by columns."""
    match name.rpartition(".weight")[0].rpartition(".")[2]:
        case "o_proj":
            return _scaled([shard.heads], shard.config.head_dim)
        case "out_proj":
            assert shard.config.linear
            return _scaled(shard.value_heads, shard.config.linear.value_head_dim)
        case "down_proj":
            return [shard.inner(columns, unit)]
    return []


def _scaled(ranges: Sequence[slice], size: int) -> list[slice]:
    return [slice(part.start * size, part.stop * size) for part in ranges]


def _moved(ranges: Sequence[slice], by: int) -> list[slice]:
    return [slice(part.start + by, part.stop + by) for part in ranges]
