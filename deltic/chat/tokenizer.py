"""Text to token ids and back, to the byte."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import sys
import threading
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer as Backend

from deltic.chat.control_tokens import MARK, ControlTokens, any_of, unmarked
from deltic.chat.tokenizer_files import DEFAULT_TEMPLATE, TokenizerFiles, read_tokenizer_files
from deltic.errors import BusyError, LongPromptError, ModelError, is_panic, show, too_long, valid_text

# The cores belong to the engine; and without a word about it the backend warns whoever forks.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

logger = logging.getLogger(__name__)

_LARGE: Final = 1 << 18
"""Characters from which on texts are encoded one at a time: the backend takes hundreds of bytes for each token."""
_HUGE: Final = 1 << 20
"""Characters from which on the memory that encoding took is given back: the allocator would keep it."""
_SLICE: Final = 1 << 16
_SLACK: Final = 64
"""Tokens by which the slices of a text may differ from the whole, for each cut."""
_PATIENCE: Final = 60.0
"""Seconds that a large text may wait for others."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
_WORD = "a"
_PIECES: Final = 1 << 10
"""Pieces of a text that are encoded in one call."""
_DECOMPOSED = "e\u0301"


@dataclass(frozen=True, slots=True)
class TokenLimit:
    """Tokens that a prompt may have, `spent` of which it has before the text at hand.

    reason: why no more, and what to do. field: where the prompt stands in a request.
    """

    tokens: int = sys.maxsize
    reason: str = ""
    field: str = "prompt"
    spent: int = 0

    def check(self, tokens: int, more: bool = False) -> None:
        """LongPromptError if so many are too many. more: there are more than that, but nobody has counted them."""
        if self.spent + tokens > self.tokens:
            counted = f"more than {self.tokens}" if more else f"{self.spent + tokens}"
            raise LongPromptError(too_long(counted, self.reason), self.field)

    def after(self, spent: int) -> TokenLimit:
        """The same for what comes after so many tokens."""
        return replace(self, spent=self.spent + spent)


UNBOUNDED: Final = TokenLimit()


ENDS = ("<|im_end|>", "<|endoftext|>")
"""Tokens of this family's vocabularies that end an answer, if they are there."""


class Tokenizer:
    """A tokenizer of a model directory. Immutable after construction, so threads may share it. added: tokens
    that no text is cut into, by their text, of which some are `special`. ends: special ones that end an answer."""

    def __init__(self, backend: Backend, special_tokens: Mapping[str, str] | None = None,
                 templates: Mapping[str, str] | None = None) -> None:
        backend.no_truncation()  # training leaves both in the file, and they are no part of what a text's tokens are
        backend.no_padding()
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(templates or {})
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added = {id: token.content for id, token in added.items()}
        self.added = {token.content: id for id, token in added.items()}
        self.special = frozenset(id for id, token in added.items() if token.special)
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=False), max(added, default=-1) + 1)
        self.bos_id = self._named_id("bos_token")
        self.eos_id = self._named_id("eos_token")
        ends = [self.eos_id, *map(backend.token_to_id, ENDS)]
        self.ends = tuple(end for end in dict.fromkeys(ends) if end is not None and end in self.special)
        self._spelled = _byte_reader(backend, self._added)
        self._bytes: dict[int, bytes] = {}
        self._turn = threading.Lock()

    @classmethod
    def from_directory(cls, path: str | Path, tokenizer: Path | None = None, config: Path | None = None) -> Tokenizer:
        """Load tokenizer.json and its neighbours; ModelError names the file that is missing or corrupt. Logs a warning
        where they do not go together. tokenizer, config: files that stand for tokenizer.json and
        tokenizer_config.json."""
        source = tokenizer or Path(path) / "tokenizer.json"
        files = read_tokenizer_files(Path(path), tokenizer, config)
        found = cls.from_files(files, source)
        missing = [text for text in files.added if found.token_to_id(text) is None]
        if missing:
            logger.warning("%s has no tokens for %s, which tokenizer_config.json names: they are read letter by "
                           "letter; save the tokenizer anew with transformers", source,
                           ", ".join(map(show, missing[:5])))
        return found

    @classmethod
    def from_files(cls, files: TokenizerFiles, source: Path) -> Tokenizer:
        """From the texts themselves; ModelError names `source` if they are no tokenizer."""
        with _explained(source):
            return cls(Backend.from_str(files.tokenizer), files.special_tokens, files.templates)

    @property
    def chat_template(self) -> str | None:
        """The source of the default chat template, or None."""
        return self.template_for(None)

    def template_for(self, tools: object) -> str | None:
        """The chat template for a request with these tools: `tool_use` where there is one, else `default`."""
        names = ("tool_use", DEFAULT_TEMPLATE) if tools else (DEFAULT_TEMPLATE,)
        sources = [self.chat_templates[name] for name in names if name in self.chat_templates]
        if sources:
            return sources[0]
        return next(iter(self.chat_templates.values())) if len(self.chat_templates) == 1 else None

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = True, quoted: bool = False,
               bound: TokenLimit = UNBOUNDED) -> list[int]:
        """Token ids of a text; RequestError if it is not valid Unicode or beyond the bound. BusyError if it is large,
        and other large ones have taken too long.

        add_special adds what the tokenizer puts around a raw prompt (often nothing, or a bos token), but not what the
        text has there itself, as one from a chat template may. With
        parse_special off, control tokens spelled in the text are ordinary text; quoted: those with a mark are (see
        `deltic.chat.control_tokens`). Other threads run meanwhile.
        """
        valid_text(text, "prompt")
        self.check_length(unmarked(text) if quoted else text, bound)
        text = text if parse_special else self.controls.ordinary(text)
        with self._room_for(len(text)):
            marked = MARK in text and (quoted or not parse_special)
            ids = self._quoted_ids(text) if marked else self._ids(text)
        if add_special:
            before, after = self.around
            ids = [*before, *ids[len(before) if ids[:len(before)] == before else 0:], *after]
        bound.check(len(ids))
        return ids

    @cached_property
    def around(self) -> tuple[list[int], list[int]]:
        """What a raw prompt begins and ends with. The rule is tokenizer.json's post-processor. As in transformers,
        `add_bos_token` in tokenizer_config.json counts for nothing beside a tokenizer.json."""
        inner = self._ids(_WORD)
        outer = list(self._backend.encode_batch_fast([_WORD], add_special_tokens=True)[0].ids)
        places = [at for at in range(len(outer)) if outer[at:at + len(inner)] == inner]
        start = places[0] if inner and places else len(outer)  # a vocabulary without the word
        return outer[:start], outer[start + len(inner):]

    def check_length(self, text: str, bound: TokenLimit) -> None:
        """LongPromptError if the text is certainly beyond the bound. Counts no more than it takes to know, and nothing
        where the text is short enough to be encoded first."""
        if len(text) <= 2 * (bound.tokens - bound.spent):
            return
        with self._room_for(len(text)):
            count = 0
            for start in range(0, len(text), _SLICE):
                piece = self._backend.encode_batch_fast([text[start:start + _SLICE]], add_special_tokens=False)[0]
                count += max(0, len(piece) - _SLACK)
                bound.check(count, more=True)

    def special_in(self, text: str) -> Iterator[tuple[int, int, int]]:
        """The special tokens that a text spells: id, first character, the one after the last."""
        return ((self._special_ids[match[0]], *match.span()) for match in self._special_pattern.finditer(text))

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of the ids; bytes that are not UTF-8 become U+FFFD."""
        ids = list(ids)
        try:
            known = self._bytes
            spelled = b"".join([known[id] for id in ids if not (skip_special and id in self.special)])
        except KeyError:
            spelled = b"".join(map(self.visible_bytes if skip_special else self.token_bytes, ids))
        return spelled.decode("utf-8", "replace")

    def token_to_id(self, token: str) -> int | None:
        """The id of a token, or None if the vocabulary does not have it."""
        return self._backend.token_to_id(token)

    def token_bytes(self, id: int) -> bytes:
        """The exact bytes that a token stands for; empty for ids past the vocabulary."""
        found = self._bytes.get(id)
        if found is None:
            found = self._bytes[id] = self._spelled(id)
        return found

    def visible_bytes(self, id: int) -> bytes:
        """As `token_bytes`, but empty for special tokens: what a reader of the answer sees."""
        return b"" if id in self.special else self.token_bytes(id)

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def _quoted_ids(self, text: str) -> list[int]:
        """Of a text with marks: what lies between them is encoded by itself."""
        first, *pieces = text.split(MARK)
        ids = self._ids(first)
        for start in range(0, len(pieces), _PIECES):
            behind = [self._seam + piece for piece in pieces[start:start + _PIECES]]
            for found in self._backend.encode_batch_fast(behind, add_special_tokens=False):
                ids += found.ids[self._seam_length:]
        return ids

    def _ids(self, text: str) -> list[int]:
        return list(self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    @contextmanager
    def _room_for(self, characters: int) -> Iterator[None]:
        """Large texts take turns, and leave the memory as it was."""
        if characters < _LARGE:
            yield
            return
        if not self._turn.acquire(timeout=_PATIENCE):
            raise BusyError("other long prompts are being read: try again later", int(_PATIENCE))
        try:
            yield
        finally:
            if characters >= _HUGE:
                _trim_memory()
            self._turn.release()

    @cached_property
    def composes(self) -> bool:
        """Whether text is put into Unicode's composed form, so that its ids spell that."""
        return self.decode(self.encode(_DECOMPOSED)) == unicodedata.normalize("NFC", _DECOMPOSED)

    @cached_property
    def controls(self) -> ControlTokens:
        """The tokens that client text must not become."""
        splitter = self._backend.pre_tokenizer

        def cuts(text: str) -> list[int]:
            return [start for _, (start, _) in splitter.pre_tokenize_str(text)] if splitter else []
        return ControlTokens(self.added, self.special, cuts)

    @cached_property
    def _seam(self) -> str:
        """What a piece of a text is put behind where the tokenizer begins each text with a space of its own."""
        return "" if self.decode(self._ids(_WORD)) == _WORD else "\n"

    @cached_property
    def _seam_length(self) -> int:
        return len(self._ids(self._seam)) if self._seam else 0

    @cached_property
    def _special_ids(self) -> dict[str, int]:
        return {self._added[id]: id for id in self.special}

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        return any_of(self._special_ids)


def _trim_memory() -> None:
    """Give free memory back to the system, where the allocator knows how."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)


def _byte_reader(backend: Backend, added: Mapping[int, str]) -> Callable[[int], bytes]:
    """How a token is turned into bytes, by the kind of the tokenizer's decoder."""
    kinds = set(_decoder_kinds(json.loads(backend.decoder.__getstate__()))) if backend.decoder else set()
    if "ByteLevel" not in kinds and kinds & {"ByteFallback", "Metaspace"}:
        # added tokens, too: one that is normalised is found with the space that the normaliser puts before it
        return lambda id: _byte_fallback(backend.id_to_token(id) or "")
    if "ByteLevel" in kinds:
        return lambda id: added[id].encode() if id in added else _byte_level(backend.id_to_token(id) or "")
    return lambda id: added[id].encode() if id in added else _by_difference(backend, id)


def _decoder_kinds(state: Any) -> Iterable[str]:
    yield state["type"]
    for part in state.get("decoders", ()):
        yield from _decoder_kinds(part)


def _byte_level(token: str) -> bytes:
    try:
        return bytes(map(_BYTE_OF.__getitem__, token))
    except KeyError:
        return token.encode()


@contextmanager
def _explained(source: Path) -> Iterator[None]:
    """What the backend raises becomes a ModelError that names the file: bare Exceptions, and panics, which are none."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ModelError(f"{source} is not a valid tokenizer ({show(str(error))}); download the file again") from error


def _byte_fallback(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()


def _by_difference(backend: Backend, id: int) -> bytes:
    """What the token adds after another one; decoders may treat the first token of a text apart."""
    if backend.id_to_token(id) is None:
        return b""
    alone, twice = (backend.decode([id] * count, skip_special_tokens=False) for count in (1, 2))
    return (twice[len(alone):] if twice.startswith(alone) else alone).encode()


def byte_letters() -> dict[int, str]:
    """GPT-2's table: printable bytes stand for themselves, the others for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


_BYTE_OF = {letter: byte for byte, letter in byte_letters().items()}
