"""A guide's tokens come whatever the model says, with drafts and without; a thinking budget closes the think block
when it is spent, neither sooner nor later, and leaves the rest to the model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reuse_cases import runtime_of, usage_of
from speculation_cases import FORCED, PARAMS, PATTERNS, Dictate, Scripted, expected
from support import (
    Reference,
    drain,
    drawn,
    greedy,
    numbers,
    odd_runtime,
    same_tokens,
    session_over,
    small_runtime,
)
from test_chat_support import QWEN_LIKE
from test_server_harness import USER, Served, serving, tiny

from deltic import LLM, SamplingParams
from deltic.chat.conversation import Conversation
from deltic.chat.output_router import AnswerText, chat_router
from deltic.chat.processor import ChatProcessor
from deltic.chat.template import ChatTemplate
from deltic.chat.thinking import ThinkEnd, ThinkingBudget
from deltic.chat.tokenizer import Tokenizer, TokenizerFiles
from deltic.cli import main
from deltic.engine.engine import Engine
from deltic.errors import ConfigError, RequestError
from deltic.params import EngineRequest, ForcedTokens
from deltic.spec_decode.draft_length import FixedDraftLength

PROMPT, ANSWER = 83, 40


@cache
def guided(params: str, choice: int = 0) -> Reference:
    """The answer with the forced tokens in it, one token at a time."""
    runtime, asked = odd_runtime(), PARAMS[params]
    prompt = numbers(5, PROMPT, runtime.config.vocab_size)
    session, rows, tokens = session_over(runtime, batch=1), [], list[int]()
    logits = session.prefill(prompt)
    for index in range(ANSWER):
        rows.append(logits)
        tokens.append(FORCED.get(index, drawn(logits, asked, choice, PROMPT + index)))
        logits = session.step(tokens[-1])
    return Reference(prompt, tuple(tokens), torch.stack(rows))


# In the engine


@pytest.mark.covering
@pytest.mark.parametrize("params", ["greedy", "drawn"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("depth", [0, 1, 4, 12])
def test_forced_tokens_come_and_the_model_goes_on_after_them(params: str, pattern: str, depth: int) -> None:
    answer = guided(params)
    drafter = Scripted({("a", 0): answer.tokens}, PATTERNS[pattern], depth)
    engine = Engine(runtime_of(odd_runtime()), drafter, FixedDraftLength(depth))
    engine.add(EngineRequest("other", answer.prompt, PARAMS[params]))
    engine.add(EngineRequest("a", answer.prompt, PARAMS[params], guide=Dictate))
    answers = drain(engine)
    same_tokens(answer, answers["a", 0].tokens, PARAMS[params])
    assert [answers["a", 0].tokens[place] for place in FORCED] == list(FORCED.values())
    same_tokens(expected("odd", params), answers["other", 0].tokens, PARAMS[params])
    if pattern == "right":
        steps = -(-(ANSWER - 1) // (depth + 1))
        assert usage_of(answers).accepted_tokens == ANSWER - 1 - steps


def test_drafts_of_what_the_model_would_say_are_rejected_where_it_is_not_asked() -> None:
    """The draft before the forced token is right, the one in its place is not."""
    answer, place = expected("odd", "greedy"), 3
    token = (answer.tokens[place] + 1) % 509
    engine = Engine(
        runtime_of(odd_runtime()), Scripted({("a", 0): answer.tokens}, PATTERNS["right"], 4), FixedDraftLength(4)
    )
    engine.add(replace(greedy(answer.prompt, place + 1), guide=partial(Dictate, {place: token})))
    answers = drain(engine)
    assert answers["a", 0].tokens == [*answer.tokens[:place], token]
    assert usage_of(answers).accepted_tokens == place - 1 and usage_of(answers).drafted_tokens == place - 1
    engine.add(replace(greedy(answer.prompt, place + 2, "b"), guide=partial(Dictate, {place: token})))
    engine.speculator.drafter.answers[("b", 0)] = answer.tokens  # type: ignore[union-attr]
    answers = drain(engine)
    assert answers["b", 0].tokens[:place + 1] == [*answer.tokens[:place], token]
    assert usage_of(answers, "b").accepted_tokens == place - 1 < usage_of(answers, "b").drafted_tokens


def test_each_choice_has_a_guide_of_its_own() -> None:
    engine = Engine(runtime_of(odd_runtime()))
    engine.add(EngineRequest("a", guided("drawn").prompt, replace(PARAMS["drawn"], n=3), guide=Dictate))
    answers = drain(engine)
    for choice in range(3):
        same_tokens(guided("drawn", choice), answers["a", choice].tokens, PARAMS["drawn"], choice)
        assert [answers["a", choice].tokens[place] for place in FORCED] == list(FORCED.values())


@pytest.mark.parametrize("depth", [0, 4])
def test_preempted_and_repeated_prompts(depth: int) -> None:
    """An exact hit draws from logits that the cache knows, without a step."""
    answer = guided("greedy")
    drafter = Scripted({("a", 0): answer.tokens}, PATTERNS["now and then"], depth)
    engine = Engine(small_runtime(odd_runtime(), batch=4, pages=20, context=160), drafter, FixedDraftLength(depth))
    for index in range(3):
        engine.add(greedy(numbers(20 + index, 70, 509), 60, f"n{index}"))
    engine.add(EngineRequest("a", answer.prompt, PARAMS["greedy"], guide=Dictate))
    same_tokens(answer, drain(engine)["a", 0].tokens)
    assert engine.scheduler.preemptions > 0
    engine = Engine(runtime_of(odd_runtime()))
    for name in ("a", "b"):
        engine.add(EngineRequest(name, answer.prompt, PARAMS["greedy"], guide=Dictate))
        answers = drain(engine)
        same_tokens(answer, answers[name, 0].tokens)
    assert usage_of(answers, "b").cached_tokens == PROMPT


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("depth", [0, 4])
def test_logprobs_are_those_of_the_tokens_that_came(depth: int, bias: bool) -> None:
    """As the model gave them, before bias."""
    answer = guided("greedy")
    drafter = Scripted({("a", 0): answer.tokens}, PATTERNS["every third wrong"], depth)
    engine = Engine(runtime_of(odd_runtime()), drafter, FixedDraftLength(depth))
    more: dict[str, Any] = {"logit_bias": {11: -9.0, 12: 30.0}} if bias else {}
    params = replace(PARAMS["greedy"], logprobs=2, max_tokens=1 if bias else ANSWER, **more)
    engine.add(EngineRequest("a", answer.prompt, params, guide=Dictate))
    events = drain(engine)["a", 0].events
    wanted = answer.logits.log_softmax(-1)
    for index, event in enumerate(events):
        assert event.logprobs is not None and event.token == answer.tokens[index]
        assert event.logprobs.token == pytest.approx(float(wanted[index, event.token]), abs=2e-3)
        assert [token for token, _ in event.logprobs.top] == wanted[index].topk(2).indices.tolist()
    assert len(events) == (1 if bias else ANSWER)


def test_a_forced_end_ends_and_a_limit_cuts_what_is_forced() -> None:
    engine = Engine(runtime_of(odd_runtime()))
    params = SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=(13,))
    engine.add(EngineRequest("stop", guided("greedy").prompt, params, guide=Dictate))
    engine.add(replace(greedy(guided("greedy").prompt, 7, "limit"), guide=Dictate))
    engine.add(replace(greedy(guided("greedy").prompt, 0, "none"), guide=Dictate))
    answers = drain(engine)
    assert answers["stop", 0].tokens == list(guided("greedy").tokens[:8])
    assert answers["limit", 0].tokens == list(guided("greedy").tokens[:7]) and answers["none", 0].tokens == []
    assert [answers[name, 0].last.finish for name in ("stop", "limit", "none")] == ["stop", "length", "length"]


@pytest.mark.parametrize("method", ["forced", "push"])
def test_failing_guide_ends_only_its_own_request(method: str) -> None:
    class Broken(Dictate):
        """Works for four tokens."""

    def fail(self: Broken, *_: int) -> int | None:
        if self.count == 4:
            raise LookupError("mine")
        return getattr(Dictate, method)(self, *_)

    setattr(Broken, method, fail)
    engine = Engine(runtime_of(odd_runtime()))
    engine.add(EngineRequest("bad", guided("greedy").prompt, PARAMS["greedy"], guide=Broken))
    engine.add(EngineRequest("a", guided("greedy").prompt, PARAMS["greedy"], guide=Dictate))
    answers = drain(engine)
    assert answers["bad", 0].last.finish == "error" and "mine" in str(answers["bad", 0].last.error)
    same_tokens(guided("greedy"), answers["a", 0].tokens)


# The budget, token by token


TINY = Path(__file__).parents[1] / "deltic" / "models" / "tiny"
TOKENIZER = Tokenizer.from_directory(TINY)
THINK, END = TOKENIZER.encode("<think></think>")
NEWLINE, STOP = (TOKENIZER.encode(text) for text in ("\n", "</think>\n\n"))


class Budgeted(ThinkingBudget):
    """With the text that the engine gives every token first."""

    def push(self, token: int, /) -> None:
        self._text.push(token)
        super().push(token)


def budget_of(tokens: int, prompt: str = "", tokenizer: Tokenizer = TOKENIZER) -> ThinkingBudget:
    closing = ThinkEnd(b"\n", tuple(tokenizer.encode("\n")), tuple(tokenizer.encode("</think>\n\n")))
    return Budgeted(AnswerText(chat_router(tokenizer, tokenizer.encode(prompt))), tokenizer, closing, tokens)


def play(guide: ForcedTokens, script: Sequence[int]) -> tuple[list[int], list[bool]]:
    """The answer of a model that says the script wherever it may choose, and which of its tokens were forced."""
    answer, forced, wanted = list[int](), list[bool](), iter(script)
    while True:
        token = guide.forced()
        forced.append(token is not None)
        choice = next(wanted, None) if token is None else token
        if choice is None:
            return answer, forced[:-1]
        answer.append(choice)
        guide.push(choice)


def spelled(tokens: Sequence[int], tokenizer: Tokenizer = TOKENIZER) -> str:
    return tokenizer.decode(tokens, skip_special=False)


def letters(text: str) -> list[int]:
    """A token for every character, and one for every tag."""
    return [TOKENIZER.encode(piece)[0] for piece in re.findall("</?think>|(?s:.)", text)]


@pytest.mark.parametrize(("budget", "prompt", "said", "answer"), [
    (0, "<think>\n", "Hi", "\n</think>\n\nHi"),
    (3, "<think>\n", "abcde</think>\n\nHi", "abc\n</think>\n\nde</think>\n\nHi"),
    (4, "<think>\n", "abc\nde", "abc\n</think>\n\nde"),
    (4, "<think>\n", "abcd\n", "abcd\n</think>\n\n\n"),
    (4, "<think>\n", "abcd</think>\n\nHi", "abcd\n</think>\n\n</think>\n\nHi"),
    (4, "<think>\n", "abc</think>\n\nHi", "abc</think>\n\nHi"),
    (4, "<think>\n", "ab\n</think>\n\n<think>cd", "ab\n</think>\n\n<think>c\n</think>\n\nd"),
    (3, "<think>\n", "ab\n</think>\n\n<think>cd", "ab\n</think>\n\n</think>\n\n<think>\n</think>\n\ncd"),
    (0, "<think>\n\n</think>\n\n", "Hi", "Hi"),
    (0, "", "Hi", "Hi"),
    (2, "", "<think>\nab", "<think>\na\n</think>\n\nb"),
    (2, "", "Hi<think>ab", "Hi<think>ab\n</think>\n\n"),
    (0, "", "Hi\n<think>ab", "Hi\n<think>\n</think>\n\nab"),
    (1, "<think>\n", "ab<think>cd", "a\n</think>\n\nb<think>\n</think>\n\ncd"),
])
def test_the_block_is_closed_when_the_budget_is_spent(budget: int, prompt: str, said: str, answer: str) -> None:
    assert spelled(play(budget_of(budget, prompt), letters(said))[0]) == answer


SAID = st.lists(st.sampled_from(["a", " ", "\n", "<think>", "</think>"]), max_size=40)


@given(SAID, st.integers(0, 9), st.booleans())
@settings(max_examples=300)
def test_whatever_the_model_says(said: list[str], budget: int, opened: bool) -> None:
    answer, forced = play(budget_of(budget, "<think>\n" if opened else ""), letters("".join(said)))
    pieces, thinking, left, last = [], opened, budget, ""
    for piece in [*said, ""]:
        if thinking and not left:
            pieces += ["" if last == "\n" else "\n", "</think>\n\n"]
            thinking = False
        pieces.append(piece)
        inside = thinking and piece != "</think>"
        last, left, thinking = piece if inside else "", left - inside, inside or piece == "<think>"
    assert spelled(answer) == "".join(pieces)
    assert spelled([token for token, dictated in zip(answer, forced, strict=True) if not dictated]) == "".join(said)


@pytest.mark.parametrize(("template", "closing"), [
    (TOKENIZER.chat_template, "\n</think>\n\n"),
    (QWEN_LIKE, "\n</think>\n\n"),
    ("{% for m in messages %}{{ m.reasoning_content }} </think>{{ m.content }}{% endfor %}", " </think>"),
    ("{% for m in messages %}{{ m.reasoning_content }}</think>\n{{ m.content }}{% endfor %}", "</think>\n"),
    ("{% for m in messages %}<think></think>{{ m.content }}{% endfor %}", "\n</think>\n\n"),
    ("{% for m in messages %}{{ m.reasoning_content }}</think>so:{{ m.content }}{% endfor %}", "\n</think>\n\n"),
    ("{{ raise_exception('no') if messages | length > 1 }}{{ messages[0].content }}", "\n</think>\n\n"),
])
@pytest.mark.parametrize("words", [True, False])
def test_the_closing_is_that_of_the_template(template: str, closing: str, words: bool) -> None:
    tokenizer = TOKENIZER if words else without_markers()
    found = ThinkEnd.of(Conversation(ChatTemplate(template), tokenizer, [{"role": "user", "content": "Hi"}]))
    gap = closing.partition("</think>")[0]
    assert found.gap == gap.encode() and spelled(found.gap_ids, tokenizer) == gap
    assert spelled(found.after(b"so"), tokenizer) == closing
    assert spelled(found.after(b"so" + gap.encode()), tokenizer) == closing.removeprefix(gap)
    assert (END in found.tag_ids) == words


@cache
def without_markers() -> Tokenizer:
    """The embedded model's tokenizer without tokens for think blocks."""
    spec = json.loads((TINY / "tokenizer.json").read_text())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if "think" not in token["content"]]
    return Tokenizer.from_files(TokenizerFiles(json.dumps(spec), {}, {}), TINY)


def test_without_think_tokens_only_spelled_blocks_are_closed() -> None:
    tokenizer = without_markers()
    assert len(tokenizer.encode("<think>")) > 1
    plain, spelled_out = tokenizer.encode("Hello there"), tokenizer.encode("Hm <think>so so so so so")
    opening = len(tokenizer.encode("Hm <think>"))
    assert play(budget_of(0, "<think>\n", tokenizer), plain)[0] == plain
    answer, forced = play(budget_of(2, "", tokenizer), spelled_out)
    assert forced.index(True) <= opening + 3 and "</think>\n\n" in spelled(answer, tokenizer)


# Through LLM


QUESTION = [{"role": "user", "content": "How many legs does a horse have?"}]
MOST = SamplingParams(temperature=0.0, max_tokens=60)


@cache
def model(speculate: str) -> LLM:
    return LLM(dtype="float32", threads=1, max_context=256, max_batch=4, speculate=speculate)


@pytest.mark.parametrize("speculate", ["off", "ngram:3", "ngram:12"])
def test_a_budget_ends_the_thinking_and_the_model_answers(speculate: str) -> None:
    llm = model(speculate)
    free, = llm.chat(QUESTION, MOST, thinking=True).choices
    thoughts = free.tokens.index(END)
    job = llm.chat_processor.chat(QUESTION, variables={"enable_thinking": True})
    assert thoughts > 15 and free.text
    for budget in (0, 1, 7, thoughts - 1, thoughts, thoughts + 9):
        found, = llm.chat(QUESTION, MOST, thinking=True, thinking_budget=budget).choices
        if budget >= thoughts:
            assert found.tokens == free.tokens and found.reasoning == free.reasoning
            continue
        closed = [*free.tokens[:budget], *NEWLINE, *STOP]
        assert list(found.tokens[:len(closed)]) == closed
        assert found.reasoning == spelled(free.tokens[:budget]).rstrip()
        again, = llm.generate([[*job.request.prompt, *closed]], MOST)
        assert found.tokens[len(closed):] == again.choices[0].tokens and found.finish == "stop"
        assert found.text == again.text.replace("</think>\n\n", "") != ""  # it may end a thought that was cut


def test_choices_and_streams_and_log_probabilities() -> None:
    llm = model("off")
    wild = SamplingParams(temperature=5.0, seed=3, max_tokens=30, n=3, logprobs=1)
    stream = llm.stream(QUESTION, wild, thinking=True, thinking_budget=4)
    deltas = list(stream)
    assert stream.output is not None
    free = llm.chat(QUESTION, wild, thinking=True)
    for choice, other in zip(stream.output.choices, free.choices, strict=True):
        assert choice.tokens[:4] == other.tokens[:4] and END in choice.tokens[4:6] and len(choice.logprobs) == 30
        assert all(score.token <= 0 for score in choice.logprobs)
    assert len({choice.tokens for choice in stream.output.choices}) == 3
    assert {delta.kind for delta in deltas} >= {"reasoning", "content"}


def test_where_the_model_does_not_think_nothing_happens() -> None:
    llm = model("off")
    plain = llm.chat(QUESTION, MOST, thinking=False)
    assert llm.chat(QUESTION, MOST, thinking=False, thinking_budget=0).choices[0].tokens == plain.choices[0].tokens


def test_the_next_turn_goes_on_where_the_closed_block_was() -> None:
    llm = model("off")
    first = llm.chat(QUESTION, MOST, thinking=True, thinking_budget=6).choices[0]
    said = {"role": "assistant", "content": first.text, "reasoning_content": first.reasoning}
    job = llm.chat_processor.chat([*QUESTION, said, *QUESTION], history="preserve")
    assert job.request.prompt[first.usage.prompt_tokens:][:len(first.tokens)] == first.tokens


def test_a_default_and_requests_that_say_otherwise() -> None:
    llm = LLM(dtype="float32", threads=1, max_context=256, thinking_budget=3)
    counts = [len(llm.chat(QUESTION, MOST, thinking=True, **more).choices[0].tokens)
              for more in ({}, {"thinking_budget": 3}, {"thinking_budget": 0}, {"thinking_budget": 99})]
    assert counts[0] == counts[1] == counts[2] + 3 < counts[3]


@pytest.mark.parametrize("wrong", [-1, 1.5, "3", True])
def test_invalid_budgets_are_refused(wrong: Any) -> None:
    with pytest.raises(RequestError, match="thinking_budget must be a number of tokens") as refusal:
        model("off").chat(QUESTION, MOST, thinking_budget=wrong)
    assert refusal.value.field == "thinking_budget"
    with pytest.raises(ConfigError, match="thinking_budget must be a number of tokens") as mistake:
        ChatProcessor(TOKENIZER, thinking_budget=wrong)
    assert mistake.value.option == "thinking_budget"


def test_raw_prompts_have_no_budget() -> None:
    with pytest.raises(TypeError, match="thinking_budget"):
        model("off").generate_stream("Once upon", MOST, thinking_budget=3)  # type: ignore[call-arg]


# On the wire and the command line


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(tiny()) as running:
        yield running


def test_a_request_brings_its_budget(served: Served) -> None:
    body: dict[str, Any] = {"messages": QUESTION, "temperature": 0, "enable_thinking": True, "max_tokens": 80}
    ask: Callable[..., Any] = lambda **more: served.post("/v1/chat/completions", **body, **more).json()  # noqa: E731
    free, none, some = ask(), ask(thinking_budget=0), ask(thinking_budget=5)
    messages = [answer["choices"][0]["message"] for answer in (free, none, some)]
    assert messages[1]["reasoning_content"] is None and messages[1]["content"]
    assert messages[0]["reasoning_content"].startswith(messages[2]["reasoning_content"])
    assert len(TOKENIZER.encode(messages[2]["reasoning_content"])) == 5
    assert none["usage"]["completion_tokens"] + 5 == some["usage"]["completion_tokens"]
    assert ask(thinking_budget=None)["choices"] == free["choices"]


@pytest.mark.parametrize("wrong", [-1, 1.5, "3", True, []])
def test_a_bad_budget_is_named(served: Served, wrong: Any) -> None:
    for stream in (False, True):
        refused = served.post("/v1/chat/completions", messages=USER, thinking_budget=wrong, stream=stream)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "thinking_budget"
    refused = served.post("/v1/completions", prompt="x", thinking_budget=3)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "thinking_budget"


def test_the_command_line_takes_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["run", "What is 17 + 25?", "--think", "--temperature", "0", "--json", "--threads", "1"]
    assert main(ask) == 0 and json.loads(capsys.readouterr().out)["reasoning"]
    assert main([*ask, "--thinking-budget", "0"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["reasoning"] == "" and answer["text"]
    for command in (["run", "hi"], ["chat"], ["serve"]):
        assert main([*command, "--thinking-budget", "-1"]) == 2
        assert "--thinking-budget: must be an integer from 0" in capsys.readouterr().err
    assert main(["run", "hi", "--raw", "--thinking-budget", "3"]) == 2
    assert "--thinking-budget has no meaning" in capsys.readouterr().err
