"""openai, LangChain and Cohere against `deltic serve` with a chat model, an embedder and a reranker."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from encoder_models import WORDS, save_encoder, save_recipe

from deltic import Encoder

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("leftovers"), pytest.mark.filterwarnings("ignore")]

TEXTS = ["w1 w2", "w3", "w4 w5 w6 w7"]


def started(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    """A server as a user starts it, and its URL."""
    command = [sys.executable, "-m", "deltic", "serve", *arguments, "--port", "0", "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"(http://[\d.:]+)/v1", line):
            return process, found[1]
    raise AssertionError(f"the server ended with {process.wait()}")


def ended(process: subprocess.Popen[str]) -> int:
    with process:
        process.send_signal(signal.SIGTERM)
        return process.wait(60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    place = tmp_path_factory.mktemp("served")
    save_encoder(place / "vectors", "bert")
    save_recipe(place / "vectors", "mean_tokens")
    save_encoder(place / "judge", "xlm-roberta", labels=1)
    process, url = started("tiny", "--embedding-model", str(place / "vectors"), "--embedding-model",
                           str(place / "judge"))
    try:
        with Encoder(place / "vectors") as vectors, Encoder(place / "judge") as judge:
            yield SimpleNamespace(url=url, vectors=vectors, judge=judge)
    finally:
        assert ended(process) == 0


def test_openai(server: SimpleNamespace) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="vectors", input=TEXTS)
        np.testing.assert_array_equal(np.float32([each.embedding for each in answer.data]),
                                      server.vectors.encode(TEXTS))
        assert [model.id for model in client.models.list()][1:] == ["vectors", "judge"]
        assert client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}],
                                              max_tokens=3).usage
        with pytest.raises(openai.NotFoundError, match="'nobody' does not exist"):
            client.embeddings.create(model="nobody", input="w1")
        with pytest.raises(openai.BadRequestError, match="dimensions must be an integer from 1 to 40"):
            client.embeddings.create(model="vectors", input="w1", dimensions=41)


def test_langchain(server: SimpleNamespace) -> None:
    langchain = pytest.importorskip("langchain_openai")
    client = langchain.OpenAIEmbeddings(model="vectors", base_url=f"{server.url}/v1", api_key="none",
                                        check_embedding_ctx_length=False, chunk_size=2)
    np.testing.assert_allclose(client.embed_documents(TEXTS), server.vectors.encode(TEXTS), rtol=1e-6)
    np.testing.assert_allclose(client.embed_query("w1"), server.vectors.encode("w1"), rtol=1e-6)


def test_langchain_with_token_ids(server: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default it cuts texts itself and sends ids, here those of the model's own tokenizer."""
    langchain = pytest.importorskip("langchain_openai")
    tiktoken = pytest.importorskip("tiktoken")

    class Tokens:
        def encode(self, text: str, **_: Any) -> list[int]:
            return list(server.vectors.text_items([text])[0].ids)

        encode_ordinary = encode

    monkeypatch.setattr(tiktoken, "encoding_for_model", lambda _: Tokens())
    client = langchain.OpenAIEmbeddings(model="vectors", base_url=f"{server.url}/v1", api_key="none")
    np.testing.assert_allclose(client.embed_documents(TEXTS), server.vectors.encode(TEXTS), rtol=1e-6)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_request_in_cohere_form(server: SimpleNamespace, path: str) -> None:
    ranked = server.judge.rank("w9", TEXTS, top_n=2)
    body = {"model": "judge", "query": "w9", "documents": TEXTS, "top_n": 2, "max_tokens_per_doc": 4096}
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=30).json()
    assert answer["results"] == [{"index": each.index, "relevance_score": each.score} for each in ranked]
    assert answer["id"] and answer["meta"]["billed_units"]["search_units"] == 1


def test_cohere_client(server: SimpleNamespace) -> None:
    cohere = pytest.importorskip("cohere")
    client = cohere.ClientV2(api_key="none", base_url=server.url)
    answer = client.rerank(model="judge", query="w9", documents=TEXTS, top_n=2)
    assert [(each.index, pytest.approx(each.relevance_score)) for each in answer.results] == [
        (each.index, each.score) for each in server.judge.rank("w9", TEXTS, top_n=2)]


def test_shutdown_waits_for_running_requests(tmp_path: Path) -> None:
    save_encoder(tmp_path / "vectors", "bert")
    process, url = started(str(tmp_path / "vectors"), "--max-texts", "20000")
    found: list[httpx.Response] = []
    texts = [" ".join(WORDS[:40])] * 3000
    asking = threading.Thread(target=lambda: found.append(
        httpx.post(f"{url}/v1/embeddings", json={"input": texts, "encoding_format": "base64"}, timeout=60)))
    asking.start()
    while not httpx.get(f"{url}/health").json()["waiting_tokens"]:
        time.sleep(0.01)
    assert httpx.get(f"{url}/ready").json() == {"status": "ready"}
    assert ended(process) == 0
    asking.join()
    assert found[0].status_code == 200 and len(found[0].json()["data"]) == 3000
