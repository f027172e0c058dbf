"""HTTP/1.1 of one connection: uvicorn's protocol over llhttp, with bounds that neither of them has.

The parser calls back for each header, chunk and piece of a body. The callbacks count these, and raise an exception to
end the parsing, so that no client keeps the event loop busy with many tiny pieces.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from deltic.config import Limits
from deltic.server.errors import Problem, fields_for
from deltic.server.http import dump

LEAST_HEADER = 64
"""Bytes that a header counts for at least: short headers cost as much as longer ones."""
LEAST_CHUNK = 64
"""Bytes of a body that allow one more chunk."""
MOST_PIPELINED = 64
"""Requests of a connection that wait for the one before them."""
_SHORT = 64 << 10
"""Bytes of a body that is read to its end although its request is answered."""
_DISCARDED = 4
"""This many times max_body_mib is read and discarded: most clients read an answer only after they have sent all."""


class _RefusedError(Exception):
    """Ends the parsing. problem: the answer; None: the answer before closes the connection."""

    def __init__(self, problem: Problem | None) -> None:
        super().__init__()
        self.problem = problem


class Transport:
    """Counts the bytes that are written to a transport. close: called instead of the transport's."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport = transport
        self.close = close
        self.close_now = transport.close
        self.written = 0

    def write(self, data: bytes) -> None:
        self.written += len(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class HttpProtocol(HttpToolsProtocol):
    """One connection. Pipelined requests are answered in order, and an unreadable one at the end. If a request is
    answered before its body has arrived, and the body may be large, the rest is discarded and the connection closed."""

    def __init__(self, config: Config, state: ServerState, app_state: dict[str, Any], limits: Limits) -> None:
        super().__init__(config, state, app_state)
        self.limits, self.answered = limits, cast(RequestResponseCycle | None, None)
        self.start = self.heard = self.loop.time()
        self.leaving = False
        """True if nothing more is answered, and all that comes is discarded."""
        self._in_head = self._in_body = self._deaf = False
        self._head = self._chunks = self._size = 0  # bytes of headers, chunks and bytes of a body
        self._unseen = 0  # bytes since the parser has found something
        self._discarded = 0
        self._keeps_alive = True
        self._problem: Problem | None = None  # answered after all requests before it

    def on_refused(self, status: int) -> None:
        """Called before a client gets the answer that it sent no readable request."""

    @property
    def begun(self) -> bool:
        """True if a part of a request has arrived."""
        return self._in_head or self._in_body

    @property
    def receives(self) -> bool:
        """True if the body of the request that is answered next is arriving."""
        return self._in_body and self.cycle is self.answered

    @property
    def answering(self) -> bool:
        """True if a request that has arrived is not answered yet."""
        return self.answered is not None and not self.answered.response_complete and not self.receives

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.counted = Transport(transport, self._close)
        super().connection_made(cast(asyncio.Transport, self.counted))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.answered:  # uvicorn notifies only the last request
            self.answered.disconnected = True
            self.answered.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.heard = self.loop.time()
        if self.leaving or self._deaf:
            self._discarded += len(data)
            if self._discarded > self.limits.max_body_mib * _DISCARDED << 20:
                self.transport.abort()
            return
        self._unseen += len(data)
        try:
            self._parse(data)
            self._check_head(self._unseen)
        except _RefusedError as refused:
            self._stop(refused.problem)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            self._stop(cause.problem if isinstance(cause, _RefusedError) else
                       Problem(400, "what was sent is no valid HTTP"))
        except httptools.HttpParserError as error:
            self._stop(Problem(400, f"what was sent is no valid HTTP: {error}"))

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:  # parsed again without the upgrade
                headers = b"".join(b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade")
                data = b"%s %s HTTP/%s\r\n%s\r\n%s" % (self.parser.get_method(), self.url, self.scope[
                    "http_version"].encode(), headers, data[int(str(upgrade)):])
            else:
                return

    def on_message_begin(self) -> None:
        self._unseen = self._head = 0
        if not self._in_head:
            self.start = self.loop.time()
        self._in_head = True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._add_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._add_head(max(len(name) + len(value), LEAST_HEADER))
        if self._in_head:  # ignores trailers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        version, method = self.parser.get_http_version(), self.parser.get_method()
        if version not in ("1.0", "1.1") or method == b"CONNECT":
            raise _RefusedError(Problem(400, f"{method.decode()} with HTTP/{version} is not served here"))
        if [name for name, _ in self.headers].count(b"host") != 1 and version == "1.1":
            raise _RefusedError(Problem(400, "the request must have one Host header"))
        if self.parser.should_upgrade():
            self.scope["http_version"] = version
            return
        if len(self.pipeline) >= MOST_PIPELINED:
            self.pipeline[0][0].keep_alive = False  # its answer closes the connection
            raise _RefusedError(None)
        if b"://" in self.url and b"/" not in self.url.partition(b"://")[2]:  # the client takes this for a proxy
            self.url += b"/"
        super().on_headers_complete()
        self._in_head, self._in_body = False, True
        self._chunks = self._size = 0
        self._keeps_alive = self.cycle.keep_alive
        if not self._is_short():  # an answer before the end of the body closes the connection
            self.cycle.keep_alive = False

    def _is_short(self) -> bool:
        """True if the body is short. A client that waits for "100 Continue" may never send it."""
        declared = next((int(value) for name, value in self.headers if name == b"content-length"), _SHORT + 1)
        return declared <= _SHORT and not self.expect_100_continue

    def on_chunk_header(self) -> None:
        self._unseen = 0
        self._chunks += 1
        most = self.limits.max_body_chunks
        if self._chunks > most + self._size // LEAST_CHUNK:
            raise _RefusedError(Problem(400, f"the body comes in more than {most} chunks of less than {LEAST_CHUNK} "
                                             "bytes on average (max_body_chunks): send larger ones"))

    def on_body(self, body: bytes) -> None:
        self._unseen = 0
        self._size += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unseen = 0
        if self.parser.should_upgrade():
            return
        self._in_body = False
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._keeps_alive
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self.answered = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self.start = self.loop.time()
        if self.leaving:
            self.server_state.total_requests += 1
            return
        super().on_response_complete()
        if self._problem and not self.answering:
            self._answer(self._problem, self._path)

    def timeout_keep_alive_handler(self) -> None:
        """Disables uvicorn's own timer; `ConnectionLimiter.watch` checks the connections."""

    def shutdown(self) -> None:
        self._keeps_alive = False
        super().shutdown()

    def _add_head(self, size: int) -> None:
        self._unseen = 0
        self._head += size
        self._check_head(self._head)

    def _check_head(self, size: int) -> None:
        most = self.limits.max_header_kib
        if size > most << 10:
            raise _RefusedError(Problem(431, f"the headers are larger than {most} KiB (max_header_kib), where each of "
                                             f"them counts for at least {LEAST_HEADER} bytes"))

    def _stop(self, problem: Problem | None) -> None:
        """Parses nothing more, and answers with the problem after all requests before it."""
        self._deaf = True
        self._path = self.scope["path"] if self._in_body else ""
        if problem is None:
            return
        self.on_refused(problem.status)
        if not self.answering and not (self.receives and self.cycle.response_started):
            self._answer(problem, self._path)
        elif self.answering:
            self._problem = problem
            if self._in_body:  # it waits in the pipeline and is not answered
                self.pipeline.popleft()

    def _answer(self, problem: Problem, path: str) -> None:
        if self.receives:  # its endpoint must not write another answer
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write(error_bytes(problem, path))
        self.transport.close()

    def _close(self) -> None:
        """Closes the connection. A client that is still sending gets time to read the answer, which the kernel discards
        with unread data."""
        if not (self.begun or self._deaf):
            self.counted.close_now()
        elif not self.leaving:
            self.leave()

    def leave(self) -> None:
        """Answers no more, and discards what comes."""
        self.leaving, self.start = True, self.loop.time()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()


def error_bytes(problem: Problem, path: str, *headers: str) -> bytes:
    """Returns a whole response for a connection without a readable request, in the form of the path's clients."""
    body = dump(fields_for(path, problem)).decode()
    lines = (f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}", "connection: close",
             "content-type: application/json", f"content-length: {len(body)}", *headers, "", body)
    return "\r\n".join(lines).encode()
