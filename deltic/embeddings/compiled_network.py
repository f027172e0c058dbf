"""A BERT encoder as a relax module."""

# mypy: ignore-errors
from __future__ import annotations

from typing import Any

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op, spec

from deltic.embeddings.bert_config import EncoderConfig
from deltic.export.tvm import encoder_kernels as kernels
from deltic.export.tvm.network import PanelLinear, call


class ResidualLayerNorm(nn.Module):
    """The layer norm of a sum, in which a product's bias is added too."""

    def __init__(self, config: EncoderConfig) -> None:
        self.hidden, self.eps = config.hidden_size, config.eps
        self.scale = nn.Parameter((config.hidden_size,), "float32")
        self.shift = nn.Parameter((config.hidden_size,), "float32")

    def forward(self, residual: nn.Tensor, delta: nn.Tensor, bias: nn.Tensor) -> nn.Tensor:
        kernel = kernels.add_layer_norm(self.hidden, self.eps, delta.shape[1])
        return call(kernel, "add_layer_norm", [residual, delta, bias, self.scale, self.shift],
                    (residual.shape[0], self.hidden))


class CompiledLayer(nn.Module):
    """One layer of the encoder."""

    def __init__(self, config: EncoderConfig, dtype: str) -> None:
        self.heads, hidden, self.inner = config.heads, config.hidden_size, config.intermediate_size
        self.dim = hidden // config.heads
        self.qkv, self.out = PanelLinear(hidden, 3 * hidden, dtype), PanelLinear(hidden, hidden, dtype)
        self.up, self.down = PanelLinear(hidden, self.inner, dtype), PanelLinear(self.inner, hidden, dtype)
        self.qkv_bias = nn.Parameter((3 * hidden,), "float32")
        self.out_bias = nn.Parameter((hidden,), "float32")
        self.up_bias = nn.Parameter((self.inner,), "float32")
        self.down_bias = nn.Parameter((hidden,), "float32")
        self.attention_norm, self.output_norm = ResidualLayerNorm(config), ResidualLayerNorm(config)

    def forward(self, x: nn.Tensor, starts: nn.Tensor, ends: nn.Tensor) -> nn.Tensor:
        n = x.shape[0]
        mixed = call(kernels.attention(self.heads, self.dim, self.qkv.width), "attention",
                     [self.qkv(x), self.qkv_bias, starts, ends], (n, self.heads * self.dim))
        middle = self.attention_norm(x, self.out(mixed), self.out_bias)
        wide = call(kernels.bias_gelu(self.inner, self.up.width), "bias_gelu", [self.up(middle), self.up_bias],
                    (n, self.inner))
        return self.output_norm(middle, self.down(wide), self.down_bias)


class EncoderNetwork(nn.Module):
    """An encoder: from tokens to the last layer's states."""

    def __init__(self, config: EncoderConfig, dtype: str) -> None:
        self.config, self.dtype, hidden = config, dtype, config.hidden_size
        self.words = nn.Parameter((config.vocab_size, hidden), dtype)
        self.places = nn.Parameter((config.places, hidden), "float32")
        self.kinds = nn.Parameter((config.kinds, hidden), "float32")
        self.norm = ResidualLayerNorm(config)
        self.layers = nn.ModuleList([CompiledLayer(config, dtype) for _ in range(config.layers)])

    def hidden(self, ids: nn.Tensor, places: nn.Tensor, kinds: nn.Tensor, starts: nn.Tensor, ends: nn.Tensor
               ) -> nn.Tensor:
        """ids, places, kinds [n] int32; starts, ends [n] int32: where each token's sequence begins and ends ->
        [n, hidden]."""
        config, n = self.config, ids.shape[0]
        kernel = kernels.embeddings(config.hidden_size, config.vocab_size, config.places, config.kinds, self.dtype)
        x, delta = call(kernel, "embeddings", [ids, places, kinds, self.words, self.places, self.kinds],
                        (n, config.hidden_size), (n, config.hidden_size))
        x = self.norm(x, delta, op.zeros((config.hidden_size,), "float32"))
        for layer in self.layers:
            x = layer(x, starts, ends)
        return x


def specification() -> dict[str, Any]:
    """The function of the artifact, and what it takes, for `export_tvm`."""
    numbers = {name: spec.Tensor(["n"], "int32") for name in ("ids", "places", "kinds", "starts", "ends")}
    return {"hidden": {**numbers, "$": {"param_mode": "packed", "effect_mode": "none"}}}
