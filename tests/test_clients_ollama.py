"""The real ollama client talks to the embedded model, and to an engine that follows a script."""

from __future__ import annotations

import base64
import io
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import pytest
from encoder_models import save_encoder, save_recipe
from ollama import Client, ResponseError
from PIL import Image
from test_server_embeddings import LIMITS, running
from test_server_harness import CALL, THOUGHT, USER, Scripted, Served, each, scripted, serving, tiny

from deltic import Encoder
from deltic.chat.output_router import AnswerCall
from deltic.server.embeddings import EmbeddingService
from deltic.server.ollama import OllamaFormatter
from deltic.server.routing import IGNORED_HEADER

CHAT, GENERATE = "/api/chat", "/api/generate"
TOOLS: list[Any] = [{"type": "function", "function": {
    "name": "weather", "description": "Says how it is.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}}]
pytestmark = pytest.mark.usefixtures("script_server")


@contextmanager
def client_of(url: str, **options: Any) -> Iterator[Client]:
    client = Client(host=url, **options)
    try:
        yield client
    finally:
        client._client.close()


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with client_of(served.url) as made:
        yield made


def test_answer_of_the_embedded_model(served: Served, client: Client) -> None:
    options = {"temperature": 0, "num_predict": 12, "num_ctx": 4096}
    whole = client.chat("tiny", USER, think=False, options=options)
    pieces = list(client.chat("tiny:latest", USER, think=False, options=options, stream=True))
    same = served.post("/v1/chat/completions", messages=USER, temperature=0, max_tokens=12,
                       enable_thinking=False).json()
    said = same["choices"][0]["message"]["content"]
    assert whole.message.content == said == "".join(piece.message.content or "" for piece in pieces)
    assert whole.message.role == "assistant" and whole.model == "tiny:latest" and whole.done
    last = pieces[-1]
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    for answer in (whole, last):
        assert (answer.prompt_eval_count, answer.eval_count) == (
            same["usage"]["prompt_tokens"], same["usage"]["completion_tokens"])
        assert answer.done_reason == ("stop" if same["choices"][0]["finish_reason"] == "stop" else "length")
        assert answer.total_duration and answer.total_duration >= (answer.eval_duration or 0) > 0


@each("streamed", [False, True])
def test_thinking_calls_and_text(streamed: bool) -> None:
    with scripted(THOUGHT.removeprefix("<think>\n") + "I look.\n" + CALL) as (served, _), client_of(
            served.url) as client:
        asked: dict[str, Any] = {"think": True, "tools": TOOLS, "stream": streamed}
        found = client.chat("tiny", USER, **asked)
        messages = [part.message for part in found] if streamed else [found.message]
    assert "".join(message.thinking or "" for message in messages).strip() == "Let me see."
    assert "".join(message.content or "" for message in messages).strip() == "I look."
    call, = [call for message in messages for call in message.tool_calls or ()]
    assert call.function.name == "weather" and call.function.arguments == {"city": "Oslo", "days": 3}


def test_tools_from_python_functions_and_their_results() -> None:
    def weather(city: str, days: int) -> str:
        """Says how it is.

        Args:
            city: where
            days: how many
        """
        return "rain"

    with scripted(CALL) as (served, engine), client_of(served.url) as client:
        first = client.chat("tiny", USER, tools=[weather])
        engine.play("Rain.")
        messages: list[Any] = [*USER, first.message, {"role": "tool", "tool_name": "weather", "content": "rain"}]
        assert client.chat("tiny", messages, tools=[weather]).message.content == "Rain."
        prompt = tiny().chat_processor.tokenizer.decode(engine.seen[-1].prompt, skip_special=False)
    assert "<function=weather>" in prompt and "<tool_response>\nrain" in prompt


def test_truncated_call_is_omitted() -> None:
    """Arguments are objects here, so that there is nothing to show of half of one."""
    calls = [AnswerCall("1", "weather", '{"city": "Oslo"}'), AnswerCall("2", "weather", '{"city": "Os'),
             AnswerCall("3", "weather", ""), AnswerCall("4", "weather", "[]")]
    message = OllamaFormatter("tiny", True, None).answer("", "", calls)["message"]
    assert [(call["id"], call["function"]["arguments"]) for call in message["tool_calls"]] == [
        ("1", {"city": "Oslo"}), ("3", {})]


def test_options_equal_fields_of_chat() -> None:
    options = {"num_predict": 7, "temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 7, "stop": ["x"],
               "repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5, "num_ctx": 8192}
    same = {"max_tokens": 7, "temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 7, "stop": ["x"],
            "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    with scripted("a b c") as (served, engine):
        for path, body in ((CHAT, {"messages": USER, "options": options}),
                           (GENERATE, {"prompt": "Hi", "options": options}),
                           (GENERATE, {"prompt": "Hi", "raw": True, "options": options}),
                           ("/v1/chat/completions", {"messages": USER, **same})):
            response = served.post(path, **body)
            assert response.status_code == 200, response.text
            assert response.headers.get(IGNORED_HEADER) == (
                None if path.startswith("/v1") else "options.num_ctx")
        outputs = [request.output for request in engine.seen]
        assert outputs[0] == outputs[1] == outputs[3]
        assert outputs[2].max_tokens == 7 and outputs[2].stop == ("x",)  # type: ignore[union-attr]
        served.post(CHAT, messages=USER, options={"num_predict": -1, "mirostat": 0, "tfs_z": 1.0})
        served.post(GENERATE, prompt="Hi", raw=True)
    assert [request.output.max_tokens for request in engine.seen[-2:]] == [None, None]  # type: ignore[union-attr]


SCHEMA: dict[str, Any] = {"type": "object", "title": "Place", "required": ["city"], "properties": {
    "city": {"type": "string", "enum": ["Oslo", "Bergen"]}}}


def test_structured_output(client: Client) -> None:
    for path in (client.chat("tiny", USER, format=SCHEMA, think=False).message.content,
                 client.generate("tiny", "Hi", format=SCHEMA, think=False).response):
        assert json.loads(path or "")["city"] in ("Oslo", "Bergen")
    options = {"num_predict": 60, "temperature": 0}
    free = client.chat("tiny", USER, format="json", think=False, options=options)
    assert (free.message.content or "").startswith("{")


def test_ollama_images() -> None:
    data = io.BytesIO()
    Image.new("RGB", (64, 64), (200, 30, 30)).save(data, "PNG")
    with scripted("Red.") as (served, engine), client_of(served.url) as client:
        client.chat("tiny", [{"role": "user", "content": "What?", "images": [data.getvalue()]}])
        client.generate("tiny", "What?", images=[data.getvalue()])
        url = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
        served.post("/v1/chat/completions", messages=[{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]}])
        prompts = [request.prompt for request in engine.seen]
        assert prompts[0].keys == prompts[1].keys == prompts[2].keys and prompts[0].pictures
        with pytest.raises(ResponseError, match=r"messages\[0\].images\[0\]"):
            client.chat("tiny", [{"role": "user", "content": "What?", "images": [b"no picture"]}])


def test_generate_raw_and_rendered() -> None:
    tokenizer = tiny().chat_processor.tokenizer
    with scripted("One.") as (served, engine), client_of(served.url) as client:
        raw = client.generate("tiny", "one two", raw=True)
        assert engine.seen[-1].prompt == tuple(tokenizer.encode("one two")) and raw.response == "One."
        assert raw.context is None
        first = client.generate("tiny", "Hi", system="Be brief.", think=False)
        again = client.generate("tiny", "And?", context=first.context, think=False)
    prompt = engine.seen[-1].prompt
    assert first.context and tuple(first.context) == prompt[:len(first.context)]
    text = tokenizer.decode(prompt, skip_special=False)
    assert "Be brief." in text and "Hi" in text and "One." in text and text.count("And?") == 1
    assert again.prompt_eval_count == len(prompt)


def test_generate_without_a_prompt_loads_the_model(client: Client) -> None:
    with pytest.raises(ResponseError, match="outside of"):
        client.generate("tiny", "a", context=[99999999])
    for answer in (client.generate("tiny"), client.generate("tiny", keep_alive=0)):
        assert (answer.response, answer.done, answer.done_reason) == ("", True, "load")
    assert client.chat("tiny", []).done_reason == "load"


def test_scores(client: Client, served: Served) -> None:
    options = {"temperature": 0, "num_predict": 5}
    whole = client.chat("tiny", USER, think=False, logprobs=True, top_logprobs=2, options=options)
    parts = list(client.generate("tiny", "Hi", think=False, logprobs=True, options=options, stream=True))
    assert whole.logprobs and len(whole.logprobs[0].top_logprobs or ()) == 2
    scores = [score for part in parts for score in part.logprobs or ()]
    assert [score.token for score in scores] == [score.token for score in whole.logprobs]


def test_models(client: Client, served: Served) -> None:
    listed, = client.list().models
    assert listed.model == "tiny:latest" and listed.size and listed.details and listed.details.family == "qwen3_5"
    loaded, = client.ps().models
    assert loaded.model == "tiny:latest" and loaded.context_length == 2048 and loaded.expires_at
    shown = client.show("tiny")
    assert {"completion", "tools", "thinking", "vision"} <= set(shown.capabilities or ()) and shown.template
    assert shown.modelinfo and shown.modelinfo["qwen3_5.context_length"] == 2048
    assert client.pull("tiny").status == "success" and [part.status for part in client.pull("tiny", stream=True)]
    major, minor, _ = served.http.get("/api/version").json()["version"].split(".")
    assert (int(major), int(minor)) >= (0, 6)
    assert served.http.head("/").status_code == 200  # how clients find out whether a server is there


@each(("call", "status", "said"), [
    (lambda client: client.chat("other", USER), 404, "'other' does not exist"),
    (lambda client: client.show("other"), 404, "'other'"), (lambda client: client.pull("other"), 404, "'other'"),
    (lambda client: client.chat("tiny", [{"role": "alien", "content": "x"}]), 400, "messages[0].role"),
    (lambda client: client.chat("tiny", USER, options={"temperature": -1}), 400, "options.temperature must be"),
    (lambda client: client.chat("tiny", USER, options={"num_predict": -5}), 400, "options.num_predict must be"),
    (lambda client: client.chat("tiny", USER, options={"temprature": 1}), 400, "'options.temprature': do you mean"),
    (lambda client: client.chat("tiny", USER, options={"messages": []}), 400, "options.messages"),
    (lambda client: client.chat("tiny", USER, options={"n_cmpl": 3}), 400, "one answer to a request"),
    (lambda client: client.chat("tiny", USER, options={"mirostat": 2}), 400, "options.mirostat is not supported"),
    (lambda client: client.chat("tiny", USER, options={"guided_regex": "("}), 400, "options.guided_regex"),
    (lambda client: client.chat("tiny", USER, think="x" * 5, stream=True), 200, ""),
    (lambda client: client.generate("tiny", "a " * 9000), 400, "prompt is too long"),
    (lambda client: client.generate("tiny", "a", suffix="b"), 400, "suffix needs a model"),
    (lambda client: client.generate("tiny", "a", template="{{ .Prompt }}"), 400, "template is not supported"),
    (lambda client: client.generate("tiny", "a", raw=True, context=[5]), 400, "context cannot be had"),
    (lambda client: client.embed("tiny", "x"), 404, "no embedding model"),
    (lambda client: client.push("tiny"), 404, "is not served here"),
])
def test_errors_in_ollama_form(call: Any, status: int, said: str) -> None:
    with scripted("x") as (served, _), client_of(served.url) as client:
        if status == 200:
            assert list(call(client))[-1].done
            return
        with pytest.raises(ResponseError) as refused:
            call(client)
    assert refused.value.status_code == status and said in refused.value.error, refused.value.error


def test_wrong_format_is_refused(served: Served) -> None:
    for wrong in (5, "yaml", ["json"]):
        error = served.post(CHAT, messages=USER, format=wrong).json()["error"]
        assert "format must be json or a JSON schema" in error


def test_engine_failure_during_a_stream() -> None:
    with scripted("one two three four five", error="the logits are NaN") as (served, _), client_of(
            served.url) as client:
        with pytest.raises(ResponseError, match="the logits are NaN"):
            list(client.chat("tiny", USER, stream=True))
        with pytest.raises(ResponseError, match="the logits are NaN"):
            client.generate("tiny", "Hi")


def test_keep_alive_lines_of_ollama_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltic.server.http.KEEP_ALIVE", 0.05)
    with scripted("ab", pause=0.3) as (served, _), client_of(served.url) as client:
        parts = list(client.chat("tiny", USER, stream=True))
    assert "".join(part.message.content or "" for part in parts) == "ab" and len(parts) > 3


def test_keys_and_limits_of_the_ollama_api() -> None:
    limits = {"max_messages": 3, "max_body_mib": 1, "max_tools": 1, "max_stops": 2, "max_answer_tokens": 5}
    with serving(Scripted("x").model(**limits), api_keys={"secret": "me"}) as served:
        with client_of(served.url) as stranger, pytest.raises(ResponseError, match="API key") as refused:
            stranger.chat("tiny", USER)
        assert refused.value.status_code == 401
        for path in ("/api/tags", "/api/ps", "/api/version"):
            assert served.http.get(path).status_code == 401
        with client_of(served.url, headers={"Authorization": "Bearer secret"}) as client:
            assert client.chat("tiny", USER).message.content == "x"
            for said, more in (("max_messages", {"messages": USER * 4}), ("max_tools", {"tools": TOOLS * 2}),
                               ("max_stops", {"options": {"stop": ["a", "b", "c"]}}),
                               ("max_answer_tokens", {"options": {"num_predict": 9}}),
                               ("max_body_mib", {"messages": [{"role": "user", "content": "x" * (2 << 20)}]})):
                with pytest.raises(ResponseError, match=said):
                    client.chat("tiny", **{"messages": USER, **more})


def test_vectors(tmp_path: Path) -> None:
    save_encoder(tmp_path / "bert", "bert")
    save_recipe(tmp_path / "bert", "mean_tokens")
    texts = ["w1 w2", "w3", "w4 w5 w6 w7"]
    with Encoder(tmp_path / "bert") as encoder:
        service = EmbeddingService("vectors", encoder)
        with running([service], LIMITS) as http, client_of(str(http.base_url)) as client:
            answer = client.embed("vectors", texts)
            np.testing.assert_array_equal(np.array(answer.embeddings, np.float32), encoder.encode(texts))
            assert answer.prompt_eval_count and len(client.embed("vectors", texts, dimensions=4).embeddings[0]) == 4
            old = client.embeddings("vectors", "w3").embedding
            np.testing.assert_array_equal(np.array(old, np.float32), encoder.encode("w3"))
            assert client.embed("vectors:latest", "").embeddings == [] == client.embeddings("vectors", "").embedding
            assert client.embed("vectors", "w1 " * 5000).embeddings
            with pytest.raises(ResponseError, match="input has"):
                client.embed("vectors", "w1 " * 5000, truncate=False)
            assert [model.model for model in client.list().models] == ["vectors:latest"] and not client.ps().models
            assert client.show("vectors").capabilities == ["embedding"]
            assert http.post("/api/chat", json={"messages": USER}).json()["error"]
        with serving(Scripted("x").model(), encoders=[service]) as both, client_of(both.url) as client:
            assert client.embed("vectors", "w3").embeddings and client.chat("tiny", USER).message.content == "x"
            assert len(client.list().models) == 2


def test_requests_at_the_limits_do_not_block_others() -> None:
    """As many messages, tools and pictures as there may be, deep schemas and long texts, beside ordinary requests."""
    with scripted("Yes.") as (served, _), client_of(served.url) as client:
        nested: Any = {"type": "string"}
        for _ in range(60):
            nested = {"type": "object", "properties": {"a": nested}}
        hostile: list[tuple[str, Any]] = [
            (CHAT, {"messages": [{"role": "user", "content": "x", "images": ["!" * 1000] * 50}] * 50}),
            (CHAT, {"messages": USER * 4096}), (CHAT, {"messages": USER, "format": nested}),
            (CHAT, {"messages": USER, "tools": TOOLS * 512, "options": {f"x{index}": 1 for index in range(5000)}}),
            (GENERATE, {"prompt": "x", "context": [5] * 100_000}), (GENERATE, {"prompt": "x\ud800"}),
            (GENERATE, {"prompt": "x" * 4_000_000, "raw": True, "options": {"stop": ["y" * 1000] * 64}})]
        with served.lateness(time.process_time) as late:
            for path, body in hostile:
                answered = served.http.post(path, content=json.dumps({"model": "tiny", **body}))
                assert answered.status_code in (200, 400) and len(answered.content) < 4000
                assert client.chat("tiny", USER).message.content == "Yes."
        assert late and served.health()[0] == 200


def test_unsupported_ollama_endpoints(served: Served) -> None:
    assert ollama.__name__ == "ollama"
    for path in ("/api/create", "/api/copy", "/api/push", "/api/blobs/sha256:x", "/v1/audio/speech",
                 "/v1/audio/transcriptions", "/v1/files", "/v1/batches", "/v1/images/generations"):
        answered = served.http.post(path, json={})
        assert answered.status_code == 404 and "error" in answered.json(), path
