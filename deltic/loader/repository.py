"""Which files of a repository on the Hugging Face hub are downloaded, and which of them is the model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import escape
from pathlib import PurePosixPath
from typing import Final

from deltic.errors import ModelError, show

_TEXTS: Final = ("*.json", "*.jinja", "*.txt")
_BESIDE: Final = ("*_linear.pt", "*_Dense/pytorch_model.bin")
"""Of encoders: the outputs of BGE-M3, layers behind the pooling."""
SAFETENSORS: Final = ("*.safetensors", *_TEXTS, *_BESIDE)
SKIPPED: Final = (
    *(f"{prefix}{folder}/*" for folder in ("checkpoint-*", "global_step*", "epoch*", "step*", "original", "onnx",
                                           "openvino", "coreml", "gguf", "mlx", "runs") for prefix in ("", "*/")),
    "consolidated*", "adapter_*", "optimizer*", "*/optimizer*")
"""Beside the model: states of its training, and its weights once more in other forms."""
_HEADS: Final = ("mtp*.safetensors",)
"""Draft heads in files of their own, in directories too."""
PICKLED: Final = ("pytorch_model*.bin", *_HEADS, *_TEXTS, *_BESIDE)
_TYPES: Final = ("Q4_K_M", "Q4_K_XL", "Q8_0")
"""Of several GGUF files the first one of these is taken, where none is named."""
_TOWERS: Final = ("BF16", "F16", "Q8_0")
_PART: Final = re.compile(r"-(\d{5})-of-(\d{5})$")
_SHOWN: Final = 12


@dataclass(frozen=True, slots=True)
class Selection:
    """patterns: of names, as fnmatch reads them, that are downloaded. skipped: of those that are not, all the same.
    file: the GGUF file that is the model, the first of its parts; None: the directory is."""

    patterns: tuple[str, ...]
    file: str | None = None
    skipped: tuple[str, ...] = ()

    def has(self, name: str) -> bool:
        return _matches(name, self.patterns) and not _matches(name, self.skipped)


def select(repository: str, names: Iterable[str], wanted: str | None) -> Selection:
    """wanted: the name of a GGUF file, or its type of weights (Q4_K_M), as it follows a repository's name behind a
    colon; None: safetensors, else what torch has saved, else the GGUF file if there is one, or one of a common type.
    ModelError says what there is instead."""
    names = sorted(names)
    if wanted is None:
        kept = [name for name in names if not _matches(name, SKIPPED)]
        if any(_matches(name, SAFETENSORS[:1]) and not _matches(name, _HEADS) for name in kept):
            return Selection(SAFETENSORS, skipped=SKIPPED)
        if any(_matches(name, PICKLED[:1]) for name in kept):
            return Selection(PICKLED, skipped=SKIPPED)
    files = [name for name in names if is_model(name)]
    if not files:
        if "adapter_config.json" in names:
            raise ModelError(f"{repository} is an adapter (LoRA) and no model: merge it into its base model, which "
                             "adapter_config.json names (peft: merge_and_unload, then save_pretrained), and name the "
                             "directory")
        raise ModelError(f"{repository} has no GGUF files: leave out :{wanted}" if wanted is not None else
                         f"{repository} has no weights that are read here (safetensors, GGUF, pytorch_model.bin): "
                         "choose another repository of the model")
    found = _named(files, wanted) if wanted is not None else files[0] if len(files) == 1 else next(
        filter(None, (_named(files, kind) for kind in _TYPES)), None)
    if found is None:
        which = "several GGUF files" if wanted is None else f"not one GGUF file of this type or name: {show(wanted)}"
        raise ModelError(f"{repository} has {which}; name one, as {repository}:NAME, of {_listed(files)}")
    tower = _tower(found, names)
    exact = tuple(escape(name) for name in (*_parts(found, names), *([tower] if tower else [])))
    return Selection((*exact, *_HEADS), found)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_model(name: str) -> bool:
    """Whether a file's name is that of a GGUF model, or of the first of its parts."""
    path = PurePosixPath(name.lower())
    part = _PART.search(path.stem)
    return (path.suffix == ".gguf" and not (part and int(part[1]) != 1)
            and "mmproj" not in path.name and "imatrix" not in path.name)


def _core(name: str) -> str:
    """A file's name without directory, parts and ending."""
    return _PART.sub("", PurePosixPath(name).stem)


def _named(files: Sequence[str], wanted: str) -> str | None:
    """The file of this name; or whose name ends with this type, of several the one with the shortest name."""
    exact = [name for name in files if wanted in (name, PurePosixPath(name).name)]
    typed = [name for name in files if re.search(rf"(?:^|[-_.]){re.escape(wanted)}$", _core(name), re.IGNORECASE)]
    found = sorted(exact or typed, key=lambda name: len(_core(name)))
    if len(found) > 1 and len(_core(found[0])) == len(_core(found[1])):
        return None
    return found[0] if found else None


def _parts(found: str, names: Iterable[str]) -> list[str]:
    """The file, and the others that it is a part with."""
    path = PurePosixPath(found)
    stem = _PART.sub("", path.stem)
    return [name for name in names if PurePosixPath(name).parent == path.parent and name.endswith(path.suffix)
            and _PART.sub("", PurePosixPath(name).stem) == stem]


def _tower(found: str, names: Iterable[str]) -> str | None:
    """The vision tower of its folder, else of the folders that this lies in."""
    folders = PurePosixPath(found).parents
    named = [name for name in names if name.lower().endswith(".gguf") and "mmproj" in PurePosixPath(name).name.lower()]
    towers = next(filter(None, ([name for name in named if PurePosixPath(name).parent == folder]
                                for folder in folders)), [])
    return next(filter(None, (_named(towers, kind) for kind in _TOWERS)), next(iter(towers), None))


def _listed(files: Sequence[str]) -> str:
    more = f" and {len(files) - _SHOWN} others" if len(files) > _SHOWN else ""
    return ", ".join(show(name) for name in files[:_SHOWN]) + more
