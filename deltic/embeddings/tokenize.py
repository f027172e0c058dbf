"""Tokenizes texts and pairs of texts, with prompts, special tokens and truncation.

Control tokens spelled out in a text are ordinary text, as in chat. Control tokens of prompts and templates stay.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from deltic.chat.control_tokens import ControlTokens
from deltic.embeddings.types import Item
from deltic.errors import LongPromptError, ModelError, RequestError, is_panic, show, valid_text
from deltic.params import common_length

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_CHARACTERS: Final = 32
"""Of a long text, this many characters per usable token are tokenized first; most tokens have four or five."""


def backend_of(stored: str, source: Path) -> Backend:
    """Returns the tokenizer of a JSON text. Raises ModelError naming its file."""
    try:
        return Backend.from_str(stored)
    except BaseException as error:  # the library raises bare Exceptions, and panics, which are not Exceptions
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ModelError(f"{source} has not a valid tokenizer ({show(str(error))}); download it again") from error


class EncoderTokenizer:
    """A model's tokenizer, which threads may share. max_length: maximum tokens of an item."""

    def __init__(self, backend: Backend, max_length: int, lower: bool = False) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend, self.max_length, self._lower = backend, max_length, lower
        added = backend.get_added_tokens_decoder()
        self.special = frozenset(id for id, token in added.items() if token.special)
        self._controls = ControlTokens({token.content: id for id, token in added.items()}, self.special, self._splits)
        if max_length <= backend.num_special_tokens_to_add(is_pair=True):
            raise ModelError(f"max_length of {max_length} leaves no room for a text beside the special tokens")

    @classmethod
    def read(cls, path: Path, max_length: int, lower: bool = False) -> EncoderTokenizer:
        """Reads a tokenizer.json. Raises ModelError if it is missing or damaged."""
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
    def token_types(self) -> int:
        """Returns the number of token types in a pair."""
        return max(self._backend.encode("a", "b").type_ids, default=0) + 1

    def token(self, id: int) -> str:
        """Returns a token in the spelling of the vocabulary."""
        return self._backend.id_to_token(id) or ""

    def items(self, texts: Sequence[str], prompt: str = "", truncate: bool = True, field: str = "input",
              start: int | None = 0, max_length: int | None = None) -> list[Item]:
        """Returns an item for each text, after the prompt.

        Long texts are cut at their end, or raise LongPromptError. Raises RequestError for a text that is invalid
        Unicode or has no tokens. field, start: name of the texts in messages and index of the first text, None for a
        single text. max_length: maximum tokens of an item, if lower than the model's.
        """
        names = [field if start is None else f"{field}[{start + index}]" for index in range(len(texts))]
        for name, text in zip(names, texts, strict=True):
            valid_text(text, name)
        special = self._backend.num_special_tokens_to_add(is_pair=False)
        room = min(self.max_length, max_length or self.max_length) - special
        if room < 1:
            raise RequestError(f"{max_length} tokens leave no room for a text beside the model's {special} special "
                               "tokens", field)
        encoded = self._encode(texts, room, prompt)
        prompt_tokens = self._prompt_tokens(prompt) if prompt else 0
        items = []
        for name, encoding in zip(names, encoded, strict=True):
            cut = len(encoding) > room
            if cut and not truncate:
                raise self._too_long(len(encoding), name)
            encoding.truncate(room)
            item = self._item(self._backend.post_process(encoding), prompt_tokens, cut)
            if not len(item):
                raise RequestError(f"{name} is empty, and this model has no special tokens to put around it: leave it "
                                   "out", name)
            items.append(item)
        return items

    def pairs(self, query: str, documents: Sequence[str], truncate: bool = True, field: str = "documents"
              ) -> list[Item]:
        """Returns an item of query and document for each document. Truncation shortens the longer part first."""
        valid_text(query, "query")
        for index, text in enumerate(documents):
            valid_text(text, f"{field}[{index}]")
        room = self.max_length - self._backend.num_special_tokens_to_add(is_pair=True)
        whole, = self._encode([query], room)
        items = []
        for index, second in enumerate(self._encode(documents, room)):
            first, query_room, document_room = whole, len(whole), len(second)
            cut = query_room + document_room > room
            if cut:
                if not truncate:
                    raise self._too_long(query_room + document_room, f"{field}[{index}]")
                query_room, document_room = _shared_room(query_room, document_room, room)
            if query_room < len(whole):
                first, = self._encode([query], room)  # because truncate() changes it
                first.truncate(query_room)
            second.truncate(document_room)
            items.append(self._item(self._backend.post_process(first, second), 0, cut))
        return items

    def raw(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns each text's token ids without special tokens."""
        encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [list(encoding.ids) for encoding in encoded]

    def framed(self, before: Sequence[int], head: str, documents: Sequence[str], after: Sequence[int],
               truncate: bool = True, field: str = "documents") -> list[Item]:
        """Returns an item for each document: ids before, head, document, ids after. Truncation cuts the document."""
        valid_text(head, "query")
        for index, text in enumerate(documents):
            valid_text(text, f"{field}[{index}]")
        room = self.max_length - len(before) - len(after)
        if room < 1:
            raise RequestError(f"the model reads {self.max_length} tokens, which leave none for a document", field)
        head_ids, *encoded = (
            encoding.ids for encoding in self._encode([head, *(head + text for text in documents)], room))
        items = []
        for index, ids in enumerate(encoded):
            if len(ids) > room and not truncate:
                raise self._too_long(len(before) + len(ids) + len(after), f"{field}[{index}]")
            shared = len(before) + common_length(head_ids, ids)
            items.append(Item([*before, *ids[:room], *after], prompt=shared, cut=len(ids) > room))
        return items

    def from_ids(self, ids: Sequence[int], field: str) -> Item:
        """Returns an item from a client's token ids. Raises RequestError for unknown tokens, or too many tokens."""
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
        """Encodes texts after the prompt, without special tokens. Of a far too long text only a part is encoded."""
        if self._lower:
            prompt, texts = prompt.lower(), [text.lower() for text in texts]
        limit = _CHARACTERS * (room + 1)
        encoded = self._encode_as_text([text[:limit] for text in texts], prompt)
        for index, text in enumerate(texts):
            if len(text) > limit and len(encoded[index]) <= room:
                encoded[index], = self._encode_as_text([text], prompt)
        return encoded

    def _encode_as_text(self, texts: Sequence[str], prompt: str) -> list[Encoding]:
        """Encodes texts so that they contain no control tokens."""
        encoded = self._backend.encode_batch_fast([prompt + text for text in texts], add_special_tokens=False)
        for index, text in enumerate(texts):
            if self._controls.ids.isdisjoint(encoded[index].ids):
                continue
            pieces = self._pieces(text)
            if len(pieces) > 1:
                pieces[0] = prompt + pieces[0]
                encoded[index] = Encoding.merge(self._backend.encode_batch_fast(pieces, add_special_tokens=False))
        return encoded

    def _pieces(self, text: str) -> list[str]:
        """Splits a text so that no piece spells a control token, neither as given nor normalized."""
        pieces, normalizer = self._controls.pieces(text), self._backend.normalizer
        if normalizer is None:
            return [*pieces]
        found = []
        for piece in pieces:
            normalized = self._controls.pieces(normalizer.normalize_str(piece))
            found += normalized if len(normalized) > 1 else [piece]
        return found

    def _splits(self, text: str) -> list[int]:
        """Returns the positions at which the pre-tokenizer splits a text."""
        splitter = self._backend.pre_tokenizer
        return [start for _, (start, _) in splitter.pre_tokenize_str(text)] if splitter else []

    def _prompt_tokens(self, prompt: str) -> int:
        ids = self._backend.encode_batch_fast([prompt], add_special_tokens=True)[0].ids
        return len(ids) - (ids[-1] in self.special)

    def _item(self, encoding: Encoding, prompt: int, cut: bool) -> Item:
        types = encoding.type_ids
        return Item(encoding.ids, types if any(types) else (), prompt, cut)

    def _too_long(self, tokens: int, field: str) -> LongPromptError:
        return LongPromptError(f"{field} has {tokens} tokens or more, and the model reads {self.max_length} with its "
                               "special tokens: shorten it, or let it be cut (truncate)", field)


def _shared_room(first: int, second: int, room: int) -> tuple[int, int]:
    """Returns the lengths of two parts after cutting tokens from the longer part until both fit."""
    half = room // 2
    if first <= half:
        return first, room - first
    if second <= half:
        return room - second, second
    return (room - half, half) if first > second else (half, room - half)
