"""Loads the model that a command's arguments name."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any, cast

from deltic.cli.options import engine_options
from deltic.cli.output import bytes_bar, gib
from deltic.cli.parser import UsageError
from deltic.config import EngineConfig, ModelConfig, available_memory

if TYPE_CHECKING:
    from deltic.config import DType
    from deltic.llm import LLM

_MEMORY_SHARE = 0.9  # of the free memory, that random weights may take
_CHAT_OPTIONS = ("chat_template", "history", "strip_billing_header", "thinking", "thinking_budget",
                 "tool_call_parser", "parse_special")


def open_llm(args: argparse.Namespace, **defaults: Any) -> LLM:
    """Loads a model with a progress bar. defaults: engine options, which given ones override."""
    check_source(args)
    options = {**defaults, **engine_options(args)}
    if args.random:
        _check_memory(args, options)
    from deltic.engine.loading import RandomModel
    from deltic.llm import LLM

    source = RandomModel(args.random, args.layers, args.random_seed or 0) if args.random else args.model
    processor = {name: getattr(args, name) for name in _CHAT_OPTIONS if hasattr(args, name)}
    with bytes_bar("loading") as bar:
        return LLM(source, revision=args.revision, progress=bar.update, **processor, **options)


def timed_llm(args: argparse.Namespace) -> tuple[LLM, float]:
    """Loads a model; returns it and the milliseconds that loading took."""
    started = time.perf_counter()
    llm = open_llm(args)
    return llm, round((time.perf_counter() - started) * 1e3, 3)


def check_source(args: argparse.Namespace) -> None:
    """Raises UsageError if a model and random weights are both asked for."""
    if args.random and args.model:
        raise UsageError(f"MODEL ({args.model}) and --random exclude each other")
    if args.random and args.revision:
        raise UsageError("--revision is for models of the Hugging Face hub: leave it out with --random")
    if args.layers and not args.random:
        raise UsageError("--layers needs --random: a checkpoint keeps its layers")


def _check_memory(args: argparse.Namespace, options: dict[str, Any]) -> None:
    """Raises UsageError if random weights do not fit into the available memory."""
    from deltic.engine.arguments import settled

    engine = settled(EngineConfig(**options))
    free = available_memory()
    room = free * _MEMORY_SHARE
    needed = _random_bytes(args.random, args.layers, engine)
    if engine.device != "cpu" or needed <= room:
        return
    layers = range(ModelConfig.preset(args.random, args.layers).num_hidden_layers - 1, 0, -1)
    fitting = next((count for count in layers if _random_bytes(args.random, count, engine) <= room), None)
    remedy = f"keep fewer layers (--layers {fitting})" if fitting else "take a smaller preset"
    raise UsageError(f"the weights of --random {args.random} take {gib(needed)}, and {gib(free)} of memory is "
                     f"available: {remedy}. --quant does not help: random weights are quantized after all were made")


def _random_bytes(preset: str, layers: int | None, engine: EngineConfig) -> int:
    from deltic.cli.inspect import weight_bytes

    config = ModelConfig.preset(preset, layers)
    return weight_bytes(config, config.dtype if engine.dtype == "auto" else cast("DType", engine.dtype))
