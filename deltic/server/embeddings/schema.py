"""Bodies of /v1/embeddings, /v1/rerank and /v1/score."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

from deltic.errors import RequestError, show
from deltic.server.body import SaltedFields

_KINDS: Mapping[str | None, str | None] = {
    None: None, "query": "query", "search_query": "query", "passage": "passage", "document": "passage",
    "search_document": "passage", "retrieval.query": "query", "retrieval.passage": "passage"}


class EmbeddingsRequest(SaltedFields):
    """OpenAI's fields; input_type, or task, as others write it, for models that have prompts; truncate: cut what is too
    long, rather than refusing it; truncate_prompt_tokens: to so many tokens, -1: to what the model reads."""

    counted: ClassVar[Mapping[str, str]] = {"input": "max_texts"}
    elsewhere: ClassVar[Mapping[str, str]] = dict.fromkeys(("messages", "inputs", "texts", "prompt"), "input")

    model: str | None = None
    input: Any
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    input_type: str | None = None
    task: str | None = None
    truncate: bool | None = None
    truncate_prompt_tokens: int | None = None
    normalize: bool | None = None

    @property
    def kind(self) -> str | None:
        """`query`, `passage` or None."""
        for name, value in (("input_type", self.input_type), ("task", self.task)):
            if value not in _KINDS:
                raise RequestError(f"{name} must be query or passage, not {show(value)}", name)
        return _KINDS[self.input_type if self.task is None else self.task]

    @property
    def most(self) -> int | None:
        """Tokens that are read of an input, if fewer are wanted than the model reads."""
        most = self.truncate_prompt_tokens
        if most is not None and most < 1 and most != -1:
            raise RequestError(f"truncate_prompt_tokens must be at least 1, or -1 for what the model reads, not {most}",
                               "truncate_prompt_tokens")
        return None if most == -1 else most

    @property
    def cuts(self) -> bool:
        """Whether what is too long is cut."""
        return bool(self.truncate) or self.truncate_prompt_tokens is not None

    @property
    def single(self) -> bool:
        """Whether the input is no list of inputs, but one by itself."""
        given = self.input
        return not isinstance(given, list) or (bool(given) and type(given[0]) is int)

    def inputs(self) -> list[str] | list[list[int]]:
        """Texts, or lists of token ids."""
        given = self.input
        if given == []:
            raise RequestError("input is empty: give at least one text", "input")
        rows = [given] if self.single else given
        if all(isinstance(row, str) for row in rows):
            empty = next((index for index, row in enumerate(rows) if not row), None)
            if empty is not None and self.single:
                raise RequestError("input is empty: give at least one text", "input")
            if empty is not None:
                raise RequestError(f"input[{empty}] is empty: leave it out", f"input[{empty}]")
            return [str(row) for row in rows]
        if all(isinstance(row, list) and all(type(id) is int for id in row) for row in rows):
            return rows
        raise RequestError("input must be text, a list of texts, a list of token ids or a list of such lists, not "
                           f"{show(given)}", "input")


class RerankRequest(SaltedFields):
    """Cohere's and Jina's fields. Documents are texts, or objects with a `text`. truncate: cut long ones (default),
    rather than refusing them; where they are cut, the model's own length decides, not max_tokens_per_doc. texts: the
    documents as text-embeddings-inference calls them, whose clients get another answer. instruction: what a reranker
    that is a decoder is to look for."""

    counted: ClassVar[Mapping[str, str]] = {"documents": "max_texts", "texts": "max_texts"}

    model: str | None = None
    query: str
    documents: list[Any] | None = None
    texts: list[Any] | None = None
    instruction: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    truncate: bool | None = None
    max_tokens_per_doc: int | None = None

    def read(self) -> list[str]:
        """The documents' texts, of which there must be one."""
        name, given = ("documents", self.documents) if self.texts is None else ("texts", self.texts)
        if given is None:
            raise RequestError("documents is missing", "documents")
        if not given:
            raise RequestError(f"{name} is empty: give at least one", name)
        found: list[Any] = [document.get("text") if isinstance(document, dict) else document for document in given]
        wrong = next((index for index, text in enumerate(found) if not isinstance(text, str)), None)
        if wrong is not None:
            raise RequestError(f"{name}[{wrong}] must be text, or an object with one as `text`, not "
                               f"{show(given[wrong])}", f"{name}[{wrong}]")
        if self.top_n is not None and self.top_n < 1:
            raise RequestError(f"top_n must be at least 1, not {self.top_n}", "top_n")
        return found


class EmbedRequest(SaltedFields):
    """text-embeddings-inference's /embed. prompt_name: the kind of text, as its prompt is called in the model's files.
    """

    counted: ClassVar[Mapping[str, str]] = {"inputs": "max_texts"}

    model: str | None = None
    inputs: Any
    normalize: bool | None = None
    truncate: bool | None = None
    dimensions: int | None = None
    prompt_name: str | None = None


class ScoreRequest(SaltedFields):
    """vLLM's fields: one text against many, or as many against each other, in pairs."""

    counted: ClassVar[Mapping[str, str]] = {"text_1": "max_texts", "text_2": "max_texts"}

    model: str | None = None
    text_1: Any
    text_2: Any
    truncate: bool | None = None
    instruction: str | None = None

    def pairs(self) -> list[tuple[str, list[str]]]:
        """Queries, each with its documents."""
        first, second = _texts(self.text_1, "text_1"), _texts(self.text_2, "text_2")
        if len(first) == 1:
            return [(first[0], second)]
        if len(first) != len(second):
            raise RequestError(f"text_1 has {len(first)} texts and text_2 has {len(second)}: give one, or equally many",
                               "text_1")
        return [(query, [document]) for query, document in zip(first, second, strict=True)]

    @contextmanager
    def naming(self, index: int) -> Iterator[None]:
        """What is wrong with the query or a document of the pairs' place `index` is said of the field that has it."""
        try:
            yield
        except RequestError as error:
            found = re.fullmatch(r"query|documents\[(\d+)\]", error.field or "")
            if not found:
                raise
            paired = isinstance(self.text_1, list) and len(self.text_1) > 1
            name, given = ("text_2", self.text_2) if found[1] else ("text_1", self.text_1)
            if isinstance(given, list):
                name += f"[{int(found[1]) if found[1] and not paired else index}]"
            raise type(error)(str(error).replace(found[0], name, 1), name) from error


def _texts(given: Any, field: str) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise RequestError(f"{field} must be text or a list with at least one, not {show(given)}", field)
    return texts
