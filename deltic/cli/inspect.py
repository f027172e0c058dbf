"""`deltic inspect`: the properties of a model, and how it would run on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from deltic.cli import options
from deltic.cli.options import check_source, open_llm
from deltic.cli.output import print_facts
from deltic.cli.parser import as_typed, existing_file
from deltic.config import DTYPE_BYTES, DType, EngineConfig, ModelConfig, available_memory, shard_config
from deltic.errors import ConfigError, DelticError, ModelError
from deltic.params import PAGE, Auto, Draft, Mtp, Ngram

if TYPE_CHECKING:
    from deltic.cache.memory_plan import MemoryPlan
    from deltic.cache.tensors import PoolOptions
    from deltic.chat.processor import ChatProcessor
    from deltic.llm import LLM
    from deltic.model.decoder import Decoder
    from deltic.ops import Ops
    from deltic.ops.types import Weight
    from deltic.runner.memory import CardMemory

Facts = dict[str, Any]


def add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.description = ("Show a model's shape, its weights by kind and bits, the memory plan, the backend of each "
                          "operation, and warnings. Of a model of the Hugging Face hub, such as org/name or "
                          "org/name@revision:file.gguf, only configs and the headers of its files are read.")
    options.add_model(parser)
    parser.add_argument("--chat-template", type=existing_file, metavar="FILE",
                        help="a jinja chat template to use instead of the model's own")
    options.add_json(parser)
    options.add_random(parser)
    options.add_engine(parser)


def run_inspect(args: argparse.Namespace) -> int:
    check_source(args)
    if args.random:
        print_facts(_preset_facts(args), args.json)
        return 0
    from deltic.cli.inspect_files import group_facts, print_survey, survey_facts
    from deltic.loader.survey import survey

    found = survey(args.model, args.revision)
    if found is None:
        print_facts(_model_facts(args), args.json)
        return 0
    try:
        if found.refusal:
            raise ModelError(found.refusal)
        loaded = _model_facts(args) | group_facts(found, args) if found.whole else None
    except DelticError:
        print_survey(survey_facts(found, args), args.json)
        raise
    print_survey(loaded or survey_facts(found, args), args.json)
    return 0


def _model_facts(args: argparse.Namespace) -> Facts:
    """Returns the facts of a model. Loads the model, which proves that it can be loaded."""
    from deltic.cache.tensors import PoolOptions
    from deltic.export.backend import ProgramModel
    from deltic.ops import explain

    llm = open_llm(args)
    runtime = llm.runtime
    names = {"model": runtime.name, "path": str(runtime.path)}
    texts = {"tokenizer": _tokenizer_facts(llm.chat_processor, runtime.generation.eos_token_ids),
             "generation": runtime.generation.sampling()}
    if isinstance(runtime, ProgramModel):
        facts = _facts(runtime.config, runtime.options, runtime.ops, (runtime.memory, PoolOptions()))
        return {**names, **facts, "ops": "compiled", **texts}
    decoder, pools = runtime.decoder, runtime.pools.shards[0]
    pool_options = PoolOptions(runtime.cache.delta_logs.size, runtime.mtp is not None, kv=pools.keys.dtype,
                               state=pools.recurrent.dtype)
    facts = _facts(runtime.config, runtime.options, decoder.ops, (runtime.memory, pool_options))
    if decoder.others:
        facts["devices"] = _device_facts(decoder, facts)
    kinds = decoder.weight_kinds()
    facts["ops"] = explain(decoder.ops, decoder.weights, runtime.views)
    facts["weights"] |= {"mib": rounded_mib(sum(kinds.values())), "kept_as": _by_size(kinds),
                         "mib_read_per_token": rounded_mib(decoder.token_bytes())}
    if runtime.path is not None:
        facts["weights"]["mtp_head"] = _mtp_head(runtime.path)
    return {**names, **facts, "speculation": _speculation(llm), **texts}


def _preset_facts(args: argparse.Namespace) -> Facts:
    """Returns the facts of a preset, without making its weights."""
    from deltic.engine.arguments import settled
    from deltic.model.tensor_parallel import check_degree
    from deltic.ops import select

    engine = settled(EngineConfig(**options.engine_options(args)))
    config = ModelConfig.preset(args.random, args.layers).with_rope_scaling(engine.rope_scaling)
    check_degree(config, engine.shards, engine.quant != "none")
    facts = _facts(config, engine, select(engine.ops), plan_cache(config, engine))
    if engine.shards > 1 and engine.quant == "none":
        facts["devices"] = _device_facts(_without_memory(config, engine), facts)
    return {"model": f"random-{args.random}", **facts, "tokenizer": None}


def _without_memory(config: ModelConfig, engine: EngineConfig) -> Decoder:
    """Returns a split model with tensors that have no memory."""
    import torch

    from deltic.loader.names import expected_tensors, tensor_dtype
    from deltic.model.decoder import build
    from deltic.model.tensor_parallel import WeightSplitter
    from deltic.ops.torch import OPS

    dtype = activation_dtype(config, engine)
    tensors = ((name, torch.empty(shape, dtype=getattr(torch, tensor_dtype(name, dtype)), device="meta"))
               for name, shape in expected_tensors(config).items())
    parts: list[dict[str, Weight]] = [{} for _ in range(engine.shards)]
    for device, name, tensor in WeightSplitter(config, engine.shards).over(["meta"] * engine.shards).cut(tensors):
        parts[device][name] = tensor
    return build(config, parts, OPS, getattr(torch, dtype))


def _device_facts(decoder: Decoder, facts: Facts) -> Facts:
    """Returns the bytes of weights (by part) and of the cache on each device."""
    embedding, memory = decoder.weights.embedding.nbytes, facts["memory"]
    found: Facts = {"embedding_of_all_mib": rounded_mib(embedding)}
    for number, parts in enumerate(decoder.part_bytes()):
        cache = {"cache_mib": round(memory["pages_and_slots_mib"] / len(decoder.shards), 1)} if memory else {}
        found[f"device {number}"] = {f"{part}_mib": rounded_mib(size) for part, size in parts.items()} | cache
    return found


def _facts(config: ModelConfig, engine: EngineConfig, ops: Ops, plan: tuple[MemoryPlan, PoolOptions] | None) -> Facts:
    from deltic.ops import explain
    from deltic.ops.capabilities import gpu_kernels

    return {"config": config_facts(config), "weights": _weight_facts(config, engine),
            "memory": memory_facts(config, engine, *plan) if plan else None, "gpu_kernels": gpu_kernels(engine.device),
            "ops": explain(ops)}


def _speculation(llm: LLM) -> str | None:
    from deltic.spec_decode.draft_model import DraftModelProposer
    from deltic.spec_decode.proposers import MtpProposer

    proposer, draft = llm.engine.speculator.drafter, llm.runtime.draft
    if proposer is None:
        return None
    name = "the model's draft head" if isinstance(proposer, MtpProposer) else "n-grams"
    if isinstance(proposer, DraftModelProposer) and draft:
        name = f"the draft model {draft.name}, which has {rounded_mib(draft.options.memory_bytes or 0)} MiB of cache"
    return f"{name}, up to {proposer.limit} tokens at a time"


def _mtp_head(path: Path) -> str | None:
    """Returns the weight types of the multi-token-prediction head, or the reason why it cannot be used."""
    from deltic.loader.model_files import open_model

    try:
        return _by_size(open_model(path).head_kinds()) or None
    except ModelError as error:
        return as_typed(f"unusable: {error}")


def layer_pattern(config: ModelConfig) -> str:
    """Returns a short form of the layers: `6 x (3 linear_attention + 1 full_attention)`."""
    kinds = config.layer_types
    period = next(size for size in range(1, len(kinds) + 1)
                  if len(kinds) % size == 0 and kinds == kinds[:size] * (len(kinds) // size))
    runs = [f"{len(list(run))} {kind}" for kind, run in groupby(kinds[:period])]
    return f"{len(kinds) // period} x ({' + '.join(runs)})"


def config_facts(config: ModelConfig) -> Facts:
    facts: Facts = {
        "architecture": config.architecture, "layers": config.num_hidden_layers, "pattern": layer_pattern(config),
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "attention_heads": config.num_attention_heads, "key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim, "vocabulary": config.vocab_size, "tied_head": config.tie_word_embeddings,
        "context": config.max_position_embeddings, "mtp_layers": config.num_mtp_layers}
    if yarn := config.rope.yarn:
        facts["yarn"] = f"{yarn.factor:g} times the trained context of {yarn.original_context:,}"
    if experts := config.experts:
        del facts["intermediate_size"]
        shared = f", and a shared one of {experts.shared_size}" if experts.shared_size else ""
        facts["experts"] = f"{experts.per_token} of {experts.count} a token, {experts.size} wide{shared}"
    if linear := config.linear:
        facts |= {"linear_heads": f"{linear.num_key_heads} key, {linear.num_value_heads} value",
                  "linear_head_dims": f"{linear.key_head_dim} key, {linear.value_head_dim} value",
                  "conv_kernel": linear.conv_kernel}
    return facts


def weight_bytes(config: ModelConfig, dtype: DType, quant: str = "none") -> int:
    return sum(_tensor_bytes(config, dtype, quant).values())


def _weight_facts(config: ModelConfig, engine: EngineConfig) -> Facts:
    dtype, quant = activation_dtype(config, engine), engine.quant
    embedding = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    active = {"active_parameters": config.active_parameter_count} if config.experts else {}
    return {"parameters": config.parameter_count, **active, "of_them_embedding_and_head": embedding, "dtype": dtype,
            "mib": rounded_mib(weight_bytes(config, dtype, quant)),
            "mib_read_per_token": rounded_mib(_token_bytes(config, dtype, quant))}


def _tensor_bytes(config: ModelConfig, dtype: DType, quant: str) -> dict[str, int]:
    from deltic.loader.names import expected_tensors, tensor_dtype
    from deltic.loader.quantize import quantized_bytes

    plain = {name: prod(shape) * DTYPE_BYTES[tensor_dtype(name, dtype)]
             for name, shape in expected_tensors(config).items()}
    return plain if quant == "none" else quantized_bytes(config, quant, plain)


def head_bytes(config: ModelConfig, engine: EngineConfig) -> int:
    """Returns the bytes of the draft head that a GPU would load."""
    from deltic.loader.names import expected_head

    if config.num_mtp_layers != 1 or not isinstance(engine.speculation, Auto | Mtp):
        return 0
    return sum(map(prod, expected_head(config).values())) * DTYPE_BYTES[activation_dtype(config, engine)]


def _token_bytes(config: ModelConfig, dtype: DType, quant: str) -> int:
    """Returns the bytes that are read for one token. Like `Decoder.token_bytes`, but computed from the shape."""
    from deltic.loader.names import EMBEDDING, is_stack

    sizes, experts = _tensor_bytes(config, dtype, quant), config.experts
    total = sum(sizes.values())
    if experts:
        stacks = sum(size for name, size in sizes.items() if is_stack(name))
        total -= stacks * (experts.count - experts.per_token) // experts.count
    unread_rows = 0 if config.tie_word_embeddings else config.vocab_size - 1
    return total - sizes[EMBEDDING] * unread_rows // config.vocab_size


def plan_cache(config: ModelConfig, engine: EngineConfig, sizes: Mapping[str, int] | None = None, others: int = 0
               ) -> tuple[MemoryPlan, PoolOptions] | None:
    """Plans the cache for the memory that the weights leave. Returns None if they leave none.

    sizes: bytes of the weights in memory, by name; default: plain weights, quantized according to the options. others:
    bytes of a draft head and a vision tower on the CPU.
    """
    import torch

    from deltic.model.tensor_parallel import WeightSplitter
    from deltic.runner.layer_offload import LayerPlan, plan_layers
    from deltic.runner.memory import expected_card, plan_memory
    from deltic.runner.weights import largest_part, weight_sizes

    dtype = activation_dtype(config, engine)
    has_drafts = isinstance(engine.speculation, Ngram | Draft)
    if engine.on_gpu and engine.memory is None:
        head, sizes = head_bytes(config, engine), sizes or weight_sizes(config, dtype, engine.quant)

        def plan(given: EngineConfig, card: CardMemory) -> tuple[MemoryPlan, PoolOptions]:
            return plan_memory(config, given, getattr(torch, dtype), head > 0, has_drafts or head > 0,
                               defers=config.linear is not None, card=card)

        split = WeightSplitter(config, engine.shards, copies=True).over(["meta"] * engine.shards)
        if card := expected_card(config, engine, largest_part(sizes, config, split) + head):
            beside = LayerPlan() if engine.shards > 1 else plan_layers(
                config, engine, dtype, sizes, head, lambda given, card: plan(given, card)[0])
            memory, pools = plan(beside.settle(engine), beside.of(card))
            return beside.describe(memory), pools
    weights = sum(sizes.values()) if sizes else weight_bytes(config, dtype, engine.quant)
    room = max(available_memory() - weights - others, 0)
    try:
        sized = replace(engine, memory=engine.memory or str(room // 2), gpu_memory_utilization=None)
        return plan_memory(config, sized, getattr(torch, dtype), False, has_drafts)
    except ConfigError:
        if engine.memory:
            raise
        return None


def memory_facts(config: ModelConfig, engine: EngineConfig, plan: MemoryPlan, pools: PoolOptions) -> Facts:
    import torch

    from deltic.cache.operations import PoolSizes
    from deltic.cache.tensors import delta_log_bytes, page_bytes, slot_bytes
    from deltic.ops.kv import name_of

    dtype: torch.dtype = getattr(torch, activation_dtype(config, engine))
    kv, own = pools.kv or dtype, shard_config(config, engine.shards)
    facts: Facts = {"kv_dtype": name_of(kv), "state_dtype": str(pools.state).removeprefix("torch.")}
    sizes = {"page": (plan.pages, page_bytes(own, kv, pools.head)),
             "slot": (plan.slots, slot_bytes(own, dtype, pools.head, pools.state)),
             "ring": (pools.delta_logs, delta_log_bytes(own, dtype))}
    units = {unit: (count, engine.shards * size) for unit, (count, size) in sizes.items()}
    for unit, (count, size) in units.items():
        facts |= {f"{unit}s": count, f"{unit}_bytes": size}
    shared = PoolSizes(plan.pages, plan.slots, 0, units["page"][1] // PAGE, units["slot"][1], layout=plan.layout)
    facts |= {"pages_share_memory_with_slots": plan.layout is not None,
              "pages_and_slots_mib": rounded_mib(shared.bytes)}
    return {**facts, "max_batch": plan.max_batch, "max_context": plan.max_context,
            "notes": list(map(as_typed, plan.notes)), "warnings": list(map(as_typed, plan.warnings))}


def _tokenizer_facts(processor: ChatProcessor, eos: tuple[int, ...]) -> Facts:
    tokenizer = processor.tokenizer
    template = tokenizer.chat_template or ""
    return {"vocabulary": tokenizer.vocab_size, "special_tokens": len(tokenizer.special),
            "ends_with": [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in eos],
            "chat_template": bool(template), "template_characters": len(template),
            "template_knows_tools": "tools" in template, "template_knows_thinking": "enable_thinking" in template,
            "templates": list(tokenizer.chat_templates)}


def activation_dtype(config: ModelConfig, engine: EngineConfig) -> DType:
    return config.dtype if engine.dtype == "auto" else cast("DType", engine.dtype)


def _by_size(kinds: dict[str, int]) -> str:
    largest_first = sorted(kinds.items(), key=lambda item: -item[1])
    return ", ".join(f"{kind} {rounded_mib(size)}" for kind, size in largest_first)


def rounded_mib(size: int) -> float:
    return round(size / (1 << 20), 1)
