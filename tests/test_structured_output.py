"""Answers have the form that they were asked for, whatever the model would rather say."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import openai.types
import pytest
from pydantic import BaseModel
from test_server_harness import USER, Served, serving, tiny

from deltic import LLM, SamplingParams
from deltic.chat import structured as grammar_module
from deltic.chat.response_format import ChoiceFormat, JsonSchema, OutputFormat, Regex
from deltic.chat.structured import GrammarConstraint, Grammars
from deltic.chat.tools import PARSERS
from deltic.cli import main
from deltic.errors import RequestError

jsonschema = pytest.importorskip("jsonschema")

QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]


def closed(**properties: Any) -> dict[str, Any]:
    """An object with these properties and no others."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def compiled(grammars: Grammars, wanted: OutputFormat) -> Any:
    """The grammar of a format."""
    pending = grammars.of(wanted)
    pending.compile()
    return pending.grammar


SHORT = {"type": "string", "maxLength": 12}
COUNT = {"type": "integer", "minimum": 0, "maximum": 99}
SCHEMAS: dict[str, Any] = {
    "empty object": closed(),
    "text": closed(a=SHORT),
    "two texts": closed(a=SHORT, b=SHORT),
    "integer": closed(a=COUNT),
    "negative": closed(a={"type": "integer", "minimum": -5, "exclusiveMaximum": 0}),
    "number": closed(a={"type": "number", "minimum": 0.5, "maximum": 2.5}),
    "boolean": closed(a={"type": "boolean"}),
    "null": closed(a={"type": "null"}),
    "enumeration": closed(a={"enum": ["one", "two", 3, None, True]}),
    "constant": closed(a={"const": "fixed \"quoted\" \\ text"}),
    "nullable": closed(a={"type": ["integer", "null"], "minimum": 0, "maximum": 9}),
    "array": closed(a={"type": "array", "items": COUNT, "maxItems": 3}),
    "array of at least": closed(a={"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}),
    "tuple": closed(a={"type": "array", "prefixItems": [COUNT, SHORT], "items": False, "minItems": 2}),
    "nested": closed(a=closed(b=closed(c=COUNT))),
    "optional": {"type": "object", "properties": {"a": COUNT, "b": SHORT}, "additionalProperties": False},
    "some required": {"type": "object", "properties": {"a": COUNT, "b": SHORT, "c": COUNT}, "required": ["b"],
                      "additionalProperties": False},
    "union": closed(a={"anyOf": [COUNT, {"type": "boolean"}, closed(x=COUNT)]}),
    "all of": closed(a={"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]}),
    "reference": {"$defs": {"point": closed(x=COUNT, y=COUNT)}, **closed(a={"$ref": "#/$defs/point"})},
    "definitions": {"definitions": {"word": SHORT}, **closed(a={"$ref": "#/definitions/word"})},
    "recursive": {"$defs": {"node": {**closed(v=COUNT), "properties": {
        "v": COUNT, "next": {"$ref": "#/$defs/node"}}}}, "$ref": "#/$defs/node"},
    "pattern": closed(a={"type": "string", "pattern": "^[A-Z]{2,4}-[0-9]{3}$"}),
    "date": closed(a={"type": "string", "format": "date"}),
    "date and time": closed(a={"type": "string", "format": "date-time"}),
    "uuid": closed(a={"type": "string", "format": "uuid"}),
    "email": closed(a={"type": "string", "format": "ipv4"}),
    "lengths": closed(a={"type": "string", "minLength": 3, "maxLength": 5}),
    "multiple": closed(a={"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 50}),
    "unicode": closed(größe=COUNT, 名={"enum": ["日本", "😀"]}),
    "top-level array": {"type": "array", "items": COUNT, "minItems": 1, "maxItems": 3},
    "top-level enumeration": {"enum": ["yes", "no"]},
    "described": {"title": "T", "description": "d", "$schema": "https://json-schema.org/draft/2020-12/schema",
                  **closed(a={**COUNT, "title": "A", "description": "a", "default": 3, "examples": [1]})},
}


def schema_format(schema: Any, strict: bool = True) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": strict, "schema": schema}}


@cache
def model(speculate: str = "off") -> LLM:
    return LLM(dtype="float32", threads=1, max_context=1024, memory="64MiB", max_batch=8, speculate=speculate)


def sampling(temperature: float, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=5, max_tokens=400, **more)


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_match_their_schema_at_any_temperature(name: str) -> None:
    schema = SCHEMAS[name]
    for temperature in (0.0, 1.0, 2.0):
        output = model().chat(QUESTION, sampling(temperature, n=2 if temperature else 1),
                              response_format=schema_format(schema))
        for choice in output.choices:
            assert choice.finish in ("stop", "length"), choice.error
            if choice.finish == "stop":
                jsonschema.validate(json.loads(choice.text), schema,
                                    format_checker=jsonschema.FormatChecker())
    assert any(choice.finish == "stop" for choice in output.choices) or name in ("recursive", "text", "two texts")


@cache
def published() -> dict[str, Any]:
    """Schemas of the models that the openai package has for its requests and answers."""
    found: dict[str, Any] = {}
    for module in pkgutil.walk_packages(openai.types.__path__, "openai.types."):
        if len(found) >= 240:
            break
        for name, kind in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(kind, BaseModel) and kind.__module__ == module.name:
                with suppress(Exception):  # some have no schema
                    found[f"{module.name}.{name}"] = kind.model_json_schema()
    return found


def brief() -> dict[int, float]:
    """A bias for what ends texts, lists and objects: a model this small writes on and on."""
    tokenizer = model().chat_processor.tokenizer
    return {token: 12.0 for token in range(tokenizer.vocab_size)
            if set(tokenizer.token_bytes(token)) & set(b'"]}') and token not in tokenizer.added.values()}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_published_schemas(part: int) -> None:
    schemas, refused, ended, bias = [*published().values()][part::8], 0, 0, brief()
    assert len(published()) >= 200

    def answer(llm: LLM, schema: Any, temperature: float) -> Any:
        found, = llm.chat(QUESTION, sampling(temperature, logit_bias=bias),
                          response_format=schema_format(schema)).choices
        return found

    alone: list[tuple[Any, float, Any]] = []
    for schema in schemas:
        for temperature in (0.0, 1.0, 2.0):
            try:
                found = answer(model(), schema, temperature)
            except RequestError:
                refused += 1
                break
            assert found.finish in ("stop", "length"), found.error
            alone.append((schema, temperature, found))
            if found.finish == "stop":
                ended += 1
                jsonschema.validate(json.loads(found.text), schema)
    assert refused < len(schemas) / 4 and ended > len(schemas) / 2
    # the same with drafts, in company
    for speculate in ("auto", "ngram:3"):
        with ThreadPoolExecutor(8) as together:
            same = [together.submit(answer, model(speculate), schema, temperature) for schema, temperature, _ in alone]
        assert [each.result().tokens for each in same] == [found.tokens for _, _, found in alone]


@pytest.mark.parametrize("speculate", ["ngram:3", "auto"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_same_answer_with_drafts_and_in_batches(speculate: str, temperature: float) -> None:
    asked = [SCHEMAS[name] for name in ("two texts", "array", "some required", "recursive", "date")]
    params = sampling(temperature)
    alone = [model().chat(QUESTION, params, response_format=schema_format(schema), thinking=bool(place % 2))
             for place, schema in enumerate(asked)]
    others = model(speculate)
    for _ in range(2):  # the second time from the prefix cache
        streams = [others.stream(QUESTION, params, response_format=schema_format(schema), thinking=bool(place % 2))
                   for place, schema in enumerate(asked)]
        threads = [threading.Thread(target=lambda stream=stream: list(stream)) for stream in streams]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for stream, output in zip(streams, alone, strict=True):
            assert stream.output and stream.output.choices[0].tokens == output.choices[0].tokens
            assert stream.output.text == output.text and stream.output.reasoning == output.reasoning


@pytest.mark.parametrize("taken", [[' ["', ' {"'], [' {"', ' ["']])
def test_what_was_only_drafted_leaves_no_trace(taken: list[str]) -> None:
    """Two strings, in a list and in an object: what may end them differs."""
    tokenizer = model().chat_processor.tokenizer
    (drafted,), (token,) = map(tokenizer.encode, taken)
    grammar = compiled(Grammars(tokenizer), JsonSchema({"type": "object"}))
    text: Any = SimpleNamespace(region="answer")
    one, other = (GrammarConstraint(grammar, text) for _ in range(2))
    for constraint in (one, other):
        for each in tokenizer.encode('{"" :'):
            constraint.push(each)
    assert one.fitting([drafted]) == 1 and len(one.allowed([drafted])) == 2
    for constraint in (one, other):
        constraint.push(token)
    assert one.allowed([]) == other.allowed([]) != [None]


def test_drafts_are_accepted_within_a_grammar() -> None:
    words = {"regex": "(the weather in Paris is fine, ){12}"}
    output, = model("ngram:4").generate(["Say: "], sampling(0.0), structured_outputs=words)
    assert output.text == "the weather in Paris is fine, " * 12
    assert output.choices[0].usage.accepted_tokens > 20


@pytest.mark.parametrize(("wanted", "pattern"), [
    ({"regex": "[a-c]{3}-[0-9]{1,4}/x"}, "[a-c]{3}-[0-9]{1,4}/x"), ({"choice": ["Paris", "Ro\"me\n", "日本"]}, None),
    ({"grammar": 'start: "x" NAME\nNAME: /[A-Z]{2,4}/'}, "x[A-Z]{2,4}"),
    ({"grammar": 'root ::= "yes" | "no" [0-9]'}, "yes|no[0-9]"), ({"json": closed(a=COUNT)}, r"(?s)\{.*\}"),
])
def test_other_forms(wanted: dict[str, Any], pattern: str | None) -> None:
    for temperature in (0.0, 1.5):
        output, = model().generate(["Hello"], sampling(temperature), structured_outputs=wanted)
        assert output.choices[0].finish == "stop"
        assert re.fullmatch(pattern, output.text) if pattern else output.text in wanted["choice"]


def test_the_form_begins_after_thinking() -> None:
    wanted = schema_format(closed(a=COUNT))
    output = model().chat(QUESTION, sampling(0.0), response_format=wanted, thinking=True)
    free = model().chat(QUESTION, sampling(0.0), thinking=True)
    assert output.reasoning == free.reasoning and json.loads(output.text)["a"] < 100
    for budget in (0, 3):
        cut = model().chat(QUESTION, sampling(0.0), response_format=wanted, thinking=True, thinking_budget=budget)
        assert json.loads(cut.text)["a"] < 100 and free.reasoning.startswith(cut.reasoning)


@pytest.mark.parametrize("more", [
    {"min_tokens": 60}, {"ignore_eos": True}, {"presence_penalty": 2.0, "repetition_penalty": 1.5},
    {"logit_bias": {5: 50.0}}, {"top_k": 1}, {"min_p": 0.9},
])
def test_other_wishes_stay_within_the_form(more: dict[str, Any]) -> None:
    schema = SCHEMAS["some required"]
    choice, = model().chat(QUESTION, sampling(1.0, **more), response_format=schema_format(schema)).choices
    assert choice.finish == "stop"
    jsonschema.validate(json.loads(choice.text), schema)


def test_stop_strings_and_limits_cut_it_off() -> None:
    wanted = {"regex": "abcdefgh"}
    cut, = model().generate(["x"], sampling(0.0, stop=("d",)), structured_outputs=wanted)
    assert cut.text == "abc" and cut.choices[0].finish == "stop"


# Calls


WEATHER = {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": {
    "type": "object", "required": ["city", "days", "unit"], "additionalProperties": False, "properties": {
        "city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["c", "f"]}, "tags": {"type": "array", "items": SHORT, "maxItems": 2},
        "note": {"type": ["string", "null"], "maxLength": 9}, "code": {"type": "string", "pattern": "^[A-Z]{2}$"}}}}}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": closed(zone={**SHORT, "minLength": 1})}}
NOTHING = {"type": "function", "function": {"name": "nothing"}}
SCHEMA_OF = {tool["function"]["name"]: tool["function"].get("parameters", {})
             for tool in (WEATHER, TIME, NOTHING)}
NAMED = {"type": "function", "function": {"name": "get_time"}}


@pytest.fixture(params=[name for name in PARSERS if name != "auto"])
def calling(request: pytest.FixtureRequest) -> Iterator[LLM]:
    llm = LLM(dtype="float32", threads=1, max_context=2048, memory="64MiB", tool_call_parser=request.param)
    with llm:
        yield llm


def test_forced_calls_fit_their_schemas(calling: LLM) -> None:
    seen = set()
    for choice in ("required", NAMED):
        for temperature in (0.0, 1.0, 2.0):
            for thinking in (False, True):
                found, = calling.chat(QUESTION, sampling(temperature, max_repeat=0), tools=[WEATHER, TIME],
                                      tool_choice=choice, thinking=thinking).choices
                assert found.calls or found.finish == "length"
                if found.finish == "stop":
                    assert not found.text
                    for call in found.calls:
                        jsonschema.validate(json.loads(call.arguments), SCHEMA_OF[call.name])
                        seen.add(call.name)
                        assert choice == "required" or call.name == "get_time"
    assert "get_time" in seen


def test_strict_tools_leave_text_free_and_calls_strict() -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    plain = model().chat(question, sampling(0.0))
    assert model().chat(question, sampling(0.0), tools=[NOTHING | {"function": {"name": "x", "strict": True}}]).text
    for temperature in (0.0, 1.0):
        found = model().chat(QUESTION, sampling(temperature), tools=[WEATHER, TIME])
        for call in found.calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMA_OF[call.name])
        assert found.calls or found.text
    assert plain.text


def test_a_format_beside_tools_is_for_what_is_no_call() -> None:
    for temperature in (0.0, 1.0, 2.0):
        found, = model().chat(QUESTION, sampling(temperature), tools=[TIME],
                              response_format=schema_format(closed(a=COUNT))).choices
        if found.calls:
            jsonschema.validate(json.loads(found.calls[0].arguments), SCHEMA_OF["get_time"])
        elif found.finish == "stop":
            jsonschema.validate(json.loads(found.text), closed(a=COUNT))


# What is refused


def deep(levels: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE: dict[str, Any] = {
    "deep": deep(200), "contradiction": {"type": "integer", "minimum": 5, "maximum": 3}, "never": False,
    "recursive alone": {"$ref": "#"}, "unknown reference": {"$ref": "#/$defs/none"},
    "product": {"allOf": [{"anyOf": [{"properties": {f"p{i}_{j}": COUNT}} for j in range(6)]} for i in range(9)]},
    "multiple": {"type": "integer", "multipleOf": 99999989, "minimum": 1, "maximum": 10**15},
    "pattern": {"type": "string", "pattern": "(" * 300 + "a" + ")" * 300},
    "strange pattern": {"type": "string", "pattern": "(?<!a)b"}, "type": {"type": "strange"},
    "not": {"not": {"type": "string"}},
}
HEAVY: dict[str, Any] = {
    "enumeration": {"enum": [f"value{index}" for index in range(20_000)]},
    "repeats": {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"},
    "lengths": {"type": "string", "minLength": 10**6},
    "properties": {"type": "object", "properties": {f"p{index}": {"type": "string", "pattern": f"a{{1,100}}{index}"}
                                                    for index in range(500)}},
    "tree": {"$defs": {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(25)} | {
        "a25": {"type": "object"}}, "$ref": "#/$defs/a0"},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_are_refused(name: str) -> None:
    began = time.monotonic()
    with pytest.raises(RequestError) as refusal:
        model().chat(QUESTION, sampling(0.0), response_format=schema_format(HOSTILE[name]))
    assert refusal.value.field == "response_format.json_schema.schema" and len(str(refusal.value)) < 500
    assert time.monotonic() - began < 8
    assert name != "recursive alone" or "refers to itself" in str(refusal.value)


def test_schema_seconds_limits_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(model().chat_processor.tokenizer, 0.001)
    with pytest.raises(RequestError, match="schema_seconds"):
        compiled(grammars, JsonSchema(HEAVY["enumeration"], True))
    monkeypatch.setattr(grammar_module, "_compile", lambda *_: pytest.fail("it is compiled again"))
    with pytest.raises(RequestError, match="schema_seconds"):
        compiled(grammars, JsonSchema(HEAVY["enumeration"], True))


def test_compilation_limit_counts_only_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the clock on the wall: behind others, or on a busy machine, it would refuse honest ones."""
    compile = grammar_module._compile

    def late(*given: Any) -> Any:
        time.sleep(0.3)
        return compile(*given)
    monkeypatch.setattr(grammar_module, "_compile", late)
    grammars = Grammars(model().chat_processor.tokenizer, 0.2)
    assert compiled(grammars, ChoiceFormat(("yes", "no"))).vocabulary


def test_concurrent_requests_compile_a_grammar_once(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, begun, free = Grammars(model().chat_processor.tokenizer), threading.Semaphore(0), threading.Event()
    compile, calls = grammar_module._compile, list[int]()

    def slow(*given: Any) -> Any:
        calls.append(1)
        begun.release()
        free.wait(60)
        return compile(*given)
    monkeypatch.setattr(grammar_module, "_compile", slow)
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(compiled, grammars, ChoiceFormat(("yes", "no"))) for _ in range(4)]
        assert begun.acquire(timeout=60)
        free.set()
        assert len({id(each.result(60).prototype) for each in found}) == 1 and len(calls) == 1


def test_an_engine_never_gets_a_grammar_that_is_not_compiled() -> None:
    job = model().chat_processor.complete("x", sampling(0.0), ChoiceFormat(("yes", "no")))
    assert job.request.constraint
    with pytest.raises(RuntimeError, match="has not been compiled"):
        job.request.constraint()
    job.compiled()
    assert job.request.constraint()


def test_taking_a_token_leaves_the_matcher_to_other_threads() -> None:
    """`push` is called in the engine's thread, which all clients share."""
    tokenizer = model().chat_processor.tokenizer
    text: Any = SimpleNamespace(region="answer")
    constraint = GrammarConstraint(compiled(Grammars(tokenizer), Regex("[a-c]+")), text)
    matcher, told = constraint._matcher, list[int]()
    constraint._matcher = SimpleNamespace(  # type: ignore[assignment]
        consume_token=lambda token: (told.append(token), matcher.consume_token(token)),
        deep_copy=matcher.deep_copy, is_error=matcher.is_error)
    tokens = tokenizer.encode("abc")
    for token in tokens:
        constraint.push(token)
    assert not told and constraint.allowed(()) and told == tokens


def test_compiled_grammars_are_kept_and_bounded() -> None:
    grammars = Grammars(model().chat_processor.tokenizer)
    first = compiled(grammars, Regex("a+"))
    assert compiled(grammars, Regex("a+")).prototype is first.prototype
    for index in range(70):
        compiled(grammars, ChoiceFormat((f"text {index}",)))
    assert compiled(grammars, Regex("a+")).prototype is not first.prototype


@pytest.mark.parametrize(("seconds", "fails"), [
    ([0.009] * 1000, False), ([0.9], False), ([0.3, *[0.0] * 29] * 30, False), ([0.05] * 1000, True),
    ([0.1, 0.0] * 500, True)])
def test_slow_tokens_are_borne_unless_they_are_many(seconds: list[float], fails: bool,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """seconds: that each token's mask takes."""
    from deltic.chat import structured as module

    grammar, clock = compiled(Grammars(model().chat_processor.tokenizer), Regex("a+", field="x")), [0.0]
    constraint = GrammarConstraint(grammar, SimpleNamespace(region="answer"))  # type: ignore[arg-type]
    took = iter(seconds)

    def mask(_: Any) -> bytes:
        clock[0] += next(took)
        return b""

    monkeypatch.setattr(module, "time", SimpleNamespace(thread_time=lambda: clock[0]))
    monkeypatch.setattr(constraint, "_mask", mask)
    with pytest.raises(RequestError, match=r"^x takes too long .* less ambiguous") if fails else nullcontext():
        for _ in seconds:
            constraint.allowed(())


# On the wire


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(tiny()) as running:
        yield running


def ask(served: Served, **more: Any) -> Any:
    return served.post("/v1/chat/completions", messages=QUESTION, max_tokens=300, seed=3, **more)


@pytest.mark.parametrize("wanted", [
    {"response_format": schema_format(closed(a=COUNT))}, {"structured_outputs": {"json": closed(a=COUNT)}},
    {"guided_json": json.dumps(closed(a=COUNT))}, {"json_schema": closed(a=COUNT)}, {"format": closed(a=COUNT)},
])
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_all_names_of_a_schema(served: Served, wanted: dict[str, Any], temperature: float) -> None:
    whole = ask(served, temperature=temperature, **wanted)
    assert whole.status_code == 200, whole.text
    choice = whole.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), closed(a=COUNT))
    streamed = ask(served, temperature=temperature, stream=True, **wanted).text
    pieces = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    said = "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces)
    assert said == choice["message"]["content"]


def test_completions_too(served: Served) -> None:
    answer = served.post("/v1/completions", prompt="x", max_tokens=40, guided_choice=["red", "blue"]).json()
    assert answer["choices"][0]["text"] in ("red", "blue")
    answer = served.post("/v1/completions", prompt="x", max_tokens=40, guided_regex="[0-9]{3}").json()
    assert re.fullmatch("[0-9]{3}", answer["choices"][0]["text"])


def test_json_objects(served: Served) -> None:
    choice = ask(served, temperature=2, response_format={"type": "json_object"}).json()["choices"][0]
    assert choice["message"]["content"].startswith("{")
    assert choice["finish_reason"] == "length" or isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize(("fields", "param"), [
    ({"response_format": "json"}, "response_format"), ({"response_format": {"type": "json_schema"}},
                                                       "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 5}}},
     "response_format.json_schema.schema"),
    ({"response_format": schema_format({"type": "strange"})}, "response_format.json_schema.schema"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"xml": "x"}}, "structured_outputs.xml"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"guided_choice": []}, "guided_choice"), ({"guided_choice": ["a", 5]}, "guided_choice"),
    ({"guided_regex": 5}, "guided_regex"), ({"guided_grammar": "start: nothing"}, "guided_grammar"),
    ({"guided_grammar": "\x00"}, "guided_grammar"), ({"guided_json": "{"}, "guided_json"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
    ({"tool_choice": "required"}, "tool_choice"), ({"tool_choice": NAMED, "tools": [WEATHER]}, "tool_choice"),
])
def test_what_is_no_form_is_named(served: Served, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        refused = ask(served, stream=stream, **fields)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == param and len(refused.json()["error"]["message"]) < 600


def test_an_ambiguous_grammar_ends_its_own_answer(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from deltic.chat import structured as module

    monkeypatch.setattr(module, "_TOKEN_SECONDS", 0.0002)
    monkeypatch.setattr(module, "_SPARE_SECONDS", 0.01)
    grammar = 'start: s\ns: s s | "a" | "b" | s s s'
    ended = ask(served, guided_grammar=grammar)
    error = ended.json()["error"]
    assert (ended.status_code, error["type"], error["param"]) == (400, "invalid_request_error", "guided_grammar")
    assert error["message"].startswith("guided_grammar takes too long to follow")
    streamed = ask(served, guided_grammar=grammar, stream=True).text.strip().splitlines()[-1]
    assert json.loads(streamed.removeprefix("data: "))["error"] == error
    assert ask(served).status_code == 200


@pytest.mark.parametrize(("path", "param", "fields"), [
    ("/v1/chat/completions", "response_format.json_schema.schema", {
        "messages": QUESTION, "response_format": schema_format(closed(a=SHORT))}),
    ("/v1/chat/completions", "tools", {"messages": QUESTION, "tools": [WEATHER], "tool_choice": "required"}),
    ("/v1/completions", "guided_regex", {"prompt": "x", "guided_regex": "a+"}),
    ("/v1/responses", "text.format.schema", {"input": "x", "text": {"format": {
        "type": "json_schema", "name": "x", "schema": closed(a=SHORT)}}}),
    ("/v1/messages", "output_config.format.schema", {"messages": QUESTION, "max_tokens": 20, "output_config": {
        "format": {"type": "json_schema", "schema": closed(a=SHORT)}}}),
])
def test_a_form_that_cannot_be_followed_is_named_by_every_wire(
        served: Served, path: str, param: str, fields: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from deltic.chat import structured as module

    monkeypatch.setattr(module, "_SPARE_SECONDS", -1.0)
    ended = served.post(path, **fields)
    assert ended.status_code == 400, ended.text
    message = ended.json()["error"]["message"]
    assert message.startswith(f"{param} takes too long to follow") and "internal error" not in message
    streamed = served.post(path, **fields, stream=True).text
    assert message in streamed and "invalid_request_error" in streamed and "internal error" not in streamed


def test_hostile_schemas_hold_nobody_up(served: Served) -> None:
    """Ordinary requests go on while schemas are compiled, refused or followed."""
    codes: list[int] = []

    def send(schema: Any) -> None:
        codes.append(ask(served, response_format=schema_format(schema, strict=False)).status_code)

    threads = [threading.Thread(target=send, args=(schema,)) for schema in (*HOSTILE.values(), *HEAVY.values())]
    for thread in threads:
        thread.start()
    late = []
    while any(thread.is_alive() for thread in threads):
        began = time.monotonic()
        assert served.post("/v1/chat/completions", messages=USER, max_tokens=1).status_code == 200
        late.append(time.monotonic() - began)
    for thread in threads:
        thread.join()
    assert set(codes) <= {200, 400} and len(codes) == len(threads)
    assert max(late) < 5


class Point(BaseModel):
    north: bool
    label: Literal["here", "there"]


def test_the_client_library_parses(served: Served) -> None:
    found = served.client.chat.completions.parse(model="tiny", messages=QUESTION, response_format=Point,  # type: ignore
                                                 max_tokens=300, temperature=1, seed=1)
    assert isinstance(found.choices[0].message.parsed, Point)
    forced = served.client.chat.completions.create(model="tiny", messages=QUESTION, tools=[TIME],  # type: ignore
                                                   tool_choice="required", max_tokens=300, temperature=0)
    call, = forced.choices[0].message.tool_calls[:1]
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA_OF["get_time"])
    assert forced.choices[0].finish_reason == "tool_calls"


def test_the_command_line_takes_a_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(closed(a=COUNT)))
    for more in ([], ["--raw"], ["--think"]):
        assert main(["run", "Hello", "--schema", str(file), "--temperature", "0", "--threads", "1", *more]) == 0
        assert capsys.readouterr().out.rpartition("{")[2].count("}") == 1
    file.write_text(json.dumps({"type": "strange"}))
    assert main(["run", "Hello", "--schema", str(file), "--threads", "1"]) == 2
