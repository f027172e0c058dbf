"""`deltic inspect`: what a model is, and how it would run here."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from deltic.cli import options
from deltic.cli.models import check_source, open_llm
from deltic.cli.parser import as_typed
from deltic.cli.table import table
from deltic.config import DType, EngineConfig, ModelConfig, available_memory
from deltic.errors import ConfigError, ModelError
from deltic.params import Draft, Ngram

if TYPE_CHECKING:
    from deltic.cache.memory_plan import MemoryPlan
    from deltic.cache.tensors import PoolOptions
    from deltic.chat.processor import ChatProcessor
    from deltic.llm import LLM
    from deltic.ops import Ops

HELP = "Show a model's shape, its memory plan, its tokenizer and who serves each operation."


def add(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options.add_template(parser)
    options.add_random(parser)
    options.add_engine(parser)


def run(args: argparse.Namespace) -> int:
    check_source(args)
    facts = _shape_facts(args) if args.random else _model_facts(args)
    print(json.dumps(facts, ensure_ascii=False) if args.json else table(facts))
    return 0


def layer_pattern(config: ModelConfig) -> str:
    """The layers in short: `6 x (3 linear_attention + 1 full_attention)`."""
    kinds = config.layer_types
    period = next(size for size in range(1, len(kinds) + 1)
                  if len(kinds) % size == 0 and kinds == kinds[:size] * (len(kinds) // size))
    runs: list[tuple[str, int]] = []
    for kind in kinds[:period]:
        if runs and runs[-1][0] == kind:
            runs[-1] = (kind, runs[-1][1] + 1)
        else:
            runs.append((kind, 1))
    return f"{len(kinds) // period} x ({' + '.join(f'{count} {kind}' for kind, count in runs)})"


def _model_facts(args: argparse.Namespace) -> dict[str, Any]:
    """Of a checkpoint, which is loaded: that is the proof that it can be."""
    from deltic.cache.tensors import PoolOptions
    from deltic.export.backend import ProgramModel
    from deltic.ops import explain

    llm = open_llm(args)
    runtime = llm.runtime
    if isinstance(runtime, ProgramModel):
        facts = _facts(runtime.config, runtime.options, runtime.ops, (runtime.memory, PoolOptions()))
        return {"model": runtime.name, "path": str(runtime.path), **facts, "ops": "compiled",
                "tokenizer": _text_facts(llm.chat_processor, runtime.generation.eos_token_ids),
                "generation": runtime.generation.sampling()}
    facts = _facts(runtime.config, runtime.options, runtime.decoder.ops,
                   (runtime.memory, PoolOptions(runtime.cache.delta_logs.size, runtime.mtp is not None,
                                            kv=runtime.pools.keys.dtype, state=runtime.pools.recurrent.dtype)))
    kinds = runtime.decoder.weight_kinds()
    kept = ", ".join(f"{kind} {_mib(size)}" for kind, size in sorted(kinds.items(), key=lambda item: -item[1]))
    facts["ops"] = explain(runtime.decoder.ops, runtime.decoder.weights, runtime.views)
    facts["weights"] |= {"mib": _mib(sum(kinds.values())), "mib_read_per_token": _mib(runtime.decoder.token_bytes()),
                         "kept_as": kept}
    if runtime.path is not None:
        facts["weights"]["mtp_head"] = _head_fact(runtime.path)
    return {"model": runtime.name, "path": str(runtime.path), **facts, "speculation": _speculation_fact(llm),
            "tokenizer": _text_facts(llm.chat_processor, runtime.generation.eos_token_ids),
            "generation": runtime.generation.sampling()}


def _speculation_fact(llm: LLM) -> str | None:
    """Who drafts, and how many tokens at a time."""
    from deltic.spec_decode.draft_model import DraftModelProposer
    from deltic.spec_decode.proposers import MtpProposer

    drafter, draft = llm.engine.speculator.drafter, llm.runtime.draft
    if drafter is None:
        return None
    who = "the model's draft head" if isinstance(drafter, MtpProposer) else "n-grams"
    if isinstance(drafter, DraftModelProposer) and draft:
        who = f"the draft model {draft.name}, which has {_mib(draft.options.memory_bytes or 0)} MiB of cache"
    return f"{who}, up to {drafter.limit} tokens at a time"


def _head_fact(path: Path) -> str | None:
    """What there is of a multi-token-prediction head, or why it cannot be used."""
    from deltic.loader.model_files import open_model

    try:
        kinds = open_model(path).head_kinds()
    except ModelError as error:
        return as_typed(f"unusable: {error}")
    return ", ".join(f"{kind} {_mib(size)}" for kind, size in sorted(kinds.items(), key=lambda item: -item[1])) or None


def _shape_facts(args: argparse.Namespace) -> dict[str, Any]:
    """Of a preset, without making its weights."""
    from deltic.engine.options import settled
    from deltic.ops import select

    engine, config = settled(EngineConfig(**options.engine_options(args))), ModelConfig.preset(args.random, args.layers)
    return {"model": f"random-{args.random}", **_facts(config, engine, select(engine.ops), _plan(config, engine)),
            "tokenizer": None}


def _plan(config: ModelConfig, engine: EngineConfig) -> tuple[MemoryPlan, PoolOptions] | None:
    """How the cache would be split beside the weights; None if they leave no room."""
    import torch

    from deltic.engine.memory import plan_memory

    kind = _dtype(config, engine)
    room = max(available_memory() - weight_bytes(config, kind), 0)
    rings = isinstance(engine.speculation, Ngram | Draft)
    try:
        sized = replace(engine, memory=engine.memory or str(room // 2), gpu_memory_utilization=None)
        return plan_memory(config, sized, getattr(torch, kind), False, rings)
    except ConfigError:
        if engine.memory:
            raise
        return None


def weight_bytes(config: ModelConfig, dtype: DType) -> int:
    return sum(_tensor_bytes(config, dtype).values())


def _tensor_bytes(config: ModelConfig, dtype: DType) -> dict[str, int]:
    from deltic.config import DTYPE_BYTES
    from deltic.loader.names import expected_tensors, tensor_dtype

    return {name: prod(shape) * DTYPE_BYTES[tensor_dtype(name, dtype)]
            for name, shape in expected_tensors(config).items()}


def _token_bytes(config: ModelConfig, dtype: DType) -> int:
    """Bytes that are read for a token, as `Decoder.token_bytes` counts them."""
    from deltic.loader.names import EMBEDDING, is_stack

    sizes, experts = _tensor_bytes(config, dtype), config.experts
    idle = experts.count - experts.per_token if experts else 0
    total = sum(size - (size * idle // experts.count if experts and is_stack(name) else 0)
                for name, size in sizes.items())
    rows = 0 if config.tie_word_embeddings else config.vocab_size - 1
    return total - sizes[EMBEDDING] * rows // config.vocab_size


def _facts(config: ModelConfig, engine: EngineConfig, ops: Ops,
           plan: tuple[MemoryPlan, PoolOptions] | None) -> dict[str, Any]:
    from deltic.ops import explain

    return {"config": _config_facts(config), "weights": _weight_facts(config, _dtype(config, engine)),
            "memory": _memory_facts(config, engine, *plan) if plan else None, "ops": explain(ops)}


def _config_facts(config: ModelConfig) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "architecture": config.architecture, "layers": config.num_hidden_layers, "pattern": layer_pattern(config),
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "attention_heads": config.num_attention_heads, "key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim, "vocabulary": config.vocab_size, "tied_head": config.tie_word_embeddings,
        "context": config.max_position_embeddings, "mtp_layers": config.num_mtp_layers}
    if config.experts:
        experts = config.experts
        del facts["intermediate_size"]
        shared = f", and a shared one of {experts.shared_size}" if experts.shared_size else ""
        facts["experts"] = f"{experts.per_token} of {experts.count} a token, {experts.size} wide{shared}"
    if config.linear:
        linear = config.linear
        facts |= {"linear_heads": f"{linear.num_key_heads} key, {linear.num_value_heads} value",
                  "linear_head_dims": f"{linear.key_head_dim} key, {linear.value_head_dim} value",
                  "conv_kernel": linear.conv_kernel}
    return facts


def _weight_facts(config: ModelConfig, dtype: DType) -> dict[str, Any]:
    embedding = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    active = {"active_parameters": config.active_parameter_count} if config.experts else {}
    return {"parameters": config.parameter_count, **active, "of_them_embedding_and_head": embedding, "dtype": dtype,
            "mib": _mib(weight_bytes(config, dtype)), "mib_read_per_token": _mib(_token_bytes(config, dtype))}


def _memory_facts(config: ModelConfig, engine: EngineConfig, plan: MemoryPlan, extras: PoolOptions) -> dict[str, Any]:
    import torch

    from deltic.cache.tensors import page_bytes, ring_bytes, slot_bytes

    kind: torch.dtype = getattr(torch, _dtype(config, engine))
    kv = extras.kv or kind
    units = {"page": (plan.pages, page_bytes(config, kv, extras.head)),
             "slot": (plan.slots, slot_bytes(config, kind, extras.head, extras.state)),
             "ring": (extras.delta_logs, ring_bytes(config, kind))}
    facts: dict[str, Any] = {"kv_dtype": str(kv).removeprefix("torch."),
                             "state_dtype": str(extras.state).removeprefix("torch.")}
    for unit, (count, size) in units.items():
        facts |= {f"{unit}s": count, f"{unit}_bytes": size, f"{unit}s_mib": _mib(count * size)}
    return {**facts, "max_batch": plan.max_batch, "max_context": plan.max_context,
            "warnings": list(map(as_typed, plan.warnings))}


def _text_facts(processor: ChatProcessor, eos: tuple[int, ...]) -> dict[str, Any]:
    tokenizer = processor.tokenizer
    template = tokenizer.chat_template or ""
    return {"vocabulary": tokenizer.vocab_size, "special_tokens": len(tokenizer.special),
            "ends_with": [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in eos],
            "chat_template": bool(template), "template_characters": len(template),
            "template_knows_tools": "tools" in template, "template_knows_thinking": "enable_thinking" in template,
            "templates": list(tokenizer.chat_templates)}


def _dtype(config: ModelConfig, engine: EngineConfig) -> DType:
    return config.dtype if engine.dtype == "auto" else cast("DType", engine.dtype)


def _mib(size: int) -> float:
    return round(size / (1 << 20), 1)
