"""`Encoder`: texts to vectors, and documents in order of what they say about a query."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from deltic.embeddings.batcher import Batcher, EncodeJob
from deltic.embeddings.open import Opened, Task, open_texts
from deltic.embeddings.types import Item, Output, Vectors
from deltic.engine.arguments import as_texts, check_callback, check_flag
from deltic.engine.options import engine_config
from deltic.errors import ConfigError, GenerationError, RequestError, show, valid_text
from deltic.loader.safetensors import Progress

Kind = Literal["query", "passage"]

_WINDOWS: Final = (64, 2048)
"""Texts that are made tokens of at a time, while the model is at those before them: first few, so that it begins soon,
then twice as many each time, up to the second number."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document's place in the list that was given, and how well it fits the query: of a reranker from 0 to 1, of a
    model of vectors the cosine."""

    index: int
    score: float


class Encoder:
    """A model of vectors, or one that scores pairs of texts.

        encoder = Encoder("BAAI/bge-m3")                      # a hub name or directory; fields of EngineConfig
        encoder.encode(["one text", "another"])                # float32 [2, 1024], of length 1
        encoder.encode(questions, kind="query", dimensions=256)
        Encoder("BAAI/bge-reranker-v2-m3").rank("a query", documents, top_n=5)

    All calls may come from any thread: one thread runs the model, and what is asked for at the same time is batched.
    task: "embed" or "rerank", "auto": as the model's files say. max_length: tokens of a text, at most the model's.
    instruction: what a reranker that is a decoder is told to look for; others take none. Unknown options raise
    ConfigError, unusable models ModelError, requests that cannot be served RequestError.
    """

    def __init__(self, model: str | Path, *, task: Task = "auto", revision: str | None = None,
                 max_length: int | None = None, instruction: str | None = None, progress: Progress | None = None,
                 **options: Any) -> None:
        if task not in get_args(Task):
            raise ConfigError(f"task must be one of {', '.join(get_args(Task))}, not {show(task)}", "task")
        if instruction is not None and not isinstance(instruction, str):
            raise ConfigError(f"instruction must be text or None, not {show(instruction)}", "instruction")
        check_callback(progress, "progress", "(bytes read, bytes in all)", ConfigError)
        config = engine_config(options, ["task", "revision", "max_length", "instruction"])
        opened: Opened = open_texts(model, task, config, revision, progress, max_length, instruction)
        self.model, self.texts, self._pairs = opened.model, opened.texts, opened.pairs
        self.name = str(model)
        self.batcher = Batcher(self.model, config.limits.max_live_tokens)
        weakref.finalize(self, self.batcher.end).atexit = False

    @property
    def dimension(self) -> int:
        """Numbers of a vector; 0 if the model only scores."""
        return self.model.dimension if "dense" in self.model.outputs else 0

    @property
    def max_length(self) -> int:
        """Tokens of the longest text, special ones included."""
        return self.texts.max_length

    @property
    def scores(self) -> bool:
        """Whether the model scores pairs, rather than giving vectors."""
        return "score" in self.model.outputs

    def encode(self, texts: str | Sequence[str], *, kind: Kind | str | None = None, prompt: str | None = None,
               dimensions: int | None = None, truncate: bool = True, progress: Callable[[int], None] | None = None
               ) -> NDArray[np.float32]:
        """Vectors [N, D] float32, or [D] of a single text; of length 1 where the model's files ask for that, as nearly
        all do.

        kind: "query", "passage" or another name of a prompt that the model has. prompt: what is put before each text
        instead. dimensions: keep the first so many, made length 1 again (Matryoshka). truncate: cut what is too long,
        else RequestError. progress(n): called as texts are done, in the thread that runs the model, so it must
        not call the encoder (RequestError); what it raises, this raises.
        """
        single = isinstance(texts, str)
        check_callback(progress, "progress", "the texts that are done")
        if not self.scores:
            check_dimensions(dimensions, self.dimension)
        batches = self._encoded([texts] if single else texts, kind, prompt, truncate, progress, frozenset({"dense"}))
        rows = [shortened(vectors.dense, dimensions, self.dimension) for vectors in batches]
        found: NDArray[np.float32] = np.stack(rows) if rows else np.zeros((0, dimensions or self.dimension), np.float32)
        return found[0] if single else found

    def encode_all(self, texts: Sequence[str], outputs: Sequence[Output] = ("dense", "sparse", "colbert"), *,
                   kind: Kind | str | None = None, prompt: str | None = None, truncate: bool = True) -> list[Vectors]:
        """The outputs that are asked for, of models that have several (BGE-M3)."""
        known = not isinstance(outputs, str) and isinstance(outputs, Collection)
        if not known or any(output not in get_args(Output) for output in outputs):
            raise RequestError(f"outputs must be a list of {', '.join(get_args(Output))}, not {show(outputs)}",
                               "outputs")
        found = self._encoded(texts, kind, prompt, truncate, None, frozenset(outputs))
        special = self.texts.special  # which say nothing of a text
        return [replace(vectors, sparse={id: weight for id, weight in vectors.sparse.items() if id not in special})
                for vectors in found]

    def rank(self, query: str, documents: Sequence[str], *, top_n: int | None = None, truncate: bool = True
             ) -> list[Ranked]:
        """The documents, best first, of equal ones the earlier first. top_n: only so many."""
        if top_n is not None and (type(top_n) is not int or top_n < 0):
            raise RequestError(f"top_n must be an integer from 0 on, or None, not {show(top_n)}", "top_n")
        scores = self.score(query, documents, truncate=truncate)
        ranked = sorted(map(Ranked, range(len(scores)), scores), key=lambda each: (-each.score, each.index))
        return ranked[:top_n]

    def score(self, query: str, documents: Sequence[str], *, truncate: bool = True) -> list[float]:
        """How well each document fits the query: see `Ranked`."""
        job = self.submit(self.pair_items(query, documents, truncate))
        return self.scores_of(sound(job.future.result()))

    def pair_items(self, query: str, documents: Sequence[str], truncate: bool = True, instruction: str | None = None
                   ) -> list[Item]:
        """What has to be run to score the documents: pairs, or the query and the documents one by one. instruction:
        instead of the encoder's own."""
        query, documents = valid_text(query, "query"), as_texts(documents, "documents")
        check_flag(truncate, "truncate")
        if self.scores:
            return self._pairs(query, documents, truncate, instruction)
        if instruction is not None:
            raise RequestError(f"{self.name} takes no instruction: only rerankers that are decoders do", "instruction")
        asked = self.texts.items([query], self.model.recipe.prompt("query"), truncate, "query", None)
        return [*asked, *self.texts.items(documents, self.model.recipe.prompt("passage"), truncate, "documents")]

    def scores_of(self, found: Sequence[Vectors]) -> list[float]:
        """The documents' scores, of what came of `pair_items`."""
        if self.scores:
            return [vectors.score for vectors in found]
        query, *documents = (shortened(vectors.dense, None, self.dimension).astype(np.float64) for vectors in found)
        return [float(query @ document / (np.linalg.norm(query) * np.linalg.norm(document) or 1.0))
                for document in documents]

    def text_items(self, texts: Sequence[str], kind: str | None = None, prompt: str | None = None,
                   truncate: bool = True, field: str = "input", start: int | None = 0, most: int | None = None
                   ) -> list[Item]:
        """What has to be run for these texts; arguments as in `encode`, and as in `Texts.items`."""
        before = self.model.recipe.prompt(kind)
        if prompt is not None:
            before = valid_text(prompt, "prompt")
        return self.texts.items(texts, before, truncate, field, start, most)

    def submit(self, items: Sequence[Item], outputs: frozenset[Output] | None = None,
               on_item: Callable[[int], None] | None = None, client: str = "") -> EncodeJob:
        """Have items run, in batches with what others ask for. client: who asks, as in `EncodeJob`. RequestError if the
        model has no such output."""
        wanted = outputs or frozenset({"score" if self.scores else "dense"})
        if missing := wanted - self.model.outputs:
            raise RequestError(f"{self.name} gives {', '.join(sorted(self.model.outputs))}, and no "
                               f"{', '.join(sorted(missing))}", "model")
        return self.batcher.submit(EncodeJob(items, wanted, on_item, client))

    def close(self) -> None:
        """End the thread; what waits fails."""
        self.batcher.close()
        self.model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
                 ) -> None:
        self.close()

    def _encoded(self, texts: Any, kind: str | None, prompt: str | None, truncate: bool,
                 progress: Callable[[int], None] | None, wanted: frozenset[Output]) -> Iterator[Vectors]:
        """Window by window, the next of which is made tokens of while the model runs one."""
        texts = as_texts(texts, "texts")
        check_flag(truncate, "truncate")
        waiting: list[tuple[EncodeJob, list[int], int]] = []
        start, (size, most) = 0, _WINDOWS
        try:
            while start < len(texts):
                items = self.text_items(texts[start:start + size], kind, prompt, truncate, "texts", start)
                order = sorted(range(len(items)), key=lambda index: -len(items[index]))  # longest first
                if waiting and size == most:
                    yield from _in_order(*waiting.pop(0))
                waiting.append((self.submit([items[index] for index in order], wanted, progress), order, start))
                start, size = start + size, min(2 * size, most)
            for job, order, start in waiting:
                yield from _in_order(job, order, start)
        finally:
            for job, _, _ in waiting:  # which nobody wants after an error
                job.future.cancel()


def _in_order(job: EncodeJob, order: Sequence[int], start: int) -> Iterator[Vectors]:
    """What came of a job whose items were put into this order. start: texts before them."""
    found: list[Any] = [None] * len(order)
    for index, vectors in zip(order, job.future.result(), strict=True):
        found[index] = vectors
    return iter(sound(found, start))


def sound(found: list[Vectors], start: int = 0) -> list[Vectors]:
    """GenerationError, naming the first text, if there is nothing of one. start: texts before them."""
    wrong = next((index for index, vectors in enumerate(found) if vectors.error), None)
    if wrong is not None:
        raise GenerationError(f"there is no result for text {start + wrong}: {found[wrong].error}")
    return found


def shortened(vector: NDArray[Any] | None, dimensions: int | None, whole: int) -> NDArray[Any]:
    """The vector's first numbers, made length 1; RequestError if there are not so many."""
    assert vector is not None
    if dimensions is None or dimensions == whole:
        return vector
    check_dimensions(dimensions, whole)
    part = vector[:dimensions].astype(np.float64)
    return (part / max(float(np.linalg.norm(part)), 1e-12)).astype(np.float32)


def check_dimensions(dimensions: int | None, whole: int) -> None:
    """RequestError unless a vector has so many."""
    if dimensions is not None and (type(dimensions) is not int or not 1 <= dimensions <= whole):
        raise RequestError(f"dimensions must be an integer from 1 to {whole}, which this model's vectors have, not "
                           f"{show(dimensions)}", "dimensions")
