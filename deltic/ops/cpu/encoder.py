"""An encoder's layers in one call of the compiled kernels."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p

from torch import Tensor

from deltic.ops.cpu.kernels import native_weight, packed
from deltic.ops.cpu.library import LinearWeight, Pool, address, library
from deltic.ops.encoder import Affine, EncoderLayer, EncoderWeights, Norm, Ragged


class LayerNorm(Structure):
    """`deltic_layer_norm`."""

    _fields_ = (("scale", c_void_p), ("shift", c_void_p))


class Layer(Structure):
    """`deltic_encoder_layer`."""

    _fields_ = (*((name, LinearWeight) for name in ("qkv", "out", "up", "down")),
                *((name, c_void_p) for name in ("qkv_bias", "out_bias", "up_bias", "down_bias")),
                ("attention_norm", LayerNorm), ("output_norm", LayerNorm))


class Encoder(Structure):
    """`deltic_encoder`."""

    _fields_ = (("hidden", c_int64), ("heads", c_int64), ("layers", c_int64), ("layer", POINTER(Layer)),
                ("norm", LayerNorm), ("eps", c_float))


def encoder_run(pool: Pool, weights: EncoderWeights) -> Callable[[Ragged, Tensor], Tensor] | None:
    """What `ops.encoder.run` does for these weights, in float32; None if they are not packed."""
    if not all(packed(affine.weight) for layer in weights.layers for affine in _affines(layer)):
        return None
    layers = (Layer * len(weights.layers))(*map(_layer, weights.layers))
    model = Encoder(weights.places.shape[1], weights.heads, len(layers), layers, _norm(weights.norm), weights.eps)

    def run(batch: Ragged, x: Tensor, _kept: object = weights) -> Tensor:
        starts, x = batch.starts.contiguous(), x.float().contiguous()
        pool.call(library().deltic_encode, byref(model), address(starts), len(starts) - 1, address(x))
        return x

    return run


def _affines(layer: EncoderLayer) -> tuple[Affine, ...]:
    return layer.qkv, layer.out, layer.up, layer.down


def _layer(layer: EncoderLayer) -> Layer:
    affines = _affines(layer)
    return Layer(*(native_weight(affine.weight) for affine in affines), *(address(affine.bias) for affine in affines),
                 _norm(layer.attention_norm), _norm(layer.output_norm))


def _norm(norm: Norm) -> LayerNorm:
    return LayerNorm(address(norm.scale), address(norm.shift))
