"""Recurrent states as bfloat16: what is refused, what it saves, where they are rounded, and that whatever moves slots
moves their bits. What a GPU's kernels make of them is in test_cuda_state_dtype.py."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from op_cases import (
    Case,
    Row,
    build_batch,
    cases,
    clone_state,
    gdn_weights,
    hidden_states,
    relative_rms,
    same_bits,
    state_errors,
    state_view,
    written_slots,
)
from reuse_cases import usage_of
from support import drain, embedded_runtime, fresh_pools, greedy, numbers, odd_runtime, serve, small_runtime
from torch import Tensor

from deltic.cache.manager import HybridCache
from deltic.cache.offload.directory import CacheDirectory
from deltic.cache.offload.disk import DiskStore
from deltic.cache.offload.host import HostStore
from deltic.cache.offload.identity import Identity
from deltic.cache.offload.index import TierIndex
from deltic.cache.offload.open import open_tiers
from deltic.cache.offload.types import StoredItem
from deltic.cache.operations import CopySlot, FlushDeltaLog, PoolSizes
from deltic.cache.tensors import delta_log_bytes, page_bytes, slot_bytes
from deltic.cli import main
from deltic.config import EngineConfig, ModelConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import load
from deltic.errors import ConfigError
from deltic.export.backend import effective_options
from deltic.export.program import ProgramInfo
from deltic.ops import Ops, backends, explain, reference
from deltic.ops.torch import OPS as TORCH
from deltic.ops.types import PAGE, StateView
from deltic.runner.memory import plan_memory
from deltic.runner.model_runner import ModelRunner
from deltic.session import Session

NAN = float("nan")
BF16 = torch.bfloat16

# Options


@pytest.mark.parametrize("value", ["float16", "auto", None])
def test_what_it_cannot_be(value: Any) -> None:
    with pytest.raises(ConfigError, match="state_dtype must be one of float32, bfloat16, not ") as caught:
        EngineConfig(state_dtype=value)
    assert caught.value.option == "state_dtype"


def test_a_compiled_program_has_states_of_its_own() -> None:
    """And experts, and weights."""
    info: Any = ProgramInfo.__new__(ProgramInfo)
    for name, value in (("state_dtype", "bfloat16"), ("kv_dtype", "fp8"), ("mmproj", "a.gguf"), ("expert_cap", 2),
                        ("expert_memory", "1GiB"), ("gpu_memory_utilization", 0.5), ("rope_scaling", "yarn:4")):
        with pytest.raises(ConfigError, match=f"{name}={value} has no meaning for a compiled program: leave it out"):
            effective_options(EngineConfig(**{name: value}), info)


# Memory


@pytest.mark.parametrize("head", [False, True])
def test_states_of_half_the_bytes_are_more_of_them(head: bool) -> None:
    config, slots = ModelConfig.preset("qwen3.5-4b"), []
    for state in ("float32", "bfloat16"):
        options = EngineConfig(device="cuda", state_dtype=state, memory="16GiB", max_batch=64)
        plan, extras = plan_memory(config, options, BF16, head, drafts=False)
        assert extras.state == getattr(torch, state)
        size = slot_bytes(config, BF16, head, extras.state)
        token = page_bytes(config, BF16, head) // PAGE
        taken = PoolSizes(plan.pages, plan.slots, 0, token, size, layout=extras.layout).bytes
        assert 15 << 30 < taken <= 16 << 30
        slots.append((plan.slots, size))
    (few, large), (more, small) = slots
    linear = config.linear
    assert linear
    numbers = linear.num_value_heads * linear.key_head_dim * linear.value_head_dim * len(config.linear_layers)
    assert large - small == 2 * numbers and 1.9 < large / small <= 2, "convolutions stay as they are"
    assert more > 1.9 * few, "the memory of pages becomes slots"


def test_replay_rings_stay_as_they_are() -> None:
    config, plans = ModelConfig.preset("qwen3.5-4b"), []
    for state in ("float32", "bfloat16"):
        options = EngineConfig(device="cuda", state_dtype=state, memory="16GiB", max_batch=64)
        plans.append(plan_memory(config, options, BF16, False, drafts=True)[1].delta_logs)
    assert plans == [64, 64]
    pools = over_bfloat16().pools
    assert pools.delta_logs and all(tensor.dtype == torch.float32 for tensor in pools.delta_logs)
    size = delta_log_bytes(odd_runtime().config, torch.float32)
    assert sum(tensor[:, :1].nbytes for tensor in pools.delta_logs) == size


def test_inspect_says_what_a_state_takes(capsys: pytest.CaptureFixture[str]) -> None:
    memory = []
    for state in ("float32", "bfloat16"):
        assert main(["inspect", "--random", "0.8b", "--state-dtype", state, "--memory", "4GiB", "--json"]) == 0
        memory.append(json.loads(capsys.readouterr().out)["memory"])
    plain, small = memory
    assert (plain["state_dtype"], small["state_dtype"]) == ("float32", "bfloat16")
    assert plain["page_bytes"] == small["page_bytes"] and 1.9 < plain["slot_bytes"] / small["slot_bytes"] <= 2
    assert small["slots"] > 1.4 * plain["slots"], "the rest are pages"


# Ops


def narrow(view: StateView) -> StateView:
    return replace(view, recurrent=view.recurrent.to(BF16))


def run(ops: Ops, case: Case, dtype: torch.dtype, view: StateView) -> Tensor:
    return ops.gdn_mixer(hidden_states(case, dtype), gdn_weights(1, dtype), view, case.fresh())


@pytest.mark.parametrize("backend", ["torch", "reference", "cpu"])
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
@pytest.mark.covering
def test_states_are_rounded_once_where_they_are_written(case: Case, backend: str) -> None:
    """And nothing else is: as in float64 from the same states, rounded in the end."""
    view = narrow(state_view(case, torch.float32))
    before = clone_state(view)
    wide = state_view(case, torch.float64)
    slow = replace(wide, recurrent=before.recurrent.double())
    output = run(backends()[backend], case, torch.float32, view)
    wanted = run(reference.OPS, case, torch.float64, slow)
    assert view.recurrent.dtype == BF16 and relative_rms(output, wanted) < 2e-5
    errors = state_errors(case, view, slow, before)
    assert errors.pop("recurrent") < 3e-3 and max(errors.values()) < 2e-5
    slots = list(written_slots(case))
    found, exact = view.recurrent[slots], slow.recurrent[slots].to(BF16)
    assert found.numel() == 0 or (found != exact).float().mean() < 0.01, "others than near the middle of two numbers"


@pytest.mark.parametrize("backend", ["torch", "reference", "cpu"])
def test_deferred_writes_round_less_often(backend: str) -> None:
    """Five tokens, each into the slot; or into a ring, which is then folded."""
    ops, tokens = backends()[backend], 5
    found: list[Tensor] = []
    for ring in (False, True):
        made = build_batch([Row(1, 20, append=ring)], 3)
        view, exact = narrow(state_view(made, torch.float32)), state_view(made, torch.float64)
        exact = replace(exact, recurrent=view.recurrent.double())
        for index in range(tokens):
            row = Row(1, 20 + index, ring=index if ring else 0, append=ring)
            case = replace(build_batch([row], 3), seed=index)
            run(ops, case, torch.float32, view)
            run(reference.OPS, case, torch.float64, exact)
            if not ring:
                exact.recurrent.copy_(exact.recurrent.to(BF16))
        slot, unit = int(made.batch.source[0]), int(made.batch.delta_log[0])
        if ring:
            ops.flush_delta_log((view,), slot, unit, 20, 25, slot)
            reference.flush_delta_log((exact,), slot, unit, 20, 25, slot)
        assert (view.recurrent[slot] != exact.recurrent[slot].to(BF16)).float().mean() < 0.01
        found.append(view.recurrent[slot].double())
    assert 5e-4 < relative_rms(found[0], found[1]) < 2e-2


# Pools


def over_bfloat16(*tiers: TierIndex, reuse: bool = True, slots: int = 24) -> ModelRunner:
    small = small_runtime(odd_runtime(), batch=4)
    pools = fresh_pools(small, 384, slots, state=BF16)
    assert pools.recurrent.dtype == BF16 and pools.conv.dtype == torch.float32
    return replace(small, cache=HybridCache(pools, reuse, tiers))


def test_slots_are_copied_folded_and_looked_at() -> None:
    pools = over_bfloat16().pools
    config = odd_runtime().config
    assert pools.sizes.slot_bytes == slot_bytes(config, torch.float32, kind=BF16)
    for tensor in pools.slot_tensors:
        tensor[:, 3] = torch.randn(tensor[:, 3].shape).to(tensor.dtype)
    pools.apply([CopySlot(3, 7)])
    assert all(same_bits(tensor[:, 7], tensor[:, 3]) for tensor in pools.slot_tensors)
    assert pools.sound((3, 7), (), 0) and not pools.sound((3, 8), (), 0)
    assert pools.delta_logs
    for tensor in pools.delta_logs:
        tensor[:, 2] = torch.rand(tensor[:, 2].shape).to(tensor.dtype)
    pools.apply([FlushDeltaLog(7, 2, 20, 24)])
    for layer in range(len(pools.recurrent)):
        wide = StateView(pools.recurrent[layer, 3:4].double(), pools.conv[layer, 3:4].clone(),
                         pools.state_views()[layer].delta_log)
        reference.flush_delta_log((wide,), 0, 2, 20, 24, 0)
        assert (pools.recurrent[layer, 7] != wide.recurrent[0].to(BF16)).float().mean() < 0.01


def test_only_what_these_pools_could_hold_is_let_in() -> None:
    pools = over_bfloat16().pools
    item = StoredItem("state", "key", "", 0, 30)

    def why(dtype: torch.dtype, number: float = 1.0) -> str:
        tensors = {name: torch.ones(pool[:, 0].shape).to(pool.dtype) for name, pool in pools.named_slots.items()}
        tensors["recurrent"] = (tensors["recurrent"] * number).to(dtype)
        return pools.item_validator.refuse(item, tensors)

    assert why(BF16) == ""
    assert "its recurrent are torch.float32" in why(torch.float32)
    assert why(BF16, NAN) == "its recurrent are not all finite"


def test_another_dtype_is_another_directory(tmp_path: Path) -> None:
    """What was kept with one is not found with another."""
    made = Identity({"model": "a"})
    for state in ("float32", "bfloat16", "float32", "bfloat16"):
        options = EngineConfig(device="cpu", cache_dir=str(tmp_path), state_dtype=state)
        tiers, notes = open_tiers("a", options, odd_runtime().ops, made, BF16)
        assert len(tiers) == 1 and notes is not None
        tiers[0].store.write(StoredItem("state", "0" * 32, "", 0, 1), {"recurrent": torch.ones(1)})
    labels = CacheDirectory(tmp_path).models()
    about = sorted(label.about for label in labels)
    assert len(about) == 2 and "states of bfloat16" in about[1] and "states" not in about[0]


PROMPT = numbers(1, 100, 500)


@pytest.mark.parametrize("store", ["host", "disk"])
def test_a_prefix_comes_back_bit_by_bit(store: str, tmp_path: Path) -> None:
    def tier() -> TierIndex:
        return TierIndex(
            HostStore(1 << 24) if store == "host" else DiskStore(tmp_path, "model", 1 << 24), threads=False
        )

    kept = tier()
    first = over_bfloat16(kept)
    told = serve(first, [greedy(PROMPT, 12)])["a", 0].tokens
    longer = (*PROMPT, *told, *numbers(2, 30, 500))
    wanted = serve(first, [greedy(longer, 24)])
    again = over_bfloat16(kept if store == "host" else tier())
    answers = serve(again, [greedy(longer, 24)])
    assert usage_of(answers).cached_tokens >= 100
    assert answers["a", 0].tokens == wanted["a", 0].tokens, "both have gone on from the same state"


# Through the engine


@lru_cache(maxsize=2)
def embedded(state: str, speculate: str = "off") -> ModelRunner:
    return load(None, EngineConfig(dtype="float32", memory="32MiB", max_batch=4, max_context=512, threads=1,
                                   speculate=speculate, state_dtype=state))


def test_engine_answers_and_reports_backends() -> None:
    plain, small = embedded("float32"), embedded("bfloat16")
    assert small.pools.recurrent.dtype == BF16 and small.pools.conv.dtype == torch.float32
    assert small.memory.slots > 1.4 * plain.memory.slots
    served = explain(small.decoder.ops, small.decoder.weights, small.views)
    if plain.step is not None:  # the compiled kernels are there
        assert small.step is None
        for name in ("gdn_mixer", "flush_delta_log"):
            assert served[name] == "torch (the states are not float32)"
        assert served["mlp"] == served["attention_mixer"] == "cpu"
    answers = serve(small, [greedy(numbers(seed, 60, 500), 30, str(seed)) for seed in range(6)])
    assert all(len(answer.tokens) == 30 and answer.last.finish == "length" for answer in answers.values())


def check_preempted(runtime: ModelRunner) -> None:
    """Four sequences are answered that have pages for hardly two."""
    engine = Engine(runtime)
    for seed in range(4):
        engine.add(greedy(numbers(seed, 60, 500), 50, str(seed)))
    answers = drain(engine)
    assert engine.scheduler.preemptions and all(len(answer.tokens) == 50 for answer in answers.values())


def test_preempted_sequences_are_answered() -> None:
    """With pages for hardly two of four."""
    runtime = embedded("bfloat16")
    small = small_runtime(runtime, batch=4, pages=14, context=200)
    small = replace(small, cache=HybridCache(fresh_pools(runtime, 14, 9), True))
    assert small.pools.recurrent.dtype == BF16
    check_preempted(small)


def test_drafts_are_verified() -> None:
    runtime = embedded("bfloat16", "mtp:3")
    engine = Engine(runtime)
    for seed in range(2):
        engine.add(greedy(numbers(seed, 40, 500), 40, str(seed)))
    answers = drain(engine)
    assert sum(engine.speculator.stats.drafted_at) and all(len(answer.tokens) == 40 for answer in answers.values())


TOKENS, SHARE = 40, 0.97
"""Of greedy tokens so many at least are those over float32 states."""


@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_greedy_tokens_mostly_equal_those_of_float32_states(count: int) -> None:
    """Each token follows those of float32 states, because answers that have diverged show nothing more."""
    prompts = [numbers(seed, 40 + 30 * seed, 500) for seed in range(count)]
    plain = embedded_runtime()
    wanted = serve(plain, [greedy(prompt, TOKENS, str(seed)) for seed, prompt in enumerate(prompts)])
    sessions = [Session(dtype="float32", memory="16MiB", max_context=512, threads=1, speculate="off", state_dtype=state)
                for state in ("float32", "bfloat16")]
    same, errors = 0, []
    for seed, prompt in enumerate(prompts):
        told = wanted[str(seed), 0].tokens
        rows = []
        for session in sessions:
            session.reset()
            rows.append(torch.stack([session.prefill(prompt), *(session.step(token) for token in told[:-1])]))
        assert rows[0].argmax(-1).tolist() == told
        same += int((rows[1].argmax(-1) == rows[0].argmax(-1)).sum())
        errors.append(relative_rms(rows[1], rows[0]))
    share = same / (count * TOKENS)
    print(f"{share:.2%} of {count * TOKENS} greedy tokens are the same over bfloat16 states, logits "
          f"{max(errors):.1e} off at most")
    assert share >= SHARE and 1e-4 < max(errors) < 5e-2


def test_torch_ops_serve_states_of_any_dtype_alike() -> None:
    """float32 states in a span are worked on in place; others are read and written back."""
    case = build_batch([Row(1, done) for done in (3, 9, 30)], 3, consecutive=True)
    assert case.batch.span
    view = state_view(case, torch.float32)
    small = narrow(view)
    view = replace(view, recurrent=small.recurrent.float())
    assert same_bits(run(TORCH, case, torch.float32, view), run(TORCH, case, torch.float32, small))
    slots = list(written_slots(case))
    assert same_bits(view.recurrent[slots].to(BF16), small.recurrent[slots])
