"""A call that max_tokens cuts stays open, on every wire, so that it cannot be taken for a whole one."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from pydantic import BaseModel
from test_server_harness import USER, Served, scripted, tiny

CONTENT = "line one\n\"two\" and more words"
WRITTEN = ("<tool_call>\n<function=write>\n<parameter=path>\na.txt\n</parameter>\n<parameter=lines>\n12\n</parameter>\n"
           f"<parameter=content>\n{CONTENT}\n</parameter>\n</function>\n</tool_call>")
WHOLE = json.dumps({"path": "a.txt", "lines": 12, "content": CONTENT})
SCHEMA = {"type": "object", "required": ["path", "lines", "content"], "properties": {
    "path": {"type": "string"}, "lines": {"type": "integer"}, "content": {"type": "string"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "write", "parameters": SCHEMA}}]


pytestmark = pytest.mark.usefixtures("script_server")


def tokens_until(text: str) -> int:
    """How many tokens spell the answer as far as this."""
    return len(tiny().chat_processor.tokenizer.encode(WRITTEN[:WRITTEN.index(text) + len(text)]))


CUT = tokens_until("line one")
ALL = len(tiny().chat_processor.tokenizer.encode(WRITTEN))


def streamed(served: Served, tokens: int) -> Any:
    state = ChatCompletionStreamState()
    for chunk in served.client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS, max_tokens=tokens,
                                                       stream=True):
        state.handle_chunk(chunk)
    return state.current_completion_snapshot.choices[0]


@pytest.mark.parametrize("form", ["qwen", "json"])
def test_arguments_are_a_beginning_of_the_whole_ones(form: str) -> None:
    text = WRITTEN if form == "qwen" else f'<tool_call>\n{{"name": "write", "arguments": {WHOLE}}}\n</tool_call>'
    every = len(tiny().chat_processor.tokenizer.encode(text))
    opened = 0
    with scripted(text) as (served, _):
        before = ""
        for tokens in range(1, every + 1):
            choice = served.client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS,
                                                           max_tokens=tokens).choices[0]
            arguments = (choice.message.tool_calls or [None])[0]
            arguments = arguments.function.arguments if arguments else ""
            assert choice.finish_reason == "length"
            assert WHOLE.startswith(arguments) and arguments.startswith(before)
            before, opened = arguments, opened + (0 < len(arguments) < len(WHOLE))
        assert before == WHOLE and opened > 5
        assert served.client.chat.completions.create(model="tiny", messages=USER,
                                                     tools=TOOLS).choices[0].finish_reason == "tool_calls"


def test_chat_whole_and_streamed() -> None:
    with scripted(WRITTEN) as (served, _):
        choice = served.client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS,
                                                       max_tokens=CUT).choices[0]
        arguments = choice.message.tool_calls[0].function.arguments
        assert arguments == WHOLE[:WHOLE.index(" one") + 4] and choice.finish_reason == "length"
        pieces = streamed(served, CUT)
        assert pieces.finish_reason == "length" and pieces.message.tool_calls[0].function.arguments == arguments
        with pytest.raises(ValueError):
            json.loads(arguments)


class Write(BaseModel):
    path: str
    lines: int
    content: str


def test_the_client_library_raises_rather_than_parse_it() -> None:
    with scripted(WRITTEN) as (served, _), pytest.raises(openai.LengthFinishReasonError):
        served.client.chat.completions.parse(model="tiny", messages=USER, max_tokens=CUT,
                                             tools=[openai.pydantic_function_tool(Write, name="write")])


def test_responses_are_incomplete() -> None:
    tools: Any = [{"type": "function", "name": "write", "parameters": SCHEMA}]
    with scripted(WRITTEN) as (served, _):
        whole = served.client.responses.create(model="tiny", input="Hi", tools=tools, max_output_tokens=CUT)
        with served.client.responses.stream(model="tiny", input="Hi", tools=tools, max_output_tokens=CUT) as stream:
            events = list(stream)
        for response in (whole, events[-1].response):
            assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
            item, = response.output
            assert item.status == "incomplete" and item.arguments == WHOLE[:WHOLE.index(" one") + 4]


def test_a_custom_tool_gets_the_text_so_far() -> None:
    text = ("<tool_call>\n<function=note>\n<parameter=input>\nsome words of a note\n</parameter>\n</function>\n"
            "</tool_call>")
    with scripted(text) as (served, _):
        item, = served.client.responses.create(model="tiny", input="Hi", tools=[{"type": "custom", "name": "note"}],
                                               max_output_tokens=16).output
        assert item.status == "incomplete" and "some words of a note".startswith(item.input) and len(item.input) > 3


def test_anthropic_has_the_arguments_that_are_whole() -> None:
    tools: Any = [{"name": "write", "input_schema": SCHEMA}]
    asked: Any = {"model": "tiny", "messages": USER, "tools": tools, "max_tokens": CUT}
    with scripted(WRITTEN) as (served, _), anthropic.Anthropic(base_url=served.url, api_key="x") as client:
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            pieces = [event.delta.partial_json for event in stream
                      if event.type == "content_block_delta" and event.delta.type == "input_json_delta"]
            final = stream.get_final_message()
        for message in (whole, final):
            assert message.stop_reason == "max_tokens"
            assert message.content[0].input == {"path": "a.txt", "lines": 12}  # what is missing fails to validate
        assert "".join(pieces) == WHOLE[:WHOLE.index(" one") + 4]


def test_a_cut_call_can_be_sent_back() -> None:
    with scripted(WRITTEN) as (served, _):
        message = served.client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS,
                                                        max_tokens=CUT).choices[0].message
        more: Any = [*USER, message.model_dump(), {"role": "tool", "tool_call_id": message.tool_calls[0].id,
                                                   "content": "the arguments are no JSON"}]
        assert served.client.chat.completions.create(model="tiny", messages=more, tools=TOOLS, max_tokens=1).choices


def test_what_the_model_ended_itself_is_closed() -> None:
    """A tag that is missing is no cut."""
    with scripted(WRITTEN[:WRITTEN.index("\n</parameter>\n</function>")]) as (served, _):
        choice = served.client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls[0].function.arguments == WHOLE
