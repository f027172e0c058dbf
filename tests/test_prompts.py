"""Prompts whose rotary positions jump, as those of pictures do, and whose keys say more than their ids.

Whatever happens to a sequence, its answer is that of a fresh reading by the reference, token by token (L6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from reuse_cases import runtime_of, serve, usage_of
from speculation_cases import PATTERNS, Scripted, headed
from support import (
    Reference,
    drain,
    drawn,
    numbers,
    odd_runtime,
    qwen3_runtime,
    same_tokens,
    session_over,
    small_runtime,
    stepwise_logits,
)

from deltic.cache.handles import SequenceCache
from deltic.cache.offload.host import HostStore
from deltic.cache.offload.index import TierIndex
from deltic.engine.engine import Engine
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.errors import RequestError
from deltic.ops import backends
from deltic.params import EngineRequest, Prompt, SamplingParams, content_keys
from deltic.runner.input_batch import build
from deltic.runner.model_runner import ModelRunner
from deltic.spec_decode.draft_length import FixedDraftLength
from deltic.spec_decode.draft_model import DraftModelProposer
from deltic.spec_decode.proposers import MtpProposer

MODELS = {"odd": odd_runtime, "qwen3": qwen3_runtime}
COUNT = 24
PARAMS = {"greedy": SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True),
          "drawn": SamplingParams(temperature=1.0, max_tokens=COUNT, ignore_eos=True, seed=77)}
Part = tuple[int, ...] | tuple[bytes, int, int]
"""Ids of a text; or a picture: its content, rows and columns of tokens."""


def joined(*parts: Part) -> Prompt:
    """As Hugging Face numbers the positions: a picture's tokens by row and column, what follows after the largest."""
    ids, keys, axes, place = list[int](), list[int](), (list[int](), list[int](), list[int]()), 0
    for part in parts:
        if isinstance(part[0], bytes):
            content, rows, columns = part
            ids += [0] * rows * columns
            keys += content_keys(content, rows * columns)
            for index in range(rows * columns):
                for axis, moved in zip(axes, (0, index // columns, index % columns), strict=True):
                    axis.append(place + moved)
            place += max(rows, columns)
        else:
            ids += part
            keys += part
            for axis in axes:
                axis += range(place, place + len(part))
            place += len(part)
    return Prompt(tuple(ids), tuple(keys), tuple(map(tuple, axes)), place - len(ids))  # type: ignore[arg-type]


OPENING, MIDDLE, QUESTION = numbers(1, 21, 509), numbers(2, 19, 509), numbers(3, 9, 509)
PROMPT = joined(OPENING, (b"one", 4, 5), MIDDLE, (b"two", 2, 7), QUESTION)


def with_rotary(prompt: Prompt, answer: Sequence[int]) -> tuple[list[int], list[tuple[tuple[int], ...]]]:
    """Ids of prompt and answer, and each one's own positions."""
    assert prompt.positions
    ids = [*prompt.ids, *answer]
    return ids, [tuple((axis[place],) for axis in prompt.positions) if place < len(prompt)
                 else ((place + prompt.offset,),) * 3 for place in range(len(ids))]


def fresh_reading(
    runtime: ModelRunner, prompt: Prompt, answer: Sequence[int] = (), hidden: bool = False
) -> torch.Tensor:
    """The logits [n, V] after each token of prompt and answer, read one by one where nobody was before."""
    ids, rotary = with_rotary(prompt, answer)
    admitted = runtime.cache.admit(ids)
    assert admitted is not None and runtime.cache.reserve(admitted, len(ids)) == len(ids)
    logits = []
    for place, (token, positions) in enumerate(zip(ids, rotary, strict=True)):
        row = PlannedRow((token,), place, admitted.pages, admitted.slot, 1, rotary=positions)  # type: ignore[arg-type]
        logits.append(runtime.run(build(StepPlan((row,)), runtime.device, hidden=hidden))[0].clone())
        runtime.cache.commit(admitted, 1)
    return torch.stack(logits)


@cache
def prefilled(model: str, prompt: Prompt) -> tuple[ModelRunner, SequenceCache, torch.Tensor]:
    """A model with the reference's ops, its only sequence, which holds the prompt, and the last logits."""
    runtime = small_runtime(MODELS[model](), batch=2)
    runtime = replace(runtime, decoder=replace(runtime.decoder, ops=backends()["reference"]))
    logits = fresh_reading(runtime, prompt)[-1]
    admitted, = runtime.cache.accounts.sequences.values()
    return runtime, admitted, logits


@cache
def expected(model: str, params: str = "greedy", prompt: Prompt = PROMPT, choice: int = 0) -> Reference:
    """By the reference's ops, which read each prompt once: answers continue forks of it."""
    runtime, source, logits = prefilled(model, prompt)
    rows, tokens = [logits], [drawn(logits, PARAMS[params], choice, len(prompt))]
    admitted, = runtime.cache.accounts.forks(source, 1)
    runtime.cache.operations.flush()
    assert runtime.cache.reserve(admitted, COUNT) == COUNT
    while len(tokens) < COUNT:
        admitted.keys.append(tokens[-1])
        row = PlannedRow(
            (tokens[-1],), admitted.done, admitted.pages, admitted.slot, 1,
            rotary=((admitted.done + prompt.offset,),) * 3
        )
        rows.append(runtime.run(build(StepPlan((row,)), runtime.device))[0].clone())
        runtime.cache.commit(admitted, 1)
        tokens.append(drawn(rows[-1], PARAMS[params], choice, len(prompt) + len(tokens)))
    runtime.cache.release(admitted)
    return Reference(prompt.ids, tuple(tokens), torch.stack(rows))


def request(prompt: Prompt = PROMPT, name: str = "a", params: str = "greedy", **changes: object) -> EngineRequest:
    return EngineRequest(name, prompt, replace(PARAMS[params], **changes),  # type: ignore[arg-type]
                   stable_prefixes=(len(OPENING), len(OPENING) + 20))


def right(model: str, found: Sequence[int], params: str = "greedy", prompt: Prompt = PROMPT, choice: int = 0) -> None:
    assert len(found) == COUNT
    same_tokens(expected(model, params, prompt, choice), found, PARAMS[params], choice)


def test_the_positions_matter() -> None:
    """Read at the places of its ids the same prompt gives other logits: the tests below could fail."""
    jumping = expected("odd").logits[0]
    plain = stepwise_logits(session_over(odd_runtime(), batch=1), PROMPT.ids)[-1]
    assert PROMPT.offset == -22 and float((jumping - plain).abs().max()) > 0.05


@pytest.mark.covering
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("budget", [7, 64, 512])
@pytest.mark.parametrize("model", MODELS)
def test_in_chunks_with_neighbours(model: str, budget: int, params: str) -> None:
    engine = Engine(runtime_of(MODELS[model](), budget=budget))
    plain, other = EngineRequest("text", PROMPT.ids[:50], PARAMS["greedy"]), joined(QUESTION, (b"one", 1, 3), OPENING)
    found = serve(engine, request(params=params), plain, request(other, "b"))
    right(model, found["a", 0].tokens, params)


@pytest.mark.parametrize("model", MODELS)
def test_one_step_ahead(model: str) -> None:
    engine = Engine(runtime_of(MODELS[model]()), overlap=True)
    right(model, serve(engine, request())["a", 0].tokens)
    assert engine.stats.async_steps > COUNT // 2


def test_choices_fork_it() -> None:
    found = serve(Engine(runtime_of(odd_runtime())), request(params="drawn", n=3))
    for choice in range(3):
        right("odd", found["a", choice].tokens, "drawn", choice=choice)


@pytest.mark.parametrize("model", MODELS)
def test_read_again_from_kept_states(model: str) -> None:
    """The same again, and the next turn, which goes on after the answer."""
    engine = Engine(runtime_of(MODELS[model]()))
    answer = serve(engine, request())["a", 0].tokens
    again = serve(engine, request())
    right(model, again["a", 0].tokens)
    assert usage_of(again).cached_tokens == len(PROMPT)
    turn = longer(PROMPT, (*answer, *QUESTION))
    found = serve(engine, request(turn))
    right(model, found["a", 0].tokens, prompt=turn)
    assert usage_of(found).cached_tokens == len(PROMPT) + len(answer) - 1


def longer(prompt: Prompt, text: Sequence[int]) -> Prompt:
    assert prompt.keys and prompt.positions
    after = tuple(range(len(prompt) + prompt.offset, len(prompt) + prompt.offset + len(text)))
    first, second, third = ((*axis, *after) for axis in prompt.positions)
    return Prompt((*prompt.ids, *text), (*prompt.keys, *text), (first, second, third), prompt.offset)


def test_back_from_a_tier() -> None:
    engine = Engine(runtime_of(odd_runtime(), tiers=[TierIndex(HostStore(1 << 24), threads=False)]))
    serve(engine, request())
    engine.runtime.cache.clear()
    found = serve(engine, request())
    right("odd", found["a", 0].tokens)
    assert usage_of(found).cached_tokens == len(PROMPT)


def test_sent_back_to_wait() -> None:
    """There is room for two of four; those that are sent back read prompt and answer again, in one chunk."""
    engine = Engine(runtime_of(odd_runtime(), reuse=False, pages=17, context=200, slots=9))
    others = [request(joined(numbers(9 + seed, 40, 509), (b"other", 3, 3)), f"n{seed}") for seed in range(3)]
    found = serve(engine, request(), *others, request(name="last"))
    assert engine.scheduler.preemptions > 1
    for name in ("a", "last"):
        right("odd", found[name, 0].tokens)


@pytest.mark.parametrize("steps", [1, 3, 9, 20])
def test_paused(steps: int) -> None:
    engine = Engine(runtime_of(odd_runtime(), budget=32))
    engine.add(request())
    events = [event for _ in range(steps) for event in engine.step()]
    engine.pause("a")
    engine.runtime.cache.clear()
    engine.resume("a")
    right("odd", [*(event.token for event in events if event.token is not None), *drain(engine)["a", 0].tokens])


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.covering
def test_with_drafts(model: str, pattern: str) -> None:
    drafter = Scripted({("a", 0): expected(model).tokens}, PATTERNS[pattern], 4)
    engine = Engine(runtime_of(MODELS[model]()), drafter, FixedDraftLength(4))
    found = serve(engine, request())
    right(model, found["a", 0].tokens)
    usage = usage_of(found)
    assert usage.drafted_tokens > 10 and (usage.accepted_tokens > 0) == (pattern != "wrong")


def test_a_draft_model_reads_the_same_positions() -> None:
    """One with the same weights is always right; two prompts that only their keys tell apart are two for it, too."""
    draft = runtime_of(odd_runtime())
    engine = Engine(runtime_of(odd_runtime()), DraftModelProposer(draft, 509, 4), FixedDraftLength(4))
    for name in ("first", "second"):
        found = serve(engine, request(name=name))
        right("odd", found[name, 0].tokens)
        usage = usage_of(found, name)
        assert usage.drafted_tokens == usage.accepted_tokens > 10
    known = [draft.cache.tree.cached_length(prompt.keys or ()) for prompt in (PROMPT, other_picture())]
    assert known[0] >= len(OPENING) + 20 and known[1] == len(OPENING)


def test_a_draft_head_follows_the_positions() -> None:
    """Its K/V, over chunks, steps with drafts and what was kept of them, and what it drafts."""
    runtime = runtime_of(headed())
    assert runtime.mtp_runner
    engine = Engine(runtime, MtpProposer(runtime, runtime.mtp_runner, 3), FixedDraftLength(3))
    for name in ("first", "again"):
        engine.add(replace(request(name=name), prompt=PROMPT))
        while not engine.scheduler.running or engine.scheduler.running[0].generated < 9:
            engine.step()
        sequence, = engine.scheduler.running
        plain = runtime_of(headed())
        assert plain.mtp_runner and sequence.cache
        fresh_reading(plain, PROMPT, sequence.tokens[len(PROMPT):sequence.done], hidden=True)
        admitted, = plain.cache.accounts.sequences.values()
        runtime.mtp_runner.catch_up()
        plain.mtp_runner.catch_up()
        for found, wanted in zip(runtime.pools.page_tensors, plain.pools.page_tensors, strict=True):
            torch.testing.assert_close(found[-1, sequence.cache.pages].flatten(0, 1)[:sequence.done],
                                       wanted[-1, admitted.pages].flatten(0, 1)[:sequence.done], rtol=0, atol=1e-4)
        drafts, hidden, tokens = engine.speculator.drafter.draft([(sequence, 3)])[0], None, sequence.tokens[-1:]
        for depth in range(3):
            place = ((sequence.done + depth + PROMPT.offset,),) * 3
            row = PlannedRow((tokens[-1],), sequence.done + depth, admitted.pages, admitted.slot, 1, rotary=place)
            plain.cache.reserve(admitted, depth + 1)
            hidden, logits = plain.mtp_runner.draft(build(StepPlan((row,)), plain.device), hidden)
            tokens.append(int(logits.argmax()))
        assert drafts == tokens[1:]
        drain(engine)


def other_picture() -> Prompt:
    """The ids and positions of `PROMPT`, and another picture."""
    other = joined(OPENING, (b"another one", 4, 5), MIDDLE, (b"two", 2, 7), QUESTION)
    assert (other.ids, other.positions) == (PROMPT.ids, PROMPT.positions) and other.keys != PROMPT.keys
    return other


@pytest.mark.parametrize("place", ["tree", "tier", "beside"])
def test_other_pictures_are_never_taken_for_each_other(place: str) -> None:
    """Not even where all ids agree: in the tree with its kept logits, in a tier, and while both are read."""
    tiers = [TierIndex(HostStore(1 << 24), threads=False)] if place == "tier" else []
    engine = Engine(runtime_of(odd_runtime(), tiers=tiers, budget=32))
    if place == "beside":
        found = serve(engine, request(), request(other_picture(), "b"), request(name="c"))
        assert usage_of(found, "c").cached_tokens > len(OPENING)
    else:
        serve(engine, request())
        if tiers:
            engine.runtime.cache.clear()
        found = serve(engine, request(other_picture(), "b"), request(PROMPT, "text"))
        assert usage_of(found, "text").cached_tokens == len(PROMPT)
    assert usage_of(found, "b").cached_tokens == (0 if place == "beside" else len(OPENING))
    text = serve(engine, EngineRequest("ids", PROMPT.ids, PARAMS["greedy"]))
    assert usage_of(text, "ids").cached_tokens == len(OPENING)


def test_keys_of_contents() -> None:
    one, other = content_keys(b"one", 300), content_keys(b"two", 300)
    assert content_keys(b"one", 5) == one[:5]
    assert len({*one, *other}) == 600 and -(1 << 63) <= min(*one, *other) <= max(*one, *other) < 0


@pytest.mark.parametrize("make", [
    lambda: Prompt((1, 2), (1,)), lambda: Prompt((1, 2), (1, -2), ((0,), (0, 1), (0, 1))),
    lambda: Prompt((1, 2), None, ((0, 0),) * 3), lambda: Prompt((1, 2), offset=3)])
def test_invalid_prompts_are_refused(make: object) -> None:
    with pytest.raises(RequestError, match="prompt"):
        make()  # type: ignore[operator]


def test_keys_of_ids_are_theirs() -> None:
    engine = Engine(runtime_of(odd_runtime()))
    for prompt in (Prompt((1, 2), (1, 3)), Prompt((1, 509), (1, -2)), Prompt(())):
        with pytest.raises(RequestError, match="prompt"):
            engine.add(EngineRequest("a", prompt))
    same = serve(
        engine, EngineRequest("a", Prompt(QUESTION), PARAMS["greedy"]), EngineRequest("b", QUESTION, PARAMS["greedy"])
    )
    assert same["a", 0].tokens == same["b", 0].tokens and not engine.has_work
