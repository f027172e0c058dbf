"""The first calls for structured output that people make, against the embedded model: what comes back makes sense."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from enum import Enum
from typing import Any, Literal

import pytest
from openai import OpenAI
from openai.lib._pydantic import to_strict_json_schema
from pydantic import BaseModel, Field
from test_server_harness import Served, serving, tiny


class Capital(BaseModel):
    country: str
    capital: str


class City(BaseModel):
    name: str
    population: int


class Country(BaseModel):
    name: str
    capital: str
    languages: list[str]
    continent: str


class Answer(BaseModel):
    answer: str


class Sum(BaseModel):
    result: int


class Colors(BaseModel):
    colors: list[str]


class Sentiment(BaseModel):
    sentiment: Literal["positive", "negative", "neutral"]


class Mood(Enum):
    POSITIVE, NEGATIVE, NEUTRAL = "positive", "negative", "neutral"


class Review(BaseModel):
    mood: Mood = Field(description="how the writer feels")


class CalendarEvent(BaseModel):
    name: str
    date: str
    participants: list[str]


class User(BaseModel):
    name: str
    age: int


class Users(BaseModel):
    users: list[User]


class Ingredient(BaseModel):
    name: str
    amount: str


class Recipe(BaseModel):
    name: str
    ingredients: list[Ingredient]
    steps: list[str]


class Lasagna(BaseModel):
    recipe: Recipe


class Containing(str):
    """Equals the texts in which it is: a fact may be given as a word or as a sentence."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and str(self) in other

    __hash__ = str.__hash__


EXTRACT = "Extract the event information."
CASES: list[tuple[type[BaseModel], str, str, dict[str, Any]]] = [
    (Capital, "", "What is the capital of France?", {"country": "France", "capital": "Paris"}),
    (Capital, "You are a helpful assistant.", "What is the capital of Japan?", {"country": "Japan",
    "capital": "Tokyo"}),
    (City, "", "Tell me about Paris.", {"name": "Paris", "population": 2_100_000}),
    (Country, "", "Tell me about Italy.",
     {"name": "Italy", "capital": "Rome", "languages": ["Italian"], "continent": "Europe"}),
    (Answer, "", "What is the capital of Spain?", {"answer": Containing("Madrid")}),
    (Sum, "", "What is 2 + 3?", {"result": 5}),
    (Colors, "", "List three colors.", {"colors": ["red", "blue", "green"]}),
    (Sentiment, "", "Classify the sentiment: I love this movie!", {"sentiment": "positive"}),
    (Sentiment, "", "Classify the sentiment: The food was terrible.", {"sentiment": "negative"}),
    (Review, "", "This phone is really great.", {"mood": "positive"}),
    (CalendarEvent, EXTRACT, "Alice and Bob are going to a science fair on Friday.",
     {"name": "science fair", "date": "Friday", "participants": ["Alice", "Bob"]}),
    (User, "", "Jason is 25 years old.", {"name": "Jason", "age": 25}),
    (Users, "", "Extract the users: Anna is 31 and Tom is 7.",
     {"users": [{"name": "Anna", "age": 31}, {"name": "Tom", "age": 7}]}),
]  # fmt: skip
IDS = [f"{model.__name__}-{number}" for number, (model, *_) in enumerate(CASES)]
cases = pytest.mark.parametrize(("model", "system", "question", "wanted"), CASES, ids=IDS)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(tiny()) as running:
        yield running


def messages(system: str, question: str) -> list[Any]:
    return [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": question}]


def client(served: Served) -> OpenAI:
    return OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def kept(model: type[BaseModel], found: Any) -> Any:
    """A value with what may be left out put in."""
    return model.model_validate(found).model_dump(mode="json")


@cases
def test_openai_parse(served: Served, model: type[BaseModel], system: str, question: str, wanted: Any) -> None:
    with client(served) as openai:
        found = openai.chat.completions.parse(model="default", messages=messages(system, question),
                                              response_format=model, temperature=0, max_tokens=400)
    assert kept(model, found.choices[0].message.parsed) == wanted


@cases
def test_responses_parse_as_agents_do(served: Served, model: type[BaseModel], system: str, question: str, wanted: Any
                                      ) -> None:
    """The Agents SDK asks so where an agent has an output_type."""
    with client(served) as openai:
        found = openai.responses.parse(model="default", instructions=system or "You are a helpful assistant.",
                                       input=question, text_format=model, temperature=0, max_output_tokens=400)
    assert kept(model, found.output_parsed) == wanted


@cases
def test_schema_in_the_prompt_as_ai_sdk_puts_it(served: Served, model: type[BaseModel], system: str, question: str,
                                                wanted: Any) -> None:
    """With response_format json_object, and without any."""
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", **to_strict_json_schema(model)}
    said = (f"JSON schema:\n{json.dumps(schema, separators=(',', ':'))}\n"
            "You MUST answer with a JSON object that matches the JSON schema above.")
    asking = messages(f"{system}\n\n{said}".strip(), question)
    for form in ({}, {"response_format": {"type": "json_object"}}):
        assert kept(model, json.loads(answered(served, asking, **form))) == wanted


@cases
def test_forced_tool_as_instructor_declares_it(served: Served, model: type[BaseModel], system: str, question: str,
                                               wanted: Any) -> None:
    function = {"name": model.__name__, "parameters": model.model_json_schema(), "description":
                f"Correctly extracted `{model.__name__}` with all the required parameters with correct types"}
    answer = served.post("/v1/chat/completions", messages=messages(system, question), temperature=0, max_tokens=400,
                         tools=[{"type": "function", "function": function}],
                         tool_choice={"type": "function", "function": {"name": model.__name__}})
    call, = answer.json()["choices"][0]["message"]["tool_calls"]
    assert kept(model, json.loads(call["function"]["arguments"])) == wanted


HEAD = "Your input fields are:\n1. `question` (str):\nYour output fields are:\n1. `answer` (str):\n"
HOW = "All interactions will be structured in the following way, with the appropriate values filled in.\n\n"
GOAL = "\nIn adhering to this structure, your objective is: \n" + " " * 8 + (
    "Given the fields `question`, produce the fields `answer`.")


@pytest.mark.parametrize(("field", "question", "wanted"), [
    ("answer", "What is the capital of France?", "Paris"), ("answer", "What is 3 + 4?", "7"),
    ("answer", "What colour is a banana?", "yellow"), ("final_answer", "What is the capital of France?", "Paris"),
    ("final_answer", "What colour is a banana?", "yellow")])
def test_dspy_question_and_answer(served: Served, field: str, question: str, wanted: str) -> None:
    """What `dspy.Predict("question -> answer")` sends: first by its chat adapter, then by its JSON adapter."""
    head, goal = HEAD.replace("`answer`", f"`{field}`"), GOAL.replace("`answer`", f"`{field}`")
    asked = f"[[ ## question ## ]]\n{question}\n\n"
    sections = f"[[ ## question ## ]]\n{{question}}\n\n[[ ## {field} ## ]]\n{{{field}}}\n\n[[ ## completed ## ]]"
    system = f"{head}{HOW}{sections}{goal}"
    user = (f"{asked}Respond with the corresponding output fields, starting with the field `[[ ## {field} ## ]]`, and "
            "then ending with the marker for `[[ ## completed ## ]]`.")
    said = answered(served, messages(system, user))
    assert re.fullmatch(rf"\[\[ ## {field} ## ]]\n[^\n]*{wanted}[^\n]*\n\n\[\[ ## completed ## ]]", said), said
    system = (f"{head}{HOW}Inputs will have the following structure:\n\n[[ ## question ## ]]\n{{question}}\n\nOutputs "
              f"will be a JSON object with the following fields.\n\n{{\n  \"{field}\": \"{{{field}}}\"\n}}{goal}")
    user = f"{asked}Respond with a JSON object in the following order of fields: `{field}`."
    for form in ({}, {"response_format": {"type": "json_object"}}):
        assert json.loads(answered(served, messages(system, user), **form)) == {field: Containing(wanted)}


def answered(served: Served, asking: list[Any], **more: Any) -> str:
    answer = served.post("/v1/chat/completions", messages=asking, temperature=0, max_tokens=400, **more)
    return str(answer.json()["choices"][0]["message"]["content"])


def test_the_lasagna_of_the_ai_sdk(served: Served) -> None:
    with client(served) as openai:
        found = openai.chat.completions.parse(model="default", messages=messages("", "Generate a lasagna recipe."),
                                              response_format=Lasagna, temperature=0, max_tokens=600)
    recipe = found.choices[0].message.parsed
    assert recipe is not None and recipe.recipe.name == "Lasagna"
    assert {"cheese", "tomato sauce"} <= {part.name for part in recipe.recipe.ingredients}
    assert len(recipe.recipe.steps) == 3


def test_any_object_has_the_form_that_fits_the_question(served: Served) -> None:
    """`json_object` without a schema anywhere: the model chooses names, lists and objects within."""
    form = {"response_format": {"type": "json_object"}}
    assert "Paris" in json.loads(answered(served, messages("", "What is the capital of France?"), **form)).values()
    (recipe,) = json.loads(answered(served, messages("", "Generate a lasagna recipe."), **form)).values()
    assert recipe["name"] == "Lasagna" and {"name", "amount"} == {*recipe["ingredients"][0]} and recipe["steps"]
