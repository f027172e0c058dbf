"""The JSON files beside a model's weights that say what it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from deltic.config import ModelConfig
from deltic.errors import ConfigError, ModelError, show
from deltic.loader.files import read_json
from deltic.loader.in_memory import PLACE
from deltic.loader.layout import refuse

MAX_CONFIG: Final = 4 << 20


def read_shape(directory: Path, config: Any) -> tuple[ModelConfig, Mapping[str, Any]]:
    """Of a model, and what else its config.json, or what stands in for it, says."""
    if not isinstance(config, ModelConfig | Mapping | str | Path | None):
        raise ConfigError(f"config must be the path of a config.json, what it holds, or a ModelConfig, not "
                          f"{show(config)}", "config")
    if isinstance(config, Mapping):
        return ModelConfig.from_hf(config), config
    path = directory / "config.json" if config is None or isinstance(config, ModelConfig) else Path(config)
    if isinstance(config, ModelConfig):
        return config, read_json(path, MAX_CONFIG) if path.exists() else {}
    if config is None and directory == PLACE:
        raise ConfigError("weights need a config: give `config`, the path of a config.json, what it holds, or a "
                          "ModelConfig", "config")
    if config is None and not path.exists():
        refuse(directory)
    mapping = read_json(path, MAX_CONFIG)
    with of_file(path):
        return ModelConfig.from_hf(mapping), mapping


def preprocessors(directory: Path) -> list[Mapping[str, Any]]:
    """What is said of pictures, and of films: in one file, as transformers writes it from version 5 on, or in one for
    each. Empty where there is nothing."""
    both, *each = (read_json(path, MAX_CONFIG) if path.is_file() else {} for path in (
        directory / "processor_config.json", directory / "preprocessor_config.json",
        directory / "video_preprocessor_config.json"))
    found = [both.get(part, alone) for part, alone in zip(("image_processor", "video_processor"), each, strict=True)]
    if not all(isinstance(said, Mapping) for said in found):
        raise ModelError("processor_config.json: image_processor and video_processor must be objects")
    return found


@contextmanager
def of_file(path: Path) -> Iterator[None]:
    """Errors about a key name the file that has it."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
