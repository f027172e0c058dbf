"""Selects the files of a Hugging Face repository that make up a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import escape
from pathlib import PurePosixPath
from typing import Final

from deltic.errors import ModelError, show

_CONFIG: Final = ("*.json", "*.jinja", "*.txt")
_ENCODER_HEADS: Final = ("*_linear.pt", "*_Dense/pytorch_model.bin")
"""Extra outputs of BGE-M3, and layers after the pooling."""
_MTP_HEADS: Final = ("mtp*.safetensors",)
"""Draft heads in files of their own, also in folders."""
_SAFETENSORS: Final = ("*.safetensors", *_CONFIG, *_ENCODER_HEADS)
_PICKLED: Final = ("pytorch_model*.bin", *_MTP_HEADS, *_CONFIG, *_ENCODER_HEADS)
_SKIPPED_FOLDERS: Final = (
    "checkpoint-*", "global_step*", "epoch*", "step*", "original", "onnx", "openvino", "coreml", "gguf", "mlx", "runs")
_SKIPPED: Final = (
    *(f"{prefix}{folder}/*" for folder in _SKIPPED_FOLDERS for prefix in ("", "*/")),
    "consolidated*", "adapter_*", "optimizer*", "*/optimizer*")
"""States of the training, and the weights in other formats."""
_PREFERRED_TYPES: Final = ("Q4_K_M", "Q4_K_XL", "Q8_0")
_PREFERRED_TOWERS: Final = ("BF16", "F16", "Q8_0")
_PART: Final = re.compile(r"-(\d{5})-of-(\d{5})$")
_MAX_LISTED: Final = 12


@dataclass(frozen=True, slots=True)
class Selection:
    """Files to download.

    patterns: fnmatch patterns of names.
    file: the GGUF file that is the model, the first of its parts; None: the directory is the model.
    skipped: patterns that override `patterns`.
    """

    patterns: tuple[str, ...]
    file: str | None = None
    skipped: tuple[str, ...] = ()

    def has(self, name: str) -> bool:
        return _matches(name, self.patterns) and not _matches(name, self.skipped)


def select(repository: str, names: Iterable[str], wanted: str | None) -> Selection:
    """Selects files by the part of a model's name after the colon.

    wanted: name of a GGUF file, or its type of weights (Q4_K_M). None: safetensors, else pytorch_model.bin, else the
    only GGUF file, or one of a common type. Raises ModelError that lists the choices.
    """
    names = sorted(names)
    if wanted is None:
        kept = [name for name in names if not _matches(name, _SKIPPED)]
        if any(name.endswith(".safetensors") and not _matches(name, _MTP_HEADS) for name in kept):
            return Selection(_SAFETENSORS, skipped=_SKIPPED)
        if any(_matches(name, _PICKLED[:1]) for name in kept):
            return Selection(_PICKLED, skipped=_SKIPPED)
    models = [name for name in names if is_model(name)]
    if not models:
        raise _no_models(repository, names, wanted)
    if wanted is not None:
        found = _find(models, wanted)
    elif len(models) == 1:
        found = models[0]
    else:
        found = _first(models, _PREFERRED_TYPES)
    if found is None:
        which = "several GGUF files" if wanted is None else f"not one GGUF file of this type or name: {show(wanted)}"
        raise ModelError(f"{repository} has {which}; name one, as {repository}:NAME, of {_list(models)}")
    tower = _tower(found, names)
    files = [*_parts(found, names), *([tower] if tower else [])]
    return Selection((*map(escape, files), *_MTP_HEADS), found)


def _no_models(repository: str, names: Sequence[str], wanted: str | None) -> ModelError:
    if "adapter_config.json" in names:
        return ModelError(f"{repository} is an adapter (LoRA) and no model: merge it into its base model, which "
                          "adapter_config.json names (peft: merge_and_unload, then save_pretrained), and name the "
                          "directory")
    if wanted is not None:
        return ModelError(f"{repository} has no GGUF files: leave out :{wanted}")
    return ModelError(f"{repository} has no weights that can be read (safetensors, GGUF, pytorch_model.bin): choose "
                      "another repository of the model")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_model(name: str) -> bool:
    """True for the name of a GGUF model, or of the first of its parts."""
    path = PurePosixPath(name.lower())
    part = _PART.search(path.stem)
    if path.suffix != ".gguf" or (part and int(part[1]) != 1):
        return False
    return "mmproj" not in path.name and "imatrix" not in path.name


def _stem(name: str) -> str:
    """Returns a file's name without directory, part number and suffix."""
    return _PART.sub("", PurePosixPath(name).stem)


def _find(files: Sequence[str], wanted: str) -> str | None:
    """Returns the file with this name, else the shortest name that ends with this type; None if that is ambiguous."""
    exact = [name for name in files if wanted in (name, PurePosixPath(name).name)]
    suffix = re.compile(rf"(?:^|[-_.]){re.escape(wanted)}$", re.IGNORECASE)
    found = sorted(exact or [name for name in files if suffix.search(_stem(name))], key=lambda name: len(_stem(name)))
    if len(found) > 1 and len(_stem(found[0])) == len(_stem(found[1])):
        return None
    return found[0] if found else None


def _first(files: Sequence[str], types: Iterable[str]) -> str | None:
    return next(filter(None, (_find(files, type) for type in types)), None)


def _parts(model: str, names: Iterable[str]) -> list[str]:
    """Returns all parts of a split model."""
    path = PurePosixPath(model)
    return [name for name in names if PurePosixPath(name).parent == path.parent and name.endswith(path.suffix)
            and _stem(name) == _stem(model)]


def _tower(model: str, names: Iterable[str]) -> str | None:
    """Returns the vision tower in the nearest folder above the model."""
    named = [name for name in names if name.lower().endswith(".gguf") and "mmproj" in PurePosixPath(name).name.lower()]
    for folder in PurePosixPath(model).parents:
        towers = [name for name in named if PurePosixPath(name).parent == folder]
        if towers:
            return _first(towers, _PREFERRED_TOWERS) or towers[0]
    return None


def _list(files: Sequence[str]) -> str:
    more = f" and {len(files) - _MAX_LISTED} others" if len(files) > _MAX_LISTED else ""
    return ", ".join(show(name) for name in files[:_MAX_LISTED]) + more
