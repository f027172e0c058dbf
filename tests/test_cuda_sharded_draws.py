"""Tokens drawn from logits that several GPUs have parts of are those drawn from all of them on one. A single GPU plays
all devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from deltic.ops.cuda.sample import sample, sample_parts
from deltic.ops.cuda.tensor_parallel import ShardedLogits
from deltic.ops.types import Sampling

if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)

FIRST = torch.device("cuda", 0)
WIDTHS = {"two": (512, 480), "odd": (257, 3, 250), "four": (62080,) * 4, "eight": (1008,) * 7 + (999,)}


def split(whole: Tensor, widths: Sequence[int]) -> list[Tensor]:
    count = torch.cuda.device_count()
    return [part.contiguous().to(torch.device("cuda", index % count))
            for index, part in enumerate(whole.split(list(widths), 1))]


def sampling_of(temperatures: Sequence[float], seed: int = 1) -> Sampling:
    temperature = torch.tensor(temperatures, device=FIRST)
    made = torch.Generator().manual_seed(seed)
    keys = torch.randint(-2**62, 2**62, (len(temperatures),), generator=made).to(FIRST)
    return Sampling(temperature, keys * 0, temperature + 1, temperature * 0, keys, greedy=not any(temperatures))


def check(whole: Tensor, widths: Sequence[int], sampling: Sampling) -> None:
    wanted = sample(whole.clone(), sampling)
    tokens, healthy = wanted.tokens.clone(), wanted.healthy.clone()
    found = sample_parts(split(whole, widths), sampling)
    assert found and found.tokens.device == FIRST
    assert torch.equal(found.tokens, tokens) and torch.equal(found.healthy, healthy)


@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS.keys())
@pytest.mark.parametrize("rows", [1, 3, 17, 256])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_draws(widths: tuple[int, ...], rows: int, temperature: float) -> None:
    for seed in range(3):
        whole = torch.randn(rows, sum(widths), generator=torch.Generator().manual_seed(seed)).to(FIRST) * 3
        check(whole, widths, sampling_of([temperature * (row % 3) for row in range(rows)], seed))
        check(whole, widths, sampling_of([temperature] * rows, seed))


UNHEALTHY: dict[str, Callable[[Tensor], object]] = {
    "NaN": lambda logits: logits[1, -1].fill_(float("nan")),
    "infinite": lambda logits: logits[0, 3].fill_(float("inf")),
    "flat": lambda logits: logits[2].fill_(0.5), "all NaN": lambda logits: logits.fill_(float("nan"))}


@pytest.mark.parametrize("kind", UNHEALTHY)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_unhealthy_logits_of_any_device_are_seen(kind: str, temperature: float) -> None:
    whole = torch.randn(3, 992, generator=torch.Generator().manual_seed(1)).to(FIRST)
    UNHEALTHY[kind](whole)
    sampling = sampling_of([temperature] * 3)
    found = sample_parts(split(whole, WIDTHS["two"]), sampling)
    assert found and torch.equal(found.healthy, sample(whole.clone(), sampling).healthy)
    assert not bool(found.healthy.all())


def test_the_lower_of_equal_tokens_is_drawn() -> None:
    whole = torch.zeros(2, 992, device=FIRST)
    whole[0, [300, 700]], whole[1, [511, 512]] = 5.0, 5.0
    found = sample_parts(split(whole, WIDTHS["two"]), sampling_of([0.0, 0.0]))
    assert found and found.tokens.tolist() == [300, 511]


def test_tokens_land_on_the_host() -> None:
    whole = torch.randn(3, 992, generator=torch.Generator().manual_seed(1)).to(FIRST)
    landing = torch.full((6,), -1, dtype=torch.int64).pin_memory()
    found = sample_parts(split(whole, WIDTHS["two"]), replace(sampling_of([0.0] * 3), landing=landing))
    torch.cuda.synchronize()
    assert found and found.landed and landing.tolist() == [*found.tokens.tolist(), 1, 1, 1]


@torch.inference_mode()
def test_logits_are_joined_for_all_else() -> None:
    whole = torch.randn(3, 992, generator=torch.Generator().manual_seed(1)).to(FIRST)
    logits = ShardedLogits(split(whole, WIDTHS["two"]))
    assert logits.device == FIRST and torch.equal(logits.clone(), whole)
    for sampling in (replace(sampling_of([0.8] * 3), filtered=True), replace(sampling_of([0.0] * 3), top_logprobs=2)):
        assert sample_parts(logits.parts, sampling) is None
        assert torch.equal(sample(logits.whole.clone(), sampling).tokens, sample(whole.clone(), sampling).tokens)
