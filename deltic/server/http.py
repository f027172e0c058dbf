"""HTTP plumbing that all APIs share: JSON, server-sent events, clients that disconnect, and large answers.

Large answers are sent in pieces. asyncio copies a body that is written as a whole twice on the event loop, and 100 MiB
would stall the loop for half a second.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pydantic_core import PydanticSerializationError, to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

if TYPE_CHECKING:
    from deltic.server.records import RequestRecord

log = logging.getLogger("deltic")

PIECE: Final = 64 << 10
"""Bytes that are written in one turn of the event loop."""
DROP: Final = "drop_connection"
"""Key in the scope's state. Its value is the function that closes the connection at once, if the server has one."""
KEEP_ALIVE = 15.0
"""Seconds of silence after which a stream sends a ping."""
_SMALL: Final = 2000
"""Tokens and logprobs up to which an answer is written in the event loop."""

Result = TypeVar("Result")


def dump(data: Any) -> bytes:
    """Returns data as JSON. Invalid Unicode becomes a question mark.

    Iterators become lists, item by item: other threads run in between, and no list of all items is built.
    """
    try:
        return to_json(data, fallback=_items)
    except PydanticSerializationError:  # a lone surrogate, for example in the name of a file
        return json.dumps(data, ensure_ascii=False, separators=(",", ":"), default=list).encode("utf-8", "replace")


def _items(items: Iterable[Any]) -> Iterator[Any]:
    yield from items


def json_response(data: Any, status: int = 200) -> Response:
    return Response(dump(data), status, media_type="application/json")


async def dumped(record: RequestRecord, work: Callable[[], bytes], size: int) -> bytes:
    """Returns the result of `work`, run in a thread if it is large. size: number of tokens and logprobs."""
    return work() if size <= _SMALL else await record.work(work, size)


async def written(request: Request, data: Any, size: int) -> Response:
    """Returns a JSON response, encoded in a thread if it is large. size: number of tokens and logprobs."""
    text = await dumped(request.state.record, partial(dump, data), size)
    return Response(text, media_type="application/json")


def spliced(head: bytes, data: Mapping[str, Any]) -> bytes:
    """Adds fields to an object that is already encoded as JSON."""
    return head[:-1] + b"," + dump(data)[1:]


def event(data: Any, name: str | None = None) -> bytes:
    """Returns one server-sent event."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + dump(data) + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Awaits `work`, or cancels it and raises ClientDisconnect when the client disconnects. Read the body before."""
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
        if gone and not task.uncancel():  # otherwise something else cancelled it too
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()


class EventStream(Response):
    """Streams server-sent events until the client disconnects.

    on_error: makes the last event if an event cannot be made. close: frees the source of the events. ping: event that
    is sent after each KEEP_ALIVE seconds of silence.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], on_error: Callable[[Exception], bytes],
                 close: Callable[[], None], ping: bytes = b": keep-alive\n\n") -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.close = close
        self._events = events
        self._on_error = on_error
        self._ping = ping
        self._last = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await while_connected(receive, self._send_all(send))
        except ClientDisconnect:
            pass
        finally:
            self.close()

    async def _send_all(self, send: Send) -> None:
        pinging = asyncio.create_task(self._send_pings(send))
        try:
            async for data in self._events:
                await self._send(send, data)
        except Exception as error:
            await self._send(send, self._on_error(error))
        finally:
            pinging.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        self._last = time.monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _send_pings(self, send: Send) -> None:
        self._last = time.monotonic()
        while True:
            await asyncio.sleep(KEEP_ALIVE - (time.monotonic() - self._last))
            if time.monotonic() - self._last >= KEEP_ALIVE:
                await self._send(send, self._ping)


class JsonLines(EventStream):
    """Streams JSON values, one per line."""

    media_type = "application/x-ndjson"


@dataclass(eq=False, slots=True)
class _Unsent:
    """A body that is being sent. held: number of its bytes that are not sent yet."""

    drop: Callable[[], None]
    held: int


class Outbox:
    """Sends the large bodies of a server. most_mib: limit for the unsent bytes, in MiB. held: unsent bytes."""

    def __init__(self, most_mib: int) -> None:
        self.held = 0
        self._most_mib = most_mib
        self._sending: dict[_Unsent, None] = {}  # oldest first

    async def send(self, scope: Scope, send: Send, message: Message) -> None:
        """Sends an ASGI message. A large body is sent in pieces."""
        body = message.get("body", b"")
        if len(body) <= PIECE:
            await send(message)
            return
        unsent = _Unsent(scope.get("state", {}).get(DROP, lambda: None), 0)
        self._hold(unsent, len(body))
        try:
            for start in range(0, len(body), PIECE):
                end = start + PIECE
                more = end < len(body) or message.get("more_body", False)
                await send({**message, "body": body[start:end], "more_body": more})
                self._release(unsent, min(PIECE, unsent.held))
                await asyncio.sleep(0)  # without this, a client that reads as fast as this writes would occupy the loop
        finally:
            self._give_up(unsent)

    def _hold(self, unsent: _Unsent, size: int) -> None:
        """Counts the unsent bytes of a body. If all bodies take too much, closes the connections of the oldest."""
        self.held += size
        unsent.held = size
        while self._sending and self.held > self._most_mib << 20:
            oldest = next(iter(self._sending))
            log.warning("answers that clients have not read take more than %d MiB (max_unsent_mib): the connection of "
                        "the oldest is closed", self._most_mib)
            self._give_up(oldest)
            oldest.drop()
        self._sending[unsent] = None

    def _give_up(self, unsent: _Unsent) -> None:
        self._sending.pop(unsent, None)
        self._release(unsent, unsent.held)

    def _release(self, unsent: _Unsent, size: int) -> None:
        self.held -= size
        unsent.held -= size
