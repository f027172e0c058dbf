"""Caches messages and tools in their normalised forms, because each turn of a conversation repeats all earlier ones.

A message is found by a hash of its content. The hash takes a small part of the time needed to check, quote and hash the
message in the forms that prompts and answer records need. Owners do not see each other's entries.
"""

from __future__ import annotations

import marshal
from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from hashlib import blake2b
from threading import Lock
from typing import Any

from deltic.chat.history_store import OwnedEntries
from deltic.chat.messages import See, check_messages, normalise_message, normalise_tools
from deltic.chat.tools import tool_schemas

_MAX_WEIGHT = 48_000_000
_MAX_ENTRIES = 1 << 14
_COPIES = 3  # an entry holds the text itself, perhaps a quoted text, and JSON
_ENTRY_COST = 1000
"""Limits in characters. Few entries keep pauses of the garbage collector short."""
_FORMAT = 2  # version of marshal's format in which equal values have equal bytes

Schemas = Mapping[str, Mapping[str, Any]]


@dataclass(slots=True, eq=False)
class ReadMessage:
    """A message or the tools of a request in the forms that a prompt needs. Shared: it must not be changed.

    value: the normalised value. schemas: the schemas of the tools.
    Set on demand: quoted: the value with marks in control tokens. json: the value as JSON. state: the history state
    before a message, the schemas that it depends on, and the state after it (`deltic.chat.history`).
    """

    value: Any
    schemas: Schemas | None = None
    quoted: Any = None
    json: str = ""
    state: tuple[str, Schemas | None, str] | None = None


class MessageCache:
    """Caches the most recently read messages and tools, by owner and content. Thread-safe."""

    def __init__(self) -> None:
        self._known: OwnedEntries[ReadMessage] = OwnedEntries(_MAX_WEIGHT, _MAX_ENTRIES)
        self._lock = Lock()
        self._owner = ""

    def of(self, owner: str) -> MessageCache:
        """Returns a view that is limited to the entries of this owner."""
        own = copy(self)
        own._owner = owner
        return own

    def messages(self, messages: Any, see: See | None = None) -> list[ReadMessage]:
        """Reads messages as `normalise_messages` does. Messages with images are not cached."""
        keys = [_key("message", message) for message in check_messages(messages)]
        with self._lock:
            found = [self._known.get(self._owner, key) if key else None for key, _ in keys]
        made = dict[bytes, tuple[ReadMessage, int]]()
        for index, (entry, (key, size)) in enumerate(zip(found, keys, strict=True)):
            if entry is None:
                images = _Images(see)
                found[index] = read = ReadMessage(
                    normalise_message(messages[index], f"messages[{index}]", images.see if see else None))
                if key and not images.seen:
                    made[key] = read, size
        self._keep(made)
        return [entry for entry in found if entry]

    def tools(self, tools: Any) -> ReadMessage:
        """Reads tools as `normalise_tools` does."""
        key, size = _key("tools", tools)
        with self._lock:
            known = self._known.get(self._owner, key) if key else None
        if known:
            return known
        value = normalise_tools(tools)
        found = ReadMessage(value, schemas=tool_schemas(value or ()))
        self._keep({key: (found, size)} if key else {})
        return found

    def _keep(self, made: Mapping[bytes, tuple[ReadMessage, int]]) -> None:
        with self._lock:
            for key, (entry, size) in made.items():
                self._known.put(self._owner, key, entry, _COPIES * size + _ENTRY_COST)


class _Images:
    """Notes that a message has images."""

    def __init__(self, see: See | None) -> None:
        self._see = see
        self.seen = False

    def see(self, part: Mapping[str, Any], kind: str, field: str) -> dict[str, Any]:
        assert self._see
        self.seen = True
        return self._see(part, kind, field)


def _key(kind: str, value: Any) -> tuple[bytes, int]:
    """Returns a hash of a value and its size. There is no hash if the value is not made of plain types."""
    with suppress(ValueError):
        data = marshal.dumps((kind, value), _FORMAT)
        return blake2b(data, digest_size=16).digest(), len(data)
    return b"", 0
