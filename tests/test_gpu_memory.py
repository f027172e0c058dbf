"""How much of a card's memory the cache takes, planned without a card."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deltic.cache.tensors import delta_log_bytes, slot_bytes
from deltic.config import EngineConfig, ModelConfig
from deltic.errors import ConfigError
from deltic.runner.memory import card_share, plan_memory, working_bytes

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
    assert card_share("cuda", 0.9) == 62 * GIB, "10 of 80 are taken"
    assert card_share("cuda", 0.9, 2 * GIB) == 60 * GIB, "and what steps work in"
    card[0] = 4 * GIB
    with pytest.raises(ConfigError, match=r"=0.9 leaves no memory: of 81920 MiB of the GPU 77824 are taken.*raise it"):
        card_share("cuda", 0.9)


def test_the_cache_takes_what_a_share_leaves(card: list[int]) -> None:
    config = ModelConfig.preset("qwen3.5-4b")
    work = working_bytes(config, 8192)
    assert GIB < work < 4 * GIB
    assert planned() == planned(gpu_memory_utilization=0.9) == planned(memory=str(62 * GIB - work))
    assert planned(gpu_memory_utilization=0.5) == planned(memory=str(30 * GIB - work))
    card[0] = 8 * GIB
    assert planned() == planned(memory=str(2 * GIB)), "weights nearly fill the card: a quarter of what is free"


def test_more_tokens_and_more_experts_take_more_to_work_in() -> None:
    dense, mixture = (ModelConfig.preset(name) for name in ("qwen3.5-4b", "qwen3.5-35b-a3b"))
    assert working_bytes(dense, 16384) - GIB == 2 * (working_bytes(dense, 8192) - GIB)
    assert working_bytes(mixture, 8192) > working_bytes(dense, 8192) // 2


def test_share_that_leaves_no_memory_is_an_error(card: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"=0.13 leaves no memory.*raise it, lower token_budget"):
        planned(gpu_memory_utilization=0.13)


@pytest.mark.parametrize("share", [0, -0.5, 1.5, "most", True, float("nan")])
def test_a_share_is_a_number(share: Any) -> None:
    with pytest.raises(ConfigError, match="must be a number above 0 and at most 1"):
        EngineConfig(device="cuda", gpu_memory_utilization=share)


@pytest.mark.parametrize(("options", "message"), [
    ({"device": "cpu"}, "is for GPUs: leave it out"), ({"memory": "4GiB"}, "leave one of them out"),
    ({"speculate": "draft:tiny"}, "not possible with a draft model")])
def test_what_a_share_is_not_for(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        EngineConfig(**{"device": "cuda", "gpu_memory_utilization": 0.9, **options})
    assert caught.value.option == "gpu_memory_utilization"


def test_256_sequences_of_4b_run_in_30_gib() -> None:
    """A sequence takes one slot and one delta log."""
    config, unit = ModelConfig.preset("qwen3.5-4b"), torch.bfloat16
    assert slot_bytes(config, unit) + delta_log_bytes(config, unit) < 85 << 20
    options = EngineConfig(device="cuda", memory="30GiB", max_batch=256)
    plan, pools = plan_memory(config, options, unit, False, False, defers=True)
    assert plan.max_batch == pools.delta_logs == 256 and not plan.warnings
    states = plan.slots * slot_bytes(config, unit) + pools.delta_logs * delta_log_bytes(config, unit)
    assert states / 256 < 85 << 20 and plan.pages * 16 > 256 * 1500


def test_256_sequences_of_9b_run_on_a_card_of_80_gb(card: list[int]) -> None:
    config = ModelConfig.preset("qwen3.5-9b")
    card[0] -= 2 * config.parameter_count
    options = EngineConfig(device="cuda", max_batch=256)
    plan, pools = plan_memory(config, options, torch.bfloat16, False, False, defers=True)
    assert plan.max_batch == pools.delta_logs == 256 and not plan.warnings
