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
from deltic.server.desk import Desk
from deltic.server.forms import ChatForm, Echo, Envelope, TextForm, usage_form
from deltic.server.schema import ChatRequest, CompletionRequest
from deltic.server.wire import (
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
from deltic.text.front import Job

_TYPES = {401: "authentication_error", 404: "not_found_error"}
_DONE = b"data: [DONE]\n\n"
_WAITING = b": waiting\n\n"
_SMALL = 2000  # tokens, and probabilities of tokens, of an answer that is written at once

Form = ChatForm | TextForm
Endpoint = Callable[[Request], Awaitable[Response]]
Check = Callable[[Request], None]


def error_response(problem: Problem, headers: dict[str, str] | None = None) -> Response:
    """A problem in OpenAI's form."""
    response = json_response(_error(problem), problem.status)
    response.headers.update(headers or {})
    if problem.retry_after is not None:
        response.headers["retry-after"] = str(problem.retry_after)
    return response


def routes(desk: Desk, check: Check) -> list[Route]:
    """The paths under /v1."""
    wire = _Wire(desk)
    found = (("/chat/completions", wire.chat, "POST"), ("/completions", wire.complete, "POST"),
             ("/models", wire.models, "GET"), ("/models/{model:path}", wire.model, "GET"))
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
class _Wire:
    desk: Desk

    async def chat(self, request: Request) -> Response:
        body, job = await self.desk.read(request, ChatRequest, self._chat_job)
        run = await self.desk.start(request, [job], "messages", not body.stream)
        return await self._answer(request, run, ChatForm(self.desk.token_bytes, bool(body.logprobs)), body)

    async def complete(self, request: Request) -> Response:
        body, (jobs, echo) = await self.desk.read(request, CompletionRequest, self._text_jobs)
        run = await self.desk.start(request, jobs, "prompt", not body.stream)
        return await self._answer(request, run, TextForm(self.desk.token_bytes, body.logprobs is not None, echo), body)

    async def models(self, _: Request) -> Response:
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self.desk.check_model(request.path_params["model"])
        return json_response(self._model())

    def _chat_job(self, body: ChatRequest) -> Job:
        self.desk.check_model(body.model)
        body.refuse_unsupported()
        job = self.desk.llm.front.chat(body.checked_messages(), body.sampling(self.desk.limits),
                                       tools=body.shown_tools(), variables=body.variables(), history=body.history,
                                       thinking_budget=body.thinking_budget)
        return _speculating(job, body.speculate)

    def _text_jobs(self, body: CompletionRequest) -> tuple[list[Job], Echo]:
        self.desk.check_model(body.model)
        body.refuse_unsupported()
        sampling, prompts = body.sampling(self.desk.limits), body.prompts()
        jobs = [_speculating(self.desk.complete(prompt, sampling), body.speculate) for prompt in prompts]
        if not body.echo:
            return jobs, Echo()
        echo = Echo([self.desk.text(prompt) for prompt in prompts], sampling.n)
        if sum(map(len, echo.prompts)) * sampling.n > self.desk.limits.max_body_mib << 20:
            raise RequestError(f"echo would repeat more than {self.desk.limits.max_body_mib} MiB (max_body_mib): ask "
                               "for fewer answers, or leave it out", "echo")
        return jobs, echo

    async def _answer(self, request: Request, run: Run, form: Form, body: ChatRequest | CompletionRequest) -> Response:
        if body.stream:
            events = _stream(run, form, Envelope(form.piece_kind, self.desk.name, form.prefix), body.wants_usage)
            return EventStream(events, _error_event, run.close)
        try:
            done = await while_connected(request.receive, run.wholes(self.desk.limits.max_answer_values))
        finally:
            run.close()
        choices = (form.whole(done.pop(0)) for _ in range(len(done)))
        answer = Envelope(form.whole_kind, self.desk.name, form.prefix).wrap(choices, usage=usage_form(run.usage))
        return json_bytes(dump(answer) if run.size <= _SMALL else await asyncio.to_thread(dump_patiently, answer))

    def _model(self) -> dict[str, Any]:
        return {"id": self.desk.name, "object": "model", "created": self.desk.created, "owned_by": "deltic",
                "max_model_len": self.desk.llm.engine.max_context}


def _speculating(job: Job, wanted: bool | None) -> Job:
    """The job, for which tokens may be guessed unless that is not wanted."""
    return job if wanted is not False else replace(job, request=replace(job.request, speculate=False))


async def _stream(run: Run, form: Form, envelope: Envelope, wants_usage: bool) -> AsyncIterator[bytes]:
    wrap = partial(envelope.wrap, usage=None) if wants_usage else envelope.wrap
    async for pieces in run.pieces():
        chunks = [event(wrap([choice])) for piece in pieces for choice in form.pieces(piece)]
        if chunks or not pieces:
            yield b"".join(chunks) or _WAITING
    if wants_usage:
        yield event(envelope.wrap([], usage=usage_form(run.usage)))
    yield _DONE


def _error(problem: Problem) -> dict[str, Any]:
    kind = _TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "server_error")
    return {"error": {"message": problem.message, "type": kind, "param": problem.param, "code": problem.code}}


def _error_event(error: Exception) -> bytes:
    return b"data: " + dump(_error(problem_of(error))) + b"\n\n"
