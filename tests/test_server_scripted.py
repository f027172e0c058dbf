"""Reasoning, tool calls and failures through the real app, with an engine that follows a script."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from test_server_harness import CALL, THOUGHT, USER, Served, each, scripted, wait_until

TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "strict": True, "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}}]


pytestmark = pytest.mark.usefixtures("script_server")


def ask(served: Served, **more: Any) -> Any:
    return served.client.chat.completions.create(**({"model": "tiny", "messages": USER} | more))


def test_a_tool_call() -> None:
    with scripted(THOUGHT + "I look it up.\n" + CALL + "\n" + CALL.replace("Oslo", "Rome")) as (served, _):
        choice = ask(served, tools=TOOLS).choices[0]
    calls = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look it up."
    assert choice.message.reasoning_content == "Let me see."
    assert [(call.type, call.function.name) for call in calls] == [("function", "weather")] * 2
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": c, "days": 3} for c in ("Oslo", "Rome")]
    assert calls[0].id.startswith("call_") and calls[0].id != calls[1].id


def test_a_tool_call_alone_has_null_content() -> None:
    with scripted(CALL) as (served, _):
        message = ask(served, tools=TOOLS).choices[0].message
    assert message.content is None and len(message.tool_calls) == 1


def test_tool_call_deltas() -> None:
    with scripted(CALL + "\n" + CALL, pause=0.01) as (served, _):
        chunks = [chunk.choices[0] for chunk in ask(served, tools=TOOLS, stream=True)]
    pieces = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert chunks[-1].finish_reason == "tool_calls"
    for index in (0, 1):
        first, *others = [piece for piece in pieces if piece.index == index]
        assert (first.type, first.function.name, first.function.arguments) == ("function", "weather", "") and first.id
        assert others and not any(piece.id or piece.type or piece.function.name for piece in others)
    for index in (0, 1):
        text = "".join(piece.function.arguments for piece in pieces if piece.index == index)
        assert json.loads(text) == {"city": "Oslo", "days": 3}


@each("stream", [False, True])
def test_one_call_where_parallel_ones_are_not_wanted(stream: bool) -> None:
    """The model goes no further than the first; what it said so far is one call and a whole answer."""
    with scripted("Once only.\n" + CALL + "\n" + CALL.replace("Oslo", "Rome")) as (served, _):
        asked = ask(served, tools=TOOLS, parallel_tool_calls=False, stream=stream)
        if stream:
            chunks = [chunk.choices[0] for chunk in asked]
            found = "".join(call.function.arguments for chunk in chunks for call in chunk.delta.tool_calls or [])
            finish = chunks[-1].finish_reason
        else:
            finish, message = asked.choices[0].finish_reason, asked.choices[0].message
            found, = [call.function.arguments for call in message.tool_calls]
            assert message.content == "Once only."
    assert finish == "tool_calls" and json.loads(found) == {"city": "Oslo", "days": 3}


def test_a_stream_says_what_the_whole_answer_says() -> None:
    text = (THOUGHT + "One.\n" + CALL + "\nTwo.\n" + CALL.replace("3", "many")
            + '\n<tool_call>\n{"name": "weather", "arguments": {"city": "\\u00c5s", "days": "4"}}\n</tool_call>\n'
            "Three.")
    with scripted(text) as (served, _):
        whole = ask(served, tools=TOOLS).choices[0].message
    with scripted(text) as (served, _):
        deltas = [chunk.choices[0].delta for chunk in ask(served, tools=TOOLS, stream=True)]
    pieces = [call for delta in deltas for call in delta.tool_calls or []]
    assert whole.content == "".join(delta.content or "" for delta in deltas) == "One.Two.Three."
    assert [call.function.arguments for call in whole.tool_calls] == [
        "".join(piece.function.arguments for piece in pieces if piece.index == index) for index in range(3)] == [
            '{"city": "Oslo", "days": 3}', '{"city": "Oslo", "days": "many"}', '{"city": "Ås", "days": 4}']


def test_the_client_library_assembles_a_streamed_call() -> None:
    with scripted(CALL) as (served, _), served.client.chat.completions.stream(
            model="tiny", messages=USER, tools=TOOLS) as stream:  # type: ignore[arg-type]
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls and json.loads(message.tool_calls[0].function.arguments)["city"] == "Oslo"


def test_tool_choice_none_neither_shows_tools_nor_reads_calls() -> None:
    with scripted(CALL) as (served, engine):
        refused = ask(served, tools=TOOLS, tool_choice="none").choices[0]
        ask(served)
        ask(served, tools=TOOLS)
    assert refused.finish_reason == "stop" and refused.message.content == CALL and refused.message.tool_calls is None
    without, bare, shown = (request.prompt for request in engine.seen)
    assert without == bare and len(shown) > len(bare)


@each("choice", ["any", 5, {"type": "function"}, {"type": "function", "function": {"name": "no"}}])
def test_other_tool_choices_are_refused(choice: Any) -> None:
    with scripted(CALL) as (served, _), pytest.raises(openai.BadRequestError) as refusal:
        ask(served, tools=TOOLS, tool_choice=choice)
    assert refusal.value.param == "tool_choice"


def test_reasoning_in_message_and_deltas() -> None:
    with scripted(THOUGHT + "Yes.") as (served, _):
        message = ask(served).choices[0].message
        deltas = [chunk.choices[0].delta for chunk in ask(served, stream=True)]
    assert (message.reasoning_content, message.content) == ("Let me see.", "Yes.")
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Let me see."
    assert "".join(delta.content or "" for delta in deltas) == "Yes."


def test_thinking_is_a_template_variable_only_if_asked_for() -> None:
    with scripted("</think>\n\nYes.") as (served, engine):
        for body in ({}, {"enable_thinking": True}, {"enable_thinking": False},
                     {"chat_template_kwargs": {"enable_thinking": True}}):
            ask(served, extra_body=body)
    default, on, off, same = (request.prompt for request in engine.seen)
    assert on != off and same == on and default in (on, off)


@each("stream", [False, True])
def test_preserved_history_repeats_what_was_generated(stream: bool) -> None:
    """The client sends no reasoning back, and arguments as its own library writes them."""
    first_words = [{"role": "user", "content": f"Hi, streamed: {stream}"}]  # that no other test says
    options = {"messages": first_words, "tools": TOOLS, "extra_body": {"enable_thinking": True, "history": "preserve"}}
    with scripted("Let me see.\n</think>\n\nI look.\n\n" + CALL) as (served, engine):
        if stream:
            list(ask(served, stream=True, **options))
        else:
            ask(served, **options)
        function = {"name": "weather", "arguments": '{"days":3.0,"city":"Oslo"}'}
        call = {"id": "1", "type": "function", "function": function}
        loop = [*first_words, {"role": "assistant", "content": "I look. ", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "1", "content": "rain"}]
        ask(served, **options | {"messages": loop})
        ask(served, **(options | {"messages": loop, "extra_body": {"enable_thinking": True, "history": "template"}}))
    first, preserved, faithful = (request.prompt for request in engine.seen[-3:])
    assert preserved[:len(first) + len(engine.script) - 1] == (*first, *engine.script[:-1])
    assert preserved[len(first) + len(engine.script) - 1] == engine.script[-1]
    assert len(faithful) < len(preserved) and faithful[:len(first) - 1] == first[:-1]


def test_unknown_history_is_refused() -> None:
    with scripted("x") as (served, _), pytest.raises(openai.BadRequestError, match="template, preserve") as refusal:
        ask(served, extra_body={"history": "all"})
    assert refusal.value.param == "history"


def test_no_think_tags_is_content() -> None:
    with scripted("Just text.") as (served, _):
        message = ask(served).choices[0].message
    assert message.content == "Just text." and message.reasoning_content is None


def test_stop_string_across_tokens_in_a_stream() -> None:
    with scripted("The answer is fortytwo and more") as (served, _):
        chunks = [chunk.choices[0] for chunk in ask(served, stop=["tytw"], stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "The answer is for"
    assert chunks[-1].finish_reason == "stop"


def test_stop_tokens_are_not_part_of_the_answer() -> None:
    with scripted("one two") as (served, engine):
        engine.script = engine.script[:-1]
        last = engine.script[-1]
        answer = ask(served, extra_body={"stop_token_ids": [last]}, logprobs=True)
    assert "one two".startswith(answer.choices[0].message.content) and answer.choices[0].message.content != "one two"
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens - 1


def test_streamed_logprobs_wait_for_text_but_none_is_lost() -> None:
    with scripted("a\U0001f642b") as (served, engine):
        chunks = [chunk.choices[0] for chunk in ask(served, stream=True, logprobs=True, stop=["zzz"])]
        scores = [score for chunk in chunks if chunk.logprobs for score in chunk.logprobs.content]
    assert [token for score in scores for token in score.bytes] == list("a\U0001f642b".encode())
    assert len(scores) == len(engine.script) - 1


def test_cached_tokens_and_choices_in_usage() -> None:
    with scripted("one two") as (served, engine):
        usage = ask(served, n=3).usage
    assert usage.prompt_tokens_details.cached_tokens == 5 and usage.prompt_tokens == len(engine.seen[0].prompt)
    assert usage.completion_tokens == 3 * len(engine.script)


def test_an_engine_error_is_a_500_or_an_error_event() -> None:
    with scripted("one two three four five", error="the logits are NaN") as (served, engine):
        with pytest.raises(openai.InternalServerError, match="the logits are NaN"):
            ask(served)
        with pytest.raises(openai.InternalServerError, match="the logits are NaN"):
            ask(served, n=3)
        with pytest.raises(openai.APIError, match="the logits are NaN"):
            list(ask(served, stream=True))
        text = served.post("/v1/chat/completions", messages=USER, stream=True).text
        assert text.rstrip().endswith('"type":"server_error","param":null,"code":null}}') and "[DONE]" not in text
        engine.error = None
        assert ask(served).choices[0].message.content == "one two three four five"
        served.wait_idle()
        assert not engine.running and served.health()[0] == 200


def test_a_stream_that_cannot_be_served_ends_what_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise LookupError("mine")

    with scripted(None) as (served, engine):
        monkeypatch.setattr("deltic.server.routing.quote", fail)
        assert served.post("/v1/chat/completions", messages=USER, stream=True, cache_prompt=True).status_code == 500
        wait_until(lambda: not engine.running)


def test_a_long_silence_is_filled_with_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltic.server.http.KEEP_ALIVE", 0.05)
    with scripted("ab", pause=0.3) as (served, _):
        text = served.post("/v1/chat/completions", messages=USER, stream=True).text
        assert "".join(chunk.choices[0].delta.content or "" for chunk in ask(served, stream=True)) == "ab"
    assert text.startswith(": keep-alive\n\n") and text.endswith("data: [DONE]\n\n")


def test_a_silence_in_which_tokens_come_is_filled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltic.server.http.KEEP_ALIVE", 0.05)
    with scripted(THOUGHT + "ab", pause=0.02) as (served, _):
        text = served.post("/v1/chat/completions", messages=USER, stream=True, include_reasoning=False).text
    assert text.count(": keep-alive\n\n") > 1 and "reasoning" not in text and text.endswith("data: [DONE]\n\n")
