"""HTTP for all wires: problems, clients that go away, event streams. Knows no wire's schema."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deltic.errors import (
    BusyError,
    DelticError,
    GenerationError,
    LongPromptError,
    QuotaError,
    RequestError,
    UnavailableError,
)
from deltic.server.fields import IGNORED_HEADER
from deltic.server.records import RequestRecord, record_of

log = logging.getLogger("deltic")

_WRITER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=list)

KEEP_ALIVE = 15.0
"""Seconds of silence after which a stream shows its client that it lives."""
_AT_ONCE = 64  # items of an iterator that are written between two turns of other threads
_PLAIN = frozenset((int, str, float, bool, type(None)))
_SMALL = 2000  # tokens, and probabilities of tokens, of an answer that is written at once

Result = TypeVar("Result")
Endpoint = Callable[[Request], Awaitable[Response]]
Check = Callable[[Request], None]
"""Raises if the request may not be served at all."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What a client is told when it does not get what it asked for. retry_after: seconds after which it may.
    request_id: of the request, where it came so far as to have one."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None
    request_id: str | None = None


class ProblemError(Exception):
    """Ends the handling of a request with this problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def problem_of(error: Exception) -> Problem:
    """How an exception looks from outside; the inside of unexpected ones goes to the log only."""
    if isinstance(error, ProblemError):
        return error.problem
    if isinstance(error, RequestError):
        return Problem(400, str(error), error.field,
                       "context_length_exceeded" if isinstance(error, LongPromptError) else None)
    if isinstance(error, QuotaError):
        return Problem(429, str(error), code="rate_limit_exceeded", retry_after=error.retry_after)
    if isinstance(error, BusyError):
        return Problem(503, str(error), retry_after=error.retry_after)
    if isinstance(error, UnavailableError):
        return Problem(503, str(error))
    if isinstance(error, GenerationError):
        return Problem(500, str(error))
    if isinstance(error, ClientDisconnect):
        return Problem(499, "the client is gone")
    if isinstance(error, DelticError):
        return Problem(400, str(error))
    if isinstance(error, HTTPException):
        return Problem(error.status_code, str(error.detail))
    log.error("internal error", exc_info=error)
    return Problem(500, "internal error; the server's log has the details")


def answering(endpoint: Endpoint, check: Check, refuse: Callable[[Problem], Response]) -> Endpoint:
    """Turns what the check or the endpoint raises into an answer, so that the connection can be used again. Names what
    had no effect. refuse: a problem in the wire's shape."""
    async def answer(request: Request) -> Response:
        record = record_of(request)
        record.served = True
        try:
            check(request)
            response = await endpoint(request)
            return _naming(record.ignored, response)
        except Exception as error:
            problem = problem_of(error)
            record.problem = {"param": problem.param, "code": problem.code}
            return refuse(replace(problem, request_id=record.id))
    return answer


def _naming(ignored: Sequence[str], response: Response) -> Response:
    """The response, which names what had no effect. A stream that cannot be served after all is closed: nobody else
    would end what is generated for it."""
    try:
        if ignored:
            response.headers[IGNORED_HEADER] = ", ".join(quote(name, errors="replace") for name in ignored)
    except BaseException:
        if isinstance(response, EventStream):
            response.close()
        raise
    return response


def dump(data: Any) -> bytes:
    """JSON; what is not valid Unicode becomes a question mark, an iterator a list."""
    return _WRITER.encode(data).encode("utf-8", "replace")


def dump_patiently(data: Any) -> bytes:
    """The same item by item, between which other threads may run. What iterators in objects give is written and
    forgotten one by one."""
    return b"".join(_written(data))


def _written(data: Any) -> Iterator[bytes]:
    if isinstance(data, Iterator):
        yield b"["
        first = True
        while items := list(islice(data, _AT_ONCE)):
            plain = all(type(item) in _PLAIN for item in items)
            for piece in (dump(items)[1:-1],) if plain else map(dump_patiently, items):
                yield b"" if first else b","
                yield piece
                first = False
        yield b"]"
    elif isinstance(data, dict) and any(isinstance(value, dict | Iterator) for value in data.values()):
        for index, (key, value) in enumerate(data.items()):
            yield (b"," if index else b"{") + dump(key) + b":"
            yield from _written(value)
        yield b"}"
    else:
        yield dump(data)


def json_response(data: Any, status: int = 200) -> Response:
    return Response(dump(data), status, media_type="application/json")


async def written(request: Request, data: Any, size: int) -> Response:
    """A response of JSON, written in a thread if it is large. size: of its tokens, and probabilities of tokens."""
    text = dump(data) if size <= _SMALL else await record_of(request).work(partial(dump_patiently, data), size)
    return Response(text, media_type="application/json")


async def dumped(record: RequestRecord, work: Callable[[], bytes], size: int) -> bytes:
    """What some work for a request gives, done in a thread if there is much of it."""
    return work() if size <= _SMALL else await record.work(work, size)


def spliced(head: bytes, data: Mapping[str, Any]) -> bytes:
    """An object that is written already, with more fields."""
    return head[:-1] + b"," + dump(data)[1:]


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do the work, or cancel it and raise ClientDisconnect as soon as the client is gone. The body must be read."""
    task, gone = asyncio.current_task(), False
    assert task is not None

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()
    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if gone and not task.uncancel():  # else somebody else wants it, too
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()


class EventStream(Response):
    """Server-sent events, for as long as the client is there. on_error: the last event, if making one fails. ping: what
    is sent after each KEEP_ALIVE seconds of silence, so that nobody on the way takes the connection for dead."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], on_error: Callable[[Exception], bytes],
                 close: Callable[[], None], ping: bytes = b": keep-alive\n\n") -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._on_error, self._close, self._ping = events, on_error, close, ping
        self._last = 0.0

    def close(self) -> None:
        """Free what the events come from."""
        self._close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await while_connected(receive, self._send_all(send))
        except ClientDisconnect:
            pass
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        pinging = asyncio.create_task(self._send_pings(send))
        try:
            async for event in self._events:
                self._last = time.monotonic()
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            await send({"type": "http.response.body", "body": self._on_error(error), "more_body": True})
        finally:
            pinging.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_pings(self, send: Send) -> None:
        self._last = time.monotonic()
        while True:
            silent = time.monotonic() - self._last
            if silent >= KEEP_ALIVE:
                self._last, silent = time.monotonic(), 0.0
                await send({"type": "http.response.body", "body": self._ping, "more_body": True})
            await asyncio.sleep(KEEP_ALIVE - silent)


def event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + dump(data) + b"\n\n"
