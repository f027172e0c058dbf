"""The record of each request (for the log, `/v1/requests` and quotas of API keys), its middleware, and the request log.

A thread writes the log, so that a full disk or pipe loses lines but delays no request.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from ipaddress import IPv6Address, ip_address, ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deltic.config import Limits
from deltic.engine.fair_executor import FairExecutor
from deltic.errors import ConfigError, QuotaError, RequestError
from deltic.params import Lineage
from deltic.server.forks import lineage_of
from deltic.server.http import Outbox, dump

if TYPE_CHECKING:
    from deltic.server.generation import GenerationStream

log = logging.getLogger("deltic")

ID_HEADERS: Final = ("x-request-id", "request-id")
"""Response headers that contain the request's id, for OpenAI's and for Anthropic's clients."""
LARGE: Final = 1 << 15
"""Body size in bytes from which work goes to the threads for large bodies."""

_IDS: Final = re.compile(r"[!-~]{1,128}")
"""Ids from clients that are accepted: ASCII without spaces."""
_LONGEST_PATH: Final = 200
_DISCONNECTED: Final = 499
_MOST_WAITING = 10_000
_AT_ONCE = 256
"""Number of lines that may wait, and that are written together."""
_QUIET = 10.0
"""Seconds between two log lines about the same problem."""
_PATIENCE = 2.0
"""Seconds that the server's shutdown waits for the last lines."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Executors:
    """Threads for work other than generation. Each kind of work takes turns by client and waits for no other kind."""

    small: FairExecutor = field(default_factory=partial(FairExecutor, 2, "deltic-small"))
    """Threads that parse bodies, render and encode prompts, and write answers."""
    large: FairExecutor = field(default_factory=partial(FairExecutor, 2, "deltic-large"))
    """Threads for the same work on large bodies."""
    grammars: FairExecutor = field(default_factory=partial(FairExecutor, 4, "deltic-grammars"))
    """Threads that compile grammars."""

    def sized(self, size: int) -> FairExecutor:
        return self.small if size <= LARGE else self.large

    def shutdown(self) -> None:
        """Finishes queued work and accepts no more."""
        for executor in (self.small, self.large, self.grammars):
            executor.shutdown()


@dataclass(slots=True, eq=False)
class RequestRecord:
    """The record of one request."""

    id: str
    """The id that the client sent, or a new one."""
    client: str
    """The client's address."""
    method: str
    path: str
    executors: Executors
    arrived: float = field(default_factory=time.time)
    began: float = field(default_factory=time.perf_counter)
    key: str | None = None
    """Name of the API key in the log."""
    owner: str | None = None
    """Owner of the API key, for stored responses, answer records and quotas."""
    prefix_owner: str | None = None
    """The owner for cached prefixes; None if owners share them."""
    served: bool = False
    """True once an endpoint has received the request."""
    model: str | None = None
    stream: bool = False
    answers: int = 0
    """Number of answers that count for the key's quota."""
    run: GenerationStream | None = None
    status: int | None = None
    ignored: tuple[str, ...] = ()
    """Names of fields that had no effect."""
    problem: Mapping[str, str | None] | None = None
    """Param and code of the error that the request was answered with."""
    cancelled: bool = False
    """True if a client has cut the answers short."""
    release: Callable[[], None] | None = None
    """Releases the request's model at the end."""
    spell: Callable[[Sequence[int]], str] | None = None
    """Decodes tokens, if the log includes texts."""
    lineage: Lineage = field(default_factory=Lineage)
    """The session that the client names."""
    boundaries: Any = None
    """Positions at which other requests may diverge from this one, if a front of several replicas has sent it."""

    @property
    def client_id(self) -> str:
        """Returns the client that the request is charged to: the key's owner, or else the client's network."""
        return self.owner or network_of(self.client)

    async def work(self, work: Callable[[], Result], size: int = 0) -> Result:
        """Runs `work` in a thread, in the client's turn. size: bytes of the data that it processes."""
        return await self.executors.sized(size).run(self.client_id, work)

    def age(self) -> float:
        """Returns the seconds since the request arrived."""
        return time.perf_counter() - self.began

    def line(self) -> dict[str, Any]:
        """Returns the line of the log."""
        run = self.run
        return {"time": _stamp(self.arrived), "id": self.id, "client": self.client, "key": self.key,
                "method": self.method, "path": self.path, "status": self.status, "model": self.model,
                "stream": self.stream, **(run.figures(self.began) if run else {}),
                "total_ms": round(self.age() * 1000, 3), "cancelled": self.cancelled, "ignored": list(self.ignored),
                "refused": self.problem, **(run.texts(self.spell) if run and self.spell else {})}


class ActiveRequests:
    """The requests that are being answered.

    log: gets a line for each finished request. texts: lines include prompts and answers. responses: counts by status.
    observe: called with each request at its end; the request's run keeps its tokens for this.
    """

    def __init__(self, limits: Limits, log: Callable[[Mapping[str, Any]], None] | None = None,
                 texts: bool = False) -> None:
        self.texts = texts
        self.executors = Executors()
        self.observe: Callable[[RequestRecord], None] | None = None
        self.responses: Counter[int] = Counter()
        self.outbox = Outbox(limits.max_unsent_mib)
        self._limits, self._log = limits, log
        self._live: dict[RequestRecord, None] = {}

    def __iter__(self) -> Iterator[RequestRecord]:
        return iter(tuple(self._live))

    def begin(self, scope: Scope) -> RequestRecord:
        """Starts the record of a request."""
        headers = dict(reversed(scope["headers"]))
        sender = scope.get("client")
        given = headers.get(ID_HEADERS[0].encode(), b"").decode("latin-1")
        id = given if _IDS.fullmatch(given) else "req_" + uuid.uuid4().hex
        record = RequestRecord(id, sender[0] if sender else "", scope["method"], scope["path"][:_LONGEST_PATH],
                               self.executors, lineage=lineage_of(headers))
        state = scope.setdefault("state", {})
        state["record"], record.boundaries = record, state.get("boundaries")
        self._live[record] = None
        return record

    def end(self, record: RequestRecord) -> None:
        """Ends the record. Successful requests for static files and health checks are not logged."""
        self._live.pop(record, None)
        self.responses[record.status or _DISCONNECTED] += 1
        if record.release:
            record.release()
        if self._log and (record.served or record.status is None or record.status >= 400):
            self._log(record.line())
        if self.observe:
            self.observe(record)
        # an idle connection keeps the record, and must not keep a model
        record.run = record.release = record.spell = None

    def refuse(self, status: int, client: str) -> None:
        """Counts an answer to a connection that sent no readable request."""
        self.responses[status] += 1
        if self._log:
            self._log({"time": _stamp(time.time()), "client": client, "status": status})

    def take(self, record: RequestRecord, answers: int) -> None:
        """Charges answers to the key until the request ends. Raises QuotaError if the key has too many answers now,
        RequestError if it may never have as many."""
        most = self._limits.max_running_per_key
        if most is not None:
            if answers > most:
                raise RequestError(f"the request is for {answers} answers, and a key may have {most} at a time "
                                   "(max_running_per_key)", "n")
            held = sum(other.answers for other in self._live if other.owner == record.owner and other is not record)
            if held + answers > most:
                raise QuotaError(f"the API key has {held} answers that run or wait, and may have {most} "
                                 "(max_running_per_key): try again when one has ended")
        record.answers = answers


class RequestRecorder:
    """Middleware that records every request and returns its id in the response's headers."""

    def __init__(self, app: ASGIApp, records: ActiveRequests) -> None:
        self._app, self._records = app, records

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _without_slashes(scope)
        record = self._records.begin(scope)

        async def recording(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                named = ((name.encode(), record.id.encode()) for name in ID_HEADERS)
                message["headers"] = [*message.get("headers", ()), *named]
            await self._records.outbox.send(scope, send, message)

        try:
            await self._app(scope, receive, recording)
        finally:
            self._records.end(record)


def _without_slashes(scope: Scope) -> Scope:
    """Replaces two leading slashes by one: clients with a base URL that ends with a slash send two."""
    if not scope["path"].startswith("//"):
        return scope
    return {**scope, "path": "/" + scope["path"].lstrip("/"), "raw_path": b"/" + scope["raw_path"].lstrip(b"/")}


def record_of(request: Request) -> RequestRecord:
    record: RequestRecord = request.state.record
    return record


def salt_of(owner: str | None, salt: str) -> str:
    """Combines an owner and a `SaltedFields.salt` into one salt; "" if both are missing."""
    return "" if owner is None and not salt else f"{salt} {'' if owner is None else 'of ' + owner}"


def network_of(host: str) -> str:
    """Returns the part of an address that identifies a client. A /64 network of IPv6 has one owner."""
    try:
        address = ip_address(host)
    except ValueError:
        return host
    return str(ip_network((address, 64), strict=False)) if isinstance(address, IPv6Address) else host


def _stamp(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


class RequestLog:
    """Appends to a file, or writes to standard output. texts: lines include prompts and answers. lost: number of lines
    that could not be written."""

    def __init__(self, path: str, texts: bool = False) -> None:
        """Opens the log. path: a file, or "-" for standard output. Raises ConfigError if it cannot be opened."""
        self.texts, self.lost = texts, 0
        self._path = None if path == "-" else Path(path).absolute()
        try:
            self._file = _open(self._path) if self._path else os.dup(1)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the request log {path} cannot be opened: {error}", "request_log") from error
        self._lines: queue.Queue[Mapping[str, Any] | None] = queue.Queue(_MOST_WAITING)
        self._torn, self._logged = False, -math.inf
        self._thread = threading.Thread(target=self._run, name="deltic-request-log", daemon=True)
        self._thread.start()

    def write(self, line: Mapping[str, Any]) -> None:
        """Queues a line."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.lost += 1

    def close(self) -> None:
        """Writes the queued lines, unless that takes too long."""
        try:
            self._lines.put(None, timeout=_PATIENCE)
        except queue.Full:
            return
        self._thread.join(_PATIENCE)

    def _run(self) -> None:
        while True:
            lines = [self._lines.get()]
            while lines[-1] is not None and len(lines) < _AT_ONCE and not self._lines.empty():
                lines.append(self._lines.get())
            self._reopen()
            self._write([dump(line) for line in lines if line is not None])
            if lines[-1] is None:
                os.close(self._file)
                return

    def _reopen(self) -> None:
        """Opens the path again after a log rotation. If that fails, the old file is used."""
        if self._path is None:
            return
        try:
            now = self._path.stat() if self._path.exists() else None
            if now is None or not os.path.samestat(os.fstat(self._file), now):
                file = _open(self._path)
                os.close(self._file)
                self._file, self._torn = file, False
        except OSError as error:
            self._warn(f"cannot be opened again: {error}")

    def _write(self, lines: list[bytes]) -> None:
        """Writes lines. A half-written line is ended before the next one."""
        for at, line in enumerate(lines):
            left = b"\n" * self._torn + line + b"\n"
            try:
                while left:
                    count = os.write(self._file, left)
                    left, self._torn = left[count:], count < len(left)
            except OSError as error:
                self.lost += len(lines) - at
                self._warn(f"cannot be written, and has lost {self.lost} lines: {error.strerror}")
                return

    def _warn(self, trouble: str) -> None:
        if time.monotonic() - self._logged > _QUIET:
            self._logged = time.monotonic()
            log.error("the request log %s", trouble)


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
