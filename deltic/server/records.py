"""What is known of each request while it is answered: for the log, for `/v1/requests`, and for what one key may have at
a time. Every response has the request's id."""

from __future__ import annotations

import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deltic.config import Limits
from deltic.errors import QuotaError, RequestError
from deltic.server.executors import Executors
from deltic.server.sending import Outbox

if TYPE_CHECKING:
    from deltic.server.collect import GenerationStream

ID_HEADERS = ("x-request-id", "request-id")
"""As OpenAI's clients look for it, and as Anthropic's do."""

_IDS = re.compile(r"[!-~]{1,128}")
"""Ids of clients that are taken: ASCII without spaces."""
_LONGEST_PATH = 200
_GONE = 499  # the status where a client left before it was answered

Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request.

    id: the client's own, or else ours.
    client: its address.
    executors: the server's threads.
    key: name of the API key in the log.
    owner: identity of the key's owner for stored responses, answer records and quotas.
    prefix_owner: the same for cached prefixes; None if owners share them.
    arrived, began: by the clock, and by time.perf_counter.
    served: whether it came so far as to be looked at by an endpoint.
    model, stream: what it asks for, once its body is read.
    answers: that it takes of what its key may have at a time.
    run: what the engine does for it.
    ignored: fields that had no effect.
    problem: param and code of the error that it was answered with.
    cancelled: whether its answers were cut short on demand.
    release: called when it is over, for what it uses.
    spell: what tokens say, if the log wants to know it.
    """

    id: str
    client: str
    method: str
    path: str
    executors: Executors
    arrived: float = field(default_factory=time.time)
    began: float = field(default_factory=time.perf_counter)
    key: str | None = None
    owner: str | None = None
    prefix_owner: str | None = None
    served: bool = False
    model: str | None = None
    stream: bool = False
    answers: int = 0
    run: GenerationStream | None = None
    status: int | None = None
    ignored: tuple[str, ...] = ()
    problem: Mapping[str, str | None] | None = None
    cancelled: bool = False
    release: Callable[[], None] | None = None
    spell: Callable[[Sequence[int]], str] | None = None

    @property
    def client_id(self) -> str:
        """The client whose share of places and processor time it takes: the owner of its key, else its network."""
        return self.owner or network_of(self.client)

    async def work(self, work: Callable[[], Result], size: int = 0) -> Result:
        """The result of some work for it, done in a thread in its client's turn. size: bytes that the work is about."""
        return await self.executors.sized(size).run(self.client_id, work)

    def age(self) -> float:
        """Seconds since it came."""
        return time.perf_counter() - self.began

    def line(self) -> dict[str, Any]:
        """What the log says of it, when it is over: nothing of what it is about, unless that is asked for."""
        run = self.run
        return {"time": _stamp(self.arrived), "id": self.id, "client": self.client, "key": self.key,
                "method": self.method, "path": self.path, "status": self.status, "model": self.model,
                "stream": self.stream, **(run.figures(self.began) if run else {}), "total_ms": _ms(self.age()),
                "cancelled": self.cancelled, "ignored": list(self.ignored), "refused": self.problem,
                **(run.texts(self.spell) if run and self.spell else {})}


class ActiveRequests:
    """The requests that are being answered. log: is given a line for each that is over. texts: whether the lines shall
    have prompts and answers. responses: how many there were of each status."""

    def __init__(self, limits: Limits, log: Callable[[Mapping[str, Any]], None] | None = None,
                 texts: bool = False) -> None:
        self.texts, self._limits, self._log = texts, limits, log
        self.executors = Executors()
        self.responses: Counter[int] = Counter()
        self.outbox = Outbox(limits.max_unsent_mib)
        self._live: dict[RequestRecord, None] = {}

    def __iter__(self) -> Iterator[RequestRecord]:
        return iter(tuple(self._live))

    def begin(self, scope: Scope) -> RequestRecord:
        """A request has come."""
        headers, sender = dict(reversed(scope["headers"])), scope.get("client")
        given = headers.get(ID_HEADERS[0].encode(), b"").decode("latin-1")
        record = RequestRecord(given if _IDS.fullmatch(given) else "req_" + uuid.uuid4().hex,
                               sender[0] if sender else "", scope["method"], scope["path"][:_LONGEST_PATH],
                               self.executors)
        scope.setdefault("state", {})["record"] = record
        self._live[record] = None
        return record

    def end(self, record: RequestRecord) -> None:
        """It is over. Looks at health and files are not worth a line."""
        self._live.pop(record, None)
        self.responses[record.status or _GONE] += 1
        if record.release:
            record.release()
        if self._log and (record.served or record.status is None or record.status >= 400):
            self._log(record.line())
        # an idle connection keeps the record, and must not keep a model
        record.run = record.release = record.spell = None

    def refuse(self, status: int, client: str) -> None:
        """A connection was answered that had no request yet that could be read."""
        self.responses[status] += 1
        if self._log:
            self._log({"time": _stamp(time.time()), "client": client, "status": status})

    def take(self, record: RequestRecord, answers: int) -> None:
        """Count these answers to what the key has at a time, until the request is over: QuotaError if that is too much,
        RequestError if it always will be."""
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
    """Keeps a record of every request, and names its id in the response."""

    def __init__(self, app: ASGIApp, records: ActiveRequests) -> None:
        self._app, self._records = app, records

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _without_slashes(scope)
        record = self._records.begin(scope)

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                named = ((name.encode(), record.id.encode()) for name in ID_HEADERS)
                message["headers"] = [*message.get("headers", ()), *named]
            await self._records.outbox.send(scope, send, message)
        try:
            await self._app(scope, receive, noting)
        finally:
            self._records.end(record)


def _without_slashes(scope: Scope) -> Scope:
    """As if there were one slash before the path: a base URL that ends with one makes two."""
    if not scope["path"].startswith("//"):
        return scope
    return {**scope, "path": "/" + scope["path"].lstrip("/"), "raw_path": b"/" + scope["raw_path"].lstrip(b"/")}


def salt_of(owner: str | None, salt: str) -> str:
    """Combines an owner and a `SaltedFields.salt` into one salt; "" if there is neither."""
    return "" if owner is None and not salt else f"{salt} {'' if owner is None else 'of ' + owner}"


def network_of(host: str) -> str:
    """The part of an address that tells clients apart: a /64 network of IPv6 has one owner."""
    try:
        address = ip_address(host)
    except ValueError:
        return host
    return str(ip_network((address, 64), strict=False)) if isinstance(address, IPv6Address) else host


def record_of(request: Request) -> RequestRecord:
    """What is known of a request."""
    record: RequestRecord = request.state.record
    return record


def _stamp(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
