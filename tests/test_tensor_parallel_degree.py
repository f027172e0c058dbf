"""How many GPUs a model takes, chosen without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from deltic.cache.memory_plan import MemoryPlan
from deltic.config import EngineConfig, ModelConfig
from deltic.engine.loading import RandomModel
from deltic.errors import ConfigError
from deltic.ops import select
from deltic.runner.degree import check_room, choose_degree
from deltic.runner.memory import CardMemory, plan_memory
from deltic.runner.weights import OpenedModel, WeightReader

GIB = 1 << 30


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Free bytes of GPUs of 80 GiB, which a test may change."""
    free = [79 * GIB] * 4
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (
        free[torch.device("cuda" if device is None else device).index or 0], 80 * GIB))
    return free


def opened(name: str) -> OpenedModel:
    model = RandomModel(name)
    return OpenedModel(f"random-{name}", model.config, None, random=model)  # type: ignore[arg-type]


def chosen(name: str, **options: Any) -> int | str:
    source, given = opened(name), EngineConfig(**{"device": "cuda", "speculate": "off", **options})

    def plan(own: EngineConfig, card: CardMemory) -> MemoryPlan:
        return plan_memory(source.config, own, torch.bfloat16, False, False, card=card)[0]

    return choose_degree(source, given, select((), "cuda"), "bfloat16", plan).tp


def test_the_fewest_gpus_that_hold_weights_and_context(cards: list[int]) -> None:
    assert chosen("qwen3.5-4b") == 1
    assert chosen("qwen3.5-27b", max_context=16384) == 1, "54 of 72 GB"
    assert chosen("qwen3.5-27b", gpu_memory="48GiB", max_context=16384) == 2
    assert chosen("qwen3.5-27b", gpu_memory="20GiB", max_context=16384) == 4
    assert chosen("qwen3.5-27b", gpu_memory="21GiB", max_context=16384, quant="q4_k") == 1
    assert chosen("qwen3.5-35b-a3b", gpu_memory="48GiB") == 2


def test_a_longer_context_takes_more_gpus(cards: list[int]) -> None:
    contexts = 1 << 12, 1 << 16, 1 << 18
    assert [chosen("qwen3.5-27b", max_context=context, gpu_memory="62GiB") for context in contexts] == [1, 1, 2]


def test_one_gpu_stays_where_several_are_no_help(cards: list[int]) -> None:
    assert chosen("qwen3.5-27b", gpu_memory="4GiB") == "auto", "four of them are too small"
    assert chosen("qwen3.5-35b-a3b", gpu_memory="12GiB", quant="q4_k") == "auto", "quantized experts are not split"
    assert chosen("qwen3.5-27b", gpu_memory="48GiB", device="cuda:0") == "auto", "the user has named a GPU"
    assert chosen("qwen3.5-27b", gpu_memory="48GiB", tp=1) == 1
    assert chosen("qwen3.5-27b", gpu_memory="48GiB", ops=("torch",)) == "auto", "torch ops are not split over GPUs"
    cards[1:] = [3 * GIB] * 3
    assert chosen("qwen3.5-27b", gpu_memory="48GiB") == "auto", "other programs have the others"
    del cards[1:]
    assert chosen("qwen3.5-27b", gpu_memory="48GiB") == "auto"


@pytest.mark.parametrize("name", ["qwen3.5-4b", "qwen3.5-27b", "qwen3.5-35b-a3b"])
@pytest.mark.parametrize("quant", ["none", "q4_k"])
def test_parts_of_the_weights_are_smaller_on_more_devices(cards: list[int], name: str, quant: str) -> None:
    source, ops = opened(name), select((), "cuda")
    degrees = (1,) if quant != "none" and source.config.experts else (1, 2, 4)
    sizes = [WeightReader(source, EngineConfig(device="cuda", tp=tp, quant=quant), ops, "bfloat16").shard_bytes()
             for tp in degrees]
    whole = WeightReader(source, EngineConfig(device="cuda", quant=quant), ops, "bfloat16").sizes()
    assert sizes[0] == sum(whole.values())
    embedding = 2 * source.config.vocab_size * source.config.hidden_size
    for tp, size in zip(degrees[1:], sizes[1:], strict=True):
        assert (sizes[0] - embedding) / tp < size < (sizes[0] - embedding) / tp * 1.02 + embedding


def test_weights_that_do_not_fit_are_an_error_before_they_are_read(cards: list[int]) -> None:
    source, ops = opened("qwen3.5-27b"), select((), "cuda")
    options = EngineConfig(device="cuda", tp=2, gpu_memory="20GiB")
    with pytest.raises(ConfigError, match=r"tp=2: a GPU's part of the weights, 2\d\.\d\d GiB, does not fit") as caught:
        check_room(source, options, ops, "bfloat16")
    assert caught.value.option == "tp"
    check_room(source, replace(options, tp=4), ops, "bfloat16")
    check_room(source, EngineConfig(device="cpu", tp=2), ops, "bfloat16")
    assert ModelConfig.preset("qwen3.5-27b") == source.config
