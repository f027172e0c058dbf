"""Options that several commands share, options from a file, and loading of the model that the arguments name.

Engine options and limits are generated from EngineConfig and Limits.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from deltic.cli.output import bytes_bar, gib
from deltic.cli.parser import UsageError, existing_file, flag, option_hint, read_text, text, whole
from deltic.config import PRESETS, EngineConfig, Limits, ModelConfig, available_memory
from deltic.params import PARAMETERS, SamplingParams

if TYPE_CHECKING:
    from deltic.llm import LLM

COMMON = ("device", "dtype", "threads", "memory", "gpu_memory", "gpu_memory_utilization", "kv_dtype", "max_context",
          "max_batch", "cache_dir", "mmproj", "quant", "expert_memory", "speculate")
"""Engine options that the short help shows."""
MODEL = "a directory, a GGUF file, a Hugging Face name such as Qwen/Qwen3.5-0.8B, or tiny, the embedded demo model"
SAMPLING = {name: (parameter.kind, parameter.metavar, parameter.help) for name, parameter in PARAMETERS.items()
            if parameter.metavar}


def add_model(parser: argparse.ArgumentParser, required: bool = False) -> None:
    """Adds MODEL and --revision, and sets the attributes of `add_random` to their defaults."""
    if required:
        parser.add_argument("model", metavar="MODEL", type=text, help=MODEL)
    else:
        parser.add_argument("model", nargs="?", metavar="MODEL", type=text, help=f"{MODEL} (default)")
    add_revision(parser)
    parser.set_defaults(random=None, layers=None)


def add_revision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a Hugging Face model")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_force(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="replace existing files")


def add_random(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("random weights instead of a model")
    group.add_argument("--random", metavar="PRESET",
                       help=f"a public shape, filled with random weights: {', '.join(PRESETS)}")
    group.add_argument("--layers", type=whole(1), metavar="N", help="keep only the first N layers")


def add_template(parser: argparse.ArgumentParser, think: str = "thinking") -> None:
    """Adds options for prompts from messages. think: attribute of --think; `thinking` sets a model's default."""
    group = parser.add_argument_group("chat template")
    group.add_argument("--chat-template", type=existing_file, metavar="FILE",
                       help="a jinja chat template to use instead of the model's own")
    group.add_argument("--think", dest=think, action=argparse.BooleanOptionalAction, default=None,
                       help="ask the model to think first, or not to (default: as the template does)")
    group.add_argument("--history", choices=("preserve", "template"), default="preserve",
                       help="how prompts repeat earlier answers. preserve: as the tokens that were generated, which "
                            "the cache knows (default). template: as rendered, perhaps without their thinking")
    group.add_argument("--strip-billing-header", action="store_true",
                       help="remove the x-anthropic-billing-header line of coding agents: it changes with every "
                            "request, so that no cached prefix would match")
    group.add_argument("--thinking-budget", type=whole(0), metavar="N",
                       help="close the model's thinking after N tokens; 0: at once (default: no bound)")
    group.add_argument("--tool-call-parser", choices=("auto", "qwen", "json", "minimax"), default="auto",
                       help="how the model writes tool calls. auto: as its chat template shows (default)")
    group.add_argument("--parse-special", action="store_true",
                       help="let messages contain control tokens: <|im_end|> in a file ends a turn (default: it is "
                            "ordinary text)")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling", "The defaults come from the model's generation_config.json.")
    for name, (kind, metavar, line) in SAMPLING.items():
        group.add_argument(flag(name), type=kind, metavar=metavar, help=line, default=argparse.SUPPRESS)
    group.add_argument("--stop", action="append", type=text, metavar="TEXT", default=[],
                       help="end the answer before this text; may be repeated")


def add_conversation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("conversation")
    group.add_argument("--system", metavar="TEXT", type=text, help="system message")
    group.add_argument("--no-thinking-output", dest="thinking_output", action="store_false",
                       help="hide the thinking, which otherwise goes to stderr")
    add_template(parser, "think")  # sent with each request, as /set may change it during a chat


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Adds an option for each field of EngineConfig, grouped by section."""
    sections = {field.name: field.metadata.get("section") for field in fields(EngineConfig)}
    for section in dict.fromkeys(filter(None, sections.values())):
        names = [name for name, own in sections.items() if own == section]
        _add_fields(parser.add_argument_group(section), EngineConfig, COMMON, names)


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Adds an option for each field of Limits."""
    group = parser.add_argument_group("limits", "A request beyond a limit is refused with the limit's name.")
    _add_fields(group, Limits, ())


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the given engine options. Raises ConfigError for a wrong value."""
    given = _given(args, EngineConfig)
    if limits := _given(args, Limits):
        given["limits"] = Limits(**limits)
    EngineConfig(**given)
    return given


def without(args: argparse.Namespace, name: str) -> argparse.Namespace:
    """Returns the arguments without an engine option."""
    return argparse.Namespace(**{key: value for key, value in vars(args).items() if key != _dest(name)})


def sampling(args: argparse.Namespace) -> SamplingParams:
    """Returns the sampling parameters. Raises DelticError for a wrong value."""
    given = {name: getattr(args, name) for name in SAMPLING if hasattr(args, name)}
    return SamplingParams(stop=tuple(args.stop), **given)


def refuse(given: dict[str, Any], reason: str) -> None:
    """Raises UsageError for the first option that was given. given: values by option, false if not given."""
    for name, value in given.items():
        if value is not None and value is not False and value != []:
            raise UsageError(reason.format(name))


def _add_fields(group: argparse._ArgumentGroup, record: type, common: Collection[str],
                names: Collection[str] | None = None) -> None:
    """Adds an option for each field. common: fields that the short help shows. names: fields to add, by default all."""
    kinds = get_type_hints(record)
    for field in fields(record):
        if names is not None and field.name not in names:
            continue
        action = group.add_argument(flag(field.name), dest=_dest(field.name), default=argparse.SUPPRESS,
                                    help=_help(field), **_form(kinds[field.name], field))
        action.advanced = field.name not in common  # type: ignore[attr-defined]


def _given(args: argparse.Namespace, record: type) -> dict[str, Any]:
    names = [field.name for field in fields(record)]
    return {name: getattr(args, _dest(name)) for name in names if hasattr(args, _dest(name))}


def _dest(name: str) -> str:
    return f"engine_{name}"


def _help(field: Field[Any]) -> str:
    line, default = str(field.metadata["help"]), field.default
    if default not in (MISSING, None, False, ()) and "default" not in line:
        line += f" (default: {default})"
    return line.replace("%", "%%")


def _form(kind: Any, field: Field[Any]) -> dict[str, Any]:
    """Returns the argparse settings for a value of this type."""
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


# Options in a file


_NOT_IN_FILES = ("--help", "--config", "--model")


def options_of(parser: argparse.ArgumentParser, path: Path, has_model: bool) -> list[str]:
    """Returns the options in a YAML or TOML file as command-line words. has_model: the command line names a MODEL,
    which overrides the file's. Raises UsageError that names a wrong key."""
    return words_of(parser, str(path), _read_options(path), has_model)


def words_of(parser: argparse.ArgumentParser, path: str, content: dict[Any, Any], has_model: bool = False) -> list[str]:
    """Does the same as `options_of` for the content of a file."""
    model, models = content.pop("model", None), content.pop("models", {})
    if not isinstance(model, str | None):
        raise UsageError(f"{path}: model must be the name of a model")
    if not isinstance(models, dict):
        raise UsageError(f"{path}: models must hold the model of each name, such as small: qwen3.5:0.8b")
    words = [word for key, value in content.items() for word in _words(parser, path, str(key), value)]
    for name, other in models.items():
        words += ["--model", f"{name}={other}"]
    return words if model is None or has_model else [*words, model]


def _read_options(path: Path) -> dict[Any, Any]:
    import tomllib

    import yaml

    is_toml = path.suffix.lower() == ".toml"
    text = read_text(path)
    try:
        content = tomllib.loads(text) if is_toml else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read as {'TOML' if is_toml else 'YAML'}: {error}") from error
    if not isinstance(content, dict | None):
        raise UsageError(f"{path} must hold options by their names, such as port: 8000")
    return content or {}


def _words(parser: argparse.ArgumentParser, path: str, key: str, value: Any) -> list[str]:
    name, actions = flag(key.removeprefix("--")), parser._option_string_actions
    action = actions.get(name)
    if action is None or name in _NOT_IN_FILES:
        hint = option_hint(name, actions)
        raise UsageError(f"{path}: there is no option {key!r}{f' ({hint})' if hint else ''}")
    if value is None:
        return []
    if action.nargs == 0:  # an option without a value
        if not isinstance(value, bool):
            raise UsageError(f"{path}: {key} must be true or false")
        word = name if value else f"--no-{name[2:]}"
        return [word] if word in actions else []
    values = value if isinstance(value, list) else [value]
    if any(isinstance(one, bool) or not isinstance(one, str | int | float) for one in values):
        raise UsageError(f"{path}: {key} must be text, a number or a list of them")
    return [f"{name}={one}" for one in values]


# Loading


_MEMORY_SHARE = 0.9  # share of the free memory that random weights may take
_CHAT_OPTIONS = ("chat_template", "history", "strip_billing_header", "thinking", "thinking_budget",
                 "tool_call_parser", "parse_special")


def open_llm(args: argparse.Namespace, **defaults: Any) -> LLM:
    """Loads a model with a progress bar. defaults: engine options, which options given by the user override."""
    check_source(args)
    given = {**defaults, **engine_options(args)}
    if args.random:
        _check_memory(args, given)
    from deltic.engine.loading import RandomModel
    from deltic.llm import LLM

    source = RandomModel(args.random, args.layers) if args.random else args.model
    processor = {name: getattr(args, name) for name in _CHAT_OPTIONS if hasattr(args, name)}
    with bytes_bar("loading") as bar:
        return LLM(source, revision=args.revision, progress=bar.update, lora=dict(getattr(args, "lora", ())),
                   **processor, **given)


def check_source(args: argparse.Namespace) -> None:
    """Raises UsageError if a model and random weights are both requested."""
    if args.random and args.model:
        raise UsageError(f"MODEL ({args.model}) and --random exclude each other")
    if args.random and args.revision:
        raise UsageError("--revision is for models of the Hugging Face hub: leave it out with --random")
    if args.layers and not args.random:
        raise UsageError("--layers needs --random: a checkpoint keeps its layers")


def _check_memory(args: argparse.Namespace, given: dict[str, Any]) -> None:
    """Raises UsageError if random weights do not fit into the available memory."""
    from deltic.cli.inspect import activation_dtype, weight_bytes
    from deltic.engine.arguments import settled

    engine, config = settled(EngineConfig(**given)), ModelConfig.preset(args.random, args.layers)
    needed, free = weight_bytes(config, activation_dtype(config, engine)), available_memory()
    if engine.device == "cpu" and needed > free * _MEMORY_SHARE:
        raise UsageError(f"the weights of --random {args.random} take {gib(needed)}, and {gib(free)} of memory is "
                         "available: keep fewer layers (--layers), or take a smaller preset. --quant does not help: "
                         "random weights are quantized after all were made")
