"""Reads message contents as agents keep them in their histories.

Clients send back the blocks, parts and items of other servers, which chat templates do not know. The text of these is
read; a part without text becomes a short placeholder and is named in a header, so that a session never fails because of
its history. In the user's newest message, an image for a model without vision, an unreadable file and a misspelt type
are refused.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from time import monotonic
from typing import Any, Final

from deltic.chat.history_store import OwnedEntries
from deltic.config import Limits
from deltic.errors import RequestError, show
from deltic.vision.decoder_process import DecoderProcess, pdf_text

Part = Mapping[str, Any]

_TEXTS: Final[Mapping[str, str]] = {
    "text": "text", "input_text": "text", "output_text": "text", "summary_text": "text", "refusal": "refusal"}
"""Types of text parts, each with the field that holds the text."""
_THOUGHTS: Final = ("thinking", "reasoning", "redacted_thinking", "reasoning_text")
_PICTURES: Final = ("image", "image_url", "input_image", "video", "video_url")
_SOUNDS: Final = ("audio", "audio_url", "input_audio")
_FILES: Final[Mapping[str, str]] = {"document": "source", "file": "file", "input_file": ""}
"""Types of file parts, each with the field that holds the file."""
_KNOWN: Final = (*_TEXTS, *_THOUGHTS, *_PICTURES, *_SOUNDS, *_FILES, "search_result")
_HEADS: Final = ("title", "context", "source", "filename")
"""Fields of a file or search result that are put before its text."""
_READABLE: Final = frozenset((
    "title", "name", "tool_name", "description", "url", "query", "queries", "command", "commands", "code", "pattern",
    "path", "file", "file_path", "filename", "text", "content", "output", "outputs", "stdout", "stderr", "results",
    "summary", "message", "error", "error_code", "logs", "tool", "tools"))
"""Fields of unknown parts from which text is read."""
_SPOKEN: Final = frozenset(("action", "arguments", "input", "operation"))
"""Fields of unknown parts in which every text is read, at any depth."""
_DEEPEST: Final = 16
_MISSPELT: Final = 0.85
"""difflib ratio from which a type counts as a misspelling of a known type."""
_LONGEST: Final = 64
_MOST_TYPES: Final = 100
"""Limits for the types that are compared: their length and their number."""

_MOST_CACHED: Final = 16_000_000
"""Total characters of the cached texts."""
_ENTRY_COST: Final = 1000
"""Characters that each cache entry counts in addition to its text."""
_ALL_DOCUMENTS: Final = 3
"""Time limit for all documents of a request, as a multiple of the limit for one document."""

Texts = Mapping[bytes, str | RequestError]
"""Texts of documents keyed by `digest`, or the error for a document that cannot be read."""
TextOf = Callable[[bytes], str | RequestError | None]
"""Function that returns the text of a document by its digest; None if the document was not read."""


class ContentReader:
    """Reads the contents of a request's messages.

    sees: the model has vision. fetches: images may be URLs. text_of: returns the text of a document. ignored: names of
    the parts that became placeholders.
    """

    def __init__(self, sees: bool, fetches: bool, text_of: TextOf) -> None:
        self.ignored: list[str] = []
        self._sees = sees
        self._fetches = fetches
        self._text_of_document = text_of
        self._meant: dict[str, str | None] = {}

    def messages(self, messages: Sequence[Any]) -> list[Any]:
        """Returns the messages with texts and images only. Raises RequestError for an unreadable part of the newest
        message if that is a user message."""
        last = len(messages) - 1
        return [self._message(message, f"messages[{index}]", index == last) if isinstance(message, dict) else message
                for index, message in enumerate(messages)]

    def _message(self, message: dict[str, Any], path: str, last: bool) -> dict[str, Any]:
        name = "content" if message.get("content") is not None else "contents"
        content, role = message.get(name), message.get("role")
        if isinstance(message.get("tool_calls"), list):
            message = {**message, "tool_calls": [*map(_call, message["tool_calls"])]}
        if not isinstance(content, list):
            return message
        parts = [self._part(part, f"{path}.{name}[{index}]", last and role == "user")
                 if isinstance(part, dict) and isinstance(part.get("type"), str) else part
                 for index, part in enumerate(content)]
        thoughts = "".join(thought_of(part) for part in content if role == "assistant" and isinstance(part, dict))
        reasoning = {"reasoning_content": thoughts} if thoughts and not message.get("reasoning_content") else {}
        return {**message, name: parts, **reasoning}

    def _part(self, part: Part, path: str, new: bool) -> Part:
        kind: str = part["type"]
        if kind in _TEXTS:
            return part if kind in ("text", "refusal") else {"type": "text", "text": part.get(_TEXTS[kind])}
        if kind in _THOUGHTS:
            return _text("")
        if kind in _KNOWN:
            try:
                found = self._read(part, kind, path)
                if new or self._fetches or not _is_behind_url(found):
                    return found
            except RequestError:
                if new:
                    raise
        elif new and (meant := self._meaning(kind)):
            raise RequestError(f"{path} has the unknown type {show(kind)}: do you mean {meant!r}?", f"{path}.type")
        texts = "\n".join(text for text in _texts(part) if text.strip())
        shown = kind[:_LONGEST]
        if kind in _KNOWN or not texts:
            self.ignored.append(f"content.{shown}")
            return _text(f"[{shown}: not shown] {texts}".rstrip())
        return _text(f"[{shown}] {texts}")

    def _meaning(self, kind: str) -> str | None:
        """Returns the known type that `kind` misspells, or None."""
        if kind not in self._meant and len(self._meant) < _MOST_TYPES:
            found = difflib.get_close_matches(kind[:_LONGEST], _KNOWN, 1, _MISSPELT)
            self._meant[kind] = found[0] if found else None
        return self._meant.get(kind)

    def _read(self, part: Part, kind: str, path: str) -> Part:
        if kind in _PICTURES:
            return self._picture(part, kind, path)
        if kind in _FILES:
            return self._file(part, kind, path)
        if kind == "search_result":
            return _text(_headed(part, self._text_within(part.get("content"), f"{path}.content"), path))
        raise RequestError(f"{path} is of type {show(kind)}: sounds are not read here", path)

    def _picture(self, part: Part, kind: str, path: str) -> Part:
        """Returns an image in the form of chat requests."""
        source = part.get("source")
        if not self._sees:
            raise RequestError(f"{path} is of type {show(kind)}, but this model reads text only", path)
        if part.get("file_id") or (isinstance(source, dict) and source.get("type") == "file"):
            raise RequestError(f"{path} names a file by its id, and no files are kept here: send it as a data URL",
                                   path)
        if isinstance(source, dict) and source.get("type") == "base64":
            given = f"data:{source.get('media_type')};base64,{source.get('data')}"
            return {"type": "image_url", "image_url": {"url": given}}
        if kind == "image" and isinstance(source, dict):
            return {"type": "image_url", "image_url": {"url": source.get("url")}}
        if kind == "input_image":
            return {"type": "image_url", "image_url": {"url": part.get("image_url")}}
        return part

    def _file(self, part: Part, kind: str, path: str) -> Part:
        """Returns the text of a file, preceded by its title, or returns an image."""
        place, at = _FILES[kind], path
        source = part.get(place) if place else part
        path = f"{path}.{place}" if place else path
        if not isinstance(source, dict):
            raise RequestError(f"{path} must be an object, not {show(source)}", path)
        heads = {**source, **part}
        form = source.get("type")
        if form == "text":
            return _text(_headed(heads, _is_text(source.get("data"), f"{path}.data"), at))
        if form == "content":
            return _text(_headed(heads, self._text_within(source.get("content"), f"{path}.content"), at))
        media, data = _data_of(source, path)
        if media.startswith("image/"):
            url = f"data:{media};base64,{base64.b64encode(data).decode()}"
            return self._picture({"type": "image_url", "image_url": {"url": url}}, "image_url", path)
        return _text(_headed(heads, self._text_of(data, path), at))

    def _text_of(self, data: bytes, path: str) -> str:
        if not _is_pdf(data):
            try:
                text = data.decode("utf-8-sig")
            except UnicodeDecodeError:
                text = "\0"
            if "\0" in text or not text:
                raise RequestError(f"{path} is neither a PDF document nor text in UTF-8", path)
            return text
        found = self._text_of_document(digest(data))
        if found is None:
            raise RequestError(f"{path} and the documents before it take too long to read (document_seconds): send "
                               "fewer", path)
        if isinstance(found, RequestError):
            raise RequestError(f"{path} {found}", path)
        return found

    def _text_within(self, content: Any, path: str) -> str:
        """Returns a text, or the joined texts of parts."""
        if isinstance(content, str):
            return content
        if not isinstance(content, list):
            raise RequestError(f"{path} must be text or a list of blocks, not {show(content)}", path)
        return "\n\n".join(self._block(block, f"{path}[{index}]") for index, block in enumerate(content))

    def _block(self, block: Any, path: str) -> str:
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str):
            raise RequestError(f"{path} must be an object with a type, not {show(block)}", path)
        if kind in _TEXTS:
            return _is_text(block.get(_TEXTS[kind]), f"{path}.{_TEXTS[kind]}")
        raise RequestError(f"{path} is of type {show(kind)}: within a document only texts are read", path)


def _call(call: Any) -> Any:
    """Converts a call of a tool that takes a text into a function call with the argument `input`."""
    custom = call.get("custom") if isinstance(call, dict) and call.get("type") == "custom" else None
    if not isinstance(custom, dict):
        return call
    rest = {name: value for name, value in call.items() if name not in ("type", "custom")}
    return {**rest, "type": "function", "function": {
        "name": custom.get("name"), "arguments": {"input": custom.get("input")}}}


def text_of(part: Part) -> str | None:
    """Returns the text of a text part."""
    text = part.get(_TEXTS.get(part.get("type", ""), ""))
    return text if isinstance(text, str) else None


def thought_of(part: Part) -> str:
    """Returns the thinking in a part of an answer. A summary does not count as thinking."""
    fields = ("thinking", "reasoning", "text", "content") if part.get("type") in _THOUGHTS else ()
    return "".join(text for name in fields for text in _texts(part.get(name)))


def _is_behind_url(part: Part) -> bool:
    """Returns True if an image has to be fetched."""
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, dict) else given
    return isinstance(url, str) and url.startswith(("http://", "https://"))


def documents_in(value: Any, depth: int = 0) -> Iterator[bytes]:
    """Yields the PDF documents in the parts of messages or items."""
    if isinstance(value, list) and depth < _DEEPEST:
        for item in value:
            yield from documents_in(item, depth + 1)
    elif isinstance(value, dict) and depth < _DEEPEST:
        kind = value.get("type")
        if isinstance(kind, str) and kind in _FILES:
            source = value.get(_FILES[kind]) if _FILES[kind] else value
            with suppress(RequestError):
                data = _data_of(source, "")[1] if isinstance(source, dict) else b""
                if _is_pdf(data):
                    yield data
        for inner in value.values():
            if isinstance(inner, dict | list):
                yield from documents_in(inner, depth + 1)


def _is_pdf(data: bytes) -> bool:
    return b"%PDF-" in data[:1024]


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _is_text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{path} must be text, not {show(value)}", path)
    return value


def _headed(part: Part, text: str, path: str) -> str:
    names = (name for name in _HEADS if part.get(name) is not None and not isinstance(part[name], dict))
    return "\n".join((*(_is_text(part[name], f"{path}.{name}") for name in names), text))


def _data_of(source: Part, path: str) -> tuple[str, bytes]:
    """Returns the media type and the content of a file."""
    given = source.get("data", source.get("file_data"))
    if not isinstance(given, str):
        raise RequestError(f"{path} has no data: files are read that are sent whole, in base64", path)
    head, text = given.split(",", 1) if given.startswith("data:") and "," in given else ("", given)
    media = head.removeprefix("data:").partition(";")[0] or source.get("media_type")
    try:
        return media if isinstance(media, str) else "", base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{path} has data that is no valid base64: {error}", path) from error


def _texts(value: Any, all_fields: bool = False, depth: int = 0) -> Iterator[str]:
    """Yields the readable texts of a part. all_fields: reads all of its fields."""
    if isinstance(value, str):
        if not value.startswith("data:"):
            yield value
    elif isinstance(value, bool | int | float):
        yield str(value)
    elif isinstance(value, list) and depth < _DEEPEST:
        for item in value:
            yield from _texts(item, all_fields, depth + 1)
    elif isinstance(value, dict) and depth < _DEEPEST:
        for name, inner in value.items():
            if all_fields:
                yield from (f"{name}: {text}" for text in _texts(inner, True, depth + 1))
            elif name in _SPOKEN or name in _READABLE:
                yield from _texts(inner, name in _SPOKEN, depth + 1)


# Documents


class DocumentTexts:
    """Caches the texts of PDF documents, because agents send them with every turn. Thread-safe.

    Each owner has its own entries: otherwise the time that a document takes would reveal that another owner has it. If
    there are too many entries, the owner with the most loses its oldest.
    """

    def __init__(self) -> None:
        self._kept: OwnedEntries[str | RequestError] = OwnedEntries(_MOST_CACHED)
        self._lock = threading.Lock()

    def read(self, owner: str | None, documents: Sequence[bytes], limits: Limits, process: DecoderProcess) -> Texts:
        """Returns the texts of those documents of a request that can be read within its time limit. process: from
        `reader_process`; it is closed at the end, and stopping it ends the work."""
        end = monotonic() + _ALL_DOCUMENTS * limits.document_seconds
        found = dict[bytes, str | RequestError]()
        with process:
            for name, data in {digest(data): data for data in documents}.items():
                text = self._text(owner, name, data, limits, end - monotonic(), process)
                if text is not None:
                    found[name] = text
        return found

    def known(self, owner: str | None, name: bytes) -> str | RequestError | None:
        """Returns the text of a cached document, or None."""
        with self._lock:
            return self._kept.get(owner, name)

    def _text(self, owner: str | None, name: bytes, data: bytes, limits: Limits, seconds: float,
              process: DecoderProcess) -> str | RequestError | None:
        known = self.known(owner, name)
        if known is not None or seconds <= 0 or process.closed:
            return known
        hurried = seconds < limits.document_seconds
        found = _read_pdf(data, replace(limits, document_seconds=max(seconds, 0.01)) if hurried else limits, process)
        if isinstance(found, str) or not (hurried or process.closed):  # with more time it may be readable
            with self._lock:
                self._kept.put(owner, name, found, _cached_size(found))
        return found


def digest(data: bytes) -> bytes:
    """Returns the cache key of a document."""
    return blake2b(data, digest_size=32).digest()


def _cached_size(found: str | RequestError) -> int:
    return _ENTRY_COST + (len(found) if isinstance(found, str) else 0)


def _read_pdf(data: bytes, limits: Limits, process: DecoderProcess) -> str | RequestError:
    try:
        return pdf_text(data, limits, "it", process)
    except RequestError as error:
        return RequestError(str(error).removeprefix("it "))
