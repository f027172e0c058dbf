"""Receives and parses request bodies within limits, so that one client's body does not hold up other clients."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from pydantic_core import from_json
from starlette.requests import Request

from deltic.config import Limits
from deltic.errors import BusyError, RequestError, show
from deltic.server.errors import ProblemError
from deltic.server.fields import Body, read_fields, renamed
from deltic.server.http import while_connected
from deltic.server.records import LARGE, record_of
from deltic.vision.prompt import UnreadImages

log = logging.getLogger("deltic")

_FORM: Final = "application/x-www-form-urlencoded"
_BOM: Final = b"\xef\xbb\xbf"
"""Byte order mark with which PowerShell and .NET begin a body."""
_PATIENCE: Final = 4
"""Bodies up to this multiple of the limit are received before the refusal: clients read after they have sent."""
_FILE_WORDS: Final = (b"file", b"document", b"\\u")
"""Byte strings. Every body that has a file part contains at least one of them."""
_MOST_LOGGED: Final = 1000
_MOST_NAMED: Final = 50
_LONGEST_NAME: Final = 60
"""Limits for the names of ignored fields in the header and in the log."""

Chosen = TypeVar("Chosen")
Prepared = TypeVar("Prepared")


@dataclass(eq=False, slots=True)
class Upload:
    """A body that is being received. held: bytes that it counts for. given_up: dropped to make room for others."""

    patience: asyncio.Timeout
    pieces: list[bytes] = field(default_factory=list)
    held: int = 0
    given_up: bool = False


class BodyReader:
    """Receives and parses the bodies of all requests of a server.

    lenient: ignore fields that would be refused. held: bytes of large bodies. uploads: large bodies that are being
    received, oldest first.
    """

    def __init__(self, limits: Limits, lenient: bool = False) -> None:
        self.held = 0
        self.uploads: dict[Upload, None] = {}
        self._limits, self._lenient = limits, lenient
        self._logged: set[str] = set()

    async def read(self, request: Request, schema: type[Body], choose: Callable[[Body], Awaitable[Chosen]],
                   prepare: Callable[[Chosen, Body], Prepared],
                   with_images: Callable[[Chosen, UnreadImages], Awaitable[Chosen]] | None = None
                   ) -> tuple[Chosen, Body, Prepared]:
        """Returns the model that `choose` finds for a body, the body, and the result of `prepare` for both.

        Parsing and `prepare` run in a thread, and stop when the client disconnects. with_images: reads the images that
        `prepare` lacks, after which it is called again.
        Raises RequestError (names a wrong field), status 413 (body too large) or BusyError (too many bodies).
        """
        record = record_of(request)

        async def work(raw: bytes) -> tuple[Chosen, Body, Prepared]:
            body = await record.work(partial(parse, raw, schema, self._limits, self._lenient), len(raw))
            chosen = await choose(body)
            with renamed(body.notes.sent):
                try:
                    return chosen, body, await record.work(partial(prepare, chosen, body), len(raw))
                except UnreadImages as missing:
                    if with_images is None:
                        raise
                    seen = await with_images(chosen, missing)
                    return chosen, body, await record.work(partial(prepare, seen, body), len(raw))

        async with self.received(request) as raw:
            _check_headers(request)
            found = await while_connected(request.receive, work(raw))
            names = [name[:_LONGEST_NAME] for name in found[1].ignored[:_MOST_LOGGED]]
            record.ignored = tuple(dict.fromkeys(names))[:_MOST_NAMED]
            self._log(record.ignored)
            return found

    @asynccontextmanager
    async def received(self, request: Request) -> AsyncIterator[bytes]:
        """Receives a body. Raises status 413 if it is too large, BusyError if there are too many bodies."""
        upload = Upload(asyncio.timeout(None))
        try:
            with suppress(TimeoutError):
                async with upload.patience:
                    await self._receive(request, upload)
            if upload.given_up:
                raise BusyError(f"the bodies of all requests are larger than {self._limits.max_bodies_mib} MiB "
                                "together (max_bodies_mib): try again later")
            self.uploads.pop(upload, None)
            raw = b"".join(upload.pieces)
            upload.pieces.clear()
            yield raw
        finally:
            self._release(upload)

    async def _receive(self, request: Request, upload: Upload) -> None:
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
            raise ProblemError(413, f"the body is larger than {self._limits.max_body_mib} MiB (max_body_mib)")

    def _hold(self, upload: Upload, size: int) -> None:
        """Counts a body of this size. If all bodies together take too much, the oldest is dropped. Small bodies are not
        counted, as the number of connections limits them."""
        if size <= LARGE:
            return
        self.uploads[upload] = None
        while self.held + size - upload.held > self._limits.max_bodies_mib << 20:
            oldest = next(iter(self.uploads))
            self._release(oldest)
            oldest.given_up = True
            oldest.patience.reschedule(0)
            if oldest is upload:
                return
        self.held += size - upload.held
        upload.held = size

    def _release(self, upload: Upload) -> None:
        self.uploads.pop(upload, None)
        self.held -= upload.held
        upload.held = 0
        upload.pieces.clear()

    def _log(self, ignored: Iterable[str]) -> None:
        """Logs each name once."""
        for name in ignored:
            if name not in self._logged and len(self._logged) < _MOST_LOGGED:
                self._logged.add(name)
                log.warning("a client sends the field %s, which has no effect here", show(name))


def parse(raw: bytes, schema: type[Body], limits: Limits, lenient: bool = False) -> Body:
    """Returns a body as a record. Raises RequestError that names a field with a wrong value or too many entries."""
    data = read_json(raw, limits.max_body_values)
    if not isinstance(data, dict):
        raise RequestError("the body must be a JSON object")
    body = read_fields(data, schema, limits, lenient, len(raw))
    body.notes.may_have_files = any(word in raw for word in _FILE_WORDS)
    return body


def read_json(raw: bytes, most_values: int) -> Any:
    """Returns the parsed value of a JSON text. Raises RequestError if it has more than `most_values` values: parsing
    holds the interpreter's lock, and other clients would have to wait."""
    raw = raw.removeprefix(_BOM)
    _check_values(raw, most_values)
    try:
        return from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        text = str(error)
        remedy = " (a lone surrogate?): send well-formed UTF-8" if "hex escape" in text or "unicode" in text else ""
        raise RequestError(f"the body is not valid JSON: {text}{remedy}") from None


def _check_values(raw: bytes, most: int) -> None:
    """Raises RequestError if there are too many values: lists, objects and their members. Four entries of a list count
    as one. Strings past the number that `most` values can contain are counted like values."""
    if _quarters(raw) <= 4 * most:  # an upper bound, as texts may contain the same bytes
        return
    parts = raw.replace(rb"\\", b"").replace(rb'\"', b"").split(b'"', 8 * most + 8)
    if _quarters(b"".join(parts[::2])) > 4 * most:
        raise RequestError(f"the body has more than {most} values (max_body_values)")


def _quarters(outside: bytes) -> int:
    return outside.count(b",") + 4 * sum(map(outside.count, (b"[", b"{", b":")))


def _check_headers(request: Request) -> None:
    """Refuses compressed bodies and types other than JSON, because a web page may send those without a preflight
    request. `curl -d` sends the type of a form, and no Origin header."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("identity", ""):
        raise ProblemError(415, f"the body has the Content-Encoding {show(encoding)}: send it uncompressed")
    kind = request.headers.get("content-type", "")
    media = kind.partition(";")[0].strip().lower()
    if media and not media.endswith("json") and (media != _FORM or "origin" in request.headers):
        raise ProblemError(415, f"the body has the Content-Type {show(kind)}: send JSON, as application/json")
