"""Exports a model's files to a program that ExecuTorch runs on XNNPACK."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor, nn

from deltic.config import GenerationDefaults, ModelConfig
from deltic.errors import ModelError
from deltic.export.executorch.network import Build, ExportedNetwork, Operators, QuantizedTable, Table
from deltic.export.executorch.runtime import sidecar_of
from deltic.export.program import sidecar_files, write_sidecar
from deltic.loader.disk import check_room, replacing, replacing_files
from deltic.loader.model_files import ModelFiles
from deltic.model.decoder import build
from deltic.ops import reference
from deltic.ops.types import Weight

Kind = Literal["fp32", "bf16", "8da4w"]
Stage = Literal["building", "quantizing", "tracing", "lowering", "writing"]
OnStage = Callable[[Stage], None]
"""Called with each stage when the stage begins."""
KINDS: Final[tuple[Kind, ...]] = ("fp32", "bf16", "8da4w")
CHUNK: Final = 128
"""Maximum tokens of one call; memory is planned for this number."""
_GROUP: Final = 32
"""Weights that share a scale in 8da4w."""
_MIN_BITS: Final[dict[Kind, int]] = {"fp32": 32, "bf16": 16, "8da4w": 4}
"""Minimum bits per parameter in the program."""


@dataclass(frozen=True, slots=True)
class ExportForm:
    """Options of an export."""

    kind: Kind = "fp32"
    """bf16: weights and inputs of products in bf16. 8da4w: dynamic int8 inputs, int4 weights in groups of 32."""
    max_context: int = 2048
    chunk: int = CHUNK
    """Maximum tokens of one call; 1: exactly one token per call."""
    operators: Operators = "executorch"
    """Operator set. deltic: the program needs deltic's operator library."""

    @property
    def static(self) -> bool:
        return self.chunk == 1


def export_files(files: ModelFiles, path: Path, form: ExportForm, on_stage: OnStage = lambda stage: None) -> int:
    """Writes a model's program, and a directory with config and tokenizer next to it. Returns the program's bytes.

    Leaves out the draft head and the vision tower. Raises ModelError for a model that cannot be exported.
    """
    check(files.config, form)
    check_room(path, files.config.parameter_count * _MIN_BITS[form.kind] // 8,
               "make room, or choose a smaller type or another place")
    config = replace(files.config, num_mtp_layers=0, max_position_embeddings=form.max_context)
    with replacing_files(sidecar_of(path), sidecar_files) as folder:
        write_sidecar(files, folder, config)
        return export(config, files.generation, files.load("float32", "cpu", None), path, form, on_stage)


def export(config: ModelConfig, generation: GenerationDefaults, weights: dict[str, Tensor], path: Path,
           form: ExportForm, on_stage: OnStage = lambda stage: None) -> int:
    """Writes a program. Returns its size in bytes. weights: canonical, float32; the dict is emptied to save memory."""
    check(config, form)
    with quiet(), torch.inference_mode(False), torch.no_grad():
        on_stage("building")
        network = _network(config, weights, form)
        if form.kind == "8da4w":
            on_stage("quantizing")
            quantize(network)
        on_stage("tracing")
        traced = trace(network, form)
        del network
        on_stage("lowering")
        program = lower(traced, metadata(config, generation, form), form.kind)
        on_stage("writing")
        with replacing(path) as file:
            program.write_to_file(file)
    return path.stat().st_size


def check(config: ModelConfig, form: ExportForm) -> None:
    """Raises ModelError naming the feature that a program cannot have."""
    if config.experts is not None and not form.static:
        raise ModelError(f"{config.architecture} is a mixture of experts, whose programs take one token a call: give "
                         "--static")
    if form.max_context > config.max_position_embeddings:
        raise ModelError(f"the model reads {config.max_position_embeddings} tokens at most: a context of "
                         f"{form.max_context} cannot be exported")


def metadata(config: ModelConfig, generation: GenerationDefaults, form: ExportForm) -> dict[str, Any]:
    """Returns the program's metadata under the names that ExecuTorch's runners use."""
    found: dict[str, Any] = {
        "get_max_seq_len": form.max_context if form.static else form.chunk,
        "get_max_context_len": form.max_context,
        "get_vocab_size": config.vocab_size,
        "get_n_layers": config.num_hidden_layers,
        "get_eos_ids": sorted({*config.eos_token_ids, *generation.eos_token_ids}),
        "enable_dynamic_shape": not form.static,
        "use_kv_cache": True,
        "use_sdpa_with_kv_cache": form.operators == "executorch",
        "use_deltic_operators": form.operators == "deltic",
    }
    if config.bos_token_id is not None:
        found["get_bos_id"] = config.bos_token_id
    return found


def _network(config: ModelConfig, weights: dict[str, Tensor], form: ExportForm) -> ExportedNetwork:
    blocks: dict[str, Weight] = {**weights}
    weights.clear()
    decoder = build(config, [blocks], reference.OPS, torch.float32)
    dtype = torch.bfloat16 if form.kind == "bf16" else torch.float32
    return ExportedNetwork(decoder.weights, Build(form.max_context, dtype, form.operators))


def quantize(network: ExportedNetwork) -> None:
    """Quantizes in place: int4 weights of products, int8 rows of embeddings and experts.

    Products whose inputs are not a multiple of the group size stay unquantized.
    """
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    config = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4,  # type: ignore[attr-defined]
                                                   weight_granularity=PerGroup(_GROUP))
    quantize_(network, config, lambda module, _: isinstance(module, nn.Linear) and module.in_features % _GROUP == 0)
    for module in [*network.modules()]:
        for name, child in [*module.named_children()]:
            if isinstance(child, Table):
                setattr(module, name, QuantizedTable(child.rows))


def trace(network: ExportedNetwork, form: ExportForm) -> torch.export.ExportedProgram:
    import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401  registers the llama operators

    count = 1 if form.static else min(form.chunk, 5)
    example = (torch.zeros(1, count, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    tokens = None if form.static else {1: torch.export.Dim("tokens", min=1, max=form.chunk)}
    return torch.export.export(network.eval(), example, dynamic_shapes=(tokens, None), strict=False)


def lower(traced: torch.export.ExportedProgram, metadata: Mapping[str, Any], kind: Kind) -> Any:
    """Returns ExecuTorch's program of a graph, with its metadata as constant methods."""
    from executorch.backends.xnnpack.partition.config import AddmmConfig, LinearConfig
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
    from executorch.exir.passes import MemoryPlanningPass

    # products only: delegating more would make a hundred small graphs, and each goes through every pass
    products = XnnpackPartitioner(configs=[LinearConfig, AddmmConfig], enable_bf16=kind == "bf16")
    edge = to_edge_transform_and_lower(
        traced, partitioner=[products], constant_methods=dict(metadata),
        compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True))
    return edge.to_executorch(ExecutorchBackendConfig(
        memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False), emit_mutable_buffer_names=True))


@contextmanager
def quiet() -> Iterator[None]:
    """Silences the compilers' warnings, because users cannot act on them."""
    loggers = [logging.getLogger(name) for name in ("torch", "torchao", "executorch", "root")]
    levels = [logger.level for logger in loggers]
    with catch_warnings():
        simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
