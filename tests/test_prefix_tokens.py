"""Answers that begin with given tokens (`prefix_token_ids`), and token ids in logprobs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from test_server_harness import CALL, THOUGHT, USER, Scripted, Served, scripted, serving, tiny

pytestmark = pytest.mark.usefixtures("script_server")

CHAT = "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}}]
SCORED = {"logprobs": True, "top_logprobs": 3, "return_tokens_as_token_ids": True}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(tiny()) as running:
        yield running


def encode(text: str) -> list[int]:
    return tiny().chat_processor.tokenizer.encode(text)


def ask(served: Served, messages: Any = QUESTION, **body: Any) -> dict[str, Any]:
    answer = served.post(CHAT, **{"messages": messages, "temperature": 0, "max_tokens": 40, **body})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def ids_of(answer: dict[str, Any]) -> list[int]:
    scored = answer["choices"][0]["logprobs"]["content"]
    return [int(one["token"].removeprefix("token_id:")) for one in scored]


def streamed(served: Served, messages: Any = QUESTION, **body: Any) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """The text of a streamed answer by region, and its scores."""
    text = served.post(CHAT, messages=messages, temperature=0, stream=True, **body).text
    found, scores = {"content": "", "reasoning_content": ""}, []
    for line in text.splitlines():
        if line.startswith("data: {"):
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            for name in found:
                found[name] += choice["delta"].get(name) or ""
            scores += (choice["logprobs"] or {}).get("content", [])
    return found, scores


def test_logprobs_name_tokens_by_ids(served: Served) -> None:
    answer = ask(served, **SCORED)
    tokenizer, scored = tiny().chat_processor.tokenizer, answer["choices"][0]["logprobs"]["content"]
    assert tokenizer.decode(ids_of(answer)) == answer["choices"][0]["message"]["content"]
    for one in scored:
        tops = one["top_logprobs"]
        assert tops[0]["token"] == one["token"] and len(tops) == 3, "greedy takes the most probable token"
        for each in (one, *tops):
            id = int(each["token"].removeprefix("token_id:"))
            assert bytes(each["bytes"]) == tokenizer.token_bytes(id)
    named = ask(served, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [bytes(one["bytes"]).decode() for one in scored] == [one["token"] for one in named]
    raw = served.post("/v1/completions", prompt="Hi", max_tokens=2, logprobs=2, return_tokens_as_token_ids=True).json()
    logprobs = raw["choices"][0]["logprobs"]
    names = [*logprobs["tokens"], *logprobs["top_logprobs"][0]]
    assert len(names) >= 4 and all(name.startswith("token_id:") for name in names)


def test_an_answer_continues_its_own_tokens(served: Served) -> None:
    """From every token on the rest is the same, also in a stream, and only these tokens are prefilled."""
    first = ask(served, **SCORED)
    message, tokens, prompt = first["choices"][0]["message"], ids_of(first), first["usage"]["prompt_tokens"]
    assert len(tokens) > 5
    for cut in range(1, len(tokens) + 1):
        again = ask(served, prefix_token_ids=tokens[:cut], **SCORED)
        assert again["choices"][0]["message"] == message
        assert ids_of(again) == tokens[cut:] and again["usage"]["prompt_tokens"] == prompt + cut
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= prompt - 1
    drawn = {"temperature": 3.0, "seed": 5, "max_tokens": 12, **SCORED}
    sampled = ids_of(ask(served, **drawn))
    assert sampled != tokens
    for cut in (1, 5, 11):
        assert ids_of(ask(served, **{**drawn, "max_tokens": 12 - cut}, prefix_token_ids=sampled[:cut])) == sampled[cut:]
    text, scores = streamed(served, prefix_token_ids=tokens[:3], **SCORED)
    assert text["content"] == message["content"] and len(scores) == len(tokens) - 3


def test_another_token_makes_another_answer_that_the_next_turn_continues(served: Served) -> None:
    """The next turn resumes at the end of the answer: all of its tokens are known, also the given ones."""
    first = ask(served, **SCORED)
    scored = first["choices"][0]["logprobs"]["content"]
    for place in (1, 3):
        other = int(scored[place]["top_logprobs"][1]["token"].removeprefix("token_id:"))
        branch = ask(served, prefix_token_ids=[*ids_of(first)[:place], other], max_tokens=8, seed=place)
        message, usage = branch["choices"][0]["message"], branch["usage"]
        begun = tiny().chat_processor.tokenizer.decode([*ids_of(first)[:place], other])
        assert message["content"].startswith(begun.strip()) and message != first["choices"][0]["message"]
        further = [*QUESTION, {"role": "assistant", "content": message["content"]}, *USER]
        cached = ask(served, further)["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= usage["prompt_tokens"] + usage["completion_tokens"] - 1


def test_tokens_are_exact() -> None:
    """Tokens that no tokenizer writes for their text stay as they are, in the request and in the next turn."""
    letters = [token for letter in "Paris" for token in encode(letter)]
    assert letters != encode("Paris")
    with scripted(" it is.") as (served, engine):
        answer = ask(served, prefix_token_ids=letters)
        content = answer["choices"][0]["message"]["content"]
        assert content == "Paris it is."
        prompt = engine.seen[-1].ids
        assert list(prompt[-len(letters):]) == letters
        ask(served, [*QUESTION, {"role": "assistant", "content": content}, *USER])
        assert engine.seen[-1].ids[:len(prompt)] == prompt
        fork = ask(served, USER, fork_from=answer["id"], prefix_token_ids=letters)
        assert engine.seen[-1].ids[:len(prompt)] == prompt and list(engine.seen[-1].ids[-len(letters):]) == letters
        assert fork["choices"][0]["message"]["content"] == content


@pytest.mark.parametrize("streams", [False, True])
def test_thinking_goes_on(streams: bool) -> None:
    whole = encode(THOUGHT + "It is 4.")
    tokenizer = tiny().chat_processor.tokenizer
    for cut in range(1, len(whole)):
        with scripted(tokenizer.decode(whole[cut:], skip_special=False)) as (served, engine):
            engine.script = [*whole[cut:], tokenizer.eos_id]
            if streams:
                found, _ = streamed(served, prefix_token_ids=whole[:cut])
            else:
                found = ask(served, prefix_token_ids=whole[:cut])["choices"][0]["message"]
            assert (found["reasoning_content"], found["content"]) == ("Let me see.", "It is 4."), cut
    with scripted("") as (served, engine):
        engine.script = [*whole[4:], tokenizer.eos_id]
        shown = ask(served, prefix_token_ids=whole[:4], include_reasoning=False, **SCORED)["choices"][0]
        assert shown["message"]["content"] == "It is 4." and shown["message"]["reasoning_content"] is None
        scores = shown["logprobs"]["content"]
        assert b"".join(bytes(one["bytes"]) for one in scores).decode().strip() == "It is 4."


def test_the_model_goes_on_thinking(served: Served) -> None:
    """Within the think block, at its end and after it; the next turn resumes at the end, thinking included."""
    first = ask(served, enable_thinking=True, max_tokens=80, **SCORED)
    message, tokens = first["choices"][0]["message"], ids_of(first)
    assert message["reasoning_content"] and message["content"]
    for cut in range(1, len(tokens), 3):
        again = ask(served, enable_thinking=True, max_tokens=80, prefix_token_ids=tokens[:cut])
        assert again["choices"][0]["message"] == message, cut
    usage = again["usage"]
    said = {name: message[name] for name in ("role", "content", "reasoning_content")}
    cached = ask(served, [*QUESTION, said, *USER])["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= usage["prompt_tokens"] + usage["completion_tokens"] - 1


def test_a_tool_call_goes_on() -> None:
    whole = encode("I look.\n" + CALL)
    for cut in range(1, len(whole), 5):
        with scripted("") as (served, engine):
            engine.script = [*whole[cut:], tiny().chat_processor.tokenizer.eos_id]
            choice = ask(served, prefix_token_ids=whole[:cut], tools=TOOLS)["choices"][0]
            call = choice["message"]["tool_calls"][0]["function"]
            assert choice["message"]["content"] == "I look." and choice["finish_reason"] == "tool_calls"
            assert call["name"] == "weather" and json.loads(call["arguments"]) == {"city": "Oslo", "days": 3}


def test_choices_begin_alike_and_stop_strings_count_the_given_text() -> None:
    with scripted("cd") as (served, _):
        choices = ask(served, prefix_token_ids=encode("ab"), n=3)["choices"]
        assert [choice["message"]["content"] for choice in choices] == ["abcd"] * 3
        stopped = ask(served, prefix_token_ids=encode("ab"), stop=["bc"])["choices"][0]
        assert stopped["message"]["content"] == "a" and stopped["finish_reason"] == "stop"


def test_an_end_token_ends_the_answer(served: Served) -> None:
    end = tiny().chat_processor.tokenizer.eos_id
    tokens = encode("Paris")
    answer = ask(served, prefix_token_ids=[*tokens, end])
    assert answer["choices"][0]["message"]["content"] == "Paris" and answer["usage"]["completion_tokens"] == 0
    found, _ = streamed(served, prefix_token_ids=[*tokens, end])
    assert found["content"] == "Paris"
    further = [*QUESTION, {"role": "assistant", "content": "Paris"}, *USER]
    usage = ask(served, further)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= answer["usage"]["prompt_tokens"] - 1


def test_a_thinking_budget_counts_from_there() -> None:
    whole = encode(THOUGHT)
    with scripted(None) as (served, engine):
        ask(served, prefix_token_ids=whole[:4], thinking_budget=2, max_tokens=3)
        guide = engine.seen[-1].guide
        assert guide
        forced = guide()
        assert forced.forced() is None, "the prefix is not counted"


def test_prefixes_that_are_refused(served: Served) -> None:
    """Hostile ones among ordinary ones; each names its field."""
    size, control = tiny().runtime.config.vocab_size, tiny().chat_processor.tokenizer.token_to_id("<|im_start|>")
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ([-1], {}, "must be a token id"), ([5, size], {}, "prefix_token_ids[1] must be a token id"),
        ([1 << 70], {}, "must be"), ([True], {}, "valid integer"), (["5"], {}, "valid integer"),
        ([5.5], {}, "valid integer"), ("text", {}, "valid list"), ({"0": 5}, {}, "valid list"),
        ([[5]], {}, "valid integer"), ([5] * 3000, {}, "context"), ([5] * 90_000, {}, "context"),
        ([control, 5], {}, "control token"), ([5, control], {}, "control token"),
        ([5], {"continue_final_message": True, "messages": [*USER, {"role": "assistant", "content": "A"}]},
         "leave out continue_final_message"),
        ([5], {"add_generation_prompt": False}, "leave out continue_final_message"),
        ([5], {"response_format": {"type": "json_object"}}, "cannot be combined"),
        ([5], {"tools": TOOLS, "tool_choice": "required"}, "cannot be combined")]
    for tokens, more, words in cases:
        answer = served.post(CHAT, **{"messages": USER, "max_tokens": 2, **more, "prefix_token_ids": tokens})
        error = answer.json()["error"]
        assert answer.status_code == 400 and words in error["message"], (tokens, more, error)
        assert error["param"].startswith("prefix_token_ids"), error
        assert ask(served, max_tokens=1)["choices"], "ordinary requests go on"
    assert ask(served, prefix_token_ids=[], max_tokens=1)["choices"] and ask(served, prefix_token_ids=None)["choices"]


def test_the_event_loop_reads_no_long_prefix() -> None:
    """A prefix of a thousand tokens is read where the prompt is prepared; its text comes with the first token."""
    engine = Scripted("end")
    with serving(engine.model()) as served, served.lateness() as late:
        for _ in range(5):
            answer = ask(served, prefix_token_ids=encode("word " * 400), max_tokens=2)
            assert answer["choices"][0]["message"]["content"].startswith("word word")
    assert max(late) < 0.5
