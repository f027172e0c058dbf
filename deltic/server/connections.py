"""Connections: how they are accepted, how many there may be, and when one that does nothing ends.

uvicorn closes connections that are idle between two requests, and no others. Here every connection waits for something
at any time, and nothing is waited for without end.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import math
import resource
import socket
import struct
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from ssl import SSLContext
from typing import Any, cast

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from deltic.config import Limits
from deltic.server.anthropic import shapes as anthropic
from deltic.server.http import Problem, dump
from deltic.server.openai import shapes as openai

log = logging.getLogger("deltic")

_AT_ONCE = 16  # connections accepted in a turn of the event loop
_SWEEP = 0.5  # seconds between two looks at all connections
_RETRY = 1.0  # seconds until a listener without file descriptors tries again
_QUIET = 10.0  # seconds between two lines of log about the same trouble
_LEAST_READ = 4096  # bytes that a client must read in the time that it has, so as not to count as asleep
_LINGER = 1.0  # seconds that a refused client has to read why
_MOST_REFUSED = 64  # refused clients that are waited for at once
_WRITTEN_AHEAD = 16 << 10  # bytes that wait for the kernel before a writer does; it has as much again and more
_NO_LINGER = struct.pack("ii", 1, 0)
_OTHER_FILES = 256  # what the process needs besides connections


def _response(status: str, body: str, *headers: str) -> bytes:
    """A whole response, for where no request is."""
    lines = (f"HTTP/1.1 {status}", "connection: close", "content-type: application/json",
             f"content-length: {len(body)}", *headers, "", body)
    return "\r\n".join(lines).encode()


class _Counted:
    """A transport that counts what is written to it, in bytes."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self.written = transport, 0

    def write(self, data: bytes) -> None:
        """As asyncio.WriteTransport's."""
        self.written += len(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


_LATE = "408 Request Timeout", Problem(408, "the request did not arrive in time: send all of it at once")
_NO_HTTP = "400 Bad Request", Problem(400, "what was sent is no valid HTTP")


def _told(status: str, problem: Problem, path: str) -> bytes:
    """Tells a client what is wrong, in the form of the clients that use this path."""
    fields = anthropic.error_fields(problem) if path.startswith(anthropic.PATH) else openai.error_fields(problem)
    return _response(status, dump(fields).decode())


class Connection(H11Protocol):
    """One connection: idle, or with a request that arrives, or with one that is answered."""

    def __init__(self, door: Door, config: Config, state: ServerState, app_state: dict[str, Any],
                 handshake: asyncio.Task[Any] | None = None) -> None:
        """handshake: ends with TLS; until then the connection counts as one that waits for a request."""
        super().__init__(config, state, app_state)
        self._door, self._handshake = door, handshake
        self._start = self._heard = self._read = self.loop.time()
        self._begun, self._taken, self._refused = False, 0, False
        self.header_seconds = float(door.limits.header_seconds)
        if handshake:
            door.enter(self)

    @property
    def since(self) -> float | None:
        """When it began to wait for a request, or for one to come wholly; None if one is answered."""
        if self._handshake:
            return self._start
        answering = self.cycle is not None and not self.cycle.response_complete and not self._receives
        return None if answering or self.transport.get_write_buffer_size() else self._start

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._counted = _Counted(transport)
        super().connection_made(cast(asyncio.Transport, self._counted))
        transport.set_write_buffer_limits(high=_WRITTEN_AHEAD)
        if not self._handshake:
            self._door.enter(self)
        self._handshake = None

    def close_unopened(self) -> None:
        """There has been no connection after all."""
        self._door.leave(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._door.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._heard = self.loop.time()
        if not self._begun:
            self._start = self._heard
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        self._start = self.loop.time()
        super().on_response_complete()
        self._look()

    def send_400_response(self, msg: str) -> None:
        """What has come cannot be read, whether a request is under way or has been answered before all of it came."""
        self._door.refused(400, self)
        under_way = self.cycle is not None and not self.cycle.response_complete
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_told(*_NO_HTTP, self.scope["path"] if under_way else ""))
        if under_way:  # who answers it must not write behind that
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        """uvicorn's own timer: it does not see the beginning of a next request. The door watches instead."""

    def refuse(self, limit: int, linger: bool) -> None:
        """Tell the client that there are too many. linger: let it read that; closed at once, with its request unread,
        the connection would take the answer away again."""
        self._refused, self._start = True, self.loop.time()
        self._door.refused(503, self)
        if self._handshake:
            self._handshake.cancel()
            return
        fields = openai.error_fields(Problem(503, f"the server has {limit} connections, and no more at a time "
                                                  "(max_connections): try again later"))
        self.transport.write(_response("503 Service Unavailable", dump(fields).decode(), "retry-after: 1"))
        if not linger:
            self.transport.abort()
        elif self.transport.can_write_eof():
            self.transport.write_eof()
        else:  # TLS has its own end
            self.transport.close()

    def end(self) -> None:
        """Close it, and say why if a request was on its way."""
        if self._handshake:
            self._handshake.cancel()
            return
        if self._begun and not (self.cycle and self.cycle.response_started and self._receives):
            self._door.refused(408, self)
            self.transport.write(_told(*_LATE, self.scope["path"] if self._receives else ""))
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def check(self, limits: Limits) -> None:
        """End the connection if it has waited too long."""
        if self._handshake:  # asyncio counts its seconds
            return
        now, since = self.loop.time(), self.since
        if self._asleep(now) > limits.unread_seconds:
            log.warning("a client has read nothing for %d seconds (unread_seconds): its connection is closed",
                        limits.unread_seconds)
            self._drop()
        elif self._refused:
            if now - self._start > _LINGER:
                self.transport.abort()
        elif since is not None and not self.transport.is_closing():
            if not self._begun:
                late = now - since > limits.keep_alive_seconds
            elif self._receives:
                late = now - self._heard > limits.header_seconds and not self.flow.read_paused
            else:
                late = now - since > limits.header_seconds
            if late:
                self.end()

    @property
    def _receives(self) -> bool:
        """Whether a body is to come."""
        return self.conn.their_state is h11.SEND_BODY

    def _look(self) -> None:
        """Whether anything of a request has come."""
        self._begun = self.conn.their_state is not h11.IDLE or bool(self.conn.trailing_data[0])

    def _drop(self) -> None:
        """Close it at once, and have the kernel forget what it still holds for the client."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()

    def _asleep(self, now: float) -> float:
        """Seconds since the client was last seen to read."""
        unread = self.transport.get_write_buffer_size()
        if unread:
            with suppress(OSError):  # the kernel makes room in large steps: see what it has, where it says so
                held = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
                unread += int.from_bytes(held, sys.byteorder)
        taken = self._counted.written - unread
        if not unread or taken - self._taken >= _LEAST_READ:
            self._taken, self._read = taken, now
        return now - self._read


class Door:
    """All connections of a server, and how many there may be."""

    def __init__(self, limits: Limits, refused: Callable[[int, str], None]) -> None:
        """refused: is told the status and the client's address where no request is that could be read."""
        self._refuse = refused
        self.limits, self._most = limits, min(limits.max_connections, _raise_file_limit(limits.max_connections))
        self._open: set[Connection] = set()
        self._leaving: set[Connection] = set()  # refused ones

    def enter(self, connection: Connection) -> None:
        """One more; if there are too many, one that waits for a request goes, or else this one."""
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
        """A connection is told that it cannot be served."""
        self._refuse(status, connection.client[0] if connection.client else "")

    def leave(self, connection: Connection) -> None:
        """It is closed."""
        self._open.discard(connection)
        self._leaving.discard(connection)

    def __len__(self) -> int:
        """How many connections there are, but for refused ones."""
        return len(self._open)

    async def watch(self) -> None:
        """End connections that wait too long, until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP)
            for connection in [*self._open, *self._leaving]:
                try:
                    connection.check(self.limits)
                except Exception:  # it must not be the last one that is looked at
                    log.exception("a connection is closed that cannot be looked at")
                    connection.transport.abort()


class Acceptor:
    """Accepts connections, a few at a time. Without file descriptors it waits a while, instead of trying as fast as it
    can."""

    def __init__(self, listener: socket.socket, make: Callable[[asyncio.Task[Any] | None], Connection],
                 tls: SSLContext | None = None) -> None:
        """make: is given the task in which a connection with TLS is opened."""
        self._listener, self._make, self._tls = listener, make, tls
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._said = -math.inf

    def start(self) -> None:
        """Begin to accept."""
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def stop(self) -> None:
        """Accept no more."""
        self._loop.remove_reader(self._listener.fileno())
        if self._timer:
            self._timer.cancel()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                self._pause(error)
                return
            accepted.setblocking(False)
            task = self._loop.create_task(self._open(accepted))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, accepted: socket.socket) -> None:
        connection = self._make(asyncio.current_task() if self._tls else None)
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection, accepted, ssl=self._tls,
                ssl_handshake_timeout=connection.header_seconds if self._tls else None,
                ssl_shutdown_timeout=_LINGER if self._tls else None)
        except (OSError, asyncio.CancelledError) as error:  # cancelled: in favour of another one
            connection.close_unopened()
            accepted.close()
            log.debug("a connection was lost while it was accepted: %s", error)

    def _pause(self, error: OSError) -> None:
        self.stop()
        self._timer = self._loop.call_later(_RETRY, self.start)
        if self._loop.time() - self._said > _QUIET:
            self._said = self._loop.time()
            log.error("no connection can be accepted: %s; trying again every %g seconds", error.strerror, _RETRY)


def _raise_file_limit(connections: int) -> int:
    """Let the process have files for so many connections, if the system allows; returns how many it has them for."""
    wanted = connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        more = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(OSError, ValueError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
            soft = more
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    fewer = max(soft - _OTHER_FILES, soft // 2)
    log.warning("the system allows this process %d files: no more than %d connections at a time, not %d; ulimit -n "
                "raises it", soft, fewer, connections)
    return fewer
