"""On a GPU: a shortened draft head whose rows change in place, between steps in flight, under recorded graphs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import Answers, drain, greedy, numbers, serve, take
from test_cuda_kernels import randn
from test_cuda_tiles import TYPES, packed
from test_cuda_verify import LARGE, SMALL, plain_of
from torch import Tensor

from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import load
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.model.draft_vocabulary import DraftVocabulary, draftable
from deltic.ops.cuda.sample import choose
from deltic.ops.noise import gumbel, sample_key
from deltic.ops.quantized import QTensor
from deltic.ops.types import Sampling
from deltic.params import SamplingParams
from deltic.runner.input_batch import verifying
from deltic.runner.model_runner import ModelRunner
from deltic.spec_decode.draft_length import FixedDraftLength
from deltic.spec_decode.mtp import PendingDrafts
from deltic.spec_decode.proposers import MtpProposer

UNITS_APART = True
if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)
MODELS = {"0.8b": (SMALL, "none", 4000), "0.8b q4_k": (SMALL, "q4_k", 4000), "4b fp8": (LARGE, "fp8", 4000),
          "tiny": (None, "none", 128)}
"""Models, how their weights are quantized, and how many tokens their heads have."""


@pytest.fixture(scope="module", params=MODELS)
def runtime(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    model, quant, count = MODELS[request.param]
    loaded = load(model, EngineConfig(device="cuda", dtype="bfloat16", memory="1GiB", max_batch=8, max_context=1024,
                                      speculate="mtp:4", quant=quant, draft_vocab=count, prefix_cache=False))
    assert loaded.capabilities.verifies, "the kernels do not serve this model, or not its head"
    assert loaded.mtp and loaded.mtp.vocabulary and len(loaded.mtp.head) < loaded.config.vocab_size
    yield loaded
    torch.cuda.empty_cache()


def vocabulary_of(runtime: ModelRunner) -> DraftVocabulary:
    assert runtime.mtp and runtime.mtp.vocabulary
    return runtime.mtp.vocabulary


def known_by(vocabulary: DraftVocabulary) -> set[int]:
    return {*vocabulary._base, *vocabulary._recent}


@pytest.mark.parametrize("form", ["plain", *TYPES])
def test_rows_are_copied_unchanged(form: str) -> None:
    whole: Any = randn(300, 512, dtype=torch.bfloat16) if form == "plain" else packed(form, 300, 512, device="cuda")[0]
    tokens, draw = draftable(64, 300), random.Random(1)
    assert tokens
    vocabulary = DraftVocabulary(whole, tokens)
    place = vocabulary.head.data.data_ptr()
    for _ in range(20):
        vocabulary.see([draw.randrange(300) for _ in range(draw.randrange(9))])
    ids, head = vocabulary.ids, vocabulary.head
    assert {*ids.tolist()} == known_by(vocabulary) and place == head.data.data_ptr()
    found, wanted = ((matrix.lookup(rows) if isinstance(matrix, QTensor) else matrix[rows])
                     for matrix, rows in ((head, torch.arange(80, device="cuda")), (whole, ids)))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("width", [80, 501, 4000])
def test_draws_map_to_vocabulary_tokens(width: int, rows: int) -> None:
    """Their noise is that of the tokens."""
    logits, draw = randn(rows, width), random.Random(width)
    ids = torch.tensor(draw.sample(range(250_000), width), device="cuda")
    temperature = torch.tensor([0.0, 0.7, 1.3][:rows] * 6, device="cuda")[:rows].contiguous()
    keys = torch.tensor([sample_key(7, 0, row) for row in range(rows)], device="cuda")
    chosen = torch.zeros(2, rows, dtype=torch.int64, device="cuda")
    choose(logits, temperature, keys, chosen, ids)
    for row in range(rows):
        scores = logits[row].double().cpu()
        if float(temperature[row]):
            noise = gumbel(keys[row:row + 1].cpu(), ids.cpu())
            scores = scores / float(temperature[row]) + noise.flatten()
        token = int(chosen[0, row])
        assert token in ids.tolist() and int(chosen[1, row]) == 1
        assert float(scores.max() - scores[ids.tolist().index(token)]) < 1e-9, (row, token)


@torch.inference_mode()
def drafts_of(runtime: ModelRunner, rows: tuple[PlannedRow, ...], count: int) -> Tensor:
    """By the recorded graph, greedily."""
    head = runtime.mtp_runner
    assert head and head._step
    zeros = torch.zeros(count * len(rows), device="cuda")
    found = head._step.draft(verifying(StepPlan(rows), runtime.device), torch.full((len(rows),), count),
                             Sampling(zeros, zeros.long(), zeros + 1, zeros, zeros.long()))
    return found.clone()


@torch.inference_mode()
def test_recorded_graph_uses_current_rows(runtime: ModelRunner) -> None:
    """The first draft is the best of the tokens that have rows then, as the torch ops say."""
    head, pools, vocabulary = runtime.mtp_runner, runtime.pools, vocabulary_of(runtime)
    assert head and head._step and pools.hidden is not None
    recorded: Any = head._step.record
    rows = tuple(
        PlannedRow((7 + row,), 20 + 9 * row, tuple(range(1 + 8 * row, 9 + 8 * row)), row, 1) for row in range(3)
    )
    draw, changed, graphs = random.Random(2), 0, None
    for seed in range(24):
        for offset, tensor in enumerate((pools.keys, pools.values, pools.hidden)):
            tensor.copy_(randn(*tensor.shape[1:], seed=3 * seed + offset))
        batch = verifying(StepPlan(rows), pools.device)
        kept = [tensor.clone() for tensor in (runtime.views.kv[-1].keys, runtime.views.kv[-1].values)]
        logits = head._mtp.draft(batch.ids, pools.hidden[0][batch.source], batch, runtime.views)[1]
        for tensor, before in zip((runtime.views.kv[-1].keys, runtime.views.kv[-1].values), kept, strict=True):
            tensor.copy_(before)
        found = drafts_of(runtime, rows, 1)[:, 0].tolist()
        for row, token in enumerate(found):
            top, finite = logits[row], logits[row][logits[row].isfinite()]
            assert len(finite) == len(vocabulary.ids) and token in vocabulary
            assert float(top.max() - top[token]) < 0.05 * float(finite.std()), (seed, row)
            changed += token >= len(vocabulary._base)
        places = tuple(recorded.__self__._known)
        graphs = graphs or places
        assert places == graphs, "a graph was recorded anew"
        vocabulary.see([draw.randrange(runtime.config.vocab_size) for _ in range(len(vocabulary.ids) // 9)])
    # the embedded model is sure of itself
    assert changed or runtime.path, "no token was drafted but those of the base"


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_changing_rows_change_no_answer(runtime: ModelRunner, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, with steps in flight behind steps with drafts; what was drafted had a row when it was drafted."""
    size, vocabulary, draw = runtime.config.vocab_size, vocabulary_of(runtime), random.Random(rows)
    requests = [replace(greedy(numbers(seed, 30 + seed, size), 60, str(seed)), output=SamplingParams(
        temperature=0.8 * (seed % 2), seed=seed, max_tokens=60, ignore_eos=True)) for seed in range(rows)]
    wanted = {name: answer.tokens for (name, _), answer in serve(plain_of(runtime), requests).items()}
    engine, answers = Engine(runtime, None, FixedDraftLength(4)), Answers()
    drafter = engine.speculator.drafter
    assert isinstance(drafter, MtpProposer)
    then, drafts, draft_ahead, drafted = dict[int, set[int]](), PendingDrafts.drafts, drafter.draft_ahead, list[int]()
    kept = list[PendingDrafts]()  # an id is of one promise as long as that is there

    def noted(flight: Any) -> None:
        draft_ahead(flight)
        if drafter._pending:
            then[id(drafter._pending)] = known_by(vocabulary)
            kept.append(drafter._pending)

    def checked(self: PendingDrafts, sequence: Any, count: int) -> tuple[int, ...]:
        found = drafts(self, sequence, count)
        assert {*found} <= then[id(self)], "rows of one step with the tokens of another"
        drafted.extend(found)
        return found

    monkeypatch.setattr(drafter, "draft_ahead", noted)
    monkeypatch.setattr(PendingDrafts, "drafts", checked)
    before = vocabulary.copied
    for request in requests:
        engine.add(request)
    while engine.has_work:
        vocabulary.see([draw.randrange(size) for _ in range(len(vocabulary.ids) // 9)])
        take(answers, engine.step())
        engine.check()
    assert {name: answer.tokens for (name, _), answer in answers.items()} == wanted
    assert engine.speculator.drafter is drafter, "drafting failed and was switched off"
    assert vocabulary.copied > before + 20 and len(drafted) > 20 and engine.stats.async_steps > engine.stats.steps / 3
    assert sum(engine.speculator.stats.drafted_at) > 50


def test_embedded_head_learns_from_prompts() -> None:
    """A head of 128 tokens is right as often as on a CPU, and more often than one that is shown nothing."""
    shares = {}
    for name, device in (("cpu", "cpu"), ("cuda", "cuda"), ("blind", "cuda")):
        loaded = load(None, EngineConfig(device=device, dtype="bfloat16", memory="256MiB", max_context=512,
                                         speculate="mtp:3", draft_vocab=128))
        engine = Engine(loaded, None, FixedDraftLength(3))
        if name == "blind":
            engine.speculator.drafter._see = lambda sequences: None  # type: ignore[union-attr, method-assign]
        for seed in range(8):
            engine.add(greedy(numbers(seed, 60, loaded.config.vocab_size), 100, str(seed)))
            drain(engine)
        stats = engine.speculator.stats
        shares[name] = sum(stats.accepted_at) / sum(stats.drafted_at)
    assert abs(shares["cuda"] - shares["cpu"]) < 0.12 and shares["cuda"] > shares["blind"], shares
