"""`LLM`: chat, stream and generate over the engine, with the model that comes with deltic. What it says does not
matter here: every answer is compared with another way to the same tokens."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from support import numbers, odd_runtime, odd_shape, reference, same_tokens

from deltic import LLM, RandomModel, SamplingParams
from deltic.chat.output_router import join
from deltic.chat.processor import ChatConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import StartTimes
from deltic.engine.sequence import Sequence
from deltic.engine.worker import Worker
from deltic.errors import ConfigError, ModelError, RequestError
from deltic.llm import Stream
from deltic.spec_decode.draft_length import FixedDraftLength
from deltic.spec_decode.mtp import Wants

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def at_rest(llm: LLM) -> None:
    """Nothing runs, and nothing is held."""
    with llm.worker.hold() as engine:
        engine.step()
        assert not engine.has_work
        engine.check()


def greedy(count: int, **params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": count, "ignore_eos": True, **params})


@pytest.fixture(scope="module")
def model() -> LLM:
    # what is reused shows in the usage, which these tests compare
    return LLM(dtype="float32", max_context=256, max_batch=4, threads=1, prefix_cache=False)


@pytest.fixture
def llm(model: LLM) -> Iterator[LLM]:
    """The embedded model; afterwards nothing may be left behind."""
    yield model
    at_rest(model)


@pytest.fixture(scope="module")
def random_llm() -> LLM:
    """A model that never repeats itself and has no tokenizer."""
    return LLM(RandomModel(shape=odd_shape(), initializer_range=0.1), memory="4MiB", max_batch=3, threads=1,
               speculate="ngram")


# Chat and stream


def test_chat_and_stream_give_equal_answers(llm: LLM) -> None:
    whole = llm.chat(MESSAGES, greedy(24))
    stream = llm.stream(MESSAGES, greedy(24))
    deltas = list(stream)
    assert stream.output is not None and stream.output == whole
    assert "".join(delta.text for delta in deltas if delta.kind == "content") == whole.text
    assert "".join(delta.text for delta in deltas if delta.kind == "reasoning") == whole.reasoning
    choice, = whole.choices
    assert choice.finish == "length" and len(choice.tokens) == choice.usage.completion_tokens == 24
    assert choice.error is None and choice.usage.prompt_tokens > 5


def test_text_is_sent_as_one_user_message(llm: LLM) -> None:
    assert llm.chat(MESSAGES[0]["content"], greedy(8)) == llm.chat(MESSAGES, greedy(8))


def test_template_variables_reach_the_template(llm: LLM) -> None:
    prompts = {llm.chat(MESSAGES, greedy(1), thinking=thinking).choices[0].usage.prompt_tokens
               for thinking in (True, False)}
    assert len(prompts) == 2
    same = llm.chat(MESSAGES, greedy(1), variables={"enable_thinking": True}).choices[0].usage.prompt_tokens
    assert same == llm.chat(MESSAGES, greedy(1), thinking=True).choices[0].usage.prompt_tokens


def test_one_logprob_per_token(llm: LLM) -> None:
    choice, = llm.chat(MESSAGES, greedy(5, logprobs=2)).choices
    assert len(choice.logprobs) == 5
    assert [entry.top[0][0] for entry in choice.logprobs] == list(choice.tokens)
    assert all(entry.token == entry.top[0][1] <= 0 for entry in choice.logprobs)
    assert llm.chat(MESSAGES, greedy(5)).choices[0].logprobs == ()


def test_choices_come_in_order(llm: LLM) -> None:
    wild = SamplingParams(temperature=20.0, top_k=0, top_p=1.0, min_p=0.0, seed=4, max_tokens=12, n=3)
    output = llm.chat(MESSAGES, wild)
    assert [choice.index for choice in output.choices] == [0, 1, 2]
    assert output.text == output.choices[0].text
    again = llm.chat(MESSAGES, wild)
    assert again == output and len({choice.tokens for choice in output.choices}) == 3


def test_pieces_name_their_choice(llm: LLM) -> None:
    stream = llm.stream("Say something.", SamplingParams(temperature=1.5, seed=1, n=3, max_tokens=20))
    deltas = list(stream)
    assert stream.output
    for choice in stream.output.choices:
        assert join(delta for delta in deltas if delta.index == choice.index).content == choice.text


def test_interleaved_streams_equal_separate_ones(llm: LLM) -> None:
    alone = [llm.generate_stream(text, greedy(count)) for text, count in (("One", 12), ("Two and", 20))]
    expected = [list(stream) for stream in alone]
    streams = [llm.generate_stream("One", greedy(12)), llm.generate_stream("Two and", greedy(20))]
    found: list[list[Any]] = [[], []]
    iterators = [iter(stream) for stream in streams]
    while any(stream.output is None for stream in streams):
        for index, iterator in enumerate(iterators):
            found[index].extend(delta for delta in [next(iterator, None)] if delta is not None)
    for index, iterator in enumerate(iterators):
        found[index].extend(iterator)
    assert [s.output for s in streams] == [s.output for s in alone]
    assert ["".join(delta.text for delta in deltas) for deltas in found] == \
        ["".join(delta.text for delta in deltas) for deltas in expected]


def bounded(llm: LLM, monkeypatch: pytest.MonkeyPatch, limit: int = 300) -> None:
    """Fail instead of stepping for ever."""
    step, calls = llm.engine.step, iter(range(limit))

    def counted() -> Any:
        assert next(calls, None) is not None, "stepping without end"
        return step()

    monkeypatch.setattr(llm.engine, "step", counted)


@pytest.mark.parametrize("how", ["close", "break", "generator"])
def test_closing_a_stream_aborts_and_frees(llm: LLM, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bounded(llm, monkeypatch)
    stream = llm.generate_stream("Once upon a time", greedy(100))
    if how == "close":
        next(iter(stream))
        stream.close()
    elif how == "break":
        for _ in stream:
            break
    else:
        iterator = iter(stream)
        next(iterator)
        iterator.close()  # type: ignore[attr-defined]
    cache = llm.runtime.cache
    llm.worker.call(lambda engine: engine.step())
    llm.worker.call(lambda engine: cache.clear())
    assert cache.pages.free == cache.pages.size and cache.slots.free == cache.slots.size
    assert stream.output is None and list(stream) == []
    stream.close()


def test_closing_a_stream_does_not_disturb_another(llm: LLM) -> None:
    expected = llm.generate_stream("One", greedy(30))
    list(expected)
    first, second = llm.generate_stream("Another text", greedy(60)), llm.generate_stream("One", greedy(30))
    next(first)
    iterator = iter(second)
    next(iterator)
    first.close()
    for _ in iterator:
        pass
    assert second.output == expected.output


def test_finished_stream_can_be_read_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    bounded(llm, monkeypatch)
    stream = llm.generate_stream("One", greedy(5))
    list(stream)
    assert list(stream) == [] and stream.output is not None


# Stop strings


def test_stop_string_ends_the_answer(llm: LLM) -> None:
    plain, = llm.generate(["Hello"], greedy(30))
    assert len(plain.text) > 8
    stop = plain.text[3:6]
    cut, = llm.generate(["Hello"], greedy(30, stop=(stop,)))
    assert cut.choices[0].finish == "stop"
    assert cut.text == plain.text[:plain.text.index(stop)]
    tokens = cut.choices[0].tokens
    assert tokens == plain.choices[0].tokens[:len(tokens)] and len(tokens) < 30


def test_stop_strings_of_concurrent_requests(llm: LLM) -> None:
    plain, = llm.generate(["Hello"], greedy(20))
    stop = plain.text[2:4]
    both = llm.generate(["Hello", "Hello"], [greedy(20, stop=(stop,)), greedy(20)])
    assert both[1].text == plain.text and both[0].text == plain.text[:plain.text.index(stop)]


def test_stop_token_id_is_not_in_the_text(llm: LLM) -> None:
    plain, = llm.generate(["Hello"], greedy(12))
    last = plain.choices[0].tokens[-1]
    first = plain.choices[0].tokens.index(last)
    cut, = llm.generate(["Hello"], greedy(12, stop_token_ids=(last,)))
    assert cut.choices[0].tokens == plain.choices[0].tokens[:first + 1] and cut.choices[0].finish == "stop"
    shorter, = llm.generate(["Hello"], greedy(first)) if first else [None]
    assert cut.text == (shorter.text if shorter else "")


def test_stop_strings_need_a_tokenizer(random_llm: LLM) -> None:
    with pytest.raises(RequestError, match="stop_token_ids"):
        random_llm.generate([[1, 2]], SamplingParams(stop=("x",)))
    with pytest.raises(ModelError, match="tokenizer"):
        random_llm.generate(["text"])


# Generate


def test_generate_continues_texts_and_ids(llm: LLM) -> None:
    ids = llm.chat_processor.tokenizer.encode("Once upon")
    text, tokens = llm.generate(["Once upon"], greedy(9)), llm.generate([ids], greedy(9))
    assert text == tokens and text[0].choices[0].usage.prompt_tokens == len(ids)
    assert llm.generate([]) == []


def test_stream_without_a_tokenizer_returns_token_ids(random_llm: LLM) -> None:
    whole, = random_llm.generate([[1, 2, 3]], greedy(12))
    stream = random_llm.generate_stream([1, 2, 3], greedy(12))
    deltas = list(stream)
    assert sum((delta.tokens for delta in deltas), ()) == whole.choices[0].tokens and len(deltas) > 1
    assert stream.output and stream.output.choices[0].tokens == whole.choices[0].tokens
    assert all(delta.tokens and not delta.text for delta in deltas)
    stop = whole.choices[0].tokens[4]
    assert stop not in whole.choices[0].tokens[:4]
    found = [*random_llm.generate_stream([1, 2, 3], greedy(12, stop_token_ids=[stop]))]
    assert sum((delta.tokens for delta in found), ()) == whole.choices[0].tokens[:4], "as of text, what ends it is none"
    stream = random_llm.generate_stream([1, 2, 3], SamplingParams(seed=1, n=3, max_tokens=9))
    deltas = list(stream)
    assert stream.output
    for choice in stream.output.choices:
        assert sum((delta.tokens for delta in deltas if delta.index == choice.index), ()) == choice.tokens
    at_rest(random_llm)


def test_generated_rows_equal_separate_ones(random_llm: LLM) -> None:
    """More rows than the batch holds, of different lengths."""
    prompts = [numbers(i, 4 + 7 * i, 509) for i in range(7)]
    outputs = random_llm.generate(prompts, greedy(15))
    for prompt, output in zip(prompts, outputs, strict=True):
        same_tokens(reference(odd_runtime(), prompt, 15), output.choices[0].tokens)
    at_rest(random_llm)


def test_rows_with_different_limits(random_llm: LLM) -> None:
    """A4.12: the longest limit counts, not the first."""
    limits = [3, 0, 40, 1]
    outputs = random_llm.generate([numbers(i, 5, 509) for i in range(4)], [greedy(limit) for limit in limits])
    assert [len(output.choices[0].tokens) for output in outputs] == limits
    assert {output.choices[0].finish for output in outputs} == {"length"}


def test_on_token_stops_only_its_row(random_llm: LLM) -> None:
    prompts = [numbers(i, 5, 509) for i in range(3)]
    plain = random_llm.generate(prompts, greedy(10))
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def on_token(row: int, token: int) -> bool:
        seen[row].append(token)
        return row != 1 or len(seen[row]) < 4

    outputs = random_llm.generate(prompts, greedy(10), on_token)
    assert [output.choices[0].tokens for output in outputs] == [tuple(seen[row]) for row in range(3)]
    assert [output.choices[0].finish for output in outputs] == ["length", "abort", "length"]
    for row, output in enumerate(outputs):
        expected = plain[row].choices[0].tokens
        assert output.choices[0].tokens == (expected[:4] if row == 1 else expected)
    at_rest(random_llm)


def test_on_token_is_not_called_after_it_stopped_the_row(random_llm: LLM) -> None:
    calls: list[tuple[int, int]] = []

    def on_token(row: int, token: int) -> bool:
        calls.append((row, token))
        return False

    outputs = random_llm.generate([[1, 2, 3]], SamplingParams(temperature=1.0, seed=1, max_tokens=9, n=3), on_token)
    assert len(calls) == 1 and len(outputs[0].choices) == 3
    assert {choice.finish for choice in outputs[0].choices} == {"abort"}


@pytest.mark.parametrize("wanted", range(1, 8))
def test_on_token_stops_within_right_drafts_too(random_llm: LLM, wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = numbers(3, 9, 509)
    plain = random_llm.generate([prompt], greedy(8))[0].choices[0].tokens
    seen: list[int] = []

    def on_token(row: int, token: int) -> bool:
        seen.append(token)
        return len(seen) < wanted

    class Right:
        limit = 3

        def draft(self, wants: Wants) -> list[list[int]]:
            return [[*plain[sequence.generated:sequence.generated + count]] for sequence, count in wants]

        def forget(self, sequence: Sequence) -> None:
            pass

    monkeypatch.setattr(random_llm, "worker", Worker(Engine(random_llm.runtime, Right(), FixedDraftLength(3))))
    choice = random_llm.generate([prompt], greedy(8), on_token)[0].choices[0]
    assert choice.tokens == tuple(seen) == plain[:wanted] and choice.finish == "abort"
    assert choice.usage.completion_tokens == wanted
    at_rest(random_llm)
    assert random_llm.worker.stop(60)


def test_exception_in_on_token_aborts_all_rows(random_llm: LLM) -> None:
    def on_token(row: int, token: int) -> bool:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        random_llm.generate([[1], [2]], greedy(9), on_token)
    at_rest(random_llm)


def test_wrong_row_aborts_all_rows(random_llm: LLM) -> None:
    with pytest.raises(RequestError, match="outside"):
        random_llm.generate([[1, 2], [9999]], greedy(5))
    at_rest(random_llm)


@pytest.mark.parametrize(("prompts", "sampling", "words"), [
    ("text", SamplingParams(), "list of prompts"), ([1, 2], SamplingParams(), "list of prompts"),
    ([[1], [2]], [SamplingParams()], "2 prompts need as many"),
    ([[1], []], SamplingParams(), r"prompts\[1\]: the prompt is empty"),
])
def test_l8_misuse_of_generate_is_explained(random_llm: LLM, prompts: Any, sampling: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        random_llm.generate(prompts, sampling)


def test_l8_unknown_options_are_named() -> None:
    with pytest.raises(ConfigError, match=r"'max_sequences'.*max_batch") as caught:
        LLM(max_sequences=4)
    assert caught.value.option == "max_sequences"


def test_l8_error_of_an_unknown_option_lists_all_options() -> None:
    named = ["max_batch", "revision", "chat_template", *(each.name for each in fields(ChatConfig))]
    with pytest.raises(ConfigError, match="unknown option 'histroy'") as caught:
        LLM(histroy="template")
    assert all(re.search(rf"\b{name}\b", str(caught.value)) for name in named)


@pytest.mark.parametrize("kind", [str, Path])
def test_chat_template_option_accepts_text_and_path(kind: Callable[[Path], Any], tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}!")
    with LLM(chat_template=kind(tmp_path / "chat.jinja"), memory="16MiB", max_context=64, threads=1) as model:
        assert model.chat_processor.tokenizer.decode(model.stream("Hi")._call.answers.jobs[0].request.ids) == "Hi!"
    with pytest.raises(ConfigError, match="chat_template must be the path of a file, not 5"):
        LLM(chat_template=5)  # type: ignore[arg-type]


# History


@pytest.mark.parametrize("thinking", [True, False])
def test_preserved_history_is_not_prefilled_again(thinking: bool) -> None:
    llm = LLM(dtype="float32", memory="64MiB", max_context=1024, threads=1, history="preserve")
    messages = [{"role": "system", "content": "You are brief."}]
    before = None
    for question in ("What is a river?", "And a lake?", "And the sea?"):
        messages.append({"role": "user", "content": question})
        stream = llm.stream(messages, SamplingParams(temperature=0.0, max_tokens=200), thinking=thinking)
        list(stream)
        assert stream.output
        usage = stream.output.choices[0].usage
        if before:
            assert usage.cached_tokens == before.prompt_tokens + before.completion_tokens - 1
        before = usage
        messages.append({"role": "assistant", "content": stream.output.text + "\n"})
    at_rest(llm)


def test_l8_unknown_history_is_named() -> None:
    with pytest.raises(ConfigError, match="one of template, preserve") as caught:
        LLM(history="all")
    assert caught.value.option == "history"


# Memory


def test_small_memory_reduces_the_context_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Preemption behind the public door: the same answers from a cache that cannot hold all of them."""
    shape = odd_shape()
    roomy = LLM(RandomModel(shape=shape, initializer_range=0.1), memory="4MiB", max_batch=3, threads=1)
    caplog.clear()
    tight = LLM(RandomModel(shape=shape, initializer_range=0.1), memory="180KiB", max_batch=3, threads=1)
    assert any("`memory`" in record.message for record in caplog.records)
    assert tight.runtime.cache.pages.size * 16 < 3 * 160
    prompts = [numbers(i, 20, 509) for i in range(3)]
    wanted = roomy.generate(prompts, greedy(100))
    assert tight.generate(prompts, greedy(100)) == wanted
    assert tight.engine.scheduler.preemptions > 0 and roomy.engine.scheduler.preemptions == 0
    at_rest(tight)


def test_memory_too_small_for_any_sequence() -> None:
    with pytest.raises(ConfigError, match=r"memory.*raise `memory`"):
        LLM(RandomModel(shape=odd_shape()), memory="4KiB")


def test_type_of_streams(llm: LLM) -> None:
    stream = llm.generate_stream("x", greedy(1))
    assert isinstance(stream, Stream)
    list(stream)


# Start


def test_log_contains_the_times_of_a_start(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "deltic"), LLM(memory="64MiB", threads=1, speculate="draft:tiny"):
        pass
    lines = [re.sub(r"\d+\.\d\d s", "T", record.getMessage()) for record in caplog.records]
    parts = "loaded in T (files T, tokenizer T, weights T, layers T, vision tower T, cache T)"
    assert [line for line in lines if " T" in line] == [f"the draft model tiny: {parts}", f"tiny: {parts}"]


def test_times_of_a_start_add_up() -> None:
    times = StartTimes()
    for part in ("a", "b", "a"):
        time.sleep(0.01)
        times.done(part)
    assert [*times.seconds] == ["a", "b"] and times.seconds["a"] >= 0.02 and times.seconds["b"] >= 0.01
    assert str(times).startswith(f"{sum(times.seconds.values()):.2f} s (a ")
