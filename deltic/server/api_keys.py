"""API keys: what clients send, and to whom the keys belong."""

from __future__ import annotations

import hmac
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b

from starlette.requests import Request

from deltic.errors import ConfigError
from deltic.server.http import Problem, ProblemError
from deltic.server.records import record_of

_MOST = 1000  # keys: each request is compared with all of them
_LONGEST_NAME = 100


@dataclass(frozen=True, slots=True)
class _Owner:
    """name: in the log. id: identity for everything that is stored."""

    name: str
    id: str


class ApiKeyAuth:
    """Checks API keys and records the owner of a request's key.

    owners: names by key; several keys may have the same name, and belong to one owner. share_prefix_cache: owners share
    cached prefixes.

    A key without a name has an owner of its own. The log names it by its position. Its owner's identity is a digest of
    the key: a position may belong to another key after a restart, and must not give access to stored data.
    """

    def __init__(self, owners: Mapping[str, str | None], share_prefix_cache: bool = False) -> None:
        if len(owners) > _MOST:
            raise ConfigError(f"there may be at most {_MOST} API keys, not {len(owners)}", "api_keys")
        if not all(owners):
            raise ConfigError("an API key is empty: everybody would have it", "api_keys")
        self._shares = share_prefix_cache
        self._owners = [(spelled, _Owner(name or f"key-{number}", name or _digest(key)))
                        for number, (key, name) in enumerate(owners.items(), 1) for spelled in _spellings(key)]

    def check(self, request: Request) -> None:
        """Of what the two kinds of clients send, as a bearer's or as x-api-key; status 401 without."""
        sent = dict(reversed(request.headers.raw))
        bearer = sent.get(b"authorization", b"")
        given = [value for value in (sent.get(b"x-api-key"), bearer[7:] if bearer[:7].lower() == b"bearer " else None)
                 if value is not None]
        # all of them are compared, to take the same time
        found = [owner for value in given for key, owner in self._owners if hmac.compare_digest(value, key)]
        if not found:
            raise ProblemError(Problem(401, "the API key is missing or wrong: send it as Authorization: Bearer KEY",
                                       code="invalid_api_key"))
        record = record_of(request)
        record.key, record.owner = found[0].name, found[0].id
        record.prefix_owner = None if self._shares else found[0].id


def _digest(key: str) -> str:
    return "key " + blake2b(key.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _spellings(key: str) -> Iterator[bytes]:
    """Beyond ASCII most clients send UTF-8, some Latin-1; a key from the environment may be neither."""
    yield key.encode("utf-8", "surrogateescape")
    if not key.isascii():
        with suppress(UnicodeEncodeError):
            yield key.encode("latin-1")


def read_keys(text: str, file: str) -> dict[str, str | None]:
    """A file's keys, with their owners' names: a line for each, the key, a space, and a name if it has one. Empty lines
    and those that begin with # are left out. ConfigError names a line that is wrong, never a key."""
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
