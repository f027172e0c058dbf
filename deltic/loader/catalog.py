"""Names of models (`qwen3.5:0.8b`, `org/name:Q4_K_M`), and the files of a repository that make up a model."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import escape
from pathlib import PurePosixPath
from typing import Final, NamedTuple

from deltic.errors import ModelError, show

_REPOSITORY: Final = re.compile(
    r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(\w[\w./-]*))?(?::([\w.-][\w./-]*))?")


class RepositoryName(NamedTuple):
    """A repository of the hub. revision: branch, tag or commit. file: name of one of its GGUF files, or its type."""

    repository: str
    revision: str | None
    file: str | None


class _Family(NamedTuple):
    repository: str
    sizes: tuple[str, ...]
    default: str


_FAMILIES: Final[Mapping[str, _Family]] = {
    "qwen3.6": _Family("Qwen/Qwen3.6-{}", ("27B", "35B-A3B"), "27b"),
    "qwen3.5": _Family(
        "Qwen/Qwen3.5-{}", ("0.8B", "2B", "4B", "9B", "27B", "35B-A3B", "122B-A10B", "397B-A17B"), "9b"),
    "qwen3": _Family("Qwen/Qwen3-{}", ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B", "235B-A22B"), "8b"),
    "qwen3-next": _Family("Qwen/Qwen3-Next-{}-Instruct", ("80B-A3B",), "80b"),
    "qwen3-coder-next": _Family("Qwen/Qwen3-Coder-Next", ("80B-A3B",), "80b"),
    "qwen2.5": _Family("Qwen/Qwen2.5-{}-Instruct", ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B"), "7b"),
    "smollm2": _Family("HuggingFaceTB/SmolLM2-{}-Instruct", ("135M", "360M", "1.7B"), "1.7b"),
    "qwen3-embedding": _Family("Qwen/Qwen3-Embedding-{}", ("0.6B", "4B", "8B"), "8b"),
    "all-minilm": _Family("sentence-transformers/all-MiniLM-{}-v2", ("L6", "L12"), "l6"),
    "bge-m3": _Family("BAAI/bge-m3", ("567m",), "567m"),
}
_GGUF: Final = "unsloth/{}-GGUF"
_QUANTIZED: Final = re.compile(r"(.*)-(i?q\d\w*|ud-[\w-]+)")
_HUB: Final = re.compile(r"(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/")
_PATH: Final = re.compile(r"(?:\.{0,2}|~)/.+|[^/]+/|.+\.(?:gguf|pte|safetensors)", re.IGNORECASE)
_VERSIONED: Final = re.compile(r"(?:qwen|llama|mistral|mixtral|smollm|gemma|phi|deepseek|codellama|bge|gpt-oss|minimax|"
                               r"glm|granite|olmo|kimi)[\w.-]*\d[\w.:-]*", re.IGNORECASE)
_TAGGED: Final = re.compile(r"[A-Za-z][\w.-]*:(?:latest|[\w.-]*\d+(?:\.\d+)?[bm]\b[\w.-]*|i?q\d\w*)", re.IGNORECASE)


def _short_names() -> dict[str, str]:
    found = dict[str, str]()
    for name, family in _FAMILIES.items():
        for size in family.sizes:
            repository = family.repository.format(size)
            tag = size.lower()
            found[f"{name}:{tag}"] = repository
            found[f"{name}:{tag.split('-a')[0]}"] = repository  # 35B-A3B is :35b, too
        for short in (name, f"{name}:latest"):
            found[short] = found[f"{name}:{family.default}"]
    return found


SHORT_NAMES: Final[Mapping[str, str]] = _short_names()
"""Short name -> repository."""


def repository_of(name: str) -> str:
    """Expands a short name to `org/name` or `org/name:FILE`; returns other names unchanged.

    Knows `qwen3.5:0.8b`, `qwen3.5-0.8b`, `qwen3.5:0.8b-q4_K_M` (a GGUF file) and URLs of the hub.
    """
    if found := _HUB.match(name):
        return name[found.end():].rstrip("/").removesuffix("/tree/main")
    key = name.lower()
    if repository := _find(key):
        return repository
    quantized = _QUANTIZED.fullmatch(key)
    if quantized and (repository := _find(quantized[1])):
        return f"{_GGUF.format(repository.split('/')[1])}:{quantized[2].upper()}"
    return name


def parse_repository(name: str, revision: str | None = None) -> RepositoryName | None:
    """Returns the parts of `org/name[@revision][:file]`, or of a short name; None for any other name.

    revision: a revision that was given apart from the name. Raises ModelError if the name has another one.
    """
    found = _REPOSITORY.fullmatch(repository_of(name))
    if found is None:
        return None
    if revision and found[2] and revision != found[2]:
        raise ModelError(f"{show(name)} names the revision {found[2]}, and the option {show(revision)}: give one")
    return RepositoryName(found[1], revision or found[2], found[3])


def _find(key: str) -> str | None:
    """Looks up a short name, also in the spelling of presets (`qwen3.5-0.8b`)."""
    size = re.search(r"-(\d[\w.-]*)$", key)
    return SHORT_NAMES.get(key) or (SHORT_NAMES.get(f"{key[:size.start()]}:{size[1]}") if size else None)


def names_a_model(word: str) -> bool:
    """Returns True if a word can only be a model's name, spelled correctly or not. Returns False for texts with spaces
    and fractions such as 1/2."""
    if not word or len(word.split()) != 1 or len(word) > 300:
        return False
    if _HUB.match(word) or word.lower() in SHORT_NAMES:
        return True
    if any(pattern.fullmatch(word) for pattern in (_PATH, _VERSIONED, _TAGGED)):
        return True
    return bool(_REPOSITORY.fullmatch(word)) and all(re.search("[A-Za-z]", half) for half in word.split("/")[:2])


def similar(name: str) -> list[str]:
    """Returns known names of models with a similar spelling, best first."""
    known = {other.lower(): other for other in (*SHORT_NAMES.values(), *SHORT_NAMES)}
    known |= {other.split("/")[1].lower(): other for other in SHORT_NAMES.values()}
    return [known[key] for key in difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.8)]


# Files of a repository


_CONFIG: Final = ("*.json", "*.jinja", "*.txt")
_ENCODER_HEADS: Final = ("*_linear.pt", "*_Dense/pytorch_model.bin")
"""Extra outputs of BGE-M3, and layers after the pooling."""
_MTP_HEADS: Final = ("mtp*.safetensors",)
"""Draft heads in separate files, also in folders."""
_SAFETENSORS: Final = ("*.safetensors", *_CONFIG, *_ENCODER_HEADS)
_PICKLED: Final = ("pytorch_model*.bin", *_MTP_HEADS, *_CONFIG, *_ENCODER_HEADS)
_SKIPPED_FOLDERS: Final = (
    "checkpoint-*", "global_step*", "epoch*", "step*", "original", "onnx", "openvino", "coreml", "gguf", "mlx", "runs")
_SKIPPED: Final = (
    *(f"{prefix}{folder}/*" for folder in _SKIPPED_FOLDERS for prefix in ("", "*/")),
    "consolidated*", "adapter_*", "optimizer*", "*/optimizer*")
"""Training states, and the weights in other formats."""
_PREFERRED_TYPES: Final = ("Q4_K_M", "Q4_K_XL", "Q8_0")
_PREFERRED_TOWERS: Final = ("BF16", "F16", "Q8_0")
_PART: Final = re.compile(r"-(\d{5})-of-(\d{5})$")
_MAX_LISTED: Final = 12


@dataclass(frozen=True, slots=True)
class Selection:
    """Files to download.

    patterns: fnmatch patterns of names.
    file: the GGUF file that is the model, or the first of its parts; None: the directory is the model.
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
        found = _find_file(models, wanted)
    elif len(models) == 1:
        found = models[0]
    else:
        found = _first(models, _PREFERRED_TYPES)
    if found is None:
        which = "several GGUF files" if wanted is None else f"not one GGUF file of this type or name: {show(wanted)}"
        raise ModelError(f"{repository} has {which}; name one, as {repository}:NAME, of {_list(models)}")
    tower = tower_of(found, names)
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
    """Returns True for the name of a GGUF model, or of the first of its parts."""
    path = PurePosixPath(name.lower())
    part = _PART.search(path.stem)
    if path.suffix != ".gguf" or (part and int(part[1]) != 1):
        return False
    return "mmproj" not in path.name and "imatrix" not in path.name


def _stem(name: str) -> str:
    """Returns a file's name without directory, part number and suffix."""
    return _PART.sub("", PurePosixPath(name).stem)


def _find_file(files: Sequence[str], wanted: str) -> str | None:
    """Returns the file with this name, else the shortest name that ends with this type; None if ambiguous."""
    exact = [name for name in files if wanted in (name, PurePosixPath(name).name)]
    suffix = re.compile(rf"(?:^|[-_.]){re.escape(wanted)}$", re.IGNORECASE)
    found = sorted(exact or [name for name in files if suffix.search(_stem(name))], key=lambda name: len(_stem(name)))
    if len(found) > 1 and len(_stem(found[0])) == len(_stem(found[1])):
        return None
    return found[0] if found else None


def _first(files: Sequence[str], types: Iterable[str]) -> str | None:
    return next(filter(None, (_find_file(files, type) for type in types)), None)


def _parts(model: str, names: Iterable[str]) -> list[str]:
    """Returns all parts of a split model."""
    path = PurePosixPath(model)
    return [name for name in names if PurePosixPath(name).parent == path.parent and name.endswith(path.suffix)
            and _stem(name) == _stem(model)]


def tower_of(model: str, names: Iterable[str]) -> str | None:
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
