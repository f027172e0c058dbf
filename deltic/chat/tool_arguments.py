"""Writes the arguments of tool calls as JSON while they are read, in the types of the tool's schema."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

from deltic.chat.json_schema import has_type
from deltic.chat.schema_coercion import Schema, argument_schema, coerce, dumps, read_json, stays_text, types_of


class CallDelta(NamedTuple):
    """A piece of a call: its name, or more of its arguments; `written` as in ToolDelta."""

    name: str | None
    arguments: str = ""
    written: str = ""


class ToolArguments:
    """Writes the calls of one block to `out`, and text between them to `outside`.

    streams: strings are emitted as they come, if the schema cannot change their type. decodes: text is read as JSON if
    it is valid. drops_empty: ignores calls without arguments. typed: a value of an allowed type is not converted.
    """

    def __init__(self, schemas: Mapping[str, Schema], *, streams: bool, decodes: bool,
                 drops_empty: bool) -> None:
        self.out: list[CallDelta] = []
        self.outside: list[str] = []
        self.typed = False
        self._schemas = schemas
        self._streams = streams
        self._decodes = decodes
        self._drops_empty = drops_empty
        self._schema = Schema({})
        self._keys: set[str] | None = None  # of the open call
        # the open value
        self._key: str | None = None
        self._live = False  # its text is emitted as it comes
        self._begun = False
        self._repeated = False  # the call had a value with this key before
        self._text: list[str] = []

    @property
    def live(self) -> bool:
        """True if the open value is emitted as it comes."""
        return self._live

    @property
    def open(self) -> bool:
        """True inside a call."""
        return self._keys is not None

    def knows(self, name: str) -> bool:
        """True for the name of a tool."""
        return name in self._schemas

    def takes(self, key: str) -> bool:
        """True if the call has no value with this key yet, and its schema, if it has properties, has this one."""
        names = self._schema.properties
        return key != self._key and key not in (self._keys or ()) and (not names or key in names)

    def begin(self, name: str) -> None:
        """Begins a call."""
        self._schema, self._keys = self._schemas.get(name, Schema({})), set()
        self.out.append(CallDelta(name))

    def key(self, key: str) -> None:
        """Begins a value. A second one with the same key is not part of the call."""
        assert self._keys is not None
        self._key, self._begun, self._text, self._repeated = key, False, [], key in self._keys
        self._live = self._streams and not self._repeated and stays_text(key, self._schema)

    def text(self, text: str) -> None:
        """Adds text to the value."""
        if self._live and text:
            self._emit_text(dumps(text)[1:-1])
        elif self._key is not None:
            self._text.append(text)

    def skip(self) -> None:
        """Drops a key without a value."""
        self._key = None

    def end_text(self) -> None:
        """Ends a value of text, if one is open."""
        if self._key is None:
            return
        if self._live:
            self._emit_text('"')
            self._key = None
        else:
            self.value("".join(self._text))

    def value(self, written: Any) -> None:
        """Sets the whole value; text may spell a value of another type."""
        key, self._key = self._key, None
        if key is None:
            return
        if self._repeated:
            self.outside += [written if isinstance(written, str) else dumps(written), "\n"]
            return
        if self.typed and has_type(written, types_of(key, self._schema)):
            self._emit(key, written, written)
            return
        if self._decodes and isinstance(written, str):
            written = _decoded(written, types_of(key, self._schema) == {"string"})
        typed = coerce(written, argument_schema(key, self._schema), self._schema)
        self._emit(key, typed, written)

    def end(self) -> None:
        """Ends the call, if one is open."""
        if self._keys is None:
            return
        self.end_text()
        if not self._keys and self._drops_empty:
            self.out.pop()
        else:
            closing = "}" if self._keys else "{}"
            self.out.append(CallDelta(None, closing, closing))
        self._keys = None

    def copy(self) -> ToolArguments:
        """Returns an independent copy."""
        twin = copy.copy(self)
        twin.out = self.out.copy()
        twin.outside = self.outside.copy()
        twin._text = self._text.copy()
        twin._keys = None if self._keys is None else self._keys.copy()
        return twin

    def _emit(self, key: str, typed: Any, written: Any) -> None:
        before = self._key_text(key)
        self.out.append(CallDelta(None, before + dumps(typed), before + dumps(written)))

    def _emit_text(self, escaped: str) -> None:
        if not self._begun:
            assert self._key is not None
            self._begun, escaped = True, f'{self._key_text(self._key)}"{escaped}'
        self.out.append(CallDelta(None, escaped, escaped))

    def _key_text(self, key: str) -> str:
        """Returns the JSON text before a value."""
        assert self._keys is not None
        self._keys.add(key)
        return f"{', ' if len(self._keys) > 1 else '{'}{dumps(key)}: "


def _decoded(text: str, wants_text: bool) -> Any:
    """Decodes JSON text; returns other text as it is, and also JSON of other types if only strings are allowed."""
    try:
        value = read_json(text)
    except ValueError:
        return text
    return value if isinstance(value, str) or not wants_text else text
