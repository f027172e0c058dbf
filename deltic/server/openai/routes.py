"""OpenAI's routes: chat completions and completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deltic.chat.choices import ChoiceDelta
from deltic.server.collect import GenerationStream
from deltic.server.http import Check, EventStream, answering, event, written
from deltic.server.model_registry import ModelRegistry
from deltic.server.openai.formatting import (
    AnswerChunk,
    ChatFormatter,
    CompletionFormatter,
    Json,
    error_event,
    error_response,
    prompt_scores,
    total_tokens,
    usage_fields,
)
from deltic.server.openai.preparation import chat_job, text_jobs
from deltic.server.openai.schema import ChatRequest, CompletionRequest
from deltic.server.records import record_of
from deltic.server.served_model import ServedModel

_DONE = b"data: [DONE]\n\n"

Shape = ChatFormatter | CompletionFormatter


def routes(models: ModelRegistry, check: Check) -> list[Route]:
    """The paths under /v1."""
    endpoints = _OpenAiEndpoints(models)
    found = (("/chat/completions", endpoints.chat), ("/completions", endpoints.complete))
    return [Route(f"/v1{path}", answering(endpoint, check, error_response), methods=["POST"])
            for path, endpoint in found]


@dataclass(frozen=True, slots=True)
class _OpenAiEndpoints:
    models: ModelRegistry

    async def chat(self, request: Request) -> Response:
        served, body, job = await self.models.read(request, ChatRequest, chat_job)
        run = await served.start(request, [job], "messages", not body.stream, body.sent)
        hides = body.include_reasoning is False
        shape = ChatFormatter(served.token_bytes, bool(body.logprobs), job.texts.again if hides else None)
        return await _answer(request, served, run, shape, body, job.request.ids)

    async def complete(self, request: Request) -> Response:
        served, body, (jobs, echo) = await self.models.read(request, CompletionRequest, text_jobs)
        run = await served.start(request, jobs, "prompt", not body.stream, body.sent)
        shape = CompletionFormatter(served.token_bytes, body.logprobs is not None, echo)
        return await _answer(request, served, run, shape, body)


async def _answer(request: Request, served: ServedModel, run: GenerationStream, shape: Shape,
                  body: ChatRequest | CompletionRequest, ids: Sequence[int] = ()) -> Response:
    """ids: the prompt's, where a chat says them."""
    if body.stream:
        events = _stream(run, shape, AnswerChunk(shape.piece_kind, served.name, shape.prefix), body)
        return EventStream(events, error_event, run.close)
    done = await served.wholes(request, run)
    if isinstance(body, CompletionRequest) and body.best_of:
        done = await record_of(request).work(partial(_best, done, body.best_of, body.n or 1), run.size)
    found = done[0].done.prompt_logprobs if ids and done[0].done else None
    more = {} if found is None else {"prompt_logprobs": prompt_scores(ids, found, served.token_bytes)}
    choices = (shape.whole(done.pop(0)) for _ in range(len(done)))
    answer = AnswerChunk(shape.whole_kind, served.name, shape.prefix).wrap(
        choices, usage=usage_fields(run.usage), **more)
    return await written(request, answer, run.size)


def _best(pieces: list[ChoiceDelta], made: int, wanted: int) -> list[ChoiceDelta]:
    """Of the choices made for each prompt those whose tokens are the most probable on average."""
    def worth(piece: ChoiceDelta) -> float:
        return sum(score.logprobs.token for score in piece.scores) / max(len(piece.scores), 1)

    groups = (sorted(pieces[start:start + made], key=worth, reverse=True) for start in range(0, len(pieces), made))
    found = [piece for group in groups for piece in group[:wanted]]
    return [replace(piece, number=number) for number, piece in enumerate(found)]


async def _stream(run: GenerationStream, shape: Shape, envelope: AnswerChunk, body: ChatRequest | CompletionRequest
                  ) -> AsyncIterator[bytes]:
    def with_usage(choice: Json) -> bytes:
        return event(envelope.wrap([choice], usage=total_tokens(*run.tokens)))

    written = with_usage if body.wants_usage_always else envelope.events(
        **({"usage": None} if body.wants_usage else {}))
    async for pieces in run.pieces():
        if chunks := [written(choice) for piece in pieces for choice in shape.pieces(piece)]:
            yield b"".join(chunks)
    if body.wants_usage:
        yield event(envelope.wrap([], usage=usage_fields(run.usage)))
    yield _DONE
