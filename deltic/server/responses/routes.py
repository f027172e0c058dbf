"""OpenAI's routes of responses: made, kept, asked for again."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deltic.chat.choices import Choice
from deltic.chat.processor import PreparedRequest
from deltic.errors import GenerationError, RequestError, show
from deltic.server.body import renamed, sent_name
from deltic.server.collect import GenerationStream
from deltic.server.http import (
    Check,
    EventStream,
    Problem,
    ProblemError,
    answering,
    dump,
    dumped,
    event,
    json_response,
    problem_of,
    spliced,
)
from deltic.server.model_registry import ModelRegistry
from deltic.server.openai.formatting import error_fields, error_response
from deltic.server.openai.preparation import chat_job
from deltic.server.records import RequestRecord, record_of
from deltic.server.responses.formatting import Json, ResponsesOutput, usage_fields
from deltic.server.responses.schema import Names, ResponsesRequest, new_response
from deltic.server.responses.store import Record, ResponseStore
from deltic.server.served_model import ServedModel

_MOST_LISTED, _LISTED = 100, 20
_REASONS = {"length": "max_output_tokens"}


def routes(models: ModelRegistry, store: ResponseStore, check: Check) -> list[Route]:
    """The paths under /v1/responses."""
    endpoints, path = _ResponsesEndpoints(models, store), "/v1/responses"
    found = (("", endpoints.create, "POST"), ("/input_tokens", endpoints.count, "POST"),
             ("/{id}", endpoints.get, "GET"), ("/{id}", endpoints.delete, "DELETE"),
             ("/{id}/cancel", endpoints.cancel, "POST"), ("/{id}/input_items", endpoints.input_items, "GET"))
    return [Route(path + rest, answering(endpoint, check, error_response), methods=[method])
            for rest, endpoint, method in found]


@dataclass(slots=True)
class _Making:
    """A response that is being made. asked: the request for it. head: what stays of it as JSON, input: its items; both
    may be large and are written once."""

    id: str
    asked: RequestRecord
    output: ResponsesOutput
    head: bytes
    input: bytes
    keeps: bool
    run: GenerationStream | None = None
    cancelled: bool = False
    _numbers: Iterator[int] = field(default_factory=count)

    def now(self, choice: Choice | None = None, error: str | None = None) -> Json:
        """What changes: with the choice, or the error, that ended it."""
        status = "in_progress"
        reason = _REASONS.get(choice.finish) if choice else None
        if choice:
            status = "incomplete" if reason else "completed"
        elif error:
            status = "cancelled" if self.cancelled else "failed"
        failed = {"code": "server_error", "message": error} if status == "failed" else None
        return {"status": status, "output": self.output.items if status != "in_progress" else [], "error": failed,
                "incomplete_details": {"reason": reason} if reason else None,
                "completed_at": int(time.time()) if status == "completed" else None,
                "usage": usage_fields(self.run.usage) if choice and self.run else None}

    def encoded(self, events: Iterable[Json]) -> bytes:
        """Events of items."""
        return b"".join(event(data | {"sequence_number": next(self._numbers)}, data["type"]) for data in events)

    def envelope(self, name: str, response: bytes) -> bytes:
        """An event with the whole response."""
        start = dump({"type": name, "sequence_number": next(self._numbers)})
        return b"event: " + name.encode() + b"\ndata: " + start[:-1] + b',"response":' + response + b"}\n\n"


@dataclass(frozen=True, slots=True)
class _ResponsesEndpoints:
    models: ModelRegistry
    store: ResponseStore
    making: dict[str, _Making] = field(default_factory=dict)

    async def create(self, request: Request) -> Response:
        prepared = partial(self._prepared, record_of(request))
        served, body, (job, names, making) = await self.models.read(request, ResponsesRequest, prepared)
        run = await served.start(request, [job], "input", not body.stream, {**body.sent, **names})
        making.run = run
        self.making[making.id] = making
        if body.stream:
            return EventStream(self._stream(making, run), partial(self._failure, making), partial(self._end, making))
        try:
            done, = await served.wholes(request, run)
        except GenerationError as error:
            if not making.cancelled:
                raise
            return _json(await self._finished(making, None, str(error)))
        finally:
            self._end(making)
        assert done.done
        return _json(await self._finished(making, done.done))

    async def count(self, request: Request) -> Response:
        prepared = partial(self._prepared, record_of(request))
        _, _, (job, _, _) = await self.models.read(request, ResponsesRequest, prepared, answers=False)
        return json_response({"object": "response.input_tokens", "input_tokens": len(job.request.ids)})

    async def get(self, request: Request) -> Response:
        if request.query_params.get("stream") == "true":
            raise RequestError("stream is not supported here: responses are streamed when they are made", "stream")
        if making := self._being_made(request):
            return _json(await dumped(record_of(request), partial(spliced, making.head, making.now()),
                                      len(making.head)))
        return _json(await record_of(request).work(lambda: dump(self._found(request)["response"])))

    async def delete(self, request: Request) -> Response:
        id, record = request.path_params["id"], record_of(request)
        if not await record.work(partial(self.store.delete, id, record.owner)):
            raise _missing(id)
        return json_response({"id": id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        making = self._being_made(request)
        if making is None or making.run is None:
            record = await record_of(request).work(partial(self._found, request))
            said = record["response"]
            raise RequestError(f"the response {said['id']} is {said['status']}: only one that is being made can be "
                               "cancelled", "response_id")
        making.cancelled = True
        making.run.cancel("the response was cancelled")
        return _json(spliced(making.head, making.now(error="cancelled")))

    async def input_items(self, request: Request) -> Response:
        asked = request.query_params
        limit = asked.get("limit", str(_LISTED))
        if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= _MOST_LISTED):
            raise RequestError(f"limit must be from 1 to {_MOST_LISTED}, not {show(limit)}", "limit")
        if asked.get("order", "desc") not in ("asc", "desc"):
            raise RequestError(f"order must be asc or desc, not {show(asked['order'])}", "order")

        def listed() -> bytes:
            items = self._found(request)["input"]
            items = items if asked.get("order") == "asc" else items[::-1]
            start = next((place for place, item in enumerate(items, 1) if item["id"] == asked.get("after")), 0)
            shown = items[start:start + int(limit)]
            return dump({"object": "list", "data": shown, "has_more": len(items) > start + len(shown),
                         "first_id": shown[0]["id"] if shown else "", "last_id": shown[-1]["id"] if shown else ""})
        return _json(await record_of(request).work(listed))

    def _prepared(self, asked: RequestRecord, served: ServedModel, body: ResponsesRequest
                  ) -> tuple[PreparedRequest, Names, _Making]:
        id, owner, most = new_response(), asked.owner, served.limits.max_messages
        items = body.items(id, self.store.finder(owner))
        before = self.store.items(body.previous_response_id, most, owner)
        if before is None:
            raise ProblemError(Problem(400, f"the response {show(body.previous_response_id)} is not kept: send its "
                                       "items", "previous_response_id", "previous_response_not_found"))
        chat, names = body.chat(before, items)
        if len(chat.messages) > most:
            raise RequestError(f"the conversation has {len(chat.messages)} messages, and may have at most {most} "
                               "(max_messages)", "input")
        if len(chat.tools or ()) > served.limits.max_tools:  # those of namespaces were not counted
            raise RequestError(f"there are {len(chat.tools or ())} tools, and may be at most {served.limits.max_tools} "
                               "(max_tools)", "tools")
        with renamed(names):
            job = chat_job(served, chat, translated=True)
        body.ignored.extend(sent_name(name, names) for name in chat.ignored)
        head = {"id": id, "object": "response", "created_at": int(time.time()), "model": served.name}
        output = ResponsesOutput(id, body.own_tools(), body.seals)
        return job, names, _Making(id, asked, output, dump(head | body.echo()), dump(items), body.store is not False)

    async def _stream(self, making: _Making, run: GenerationStream) -> AsyncIterator[bytes]:
        begun = await dumped(making.asked, partial(spliced, making.head, making.now()), len(making.head))
        yield making.envelope("response.created", begun) + making.envelope("response.in_progress", begun)
        choice = None
        async for pieces in run.pieces():
            for piece in pieces:
                choice = piece.done
                work = partial(making.encoded, making.output.take(piece.deltas))
                if text := await dumped(making.asked, work, run.size if _closes(making, piece.deltas) else 0):
                    yield text
        assert choice
        closing = partial(making.encoded, making.output.close(choice.finish == "length"))
        yield await dumped(making.asked, closing, run.size)
        whole = await self._finished(making, choice)
        yield making.envelope("response.incomplete" if choice.finish == "length" else "response.completed", whole)

    async def _finished(self, making: _Making, choice: Choice | None, error: str | None = None) -> bytes:
        """The whole response, which is kept if that is wanted."""
        def work() -> bytes:
            if choice and not making.output.items:
                for _ in (*making.output.take(choice.said), *making.output.close(choice.finish == "length")):
                    pass
            response = spliced(making.head, making.now(choice, error))
            if making.keeps:
                kept, owner = b'{"response":%b,"input":%b,"owner":%b}', making.asked.owner
                self.store.put(making.id, kept % (response, making.input, json.dumps(owner).encode()), owner)
            return response
        return await making.asked.work(work)

    def _failure(self, making: _Making, error: Exception) -> bytes:
        problem = problem_of(error)
        if isinstance(error, GenerationError):
            return making.envelope("response.failed", spliced(making.head, making.now(error=problem.message)))
        said = error_fields(problem)["error"]
        return making.encoded([{"type": "error", "code": said["code"] or said["type"], "message": said["message"],
                                "param": said["param"]}])

    def _end(self, making: _Making) -> None:
        self.making.pop(making.id, None)
        if making.run:
            making.run.close()

    def _being_made(self, request: Request) -> _Making | None:
        making = self.making.get(request.path_params["id"])
        return making if making and making.asked.owner == record_of(request).owner else None

    def _found(self, request: Request) -> Record:
        id = request.path_params["id"]
        record = self.store.get(id, record_of(request).owner)
        if record is None:
            raise _missing(id)
        return record


def _closes(making: _Making, deltas: Iterable[Any]) -> bool:
    """Whether these deltas may end an item, whose whole text is then sent again."""
    items = making.output.items
    return bool(items) and any((delta.kind == "reasoning") != (items[-1]["type"] == "reasoning") or delta.call
                               for delta in deltas)


def _missing(id: str) -> ProblemError:
    return ProblemError(Problem(404, f"the response {show(id)} does not exist: it was not kept, or not for so long",
                                "response_id"))


def _json(data: bytes) -> Response:
    return Response(data, media_type="application/json")
