"""Checks that run before the endpoints: allowed hosts, allowed web pages, and API keys."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from ipaddress import ip_address
from typing import Final

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from deltic.errors import ConfigError, show
from deltic.server.errors import Problem, ProblemError, refusal
from deltic.server.records import record_of

LOCAL_NAMES: Final = ("localhost", "*.localhost", "*.docker.internal", "*.containers.internal", "*.lima.internal")
"""Names by which a machine is known to itself and to its containers."""
_MOST_KEYS: Final = 1000
_LONGEST_NAME: Final = 100


class HostCheck:
    """Refuses requests for hosts that are not allowed, and requests from other web pages.

    hosts: allowed names; `*.name` allows all names below it, `*` all names. IP addresses are always allowed: a web page
    that reaches the server by DNS rebinding sends its name. Starlette's TrustedHostMiddleware would refuse them.
    origins: web pages that may use the server in addition to its own; `*` allows all.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str], origins: Sequence[str]) -> None:
        self._app = app
        self._hosts = tuple(host.lower() for host in hosts)
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(scope["headers"]) if scope["type"] == "http" else None
        if problem:
            await refusal(scope, problem, {"connection": "close"})(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _problem(self, headers: Iterable[tuple[bytes, bytes]]) -> Problem | None:
        sent: dict[bytes, list[str]] = {}
        for name, value in headers:
            sent.setdefault(name, []).append(value.decode("latin-1").strip())
        hosts = sent.get(b"host", [])
        for host in hosts:
            if not self._allows(_name_of(host)):
                return Problem(403, f"the host {show(_name_of(host))} is not allowed: ask by address, or start the "
                                    "server with --allowed-host", code="host_not_allowed")
        if sent.get(b"sec-fetch-site") == ["same-origin"]:  # sent by browsers; a proxy may have changed the Host header
            return None
        for origin in sent.get(b"origin", ()):
            own = origin.lower().partition("://")[2] in [host.lower() for host in hosts]
            if not own and self._origins.isdisjoint(("*", origin)):
                return Problem(403, f"a web page of the origin {show(origin)} may not use this server: start it with "
                                    "--cors-origin and the origin", code="origin_not_allowed")
        return None

    def _allows(self, host: str) -> bool:
        for name in self._hosts:
            if name in ("*", host) or (name.startswith("*.") and host.endswith(name[1:])):
                return True
        try:
            return bool(ip_address(host))
        except ValueError:
            return False


def _name_of(host: str) -> str:
    """Returns the host without its port and a trailing dot."""
    name = host.strip().lower()
    return name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0].removesuffix(".")


@dataclass(frozen=True, slots=True)
class _Owner:
    """name: the owner's name in the log. id: the owner's identity for all stored data."""

    name: str
    id: str


class ApiKeyAuth:
    """Checks API keys and records the owner of a request's key.

    owners: names by key; keys with the same name have one owner. share_prefix_cache: owners share cached prefixes.

    A key without a name is its own owner. The log names it by its position. The owner's identity is a digest of the
    key: a position may belong to another key after a restart, and must not give access to stored data.
    """

    def __init__(self, owners: Mapping[str, str | None], share_prefix_cache: bool = False) -> None:
        if len(owners) > _MOST_KEYS:
            raise ConfigError(f"there may be at most {_MOST_KEYS} API keys, not {len(owners)}", "api_keys")
        if not all(owners):
            raise ConfigError("an API key is empty: every client would have it", "api_keys")
        self._shares = share_prefix_cache
        self._owners = [(spelled, _Owner(name or f"key-{number}", name or _digest(key)))
                        for number, (key, name) in enumerate(owners.items(), 1) for spelled in _spellings(key)]

    def check(self, request: Request) -> None:
        """Reads the key from `Authorization: Bearer` or `x-api-key`. Raises status 401 if it is missing or wrong."""
        sent = dict(reversed(request.headers.raw))
        bearer = sent.get(b"authorization", b"")
        given = [sent[b"x-api-key"]] if b"x-api-key" in sent else []
        if bearer[:7].lower() == b"bearer ":
            given.append(bearer[7:])
        # compares all keys, so that the duration reveals nothing about them
        found = [owner for value in given for key, owner in self._owners if hmac.compare_digest(value, key)]
        if not found:
            raise ProblemError(401, "the API key is missing or wrong: send it as Authorization: Bearer KEY",
                               code="invalid_api_key")
        record = record_of(request)
        record.key, record.owner = found[0].name, found[0].id
        record.prefix_owner = None if self._shares else found[0].id


def _digest(key: str) -> str:
    return "key " + blake2b(key.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _spellings(key: str) -> Iterator[bytes]:
    """Yields a key's encodings. Beyond ASCII most clients send UTF-8, some Latin-1; environment keys may be neither."""
    yield key.encode("utf-8", "surrogateescape")
    if not key.isascii():
        with suppress(UnicodeEncodeError):
            yield key.encode("latin-1")


def read_keys(text: str, file: str) -> dict[str, str | None]:
    """Returns the owners' names by key. Each line of the file has a key, optionally followed by a space and a name.
    Empty lines and comments (#) are skipped. Raises ConfigError that names a wrong line, never a key."""
    owners: dict[str, str | None] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key, *name = line.split(maxsplit=1)
        owner = name[0].strip() if name else None
        if key in owners:
            raise ConfigError(f"line {number} of {file} has a key that another line has", "api_key_file")
        if owner and len(owner) > _LONGEST_NAME:
            raise ConfigError(f"line {number} of {file} has a name of more than {_LONGEST_NAME} characters",
                              "api_key_file")
        owners[key] = owner
    if not owners:
        raise ConfigError(f"{file} has no API keys: a line for each, the key and then perhaps a name", "api_key_file")
    return owners
