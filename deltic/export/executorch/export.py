"""From a model's files to a program that ExecuTorch runs on XNNPACK."""

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
from deltic.export.executorch.mixers import Operators
from deltic.export.executorch.names import sidecar_of
from deltic.export.executorch.network import Build, ExportedNetwork
from deltic.export.executorch.parts import Embedding, ExpertBank, QuantizedExpertBank
from deltic.export.sidecar import sidecar_files, write_sidecar
from deltic.loader.model_files import ModelFiles
from deltic.loader.writing import check_room, replacing, replacing_files
from deltic.model.decoder import build
from deltic.ops import reference
from deltic.ops.types import Weight

Kind = Literal["fp32", "bf16", "8da4w"]
Stage = Literal["building", "quantizing", "tracing", "lowering", "writing"]
KINDS: Final[tuple[Kind, ...]] = ("fp32", "bf16", "8da4w")
STAGES: Final[tuple[Stage, ...]] = ("building", "quantizing", "tracing", "lowering", "writing")
GROUP: Final = 32
"""Weights that share a scale in 8da4w."""
_LEAST_BITS: Final[dict[Kind, int]] = {"fp32": 32, "bf16": 16, "8da4w": 4}
"""Of a parameter in the program."""
CHUNK: Final = 128
"""Tokens that a program takes in one call: memory is planned for so many."""


@dataclass(frozen=True, slots=True)
class ExportForm:
    """What is made of a model.

    kind: fp32; bf16: weights and inputs of products; 8da4w: products of int8 inputs, quantized as they come, and int4
        weights in groups of 32.
    max_context: tokens that a sequence may have.
    chunk: tokens of one call, at most; 1: exactly one.
    operators: of the mixers: ExecuTorch's own, or deltic's, for which its operator library has to be there.
    """

    kind: Kind = "fp32"
    max_context: int = 2048
    chunk: int = CHUNK
    operators: Operators = "executorch"

    @property
    def static(self) -> bool:
        return self.chunk == 1


def export(
    config: ModelConfig,
    generation: GenerationDefaults,
    weights: dict[str, Tensor],
    path: Path,
    form: ExportForm,
    tell: Callable[[Stage], None] = lambda stage: None,
) -> int:
    """Write the program; returns its bytes. weights: canonical, float32, taken out as they are used. tell: hears of
    each stage as it begins. ModelError for what cannot be exported."""
    check(config, form)
    with quiet(), torch.inference_mode(False), torch.no_grad():
        tell("building")
        network = _network(config, weights, form)
        if form.kind == "8da4w":
            tell("quantizing")
            quantize(network)
        tell("tracing")
        traced = trace(network, form)
        del network
        tell("lowering")
        program = lower(traced, facts(config, generation, form), form.kind)
        tell("writing")
        with replacing(path) as file:
            program.write_to_file(file)
    return path.stat().st_size


def export_files(
    files: ModelFiles, path: Path, form: ExportForm, tell: Callable[[Stage], None] = lambda stage: None
) -> int:
    """Write the program of a model, and beside it the directory with its config and tokenizer; returns the program's
    bytes. The draft head and the vision tower are left out. ModelError for what cannot be exported."""
    check(files.config, form)
    check_room(path, files.config.parameter_count * _LEAST_BITS[form.kind] // 8,
               "make room, or choose a smaller type or another place")
    config = replace(files.config, num_mtp_layers=0, max_position_embeddings=form.max_context)
    with replacing_files(sidecar_of(path), sidecar_files) as folder:
        write_sidecar(files, folder, config)
        return export(config, files.generation, files.load("float32", "cpu", None), path, form, tell)


def check(config: ModelConfig, form: ExportForm) -> None:
    """ModelError naming what a program cannot have."""
    if config.experts is not None and not form.static:
        raise ModelError(f"{config.architecture} is a mixture of experts, whose programs take one token a call: give "
                         "--static")
    if form.max_context > config.max_position_embeddings:
        raise ModelError(f"the model reads {config.max_position_embeddings} tokens at most: a context of "
                         f"{form.max_context} cannot be exported")


def facts(config: ModelConfig, generation: GenerationDefaults, form: ExportForm) -> dict[str, Any]:
    """What the program says of itself, under the names that ExecuTorch's own runners ask for."""
    ends = sorted({*config.eos_token_ids, *generation.eos_token_ids})
    said: dict[str, Any] = {
        "get_max_seq_len": form.chunk if not form.static else form.max_context,
        "get_max_context_len": form.max_context,
        "get_vocab_size": config.vocab_size,
        "get_n_layers": config.num_hidden_layers,
        "get_eos_ids": ends,
        "enable_dynamic_shape": not form.static,
        "use_kv_cache": True,
        "use_sdpa_with_kv_cache": form.operators == "executorch",
        "use_deltic_operators": form.operators == "deltic",
    }
    return said if config.bos_token_id is None else {**said, "get_bos_id": config.bos_token_id}


def quantize(network: ExportedNetwork) -> None:
    """Int4 weights in the products, int8 rows in the embedding table and in experts, in place. Products whose inputs
    are no multiple of the group stay as they are."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    wanted = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4,  # type: ignore[attr-defined]
                                                  weight_granularity=PerGroup(GROUP))
    quantize_(network, wanted, lambda module, _: isinstance(module, nn.Linear) and module.in_features % GROUP == 0)
    for module in [*network.modules()]:
        for name, child in [*module.named_children()]:
            if isinstance(child, ExpertBank):
                setattr(module, name, QuantizedExpertBank(child.matrices))
    assert isinstance(network.embedding, Embedding)
    network.embedding = QuantizedEmbedding(network.embedding.table)


class QuantizedEmbedding(nn.Module):
    """As `Embedding`, of a table [V, H] that is kept as int8 with a scale for each row."""

    table: Tensor
    scale: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        scale = table.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        self.register_buffer("table", (table / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, ids: Tensor) -> Tensor:
        row: Tensor = nn.functional.embedding(ids, self.table).to(torch.float32)
        return row * nn.functional.embedding(ids, self.scale)


def trace(network: ExportedNetwork, form: ExportForm) -> torch.export.ExportedProgram:
    import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401  registers the operators

    import deltic.export.executorch.operators  # noqa: F401  so does this

    count = 1 if form.static else min(form.chunk, 5)
    example = (torch.zeros(1, count, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    tokens = None if form.static else {1: torch.export.Dim("tokens", min=1, max=form.chunk)}
    return torch.export.export(network.eval(), example, dynamic_shapes=(tokens, None), strict=False)


def _network(config: ModelConfig, weights: dict[str, Tensor], form: ExportForm) -> ExportedNetwork:
    blocks: dict[str, Weight] = {**weights}
    weights.clear()
    decoder = build(config, blocks, reference.OPS, torch.float32)
    dtype = torch.bfloat16 if form.kind == "bf16" else torch.float32
    return ExportedNetwork(decoder.weights, Build(form.max_context, dtype, form.operators))


def lower(traced: torch.export.ExportedProgram, said: Mapping[str, Any], kind: Kind) -> Any:
    """ExecuTorch's program of a graph, with methods that say something beside it."""
    from executorch.backends.xnnpack.partition.config import AddmmConfig, LinearConfig
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
    from executorch.exir.passes import MemoryPlanningPass

    # products alone: whatever else were delegated is a hundred small graphs, each of which passes through every pass
    products = XnnpackPartitioner(configs=[LinearConfig, AddmmConfig], enable_bf16=kind == "bf16")
    edge = to_edge_transform_and_lower(
        traced, partitioner=[products], constant_methods=dict(said),
        compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True))
    return edge.to_executorch(ExecutorchBackendConfig(
        memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False), emit_mutable_buffer_names=True))


@contextmanager
def quiet() -> Iterator[None]:
    """Without the compilers' warnings, which are none of the caller's."""
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
