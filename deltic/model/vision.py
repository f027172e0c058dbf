"""The vision tower of Qwen3.5 (transformers' Qwen3_5VisionModel): from patches to rows that stand for tokens."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deltic.config.vision import VisionConfig
from deltic.ops import Ops
from deltic.ops.records import Block

_EPS = 1e-6
SLICE = 2048
"""Rows of patches that are worked on at once: bounds the memory of a large picture, and how long others wait for it."""


@dataclass(frozen=True, slots=True)
class Affine:
    """weight [out, in], or [width] of a norm; bias [out] float32."""

    weight: Block
    bias: Tensor


@dataclass(frozen=True, slots=True)
class VisionBlock:
    """One block: attention within a frame, then a feed-forward, each behind a layer norm and added to what came in."""

    norm1: Affine
    qkv: Affine
    proj: Affine
    norm2: Affine
    fc1: Affine
    fc2: Affine


@dataclass(frozen=True, slots=True)
class Tower:
    """A vision tower, ready to run.

    positions [side * side, hidden_size] float32: the learned table.
    merger: norm, and the two layers that make one row of a token's patches.
    dtype: of the activations.
    """

    config: VisionConfig
    ops: Ops
    patch: Affine
    positions: Tensor
    blocks: tuple[VisionBlock, ...]
    merger: tuple[Affine, Affine, Affine]
    dtype: torch.dtype

    @torch.inference_mode()
    def encode(self, patches: Tensor, grids: Sequence[tuple[int, int]]) -> Generator[None, None, Tensor]:
        """Rows [N / merge_size ** 2, out_hidden_size] float32 of pictures one after another, whatever is beside each.

        patches [N, patch_values] float32, of grids of so many rows and columns. Yields after each slice of the work.
        """
        sizes = [rows * columns for rows, columns in grids]
        x = torch.cat([self._linear(part, self.patch) for part in patches.split(SLICE)]).to(self.dtype)
        x += torch.cat([self._positions(grid) for grid in grids]).to(self.dtype)
        turns = torch.cat([self._turns(grid) for grid in grids])
        cos, sin = turns.cos()[:, None], turns.sin()[:, None]
        yield
        for block in self.blocks:
            yield from self._attend(x, block, cos, sin, sizes)
            for part in x.split(SLICE):
                inner = F.gelu(self._linear(self._norm(part, block.norm2), block.fc1), approximate="tanh")
                part += self._linear(inner, block.fc2).to(self.dtype)
                yield
        norm, first, second = self.merger
        normed = self._norm(x, norm).view(-1, self.config.hidden_size * self.config.merge_size ** 2)
        rows = []
        for part in normed.split(SLICE):
            rows.append(self._linear(F.gelu(self._linear(part, first)), second))
            yield
        return torch.cat(rows).float()

    def _attend(self, x: Tensor, block: VisionBlock, cos: Tensor, sin: Tensor, sizes: list[int]
                ) -> Generator[None, None, None]:
        """Add attention within each picture to x [N, hidden_size]."""
        heads, dim = self.config.num_heads, self.config.head_dim
        query, key, value = (torch.empty(len(x), heads, dim, dtype=self.dtype, device=x.device) for _ in range(3))
        for start in range(0, len(x), SLICE):
            rows = slice(start, start + SLICE)
            qkv = self._linear(self._norm(x[rows], block.norm1), block.qkv).view(-1, 3, heads, dim)
            query[rows] = _rotate(qkv[:, 0], cos[rows], sin[rows])
            key[rows] = _rotate(qkv[:, 1], cos[rows], sin[rows])
            value[rows] = qkv[:, 2]
            yield
        first = 0
        for size in sizes:
            keys, values = (each[first:first + size].transpose(0, 1)[None] for each in (key, value))
            for start in range(first, first + size, SLICE):
                rows = slice(start, min(start + SLICE, first + size))
                found = F.scaled_dot_product_attention(query[rows].transpose(0, 1)[None], keys, values)
                x[rows] += self._linear(found[0].transpose(0, 1).flatten(1), block.proj).to(self.dtype)
                yield
            first += size

    def _linear(self, x: Tensor, affine: Affine) -> Tensor:
        """float32, whatever x is."""
        return self.ops.head(x.to(self.dtype), affine.weight) + affine.bias

    def _norm(self, x: Tensor, affine: Affine) -> Tensor:
        assert isinstance(affine.weight, Tensor)
        return F.layer_norm(x.float(), (x.shape[-1],), affine.weight, affine.bias, _EPS).to(self.dtype)

    def _places(self, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Row and column [N] int64 of each patch, those of one token behind each other."""
        merge, (rows, columns) = self.config.merge_size, grid
        places = torch.arange(rows * columns, device=self.positions.device).view(
            rows // merge, merge, columns // merge, merge).transpose(1, 2).flatten()
        return places // columns, places % columns

    def _positions(self, grid: tuple[int, int]) -> Tensor:
        """[N, hidden_size] float32: the table, between its entries in proportion; its corners are the picture's."""
        side = self.config.grid_side
        parts = []
        for places, size in zip(self._places(grid), grid, strict=True):
            exact = places.float() * (side - 1) / max(size - 1, 1)
            below = exact.floor()
            parts.append((below.long(), (below.long() + 1).clamp(max=side - 1), (exact - below)[:, None]))
        (top, bottom, down), (left, right, along) = parts
        table = self.positions
        upper = table[top * side + left] * (1 - along) + table[top * side + right] * along
        lower = table[bottom * side + left] * (1 - along) + table[bottom * side + right] * along
        return upper * (1 - down) + lower * down

    def _turns(self, grid: tuple[int, int]) -> Tensor:
        """[N, head_dim] float32 radians: a quarter by rows, a quarter by columns, and both again."""
        half = self.config.head_dim // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32, device=self.positions.device) / half
        frequencies = 1.0 / self.config.rope_theta ** exponents
        rows, columns = (places.float()[:, None] * frequencies for places in self._places(grid))
        return torch.cat([rows, columns, rows, columns], -1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [N, heads, dim] by angles [N, 1, dim], in float32."""
    left, right = x.float().chunk(2, -1)
    return x.float() * cos + torch.cat([-right, left], -1) * sin


def build_tower(config: VisionConfig, weights: dict[str, Block], ops: Ops, dtype: torch.dtype) -> Tower:
    """Make a tower of canonical tensors (`weights.vision`), which are taken out of `weights`."""
    def vector(name: str) -> Tensor:
        tensor = weights.pop(name)
        assert isinstance(tensor, Tensor)
        return tensor.float()

    def linear(name: str) -> Affine:
        weight = weights.pop(f"{name}.weight")
        packed = ops.pack(weight.flatten(1), False) if isinstance(weight, Tensor) else weight
        return Affine(packed, vector(f"{name}.bias"))

    def norm(name: str) -> Affine:
        return Affine(vector(f"{name}.weight"), vector(f"{name}.bias"))

    def block(name: str) -> VisionBlock:
        return VisionBlock(norm(f"{name}.norm1"), linear(f"{name}.attn.qkv"), linear(f"{name}.attn.proj"),
                           norm(f"{name}.norm2"), linear(f"{name}.mlp.linear_fc1"), linear(f"{name}.mlp.linear_fc2"))

    return Tower(config, ops, linear("visual.patch_embed.proj"), vector("visual.pos_embed.weight"),
                 tuple(block(f"visual.blocks.{index}") for index in range(config.depth)),
                 (norm("visual.merger.norm"), linear("visual.merger.linear_fc1"), linear("visual.merger.linear_fc2")),
                 dtype)
