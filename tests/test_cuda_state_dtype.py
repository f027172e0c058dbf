"""The GPU's kernels over states as bfloat16: against float64 rounded in the same places, against those over float32,
and through the engine.

What is promised to the bit over float32 states (L6) is not over these: how often a state was written matters. Which
share of greedy tokens is the same is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import drain, greedy, numbers, serve, small_runtime
from test_cuda_kernels import batch_of, error, normed_slices, randn, served
from test_cuda_kv_dtype import logits_of, session_over
from test_cuda_prompts import CASES as PROMPTS
from test_cuda_prompts import batch_of as prompt_of
from test_cuda_prompts import mix, prompts_of
from test_cuda_verify import CASES as RINGS
from test_cuda_verify import Known, fill_with_nan, plain_of
from test_state_dtype import check_preempted
from torch import Tensor

from deltic.cache.manager import HybridCache
from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import RandomModel, load
from deltic.engine.scheduler import DEFERRED
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.ops import explain, reference
from deltic.ops.torch import gdn as torch_gdn
from deltic.ops.types import Batch, DecoderLayer, DeltaLogView, GdnWeights, StateView
from deltic.runner.input_batch import decoding, power_of_two, step_of, verifying
from deltic.runner.model_runner import ModelRunner
from deltic.spec_decode.draft_length import FixedDraftLength

UNITS_APART = True
if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)
BF16, NAN = torch.bfloat16, float("nan")
MODELS = {"tiny": None, **{name: RandomModel(f"qwen3.5-{name}", 4, initializer_range=0.05) for name in ("0.8b", "4b")}}
"""Heads of 32 and of 128, the latter in slices of 16 and of 32 columns."""
NAMES = ("inputs", "keys", "updates", "decays")
SLOTS = 576
"""That rows use at most; a card serves several processes, so that no more of them are looked at."""


def options(**given: Any) -> EngineConfig:
    return EngineConfig(**{"device": "cuda", "dtype": "bfloat16", "state_dtype": "bfloat16", "memory": "4GiB",
                           "max_batch": 256, "max_context": 256, "speculate": "off", "host_memory": "0", **given})


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[ModelRunner, ModelRunner]]:
    """The same model over bfloat16 states, and over float32."""
    small, plain = (load(MODELS[request.param], options(state_dtype=state)) for state in ("bfloat16", "float32"))
    assert small.pools.recurrent.dtype == BF16 and plain.pools.recurrent.dtype == torch.float32
    assert small.pools.conv.dtype == BF16
    assert small.capabilities.defers_state_writes and plain.capabilities.defers_state_writes
    yield small, plain
    torch.cuda.empty_cache()


@pytest.fixture
def runtime(pair: tuple[ModelRunner, ModelRunner]) -> ModelRunner:
    return pair[0]


# One layer's kernels


def fill(runtime: ModelRunner) -> None:
    """Numbers that bfloat16 holds, the same whatever the states are."""
    pools = runtime.pools
    for seed, tensor in enumerate((pools.recurrent, pools.conv, *(pools.delta_logs or ()))):
        for slot in range(0, min(SLOTS, tensor.shape[1]), 64):
            part = tensor[:, slot:slot + 64]
            part.copy_((randn(*part.shape[1:], seed=1000 * seed + slot) * 0.3).to(BF16))
    if pools.delta_logs:
        pools.delta_logs[3].uniform_(0.5, 1, generator=torch.Generator("cuda").manual_seed(1))


def in_float64(state: StateView) -> StateView:
    ring = state.delta_log
    return StateView(state.recurrent[:SLOTS].double(), state.conv[:SLOTS].double(), ring and DeltaLogView(
        *(getattr(ring, name).double() for name in NAMES), ring.tiled))


def enough(runtime: ModelRunner, slots: int) -> None:
    if runtime.pools.recurrent.shape[1] < slots:
        pytest.skip("the model's states are too large for so many")


def check_states(found: Tensor, exact: Tensor, before: Tensor, slots: list[int], tolerance: float = 0.02) -> None:
    """In these slots it is the exact state, rounded once, but for the share `tolerance` of its numbers, which float32
    has rounded to the other side of a middle; no other slot was written. before: the slots as they were."""
    mine, wanted = found[slots], exact[slots].to(found.dtype)
    if slots:
        assert error(mine, exact[slots]) < 3e-3
        assert (mine != wanted).float().mean() <= tolerance
        assert ((mine.double() - exact[slots]).abs() <= exact[slots].abs() * 2**-8 + 1e-4).all()
    others = torch.ones(len(before), dtype=torch.bool, device="cuda")
    others[slots] = False
    assert torch.equal(found[:SLOTS][others].nan_to_num(7), before[others].nan_to_num(7))


def inputs(layer: DecoderLayer, tokens: int, few: bool) -> Tensor:
    assert isinstance(layer.mixer, GdnWeights)
    spec = layer.mixer.spec
    proj = randn(tokens, spec.channels + spec.values + 2 * spec.value_heads, seed=3, dtype=BF16)
    return proj.float() if few else proj


def weights_in_float64(layer: DecoderLayer) -> GdnWeights:
    assert isinstance(layer.mixer, GdnWeights)
    return replace(layer.mixer, **{name: getattr(layer.mixer, name).double()
                                   for name in ("conv", "decay", "dt_bias", "norm")})


def run_layer(runtime: ModelRunner, batch: Batch, proj: Tensor, blocks: int | None = None) -> Tensor:
    """What the first layer's kernels give for a bucket: [tokens, values]. blocks: for as many multiprocessors."""
    step, layer = served(runtime), runtime.decoder.weights.layers[0]
    assert isinstance(layer.mixer, GdnWeights)
    spec, kind = layer.mixer.spec, "few" if proj.dtype == torch.float32 else "many"
    work = step.begin(batch, kind)
    fill_with_nan(work)
    known, step.blocks = step.blocks, blocks or step.blocks
    step.mix(layer, work, proj, proj.shape[1])
    step.blocks = known
    step.end(work)
    if step.splits_heads(spec, work):
        return normed_slices(work.core, spec)
    return work.y.view(-1)[:len(proj) * spec.values].view(len(proj), spec.values)


@pytest.mark.parametrize("moved", [False, True], ids=["in-place", "moved"])
@pytest.mark.parametrize(("count", "blocks"), [(1, 132), (2, 132), (5, 132), (16, 132), (17, 132), (40, 132), (40, 7),
                                               (256, 132)])
@torch.inference_mode()
def test_rows_that_write_their_states(
    pair: tuple[ModelRunner, ModelRunner], count: int, blocks: int, moved: bool
) -> None:
    """Few blocks have more heads than they remember the places of."""
    done = [(3 + 7 * row) % 1000 if row % 9 != 4 else 0 for row in range(count)]
    done += [done[-1]] * (power_of_two(count) - count)
    batch, found = batch_of(done, count, moved), []
    proj = inputs(pair[0].decoder.weights.layers[0], len(done), len(done) <= 16)
    for runtime in pair:
        enough(runtime, 2 * len(done))
        fill(runtime)
        state = runtime.views.states[0]
        slow, before = in_float64(replace(state, delta_log=None)), state.recurrent[:SLOTS].clone()
        output = run_layer(runtime, batch, proj, blocks)[:count]
        wanted = torch_gdn._core(proj.double(), weights_in_float64(runtime.decoder.weights.layers[0]), slow,
                                 replace(batch, memo={}))[:count]
        slots = batch.target[:count].tolist()
        assert error(output, wanted) < 5e-3
        if state.recurrent.dtype == BF16:
            check_states(state.recurrent, slow.recurrent, before, slots)
        assert torch.equal(state.conv[slots].double(), slow.conv[slots])
        found.append((output.clone(), state.recurrent[slots]))
    check_pair(found, "rows", count)


def check_pair(found: list[tuple[Tensor, Tensor]], *what: object) -> None:
    """Over bfloat16 and over float32: outputs from the same states are the same but for how two compilations round in
    float32, and so are states once they are rounded."""
    (mine, my_states), (theirs, their_states) = found
    difference, share = error(mine, theirs), float((my_states != their_states.to(BF16)).float().mean())
    print(*what, f"outputs differ by {difference:.1e} from those over float32, {share:.1e} of the states' numbers")
    assert difference < 1e-3 and share < 5e-3


@pytest.mark.parametrize("case", RINGS)
@torch.inference_mode()
def test_rows_of_several_tokens(runtime: ModelRunner, case: str) -> None:
    """That leave tokens in rings, have some there, or both; of which the kernel folds those that are full."""
    rows = tuple(PlannedRow((7,) * count, done, tuple(range(1 + 4 * index, 5 + 4 * index)), 2 * index, count, base=base,
                     delta_log=index + 1, append=count > 1 or index % 2 == 1) for index, (done, base, count)
                 in enumerate(RINGS[case]))
    check_rings(runtime, verifying(StepPlan(rows), runtime.pools.device), rows)


@pytest.mark.parametrize("moved", [False, True], ids=["in-place", "moved"])
@pytest.mark.parametrize(("count", "blocks"), [(17, 132), (40, 132), (40, 7), (256, 132)])
@torch.inference_mode()
def test_many_rows_over_rings(runtime: ModelRunner, count: int, blocks: int, moved: bool) -> None:
    """One of five writes its state, the others leave their token in their ring; with none to nine behind."""
    enough(runtime, 300 + count if moved else count)
    rows = tuple(
        PlannedRow(
            (7,),
            30 + index % 7,
            tuple(range(4)),
            index,
            1,
            300 + index if moved and not append else None,
            base=30 + index % 7 - index % 10,
            delta_log=count - 1 - index,
            append=append,
        )
        for index in range(count)
        for append in [index % DEFERRED != DEFERRED - 1]
    )
    check_rings(runtime, decoding(StepPlan(rows), runtime.pools.device), rows, blocks)


def check_rings(runtime: ModelRunner, batch: Batch, rows: tuple[PlannedRow, ...], blocks: int | None = None) -> None:
    fill(runtime)
    state, layer = runtime.views.states[0], runtime.decoder.weights.layers[0]
    assert state.delta_log and batch.padded
    slow, before = in_float64(state), state.recurrent[:SLOTS].clone()
    bucket = step_of(batch.padded)
    proj = inputs(layer, bucket.layout.tokens, bucket.layout.tokens <= 16)
    found = run_layer(runtime, bucket, proj, blocks)
    real = replace(batch, append=batch.append.bool(), padded=None)
    output = reference.gdn_core(proj[:batch.layout.tokens].double(), weights_in_float64(layer), slow, real)
    assert error(found[:len(output)], output) < 5e-3
    written = []
    for row in rows:
        assert row.base is not None
        after = reference.next_base(row.base, row.done, len(row.tokens), row.append)
        slot = row.slot if row.target is None else row.target
        if after > row.base:
            written.append(slot)
            for position in range(max(after - 3, 0), after):
                assert torch.equal(state.conv[slot, position % 4].double(), slow.conv[slot, position % 4])
    check_states(state.recurrent, slow.recurrent, before, written)
    for name in NAMES:
        assert error(getattr(state.delta_log, name), getattr(slow.delta_log, name)) < 2e-5, name


@torch.inference_mode()
def test_flushing(runtime: ModelRunner) -> None:
    """All layers at once, in place and to another slot; the bits that a kernel writes whose row finds its ring full."""
    fill(runtime)
    pools, states = runtime.pools, runtime.views.states
    slow, before = [in_float64(state) for state in states], pools.recurrent[:, :SLOTS].clone()
    runtime.decoder.ops.flush_delta_log(states, 3, 1, 19, 30, 5)
    runtime.decoder.ops.flush_delta_log(states, 4, 2, 0, 7, 4)
    for layer, exact in enumerate(slow):
        reference.flush_delta_log((exact,), 3, 1, 19, 30, 5)
        reference.flush_delta_log((exact,), 4, 2, 0, 7, 4)
        check_states(pools.recurrent[layer], exact.recurrent, before[layer], [4, 5], 2e-3)
        for slot, first in ((5, 26), (4, 3)):
            places = [position % 4 for position in range(first, first + 4)]
            assert torch.equal(pools.conv[layer, slot, places].double(), exact.conv[slot, places])
    row = PlannedRow((7,) * 6, 30, (1, 2, 3), 3, 6, base=19, delta_log=1, append=True)
    padded = verifying(StepPlan((row,)), pools.device).padded
    assert padded
    bucket = step_of(padded)
    run_layer(runtime, bucket, inputs(runtime.decoder.weights.layers[0], bucket.layout.tokens, True))
    assert torch.equal(pools.recurrent[0, 3], pools.recurrent[0, 5])


@pytest.mark.parametrize("moved", [False, True], ids=["in-place", "moved"])
@pytest.mark.parametrize("case", PROMPTS)
@torch.inference_mode()
def test_prompts(pair: tuple[ModelRunner, ModelRunner], case: str, moved: bool) -> None:
    """With states that are emitted inside and at the ends of chunks, and rows of one token among them."""
    batch, found = prompt_of(*PROMPTS[case], moved), []
    written = sorted({*batch.target.tolist(), *batch.emit_slot.tolist()})
    for runtime in pair:
        layer, state = runtime.decoder.weights.layers[0], runtime.views.states[0]
        fill(runtime)
        fresh = batch.source[batch.done == 0]
        state.recurrent[fresh], state.conv[fresh] = NAN, NAN
        slow, before = in_float64(replace(state, delta_log=None)), state.recurrent[:SLOTS].clone()
        proj = inputs(layer, batch.layout.tokens, False)
        output = mix(prompts_of(runtime), layer, proj, batch)
        wanted = torch_gdn._core(proj.double(), weights_in_float64(layer), slow, replace(batch, memo={}))
        assert error(output, wanted) < 8e-3
        for slot in written:
            assert error(state.recurrent[slot], slow.recurrent[slot]) < 9e-3, slot
        others = [slot for slot in range(len(before)) if slot not in written]
        assert torch.equal(state.recurrent[others].nan_to_num(7), before[others].nan_to_num(7))
        found.append((output.clone(), state.recurrent[written]))
    check_pair(found, "prompts", case)


# Through the engine


def test_kernels_support_it(runtime: ModelRunner) -> None:
    who = explain(runtime.decoder.ops, runtime.decoder.weights, runtime.views)
    assert who["step"] == "cuda" and runtime.graphs is not None
    assert served(runtime).prefill is not None and served(runtime).delta_log is not None


def test_more_states_fit() -> None:
    plain, small = (load(MODELS["4b"], options(state_dtype=state, max_batch=8, memory="1GiB"))
                    for state in ("float32", "bfloat16"))
    assert small.memory.slots > 1.4 * plain.memory.slots
    assert 1.9 < plain.pools.sizes.slot_bytes / small.pools.sizes.slot_bytes <= 2


def test_prompts_then_decode(pair: tuple[ModelRunner, ModelRunner]) -> None:
    small, plain = (logits_of(runtime, 150) for runtime in pair)
    difference = error(small, plain)
    print(f"{pair[0].name}: logits over bfloat16 states are {difference:.1e} from those over float32")
    assert error(small[0], plain[0]) < 1e-2, "a prompt of one step reads no state"
    assert 1e-5 < difference < 0.1


@pytest.mark.parametrize("model", ["tiny", "0.8b"])
def test_torch_ops_support_it(model: str) -> None:
    """Where `--ops` says so."""
    own, theirs = (load(MODELS[model], options(max_batch=4, memory="1GiB", ops=ops)) for ops in ((), ("torch",)))
    assert own.step is not None and theirs.step is None and theirs.graphs is not None
    difference = error(logits_of(own, 150), logits_of(theirs, 150))
    print(f"{model}: logits of the kernels are {difference:.1e} from those of torch")
    assert difference < 8e-2
    assert len(serve(theirs, [greedy(numbers(1, 100, 500), 20)])["a", 0].tokens) == 20


COUNT, TOKENS, SHARE = 12, 50, 0.96
"""Of greedy tokens so many at least are those over float32 states. On a CPU, in float32, 99.1 % are."""


def test_greedy_tokens_mostly_equal_float32() -> None:
    """Each after those of float32 states: of answers that have parted, nothing more would be learned."""
    plain, small = (load(None, options(state_dtype=state, max_batch=16, max_context=512, memory="1GiB"))
                    for state in ("float32", "bfloat16"))
    prompts = [numbers(seed, 60 + 20 * seed, 500) for seed in range(COUNT)]
    wanted = serve(plain, [greedy(prompt, TOKENS, str(seed)) for seed, prompt in enumerate(prompts)])
    session, same = session_over(small), 0
    for seed, prompt in enumerate(prompts):
        told = wanted[str(seed), 0].tokens
        session.reset()
        logits = [session.prefill(prompt), *(session.step(token) for token in told[:-1])]
        same += sum(int(row.argmax()) == token for row, token in zip(logits, told, strict=True))
    share = same / (COUNT * TOKENS)
    print(f"{share:.2%} of {COUNT * TOKENS} greedy tokens of the embedded model are the same over bfloat16 states")
    assert share >= SHARE


def agreement(found: dict[str, list[int]], wanted: dict[str, list[int]]) -> float:
    """How far answers go together, of their length."""
    together = [next((index for index, pair in enumerate(zip(answer, wanted[name], strict=True)) if pair[0] != pair[1]),
                     len(answer)) for name, answer in found.items()]
    return sum(together) / sum(map(len, wanted.values()))


def tokens_of(answers: Any) -> dict[str, list[int]]:
    return {name: answer.tokens for (name, _), answer in answers.items()}


@pytest.mark.parametrize("defers", [False, True], ids=["all written", "deferred"])
def test_many_sequences(pair: tuple[ModelRunner, ModelRunner], defers: bool) -> None:
    """Come and end, by recorded steps; with states written for every token, and for every fifth."""
    requests = [greedy(numbers(seed, 5 + 2 * seed, pair[0].config.vocab_size), 30 + 3 * (seed % 11), str(seed))
                for seed in range(50)]
    found = []
    for runtime in pair:
        engine = Engine(replace(runtime, cache=HybridCache(runtime.pools)), depth=FixedDraftLength(0))
        if not defers:
            engine.scheduler.defer_from = None
        for request in requests:
            engine.add(request)
        found.append(tokens_of(drain(engine)))
    share = agreement(found[0], found[1])
    print(f"{pair[0].name}, {'deferred' if defers else 'all written'}: answers are the same for {share:.0%} of their "
          "length over bfloat16 and over float32 states")
    assert all(len(found[0][request.id]) == len(found[1][request.id]) for request in requests)
    assert share > (0.3 if pair[0].name == "tiny" else 0.02), "random models have many tokens that are nearly as likely"


@pytest.mark.parametrize("drafter", ["known", "head"])
def test_drafts(drafter: str) -> None:
    """Over rings, whose states are written when these are full; of what float32 states answer most are right."""
    given = {"memory": "512MiB", "max_batch": 4, "max_context": 600, "speculate": "mtp:3", "prefix_cache": False}
    small, plain = (load(None, options(state_dtype=state, **given)) for state in ("bfloat16", "float32"))
    assert small.capabilities.verifies and small.pools.recurrent.dtype == BF16
    requests = [greedy(numbers(seed, 30 + seed, 500), 50, str(seed)) for seed in range(3)]
    wanted = tokens_of(serve(plain_of(plain), requests))
    engine = Engine(small, Known(wanted, 1.0) if drafter == "known" else None, FixedDraftLength(3))
    for request in requests:
        engine.add(request)
    found, stats = tokens_of(drain(engine)), engine.speculator.stats
    print(f"{drafter}: answers are the same for {agreement(found, wanted):.0%} of their length")
    assert all(len(answer) == 50 for answer in found.values()) and agreement(found, wanted) > 0.3
    assert sum(stats.drafted_at) > 50 and sum(stats.accepted_at) > 10


def test_cached_prefix_gives_the_same_answer() -> None:
    """From the same kept state to the same tokens, by forks of one prompt, too."""
    loaded = load(None, options(memory="512MiB", max_batch=8, max_context=1024))
    kept = replace(loaded, cache=HybridCache(loaded.pools, True))
    requests = [greedy(numbers(seed, 50 + 60 * seed, 500), 24, f"{seed}") for seed in range(6)]
    for request in requests:
        serve(kept, [request])
    wanted = {request.id: serve(kept, [request])[request.id, 0] for request in requests}
    for request in requests:
        usage = wanted[request.id].last.usage
        assert usage and usage.cached_tokens == len(request.prompt)
    together = serve(kept, requests)  # their prompts' ends are known, so that these steps decode alone
    assert tokens_of(together) == {name: answer.tokens for name, answer in wanted.items()}
    forked = replace(requests[5], output=replace(requests[5].output, n=3))
    assert [answer.tokens for answer in serve(kept, [forked]).values()] == [wanted["5"].tokens] * 3


def test_prefix_from_host_memory() -> None:
    loaded = load(None, options(memory="256MiB", host_memory="256MiB", max_batch=2, max_context=1024))
    prompt = numbers(5, 700, loaded.config.vocab_size)
    told = serve(loaded, [greedy(prompt, 24)])["a", 0]
    longer = (*prompt, *told.tokens, *numbers(6, 40, loaded.config.vocab_size))
    known = serve(loaded, [greedy(longer, 24)])["a", 0]
    for tier in loaded.cache.tiers:
        while tier._pending:
            torch.cuda.synchronize()
            tier._settle()
    found = []
    for _ in range(2):
        for pool in (*loaded.pools.page_tensors, *loaded.pools.slot_tensors):
            pool.fill_(NAN)
        empty = replace(loaded, cache=HybridCache(loaded.pools, True, loaded.cache.tiers))
        answer = serve(empty, [greedy(longer, 24)])["a", 0]
        assert answer.last.usage and answer.last.usage.cached_tokens >= 700
        found.append(answer.tokens)
    assert found[0] == found[1]
    assert agreement({"a": found[0]}, {"a": known.tokens}) > 0.2, "which may have gone on from a later state"


def test_preempted_sequences_finish() -> None:
    """With pages for hardly two of four."""
    loaded = load(None, options(memory="256MiB", max_batch=4, max_context=256))
    small = small_runtime(loaded, batch=4, pages=14, context=200)
    assert small.pools.recurrent.dtype == BF16
    check_preempted(small)


# Over many steps

STEPS = 2048


@pytest.mark.parametrize("written", [1, DEFERRED])
@torch.inference_mode()
def test_rounding_errors_do_not_accumulate(runtime: ModelRunner, written: int) -> None:
    """Against float64, with states that remember hundreds of tokens, rounded after every token or after every fifth:
    each rounding is forgotten as what it was made of is."""
    layer, state = runtime.decoder.weights.layers[0], runtime.views.states[0]
    assert isinstance(layer.mixer, GdnWeights)
    spec, core = layer.mixer.spec, one_by_one(runtime, written)
    proj = inputs(layer, STEPS, True)
    proj[:, -spec.value_heads:] -= 6
    outputs = core(proj)
    slow = StateView(torch.zeros_like(state.recurrent[:2]).double(), torch.zeros_like(state.conv[:2]).double())
    weights, wanted = weights_in_float64(layer), []
    for first in range(0, STEPS, 512):
        row = prompt_of([(first, 512)])
        zero = torch.zeros_like(row.source)
        wanted.append(torch_gdn._core(proj[first:first + 512].double(), weights, slow,
                                      replace(row, source=zero, target=zero)))
    errors = [error(outputs[first:first + 512], exact) for first, exact in zip(range(0, STEPS, 512), wanted,
                                                                               strict=True)]
    print(f"{runtime.name}, written every {written}: outputs of 512 steps each "
          f"{', '.join(f'{each:.1e}' for each in errors)} from float64")
    assert errors[-1] < 0.1 and errors[-1] < 3 * errors[1] + 1e-3


def one_by_one(runtime: ModelRunner, written: int) -> Callable[[Tensor], Tensor]:
    """The first layer, a token a step, from no state on: all but each `written`-th one stay in the ring meanwhile."""
    def run(proj: Tensor) -> Tensor:
        fill(runtime)
        found, base = [], 0
        for done in range(len(proj)):
            append = (done + 1) % written != 0
            row = PlannedRow((7,), done, (1,) * (done // 16 + 1), 3, 1, base=base, delta_log=2, append=append)
            padded = verifying(StepPlan((row,)), runtime.pools.device).padded
            assert padded
            found.append(run_layer(runtime, step_of(padded), proj[done:done + 1]).clone())
            base = base if append else done + 1
        return torch.cat(found)
    return run
