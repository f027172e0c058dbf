"""Encoders of the BERT family: vectors, sparse weights and token vectors of texts, scores of pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from deltic.config import EngineConfig
from deltic.encoders.config import EncoderConfig
from deltic.encoders.heads import Heads, read_heads
from deltic.encoders.items import Item, Output, Vectors
from deltic.encoders.recipe import Recipe, read_recipe
from deltic.encoders.weights import Form, find_sources, read_weights
from deltic.errors import ConfigError, ModelError
from deltic.ops import encoder as torch_ops
from deltic.ops.cpu import missing, pool_of, torch_threads
from deltic.ops.cpu.encoder import encoder_run
from deltic.ops.cpu.kernels import linear as native_linear
from deltic.ops.cpu.library import Pool
from deltic.ops.encoder import Affine, EncoderWeights, Ragged
from deltic.ops.torch.basic import embed
from deltic.ops.torch.basic import linear as torch_linear
from deltic.weights.files import read_json
from deltic.weights.safetensors import TORCH_DTYPES, Progress

_NO_NUMBERS: Final = "the model gave no numbers (NaN or infinite): its weights, dtype or a kernel are broken"


@dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """What computes. pool: the compiled kernels' threads; None: torch serves, on the device, in the dtype."""

    device: torch.device
    dtype: torch.dtype
    pool: Pool | None

    def linear(self, x: Tensor, affine: Affine) -> Tensor:
        """x [N, in] -> [N, out] float32; with the kernels a row does not depend on the others."""
        if self.pool is not None:
            return native_linear(self.pool, x, affine.weight) + affine.bias
        product = torch_linear(x.to(self.dtype), affine.weight)
        return product.float() + affine.bias


class Bert:
    """An encoder that is loaded; a `TextModel`."""

    def __init__(self, name: str, config: EncoderConfig, weights: EncoderWeights, heads: Heads, machine: Machine,
                 recipe: Recipe, budget: int) -> None:
        self.name, self.config, self.recipe, self.budget = name, config, recipe, budget
        self._weights, self._heads, self._machine = weights, heads, machine
        self._run = self._runner()
        self.outputs = heads.outputs
        self.dimension = heads.dimension(len(recipe.pooling) * config.hidden_size)
        self.max_length = min(recipe.max_length or config.max_length, config.max_length)

    def run(self, items: Sequence[Item], wanted: frozenset[Output]) -> list[Vectors]:
        if self._machine.pool is not None:  # two pools of threads that take turns would spin in each other's way
            torch_threads(1)
        hidden = self.hidden(items).float()
        states = hidden.split([len(item) for item in items])
        found = [Vectors() for _ in items]
        if "dense" in wanted:
            for index, vector in enumerate(self._dense(items, states)):
                found[index] = replace(found[index], dense=vector.numpy())
        for output, apply in (("sparse", self._heads.sparse), ("colbert", self._heads.colbert)):
            if output in wanted and apply is not None:
                rows = self._machine.linear(hidden, apply).split([len(item) for item in items])
                found = [replace(vectors, **{output: _of_tokens(output, item, each)})
                         for vectors, item, each in zip(found, items, rows, strict=True)]
        if "score" in wanted:
            for index, score in enumerate(self._scores(states)):
                found[index] = replace(found[index], score=score)
        healthy = [bool(torch.isfinite(state).all()) for state in states]
        return [vectors if fine else Vectors(error=_NO_NUMBERS) for vectors, fine in zip(found, healthy, strict=True)]

    def hidden(self, items: Sequence[Item]) -> Tensor:
        """The last layer's states of all tokens, one item after another [T, H]."""
        batch = self._ragged(items)
        words = embed(batch.ids, self._weights.words, self._machine.dtype)
        with torch.inference_mode():
            return self._run(batch, torch_ops.embeddings(self._weights, batch, words))

    def close(self) -> None:
        """The memory goes with the object."""

    def _runner(self) -> Callable[[Ragged, Tensor], Tensor]:
        native = encoder_run(self._machine.pool, self._weights) if self._machine.pool else None
        return native or (lambda batch, x: torch_ops.run(self._weights, batch, x))

    def _ragged(self, items: Sequence[Item]) -> Ragged:
        first, device = self.config.first_place, self._machine.device
        ids = torch.tensor([id for item in items for id in item.ids])
        kinds = torch.tensor([kind for item in items for kind in item.kinds or (0,) * len(item)])
        places = torch.cat([torch.arange(first, first + len(item)) for item in items])
        starts = torch.tensor([0, *accumulate(map(len, items))])
        return Ragged(*(tensor.to(device) for tensor in (ids, places, kinds, starts)))

    def _dense(self, items: Sequence[Item], states: Sequence[Tensor]) -> list[Tensor]:
        recipe = self.recipe
        pooled = [torch.cat([_POOLINGS[pooling](state if recipe.with_prompt else _without(state, item.prompt, pooling))
                             for pooling in recipe.pooling]) for item, state in zip(items, states, strict=True)]
        if self._heads.dense:
            rows = torch.stack(pooled)
            for affine, activation in self._heads.dense:
                rows = activation(self._machine.linear(rows, affine))
            pooled = list(rows)
        return [(F.normalize(vector, dim=0, eps=1e-12) if recipe.normalize else vector).cpu() for vector in pooled]

    def _scores(self, states: Sequence[Tensor]) -> list[float]:
        assert self._heads.classifier is not None
        dense, last = self._heads.classifier
        rows = torch.tanh(self._machine.linear(torch.stack([state[0] for state in states]), dense))
        scores: list[float] = self._heads.activation(self._machine.linear(rows, last)[:, 0]).tolist()
        return scores


def _without(state: Tensor, prompt: int, pooling: str) -> Tensor:
    """What is pooled where the prompt's tokens do not count."""
    return state if pooling in ("cls", "lasttoken") else state[prompt:]


def _weighted(state: Tensor) -> Tensor:
    weights = torch.arange(1, len(state) + 1, device=state.device, dtype=state.dtype)
    return (state * weights[:, None]).sum(0) / weights.sum()


_POOLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "cls": lambda state: state[0], "lasttoken": lambda state: state[-1], "max": lambda state: state.amax(0),
    "mean": lambda state: state.mean(0), "mean_sqrt_len": lambda state: state.sum(0) / len(state)**0.5,
    "weightedmean": _weighted}


def _of_tokens(output: str, item: Item, rows: Tensor) -> Any:
    """BGE-M3's other outputs (arXiv 2402.03216): a weight for each token id that occurs, the largest of its places; a
    vector of length 1 for each token after the first."""
    if output == "colbert":
        return F.normalize(rows[1:], dim=-1, eps=1e-12).cpu().numpy()
    weights: dict[int, float] = {}
    for id, weight in zip(item.ids, rows[:, 0].clamp(min=0).tolist(), strict=True):
        if weight > weights.get(id, 0.0):
            weights[id] = weight
    return weights


def load_bert(name: str, directory: Path, options: EngineConfig, progress: Progress | None = None) -> Bert:
    """Load an encoder's directory. ModelError names the file, key or tensor that cannot be used; ConfigError an option.
    """
    path = directory / "config.json"
    mapping = read_json(path)
    try:
        config = EncoderConfig.from_hf(mapping)
        if config.labels > 1:
            raise ModelError(f"the classifier has {config.labels} labels; rerankers have one")
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    machine = _machine(options, config)
    dtype = "float32" if options.dtype == "auto" else options.dtype
    packed = machine.pool is not None
    if options.quant != "none" and not packed:
        raise ConfigError(f"quant={options.quant} needs the compiled kernels, which serve on a CPU alone", "quant")
    sources, form = find_sources(directory, config), Form(dtype, options.device, options.quant, packed)  # type: ignore[arg-type]
    recipe = read_recipe(directory)
    heads = read_heads(directory, config, sources, recipe, form, mapping)
    weights = read_weights(config, sources, form, progress)
    assert options.token_budget
    return Bert(name, config, weights, heads, machine, recipe, options.token_budget)


def _machine(options: EngineConfig, config: EncoderConfig) -> Machine:
    """The compiled kernels, unless they are absent, or the device or an option (ops=torch) leaves the work to torch."""
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {options.device}: torch finds no CUDA device here; use --device cpu", "device")
    dtype = torch.float32 if options.dtype == "auto" else TORCH_DTYPES[options.dtype]  # type: ignore[index]
    if options.device != "cpu" or missing() or options.ops in (("torch",), ("ref",)):
        return Machine(torch.device(options.device), dtype, None)
    size = config.layers * config.hidden_size * (4 * config.hidden_size + 2 * config.intermediate_size)
    return Machine(torch.device("cpu"), torch.float32, pool_of(options.cpu_level, options.threads_for(size)))


