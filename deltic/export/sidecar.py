"""What travels with a compiled model beside its program: config, advice for sampling, tokenizer and chat template."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from deltic.config import GenerationDefaults, ModelConfig
from deltic.errors import ModelError
from deltic.export.program import generation_config, hf_config

if TYPE_CHECKING:
    from deltic.loader.model_files import ModelFiles

_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.json", "chat_template.jinja")
_TEMPLATES: Final = "additional_chat_templates"
_CONFIG: Final = "config.json"
_GENERATION: Final = "generation_config.json"


def write_sidecar(files: ModelFiles, folder: Path, config: ModelConfig | None = None) -> None:
    """Write config.json, generation_config.json and the tokenizer's files of a model into a directory.

    config: what to write instead of the model's own, such as one without a draft head. ModelError if the shape cannot
    be said in a config.json.
    """
    config = config or files.config
    mapping = hf_config(config)
    if ModelConfig.from_hf(mapping) != config:
        raise ModelError(f"{files.path}: the scaled rotary frequencies of this model cannot be compiled")
    write_json(folder / _CONFIG, mapping)
    write_json(folder / _GENERATION, generation_config(files.generation))
    texts = files.tokenizer()
    if texts is not None:
        (folder / _FILES[0]).write_text(texts.tokenizer, encoding="utf-8")
        write_json(folder / _FILES[1], {**texts.special_tokens, "chat_template": [
            {"name": name, "template": template} for name, template in texts.templates.items()]})
        return
    for name in _FILES:
        if (files.path / name).is_file():
            shutil.copyfile(files.path / name, folder / name)
    if (files.path / _TEMPLATES).is_dir():
        shutil.copytree(files.path / _TEMPLATES, folder / _TEMPLATES, dirs_exist_ok=True)


def sidecar_files(folder: Path) -> list[Path]:
    """What `write_sidecar` may have left in a directory."""
    return [path for name in (_CONFIG, _GENERATION, *_FILES, _TEMPLATES) if (path := folder / name).exists()]


def read_sidecar(folder: Path) -> tuple[ModelConfig, GenerationDefaults]:
    """The config and the advice for sampling that `write_sidecar` has left; ModelError naming the file and key."""
    path = folder / _CONFIG
    try:
        config = ModelConfig.from_hf(load_json(path))
        path = folder / _GENERATION
        advice = load_json(path) if path.is_file() else {}
        return config, GenerationDefaults.from_hf(advice, config.eos_token_ids)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ModelError if there is none."""
    if not path.is_file():
        raise ModelError(f"there is no {path.name}; the artifact is not whole: make or copy it again")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"it cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError("it must hold one JSON object")
    return value
