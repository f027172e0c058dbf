"""An answer that goes round in circles ends there, neither sooner nor later, whatever is drafted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reuse_cases import runtime_of, usage_of
from support import drain, greedy, numbers, odd_runtime, odd_shape
from test_server_harness import serving, tiny
from test_speculation import PATTERNS, Scripted

from deltic import LLM, RandomModel, SamplingParams
from deltic.cli import command_parser, main
from deltic.cli.options import engine_options
from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import load
from deltic.engine.sequence import LONGEST, Repeats
from deltic.errors import ConfigError, RequestError
from deltic.params import EngineRequest
from deltic.runner.model_runner import ModelRunner
from deltic.spec_decode.draft_length import FixedDraftLength
from deltic.spec_decode.proposers import NgramProposer, Proposer


def circles(tokens: Sequence[int], times: int) -> bool:
    """Whether the end of these tokens is a group again and again, by looking at all of it."""
    for length in range(1, 129):
        size = times * (8 if length < 8 else length)
        end = tokens[-size:]
        if len(end) == size and end[:-length] == end[length:]:
            return True
    return False


def first_end(tokens: list[int], times: int) -> int | None:
    """How many tokens an answer has when it ends, if it does."""
    return next((count for count in range(1, len(tokens) + 1) if circles(tokens[:count], times)), None)


def found_end(tokens: list[int], times: int) -> int | None:
    repeats = Repeats(times)
    return next((count for count, token in enumerate(tokens, 1) if repeats.push(token)), None)


# The detector


@pytest.mark.parametrize("times", [2, 3, 7])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 31, 127, 128])
@pytest.mark.covering
def test_repeat_is_detected_after_enough_groups(length: int, times: int) -> None:
    group, enough = list(range(length)), times * max(length, 8)
    tokens = [500, 501, *(group * enough)[:enough]]
    assert found_end(tokens, times) == len(tokens) == first_end(tokens, times)
    assert found_end(tokens[:-1], times) is None
    assert found_end([*tokens[:-1], 502, *tokens[2:-1]], times) is None, "one other token in between"


def test_longer_groups_are_ignored() -> None:
    assert found_end(list(range(LONGEST + 1)) * 9, 2) is None and LONGEST == 128


def test_a_line_of_dashes_or_a_column_of_zeros_is_no_circle() -> None:
    dashes, columns = [7] * 60, [3, 4] * 30
    assert found_end([1, *dashes, 2, *columns, 5], 8) is None
    assert found_end([1, *dashes, 7, 7, 7, 7], 8) == 65


PIECES = st.lists(st.tuples(
    st.one_of(st.lists(st.integers(0, 2), min_size=1, max_size=12),
              st.integers(120, 130).map(lambda length: [i % 11 + i // 50 for i in range(length)])),
    st.integers(1, 9)), max_size=6)


@given(PIECES, st.integers(2, 4))
@settings(max_examples=100)
def test_detector_equals_a_full_search(pieces: list[tuple[list[int], int]], times: int) -> None:
    tokens = bytes([token for group, count in pieces for token in group * count][:700])
    repeats = Repeats(times)
    found = [repeats.push(token) for token in tokens]
    assert found == [circles(tokens[:count], times) for count in range(1, len(tokens) + 1)]


def test_detector_memory_is_bounded() -> None:
    repeats = Repeats(1 << 31)
    for token in range(5000):
        assert not repeats.push(token % 3 if token < 2500 else token)
        assert len(repeats._equal) <= LONGEST and len(repeats._last) <= LONGEST
    assert sum(map(len, repeats._places.values())) == len(repeats._places) == LONGEST == len(repeats._last)


# In an engine


class Cycle:
    """Forces an answer: nine tokens, then a group of thirteen for ever."""

    START, GROUP = list(range(100, 109)), list(range(200, 213))

    def __init__(self) -> None:
        self.count = 0

    def forced(self) -> int:
        return cycle(self.count + 1)[-1]

    def push(self, token: int) -> None:
        self.count += 1


def cycle(count: int) -> list[int]:
    return [*Cycle.START, *Cycle.GROUP * count][:count]


@pytest.mark.parametrize("depth", [0, 1, 4, 12])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.covering
def test_the_cut_is_exact_within_drafts(pattern: str, depth: int) -> None:
    drafter = Scripted({("a", 0): cycle(99)}, PATTERNS[pattern], depth)
    engine = Engine(runtime_of(odd_runtime()), drafter, FixedDraftLength(depth))
    for times in (2, 3):
        request = greedy(numbers(5, 20 + times, 509), 90, max_repeat=times)
        engine.add(replace(request, guide=Cycle))
        answers = drain(engine)
        assert answers["a", 0].tokens == cycle(9 + 13 * times) and answers["a", 0].last.finish == "length"
        assert usage_of(answers).completion_tokens == 9 + 13 * times
        # nothing behind the cut was kept
        longer = (*request.prompt, *cycle(9 + 13 * times + 5), 5)
        engine.add(greedy(longer, 1, "b"))
        assert usage_of(drain(engine), "b").cached_tokens == len(request.prompt) + 9 + 13 * times - 1


@cache
def stuck() -> ModelRunner:
    """A model that soon says one token for ever."""
    model = RandomModel(shape=odd_shape(tie_word_embeddings=True), initializer_range=0.02)
    return load(model, EngineConfig(dtype="float32", memory="8MiB", threads=1))


@pytest.mark.parametrize("drafter", [None, NgramProposer(4), NgramProposer(12)], ids=["none", "4", "12"])
def test_endless_repetition_ends_the_answer(drafter: Proposer | None) -> None:
    engine = Engine(runtime_of(stuck()), drafter, FixedDraftLength(drafter.limit if drafter else 0))
    engine.add(greedy(numbers(3, 20, 509), 60, "free"))
    engine.add(greedy(numbers(3, 20, 509), 60, "cut", max_repeat=3))
    answers = drain(engine)
    free, cut = answers["free", 0].tokens, answers["cut", 0].tokens
    end = first_end(free, 3)
    assert len(free) == 60 and end and cut == free[:end] and answers["cut", 0].last.finish == "length"


def test_choices_have_circles_of_their_own() -> None:
    engine = Engine(runtime_of(odd_runtime()))
    params = SamplingParams(temperature=0.0, max_tokens=80, max_repeat=2, n=3, ignore_eos=True)
    engine.add(EngineRequest("a", numbers(5, 20, 509), params, guide=Cycle))
    answers = drain(engine)
    assert all(answers["a", choice].tokens == cycle(35) for choice in range(3))


def test_an_end_of_text_comes_before_a_circle() -> None:
    engine = Engine(runtime_of(odd_runtime()))
    last = cycle(35)[-1]
    params = SamplingParams(temperature=0.0, max_tokens=80, max_repeat=2, stop_token_ids=(last,))
    engine.add(EngineRequest("a", numbers(5, 20, 509), params, guide=Cycle))
    assert drain(engine)["a", 0].last.finish == "stop"


@pytest.mark.parametrize(("default", "asked", "end"), [
    (0, None, 60), (2, None, 35), (2, 0, 60), (2, 3, 48), (0, 3, 48)])
def test_the_request_decides_before_the_engine(default: int, asked: int | None, end: int) -> None:
    runtime = runtime_of(odd_runtime())
    engine = Engine(replace(runtime, options=replace(runtime.options, max_repeat=default)))
    engine.add(replace(greedy(numbers(5, 20, 509), 60, max_repeat=asked), guide=Cycle))
    assert drain(engine)["a", 0].tokens == cycle(end)


# Doors


STUCK = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
ONE = 1234


@pytest.mark.parametrize("speculate", ["off", "ngram:5"])
def test_through_llm(speculate: str) -> None:
    llm = LLM(dtype="float32", threads=1, max_context=256, max_repeat=3, speculate=speculate)
    endless = SamplingParams(**STUCK, logit_bias={ONE: 100})
    choice, = llm.chat("Hi", endless).choices
    assert choice.tokens == (ONE,) * 24 and choice.finish == "length"
    assert len(llm.chat("Hi", replace(endless, max_repeat=2)).choices[0].tokens) == 16
    assert len(llm.chat("Hi", replace(endless, max_repeat=0)).choices[0].tokens) == 40


def test_on_the_wire() -> None:
    with serving(tiny()) as served:
        body = {"messages": [{"role": "user", "content": "Round and round"}], **STUCK, "logit_bias": {str(ONE): 100}}
        for path, more in (("chat/completions", {}), ("completions", {"prompt": "Round", "messages": None})):
            asked = {key: value for key, value in (body | more).items() if value is not None}
            answer = served.post(f"/v1/{path}", **asked, max_repeat=2).json()
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] == 16
            assert served.post(f"/v1/{path}", **asked).json()["usage"]["completion_tokens"] == 40
            for wrong in (1, -1, "2", 2.5, True, 1 << 40):
                refused = served.post(f"/v1/{path}", **asked, max_repeat=wrong)
                assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_repeat", wrong


@pytest.mark.parametrize("wrong", [1, -1, 2.5, True, "2"])
def test_invalid_counts_are_refused(wrong: object) -> None:
    with pytest.raises(RequestError, match="max_repeat must be") as refusal:
        SamplingParams(max_repeat=wrong)  # type: ignore[arg-type]
    assert refusal.value.field == "max_repeat"
    with pytest.raises(ConfigError, match="max_repeat must be") as mistake:
        EngineConfig(max_repeat=wrong)  # type: ignore[arg-type]
    assert mistake.value.option == "max_repeat"


@pytest.mark.parametrize("command", ["run", "chat", "serve"])
def test_on_the_command_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["hi"] if command == "run" else []
    given = engine_options(command_parser(command).parse_mixed([*words, "--max-repeat", "4"]))
    assert given == {"max_repeat": 4}
    assert main([command, *words, "--max-repeat", "1"]) == 2
    assert "--max-repeat must be 0 (off) or at least 2" in capsys.readouterr().err
