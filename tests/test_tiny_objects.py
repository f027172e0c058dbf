"""The embedded model's training on objects: schemas as pydantic writes them, prompts and tokens as clients send."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest
from openai.lib._pydantic import to_strict_json_schema
from pydantic import BaseModel, create_model
from tokenizers import Tokenizer

from deltic import LLM
from deltic.chat.response_format import JsonSchema
from deltic.chat.structured import Grammars

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "deltic" / "models" / "tiny"
EXAMPLE = ROOT / "examples" / "tiny"

jsonschema = pytest.importorskip("jsonschema")
sys.path.insert(0, str(EXAMPLE))
import batches  # noqa: E402
import client_prompts  # noqa: E402
import data  # noqa: E402
import facts  # noqa: E402
import schemas  # noqa: E402
import structured  # noqa: E402
from phrases import HELDOUT, TRAIN  # noqa: E402
from render import render  # noqa: E402

sys.path.remove(str(EXAMPLE))

NOBODY = random.Random(0)


def task(seed: int, split: str = TRAIN) -> Any:
    return structured.make_task(data.Dialogue(random.Random(seed), split))


def annotation(field: Any, value: Any = None) -> Any:
    """The Python type of a field's value."""
    value = field.value if value is None else value
    if field.options:
        kind: Any = Literal[field.options]
    elif isinstance(value, list):
        kind = list[annotation(field, value[0])]  # type: ignore[misc]
    elif isinstance(value, schemas.Object):
        kind = model_of(value)
    else:
        kind = str if value is None else type(value)
    return kind | None if field.optional else kind


def model_of(thing: Any) -> type[BaseModel]:
    fields: dict[str, Any] = {field.key: (annotation(field), None if field.optional else ...) for field in thing.fields}
    return create_model(thing.name, **fields)


def test_schemas_equal_those_of_pydantic_and_openai():
    for seed in range(75):
        thing = task(seed).answer
        theirs = model_of(thing)
        assert schemas.pydantic(thing, NOBODY, strict=False, described=False) == theirs.model_json_schema(), seed
        strict = schemas.pydantic(thing, NOBODY, strict=True, described=False)
        assert strict == to_strict_json_schema(theirs), seed


@pytest.mark.parametrize("split", [TRAIN, HELDOUT])
def test_objects_follow_their_schemas(split):
    for seed in range(60):
        thing = task(seed, split).answer
        for schema in (schemas.pydantic(thing, NOBODY, strict=True, described=True), schemas.zod(thing)):
            jsonschema.validate(thing.plain(), schema)


def test_samples_cover_tasks_and_clients():
    found = [client_prompts.object_sample(1, i, TRAIN) for i in range(700)]
    assert len(Counter(sample.category for sample in found)) > 20
    prompts = [str(sample.messages) for sample in found if not sample.forced]
    for mark in ("MUST answer with a JSON object that matches", "genius expert", "[[ ## completed ## ]]",
        "in the following order",
                 "$defs", "anyOf", "#/$defs/", "additionalProperties"):  # fmt: skip
        assert any(mark in prompt for prompt in prompts), mark
    assert sum(bool(sample.tools) for sample in found) > 70
    share = sum(data.make_sample(1, i, TRAIN) != client_prompts.training_sample(1, i) for i in range(1000)) / 1000
    assert 0.15 < share < 0.3


def test_no_heldout_question_or_text_frame_is_trained():
    trained = {client_prompts.object_sample(2, i, TRAIN).messages[-1]["content"] for i in range(750)}
    held = [client_prompts.object_sample(2, i, HELDOUT).messages[-1]["content"] for i in range(150)]
    assert not any(text.startswith("Read this and give me") for text in trained)
    assert sum(text.startswith("Read this and give me") for text in held) > 10


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(MODEL), dtype="float32", threads=1)


def test_grammar_allows_training_tokens(llm):
    """An enforced schema meets the same tokens in the same form of JSON, and what it forces is not counted."""
    grammars = llm.chat_processor.grammars
    assert isinstance(grammars, Grammars)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    enforced = [s for i in range(150) if (s := client_prompts.object_sample(3, i, TRAIN)).forced == "{\""]
    assert len(enforced) > 50
    for sample in enforced:
        *_, (forced, said), (rest, _) = batches.tokens_of(tokenizer, [sample])[0]
        assert not said and tokenizer.decode(forced) == '{"' and len(forced) == 1
        tokens = [*forced, *rest][:-1]
        assert tokens == tokenizer.encode(sample.target["content"]).ids
        schema = infer(json.loads(sample.target["content"]))
        pending = grammars.of(JsonSchema(schema, strict=True))
        pending.compile()
        matcher = pending.grammar.matcher()
        assert matcher.validate_tokens(tokens) == len(tokens), sample.target["content"]


def infer(value: Any) -> dict[str, Any]:
    """A schema of which the value is one."""
    if isinstance(value, dict):
        return {"type": "object", "properties": {key: infer(inner) for key, inner in value.items()},
                "required": [*value], "additionalProperties": False}
    if isinstance(value, list):
        return {"type": "array", "items": infer(value[0])}
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return {"anyOf": [{"type": names.get(type(value), "string")}, {"type": "null"}]}


def test_forced_answer_ends_as_rendered():
    for i in range(100):
        sample = client_prompts.object_sample(4, i, TRAIN)
        text = render([*sample.messages, sample.target], sample.tools)
        cut = list(data.pieces(text, sample.forced))
        assert "".join(part for part, _ in cut) == text
        assert cut[-1][1] and cut[-1][0].endswith("<|im_end|>")
        assert (cut[-2] == (sample.forced, False)) == bool(sample.forced)


def test_every_country_has_figures():
    assert structured.FIGURES.keys() == {country.name for country in facts.COUNTRIES}
