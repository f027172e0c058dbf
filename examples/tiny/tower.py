"""The tiny model's vision tower in plain torch for training; parameters have the names of Qwen3.5's checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from network import SHAPE
from torch import Tensor, nn

Grid = tuple[int, int]  # patches by height and by width


@dataclass(frozen=True)
class TowerShape:
    hidden: int = 128
    inner: int = 384
    depth: int = 5
    heads: int = 4
    side: int = 10  # of the square of learned positions
    patch: int = 16
    merge: int = 2
    frames: int = 2
    rope_theta: float = 10000.0
    eps: float = 1e-6
    pixels: tuple[int, int] = (128 * 128, 160 * 160)  # least and most that a picture is scaled to

    @property
    def unit(self) -> int:
        """Pixels a side of what becomes a token."""
        return self.patch * self.merge


TOWER = TowerShape()


def tower_config() -> dict[str, Any]:
    """`vision_config`, as transformers reads it."""
    s = TOWER
    return {
        "deepstack_visual_indexes": [], "depth": s.depth, "hidden_act": "gelu_pytorch_tanh", "hidden_size": s.hidden,
        "in_channels": 3, "initializer_range": 0.02, "intermediate_size": s.inner, "model_type": "qwen3_5",
        "num_heads": s.heads, "num_position_embeddings": s.side ** 2, "out_hidden_size": SHAPE.hidden,
        "patch_size": s.patch, "spatial_merge_size": s.merge, "temporal_patch_size": s.frames,
    }  # fmt: skip


def preprocessor_config() -> dict[str, Any]:
    """preprocessor_config.json, as transformers reads it."""
    return {
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_processor_type": "Qwen2VLImageProcessorFast",
        "merge_size": TOWER.merge, "patch_size": TOWER.patch, "temporal_patch_size": TOWER.frames,
        "size": {"shortest_edge": TOWER.pixels[0], "longest_edge": TOWER.pixels[1]},
    }  # fmt: skip


def target_size(height: int, width: int) -> tuple[int, int]:
    """Height and width that the processor scales a picture to."""
    unit, (least, most) = TOWER.unit, TOWER.pixels
    tall, wide = round(height / unit) * unit, round(width / unit) * unit
    if tall * wide > most:
        scale = math.sqrt(height * width / most)
        tall = max(unit, math.floor(height / scale / unit) * unit)
        wide = max(unit, math.floor(width / scale / unit) * unit)
    elif tall * wide < least:
        scale = math.sqrt(least / (height * width))
        tall, wide = math.ceil(height * scale / unit) * unit, math.ceil(width * scale / unit) * unit
    return tall, wide


def patches_of(pixels: Tensor) -> Tensor:
    """[n, patches, 3 * patch * patch] of pixels [n, 3, height, width] from -1 to 1: those of a token behind each
    other."""
    n, _, height, width = pixels.shape
    side, merge = TOWER.patch, TOWER.merge
    parts = pixels.view(n, 3, height // side // merge, merge, side, width // side // merge, merge, side)
    return parts.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(n, -1, 3 * side * side)


@cache
def _places(grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column of each patch, those of a token behind each other."""
    rows, columns = grid
    merge = TOWER.merge
    places = torch.arange(rows * columns, device=device).view(rows // merge, merge, columns // merge, merge)
    places = places.transpose(1, 2).flatten()
    return places // columns, places % columns


@cache
def _corners(grid: Grid, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Entries of the table of positions, and their weights [patches, 1], that make each patch's."""
    ends = []
    for places, size in zip(_places(grid, device), grid, strict=True):
        exact = places.float() * (TOWER.side - 1) / max(size - 1, 1)
        below = exact.floor().long()
        ends.append([(below, 1 - (exact - below)), ((below + 1).clamp(max=TOWER.side - 1), exact - below)])
    return [(row * TOWER.side + column, (down * along).unsqueeze(-1)) for row, down in ends[0] for column, along in
            ends[1]]


@cache
def _turns(grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [patches, head_dim / 2]."""
    half = TOWER.hidden // TOWER.heads // 2
    frequencies = TOWER.rope_theta ** -(torch.arange(0, half, 2, device=device) / half)
    angles = torch.cat([places.float().unsqueeze(-1) * frequencies for places in _places(grid, device)], -1)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """[n, heads, patches, head_dim] turned."""
    cos, sin = turns
    left, right = x.float().chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(TOWER.hidden, 3 * TOWER.hidden), nn.Linear(TOWER.hidden, TOWER.hidden)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, TOWER.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(_rotate(query, turns), _rotate(key, turns), value)
        return self.proj(out.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(TOWER.hidden, TOWER.inner), nn.Linear(TOWER.inner, TOWER.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(TOWER.hidden, TOWER.eps) for _ in range(2))
        self.attn, self.mlp = SelfAttention(), FeedForward()

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attn(self.norm1(x), turns)
        return x + self.mlp(self.norm2(x))


class Merger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        merged = TOWER.hidden * TOWER.merge ** 2
        self.norm = nn.LayerNorm(TOWER.hidden, TOWER.eps)
        self.linear_fc1, self.linear_fc2 = nn.Linear(merged, merged), nn.Linear(merged, SHAPE.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x).unflatten(1, (-1, TOWER.merge ** 2)).flatten(-2)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


class PatchEmbed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(3 * TOWER.patch ** 2, TOWER.hidden)


class Tower(nn.Module):
    """Pixels [n, 3, height, width] from -1 to 1 to rows [n, tokens, hidden of the text model].

    A picture's two frames are the same, so that in training the patch embedding has only one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed()
        self.pos_embed = nn.Embedding(TOWER.side ** 2, TOWER.hidden)
        self.blocks = nn.ModuleList(Block() for _ in range(TOWER.depth))
        self.merger = Merger()
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.5 / math.sqrt(weight.shape[1]) if "embed" not in name else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, pixels: Tensor) -> Tensor:
        grid = (pixels.shape[-2] // TOWER.patch, pixels.shape[-1] // TOWER.patch)
        table = self.pos_embed.weight
        places = torch.stack([table[entry] * weight for entry, weight in _corners(grid, pixels.device)]).sum(0)
        x, turns = self.patch_embed.proj(patches_of(pixels)).float() + places, _turns(grid, pixels.device)
        for block in self.blocks:
            x = block(x, turns)
        return self.merger(x)
