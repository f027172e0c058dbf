"""The tiny model's layers in plain torch for training; parameters have the names of Qwen3.5's checkpoints.

A batch is packed: rows of one width that hold whole conversations end to end, and each token's place in its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from delta import gated_delta_rule
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    vocab: int = 3072
    hidden: int = 192
    inner: int = 576
    layers: tuple[str, ...] = ("linear_attention", "linear_attention", "linear_attention", "full_attention") * 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 16
    rope_theta: float = 100000.0
    key_heads: int = 3
    value_heads: int = 6
    linear_dim: int = 32
    conv: int = 4
    eps: float = 1e-6


SHAPE = Shape()
KeyValue = tuple[Tensor, Tensor]  # [rows, width, heads, head_dim] each


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Norm(nn.Module):
    """RMS norm whose weight is stored less one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], 1.0 + self.weight, SHAPE.eps)


class GatedNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, SHAPE.eps) * F.silu(gate.float())


class Mlp(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = _linear(s.hidden, s.inner), _linear(s.hidden, s.inner)
        self.down_proj = _linear(s.inner, s.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DeltaNet(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.widths = [s.key_heads * s.linear_dim, s.key_heads * s.linear_dim, s.value_heads * s.linear_dim]
        self.in_proj_qkv, self.in_proj_z = _linear(s.hidden, sum(self.widths)), _linear(s.hidden, self.widths[2])
        self.in_proj_b, self.in_proj_a = _linear(s.hidden, s.value_heads), _linear(s.hidden, s.value_heads)
        self.conv1d = nn.Conv1d(sum(self.widths), sum(self.widths), s.conv, groups=sum(self.widths), bias=False)
        self.dt_bias, self.A_log = nn.Parameter(torch.ones(s.value_heads)), nn.Parameter(torch.zeros(s.value_heads))
        self.norm = GatedNorm(s.linear_dim)
        self.out_proj = _linear(self.widths[2], s.hidden)

    def _convolved(self, x: Tensor, place: Tensor) -> Tensor:
        """A causal convolution that does not look past the beginning of a conversation."""
        taps = self.conv1d.weight.squeeze(1)
        out = x * taps[:, -1]
        for back in range(1, taps.shape[1]):
            seen = F.pad(x, (0, 0, back, -back)) * (place >= back).unsqueeze(-1)
            out = out + seen * taps[:, -1 - back]
        return F.silu(out)

    def forward(self, x: Tensor, place: Tensor) -> Tensor:
        mixed = self._convolved(self.in_proj_qkv(x).float(), place)
        query, key, value = (part.unflatten(-1, (-1, SHAPE.linear_dim)) for part in mixed.split(self.widths, -1))
        beta = self.in_proj_b(x).float().sigmoid()
        g = -self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        out = gated_delta_rule(query, key, value, g, beta, place == 0)
        return self.out_proj(self.norm(out, self.in_proj_z(x).view_as(out)).flatten(-2))


AXES = (0, 1, 2, 0, 1, 2, 0, 1)  # by time, height or width each pair turns: sections of 3, 3 and 2, interleaved


def rotate(x: Tensor, place: Tensor) -> Tensor:
    """Rotary positions on the first dimensions of [rows, width, heads, head_dim].

    `place` [rows, width], as text has one position a token, or [rows, width, pairs], one for each pair of numbers that
    turns."""
    half = SHAPE.rotary_dim // 2
    turned = place.float().unsqueeze(-1) if place.ndim == 2 else place.float()
    angles = turned * SHAPE.rope_theta ** -(torch.arange(half, device=x.device) / half)
    cos, sin = angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


class Attention(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.q_proj = _linear(s.hidden, 2 * s.heads * s.head_dim)
        self.k_proj, self.v_proj = (_linear(s.hidden, s.kv_heads * s.head_dim) for _ in range(2))
        self.o_proj = _linear(s.heads * s.head_dim, s.hidden)
        self.q_norm, self.k_norm = Norm(s.head_dim), Norm(s.head_dim)

    def forward(self, x: Tensor, place: Tensor, seen: Tensor, before: list[KeyValue]) -> tuple[Tensor, KeyValue]:
        """Attend where `seen` [rows, 1, width, keys] says, to the keys of `before` and then to these."""
        query, gate = self.q_proj(x).unflatten(-1, (SHAPE.heads, -1)).chunk(2, -1)
        key, value = (project(x).unflatten(-1, (SHAPE.kv_heads, -1)) for project in (self.k_proj, self.v_proj))
        query, key = rotate(self.q_norm(query), place), rotate(self.k_norm(key), place)
        own = key.to(value.dtype), value
        groups = SHAPE.heads // SHAPE.kv_heads
        keys, values = (
            torch.cat(t, 1).transpose(1, 2).repeat_interleave(groups, 1) for t in zip(*before, own, strict=True)
        )
        out = F.scaled_dot_product_attention(query.to(value.dtype).transpose(1, 2), keys, values, attn_mask=seen)
        return self.o_proj(out.transpose(1, 2).flatten(-2) * gate.flatten(-2).sigmoid()), own


class Layer(nn.Module):
    def __init__(self, s: Shape, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "linear_attention":
            self.linear_attn = DeltaNet(s)
        else:
            self.self_attn = Attention(s)
        self.mlp = Mlp(s)
        self.input_layernorm, self.post_attention_layernorm = Norm(s.hidden), Norm(s.hidden)

    def forward(
        self, x: Tensor, place: Tensor, seen: Tensor, before: list[KeyValue], turned: Tensor | None = None
    ) -> tuple[Tensor, KeyValue | None]:
        """turned: rotary positions, where they are others than `place`."""
        normed, own = self.input_layernorm(x), None
        if self.kind == "linear_attention":
            x = x + self.linear_attn(normed, place)
        else:
            mixed, own = self.self_attn(normed, place if turned is None else turned, seen, before)
            x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), own


def own_past(place: Tensor) -> Tensor:
    """Which tokens each token may attend to, [rows, 1, width, width]: those of its conversation up to itself."""
    index = torch.arange(place.shape[1], device=place.device)
    begin = (index - place).unsqueeze(-1)
    return ((index <= index.unsqueeze(-1)) & (index >= begin)).unsqueeze(1)


class Trunk(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(s.vocab, s.hidden)
        self.layers = nn.ModuleList(Layer(s, kind) for kind in s.layers)
        self.norm = Norm(s.hidden)


class Network(nn.Module):
    """Token ids and places, both [rows, width], to hidden states after the last norm [rows, width, hidden]."""

    def __init__(self, s: Shape = SHAPE) -> None:
        super().__init__()
        self.model = Trunk(s)

    def forward(self, ids: Tensor, place: Tensor) -> Tensor:
        x, seen = self.model.embed_tokens(ids), own_past(place)
        for layer in self.model.layers:
            x, _ = layer(x, place, seen, [])
        return self.model.norm(x)

    def seeing(self, x: Tensor, place: Tensor, turned: Tensor) -> Tensor:
        """Hidden states as `forward` gives them, of embeddings [rows, width, hidden] with rows of pictures among them;
        `turned` [rows, width, pairs]: rotary positions."""
        seen = own_past(place)
        for layer in self.model.layers:
            x, _ = layer(x, place, seen, [], turned)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)


@torch.no_grad()
def fresh(s: Shape = SHAPE) -> Network:
    """A network to train, whose heads start with memories of ten to a thousand tokens."""
    network = Network(s)
    for name, weight in network.named_parameters():
        if name.endswith(("proj.weight", "qkv.weight", "_z.weight", "_a.weight", "_b.weight", "tokens.weight")):
            nn.init.normal_(weight, std=0.02)
        elif name.endswith("A_log"):
            nn.init.uniform_(weight, 1.0, 4.0).log_()
        elif name.endswith("dt_bias"):
            step = torch.empty_like(weight).uniform_(-6.5, -3.5).exp()
            weight.copy_(torch.log(torch.expm1(step)))
    return network
