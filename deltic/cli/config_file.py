"""Reads the options of `serve --config FILE` from YAML or TOML."""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path
from typing import Any

import yaml

from deltic.cli.foreign import option_hint
from deltic.cli.parser import UsageError, flag, read_text

_NOT_IN_FILES = ("--help", "--config", "--model")


def options_of(parser: argparse.ArgumentParser, path: Path, has_model: bool) -> list[str]:
    """Returns the options of the file as words of a command line. has_model: the command line names a MODEL, which
    overrides the file's. Raises UsageError with the name of a wrong key."""
    content = _read(path)
    model, models = content.pop("model", None), content.pop("models", {})
    if not isinstance(model, str | None):
        raise UsageError(f"{path}: model must be the name of a model")
    if not isinstance(models, dict):
        raise UsageError(f"{path}: models must hold the model of each name, such as small: qwen3.5:0.8b")
    words = [word for key, value in content.items() for word in _option(parser, path, str(key), value)]
    for name, other in models.items():
        words += ["--model", f"{name}={other}"]
    return words if model is None or has_model else [*words, model]


def _read(path: Path) -> dict[Any, Any]:
    is_toml = path.suffix.lower() == ".toml"
    try:
        text = read_text(path)
        content = tomllib.loads(text) if is_toml else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read as {'TOML' if is_toml else 'YAML'}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"{path} must hold options by their names, such as port: 8000")
    return content


def _option(parser: argparse.ArgumentParser, path: Path, key: str, value: Any) -> list[str]:
    name = flag(key.removeprefix("--"))
    actions = parser._option_string_actions
    action = actions.get(name)
    if action is None or name in _NOT_IN_FILES:
        hint = option_hint(name, actions)
        raise UsageError(f"{path}: there is no option {key!r}{f' ({hint})' if hint else ''}")
    if value is None:
        return []
    takes_value = action.nargs != 0
    if isinstance(value, bool):
        off = f"--no-{name[2:]}"
        if takes_value or off in actions:
            if off not in actions:
                raise UsageError(f"{path}: {key} must have a value, not {str(value).lower()}")
            return [name if value else off]
        return [name] if value else []
    values = value if isinstance(value, list) else [value]
    if not takes_value:
        raise UsageError(f"{path}: {key} must be true or false")
    if not all(isinstance(one, str | int | float) for one in values):
        raise UsageError(f"{path}: {key} must be text, a number or a list of them")
    return [f"{name}={one}" for one in values]
