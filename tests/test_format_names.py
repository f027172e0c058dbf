"""Whatever name a client has for what an answer must look like: it is kept, refused, or named as ignored."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from test_server_harness import Served, each, serving, tiny

jsonschema = pytest.importorskip("jsonschema")

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["a"],
          "additionalProperties": False}
DIGITS, GBNF = "[0-9]{3}", "root ::= [0-9] [0-9] [0-9]"
AS_SCHEMA: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    {"response_format": {"type": "json_schema", "schema": SCHEMA}},  # Responses' form, llama.cpp
    {"response_format": {"type": "json_object", "schema": SCHEMA}},  # llama.cpp, Together, Fireworks
    {"response_format": {"type": "json_object", "value": SCHEMA}},
    {"response_format": {"type": "json", "value": SCHEMA}},
    {"response_format": {"type": "json_schema", "value": SCHEMA}},  # text-generation-inference
    {"structured_outputs": {"json": SCHEMA}}, {"guided_json": SCHEMA}, {"guided_json": json.dumps(SCHEMA)},
    {"json_schema": SCHEMA}, {"json_schema": json.dumps(SCHEMA)}, {"format": SCHEMA},  # llama.cpp, SGLang; Ollama
    {"grammar": {"type": "json", "value": SCHEMA}}]
AS_TEXT: list[dict[str, Any]] = [
    {"response_format": {"type": "regex", "pattern": DIGITS}}, {"response_format": {"type": "regex", "value": DIGITS}},
    {"response_format": {"type": "regex", "regex": {"regex": DIGITS}}},
    {"response_format": {"type": "ebnf", "ebnf": GBNF}},
    {"response_format": {"type": "grammar", "grammar": GBNF}}, {"structured_outputs": {"regex": DIGITS}},
    {"structured_outputs": {"grammar": GBNF}}, {"structured_outputs": {"choice": ["123", "456"]}},
    {"guided_regex": DIGITS}, {"guided_choice": ["123", "456"]}, {"guided_grammar": GBNF}, {"regex": DIGITS},
    {"regex_pattern": DIGITS}, {"ebnf": GBNF}, {"grammar": GBNF}, {"grammar_string": GBNF},
    {"grammar": {"type": "regex", "value": DIGITS}}]
REFUSED: list[dict[str, Any]] = [
    {"response_format": {"type": "structural_tag", "structures": [], "triggers": []}}, {"structural_tag": "{}"},
    {"structured_outputs": {"structural_tag": "{}"}}, {"response_format": {"type": "xml"}},
    {"response_format": {"type": ["regex"]}}, {"response_format": {"type": "regex"}}, {"grammar_lazy": True},
    {"response_format": {"type": "json_object", "schema": 5}}, {"response_format": {"type": "grammar"}}]
NAMED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA, "colour": 1}}, "response_format.colour"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "max": 5}}},
     "response_format.json_schema.max"),
    ({"response_format": {"type": "json_schema", "schema": {}, "json_schema": {"schema": SCHEMA}}},
     "response_format.schema"),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {
        **SCHEMA, "not": {"required": ["b"]}}}}}, "response_format.json_schema.schema.not"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
        "a": {"type": "array", "uniqueItems": True}}}}}], "tool_choice": "required"}, "tools.uniqueItems")]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(tiny()) as running:
        yield running


def asked(served: Served, path: str, wanted: dict[str, Any]) -> Any:
    what = {"prompt": "x"} if path.endswith("/completions") and "chat" not in path else {
        "messages": [{"role": "user", "content": "Hi"}]}
    return served.post(path, **what, max_tokens=60, temperature=0, **wanted)


def text_of(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop" and "x-deltic-ignored" not in answer.headers
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("wanted", [*AS_SCHEMA, *AS_TEXT], ids=str)
def test_it_is_kept(served: Served, path: str, wanted: dict[str, Any]) -> None:
    text = text_of(asked(served, path, wanted))
    if wanted in AS_SCHEMA:
        jsonschema.validate(json.loads(text), SCHEMA)
    else:
        assert re.fullmatch(DIGITS, text)


@pytest.mark.parametrize("wanted", REFUSED, ids=str)
def test_it_is_refused(served: Served, wanted: dict[str, Any]) -> None:
    refused = asked(served, "/v1/chat/completions", wanted)
    assert refused.status_code == 400 and refused.json()["error"]["param"].split(".")[0] in wanted


@pytest.mark.parametrize(("wanted", "name"), NAMED, ids=str)
def test_what_has_no_effect_is_named(served: Served, wanted: dict[str, Any], name: str) -> None:
    answer = asked(served, "/v1/chat/completions", wanted)
    assert answer.status_code == 200 and answer.headers["x-deltic-ignored"] == name


@each("form", [
    {"type": "json_object", "schema": SCHEMA}, {"type": "json_schema", "name": "x", "schema": SCHEMA},
    {"type": "regex", "pattern": r'\{"a":[0-9]\}'}])
def test_responses(served: Served, form: dict[str, Any]) -> None:
    answer = served.post("/v1/responses", input="Hi", max_output_tokens=60, temperature=0, text={"format": form})
    assert answer.status_code == 200, answer.text
    jsonschema.validate(json.loads(answer.json()["output"][-1]["content"][0]["text"]), SCHEMA)


def test_names_of_other_wires(served: Served) -> None:
    loose = {**SCHEMA, "not": {"required": ["b"]}}
    answer = served.post("/v1/responses", input="Hi", max_output_tokens=60, temperature=0, text={"format": {
        "type": "json_schema", "name": "x", "schema": loose, "colour": 1}})
    assert answer.headers["x-deltic-ignored"] == "text.format.colour, text.format.schema.not"
    answer = served.post("/v1/messages", messages=[{"role": "user", "content": "Hi"}], max_tokens=60, temperature=0,
                         output_config={"format": {"type": "json_schema", "schema": SCHEMA, "colour": 1}})
    assert answer.headers["x-deltic-ignored"] == "output_config.format.colour"
    answer = served.post("/v1/messages", messages=[{"role": "user", "content": "Hi"}], max_tokens=60, temperature=0,
                         tools=[{"name": "f", "input_schema": {"type": "object", "properties": {
                             "a": {"type": "string", "not": {"const": "b"}}}}}], tool_choice={"type": "any"})
    assert answer.headers["x-deltic-ignored"] == "tools.not"
