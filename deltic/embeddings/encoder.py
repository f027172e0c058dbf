"""`Encoder` converts texts to vectors, and ranks documents by a query."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from deltic.embeddings.batcher import Batcher, EncodeJob
from deltic.embeddings.open import Task, open_texts
from deltic.embeddings.types import Item, Output, Vectors
from deltic.engine.arguments import as_texts, check_callback, check_flag, engine_config
from deltic.errors import ConfigError, GenerationError, RequestError, show, valid_text
from deltic.loader.safetensors import Progress

Kind = Literal["query", "passage"]

_FIRST_WINDOW, _MAX_WINDOW = 64, 2048
"""Number of texts that are tokenized at a time while the model runs the previous ones: first few, so that the model
starts soon, then twice as many each time."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document's index in the given list, and its score: from 0 to 1 for a reranker, the cosine for vectors."""

    index: int
    score: float


class Encoder:
    """An embedding model or a reranker.

        encoder = Encoder("BAAI/bge-m3")                      # a hub name or directory; fields of EngineConfig
        encoder.encode(["one text", "another"])                # float32 [2, 1024], of length 1
        encoder.encode(questions, kind="query", dimensions=256)
        Encoder("BAAI/bge-reranker-v2-m3").rank("a query", documents, top_n=5)

    Calls may come from any thread: one thread runs the model and batches concurrent requests.

    task: "embed", "rerank" or "auto" (determined from the model's files). max_length: maximum tokens of a text, at most
    the model's. instruction: for rerankers that are decoders; other models take none. Raises ConfigError for unknown
    options, ModelError for unusable models. Calls raise RequestError for requests that cannot be served.
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
        opened = open_texts(model, task, config, revision, progress, max_length, instruction)
        self.model, self.texts, self._pairs = opened.model, opened.texts, opened.pairs
        self.name = str(model)
        self.batcher = Batcher(self.model, config.limits.max_live_tokens)
        weakref.finalize(self, self.batcher.end).atexit = False

    @property
    def dimension(self) -> int:
        """Returns the size of a vector; 0 if the model only scores."""
        return self.model.dimension if "dense" in self.model.outputs else 0

    @property
    def max_length(self) -> int:
        """Returns the maximum tokens of a text, including special tokens."""
        return self.texts.max_length

    @property
    def scores(self) -> bool:
        """Returns True if the model scores pairs, False if it returns vectors."""
        return "score" in self.model.outputs

    def encode(self, texts: str | Sequence[str], *, kind: Kind | str | None = None, prompt: str | None = None,
               dimensions: int | None = None, truncate: bool = True, progress: Callable[[int], None] | None = None
               ) -> NDArray[np.float32]:
        """Returns vectors [N, D] float32, or [D] for a single text; scaled to length 1 if the model's files request it.

        kind: "query", "passage" or another name of the model's prompts. prompt: replaces the kind's prompt.
        dimensions: keeps this many leading dimensions, scaled to length 1 again (Matryoshka). truncate: cut long texts;
        otherwise they raise RequestError. progress(n): called with finished texts, in the thread that runs the model.
        It must not call the encoder (RequestError). Its exceptions are raised here.
        """
        single = isinstance(texts, str)
        check_callback(progress, "progress", "the finished texts")
        if not self.scores:
            check_dimensions(dimensions, self.dimension)
        found = self._encoded([texts] if single else texts, kind, prompt, truncate, progress, frozenset({"dense"}))
        rows = [shortened(vectors.dense, dimensions, self.dimension) for vectors in found]
        if single:
            return rows[0]
        return np.stack(rows) if rows else np.zeros((0, dimensions or self.dimension), np.float32)

    def encode_all(self, texts: Sequence[str], outputs: Sequence[Output] = ("dense", "sparse", "colbert"), *,
                   kind: Kind | str | None = None, prompt: str | None = None, truncate: bool = True) -> list[Vectors]:
        """Returns several outputs, for models that have them (BGE-M3)."""
        known = not isinstance(outputs, str) and isinstance(outputs, Collection)
        if not known or any(output not in get_args(Output) for output in outputs):
            raise RequestError(f"outputs must be a list of {', '.join(get_args(Output))}, not {show(outputs)}",
                               "outputs")
        found = self._encoded(texts, kind, prompt, truncate, None, frozenset(outputs))
        special = self.texts.special  # their weights have no meaning
        return [replace(vectors, sparse={id: weight for id, weight in vectors.sparse.items() if id not in special})
                for vectors in found]

    def rank(self, query: str, documents: Sequence[str], *, top_n: int | None = None, truncate: bool = True
             ) -> list[Ranked]:
        """Returns the documents, best first; equal scores keep the given order. top_n: returns only the first n."""
        if top_n is not None and (type(top_n) is not int or top_n < 0):
            raise RequestError(f"top_n must be an integer from 0 on, or None, not {show(top_n)}", "top_n")
        scores = self.score(query, documents, truncate=truncate)
        ranked = sorted(map(Ranked, range(len(scores)), scores), key=lambda each: (-each.score, each.index))
        return ranked[:top_n]

    def score(self, query: str, documents: Sequence[str], *, truncate: bool = True) -> list[float]:
        """Returns each document's score for the query; see `Ranked`."""
        job = self.submit(self.pair_items(query, documents, truncate))
        return self.scores_of(sound(job.future.result()))

    def pair_items(self, query: str, documents: Sequence[str], truncate: bool = True, instruction: str | None = None
                   ) -> list[Item]:
        """Returns the items that score the documents: pairs, or the query and the documents.

        instruction: replaces the encoder's instruction.
        """
        query, documents = valid_text(query, "query"), as_texts(documents, "documents")
        check_flag(truncate, "truncate")
        if self.scores:
            return self._pairs(query, documents, truncate, instruction)
        if instruction is not None:
            raise RequestError(f"{self.name} takes no instruction: only rerankers that are decoders do", "instruction")
        recipe = self.model.recipe
        return [*self.texts.items([query], recipe.prompt("query"), truncate, "query", None),
                *self.texts.items(documents, recipe.prompt("passage"), truncate, "documents")]

    def scores_of(self, found: Sequence[Vectors]) -> list[float]:
        """Returns the documents' scores from the results of `pair_items`."""
        if self.scores:
            return [vectors.score for vectors in found]
        query, *documents = (shortened(vectors.dense, None, self.dimension).astype(np.float64) for vectors in found)
        return [float(query @ document / (np.linalg.norm(query) * np.linalg.norm(document) or 1.0))
                for document in documents]

    def text_items(self, texts: Sequence[str], kind: str | None = None, prompt: str | None = None,
                   truncate: bool = True, field: str = "input", start: int | None = 0, max_length: int | None = None
                   ) -> list[Item]:
        """Returns the items of texts; see `encode` and `EncoderTokenizer.items`."""
        prefix = self.model.recipe.prompt(kind)
        if prompt is not None:
            prefix = valid_text(prompt, "prompt")
        return self.texts.items(texts, prefix, truncate, field, start, max_length)

    def submit(self, items: Sequence[Item], outputs: frozenset[Output] | None = None,
               on_item: Callable[[int], None] | None = None, client: str = "") -> EncodeJob:
        """Queues items. Raises RequestError if the model lacks an output."""
        wanted = outputs or frozenset({"score" if self.scores else "dense"})
        if missing := wanted - self.model.outputs:
            raise RequestError(f"{self.name} gives {', '.join(sorted(self.model.outputs))}, and no "
                               f"{', '.join(sorted(missing))}", "model")
        return self.batcher.submit(EncodeJob(items, wanted, on_item, client))

    def close(self) -> None:
        """Ends the thread and frees the model. Waiting requests fail."""
        self.batcher.close()
        self.model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
                 ) -> None:
        self.close()

    def _encoded(self, texts: Any, kind: str | None, prompt: str | None, truncate: bool,
                 progress: Callable[[int], None] | None, wanted: frozenset[Output]) -> Iterator[Vectors]:
        """Yields results window by window. Tokenizes the next window while the model runs the current one."""
        texts = as_texts(texts, "texts")
        check_flag(truncate, "truncate")
        waiting: list[tuple[EncodeJob, list[int], int]] = []
        start, size = 0, _FIRST_WINDOW
        try:
            while start < len(texts):
                items = self.text_items(texts[start:start + size], kind, prompt, truncate, "texts", start)
                order = sorted(range(len(items)), key=lambda index: -len(items[index]))  # longest first
                if waiting and size == _MAX_WINDOW:
                    yield from _in_order(*waiting.pop(0))
                waiting.append((self.submit([items[index] for index in order], wanted, progress), order, start))
                start, size = start + size, min(2 * size, _MAX_WINDOW)
            for job, order, start in waiting:
                yield from _in_order(job, order, start)
        finally:
            for job, _, _ in waiting:
                job.future.cancel()


def _in_order(job: EncodeJob, order: Sequence[int], start: int) -> Iterator[Vectors]:
    """Returns the results of a reordered job in the original order. start: index of the job's first text."""
    found: list[Any] = [None] * len(order)
    for index, vectors in zip(order, job.future.result(), strict=True):
        found[index] = vectors
    return iter(sound(found, start))


def sound(found: list[Vectors], start: int = 0) -> list[Vectors]:
    """Returns the results. Raises GenerationError naming the first failed text. start: index of the first text."""
    for index, vectors in enumerate(found, start):
        if vectors.error:
            raise GenerationError(f"there is no result for text {index}: {vectors.error}")
    return found


def shortened(vector: NDArray[Any] | None, dimensions: int | None, whole: int) -> NDArray[Any]:
    """Returns the vector's first dimensions, scaled to length 1. Raises RequestError if it has fewer."""
    assert vector is not None
    if dimensions is None or dimensions == whole:
        return vector
    check_dimensions(dimensions, whole)
    part = vector[:dimensions].astype(np.float64)
    return (part / max(float(np.linalg.norm(part)), 1e-12)).astype(np.float32)


def check_dimensions(dimensions: int | None, whole: int) -> None:
    """Raises RequestError unless a vector has at least this many dimensions."""
    if dimensions is not None and (type(dimensions) is not int or not 1 <= dimensions <= whole):
        raise RequestError(f"dimensions must be an integer from 1 to {whole}, which this model's vectors have, not "
                           f"{show(dimensions)}", "dimensions")
