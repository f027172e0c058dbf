"""Recognises models, and things that are no models, by file names and first bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from deltic.errors import ModelError, show

_GGUF: Final = b"GGUF"
_POINTER: Final = b"version https://git-lfs"
_OTHER_FORMATS: Final[Mapping[str, str]] = {
    "params.json": "is in the original format of its authors (params.json): take the Hugging Face format, with "
                   "config.json and model.safetensors",
    "model_index.json": "is a diffusers pipeline, which generates pictures: it has no language model to serve",
    "weights.npz": "is an MLX model (weights.npz): take the original checkpoint, or a GGUF file",
    "*.onnx": "is an ONNX model: take the original checkpoint, or a GGUF file",
    "onnx/*.onnx": "has only ONNX weights: take the original checkpoint, or a GGUF file",
    "*.mlpackage": "is a Core ML model: take the original checkpoint, or a GGUF file",
    "openvino_model.xml": "is an OpenVINO model: take the original checkpoint, or a GGUF file",
    "mlc-chat-config.json": "has only the parameters of an mlc-llm model and no library: compile one with deltic "
                            "compile, or take the original checkpoint"}
"""Models of other tools, by a typical file."""
_MAX_LISTED: Final = 3


def is_gguf(path: Path) -> bool:
    """True if a file starts like a GGUF file, whatever its name: Ollama's blobs have no suffix."""
    return _begins(path, _GGUF)


def has_weights(directory: Path) -> bool:
    """True if a directory has weights of a model, other than GGUF files, draft heads and adapters."""
    weights = [*directory.glob("*.safetensors"), *directory.glob("pytorch_model*.bin"),
               *directory.glob("*.safetensors.index.json")]
    return any(not path.name.startswith(("mtp", "adapter_")) for path in weights)


def refuse(directory: Path) -> None:
    """Raises ModelError with cause and remedy if a directory is recognised as something that cannot be loaded."""
    for check in (_refuse_adapter, _refuse_tower, _refuse_other_formats, _refuse_folders):
        check(directory)


def is_pointer(content: bytes) -> bool:
    """True if a file's content starts like a git-lfs pointer."""
    return len(content) >= len(_GGUF) and content.startswith(_POINTER[:len(content)])


def pointer_error(path: Path) -> ModelError:
    return ModelError(f"{path} is a git-lfs pointer and not the file itself: run `git lfs pull` in {path.parent}, or "
                      "download the file")


def refuse_pointer(path: Path) -> None:
    """Raises ModelError if a file is a git-lfs pointer."""
    if _begins(path, _POINTER):
        raise pointer_error(path)


def _begins(path: Path, mark: bytes) -> bool:
    with suppress(OSError, ValueError):
        if path.is_file():
            with path.open("rb") as file:
                return file.read(len(mark)) == mark
    return False


def _refuse_adapter(directory: Path) -> None:
    path = directory / "adapter_config.json"
    if not path.is_file() or (directory / "config.json").is_file():
        return
    base = None
    with suppress(OSError, ValueError, RecursionError, AttributeError):
        base = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path")
    raise ModelError(f"{directory} is an adapter (LoRA) and no model: merge it into its base model"
                     f"{f' {show(base)}' if base else ''} (peft: merge_and_unload, then save_pretrained), and name the "
                     "directory of the merged model")


def _refuse_tower(directory: Path) -> None:
    if tower := next(directory.glob("*mmproj*.gguf"), None):
        raise ModelError(f"{directory} has a vision tower ({tower.name}) and no model: put the model's own GGUF file "
                         "beside it")


def _refuse_other_formats(directory: Path) -> None:
    for pattern, message in _OTHER_FORMATS.items():
        if next(directory.glob(pattern), None):
            raise ModelError(f"{directory} {message}")


def _refuse_folders(directory: Path) -> None:
    """Refuses a directory whose folders contain models: checkpoints of a training, snapshots of the hub's cache."""
    configs = [*directory.glob("*/config.json"), *directory.glob("*/*/config.json")]
    files = [*directory.glob("*/*.gguf"), *directory.glob("*/*/*.gguf")]
    models = sorted({*files, *(path.parent for path in configs if has_weights(path.parent))})
    if models:
        raise ModelError(f"{directory} holds no model itself, but its folders do: name "
                         + " or ".join(str(path) for path in models[-_MAX_LISTED:]))
