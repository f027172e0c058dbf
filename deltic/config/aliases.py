"""What things are called elsewhere, and what they are called here: the one table for architectures, formats of numbers
and artifacts, and backends of attention kernels."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal, TypeVar

from deltic.errors import ModelError, show

# Keys are lower case without punctuation, so that `qwen3.5`, `qwen3_5` and `Qwen3_5` are one entry.
_GENERATIONS: Final = ("qwen35", "qwen36", "qwen38")
_CAUSAL_FORMS: Final = ("", "model", "forcausallm")
_DENSE_FORMS: Final = (*_CAUSAL_FORMS, "text", "textmodel", "forconditionalgeneration")
ARCHITECTURES: Final[Mapping[str, str]] = {
    **{base + form: "qwen3_5" for base in _GENERATIONS for form in _DENSE_FORMS},
    **{base + "moe" + form: "qwen3_5_moe" for base in _GENERATIONS for form in _DENSE_FORMS},
    **{"qwen3" + form: "qwen3" for form in _CAUSAL_FORMS},
    **{"qwen3moe" + form: "qwen3_moe" for form in _CAUSAL_FORMS},
    **{"qwen2" + form: "qwen2" for form in _CAUSAL_FORMS},
    **{"qwen2moe" + form: "qwen2_moe" for form in _CAUSAL_FORMS},
    # without sliding windows, which are refused, a Mistral is a Llama
    **{base + form: "llama" for base in ("llama", "mistral") for form in _CAUSAL_FORMS},
    **{"mixtral" + form: "mixtral" for form in _CAUSAL_FORMS},
}
FORMATS: Final[Mapping[str, Literal["float32", "bfloat16", "float16"]]] = {
    "float32": "float32", "fp32": "float32", "f32": "float32", "float": "float32", "q0f32": "float32",
    "bfloat16": "bfloat16", "bf16": "bfloat16", "q0bf16": "bfloat16",
    "float16": "float16", "fp16": "float16", "f16": "float16", "half": "float16", "q0f16": "float16",
}
"""Of numbers; those that begin with q0 are what compiled models call weights that are not quantized."""
GENERATIONS: Final[Mapping[str, str]] = {"v1": "v1", "1": "v1", "v2": "v2", "2": "v2"}
"""Of directories compiled by TVM: attention alone, hybrid."""
BACKENDS: Final[Mapping[str, str]] = {"tirx": "tirx", "tir": "tirx", "flashinfer": "flashinfer"}
"""Who serves attention in a compiled model; TVM has renamed `tir`."""


Name = TypeVar("Name", bound=str)


def find(table: Mapping[str, Name], name: str) -> Name | None:
    """What a name of the table means, in any of its spellings; None if it is none."""
    return table.get(re.sub(r"[^a-z0-9]", "", name.lower()))


def canonical(table: Mapping[str, Name], name: str, what: str) -> Name:
    """As `find`; ModelError for what is none, which says what it should have been."""
    found = find(table, name)
    if found is None:
        raise ModelError(f"{what} {show(name)} is not known, only {', '.join(dict.fromkeys(table.values()))}")
    return found
