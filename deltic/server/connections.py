"""Connections: accepted within bounds, and closed when they wait or sleep too long.

uvicorn only closes connections that are idle between two requests. Here every state of a connection has a time limit.
The acceptor is not asyncio's, which cannot end a TLS handshake, and without file descriptors logs each failed try.
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
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from ssl import SSLContext
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from deltic.config import Limits
from deltic.server.errors import Problem
from deltic.server.http_protocol import HttpProtocol, error_bytes
from deltic.server.sending import DROP

log = logging.getLogger("deltic")

_AT_ONCE = 16
"""Connections that are accepted in a turn of the event loop."""
_SWEEP = 0.5
"""Seconds between two checks of all connections."""
_RETRY = 1.0
"""Seconds until the acceptor tries again without file descriptors."""
_QUIET = 10.0
"""Seconds between two log lines about the same problem."""
_LEAST_READ = 4096
"""Bytes that a client must read within unread_seconds."""
_LINGER = 1.0
"""Seconds in which a refused client can read the reason."""
_MOST_REFUSED = 64
"""Refused clients that are waited for at once."""
_WRITE_BUFFER = 16 << 10
"""Bytes of asyncio's buffer at which a writer waits."""
_NO_LINGER = struct.pack("ii", 1, 0)
_OTHER_FILES = 256
"""Files that the process needs besides connections."""
_LATE = Problem(408, "the request did not arrive in time: send all of it at once")


class Connection(HttpProtocol):
    """One connection, with its time limits."""

    def __init__(self, door: ConnectionLimiter, config: Config, state: ServerState, app_state: dict[str, Any],
                 handshake: asyncio.Task[Any] | None = None) -> None:
        """handshake: the task of the TLS handshake, during which the connection counts as waiting."""
        super().__init__(config, state, app_state, door.limits)
        self._door, self._handshake = door, handshake
        self._read, self._taken = self.start, 0
        self.header_seconds = float(door.limits.header_seconds)
        if handshake:
            door.enter(self)

    @property
    def since(self) -> float | None:
        """When it began to wait for a whole request; None while a request is answered."""
        if self._handshake:
            return self.start
        return None if self.answering or self.transport.get_write_buffer_size() else self.start

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_WRITE_BUFFER)
        if not self._handshake:
            self._door.enter(self)
        self._handshake = None

    def close_unopened(self) -> None:
        """Forgets a connection whose handshake failed."""
        self._door.leave(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._door.leave(self)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][DROP] = self._drop

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self.answered = cycle
        self._door.turns.add(self.client[0] if self.client else "", partial(super()._start_asgi_task, cycle, app))

    def on_refused(self, status: int) -> None:
        self._door.refused(status, self)

    def refuse(self, limit: int, linger: bool) -> None:
        """Answers that there are too many connections. linger: wait until the client has read this: a connection that
        is closed with an unread request loses its answer."""
        self.on_refused(503)
        if self._handshake:
            self._handshake.cancel()
            return
        problem = Problem(503, f"the server has {limit} connections, and no more at a time (max_connections): try "
                               "again later")
        self.transport.write(error_bytes(problem, "", "retry-after: 1"))
        if linger:
            self.leave()
        else:
            self.transport.abort()

    def end(self) -> None:
        """Closes it, with status 408 if a request was arriving."""
        if self._handshake:
            self._handshake.cancel()
            return
        if self.begun and not self.leaving and not (self.receives and self.cycle.response_started):
            self.on_refused(408)
            self.transport.write(error_bytes(_LATE, self.scope["path"] if self.receives else ""))
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.counted.close_now()

    def check(self, limits: Limits) -> None:
        """Ends the connection if it has waited too long."""
        if self._handshake:  # has a time limit in asyncio
            return
        now, since = self.loop.time(), self.since
        if self._unread_seconds(now) > limits.unread_seconds:
            log.warning("a client has read nothing for %d seconds (unread_seconds): its connection is closed",
                        limits.unread_seconds)
            self._drop()
        elif since is None or self.transport.is_closing():
            return
        elif self.leaving:
            if now - max(since, self.heard) > _LINGER or now - since > limits.header_seconds:
                self.transport.abort()
        elif self._is_late(now, since, limits):
            self.end()

    def _is_late(self, now: float, since: float, limits: Limits) -> bool:
        if not self.begun:
            return now - since > limits.keep_alive_seconds
        if self.receives:
            return now - self.heard > limits.header_seconds and not self.flow.read_paused
        return now - since > limits.header_seconds

    def _drop(self) -> None:
        """Closes it at once, and discards what the kernel holds for the client."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()

    def _unread_seconds(self, now: float) -> float:
        """Seconds since the client has last read."""
        unread = self.transport.get_write_buffer_size()
        if unread:
            with suppress(OSError):  # some kernels report what they hold
                held = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
                unread += int.from_bytes(held, sys.byteorder)
        taken = self.counted.written - unread
        if not unread or taken - self._taken >= _LEAST_READ:
            self._taken, self._read = taken, now
        return now - self._read


class RequestTurns:
    """Starts one request of each client in a turn of the event loop, however many a client sends at once."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Callable[[], None]]] = {}

    def add(self, client: str, begin: Callable[[], None]) -> None:
        """Queues a request of a client."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._turn)
        self._waiting.setdefault(client, deque()).append(begin)

    def __len__(self) -> int:
        """The number of queued requests."""
        return sum(map(len, self._waiting.values()))

    def _turn(self) -> None:
        for client, requests in [*self._waiting.items()]:
            requests.popleft()()
            if not requests:
                del self._waiting[client]
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._turn)


class ConnectionLimiter:
    """All connections of a server, within a limit."""

    def __init__(self, limits: Limits, refused: Callable[[int, str], None]) -> None:
        """refused: called with the status and the client's address for a connection without a readable request."""
        self._refuse = refused
        self.limits, self._most = limits, min(limits.max_connections, _raise_file_limit(limits.max_connections))
        self.turns = RequestTurns()
        self._open: set[Connection] = set()
        self._leaving: set[Connection] = set()  # refused ones

    def enter(self, connection: Connection) -> None:
        """Adds a connection. If there are too many, the one that waits longest is closed, or else the new one."""
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
        """The number of connections, without refused ones."""
        return len(self._open)

    async def watch(self) -> None:
        """Ends connections that wait too long, until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP)
            for connection in [*self._open, *self._leaving]:
                try:
                    connection.check(self.limits)
                except Exception:  # the others must still be checked
                    log.exception("a connection is closed because it cannot be checked")
                    connection.transport.abort()


class ConnectionAcceptor:
    """Accepts connections, a few at a time. Without file descriptors it waits before it tries again."""

    def __init__(self, listener: socket.socket, make: Callable[[asyncio.Task[Any] | None], Connection],
                 tls: SSLContext | None = None) -> None:
        """make: gets the task of the TLS handshake."""
        self._listener = listener
        self._make = make
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._logged = -math.inf

    def start(self) -> None:
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def stop(self) -> None:
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
        except (OSError, asyncio.CancelledError) as error:  # cancelled: another connection took its place
            connection.close_unopened()
            accepted.close()
            log.debug("a connection was lost while it was accepted: %s", error)

    def _pause(self, error: OSError) -> None:
        self.stop()
        self._timer = self._loop.call_later(_RETRY, self.start)
        if self._loop.time() - self._logged > _QUIET:
            self._logged = self._loop.time()
            log.error("no connection can be accepted: %s; trying again every %g seconds", error.strerror, _RETRY)


def _raise_file_limit(connections: int) -> int:
    """Raises the process's limit of files; returns the number of connections that it allows."""
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
