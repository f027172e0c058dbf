"""From a command's arguments to a loaded model."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any, cast

from deltic.cli.options import engine_options
from deltic.cli.parser import UsageError
from deltic.cli.terminal import loading_bar
from deltic.config import EngineConfig, ModelConfig, available_memory

if TYPE_CHECKING:
    from deltic.config import DType
    from deltic.engine.loading import RandomModel
    from deltic.llm import LLM

_SHARE = 0.9
_CHAT = ("chat_template", "history", "strip_billing_header", "thinking", "thinking_budget", "tool_call_parser",
         "parse_special")
"""Options of the commands that read words."""


def open_llm(args: argparse.Namespace, **defaults: Any) -> LLM:
    """Load what the arguments name, with a progress bar. `defaults` are engine options to use where none is given."""
    check_source(args)
    options = {**defaults, **engine_options(args)}
    if args.random:
        _check_memory(args, options)
    from deltic.llm import LLM

    bar = loading_bar()
    processor = {name: getattr(args, name) for name in _CHAT if hasattr(args, name)}
    try:
        return LLM(_source(args), revision=args.revision, progress=bar.update, **processor, **options)
    finally:
        bar.close()


def timed_llm(args: argparse.Namespace) -> tuple[LLM, float]:
    """The model, and the milliseconds that loading took."""
    started = time.perf_counter()
    llm = open_llm(args)
    return llm, round((time.perf_counter() - started) * 1e3, 3)


def check_source(args: argparse.Namespace) -> None:
    """A model or random weights, not both."""
    if args.random and args.model:
        raise UsageError(f"MODEL ({args.model}) and --random exclude each other")
    if args.random and args.revision:
        raise UsageError("--revision is for models of the Hugging Face hub: leave it out with --random")
    if args.layers and not args.random:
        raise UsageError("--layers needs --random: a checkpoint keeps its layers")


def _check_memory(args: argparse.Namespace, options: dict[str, Any]) -> None:
    """UsageError if random weights would not fit into the memory that is left; some is needed beside them."""
    from deltic.engine.options import settled

    engine = settled(EngineConfig(**options))
    free, needed = available_memory(), _random_bytes(args.random, args.layers, engine)
    if engine.device != "cpu" or needed <= free * _SHARE:
        return
    layers = range(ModelConfig.preset(args.random, args.layers).num_hidden_layers - 1, 0, -1)
    fitting = next((count for count in layers if _random_bytes(args.random, count, engine) <= free * _SHARE), None)
    remedy = f"keep fewer layers (--layers {fitting})" if fitting else "take a smaller preset"
    raise UsageError(f"the weights of --random {args.random} take {_gib(needed)}, and {_gib(free)} of memory is "
                     f"available: {remedy}. --quant does not help here: random weights are made whole before they are "
                     "quantized")


def _random_bytes(preset: str, layers: int | None, engine: EngineConfig) -> int:
    from deltic.cli.inspect import weight_bytes

    config = ModelConfig.preset(preset, layers)
    return weight_bytes(config, config.dtype if engine.dtype == "auto" else cast("DType", engine.dtype))


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def _source(args: argparse.Namespace) -> str | RandomModel | None:
    from deltic.engine.loading import RandomModel

    model: str | None = args.model
    return RandomModel(args.random, args.layers, args.random_seed) if args.random else model
