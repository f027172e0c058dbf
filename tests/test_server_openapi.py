"""/openapi.json describes the server, and generated requests, valid or not, cause no server error."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from encoder_models import save_encoder, save_recipe
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from starlette.routing import Route
from test_server_harness import USER, Scripted, Served, limited, serving, tiny

from deltic import Encoder
from deltic.server.embeddings import EmbeddingService
from deltic.server.fields import Fields
from deltic.server.routing import ApiRoute

PAGES = [Path(__file__).parents[1] / "docs" / name for name in ("server.md", "embeddings.md", "states.md")]
WITH_BODY, OTHERS = 350, 30
"""Cases for each operation and mode: with a body, and without."""


def bodies_of(served: Served) -> dict[str, type[Fields]]:
    """The schemas of bodies, by path."""
    return {route.path: route.body for route in served.app.routes if isinstance(route, ApiRoute) and route.body}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a chat model, an embedding model and a reranker."""
    folder = tmp_path_factory.mktemp("encoders")
    save_encoder(folder / "bert", "bert")
    save_recipe(folder / "bert", "mean_tokens")
    save_encoder(folder / "judge", "xlm-roberta", labels=1)
    with Encoder(folder / "bert") as vectors, Encoder(folder / "judge") as judge:
        encoders = [EmbeddingService("vectors", vectors), EmbeddingService("judge", judge)]
        with serving(Scripted("x").model(), api_keys={"secret": "me"}, encoders=encoders) as running:
            running.http.headers["x-api-key"] = "secret"
            yield running


def test_openapi_and_the_server_page_have_every_route(served: Served) -> None:
    assert served.http.get("/openapi.json", headers={"x-api-key": "wrong"}).status_code == 401
    document = served.http.get("/openapi.json").json()
    routes = [route for route in served.app.routes if isinstance(route, Route) and "/page/" not in route.path]
    found = {(path, method) for path, operations in document["paths"].items() for method in operations}
    assert found == {(route.path.replace(":path", ""), method.lower()) for route in routes
                     for method in route.methods or () if method != "HEAD"}
    page = PAGES[0].read_text(encoding="utf-8")
    assert not [path for path in document["paths"] if not re.search(f"[` …]{path.partition('{')[0]}", page)]
    assert {path for path, operations in document["paths"].items()
            if "requestBody" in operations.get("post", {})} == bodies_of(served).keys()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            path = path.replace("{", "").replace("}", "")
            known = served.http.request(method, path, headers={"x-api-key": "wrong"}).status_code == 401
            assert known == ("security" in operation), path


def test_docs_name_every_field(served: Served) -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    fields = {name for body in bodies_of(served).values() for name in body.model_fields}
    assert not {name for name in fields if not re.search(rf"[`\"]\b{name}\b", text)}


def test_openapi_schemas_accept_what_the_server_accepts(served: Served) -> None:
    bodies = {"/v1/chat/completions": {"messages": USER, "n": 2}, "/v1/completions": {"prompt": ["a", "b"]},
              "/v1/responses": {"input": "x"}, "/v1/responses/input_tokens": {"input": "x"},
              "/v1/messages": {"messages": USER, "max_tokens": 5},
              "/v1/messages/count_tokens": {"messages": USER}, "/tokenize": {"prompt": "x"},
              "/detokenize": {"tokens": [5]}, "/v1/embeddings": {"input": ["w1"]}, "/embed": {"inputs": "w1"}}
    ranked = {"model": "judge", "query": "w1", "documents": ["w2", {"text": "w3"}]}
    scored = {"model": "judge", "text_1": "w1", "text_2": ["w2", "w3"]}
    bodies |= {"/v1/rerank": ranked, "/v2/rerank": ranked, "/rerank": ranked, "/v1/score": scored, "/score": scored}
    bodies |= {"/api/chat": {"messages": USER}, "/api/generate": {"prompt": "x"}, "/api/embed": {"input": "w1"},
               "/api/embeddings": {"prompt": "w1"}, "/api/show": {"model": "tiny"}, "/api/pull": {"name": "tiny"}}
    off = {"/v1/states": {"load": "0" * 64}, "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "a"},
           "/v1/unload_lora_adapter": {"lora_name": "a"}}  # unless a directory is named
    bodies |= off
    assert bodies.keys() == bodies_of(served).keys()
    document = served.http.get("/openapi.json").json()
    for path, body in bodies.items():
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        validator = jsonschema.Draft202012Validator({**schema, "components": document["components"]})
        validator.validate(body)
        assert served.http.post(path, json=body).status_code == (404 if path in off else 200), path
        assert not validator.is_valid([]) and not validator.is_valid(5), path


def thin(case: Any, most: int) -> None:
    """Leave so many of the fields that a body need not have: with all of them, one would nearly always be wrong."""
    if isinstance(case.body, dict):
        optional = [name for name in case.body if name not in ("messages", "prompt", "input", "tokens", "max_tokens")]
        kept = [name for name in optional if name != "model"][:most]
        for name in {*optional} - {*kept}:
            del case.body[name]
        if isinstance(case.body.get("max_tokens"), int):
            case.body["max_tokens"] %= 16


@pytest.mark.slow
def test_five_thousand_generated_requests_cause_no_server_error() -> None:
    """By schemathesis, from the document; refusals with Retry-After are no faults."""
    schemathesis = pytest.importorskip("schemathesis", reason="the extra fuzz is not installed")
    answered: Counter[int] = Counter()

    def check(served: Served, operation: Any, mode: Any) -> None:
        count = WITH_BODY if operation.body else OTHERS

        @settings(max_examples=count, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
                  suppress_health_check=[*HealthCheck])
        @given(case=operation.as_strategy(generation_mode=mode))
        def run(case: Any) -> None:
            if mode is schemathesis.GenerationMode.POSITIVE:
                thin(case, answered.total() % 4)
            response = case.call(base_url=served.url, timeout=60)
            answered[response.status_code] += 1
            assert response.status_code < 500 or "retry-after" in response.headers, response.text

        with suppress(*[] if operation.body else [Unsatisfiable]):  # nothing can be wrong
            run()

    with serving(limited(tiny(), max_answer_tokens=16)) as served:
        schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
        operations = [found.ok() for found in schema.get_all_operations()]
        assert len(operations) > 15
        for operation in operations:
            for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
                check(served, operation, mode)
        served.wait_idle(60)
        assert served.health()[0] == 200
        tiny().worker.call(lambda engine: engine.check())
    print(answered)
    assert answered.total() >= 5000 and answered[200] > 100 and answered[400] > 1000
