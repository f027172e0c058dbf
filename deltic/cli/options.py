"""Options that several commands share, and how they become the values that the engine takes.

The engine's options are generated from the fields of EngineConfig.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import MISSING, Field, fields
from typing import Any, get_args, get_type_hints

from deltic.cli.parser import ShowHelp, UsageError, existing_file, flag, text, whole
from deltic.config import PRESETS, EngineConfig, Limits
from deltic.params import SamplingParams

COMMON = ("device", "dtype", "threads", "memory", "gpu_memory_utilization", "kv_dtype", "max_context", "max_batch",
          "cache_dir", "mmproj", "quant", "expert_memory", "speculate")
"""Options of the engine that the short help shows."""
LIMITS = "limits"
SAMPLING: dict[str, tuple[type, str, str]] = {
    "temperature": (float, "T", "0 always takes the most probable token"),
    "top_p": (float, "P", "draw from the most probable tokens that together reach P"),
    "top_k": (int, "K", "draw from the K most probable tokens; 0: from all"),
    "min_p": (float, "P", "drop tokens less probable than P times the most probable one"),
    "seed": (int, "N", "make the draws repeatable"),
    "max_tokens": (int, "N", "most tokens of the answer (default: what the context holds)"),
    "repetition_penalty": (float, "X", "make tokens of prompt and answer less probable; 1 is neutral"),
    "presence_penalty": (float, "X", "subtract from tokens that the answer has"),
    "frequency_penalty": (float, "X", "subtract from tokens as often as the answer has them"),
}


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", type=text,
                        help="a directory, a GGUF file, a Hugging Face name such as Qwen/Qwen3.5-0.8B, or tiny, the "
                             "embedded demo model (default)")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a Hugging Face model")


def add_random(parser: argparse.ArgumentParser, hidden: bool = False) -> None:
    """Random weights; commands that need words have the options only in order to explain why not."""
    group = parser.add_argument_group("random weights instead of a model")
    texts = {"--random": f"a public shape, filled with random weights: {', '.join(PRESETS)}",
             "--layers": "keep only the first N layers", "--random-seed": "seed of the weights (default: 0)"}
    helps = {name: argparse.SUPPRESS if hidden else line for name, line in texts.items()}
    group.add_argument("--random", metavar="PRESET", help=helps["--random"])
    group.add_argument("--layers", type=whole(1), metavar="N", help=helps["--layers"])
    group.add_argument("--random-seed", type=whole(0), default=0, metavar="N", help=helps["--random-seed"])


def add_template(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chat-template", type=existing_file, metavar="FILE",
                        help="a jinja chat template to use instead of the model's own")
    parser.add_argument("--history", choices=("preserve", "template"), default="preserve",
                        help="how prompts treat earlier answers. preserve: with the exact tokens that were generated, "
                             "thinking included, so that nothing is read twice (default). template: as the chat "
                             "template renders them, which may drop their thinking")
    parser.add_argument("--strip-billing-header", action="store_true",
                        help="remove the x-anthropic-billing-header line that coding agents put before the system "
                             "message: it changes with every request, so that no prompt could be reused")
    parser.add_argument("--thinking-budget", type=whole(0), metavar="N",
                        help="close the model's thinking after N tokens and let it answer; 0: at once. A client's chat "
                             "request may say otherwise (default: it may think as long as it wants)")
    parser.add_argument("--tool-call-parser", choices=("auto", "qwen", "json", "minimax"), default="auto",
                        help="how the model writes tool calls. auto: as its chat template shows (default)")
    parser.add_argument("--parse-special", action="store_true",
                        help="let messages spell control tokens, so that <|im_end|> in a file or a web page ends a "
                             "turn (default: it is ordinary text)")


def add_thinking(parser: argparse.ArgumentParser, name: str = "thinking") -> None:
    """name: what the arguments call it; a model is opened with the default one."""
    parser.add_argument("--think", dest=name, action=argparse.BooleanOptionalAction, default=None,
                        help="ask the model to think first, or not to. A client's chat request may say otherwise "
                             "(default: as its template does)")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling", "Where not given, the model's generation_config.json decides.")
    for name, (kind, metavar, line) in SAMPLING.items():
        group.add_argument(flag(name), type=kind, metavar=metavar, help=line, default=argparse.SUPPRESS)
    group.add_argument("--stop", action="append", type=text, metavar="TEXT", default=[],
                       help="end the answer before this text; may be repeated")


def add_conversation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", type=text, help="system message")
    add_thinking(parser, "think")  # goes with each request: in a chat it can be changed
    parser.add_argument("--no-thinking-output", dest="thinking_output", action="store_false",
                        help="do not show the thinking; otherwise it goes to stderr")
    add_template(parser)


def add_engine(parser: argparse.ArgumentParser) -> None:
    """An option per field of EngineConfig, grouped by section."""
    sections = {field.name: field.metadata.get("section") for field in fields(EngineConfig)}
    for section in dict.fromkeys(filter(None, sections.values())):
        names = [name for name, own in sections.items() if own == section]
        _add_fields(parser.add_argument_group(section), EngineConfig, COMMON, names)


def add_limits(parser: argparse.ArgumentParser) -> None:
    """An option per field of Limits."""
    _add_fields(parser.add_argument_group(LIMITS, "What is beyond one is refused by its name."), Limits, ())
    parser.add_argument("--help-limits", action=ShowHelp, show=lambda parser: parser.format_group(LIMITS),
                        help="show the limits and exit")


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, checked."""
    given, limits = _given(args, EngineConfig), _given(args, Limits)
    if limits:
        given["limits"] = Limits(**limits)
    EngineConfig(**given)
    return given


def without(args: argparse.Namespace, name: str) -> argparse.Namespace:
    """The arguments but for an engine option, which is not given then."""
    return argparse.Namespace(**{given: value for given, value in vars(args).items() if given != _dest(name)})


def _add_fields(group: argparse._ArgumentGroup, record: type, common: Collection[str],
                names: Collection[str] | None = None) -> None:
    """common: the fields that the short help shows. names: the fields to add, by default all."""
    kinds = get_type_hints(record)
    for field in fields(record):
        if names is None or field.name in names:
            action = group.add_argument(flag(field.name), dest=_dest(field.name), default=argparse.SUPPRESS,
                                        help=_help(field), **_form(kinds[field.name], field))
            action.advanced = field.name not in common  # type: ignore[attr-defined]


def _given(args: argparse.Namespace, record: type) -> dict[str, Any]:
    return {field.name: getattr(args, _dest(field.name)) for field in fields(record)
            if hasattr(args, _dest(field.name))}


def sampling(args: argparse.Namespace) -> SamplingParams:
    """What the sampling options ask for, checked."""
    given = {name: getattr(args, name) for name in SAMPLING if hasattr(args, name)}
    return SamplingParams(stop=tuple(args.stop), **given)


def refuse_random(args: argparse.Namespace) -> None:
    """For commands that need a tokenizer."""
    if args.random or args.layers:
        raise UsageError("random weights have no tokenizer, so they cannot talk: use deltic bench or deltic inspect")


def _dest(name: str) -> str:
    return f"engine_{name}"


def _help(field: Field[Any]) -> str:
    line, default = str(field.metadata["help"]), field.default
    shown = default not in (MISSING, None, False, ()) and "default" not in line
    return (f"{line} (default: {default})" if shown else line).replace("%", "%%")


def _form(kind: Any, field: Field[Any]) -> dict[str, Any]:
    """How argparse shall read a value of this type."""
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction if field.default else "store_true"}
    if "choices" in field.metadata:
        return {"choices": field.metadata["choices"]}
    if kind == tuple[str, ...]:
        return {"action": "append", "metavar": "X"}
    for number in (float, int):
        if number in (kind, *get_args(kind)):
            return {"type": number, "metavar": "N"}
    return {"metavar": "X"}
