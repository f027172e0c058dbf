"""Reads tokenizer files, encodes text to token ids and decodes ids to exact bytes."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import sys
import threading
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer as Backend

from deltic.chat.control_tokens import MARK, ControlTokens, any_of, unmarked
from deltic.config.families import GPT2, SPLITTERS, Splitter, splitter_of
from deltic.errors import BusyError, LongPromptError, ModelError, is_panic, show, too_long, valid_text

# The engine uses the cores. Without this, the backend also warns after a fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

logger = logging.getLogger(__name__)

_LARGE: Final = 1 << 18
"""Characters from which texts are encoded one at a time, because the backend takes hundreds of bytes per token."""
_HUGE: Final = 1 << 20
"""Characters from which the encoding's memory is returned to the system; the allocator would keep it."""
_LARGE_FILE: Final = 1 << 20
"""Length from which a tokenizer.json's parsing memory is returned to the system."""
_SLICE: Final = 1 << 16
_SLACK: Final = 64
"""Number of tokens, for each cut, by which slices of a text may differ from the whole text."""
_PATIENCE: Final = 60.0
"""Seconds that a large text may wait for other large texts."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
_WORD = "a"
_PIECES: Final = 1 << 10
"""Number of pieces of a text that are encoded in one call."""
_DECOMPOSED = "e\u0301"


@dataclass(frozen=True, slots=True)
class TokenLimit:
    """The maximum number of prompt tokens. `spent`: number of tokens before the current text.

    reason: the reason for the limit, and the remedy. field: field of the prompt in a request.
    """

    tokens: int = sys.maxsize
    reason: str = ""
    field: str = "prompt"
    spent: int = 0

    def check(self, tokens: int, more: bool = False) -> None:
        """Raises LongPromptError if there are too many tokens. more: `tokens` is a lower bound."""
        if self.spent + tokens > self.tokens:
            counted = f"more than {self.tokens}" if more else f"{self.spent + tokens}"
            raise LongPromptError(too_long(counted, self.reason), self.field)

    def after(self, spent: int) -> TokenLimit:
        """Returns the limit for the text after `spent` further tokens."""
        return replace(self, spent=self.spent + spent)


UNBOUNDED: Final = TokenLimit()


ENDS = ("<|im_end|>", "<|endoftext|>")
"""Tokens of Qwen vocabularies that end an answer."""


class Tokenizer:
    """The tokenizer of a model. Thread-safe.

    added: ids of the added tokens by text; some of them are `special`. ends: special tokens that end an answer.
    """

    def __init__(self, backend: Backend, special_tokens: Mapping[str, str] | None = None,
                 templates: Mapping[str, str] | None = None) -> None:
        backend.no_truncation()  # some files keep this setting of the training
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
        """Loads the tokenizer files. Raises ModelError for a missing or corrupt one. Logs a warning if they mismatch.

        tokenizer, config: files in place of tokenizer.json and tokenizer_config.json.
        """
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
        """Creates a tokenizer from its files' texts. Raises ModelError that names `source` if they are invalid."""
        with _model_errors(source):
            found = cls(Backend.from_str(files.tokenizer), files.special_tokens, files.templates)
        if len(files.tokenizer) >= _LARGE_FILE:
            _trim_memory()  # 248,000 tokens take 230 MiB: parsing alone takes 145
        return found

    @property
    def chat_template(self) -> str | None:
        return self.template_for(None)

    def template_for(self, tools: object) -> str | None:
        """Returns the chat template for a request: `tool_use` with tools if there is one, else `default`."""
        names = ("tool_use", DEFAULT_TEMPLATE) if tools else (DEFAULT_TEMPLATE,)
        sources = [self.chat_templates[name] for name in names if name in self.chat_templates]
        if sources:
            return sources[0]
        return next(iter(self.chat_templates.values())) if len(self.chat_templates) == 1 else None

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = True, quoted: bool = False,
               bound: TokenLimit = UNBOUNDED) -> list[int]:
        """Encodes a text without holding the GIL. Raises RequestError if it is not valid Unicode or beyond the bound.

        Raises BusyError if the text is large and waits too long for other large texts.

        add_special: adds the tokenizer's tokens around a raw prompt, such as bos, unless the text already has them.
        parse_special: False makes all control tokens in the text ordinary text.
        quoted: control tokens with a mark are ordinary text (see `deltic.chat.control_tokens`).
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
        """The ids before and after a raw prompt, according to tokenizer.json's post-processor.

        As in transformers, tokenizer.json overrides `add_bos_token` in tokenizer_config.json.
        """
        inner = self._ids(_WORD)
        outer = list(self._backend.encode_batch_fast([_WORD], add_special_tokens=True)[0].ids)
        places = [at for at in range(len(outer)) if outer[at:at + len(inner)] == inner]
        start = places[0] if inner and places else len(outer)  # else the vocabulary lacks the word
        return outer[:start], outer[start + len(inner):]

    def check_length(self, text: str, bound: TokenLimit) -> None:
        """Raises LongPromptError if the text is certainly beyond the bound. Encodes as few slices as possible."""
        if len(text) <= 2 * (bound.tokens - bound.spent):
            return
        with self._room_for(len(text)):
            count = 0
            for start in range(0, len(text), _SLICE):
                piece = self._backend.encode_batch_fast([text[start:start + _SLICE]], add_special_tokens=False)[0]
                count += max(0, len(piece) - _SLACK)
                bound.check(count, more=True)

    def special_in(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Yields the special tokens in a text as id, start and end."""
        return ((self._special_ids[match[0]], *match.span()) for match in self._special_pattern.finditer(text))

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Decodes ids; bytes that are not UTF-8 become U+FFFD."""
        if skip_special:
            ids = [id for id in ids if id not in self.special]
        return self.bytes_of(list(ids)).decode("utf-8", "replace")

    def bytes_of(self, ids: Sequence[int]) -> bytes:
        """Returns the exact bytes of tokens, including special tokens."""
        try:
            return b"".join(map(self._bytes.__getitem__, ids))
        except KeyError:
            return b"".join(map(self.token_bytes, ids))

    def token_to_id(self, token: str) -> int | None:
        """Returns the id of a token; None if it is not in the vocabulary."""
        return self._backend.token_to_id(token)

    def token_bytes(self, id: int) -> bytes:
        """Returns the exact bytes of a token; empty for ids beyond the vocabulary."""
        found = self._bytes.get(id)
        if found is None:
            found = self._bytes[id] = self._spelled(id)
        return found

    def visible_bytes(self, id: int) -> bytes:
        """Returns the same as `token_bytes`, but nothing for special tokens."""
        return b"" if id in self.special else self.token_bytes(id)

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def _quoted_ids(self, text: str) -> list[int]:
        """Encodes the pieces between marks separately."""
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
        """Encodes large texts one at a time, and returns the memory of huge ones."""
        if characters < _LARGE:
            yield
            return
        if not self._turn.acquire(timeout=_PATIENCE):
            raise BusyError("other long prompts are being encoded: try again later", int(_PATIENCE))
        try:
            yield
        finally:
            if characters >= _HUGE:
                _trim_memory()
            self._turn.release()

    @cached_property
    def composes(self) -> bool:
        """True if the tokenizer normalises text to Unicode's composed form."""
        return self.decode(self.encode(_DECOMPOSED)) == unicodedata.normalize("NFC", _DECOMPOSED)

    @cached_property
    def controls(self) -> ControlTokens:
        """The control tokens that client text must not be encoded as."""
        splitter = self._backend.pre_tokenizer

        def cuts(text: str) -> list[int]:
            return [start for _, (start, _) in splitter.pre_tokenize_str(text)] if splitter else []
        return ControlTokens(self.added, self.special, cuts)

    @cached_property
    def _seam(self) -> str:
        """A prefix for pieces of a text, if the tokenizer puts a space before each text."""
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
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)


def _byte_reader(backend: Backend, added: Mapping[int, str]) -> Callable[[int], bytes]:
    """Returns the function from ids to bytes that corresponds to the tokenizer's decoder."""
    kinds = set(_decoder_kinds(json.loads(backend.decoder.__getstate__()))) if backend.decoder else set()
    if "ByteLevel" not in kinds and kinds & {"ByteFallback", "Metaspace"}:
        # also for added tokens: normalised tokens include the space that the normaliser puts before them
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
def _model_errors(source: Path) -> Iterator[None]:
    """Converts errors and panics of the backend to a ModelError that names the file."""
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
    """Returns the text that a token adds after another token: decoders may treat the first token differently."""
    if backend.id_to_token(id) is None:
        return b""
    alone, twice = (backend.decode([id] * count, skip_special_tokens=False) for count in (1, 2))
    return (twice[len(alone):] if twice.startswith(alone) else alone).encode()


def byte_letters() -> dict[int, str]:
    """Returns GPT-2's table: printable bytes map to themselves, other bytes to characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


_BYTE_OF = {letter: byte for byte, letter in byte_letters().items()}


DEFAULT_TEMPLATE = "default"
VOCABULARY, MERGES = "vocab.json", "merges.txt"
_MAX_BYTES = 256 << 20  # the largest tokenizer files have some tens of MB
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The files of a model directory's tokenizer.

    tokenizer: the text of tokenizer.json. special_tokens: template variables (`eos_token` ...) and their text.
    templates: chat templates by name. added: further tokens that tokenizer_config.json names.
    """

    tokenizer: str
    special_tokens: Mapping[str, str]
    templates: Mapping[str, str]
    added: tuple[str, ...] = ()


def read_tokenizer_files(directory: Path, tokenizer: Path | None = None, config_file: Path | None = None
                         ) -> TokenizerFiles:
    """Reads tokenizer.json (or vocabulary and merges in its place), tokenizer_config.json and chat templates.

    tokenizer, config_file: files in place of tokenizer.json and tokenizer_config.json. Raises ModelError that names a
    missing or unreadable file.
    """
    path = tokenizer or directory / "tokenizer.json"
    for given in (tokenizer, config_file):
        if given is not None and not given.is_file():
            raise ModelError(f"there is no file {given}: name the tokenizer's file")
    config = _read_json(config_file or directory / "tokenizer_config.json")
    whole = _read_text(path) if path.is_file() else _tokenizer_json(directory, config)
    if whole is None:
        raise ModelError(f"{directory} has no tokenizer.json: copy it from the model's repository, "
                         "or name a directory that holds the complete model")
    return TokenizerFiles(whole, _special_tokens(config), _templates(directory, config), _added(config))


def _tokenizer_json(directory: Path, config: Mapping[str, Any]) -> str | None:
    """Makes a tokenizer.json from vocab.json and merges.txt of a byte-level BPE. Returns None if a file is missing or
    the pre-tokenizer is unknown."""
    if not all((directory / name).is_file() for name in (VOCABULARY, MERGES)):
        return None
    splitter = _splitter(_read_json(directory / "config.json"), config)
    if splitter is None:
        return None
    vocabulary = _read_json(directory / VOCABULARY)
    if not all(type(id) is int for id in vocabulary.values()):
        raise ModelError(f"{directory / VOCABULARY} must hold token ids by token; download the file again")
    lines = _read_text(directory / MERGES).split("\n")
    merges = [line for line in lines if line and not line.startswith("#version")]
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": splitter.whole,
             "vocab": vocabulary, "merges": merges}
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": _added_tokens(config, directory),
        "normalizer": splitter.normalizer, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splitter.cuts]},
        "post_processor": {**GPT2, "use_regex": False}, "decoder": GPT2, "model": model}, ensure_ascii=False)


def _splitter(model: Mapping[str, Any], config: Mapping[str, Any]) -> Splitter | None:
    if config.get("tokenizer_class") in ("GPT2Tokenizer", "GPT2TokenizerFast"):
        return SPLITTERS["gpt-2"]
    inner = model.get("text_config")
    kind = (inner if isinstance(inner, dict) else {}).get("model_type") or model.get("model_type")
    return splitter_of(kind) if isinstance(kind, str) else None


def _added_tokens(config: Mapping[str, Any], directory: Path) -> list[dict[str, Any]]:
    """Returns the tokens outside the vocabulary, by ascending id."""
    found: dict[int, dict[str, Any]] = {}
    for content, number in _read_json(directory / "added_tokens.json").items():
        found[number] = {"content": content, "special": True}
    decoder = config.get("added_tokens_decoder")
    for id, token in (decoder.items() if isinstance(decoder, dict) else ()):
        if str(id).isdecimal() and isinstance(token, dict) and isinstance(token.get("content"), str):
            found[int(id)] = token
    return [{"id": id, "content": token["content"], **{flag: bool(token.get(flag)) for flag in _FLAGS}}
            for id, token in sorted(found.items())]


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ModelError(f"cannot read {path}: it has more than {_MAX_BYTES >> 20} MiB, which no tokenizer file "
                             "has; download the file again")
        return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read {path}: {error}; download the file again") from error


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ModelError(f"{path} has a lone surrogate, which is not valid Unicode; download the file again") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}); download the file again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object; download the file again")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        extra = config.get(key)
        named |= extra if isinstance(extra, dict) else {}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _added(config: Mapping[str, Any]) -> tuple[str, ...]:
    decoder = config.get("added_tokens_decoder")
    named = [*decoder.values()] if isinstance(decoder, dict) else []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = config.get(key)
        named += more if isinstance(more, list) else []
    texts = [token.get("content") if isinstance(token, dict) else token for token in named]
    return tuple(dict.fromkeys(text for text in texts if isinstance(text, str)))


def _templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns chat templates. Later sources win, as in transformers: config, chat_template.json, chat_template.jinja,
    further files."""
    found = _named_templates(config.get("chat_template"))
    found |= _named_templates(_read_json(directory / "chat_template.json").get("chat_template"))
    if (directory / "chat_template.jinja").is_file():
        found[DEFAULT_TEMPLATE] = _read_text(directory / "chat_template.jinja")
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = _read_text(path)
    return found


def _named_templates(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    if isinstance(value, list):
        pairs = [(entry.get("name"), entry.get("template")) for entry in value if isinstance(entry, dict)]
    else:
        pairs = list(value.items()) if isinstance(value, dict) else []
    return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
