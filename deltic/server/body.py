"""Bodies of requests: received within bounds, and read so that nobody else has to wait.

Python's own JSON reader holds the interpreter's lock until it has read everything: for the worst 8 MiB half a second,
in which no other client gets a token. So values are counted first, and the reader gets no more of them than it reads in
some milliseconds.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import logging
import math
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from dataclasses import field as attribute
from functools import partial
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError
from starlette.requests import Request

from deltic.config import Limits
from deltic.errors import BusyError, RequestError, show, valid_text
from deltic.server.executors import LARGE
from deltic.server.fields import Refused, asks_nothing, known
from deltic.server.http import Problem, ProblemError, while_connected
from deltic.server.records import record_of
from deltic.vision.prompt import UnreadImages

log = logging.getLogger("deltic")

_FORM = "application/x-www-form-urlencoded"
_PIECE = 1 << 16  # bytes whose values are counted in one go
_BOM = b"\xef\xbb\xbf"  # with which PowerShell and .NET begin a body
_PATIENCE = 4  # so many times the limit is read and thrown away, as clients listen only after they have sent all

# Which limit bounds the entries of a field; what has more is not even looked at.
_COUNTED: Mapping[str, str] = {"messages": "max_messages", "tools": "max_tools", "stop": "max_stops",
                               "stop_token_ids": "max_stops", "logit_bias": "max_logit_bias",
                               "stop_sequences": "max_stops", "input": "max_messages", "documents": "max_messages"}

_SCHEMAS = ("tools", "functions", "response_format", "structured_outputs", "guided_json", "guided_regex",
             "guided_choice", "guided_grammar", "text", "output_config")
_OF_FILES = (b"file", b"document", b"\\u")
"""One of these stands in every body that has a part with a file: its type, or a letter that is escaped."""
_MOST_TOLD = 1000
_MISSPELT, _RELATED = 0.85, 0.6
"""How near to a field's name (difflib) another one has to be to be meant as it, and one that has a word of it."""
_LONGEST_NAME = 60
_MOST_NAMED = 50  # fields without effect, in the header and in the log: clients could send any number

class Fields(BaseModel):
    """A body, or a part of one: JSON's own types, and no other fields than these."""

    model_config = ConfigDict(extra="forbid", strict=True)
    counted: ClassVar[Mapping[str, str]] = {}
    """Names of limits of this schema's own, by the fields whose entries they bound."""
    elsewhere: ClassVar[Mapping[str, str]] = {}
    """What fields of other wires are called here, for who mixes them up."""
    _ignored: list[str] = PrivateAttr(default_factory=list)
    _lenient: bool = PrivateAttr(False)
    _sent: Mapping[str, str] = PrivateAttr(default_factory=dict)
    _may_have_files: bool = PrivateAttr(False)

    @property
    def ignored(self) -> list[str]:
        """Names of what the client sent and what had no effect."""
        return self._ignored

    @property
    def sent(self) -> Mapping[str, str]:
        """Names under which the client sent fields, where it used another server's."""
        return self._sent

    @property
    def may_have_files(self) -> bool:
        """Whether it is worth looking for documents in messages."""
        return self._may_have_files

    @property
    def lenient(self) -> bool:
        """Whether what nobody knows is ignored."""
        return self._lenient


class SaltedFields(Fields):
    """Adds cache_salt, as in vLLM: requests with different salts share neither cached prefixes nor answer records."""

    cache_salt: str | None = None

    @property
    def salt(self) -> str:
        """A digest of the salt; "" if there is none."""
        if self.cache_salt is None:
            return ""
        if not self.cache_salt:
            raise RequestError("cache_salt is empty: give at least one character, or leave it out", "cache_salt")
        return blake2b(valid_text(self.cache_salt, "cache_salt").encode(), digest_size=16).hexdigest()


Body = TypeVar("Body", bound=Fields)
Chosen = TypeVar("Chosen")
Prepared = TypeVar("Prepared")
Seeing = Callable[[Chosen, UnreadImages], Awaitable[Chosen]]


@dataclass(frozen=True, slots=True)
class _Notes:
    """What is found while fields are read. ignored: those without effect. sent: as in `Fields`."""

    ignored: list[str] = attribute(default_factory=list)
    sent: dict[str, str] = attribute(default_factory=dict)


@dataclass(eq=False, slots=True)
class _Upload:
    """A body on its way. patience: ends the wait for it. held: bytes that it counts for. given_up: in favour of others.
    """

    patience: asyncio.Timeout
    pieces: list[bytes] = attribute(default_factory=list)
    held: int = 0
    given_up: bool = False


class BodyReader:
    """Takes in the bodies of all requests of a server. lenient: ignores fields that nobody knows, and those
    of other servers that would change the answer."""

    def __init__(self, limits: Limits, lenient: bool = False) -> None:
        self._limits, self._lenient, self._held = limits, lenient, 0
        self._told: set[str] = set()
        self._coming: dict[_Upload, None] = {}  # in the order in which they became large

    async def read(self, request: Request, schema: type[Body], choose: Callable[[Body], Awaitable[Chosen]],
                   prepare: Callable[[Chosen, Body], Prepared], seeing: Seeing[Chosen] | None = None
                   ) -> tuple[Chosen, Body, Prepared]:
        """What is chosen by the body, the body, and what `prepare` makes of both, in a thread: big prompts take a while
        to parse and encode. Work that has not begun is dropped when the client goes away.

        seeing: gives what was chosen with the pictures that `prepare` has missed, for another try; while it waits for
        these it has no thread that others need.
        RequestError names what is wrong with it, and ProblemError has status 413 if it is too large; BusyError if there
        are too many at the same time. What had no effect is noted with the request, see `answering`.
        """
        record = record_of(request)

        async def work(raw: bytes) -> tuple[Chosen, Body, Prepared]:
            body = await record.work(partial(parse, raw, schema, self._limits, self._lenient), len(raw))
            chosen = await choose(body)
            with renamed(body.sent):
                try:
                    return chosen, body, await record.work(partial(prepare, chosen, body), len(raw))
                except UnreadImages as missing:
                    if seeing is None:
                        raise
                    seen = await seeing(chosen, missing)
                    return chosen, body, await record.work(partial(prepare, seen, body), len(raw))

        async with self._received(request) as raw:
            _check_form(request)
            chosen, body, prepared = await while_connected(request.receive, work(raw))
            record.ignored = _named(body.ignored)
            self._tell(record.ignored)
            return chosen, body, prepared

    @asynccontextmanager
    async def _received(self, request: Request) -> AsyncIterator[bytes]:
        upload = _Upload(asyncio.timeout(None))
        try:
            with suppress(TimeoutError):
                async with upload.patience:
                    await self._receive(request, upload)
            if upload.given_up:
                raise self._too_much()
            self._coming.pop(upload, None)
            raw = b"".join(upload.pieces)
            upload.pieces.clear()
            yield raw
        finally:
            self._release(upload)

    async def _receive(self, request: Request, upload: _Upload) -> None:
        most, size = self._limits.max_body_mib << 20, 0
        async for piece in request.stream():
            size += len(piece)
            if upload.given_up:
                return
            if size <= most:
                self._hold(upload, size)
                upload.pieces.append(piece)
            elif size > most * _PATIENCE:
                break
        if size > most:
            raise ProblemError(Problem(413, f"the body is larger than {self._limits.max_body_mib} MiB (max_body_mib)"))

    def _hold(self, upload: _Upload, size: int) -> None:
        """Count in a body that has grown to this size. If all together are too much, the one that has been on its way
        for longest is given up: honest ones take a moment. Small ones are as many as there are connections, at most."""
        if size <= LARGE:
            return
        self._coming[upload] = None
        while self._held + size - upload.held > self._limits.max_bodies_mib << 20:
            oldest = next(iter(self._coming))
            self._release(oldest)
            oldest.given_up = True
            oldest.patience.reschedule(0)  # ends its wait for more
            if oldest is upload:
                return
        self._held, upload.held = self._held + size - upload.held, size

    def _release(self, upload: _Upload) -> None:
        self._coming.pop(upload, None)
        self._held, upload.held = self._held - upload.held, 0
        upload.pieces.clear()

    def _tell(self, ignored: Iterable[str]) -> None:
        """Once for each name."""
        for name in ignored:
            if name not in self._told and len(self._told) < _MOST_TOLD:
                self._told.add(name)
                log.warning("a client sends the field %s, which has no effect here", show(name))

    def _too_much(self) -> BusyError:
        return BusyError(f"the bodies of all requests are larger than {self._limits.max_bodies_mib} MiB together "
                         "(max_bodies_mib): try again later")


def parse(raw: bytes, schema: type[Body], limits: Limits, lenient: bool = False) -> Body:
    """The body as a record; RequestError names the field that is wrong or unknown, or has too many entries."""
    data = _read_json(raw, limits.max_body_values)
    if not isinstance(data, dict):
        raise RequestError("the body must be a JSON object")
    body = read_fields(data, schema, limits, lenient, len(raw))
    body._may_have_files = any(word in raw for word in _OF_FILES)
    return body


def read_fields(data: Mapping[str, Any], schema: type[Body], limits: Limits, lenient: bool = False,
                size: int = sys.maxsize) -> Body:
    """The same of what was read already. size: of it as JSON, if that is known."""
    notes = _Notes()
    data = _known(data, schema, notes, lenient)
    with renamed(notes.sent):
        _check_counts(data, limits, {**_COUNTED, **schema.counted})
        if size > limits.max_schema_kib << 10:
            _check_schemas(data, limits.max_schema_kib)
        try:
            body = schema.model_validate(data)
        except ValidationError as error:
            raise _explain(error) from None
    body._lenient, body._sent = lenient, notes.sent
    body.ignored.extend(notes.ignored)
    return body


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about fields name those that the client sent. names: by their own names, what they begin with is enough.
    """
    try:
        yield
    except RequestError as error:
        field = error.field or ""
        sent = sent_name(field, names)
        if sent == field:
            raise
        raise type(error)(str(error).replace(field, sent, 1), sent) from error


def sent_name(field: str, names: Mapping[str, str]) -> str:
    """What the client calls a field."""
    name = next((name for name in (field, *_beginnings(field)) if name in names), None)
    return field if name is None else names[name] + field[len(name):]


def _beginnings(field: str) -> Iterator[str]:
    """messages[3], messages of messages[3].content"""
    for at in range(len(field) - 1, 0, -1):
        if field[at] in ".[":
            yield field[:at]


def _check_form(request: Request) -> None:
    """A body that is compressed would look like damaged text. One that is no JSON by its type may be of a web page that
    did not ask whether it may send it; `curl -d` names a form's type by default, and has no origin."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("identity", ""):
        raise ProblemError(Problem(415, f"the body has the Content-Encoding {show(encoding)}: send it as it is"))
    kind = request.headers.get("content-type", "")
    media = kind.partition(";")[0].strip().lower()
    if media and not media.endswith("json") and (media != _FORM or "origin" in request.headers):
        raise ProblemError(Problem(415, f"the body has the Content-Type {show(kind)}: send JSON, as application/json"))


def _named(ignored: Sequence[str]) -> tuple[str, ...]:
    """Names of what had no effect, each once; no more and no longer ones than a header and a log can bear."""
    return tuple(dict.fromkeys(name[:_LONGEST_NAME] for name in ignored[:_MOST_TOLD]))[:_MOST_NAMED]


def _check_counts(data: Mapping[str, Any], limits: Limits, counted: Mapping[str, str]) -> None:
    """Refuse what has so many entries that validating them, or listing all that is wrong with them, would take long."""
    for field, limit in counted.items():
        value, most = data.get(field), getattr(limits, limit)
        if isinstance(value, list | dict) and len(value) > most:
            raise RequestError(f"{field} has {len(value)} entries, and may have at most {most} ({limit})", field)


def _check_schemas(data: Mapping[str, Any], most_kib: int) -> None:
    size = 0
    for field in _SCHEMAS:
        for piece in json.JSONEncoder(ensure_ascii=False).iterencode(data.get(field)):  # in Python, lets others run
            size += len(piece)
            if size > most_kib << 10:
                raise RequestError(f"{field} takes more than {most_kib} KiB (max_schema_kib)", field)


def _known(data: Mapping[str, Any], schema: type[Fields], notes: _Notes, lenient: bool, path: str = ""
           ) -> dict[str, Any]:
    """The fields that the schema has; those of other servers as ours, if they can be."""
    fields, strange = schema.model_fields, dict[str, Mapping[str, Any] | Refused]()
    for name, value in data.items():
        if name not in fields:
            meant = known(name, value) if not path else None
            if meant is None and not lenient:
                raise unknown_field(path, name, schema.model_fields, schema.elsewhere)
            strange[name] = {} if meant is None else meant
    own = {name: data[name] for name in fields if name in data}
    for name, meant in strange.items():
        _take_over(name, data[name], meant, own, schema, notes, lenient)
    for name, field in fields.items():
        for kind in get_args(field.annotation):
            if isinstance(kind, type) and issubclass(kind, Fields) and isinstance(own.get(name), dict):
                own[name] = _known(own[name], kind, notes, lenient, f"{name}.")
    return own


def _take_over(name: str, value: Any, meant: Mapping[str, Any] | Refused, own: dict[str, Any],
               schema: type[Fields], notes: _Notes, lenient: bool) -> None:
    if asks_nothing(name, value):
        return
    if isinstance(meant, Refused):
        if value in meant.neutral:
            return
        if not lenient:
            raise RequestError(f"{name} is not supported" + (f" with the value {show(value)}" if meant.neutral else ""),
                               name)
        meant = {}
    asked = {ours: wanted for ours, wanted in meant.items() if ours in schema.model_fields and wanted is not None}
    taken = {ours: wanted for ours, wanted in asked.items() if own.get(ours) in (None, wanted)}
    own.update(taken)
    notes.sent.update({ours: name for ours, wanted in taken.items() if wanted is value})
    if not asked or len(taken) < len(asked):  # what our own field says otherwise counts
        notes.ignored.append(name)


def _read_json(raw: bytes, most_values: int) -> Any:
    raw = raw.removeprefix(_BOM)
    _check_values(raw, most_values)
    try:
        return _READER.decode(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not valid UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None


def _check_values(raw: bytes, most: int) -> None:
    """RequestError if there are more values than may be read in one go. Goes through the bytes outside of strings piece
    by piece, between which other threads may run."""
    at, inside, quarters = 0, 0, 0
    while at < len(raw):
        piece = raw[at:at + _PIECE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # the last one escapes what comes next
            piece = raw[at:at + _PIECE + 1]
        at += len(piece)
        parts = piece.replace(rb"\\", b"").replace(rb'\"', b"").split(b'"')
        outside = b"".join(parts[inside::2])
        inside ^= (len(parts) - 1) % 2
        quarters += outside.count(b",") + 4 * sum(map(outside.count, (b"[", b"{", b":")))
        if quarters > 4 * most:
            raise RequestError(f"the body has more than {most} values (max_body_values)")


def _not_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is too large")
    return value


_READER = json.JSONDecoder(parse_constant=_not_json, parse_float=_finite)


def _explain(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False)[0]
    field = _path(first["loc"])
    if first["type"] == "missing":
        return RequestError(f"{field} is missing", field)
    expected = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return RequestError(f"{field} must be {expected}, not {show(first['input'])}", field)


def unknown_field(path: str, name: str, known: Iterable[str], elsewhere: Mapping[str, str] = MappingProxyType({})
                  ) -> RequestError:
    """There is no field of this name, and perhaps one of those that are known is meant. path: what stands before it.
    elsewhere: what fields of other wires are called here."""
    shown = path + (name if len(name) <= _LONGEST_NAME else name[:_LONGEST_NAME] + "...")
    meant = elsewhere.get(name) or _meant(name[:_LONGEST_NAME], known)
    return RequestError(f"unknown field {show(shown)}" + (f": do you mean {path + meant!r}?" if meant else ""), shown)


def _meant(name: str, known: Iterable[str]) -> str | None:
    """The name that this one seems to be: that one misspelt, or one with words of it, the more the better, so that who
    says `max_tokens` hears of `max_output_tokens` rather than of `min_tokens`."""
    def common(other: str) -> int:
        return len({*name.split("_")} & {*other.split("_")})

    near = difflib.get_close_matches(name, known, _MOST_NAMED, _RELATED)
    misspelt = difflib.get_close_matches(name, near, 1, _MISSPELT)
    related = sorted(filter(common, near), key=common, reverse=True)
    return next(iter((*misspelt, *related)), None)


def _path(location: tuple[int | str, ...]) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return path.removeprefix(".")
