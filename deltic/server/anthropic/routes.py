"""Anthropic's routes: messages, and how many tokens they have."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deltic.chat.processor import PreparedRequest
from deltic.params import Usage
from deltic.server.anthropic.formatting import (
    PING,
    UNSTOPPED,
    Blocks,
    blocks,
    error_event,
    error_response,
    message,
    stop_fields,
    usage_fields,
)
from deltic.server.anthropic.schema import CountRequest, MessagesRequest, Names
from deltic.server.body import renamed, sent_name
from deltic.server.collect import GenerationStream
from deltic.server.http import Check, EventStream, answering, event, json_response, written
from deltic.server.model_registry import ModelRegistry
from deltic.server.openai.preparation import chat_job
from deltic.server.served_model import ServedModel


def routes(models: ModelRegistry, check: Check) -> list[Route]:
    """The paths under /v1/messages."""
    endpoints = _AnthropicEndpoints(models)
    found = (("/v1/messages", endpoints.create), ("/v1/messages/count_tokens", endpoints.count))
    return [Route(path, answering(endpoint, check, error_response), methods=["POST"]) for path, endpoint in found]


@dataclass(frozen=True, slots=True)
class _AnthropicEndpoints:
    models: ModelRegistry

    async def create(self, request: Request) -> Response:
        served, body, (job, names) = await self.models.read(request, MessagesRequest, _job)
        run = await served.start(request, [job], "messages", not body.stream, {**body.sent, **names})
        if body.stream:
            started = message(served.name, Usage(len(job.request.ids), 0, 0), (), UNSTOPPED)
            events = _stream(run, started, Blocks(body.shows_thinking), served.llm.engine.max_context)
            return EventStream(events, error_event, run.close, PING)
        done, = await served.wholes(request, run)
        assert done.done
        content = blocks(done.done.said, body.shows_thinking)
        stopped = stop_fields(done.done, served.llm.engine.max_context)
        return await written(request, message(served.name, run.usage, content, stopped), run.size)

    async def count(self, request: Request) -> Response:
        _, _, (job, _) = await self.models.read(request, CountRequest, _job, answers=False)
        return json_response({"input_tokens": len(job.request.ids)})


def _job(served: ServedModel, body: CountRequest) -> tuple[PreparedRequest, Names]:
    chat, names = body.chat()
    with renamed(names):
        job = chat_job(served, chat, translated=True)
    body.ignored.extend(sent_name(name, names) for name in chat.ignored)
    return job, names


async def _stream(run: GenerationStream, first: dict[str, Any], content: Blocks, context: int) -> AsyncIterator[bytes]:
    def named(*events: dict[str, Any]) -> bytes:
        return b"".join(event(data, data["type"]) for data in events)

    yield named({"type": "message_start", "message": first})
    choice = None
    async for pieces in run.pieces():
        for piece in pieces:
            choice = piece.done
            if events := [*content.events(piece.deltas)]:
                yield named(*events)
    assert choice
    yield named(*content.close(), {"type": "message_delta", "delta": stop_fields(choice, context),
                                   "usage": usage_fields(run.usage)}, {"type": "message_stop"})
