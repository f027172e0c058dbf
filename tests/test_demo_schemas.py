"""The embedded model finishes the schemas with which clients try a server first, as pydantic and zod write them."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator
from enum import Enum
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field
from test_server_harness import Served, serving, tiny

from deltic.chat.json_schema import Bounds
from deltic.config import GenerationDefaults

jsonschema = pytest.importorskip("jsonschema")


class Colour(Enum):
    RED, BLUE = "red", "blue"


class Capital(BaseModel):
    city: str
    country: str = Field(description="where it is")


class Recipe(BaseModel):
    name: str
    ingredients: list[Capital]
    steps: list[str]


class Person(BaseModel):
    name: str
    age: int
    height: float
    email: str | None = None
    born: datetime.date | None = None


class Mood(BaseModel):
    mood: Literal["positive", "negative", "neutral"]
    confidence: float = Field(ge=0, le=1)
    colours: list[Colour]


class Notes(BaseModel):
    tags: dict[str, str]
    scores: dict[str, int]
    more: dict[str, Any]


ZOD = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "additionalProperties": False,
       "required": ["recipe"], "properties": {"recipe": {
           "type": "object", "additionalProperties": False, "required": ["name", "steps"], "properties": {
               "name": {"type": "string"}, "steps": {"type": "array", "items": {"type": "string"}}}}}}
SCHEMAS = [*(kind.model_json_schema() for kind in (Capital, Recipe, Person, Mood, Notes)), ZOD]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(tiny()) as running:
        yield running


def asked(served: Served, temperature: float, **more: Any) -> Any:
    answer = served.post("/v1/chat/completions", messages=[{"role": "user", "content": "Generate a lasagna recipe."}],
                         max_tokens=512, temperature=temperature, seed=1, **more)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.get("title", "zod"))
@pytest.mark.covering
def test_answers_match_their_schema(served: Served, schema: dict[str, Any], strict: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": strict, "schema": schema}}
    for temperature in (0.0, 1.0):
        choice = asked(served, temperature, response_format=form)
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)


@pytest.mark.parametrize("schema", [
    pytest.param(schema, marks=() if schema is ZOD or schema["title"] == "Capital" else pytest.mark.slow)
    for schema in SCHEMAS])
def test_arguments_match_their_schema(served: Served, schema: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "final_result", "strict": True, "parameters": schema}}
    choice = asked(served, 0.0, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    assert choice["finish_reason"] == "tool_calls"
    jsonschema.validate(json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]), schema)


def test_json_object_without_a_schema(served: Served) -> None:
    choice = asked(served, 0.0, response_format={"type": "json_object"})
    assert choice["finish_reason"] == "stop" and isinstance(json.loads(choice["message"]["content"]), dict)


def test_field_names_of_an_object_without_a_schema() -> None:
    """DSPy asks for `json_object` and names its outputs in the prompt: `final_answer`, `next_tool_args`."""
    (pattern,) = Bounds(120, 8).on({"type": "object"})["patternProperties"]
    for name in ("answer", "final_answer", "next_tool_name", "city2", "firstName"):
        assert re.search(pattern, name), name
    for name in ("", "_", "2nd", "a b", "a" * 25):
        assert not re.search(pattern, name), name


def test_bounds_keep_those_of_the_schema() -> None:
    given = GenerationDefaults.from_hf({"json_max_length": 40, "json_max_items": 3})
    assert not given.sampling() and Bounds.of(GenerationDefaults()) is None
    bounds = Bounds.of(given)
    assert bounds is not None
    kept = {"type": "object", "additionalProperties": False, "properties": {
        "a": {"type": "string", "maxLength": 500}, "b": {"type": "array", "maxItems": 9}, "c": {"enum": ["x" * 99]},
        "d": {"type": "integer", "minimum": 2**40}, "e": {"type": "string", "pattern": "^a*$"}}}
    assert bounds.on(kept) == kept
    assert bounds.on({"type": "string", "minLength": 50})["maxLength"] == 50
