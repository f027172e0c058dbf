"""The record of each request, and the middleware that keeps it: for the log, `/v1/requests` and quotas of API keys."""

from __future__ import annotations

import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from ipaddress import IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING, Any, Final, TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deltic.config import Limits
from deltic.engine.fair_executor import FairExecutor
from deltic.errors import QuotaError, RequestError
from deltic.server.sending import Outbox

if TYPE_CHECKING:
    from deltic.server.generation import GenerationStream

ID_HEADERS: Final = ("x-request-id", "request-id")
"""Response headers with the request's id, for OpenAI's and for Anthropic's clients."""
LARGE: Final = 1 << 15
"""Bytes from which a body's work goes to the threads for large bodies."""

_IDS: Final = re.compile(r"[!-~]{1,128}")
"""Ids of clients that are accepted: ASCII without spaces."""
_LONGEST_PATH: Final = 200
_DISCONNECTED: Final = 499

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Executors:
    """Threads for work that is not generation. Each kind of work takes turns by client, and waits for no other kind."""

    small: FairExecutor = field(default_factory=partial(FairExecutor, 2, "deltic-small"))
    """Parses bodies, renders and encodes prompts, writes answers."""
    large: FairExecutor = field(default_factory=partial(FairExecutor, 2, "deltic-large"))
    """Does the same for large bodies."""
    grammars: FairExecutor = field(default_factory=partial(FairExecutor, 4, "deltic-grammars"))
    """Compiles grammars."""

    def sized(self, size: int) -> FairExecutor:
        return self.small if size <= LARGE else self.large

    def shutdown(self) -> None:
        """Finishes queued work, and accepts no more."""
        for executor in (self.small, self.large, self.grammars):
            executor.shutdown()


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request."""

    id: str
    """The client's own id, or a new one."""
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
    """The key's owner, for stored responses, answer records and quotas."""
    prefix_owner: str | None = None
    """The owner for cached prefixes; None if owners share them."""
    served: bool = False
    """True once an endpoint has seen the request."""
    model: str | None = None
    stream: bool = False
    answers: int = 0
    """Answers that count for the quota of the key."""
    run: GenerationStream | None = None
    status: int | None = None
    ignored: tuple[str, ...] = ()
    """Fields that had no effect."""
    problem: Mapping[str, str | None] | None = None
    """Param and code of the error that answered it."""
    cancelled: bool = False
    """True if a client has cut its answers short."""
    release: Callable[[], None] | None = None
    """Frees its model at the end."""
    spell: Callable[[Sequence[int]], str] | None = None
    """Decodes tokens, if the log is to have texts."""

    @property
    def client_id(self) -> str:
        """The client that the request is charged to: the key's owner, or else the network."""
        return self.owner or network_of(self.client)

    async def work(self, work: Callable[[], Result], size: int = 0) -> Result:
        """Does work in a thread, in the client's turn. size: bytes that it is about."""
        return await self.executors.sized(size).run(self.client_id, work)

    def age(self) -> float:
        """Seconds since it arrived."""
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

    log: gets a line for each finished request. texts: lines have prompts and answers. responses: counts by status.
    """

    def __init__(self, limits: Limits, log: Callable[[Mapping[str, Any]], None] | None = None,
                 texts: bool = False) -> None:
        self.texts = texts
        self.executors = Executors()
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
                               self.executors)
        scope.setdefault("state", {})["record"] = record
        self._live[record] = None
        return record

    def end(self, record: RequestRecord) -> None:
        """Ends the record. Successful requests for files and health are not logged."""
        self._live.pop(record, None)
        self.responses[record.status or _DISCONNECTED] += 1
        if record.release:
            record.release()
        if self._log and (record.served or record.status is None or record.status >= 400):
            self._log(record.line())
        # an idle connection keeps the record, and must not keep a model
        record.run = record.release = record.spell = None

    def refuse(self, status: int, client: str) -> None:
        """Counts an answer to a connection that sent no readable request."""
        self.responses[status] += 1
        if self._log:
            self._log({"time": _stamp(time.time()), "client": client, "status": status})

    def take(self, record: RequestRecord, answers: int) -> None:
        """Charges answers to the key until the request ends. QuotaError: the key has too many now. RequestError: it
        may never have as many."""
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
    """Middleware that keeps a record of every request, and returns its id in the response's headers."""

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
    """Removes the second of two leading slashes: clients whose base URL ends with a slash send two."""
    if not scope["path"].startswith("//"):
        return scope
    return {**scope, "path": "/" + scope["path"].lstrip("/"), "raw_path": b"/" + scope["raw_path"].lstrip(b"/")}


def record_of(request: Request) -> RequestRecord:
    record: RequestRecord = request.state.record
    return record


def salt_of(owner: str | None, salt: str) -> str:
    """Combines an owner and a `SaltedFields.salt` into one salt; "" if there is neither."""
    return "" if owner is None and not salt else f"{salt} {'' if owner is None else 'of ' + owner}"


def network_of(host: str) -> str:
    """Returns the part of an address that identifies a client: a /64 network of IPv6 has one owner."""
    try:
        address = ip_address(host)
    except ValueError:
        return host
    return str(ip_network((address, 64), strict=False)) if isinstance(address, IPv6Address) else host


def _stamp(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"
