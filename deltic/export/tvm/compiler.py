"""Compiles a model into a directory that TVM's runtime runs: a library, parameters, and the files beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor

from deltic.config import ModelConfig
from deltic.errors import ConfigError, ModelError
from deltic.export.program import hf_config, require_extra, write_sidecar
from deltic.export.tvm.artifact import (
    Generation,
    Metadata,
    Spec,
    as_stored,
    quantization_name,
    write_config,
    write_parameters,
)
from deltic.export.tvm.runtime import last_line
from deltic.export.tvm.targets import CompileTarget, link, parse_target
from deltic.loader.model_files import ModelFiles

StoredType = Literal["float32", "float16"]


@dataclass(frozen=True, slots=True)
class Compiled:
    """Bytes of the written library and parameters."""

    library: int
    parameters: int


def compile_model(files: ModelFiles, folder: Path, *, generation: Generation | None = None,
                  dtype: StoredType = "float32", target: str = "llvm", max_context: int | None = None,
                  chunk: int = 512) -> Compiled:
    """Compiles a language model into an existing directory.

    generation: default v2 for models with recurrent layers, else v1. dtype: of the stored matrices; everything else
    is float32. target: llvm, for this processor, or as TVM writes it. chunk: tokens of a prefill step, at most.
    """
    require_extra("tvm")
    from deltic.export.tvm.network import AttentionNetwork, HybridNetwork, specification

    compile_target = parse_target(target)
    config = replace(files.config, num_mtp_layers=0)
    generation = _generation(config, generation)
    tensors = files.load("float32", "cpu", None)
    context = max_context or config.max_position_embeddings
    stored_config = replace(config, dtype=dtype, max_position_embeddings=context)
    write_sidecar(files, folder, stored_config)
    metadata = Metadata(generation, config.architecture, quantization_name(dtype), (), context, min(chunk, context),
                        config.vocab_size, compile_target.machine)
    network = HybridNetwork if config.linear_layers else AttentionNetwork
    library, metadata = build_library(
        lambda: network(config, dtype, compile_target.target), specification, metadata, compile_target, folder)
    size = write_parameters(folder, generation, _parameters(config, tensors, metadata.parameters))
    write_config(folder, metadata, stored_config, hf_config(stored_config))
    return Compiled(library, size)


def parameter_bytes(config: ModelConfig, dtype: StoredType) -> int:
    """Returns a lower bound of the parameters' size on disk."""
    return config.parameter_count * (2 if dtype == "float16" else 4)


def _generation(config: ModelConfig, requested: Generation | None) -> Generation:
    """Raises ModelError for models that cannot be compiled, ConfigError for a generation without their layers."""
    if config.architecture not in ("qwen3_5", "qwen3"):
        raise ModelError(f"a {config.architecture} cannot be compiled by TVM, only dense Qwen3.5 and Qwen3")
    if not config.attention_layers:
        raise ModelError("a model without attention layers cannot be compiled by TVM")
    if config.linear_layers and requested == "v1":
        raise ConfigError("--generation v1 has attention alone, and this model has recurrent layers: leave it out",
                          "generation")
    return requested or ("v2" if config.linear_layers else "v1")


def build_library(network: Callable[[], Any], specification: Callable[[Any], Any], metadata: Metadata,
                  target: CompileTarget, folder: Path) -> tuple[int, Metadata]:
    """Writes the library of a network. Returns its size in bytes, and the metadata with parameters and target."""
    import tvm
    from tvm import relax

    try:
        with target.target:
            made = network()
            module, named = made.export_tvm(spec=specification(made))
            parameters = [(name, tuple(map(int, one.shape)), str(one.dtype)) for name, one in named]
            metadata = replace(metadata, parameters=tuple(parameters), needs=target.needs, device=target.device,
                               system=target.system, target=target.text)
            builder = relax.BlockBuilder(module)
            with builder.function("_metadata", params=[]):
                builder.emit_func_output(tvm.ir.StringImm(metadata.to_json()))
            built = relax.build(builder.get(), target=target.target,
                                relax_pipeline=relax.get_default_pipeline(target.target))
    except Exception as error:
        raise ModelError(f"TVM cannot compile this model for target {target.text!r}: {last_line(error)}") from error
    path = folder / target.library
    link(built, path, target)
    return path.stat().st_size, metadata


# Parameters


def _parameters(config: ModelConfig, tensors: dict[str, Tensor], specs: tuple[Spec, ...]
                ) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yields the library's parameters, and takes their tensors out of `tensors`."""
    for spec in specs:
        yield as_stored(spec, _parameter(config, tensors, spec[0]).numpy())


def _parameter(config: ModelConfig, tensors: dict[str, Tensor], name: str) -> Tensor:
    """Returns a parameter by its name in the network."""
    head, _, rest = name.partition(".")
    if head == "frequencies":
        size = config.rope.rotary_dim
        exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
        return 1.0 / config.rope.theta ** exponents
    if head == "norm":
        return tensors.pop("model.norm.weight").float() + config.norm_offset
    if head in ("table", "head"):
        return tensors.pop("model.embed_tokens.weight" if head == "table" else "lm_head.weight")
    layer, _, part = rest.partition(".")
    sources, change = _PARTS[part]
    taken = [tensors.pop(f"model.layers.{layer}.{source}").float() for source in sources]
    return change(taken[0] if len(taken) == 1 else torch.cat(taken), config.norm_offset)


def _unchanged(tensor: Tensor, norm_offset: float) -> Tensor:
    return tensor


def _norm(tensor: Tensor, norm_offset: float) -> Tensor:
    return tensor + norm_offset


def _taps(tensor: Tensor, norm_offset: float) -> Tensor:
    return tensor.squeeze(1).T


def _decay(tensor: Tensor, norm_offset: float) -> Tensor:
    return -tensor.exp()


_PARTS: Final[Mapping[str, tuple[tuple[str, ...], Callable[[Tensor, float], Tensor]]]] = {
    "input_norm": (("input_layernorm.weight",), _norm),
    "post_norm": (("post_attention_layernorm.weight",), _norm),
    "mixer.in_proj.weight": (tuple(f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
                             _unchanged),
    "mixer.out_proj.weight": (("linear_attn.out_proj.weight",), _unchanged),
    "mixer.conv": (("linear_attn.conv1d.weight",), _taps),
    "mixer.decay": (("linear_attn.A_log",), _decay),
    "mixer.dt_bias": (("linear_attn.dt_bias",), _unchanged),
    "mixer.norm": (("linear_attn.norm.weight",), _unchanged),
    "mixer.qkv.weight": (tuple(f"self_attn.{part}_proj.weight" for part in "qkv"), _unchanged),
    "mixer.o_proj.weight": (("self_attn.o_proj.weight",), _unchanged),
    "mixer.q_norm": (("self_attn.q_norm.weight",), _norm),
    "mixer.k_norm": (("self_attn.k_norm.weight",), _norm),
    "gate_up.weight": (("mlp.gate_proj.weight", "mlp.up_proj.weight"), _unchanged),
    "down.weight": (("mlp.down_proj.weight",), _unchanged),
}
"""Checkpoint tensors of a layer's parameter, whose rows are concatenated, and the change applied to them."""
