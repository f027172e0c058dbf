"""The compiled quantizers write what the numpy ones write, to the bit; and whole models are quantized in memory."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from four_bit_cases import E2M1, LAYOUTS, numbers_of
from gguf_models import SHAPES
from numpy.typing import NDArray
from support import odd_shape

from deltic.config import LinearConfig, ModelConfig, RopeConfig
from deltic.errors import ModelError
from deltic.loader import four_bits
from deltic.loader.dummy import random_weights
from deltic.loader.gguf import blocks
from deltic.loader.gguf import quantize as quantize_module
from deltic.loader.gguf.blocks import decode
from deltic.loader.gguf.convert import FILE_TYPES, target_of
from deltic.loader.gguf.quantize import _encode, quantize, quantize_in_pieces
from deltic.loader.quantize import SCHEMES, quantize_tensors
from deltic.ops.cpu import missing
from deltic.ops.cpu.library import library
from deltic.ops.quantized import QTensor

pytestmark = pytest.mark.skipif(bool(missing()), reason=str(missing()))

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

BY_NAME = {**blocks.BY_NAME, **four_bits.TYPES}
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", *four_bits.TYPES)
FOUR_BITS = {"nvfp4": "NVFP4", "int4": "INT4_128"}
"""Scheme -> type instead of Q4_K."""
GUARD = 4096
"""Bytes behind the blocks that must stay unchanged."""


def native(values: Floats, kind: str) -> Bytes:
    """The blocks, [rows, bytes], by the library alone."""
    rows, columns = values.shape
    values, size = np.ascontiguousarray(values), BY_NAME[kind].size(rows * columns)
    out = np.full(size + GUARD, 0xAA, np.uint8)
    assert library().deltic_quantize(BY_NAME[kind].id, values.ctypes.data, rows, columns, out.ctypes.data) == 0
    assert (out[size:] == 0xAA).all()
    return out[:size].reshape(rows, BY_NAME[kind].size(columns))


@cache
def samples() -> dict[str, NDArray[Any]]:
    """Returns ordinary and extreme numbers."""
    rng, shape = np.random.default_rng(5), (33, 512)
    normal, signs = rng.standard_normal(shape), rng.choice([-1.0, 1.0], shape)
    groups = np.repeat(10.0 ** rng.integers(-44, 4, (33, 16)), 32, axis=1)
    huge = normal * 1e-3
    huge[:, 100] = 65504 * signs[:, 0]
    bits = rng.integers(0, 1 << 32, shape, dtype=np.uint32).view(np.float32)
    return {
        "normal": normal * 0.02, "heavy": rng.standard_t(3, shape), "positive": abs(normal), "negative": -abs(normal),
        "zeros": 0 * normal, "zeros of both signs": 0 * signs, "negative zeros": -0.0 * abs(normal),
        "equal": np.full(shape, 0.3), "equal, negative": np.full(shape, -0.3), "of one size": 0.7 * signs,
        "sparse": normal * (rng.random(shape) < 0.02), "one huge": huge, "largest": 65504 * signs,
        "near the limit": rng.uniform(60000, 65504, shape) * signs, "whole numbers": rng.integers(-9, 10, shape),
        "halves": rng.integers(-255, 256, shape) / 2, "denormals": normal * 1e-41, "smallest": signs * 2.0**-149,
        "below float16": normal * 1e-8, "around 2**-126": normal * 2.0**-126, "around 2**-120": normal * 2.0**-115,
        "groups of all sizes": normal * groups, "numbers of all sizes": normal * 10.0 ** rng.integers(-9, 4, shape),
        "any bits": np.where(abs(bits) <= 65504, bits, np.float32(1)),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_native_and_numpy_write_the_same_bits(kind: str) -> None:
    for name, sample in samples().items():
        values = sample.astype(np.float32)
        expected = _encode(values, BY_NAME[kind])
        assert np.array_equal(native(values, kind), expected), name
        assert np.array_equal(quantize(values, BY_NAME[kind]), expected), name


@pytest.mark.parametrize("kind", KINDS)
def test_shapes(kind: str) -> None:
    type = BY_NAME[kind]
    for rows, columns in product((0, 1, 3, 17), (32, 96, 256, 512)):
        values = np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32)
        if columns % type.weights:
            assert library().deltic_quantize(type.id, values.ctypes.data, rows, columns, None) == -1, (rows, columns)
            continue
        expected = quantize(np.tile(values, (1, 2)), type).reshape(rows, 2, type.size(columns))
        assert np.array_equal(expected[:, 0], expected[:, 1]), (rows, columns)
        assert np.array_equal(native(values, kind), expected[:, 0]), (rows, columns)
        assert np.array_equal(quantize(np.asfortranarray(values), type), expected[:, 0]), (rows, columns)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_every_scale_is_rounded_as_numpy_rounds(kind: str) -> None:
    """Every float16, the numbers halfway between two, and those next to these."""
    halves = np.arange(0x7BFF, dtype=np.uint16).view(np.float16).astype(np.float32)
    nexts = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middle = (halves + nexts) / 2
    scales = np.concatenate([halves, middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, nexts)])
    factor = {"Q8_0": 127, "Q4_0": -8}[kind]
    values = np.zeros((len(scales), 32), np.float32)
    values[:, 7] = scales * np.float32(factor)
    values = values[abs(values[:, 7]) <= 65504]
    assert len(values) > 50000 and np.array_equal(native(values, kind), _encode(values, BY_NAME[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_non_finite_numbers_stay_within_the_blocks(kind: str) -> None:
    """Callers refuse such numbers earlier."""
    values = np.random.default_rng(6).integers(0, 1 << 32, (200, 512), dtype=np.uint32).view(np.float32)
    for special in (np.nan, np.inf, -np.inf):
        values[:, ::37] = special
        native(values, kind)


def test_unknown_types_are_refused() -> None:
    values = np.zeros((1, 256), np.float32)
    known = {BY_NAME[kind].id for kind in KINDS}
    for id in (*range(-1, 50), 1 << 32, (1 << 32) + 8):
        if id not in known:
            assert library().deltic_quantize(id, values.ctypes.data, 1, 256, None) == -1


def test_threads_share_the_library() -> None:
    values = np.random.default_rng(8).standard_normal((64, 512)).astype(np.float32)
    expected = {kind: native(values, kind) for kind in KINDS}
    with ThreadPoolExecutor(8) as pool:
        jobs = [(kind, pool.submit(native, values, kind)) for kind in KINDS * 8]
        assert all(np.array_equal(job.result(), expected[kind]) for kind, job in jobs)


# Callers of the library


@pytest.mark.covering
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "F16", "BF16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_matrices_are_quantized_in_pieces(kind: str, dtype: torch.dtype) -> None:
    values = torch.randn(2003, 512, generator=torch.manual_seed(9)).to(dtype)
    type = BY_NAME[kind]
    with ThreadPoolExecutor(3) as pool:
        for matrix in (values, values[:1], values.tile(1, 2)[:, 512:]):
            pieces = list(quantize_in_pieces("t", matrix, type, pool))
            assert np.array_equal(np.concatenate(pieces), _encode(matrix.float().contiguous().numpy(), type))
            assert len(pieces) == -(-len(matrix) // 512)
        values[-1, 3] = math.nan
        if kind != "BF16":
            with pytest.raises(ModelError, match=f"tensor 't': it has values that {kind} cannot hold"):
                list(quantize_in_pieces("t", values, type, pool))


@pytest.mark.parametrize("kind", KINDS)
def test_numpy_fallback_writes_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(10).standard_normal((9, 512)).astype(np.float32)
    expected = quantize(values, BY_NAME[kind])
    monkeypatch.setattr(quantize_module, "load", lambda: "not compiled")
    assert np.array_equal(quantize(values, BY_NAME[kind]), expected)


GGML = {"Q4_K": (0.07125, 0.09305), "Q5_K": (0.03613, 0.04704), "Q6_K": (0.01772, 0.02565)}
"""Relative errors (root mean square) of ggml's quantizers (`quantize_q4_K` and so on, without importances) on the
normal weights and those of Student's t with three degrees of freedom that the test draws."""


@pytest.mark.parametrize("kind", list(GGML))
def test_errors_are_near_ggmls(kind: str) -> None:
    rng = np.random.default_rng(11)
    for values, theirs in zip((rng.standard_normal((256, 1024)), rng.standard_t(3, (256, 1024))), GGML[kind],
                              strict=True):
        found = decode(quantize(values.astype(np.float32), BY_NAME[kind]).reshape(-1), BY_NAME[kind])
        error = np.linalg.norm(found - values.reshape(-1)) / np.linalg.norm(values)
        assert error < 1.015 * theirs


@pytest.mark.parametrize(("kind", "most"), [("NVFP4", 0.1), ("INT4_32", 0.09), ("INT4_64", 0.1), ("INT4_128", 0.12)])
def test_four_bits_are_rounded_to_the_nearest(kind: str, most: float) -> None:
    """No other code of a group is nearer to a weight."""
    values = np.random.default_rng(12).standard_normal((64, 1024)).astype(np.float32)
    raw = quantize(values, BY_NAME[kind])
    found, blocks = numbers_of(kind, raw), raw.reshape(-1).view(LAYOUTS[kind])
    for code in range(16):
        other = blocks.copy()
        other["qs"] = code * 17
        others = numbers_of(kind, other.view(np.uint8).reshape(raw.shape))
        assert (abs(found - values) <= abs(others - values) * 1.00001 + 1e-6).all(), code
    assert np.linalg.norm(found - values) / np.linalg.norm(values) < most


def test_ties_of_e2m1_go_to_the_even_code() -> None:
    values = np.zeros((1, 256), np.float32)
    values[0, :9] = 6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -2.5
    codes = quantize(values, BY_NAME["NVFP4"]).view(LAYOUTS["NVFP4"])["qs"].reshape(-1)[:5]
    found = E2M1[np.stack((codes & 15, codes >> 4), -1).reshape(-1)[:9]]
    assert found.tolist() == [6, 0, 1, 1, 2, 2, 4, 4, -2]


# Whole models


def mixed_shape() -> ModelConfig:
    """Rows of 256 and of 288 weights: the latter fit only blocks of 32."""
    return odd_shape(
        vocab_size=300, hidden_size=256, intermediate_size=288, num_attention_heads=4, head_dim=64,
        rope=RopeConfig(1e4, 6, (1, 1, 1)), linear=LinearConfig(2, 4, 10, 64, 4))


@pytest.mark.parametrize("scheme", list(SCHEMES))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_model_gets_the_types_of_a_file(scheme: str, dtype: Any) -> None:
    config = mixed_shape()
    sources = random_weights(config, dtype)
    found = quantize_tensors(iter(sources.items()), scheme, config)
    assert list(found) == list(sources)
    kinds = set()
    for name, source in sources.items():
        type, tensor = target_of(name, tuple(source.shape), config, FILE_TYPES[SCHEMES[scheme]]).type, found[name]
        type = four_bits.TYPES[FOUR_BITS[scheme]] if type.name == "Q4_K" and scheme in FOUR_BITS else type
        if not isinstance(tensor, QTensor):
            assert tensor is source and type.name == "F32" and (source.ndim != 2), name
            continue
        kinds.add(tensor.type)
        assert tensor.type == type.name and tensor.shape == tuple(source.shape)
        raw = quantize(source.float().numpy(), type)
        expected = numbers_of(type.name, raw) if type.name in four_bits.TYPES else decode(raw.reshape(-1), type)
        assert torch.equal(tensor.dequantize(), torch.from_numpy(expected).view(tensor.shape)), name
    assert kinds == ({"Q8_0"} if scheme == "q8_0" else {FOUR_BITS.get(scheme, "Q4_K"), "Q5_0", "Q6_K", "Q8_0"})


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_matrices_without_whole_blocks_stay_plain(scheme: str, shape: str) -> None:
    config = SHAPES[shape]
    sources = random_weights(config, "float32")
    for name, tensor in quantize_tensors(iter(sources.items()), scheme, config).items():
        packed = isinstance(tensor, QTensor)
        assert packed == (sources[name].ndim == 2 and sources[name].shape[1] % 32 == 0), name
        assert packed or tensor is sources[name]


def test_sources_are_freed_one_by_one() -> None:
    config = mixed_shape()
    weights = random_weights(config, "float32")
    matrices = {name: weakref.ref(tensor) for name, tensor in weights.items() if tensor.ndim == 2}

    def popped() -> Iterator[tuple[str, torch.Tensor]]:
        for name in list(weights):
            deadline = time.monotonic() + 10  # threads let go of the last piece a moment after its result is there
            while any(reference() is not None for name, reference in matrices.items() if name not in weights):
                assert time.monotonic() < deadline
                time.sleep(0.001)
            yield name, weights.pop(name)

    assert quantize_tensors(popped(), "q8_0", config) and not weights


def test_error_names_the_tensor() -> None:
    config = mixed_shape()
    weights = random_weights(config, "bfloat16")
    weights["model.layers.1.self_attn.k_proj.weight"][3, 5] = 1e6
    with pytest.raises(ModelError, match=r"tensor 'model\.layers\.1\.self_attn\.k_proj\.weight': it has values that"):
        quantize_tensors(iter(weights.items()), "q4_k", config)
