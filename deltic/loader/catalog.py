"""Short names of models (`qwen3.5:0.8b`), and the recognition of model names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

REPOSITORY: Final = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w.-][\w./-]*))?")
"""A repository of the hub, optionally with one of its GGUF files or their type."""


class _Family(NamedTuple):
    repository: str
    sizes: tuple[str, ...]
    default: str


_FAMILIES: Final[Mapping[str, _Family]] = {
    "qwen3.6": _Family("Qwen/Qwen3.6-{}", ("27B", "35B-A3B"), "27b"),
    "qwen3.5": _Family(
        "Qwen/Qwen3.5-{}", ("0.8B", "2B", "4B", "9B", "27B", "35B-A3B", "122B-A10B", "397B-A17B"), "9b"),
    "qwen3": _Family("Qwen/Qwen3-{}", ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B", "235B-A22B"), "8b"),
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


def _find(key: str) -> str | None:
    """Looks up a short name, also in the spelling of presets (`qwen3.5-0.8b`)."""
    size = re.search(r"-(\d[\w.-]*)$", key)
    return SHORT_NAMES.get(key) or (SHORT_NAMES.get(f"{key[:size.start()]}:{size[1]}") if size else None)


def names_a_model(word: str) -> bool:
    """True if a word can only be a model's name, spelled correctly or not. Texts with spaces and fractions such as 1/2
    are none."""
    if not word or len(word.split()) != 1 or len(word) > 300:
        return False
    if _HUB.match(word) or word.lower() in SHORT_NAMES:
        return True
    if any(pattern.fullmatch(word) for pattern in (_PATH, _VERSIONED, _TAGGED)):
        return True
    return bool(REPOSITORY.fullmatch(word)) and all(re.search("[A-Za-z]", half) for half in word.split("/")[:2])


def similar(name: str) -> list[str]:
    """Returns known names of models with a similar spelling, best first."""
    known = {other.lower(): other for other in (*SHORT_NAMES.values(), *SHORT_NAMES)}
    known |= {other.split("/")[1].lower(): other for other in SHORT_NAMES.values()}
    return [known[key] for key in difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.8)]
