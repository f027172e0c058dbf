"""Pre-tokenizers of byte-level BPE models: how text is normalised and split before merging.

Patterns from transformers (tokenization_qwen2.py, tokenization_qwen3_5.py) and from the tokenizer.json of Llama 3,
SmolLM2 and Mistral Nemo.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_NFC: Final = {"type": "NFC"}
GPT2: Final[dict[str, Any]] = {
    "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


@dataclass(frozen=True, slots=True)
class Splitter:
    """A pre-tokenizer.

    cuts: pre-tokenizers in the form of tokenizer.json, applied in order.
    whole: a piece that is a token is not split by merges (ignore_merges).
    bos: a raw prompt starts with a bos token by default.
    """

    cuts: Sequence[Mapping[str, Any]]
    normalizer: Mapping[str, str] | None = None
    whole: bool = False
    bos: bool = False


def _regex(pattern: str) -> list[dict[str, Any]]:
    return [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {**GPT2, "use_regex": False}]


_QWEN2: Final = Splitter(_regex(
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"), _NFC)
_QWEN35: Final = Splitter(_regex(
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"),
    _NFC)
_LLAMA3: Final = Splitter(_regex(
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"),
    whole=True, bos=True)
_TEKKEN: Final = Splitter(_regex(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"), whole=True, bos=True)
SPLITTERS: Final[Mapping[str, Splitter]] = {
    "qwen2": _QWEN2,
    "qwen35": _QWEN35,
    "llama-bpe": _LLAMA3,
    "tekken": _TEKKEN,
    "gpt-2": Splitter([GPT2]),
    "smollm": Splitter([{"type": "Digits", "individual_digits": True}, GPT2]),
    "deepseek-r1-qwen": _QWEN2,
}
"""Keyed by tokenizer.ggml.pre of GGUF files."""
_BY_ARCHITECTURE: Final[Mapping[str, str]] = {
    "qwen35": "qwen35", "qwen36": "qwen35", "qwen38": "qwen35", "qwen3": "qwen2", "qwen2": "qwen2"}
"""Keyed by the start of an architecture's name; longer ones first."""


def splitter_of(architecture: str) -> Splitter | None:
    """Returns the pre-tokenizer common to all models of an architecture (qwen35moe, qwen3_5_text), if there is one."""
    plain = re.sub("[^a-z0-9]", "", architecture.lower())
    return next((SPLITTERS[name] for start, name in _BY_ARCHITECTURE.items() if plain.startswith(start)), None)
