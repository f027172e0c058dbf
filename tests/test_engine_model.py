"""What an engine needs of a model is what `Model` says: one without weights, decoder or kernels is served like any
other."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from support import drain, greedy, odd_runtime, odd_shape, reference, small_runtime
from torch import Tensor

from deltic.cache.manager import HybridCache
from deltic.cache.memory_plan import MemoryPlan
from deltic.cache.tensors import allocate
from deltic.config import EngineConfig, GenerationDefaults, ModelConfig
from deltic.engine.engine import Engine
from deltic.model.partial_head import PartialHead
from deltic.ops import backends
from deltic.ops.capabilities import Capabilities
from deltic.ops.types import Batch, Sampled, Sampling
from deltic.params import PAGE
from deltic.runner.image_embeds import Encode
from deltic.runner.input_batch import BucketNumbers
from deltic.runner.model_runner import Model
from deltic.spec_decode.mtp import MtpRunner
from deltic.spec_decode.proposers import NgramProposer

OPS = backends()["reference"]
PAGES, SLOTS = 12, 6


def small_cache(config: ModelConfig) -> HybridCache:
    pools = allocate(config, PAGES, SLOTS, torch.float32, OPS)
    for tensor in (*pools.page_tensors, *pools.slot_tensors):
        tensor.zero_()
    return HybridCache(pools)


@dataclass
class Successor:
    """After token n comes n + 1."""

    name: str = "successor"
    config: ModelConfig = field(default_factory=odd_shape)
    options: EngineConfig = field(default_factory=lambda: EngineConfig(token_budget=24, max_batch=4))
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    memory: MemoryPlan = field(default_factory=lambda: MemoryPlan(PAGES, SLOTS, 4, PAGES * PAGE))
    cache: HybridCache = field(default_factory=lambda: small_cache(odd_shape()))
    mtp_runner: MtpRunner | None = None
    partial_head: PartialHead | None = None
    draft: Model | None = None
    encode: Encode | None = None
    capabilities: Capabilities = field(default_factory=Capabilities)
    numbers: BucketNumbers = field(default_factory=dict)
    steps: int = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def run(self, batch: Batch) -> Tensor:
        self.steps += 1
        following = (batch.ids[batch.logit_tokens] + 1) % self.config.vocab_size
        return 9.0 * torch.nn.functional.one_hot(following, self.config.vocab_size).float()

    def sample(self, logits: Tensor, sampling: Sampling) -> Sampled:
        return OPS.sample(logits, sampling)


def test_a_model_of_one_rule_is_served() -> None:
    """Prompts in chunks, several at once, choices, pages that run out."""
    model: Model = Successor()
    engine = Engine(model)
    for start in range(5):
        engine.add(greedy(range(start, start + 30), 12, f"r{start}", n=2 if start == 1 else 1))
    answers = drain(engine)
    assert len(answers) == 6
    for (name, _), answer in answers.items():
        first = int(name[1:]) + 30
        assert answer.tokens == list(range(first, first + 12))


def test_its_prompts_are_kept() -> None:
    engine = Engine(Successor())
    for name in ("once", "again"):
        engine.add(greedy(range(50, 120), 4, name))
        answer = drain(engine)[name, 0]
        assert answer.tokens == [120, 121, 122, 123] and answer.last.usage is not None
        assert answer.last.usage.cached_tokens == (70 if name == "again" else 0)


def test_it_may_be_drafted_for() -> None:
    model = Successor()
    vocabulary = model.config.vocab_size
    plain, drafted = Engine(model), Engine(replace(model, cache=small_cache(model.config)), NgramProposer(3))
    found = []
    for engine in (plain, drafted):
        engine.add(greedy(list(range(vocabulary - 20, vocabulary)) + list(range(20)), vocabulary // 8, "a"))
        found.append(drain(engine)["a", 0].tokens)
    assert found[0] == found[1] == [20 + index for index in range(vocabulary // 8)]


@dataclass
class Elsewhere:
    """Stands for a model in another place: it is told of batches, and answers with logits."""

    behind: Any
    told: list[int] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)

    def run(self, batch: Batch) -> Tensor:
        self.told.append(batch.layout.tokens)
        logits: Tensor = self.behind.run(batch)
        return logits


def test_a_model_may_stand_before_another() -> None:
    runtime = small_runtime(odd_runtime(), batch=2)
    there = Elsewhere(runtime)
    engine = Engine(there)
    engine.add(greedy(range(3, 40), 9))
    assert tuple(drain(engine)["a", 0].tokens) == reference(runtime, range(3, 40), 9).tokens
    assert sum(there.told) == 37 + 8


def test_a_copy_of_a_runtime_steps_over_its_own_cache() -> None:
    """What was made for a cache is made anew with another one."""
    runtime = small_runtime(odd_runtime(), batch=2)
    other = small_runtime(runtime, batch=3)
    assert other.views.kv[0].keys.data_ptr() == other.pools.keys[0].data_ptr() != (
        runtime.views.kv[0].keys.data_ptr())
    assert replace(other).views.kv[0].keys.data_ptr() == other.views.kv[0].keys.data_ptr()
