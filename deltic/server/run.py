"""Sockets and the lifetime of the server process."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import gc
import logging
import math
import os
import signal
import socket
import ssl
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette

from deltic.config import Limits
from deltic.errors import ConfigError, UnavailableError
from deltic.server.connections import LINGER, Connection, ConnectionLimiter
from deltic.server.middleware import LOCAL_NAMES

log = logging.getLogger("deltic")

_BACKLOG = 2048
_AT_ONCE = 16
"""Number of connections that are accepted in one turn of the event loop."""
_RETRY = 1.0
"""Seconds until the acceptor tries again after it ran out of file descriptors."""
_QUIET = 10.0
"""Seconds between two log lines about the same problem."""
_SWITCH_INTERVAL = 0.0001
"""Seconds that a thread may hold the interpreter's lock. A step of the engine needs the lock dozens of times."""
_FLUSH_SECONDS = 2
"""Seconds that clients get to read their last bytes."""
_POLL = 0.1
"""Seconds between two checks for a second signal."""
_SEND_BUFFER = 64 << 10
"""Bytes that the kernel buffers for a client that does not read. The kernel's own default is 4 MiB."""


def listen(host: str, port: int) -> socket.socket:
    """Claims an address. Clients can connect once the server runs. Raises ConfigError if the address cannot be used."""
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
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)  # accepted connections inherit it
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}, port {port}: {_reason(error)}; choose another --host or --port",
                          "port") from error
    return listener


def listen_unix(path: Path, mode: int = 0o600) -> socket.socket:
    """Claims a Unix socket. mode: of its file. Replaces a socket that was left behind. Closing it removes the file.
    Raises ConfigError if the socket is in use, or another file is there."""
    listener = _UnixListener(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.claim(path, mode)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on the Unix socket {path}: {_reason(error)}; choose another --unix-socket",
                          "unix_socket") from error
    return listener


class _UnixListener(socket.socket):
    """A Unix socket that removes its file when it is closed. A lock file next to it shows that it is in use: no client
    can connect before the server runs. The lock file is removed too, unless it has content: then it is not ours."""

    _lock = -1
    _lock_path: Path | None = None
    _path: Path | None = None

    def claim(self, path: Path, mode: int) -> None:
        self._take_lock(Path(f"{path}.lock").absolute())
        if _is_left_behind(path):
            path.unlink()
        os.fchmod(self.fileno(), mode)  # set before the socket is bound, independently of the umask
        self.bind(str(path))
        self._path = path.absolute()
        path.chmod(mode)

    def _take_lock(self, path: Path) -> None:
        self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.fstat(self._lock)
            if not os.path.samestat(found, path.stat()):  # its owner has just removed it
                raise FileNotFoundError(errno.ENOENT, "the lock is gone")
        except OSError as error:
            raise OSError(error.errno, "another server uses it") from error
        self._lock_path = path if found.st_size == 0 else None

    def close(self) -> None:
        for path in (self._path, self._lock_path):  # the lock is released last
            with suppress(OSError):
                if path:
                    path.unlink()
        self._path = self._lock_path = None
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1
        super().close()


def _is_left_behind(path: Path) -> bool:
    """Returns True if a Unix socket has no server. Raises OSError if a server uses it, or it is no socket."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return False
    if not is_socket:
        raise FileExistsError(errno.EEXIST, "a file is there that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
    raise OSError(errno.EADDRINUSE, "another program listens on it")


def tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Returns the TLS context for a certificate and its key in PEM files. Raises ConfigError if they cannot be used."""
    def no_passphrase() -> str:
        raise ConfigError(f"the key {key} has a passphrase: store it without", "tls_key")

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key, no_passphrase)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the certificate {certificate} and the key {key} cannot be used: {_reason(error)}",
                          "tls_certificate") from error
    return context


def url_of(listener: socket.socket, tls: bool = False) -> str:
    """Returns the server's URL."""
    scheme = "https" if tls else "http"
    if listener.family == socket.AF_UNIX:
        return f"{scheme}://localhost"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def hosts_of(listener: socket.socket, allowed: Sequence[str], host: str) -> Sequence[str]:
    """Returns the host names that requests may use. allowed: the configured names; by default this machine's own names
    if only this machine can reach the server, else all. host: the name on which the server listens."""
    reachable = listener.family == socket.AF_UNIX or not ip_address(listener.getsockname()[0]).is_loopback
    return ("*",) if reachable and not allowed else (*allowed, *LOCAL_NAMES, host)


class ConnectionAcceptor:
    """Accepts connections, a few at a time. If file descriptors run out, it waits before it tries again.

    asyncio's own acceptor cannot end a TLS handshake, and logs each failed try.
    """

    def __init__(self, listener: socket.socket, make: Callable[[asyncio.Task[Any] | None], Connection],
                 limiter: ConnectionLimiter, tls: ssl.SSLContext | None = None) -> None:
        """make: called with the task of the TLS handshake, or None without TLS."""
        self._listener, self._make, self._limiter = listener, make, limiter
        self._loop = asyncio.get_running_loop()
        seconds = float(limiter.limits.header_seconds)
        self._tls: dict[str, Any] = {
            "ssl": tls, "ssl_handshake_timeout": seconds, "ssl_shutdown_timeout": LINGER} if tls else {}
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
            await self._loop.connect_accepted_socket(lambda: connection, accepted, **self._tls)
        except (OSError, asyncio.CancelledError) as error:  # cancelled: another connection took its place
            self._limiter.leave(connection)
            accepted.close()
            log.debug("a connection was lost while it was accepted: %s", error)

    def _pause(self, error: OSError) -> None:
        self.stop()
        self._timer = self._loop.call_later(_RETRY, self.start)
        if self._loop.time() - self._logged > _QUIET:
            self._logged = self._loop.time()
            log.error("no connection can be accepted: %s; trying again every %g seconds", error.strerror, _RETRY)


class Draining(Protocol):
    """An object that runs the requests of a server."""

    async def drain(self, grace: float) -> None:
        """Stops accepting requests, and ends the running ones after `grace` seconds."""

    async def stop(self) -> None:
        """Ends all requests now."""


class Server(uvicorn.Server):
    """A uvicorn server that drains at a signal: it refuses new requests and gives running requests `drain_seconds`. A
    second signal ends them at once."""

    def __init__(self, app: Starlette, models: Draining, drain_seconds: float, on_ready: Callable[[], None],
                 limits: Limits, tls: ssl.SSLContext | None = None) -> None:
        # log level error: client mistakes are not logged
        super().__init__(uvicorn.Config(
            app, lifespan="on", log_config=None, log_level="error", access_log=False, server_header=False,
            http="httptools", timeout_graceful_shutdown=_FLUSH_SECONDS, ws="none"))
        self._app = app
        self._models = models
        self._drain_seconds = drain_seconds
        self._on_ready, self._tls = on_ready, tls
        self.door = ConnectionLimiter(limits, app.state.records.refuse)
        self._acceptors: list[ConnectionAcceptor] = []

    def run_on(self, listener: socket.socket) -> None:
        """Serves until a signal arrives."""
        try:
            listener.listen(_BACKLOG)
        except OSError as error:
            raise ConfigError(f"cannot listen on {url_of(listener)}: {_reason(error)}", "port") from error
        with _interpreter_settings():
            self.run([listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        with suppress(SystemExit):  # raised if the application cannot start
            await super().startup([])
        if self.lifespan.should_exit:
            error = getattr(self._app.state, "startup_error", "the log says why")
            raise UnavailableError(f"the server did not start: {error}")
        make = partial(Connection, self.door, self.config, self.server_state, self.lifespan.state)
        for listener in sockets or ():
            listener.setblocking(False)
            acceptor = ConnectionAcceptor(listener, make, self.door, self._tls)
            acceptor.start()
            self._acceptors.append(acceptor)
        self._watching = asyncio.create_task(self.door.watch())
        if not self.should_exit:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drains at the first signal, and ends at once at the second."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.create_task(self._models.drain(self._drain_seconds))
        while not (draining.done() or self.force_exit):
            await asyncio.wait([draining], timeout=_POLL)
        for acceptor in self._acceptors:
            acceptor.stop()
        if self.force_exit:
            draining.cancel()
            await self._models.stop()
        await super().shutdown(sockets)
        self._watching.cancel()
        await asyncio.gather(draining, self._watching, return_exceptions=True)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Makes Ctrl-C and SIGTERM end the server, but not the process."""
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
def _interpreter_settings() -> Iterator[None]:
    """Keeps threads that read and write JSON from delaying the engine's thread."""
    before = sys.getswitchinterval()
    gc.freeze()  # full collections skip the model and all libraries, which saves half a second
    sys.setswitchinterval(_SWITCH_INTERVAL)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        gc.unfreeze()


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
