"""Reuse is a number that is promised; what is kept, what goes first, and what leaves nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from reuse_cases import WHOLE, engine_for, runtime_of, serve, tree_of, usage_of
from support import (
    Answers,
    Reference,
    drain,
    greedy,
    numbers,
    odd_runtime,
    reference,
    same_tokens,
    take,
)
from test_engine import POISONS, SICK, Fragile, poison

from deltic import LLM
from deltic.engine.engine import Engine
from deltic.params import PAGE, EngineRequest, SamplingParams


def test_repeated_prompt_prefills_nothing() -> None:
    engine, prompt = engine_for(), numbers(1, 100, 500)
    first = serve(engine, greedy(prompt, 10))
    again = serve(engine, greedy(prompt, 10))
    assert (usage_of(first).cached_tokens, usage_of(again).cached_tokens) == (0, 100)
    assert again[("a", 0)].tokens == first[("a", 0)].tokens
    assert engine.stats.prompt_tokens == 100


@pytest.mark.parametrize("changes", [{"logit_bias": {7: 100.0}}, {"repetition_penalty": 5.0}, {"min_tokens": 4},
                                     {"presence_penalty": 2.0}])
def test_l8_kept_logits_are_not_changed_by_requests(changes: dict[str, Any]) -> None:
    engine, prompt = engine_for(), numbers(1, 100, 500)
    first = serve(engine, greedy(prompt, 3))
    serve(engine, greedy(prompt, 3, **changes, stop_token_ids=(first[("a", 0)].tokens[0],), ignore_eos=False))
    again = serve(engine, greedy(prompt, 3))
    assert usage_of(again).cached_tokens == 100 and again[("a", 0)].tokens == first[("a", 0)].tokens


@pytest.mark.parametrize("length", [14, 15, 16, 17, 100])
@pytest.mark.parametrize("answer", [1, 2, 12])
def test_a_prompt_that_goes_on_after_an_answer_reuses_all_but_its_last_token(length: int, answer: int) -> None:
    """The last token of an answer was chosen, but never read."""
    engine, prompt = engine_for(), numbers(1, length, 500)
    tokens = serve(engine, greedy(prompt, answer))[("a", 0)].tokens
    longer = (*prompt, *tokens, 1, 2, 3)
    usage = usage_of(serve(engine, greedy(longer, 4)))
    assert usage.cached_tokens == length + answer - 1
    assert engine.stats.prompt_tokens == length + 1 + 3


def test_another_answer_to_the_same_prompt_starts_at_its_end() -> None:
    engine, prompt = engine_for(), numbers(1, 50, 500)
    for seed in range(3):
        usage = usage_of(serve(engine, greedy(prompt, 9, temperature=1.0, seed=seed)))
        assert usage.cached_tokens == (50 if seed else 0)


def test_a_shorter_prompt_resumes_at_a_boundary_only() -> None:
    """L2: the K/V of all its tokens is there, but a state only at the boundaries, and logits only at prompts' ends."""
    engine, prompt = engine_for(), numbers(1, 100, 500)
    serve(engine, replace(greedy(prompt, 3), stable_prefixes=(20, 57)))
    for length, cached in ((20, 0), (56, 20), (57, 56), (58, 57), (99, 58)):
        assert usage_of(serve(engine, greedy(prompt[:length], 1))).cached_tokens == cached, length


def test_several_choices_share_one_prompt_and_all_answers_are_kept() -> None:
    engine, prompt = engine_for(), numbers(1, 40, 500)
    found = serve(engine, greedy(prompt, 8, temperature=1.0, seed=4, n=3))
    assert [usage_of(found, choice=i).cached_tokens for i in range(3)] == [0, 40, 40]
    assert engine.stats.prompt_tokens == 40
    for choice in range(3):
        longer = (*prompt, *found[("a", choice)].tokens, 7)
        assert usage_of(serve(engine, greedy(longer, 1))).cached_tokens == 47


@pytest.mark.parametrize("budget", [7, WHOLE])
def test_six_simultaneous_prompts_prefill_their_prefix_once(budget: int) -> None:
    engine = engine_for(budget=budget)
    common = numbers(1, 400, 500)
    requests = [greedy((*common, *numbers(10 + i, 20 + i, 400)), 5, f"r{i}") for i in range(6)]
    found = serve(engine, *requests)
    own = sum(20 + i for i in range(6))
    assert engine.stats.prompt_tokens == 400 + own
    assert [usage_of(found, f"r{i}").cached_tokens for i in range(6)] == [0] + [400] * 5
    for request in requests[:3]:
        same_tokens(reference(odd_runtime(), request.prompt, 5), found[(request.id, 0)].tokens)


def test_identical_simultaneous_prompts_prefilled_once() -> None:
    engine, prompt = engine_for(), numbers(1, 150, 500)
    found = serve(engine, *(greedy(prompt, 12, f"r{i}") for i in range(5)))
    assert engine.stats.prompt_tokens == 150
    assert [usage_of(found, f"r{i}").cached_tokens for i in range(5)] == [0] + [150] * 4
    assert len({tuple(answer.tokens) for answer in found.values()}) == 1


def test_unrelated_simultaneous_prompts_do_not_wait() -> None:
    engine = engine_for(budget=WHOLE)
    for i in range(4):
        engine.add(greedy((*numbers(1, 20, 500), *numbers(20 + i, 60, 500)), 5, f"r{i}"))
    engine.step()
    assert len(engine.scheduler.running) == 4
    drain(engine)


def test_a_shared_prefix_is_read_anew_if_its_reader_is_aborted() -> None:
    engine, common = engine_for(budget=16), numbers(1, 200, 500)
    for i in range(3):
        engine.add(greedy((*common, i), 5, f"r{i}"))
    for _ in range(3):
        engine.step()
    assert len(engine.scheduler.running) == 1
    engine.abort("r0")
    found = drain(engine)
    assert found[("r0", 0)].last.finish == "abort"
    for i in (1, 2):
        same_tokens(reference(odd_runtime(), (*common, i), 5), found[(f"r{i}", 0)].tokens)
    assert [usage_of(found, f"r{i}").cached_tokens for i in (1, 2)] == [0, 200]


def test_chat_turns_resume_at_the_last_stable_boundary() -> None:
    llm = LLM(dtype="float32", memory="64MiB", max_context=512, threads=1)
    params = SamplingParams(temperature=0.0, max_tokens=20)
    messages = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "What is a river?"}]
    for question in ("And a lake?", "And the sea?", "Which is deepest?"):
        boundaries = llm.chat_processor.chat(messages, params).request.stable_prefixes
        answer = llm.chat(messages, params).text
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
        output = llm.chat(messages, replace(params, max_tokens=1))
        assert boundaries and output.choices[0].usage.cached_tokens > max(boundaries) - PAGE
    llm.worker.call(Engine.check)


def test_chat_answers_are_the_same_without_reuse() -> None:
    def answers(reuse: bool) -> list[str]:
        llm = LLM(dtype="float32", memory="64MiB", max_context=512, threads=1, prefix_cache=reuse)
        messages = [{"role": "user", "content": "Tell me a story."}]
        for question in ("And then?", "Why?"):
            text = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=30)).text
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": question}]
        return [message["content"] for message in messages]

    assert answers(True) == answers(False)


# What is expected stays


def turn(name: str, prompt: Sequence[int], *boundaries: int, count: int = 4) -> EngineRequest:
    return replace(greedy(tuple(prompt), count, name), stable_prefixes=boundaries)


def conversation(engine: Engine, turns: int, first: int = 60) -> tuple[int, ...]:
    """Turns as a template gives them that drops the thinking: each prompt parts 4 tokens before its end. Returns what
    the next prompt begins with."""
    stable = numbers(1, first, 400)
    for number in range(turns):
        prompt = (*stable, *numbers(50 + number, 4, 400))
        serve(engine, turn("main", prompt, 30, len(stable)))
        stable = (*stable, *numbers(100 + number, 25, 400))
    return stable[:-25]


def side_request(engine: Engine, seed: int) -> None:
    prompt = numbers(seed, 120, 400)
    serve(engine, turn("side", prompt, 100))


@pytest.mark.parametrize("slots", [6, 7, 8])
def test_side_requests_evict_superseded_checkpoints(slots: int) -> None:
    """A long conversation, and after each turn a title: its last boundary survives in a pool for few states."""
    engine = engine_for(slots=slots, batch=1)
    for number in range(3, 9):
        last = conversation(engine, number)
        side_request(engine, 900 + number)
        known = engine.runtime.cache.tree.cached_length((*last, 9))
        assert known == len(last), "the conversation's last checkpoint is gone"


def test_side_requests_beside_a_running_conversation_do_not_take_its_last_checkpoint() -> None:
    """While it runs, as many as there may be."""
    engine = engine_for(slots=7, batch=2)
    last = conversation(engine, 3)
    prompt = (*last, *numbers(70, 20, 400))
    engine.add(turn("main", prompt, 30, len(last), count=300))
    for seed in range(12):
        engine.add(turn(f"side{seed}", numbers(900 + seed, 120, 400), 100))
    while any(name.startswith("side") for name in engine._sequences):
        engine.step()
        engine.check()
        assert engine.runtime.cache.tree.cached_length((*last, 9)) == len(last)
    engine.abort("main")
    drain(engine)
    assert engine.runtime.cache.tree.cached_length((*last, 9)) == len(last)


def test_superseded_checkpoints_evicted_first() -> None:
    engine = engine_for(slots=24, batch=1)
    last = conversation(engine, 4)
    checkpoints = {one.done: one.likely_resume for one in tree_of(engine)._checkpoints if one.done <= len(last)}
    expected = [done for done, is_expected in checkpoints.items() if is_expected]
    assert expected == [30, len(last)], "the opening, and where the next prompt will part"
    assert {60, 85, 110} <= set(checkpoints), "others stay as long as there is room: an edit may return to them"


def test_pinned_prompts_outlive_everything_else() -> None:
    engine = engine_for(slots=5, batch=1)
    prompt = numbers(3, 90, 400)
    serve(engine, turn("pin", prompt, 90, count=0))
    assert engine.runtime.cache.tree.pin(prompt) and not engine.runtime.cache.tree.pin(prompt[:50])
    for seed in range(20):
        side_request(engine, 900 + seed)
    assert engine.runtime.cache.tree.cached_length((*prompt, 1)) == 90


def test_pinned_prompt_yields_if_nothing_else_can(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_for(pages=8, slots=4, batch=1, context=8 * PAGE)
    prompt = numbers(3, 60, 400)
    serve(engine, greedy(prompt, 0))
    assert engine.runtime.cache.tree.pin(prompt)
    found = serve(engine, greedy(numbers(4, 100, 400), 20))
    assert found[("a", 0)].last.finish == "length"
    assert "the pinned prompt of 60 tokens is evicted" in caplog.text


# What is not kept, and what is given up


def test_without_reuse_everything_is_read_again() -> None:
    engine, prompt = engine_for(reuse=False), numbers(1, 60, 500)
    for _ in range(2):
        assert usage_of(serve(engine, replace(greedy(prompt, 5), stable_prefixes=(20,)))).cached_tokens == 0
    assert len(tree_of(engine)) == 0 and engine.stats.prompt_tokens == 120
    assert engine.runtime.cache.pages.free == engine.runtime.cache.pages.size


@pytest.mark.parametrize("kind", POISONS)
@pytest.mark.parametrize("params", [{}, {"n": 3}, {"max_tokens": 0}])
def test_l3_prompt_with_nan_logits_leaves_nothing(kind: str, params: dict[str, Any]) -> None:
    engine = Engine(poison(POISONS[kind])(runtime_of(odd_runtime(), budget=16)))
    sick = greedy((*numbers(1, 40, SICK), SICK), 5, "sick", **params)
    found = serve(engine, replace(sick, stable_prefixes=(10, 20)))
    assert found[("sick", 0)].last.finish == "error"
    assert len(tree_of(engine)) == 0
    assert engine.runtime.cache.slots.free == engine.runtime.cache.slots.size


def test_l3_answer_with_nan_logits_is_not_kept() -> None:
    """Its prompt was sound, and stays."""
    prompt = (*numbers(1, 40, SICK), 5)
    bias = greedy(prompt, 10, "sick", logit_bias={SICK: 100.0})
    engine = Engine(poison(POISONS["nan"])(runtime_of(odd_runtime())))
    found = serve(engine, bias)
    assert found[("sick", 0)].last.finish == "error" and found[("sick", 0)].tokens == [SICK]
    assert [checkpoint.done for checkpoint in tree_of(engine)._checkpoints] == [41]


def test_l3_a_step_that_raises_leaves_nothing() -> None:
    engine = Engine(Fragile(runtime_of(odd_runtime(), budget=16)))  # type: ignore[arg-type]
    found = serve(engine, replace(greedy(numbers(1, 100, 500), 5), stable_prefixes=(10, 55)))
    assert found[("a", 0)].last.finish == "error" and len(tree_of(engine)) == 0
    assert engine.runtime.cache.slots.free == engine.runtime.cache.slots.size


@pytest.mark.parametrize("steps", range(1, 8))
def test_l3_an_abort_mid_prefill_leaves_nothing(steps: int) -> None:
    engine = engine_for(budget=16)
    engine.add(replace(greedy(numbers(1, 100, 500), 5), stable_prefixes=(10, 55)))
    for _ in range(steps):
        engine.step()
    engine.abort("a")
    found = drain(engine)
    assert found[("a", 0)].last.finish == "abort"
    if steps < 7:
        assert len(tree_of(engine)) == 0
    again = serve(engine, greedy(numbers(1, 100, 500), 5))
    same_tokens(reference(odd_runtime(), numbers(1, 100, 500), 5), again[("a", 0)].tokens)


def test_l3_an_aborted_answer_is_kept_up_to_where_it_was_read() -> None:
    engine, prompt, found = engine_for(), numbers(1, 30, 500), dict[Any, Any]()
    engine.add(greedy(prompt, 50))
    for _ in range(10):
        take(found, engine.step())
    engine.abort("a")
    tokens = drain(engine, found)[("a", 0)].tokens
    usage = usage_of(serve(engine, greedy((*prompt, *tokens, 3), 1)))
    assert usage.cached_tokens == 30 + len(tokens) - 1


def pressed(engine: Engine, rounds: int, lengths: Sequence[int], common: int = 40) -> None:
    """Many prompts with common beginnings, some repeated, three at a time; each answer must be the reference's."""
    for turn in range(rounds):
        requests = []
        for i in range(3):
            seed = (turn * 5 + i * 3) % 7
            prompt = (*numbers(seed % 2, common, 500), *numbers(seed, lengths[seed % len(lengths)], 500))
            requests.append(replace(greedy(prompt, 12, f"r{i}"), stable_prefixes=(common,)))
        found = serve(engine, *requests)
        for request in requests:
            same_tokens(answer_to(request.prompt), found[(request.id, 0)].tokens)


@cache
def answer_to(prompt: tuple[int, ...]) -> Reference:
    return reference(odd_runtime(), prompt, 12)


@pytest.mark.parametrize(("pages", "slots"), [(24, 5), (12, 24), (8, 6), (8, 4)])
@pytest.mark.parametrize("budget", [7, 64])
@pytest.mark.covering
def test_l6_under_eviction_pressure(pages: int, slots: int, budget: int) -> None:
    engine = engine_for(pages=pages, slots=slots, batch=3, budget=budget, context=pages * PAGE)
    pressed(engine, 8, (3, 8, 24, 41, 60))
    assert tree_of(engine).evictions > 5


def test_l6_preempted_sequences_resume_what_they_had_read() -> None:
    """Three whose answers do not fit together."""
    engine = engine_for(pages=14, slots=12, batch=3, context=160)
    requests = [greedy(numbers(40 + i, 50, 500), 60, f"r{i}") for i in range(3)]
    found = serve(engine, *requests)
    assert engine.scheduler.preemptions > 0
    for request in requests:
        same_tokens(reference(odd_runtime(), request.prompt, 60), found[(request.id, 0)].tokens)
        assert usage_of(found, request.id).cached_tokens == 0, "its own prompt was not in the cache before"


@pytest.mark.parametrize("budget", [7, 64, WHOLE])
def test_l4_a_kept_prefix_does_not_stop_the_prompt_that_extends_it(budget: int) -> None:
    """A pool of one context, of which the kept prefix holds a page."""
    engine = engine_for(pages=6, slots=4, batch=2, context=96, budget=budget)
    prompt = numbers(1, 92, 500)
    serve(engine, greedy(prompt[:20], 0))
    found = serve(engine, greedy(prompt, 3))
    same_tokens(reference(odd_runtime(), prompt, 3), found[("a", 0)].tokens)


def test_l4_a_prompt_starts_although_its_own_prefix_fills_the_pool() -> None:
    engine = engine_for(pages=4, slots=4, batch=2, context=64)
    prompt = numbers(1, 40, 500)
    tokens = serve(engine, greedy(prompt, 20))[("a", 0)].tokens
    longer = (*prompt, *tokens, 3)
    found = serve(engine, greedy(longer, 3))
    same_tokens(reference(odd_runtime(), longer, 3), found[("a", 0)].tokens)


def test_l1_preempted_exact_hit_samples_first_token_once() -> None:
    """Two sequences take the last pages in the very step that admits it."""
    engine = engine_for(pages=6, slots=8, batch=3, context=96)
    engine.scheduler.times = None  # on a slow device the two would not advance together
    exact = numbers(1, 16, 500)
    serve(engine, greedy(exact, 0, "earlier"))
    found: Answers = {}
    for i in range(2):
        engine.add(greedy(numbers(10 + i, 16, 500), 24, f"old{i}"))
    while any(s.done < 32 for s in engine.scheduler.running) or not engine.scheduler.running:
        take(found, engine.step())
        engine.check()
    engine.add(greedy(exact, 10))
    drain(engine, found, limit=500)
    assert engine.scheduler.preemptions, "nobody was preempted: the test shows nothing"
    same_tokens(reference(odd_runtime(), exact, 10), found[("a", 0)].tokens)
    assert usage_of(found).completion_tokens == 10
