"""GGML block types: every block means what gguf-py says it means, to the bit."""

import math
import tracemalloc

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from deltic.errors import ModelError
from deltic.loader.gguf.blocks import BY_NAME, LAYOUTS, TYPES, decode, fill
from deltic.loader.safetensors import TORCH_DTYPES

READABLE = sorted(LAYOUTS)


def random_rows(name, rows, blocks, seed=0):
    """Rows of random blocks, uint8 [rows, bytes]: random bits, sane scales (also zero, negative and subnormal)."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, blocks * BY_NAME[name].nbytes), dtype=np.uint8)
    fields = raw.reshape(-1).view(LAYOUTS[name])
    for field in ("d", "dmin", "m", "x"):
        if field in LAYOUTS[name].names and LAYOUTS[name][field].kind == "f":
            fields[field] = rng.standard_normal(fields.shape) * rng.choice([0.0, 1e-6, 1e-2, 3.0], fields.shape)
    if name == "MXFP4":
        fields["e"] %= 250
    return raw


def theirs(name, raw):
    with np.errstate(all="ignore"):
        return quants.dequantize(raw, GGMLQuantizationType[name])


def same_bits(left, right):
    return np.array_equal(np.asarray(left).view(np.uint32), np.asarray(right).view(np.uint32))


def test_gguf_type_ids_and_sizes():
    known = [type for type in GGMLQuantizationType if not type.name.startswith(("Q8_1", "Q8_K"))]
    assert {type.name for type in known} <= set(BY_NAME)
    for type in known:
        assert (TYPES[type].name, TYPES[type].weights, TYPES[type].nbytes) == (type.name, *gguf.GGML_QUANT_SIZES[type])
    assert {name for name, type in BY_NAME.items() if type.readable} == set(LAYOUTS)


def dequantize(raw, type, shape, dtype):
    result = torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    fill(result, type, lambda start, count: raw[start:start + count])
    return result


@pytest.mark.parametrize("name", READABLE)
@pytest.mark.parametrize("seed", range(3))
def test_gguf_type_decodes_random_blocks_as_gguf_py(name, seed):
    raw = random_rows(name, rows=33, blocks=5, seed=seed)
    assert same_bits(decode(raw.reshape(-1), BY_NAME[name]), theirs(name, raw).reshape(-1))


@pytest.mark.parametrize("name", READABLE)
def test_gguf_type_decodes_any_bits(name):
    """Scales that are infinite or NaN give what they give, without a warning."""
    raw = np.random.default_rng(1).integers(0, 256, (512, BY_NAME[name].nbytes), dtype=np.uint8)
    raw[:2] = np.array([[0x00], [0xFF]], dtype=np.uint8)
    values, expected = decode(raw.reshape(-1), BY_NAME[name]), theirs(name, raw).reshape(-1)
    assert np.array_equal(values, expected, equal_nan=True)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantization_error_within_one_step(name):
    values = np.random.default_rng(2).standard_normal((7, 96)).astype(np.float32)
    raw = quants.quantize(values, GGMLQuantizationType[name]).reshape(-1)
    step = np.abs(values).max() * 2 / (2 ** int(name[1]) - 1)
    assert np.abs(decode(raw, BY_NAME[name]).reshape(7, 96) - values).max() <= step


def test_blocks_by_hand():
    q4_0 = np.array([0x00, 0x40, *([0x8F] * 16)], dtype=np.uint8)  # d = 2; low nibbles 15, high nibbles 8
    assert decode(q4_0, BY_NAME["Q4_0"]).tolist() == [14.0] * 16 + [0.0] * 16
    q8_0 = np.array([0x00, 0x38, *range(16), *([0xFF] * 16)], dtype=np.uint8)  # d = 0.5
    assert decode(q8_0, BY_NAME["Q8_0"]).tolist() == [i / 2 for i in range(16)] + [-0.5] * 16
    mxfp4 = np.array([128, *([0x97] * 16)], dtype=np.uint8)  # scale 2; codes 7 (six) and 9 (minus a half)
    assert decode(mxfp4, BY_NAME["MXFP4"]).tolist() == [12.0] * 16 + [-1.0] * 16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", READABLE)
def test_gguf_type_fills_a_tensor(name, dtype):
    raw, width = random_rows(name, rows=6, blocks=3), 3 * BY_NAME[name].weights
    if name in ("BF16", "MXFP4"):
        raw[:] = quants.quantize(np.linspace(-9, 9, 6 * width, dtype=np.float32).reshape(6, width),
                                 GGMLQuantizationType[name])
    found = dequantize(raw.reshape(-1), BY_NAME[name], (2, 3, width), dtype)
    expected = torch.from_numpy(theirs(name, raw).reshape(2, 3, width).copy())
    assert found.is_contiguous() and torch.equal(found, expected.to(TORCH_DTYPES[dtype]))


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "F32"])
def test_fill_needs_little_extra_memory(name):
    raw = np.tile(random_rows(name, 1, 1), 3_000_000 // BY_NAME[name].weights).reshape(-1)
    tracemalloc.start()
    try:
        found = dequantize(raw, BY_NAME[name], (3_000_000 // BY_NAME[name].weights, BY_NAME[name].weights), "bfloat16")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20
    assert torch.equal(found[-1], found[0])


def test_unsupported_types_and_overflow_refused():
    with pytest.raises(ModelError, match="IQ2_XXS is not supported"):
        decode(np.zeros(66, np.uint8), BY_NAME["IQ2_XXS"])
    large = np.array([1.0, 65520.0], np.float32).view(np.uint8)
    with pytest.raises(ModelError, match="float16"):
        dequantize(large, BY_NAME["F32"], (2,), "float16")
    assert math.isinf(dequantize(np.array([math.inf], np.float32).view(np.uint8), BY_NAME["F32"], (1,), "float16")[0])
