"""Decoders that embed (by the last token's state) or rerank (by the logits of yes and no), run by the engine.

The engine's prefix cache computes a shared instruction only once.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltic.config import EngineConfig
from deltic.embeddings.gguf import gives_vectors, read_gguf_recipe
from deltic.embeddings.sentence_transformers import Recipe, read_recipe
from deltic.embeddings.tokenize import EncoderTokenizer, backend_of
from deltic.embeddings.types import Item, Output, Vectors
from deltic.engine.engine import Engine
from deltic.engine.loading import load
from deltic.engine.worker import EventMailbox, Worker
from deltic.errors import ModelError
from deltic.loader.gguf.file import GgufFile
from deltic.loader.safetensors import Progress
from deltic.ops.quantized import QTensor
from deltic.params import Embed, EngineRequest, VectorEvent
from deltic.runner.model_runner import ModelRunner

_BUDGET: Final = 2048
_BEFORE: Final = ('<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the '
                  'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n')
_AFTER: Final = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
"""The prompt that Qwen3-Reranker was trained with (its model card)."""


class DecoderTextModel:
    """A loaded decoder, a `TextModel`.

    judge [H]: set for a reranker; its product with a state is the logit of yes minus the logit of no.
    """

    overlaps = False

    def __init__(self, name: str, runtime: ModelRunner, recipe: Recipe, judge: Tensor | None) -> None:
        self.name, self.recipe, self.runtime, self._judge = name, recipe, runtime, judge
        self.outputs: frozenset[Output] = frozenset({"dense" if judge is None else "score"})
        self.dimension, self.budget = runtime.config.hidden_size, _BUDGET
        self.max_length = min(recipe.max_length or runtime.memory.max_context, runtime.memory.max_context)
        self._worker = Worker(Engine(runtime))
        weakref.finalize(self, self._worker.stop, 0.0).atexit = False

    def start(self, items: Sequence[Item], wanted: frozenset[Output]) -> Callable[[], list[Vectors]]:
        mailbox, requests = EventMailbox(1), list[EngineRequest]()
        for item in items:
            boundaries = (item.prompt,) if 0 < item.prompt < len(item) else ()
            requests.append(EngineRequest(uuid.uuid4().hex, tuple(item.ids), Embed(), boundaries,
                                          cache_salt=item.cache_salt))
        self._worker.submit(requests, mailbox, mailbox.on_reply)
        return lambda: self._collect([request.id for request in requests], mailbox)

    def close(self) -> None:
        if self._worker.stop(60.0, "the model has been closed: load it again") and not self._worker.forked:
            self._worker.engine.close()

    def _collect(self, ids: Sequence[str], mailbox: EventMailbox) -> list[Vectors]:
        """Waits for the results of the requests."""
        found: dict[str, Vectors] = {}
        while len(found) < len(ids):
            for event in mailbox.get():
                if isinstance(event, VectorEvent):
                    found[event.request] = self._vectors(np.array(event.vector, np.float32))
                elif event.finish:
                    found[event.request] = Vectors(error=event.error or f"the engine ended it: {event.finish}")
        return [found[id] for id in ids]

    def _vectors(self, state: NDArray[Any]) -> Vectors:
        if self._judge is not None:
            logit = float(state.astype(np.float64) @ self._judge.double().numpy())
            return Vectors(score=float(1 / (1 + np.exp(-logit))))
        if self.recipe.normalize:
            state = (state.astype(np.float64) / max(float(np.linalg.norm(state)), 1e-12)).astype(np.float32)
        return Vectors(dense=state)


def load_decoder(name: str, place: Path, task: str, options: EngineConfig, revision: str | None = None,
                 progress: Progress | None = None) -> DecoderTextModel:
    """Loads a decoder. With task "auto", the model is a reranker if its name contains "rerank"."""
    file = GgufFile.open(place) if place.is_file() else None
    directory = place.parent if file else place
    if file and gives_vectors(file):
        recipe = read_gguf_recipe(file)
    else:
        recipe = read_recipe(directory, pooling="lasttoken")
    if recipe.pooling != ("lasttoken",) or recipe.dense:
        raise ModelError(f"{place}: decoders give the state of the last token; this one asks for "
                         f"{', '.join(recipe.pooling)}{' and Dense layers' if recipe.dense else ''}")
    runtime = load(name, replace(options, speculate="off"), revision, progress, vectors=True)
    reranks = task == "rerank" or (task == "auto" and "rerank" in place.name.lower())
    return DecoderTextModel(name, runtime, recipe, _judge(runtime, directory) if reranks else None)


def decoder_texts(decoder: DecoderTextModel, max_length: int) -> EncoderTokenizer:
    """Returns the decoder's tokenizer, from tokenizer.json or its GGUF file."""
    stored, path = decoder.runtime.tokenizer, decoder.runtime.path
    assert path is not None
    if stored is None:
        return EncoderTokenizer.read(path / "tokenizer.json", max_length, decoder.recipe.lower)
    return EncoderTokenizer(backend_of(stored.tokenizer, path), max_length, decoder.recipe.lower)


def reranker_pairs(texts: EncoderTokenizer, instruction: str | None
                   ) -> Callable[[str, Sequence[str], bool, str | None], list[Item]]:
    """Returns a function that builds a Qwen3-Reranker's items from a query and documents.

    instruction: used for requests without an instruction of their own.
    """
    def pairs(query: str, documents: Sequence[str], truncate: bool, requested: str | None) -> list[Item]:
        before, after = texts.raw([_BEFORE, _AFTER])
        head = f"<Instruct>: {requested or instruction or _INSTRUCTION}\n<Query>: {query}\n<Document>: "
        return texts.framed(before, head, documents, after, truncate)
    return pairs


def _judge(runtime: ModelRunner, directory: Path) -> Tensor:
    """Returns the head's row of yes minus its row of no [H]."""
    stored = runtime.tokenizer.tokenizer if runtime.tokenizer else (directory / "tokenizer.json").read_text("utf-8")
    backend = backend_of(stored, directory)

    def row(word: str) -> Tensor:
        id = backend.token_to_id(word)
        if id is None:
            raise ModelError(f"{directory} cannot judge: its vocabulary has no token {word!r}")
        return _head_row(runtime, id)

    return row("yes") - row("no")


def _head_row(runtime: ModelRunner, id: int) -> Tensor:
    head = runtime.decoder.weights.head
    for part in head if isinstance(head, tuple) else (head,):
        if id < len(part):
            row = part.lookup(torch.tensor([id]))[0] if isinstance(part, QTensor) else part[id]
            return row.float().cpu()
        id -= len(part)
    raise ModelError(f"the model's head has no token {id}")
