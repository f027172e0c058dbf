"""OpenAI's routes: chat completions, completions, models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deltic.errors import RequestError
from deltic.server.collect import Run
from deltic.server.http import (
    EventStream,
    Problem,
    dump,
    dump_patiently,
    event,
    json_bytes,
    json_response,
    problem_of,
    while_connected,
)
from deltic.server.responses import ChatShape, CompletionShape, Echo, Envelope, usage_fields
from deltic.server.schema import ChatRequest, CompletionRequest
from deltic.server.served_model import ServedModel
from deltic.text.chat_processor import Job

_TYPES = {401: "authentication_error", 404: "not_found_error"}
_DONE = b"data: [DONE]\n\n"
_WAITING = b": waiting\n\n"
_SMALL = 2000  # tokens, and probabilities of tokens, of an answer that is written at once

Shape = ChatShape | CompletionShape
Endpoint = Callable[[Request], Awaitable[Response]]
Check = Callable[[Request], None]


def error_response(problem: Problem, headers: dict[str, str] | None = None) -> Response:
    """A problem in OpenAI's shape."""
    response = json_response(_error(problem), problem.status)
    response.headers.update(headers or {})
    if problem.retry_after is not None:
        response.headers["retry-after"] = str(problem.retry_after)
    return response


def routes(served: ServedModel, check: Check) -> list[Route]:
    """The paths under /v1."""
    endpoints = _Endpoints(served)
    found = (("/chat/completions", endpoints.chat, "POST"), ("/completions", endpoints.complete, "POST"),
             ("/models", endpoints.models, "GET"), ("/models/{model:path}", endpoints.model, "GET"))
    return [Route(f"/v1{path}", answering(endpoint, check), methods=[method]) for path, endpoint, method in found]


def answering(endpoint: Endpoint, check: Check) -> Endpoint:
    """Turns what the check or the endpoint raises into an answer, so that the connection can be used again."""
    async def answer(request: Request) -> Response:
        try:
            check(request)
            return await endpoint(request)
        except Exception as error:
            return error_response(problem_of(error))
    return answer


@dataclass(frozen=True, slots=True)
class _Endpoints:
    served: ServedModel

    async def chat(self, request: Request) -> Response:
        body, job = await self.served.read(request, ChatRequest, self._chat_job)
        run = await self.served.start(request, [job], "messages", not body.stream)
        return await self._answer(request, run, ChatShape(self.served.token_bytes, bool(body.logprobs)), body)

    async def complete(self, request: Request) -> Response:
        body, (jobs, echo) = await self.served.read(request, CompletionRequest, self._text_jobs)
        run = await self.served.start(request, jobs, "prompt", not body.stream)
        shape = CompletionShape(self.served.token_bytes, body.logprobs is not None, echo)
        return await self._answer(request, run, shape, body)

    async def models(self, _: Request) -> Response:
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self.served.check_model(request.path_params["model"])
        return json_response(self._model())

    def _chat_job(self, body: ChatRequest) -> Job:
        self.served.check_model(body.model)
        body.refuse_unsupported()
        job = self.served.llm.chat_processor.chat(body.checked_messages(), body.sampling(self.served.limits),
                                       tools=body.shown_tools(), parallel_calls=body.parallel_tool_calls is not False,
                                       variables=body.variables(), history=body.history,
                                       thinking_budget=body.thinking_budget)
        return _speculating(job, body.speculate)

    def _text_jobs(self, body: CompletionRequest) -> tuple[list[Job], Echo]:
        self.served.check_model(body.model)
        body.refuse_unsupported()
        sampling, prompts = body.sampling(self.served.limits), body.prompts()
        jobs = [_speculating(self.served.complete(prompt, sampling), body.speculate) for prompt in prompts]
        if not body.echo:
            return jobs, Echo()
        echo = Echo([self.served.text(prompt) for prompt in prompts], sampling.n)
        if sum(map(len, echo.prompts)) * sampling.n > self.served.limits.max_body_mib << 20:
            raise RequestError(f"echo would repeat more than {self.served.limits.max_body_mib} MiB (max_body_mib): ask "
                               "for fewer answers, or leave it out", "echo")
        return jobs, echo

    async def _answer(self, request: Request, run: Run, shape: Shape,
                      body: ChatRequest | CompletionRequest) -> Response:
        if body.stream:
            events = _stream(run, shape, Envelope(shape.piece_kind, self.served.name, shape.prefix), body.wants_usage)
            return EventStream(events, _error_event, run.close)
        try:
            done = await while_connected(request.receive, run.wholes(self.served.limits.max_answer_values))
        finally:
            run.close()
        choices = (shape.whole(done.pop(0)) for _ in range(len(done)))
        answer = Envelope(shape.whole_kind, self.served.name, shape.prefix).wrap(choices, usage=usage_fields(run.usage))
        return json_bytes(dump(answer) if run.size <= _SMALL else await asyncio.to_thread(dump_patiently, answer))

    def _model(self) -> dict[str, Any]:
        return {"id": self.served.name, "object": "model", "created": self.served.created, "owned_by": "deltic",
                "max_model_len": self.served.llm.engine.max_context}


def _speculating(job: Job, wanted: bool | None) -> Job:
    """The job, for which tokens may be drafted unless that is not wanted."""
    return job if wanted is not False else replace(job, request=replace(job.request, speculate=False))


async def _stream(run: Run, shape: Shape, envelope: Envelope, wants_usage: bool) -> AsyncIterator[bytes]:
    wrap = partial(envelope.wrap, usage=None) if wants_usage else envelope.wrap
    async for pieces in run.pieces():
        chunks = [event(wrap([choice])) for piece in pieces for choice in shape.pieces(piece)]
        if chunks or not pieces:
            yield b"".join(chunks) or _WAITING
    if wants_usage:
        yield event(envelope.wrap([], usage=usage_fields(run.usage)))
    yield _DONE


def _error(problem: Problem) -> dict[str, Any]:
    kind = _TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "server_error")
    return {"error": {"message": problem.message, "type": kind, "param": problem.param, "code": problem.code}}


def _error_event(error: Exception) -> bytes:
    return b"data: " + dump(_error(problem_of(error))) + b"\n\n"
