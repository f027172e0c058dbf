"""Sockets and the life of the server process."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import uvicorn
from starlette.applications import Starlette

from deltic.config import Limits
from deltic.errors import ConfigError
from deltic.server.bridge import Bridge
from deltic.server.connections import Acceptor, Connection, Door

_BACKLOG = 2048
_SWITCH = 0.0005  # seconds that a busy thread keeps the interpreter: a step asks for it dozens of times
_FLUSH = 2.0  # seconds for clients to read their last bytes
_SEND_BUFFER = 64 << 10  # what the kernel keeps for a client that does not read; by itself it would take 4 MiB


def listen(host: str, port: int) -> socket.socket:
    """Claim an address; ConfigError says why it cannot be had. Nobody can connect before the server runs."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"port must be from 0 to 65535, not {port}", "port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host {host!r} is not known: {_reason(error)}", "host") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)  # also of what is accepted
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}, port {port}: {_reason(error)}; choose another --host or --port",
                          "port") from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Where clients find the server."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn, which on a signal stops taking requests, gives the running ones `grace` seconds, and returns.

    A second signal takes the grace away.
    """

    def __init__(self, app: Starlette, bridge: Bridge, grace: float, on_ready: Callable[[], None],
                 limits: Limits) -> None:
        # error: what is wrong with a client's request is said to the client, and is no business of the log
        super().__init__(uvicorn.Config(
            app, lifespan="on", log_config=None, log_level="error", access_log=False, server_header=False,
            http="h11", timeout_graceful_shutdown=max(1, round(grace + _FLUSH)), ws="none"))
        self._bridge, self._grace, self._on_ready, self.door = bridge, grace, on_ready, Door(limits)
        self._acceptors: list[Acceptor] = []

    def run_on(self, listener: socket.socket) -> None:
        """Serve until a signal comes."""
        try:
            listener.listen(_BACKLOG)
        except OSError as error:
            raise ConfigError(f"cannot listen on {url_of(listener)}: {_reason(error)}", "port") from error
        with _many_threads():
            self.run([listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        make = partial(Connection, self.door, self.config, self.server_state, self.lifespan.state)
        for listener in sockets or ():
            listener.setblocking(False)
            self._acceptors.append(Acceptor(listener, make))
            self._acceptors[-1].start()
        self._watching = asyncio.create_task(self.door.watch())
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self._acceptors:
            acceptor.stop()
        draining = asyncio.create_task(self._bridge.drain(self._grace))
        await super().shutdown(sockets)
        if self.force_exit:
            draining.cancel()
            await self._bridge.stop()
        self._watching.cancel()
        await asyncio.gather(draining, self._watching, return_exceptions=True)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM end the server, not the process, which may have more to do."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def _many_threads() -> Iterator[None]:
    """Python for a process in which threads that read and write JSON work beside the engine's, which must not wait."""
    before = sys.getswitchinterval()
    gc.freeze()  # else every full collection would look through the model and all libraries, for half a second
    sys.setswitchinterval(_SWITCH)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        gc.unfreeze()


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
