"""From a command's arguments to a loaded model."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from deltic.cli.options import engine_options
from deltic.cli.parser import UsageError
from deltic.cli.terminal import loading_bar

if TYPE_CHECKING:
    from deltic.engine.llm import LLM
    from deltic.engine.runtime import RandomModel

_FRONT = ("chat_template", "history", "strip_billing_header", "thinking_budget")
"""Options of the commands that read words."""


def open_llm(args: argparse.Namespace, **defaults: Any) -> LLM:
    """Load what the arguments name, with a progress bar. `defaults` are engine options to use where none is given."""
    check_source(args)
    options = {**defaults, **engine_options(args)}
    from deltic.engine.llm import LLM

    bar = loading_bar()
    front = {name: getattr(args, name) for name in _FRONT if hasattr(args, name)}
    try:
        return LLM(_source(args), revision=args.revision, progress=bar.update, **front, **options)
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


def _source(args: argparse.Namespace) -> str | RandomModel | None:
    from deltic.engine.runtime import RandomModel

    model: str | None = args.model
    return RandomModel(args.random, args.layers, args.random_seed) if args.random else model
