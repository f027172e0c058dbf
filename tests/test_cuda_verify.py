"""On a GPU: rows with drafts over replay rings give the bits of the same tokens one by one, and the draft head drafts
on from what the model has drawn."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import Answers, drain, greedy, numbers, serve, take
from test_cuda_kernels import error, randn
from tokenizers import Tokenizer

from deltic.config import EngineConfig, ModelConfig
from deltic.engine import policy
from deltic.engine.engine import Engine
from deltic.engine.loading import RandomModel, load
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.loader.hub import resolve
from deltic.ops import reference
from deltic.ops.cuda.decode import DecodeStep
from deltic.ops.types import DeltaLogView, GdnWeights, StateView
from deltic.params import SamplingParams
from deltic.runner.input_batch import build, step_of, verifying
from deltic.runner.model_runner import ModelRunner
from deltic.session import Session
from deltic.spec_decode.draft_length import FixedDraftLength
from deltic.spec_decode.proposers import MtpProposer

UNITS_APART = True
__test__ = torch.cuda.is_available()  # without a device only the helpers below are of use
SMALL, LARGE = (RandomModel(name, 4, initializer_range=0.05, head=True) for name in ("qwen3.5-0.8b", "qwen3.5-4b"))
YARN = replace(SMALL, shape=ModelConfig.preset("qwen3.5-0.8b", 4).with_rope_scaling("yarn:4:1024"))
SIZES = {"tiny": (None, "none"), "0.8b": (SMALL, "none"), "0.8b yarn": (YARN, "none"), "4b": (LARGE, "none"),
         "0.8b q4_k": (SMALL, "q4_k"), "4b q4_k": (LARGE, "q4_k"), "4b fp8": (LARGE, "fp8")}
"""Models with their heads, which stay bfloat16, and how their own weights are quantized."""


@pytest.fixture(scope="module", params=SIZES)
def runtime(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    model, quant = SIZES[request.param]
    loaded = load(model, EngineConfig(device="cuda", dtype="bfloat16", memory="2GiB", max_batch=16, max_context=2048,
                                      speculate="mtp:4", quant=quant))
    assert loaded.capabilities.verifies, "the kernels do not serve this model, or not its head"
    yield loaded
    torch.cuda.empty_cache()


# The delta rule over rings

CASES = {
    "one": [(20, 20, 4)], "behind": [(20, 17, 4)], "full": [(27, 15, 4)], "folds": [(30, 16, 4)],
    "long": [(40, 37, 13)], "folds long": [(40, 36, 13)], "from nothing": [(5, 0, 3)], "single": [(30, 17, 1)],
    "single in time": [(31, 31, 1)], "many": [(20, 17, 4), (33, 33, 1), (50, 36, 3), (5, 2, 1)],
    "very many": [(20 + row, 16 + row % 5, 1 + row % 4) for row in range(12)],
}
"""Cursor, tokens that the slot stands for, tokens of each row."""


def fill_with_nan(work: Any) -> None:
    """A step's memory, of which a test of one layer writes the others' never."""
    new = work.new_deltas
    for tensor in (work.y, work.core, *((new.inputs, new.keys, new.decays) if new else ())):
        tensor.fill_(float("nan"))


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_rings(runtime: ModelRunner, case: str) -> None:
    step, layer, pools = runtime.step, runtime.decoder.weights.layers[0], runtime.pools
    assert isinstance(step, DecodeStep) and isinstance(layer.mixer, GdnWeights) and step.delta_log
    for seed, tensor in enumerate((pools.recurrent, pools.conv, *(pools.delta_logs or ()))):
        tensor.copy_(randn(*tensor.shape[1:], seed=seed) * 0.3)
    state, spec = runtime.views.states[0], layer.mixer.spec
    assert state.delta_log
    state.delta_log.decays.uniform_(0.5, 1)
    rows = tuple(PlannedRow((7,) * count, done, tuple(range(1 + 4 * index, 5 + 4 * index)), 2 * index, count, base=base,
                     delta_log=index + 1, append=count > 1 or index % 2 == 1) for index, (done, base, count)
                 in enumerate(CASES[case]))
    padded = verifying(StepPlan(rows), pools.device).padded
    assert padded
    batch = step_of(padded)
    kind = "few" if batch.layout.tokens <= 16 else "many"
    proj = randn(batch.layout.tokens, spec.channels + spec.values + 2 * spec.value_heads, seed=9,
                 dtype=torch.float32 if kind == "few" else torch.bfloat16)
    slow = StateView(
        state.recurrent.double(),
        state.conv.double(),
        DeltaLogView(
            state.delta_log.inputs.double(),
            *(getattr(state.delta_log, name).double() for name in ("keys", "updates", "decays")),
            state.delta_log.tiled,
        ),
    )
    work = step.begin(batch, kind)
    fill_with_nan(work)
    step.mix(layer, work, proj, proj.shape[1])
    step.end(work)
    wide = replace(layer.mixer, **{name: getattr(layer.mixer, name).double()
                                   for name in ("conv", "decay", "dt_bias", "norm")})
    wanted = proj.double()
    wanted[:, :spec.channels] = wanted[:, :spec.channels].bfloat16().double()
    real = verifying(StepPlan(rows), pools.device)
    real = replace(real, append=real.append.bool(), padded=None)
    output = reference.gdn_core(wanted[:real.layout.tokens], wide, slow, real)
    found = work.y.view(-1)[:output.numel()].view(output.shape)
    assert error(found, output) < 5e-3
    assert error(state.recurrent, slow.recurrent) < 2e-5
    for row, (done, base, count) in zip(rows, CASES[case], strict=True):
        after = reference.next_base(base, done, count, row.append)
        if after > base:
            for position in range(max(after - 3, 0), after):
                assert torch.equal(state.conv[row.slot, position % 4].double(), slow.conv[row.slot, position % 4])
    for name in ("inputs", "keys", "updates", "decays"):
        assert error(getattr(state.delta_log, name), getattr(slow.delta_log, name)) < 2e-5, name


@torch.inference_mode()
def test_flush_has_the_bits_of_replay(runtime: ModelRunner) -> None:
    """What a row of one token finds after the ring was folded into its slot, and over the ring itself."""
    pools, ops = runtime.pools, runtime.decoder.ops
    for seed, tensor in enumerate((pools.recurrent, pools.conv, pools.keys, pools.values, *(pools.delta_logs or ()))):
        tensor.copy_(randn(*tensor.shape[1:], seed=seed) * 0.3)
    before = [tensor.clone() for tensor in (pools.recurrent, pools.conv)]
    row = PlannedRow((7,), 30, (1, 2, 3), 3, 1, base=19, delta_log=1)
    batch = verifying(StepPlan((row,)), pools.device).padded
    assert batch and runtime.step
    over = runtime.step(step_of(batch))
    over_state = pools.recurrent[:, 3].clone()
    for tensor, old in zip((pools.recurrent, pools.conv), before, strict=True):
        tensor.copy_(old)
    ops.flush_delta_log(runtime.views.states, 3, 1, 19, 30, 5)
    batch = verifying(StepPlan((replace(row, slot=5, base=30),)), pools.device).padded
    assert batch and over
    folded = runtime.step(step_of(batch))
    assert folded and torch.equal(over[0], folded[0]) and torch.equal(over_state, pools.recurrent[:, 5])
    assert torch.equal(pools.recurrent[:, 3], before[0][:, 3])


@torch.inference_mode()
def test_prompts_beside_rows_with_delta_logs(runtime: ModelRunner) -> None:
    """Against the torch ops: rows of one token, with and without tokens in their rings, and a prompt."""
    pools = runtime.pools
    tensors = (pools.recurrent, pools.conv, pools.keys, pools.values, *(pools.delta_logs or ()))
    rows = (PlannedRow((7,), 30, (1, 2, 3), 1, 1, base=19, delta_log=1), PlannedRow((9,), 20, (4, 5), 2, 1, base=20),
            PlannedRow(tuple(range(40)), 0, (6, 7, 8), 3, 1))
    batch = build(StepPlan(rows), pools.device, hidden=True, verified=True)
    found = []
    for serve_step in (runtime.step, lambda given: (runtime.decoder.forward(given, runtime.views), None)):
        for seed, tensor in enumerate(tensors):
            tensor.copy_(randn(*tensor.shape[1:], seed=seed) * 0.3)
        assert pools.delta_logs and serve_step
        pools.delta_logs[3].uniform_(0.9, 1, generator=torch.Generator("cuda").manual_seed(1))
        given = serve_step(replace(batch, memo={}))
        assert given is not None, "the kernels do not serve this step"
        hidden = given[0] if given[1] is None else given[1]
        found.append((hidden, pools.recurrent[:, 1:4].clone()))
    (mine, my_states), (theirs, their_states) = found
    assert error(mine, theirs) < 3e-2 and error(my_states, their_states) < 2e-2


# The same bits as one by one


@pytest.mark.parametrize("model", SIZES)
def test_verified_tokens_have_the_bits_of_single_tokens(model: str) -> None:
    options = {"dtype": "bfloat16", "device": "cuda", "memory": "1GiB", "max_context": 1024, "speculate": "off"}
    size, options["quant"] = SIZES[model]
    one, many = (Session(size and replace(size, head=False), **options) for _ in range(2))
    assert many.runtime.capabilities.verifies
    prompt, tokens, rng = numbers(1, 20, one.vocab_size), numbers(2, 90, one.vocab_size), random.Random(3)
    for session in (one, many):
        session.prefill(prompt)
    wanted, place = [one.step(token) for token in tokens], 0
    while place < len(tokens) - 13:
        count = rng.choice([1, 2, 3, 4, 4, 4, 5, 8, 13])
        right = rng.randint(1, count)
        drafts = [*tokens[place:place + right], *numbers(place, count - right, one.vocab_size)]
        logits = many.verify(drafts)
        for index in range(right):
            assert torch.equal(logits[index], wanted[place + index]), (place, index, count)
        many.accept(right)
        place += right
        if rng.random() < 0.3:  # with what is in the ring
            assert torch.equal(many.step(tokens[place]), wanted[place]), place
            place += 1


class Known:
    """Drafts from known answers, now and then wrong ones."""

    limit = 4

    def __init__(self, answers: dict[str, list[int]], share: float = 0.7) -> None:
        self.answers, self.share, self.random = answers, share, random.Random(1)

    def draft(self, wants: list) -> list[list[int]]:  # type: ignore[type-arg]
        return [[token if self.random.random() < self.share else token ^ 1
                 for token in self.answers[sequence.request.id][sequence.generated:sequence.generated + count]]
                for sequence, count in wants]

    def forget(self, sequence: object) -> None:
        pass


PATTERNS = {"right": 1.0, "wrong": 0.0, "now and then": 0.6}
PARAMS = {"greedy": SamplingParams(temperature=0.0), "drawn": SamplingParams(temperature=1.0),
          "filters": SamplingParams(temperature=1.0, top_k=40, top_p=0.9, min_p=0.02),
          "penalties": SamplingParams(temperature=0.8, presence_penalty=0.7, repetition_penalty=1.3,
                                      logit_bias={7: 4.0})}


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("pattern", [*PATTERNS, "head"])
@pytest.mark.parametrize("depth", [1, 3, 7])
def test_same_answers_with_any_drafts(embedded: ModelRunner, pattern: str, depth: int, params: str) -> None:
    """To the bit, with up to 16 tokens in a step; one who does not want drafts; twice."""
    requests = [replace(greedy(numbers(seed, 30 + seed, 500), 40, str(seed)), speculate=seed != 1, output=replace(
        PARAMS[params], seed=seed, max_tokens=40, ignore_eos=True)) for seed in range(16 // (depth + 1))]
    wanted = {name: answer.tokens for (name, _), answer in serve(plain_of(embedded), requests).items()}
    head = embedded.mtp_runner
    assert head
    drafter = (MtpProposer(embedded, head, depth) if pattern == "head"
               else Known(wanted, PATTERNS[pattern]))
    drafter.limit = depth
    engine = Engine(embedded, drafter, FixedDraftLength(depth))
    for _ in range(2):
        for request in requests:
            engine.add(request)
        answers: Answers = {}
        while engine.has_work:
            take(answers, engine.step())
            engine.check()
        assert {name: answer.tokens for (name, _), answer in answers.items()} == wanted
    assert sum(engine.speculator.stats.drafted_at) > 0 and engine.speculator.drafter is drafter


@pytest.fixture(autouse=True)
def _whole_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are not cut by the duration of steps: on a GPU, chunks of other lengths round differently."""
    monkeypatch.setattr(policy, "_STALL", 3600.0)


@pytest.fixture(scope="module")
def embedded() -> ModelRunner:
    return load(None, EngineConfig(device="cuda", dtype="bfloat16", memory="512MiB", max_batch=8, max_context=512,
                                   speculate="mtp:7", prefix_cache=False))


def plain_of(runtime: ModelRunner) -> ModelRunner:
    return replace(runtime, mtp=None, options=replace(runtime.options, speculate="off"))


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_same_answers_with_drafts(runtime: ModelRunner, rows: int) -> None:
    """To the bit, with up to 16 tokens in a step."""
    requests = [replace(greedy(numbers(seed, 30 + seed, runtime.config.vocab_size), 60, str(seed)),
                        output=SamplingParams(temperature=0.8 * (seed % 2), seed=seed, max_tokens=60, ignore_eos=True))
                for seed in range(rows)]
    wanted = {name: answer.tokens for (name, _), answer in serve(plain_of(runtime), requests).items()}
    for drafter in (Known(wanted), None):
        engine = Engine(runtime, drafter, FixedDraftLength(4))
        for request in requests:
            engine.add(request)
        answers = drain(engine)
        assert {name: answer.tokens for (name, _), answer in answers.items()} == wanted
        stats = engine.speculator.stats
        assert engine.speculator.drafter and sum(stats.drafted_at) > 50
        assert drafter or engine.stats.async_steps > engine.stats.steps / 3, (
            "no step was launched behind one with drafts"
        )
        if drafter:
            assert sum(stats.accepted_at) > 0.3 * sum(stats.drafted_at)


# The draft head


@torch.inference_mode()
def test_drafts_equal_the_torch_ops(runtime: ModelRunner) -> None:
    """One by one from the same hidden states and K/V."""
    head, pools = runtime.mtp_runner, runtime.pools
    assert head and head._step and pools.hidden is not None
    for seed, tensor in enumerate((pools.keys, pools.values, pools.hidden)):
        tensor.copy_(randn(*tensor.shape[1:], seed=seed))
    rows = tuple(
        PlannedRow((7 + row,), 20 + 9 * row, tuple(range(1 + 8 * row, 9 + 8 * row)), row, 1) for row in range(3)
    )
    batch = verifying(StepPlan(rows), pools.device)
    views, mtp, layer = runtime.views, head._mtp, runtime.views.kv[-1]
    kept = layer.keys.clone(), layer.values.clone()
    slow, hidden = batch, pools.hidden[0][batch.source]
    wanted, logits_of = [], []
    for depth in range(4):
        hidden, logits = mtp.draft(slow.ids, hidden, slow, views)
        wanted.append(logits.argmax(-1))
        logits_of.append(logits)
        moved = tuple(replace(row, tokens=(int(wanted[-1][index]),), done=row.done + depth + 1)
                      for index, row in enumerate(rows))
        slow = verifying(StepPlan(moved), pools.device)
    layer.keys.copy_(kept[0])
    layer.values.copy_(kept[1])
    from deltic.ops.types import Sampling

    zeros = torch.zeros(12, device="cuda")
    found = head._step.draft(batch, torch.full((3,), 4), Sampling(zeros, zeros.long(), zeros + 1, zeros, zeros.long()))
    for row in range(3):
        for depth in range(4):
            mine, theirs = int(found[row, depth]), int(wanted[depth][row])
            if mine != theirs:  # a near tie; what follows has nothing in common
                top = logits_of[depth][row]
                assert float(top[theirs] - top[mine]) < 0.05 * float(top[top.isfinite()].std()), (row, depth)
                break


@pytest.mark.parametrize("quant", ["none", "q4_k", "q8_0", "fp8"])
def test_model_with_a_head_drafts_by_default(quant: str) -> None:
    """With the default of `speculate`, whatever the model's own weights are."""
    loaded = load(SMALL, EngineConfig(device="cuda", dtype="bfloat16", memory="1GiB", max_batch=4, max_context=512,
                                      quant=quant))
    assert loaded.capabilities.verifies and loaded.mtp_runner and loaded.mtp_runner.drafts_on_device
    engine = Engine(loaded, MtpProposer(loaded, loaded.mtp_runner, 3), FixedDraftLength(3))
    requests = [greedy(numbers(seed, 40, 500), 40, str(seed)) for seed in range(3)]
    wanted = {name: answer.tokens for (name, _), answer in serve(plain_of(loaded), requests).items()}
    for request in requests:
        engine.add(request)
    assert {name: answer.tokens for (name, _), answer in drain(engine).items()} == wanted
    assert sum(engine.speculator.stats.drafted_at) > 30


@pytest.mark.parametrize("seed", range(12))
def test_same_answers_with_idle_sequences(seed: int) -> None:
    """While steps are in flight, sequences lose their places and go on later; to the bit, as their states are kept."""
    loaded = load(None, EngineConfig(device="cuda", dtype="bfloat16", memory="512MiB", max_batch=4, max_context=512,
                                     speculate="mtp:3"))
    assert loaded.mtp_runner
    draw, names = random.Random(seed), "abc"
    requests = [replace(greedy(numbers(10 * seed + index, 30 + index, 500), 60, name), output=SamplingParams(
        temperature=0.8 * (index % 2), seed=index, max_tokens=60, ignore_eos=True))
        for index, name in enumerate(names)]
    wanted = {name: answer.tokens for (name, _), answer in serve(plain_of(loaded), requests).items()}
    loaded.cache.clear()
    engine, answers = Engine(loaded, MtpProposer(loaded, loaded.mtp_runner, 3), FixedDraftLength(3)), Answers()
    for request in requests:
        engine.add(request)
    for step in range(1000):
        for name in draw.choice(["", "", "", *names]):
            (engine.pause if 4 <= step < 60 and draw.random() < 0.5 else engine.resume)(name)
        for name in names if step >= 60 else "":
            engine.resume(name)
        if not engine.has_work and not engine.scheduler.paused:
            break
        take(answers, engine.step())
        engine.check()
    assert {name: answer.tokens for (name, _), answer in answers.items()} == wanted
    assert engine.stats.async_steps > 10 and engine.speculator.drafter


class EndsAt:
    """A matcher that ends an answer at this token of it."""

    def __init__(self, last: int) -> None:
        self.left = last

    def push(self, token: int) -> bool:
        self.left -= 1
        return self.left == 0


def test_answer_ending_among_drafts_keeps_its_state() -> None:
    """While the next step is in flight already: whoever goes on there gets the same tokens, and as good drafts. The
    plain engine has no step in flight, so that both keep the state before the last token."""
    # no host memory: prefixes that the plain engine left there would have no K/V of the head
    loaded = load(None, EngineConfig(device="cuda", dtype="bfloat16", memory="512MiB", host_memory="0", max_batch=4,
                                     max_context=512, speculate="mtp:3"))
    assert loaded.mtp_runner
    shares = []
    wanted, found = (
        Engine(plain_of(loaded), overlap=False),
        Engine(loaded, MtpProposer(loaded, loaded.mtp_runner, 3), FixedDraftLength(3)),
    )
    for last in range(3, 35):
        request = replace(greedy(numbers(last, 40, 500), 60, "first"), matcher=lambda end=last: EndsAt(end))
        results, counts = [], (sum(found.speculator.stats.drafted_at), sum(found.speculator.stats.accepted_at))
        for engine in (wanted, found):
            engine.runtime.cache.clear()
            engine.add(request)
            first = drain(engine)["first", 0].tokens
            engine.add(greedy((*request.ids, *first, 9, 8), 30, "next"))
            answer = drain(engine)["next", 0]
            assert answer.last.usage and answer.last.usage.cached_tokens == 40 + last - 1
            results.append((first, answer.tokens))
        assert results[0] == results[1], last
        shares.append((sum(found.speculator.stats.accepted_at) - counts[1])
                      / (sum(found.speculator.stats.drafted_at) - counts[0]))
    # prompts of random numbers, of which few answers are easy to foresee
    assert found.stats.async_steps > found.stats.steps / 3 and sum(shares) > 0.1 * len(shares), shares


QUESTION = "<|im_start|>user\nWhat is the capital of {}?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
COUNTRIES = ("France", "Italy", "Japan", "Peru", "Kenya", "Norway", "Chile", "Egypt", "Spain", "Poland")


def test_embedded_head_predicts_training_text() -> None:
    """On a CPU, ahead of the host and after it."""
    tokenizer = Tokenizer.from_file(str(resolve(None) / "tokenizer.json"))
    for temperature in (0.0, 0.7):
        for device, ahead in (("cpu", False), ("cuda", False), ("cuda", True)):
            loaded = load(None, EngineConfig(device=device, dtype="bfloat16", memory="256MiB", max_context=512,
                                             speculate="mtp:3"))
            assert loaded.mtp_runner
            engine = Engine(loaded, MtpProposer(loaded, loaded.mtp_runner, 3), FixedDraftLength(3))
            if not ahead:
                engine.speculator.draft_ahead = lambda flight: None  # type: ignore[method-assign]
            for country in COUNTRIES:
                ids = tokenizer.encode(QUESTION.format(country)).ids
                engine.add(replace(greedy(ids, 20, country), output=SamplingParams(
                    temperature=temperature, seed=1, max_tokens=20)))
                drain(engine)
            stats = engine.speculator.stats
            assert sum(stats.accepted_at) > 0.6 * sum(stats.drafted_at) > 10, (device, ahead, stats)


class NowAndThen(FixedDraftLength):
    """Three drafts in steps that are three apart, none in between."""

    step = 0

    def choose(self, known: Any, rows: int) -> int:
        self.step += 1
        return self.limit if self.step % 3 == 0 else 0


def test_drafts_start_and_stop() -> None:
    """What was drafted behind a step is not verified where another one has come between."""
    loaded = load(None, EngineConfig(device="cuda", dtype="bfloat16", memory="256MiB", max_context=512,
                                     speculate="mtp:3"))
    assert loaded.mtp_runner
    requests = [greedy(numbers(seed, 40, 500), 60, str(seed)) for seed in range(3)]
    wanted = {name: answer.tokens for (name, _), answer in serve(plain_of(loaded), requests).items()}
    engine = Engine(loaded, MtpProposer(loaded, loaded.mtp_runner, 3), NowAndThen(3))
    for request in requests:
        engine.add(request)
    answers = drain(engine)
    assert {name: answer.tokens for (name, _), answer in answers.items()} == wanted
    assert sum(engine.speculator.stats.drafted_at) > 30


@torch.inference_mode()
def test_warm_up_records_draft_steps() -> None:
    loaded = load(None, EngineConfig(device="cuda", dtype="bfloat16", memory="256MiB", max_batch=4, max_context=600,
                                     speculate="mtp:3"))
    loaded.warm_up()
    assert loaded.graphs and loaded.mtp_runner and loaded.mtp_runner._step
    head = loaded.mtp_runner._step.record.__self__  # type: ignore[attr-defined]
    recorded = loaded.graphs.buckets, tuple(head._known)
    answers = serve(loaded, [greedy(numbers(seed, 20 + 9 * seed, 500), 50, str(seed)) for seed in range(4)])
    assert len(answers) == 4 and (loaded.graphs.buckets, tuple(head._known)) == recorded
