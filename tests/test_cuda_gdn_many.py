"""The delta rule of many rows, whose states pass through shared memory: blocks with more heads than they remember, and
states that are written only now and then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from support import drain, greedy, numbers
from test_cuda_kernels import batch_of, error, randn, served

from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import RandomModel, load
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.ops.torch import gdn as torch_gdn
from deltic.ops.types import GdnWeights, StateView
from deltic.runner.input_batch import decoding, step_of
from deltic.runner.model_runner import ModelRunner
from deltic.spec_decode.draft_length import FixedDraftLength

UNITS_APART = True
if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)


@pytest.fixture(scope="module", params=["qwen3.5-0.8b", "qwen3.5-4b"])
def runtime(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    yield load(RandomModel(request.param, 4), EngineConfig(
        device="cuda", dtype="bfloat16", memory="3GiB", max_batch=256, max_context=256, speculate="off"))
    torch.cuda.empty_cache()


@pytest.mark.parametrize("real", [100, 61])
@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("blocks", [132, 5])
@torch.inference_mode()
def test_whole_states(runtime: ModelRunner, blocks: int, moved: bool, real: int) -> None:
    step, layer = served(runtime), runtime.decoder.weights.layers[0]
    assert isinstance(layer.mixer, GdnWeights)
    state, spec = runtime.views.states[0], layer.mixer.spec
    assert len(state.recurrent) >= 200
    state.recurrent.copy_(randn(*state.recurrent.shape, seed=1) * 0.3)
    state.conv.copy_(randn(*state.conv.shape, seed=2))
    before = StateView(state.recurrent.clone(), state.conv.clone())
    batch = batch_of([3 + 7 * row if row % 9 else 0 for row in range(100)], real, moved)
    proj = randn(100, spec.channels + spec.values + 2 * spec.value_heads, seed=3, dtype=torch.bfloat16)
    work = step.begin(batch, "many")
    known, step.blocks = step.blocks, blocks
    step.mix(layer, work, proj, proj.shape[1])
    step.blocks = known
    wide = replace(layer.mixer, **{name: getattr(layer.mixer, name).double()
                                   for name in ("conv", "decay", "dt_bias", "norm")})
    slow = StateView(before.recurrent.double(), before.conv.double())
    output = torch_gdn._core(proj.double(), wide, slow, replace(batch, memo={}))
    found, slots = work.y.view(-1)[:output.numel()].view(output.shape), batch.target[:real]
    assert error(found[:real], output[:real]) < 5e-3
    assert error(state.recurrent[slots], slow.recurrent[slots]) < 2e-5
    assert torch.equal(state.conv[slots].double(), slow.conv[slots])
    others = torch.ones(len(before.recurrent), dtype=torch.bool, device="cuda")
    others[slots] = False
    assert torch.equal(state.recurrent[others], before.recurrent[others])
    assert torch.equal(state.conv[others], before.conv[others])


@dataclass
class Place:
    """Where a row's state is, where it is written to next, and how many tokens are in its ring."""

    slot: int
    other: int
    behind: int = 0

    def advance(self, row: PlannedRow) -> None:
        self.behind = self.behind + 1 if row.append else 0
        if not row.append:
            self.slot, self.other = self.other, self.slot


def row_of(index: int, place: Place, tokens: int, deferred: bool) -> PlannedRow:
    """That has had so many tokens more than at first. deferred: most leave this one in their rings, not all at once."""
    done, append = (5 * index) % 23 + tokens, deferred and (tokens + index) % 8 != 0
    return PlannedRow(
        (7,),
        done,
        tuple(range(4 * index, 4 * index + 4)),
        place.slot,
        1,
        None if append else place.other,
        base=done - place.behind,
        delta_log=39 - index,
        append=append,
    )


@pytest.mark.parametrize("blocks", [132, 7])
@torch.inference_mode()
def test_deferred_updates_have_the_same_bits(runtime: ModelRunner, blocks: int) -> None:
    """Outputs token by token, and the states in the end."""
    step, layer, pools, count = served(runtime), runtime.decoder.weights.layers[0], runtime.pools, 40
    assert isinstance(layer.mixer, GdnWeights) and runtime.capabilities.defers_state_writes and pools.delta_logs
    spec, state = layer.mixer.spec, runtime.views.states[0]
    for tensor in pools.delta_logs:
        tensor.fill_(float("nan"))
    start = randn(*state.recurrent.shape, seed=1) * 0.3, randn(*state.conv.shape, seed=2)
    found = []
    for deferred in (False, True):
        state.recurrent.copy_(start[0])
        state.conv.copy_(start[1])
        places = [Place(index, 100 + index if index % 2 else index) for index in range(count)]
        outputs = []
        for tokens in range(21):
            rows = tuple(row_of(index, place, tokens, deferred) for index, place in enumerate(places))
            padded = decoding(StepPlan(rows), pools.device).padded
            assert padded and (padded.tokens is not None) == deferred
            batch = step_of(padded)
            proj = randn(padded.rows, spec.channels + spec.values + 2 * spec.value_heads, seed=tokens,
                         dtype=torch.bfloat16)
            work = step.begin(batch, "many")
            assert work.new_deltas is None
            known, step.blocks = step.blocks, blocks
            step.mix(layer, work, proj, proj.shape[1])
            step.blocks = known
            outputs.append(work.y.view(-1)[:count * spec.values].clone())
            for place, row in zip(places, rows, strict=True):
                place.advance(row)
        assert (max(place.behind for place in places) > 3) == deferred
        for index, place in enumerate(places):
            if place.behind:
                row = row_of(index, place, 21, deferred)
                runtime.decoder.ops.flush_delta_log(
                    runtime.views.states[:1], row.slot, row.delta_log, row.done - place.behind, row.done, row.slot
                )
        slots = [place.slot for place in places]
        found.append((torch.stack(outputs), state.recurrent[slots], state.conv[slots]))
    for wanted, given in zip(*found, strict=True):
        assert torch.equal(wanted, given)


@pytest.mark.parametrize(("model", "speculate"), [(None, "off"), (None, "mtp:3"), ("qwen3.5-0.8b", "off"),
                                                  ("qwen3.5-35b-a3b", "off")])
def test_answers_with_deferred_updates(model: str | None, speculate: str) -> None:
    """Are the same as without, while sequences come and end, also beside a draft head that drafts nothing; and nothing
    is recorded on the way."""
    options = EngineConfig(device="cuda", dtype="bfloat16", memory="2GiB", max_batch=32, max_context=512,
                           speculate=speculate, prefix_cache=False)
    runtime = load(model and RandomModel(model, 4), options)
    runtime.warm_up()
    assert runtime.capabilities.defers_state_writes and runtime.graphs
    recorded = runtime.graphs.buckets
    requests = [greedy(numbers(seed, 5 + 3 * seed, runtime.config.vocab_size), 30 + 3 * (seed % 11), str(seed))
                for seed in range(50)]
    plain, deferring = (Engine(each, depth=FixedDraftLength(0)) for each in (replace(runtime), runtime))
    plain.scheduler.defer_from = None
    answers = []
    for engine in (plain, deferring):
        engine.scheduler.times = None  # what is computed together may not depend on the time
        for request in requests:
            engine.add(request)
        answers.append({key: answer.tokens for key, answer in drain(engine).items()})
    assert answers[0] == answers[1] and runtime.graphs.buckets == recorded
    torch.cuda.empty_cache()
