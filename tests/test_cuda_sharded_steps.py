"""Steps of a split model whose devices are all one GPU: their launches, and the bits of their sums, without peers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F
from sharded_cases import content, write_page, write_slot
from support import numbers
from torch import Tensor

from deltic.cache.item_copies import read_state
from deltic.cache.sharded_pools import ShardedPools, allocate_shards
from deltic.cache.tensors import CachePools, PoolOptions
from deltic.config import ModelConfig
from deltic.engine.loading import RandomModel
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.model.decoder import build as build_decoder
from deltic.model.tensor_parallel import WeightSplitter
from deltic.ops import select
from deltic.ops.cuda.decode import DecodeStep, step
from deltic.ops.cuda.tensor_parallel import PartialSum, ShardedLogits, ShardedStep
from deltic.ops.slices import tree_sum
from deltic.ops.types import CacheViews, Weight
from deltic.params import PAGE
from deltic.runner.input_batch import build, step_of

UNITS_APART = True
__test__ = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0)
MODELS = {name: RandomModel(f"qwen3.5-{name}", 4, initializer_range=0.05) for name in ("0.8b", "4b", "35b-a3b")}
ROUNDING = {name: 0.1 if model.config.experts else 0.03 for name, model in MODELS.items()}
"""Error of logits that other orders of sums may make. Rounding gives some tokens of a mixture other experts."""
PAGES, ALL_PAGES, SLOTS = 4, 600, 131
"""Pages of a row, and of all; slots."""
each_model = pytest.mark.parametrize("name", MODELS)
each_degree = pytest.mark.parametrize("tp", [2, 4])


def exchange(parts: Sequence[PartialSum]) -> None:
    """Adds parts in the order of peers."""
    total = tree_sum([part.own for part in parts])
    for part in parts:
        if part.residual is None:
            part.own.copy_(total)
        else:
            part.residual.add_(total)
        if norm := part.norm:
            assert part.residual is not None
            normed = F.rms_norm(part.residual, norm.scale.shape, norm.scale, norm.eps)
            norm.y.copy_(normed)
            if norm.wide is not None:
                norm.wide.copy_(normed)


@dataclass
class OneGpu:
    """A model whose devices are all the same GPU."""

    config: ModelConfig
    pools: CachePools | ShardedPools
    step: ShardedStep

    @torch.inference_mode()
    def run(self, rows: Sequence[PlannedRow], all_logits: bool = False) -> Tensor:
        batch = build(StepPlan(tuple(rows)), DEVICE, all_logits)
        found = self.step(step_of(batch.padded) if batch.padded else batch)  # as graphs do
        assert found, "the kernels do not serve the step"
        logits = found[0]
        assert isinstance(logits, ShardedLogits)
        return logits.whole[:batch.layout.logits].clone()


@lru_cache(2)
@torch.inference_mode()
def model_of(name: str, tp: int) -> OneGpu:
    model, ops, devices = MODELS[name], select((), "cuda"), ["cuda:0"] * tp
    config, parts = model.config, [dict[str, Weight]() for _ in devices]
    split = WeightSplitter(config, tp, copies=True).over(devices)
    for index, tensor_name, tensor in split.cut(model.tensors(config, "bfloat16", "cuda:0")):
        parts[index][tensor_name] = tensor
    decoder = build_decoder(config, parts, ops, torch.bfloat16)
    pools = allocate_shards(config, ALL_PAGES, SLOTS, torch.bfloat16, [ops] * tp, devices, PoolOptions())
    steps = list[DecodeStep]()
    for shard, own in zip(decoder.shards, pools.shards, strict=True):
        found = step(ops, shard, CacheViews(own.kv_views(), own.state_views()))
        assert isinstance(found, DecodeStep), "the kernels do not know the model"
        steps.append(found)
    return OneGpu(config, pools, ShardedStep(steps, exchange))


@pytest.fixture(autouse=True, scope="module")
def free_memory() -> Iterator[None]:
    yield
    model_of.cache_clear()
    torch.cuda.empty_cache()


@lru_cache(2)
def content_of(config: ModelConfig, rows: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """K/V of the pages of so many rows, and as many states."""
    kind = torch.bfloat16, PoolOptions()
    assert config.linear
    stateless = replace(config, linear=replace(config.linear, key_head_dim=1, value_head_dim=1))
    prefix, state = content(stateless, kind, rows * PAGES * PAGE), content(config, kind, rows)
    return prefix, {name: 0.3 * tensor for name, tensor in state.items()}


@torch.inference_mode()
def fill(model: OneGpu, rows: int) -> list[PlannedRow]:
    """Writes random K/V and states; returns rows over them."""
    pools, config = model.pools, model.config
    prefix, state = content_of(config, rows)
    for page in range(rows * PAGES):
        write_page(pools, config, page, prefix, slice(page * PAGE, (page + 1) * PAGE))
    for slot in range(rows):
        write_slot(pools, config, slot, state, slot)
    return [PlannedRow((7 + row,), 17 + (5 * row) % 30, tuple(range(PAGES * row, PAGES * row + PAGES)), row, 1)
            for row in range(rows)]


def states(model: OneGpu, rows: int) -> list[Tensor]:
    return [tensor.cpu() for slot in range(rows) for tensor in read_state(model.pools.shards, slot).values()]


def error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@each_degree
@each_model
@pytest.mark.parametrize("rows", [1, 2, 5, 16])
def test_steps_that_decode_have_the_bits_of_one_device(name: str, tp: int, rows: int) -> None:
    found = list[list[Tensor]]()
    for count in (1, tp):
        model = model_of(name, count)
        logits = model.run(fill(model, rows))
        assert bool(logits.isfinite().all()) and float(logits.std()) > 0
        found.append([logits.cpu(), *states(model, rows)])
    for index, (one, several) in enumerate(zip(*found, strict=True)):
        assert torch.equal(one, several), ("logits" if index == 0 else f"state tensor {index - 1}", error(several, one))


@each_degree
@each_model
@pytest.mark.parametrize("rows", [17, 64, 130])
def test_steps_of_many_rows_are_those_of_one_device_up_to_rounding(name: str, tp: int, rows: int) -> None:
    found = []
    for count in (1, tp):
        model = model_of(name, count)
        first, second = (model.run(fill(model, rows)) for _ in range(2))
        assert torch.equal(first, second), count
        found.append(first)
    assert error(found[1], found[0]) < ROUNDING[name]


@each_degree
@each_model
@pytest.mark.parametrize("tokens", [40, 250, 900])
def test_prompts_are_those_of_one_device_up_to_rounding(name: str, tp: int, tokens: int) -> None:
    """Sums in float32 up to 256 tokens, in bfloat16 beyond."""
    found = []
    for count in (1, tp):
        model = model_of(name, count)
        ids = numbers(3, tokens, model.config.vocab_size)
        found.append(model.run([PlannedRow(tuple(ids), 0, tuple(range(-(-tokens // PAGE))), 0, 1)], all_logits=True))
        assert len(found[-1]) == tokens and bool(found[-1].isfinite().all())
    assert error(found[1], found[0]) < ROUNDING[name]
