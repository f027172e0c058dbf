"""Ollama's routes: answers, vectors, and what is known of models."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deltic.chat.processor import PreparedRequest
from deltic.embeddings.types import Item, Vectors
from deltic.errors import RequestError, show
from deltic.params import Usage
from deltic.server.body import BodyReader, Fields, renamed
from deltic.server.collect import GenerationStream
from deltic.server.embeddings.schema import EmbeddingsRequest
from deltic.server.embeddings.service import EmbeddingService, Services
from deltic.server.embeddings.vectors import rows_of, to_embed
from deltic.server.http import Check, Problem, ProblemError, answering, dumped, json_response, written
from deltic.server.model_registry import ModelRegistry
from deltic.server.ollama import models as described
from deltic.server.ollama.formatting import Json, JsonLines, OllamaFormatter, error_line, error_response, line
from deltic.server.ollama.schema import (
    Names,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaModelRequest,
)
from deltic.server.openai.preparation import chat_job, text_jobs
from deltic.server.records import RequestRecord, record_of
from deltic.server.served_model import ServedModel

API_VERSION: Final = "0.13.0"
"""Of Ollama, whose API this is: clients ask whether it is new enough for them."""
_NANO = 1_000_000_000


Embedding = TypeVar("Embedding", OllamaEmbedRequest, OllamaEmbeddingsRequest)


class Prepared(NamedTuple):
    """What a request becomes. job: None if it only asks for the model. scored: probabilities of tokens are wanted.
    remembers: the client gets the tokens of the conversation, to send them back."""

    job: PreparedRequest | None
    names: Names
    scored: bool = False
    remembers: bool = False


def routes(models: ModelRegistry | None, services: Services, intake: BodyReader, check: Check) -> list[Route]:
    """The paths under /api. models: those that answer, if there are some."""
    endpoints = _OllamaEndpoints(models, services, intake)
    asked = {"/api/embed": endpoints.embed, "/api/embeddings": endpoints.embeddings, "/api/show": endpoints.show,
             "/api/pull": endpoints.pull}
    if models is not None:
        asked |= {"/api/chat": endpoints.chat, "/api/generate": endpoints.generate}
    told = {"/api/tags": endpoints.tags, "/api/ps": endpoints.running, "/api/version": endpoints.version}
    return [*(Route(path, answering(endpoint, check, error_response), methods=["POST"])
              for path, endpoint in asked.items()),
            *(Route(path, answering(endpoint, check, error_response)) for path, endpoint in told.items())]


@dataclass(frozen=True, slots=True)
class _OllamaEndpoints:
    registry: ModelRegistry | None
    services: Services
    intake: BodyReader

    @property
    def models(self) -> ModelRegistry:
        assert self.registry is not None
        return self.registry

    async def chat(self, request: Request) -> Response:
        served, body, prepared = await self.models.read(request, OllamaChatRequest, _chat)
        return await _answer(request, served, body.streams, prepared, chat=True)

    async def generate(self, request: Request) -> Response:
        served, body, prepared = await self.models.read(request, OllamaGenerateRequest, _generate)
        return await _answer(request, served, body.streams, prepared, chat=False)

    async def embed(self, request: Request) -> Response:
        began = time.perf_counter()
        service, items, found, asked = await self._vectors(request, OllamaEmbedRequest)
        answer = {"model": described.tagged(service.name), "embeddings": rows_of(found, asked, service),
                  "total_duration": _since(began), "load_duration": 0, "prompt_eval_count": sum(map(len, items))}
        return await written(request, answer, len(found) * service.encoder.dimension)

    async def embeddings(self, request: Request) -> Response:
        service, _, found, asked = await self._vectors(request, OllamaEmbeddingsRequest)
        return json_response({"embedding": next(rows_of(found, asked, service), [])})

    async def tags(self, _: Request) -> Response:
        loaded = self._loaded()
        found = [described.listed(entry, loaded[entry.name].llm if entry.name in loaded else None)
                 for entry in (self.registry.entries() if self.registry else ())]
        return json_response({"models": [*found, *map(described.listed_encoder, self.services)]})

    async def running(self, _: Request) -> Response:
        loaded = self._loaded()
        entries = self.registry.entries() if self.registry else []
        return json_response({"models": [described.running(entry, loaded[entry.name].llm) for entry in entries
                                         if entry.name in loaded]})

    async def version(self, _: Request) -> Response:
        return json_response({"version": API_VERSION})

    async def show(self, request: Request) -> Response:
        body = await self._asked(request)
        if service := self.services.named(body.meant):
            return json_response(described.shown_encoder(service))
        entry = self._entry(body.meant)
        return json_response(described.shown(entry, self._loaded().get(entry.name)))

    async def pull(self, request: Request) -> Response:
        """What is served is there; nothing else is fetched."""
        body = await self._asked(request)
        if not self.services.named(body.meant):
            self._entry(body.meant)
        done = {"status": "success"}
        return Response(line(done), media_type=JsonLines.media_type) if body.stream is not False else (
            json_response(done))

    async def _asked(self, request: Request) -> OllamaModelRequest:
        async def nothing(_: OllamaModelRequest) -> None:
            return None

        _, body, _ = await self.intake.read(request, OllamaModelRequest, nothing, lambda _, body: body.meant)
        return body

    def _entry(self, name: str) -> Any:
        if self.registry is None:
            raise ProblemError(Problem(404, f"model {show(name)} not found", "model", "model_not_found"))
        return self.registry.entry(name)

    def _loaded(self) -> dict[str, ServedModel]:
        return {served.name: served for served in (self.registry.loaded if self.registry else ())}

    async def _vectors(self, request: Request, schema: type[Embedding]
                       ) -> tuple[EmbeddingService, list[Item], list[Vectors], EmbeddingsRequest]:
        async def choose(body: Embedding) -> EmbeddingService:
            if not self.services.services:
                raise ProblemError(Problem(404, "this server has no model of vectors", "model", "model_not_found"))
            return self.services.find(body.model)

        service, body, (items, asked) = await self.intake.read(request, schema, choose, _to_embed)
        return service, items, await self.services.run(service, request, items, body.salt) if items else [], asked


def _to_embed(service: EmbeddingService, body: OllamaEmbedRequest | OllamaEmbeddingsRequest
              ) -> tuple[list[Item], EmbeddingsRequest]:
    if isinstance(body, OllamaEmbeddingsRequest):
        asked, names = EmbeddingsRequest(input=body.prompt, truncate=True), {"input": "prompt"}
    else:
        asked, names = EmbeddingsRequest(input=body.input, truncate=body.truncate is not False,
                                         dimensions=body.dimensions), {}
    if asked.input in (None, "", []):  # Ollama's clients ask so whether the model is there
        return [], asked
    with renamed(names):
        return to_embed(service, asked), asked


def _chat(served: ServedModel, body: OllamaChatRequest) -> Prepared:
    if not body.messages:
        return Prepared(None, {})
    chat, names = body.chat(served.limits)
    return _prepared(served, body, chat, names)


def _generate(served: ServedModel, body: OllamaGenerateRequest) -> Prepared:
    if body.loads:
        return Prepared(None, {})
    if not (body.raw or body.suffix):
        chat, names = body.chat(served.limits)
        prepared = _prepared(served, body, chat, names)
        assert prepared.job
        return prepared._replace(job=_continued(served, prepared.job, body.context or ()), remembers=True)
    text, names = body.completion(served.limits)
    with renamed(names):
        (job,), _ = text_jobs(served, text)
    body.ignored.extend(names.get(name, name) for name in text.ignored)
    return Prepared(job, names, text.logprobs is not None)


def _prepared(served: ServedModel, body: Fields, chat: Any, names: Names) -> Prepared:
    with renamed(names):
        job = chat_job(served, chat)
    body.ignored.extend(names.get(name, name) for name in chat.ignored)
    return Prepared(job, names, bool(chat.logprobs))


def _continued(served: ServedModel, job: PreparedRequest, context: Sequence[int]) -> PreparedRequest:
    """The job behind the tokens of the conversation so far."""
    if not context:
        return job
    if not isinstance(job.request.prompt, tuple):
        raise RequestError("context cannot be had together with pictures: use /api/chat", "context")
    whole = served.complete([*context, *job.request.prompt], job.request.output)  # type: ignore[arg-type]
    return replace(job, request=replace(job.request, prompt=whole.request.prompt, stable_prefixes=()), remember=None)


async def _answer(request: Request, served: ServedModel, streams: bool, prepared: Prepared, chat: bool) -> Response:
    shape = OllamaFormatter(described.tagged(served.name), chat, served.token_bytes if prepared.scored else None)
    if prepared.job is None:
        loaded = shape.said("", done=True) | {"done_reason": "load"}
        return Response(line(loaded), media_type=JsonLines.media_type) if streams else json_response(loaded)
    run = await served.start(request, [prepared.job], "messages" if chat else "prompt", not streams, prepared.names)
    record, ids = record_of(request), prepared.job.request.ids if prepared.remembers else ()
    if streams:
        return JsonLines(_stream(run, record, shape, ids), error_line, run.close, line(shape.said("")))
    done, = await served.wholes(request, run)

    def whole() -> bytes:
        choice = done.done
        assert choice
        return line(shape.said(choice.text, choice.reasoning, choice.calls, done.scores, True) | _end(
            run, record.began, choice, ids))

    return Response(await dumped(record, whole, run.size + len(ids)), media_type="application/json")


async def _stream(
    run: GenerationStream, record: RequestRecord, shape: OllamaFormatter, ids: Sequence[int]
) -> AsyncIterator[bytes]:
    choice = None
    async for pieces in run.pieces():
        for piece in pieces:
            choice = piece.done
            if lines := shape.piece(piece):
                yield b"".join(map(line, lines))
    assert choice
    last = shape.said("", done=True) | _end(run, record.began, choice, ids)
    yield await dumped(record, partial(line, last), run.size + len(ids))


def _end(run: GenerationStream, began: float, choice: Any, ids: Sequence[int]) -> Json:
    """Why an answer ended, what it counts and took. ids: of the prompt, if the client is to send all of them back."""
    usage: Usage = run.usage
    waited, answered = run.seconds
    context = {"context": [*ids, *choice.tokens]} if ids else {}
    return {"done_reason": choice.finish, "total_duration": _since(began), "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens, "prompt_eval_duration": int(waited * _NANO),
            "eval_count": usage.completion_tokens, "eval_duration": int(answered * _NANO), **context}


def _since(began: float) -> int:
    return int((time.perf_counter() - began) * _NANO)

