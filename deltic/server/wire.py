"""HTTP for all wires: bodies, problems, clients that go away, event streams. Knows no wire's schema."""

from __future__ import annotations

import asyncio
import difflib
import json
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deltic.errors import DelticError, GenerationError, LongPromptError, RequestError, UnavailableError, show

log = logging.getLogger("deltic")

MAX_BODY = 32 << 20
_PATIENCE = 4  # so many times the limit is read and thrown away, as clients listen only after they have sent all

Result = TypeVar("Result")
Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Problem:
    """What a client is told when it does not get what it asked for."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None


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
    if isinstance(error, UnavailableError):
        return Problem(503, str(error))
    if isinstance(error, GenerationError):
        return Problem(500, str(error))
    if isinstance(error, DelticError | ClientDisconnect):
        return Problem(400, str(error))
    if isinstance(error, HTTPException):
        return Problem(error.status_code, str(error.detail))
    log.error("internal error", exc_info=error)
    return Problem(500, "internal error; the server's log has the details")


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body; a problem with status 413 if it is larger than the limit."""
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size <= limit:
            pieces.append(piece)
        elif size > limit * _PATIENCE:
            break
    if size > limit:
        raise ProblemError(Problem(413, f"the body is larger than {limit} bytes"))
    return b"".join(pieces)


def parse(body: bytes, schema: type[Body]) -> Body:
    """The body as a record; RequestError names the field that is wrong or unknown."""
    data = _read_json(body)
    if not isinstance(data, dict):
        raise RequestError("the body must be a JSON object")
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise _explain(error, schema) from None


def dump(data: Any) -> bytes:
    """JSON; what is not valid Unicode becomes a question mark."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


def json_response(data: Any, status: int = 200) -> Response:
    return Response(dump(data), status, media_type="application/json")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do the work, or cancel it and raise ClientDisconnect as soon as the client is gone. The body must be read."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(Response):
    """Server-sent events, for as long as the client is there. on_error: the last event, if making one fails."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], on_error: Callable[[Exception], bytes],
                 close: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._on_error, self._close = events, on_error, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await while_connected(receive, self._send_all(send))
        except ClientDisconnect:
            pass
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            await send({"type": "http.response.body", "body": self._on_error(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + dump(data) + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _read_json(body: bytes) -> Any:
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_not_json, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not valid UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None


def _not_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is too large")
    return value


def _explain(error: ValidationError, schema: type[BaseModel]) -> RequestError:
    errors = error.errors(include_url=False)
    first = next((found for found in errors if found["type"] == "extra_forbidden"), errors[0])
    field = _path(first["loc"])
    if first["type"] == "extra_forbidden":
        return _unknown(field, schema)
    if first["type"] == "missing":
        return RequestError(f"{field} is missing", field)
    expected = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return RequestError(f"{field} must be {expected}, not {_short(first['input'])}", field)


def _unknown(field: str, schema: type[BaseModel]) -> RequestError:
    near = difflib.get_close_matches(field, schema.model_fields, 1)
    return RequestError(f"unknown field {show(field)}" + (f": do you mean {near[0]!r}?" if near else ""), field)


def _path(location: tuple[int | str, ...]) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return path.removeprefix(".")


def _short(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."
