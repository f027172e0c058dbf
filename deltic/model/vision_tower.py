"""The vision tower of Qwen3.5 (transformers' Qwen3_5VisionModel): computes embeddings of image tokens from patches."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deltic.config.vision import VisionConfig
from deltic.ops import Ops
from deltic.ops.encoder import Affine, EncoderLayer, LayerNorm, Scene, VisionWeights
from deltic.ops.types import Block

_EPS = 1e-6
_SLICE, _GPU_SLICE = 2048, 1 << 16
"""Number of patches computed at a time: on the CPU, on a GPU."""


@dataclass(frozen=True, slots=True)
class VisionTower:
    """A vision tower, ready to run.

    positions [side * side, hidden_size] float32: the learned table.
    merger: a norm, and the two layers that merge a token's patches into one embedding.
    dtype: dtype of the activations.
    """

    config: VisionConfig
    ops: Ops
    patch: Affine
    positions: Tensor
    blocks: VisionWeights
    merger: tuple[LayerNorm, Affine, Affine]
    dtype: torch.dtype

    @torch.inference_mode()
    def encode(self, patches: Tensor, grids: Sequence[tuple[int, int]]) -> Generator[None, None, Tensor]:
        """Returns embeddings [N / merge_size ** 2, out_hidden_size] float32 of images. Images do not depend on each
        other.

        patches [N, patch_values] float32. grids: (rows, columns) of each image. Yields after each slice of the work.
        """
        sizes, first = tuple(rows * columns for rows, columns in grids), 0
        most, known, places = _GPU_SLICE if patches.is_cuda else _SLICE, None, Tensor()
        x = patches.new_empty(len(patches), self.config.hidden_size,
                              dtype=self.dtype if patches.is_cuda else torch.float32)
        for size, grid in zip(sizes, grids, strict=True):
            for start in range(0, size, most):
                part = slice(start, min(start + most, size))
                rows = slice(first + part.start, first + part.stop)
                if known != (grid, part):
                    known, places = (grid, part), (self._positions(grid, part) + self.patch.bias).to(x.dtype)
                self._add_product(patches[rows], places, x[rows])
                yield
            first += size
        del patches
        turned = {grid: self._turns(grid) for grid in set(grids)}
        turns = torch.cat([turned[grid] for grid in grids])
        yield from self.ops.vision(x, self.blocks, Scene(sizes, turns.cos(), turns.sin(), self.dtype))
        norm, up, down = self.merger
        merged, embeddings = self.config.merge_size ** 2, []
        for some in x.split(most // merged * merged):
            normed = self._norm(some, norm).view(-1, self.config.hidden_size * merged)
            embeddings.append(self._linear(F.gelu(self._linear(normed, up)), down))
            yield
        return torch.cat(embeddings).float()

    def _add_product(self, patches: Tensor, places: Tensor, x: Tensor) -> None:
        """Writes the patch embedding plus `places` to x."""
        weight = self.patch.weight
        if x.is_cuda and isinstance(weight, Tensor):
            torch.addmm(places, patches.to(x.dtype), weight.t(), out=x)
        else:
            torch.add(self.ops.head(patches.to(self.dtype), weight), places, out=x)

    def _linear(self, x: Tensor, affine: Affine) -> Tensor:
        """Computes a linear layer. Returns float32; on a GPU the tower's dtype."""
        if affine.bias.is_cuda and isinstance(affine.weight, Tensor):
            return F.linear(x.to(self.dtype), affine.weight, affine.bias)
        return self.ops.head(x.to(self.dtype), affine.weight) + affine.bias

    def _norm(self, x: Tensor, norm: LayerNorm) -> Tensor:
        """Computes a layer norm. Returns the tower's dtype."""
        return F.layer_norm(x.float(), norm.scale.shape, norm.scale, norm.shift, _EPS).to(self.dtype)

    def _places(self, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Returns rows [N] and columns [N] int64 of the patches. The patches of a token are consecutive."""
        merge, (rows, columns) = self.config.merge_size, grid
        places = torch.arange(rows * columns, device=self.positions.device).view(
            rows // merge, merge, columns // merge, merge).transpose(1, 2).flatten()
        return places // columns, places % columns

    def _positions(self, grid: tuple[int, int], part: slice) -> Tensor:
        """Interpolates the position table for the patches `part`: [n, hidden_size] float32. The corners of table and
        image coincide."""
        side = self.config.grid_side
        parts = []
        for places, size in zip(self._places(grid), grid, strict=True):
            exact = places[part].float() * (side - 1) / max(size - 1, 1)
            below = exact.floor()
            parts.append((below.long(), (below.long() + 1).clamp(max=side - 1), (exact - below)[:, None]))
        (top, bottom, down), (left, right, along) = parts
        table = self.positions
        upper = table[top * side + left] * (1 - along) + table[top * side + right] * along
        lower = table[bottom * side + left] * (1 - along) + table[bottom * side + right] * along
        return upper * (1 - down) + lower * down

    def _turns(self, grid: tuple[int, int]) -> Tensor:
        """Returns rotary angles in radians [N, head_dim / 2] float32: one half by rows, the other by columns."""
        half = self.config.head_dim // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32, device=self.positions.device) / half
        frequencies = 1.0 / self.config.rope_theta ** exponents
        rows, columns = (places.float()[:, None] * frequencies for places in self._places(grid))
        return torch.cat([rows, columns], -1)


def build_tower(config: VisionConfig, weights: dict[str, Block], ops: Ops, dtype: torch.dtype) -> VisionTower:
    """Builds a tower from canonical tensors (loader/vision), which it pops from `weights`."""
    def vector(name: str) -> Tensor:
        tensor = weights.pop(name)
        assert isinstance(tensor, Tensor)
        return tensor.float()

    def linear(name: str) -> Affine:
        weight = weights.pop(f"{name}.weight")
        packed = ops.pack(weight.flatten(1), False) if isinstance(weight, Tensor) else weight
        bias = vector(f"{name}.bias")
        return Affine(packed, bias.to(dtype) if bias.is_cuda else bias)

    def norm(name: str) -> LayerNorm:
        return LayerNorm(vector(f"{name}.weight"), vector(f"{name}.bias"))

    def block(name: str) -> EncoderLayer:
        return EncoderLayer(linear(f"{name}.attn.qkv"), linear(f"{name}.attn.proj"), norm(f"{name}.norm1"),
                            linear(f"{name}.mlp.linear_fc1"), linear(f"{name}.mlp.linear_fc2"), norm(f"{name}.norm2"))

    blocks = VisionWeights(tuple(block(f"visual.blocks.{index}") for index in range(config.depth)), config.num_heads,
                           _EPS)
    return VisionTower(config, ops, linear("visual.patch_embed.proj"), vector("visual.pos_embed.weight"), blocks,
                 (norm("visual.merger.norm"), linear("visual.merger.linear_fc1"), linear("visual.merger.linear_fc2")),
                 dtype)
