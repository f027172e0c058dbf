"""An encoder's layers in one call of the compiled kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import byref
from typing import Any

from torch import Tensor

from deltic.ops.cpu.kernels import native_weight, packed
from deltic.ops.cpu.library import EncoderModel, EncoderModelLayer, LayerNormStruct, ThreadPool, address, library
from deltic.ops.encoder import Affine, EncoderLayer, EncoderWeights, LayerNorm, Ragged


def encoder_run(pool: ThreadPool, weights: EncoderWeights) -> Callable[[Ragged, Tensor], Tensor] | None:
    """What `ops.encoder.run` does for these weights, in float32; None if they are not packed."""
    if not packed_layers(weights.layers):
        return None
    layers = native_layers(weights.layers)
    model = EncoderModel(weights.places.shape[1], weights.heads, len(layers), layers, _norm(weights.norm), weights.eps)

    def run(batch: Ragged, x: Tensor, _kept: object = weights) -> Tensor:
        starts, x = batch.starts.contiguous(), x.float().contiguous()
        pool.call(library().deltic_encode, byref(model), address(starts), len(starts) - 1, address(x))
        return x

    return run


def packed_layers(layers: Sequence[EncoderLayer]) -> bool:
    """Whether the kernels can multiply with them."""
    return all(packed(affine.weight) for layer in layers for affine in _affines(layer))


def native_layers(layers: Sequence[EncoderLayer]) -> Any:
    """The structs of layers that are packed; they borrow the weights."""
    return (EncoderModelLayer * len(layers))(*map(_layer, layers))


def _affines(layer: EncoderLayer) -> tuple[Affine, ...]:
    return layer.qkv, layer.out, layer.up, layer.down


def _layer(layer: EncoderLayer) -> EncoderModelLayer:
    affines = _affines(layer)
    weights, biases = ([part(affine) for affine in affines] for part in (
        lambda affine: native_weight(affine.weight), lambda affine: address(affine.bias)))
    return EncoderModelLayer(*weights, *biases, _norm(layer.attention_norm), _norm(layer.output_norm))


def _norm(norm: LayerNorm) -> LayerNormStruct:
    return LayerNormStruct(address(norm.scale), address(norm.shift))
