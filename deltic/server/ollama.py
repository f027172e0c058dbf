"""Ollama's API: answers, embeddings, and descriptions of models."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from typing import Any, Final, NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deltic.chat.choices import Choice, ChoiceDelta, TokenScore
from deltic.chat.control_tokens import Infill
from deltic.chat.markers import THINK
from deltic.chat.output_router import AnswerCall
from deltic.chat.processor import PreparedRequest
from deltic.embeddings.types import Item, Vectors
from deltic.errors import RequestError, show
from deltic.llm import LLM
from deltic.server.body import BodyReader
from deltic.server.embeddings import EmbeddingService, EmbeddingsRequest, Services, rows_of, to_embed
from deltic.server.errors import ProblemError, ollama_error, problem_of
from deltic.server.fields import Fields, renamed
from deltic.server.generation import GenerationStream, ServedModel
from deltic.server.http import JsonLines, dump, dumped, json_response, written
from deltic.server.models import ModelEntry, ModelRegistry
from deltic.server.ollama_schema import (
    Names,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaModelRequest,
    OllamaRequest,
)
from deltic.server.openai import scored_token
from deltic.server.openai_schema import ChatRequest, prepare_chat, prepare_completions
from deltic.server.records import RequestRecord, record_of
from deltic.server.routing import ApiRoute, Check, Endpoint

API_VERSION: Final = "0.13.0"
"""Version of Ollama's API that this module implements; clients check it."""
_TAG: Final = ":latest"
_NEVER: Final = "2318-01-01T00:00:00Z"
"""Expiry time reported for models that are never unloaded."""
_BYTES: Final = {"float32": 4}
_NANO: Final = 1_000_000_000
_NO_DETAILS: Final = {"parent_model": "", "format": "", "family": "", "families": [], "parameter_size": "",
                      "quantization_level": ""}

Json = dict[str, Any]
EmbedBody = TypeVar("EmbedBody", OllamaEmbedRequest, OllamaEmbeddingsRequest)


class Prepared(NamedTuple):
    """A prepared request. request: None if the client only wants the model to be loaded. remembers: the client gets the
    tokens of the conversation and sends them back."""

    request: PreparedRequest | None
    names: Names
    scored: bool = False
    remembers: bool = False


def routes(models: ModelRegistry | None, services: Services, reader: BodyReader, check: Check) -> list[Route]:
    """Returns the routes of Ollama's API. models: chat models, if there are any."""
    endpoints = _OllamaEndpoints(models, services, reader)
    found: list[tuple[str, Endpoint, type[Fields] | None]] = [
        ("/api/embed", endpoints.embed, OllamaEmbedRequest),
        ("/api/embeddings", endpoints.embeddings, OllamaEmbeddingsRequest),
        ("/api/show", endpoints.show, OllamaModelRequest), ("/api/pull", endpoints.pull, OllamaModelRequest),
        ("/api/tags", endpoints.tags, None), ("/api/ps", endpoints.running, None),
        ("/api/version", endpoints.version, None)]
    if models is not None:
        found += [("/api/chat", endpoints.chat, OllamaChatRequest),
                  ("/api/generate", endpoints.generate, OllamaGenerateRequest)]
    return [ApiRoute(path, endpoint, check, body=body, refuse=ollama_error) for path, endpoint, body in found]


@dataclass(frozen=True, slots=True)
class _OllamaEndpoints:
    registry: ModelRegistry | None
    services: Services
    reader: BodyReader

    async def chat(self, request: Request) -> Response:
        assert self.registry
        served, body, prepared = await self.registry.read(request, OllamaChatRequest, _prepare_chat)
        return await _answer(request, served, body.streams, prepared, chat=True)

    async def generate(self, request: Request) -> Response:
        assert self.registry
        served, body, prepared = await self.registry.read(request, OllamaGenerateRequest, _prepare_generate)
        return await _answer(request, served, body.streams, prepared, chat=False)

    async def embed(self, request: Request) -> Response:
        began = time.perf_counter()
        service, items, found, asked = await self._vectors(request, OllamaEmbedRequest)
        answer = {"model": _tagged(service.name), "embeddings": rows_of(found, asked, service),
                  "total_duration": _since(began), "load_duration": 0, "prompt_eval_count": sum(map(len, items))}
        return await written(request, answer, len(found) * service.encoder.dimension)

    async def embeddings(self, request: Request) -> Response:
        service, _, found, asked = await self._vectors(request, OllamaEmbeddingsRequest)
        return json_response({"embedding": next(rows_of(found, asked, service), [])})

    async def tags(self, _: Request) -> Response:
        loaded = self._loaded()
        found = [_listed(entry.name, entry.created, loaded.get(entry.name)) for entry in self._entries()]
        found += [_listed(service.name, service.created, None) for service in self.services]
        return json_response({"models": found})

    async def running(self, _: Request) -> Response:
        loaded = self._loaded()
        entries = [entry for entry in self._entries() if entry.name in loaded]
        return json_response({"models": [_running(entry, loaded[entry.name]) for entry in entries]})

    async def version(self, _: Request) -> Response:
        return json_response({"version": API_VERSION})

    async def show(self, request: Request) -> Response:
        body = await self._model_request(request)
        if service := self.services.named(body.meant):
            return json_response(_shown_encoder(service))
        entry = self._entry(body.meant)
        return json_response(_shown(entry, self._loaded().get(entry.name)))

    async def pull(self, request: Request) -> Response:
        """Reports success if the model is served; downloads nothing."""
        body = await self._model_request(request)
        if not self.services.named(body.meant):
            self._entry(body.meant)
        done = {"status": "success"}
        return json_response(done) if body.stream is False else _one_line(done)

    async def _model_request(self, request: Request) -> OllamaModelRequest:
        async def choose(_: OllamaModelRequest) -> None:
            return None

        _, body, _ = await self.reader.read(request, OllamaModelRequest, choose, lambda _, body: body.meant)
        return body

    def _entries(self) -> list[ModelEntry]:
        return self.registry.entries() if self.registry else []

    def _entry(self, name: str) -> ModelEntry:
        if self.registry is None:
            raise ProblemError(404, f"model {show(name)} not found", "model", "model_not_found")
        return self.registry.entry(name)

    def _loaded(self) -> dict[str, ServedModel]:
        return {served.name: served for served in (self.registry.loaded if self.registry else ())}

    async def _vectors(self, request: Request, schema: type[EmbedBody]
                       ) -> tuple[EmbeddingService, list[Item], list[Vectors], EmbeddingsRequest]:
        async def choose(body: EmbedBody) -> EmbeddingService:
            if not self.services.services:
                raise ProblemError(404, "this server has no embedding model", "model", "model_not_found")
            return self.services.find(body.model)

        service, body, (items, asked) = await self.reader.read(request, schema, choose, _to_embed)
        return service, items, await self.services.run(service, request, items, body.salt) if items else [], asked


def _to_embed(service: EmbeddingService, body: OllamaEmbedRequest | OllamaEmbeddingsRequest
              ) -> tuple[list[Item], EmbeddingsRequest]:
    if isinstance(body, OllamaEmbeddingsRequest):
        asked, names = EmbeddingsRequest(input=body.prompt, truncate=True), {"input": "prompt"}
    else:
        asked, names = EmbeddingsRequest(input=body.input, truncate=body.truncate is not False,
                                         dimensions=body.dimensions), {}
    if asked.input in (None, "", []):  # clients send this to test whether the model is served
        return [], asked
    with renamed(names):
        return to_embed(service, asked), asked


def _prepare_chat(served: ServedModel, body: OllamaChatRequest) -> Prepared:
    return _prepared(served, body, *body.chat(served.limits)) if body.messages else Prepared(None, {})


def _prepare_generate(served: ServedModel, body: OllamaGenerateRequest) -> Prepared:
    if body.loads:
        return Prepared(None, {})
    if not (body.raw or body.suffix):
        prepared = _prepared(served, body, *body.chat(served.limits))
        assert prepared.request
        return prepared._replace(request=_continued(served, prepared.request, body.context or ()), remembers=True)
    text, names = body.completion(served.limits)
    with renamed(names):
        (request,), _ = prepare_completions(served, text)
    body.ignored.extend(names.get(name, name) for name in text.ignored)
    return Prepared(request, names, text.logprobs is not None)


def _prepared(served: ServedModel, body: OllamaRequest, chat: ChatRequest, names: Names) -> Prepared:
    with renamed(names):
        request = prepare_chat(served, chat)
    body.ignored.extend(names.get(name, name) for name in chat.ignored)
    return Prepared(request, names, bool(chat.logprobs))


def _continued(served: ServedModel, prepared: PreparedRequest, context: Sequence[int]) -> PreparedRequest:
    """Puts the tokens of the conversation so far before the prompt."""
    if not context:
        return prepared
    request = prepared.request
    if not isinstance(request.prompt, tuple):
        raise RequestError("context cannot be had together with pictures: use /api/chat", "context")
    whole = served.complete([*context, *request.prompt], request.output)  # type: ignore[arg-type]
    return replace(prepared, request=replace(request, prompt=whole.request.prompt, stable_prefixes=()), remember=None)


async def _answer(request: Request, served: ServedModel, streams: bool, prepared: Prepared, chat: bool) -> Response:
    formatter = OllamaFormatter(_tagged(served.name), chat, served.token_bytes if prepared.scored else None)
    if prepared.request is None:
        loaded = formatter.answer("", done=True) | {"done_reason": "load"}
        return _one_line(loaded) if streams else json_response(loaded)
    run = await served.start(request, [prepared.request], "messages" if chat else "prompt", not streams,
                             prepared.names)
    record, ids = record_of(request), prepared.request.request.ids if prepared.remembers else ()
    if streams:
        ping = _line(formatter.answer(""))
        return JsonLines(_stream(run, record, formatter, ids), _error_line, run.close, ping)
    done, = await served.gather(request, run)

    def whole() -> bytes:
        choice = done.done
        assert choice
        answer = formatter.answer(choice.text, choice.reasoning, choice.calls, done.scores, True)
        return _line(answer | _end(run, record.began, choice, ids))

    return Response(await dumped(record, whole, run.size + len(ids)), media_type="application/json")


async def _stream(run: GenerationStream, record: RequestRecord, formatter: OllamaFormatter, ids: Sequence[int]
                  ) -> AsyncIterator[bytes]:
    choice = None
    async for deltas in run.deltas():
        for delta in deltas:
            choice = delta.done
            if part := formatter.part(delta):
                yield _line(part)
    assert choice
    last = formatter.answer("", done=True) | _end(run, record.began, choice, ids)
    yield await dumped(record, partial(_line, last), run.size + len(ids))


def _end(run: GenerationStream, began: float, choice: Choice, ids: Sequence[int]) -> Json:
    """Returns an answer's stop reason, counts and durations. ids: the prompt's ids, if the client is to get them."""
    waited, answered = run.seconds
    context = {"context": [*ids, *choice.tokens]} if ids else {}
    return {"done_reason": choice.finish, "total_duration": _since(began), "load_duration": 0,
            "prompt_eval_count": run.usage.prompt_tokens, "prompt_eval_duration": int(waited * _NANO),
            "eval_count": run.usage.completion_tokens, "eval_duration": int(answered * _NANO), **context}


def _since(began: float) -> int:
    return int((time.perf_counter() - began) * _NANO)


# Answers


def _line(data: Any) -> bytes:
    return dump(data) + b"\n"


def _one_line(data: Json) -> Response:
    return Response(_line(data), media_type=JsonLines.media_type)


def _error_line(error: Exception) -> bytes:
    return _line({"error": problem_of(error).message})


def _stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class OllamaFormatter:
    """Formats an answer. chat: for /api/chat, not /api/generate. spell: returns a token's bytes; None: no logprobs."""

    model: str
    chat: bool
    spell: Callable[[int], bytes] | None

    def answer(self, text: str, thinking: str = "", calls: Sequence[AnswerCall] = (),
               scores: Iterable[TokenScore] = (), done: bool = False) -> Json:
        """Returns an answer, or part of one."""
        more: Json = {"thinking": thinking} if thinking else {}
        if complete := _complete(calls):
            more["tool_calls"] = complete
        message = {"response": text, **more}
        if self.chat:
            message = {"message": {"role": "assistant", "content": text, **more}}
        logprobs = {"logprobs": [self._score(score) for score in scores]} if self.spell and scores else {}
        return {"model": self.model, "created_at": _stamp(time.time()), **message, "done": done, **logprobs}

    def part(self, delta: ChoiceDelta) -> Json | None:
        """Returns a part of an answer, or None if it would be empty. Tool calls come at the end."""
        text = "".join(each.text for each in delta.deltas if each.kind == "content")
        thinking = "".join(each.text for each in delta.deltas if each.kind == "reasoning")
        calls = delta.done.calls if delta.done and _complete(delta.done.calls) else ()
        if not (text or thinking or calls or (self.spell and delta.scores)):
            return None
        return self.answer(text, thinking, calls, delta.scores)

    def _score(self, score: TokenScore) -> Json:
        assert self.spell
        tops = [scored_token(self.spell, *other) for other in score.logprobs.top]
        token = scored_token(self.spell, score.token, score.logprobs.token)
        return token | ({"top_logprobs": tops} if tops else {})


def _complete(calls: Sequence[AnswerCall]) -> list[Json]:
    """Returns the complete tool calls. Ollama's arguments are objects, so a call that was cut off cannot be shown."""
    found = list[Json]()
    for call in calls:
        with suppress(ValueError):
            arguments = json.loads(call.arguments or "{}")
            if isinstance(arguments, dict):
                found.append({"id": call.id, "function": {"name": call.name, "arguments": arguments}})
    return found


# Descriptions of models


def _tagged(name: str) -> str:
    return name if ":" in name else name + _TAG


def _listed(name: str, created: int, served: ServedModel | None) -> Json:
    """Returns a model as /api/tags lists it. served: the loaded model, if it is loaded."""
    llm = served.llm if served else None
    return {"name": _tagged(name), "model": _tagged(name), "modified_at": _stamp(created), "size": _size(llm),
            "digest": sha256(name.encode("utf-8", "replace")).hexdigest(), "details": _details(llm)}


def _running(entry: ModelEntry, served: ServedModel) -> Json:
    """Returns a model as /api/ps lists it."""
    on_gpu = served.llm.runtime.capabilities.own_memory
    return _listed(entry.name, entry.created, served) | {
        "expires_at": _NEVER, "size_vram": _size(served.llm) if on_gpu else 0, "context_length": entry.context}


def _shown(entry: ModelEntry, served: ServedModel | None) -> Json:
    """Returns a model as /api/show describes it. Few fields are known for a model that is not loaded."""
    found: Json = {"modified_at": _stamp(entry.created), "details": _details(served.llm if served else None),
                   "model_info": {}, "capabilities": ["completion"], "template": "", "parameters": "",
                   "modelfile": f"FROM {entry.name}\n"}
    if served is None:
        return found
    config = served.llm.runtime.config
    kind = config.architecture
    return found | {
        "template": served.processor.source, "capabilities": _capabilities(served),
        "parameters": _parameters(served.llm),
        "model_info": {
            "general.architecture": kind, "general.basename": entry.name,
            "general.parameter_count": config.parameter_count, f"{kind}.context_length": entry.context,
            f"{kind}.embedding_length": config.hidden_size, f"{kind}.block_count": config.num_hidden_layers,
            f"{kind}.attention.head_count": config.num_attention_heads,
            f"{kind}.attention.head_count_kv": config.num_key_value_heads, f"{kind}.vocab_size": config.vocab_size}}


def _shown_encoder(service: EmbeddingService) -> Json:
    encoder = service.encoder
    return {"modified_at": _stamp(service.created), "details": _NO_DETAILS, "template": "", "parameters": "",
            "modelfile": f"FROM {service.name}\n", "capabilities": ["rerank" if encoder.scores else "embedding"],
            "model_info": {"general.basename": service.name, "bert.context_length": encoder.max_length,
                           "bert.embedding_length": encoder.dimension}}


def _details(llm: LLM | None) -> Json:
    if llm is None:
        return _NO_DETAILS
    config, path = llm.runtime.config, llm.runtime.path
    form = "gguf" if path is not None and path.suffix == ".gguf" else "safetensors"
    return {"parent_model": "", "format": form, "family": config.architecture, "families": [config.architecture],
            "parameter_size": _count(config.parameter_count), "quantization_level": config.dtype.upper()}


def _size(llm: LLM | None) -> int:
    """Returns the approximate size of a model's weights in bytes."""
    return llm.runtime.config.parameter_count * _BYTES.get(llm.runtime.config.dtype, 2) if llm else 0


def _count(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 100_000_000 else f"{count / 1e6:.1f}M"


def _parameters(llm: LLM) -> str:
    """Returns the model's default sampling parameters."""
    generation = llm.runtime.generation
    found = {name: getattr(generation, name, None) for name in ("temperature", "top_k", "top_p", "min_p")}
    return "\n".join(f"{name} {value}" for name, value in found.items() if value is not None)


def _capabilities(served: ServedModel) -> list[str]:
    source = served.processor.source
    found = {"completion": True, "tools": "tools" in source, "vision": served.processor.sees,
             "thinking": THINK in source, "insert": _inserts(served)}
    return [name for name, there in found.items() if there]


def _inserts(served: ServedModel) -> bool:
    try:
        Infill.of(served.processor.tokenizer.added)
    except RequestError:
        return False
    return True
