"""Short names of models, as other tools have them (`qwen3.5:0.8b`), and which words are names of models at all."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Final

REPOSITORY: Final = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w.-][\w./-]*))?")
"""A repository of the hub, perhaps with one of its GGUF files or their type."""

_FAMILIES: Final[Mapping[str, tuple[str, tuple[str, ...], str]]] = {
    "qwen3.6": ("Qwen/Qwen3.6-{}", ("27B", "35B-A3B"), "27b"),
    "qwen3.5": ("Qwen/Qwen3.5-{}", ("0.8B", "2B", "4B", "9B", "27B", "35B-A3B", "122B-A10B", "397B-A17B"), "9b"),
    "qwen3": ("Qwen/Qwen3-{}", ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B", "235B-A22B"), "8b"),
    "qwen2.5": ("Qwen/Qwen2.5-{}-Instruct", ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B"), "7b"),
    "smollm2": ("HuggingFaceTB/SmolLM2-{}-Instruct", ("135M", "360M", "1.7B"), "1.7b"),
    "qwen3-embedding": ("Qwen/Qwen3-Embedding-{}", ("0.6B", "4B", "8B"), "8b"),
    "all-minilm": ("sentence-transformers/all-MiniLM-{}-v2", ("L6", "L12"), "l6"),
    "bge-m3": ("BAAI/bge-m3", ("567m",), "567m"),
}
"""A family's repositories, its sizes, and the size that its bare name means."""
_GGUF: Final = "unsloth/{}-GGUF"
_QUANTIZED: Final = re.compile(r"(.*)-(i?q\d\w*|ud-[\w-]+)")
_HUB: Final = re.compile(r"(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/")
_PATH: Final = re.compile(r"(?:\.{0,2}|~)/.+|[^/]+/|.+\.(?:gguf|pte|safetensors)", re.IGNORECASE)
_VERSIONED: Final = re.compile(r"(?:qwen|llama|mistral|mixtral|smollm|gemma|phi|deepseek|codellama|bge|gpt-oss|minimax|"
                               r"glm|granite|olmo|kimi)[\w.-]*\d[\w.:-]*", re.IGNORECASE)
_TAGGED: Final = re.compile(r"[A-Za-z][\w.-]*:(?:latest|[\w.-]*\d+(?:\.\d+)?[bm]\b[\w.-]*|i?q\d\w*)", re.IGNORECASE)


def _short_names() -> dict[str, str]:
    found = dict[str, str]()
    for family, (pattern, sizes, default) in _FAMILIES.items():
        for size in sizes:
            repository = pattern.format(size)
            # the 35B-A3B is both :35b-a3b and :35b
            found |= {f"{family}:{tag}": repository for tag in (size.lower(), size.lower().split("-a")[0])}
        found |= dict.fromkeys((family, f"{family}:latest"), found[f"{family}:{default}"])
    return found


SHORT_NAMES: Final[Mapping[str, str]] = _short_names()
"""The repository that each short name stands for."""


def repository_of(name: str) -> str:
    """The repository that a name stands for, as `org/name` or `org/name:FILE`; other names as they are.

    Knows `qwen3.5:0.8b`, `qwen3.5-0.8b`, `qwen3.5:0.8b-q4_K_M` (a GGUF file) and the hub's own addresses.
    """
    if found := _HUB.match(name):
        return name[found.end():].rstrip("/").removesuffix("/tree/main")
    key = name.lower()
    if (plain := _short(key)) is not None:
        return plain
    quantized = _QUANTIZED.fullmatch(key)
    if quantized and (plain := _short(quantized[1])) is not None:
        return f"{_GGUF.format(plain.split('/')[1])}:{quantized[2].upper()}"
    return name


def _short(key: str) -> str | None:
    """`qwen3.5-0.8b`, as presets are called, is `qwen3.5:0.8b`."""
    size = re.search(r"-(\d[\w.-]*)$", key)
    return SHORT_NAMES.get(key) or (SHORT_NAMES.get(f"{key[:size.start()]}:{size[1]}") if size else None)


def names_a_model(word: str) -> bool:
    """Whether a word can only be meant as the name of a model, here or on the hub, spelled right or not.

    Text with spaces never is; nor are fractions such as 1/2.
    """
    if not word or len(word.split()) != 1 or len(word) > 300:
        return False
    patterns = (_PATH, _VERSIONED, _TAGGED)
    if _HUB.match(word) or word.lower() in SHORT_NAMES or any(pattern.fullmatch(word) for pattern in patterns):
        return True
    return bool(REPOSITORY.fullmatch(word)) and all(re.search("[A-Za-z]", half) for half in word.split("/")[:2])


def similar(name: str) -> list[str]:
    """Names of models that one may have meant, best first."""
    known = {other.lower(): other for other in (*SHORT_NAMES.values(), *SHORT_NAMES)}
    known |= {other.split("/")[1].lower(): other for other in SHORT_NAMES.values()}
    return [known[key] for key in difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.8)]
