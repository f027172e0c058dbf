"""Aliases of names: the only table for architectures, number formats, compiled artifacts and attention backends."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal, TypeVar

from deltic.errors import ModelError, show

# Keys are lower case without punctuation, so that `qwen3.5`, `qwen3_5` and `Qwen3_5` are one entry.
_GENERATIONS: Final = ("qwen35", "qwen36", "qwen38")
_CAUSAL_FORMS: Final = ("", "model", "forcausallm")
_MULTIMODAL_FORMS: Final = (*_CAUSAL_FORMS, "text", "textmodel", "forconditionalgeneration")
_TEXT_MODELS: Final[Mapping[str, str]] = {
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "llama": "llama",
    "mistral": "llama",  # the same without sliding windows, which are refused
    "mixtral": "mixtral",
}
ARCHITECTURES: Final[Mapping[str, str]] = {
    **{base + form: "qwen3_5" for base in _GENERATIONS for form in _MULTIMODAL_FORMS},
    **{base + "moe" + form: "qwen3_5_moe" for base in _GENERATIONS for form in _MULTIMODAL_FORMS},
    **{base + form: name for base, name in _TEXT_MODELS.items() for form in _CAUSAL_FORMS},
}
FORMATS: Final[Mapping[str, Literal["float32", "bfloat16", "float16"]]] = {
    "float32": "float32", "fp32": "float32", "f32": "float32", "float": "float32", "q0f32": "float32",
    "bfloat16": "bfloat16", "bf16": "bfloat16", "q0bf16": "bfloat16",
    "float16": "float16", "fp16": "float16", "f16": "float16", "half": "float16", "q0f16": "float16",
}
"""Number formats. Compiled models call unquantized weights q0..."""
GENERATIONS: Final[Mapping[str, str]] = {"v1": "v1", "1": "v1", "v2": "v2", "2": "v2"}
"""Generations of directories compiled by TVM: attention only, hybrid."""
BACKENDS: Final[Mapping[str, str]] = {"tirx": "tirx", "tir": "tirx", "flashinfer": "flashinfer"}
"""Attention backends of compiled models. TVM renamed `tir`."""

Name = TypeVar("Name", bound=str)


def find(table: Mapping[str, Name], name: str) -> Name | None:
    """Returns the canonical form of a name in any spelling; None for an unknown name."""
    return table.get(re.sub(r"[^a-z0-9]", "", name.lower()))


def canonical(table: Mapping[str, Name], name: str, what: str) -> Name:
    """Like `find`, but raises ModelError for an unknown name."""
    found = find(table, name)
    if found is None:
        raise ModelError(f"{what} {show(name)} is not known, only {', '.join(dict.fromkeys(table.values()))}")
    return found
