"""How clients ask for an object: as response_format, with the schema in the prompt, as DSPy does, as a tool."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import data
from data import Dialogue, Message, Sample, assistant, call_message
from phrases import TRAIN
from schemas import Field, Json, Object, camel, plain, pydantic, zod
from structured import Task, make_task

SHARE = 0.24  # of training
_INSTRUCTIONS = (
    "Answer with a JSON object of this schema: {schema}", "Respond in JSON that follows this schema:\n{schema}",
    "Return only JSON. Schema:\n{schema}", "JSON schema:\n{schema}\nYou MUST answer with JSON.",
    "The output should be formatted as a JSON instance that conforms to the JSON schema below.\n\n"
    "Here is the output schema:\n```\n{schema}\n```", "Respond with JSON. The schema is {schema}",
)  # fmt: skip
_AI_SDK = "JSON schema:\n{schema}\nYou MUST answer with a JSON object that matches the JSON schema above."
_GENIUS = (
    "As a genius expert, your task is to understand the content and provide\nthe parsed objects in json that match the "
    "following json_schema:\n\n\n{schema}\n\nMake sure to return an instance of the JSON, not the schema itself"
)
_LANGCHAIN = (
    "The output should be formatted as a JSON instance that conforms to the JSON schema below.\n\nAs an example, "
    'for the schema {{"properties": {{"foo": {{"title": "Foo", "description": "a list of strings", '
    '"type": "array", "items": '
    '{{"type": "string"}}}}}}, "required": ["foo"]}}\n'
    'the object {{"foo": ["bar", "baz"]}} is a well-formatted '
    'instance of the schema. The object {{"properties": {{"foo": ["bar", "baz"]}}}} is not well-formatted.\n\nHere is '
    "the output schema:\n```\n{schema}\n```"
)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _system(d: Dialogue, task: Task) -> str:
    """What the developer says, if anything."""
    draw = d.rng.random()
    if task.system and draw < 0.4:
        return d.rng.choice(task.system)
    return d.rng.choice(data.SYSTEMS[d.split]) if draw < 0.65 else ""


def _messages(system: str, user: str) -> list[Message]:
    return [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": user}]


def _schema(d: Dialogue, thing: Object) -> Json:
    if d.rng.random() < 0.4:
        start = {"$schema": d.rng.choice(["http://json-schema.org/draft-07/schema#",
                                          "https://json-schema.org/draft/2020-12/schema"])}  # fmt: skip
        return (start if d.rng.random() < 0.6 else {}) | zod(thing)
    return pydantic(thing, d.rng, strict=d.rng.random() < 0.5, described=d.rng.random() < 0.3)


def as_format(d: Dialogue, task: Task) -> Sample:
    """The schema is enforced and not shown: how the answer begins is no choice of the model."""
    thinking = d.rng.random() < 0.12
    thought = f"{task.thought} I give the object.".strip() if thinking else ""
    answer = camel(task.answer) if d.rng.random() < 0.2 else task.answer
    target = assistant(thought, _dump(answer.plain()))
    return Sample(task.kind, _messages(_system(d, task), task.user), target, None, thinking, '{"')


def with_schema(d: Dialogue, task: Task) -> Sample:
    """The schema is in the prompt, as AI SDK, instructor, LangChain and others put it there."""
    thing = camel(task.answer) if d.rng.random() < 0.3 else task.answer
    schema, system = _schema(d, thing), _system(d, task)
    draw = d.rng.random()
    if draw < 0.45:
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
        messages = _messages((system + "\n\n" if system else "") + _AI_SDK.replace("{schema}", text), task.user)
    elif draw < 0.6:
        text = _GENIUS.replace("{schema}", json.dumps(schema, ensure_ascii=False, indent=2))
        messages = _messages((system + "\n\n" if system else "") + text, task.user)
    else:
        text = _LANGCHAIN.replace("{{", "{").replace("}}", "}") if draw < 0.7 else d.rng.choice(_INSTRUCTIONS)
        text = text.replace("{schema}", _dump(schema) if d.rng.random() < 0.7 else json.dumps(schema, indent=2))
        if d.rng.random() < 0.5:
            messages = _messages((system + "\n\n" if system else "") + text, task.user)
        else:
            messages = _messages(system, task.user + d.rng.choice(["\n\n", "\n"]) + text)
    return Sample(task.kind, messages, assistant("", _dump(thing.plain())), None, False)


def as_tool(d: Dialogue, task: Task) -> Sample:
    """The schema is that of a tool that has to be called, as instructor, LangChain and pydantic-ai do it."""
    thing = task.answer
    schema = _schema(d, thing)
    name, about = d.rng.choice([
        (thing.name, f"Correctly extracted `{thing.name}` with all the required parameters with correct types"),
        (thing.name, ""), ("final_result", "The final response which ends this conversation"),
        ("json", "Respond with a JSON object."), (thing.name, "Return the result."),
    ])  # fmt: skip
    function = {"name": name, **({"description": about} if about else {}), "parameters": schema}
    tools = [{"type": "function", "function": function}]
    arguments = {key: value if isinstance(value, str) else _dump(value) for key, value in thing.plain().items()}
    target = assistant("", "", [call_message(name, arguments)])
    return Sample(task.kind, _messages(_system(d, task), task.user), target, tools, False, "<tool_call>")


# DSPy

_HOW = "All interactions will be structured in the following way, with the appropriate values filled in."
_NAMES = {str: "str", int: "int", float: "float", bool: "bool"}


def _annotation(field: Field) -> str:
    """The Python type as DSPy names it."""
    if field.options:
        return f"Literal[{', '.join(map(repr, field.options))}]"
    if isinstance(field.value, list):
        return f"list[{_annotation(replace(field, value=field.value[0] if field.value else ''))}]"
    return field.value.name if isinstance(field.value, Object) else _NAMES[type(field.value)]


def _type_first(schema: Any) -> Any:
    """The order in which DSPy shows a schema."""
    if isinstance(schema, dict):
        return {key: _type_first(schema[key]) for key in sorted(schema, key=lambda key: (key != "type", key))}
    return [_type_first(item) for item in schema] if isinstance(schema, list) else schema


def _note(field: Field, d: Dialogue) -> str:
    """What DSPy says of the value that has to be produced."""
    if field.options:
        said = f"must exactly match (no extra characters) one of: {'; '.join(field.options)}"
    elif isinstance(field.value, bool):
        said = "must be True or False"
    elif isinstance(field.value, int | float):
        said = f"must be a single {_annotation(field)} value"
    elif isinstance(field.value, str):
        return ""
    else:
        schema = pydantic(Object("X", (field,)), d.rng, strict=False, described=False)
        [part] = schema.pop("properties").values()
        part.pop("title", None)
        inner = {"$defs": schema["$defs"]} if "$defs" in schema else {}
        if "$ref" in part:
            found = dict(inner["$defs"])
            part = found.pop(part["$ref"].rpartition("/")[2])
            inner = {"$defs": found} if found else {}
        said = f"must adhere to the JSON schema: {_dump(_type_first(inner | part))}"
    return f"        # note: the value you produce {said}"


def as_dspy(d: Dialogue, task: Task) -> Sample:
    """DSPy's prompt: its chat adapter's sections, or a JSON object."""
    fields = tuple(field for field in task.answer.fields if not field.optional and field.value is not None)
    if not fields:
        return as_format(d, task)
    if task.thought and not any(f.key == "reasoning" for f in fields) and d.rng.random() < 0.3:
        fields = (Field("reasoning", task.thought), *fields)
    free = [name for name in task.subject if all(f.key != name for f in fields)]
    given, sections = d.rng.choice(free or ["request"]), d.rng.random() < 0.5
    head = f"Your input fields are:\n1. `{given}` (str):\nYour output fields are:\n"
    head += "\n".join(f"{i + 1}. `{f.key}` ({_annotation(f)}): " for i, f in enumerate(fields)).strip()
    notes = {f.key: "{" + f.key + "}" + _note(f, d) for f in fields}
    into = f"[[ ## {given} ## ]]\n{{{given}}}"
    if sections:
        out = "\n\n".join(f"[[ ## {key} ## ]]\n{note}" for key, note in notes.items())
        system = f"{head}\n{_HOW}\n\n{into}\n\n{out}\n\n[[ ## completed ## ]]"
        wanted = ", then ".join(f"`[[ ## {f.key} ## ]]`{_must(f)}" for f in fields)
        end = (f"Respond with the corresponding output fields, starting with the field {wanted}, and then ending with "
               "the marker for `[[ ## completed ## ]]`.")  # fmt: skip
        values = (str(f.value) if isinstance(f.value, str | bool) else _dump(plain(f.value)) for f in fields)
        said = "\n\n".join(f"[[ ## {f.key} ## ]]\n{value}" for f, value in zip(fields, values, strict=True))
        said += "\n\n[[ ## completed ## ]]"
    else:
        out = json.dumps(notes, indent=2, ensure_ascii=False)
        system = (f"{head}\n{_HOW}\n\nInputs will have the following structure:\n\n{into}\n\nOutputs will be a JSON "
                  f"object with the following fields.\n\n{out}")  # fmt: skip
        end = "Respond with a JSON object in the following order of fields: "
        end += ", then ".join(f"`{f.key}`{_must(f)}" for f in fields) + "."
        said = _dump(Object("", fields).plain())
    produced = ", ".join(f"`{f.key}`" for f in fields if f.key != "reasoning")
    goal = f"Given the fields `{given}`, produce the fields {produced}."
    if task.system and d.rng.random() < 0.4:
        goal = d.rng.choice(task.system)
    system += f"\nIn adhering to this structure, your objective is: \n        {goal}"
    messages = _messages(system, f"[[ ## {given} ## ]]\n{task.user}\n\n{end}")
    return Sample(task.kind, messages, assistant("", said), None, False)


def _must(field: Field) -> str:
    return "" if isinstance(field.value, str) and not field.options else (
        f" (must be formatted as a valid Python {_annotation(field)})")  # fmt: skip


WAYS: tuple[tuple[Callable[[Dialogue, Task], Sample], float], ...] = (
    (as_format, 46), (with_schema, 20), (as_dspy, 18), (as_tool, 16),
)  # fmt: skip


def object_sample(seed: int, index: int, split: str) -> Sample:
    """The conversation with this number that ends in an object."""
    rng = random.Random(f"{seed}/{split}/{index}/object")
    d = Dialogue(rng, split)
    task = make_task(d)
    ways, weights = zip(*WAYS, strict=True)
    return rng.choices(ways, weights)[0](d, task)


def training_sample(seed: int, index: int) -> Sample:
    """The training sample with this number: mostly a conversation in words and calls, else one about an object."""
    if random.Random(f"{seed}/{index}/kind").random() < SHARE:
        return object_sample(seed, index, TRAIN)
    return data.make_sample(seed, index, TRAIN)
