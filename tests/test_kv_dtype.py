"""Keys and values as float8: what is refused, what it saves, how numbers are rounded, and that whatever moves pages
moves their bytes. What a GPU's kernels make of them is in test_cuda_kv_dtype.py."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from op_cases import Row, attention_weights, build_batch, hidden_states, kv_view, relative_rms, rope_table, same_bits
from reuse_cases import usage_of
from support import drain, fresh_pools, greedy, numbers, odd_runtime, small_runtime
from torch import Tensor

from deltic.cache.manager import HybridCache
from deltic.cache.offload.directory import CacheDirectory
from deltic.cache.offload.disk import DiskStore, encode
from deltic.cache.offload.host import HostStore
from deltic.cache.offload.identity import Identity
from deltic.cache.offload.index import TierIndex
from deltic.cache.offload.open import open_tiers
from deltic.cache.offload.types import StoredItem
from deltic.cache.operations import CopyPage, PoolSizes
from deltic.cache.tensors import page_bytes, slot_bytes
from deltic.cli import main
from deltic.config import EngineConfig, ModelConfig
from deltic.engine.engine import Engine
from deltic.errors import ConfigError
from deltic.ops import Ops, backends, reference
from deltic.ops.cuda.driver import FOLDER
from deltic.ops.kv import FP8, is_finite, rounded, store, take
from deltic.ops.torch.attention import _attend
from deltic.ops.types import KvView
from deltic.params import PAGE
from deltic.runner.memory import plan_memory
from deltic.runner.model_runner import ModelRunner

NAN, INFINITY = float("nan"), float("inf")
EVERY = torch.arange(256).to(torch.uint8).view(FP8)
"""All float8 numbers."""

# Options


@pytest.mark.parametrize(("options", "message"), [
    ({"kv_dtype": "fp8", "device": "cpu"}, "kv_dtype=fp8 is for NVIDIA GPUs: use int8 or int4, leave it out"),
    ({"kv_dtype": "int8", "device": "cuda"}, "kv_dtype=int8 is for CPUs: use fp8, which has the same size, int4"),
    ({"kv_dtype": "int8", "device": "mlx"}, "kv_dtype is not possible with device mlx"),
    ({"kv_dtype": "e5m2", "device": "cuda"}, "kv_dtype must be one of auto, fp8, int8, int4, not 'e5m2'"),
    ({"kv_dtype": None}, "kv_dtype must be one of auto, fp8, int8, int4, not None")])
def test_what_it_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        EngineConfig(**options)
    assert caught.value.option == "kv_dtype"


def test_the_command_line_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--kv-dtype", "fp8", "tiny", "hi"]) == 2
    assert "--kv-dtype fp8 is for NVIDIA GPUs" in capsys.readouterr().err


# Memory


@pytest.mark.parametrize("head", [False, True])
def test_pages_of_half_the_bytes_are_more_of_them(head: bool) -> None:
    config, pages = ModelConfig.preset("qwen3.5-4b"), []
    for kv in ("auto", "fp8"):
        options = EngineConfig(device="cuda", kv_dtype=kv, memory="16GiB", max_batch=4)
        plan, extras = plan_memory(config, options, torch.bfloat16, head, drafts=False)
        assert extras.kv == (FP8 if kv == "fp8" else None)
        size = page_bytes(config, extras.kv or torch.bfloat16, head)
        state = slot_bytes(config, torch.bfloat16, head)
        taken = PoolSizes(plan.pages, plan.slots, 0, size // PAGE, state, layout=extras.layout).bytes
        assert 15 << 30 < taken <= 16 << 30
        pages.append((plan.pages, size))
    (many, large), (more, small) = pages
    assert large == 2 * small and 1.3 * many < more, "the rest are states"


def test_inspect_says_what_a_page_takes(capsys: pytest.CaptureFixture[str]) -> None:
    memory = []
    for kv in ("auto", "fp8"):
        assert main(["inspect", "--random", "0.8b", "--device", "cuda", "--kv-dtype", kv, "--memory", "4GiB",
                     "--json"]) == 0
        memory.append(json.loads(capsys.readouterr().out)["memory"])
    plain, small = memory
    assert (plain["kv_dtype"], small["kv_dtype"]) == ("bfloat16", "float8_e4m3fn")
    assert plain["page_bytes"] == 2 * small["page_bytes"] and plain["slot_bytes"] == small["slot_bytes"]
    assert small["pages"] > 1.4 * plain["pages"], "the rest are states"


# Numbers


def all_kinds() -> Tensor:
    """All bfloat16 numbers, the middles between neighbours of float8 and what lies beside these, and many others."""
    numbers = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16).float()
    sorted = EVERY[:0x7f].float()
    middles = torch.cat(((sorted[1:] + sorted[:-1]) / 2, torch.tensor([448.0, 464.0, 480.0, 2.0**-10])))
    middles = torch.cat((middles, middles.nextafter(middles + 1), middles.nextafter(middles - 1)))
    rng = torch.Generator().manual_seed(0)
    others = torch.randn(100_000, generator=rng) * torch.rand(100_000, generator=rng).mul(20).sub(11).exp2()
    return torch.cat((numbers, middles, -middles, others))


def test_numbers_saturate_and_what_is_none_stays_so() -> None:
    x = torch.tensor([1e4, -1e4, 449.0, INFINITY, -INFINITY, 448.0, 0.0, -0.0, 2.0**-9, 2.0**-11])
    assert rounded(x, FP8).float().tolist() == [448, -448, 448, 448, -448, 448, 0, 0, 2**-9, 0]
    assert rounded(torch.tensor([NAN, 1.0]), FP8).float().isnan().tolist() == [True, False]
    assert same_bits(rounded(EVERY.float(), FP8)[:0x7f], EVERY[:0x7f])
    assert same_bits(rounded(EVERY.bfloat16(), FP8)[:0x7f], EVERY[:0x7f]), "bfloat16 holds them all"
    assert rounded(x, torch.float32) is x


def test_what_is_no_number_is_found() -> None:
    fine = EVERY[(EVERY.view(torch.uint8) & 0x7f) != 0x7f]
    assert is_finite(fine) and is_finite(fine[:0])
    for byte in (0x7f, 0xff):
        assert not is_finite(torch.cat((fine.view(torch.uint8), torch.tensor([byte], dtype=torch.uint8))).view(FP8))
    assert is_finite(torch.ones(3))
    assert not is_finite(torch.tensor([1, NAN])) and not is_finite(torch.tensor([INFINITY]))


SHIM = """
#include <cmath>
#include <cstring>
#define DEVICE static inline
typedef unsigned char u8;
typedef unsigned int u32;
static u32 __float_as_uint(float x) { u32 r; memcpy(&r, &x, 4); return r; }
static float __uint_as_float(u32 x) { float r; memcpy(&r, &x, 4); return r; }
static int __float2int_rn(float x) { return int(nearbyintf(x)); }
static float half_of(u32 x) {
    const u32 power = x >> 10 & 31, rest = x & 1023;
    const float v = power ? ldexpf(1024 + rest, int(power) - 25) : ldexpf(rest, -24);
    return x & 0x8000 ? -v : v;
}
"""
CALLS = """
extern "C" void narrow(const float *x, u8 *y, int n) { for (int i = 0; i < n; ++i) y[i] = round_e4m3(x[i]); }
extern "C" void widen(const u8 *x, float *y, int n) { for (int i = 0; i < n; ++i) y[i] = spread_e4m3(x[i]); }
"""


def test_kernels_without_the_instruction_round_as_torch_does(tmp_path: Path) -> None:
    """Their own text, compiled for the CPU."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    text = (FOLDER / "kv.cuh").read_text(encoding="utf-8")
    functions = re.findall(r"^DEVICE \w+ (?:round|spread)_e4m3\(.*?^}\n", text, re.DOTALL | re.MULTILINE)
    assert len(functions) == 2
    (tmp_path / "e4m3.cpp").write_text(SHIM + "".join(functions) + CALLS, encoding="utf-8")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(tmp_path / "e4m3.so"), str(tmp_path / "e4m3.cpp")],
                   check=True)
    library = ctypes.CDLL(str(tmp_path / "e4m3.so"))

    def call(name: str, x: Tensor, y: Tensor) -> Tensor:
        getattr(library, name)(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), len(x))
        return y

    x = all_kinds()
    found, wanted = call("narrow", x, torch.empty(len(x), dtype=torch.uint8)), rounded(x, FP8)
    numbers = ~x.isnan()
    assert torch.equal(found[numbers], wanted.view(torch.uint8)[numbers])
    assert ((found[~numbers] & 0x7f) == 0x7f).all()
    back = call("widen", EVERY.view(torch.uint8), torch.empty(256))
    assert torch.equal(back.nan_to_num(7), EVERY.float().nan_to_num(7))
    assert torch.equal(back.signbit()[:0xff], EVERY.float().signbit()[:0xff]) and back.isnan().sum() == 2


# Attention

CASE = build_batch([Row(1, 5), Row(1, 0), Row(1, 33), Row(3, 14), Row(40, 7), Row(17, 0)], 8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["torch", "reference", "cpu"])
def test_attention(backend: str, dtype: torch.dtype) -> None:
    """The new tokens' keys and values are read as they are stored, so that it is attention over what the pages hold."""
    ops: Ops | None = backends().get(backend)
    if ops is None:
        pytest.skip("the kernels are not compiled")
    x, weights = hidden_states(CASE, dtype), attention_weights(3, dtype)
    view, rope = kv_view(CASE, FP8), rope_table(reference.OPS, CASE)
    slow = KvView(view.keys.clone(), view.values.clone())
    before = kv_view(CASE, torch.bfloat16)
    found = ops.attention_mixer(x, weights, view, CASE.fresh(), rope)
    wanted = reference.attention_mixer(x.double(), attention_weights(3, torch.float64), slow, CASE.fresh(), rope)
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    assert found.dtype == dtype and relative_rms(found, wanted) < tolerance
    coarse = relative_rms(found, ops.attention_mixer(
        x.bfloat16(), attention_weights(3, torch.bfloat16), before, CASE.fresh(), rope))
    assert 5e-3 < coarse < 8e-2, "e4m3 has four bits of 8"
    places, stored = CASE.batch.store, torch.zeros(CASE.pages * PAGE, dtype=torch.bool)
    stored[places] = True
    for name in ("keys", "values"):
        mine, theirs = (getattr(each, name).flatten(0, 1) for each in (view, slow))
        assert same_bits(mine[~stored], theirs[~stored]), "an entry of no token was written"
        if dtype != torch.bfloat16:
            assert (mine[stored].view(torch.uint8) != theirs[stored].view(torch.uint8)).float().mean() < 1e-3
        assert is_finite(mine[stored])


def test_float8_is_read_as_the_numbers_that_it_is() -> None:
    view, query = kv_view(CASE, FP8), torch.randn(CASE.batch.layout.tokens, 6, 10, dtype=torch.float64)
    store(view.keys, CASE.batch.store, query[:, :2])
    store(view.values, CASE.batch.store, query[:, 2:4])
    plain = KvView(view.keys.double(), view.values.double())
    assert torch.equal(_attend(query, view, CASE.fresh()), _attend(query, plain, CASE.fresh()))
    index = torch.tensor([2, 0])
    assert same_bits(take(view.keys, 0, index), torch.stack([view.keys[2], view.keys[0]]))


# Pools and tiers


def over_float8(*tiers: TierIndex, reuse: bool = True) -> ModelRunner:
    """On the CPU, where no option gives it."""
    small = small_runtime(odd_runtime(), batch=4)
    pools = fresh_pools(small, 384, 24, kv=FP8)
    assert pools.keys.dtype == FP8 and pools.conv.dtype == torch.float32
    return replace(small, cache=HybridCache(pools, reuse, tiers))


def test_pages_are_copied_and_looked_at() -> None:
    pools = over_float8().pools
    assert pools.sizes.token_bytes == page_bytes(odd_runtime().config, FP8) // PAGE
    for tensor in pools.page_tensors:
        tensor[:, 3] = torch.randn(tensor[:, 3].shape).to(FP8)
        tensor[:, 5] = 1
    pools.apply([CopyPage(3, 7)])
    for tensor in pools.page_tensors:
        assert same_bits(tensor[:, 7], tensor[:, 3]) and tensor[:, 6].float().isnan().all()
    assert pools.sound((), (3, 7), 2 * PAGE) and pools.sound((), (3, 7, 8), 2 * PAGE)
    assert not pools.sound((), (3, 8), PAGE + 1)
    pools.values[-1, 7, 3, 0, 0] = NAN
    assert pools.sound((), (3, 7), PAGE + 3) and not pools.sound((), (3, 7), PAGE + 4)


PROMPT = numbers(1, 100, 500)


@pytest.mark.parametrize("store", ["host", "disk"])
def test_a_prefix_comes_back_byte_by_byte(store: str, tmp_path: Path) -> None:
    def tier() -> TierIndex:
        return TierIndex(
            HostStore(1 << 24) if store == "host" else DiskStore(tmp_path, "model", 1 << 24), threads=False
        )

    kept = tier()
    first = over_float8(kept)
    told = drain(added(first, greedy(PROMPT, 12)))["a", 0].tokens
    longer = (*PROMPT, *told, *numbers(2, 30, 500))
    wanted = drain(added(over_float8(reuse=False), greedy(longer, 24)))["a", 0].tokens
    again = over_float8(kept if store == "host" else tier())
    answers = drain(added(again, greedy(longer, 24)))
    assert usage_of(answers).cached_tokens >= 100 and answers["a", 0].tokens == wanted
    pages = [runtime.cache.tree.shared(PROMPT) for runtime in (again, first)]
    assert [len(known) for known in pages] == [100 // PAGE] * 2
    for pools in zip(again.pools.page_tensors, first.pools.page_tensors, strict=True):
        found, before = (pool[:, known] for pool, known in zip(pools, pages, strict=True))
        assert is_finite(found) and same_bits(found, before)


def added(runtime: ModelRunner, *requests: Any) -> Engine:
    engine = Engine(runtime)
    for request in requests:
        engine.add(request)
    return engine


def test_only_what_these_pools_could_hold_is_let_in() -> None:
    pools = over_float8().pools
    item = StoredItem("kv", "key", "", 0, 3)
    shape = (len(pools.keys), 3, *pools.keys.shape[3:])

    def why(dtype: torch.dtype, byte: int = 0) -> str:
        kv = torch.ones(shape).to(dtype)
        if byte:
            kv.view(torch.uint8)[0, 0, 0, 0] = byte
        return pools.item_validator.refuse(item, {"tokens": torch.tensor([1, 2, 3]), "keys": kv, "values": kv})

    assert why(FP8) == "" and why(FP8, 0x7e) == ""
    assert "its keys are torch.bfloat16" in why(torch.bfloat16)
    assert why(FP8, 0x7f) == why(FP8, 0xff) == "its keys are not all finite"


def test_another_dtype_is_another_directory(tmp_path: Path) -> None:
    """What was kept with one is not found with another."""
    options, made = EngineConfig(device="cpu", cache_dir=str(tmp_path)), Identity({"model": "a"})
    for dtype in (torch.bfloat16, FP8, torch.bfloat16, FP8):
        tiers, notes = open_tiers("a", options, odd_runtime().ops, made, dtype)
        assert len(tiers) == 1 and notes is not None
        tiers[0].store.write(StoredItem("kv", "0" * 32, "", 0, 1), {"keys": torch.ones(1).to(dtype)})
    labels = CacheDirectory(tmp_path).models()
    assert {label.about.partition(",")[0] for label in labels} == {
        "bfloat16", "float8_e4m3fn"}


def test_files_are_safetensors() -> None:
    from safetensors.torch import load

    content = b"".join(bytes(piece) for piece in encode({"keys": EVERY}))
    assert BytesIO(content).getbuffer().nbytes > 256
    assert same_bits(load(content)["keys"], EVERY)
