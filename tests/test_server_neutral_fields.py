"""Fields that clients of other servers always send, by the values that ask for nothing, and what each one means."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_server_harness import USER, Scripted, each, limited, scripted, serving, tiny

from deltic.chat.control_tokens import Infill
from deltic.chat.processor import ChatProcessor
from deltic.server.routing import IGNORED_HEADER

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
pytestmark = pytest.mark.usefixtures("script_server")


@each("fields", [
    {"grammar": ""}, {"ebnf": ""}, {"json_schema": {}}, {"best_of": 1}, {"echo": False}, {"stop_regex": None},
    {"custom_params": None}, {"backend_sampling": False}, {"reasoning_budget": -1}, {"thinking_token_budget": None},
    {"thinking_token_budget": -1}, {"verbosity": "medium"}, {"service_tier": "auto"}, {"store": False}, {"suffix": ""},
    {"truncate_prompt_tokens": None}, {"n_cmpl": 1}, {"stream_options": {"continuous_usage_stats": False}},
])
def test_neutral_values_are_accepted_silently(fields: dict[str, Any]) -> None:
    with scripted("x") as (served, _):
        response = served.post(CHAT, messages=USER, **fields)
    assert response.status_code == 200 and IGNORED_HEADER not in response.headers, response.text


@each(("fields", "ignored"), [
    ({"store": True}, "store"), ({"service_tier": "flex"}, "service_tier"), ({"verbosity": "low"}, "verbosity"),
    ({"backend_sampling": True}, "backend_sampling"), ({"media_io_kwargs": {"video": {}}}, "media_io_kwargs")])
def test_fields_without_effect_are_named(fields: dict[str, Any], ignored: str) -> None:
    with scripted("x") as (served, _):
        response = served.post(CHAT, messages=USER, **fields)
    assert (response.status_code, response.headers[IGNORED_HEADER]) == (200, ignored)


def test_verbosity_reaches_a_template_that_reads_it() -> None:
    model, tokenizer = limited(tiny()), tiny().chat_processor.tokenizer
    template = "{{ verbosity }}:{% for message in messages %}{{ message.content }}{% endfor %}"
    model.chat_processor = ChatProcessor(tokenizer, template)
    with serving(model) as served:
        for path, fields in ((CHAT, {"messages": USER, "verbosity": "low"}),
                             (RESPONSES, {"input": "Hi", "text": {"verbosity": "low"}})):
            counted = served.post(path, **fields, **{"max_tokens" if path == CHAT else "max_output_tokens": 1})
            assert counted.status_code == 200 and IGNORED_HEADER not in counted.headers
        ids = served.post("/tokenize", messages=USER, verbosity="low").json()["tokens"]
    assert tokenizer.decode(ids) == "low:Hi"


@each(("path", "fields", "param"), [
    (CHAT, {"grammar": "root ::= ("}, "grammar"), (CHAT, {"regex": "("}, "regex"),
    (CHAT, {"n_predict": -2}, "n_predict"),
    (CHAT, {"think": 5}, "think"), (CHAT, {"repeat_penalty": 0}, "repeat_penalty"), (CHAT, {"best_of": 2}, "best_of"),
    (CHAT, {"thinking_token_budget": -5}, "thinking_token_budget"), (CHAT, {"verbosity": "often"}, "verbosity"),
    (CHAT, {"stop_sequences": ["x"] * 100}, "stop_sequences"), (CHAT, {"store": "yes"}, "store"),
    (TEXT, {"suffix": "end"}, "suffix"), (TEXT, {"suffix": "end", "echo": True}, "echo"),
    (CHAT, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    (RESPONSES, {"text": {"verbosity": "often"}}, "text.verbosity"),
])
def test_error_names_the_field_as_it_was_sent(path: str, fields: dict[str, Any], param: str) -> None:
    asked = {CHAT: {"messages": USER}, TEXT: {"prompt": "x"}, RESPONSES: {"input": "x"}}[path]
    with scripted("x") as (served, _):
        response = served.post(path, **asked, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param) and param in error["message"], error


@each(("path", "field", "meant"), [
    (RESPONSES, "response_format", "text.format"), (RESPONSES, "messages", "input"), (CHAT, "input", "messages"),
    (MESSAGES, "response_format", "output_config.format"), (TEXT, "messages", "prompt")])
def test_suggestions_for_fields_of_other_apis(path: str, field: str, meant: str) -> None:
    asked = {CHAT: {"messages": USER}, TEXT: {"prompt": "x"}, RESPONSES: {"input": "x"},
             MESSAGES: {"messages": USER, "max_tokens": 5}}[path]
    with scripted("x") as (served, _):
        message = served.post(path, **asked, **{field: {"type": "json_object"}}).json()["error"]["message"]
    assert f"do you mean '{meant}'?" in message


@each("name", ["thinking_budget", "thinking_token_budget", "thinking_budget_tokens",
                                  "reasoning_budget"])
def test_aliases_of_thinking_budget(name: str) -> None:
    with scripted("x") as (served, engine):
        response = served.post(CHAT, messages=USER, enable_thinking=True, **{name: 0})
    assert response.status_code == 200 and IGNORED_HEADER not in response.headers
    assert engine.seen[-1].guide is not None


@each(("path", "asked"), [(CHAT, {"messages": USER}), (TEXT, {"prompt": "x", "max_tokens": 20})])
def test_continuous_usage_stats(path: str, asked: dict[str, Any]) -> None:
    def chunks(**options: Any) -> list[dict[str, Any]]:
        text = served.post(path, **asked, stream=True, stream_options=options).text
        return [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]

    with scripted("one two three four five", pause=0.01) as (served, _):
        always, end = chunks(include_usage=True, continuous_usage_stats=True), chunks(include_usage=True)
        never = chunks(continuous_usage_stats=True)
    counts = [chunk["usage"]["completion_tokens"] for chunk in always]
    assert counts == sorted(counts) and len(set(counts)) > 3
    assert always[-1]["usage"] == end[-1]["usage"] and counts[-1] == always[-2]["usage"]["completion_tokens"]
    assert {chunk["usage"]["prompt_tokens"] for chunk in always} == {end[-1]["usage"]["prompt_tokens"]}
    assert all(chunk["usage"] is None for chunk in end[:-1]) and not any("usage" in chunk for chunk in never)


LONG = "word " * 6000


@each(("path", "asked", "field"), [
    ("/tokenize", {"prompt": LONG}, "count"), ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}, "count"),
    ("/v1/responses/input_tokens", {"input": LONG}, "input_tokens"),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": LONG}]}, "input_tokens"),
])
def test_prompts_beyond_the_context_are_counted(path: str, asked: dict[str, Any], field: str) -> None:
    with scripted("x") as (served, _):
        counted = served.post(path, **asked)
        assert counted.status_code == 200 and counted.json()[field] > 6000, counted.text
        refused = served.post(CHAT, messages=[{"role": "user", "content": LONG}])
        assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_limit_of_counted_tokens() -> None:
    with serving(Scripted("x").model(max_counted_tokens=5000)) as served:
        for path, asked in (("/tokenize", {"prompt": LONG}), (TEXT, {"prompt": LONG, "truncate_prompt_tokens": 5}),
                            ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": LONG}]})):
            refused = served.post(path, **asked)
            assert refused.status_code == 400 and "max_counted_tokens" in refused.text
        assert served.post("/tokenize", prompt="word " * 4000).json()["count"] > 4000


def test_truncate_prompt_tokens() -> None:
    with scripted("x") as (served, engine):
        for wanted, length in ((5, 5), (-1, 2048 - 40), (100_000, 2047)):
            for path, asked in ((TEXT, {"prompt": LONG}), (CHAT, {"messages": [{"role": "user", "content": LONG}]})):
                response = served.post(path, **asked, truncate_prompt_tokens=wanted, max_tokens=40)
                assert response.status_code == 200 and len(engine.seen[-1].prompt) == length
        whole = served.post("/tokenize", messages=[{"role": "user", "content": LONG}]).json()["tokens"]
        assert engine.seen[-1].prompt == tuple(whole[-2047:])
        echo = served.post(TEXT, prompt="one two three four", truncate_prompt_tokens=2, echo=True).json()
        assert "three four".endswith(echo["choices"][0]["text"].removesuffix("x").strip())
        served.post(TEXT, prompt="one", truncate_prompt_tokens=50)
        assert len(engine.seen[-1].prompt) < 5


def test_fill_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny().chat_processor.tokenizer
    form = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")  # stand in for tokens that the vocabulary lacks
    monkeypatch.setattr("deltic.chat.control_tokens._FORMS", (form,))
    with scripted("x") as (served, engine):
        assert served.post(TEXT, prompt="def f(", suffix="return 1").status_code == 200
    request, (start, end, pad) = engine.seen[-1], (tokenizer.added[token] for token in form)
    assert request.prompt == (start, *tokenizer.encode("def f("), end, *tokenizer.encode("return 1"), pad)
    assert {start, end, pad} <= set(request.output.stop_token_ids)  # type: ignore[union-attr]


def test_cache_salt_of_ollama_clients() -> None:
    user = [{"role": "user", "content": "Hi"}]
    for path, body in (("/api/chat", {"messages": user}), ("/api/generate", {"prompt": "Hi"}),
                       ("/api/generate", {"prompt": "Hi", "raw": True})):
        with scripted("x") as (served, engine):
            for salt in ({}, {"cache_salt": "x"}, {"cache_salt": "y"}):
                answer = served.post(path, stream=False, **body, **salt)
                assert answer.status_code == 200 and "x-deltic-ignored" not in answer.headers, answer.text
            assert len({request.cache_salt for request in engine.seen[-3:]}) == 3


def test_fill_in_the_middle_begins_with_bos(monkeypatch: pytest.MonkeyPatch) -> None:
    """As /v1/completions does: a bos token before all, once, and none around token ids or without special tokens."""
    tokenizer = tiny().chat_processor.tokenizer
    form = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
    monkeypatch.setattr("deltic.chat.control_tokens._FORMS", (form,))
    bos = tokenizer.added["<|endoftext|>"]
    monkeypatch.setitem(tokenizer.__dict__, "around", ([bos], [7]))
    start, end, pad = (tokenizer.added[token] for token in form)
    plain, behind = tokenizer.encode("def f("), tokenizer.encode("return 1")
    asked: list[tuple[dict[str, Any], list[int]]] = [
        ({"prompt": "def f("}, [bos]), ({"prompt": "<|endoftext|>def f("}, [bos]), ({"prompt": plain}, []),
        ({"prompt": "def f(", "add_special_tokens": False}, [])]
    with scripted("x") as (served, engine):
        for body, before in asked:
            assert served.post(TEXT, suffix="return 1", **body).status_code == 200
            assert engine.seen[-1].prompt == (*before, start, *plain, end, *behind, pad), body


@each("form", [("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
                                  ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>",
                                   "<\uff5cfim\u2581end\uff5c>")])
def test_fill_in_the_middle_tokens_of_vocabularies(form: tuple[str, str, str]) -> None:
    infill = Infill.of({token: id for id, token in enumerate(("<x>", *form, "<|file_sep|>"))})
    assert infill.ids([7], [8, 9]) == [1, 7, 2, 8, 9, 3] and infill.ends == (1, 2, 3, 4)
