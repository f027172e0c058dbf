"""Sockets and the life of the server process."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from deltic.errors import ConfigError
from deltic.server.bridge import Bridge

_BACKLOG = 2048
_FLUSH = 2.0  # seconds for clients to read their last bytes
_KEEP_ALIVE = 65  # longer than what proxies and clients keep, so that they close first


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

    def __init__(self, app: FastAPI, bridge: Bridge, grace: float, on_ready: Callable[[], None]) -> None:
        super().__init__(uvicorn.Config(
            app, lifespan="on", log_config=None, log_level="warning", access_log=False, server_header=False,
            timeout_keep_alive=_KEEP_ALIVE, timeout_graceful_shutdown=max(1, round(grace + _FLUSH)), ws="none"))
        self._bridge, self._grace, self._on_ready = bridge, grace, on_ready

    def run_on(self, listener: socket.socket) -> None:
        """Serve until a signal comes."""
        try:
            listener.listen(_BACKLOG)
        except OSError as error:
            raise ConfigError(f"cannot listen on {url_of(listener)}: {_reason(error)}", "port") from error
        self.run([listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.create_task(self._bridge.drain(self._grace))
        await super().shutdown(sockets)
        if self.force_exit:
            draining.cancel()
            await self._bridge.stop()
        await asyncio.gather(draining, return_exceptions=True)

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


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
