"""Keys and values in four bits: the format, its kernels against the reference, and what of an answer it keeps. What a
GPU's kernels make of them is in test_cuda_kv_dtype.py."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import takewhile
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from op_cases import (
    ROPE,
    Case,
    Row,
    attention_weights,
    build_batch,
    generator,
    hidden_states,
    relative_rms,
    same_bits,
)
from real_models import documents, smollm2
from reuse_cases import usage_of
from support import drain, embedded_runtime, fresh_pools, greedy, numbers, small_runtime
from torch import Tensor

from deltic import LLM, SamplingParams
from deltic.cache.manager import HybridCache
from deltic.cache.offload.disk import DiskStore
from deltic.cache.offload.host import HostStore
from deltic.cache.offload.index import TierIndex
from deltic.cache.offload.types import StoredItem
from deltic.cache.operations import CopyPage
from deltic.cache.tensors import page_bytes
from deltic.config import EngineConfig, ModelConfig
from deltic.engine.engine import Engine
from deltic.errors import ConfigError
from deltic.ops import Ops, reference
from deltic.ops.cpu import overlay
from deltic.ops.cuda.driver import FOLDER
from deltic.ops.kv import INT4, KEY_BITS, VALUE_BITS, is_finite, pack, rotated, rotated_back, store, unpack, width
from deltic.ops.torch import OPS as TORCH
from deltic.ops.types import AttentionSpec, KvView, Rope, RopeSpec
from deltic.params import PAGE, EngineRequest
from deltic.runner.memory import plan_memory
from deltic.runner.model_runner import ModelRunner
from deltic.session import Session

SIZES = (16, 32, 64, 128, 256)
BITS = {KEY_BITS: 0.048, VALUE_BITS: 0.0935}
"""The error of normally distributed numbers at most."""

# The format


@pytest.mark.parametrize("dim", SIZES)
def test_rotation(dim: int) -> None:
    x = torch.randn(4, 3, dim, generator=generator(1), dtype=torch.float64)
    matrix = reference.hadamard(dim)
    assert torch.allclose(matrix @ matrix.T, torch.eye(dim, dtype=torch.float64))
    assert torch.allclose(rotated(x), x @ matrix) and torch.allclose(rotated_back(rotated(x)), x)
    assert rotated(torch.ones(dim)).abs().max() < 1.5, "equal numbers do not add up"
    assert rotated(x.bfloat16()).dtype == torch.float32


@pytest.mark.covering
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", SIZES)
def test_bytes_are_those_of_the_reference(dim: int, bits: int) -> None:
    x = torch.randn(50, 3, dim, generator=generator(2), dtype=torch.float64) * torch.logspace(-6, 6, 50)[:, None, None]
    stored = pack(rotated(x), bits)
    assert stored.shape == (50, 3, width(dim, bits, INT4)) == (50, 3, dim * bits // 8 + 2)
    assert torch.equal(stored, torch.stack([reference.write_int4(token, bits) for token in x]))
    back = rotated_back(unpack(stored, dim, torch.float64))
    assert relative_rms(back, torch.stack([reference.read_int4(token) for token in stored])) < 1e-12
    assert 0.01 < (back - x).norm(dim=-1).div(x.norm(dim=-1)).mean() < BITS[bits]


@pytest.mark.parametrize("bits", BITS)
def test_unusual_numbers(bits: int) -> None:
    x = torch.randn(5, 2, 32, generator=generator(3))
    x[0], x[1] = 0, 1e-38
    stored = pack(rotated(x), bits)
    assert not unpack(stored, 32, torch.float32)[:2].any() and is_finite(stored) and is_finite(stored[:0])
    for bad in (float("nan"), float("inf"), -float("inf")):
        x[3, 1, 7] = bad
        stored = pack(rotated(x), bits)
        assert is_finite(stored[:3]) and not is_finite(stored[3]) and not is_finite(stored)
        assert not is_finite(reference.write_int4(x[3], bits))


def test_it_is_three_and_a_half_times_smaller() -> None:
    for dim, least in ((64, 3.3), (128, 3.4), (256, 3.5)):
        assert 4 * dim / (width(dim, KEY_BITS, INT4) + width(dim, VALUE_BITS, INT4)) > least


WARP = """
#include <algorithm>
#include <barrier>
#include <bit>
#include <cmath>
#include <cstdint>
#include <thread>
#include <vector>
#define DEVICE inline
typedef uint8_t u8; typedef uint16_t u16; typedef uint32_t u32; typedef int64_t i64;
struct uint2 { u32 x, y; };
using std::max;
static thread_local struct { int x; } threadIdx;
static std::barrier meeting(32);
static u32 seen[32];
template <class T> T exchange(T own, int other) {  // a lane reads what another one has
    seen[threadIdx.x] = std::bit_cast<u32>(own);
    meeting.arrive_and_wait();
    const u32 found = seen[other];
    meeting.arrive_and_wait();
    return std::bit_cast<T>(found);
}
template <class T> T __shfl_xor_sync(u32, T own, int apart) { return exchange(own, threadIdx.x ^ apart); }
template <class T> T __shfl_sync(u32, T own, int lane) { return exchange(own, lane); }
u32 __reduce_max_sync(u32, u32 own) {
    for (int apart = 16; apart; apart /= 2) own = max(own, exchange(own, threadIdx.x ^ apart));
    return own;
}
int __popc(u32 x) { return std::popcount(x); }
u32 __float_as_uint(float x) { return std::bit_cast<u32>(x); }
float __uint_as_float(u32 x) { return std::bit_cast<float>(x); }
float __fadd_rn(float a, float b) { return a + b; }
float __fmul_rn(float a, float b) { return a * b; }
float __fdiv_rn(float a, float b) { return a / b; }
template <class T> T __ldcg(const T *p) { return *p; }
u32 narrow2(float low, float) {
    const u32 bits = __float_as_uint(low);
    return low != low ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
template <int N, class KV> struct Vector;
"""
"""What kernels use of CUDA, with a thread for each lane of a warp."""
CALLS = """
template <int D, int BITS> void run(const float *x, u8 *pool, float *back, int tokens, int heads) {
    std::vector<std::thread> lanes;
    for (int lane = 0; lane < 32; ++lane)
        lanes.emplace_back([=] {
            threadIdx.x = lane;
            for (int item = 0; item < tokens * heads; ++item) {
                constexpr int N = D / 32;
                float v[N];
                std::copy_n(x + item * D + lane * N, N, v);
                store_int4<D>(pool, BITS == 5, item / heads, item % heads, heads, v);
                meeting.arrive_and_wait();
                Int4Vector<D, BITS> kept;
                kept.read(pool, item / heads, item % heads, heads);
                for (int i = 0; i < N; ++i) back[item * D + lane * N + i] = kept.at(i) * kept.scale();
            }
        });
    for (auto &lane : lanes) lane.join();
}
"""


def test_kernels_of_gpus_write_the_same_bytes(tmp_path: Path) -> None:
    """Their text, compiled for this machine."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    shared, kernels = ((FOLDER / f"{name}.cuh").read_text(encoding="utf-8") for name in ("common", "kv"))
    sums = re.search(r"^template <int COUNT> DEVICE void warp_sums.*?^}\n", shared, re.DOTALL | re.MULTILINE)
    assert sums
    own = kernels[kernels.index("// ---- Int4"):kernels.index("struct GatherInt4")]
    kinds = [(dim, bits) for dim in (64, 256) for bits in BITS]
    calls = "".join(f'extern "C" void run_{dim}_{bits}(const float *x, u8 *pool, float *back, int tokens, int heads) '
                    f"{{ run<{dim}, {bits}>(x, pool, back, tokens, heads); }}\n" for dim, bits in kinds)
    source, program, heads = tmp_path / "int4.cpp", tmp_path / "int4.so", 2
    source.write_text(WARP + sums[0] + own + CALLS + calls, encoding="utf-8")
    subprocess.run([compiler, "-std=c++20", "-O1", "-w", "-ffp-contract=off", "-pthread", "-shared", "-fPIC",
                    "-o", str(program), str(source)], check=True)
    for dim, bits in kinds:
        x = torch.randn(4, heads, dim, generator=generator(5)) * torch.tensor([1e-4, 1, 100, 0])[:, None, None]
        found, back = torch.full((4, heads, width(dim, bits, INT4)), 0xee, dtype=INT4), torch.zeros(4, heads, dim)
        run = partial(getattr(ctypes.CDLL(str(program)), f"run_{dim}_{bits}"),
                      *(ctypes.c_void_p(each.data_ptr()) for each in (x, found, back)), 4, heads)
        run()
        assert float((found != pack(rotated(x), bits)).float().mean()) < 0.01, (dim, bits)
        assert torch.equal(back, unpack(found, dim, torch.float32)), (dim, bits)
        x[1, 1, 3] = float("nan")
        run()
        assert [is_finite(token) for token in found] == [True, False, True, True]


# Options


def test_what_it_cannot_be() -> None:
    config = replace(ModelConfig.preset("qwen3.5-4b"), head_dim=80)
    with pytest.raises(ConfigError, match="a power of two; this model's have 80") as caught:
        plan_memory(config, EngineConfig(device="cpu", kv_dtype="int4"), torch.bfloat16, False, False)
    assert caught.value.option == "kv_dtype"


def test_smaller_pages_are_more_of_them() -> None:
    config, pages = ModelConfig.preset("qwen3.5-4b"), []
    for kv in ("auto", "int4"):
        options = EngineConfig(device="cpu", kv_dtype=kv, memory="16GiB", max_batch=4)
        pages.append(plan_memory(config, options, torch.bfloat16, False, drafts=False)[0].pages)
    assert pages[1] > 1.6 * pages[0], "the rest are states"


# Attention

CASE = build_batch([Row(1, 5), Row(1, 0), Row(1, 33), Row(1, 530), Row(3, 14), Row(20, 7), Row(17, 0)], 8)
SPECS = {dim: AttentionSpec(heads=6, kv_heads=heads, head_dim=dim, rotary_dim=rotary, gate=gate, eps=1e-6)
         for dim, heads, rotary, gate in ((16, 2, 8, True), (64, 3, 64, False), (128, 1, 32, True), (256, 2, 64, True))}


def view_of(case: Case, spec: AttentionSpec, kv: torch.dtype = INT4) -> KvView:
    """Pages whose scales are NaN but for the entries before each row's cursor."""
    rng, views = generator(4), list[Tensor]()
    for bits in (KEY_BITS, VALUE_BITS):
        pool = torch.full((case.pages, PAGE, spec.kv_heads, width(spec.head_dim, bits, kv)), 0xff, dtype=INT4).view(kv)
        for row, table in zip(case.rows, case.batch.pages, strict=True):
            if row.done:
                places = torch.tensor([int(table[place // PAGE]) * PAGE + place % PAGE for place in range(row.done)])
                store(pool, places, torch.randn(row.done, spec.kv_heads, spec.head_dim, generator=rng))
        views.append(pool)
    return KvView(*views)


def rope_of(spec: AttentionSpec) -> Rope:
    return reference.OPS.rope(CASE.batch.positions, RopeSpec(ROPE.theta, spec.rotary_dim))


@cache
def exact_attention(dim: int, dtype: torch.dtype) -> tuple[Tensor, KvView]:
    """The reference's result and its pages."""
    view, weights = view_of(CASE, SPECS[dim]), attention_weights(3, dtype, SPECS[dim])
    x = hidden_states(CASE, dtype).double()
    return reference.attention_mixer(x, weights, view, CASE.fresh(), rope_of(SPECS[dim])), view


def compiled_ops(level: str) -> Ops:
    """Those of csrc at a level. Skips the test where it cannot be had."""
    try:
        return overlay(level)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", SPECS)
@pytest.mark.parametrize("backend", ["torch", "portable", "avx2", "avx512"])
def test_attention(backend: str, dim: int, dtype: torch.dtype) -> None:
    ops: Ops = TORCH if backend == "torch" else compiled_ops(backend)
    spec = SPECS[dim]
    x, weights, view = hidden_states(CASE, dtype), attention_weights(3, dtype, spec), view_of(CASE, spec)
    found = ops.attention_mixer(x, weights, view, CASE.fresh(), rope_of(spec))
    wanted, slow = exact_attention(dim, dtype)
    assert found.dtype == dtype and relative_rms(found, wanted) < {torch.float32: 5e-3, torch.bfloat16: 5e-2}[dtype]
    stored = torch.zeros(CASE.pages * PAGE, dtype=torch.bool)
    stored[CASE.batch.store] = True
    for mine, theirs in ((view.keys, slow.keys), (view.values, slow.values)):
        mine, theirs = mine.flatten(0, 1), theirs.flatten(0, 1)
        assert same_bits(mine[~stored], theirs[~stored]), "an entry of no token was written"
        assert is_finite(mine[stored])
        if dtype == torch.float32:
            assert (mine[stored] != theirs[stored]).float().mean() < 2e-3


# Pools and tiers


def over_int4(*tiers: TierIndex, reuse: bool = True) -> ModelRunner:
    small = small_runtime(embedded_runtime(), batch=4)
    pools = fresh_pools(small, 128, 24, kv=INT4)
    assert pools.sizes.token_bytes == page_bytes(small.config, INT4) // PAGE == 2 * 2 * (42 + 34)
    return replace(small, cache=HybridCache(pools, reuse, tiers))


def test_pages_are_copied_and_checked() -> None:
    pools = over_int4().pools
    for tensor in pools.page_tensors:
        tensor[:, 3] = torch.randint(0, 0x7f, tensor[:, 3].shape, dtype=INT4)
        tensor[:, 5] = 1
    pools.apply([CopyPage(3, 7)])
    for tensor in pools.page_tensors:
        assert same_bits(tensor[:, 7], tensor[:, 3]) and bool((tensor[:, 6] == 0xff).all())
    assert pools.sound((), (3, 7), 2 * PAGE) and not pools.sound((), (3, 8), PAGE + 1)
    pools.values[-1, 7, 3, -1, -2:] = 0xff
    assert pools.sound((), (3, 7), PAGE + 3) and not pools.sound((), (3, 7), PAGE + 4)


def test_only_what_these_pools_could_hold_is_let_in() -> None:
    pools = over_int4().pools
    item = StoredItem("kv", "key", "", 0, 3)
    kept = {name: torch.ones(len(pool), 3, *pool.shape[3:], dtype=INT4)
            for name, pool in zip(("keys", "values"), pools.page_tensors, strict=True)}
    kept["tokens"] = torch.tensor([1, 2, 3])
    assert pools.item_validator.refuse(item, kept) == ""
    assert "its keys are torch.uint8" in pools.item_validator.refuse(item, {**kept, "keys": kept["values"]})
    kept["values"][1, 2, -1, -2:] = 0xff
    assert pools.item_validator.refuse(item, kept) == "its values are not all finite"


PROMPT = numbers(1, 100, 500)


def added(runtime: ModelRunner, request: EngineRequest) -> Engine:
    engine = Engine(runtime)
    engine.add(request)
    return engine


def check_prefix_of_tier(over: Callable[..., ModelRunner], kind: str, place: Path) -> None:
    """A prefix comes back from a tier byte by byte. over(*tiers, reuse): a model with small pools."""
    def tier() -> TierIndex:
        return TierIndex(HostStore(1 << 24) if kind == "host" else DiskStore(place, "model", 1 << 24), threads=False)

    kept = tier()
    first = over(kept)
    told = drain(added(first, greedy(PROMPT, 12)))["a", 0].tokens
    longer = (*PROMPT, *told, *numbers(2, 30, 500))
    wanted = drain(added(over(reuse=False), greedy(longer, 24)))["a", 0].tokens
    again = over(kept if kind == "host" else tier())
    answers = drain(added(again, greedy(longer, 24)))
    assert usage_of(answers).cached_tokens >= 100 and answers["a", 0].tokens == wanted
    pages = [runtime.cache.tree.shared(PROMPT) for runtime in (again, first)]
    for pools in zip(again.pools.page_tensors, first.pools.page_tensors, strict=True):
        found, before = (pool[:, known] for pool, known in zip(pools, pages, strict=True))
        assert len(pages[0]) == 100 // PAGE and is_finite(found) and same_bits(found, before)


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_prefix_comes_back_byte_by_byte(kind: str, tmp_path: Path) -> None:
    check_prefix_of_tier(over_int4, kind, tmp_path)


# What it costs

LEAST, LEAST_BEFORE, MOST, MOST_DIVERGENCE = 0.99, 0.97, 0.02, 0.015
"""Least shares of `equal_greedy_tokens`. Most that the perplexity of SmolLM2 may rise by, a small model with heads of
64 dimensions, and most that its distributions may differ (Kullback-Leibler, in nats a token)."""


def equal_greedy_tokens(device: str, packed: str = "int4") -> tuple[float, float]:
    """Of greedy tokens of the embedded model over bfloat16 K/V, on 200 conversations whose phrasings its training had
    not: the share that packed K/V give after the same tokens, and the share before an answer's first other token."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "tiny"))
    from data import heldout_set

    options: dict[str, Any] = {"device": device, "dtype": "bfloat16", "memory": "256MiB", "speculate": "off"}
    answers, prompts = list[list[list[int]]](), list[tuple[int, ...]]()
    for kv in ("auto", packed):
        with LLM("tiny", kv_dtype=kv, **options) as llm:
            prompts = [llm.chat_processor.chat(sample.messages, tools=sample.tools, variables={
                "enable_thinking": sample.thinking}).request.prompt for sample in heldout_set(7, 40)]
            prompts = [prompt for prompt in prompts if len(prompt) < 750]
            Random(1).shuffle(prompts)
            outputs = llm.generate(prompts[:200], SamplingParams(temperature=0.0, max_tokens=64))
        answers.append([list(output.choices[0].tokens) for output in outputs])
    assert len(answers[0]) == len(answers[1]) == 200
    session, tokens, same, before = Session("tiny", kv_dtype=packed, max_context=1024, **options), 0, 0, 0
    for prompt, plain, coarse in zip(prompts, *answers, strict=False):
        session.reset()
        logits = session.prefill((*prompt, *plain[:-1]), all_logits=True)[len(prompt) - 1:]
        same += sum(int(row.argmax()) == token for row, token in zip(logits, plain, strict=True))
        before += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(plain, coarse, strict=False)))
        tokens += len(plain)
    print(f"{same} of {tokens} greedy tokens are the same over {packed} K/V, {before} before the first other token")
    assert tokens > 3000
    return same / tokens, before / tokens


@pytest.mark.slow
def test_greedy_tokens_of_the_embedded_model() -> None:
    same, before = equal_greedy_tokens("cpu")
    assert same >= LEAST and before >= LEAST_BEFORE


def cost_of(packed: str) -> tuple[float, float]:
    """The rise of SmolLM2's perplexity over that of bfloat16 K/V, which moves by 0.4 % with the text, and the
    divergence from its distributions, which says more."""
    loss, divergence, window, windows = [0.0, 0.0], 0.0, 1024, 12
    with LLM(smollm2(), memory="64MiB", max_context=64) as llm:
        ids = llm.chat_processor.tokenizer.encode(documents())
    sessions = [Session(smollm2(), "bfloat16", kv_dtype=kv, memory="256MiB", max_context=window + 64, speculate="off")
                for kv in ("auto", packed)]
    for start in range(0, window * windows, window):
        tokens, found = ids[start:start + window], list[Tensor]()
        for which, session in enumerate(sessions):
            session.reset()
            found.append(session.prefill(tokens, all_logits=True).float().log_softmax(-1))
            loss[which] += float(torch.nn.functional.nll_loss(found[-1][:-1], torch.tensor(tokens[1:]))) / windows
        divergence += float((found[0].exp() * (found[0] - found[1])).sum(-1).mean()) / windows
    rise = torch.tensor(loss[1] - loss[0]).exp().item() - 1
    print(f"the perplexity rises by {rise:.2%} over {packed} K/V, the divergence is {divergence:.5f}")
    return rise, divergence


@pytest.mark.slow
def test_perplexity_of_a_real_model() -> None:
    rise, divergence = cost_of("int4")
    assert 0.0005 < rise < MOST and 0.001 < divergence < MOST_DIVERGENCE
