"""Runs encoders of the BERT family: vectors, sparse weights and token vectors of texts, scores of pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from deltic.config import DType, EngineConfig
from deltic.embeddings.bert_config import EncoderConfig
from deltic.embeddings.directory import StoredEncoder
from deltic.embeddings.heads import Heads, pooled
from deltic.embeddings.sentence_transformers import Recipe
from deltic.embeddings.types import Item, Output, Vectors
from deltic.embeddings.weights import WeightForm, read_weights
from deltic.errors import ConfigError, ModelError
from deltic.export.program import check_options
from deltic.loader.safetensors import TORCH_DTYPES, Progress
from deltic.ops.cpu import missing, pool_of, torch_threads
from deltic.ops.cpu.encoder import encoder_run
from deltic.ops.cpu.kernels import linear as native_linear
from deltic.ops.cpu.library import ThreadPool
from deltic.ops.encoder import Affine, EncoderWeights, Ragged
from deltic.ops.memory import Workspace
from deltic.ops.torch import encoder as torch_ops
from deltic.ops.torch.basic import embed
from deltic.ops.torch.basic import linear as torch_linear

_NOT_FINITE: Final = "the model gave no numbers (NaN or infinite): its weights, dtype or a kernel are broken"

States = Callable[[Ragged], Tensor]
"""Computes the last layer's states [T, H] of a batch."""


@dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """Where an encoder runs."""

    device: torch.device
    dtype: torch.dtype
    pool: ThreadPool | None = None
    """Threads of the compiled CPU kernels; None: torch computes."""
    cuda_kernels: bool = False

    def linear(self, x: Tensor, affine: Affine) -> Tensor:
        """x [N, in] -> [N, out] float32. With the compiled kernels a row does not depend on the others."""
        if self.pool is not None:
            return native_linear(self.pool, x, affine.weight) + affine.bias
        return torch_linear(x.float(), affine.weight) + affine.bias


class Bert:
    """A loaded encoder, a `TextModel`."""

    def __init__(self, name: str, config: EncoderConfig, states: States, heads: Heads, machine: Machine,
                 recipe: Recipe, budget: int) -> None:
        self.name, self.config, self.recipe, self.budget = name, config, recipe, budget
        self._states, self._heads, self._machine = states, heads, machine
        self.outputs = heads.outputs
        self.overlaps = machine.device.type != "cpu"
        self.dimension = heads.dimension(len(recipe.pooling) * config.hidden_size)
        self.max_length = min(recipe.max_length or config.max_length, config.max_length)
        self._workspace = Workspace() if self.overlaps else None

    def start(self, items: Sequence[Item], wanted: frozenset[Output]) -> Callable[[], list[Vectors]]:
        if self._machine.pool is not None:  # two spinning thread pools would slow each other down
            torch_threads(1)
        with torch.inference_mode(), self._own_memory():
            found = {name: _to_host(rows) for name, rows in self._outputs(items, wanted).items()}
            done = torch.cuda.Event() if self.overlaps else None
            if done is not None:
                done.record(torch.cuda.current_stream(self._machine.device))

        def finish() -> list[Vectors]:
            if done is not None:
                done.synchronize()
            with torch.inference_mode():
                return self._vectors(items, found)
        return finish

    def hidden(self, items: Sequence[Item]) -> Tensor:
        """Returns the last layer's states of all tokens [T, H]."""
        return self._states(self._ragged(items))

    def warm_up(self) -> None:
        """Runs a batch of the largest size, which reserves its device memory before other models measure the rest."""
        length = min(self.budget, self.max_length)
        self.start([Item((0,) * length)] * (self.budget // length), self.outputs)()

    def close(self) -> None:
        """Does nothing: the memory is freed with the object."""

    def _outputs(self, items: Sequence[Item], wanted: frozenset[Output]) -> dict[str, Tensor]:
        """Returns tensors on the device: dense [N, D], score [N]; for each token sparse [T, 1], colbert [T, D], and
        always finite [T] bool."""
        lengths, hidden = [len(item) for item in items], self.hidden(items)
        found = {"finite": torch.isfinite(hidden.sum(1, dtype=torch.float32))}
        if "dense" in wanted:
            found["dense"] = self._dense(items, hidden, lengths)
        if "sparse" in wanted and self._heads.sparse is not None:
            found["sparse"] = self._machine.linear(hidden, self._heads.sparse)
        if "colbert" in wanted and self._heads.colbert is not None:
            found["colbert"] = self._machine.linear(hidden, self._heads.colbert)
        if "score" in wanted:
            found["score"] = self._scores(hidden, lengths)
        return found

    def _vectors(self, items: Sequence[Item], outputs: Mapping[str, Tensor]) -> list[Vectors]:
        """Returns the items' results. outputs: on the host."""
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
            found["colbert"] = F.normalize(rows["colbert"][1:], dim=-1, eps=1e-12).cpu().numpy()
        if "score" in rows:
            found["score"] = rows["score"].item()
        return Vectors(**found)

    def _dense(self, items: Sequence[Item], hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        prompts = [0 if self.recipe.with_prompt else item.prompt for item in items]
        rows = pooled(hidden, lengths, prompts, self.recipe.pooling)
        for affine, activation in self._heads.dense:
            rows = activation(self._machine.linear(rows, affine))
        return rows

    def _scores(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        assert self._heads.classifier is not None
        dense, last = self._heads.classifier
        rows = torch.tanh(self._machine.linear(pooled(hidden, lengths, [], ("cls",)), dense))
        return self._heads.activation(self._machine.linear(rows, last)[:, 0])

    def _ragged(self, items: Sequence[Item]) -> Ragged:
        lengths = [len(item) for item in items]
        ids = torch.from_numpy(np.fromiter(chain.from_iterable(item.ids for item in items), np.int64, sum(lengths)))
        types = torch.zeros_like(ids)
        if self.config.family == "bert" and any(item.token_types for item in items):  # RoBERTa has no token types
            types = torch.tensor([each for item in items for each in item.token_types or (0,) * len(item)])
        starts = torch.tensor([0, *accumulate(lengths)])
        places = torch.arange(len(ids)) - starts[:-1].repeat_interleave(starts.diff()) + self.config.first_position
        ids, places, types = (torch_ops.on_device(each, self._machine.device) for each in (ids, places, types))
        return Ragged(ids, places, types, starts)

    def _own_memory(self) -> AbstractContextManager[None]:
        """Keeps a batch's device memory for this model, even while it is idle: weights that are loaded later would
        else take its place, and the next batch would need more."""
        if self._workspace is None:
            return nullcontext()
        return self._workspace.use(self._machine.device)


def _to_host(rows: Tensor) -> Tensor:
    """Returns a copy on the host, which is complete when the device has reached this point."""
    if rows.device.type == "cpu":
        return rows
    return torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True).copy_(rows, non_blocking=True)


def _sparse_weights(item: Item, column: Tensor) -> dict[int, float]:
    """Returns the largest positive weight of each token id (BGE-M3, arXiv 2402.03216)."""
    weights: dict[int, float] = {}
    for id, weight in zip(item.ids, column.clamp(min=0).tolist(), strict=True):
        if weight > weights.get(id, 0.0):
            weights[id] = weight
    return weights


# Loading


def load_bert(name: str, stored: StoredEncoder, options: EngineConfig, progress: Progress | None = None) -> Bert:
    """Loads an encoder. Raises ModelError naming the file, key or tensor, ConfigError naming the option."""
    config = stored.config
    if config.labels > 1:
        raise ModelError(f"{stored.place}: the classifier has {config.labels} labels; rerankers have one")
    if stored.compiled:
        return _load_compiled(name, stored, options)
    assert options.token_budget
    machine = _machine(options, config)
    packed = machine.pool is not None
    if options.quant != "none" and not packed:
        raise ConfigError(f"quant={options.quant} needs the compiled kernels, which run on a CPU only", "quant")
    form = WeightForm(_dtype(options), options.device, options.quant, packed)
    heads = stored.heads(form)
    weights = read_weights(config, stored.sources, form, progress)
    bert = Bert(name, config, _states_of(weights, machine), heads, machine, stored.recipe, options.token_budget)
    if machine.device.type != "cpu":
        bert.warm_up()
    return bert


def _load_compiled(name: str, stored: StoredEncoder, options: EngineConfig) -> Bert:
    """Loads an encoder that TVM compiled; torch computes the heads on the CPU."""
    from deltic.embeddings.compiled import CompiledEncoder  # needs an extra

    check_options(options)
    options = replace(options, device="cpu")
    program = CompiledEncoder(stored.place, stored.config, options.threads_for(_parameter_count(stored.config)))
    heads = stored.heads(WeightForm("float32", "cpu", "none", False))
    assert options.token_budget
    return Bert(name, stored.config, program.hidden, heads, Machine(torch.device("cpu"), torch.float32), stored.recipe,
                options.token_budget)


def _states_of(weights: EncoderWeights, machine: Machine) -> States:
    native = None
    if machine.pool is not None:
        native = encoder_run(machine.pool, weights)
    elif machine.cuda_kernels:
        from deltic.ops.cuda.encoder import encoder_run as cuda_run

        native = cuda_run(weights)
    run = native or partial(torch_ops.run, weights)

    def states(batch: Ragged) -> Tensor:
        words = embed(batch.ids, weights.words, machine.dtype)
        return run(batch, torch_ops.embeddings(weights, batch, words))
    return states


def _dtype(options: EngineConfig) -> DType:
    """Returns the option's dtype; by default bfloat16 on a GPU, where float32 is many times slower."""
    if options.dtype != "auto":
        return options.dtype  # type: ignore[return-value]
    return "float32" if options.device == "cpu" else "bfloat16"


def _machine(options: EngineConfig, config: EncoderConfig) -> Machine:
    """Chooses the compiled kernels, unless they are missing, or ops=torch or the device leaves the work to torch."""
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {options.device}: torch finds no CUDA device here; use `device='cpu'`", "device")
    torch_only = options.ops in (("torch",), ("reference",))
    if options.device != "cpu":
        return Machine(torch.device(options.device), TORCH_DTYPES[_dtype(options)], None, not torch_only)
    if torch_only or missing():
        return Machine(torch.device("cpu"), TORCH_DTYPES[_dtype(options)])
    threads = options.threads_for(_parameter_count(config))
    return Machine(torch.device("cpu"), torch.float32, pool_of(options.cpu_level, threads))


def _parameter_count(config: EncoderConfig) -> int:
    """Returns the numbers of the layers' matrices."""
    return config.layers * config.hidden_size * (4 * config.hidden_size + 2 * config.intermediate_size)
