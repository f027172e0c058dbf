"""Writes the arguments of tool calls as JSON while they are read, in the types of the tool's schema."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

from deltic.chat.json_schema import has_type
from deltic.chat.schema_coercion import Schema, argument_schema, coerce, dumps, read_json, stays_text, types_of


class CallDelta(NamedTuple):
    """A piece of a call: its name, with which it begins, or more of its arguments; `written` as in ToolDelta."""

    name: str | None
    arguments: str = ""
    written: str = ""


class ToolArguments:
    """The calls of one block. What they say is in `out`, text that is no part of them in `aside`.

    schemas: by the names of tools. streams: texts are said as they come, where the schema leaves them as they are.
    decodes: texts are JSON where they can be. drops_empty: a call without arguments is none. typed: a value that has
    a type of its schema stays as it is.
    """

    def __init__(self, schemas: Mapping[str, Schema], *, streams: bool, decodes: bool,
                 drops_empty: bool) -> None:
        self.out: list[CallDelta] = []
        self.aside: list[str] = []
        self.typed = False
        self._schemas, self._streams, self._decodes, self._drops_empty = schemas, streams, decodes, drops_empty
        self._schema = Schema({})
        self._keys: set[str] | None = None  # of the call that is open
        # of the open value: its key, whether its text is said at once, whether that has begun, whether there was one
        # with this key before, and what there is of it
        self._key: str | None = None
        self._live = self._begun = self._repeated = False
        self._text: list[str] = []

    @property
    def live(self) -> bool:
        """Whether the open value is said as it comes."""
        return self._live

    @property
    def open(self) -> bool:
        """Whether a call is."""
        return self._keys is not None

    def knows(self, name: str) -> bool:
        """Whether there is a tool of this name."""
        return name in self._schemas

    def takes(self, key: str) -> bool:
        """Whether the open call may get a value with this key: it has none yet, and the schema, if it names any, names
        this one."""
        names = self._schema.properties
        return key != self._key and key not in (self._keys or ()) and (not names or key in names)

    def begin(self, name: str) -> None:
        """A call."""
        self._schema, self._keys = self._schemas.get(name, Schema({})), set()
        self.out.append(CallDelta(name))

    def key(self, key: str) -> None:
        """Of a value that follows. Where there is one with this key already, it is no part of the call."""
        assert self._keys is not None
        self._key, self._begun, self._text, self._repeated = key, False, [], key in self._keys
        self._live = self._streams and not self._repeated and stays_text(key, self._schema)

    def text(self, text: str) -> None:
        """More of a value that is text."""
        if self._live and text:
            self._say_text(dumps(text)[1:-1])
        elif self._key is not None:
            self._text.append(text)

    def skip(self) -> None:
        """The key has no value."""
        self._key = None

    def end_text(self) -> None:
        """Of the value, if there is one."""
        if self._key is None:
            return
        if self._live:
            self._say_text('"')
            self._key = None
        else:
            self.value("".join(self._text))

    def value(self, written: Any) -> None:
        """The whole value; text may be the spelling of another type."""
        key, self._key = self._key, None
        if key is None:
            return
        if self._repeated:
            self.aside += [written if isinstance(written, str) else dumps(written), "\n"]
            return
        if self.typed and has_type(written, types_of(key, self._schema)):
            self._say(key, written, written)
            return
        if self._decodes and isinstance(written, str):
            written = _decoded(written, types_of(key, self._schema) == {"string"})
        typed = coerce(written, argument_schema(key, self._schema), self._schema)
        self._say(key, typed, written)

    def end(self) -> None:
        """Of the call, if one is open."""
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
        """Independent ones in the same state."""
        twin = copy.copy(self)
        twin.out, twin.aside, twin._text = self.out.copy(), self.aside.copy(), self._text.copy()
        twin._keys = None if self._keys is None else self._keys.copy()
        return twin

    def _say(self, key: str, typed: Any, written: Any) -> None:
        before = self._before(key)
        self.out.append(CallDelta(None, before + dumps(typed), before + dumps(written)))

    def _say_text(self, escaped: str) -> None:
        if not self._begun:
            assert self._key is not None
            self._begun, escaped = True, f'{self._before(self._key)}"{escaped}'
        self.out.append(CallDelta(None, escaped, escaped))

    def _before(self, key: str) -> str:
        """What stands before a value."""
        assert self._keys is not None
        self._keys.add(key)
        return f"{', ' if len(self._keys) > 1 else '{'}{dumps(key)}: "


def _decoded(text: str, wants_text: bool) -> Any:
    """What the text is the JSON of; itself if it is none, or of what is no text where only that is wanted."""
    try:
        value = read_json(text)
    except ValueError:
        return text
    return value if isinstance(value, str) or not wants_text else text
