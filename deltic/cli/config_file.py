"""A file with options of a command, as `serve --config FILE` takes it: YAML or TOML, by its suffix."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from deltic.cli.foreign import option_hint
from deltic.cli.parser import UsageError, read_text

MODEL = "model"
MODELS = "models"


def words(parser: argparse.ArgumentParser, path: Path, named: bool) -> list[str]:
    """The options of the file as they would be typed. named: a MODEL is typed, which counts instead of the file's.

    Raises UsageError naming the key that is no option, or whose value cannot be one.
    """
    content = _read(path)
    found = [] if named else [*_model(path, content)]
    options = {key: value for key, value in content.items() if key not in (MODEL, MODELS)}
    typed = [word for key, value in options.items() for word in _option(parser, path, str(key), value)]
    served = content.get(MODELS, {})
    if not isinstance(served, dict):
        raise UsageError(f"{path}: {MODELS} must hold the model of each name, such as small: qwen3.5:0.8b")
    return [*typed, *(word for name, model in served.items() for word in ("--model", f"{name}={model}")), *found]


def _model(path: Path, content: dict[Any, Any]) -> Iterator[str]:
    model = content.get(MODEL)
    if isinstance(model, str):
        yield model
    elif model is not None:
        raise UsageError(f"{path}: {MODEL} must be the name of a model")


def _read(path: Path) -> dict[Any, Any]:
    try:
        text = read_text(path)
        found = tomllib.loads(text) if path.suffix.lower() == ".toml" else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read as {'TOML' if path.suffix.lower() == '.toml' else 'YAML'}: {error}"
                         ) from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise UsageError(f"{path} must hold options by their names, such as port: 8000")
    return found


def _option(parser: argparse.ArgumentParser, path: Path, key: str, value: Any) -> list[str]:
    name = "--" + key.replace("_", "-").removeprefix("--")
    known = parser._option_string_actions
    action = known.get(name)
    if action is None or name in ("--help", "--config", "--model"):
        hint = option_hint(name, known)
        raise UsageError(f"{path}: there is no option {key!r}{f' ({hint})' if hint else ''}")
    if isinstance(value, bool):
        off = f"--no-{name[2:]}"
        if action.nargs != 0 or (not value and off not in known):
            if action.nargs == 0:
                return []
            raise UsageError(f"{path}: {key} must have a value, not {str(value).lower()}")
        return [name if value else off]
    if value is None:
        return []
    values = value if isinstance(value, list) else [value]
    if action.nargs == 0 or not all(isinstance(one, str | int | float) for one in values):
        kind = "true or false" if action.nargs == 0 else "text, a number or a list of them"
        raise UsageError(f"{path}: {key} must be {kind}")
    return [f"{name}={one}" for one in values]
