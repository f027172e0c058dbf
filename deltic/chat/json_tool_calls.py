"""Parser states of `deltic.chat.tool_parsers` for calls that are JSON objects, in JSON's or Python's spelling.

If an object begins with `{"name": NAME, "arguments": {`, its arguments are emitted one by one; any other object is read
as a whole.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deltic.chat.tool_arguments import loads
from deltic.chat.tools import skip_spaces

if TYPE_CHECKING:
    from deltic.chat.tool_parsers import CallReader

_QUOTES = "\"'"
_MAX_HEAD = 600  # characters of a key, or of an object before its arguments
_MAX_EXACT_KEY = 4096
_HEAD = re.compile(r"""\{\s*(["'])name\1\s*:\s*(["'])(?P<name>(?=\s*[^\s"'])[^"'\\<\n]{1,256})\2\s*,"""
                   r"""\s*(["'])(?:arguments|parameters)\4\s*:\s*\{""")
_KEY = re.compile(r"""(?:"((?:[^"\\<\n]|\\[^<\n])*)"|'((?:[^'\\<\n]|\\[^<\n])*)'|([A-Za-z_][\w$-]*))\s*:""")
_BEGUN_KEY = re.compile(r"""(?:"(?:[^"\\<\n]|\\[^<\n])*(?:\\|"\s*)?|'(?:[^'\\<\n]|\\[^<\n])*(?:\\|'\s*)?"""
                        r"""|[A-Za-z_][\w$-]*\s*)\Z""")
_EXACT_KEY, _BEGUN_EXACT_KEY = (re.compile(rf'"((?:[^"\\]|\\.)*{end}', re.DOTALL)
                                for end in (r')"\s*:', r'(?:\\|"\s*)?)\Z'))
_IN_TEXT = re.compile(r'["\\<]')
_ESCAPE = re.compile(r"\\(?:u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|(.))",
                     re.DOTALL)
_BEGUN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3}|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F]"
                           r"[0-9a-fA-F]?)?)?)?)?)?\Z")
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "'": "'", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


@dataclass(slots=True)
class JsonScan:
    """A part that is read as a whole.

    what: "object" (a call), "value" (an argument) or "rest" (the object's text after the arguments).
    ends: the characters that end the part. quote: the open quote. depth: the number of open brackets.
    """

    what: str = ""
    ends: str = ""
    quote: str = ""
    depth: int = 0


def head(reader: CallReader, text: str, at: int) -> int:
    """Handles text before the arguments of an object."""
    found = _HEAD.match(text, at)
    if found and found.end() - at <= _MAX_HEAD:
        reader.begin(found["name"])
        reader.confirm()
        reader.state = before_key
        return found.end()
    ended = any(tag in text[at:at + _MAX_HEAD] for tag in reader.tags.block)
    if len(text) - at < _MAX_HEAD and not ended:
        return at
    return _begin_scan(reader, "object", "}", at + 1)


def before_key(reader: CallReader, text: str, at: int) -> int:
    """Handles text between arguments."""
    start = skip_spaces(text, at)
    if start == len(text):
        return start
    if text[start] == ",":
        return start + 1
    if text[start] == "}":
        reader.arguments.end()
        return _begin_scan(reader, "rest", "}", start + 1)
    key, begun, most = (_EXACT_KEY, _BEGUN_EXACT_KEY, _MAX_EXACT_KEY) if reader.exact else (_KEY, _BEGUN_KEY, _MAX_HEAD)
    found = key.match(text, start)
    if found and found.end() - start <= most:
        name = next((name for name in found.groups() if name is not None), "")
        reader.arguments.key(_ESCAPE.sub(_character, name))
        reader.state = before_value
        return found.end()
    if len(text) - start < most and begun.match(text, start):
        return start
    return _end_early(reader, text, start)


def before_value(reader: CallReader, text: str, at: int) -> int:
    """Handles text after a key."""
    start = skip_spaces(text, at)
    if start == len(text):
        return start
    if text[start] in ",}":  # the value is missing
        reader.arguments.skip()
        reader.state = before_key
        return start
    if text[start] == '"' and reader.arguments.live:
        reader.state = in_text
        return start + 1
    return _begin_scan(reader, "value", ",}", start)


def in_text(reader: CallReader, text: str, at: int) -> int:
    """Handles text in a string that is emitted as it arrives."""
    found = _IN_TEXT.search(text, at)
    end = found.start() if found else len(text)
    reader.arguments.text(text[at:end])
    if found is None:
        return end
    if found[0] == '"':
        reader.state, reader.pieces = after_text, []
        return end + 1
    if found[0] == "\\":
        return _in_escape(reader, text, end)
    tag, is_open = reader.tag_at(text, end)
    if is_open:
        return end
    if tag and tag.lastgroup in ("opening", "closing"):
        if reader.next_tag_ends:
            return _end_early(reader, text, end)
        reader.mark_possible_end(text[end:])
    reader.next_tag_ends = False
    reader.arguments.text("<")
    return end + 1


def _in_escape(reader: CallReader, text: str, at: int) -> int:
    if _BEGUN_ESCAPE.match(text, at):
        return at
    found = _ESCAPE.match(text, at)
    reader.arguments.text(_character(found) if found else "\\")
    return found.end() if found else at + 1


def after_text(reader: CallReader, text: str, at: int) -> int:
    """Handles text after a quote that ends the string if a suitable character follows."""
    start, tag, waits = reader.past_spaces(text, at)
    if waits:
        return start
    if text[start] in ",}" or (tag and tag.lastgroup in ("opening", "closing")):
        reader.arguments.end_text()
        reader.state = before_key
    elif not reader.backtrack():
        reader.arguments.text('"' + "".join(reader.pieces))
        reader.state = in_text
    return start


def scan(reader: CallReader, text: str, at: int) -> int:
    """Handles text in a part that is read as a whole."""
    now, seen = reader.json, at
    for mark in reader.tags.marks.finditer(text, at):
        sign, seen = mark[0], mark.end()
        if sign[0] == "<":
            reader.pieces.append(text[at:mark.start()])
            at = mark.start()
            if not now.quote or reader.next_tag_ends or now.what == "rest":
                reader.next_tag_ends = False
                return _stopped(reader, text, at)
            reader.mark_possible_end(text[at:])
        elif now.quote:
            now.quote = "" if sign == now.quote else now.quote
        elif sign in _QUOTES:
            now.quote = sign
        elif sign in now.ends and not now.depth:
            reader.pieces.append(text[at:mark.start()])
            return _scanned(reader, text, mark.start())
        else:
            now.depth += 1 if sign in "[{" else -1 if sign in "]}" and now.depth else 0
    end = reader.open_tag(text, seen)
    if text[seen:].endswith("\\"):
        end = min(end, len(text) - 1)
    reader.pieces.append(text[at:end])
    return end


def after_object(reader: CallReader, text: str, at: int) -> int:
    """Handles text between the calls of a block, or after the last call."""
    start = skip_spaces(text, at)
    if start == len(text):
        return start
    if text[start] == "}":
        return start + 1
    if text[start] == "{":
        reader.state = head
        return start
    return _end_early(reader, text, start)


def cut(reader: CallReader, held: str, closes: bool) -> str:
    """Handles held text at the end of all text. Returns the part outside of calls."""
    if reader.state is in_text and not closes and held[:1] != "\\":
        reader.arguments.text(held)
    if reader.state is head:
        _begin_scan(reader, "object", "}", 0)
        held = held[1:]
    if reader.state is not scan:
        return ""
    reader.pieces.append(held)
    return _stop(reader) or ""


def _stop(reader: CallReader) -> str | None:
    """Ends the scanned part. Returns its text if it is an object without a call, else None."""
    written, what = "".join(reader.pieces), reader.json.what
    if what == "object":
        return None if _emit_call(reader, "{" + written) else "{" + written
    if what == "value":
        reader.arguments.value(_read(written))
    else:
        reader.arguments.outside.append(written)
    return None


def _begin_scan(reader: CallReader, what: str, ends: str, at: int) -> int:
    reader.json = JsonScan(what, ends)
    reader.pieces = []
    reader.state = scan
    return at


def _scanned(reader: CallReader, text: str, at: int) -> int:
    if reader.json.what == "value":
        reader.arguments.value(_read("".join(reader.pieces)))
        reader.state = before_key
        return at
    if reader.json.what == "object":
        written = "{" + "".join(reader.pieces)
        if not _emit_call(reader, written + "}"):
            return _reject_object(reader, written, text, at, at + 1)
    elif not _has_keys(rest := "".join(reader.pieces)):
        reader.arguments.outside.append(rest.removeprefix(","))
    reader.discard_possible_end()
    reader.state = after_object
    return at + 1


def _has_keys(rest: str) -> bool:
    """Returns True if the text after the arguments of an object contains more keys of the object."""
    try:
        return rest.startswith(",") and (not rest.strip(", \n") or isinstance(loads("{" + rest[1:] + "}"), dict))
    except ValueError:
        return False


def _stopped(reader: CallReader, text: str, at: int) -> int:
    """Ends the scanned part at a tag that ends the block."""
    end = _after_block(reader, text, at)
    written = _stop(reader)
    return reader.close(text, end) if written is None else _reject_object(reader, written, text, at, end)


def _reject_object(reader: CallReader, written: str, text: str, at: int, end: int) -> int:
    """Handles an object that is not a call. at, end: start and end of the character or tag after it."""
    if reader.backtrack():
        return at
    return reader.close(written + text[at:], 0) if reader.confirmed else reader.reject(text, end)


def _end_early(reader: CallReader, text: str, at: int) -> int:
    """Ends the block at a tag or at text that is not JSON, even with open brackets."""
    tag, is_open = reader.tag_at(text, at)
    if tag and tag.lastgroup in ("opening", "closing"):
        return reader.close(text, _after_block(reader, text, at))
    if is_open:
        return at
    return at if reader.backtrack() else reader.close(text, at)


def _after_block(reader: CallReader, text: str, at: int) -> int:
    """Returns the position after the end tag of the block if the tag is here."""
    closing = reader.tags.block[1]
    return at + len(closing) if text.startswith(closing, at) else at


def _emit_call(reader: CallReader, text: str) -> bool:
    """Emits the call in an object. Returns False if there is none."""
    try:
        call = loads(text)
        name, arguments = call["name"], call.get("arguments", call.get("parameters"))
        arguments = loads(arguments) if isinstance(arguments, str) and arguments.strip() else arguments or {}
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
        return False
    if any(sign in key for key in call for sign in "<\n"):  # a quote is missing
        return False
    reader.begin(name.encode("utf-8", "replace").decode())
    reader.confirm()
    for key, value in arguments.items():
        reader.arguments.key(key)
        reader.arguments.value(value)
    reader.arguments.end()
    return True


def _read(text: str) -> Any:
    """Returns the parsed value, or the text itself if it is neither JSON nor a Python literal."""
    text = text.strip()
    try:
        return loads(text)
    except ValueError:
        return text


def _character(found: re.Match[str]) -> str:
    high, low, code, other = found.groups()
    if high:
        return chr(0x10000 + ((int(high, 16) & 0x3ff) << 10) + (int(low, 16) & 0x3ff))
    return chr(int(code, 16)) if code else _ESCAPES.get(other, found[0])
