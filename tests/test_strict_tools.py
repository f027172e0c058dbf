"""Strict tools keep their schemas, however they are written; others as far as the grammar library can."""

from __future__ import annotations

import datetime
import json
import random
from collections.abc import Iterator
from contextlib import ExitStack
from enum import Enum, IntEnum
from functools import cache
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, create_model
from test_server_harness import Served, scripted, serving, tiny

from deltic import LLM, SamplingParams
from deltic.chat.structured import Grammars
from deltic.chat.tool_grammar import CallAnswers, call_parts
from deltic.chat.tools import PARSERS, QWEN, CallForm
from deltic.errors import RequestError

jsonschema = pytest.importorskip("jsonschema")

QUESTION = [{"role": "user", "content": "Give me JSON"}]


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


@cache
def model(parser: str = "auto") -> LLM:
    return LLM(dtype="float32", threads=1, max_context=2048, memory="64MiB", max_batch=8, tool_call_parser=parser)


@cache
def brief() -> dict[int, float]:
    """A bias for what ends texts, lists and objects: a model this small writes on and on."""
    tokenizer = tiny().chat_processor.tokenizer
    return {token: 6.0 for token in range(tokenizer.vocab_size)
            if set(tokenizer.token_bytes(token)) & set(b'"]}<\n') and token not in tokenizer.added.values()}


def tool(schema: Any, strict: bool = True, name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "strict": strict, "parameters": schema}}


@pytest.fixture(scope="module")
def served() -> Iterator[dict[str, Served]]:
    """The embedded model behind a server, by the form in which it writes calls."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(serving(model(name))) for name in PARSERS}


def called(served: Served, schema: Any, temperature: float = 0.0, seed: int = 5, strict: bool = True) -> Any:
    """The arguments of a forced call; None if it was cut."""
    answer = served.post("/v1/chat/completions", messages=QUESTION, tools=[tool(schema, strict)], max_tokens=120,
                         tool_choice="required", parallel_tool_calls=False, temperature=temperature, seed=seed,
                         logit_bias=brief())
    if answer.status_code != 200:
        raise RequestError(answer.json()["error"]["message"], answer.json()["error"]["param"])
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] in ("tool_calls", "length")
    if choice["finish_reason"] == "length":
        return None
    call, = choice["message"]["tool_calls"]
    return json.loads(call["function"]["arguments"])


def fits(arguments: Any, schema: Any) -> None:
    jsonschema.validate(arguments, schema, format_checker=jsonschema.FormatChecker())


RED = {"type": "string", "enum": ["red", "blue"]}
NODE = closed(v={"type": "integer"}, kids={"type": "array", "items": {"$ref": "#/$defs/N"}, "maxItems": 2})
KEPT: dict[str, Any] = {
    "nullable enumeration": closed(c={"anyOf": [RED, {"type": "null"}]}),
    "nullable constant": closed(c={"anyOf": [{"const": "auto"}, {"type": "integer"}]}),
    "text that looks like a number": closed(c={"anyOf": [{"type": "string", "minLength": 1}, {"type": "integer",
                                                                                            "minimum": 500}]}),
    "text that looks like null": closed(c={"anyOf": [{"type": "string", "pattern": "^(null|nul)$"}, {"type": "null"}]}),
    "enumeration of several types": closed(c={"enum": ["1", 2, None, "null", True, "x"]}),
    "text beside an object": closed(c={"anyOf": [{"type": "string", "minLength": 3}, closed(a={"type": "boolean"})]}),
    "nullable pattern": closed(c={"anyOf": [{"type": "string", "pattern": "^\\d{3}$"}, {"type": "null"}]}),
    "nullable date": closed(c={"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]}),
    "all of a reference": {"definitions": {"C": RED}, **closed(c={"allOf": [{"$ref": "#/definitions/C"}]})},
    "all of two": closed(c={"allOf": [{"type": "string", "pattern": "^[a-f]+$"}, {"minLength": 3, "maxLength": 5}]}),
    "one of two that a constant tells apart": {"$defs": {
        "cat": closed(kind={"const": "cat"}, lives={"type": "integer", "minimum": 0, "maximum": 9}),
        "dog": closed(kind={"enum": ["dog", "pup"]}, barks={"type": "boolean"})}, **closed(pet={
            "discriminator": {"propertyName": "kind"}, "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]})},
    "an anchor": {"$defs": {"a": {"$anchor": "foo", "type": "integer"}}, **closed(x={"$ref": "#foo"})},
    "an escaped pointer": {"$defs": {"a/b c": {"type": "integer"}}, **closed(x={"$ref": "#/$defs/a~1b%20c"})},
    "a reference to a property": closed(a=RED, b={"$ref": "#/properties/a"}),
    "a reference at the root": {"$defs": {"N": NODE}, "$ref": "#/$defs/N"},
    "a reference to the root": {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#"}},
                                "required": ["v"], "additionalProperties": False},
    "all of at the root": {"allOf": [closed(v={"type": "integer"})]},
    "any of at the root": {"anyOf": [closed(v={"type": "integer"}), closed(w={"type": "boolean"})]},
    "patterns of properties": {"type": "object", "patternProperties": {"^x[0-9]$": {"type": "integer"}},
                               "additionalProperties": False, "minProperties": 1, "maxProperties": 2},
    "a dictionary": {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1,
                     "maxProperties": 2},
    "what is required and not described": {"type": "object", "properties": {}, "required": ["a"],
                                           "additionalProperties": {"type": "boolean"}},
    "numbers of 64 bits": closed(c={"type": "integer", "minimum": -2**63, "maximum": 2**63 - 1}),
    "unsigned numbers of 64 bits": closed(c={"type": "integer", "minimum": 0, "maximum": 2**64 - 1}),
    "single precision": closed(c={"type": "number", "minimum": -3.4028235e38, "maximum": 3.4028235e38}),
    "lengths": closed(a={"type": "string", "maxLength": 500}, b={"type": "string", "minLength": 40},
                      c={"type": "string", "minLength": 3, "maxLength": 50}, d={"type": "string", "minLength": 1}),
    "a repeated sign": closed(c={"type": "string", "pattern": "^.{1,50}$"}),
    "alternatives with anchors": closed(c={"type": "string", "pattern": "^(a|b)+$"}),
    "endless lengths": closed(c={"type": "string", "minLength": 2, "maxLength": 2**63 - 1}),
    "formats": closed(**{name: {"type": "string", "format": name} for name in (
        "date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "duration")}),
    "an optional parameter that nothing fits": {"type": "object", "properties": {"a": RED, "b": False},
                                                "required": ["a"], "additionalProperties": False},
}


@pytest.mark.parametrize("parser", ["qwen", "json", "minimax"])
@pytest.mark.parametrize("name", KEPT)
@pytest.mark.covering
def test_strict_tools_keep_their_schemas(name: str, parser: str, served: dict[str, Served]) -> None:
    seen = 0
    for attempt, temperature in enumerate((0.0, 1.5, 0.7, 1.0), 1):  # a few more where long texts never ended
        arguments = called(served[parser], KEPT[name], temperature, attempt) if attempt < 3 or not seen else None
        if arguments is not None:
            fits(arguments, KEPT[name])
            seen += 1
    assert seen or name in ("a reference at the root", "formats")


@pytest.mark.parametrize("parser", ["qwen", "json", "minimax"])
def test_a_forced_call_without_arguments_is_one(parser: str, served: dict[str, Served]) -> None:
    assert called(served[parser], {"type": "object", "properties": {}}) == {}


REFUSED: dict[str, Any] = {
    "not": closed(a={"type": "string", "not": {"const": "JSon"}}),
    "if": {**closed(a={"type": "string"}, b={"type": "string"}), "if": {"required": ["a"]},
           "then": {"required": ["b"]}},
    "dependent": {**closed(a={"type": "string"}), "dependentRequired": {"a": ["b"]}},
    "remote": closed(x={"$ref": "https://example.com/never.json"}),
    "unknown type": closed(x={"type": "any"}),
    "unknown format": closed(x={"type": "string", "format": "binary"}),
    "look-around": closed(x={"type": "string", "pattern": "^(?!a)b"}),
    "one of two": closed(x={"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]}),
    "unique": closed(x={"type": "array", "uniqueItems": True}),
    "contradiction": closed(x={"type": "string", "minLength": 3, "maxLength": 2}),
    "beyond 64 bits": closed(x={"type": "integer", "minimum": 1e20}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_strict_tools_are_refused_as_formats_are(name: str) -> None:
    """With the field of the tool, and the same reason."""
    schema, said = REFUSED[name], []
    form = {"name": "x", "strict": True, "schema": schema}
    for more in ({"tools": [tool(closed(x={"type": "string"}), name="g"), tool(schema)], "tool_choice": "required"},
                 {"response_format": {"type": "json_schema", "json_schema": form}}):
        with pytest.raises(RequestError) as refusal:
            model().chat(QUESTION, SamplingParams(max_tokens=1), **more)  # type: ignore[arg-type]
        said.append((refusal.value.field, str(refusal.value).removeprefix(f"{refusal.value.field} ")))
    assert said[0] == ("tools[1].function.parameters", said[1][1])


@pytest.mark.parametrize("name", [name for name in REFUSED if name != "contradiction"])
def test_other_tools_are_loosened(name: str, served: dict[str, Served]) -> None:
    for temperature in (0.0, 1.0):
        arguments = called(served["auto"], REFUSED[name], temperature, strict=False)
        assert arguments is None or isinstance(arguments, dict)


# Schemas as pydantic writes them


class Colour(Enum):
    RED, BLUE = "red", "sky blue"


class Level(IntEnum):
    LOW, HIGH = 1, 10


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    on: bool
    name: Annotated[str, Field(max_length=8)] = "x"


class Tree(BaseModel):
    model_config = ConfigDict(extra="forbid")
    leaf: bool
    left: Tree | None
    right: Tree | None


class Cat(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=0, le=9)]


class Dog(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["dog"]
    barks: bool


SHORT = Annotated[str, Field(min_length=1, max_length=10)]
TYPES: list[Any] = [
    bool, int, SHORT, Annotated[str, Field(pattern=r"^[a-z]{2,6}$")], Colour, Level, Literal["a", "b", "c d"],
    Literal[1, 2, "one"], Inner, Tree, Cat | Dog, datetime.date, datetime.datetime, Annotated[int, Field(gt=-5, le=99)],
    Annotated[float, Field(ge=0.5, lt=2.5)], dict[SHORT, bool], dict[str, int], None,
    Annotated[str, Field(max_length=300)],
    Annotated[int, Field(ge=-2**63, lt=2**63)], Annotated[float, Field(ge=0, le=1e300)]]


def annotation(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    if depth < 2 and kind < 0.2:
        return annotation(rng, depth + 1) | None
    if depth < 2 and kind < 0.35:
        return Annotated[list[annotation(rng, depth + 1)], Field(max_length=2)]  # type: ignore[misc]
    if depth < 2 and kind < 0.45:
        return annotation(rng, depth + 1) | rng.choice([int, bool, SHORT, Inner])
    return rng.choice(TYPES)


def made(seed: int) -> type[BaseModel]:
    """A model of a few fields of such types."""
    rng = random.Random(seed)
    fields: dict[str, Any] = {}
    for place in range(rng.randint(1, 3)):
        kind = annotation(rng)
        fields[f"field_{place}"] = (kind, ... if rng.random() < 0.7 else None)
    return create_model(f"Made{seed}", __config__=ConfigDict(extra="forbid"), **fields)


def check_made(served: dict[str, Served], seed: int) -> int:
    schema = made(seed).model_json_schema()
    parser = [name for name in PARSERS if name != "auto"][seed % 3]
    try:
        arguments = called(served[parser], schema, [0.0, 1.0, 1.5][seed // 3 % 3], seed)
    except RequestError as refusal:
        assert "propertyNames" in str(refusal)
        return 0
    if arguments is None:
        return 0
    fits(arguments, schema)
    return 1


@pytest.mark.slow
def test_calls_match_pydantic_schemas(served: dict[str, Served]) -> None:
    assert sum(check_made(served, seed) for seed in range(15)) > 7


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_many_calls_match_pydantic_schemas(part: int, served: dict[str, Served]) -> None:
    assert sum(check_made(served, 1000 + seed) for seed in range(part * 60, part * 60 + 60)) > 30


PRICE = closed(amount={"anyOf": [{"type": "number"}, {
    "type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]})  # as pydantic writes a Decimal


def test_decimal_patterns_are_not_enforced_without_strict(served: dict[str, Served]) -> None:
    """Their pattern looks ahead."""
    assert called(served["auto"], PRICE, strict=False) is not None
    with pytest.raises(RequestError, match="look-around"):
        called(served["auto"], PRICE)


# Values that hold closing tags


def written(form: CallForm, *parameters: tuple[str, str]) -> str:
    """A call as its form writes it."""
    assert form.parameter
    inner = "".join(f"{form.parameter[0]}{key}{form.parameter[1]}{value}{form.parameter_end}"
                    for key, value in parameters)
    return f"{form.opening}{form.function[0]}f{form.function[1]}{inner}{form.function_end}{form.closing}"


def may_be_written(form: CallForm, schema: Any, text: str, strict: bool = True) -> bool:
    calls = CallAnswers(form, {0: tool(schema, strict)["function"]}, needed=True)
    tokenizer = tiny().chat_processor.tokenizer
    pending = Grammars(tokenizer).grammar(lambda known, schemas: call_parts(calls, known.tags, schemas), "tools")
    pending.compile()
    matcher = pending.grammar.matcher()
    return bool(matcher.consume_tokens(tokenizer.encode(text)) and matcher.is_accepting())


FILES = closed(path={"type": "string"}, content={"type": "string"}, mode={"type": "integer"})
OPTIONAL = {"type": "object", "properties": {key: {"type": "string"} for key in "abc"}, "required": ["b"],
            "additionalProperties": False}
XML = "<a>\n</parameter>\n<b/>\n</parameter>\nend </parameter>, </function>"


def test_a_text_may_hold_closing_tags() -> None:
    """It ends only where another parameter or the function's end follows; the reader gives the same text."""
    last = closed(content={"type": "string"})
    for value in (XML, "\n</parameter>\n", "</parameter>", "a\n</parameter>\n\n</function>\n"):
        for first, second in ((value, "c"), ("p", value)):
            whole = written(QWEN, ("path", first), ("content", second), ("mode", "3"))
            assert may_be_written(QWEN, FILES, whole), value
        assert may_be_written(QWEN, last, written(QWEN, ("content", value))), value


@pytest.mark.usefixtures("script_server")
def test_the_reader_gives_a_text_with_closing_tags_back() -> None:
    for value in (XML, "\n</parameter>\n", "</parameter>", "x\n</parameter>\ny", "a\n</parameter>\n\n</function>\nb"):
        with scripted(written(QWEN, ("path", value), ("content", value), ("mode", "3"))) as (served, _):
            answer = served.post("/v1/chat/completions", messages=QUESTION, tools=[tool(FILES)]).json()
        call, = answer["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"path": value, "content": value, "mode": 3}
        assert not answer["choices"][0]["message"]["content"]


def test_what_would_end_a_text_elsewhere_is_not_written_within() -> None:
    """Nothing is cut without a word: such a token is never drawn."""
    last = closed(content={"type": "string"})
    assert not may_be_written(QWEN, last, written(QWEN, ("content", "a\n</parameter>\n<parameter=content>\nb")))
    assert not may_be_written(QWEN, FILES, written(QWEN, ("path", "a\n</parameter>\n</function>\nb"),
                                                   ("content", "c"), ("mode", "3")))


def test_a_text_that_has_to_match_holds_no_closing_tag() -> None:
    """It cannot be cut: the tag is not written."""
    short = closed(content={"type": "string", "maxLength": 40})
    assert may_be_written(QWEN, short, written(QWEN, ("content", "a <b> </c>")))
    assert not may_be_written(QWEN, short, written(QWEN, ("content", "a\n</parameter>\nb")))


def test_which_parameters_may_follow_each_other() -> None:
    """In the order of the schema, those that are required always, each once."""
    for keys, fits_ in (("b", True), ("ab", True), ("abc", True), ("bc", True), ("", False), ("a", False),
                        ("ac", False), ("ba", False), ("bb", False), ("cb", False)):
        text = written(QWEN, *((key, "x") for key in keys))
        assert may_be_written(QWEN, OPTIONAL, text) == fits_, keys
    assert may_be_written(QWEN, closed(), written(QWEN))
    assert not may_be_written(QWEN, FILES, written(QWEN, ("path", "p"), ("content", "c"), ("mode", "x")))
