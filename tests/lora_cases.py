"""Random adapters (LoRA) in the files of peft, models that they are merged into, and logits of rows with them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support import DEVICE, small_runtime
from torch import Tensor

from deltic.config import EngineConfig, ModelConfig
from deltic.engine.adapters import AdapterSet
from deltic.engine.loading import ModelOverrides, RandomModel, load
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.loader.names import expected_tensors, is_stack
from deltic.ops.adapters import Adapter, AdapterLayer, LowRank
from deltic.runner.input_batch import build, with_adapters
from deltic.runner.model_runner import ModelRunner

PREFIX = "base_model.model."
SMALL: dict[str, Any] = {"dtype": "float32", "memory": "8MiB", "max_batch": 8, "threads": 1, "device": DEVICE}


def linears(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The linear layers that peft's all-linear finds, the router and lm_head, with the shapes of their matrices."""
    shapes = {name.removesuffix(".weight"): shape for name, shape in expected_tensors(config).items()}
    ends = ("_proj", "_qkv", "_z", "_a", "_b", "gate", "lm_head")
    return {name: shape for name, shape in shapes.items() if len(shape) == 2 and name.endswith(ends)}


def stacks(config: ModelConfig) -> dict[str, tuple[int, int, int]]:
    """The parameters of all experts by the names of their factors in files, as peft nests them."""
    found = dict[str, tuple[int, int, int]]()
    for index in range(config.num_hidden_layers if config.experts else 0):
        assert config.experts
        count, size, hidden = config.experts.count, config.experts.size, config.hidden_size
        found[f"model.layers.{index}.mlp.experts"] = (count, 2 * size, hidden)
        found[f"model.layers.{index}.mlp.experts.base_layer"] = (count, hidden, size)
    return found


def random_adapter(directory: Path, config: ModelConfig, seed: int = 0, rank: int = 4, only: str = "",
                   settings: Mapping[str, Any] | None = None, more: Mapping[str, Tensor] | None = None) -> Path:
    """Writes an adapter. only: what the names of its modules end with."""
    rng = torch.Generator().manual_seed(seed)
    tensors = dict[str, Tensor]()
    for name, shape in (linears(config) | stacks(config)).items():
        if not name.endswith(only):
            continue
        count = shape[0] if len(shape) == 3 else 1
        rows, columns = shape[-2:]
        tensors[f"{PREFIX}{name}.lora_A.weight"] = torch.randn(rank * count, columns, generator=rng) / columns ** 0.5
        tensors[f"{PREFIX}{name}.lora_B.weight"] = torch.randn(rows, rank * count, generator=rng) * 0.1
    return write_adapter(directory, {**tensors, **(more or {})},
                         {"r": rank, "lora_alpha": 2 * rank, **(settings or {})})


def write_adapter(directory: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "adapter_model.safetensors")
    found = {"peft_type": "LORA", "bias": "none", "lora_alpha": 8, **settings}
    (directory / "adapter_config.json").write_text(json.dumps(found))
    return directory


def merged(config: ModelConfig, weights: Mapping[str, Tensor], directory: Path) -> dict[str, Tensor]:
    """The weights with an adapter's terms, computed as peft does: W + alpha / r B A, and for experts by einsum."""
    from safetensors.torch import load_file

    tensors, settings = load_file(directory / "adapter_model.safetensors"), json.loads(
        (directory / "adapter_config.json").read_text())
    found = {name: tensor.clone() for name, tensor in weights.items()}
    for name in tensors:
        if not name.endswith("lora_A.weight"):
            continue
        module, a, b = name.removesuffix(".lora_A.weight"), tensors[name], tensors[name.replace("lora_A", "lora_B")]
        plain = module.removeprefix(PREFIX)
        count = config.experts.count if ".experts" in plain and config.experts else 1
        rank = len(a) // count
        scale = settings["lora_alpha"] / (math.sqrt(rank) if settings.get("use_rslora") else rank)
        if count == 1:
            found[f"{plain}.weight"] += scale * b @ a
            continue
        delta = scale * torch.einsum("ore,eri->eoi", b.view(len(b), rank, count), a.view(count, rank, -1))
        stack = plain.removesuffix(".base_layer")
        if plain == stack:
            gate, up = delta.chunk(2, 1)
            found[f"{stack}.gate_proj.weight"] += gate
            found[f"{stack}.up_proj.weight"] += up
        else:
            found[f"{stack}.down_proj.weight"] += delta
    return found


def stored(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights by names that a checkpoint may have: gate and up of all experts are one stack there."""
    found = dict[str, Tensor]()
    for name, tensor in weights.items():
        if not is_stack(name):
            found[name] = tensor
        elif ".gate_proj." in name:
            both = torch.cat((tensor, weights[name.replace(".gate_", ".up_")]), 1)
            found[name.replace("gate_proj.weight", "gate_up_proj")] = both
        elif ".down_proj." in name:
            found[name.removesuffix(".weight")] = tensor
    return found


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    model = RandomModel(shape=config, initializer_range=0.1, seed=seed)
    return dict(model.tensors(config, "float32", "cpu"))


def runtime_of(config: ModelConfig, weights: Mapping[str, Tensor], **options: Any) -> ModelRunner:
    return load(None, EngineConfig(**{**SMALL, **options}), given=ModelOverrides(config, stored(weights)))


def adapters_of(runtime: ModelRunner, paths: Mapping[str, Path]) -> dict[str, Adapter]:
    found = AdapterSet(runtime)
    return {name: found.load(name, path) for name, path in paths.items()}


def logits_of(runtime: ModelRunner, rows: Sequence[tuple[Sequence[int], Adapter | None]], chunk: int = 1 << 20
              ) -> list[Tensor]:
    """All logits of some prompts [n, V], each with its adapter, in steps of up to `chunk` tokens of each."""
    own = small_runtime(runtime, batch=len(rows))
    caches, found = [own.cache.admit() for _ in rows], [list[Tensor]() for _ in rows]
    adapters = {adapter.identity: adapter for _, adapter in rows if adapter}
    for cache, (tokens, _) in zip(caches, rows, strict=True):
        assert cache
        cache.keys = [*tokens]
        assert own.cache.reserve(cache, len(tokens)) == len(tokens)
    while True:
        parts = [(place, cache, tuple(cache.keys[cache.done:cache.done + chunk]))
                 for place, cache in enumerate(caches) if cache and cache.done < len(cache.keys)]
        if not parts:
            return [torch.cat(each) for each in found]
        parts.sort(key=lambda part: len(part[2]) > 1)
        plan = [PlannedRow(tokens, cache.done, cache.pages, cache.slot, 1,
                           adapter=adapter.identity if (adapter := rows[place][1]) else "")
                for place, cache, tokens in parts]
        own.cache.operations.flush()
        batch = with_adapters(build(StepPlan(tuple(plan)), own.device, all_logits=True), plan, adapters)
        logits = own.run(batch).clone().split([len(tokens) for *_, tokens in parts])
        for (place, cache, tokens), own_logits in zip(parts, logits, strict=True):
            found[place].append(own_logits)
            own.cache.commit(cache, len(tokens))


# Terms


def term(columns: int, rows: int, rank: int, first: int, seed: int) -> LowRank:
    """A random term in bfloat16."""
    rng = torch.Generator().manual_seed(seed)
    a, b = torch.randn(rank, columns, generator=rng), torch.randn(rows, rank, generator=rng)
    return LowRank.of((a * columns**-0.5).bfloat16(), b.bfloat16(), first)


def adapter(name: str, *layers: dict[str, tuple[LowRank, ...]], head: tuple[LowRank, ...] = ()) -> Adapter:
    """An adapter with these products of each layer."""
    return Adapter(name, name, tuple(AdapterLayer(products) for products in layers), head)


def wanted(x: Tensor, norm: Tensor | None, terms: tuple[LowRank, ...], rows: int) -> Tensor:
    """The terms [T, rows] of x [T, columns] in float64. norm: the scale of a norm before the product."""
    own = x.double()
    if norm is not None:
        own = (x * norm).bfloat16().double() * (x.double().square().mean(-1, True) + 1e-6).rsqrt()
    found = torch.zeros(len(x), rows, dtype=torch.float64)
    for each in terms:
        found[:, each.first:each.first + each.rows] = own @ each.a.double().T @ each.b.double().T
    return found
