"""Texts to items: prompts, special tokens, pairs, and what is too long.

Control tokens that a text spells are ordinary text, as in chat; those of the model's own prompts and templates stay.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from deltic.chat.control_tokens import ControlTokens
from deltic.embeddings.types import Item
from deltic.errors import LongPromptError, ModelError, RequestError, is_panic, show, valid_text
from deltic.params import common_length

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_CHARACTERS: Final = 32
"""Characters for each token that may be used, of which a text is looked at first: most tokens have four or five."""


def backend_of(stored: str, source: Path) -> Backend:
    """The tokenizer that was stored as this JSON; ModelError names the file that it comes from."""
    try:
        return Backend.from_str(stored)
    except BaseException as error:  # bare Exceptions, and panics, which are none
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ModelError(f"{source} has not a valid tokenizer ({show(str(error))}); download it again") from error


class EncoderTokenizer:
    """A model's tokenizer. Threads may share it. max_length: tokens of an item. lower: texts are made lower case."""

    def __init__(self, backend: Backend, max_length: int, lower: bool = False) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend, self.max_length, self._lower = backend, max_length, lower
        added = backend.get_added_tokens_decoder()
        self._special = {id for id, token in added.items() if token.special}
        self._controls = ControlTokens({token.content: id for id, token in added.items()}, self.special, self._cuts)
        if max_length <= backend.num_special_tokens_to_add(is_pair=True):
            raise ModelError(f"max_length of {max_length} leaves no room for a text beside the special tokens")

    @classmethod
    def read(cls, path: Path, max_length: int, lower: bool = False) -> EncoderTokenizer:
        """From tokenizer.json; ModelError if there is none."""
        if not path.is_file():
            raise ModelError(f"{path} is absent: copy it from the model's repository, or name a directory that holds "
                             "the complete model")
        try:
            stored = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path} cannot be read ({error}); download it again") from error
        return cls(backend_of(stored, path), max_length, lower)

    @property
    def vocab_size(self) -> int:
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def kinds(self) -> int:
        """Token types that the parts of a pair have."""
        return max(self._backend.encode("a", "b").type_ids, default=0) + 1

    @property
    def special(self) -> frozenset[int]:
        """Ids of special tokens."""
        return frozenset(self._special)

    def token(self, id: int) -> str:
        """How the vocabulary writes a token."""
        return self._backend.id_to_token(id) or ""

    def items(self, texts: Sequence[str], prompt: str = "", truncate: bool = True, field: str = "input",
              start: int | None = 0, most: int | None = None) -> list[Item]:
        """An item for each text behind the prompt. What is too long is cut at its end, or LongPromptError says so;
        RequestError names a text that is no valid Unicode, or has no tokens. field: where the texts stand in a request,
        from the place `start` on; None: it is the only one. most: tokens of an item, if fewer than the model reads."""
        names = [field if start is None else f"{field}[{start + index}]" for index in range(len(texts))]
        for name, text in zip(names, texts, strict=True):
            valid_text(text, name)
        special = self._backend.num_special_tokens_to_add(is_pair=False)
        room = min(self.max_length, most or self.max_length) - special
        if room < 1:
            raise RequestError(f"{most} tokens leave no room for a text beside the model's {special} special tokens",
                               field)
        encoded = self._encode(texts, room, prompt)
        read = self._prompt_tokens(prompt) if prompt else 0
        found = []
        for name, encoding in zip(names, encoded, strict=True):
            cut = len(encoding) > room
            if cut and not truncate:
                raise self._too_long(len(encoding), name)
            encoding.truncate(room)
            item = self._item(self._backend.post_process(encoding), read, cut)
            if not len(item):
                raise RequestError(f"{name} is empty, and this model has no special tokens to put around it: leave it "
                                   "out", name)
            found.append(item)
        return found

    def pairs(self, query: str, documents: Sequence[str], truncate: bool = True, field: str = "documents"
              ) -> list[Item]:
        """An item for each document, which comes behind the query. What is too long is cut: of a pair always the part
        that is longer, token by token."""
        valid_text(query, "query")
        for index, text in enumerate(documents):
            valid_text(text, f"{field}[{index}]")
        room = self.max_length - self._backend.num_special_tokens_to_add(is_pair=True)
        first, = self._encode([query], room)
        ids, found = len(first), []
        for index, second in enumerate(self._encode(documents, room)):
            asked, told = ids, len(second)
            if cut := asked + told > room:
                if not truncate:
                    raise self._too_long(asked + told, f"{field}[{index}]")
                asked, told = _shares(asked, told, room)
            start, = self._encode([query], room) if asked < len(first) else [first]
            start.truncate(asked)
            second.truncate(told)
            found.append(self._item(self._backend.post_process(start, second), 0, cut))
        return found

    def raw(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids without special tokens around them."""
        return [list(encoding.ids) for encoding in self._backend.encode_batch_fast(list(texts),
                                                                                      add_special_tokens=False)]

    def framed(self, before: Sequence[int], head: str, documents: Sequence[str], after: Sequence[int],
               truncate: bool = True, field: str = "documents") -> list[Item]:
        """Items of a document each, behind the ids and the text that all begin with, before the ids that all end with.
        What is too long is cut at the document's end."""
        for index, text in enumerate((head, *documents)):
            valid_text(text, f"{field}[{index - 1}]" if index else "query")
        room = self.max_length - len(before) - len(after)
        if room < 1:
            raise RequestError(f"the model reads {self.max_length} tokens, which leave none for a document", field)
        texts = [head, *(head + text for text in documents)]
        start, *encoded = (encoding.ids for encoding in self._encode(texts, room))
        found = []
        for index, ids in enumerate(encoded):
            if len(ids) > room and not truncate:
                raise self._too_long(len(before) + len(ids) + len(after), f"{field}[{index}]")
            shared = len(before) + common_length(start, ids)
            found.append(Item([*before, *ids[:room], *after], prompt=shared, cut=len(ids) > room))
        return found

    def from_ids(self, ids: Sequence[int], field: str) -> Item:
        """An item of ids that a client made; RequestError if the model has no such tokens, or not so many positions."""
        if not ids:
            raise RequestError(f"{field} is empty: give at least one token", field)
        wrong = next((id for id in ids if not 0 <= id < self.vocab_size), None)
        if wrong is not None:
            raise RequestError(f"{field} has the token {wrong}, and the model has tokens from 0 to "
                               f"{self.vocab_size - 1}", field)
        if len(ids) > self.max_length:
            raise self._too_long(len(ids), field)
        return Item(tuple(ids))

    def _encode(self, texts: Sequence[str], room: int, prompt: str = "") -> list[Encoding]:
        """Encodings without special tokens of the texts behind the model's own prompt; of texts that are far too long
        only what is needed to know that."""
        if self._lower:
            prompt, texts = prompt.lower(), [text.lower() for text in texts]
        most = _CHARACTERS * (room + 1)
        found = self._ordinary([text[:most] for text in texts], prompt)
        for index, text in enumerate(texts):
            if len(text) > most and len(found[index]) <= room:
                found[index], = self._ordinary([text], prompt)
        return found

    def _ordinary(self, texts: Sequence[str], prompt: str) -> list[Encoding]:
        """Encodings in which no control token comes of a text."""
        found = self._backend.encode_batch_fast([prompt + text for text in texts], add_special_tokens=False)
        for index, text in enumerate(texts):
            if not self._controls.ids.isdisjoint(found[index].ids) and len(pieces := self._pieces(text)) > 1:
                found[index] = Encoding.merge(self._backend.encode_batch_fast(
                    [prompt + pieces[0], *pieces[1:]], add_special_tokens=False))
        return found

    def _pieces(self, text: str) -> list[str]:
        """A text in pieces that spell no control token, as it stands and as the tokenizer normalizes it."""
        found, normalizer = self._controls.pieces(text), self._backend.normalizer
        if normalizer is None:
            return found
        normal = [self._controls.pieces(normalizer.normalize_str(piece)) for piece in found]
        return [part for piece, parts in zip(found, normal, strict=True) for part in (parts if parts[1:] else [piece])]

    def _cuts(self, text: str) -> list[int]:
        """Where the tokenizer cuts a text before it looks for tokens."""
        splitter = self._backend.pre_tokenizer
        return [start for _, (start, _) in splitter.pre_tokenize_str(text)] if splitter else []

    def _prompt_tokens(self, prompt: str) -> int:
        ids = self._backend.encode_batch_fast([prompt], add_special_tokens=True)[0].ids
        return len(ids) - (ids[-1] in self._special)

    def _item(self, encoding: Any, prompt: int, cut: bool) -> Item:
        kinds = encoding.type_ids
        return Item(encoding.ids, kinds if any(kinds) else (), prompt, cut)

    def _too_long(self, tokens: int, field: str) -> LongPromptError:
        return LongPromptError(f"{field} has {tokens} tokens or more, and the model reads {self.max_length} with its "
                               "special tokens: shorten it, or let it be cut (truncate)", field)


def _shares(first: int, second: int, room: int) -> tuple[int, int]:
    """What is left of two parts if the longer one loses tokens until both fit."""
    half = room // 2
    if first <= half:
        return first, room - first
    if second <= half:
        return room - second, second
    more = room - half
    return (more, half) if first > second else (half, more)
