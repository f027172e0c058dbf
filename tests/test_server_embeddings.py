"""/v1/embeddings, /v1/rerank and /v1/score: real clients, forms of other servers, refusals, fairness."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from encoder_models import save_encoder, save_recipe
from starlette.testclient import TestClient
from test_server_harness import each, serving, tiny

from deltic import Encoder
from deltic.config import Limits
from deltic.embeddings.types import Item
from deltic.server.app import create_app, create_encoder_app
from deltic.server.embeddings import EmbeddingService
from deltic.server.run import Server, listen, url_of

TEXTS = ["w1 w2", "w3", "w4 w5 w6 w7"]
LIMITS = Limits(max_texts=20_000)


@contextmanager
def running(services: list[EmbeddingService], limits: Limits, **options: Any) -> Iterator[httpx.Client]:
    app = create_encoder_app(services, limits, **options)
    listener, ready = listen("127.0.0.1", 0), threading.Event()
    server = Server(app, app.state.work, 0.2, ready.set, limits)
    thread = threading.Thread(target=server.run_on, args=(listener,))
    thread.start()
    assert ready.wait(20)
    try:
        with httpx.Client(base_url=url_of(listener), timeout=30) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    place = tmp_path_factory.mktemp("served")
    save_encoder(place / "bert", "bert")
    save_recipe(place / "bert", "mean_tokens")
    save_encoder(place / "judge", "xlm-roberta", labels=1)
    with Encoder(place / "bert") as vectors, Encoder(place / "judge") as judge:
        yield SimpleNamespace(vectors=vectors, judge=judge, services=[
            EmbeddingService("vectors", vectors), EmbeddingService("judge", judge)])


@pytest.fixture(scope="module")
def http(encoders: SimpleNamespace) -> Iterator[httpx.Client]:
    with running(encoders.services, LIMITS) as client:
        yield client


@pytest.fixture
def client(http: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_openai_s_client(client: openai.OpenAI, encoders: SimpleNamespace) -> None:
    wanted = encoders.vectors.encode(TEXTS)
    for form in ("float", "base64", openai.omit):  # without it the client asks for base64
        answer = client.embeddings.create(model="vectors", input=TEXTS, encoding_format=form)
        found = [np.frombuffer(base64.b64decode(each.embedding), "<f4") if isinstance(each.embedding, str)
                 else each.embedding for each in answer.data]
        np.testing.assert_array_equal(np.array(found, np.float32), wanted)
        assert [each.index for each in answer.data] == [0, 1, 2] and answer.usage.total_tokens == 13
    assert client.embeddings.create(model="vectors", input="w1 w2").data[0].embedding == pytest.approx(wanted[0])
    by_ids = client.embeddings.create(model="vectors", input=[[2, 7, 8, 3], [2, 9, 3]]).data
    np.testing.assert_array_equal(np.array([each.embedding for each in by_ids], np.float32), wanted[:2])
    assert client.embeddings.create(model="vectors", input=[2, 9, 3]).data[0].embedding == by_ids[1].embedding
    short = client.embeddings.create(model="vectors", input=TEXTS, dimensions=5).data
    np.testing.assert_allclose([each.embedding for each in short], encoders.vectors.encode(TEXTS, dimensions=5))
    assert [model.id for model in client.models.list()] == ["vectors", "judge"]
    assert client.models.retrieve("judge").id == "judge"


def test_prompts_by_kind(http: httpx.Client, encoders: SimpleNamespace) -> None:
    for kind, name in (("query", "query"), ("search_document", "passage")):
        answer = http.post("/v1/embeddings", json={"input": "w1", "input_type": kind}).json()
        np.testing.assert_array_equal(np.float32(answer["data"][0]["embedding"]),
                                      encoders.vectors.encode("w1", kind=name))


@each("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_rerank(http: httpx.Client, encoders: SimpleNamespace, path: str) -> None:
    ranked = encoders.judge.rank("w9", TEXTS)
    body = {"model": "judge", "query": "w9", "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]}
    answer = http.post(path, json={**body, "top_n": 2, "return_documents": True}).json()
    assert answer["results"] == [{"index": each.index, "relevance_score": each.score,
                                  "document": {"text": TEXTS[each.index]}} for each in ranked[:2]]
    assert answer["usage"]["total_tokens"] == answer["meta"]["tokens"]["input_tokens"] > 0
    plain = http.post(path, json={"model": "judge", "query": "w9", "documents": TEXTS}).json()
    assert [each["index"] for each in plain["results"]] == [each.index for each in ranked]
    assert "document" not in plain["results"][0]


def test_score(http: httpx.Client, encoders: SimpleNamespace) -> None:
    def scores(**body: Any) -> list[float]:
        return [each["score"] for each in http.post("/v1/score", json={"model": "judge", **body}).json()["data"]]

    assert scores(text_1="w9", text_2=TEXTS) == encoders.judge.score("w9", TEXTS)
    assert scores(text_1=["w9", "w8"], text_2=TEXTS[:2]) == [encoders.judge.score("w9", TEXTS[:1])[0],
                                                            encoders.judge.score("w8", TEXTS[1:2])[0]]
    cosine = http.post("/score", json={"model": "vectors", "text_1": "w1", "text_2": "w1"}).json()
    assert cosine["data"][0]["object"] == "score"


LONG = "w1 " * 100_000
WRONG: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "empty": ("embeddings", {"input": ""}, 400, "input is empty"),
    "one empty": ("embeddings", {"input": ["w1", ""]}, 400, "input[1] is empty"),
    "nothing": ("embeddings", {"input": []}, 400, "input is empty"),
    "no input": ("embeddings", {}, 400, "input is missing"),
    "number": ("embeddings", {"input": 3.5}, 400, "input must be text"),
    "mixed": ("embeddings", {"input": ["w1", 3]}, 400, "input must be text"),
    "long": ("embeddings", {"input": ["w1", LONG]}, 400, "input[1] has"),
    "one long": ("embeddings", {"input": LONG}, 400, "input has"),
    "unknown id": ("embeddings", {"input": [2, 171, 3]}, 400, "the token 171"),
    "negative id": ("embeddings", {"input": [2, -1, 3]}, 400, "the token -1"),
    "long ids": ("embeddings", {"input": [2] * 100}, 400, "input has 100 tokens or more, and the model reads 61"),
    "dimensions": ("embeddings", {"input": "w1", "dimensions": 41}, 400, "dimensions must be an integer from 1 to 40"),
    "no dimensions": ("embeddings", {"input": "w1", "dimensions": 0}, 400, "dimensions must be an integer"),
    "format": ("embeddings", {"input": "w1", "encoding_format": "int8"}, 400, "encoding_format"),
    "model": ("embeddings", {"input": "w1", "model": "gpt"}, 404, "the model 'gpt' does not exist"),
    "reranker": ("embeddings", {"input": "w1", "model": "judge"}, 400, "gives no vectors"),
    "kind": ("embeddings", {"input": "w1", "input_type": "song"}, 400, "input_type must be query or passage"),
    "field": ("embeddings", {"input": "w1", "dimension": 3}, 400, "do you mean 'dimensions'"),
    "messages": ("embeddings", {"messages": [{"role": "user", "content": "w1"}]}, 400, "do you mean 'input'?"),
    "cut to nothing": ("embeddings", {"input": "w1", "truncate_prompt_tokens": 2}, 400, "leave no room"),
    "cut to less": ("embeddings", {"input": "w1", "truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens must be"),
    "not normal": ("embeddings", {"input": "w1", "normalize": False}, 400, "normalize cannot be false"),
    "task": ("embeddings", {"input": "w1", "task": "separation"}, 400, "task must be query or passage"),
    "bytes": ("embeddings", {"input": "w1", "output_dtype": "int8"}, 400, "output_dtype is not supported"),
    "instruction": ("rerank", {"query": "w1", "documents": ["w1"], "instruction": "x"}, 400, "takes no instruction"),
    "no documents": ("rerank", {"query": "w1"}, 400, "documents is missing"),
    "wrong text": ("rerank", {"query": "w1", "texts": ["w1", 5]}, 400, "texts[1] must be text"),
    "raw scores": ("rerank", {"query": "w1", "texts": ["w1"], "raw_scores": True}, 400, "raw_scores is not supported"),
    "long text of texts": ("rerank", {"query": "w1", "texts": [LONG], "truncate": False}, 400, "texts[0] has"),
    "many": ("embeddings", {"input": ["w1"] * 20_001}, 400, "max_texts"),
    "documents": ("rerank", {"query": "w1", "documents": []}, 400, "documents is empty"),
    "document": ("rerank", {"query": "w1", "documents": ["w1", 3]}, 400, "documents[1] must be text"),
    "top_n": ("rerank", {"query": "w1", "documents": ["w1"], "top_n": 0}, 400, "top_n must be at least 1"),
    "long document": ("rerank", {"query": "w1", "documents": [LONG], "truncate": False}, 400, "documents[0] has"),
    "pairs": ("score", {"text_1": ["a", "b"], "text_2": ["a"]}, 400, "equally many"),
    "no texts": ("score", {"text_1": "a", "text_2": []}, 400, "text_2 must be text or a list with at least one"),
    "no text": ("score", {"text_1": 5, "text_2": "a"}, 400, "text_1 must be text or a list with at least one, not 5"),
    "long text": ("score", {"text_1": "w1", "text_2": ["w1", LONG]}, 400, "text_2[1] has"),
    "long texts": ("score", {"text_1": ["w1", LONG], "text_2": ["w1", "w1"]}, 400, "text_1[1] has"),
    "long query": ("score", {"text_1": LONG, "text_2": ["w1"], "model": "vectors"}, 400, "text_1 has"),
    "one no text": ("score", {"text_1": "a", "text_2": ["a", 5]}, 400, "text_2 must be text or a list")}


@each("case", WRONG)
def test_refusals(http: httpx.Client, case: str) -> None:
    path, body, status, message = WRONG[case]
    answer = http.post(f"/v1/{path}", json=body)
    assert answer.status_code == status and message in answer.json()["error"]["message"], answer.text


def test_long_texts_are_cut_where_that_is_asked_for(http: httpx.Client, encoders: SimpleNamespace) -> None:
    answer = http.post("/v1/embeddings", json={"input": [LONG], "truncate": True}).json()
    np.testing.assert_array_equal(np.float32(answer["data"][0]["embedding"]), encoders.vectors.encode(LONG))
    assert answer["usage"]["prompt_tokens"] == 61
    ids = http.post("/v1/embeddings", json={"input": [2] * 100, "truncate": True}).json()
    assert ids["usage"]["prompt_tokens"] == 61
    assert http.post("/v1/rerank", json={"query": "w1", "documents": [LONG], "model": "judge"}).status_code == 200


@each(("fields", "same"), [
    ({"truncate_prompt_tokens": -1, "input": LONG}, {"truncate": True, "input": LONG}),
    ({"truncate_prompt_tokens": 5, "input": "w1 w2 w3 w4 w5 w6 w7"}, {"input": "w1 w2 w3"}),
    ({"truncate_prompt_tokens": 500, "input": LONG}, {"truncate": True, "input": LONG}),
    ({"truncate_prompt_tokens": 3, "input": [2, 7, 8, 3]}, {"input": [2, 7, 8]}),
    ({"normalize": True, "input": "w1"}, {"input": "w1"}), ({"output_dimension": 16, "input": "w1"},
                                                           {"dimensions": 16, "input": "w1"}),
    ({"task": "retrieval.query", "input": "w1"}, {"input_type": "query", "input": "w1"}),
    ({"truncation": True, "input": LONG}, {"truncate": True, "input": LONG}),
    ({"output_dtype": "float", "late_chunking": False, "input": "w1"}, {"input": "w1"}),
    ({"embedding_type": "float", "embedding_types": ["float"], "input": "w1"}, {"input": "w1"}),
])
def test_fields_of_other_servers(http: httpx.Client, fields: dict[str, Any], same: dict[str, Any]) -> None:
    answers = [http.post("/v1/embeddings", json=body) for body in (fields, same)]
    assert answers[0].json() == answers[1].json() and answers[0].status_code == 200, answers[0].text
    assert "x-deltic-ignored" not in answers[0].headers


def test_vectors_are_made_length_one_where_that_is_asked_for(tmp_path: Path) -> None:
    save_encoder(tmp_path / "bert", "bert")
    save_recipe(tmp_path / "bert", "mean_tokens", normalize=False)
    with Encoder(tmp_path / "bert") as encoder, running([EmbeddingService("v", encoder)], LIMITS) as http:
        def vector(**fields: Any) -> Any:
            answer = http.post("/v1/embeddings", json={"input": "w1 w2", **fields}).json()
            return np.array(answer["data"][0]["embedding"])

        plain, unit = vector(), vector(normalize=True)
        np.testing.assert_allclose(unit, plain / np.linalg.norm(plain), rtol=1e-5)
        assert abs(np.linalg.norm(plain) - 1) > 0.1 and (vector(normalize=False) == plain).all()
        np.testing.assert_allclose(http.post("/embed", json={"inputs": "w1 w2"}).json()[0], unit, rtol=1e-6)


def test_text_embeddings_inference(http: httpx.Client, encoders: SimpleNamespace) -> None:
    vectors = http.post("/embed", json={"inputs": TEXTS, "truncate": False}).json()
    np.testing.assert_array_equal(np.float32(vectors), encoders.vectors.encode(TEXTS))
    assert len(http.post("/embed", json={"inputs": "w1", "dimensions": 4}).json()[0]) == 4
    ranked = encoders.judge.rank("w9", TEXTS)
    body = {"model": "judge", "query": "w9", "texts": TEXTS, "raw_scores": False, "truncation_direction": "Right"}
    assert http.post("/rerank", json={**body, "return_text": True}).json() == [
        {"index": each.index, "score": each.score, "text": TEXTS[each.index]} for each in ranked]
    assert http.post("/rerank", json=body).json()[0].keys() == {"index", "score"}


def test_ten_thousand_texts_hold_up_nobody(http: httpx.Client) -> None:
    url, done = f"{http.base_url}/v1/embeddings", []

    def many() -> None:
        answer = httpx.post(url, json={"input": ["w1 w2 w3 w4 w5 w6 w7 w8"] * 10_000, "encoding_format": "base64"},
                            timeout=60)
        done.append((time.monotonic(), answer))

    thread = threading.Thread(target=many)
    thread.start()
    count = 0
    while not http.get("/health").json()["waiting_tokens"]:
        time.sleep(0.005)
    while thread.is_alive() and http.get("/health").json()["waiting_tokens"] > 20_000:
        assert http.post("/v1/embeddings", json={"input": "w1"}).status_code == 200
        count += 1
    thread.join()
    assert count >= 3 and done[0][1].status_code == 200 and len(done[0][1].json()["data"]) == 10_000


def test_who_goes_away_is_forgotten(http: httpx.Client) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{http.base_url}/v1/embeddings", json={"input": ["w1 w2 w3 w4 w5"] * 15_000}, timeout=0.3)
    deadline = time.monotonic() + 10
    while (http.get("/v1/requests").json()["data"] or http.get("/health").json()["waiting_tokens"]) and (
            time.monotonic() < deadline):
        http.post("/v1/embeddings", json={"input": "w1"})
        time.sleep(0.01)
    assert not http.get("/v1/requests").json()["data"] and not http.get("/health").json()["waiting_tokens"]


def test_key_metrics_and_other_paths(encoders: SimpleNamespace) -> None:
    with running(encoders.services, LIMITS, api_keys={"secret": "me"}) as http:
        assert http.post("/v1/embeddings", json={"input": "w1"}).status_code == 401
        http.headers["authorization"] = "Bearer secret"
        assert http.post("/v1/embeddings", json={"input": "w1"}).status_code == 200
        page = http.get("/metrics").text
        assert 'deltic_texts_total{model="vectors"}' in page and "# TYPE deltic_text_tokens_total counter" in page
        assert http.post("/v1/chat/completions", json={}).status_code == 404


def test_beside_a_chat_model(encoders: SimpleNamespace) -> None:
    with serving(tiny(), encoders=encoders.services) as served:
        said = served.post("/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], max_tokens=3)
        assert said.status_code == 200
        answer = served.client.embeddings.create(model="vectors", input="w1")
        np.testing.assert_array_equal(np.float32(answer.data[0].embedding), encoders.vectors.encode("w1"))
        wrong = served.post("/v1/embeddings", model="tiny", input="w1")
        assert wrong.status_code == 404 and "gives no vectors" in wrong.text
    with serving(tiny()) as served:
        assert served.post("/v1/embeddings", input="w1").status_code == 404


@pytest.mark.parametrize("path, body", [("/v1/embeddings", {"input": "w1"}), ("/api/embed", {"input": "w1"}),
                                        ("/api/embeddings", {"prompt": "w1"})])
def test_a_salt_reaches_the_model(path: str, body: dict[str, str], encoders: SimpleNamespace,
                                  monkeypatch: pytest.MonkeyPatch) -> None:
    seen, original = list[Item](), Encoder.submit

    def noted(self: Encoder, items: Any, *more: Any, **options: Any) -> Any:
        seen.extend(items)
        return original(self, items, *more, **options)

    monkeypatch.setattr(Encoder, "submit", noted)
    with running(encoders.services, LIMITS) as http:
        for salt in ({}, {"cache_salt": "x"}, {"cache_salt": "y"}):
            answer = http.post(path, json={**body, **salt})
            assert answer.status_code == 200 and "x-deltic-ignored" not in answer.headers, answer.text
        assert http.post(path, json={**body, "cache_salt": ""}).status_code == 400
    assert len({item.cache_salt for item in seen}) == 3 and not seen[0].cache_salt


def test_too_much_at_once(encoders: SimpleNamespace, tmp_path: Path) -> None:
    with Encoder(encoders.vectors.name, limits=Limits(max_live_tokens=100)) as encoder:
        first = encoder.submit(encoder.text_items(["w1 w2 w3"] * 2000), client="127.0.0.1")
        with running([EmbeddingService("v", encoder)], LIMITS) as http:
            answer = http.post("/v1/embeddings", json={"input": ["w1"] * 20})
        assert answer.status_code == 503 and "max_live_tokens" in answer.text and answer.headers["retry-after"]
        first.future.cancel()


def test_what_a_server_says_of_encoders_beside_a_chat_model(encoders: SimpleNamespace) -> None:
    with serving(tiny(), encoders=encoders.services) as served:
        chat, vectors, judge = served.client.models.list()
        assert (chat.id, vectors.id, judge.id) == ("tiny", "vectors", "judge")
        assert served.client.models.retrieve("judge").model_dump()["max_model_len"] == encoders.judge.max_length
        anthropic = httpx.get(f"{served.url}/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
        assert [model["id"] for model in anthropic["data"]] == ["tiny"], "in that form there is chat alone"
        served.client.embeddings.create(model="vectors", input="w1 w2")
        page = httpx.get(f"{served.url}/metrics").text
        assert 'deltic_texts_total{model="vectors"}' in page and 'deltic_steps_total{model="tiny"}' in page
        assert 'deltic_text_tokens_waiting{model="judge"} 0' in page


@pytest.mark.parametrize("beside, grace, status", [(False, 20.0, 200), (True, 20.0, 200), (False, 0.0, 503)])
def test_a_server_that_ends_answers_what_runs(encoders: SimpleNamespace, beside: bool, grace: float, status: int
                                              ) -> None:
    """And what takes longer than it may is ended with a reason."""
    found: list[httpx.Response] = []
    with Encoder(encoders.vectors.name, token_budget=16) as encoder:
        services, others = [EmbeddingService("vectors", encoder)], encoder.submit([Item((2, 7, 3))] * 50_000)
        app = create_app(tiny(), encoders=services) if beside else create_encoder_app(services, LIMITS)
        listener, ready = listen("127.0.0.1", 0), threading.Event()
        server = Server(app, app.state.work, grace, ready.set, LIMITS)
        running = threading.Thread(target=server.run_on, args=(listener,))
        running.start()
        assert ready.wait(20)
        url = f"{url_of(listener)}/v1/embeddings"
        asking = threading.Thread(target=lambda: found.append(
            httpx.post(url, json={"input": ["w1 w2"] * 1000}, timeout=30)))
        asking.start()
        while not any(job.taken for job in tuple(encoder.batcher._unfinished) if len(job.items) == 1000):
            time.sleep(0.001)
        server.should_exit = True
        asking.join(30)
        running.join(30)
        listener.close()
        others.future.cancel()
    assert found[0].status_code == status and (status == 200 or "shutting down" in found[0].text), found[0].text


def test_ready_says_when_a_server_ends(encoders: SimpleNamespace) -> None:
    app = create_encoder_app(encoders.services, LIMITS)
    with TestClient(app) as client:
        assert client.get("/ready").json() == {"status": "ready"}
        app.state.work.draining = True
        answer = client.get("/ready")
        assert answer.status_code == 503 and answer.json()["reason"] == "the server is shutting down"
        refused = client.post("/v1/embeddings", json={"input": "w1"})
        assert refused.status_code == 503 and "shutting down" in refused.text
