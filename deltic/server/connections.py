"""Connections: uvicorn's HTTP/1.1 protocol over the llhttp parser, with the limits that both lack.

The parser calls back for each header, chunk and piece of a body. The callbacks count these, and raise an exception to
end the parsing, so that no client keeps the event loop busy with many tiny pieces. Every state of a connection has a
time limit, whereas uvicorn closes only connections that are idle between two requests.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import resource
import socket
import struct
import sys
import termios
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from deltic.config import Limits
from deltic.server.errors import Problem, fields_for
from deltic.server.http import DROP, dump

log = logging.getLogger("deltic")

LEAST_HEADER = 64
"""Bytes that a header counts for at least: short headers cost as much as longer ones."""
LEAST_CHUNK = 64
"""Number of body bytes that allow one more chunk."""
MOST_PIPELINED = 64
"""Number of requests of a connection that may wait for the one before them."""
LINGER = 1.0
"""Seconds in which a refused client can read the reason."""
_SHORT = 64 << 10
"""Size of a body, in bytes, up to which it is read to its end although its request is already answered."""
_DISCARDED = 4
"""Multiple of max_body_mib that is read and discarded: most clients read an answer only after they have sent all."""
_SWEEP = 0.5
"""Seconds between two checks of all connections."""
_LEAST_READ = 4096
"""Bytes that a client must read within unread_seconds."""
_MOST_REFUSED = 64
"""Number of refused clients that may linger at once."""
_WRITE_BUFFER = 16 << 10
"""Bytes in asyncio's buffer above which a writer waits."""
_NO_LINGER = struct.pack("ii", 1, 0)
_OTHER_FILES = 256
"""Number of file descriptors that the process needs besides connections."""
_LATE = Problem(408, "the request did not arrive in time: send all of it at once")


class _RefusedError(Exception):
    """Ends the parsing. problem: the error to answer with; None: the previous answer closes the connection."""

    def __init__(self, problem: Problem | None) -> None:
        super().__init__()
        self.problem = problem


class Transport:
    """Counts the bytes that are written to a transport. close: called instead of the transport's own close."""

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


class Connection(HttpToolsProtocol):
    """One connection. Pipelined requests are answered in order, and an unreadable one last. If a request is
    answered before its body has arrived, and the body may be large, the rest is discarded and the connection closed."""

    def __init__(self, limiter: ConnectionLimiter, config: Config, state: ServerState, app_state: dict[str, Any],
                 handshake: asyncio.Task[Any] | None = None) -> None:
        """handshake: the task of the TLS handshake, during which the connection counts as waiting."""
        super().__init__(config, state, app_state)
        self._limiter, self._limits, self._handshake = limiter, limiter.limits, handshake
        self._answered: RequestResponseCycle | None = None
        self._start = self._heard = self._read = self.loop.time()
        self._leaving = False  # no more answers are sent, and all received bytes are discarded
        self._in_head = self._in_body = self._deaf = False
        self._head = self._chunks = self._size = 0  # bytes of headers, number of chunks, bytes of a body
        self._unseen = 0  # bytes since the parser last called back
        self._discarded = self._taken = 0
        self._keeps_alive = True
        self._problem: Problem | None = None  # answered after all requests before it
        if handshake:
            limiter.enter(self)

    @property
    def since(self) -> float | None:
        """Returns the time at which it began to wait for a whole request; None while a request is answered."""
        if self._handshake:
            return self._start
        return None if self._answering or self.transport.get_write_buffer_size() else self._start

    @property
    def _begun(self) -> bool:
        """Returns True if part of a request has arrived."""
        return self._in_head or self._in_body

    @property
    def _receives(self) -> bool:
        """Returns True if the body of the request that is answered next is still arriving."""
        return self._in_body and self.cycle is self._answered

    @property
    def _answering(self) -> bool:
        """Returns True if a request that has arrived is not answered yet."""
        return self._answered is not None and not self._answered.response_complete and not self._receives

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._counted = Transport(transport, self._close)
        super().connection_made(cast(asyncio.Transport, self._counted))
        transport.set_write_buffer_limits(high=_WRITE_BUFFER)
        if not self._handshake:
            self._limiter.enter(self)
        self._handshake = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._limiter.leave(self)
        if self._answered:  # uvicorn notifies only the last request
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    # Parsing

    def data_received(self, data: bytes) -> None:
        self._heard = self.loop.time()
        if self._leaving or self._deaf:
            self._discarded += len(data)
            if self._discarded > self._limits.max_body_mib * _DISCARDED << 20:
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
            self._start = self.loop.time()
        self._in_head = True
        super().on_message_begin()
        self.scope["state"][DROP] = self._drop

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
        """Returns True if the body is short. A client that waits for "100 Continue" may never send it."""
        declared = next((int(value) for name, value in self.headers if name == b"content-length"), _SHORT + 1)
        return declared <= _SHORT and not self.expect_100_continue

    def on_chunk_header(self) -> None:
        self._unseen = 0
        self._chunks += 1
        most = self._limits.max_body_chunks
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

    def _add_head(self, size: int) -> None:
        self._unseen = 0
        self._head += size
        self._check_head(self._head)

    def _check_head(self, size: int) -> None:
        most = self._limits.max_header_kib
        if size > most << 10:
            raise _RefusedError(Problem(431, f"the headers are larger than {most} KiB (max_header_kib), where each of "
                                             f"them counts for at least {LEAST_HEADER} bytes"))

    # Answering

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        begin = partial(super()._start_asgi_task, cycle, app)
        self._limiter.turns.add(self.client[0] if self.client else "", begin)

    def on_response_complete(self) -> None:
        self._start = self.loop.time()
        if self._leaving:
            self.server_state.total_requests += 1
            return
        super().on_response_complete()
        if self._problem and not self._answering:
            self._answer(self._problem, self._path)

    def _stop(self, problem: Problem | None) -> None:
        """Stops parsing, and answers with the problem after all requests before it."""
        self._deaf = True
        self._path = self.scope["path"] if self._in_body else ""
        if problem is None:
            return
        self._limiter.refused(problem.status, self)
        if not self._answering and not (self._receives and self.cycle.response_started):
            self._answer(problem, self._path)
        elif self._answering:
            self._problem = problem
            if self._in_body:  # the request waits in the pipeline and is not answered
                self.pipeline.popleft()

    def _answer(self, problem: Problem, path: str) -> None:
        if self._receives:  # the endpoint of the request must not write another answer
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write(_error_bytes(problem, path))
        self.transport.close()

    # The end

    def refuse(self, limit: int, linger: bool) -> None:
        """Answers that there are too many connections. linger: wait until the client has read this, because a
        connection that is closed with an unread request loses its answer."""
        self._limiter.refused(503, self)
        if self._handshake:
            self._handshake.cancel()
            return
        problem = Problem(503, f"the server has {limit} connections, and no more at a time (max_connections): try "
                               "again later")
        self.transport.write(_error_bytes(problem, "", "retry-after: 1"))
        if linger:
            self._leave()
        else:
            self.transport.abort()

    def end(self) -> None:
        """Closes the connection, with status 408 if a request was arriving."""
        if self._handshake:
            self._handshake.cancel()
            return
        if self._begun and not self._leaving and not (self._receives and self.cycle.response_started):
            self._limiter.refused(408, self)
            self.transport.write(_error_bytes(_LATE, self.scope["path"] if self._receives else ""))
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self._counted.close_now()

    def check(self) -> None:
        """Ends the connection if it has waited too long."""
        if self._handshake:  # asyncio limits the time of the handshake
            return
        limits, now, since = self._limits, self.loop.time(), self.since
        if self._unread_seconds(now) > limits.unread_seconds:
            log.warning("a client has read nothing for %d seconds (unread_seconds): its connection is closed",
                        limits.unread_seconds)
            self._drop()
        elif since is None or self.transport.is_closing():
            return
        elif self._leaving:
            if now - max(since, self._heard) > LINGER or now - since > limits.header_seconds:
                self.transport.abort()
        elif self._is_late(now, since):
            self.end()

    def _is_late(self, now: float, since: float) -> bool:
        if not self._begun:
            return now - since > self._limits.keep_alive_seconds
        if self._receives:
            return now - self._heard > self._limits.header_seconds and not self.flow.read_paused
        return now - since > self._limits.header_seconds

    def _unread_seconds(self, now: float) -> float:
        """Returns the seconds since the client last read."""
        unread = self.transport.get_write_buffer_size()
        if unread:
            with suppress(OSError):  # some kernels report the bytes that they hold
                held = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
                unread += int.from_bytes(held, sys.byteorder)
        taken = self._counted.written - unread
        if not unread or taken - self._taken >= _LEAST_READ:
            self._taken, self._read = taken, now
        return now - self._read

    def timeout_keep_alive_handler(self) -> None:
        """Disables uvicorn's own timer; `ConnectionLimiter.watch` checks the connections."""

    def shutdown(self) -> None:
        self._keeps_alive = False
        super().shutdown()

    def _drop(self) -> None:
        """Closes the connection at once, and discards the bytes that the kernel holds for the client."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()

    def _close(self) -> None:
        """Closes the connection. A client that is still sending gets time to read the answer, because the kernel would
        discard the answer if unread data were left."""
        if not (self._begun or self._deaf):
            self._counted.close_now()
        elif not self._leaving:
            self._leave()

    def _leave(self) -> None:
        """Stops answering, and discards all further input."""
        self._leaving, self._start = True, self.loop.time()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()


def _error_bytes(problem: Problem, path: str, *headers: str) -> bytes:
    """Returns a whole response for a connection without a readable request, in the error format of the path's API."""
    body = dump(fields_for(path, problem)).decode()
    lines = (f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}", "connection: close",
             "content-type: application/json", f"content-length: {len(body)}", *headers, "", body)
    return "\r\n".join(lines).encode()


class RequestTurns:
    """Starts one request of each client per turn of the event loop, however many a client sends at once."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Callable[[], None]]] = {}

    def add(self, client: str, begin: Callable[[], None]) -> None:
        """Queues a request of a client."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._turn)
        self._waiting.setdefault(client, deque()).append(begin)

    def _turn(self) -> None:
        for client, requests in [*self._waiting.items()]:
            requests.popleft()()
            if not requests:
                del self._waiting[client]
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._turn)


class ConnectionLimiter:
    """Limits and tracks all connections of a server."""

    def __init__(self, limits: Limits, refused: Callable[[int, str], None]) -> None:
        """refused: called with the status and the client's address for a connection without a readable request."""
        self._refuse = refused
        self.limits, self._most = limits, min(limits.max_connections, _raise_file_limit(limits.max_connections))
        self.turns = RequestTurns()
        self._open: set[Connection] = set()
        self._leaving: set[Connection] = set()  # refused connections

    def enter(self, connection: Connection) -> None:
        """Adds a connection. At the limit, closes the connection that has waited longest, or else the new one."""
        if len(self._open) >= self._most:
            waiting = [(since, id(other), other) for other in self._open if (since := other.since) is not None]
            if not waiting:
                connection.refuse(self._most, linger=len(self._leaving) < _MOST_REFUSED)
                self._leaving.add(connection)
                return
            *_, oldest = min(waiting)
            self._open.discard(oldest)
            oldest.end()
        self._open.add(connection)

    def refused(self, status: int, connection: Connection) -> None:
        """Counts a refusal."""
        self._refuse(status, connection.client[0] if connection.client else "")

    def leave(self, connection: Connection) -> None:
        """Removes a closed connection."""
        self._open.discard(connection)
        self._leaving.discard(connection)

    def __len__(self) -> int:
        """Returns the number of connections, without refused ones."""
        return len(self._open)

    async def watch(self) -> None:
        """Ends connections that wait too long. Runs until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP)
            for connection in [*self._open, *self._leaving]:
                try:
                    connection.check()
                except Exception:  # an error must not end the check of the other connections
                    log.exception("a connection is closed because it cannot be checked")
                    connection.transport.abort()


def _raise_file_limit(connections: int) -> int:
    """Raises the process's limit of file descriptors. Returns the number of connections that it allows."""
    wanted = connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        more = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(OSError, ValueError):  # some systems allow less than they report
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
            soft = more
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    fewer = max(soft - _OTHER_FILES, soft // 2)
    log.warning("the system allows this process %d files: no more than %d connections at a time, not %d; ulimit -n "
                "raises it", soft, fewer, connections)
    return fewer
