"""A model over several GPUs gives the answers of one, with drafts and without, whatever a device waits for."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_cases import content, write_page, write_slot
from support import Answers, drain, greedy, numbers, serve, session_over, small_runtime, take
from test_cuda_sharded_pools import host_tier, settled
from test_tensor_parallel import Found, found, same, story
from torch import Tensor

from deltic.cache.item_copies import read_state
from deltic.cache.manager import HybridCache
from deltic.cache.offload.disk import DiskStore
from deltic.cache.offload.host import DeviceToHostCopy
from deltic.cache.offload.index import TierIndex
from deltic.cache.tensors import PoolOptions
from deltic.config import EngineConfig, ModelConfig
from deltic.engine import policy
from deltic.engine.engine import Engine
from deltic.engine.loading import RandomModel, load
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.ops.cuda.mtp import DraftHeads
from deltic.ops.cuda.tensor_parallel import PeerExchange, ShardedStep
from deltic.ops.types import Drafted
from deltic.params import PAGE, EngineRequest
from deltic.runner.input_batch import build
from deltic.runner.model_runner import ModelRunner
from deltic.runner.sharded_graphs import ShardedGraphs
from deltic.spec_decode.draft_length import FixedDraftLength

UNITS_APART = True
COUNT = torch.cuda.device_count() if torch.cuda.is_available() else 0
if COUNT < 2:
    pytest.skip("needs two CUDA devices", allow_module_level=True)

OPTIONS: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "memory": "512MiB", "max_batch": 16,
                           "max_context": 1024, "speculate": "mtp:3"}
VOCABULARIES = {"0.8b": 248_320, "4b": 40_000, "35b-a3b": 40_000}
"""The true one, and smaller ones, with which models load faster."""
MODELS = {name: RandomModel(shape=replace(ModelConfig.preset(f"qwen3.5-{name}", 4), vocab_size=size),
                            initializer_range=0.05, head=True) for name, size in VOCABULARIES.items()}
ROUNDING = {name: 0.1 if model.config.experts else 0.03 for name, model in MODELS.items()}
"""Error of logits that other orders of sums may make. Rounding gives some tokens of a mixture other experts."""
PAGES = 4
"""Pages of a row."""
each_degree = pytest.mark.parametrize("tp", [tp for tp in (2, 4) if tp <= COUNT])
each_model = pytest.mark.parametrize("name", MODELS)
each_form = pytest.mark.parametrize("quant", ["none", "q4_k"])
each_case = pytest.mark.parametrize(("name", "quant"), [("0.8b", "none"), ("0.8b", "q4_k"), ("4b", "none"),
                                                        ("4b", "q4_k"), ("35b-a3b", "none")])


@lru_cache(3)
def runtime_of(name: str, tp: int, **options: Any) -> ModelRunner:
    runtime = load(MODELS[name], EngineConfig(**{**OPTIONS, "tp": tp, **options}))
    assert len({shard.device for shard in runtime.pools.shards}) == tp and runtime.step is not None
    return runtime


@pytest.fixture(autouse=True, scope="module")
def free_memory() -> Iterator[None]:
    yield
    runtime_of.cache_clear()
    torch.cuda.empty_cache()


def heads_of(runtime: ModelRunner) -> DraftHeads:
    """The draft head on all devices."""
    assert runtime.mtp_runner and runtime.mtp_runner._step
    heads = runtime.mtp_runner._step.record.__self__  # type: ignore[union-attr]
    assert isinstance(heads, DraftHeads)
    return heads


def wait() -> None:
    for device in range(COUNT):
        torch.cuda.synchronize(device)


# Answers


@each_degree
@each_case
def test_batch_invariant_answers_have_the_bits_of_one_device(name: str, quant: str, tp: int) -> None:
    """Prompts in pieces, several choices, an abort, a prefix that is used again, a constraint."""
    one, several = (story(runtime_of(name, count, quant=quant, batch_invariant=True, speculate="off"))
                    for count in (1, tp))
    same(one, several, exact=True)


def requests(vocabulary: int, count: int = 9) -> list[EngineRequest]:
    return [greedy(numbers(seed, 10 + 23 * seed % 150, vocabulary), 40, str(seed), temperature=0.8 * (seed % 2),
                   seed=seed, logprobs=0) for seed in range(count)]


@each_degree
@each_form
def test_preempted_answers_are_the_same(quant: str, tp: int) -> None:
    """There is no room for all of them at once."""
    one, several = (runtime_of("0.8b", count, quant=quant, batch_invariant=True, speculate="off") for count in (1, tp))
    tight = Engine(small_runtime(several, batch=4, pages=20))
    for request in requests(several.config.vocab_size):
        tight.add(request)
    answers = drain(tight)
    assert tight.scheduler.preemptions, "all of them found room"
    same(found(serve(one, requests(one.config.vocab_size))), found(answers), exact=True)


@each_degree
@each_model
def test_prompts_are_those_of_one_device_up_to_rounding(name: str, tp: int) -> None:
    tokens = numbers(3, 700, runtime_of(name, 1).config.vocab_size)
    one, several = (session_over(runtime_of(name, count), batch=1, context=1024).prefill(tokens, all_logits=True)
                    for count in (1, tp))
    error = float((one - several).norm() / one.norm())
    assert error < ROUNDING[name], error


# Steps from equal states


@lru_cache(2)
def content_of(config: ModelConfig, rows: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """K/V of the pages of so many rows, and as many states."""
    kind = torch.bfloat16, PoolOptions(head=True)
    assert config.linear
    stateless = replace(config, linear=replace(config.linear, key_head_dim=1, value_head_dim=1))
    prefix, state = content(stateless, kind, rows * PAGES * PAGE), content(config, kind, rows)
    return prefix, {name: tensor if name == "hidden" else 0.3 * tensor for name, tensor in state.items()}


def fill(runtime: ModelRunner, rows: int) -> list[PlannedRow]:
    """Writes random K/V and states; returns rows over them. The cache must be fresh."""
    pools, config = runtime.pools, runtime.config
    prefix, state = content_of(config, rows)
    for page in range(rows * PAGES):
        write_page(pools, config, page, prefix, slice(page * PAGE, (page + 1) * PAGE))
    for slot in range(rows):
        write_slot(pools, config, slot, state, slot)
    wait()
    return [PlannedRow((7 + row,), 17 + (5 * row) % 30, tuple(range(PAGES * row, PAGES * row + PAGES)), row, 1)
            for row in range(rows)]


def states(runtime: ModelRunner, rows: int) -> list[Tensor]:
    assert runtime.mtp_runner
    runtime.mtp_runner.catch_up()
    found = [read_state(runtime.pools.shards, slot) for slot in range(rows)]
    return [tensor.cpu() for state in found for tensor in state.values()]


def equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


@each_degree
@each_case
@pytest.mark.parametrize("rows", [1, 2, 5, 16])
def test_steps_that_decode_have_the_bits_of_one_device(name: str, quant: str, tp: int, rows: int) -> None:
    """The first step of a bucket, which runs without graphs, and replays of it."""
    runs = []
    for count in (1, tp):
        runtime = small_runtime(runtime_of(name, count, quant=quant), batch=16, context=PAGES * PAGE)
        for turn in range(3):
            plan = StepPlan(tuple(fill(runtime, rows)))
            batch = build(plan, runtime.device, hidden=True, verified=runtime.capabilities.verifies)
            logits = runtime.run(batch).cpu()
            runs.append([logits, *states(runtime, rows)])
            assert bool(logits.isfinite().all()) and float(logits.std()) > 0
            assert equal(runs[0], runs[-1]), (count, turn)
        assert runtime.graphs and len(runtime.graphs.buckets) == 1
    assert isinstance(runtime.graphs, ShardedGraphs)


@each_degree
@each_model
@pytest.mark.parametrize("rows", [17, 64, 130])
def test_steps_of_many_rows_are_those_of_one_device_up_to_rounding(name: str, tp: int, rows: int) -> None:
    found = []
    for count in (1, tp):
        runtime = small_runtime(runtime_of(name, count, max_batch=256), batch=256, context=PAGES * PAGE)
        plan = StepPlan(tuple(fill(runtime, rows)))
        for _ in range(2):
            fill(runtime, rows)
            batch = build(plan, runtime.device, hidden=True, verified=runtime.capabilities.verifies)
            found.append(runtime.run(batch).cpu())
    error = float((found[-1] - found[0]).norm() / found[0].norm())
    assert torch.equal(found[2], found[3]) and error < ROUNDING[name], error


def tokens_of(drafted: Drafted, rows: int) -> Tensor:
    """Tokens and whether their logits were healthy, [drafts, 2, rows], of the real rows of a bucket."""
    return drafted.numbers[:drafted.token_at(0)].cpu().view(drafted.drafts, 2, -1)[..., :rows]


@each_degree
@each_case
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_drafts_have_the_bits_of_one_device(name: str, quant: str, tp: int, rows: int) -> None:
    """All devices draw the same ones, and have the same hidden states."""
    drafted = []
    for count in (1, tp):
        runtime = small_runtime(runtime_of(name, count, quant=quant), batch=16, context=PAGES * PAGE)
        head, device = runtime.mtp_runner, runtime.device
        assert head and head.drafts_on_device
        keys = torch.arange(7 * rows, device=device).view(rows, 7) * 977
        temperature = torch.tensor([0.8 * (row % 2) for row in range(rows)], device=device)
        for _ in range(3):
            batch = build(StepPlan(tuple(fill(runtime, rows))), device, hidden=True, verified=True)
            chosen = runtime.run(batch).argmax(-1)
            found = head.draft_ahead(batch, 3, chosen, keys, temperature)
            accepted = found.numbers[found.token_at(0):found.token_at(rows)]
            drafted.append((tokens_of(found, rows), accepted.cpu()))
            assert equal(drafted[0], drafted[-1]), count
        wait()
        (drafts,) = heads_of(runtime)._known.values()
        tokens = drafted[-1][0]
        assert len(drafts.outputs) == count and (rows == 1 or len({*tokens[:, 0].flatten().tolist()}) > 2)
        assert bool((tokens[:, 1] == 1).all()), "the logits were not healthy"
        assert all(torch.equal(tokens_of(output, rows), tokens) for output in drafts.outputs)
        hidden = [shard.hidden[:, :rows].cpu() for shard in runtime.pools.shards if shard.hidden is not None]
        assert len(hidden) == count and equal(hidden, hidden[:1] * count) and bool(hidden[0].isfinite().all())


@pytest.fixture
def whole_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The duration of steps cuts no prompts: chunks of other lengths round differently."""
    monkeypatch.setattr(policy, "_STALL", 3600.0)


@each_degree
@each_case
@pytest.mark.usefixtures("whole_prompts")
def test_drafts_change_no_answer(name: str, quant: str, tp: int) -> None:
    """To the bit, with up to 16 tokens in a step."""
    runtime = runtime_of(name, tp, quant=quant)
    assert runtime.capabilities.verifies and runtime.mtp_runner and runtime.mtp_runner.drafts_on_device
    answers = []
    for depth in (0, 3):
        engine = Engine(small_runtime(runtime, batch=4, pages=200), depth=FixedDraftLength(depth))
        for request in requests(runtime.config.vocab_size, 4):
            engine.add(request)
        answers.append(found(drain(engine)))
        assert (sum(engine.speculator.stats.drafted_at) > 0) == (depth > 0)
    same(answers[0], answers[1], exact=True)


@each_degree
def test_rows_of_the_draft_vocabulary_change_on_all_devices(tp: int) -> None:
    runtime = runtime_of("0.8b", tp)
    assert runtime.mtp and runtime.mtp.vocabulary and runtime.mtp_runner
    short, size = runtime.mtp.vocabulary, runtime.config.vocab_size
    runtime.mtp_runner.see(range(size - 50, size))
    wait()
    whole = runtime.decoder.shards[0].embedding
    assert isinstance(whole, Tensor) and short.copied >= 50 and len(short.copies) == tp
    for device, (head, ids) in short.copies.items():
        assert isinstance(head, Tensor) and head.device == ids.device == device
        assert torch.equal(ids.cpu(), short.ids.cpu())
        assert torch.equal(head.cpu(), whole[short.ids].cpu())


# Tiers, and devices that are late


@each_degree
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("kind", ["disk", "host"])
def test_prefixes_are_read_by_another_number_of_devices(tp: int, back: bool, kind: str, tmp_path: Path) -> None:
    tier = host_tier(True) if kind == "host" else TierIndex(
        DiskStore(tmp_path, "model", 1 << 30), threads=True, copier=DeviceToHostCopy())
    counts, answers = ((1, tp) if back else (tp, 1)), list[Found]()
    prompt = given = numbers(5, 150, MODELS["0.8b"].config.vocab_size)
    for count in counts:
        runtime = small_runtime(runtime_of("0.8b", count, batch_invariant=True, speculate="off"), batch=4)
        engine = Engine(replace(runtime, cache=HybridCache(runtime.pools, tiers=[tier])))
        engine.add(greedy(given, 16, "a", logprobs=0))
        events = drain(engine)
        usage = events["a", 0].last.usage
        assert usage and (usage.cached_tokens >= 150) == bool(answers), usage
        answers.append(found(events))
        given = (*prompt, *answers[0]["a", 0][0], 7, 8)
        settled(tier)
    plain = small_runtime(runtime_of("0.8b", 1, batch_invariant=True, speculate="off"), batch=4)
    same(found(serve(plain, [greedy(given, 16, "a", logprobs=0)])), answers[1], exact=True)


@each_degree
@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.usefixtures("whole_prompts")
def test_a_device_that_is_late_changes_nothing(tp: int, depth: int) -> None:
    """Another one in each step, or several. To the bit, with up to 16 tokens in a step."""
    runtime, draw, answers = runtime_of("0.8b", tp), random.Random(1), list[Found]()
    for late in (False, True):
        engine = Engine(small_runtime(runtime, batch=4, pages=200), depth=FixedDraftLength(depth))
        for request in requests(runtime.config.vocab_size, 4):
            engine.add(request)
        events = Answers()
        while engine.has_work:
            for shard in runtime.pools.shards:
                if late and draw.random() < 0.5:
                    with torch.cuda.device(shard.device):
                        torch.cuda._sleep(draw.randrange(1, 20_000_000))
            take(events, engine.step())
            engine.check()
        answers.append(found(events))
    same(answers[0], answers[1], exact=True)


@each_degree
def test_a_device_that_does_not_come_ends_requests_and_later_ones_are_served(tp: int) -> None:
    runtime = small_runtime(runtime_of("0.8b", tp, batch_invariant=True, speculate="off"), batch=4, pages=200)
    engine, found = Engine(runtime), list[Any]()
    assert isinstance(runtime.step, ShardedStep) and isinstance(runtime.step.exchange, PeerExchange)
    sums, prompt = runtime.step.exchange._sums, numbers(5, 40, runtime.config.vocab_size)
    for turn in range(3):
        if turn == 1:  # as the kernel reports it
            wait()
            sums._reports[0, 0] = 2
            for state in sums._states:
                state[2] = 1
        engine.add(greedy(prompt, 8, str(turn)))
        found.append(drain(engine)[str(turn), 0])
        engine.check()
    before, lost, after = found
    assert lost.last.finish == "error" and "waited for device cuda:1 in vain" in str(lost.last.error)
    assert after.last.finish == before.last.finish == "length" and after.tokens == before.tokens
