"""Encoders of the BERT family: vectors, sparse weights and token vectors of texts, scores of pairs."""

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
from deltic.embeddings.heads import Heads
from deltic.embeddings.pooling import pooled
from deltic.embeddings.sentence_transformers import Recipe
from deltic.embeddings.types import Item, Output, Vectors
from deltic.embeddings.weights import WeightForm, read_weights
from deltic.errors import ConfigError, ModelError
from deltic.export.options import check_compiled
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

_NO_NUMBERS: Final = "the model gave no numbers (NaN or infinite): its weights, dtype or a kernel are broken"


@dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """What computes. pool: the compiled kernels' threads; None: torch serves, on the device, in the dtype. kernels:
    with kernels of our own on a GPU, where they know the model."""

    device: torch.device
    dtype: torch.dtype
    pool: ThreadPool | None
    kernels: bool = False

    def linear(self, x: Tensor, affine: Affine) -> Tensor:
        """x [N, in] -> [N, out] float32; with the kernels a row does not depend on the others."""
        if self.pool is not None:
            return native_linear(self.pool, x, affine.weight) + affine.bias
        return torch_linear(x.float(), affine.weight) + affine.bias


States = Callable[[Ragged], Tensor]
"""Gives the last layer's states [T, H] of a batch."""


class Bert:
    """An encoder that is loaded; a `TextModel`."""

    def __init__(self, name: str, config: EncoderConfig, states: States, heads: Heads, machine: Machine,
                 recipe: Recipe, budget: int) -> None:
        self.name, self.config, self.recipe, self.budget = name, config, recipe, budget
        self._states, self._heads, self._machine = states, heads, machine
        self.outputs, self.ahead = heads.outputs, machine.device.type != "cpu"
        self._workspace = Workspace() if self.ahead else None
        self.dimension = heads.dimension(len(recipe.pooling) * config.hidden_size)
        self.max_length = min(recipe.max_length or config.max_length, config.max_length)

    def start(self, items: Sequence[Item], wanted: frozenset[Output]) -> Callable[[], list[Vectors]]:
        if self._machine.pool is not None:  # two pools of threads that take turns would spin in each other's way
            torch_threads(1)
        with torch.inference_mode(), self._own_memory():
            found = {name: _to_host(rows) for name, rows in self._outputs(items, wanted).items()}
            done = torch.cuda.Event() if self.ahead else None
            if done is not None:
                done.record(torch.cuda.current_stream(self._machine.device))

        def finish() -> list[Vectors]:
            if done is not None:
                done.synchronize()
            with torch.inference_mode():
                return self._vectors(items, found)
        return finish

    def _outputs(self, items: Sequence[Item], wanted: frozenset[Output]) -> dict[str, Tensor]:
        """What the model gives, on its device: dense [N, D], score [N]; of each token sparse [T, 1], colbert [T, D]
        and, always, healthy [T] bool."""
        lengths, hidden = [len(item) for item in items], self.hidden(items)
        found = {"healthy": torch.isfinite(hidden.sum(1, dtype=torch.float32))}
        if "dense" in wanted:
            found["dense"] = self._dense(items, hidden, lengths)
        for output, apply in (("sparse", self._heads.sparse), ("colbert", self._heads.colbert)):
            if output in wanted and apply is not None:
                found[output] = self._machine.linear(hidden, apply)
        if "score" in wanted:
            found["score"] = self._scores(hidden, lengths)
        return found

    def _vectors(self, items: Sequence[Item], outputs: Mapping[str, Tensor]) -> list[Vectors]:
        """The texts' results, of those outputs on the host."""
        lengths, found = [len(item) for item in items], [Vectors() for _ in items]
        if "dense" in outputs:
            rows = outputs["dense"].clone()
            found = [replace(vectors, dense=self._finished(row).numpy())
                     for vectors, row in zip(found, rows, strict=True)]
        for output in outputs.keys() & {"sparse", "colbert"}:
            found = [replace(vectors, **{output: _of_tokens(output, item, each)})
                     for vectors, item, each in zip(found, items, outputs[output].split(lengths), strict=True)]
        if "score" in outputs:
            found = [replace(vectors, score=score)
                     for vectors, score in zip(found, outputs["score"].tolist(), strict=True)]
        return [vectors if bool(fine.all()) else Vectors(error=_NO_NUMBERS)
                for vectors, fine in zip(found, outputs["healthy"].split(lengths), strict=True)]

    def _finished(self, row: Tensor) -> Tensor:
        return F.normalize(row, dim=0, eps=1e-12) if self.recipe.normalize else row

    def hidden(self, items: Sequence[Item]) -> Tensor:
        """The last layer's states of all tokens, one item after another [T, H]."""
        return self._states(self._ragged(items))

    def warm_up(self) -> None:
        """Run a batch as large as they come, so that the device's memory for it is taken, and kept, before other models
        look how much is left."""
        length = min(self.budget, self.max_length)
        self.start([Item((0,) * length)] * (self.budget // length), self.outputs)()

    def close(self) -> None:
        """The memory goes with the object."""

    def _own_memory(self) -> AbstractContextManager[None]:
        """Where what a batch takes on a device is this model's, also while nothing runs: else weights that are loaded
        later would come to lie there, and the next batch would take more."""
        if self._workspace is None:
            return nullcontext()
        return self._workspace.use(self._machine.device)

    def _ragged(self, items: Sequence[Item]) -> Ragged:
        lengths, device = [len(item) for item in items], self._machine.device
        ids = torch.from_numpy(np.fromiter(chain.from_iterable(item.ids for item in items), np.int64, sum(lengths)))
        kinds = torch.zeros_like(ids)
        if self.config.family == "bert" and any(item.kinds for item in items):  # RoBERTa is never told any
            kinds = torch.tensor([kind for item in items for kind in item.kinds or (0,) * len(item)])
        starts = torch.tensor([0, *accumulate(lengths)])
        places = torch.arange(len(ids)) - starts[:-1].repeat_interleave(starts.diff()) + self.config.first_place
        ids, places, kinds = (torch_ops.on_device(each, device) for each in (ids, places, kinds))
        return Ragged(ids, places, kinds, starts)

    def _dense(self, items: Sequence[Item], hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        recipe = self.recipe
        prompts = [0 if recipe.with_prompt else item.prompt for item in items]
        rows = pooled(hidden, lengths, prompts, recipe.pooling)
        for affine, activation in self._heads.dense:
            rows = activation(self._machine.linear(rows, affine))
        return rows

    def _scores(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        assert self._heads.classifier is not None
        dense, last = self._heads.classifier
        rows = torch.tanh(self._machine.linear(pooled(hidden, lengths, [], ("cls",)), dense))
        return self._heads.activation(self._machine.linear(rows, last)[:, 0])


def _to_host(rows: Tensor) -> Tensor:
    """A copy that is there when the device has come so far."""
    if rows.device.type == "cpu":
        return rows
    return torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True).copy_(rows, non_blocking=True)


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


def _states_of(weights: EncoderWeights, machine: Machine) -> States:
    """What runs an encoder's layers on a machine."""
    native = None
    if machine.pool is not None:
        native = encoder_run(machine.pool, weights)
    elif machine.kernels:
        from deltic.ops.cuda.encoder import encoder_run as cuda_run  # only where there is a card

        native = cuda_run(weights)
    run = native or partial(torch_ops.run, weights)

    def states(batch: Ragged) -> Tensor:
        words = embed(batch.ids, weights.words, machine.dtype)
        return run(batch, torch_ops.embeddings(weights, batch, words))
    return states


def _load_compiled(name: str, stored: StoredEncoder, options: EngineConfig) -> Bert:
    """An encoder whose states a library gives that TVM has compiled; torch does what comes behind them."""
    from deltic.embeddings.compiled import CompiledEncoder  # needs an extra

    check_compiled(options)
    options = replace(options, device="cpu")  # where torch computes, whatever runs the library
    config, device = stored.config, torch.device("cpu")
    program = CompiledEncoder(stored.place, config, options.threads_for(_size(config)))
    heads = stored.heads(WeightForm("float32", "cpu", "none", False))
    assert options.token_budget
    return Bert(name, config, program.hidden, heads, Machine(device, torch.float32, None), stored.recipe,
                options.token_budget)


def load_bert(name: str, stored: StoredEncoder, options: EngineConfig, progress: Progress | None = None) -> Bert:
    """Load an encoder. ModelError names the file, key or tensor that cannot be used; ConfigError an option."""
    config = stored.config
    if config.labels > 1:
        raise ModelError(f"{stored.place}: the classifier has {config.labels} labels; rerankers have one")
    if stored.compiled:
        return _load_compiled(name, stored, options)
    machine = _machine(options, config)
    packed = machine.pool is not None
    if options.quant != "none" and not packed:
        raise ConfigError(f"quant={options.quant} needs the compiled kernels, which serve on a CPU alone", "quant")
    form = WeightForm(_dtype(options), options.device, options.quant, packed)
    heads = stored.heads(form)
    weights = read_weights(config, stored.sources, form, progress)
    assert options.token_budget
    bert = Bert(name, config, _states_of(weights, machine), heads, machine, stored.recipe, options.token_budget)
    if machine.device.type != "cpu":
        bert.warm_up()
    return bert


def _dtype(options: EngineConfig) -> DType:
    """bfloat16 on a GPU, where float32 is many times slower, unless another one is asked for."""
    if options.dtype != "auto":
        return options.dtype  # type: ignore[return-value]
    return "float32" if options.device == "cpu" else "bfloat16"


def _machine(options: EngineConfig, config: EncoderConfig) -> Machine:
    """The compiled kernels, unless they are absent, or the device or an option (ops=torch) leaves the work to torch."""
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {options.device}: torch finds no CUDA device here; use `device='cpu'`", "device")
    plain = options.ops in (("torch",), ("reference",))
    if options.device != "cpu" or missing() or plain:
        return Machine(torch.device(options.device), TORCH_DTYPES[_dtype(options)], None,
                       options.device != "cpu" and not plain)
    return Machine(torch.device("cpu"), torch.float32, pool_of(options.cpu_level, options.threads_for(_size(config))))


def _size(config: EncoderConfig) -> int:
    """Numbers of the layers' matrices."""
    return config.layers * config.hidden_size * (4 * config.hidden_size + 2 * config.intermediate_size)


