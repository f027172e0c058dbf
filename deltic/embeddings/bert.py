"""Runs encoders of the BERT family: vectors, sparse weights and token vectors of texts, scores of pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from deltic.config import EngineConfig
from deltic.embeddings.directory import Heads, StoredEncoder
from deltic.embeddings.sentence_transformers import Recipe
from deltic.embeddings.types import Item, Output, Vectors
from deltic.embeddings.weights import EncoderConfig, read_weights
from deltic.errors import ConfigError, ModelError
from deltic.export.program import check_options
from deltic.loader.safetensors import TORCH_DTYPES, Progress
from deltic.ops.encoder import EncoderBackend, EncoderWeights, Ragged, select_backend
from deltic.ops.memory import Workspace
from deltic.ops.torch.basic import embed
from deltic.ops.torch.encoder import embeddings, on_device, segment_reduce, to_host

_SHORT_TEXT: Final = 16
"""Number of tokens of a short text (`Bert.warm_up`)."""
_NOT_FINITE: Final = "the model gave no numbers (NaN or infinite): its weights, dtype or a kernel are broken"

States = Callable[[Ragged], Tensor]
"""Computes the last layer's states [T, H] of a batch."""


class Bert:
    """A loaded encoder, a `TextModel`."""

    def __init__(self, name: str, config: EncoderConfig, states: States, heads: Heads, backend: EncoderBackend,
                 recipe: Recipe, budget: int) -> None:
        self.name, self.config, self.recipe, self.budget = name, config, recipe, budget
        self._states, self._heads, self._backend = states, heads, backend
        self.outputs = heads.outputs
        self.overlaps = backend.overlaps
        self.dimension = heads.dimension(len(recipe.pooling) * config.hidden_size)
        self.max_length = min(recipe.max_length or config.max_length, config.max_length)
        self._workspace = Workspace() if self.overlaps else None

    def start(self, items: Sequence[Item], wanted: frozenset[Output]) -> Callable[[], list[Vectors]]:
        with torch.inference_mode(), self._own_memory():
            found, wait = to_host(self._outputs(items, wanted))

        def finish() -> list[Vectors]:
            wait()
            with torch.inference_mode():
                return self._vectors(items, found)
        return finish

    def hidden(self, items: Sequence[Item]) -> Tensor:
        """Returns the last layer's states of all tokens [T, H]."""
        return self._states(self._ragged(items))

    def warm_up(self) -> None:
        """Runs batches of the largest size, which reserves their device memory before other models measure the rest.

        Long texts need the most memory for attention, short texts for results. As in service, the next batch starts
        before the results of the previous one are read.
        """
        finish: list[Callable[[], list[Vectors]]] = []
        for length in (min(self.budget, self.max_length), min(self.budget, _SHORT_TEXT)):
            batch = [Item((0,) * length)] * (self.budget // length)
            finish += [self.start(batch, self.outputs), self.start(batch, self.outputs)]
            finish.pop(0)()
        for each in finish:
            each()

    def close(self) -> None:
        """Does nothing: the memory is freed with the object."""

    def _outputs(self, items: Sequence[Item], wanted: frozenset[Output]) -> dict[str, Tensor]:
        """Returns tensors on the device: dense [N, D], score [N]; and for each token sparse [T, 1], colbert [T, D]
        and, in all cases, finite [T] bool."""
        lengths, hidden = [len(item) for item in items], self.hidden(items)
        found = {"finite": torch.isfinite(hidden.sum(1, dtype=torch.float32))}
        if "dense" in wanted:
            found["dense"] = self._dense(items, hidden, lengths)
        if "sparse" in wanted and self._heads.sparse is not None:
            found["sparse"] = self._backend.linear(hidden, self._heads.sparse)
        if "colbert" in wanted and self._heads.colbert is not None:
            found["colbert"] = self._backend.linear(hidden, self._heads.colbert)
        if "score" in wanted:
            found["score"] = self._scores(hidden, lengths)
        return found

    def _vectors(self, items: Sequence[Item], outputs: Mapping[str, Tensor]) -> list[Vectors]:
        """Returns the items' results. outputs: tensors on the host."""
        lengths = [len(item) for item in items]
        by_item: dict[str, Any] = {
            name: rows.split(lengths) if name in ("finite", "sparse", "colbert") else rows
            for name, rows in outputs.items()}
        return [self._item_vectors(item, {name: rows[index] for name, rows in by_item.items()})
                for index, item in enumerate(items)]

    def _item_vectors(self, item: Item, rows: Mapping[str, Tensor]) -> Vectors:
        if not bool(rows["finite"].all()):
            return Vectors(error=_NOT_FINITE)
        found: dict[str, Any] = {}
        if "dense" in rows:
            row = rows["dense"].clone()
            found["dense"] = (F.normalize(row, dim=0, eps=1e-12) if self.recipe.normalize else row).numpy()
        if "sparse" in rows:
            found["sparse"] = _sparse_weights(item, rows["sparse"][:, 0])
        if "colbert" in rows:
            found["colbert"] = F.normalize(rows["colbert"][1:], dim=-1, eps=1e-12).numpy()
        if "score" in rows:
            found["score"] = rows["score"].item()
        return Vectors(**found)

    def _dense(self, items: Sequence[Item], hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        prompts = [0 if self.recipe.with_prompt else item.prompt for item in items]
        rows = _pooled(hidden, lengths, prompts, self.recipe.pooling)
        for affine, activation in self._heads.dense:
            rows = activation(self._backend.linear(rows, affine))
        return rows

    def _scores(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        assert self._heads.classifier is not None
        dense, last = self._heads.classifier
        rows = torch.tanh(self._backend.linear(_pooled(hidden, lengths, [], ("cls",)), dense))
        return self._heads.activation(self._backend.linear(rows, last)[:, 0])

    def _ragged(self, items: Sequence[Item]) -> Ragged:
        lengths = [len(item) for item in items]
        ids = torch.from_numpy(np.fromiter(chain.from_iterable(item.ids for item in items), np.int64, sum(lengths)))
        types = torch.zeros_like(ids)
        if self.config.family == "bert" and any(item.token_types for item in items):  # RoBERTa has no token types
            types = torch.tensor([each for item in items for each in item.token_types or (0,) * len(item)])
        starts = torch.tensor([0, *accumulate(lengths)])
        places = torch.arange(len(ids)) - starts[:-1].repeat_interleave(starts.diff()) + self.config.first_position
        ids, places, types = (on_device(each, self._backend.device) for each in (ids, places, types))
        return Ragged(ids, places, types, starts)

    def _own_memory(self) -> AbstractContextManager[None]:
        """Reserves a batch's device memory for this model, even while it is idle. Otherwise weights that are loaded
        later would occupy this memory, and the next batch would need more."""
        if self._workspace is None:
            return nullcontext()
        return self._workspace.use(self._backend.device)


def _sparse_weights(item: Item, column: Tensor) -> dict[int, float]:
    """Returns the largest positive weight of each token id (BGE-M3, arXiv 2402.03216)."""
    weights: dict[int, float] = {}
    for id, weight in zip(item.ids, column.clamp(min=0).tolist(), strict=True):
        if weight > weights.get(id, 0.0):
            weights[id] = weight
    return weights


# Pooling

def _pooled(states: Tensor, lengths: Sequence[int], prompts: Sequence[int], poolings: Sequence[str]) -> Tensor:
    """Pools the states [T, H] of N texts, one after another. Returns vectors [N, H * poolings] float32.

    A text's vector depends only on its own states. prompts: number of leading tokens of each text that are not pooled,
    except for cls and lasttoken.
    """
    sizes, skipped = torch.tensor(lengths), torch.tensor(prompts)
    ends = sizes.cumsum(0)
    firsts = ends - sizes
    vectors = []
    for pooling in poolings:
        if pooling in ("cls", "lasttoken"):
            indices = firsts if pooling == "cls" else ends - 1
            vectors.append(states[indices.to(states.device)].float())
            continue
        rows, places = states, torch.arange(int(ends[-1])) - firsts.repeat_interleave(sizes)
        if any(prompts):
            kept = places >= skipped.repeat_interleave(sizes)
            rows, places = states[kept.to(states.device)], places[kept]
        vectors.append(_reduced(pooling, rows.float(), places.to(states.device), (sizes - skipped).to(states.device)))
    return torch.cat(vectors, 1)


def _reduced(pooling: str, rows: Tensor, places: Tensor, lengths: Tensor) -> Tensor:
    match pooling:
        case "max" | "mean":
            return segment_reduce(rows, pooling, lengths)
        case "mean_sqrt_len":
            return segment_reduce(rows, "sum", lengths) / lengths[:, None].sqrt()
        case "weightedmean":  # a token's weight is its position, counted from 1
            weights = (places + 1).to(rows.dtype)[:, None]
            return segment_reduce(rows * weights, "sum", lengths) / segment_reduce(weights, "sum", lengths)
    raise AssertionError(f"{pooling} is no pooling")


# Loading


def load_bert(name: str, stored: StoredEncoder, options: EngineConfig, progress: Progress | None = None) -> Bert:
    """Loads an encoder. Raises ModelError naming the file, key or tensor, ConfigError naming the option."""
    config = stored.config
    if config.labels > 1:
        raise ModelError(f"{stored.place}: the classifier has {config.labels} labels; rerankers have one")
    if stored.compiled:
        return _load_compiled(name, stored, options)
    assert options.token_budget
    dtype = TORCH_DTYPES.get(options.dtype)  # type: ignore[call-overload]  # None: auto
    torch_only = options.ops in (("torch",), ("reference",))
    backend = select_backend(options.device, dtype, torch_only, options.cpu_level, _threads(options, config))
    if options.quant != "none" and not backend.packs:
        raise ConfigError(f"quant={options.quant} needs the compiled kernels, which run on a CPU only", "quant")
    heads = stored.heads(backend)
    weights = read_weights(config, stored.sources, backend, options.quant, progress)
    bert = Bert(name, config, _states_of(weights, backend), heads, backend, stored.recipe, options.token_budget)
    if backend.overlaps:
        bert.warm_up()
    return bert


def _load_compiled(name: str, stored: StoredEncoder, options: EngineConfig) -> Bert:
    """Loads an encoder that TVM compiled; torch computes the heads on the CPU."""
    from deltic.embeddings.compiled import CompiledEncoder  # needs an extra

    check_options(options)
    options = replace(options, device="cpu")
    program = CompiledEncoder(stored.place, stored.config, _threads(options, stored.config))
    backend = select_backend("cpu", torch.float32, torch_only=True)
    assert options.token_budget
    return Bert(name, stored.config, program.hidden, stored.heads(backend), backend, stored.recipe,
                options.token_budget)


def _states_of(weights: EncoderWeights, backend: EncoderBackend) -> States:
    run = backend.run(weights)

    def states(batch: Ragged) -> Tensor:
        words = embed(batch.ids, weights.words, backend.activations)
        return run(batch, embeddings(weights, batch, words))
    return states


def _threads(options: EngineConfig, config: EncoderConfig) -> int:
    """Returns the number of threads for the matrix products of the layers."""
    hidden = config.hidden_size
    return options.threads_for(config.layers * hidden * (4 * hidden + 2 * config.intermediate_size))
