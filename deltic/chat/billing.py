"""Removes billing headers: coding agents begin the system message with a changing line, which defeats prefix reuse."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

# x-anthropic-billing-header: cc_version=2.1.15.abc; cc_entrypoint=cli; cch=00000;
_HEADER = re.compile(r"\A(?:x-anthropic-billing-header:[^\n]*(?:\n|\Z))+", re.IGNORECASE)
_SYSTEM = ("system", "developer")


def without_billing_headers(messages: Any) -> Any:
    """Removes billing headers from the beginning of system messages; returns the same object if there are none.

    Takes messages as clients send them: a header in a part of its own has no line end once parts are joined.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        return messages
    cleaned = [_message(message) for message in messages]
    return messages if all(new is old for new, old in zip(cleaned, messages)) else cleaned


def _message(message: Any) -> Any:
    if not isinstance(message, Mapping) or message.get("role") not in _SYSTEM:
        return message
    changed = {name: cleaned for name in ("content", "contents")
               if (cleaned := _content(message.get(name))) is not message.get(name)}
    return {**message, **changed} if changed else message


def _content(content: Any) -> Any:
    if isinstance(content, str):
        return _HEADER.sub("", content) if _HEADER.match(content) else content
    if not isinstance(content, list | tuple) or not content:
        return content
    part = content[0]
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str) or not _HEADER.match(text):
        return content
    left = _HEADER.sub("", text)
    rest = list(content[1:])
    return [{**part, "text": left} if isinstance(part, Mapping) else left, *rest] if left else _content(rest)
