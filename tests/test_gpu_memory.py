"""How much of a card's memory the cache takes, planned without a card."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from deltic.cache.memory_plan import MemoryPlan
from deltic.cache.operations import PoolSizes
from deltic.cache.tensors import PoolOptions, delta_log_bytes, page_bytes, slot_bytes
from deltic.cli.inspect import head_bytes, plan_cache, weight_bytes
from deltic.config import EngineConfig, ModelConfig, shard_config
from deltic.errors import ConfigError, ModelError
from deltic.params import PAGE
from deltic.runner.memory import (
    card_room,
    expected_card,
    fit_card,
    free_on_card,
    plan_memory,
    step_bytes,
    whole_blocks,
    working_bytes,
)

GIB = 1 << 30


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Free and total bytes, which a test may change."""
    sizes = [70 * GIB, 80 * GIB]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: tuple(sizes))
    return sizes


def planned(**options: Any) -> tuple[int, int]:
    """Slots and pages of a cache."""
    config = EngineConfig(device="cuda", max_context=4096, **options)
    plan, _ = plan_memory(ModelConfig.preset("qwen3.5-4b"), config, torch.bfloat16, False, False)
    return plan.slots, plan.pages


def test_a_share_of_the_card_is_of_all_of_it(card: list[int]) -> None:
    options = EngineConfig(device="cuda", gpu_memory_utilization=0.9)
    assert card_room(options) == 62 * GIB, "10 of 80 are taken"
    assert card_room(EngineConfig(device="cuda", gpu_memory="24GiB")) == 13.5 * GIB, "torch may not take half a GiB"
    assert card_room(EngineConfig(device="cuda", gpu_memory="200GiB")) == 69.5 * GIB, "more than the card has"
    assert free_on_card(options) == 70 * GIB
    assert free_on_card(EngineConfig(device="cuda", gpu_memory="24GiB")) == 14 * GIB
    card[0] = 4 * GIB
    with pytest.raises(ConfigError, match=r"=0.9 leaves no memory.*of 73728 MiB, weights.* take 77824.*raise it"):
        card_room(options)


def test_the_cache_takes_what_a_share_leaves(card: list[int]) -> None:
    config = ModelConfig.preset("qwen3.5-4b")
    work = working_bytes(config, 8192, context=4096)
    assert GIB < work < 4 * GIB
    assert planned() == planned(gpu_memory_utilization=0.9) == planned(memory=str(62 * GIB - work))
    assert planned(gpu_memory_utilization=0.5) == planned(memory=str(30 * GIB - work))
    assert planned(gpu_memory="40GiB") == planned(memory=str(30 * GIB - GIB // 2 - work))
    card[0] = 8 * GIB
    assert planned() == planned(memory=str(2 * GIB)), "weights nearly fill the card: a quarter of what is free"


def test_more_tokens_and_more_experts_take_more_to_work_in() -> None:
    dense, mixture = (ModelConfig.preset(name) for name in ("qwen3.5-4b", "qwen3.5-35b-a3b"))
    kept = working_bytes(dense, 0)
    assert working_bytes(dense, 16384) - kept == 2 * (working_bytes(dense, 8192) - kept) > 0
    assert working_bytes(mixture, 8192) > working_bytes(dense, 8192) // 2


def test_long_contexts_take_memory_of_steps(card: list[int]) -> None:
    """One layer's keys and values: 4 heads of 256, gathered in two bytes."""
    config, given = ModelConfig.preset("qwen3.5-4b"), "24GiB"
    with_keys_and_values = working_bytes(config, 2048, context=1 << 16) - working_bytes(config, 2048)
    assert with_keys_and_values >= 2 * (1 << 16) * 4 * 256 * 2
    short, usual, long = (step_bytes(config, EngineConfig(device="cuda", gpu_memory=given, max_context=context))
                          for context in (4096, None, 1 << 17))
    assert short < usual < long and usual == working_bytes(config, 8192, context=1 << 16)


def test_share_that_leaves_no_memory_is_an_error(card: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"=0.13 leaves no memory.*raise it, lower `token_budget`"):
        planned(gpu_memory_utilization=0.13)


@pytest.mark.parametrize("share", [0, -0.5, 1.5, "most", True, float("nan")])
def test_a_share_is_a_number(share: Any) -> None:
    with pytest.raises(ConfigError, match="must be a number above 0 and at most 1"):
        EngineConfig(device="cuda", gpu_memory_utilization=share)


@pytest.mark.parametrize("limit", [{"gpu_memory_utilization": 0.9}, {"gpu_memory": "24GiB"}])
@pytest.mark.parametrize(("options", "message"), [
    ({"device": "cpu"}, "is for GPUs: leave it out"), ({"memory": "4GiB"}, "leave one of them out"),
    ({"speculate": "draft:tiny"}, "not possible with a draft model")])
def test_what_a_limit_is_not_for(options: dict[str, Any], message: str, limit: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        EngineConfig(**{"device": "cuda", **limit, **options})
    assert caught.value.option == next(iter(limit))


def test_a_size_and_a_share_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="leave one of them out") as caught:
        EngineConfig(device="cuda", gpu_memory="24GiB", gpu_memory_utilization=0.9)
    assert caught.value.option == "gpu_memory"
    with pytest.raises(ConfigError, match="gpu_memory must be a size such as 4GiB"):
        EngineConfig(device="cuda", gpu_memory="0.8")


@pytest.mark.parametrize(("size", "tokens"), [("24GiB", 2048), ("32GiB", 2048), ("40GiB", 8192)])
def test_a_size_restricts_torch_and_shortens_steps(card: list[int], monkeypatch: pytest.MonkeyPatch, size: str,
                                                   tokens: int) -> None:
    fractions = list[float]()
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: fractions.append(share))
    options = fit_card(EngineConfig(device="cuda", gpu_memory=size))
    assert options.token_budget == tokens
    # 10 GiB are taken, 3 of them by torch; half a GiB is for what torch does not allocate
    assert fractions == [pytest.approx((int(size[:2]) - 7 - 0.5) / 80)]
    assert fit_card(replace(options, token_budget=100)).token_budget == 100
    with pytest.raises(ConfigError, match=r"gpu_memory=7GiB is less than CUDA and other programs take.* 7680 MiB"):
        fit_card(EngineConfig(device="cuda", gpu_memory="7GiB"))
    fractions.clear()
    whole = EngineConfig(device="cuda")
    assert fit_card(whole) is whole and not fractions
    assert fit_card(EngineConfig(device="cpu")).token_budget == 512
    card[:] = 23 * GIB, 24 * GIB
    assert fit_card(whole).token_budget == 2048 and not fractions


@pytest.mark.parametrize(("options", "small"), [
    ({"gpu_memory": "24GiB"}, True), ({"gpu_memory": "40GiB"}, False), ({}, False), ({"device": "cpu"}, False),
], ids=str)
def test_blocks_are_whole_while_weights_are_read(card: list[int], monkeypatch: pytest.MonkeyPatch,
                                                 options: dict[str, str], small: bool) -> None:
    settings = list[str]()
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append, raising=False)
    monkeypatch.setattr("deltic.runner.memory.empty_cache", lambda devices: None)
    config = EngineConfig(**{"device": "cuda", **options})
    with suppress(ModelError), whole_blocks(config):
        assert settings == ["max_split_size_mb:32"] * small
        raise ModelError("the file is truncated")
    assert settings[1:] == ["max_split_size_mb:1048576"] * small
    settings.clear()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    with whole_blocks(config):
        assert not settings


def test_several_gpus_go_by_the_fullest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its part of every page and slot."""
    sizes, fractions = [(70 * GIB, 80 * GIB), (50 * GIB, 80 * GIB)], list[tuple[float, int]]()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: sizes[torch.device(device or 0).index or 0])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", lambda settings: None)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction",
                        lambda share, device: fractions.append((share, device)))
    config, options = ModelConfig.preset("qwen3.5-4b"), EngineConfig(device="cuda", tp=2, gpu_memory="40GiB")
    assert free_on_card(options) == 10 * GIB, "30 of 40 are taken on the second one"
    fit_card(options)
    assert fractions == [(29.5 / 80, 0), (9.5 / 80, 1)]
    own = shard_config(config, 2)
    work = working_bytes(own, 8192, context=1 << 16)
    assert work < working_bytes(config, 8192, context=1 << 16)
    found, _ = plan_memory(config, options, torch.bfloat16, False, False)
    left = 19 * GIB // 2 - work
    given = EngineConfig(device="cuda", tp=2, memory=str(2 * left))
    wanted, _ = plan_memory(config, given, torch.bfloat16, False, False)
    assert (found.pages, found.slots) == (wanted.pages, wanted.slots)
    one, _ = plan_memory(own, EngineConfig(device="cuda", memory=str(left)), torch.bfloat16, False, False)
    assert abs(found.pages - one.pages) < 100, "a device has room for its part of each page"
    sizes[1] = 5 * GIB, 80 * GIB
    with pytest.raises(ConfigError, match="gpu_memory=40GiB is less than CUDA and other programs take"):
        fit_card(options)


TOWER = GIB
"""More than the vision tower of the 27B takes in bfloat16."""


@pytest.mark.parametrize(("kv", "batch"), [("fp8", 8), ("int4", 8)])
def test_27b_in_4_bits_has_64k_tokens_of_context_in_24_gib(kv: str, batch: int) -> None:
    """With its vision tower and drafts."""
    config = ModelConfig.preset("qwen3.5-27b")
    options = EngineConfig(device="cuda", gpu_memory="24GiB", quant="q4_k", max_context=1 << 16, kv_dtype=kv)
    weights = weight_bytes(config, "bfloat16", "q4_k") + head_bytes(config, options)
    assert 4.5 < 8 * weight_bytes(config, "bfloat16", "q4_k") / config.parameter_count < 5.2
    card = expected_card(config, options, weights + TOWER)
    assert card and card.limit == 24 * GIB
    plan, pools = plan_memory(config, options, torch.bfloat16, True, True, card=card)
    assert plan.max_context == 1 << 16 and plan.max_batch >= batch and pools.delta_logs == plan.max_batch
    total, cache = plan.notes
    assert total.startswith("GPU memory: 24.00 GiB = ") and "contexts of up to 65,536 tokens" in cache
    kv, state = page_bytes(config, pools.kv or torch.bfloat16, True), slot_bytes(config, torch.bfloat16, True)
    used = PoolSizes(plan.pages, plan.slots, 0, kv // PAGE, state, layout=pools.layout).bytes
    used += pools.delta_logs * delta_log_bytes(config, torch.bfloat16)
    assert card.taken + card.steps + used <= 24 * GIB


@pytest.mark.parametrize("size", ["16GiB", "12GiB"])
def test_9b_fits_smaller_cards(size: str) -> None:
    limits: dict[str, Any] = {"device": "cuda", "gpu_memory": size, "quant": "q4_k"}
    plan, _ = preset_plan("qwen3.5-9b", EngineConfig(**limits))
    wide, _ = preset_plan("qwen3.5-9b", EngineConfig(**limits, kv_dtype="fp8"))
    assert plan.max_batch == 16 and 64_000 < plan.max_context < wide.max_context
    assert any("`kv_dtype='fp8'` would hold" in warning for warning in plan.warnings)
    assert not any("fp8" in warning for warning in wide.warnings)


def test_what_does_not_fit_at_all_is_an_error() -> None:
    options = EngineConfig(device="cuda", gpu_memory="9GiB", quant="q4_k")
    with pytest.raises(ConfigError, match=r"even with all feed-forwards in host memory, gpu_memory=9GiB leaves no "
                                          r"memory.*fewer bits.*`vision=False`.*drafts"):
        preset_plan("qwen3.5-27b", options)


def preset_plan(name: str, options: EngineConfig) -> tuple[MemoryPlan, PoolOptions]:
    found = plan_cache(ModelConfig.preset(name), options)
    assert found
    return found


def test_256_sequences_of_4b_run_in_30_gib() -> None:
    """A sequence takes one slot and one delta log."""
    config, unit = ModelConfig.preset("qwen3.5-4b"), torch.bfloat16
    assert slot_bytes(config, unit) + delta_log_bytes(config, unit) < 85 << 20
    options = EngineConfig(device="cuda", memory="30GiB", max_batch=256)
    plan, pools = plan_memory(config, options, unit, False, False, defers=True)
    assert plan.max_batch == pools.delta_logs == 256 and not plan.warnings
    layout = plan.layout
    assert layout and layout.unit + delta_log_bytes(config, unit) < 85 << 20
    running = 256 * layout.unit + pools.delta_logs * delta_log_bytes(config, unit)
    frames = plan.pages // layout.pages
    assert frames * layout.size + plan.slots * layout.side + running - 256 * layout.unit <= 30 << 30
    assert running / 256 < 85 << 20 and (frames - 256) * layout.pages * PAGE > 256 * 1600


def test_256_sequences_of_9b_run_on_a_card_of_80_gb(card: list[int]) -> None:
    config = ModelConfig.preset("qwen3.5-9b")
    card[0] -= 2 * config.parameter_count
    options = EngineConfig(device="cuda", max_batch=256)
    plan, pools = plan_memory(config, options, torch.bfloat16, False, False, defers=True)
    assert plan.max_batch == pools.delta_logs == 256 and not plan.warnings
