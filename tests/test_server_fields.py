"""Fields of other servers, ends of prompts, models and tokens: whatever clients send beside the common."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from anthropic import Anthropic
from test_server_harness import CALL as WEATHER_CALL
from test_server_harness import THOUGHT, USER, Scripted, Served, each, scripted, serving, tiny

from deltic import __version__
from deltic.chat.markers import closes_thinking
from deltic.chat.processor import ChatProcessor
from deltic.params import SamplingParams
from deltic.server.anthropic import MessagesRequest
from deltic.server.embeddings import EmbeddingsRequest
from deltic.server.fields import unknown_field
from deltic.server.openai_schema import ChatRequest
from deltic.server.responses_schema import ResponsesRequest
from deltic.server.routing import IGNORED_HEADER

CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES = "/v1/responses"
pytestmark = pytest.mark.usefixtures("script_server")


@pytest.fixture(scope="module")
def lenient() -> Iterator[Served]:
    with serving(Scripted("x").model(), lenient=True) as running:
        yield running


@each(("field", "value"), [
    ("cache_prompt", True), ("add_special_tokens", False), ("skip_special_tokens", True), ("keep_alive", "5m"),
    ("provider", {"order": ["x"]}), ("transforms", []), ("id_slot", -1), ("repeat_last_n", 64), ("resendFiles", True),
    ("promptPrefix", "x"), ("timings_per_token", True), ("separate_reasoning", True), ("priority", 0),
    ("mirostat_tau", 5.0), ("samplers", ["top_k"]), ("drop_params", True), ("length_penalty", 1.0), ("do_sample", True),
])
@each("stream", [False, True])
def test_fields_of_other_servers_are_ignored_and_named(field: str, value: Any, stream: bool) -> None:
    with scripted("x") as (served, _):
        response = served.post(CHAT, messages=USER, stream=stream, **{field: value})
        assert response.status_code == 200 and response.headers[IGNORED_HEADER] == field
        plain = served.post(CHAT, messages=USER, stream=stream, **{field: None})
        assert plain.status_code == 200 and IGNORED_HEADER not in plain.headers


def test_log_names_an_ignored_field_once(caplog: pytest.LogCaptureFixture) -> None:
    with scripted("x") as (served, _), caplog.at_level(logging.WARNING, "deltic"):
        for _ in range(2):
            assert served.post(CHAT, messages=USER, num_gpu=1).status_code == 200
    assert [record.getMessage() for record in caplog.records].count(
        "a client sends the field 'num_gpu', which has no effect here") == 1


@each(("path", "fields", "sampling"), [
    (CHAT, {"max_tokens": -1}, {"max_tokens": None}), (CHAT, {"max_completion_tokens": -1}, {"max_tokens": None}),
    (TEXT, {"n_predict": -1}, {"max_tokens": None}), (TEXT, {"n_predict": 7}, {"max_tokens": 7}),
    (CHAT, {"top_k": -1}, {"top_k": 0}), (MESSAGES, {"top_k": -1, "max_tokens": 5}, {"top_k": 0}),
    (CHAT, {"num_predict": 7}, {"max_tokens": 7}),
    (CHAT, {"max_new_tokens": 5, "max_tokens": 5}, {"max_tokens": 5}),
    (CHAT, {"do_sample": False}, {"temperature": 0.0}),
    (CHAT, {"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}), (CHAT, {"min_new_tokens": 2}, {"min_tokens": 2}),
])
def test_aliases_of_fields(path: str, fields: dict[str, Any], sampling: dict[str, Any]) -> None:
    asked = {"prompt": "x"} if path == TEXT else {"messages": USER}
    with scripted("a b c d e f g h i") as (served, engine):
        response = served.post(path, **asked, **fields)
    assert response.status_code == 200 and IGNORED_HEADER not in response.headers, response.text
    assert {name: getattr(engine.seen[-1].output, name) for name in sampling} == sampling


@each(("fields", "ignored"), [
    ({"max_new_tokens": 7, "max_tokens": 5}, "max_new_tokens"), ({"n_predict": 5, "num_predict": 7}, "num_predict"),
    ({"max_tokens": 5, "do_sample": False, "temperature": 0.5}, "do_sample"),
    ({"max_tokens": 5, "reasoning": {"effort": "high", "enabled": True}, "enable_thinking": False}, "reasoning"),
])
def test_own_field_overrides_an_alias_with_another_value(fields: dict[str, Any], ignored: str) -> None:
    with scripted("a b c d e f g h i") as (served, engine):
        response = served.post(CHAT, messages=USER, **fields)
    assert response.status_code == 200 and response.headers[IGNORED_HEADER] == ignored
    assert engine.seen[-1].output.max_tokens == 5


def test_budget_tokens_within_thinking() -> None:
    thinking = {"type": "enabled", "budget_tokens": 2}
    with serving(tiny()) as served:
        answers = [served.post(CHAT, messages=USER, temperature=0, max_tokens=60, **fields).json()["choices"]
                   for fields in ({"thinking": thinking}, {"enable_thinking": True, "thinking_budget": 2})]
        wrong = served.post(CHAT, messages=USER, thinking={**thinking, "budget_tokens": -1})
    assert answers[0] == answers[1] and wrong.status_code == 400


CHOOSING: dict[str, Any] = {
    "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": 7,
    "stop_token_ids": [5], "min_tokens": 2, "ignore_eos": True, "max_repeat": 3, "logit_bias": {"7": -5}}
BAD_CHOOSING: list[dict[str, Any]] = [
    {"min_p": 2}, {"repetition_penalty": 0}, {"presence_penalty": 3}, {"frequency_penalty": "1"}, {"min_tokens": -1},
    {"logit_bias": {"x": 1}}, {"logit_bias": {str(token): 1 for token in range(301)}}, {"max_repeat": -1},
    {"stop_token_ids": ["x"]}, {"chat_template_kwargs": []}, {"structured_outputs": {"regex": 5}},
    {"structured_outputs": {"regex": "a", "choice": ["a"]}}]


def asked(path: str) -> dict[str, Any]:
    return {"input": USER} if path == RESPONSES else {"messages": USER, "max_tokens": 9}


@each("path", [RESPONSES, MESSAGES])
def test_sampling_fields_are_the_same_in_all_apis(path: str) -> None:
    with scripted("a b c") as (served, engine):
        for each in (CHAT, path):
            assert served.post(each, **asked(each), **CHOOSING, speculate=False).status_code == 200
        chat, other = engine.seen
        for name in ("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
                     "stop_token_ids", "min_tokens", "ignore_eos", "max_repeat", "logit_bias"):
            assert getattr(other.output, name) == getattr(chat.output, name) != getattr(SamplingParams(), name)
        assert other.speculate is chat.speculate is False
        for wrong in BAD_CHOOSING:
            said, expected = (served.post(each, **asked(each), **wrong) for each in (path, CHAT))
            assert said.status_code == expected.status_code == 400
            assert said.json()["error"]["message"] == expected.json()["error"]["message"]


@each("path", [RESPONSES, MESSAGES])
def test_template_variables_and_formats_are_the_same_in_all_apis(path: str) -> None:
    variables = {"chat_template_kwargs": {"enable_thinking": True}}
    with scripted("a") as (served, engine):
        for each in (CHAT, path):
            assert served.post(each, **asked(each), **variables).status_code == 200
            assert served.post(each, **asked(each), structured_outputs={"choice": ["a"]}).status_code == 200
        thinking, formed, other_thinking, other_formed = engine.seen
        assert other_thinking.prompt == thinking.prompt != formed.prompt == other_formed.prompt
        assert not thinking.constraint and formed.constraint and other_formed.constraint
        counting = "/v1/messages/count_tokens" if path == MESSAGES else "/v1/responses/input_tokens"
        sent = {name: value for name, value in asked(path).items() if name != "max_tokens"}
        assert served.post(counting, **sent, **variables).json()["input_tokens"] == len(thinking.prompt)


@each(("fields", "same"), [
    ({"think": True}, {"enable_thinking": True}), ({"think": "high"}, {"reasoning_effort": "high"}),
    ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}), ({"reasoning": {"enabled": True}},
                                                                       {"enable_thinking": True}),
    ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
])
def test_fields_that_switch_thinking(fields: dict[str, Any], same: dict[str, Any]) -> None:
    with scripted("x") as (served, engine):
        for asked in (fields, same):
            assert served.post(CHAT, messages=USER, **asked).status_code == 200
    assert engine.seen[-1].prompt == engine.seen[-2].prompt


SAYS_SO = [(CHAT, {"enable_thinking": True}, True), (CHAT, {"enable_thinking": False}, False),
           (CHAT, {"chat_template_kwargs": {"enable_thinking": True}}, True),
           (CHAT, {"reasoning_effort": "high"}, True), (CHAT, {"reasoning_effort": "none"}, False),
           (RESPONSES, {"reasoning": {"effort": "high"}}, True),
           (RESPONSES, {"enable_thinking": False}, False), (MESSAGES, {"max_tokens": 5}, False),
           (MESSAGES, {"max_tokens": 5, "thinking": {"type": "adaptive"}}, True)]


@each("default", [None, True, False])
def test_thinking_default_of_the_server(default: bool | None) -> None:
    engine = Scripted("x")
    model = engine.model()
    model.chat_processor = ChatProcessor(tiny().chat_processor.tokenizer, thinking=default)
    with serving(model) as served:
        def thinks(path: str, **fields: Any) -> bool:
            assert served.post(path, **{"input" if path == RESPONSES else "messages": USER}, **fields).is_success
            return not closes_thinking(engine.seen[-1].prompt, model.chat_processor.tokenizer)

        assert thinks(CHAT) == thinks(CHAT, enable_thinking=None) == thinks(RESPONSES) == bool(default)
        assert [thinks(path, **fields) for path, fields, _ in SAYS_SO] == [wanted for *_, wanted in SAYS_SO]


def test_pinned_prefix_matches_prompts_with_a_thinking_default() -> None:
    template = "{{ enable_thinking }} {% for message in messages %}{{ message.content }}\n{% endfor %}"
    processor = ChatProcessor(tiny().chat_processor.tokenizer, template, thinking=False)
    system = [{"role": "system", "content": "Be kind."}]
    pinned = processor.system_prefix(system)
    assert pinned and processor.chat([*system, *USER]).request.ids[:len(pinned)] == pinned


@each("fields", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}])
def test_answer_without_reasoning(fields: dict[str, Any]) -> None:
    with scripted(THOUGHT + "Yes.") as (served, _):
        whole = served.post(CHAT, messages=USER, **fields).json()
        text = served.post(CHAT, messages=USER, stream=True, **fields).text
    assert whole["choices"][0]["message"] == {
        "role": "assistant", "content": "Yes.", "refusal": None, "reasoning_content": None}
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0 and "see" not in text


@each("fields", [{}, {"include_reasoning": False}])
@each("stream", [False, True])
def test_logprobs_without_reasoning(fields: dict[str, Any], stream: bool) -> None:
    with scripted(THOUGHT + "Yes.") as (served, _):
        answer = served.client.chat.completions.create(
            model="tiny", messages=USER, n=2, logprobs=True, stream=stream, extra_body=fields)  # type: ignore[call-overload]
        spelled = {0: "", 1: ""}
        for choice in [each for part in answer for each in part.choices] if stream else answer.choices:
            scores = choice.logprobs.content if choice.logprobs else []
            spelled[choice.index] += "".join(score.token for score in scores)
    for text in spelled.values():
        assert text.strip() == "Yes." if fields else "see" in text and text.endswith("Yes.")


def test_more_tokens_than_the_context_holds_are_taken_as_many_as_it_holds() -> None:
    with scripted("x") as (served, _):
        assert served.post(CHAT, messages=USER, max_tokens=1 << 20).status_code == 200


def test_thoughts_are_counted() -> None:
    thought = tiny().chat_processor.tokenizer.encode("\nLet me see.\n")
    with scripted(THOUGHT + "Yes.") as (served, _):
        usage = served.post(CHAT, messages=USER, n=2).json()["usage"]
        none = served.post(TEXT, prompt="x").json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 2 * len(thought)
    assert none["completion_tokens_details"]["reasoning_tokens"] == 0


@each(("field", "value"), [
    ("use_beam_search", True), ("lora_path", "x"), ("allowed_token_ids", [1]),
    ("bad_words", ["x"]), ("chat_template", "{{ 1 }}"), ("include_stop_str_in_output", True),
    ("logits_processors", ["x"]), ("watermark", True), ("mirostat", 2),
    ("mirostat_mode", 1), ("dry_multiplier", 0.8), ("xtc_probability", 0.5), ("dynatemp_range", 0.5),
    ("typical_p", 0.9), ("top_a", 0.2), ("tfs_z", 0.95), ("top_n_sigma", 1.5), ("no_repeat_ngram_size", 3),
    ("min_keep", 5), ("mirostat", "off"), ("typical_p", []),
])
def test_unsupported_fields_are_refused(field: str, value: Any) -> None:
    with scripted("x") as (served, _):
        error = served.post(CHAT, messages=USER, **{field: value}).json()["error"]
        others = [served.post(path, **asked(path), **{field: value}) for path in (RESPONSES, MESSAGES)]
    assert (error["type"], error["param"]) == ("invalid_request_error", field)
    assert {other.json()["error"]["message"] for other in others} == {error["message"]}


@each("fields", [
    {"mirostat": 0, "mirostat_mode": 0, "dry_multiplier": 0, "xtc_probability": 0.0, "dynatemp_range": 0, "top_a": 0.0,
     "typical_p": 1.0, "typ_p": 1, "tfs_z": 1, "tfs": 1.0, "top_n_sigma": -1, "min_keep": 0, "watermark": False},
    {"top_n_sigma": 0, "mirostat": None, "typical_p": None, "no_repeat_ngram_size": 0, "guidance_scale": 1},
])
def test_unsupported_fields_with_neutral_values_are_accepted(fields: dict[str, Any]) -> None:
    with scripted("x") as (served, _):
        response = served.post(CHAT, messages=USER, **fields)
    assert response.status_code == 200 and IGNORED_HEADER not in response.headers


def test_lenient_server_ignores_and_names_unsupported_fields(lenient: Served) -> None:
    fields = {"mirostat": 2, "xtc_probability": 0.5, "bad_words": ["x"], "top_a": 0}
    response = lenient.post(CHAT, messages=USER, **fields)
    assert response.status_code == 200 and response.headers[IGNORED_HEADER] == "mirostat, xtc_probability, bad_words"


def test_unknown_fields_are_named_and_misspelt_ones_refused(lenient: Served) -> None:
    body = {"messages": USER, "max_tokns": 5, "stream_options": {"often": 1}}
    with scripted("x") as (served, _):
        for path, refused in ((CHAT, {"max_tokns": 5}), (RESPONSES, {"response_format": {"type": "json_object"}}),
                              (CHAT, {"stream_options": {"include_usag": True}}),
                              (CHAT, {f"field_{index}": 1 for index in range(5000)})):
            assert served.post(path, **asked(path), **refused).status_code == 400
        response = served.post(CHAT, messages=USER, wanted=1, stream_options={"often": 1})
        assert response.headers[IGNORED_HEADER] == "wanted, stream_options.often" and response.status_code == 200
    response = lenient.post(CHAT, **body, **{"\u00fc\n": 1})
    assert response.status_code == 200
    assert response.headers[IGNORED_HEADER] == "max_tokns, %C3%BC%0A, stream_options.often"
    many = lenient.post(MESSAGES, messages=USER, max_tokens=5, **{f"field_{index}": 1 for index in range(5000)})
    assert many.status_code == 200 and len(many.headers[IGNORED_HEADER]) < 1000


@each(("path", "field", "meant"), [
    (RESPONSES, "max_tokens", "max_output_tokens"), (RESPONSES, "max_completion_tokens", "max_output_tokens"),
    (RESPONSES, "reasoning_effort", "reasoning"), (RESPONSES, "inputs", "input"), (RESPONSES, "nipt", None),
    (RESPONSES, "minput", "input"), (RESPONSES, "output", None), (CHAT, "max_tokns", "max_tokens"),
    (CHAT, "frequncy_penalty", "frequency_penalty"), (CHAT, "mesages", "messages"), (CHAT, "maxtokens", "max_tokens"),
    (CHAT, "sampler", None), (CHAT, "x", None), (CHAT, "_", None), (MESSAGES, "stop_sequence", "stop_sequences"),
    ("/v1/embeddings", "dimension", "dimensions"),
])
def test_suggestions_for_unknown_fields(path: str, field: str, meant: str | None) -> None:
    schemas = {CHAT: ChatRequest, RESPONSES: ResponsesRequest, MESSAGES: MessagesRequest}
    said = str(unknown_field("", field, schemas.get(path, EmbeddingsRequest).model_fields))
    assert said == f"unknown field '{field}'" + (f": do you mean '{meant}'?" if meant else "")


CALL: dict[str, Any] = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ASSISTANT: dict[str, Any] = {"role": "assistant", "content": "x"}
ASKED: dict[str, dict[str, Any]] = {CHAT: {}, RESPONSES: {}, MESSAGES: {"max_tokens": 5}}
WITHIN: list[tuple[str, str, Any]] = [  # path, place of the object that gets another field, and what stands there
    (CHAT, "messages[0]", [{"role": "user", "content": "x"}]),
    (CHAT, "messages[0].content[0]", [{"role": "user", "content": [{"type": "text", "text": "x"}]}]),
    (CHAT, "messages[1].tool_calls[0]", [*USER, {**ASSISTANT, "tool_calls": [CALL]}, *USER]),
    (CHAT, "messages[1].tool_calls[0].function", [*USER, {**ASSISTANT, "tool_calls": [CALL]}, *USER]),
    (RESPONSES, "input[0]", [{"role": "user", "content": "x"}]),
    (RESPONSES, "input[0].content[0]", [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}]),
    (RESPONSES, "input[1]", [*USER, {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}]),
    (RESPONSES, "input[1]", [*USER, {"type": "function_call_output", "call_id": "a", "output": "x"}]),
    (RESPONSES, "tools[0]", [{"type": "function", "name": "f"}]), (RESPONSES, "reasoning", {"effort": None}),
    (RESPONSES, "text", {}),
    (MESSAGES, "messages[0]", [{"role": "user", "content": "x"}]), (MESSAGES, "thinking", {"type": "disabled"}),
    (MESSAGES, "messages[0].content[0]", [{"role": "user", "content": [{"type": "text", "text": "x"}]}]),
    (MESSAGES, "messages[1].content[0].content[0]", [*USER, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "x"}]}]}]),
    (MESSAGES, "system[0]", [{"type": "text", "text": "x"}]),
    (MESSAGES, "tools[0]", [{"name": "f", "input_schema": {}}]),
    (MESSAGES, "tool_choice", {"type": "auto"}), (MESSAGES, "output_config", {}),
]


@each(("path", "place", "given"), WITHIN)
def test_unknown_fields_within_messages_and_tools(lenient: Served, path: str, place: str, given: Any) -> None:
    """Named if they have no effect, whatever they hold; refused if they are misspelt."""
    name, *steps = place.replace("]", "").replace(".", "[").split("[")
    given = json.loads(json.dumps(given))
    target = given
    for step in steps:
        target = target[int(step) if step.isdigit() else step]
    body = {("input" if path == RESPONSES else "messages"): USER, **ASKED[path], name: given}
    plain = ".".join([name, *(step for step in steps if not step.isdigit())])
    known = max(target or ("format",), key=len)
    with scripted("x") as (served, _):
        for empty in (None, "", [], {}, False):
            target["foo"] = target[f"{known}x"] = empty
            response = served.post(path, **body)
            assert response.status_code == 200 and IGNORED_HEADER not in response.headers, response.text
        target["foo"] = {"a": 1}
        assert served.post(path, **body).headers[IGNORED_HEADER] == f"{plain}.foo"
        target[f"{known}x"] = 5
        refused = served.post(path, **body)
        assert refused.status_code == 400 and f"unknown field '{place}.{known}x': do you mean" in refused.text
    response = lenient.post(path, **body)
    assert {*response.headers[IGNORED_HEADER].split(", ")} == {f"{plain}.foo", f"{plain}.{known}x"}


@each(("message", "hint"), [
    ({**ASSISTANT, "prefix": True}, "continue_final_message"), ({**USER[0], "images": ["AA=="]}, "image_url"),
    ({**ASSISTANT, "tool_call": []}, None),
    ({**ASSISTANT, "tool_call": [CALL]}, "do you mean 'messages[1].tool_calls'"),
])
def test_unsupported_fields_of_messages_are_refused(message: dict[str, Any], hint: str | None) -> None:
    with scripted("x") as (served, _):
        response = served.post(CHAT, messages=[*USER, message, *USER])
    assert response.status_code == (400 if hint else 200), response.text
    assert hint is None or hint in response.json()["error"]["message"]


def test_fields_that_the_template_reads_are_known() -> None:
    from deltic.chat.processor import ChatProcessor
    template = "{% for m in messages %}{{ m.mood }}{{ m['tone'] }}: {{ m.content }}{% endfor %}"
    model = Scripted("x").model()
    model.chat_processor = ChatProcessor(tiny().chat_processor.tokenizer, template)
    with serving(model) as served:
        response = served.post(CHAT, messages=[{**USER[0], "mood": "good", "tone": "low"}])
        assert response.status_code == 200 and IGNORED_HEADER not in response.headers
        response = served.post(CHAT, messages=[{**USER[0], "moo": "good"}])
        assert response.headers[IGNORED_HEADER] == "messages.moo"


def test_answers_of_client_libraries_are_accepted_as_history() -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "weather"}}]
    with scripted(THOUGHT + "I look.\n" + WEATHER_CALL) as (served, _):
        said = served.client.chat.completions.create(model="tiny", messages=USER, tools=tools)  # type: ignore[arg-type]
        back = {**said.choices[0].message.model_dump(), "annotations": [], "audio": None}
        result = {"role": "tool", "tool_call_id": back["tool_calls"][0]["id"], "name": "weather", "content": "dry"}
        response = served.post(CHAT, messages=[*USER, back, result], tools=tools)
        assert response.status_code == 200 and IGNORED_HEADER not in response.headers, response.text

        flat: list[Any] = [{"type": "function", "name": "weather"}]
        made = served.client.responses.create(model="tiny", input="Hi", tools=flat)
        items = [item.model_dump() for item in made.output]
        response = served.post(RESPONSES, input=[*USER, *items, {
            "type": "function_call_output", "call_id": items[-1]["call_id"], "output": "dry"}], tools=flat)
        assert response.status_code == 200 and IGNORED_HEADER not in response.headers, response.text

        with Anthropic(base_url=served.url, api_key="x", max_retries=0) as client:
            tool: Any = {"name": "weather", "input_schema": {}, "cache_control": {"type": "ephemeral"}}
            message = client.messages.create(model="tiny", max_tokens=99, messages=USER, tools=[tool],  # type: ignore[arg-type]
                                             thinking={"type": "enabled", "budget_tokens": 1024})
        blocks = [block.model_dump() for block in message.content]
        response = served.post(MESSAGES, max_tokens=5, tools=[tool], messages=[
            *USER, {"role": "assistant", "content": blocks}, {"role": "user", "content": [{
                "type": "tool_result", "tool_use_id": blocks[-1]["id"], "content": "dry", "is_error": False,
                "cache_control": {"type": "ephemeral"}}]}])
        assert response.status_code == 200 and IGNORED_HEADER not in response.headers, response.text


def test_reasoning_effort_unknown_to_the_template() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}|{% if enable_thinking is defined %}" \
               "{{ enable_thinking }}{% endif %}|{{ documents }}"
    llm = tiny()
    from deltic.chat.processor import ChatProcessor
    engine = Scripted("x")
    model = engine.model()
    model.chat_processor = ChatProcessor(llm.chat_processor.tokenizer, template)
    with serving(model) as served:
        none = served.post(CHAT, messages=USER, reasoning_effort="none")
        high = served.post(CHAT, messages=USER, reasoning_effort="high")
        listed = served.post(CHAT, messages=USER, documents=[{"title": "x", "text": "y"}])
    assert (none.headers.get(IGNORED_HEADER), high.headers.get(IGNORED_HEADER)) == (None, "reasoning_effort")
    shown = [llm.chat_processor.tokenizer.decode(request.prompt) for request in engine.seen]
    assert shown[:2] == ["Hi|False|None", "Hi||None"] and "'title': 'x'" in shown[2] and listed.status_code == 200


def test_documents_need_a_template_that_knows_them() -> None:
    with scripted("x") as (served, _):
        error = served.post(CHAT, messages=USER, documents=[{"text": "y"}]).json()["error"]
        assert error["param"] == "documents" and served.post(CHAT, messages=USER, documents=[]).status_code == 200


def test_ends_of_prompts() -> None:
    begun = [*USER, {"role": "assistant", "content": "The answer "}]
    with scripted("x") as (served, engine):
        for fields in ({"continue_final_message": True, "add_generation_prompt": False},
                       {"continue_final_message": True}, {"add_generation_prompt": False}, {}):
            assert served.post(CHAT, messages=begun, **fields).status_code == 200
        shown = [tiny().chat_processor.tokenizer.decode(request.prompt, skip_special=False) for request in engine.seen]
        error = served.post(CHAT, messages=begun, continue_final_message=True, add_generation_prompt=True).json()
        wrong = served.post(CHAT, messages=USER, continue_final_message=True).json()
    assert shown[0] == shown[1] and shown[0].endswith("</think>\n\nThe answer ")
    assert shown[2].endswith("The answer<|im_end|>\n") and shown[3].startswith(shown[2])
    assert shown[3].removeprefix(shown[2]).startswith("<|im_start|>assistant")
    assert error["error"]["param"] == "continue_final_message" and wrong["error"]["param"] == "messages"


def test_models_in_both_forms() -> None:
    with scripted("x") as (served, _), Anthropic(base_url=served.url, api_key="x", max_retries=0) as client:
        found = list(client.models.list())
        assert [model.id for model in found] == ["tiny"] and found[0].created_at.year > 2000
        assert client.models.retrieve("tiny").max_input_tokens == 2048
        version = {"anthropic-version": "2023-06-01"}
        assert served.http.get("/v1/models/x", headers=version).json()["error"]["type"] == "not_found_error"
        assert served.client.models.retrieve("tiny").object == "model"
        with pytest.raises(openai.NotFoundError):
            served.client.models.retrieve("x")


def test_tokens_and_back() -> None:
    with scripted("x") as (served, engine):
        found = served.post("/tokenize", model="tiny", prompt="Hello \u6f22", add_special_tokens=True).json()
        assert found["count"] == len(found["tokens"]) > 1 and found["max_model_len"] == 2048
        assert served.post("/detokenize", model="tiny", tokens=found["tokens"]).json() == {"prompt": "Hello \u6f22"}
        named = served.post("/tokenize", prompt="Hello", return_token_strs=True).json()
        assert "".join(named["token_strs"]) == "Hello" and found["token_strs"] is None
        asked = {"messages": USER, "chat_template_kwargs": {"enable_thinking": True}}
        served.post(CHAT, **asked)
        assert tuple(served.post("/tokenize", **asked).json()["tokens"]) == engine.seen[-1].prompt
        assert served.http.get("/version").json() == {"version": __version__}


@each(("path", "body", "param"), [
    ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": "x", "messages": USER}, "prompt"),
    ("/tokenize", {"prompt": 5}, "prompt"), ("/tokenize", {"messages": [5]}, "messages[0]"),
    ("/tokenize", {"promt": "x"}, "promt"), ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": ["x"]}, "tokens[0]"), ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [1 << 40]}, "tokens"), ("/detokenize", {"token": [1]}, "token"),
    (CHAT, {"messages": USER, "documents": 5}, "documents"), (CHAT, {"messages": USER, "think": 5}, "think"),
    (CHAT, {"messages": USER, "reasoning": {"effort": 5}}, "reasoning_effort"),
    (CHAT, {"messages": USER, "documents": [1] * 5000}, "documents"),
])
def test_wrong_field_is_named(path: str, body: dict[str, Any], param: str) -> None:
    with scripted("x") as (served, _):
        response = served.http.post(path, content=json.dumps(body))
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
