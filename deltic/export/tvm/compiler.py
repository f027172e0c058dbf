"""From a model to a directory that TVM's runtime runs: a library, parameters, and what goes with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltic.config import ModelConfig
from deltic.errors import ConfigError, ModelError
from deltic.export.extras import need
from deltic.export.program import hf_config
from deltic.export.sidecar import write_sidecar
from deltic.export.tvm import parameters
from deltic.export.tvm.metadata import Generation, Metadata, write_config
from deltic.export.tvm.panels import panels
from deltic.export.tvm.targets import Goal, find_goal, link
from deltic.loader.model_files import ModelFiles

Stored = Literal["float32", "float16"]


@dataclass(frozen=True, slots=True)
class Compiled:
    """What was written: bytes of the library and of the parameters."""

    library: int
    parameters: int


def compile_model(files: ModelFiles, folder: Path, *, generation: Generation | None = None, dtype: Stored = "float32",
                  target: str = "llvm", max_context: int | None = None, chunk: int = 512) -> Compiled:
    """Compile a model into a directory, which must exist.

    generation: v2 by default, v1 for models without recurrent layers on request. dtype: of the matrices; all else,
    and what is computed, is float32. target: llvm, for this processor, or as TVM writes it. max_context: tokens of a
    sequence (default: the model's). chunk: most tokens of a prompt that are read at once.
    """
    need("tvm")
    goal, config = find_goal(target), replace(files.config, num_mtp_layers=0)
    kept = _generation(config, generation)
    tensors = files.load("float32", "cpu", None)
    stated = replace(config, dtype=dtype, max_position_embeddings=max_context or config.max_position_embeddings)
    write_sidecar(files, folder, stated)
    library, taken = _language_model(config, kept, dtype, goal, stated.max_position_embeddings, chunk, folder)
    size = parameters.write(folder, kept, _in_order(config, tensors, taken.parameters))
    write_config(folder, taken, stated, hf_config(stated))
    return Compiled(library, size)


def parameter_bytes(config: ModelConfig, dtype: Stored) -> int:
    """What the parameters take on disk, at least."""
    return config.parameter_count * (2 if dtype == "float16" else 4)


def _generation(config: ModelConfig, asked: Generation | None) -> Generation:
    """ModelError for models that cannot be compiled, ConfigError for a generation that does not know their layers."""
    if config.architecture not in ("qwen3_5", "qwen3"):
        raise ModelError(f"a {config.architecture} cannot be compiled by TVM, only dense Qwen3.5 and Qwen3")
    if not config.attention_layers:
        raise ModelError("a model without attention layers cannot be compiled by TVM")
    if config.linear_layers and asked == "v1":
        raise ConfigError("--generation v1 knows attention alone, and this model has recurrent layers: leave it out",
                          "generation")
    return asked or ("v2" if config.linear_layers else "v1")


def _language_model(config: ModelConfig, generation: Generation, dtype: str, goal: Goal, context: int, chunk: int,
                    folder: Path) -> tuple[int, Metadata]:
    """Write the library; returns its size in bytes and its metadata."""
    from deltic.export.tvm.network import AttentionNetwork, HybridNetwork, specification

    kind = HybridNetwork if config.linear_layers else AttentionNetwork
    metadata = Metadata(generation, config.architecture, quantization(dtype), (), context, min(chunk, context),
                        config.vocab_size, goal.machine, goal.needs, device=goal.device, system=goal.system,
                        target=goal.text)
    return build_library(lambda: kind(config, dtype, goal.target), specification, metadata, goal, folder)


def build_library(network: Callable[[], Any], specification: Callable[[Any], Any], metadata: Metadata, goal: Goal,
           folder: Path) -> tuple[int, Metadata]:
    """Write the library of a network; returns its size in bytes and its metadata with all parameters."""
    import tvm
    from tvm import relax

    try:
        with goal.target:
            made = network()
            module, named = made.export_tvm(spec=specification(made))
            metadata = replace(metadata, parameters=tuple(
                (name, tuple(map(int, one.shape)), str(one.dtype)) for name, one in named))
            builder = relax.BlockBuilder(module)
            with builder.function("_metadata", params=[]):
                builder.emit_func_output(tvm.ir.StringImm(metadata.to_json()))
            built = relax.build(builder.get(), target=goal.target,
                                relax_pipeline=relax.get_default_pipeline(goal.target))
    except Exception as error:
        reason = str(error).strip().rsplit("\n", 1)[-1]
        raise ModelError(f"TVM cannot compile this model for target {goal.text!r}: {reason}") from error
    path = folder / goal.library
    link(built, path, goal)
    return path.stat().st_size, metadata


def quantization(dtype: str) -> str:
    return "q0f16" if dtype == "float16" else "q0f32"


def _in_order(config: ModelConfig, tensors: dict[str, Tensor],
              wanted: tuple[tuple[str, tuple[int, ...], str], ...]) -> Iterator[tuple[str, NDArray[Any]]]:
    """The library's parameters, made of the model's tensors, which are taken out as it goes."""
    for name, shape, dtype in wanted:
        array = _made(config, tensors, name)
        array = panels(array) if len(shape) == 3 else array
        assert array.shape == shape, f"{name} is {array.shape} instead of {shape}"
        yield name, np.ascontiguousarray(array.astype(dtype))


def _made(config: ModelConfig, tensors: dict[str, Tensor], name: str) -> NDArray[Any]:
    """A parameter, by the name that it has in the network."""
    head, _, rest = name.partition(".")
    if head == "frequencies":
        half = config.rope.rotary_dim
        exponents = torch.arange(0, half, 2, dtype=torch.int64).float() / half
        return (1.0 / config.rope.theta ** exponents).numpy()
    if head == "norm":
        return (tensors.pop("model.norm.weight").float() + config.norm_offset).numpy()
    if head in ("table", "head"):
        return tensors.pop("model.embed_tokens.weight" if head == "table" else "lm_head.weight").numpy()
    layer, _, part = rest.partition(".")
    rows, change = _PARTS[part]
    taken = [tensors.pop(f"model.layers.{layer}.{row}").float() for row in rows]
    made: NDArray[Any] = _CHANGES[change](taken[0] if len(taken) == 1 else torch.cat(taken), config.norm_offset).numpy()
    return made


_LINEAR: Final = "linear_attn."
_PARTS: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    "input_norm": (("input_layernorm.weight",), "norm"),
    "post_norm": (("post_attention_layernorm.weight",), "norm"),
    "mixer.in_proj.weight": (tuple(f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")), "none"),
    "mixer.out_proj.weight": (("linear_attn.out_proj.weight",), "none"),
    "mixer.conv": (("linear_attn.conv1d.weight",), "taps"),
    "mixer.decay": (("linear_attn.A_log",), "decay"),
    "mixer.dt_bias": (("linear_attn.dt_bias",), "none"),
    "mixer.norm": (("linear_attn.norm.weight",), "none"),
    "mixer.qkv.weight": (tuple(f"self_attn.{part}_proj.weight" for part in "qkv"), "none"),
    "mixer.o_proj.weight": (("self_attn.o_proj.weight",), "none"),
    "mixer.q_norm": (("self_attn.q_norm.weight",), "norm"),
    "mixer.k_norm": (("self_attn.k_norm.weight",), "norm"),
    "gate_up.weight": (("mlp.gate_proj.weight", "mlp.up_proj.weight"), "none"),
    "down.weight": (("mlp.down_proj.weight",), "none"),
}
"""The rows of a layer's parameter, and what is done to them."""
_CHANGES: Final = {
    "none": lambda tensor, offset: tensor,
    "norm": lambda tensor, offset: tensor + offset,
    "taps": lambda tensor, offset: tensor.squeeze(1).T,
    "decay": lambda tensor, offset: -tensor.exp(),
}
