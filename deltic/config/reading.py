"""Strict readers of JSON values, names of number formats in any spelling, and generation_config.json.

Each error names the key and the allowed values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal, TypeVar

from deltic.errors import ModelError, show

FORMATS: Final[Mapping[str, Literal["float32", "bfloat16", "float16"]]] = {
    "float32": "float32", "fp32": "float32", "f32": "float32", "float": "float32", "q0f32": "float32",
    "bfloat16": "bfloat16", "bf16": "bfloat16", "q0bf16": "bfloat16",
    "float16": "float16", "fp16": "float16", "f16": "float16", "half": "float16", "q0f16": "float16",
}
"""Number formats. Compiled models use names q0... for unquantized weights."""
GENERATIONS: Final[Mapping[str, str]] = {"v1": "v1", "1": "v1", "v2": "v2", "2": "v2"}
"""Generations of directories compiled by TVM: v1 attention only, v2 hybrid."""
BACKENDS: Final[Mapping[str, str]] = {"tirx": "tirx", "tir": "tirx", "flashinfer": "flashinfer"}
"""Attention backends of compiled models. TVM renamed `tir`."""


Name = TypeVar("Name", bound=str)


def plain(name: str) -> str:
    """Returns a name in lower case without punctuation, so that `qwen3.5`, `qwen3_5` and `Qwen3_5` are equal."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def find(table: Mapping[str, Name], name: str) -> Name | None:
    """Returns the canonical form of a name in any spelling; None for an unknown name."""
    return table.get(plain(name))


def canonical(table: Mapping[str, Name], name: str, what: str) -> Name:
    """Like `find`, but raises ModelError for an unknown name."""
    found = find(table, name)
    if found is None:
        raise ModelError(f"{what} {show(name)} is not known, only {', '.join(dict.fromkeys(table.values()))}")
    return found


def required(source: Mapping[str, Any], key: str) -> Any:
    value = source.get(key)
    if value is None:
        raise ModelError(f"{key} is absent; take the config.json that belongs to the weights")
    return value


def integer(source: Mapping[str, Any], key: str, low: int, high: int) -> int:
    value = required(source, key)
    if type(value) is not int or not low <= value <= high:
        raise ModelError(f"{key} must be an integer from {low} to {high}, not {show(value)}")
    return value


def number(source: Mapping[str, Any], key: str, low: float, high: float) -> float:
    value = required(source, key)
    if type(value) not in (int, float) or not low <= value <= high:
        raise ModelError(f"{key} must be a number from {low:g} to {high:g}, not {show(value)}")
    return float(value)


def flag(source: Mapping[str, Any], key: str, default: bool) -> bool:
    value = source.get(key)
    if value is not None and type(value) is not bool:
        raise ModelError(f"{key} must be true or false, not {show(value)}")
    return default if value is None else value


def token_ids(source: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Reads a key with one id or a list of ids."""
    value = source.get(key)
    ids = [] if value is None else value if isinstance(value, list | tuple) else [value]
    if any(type(token) is not int or not 0 <= token < 1 << 31 for token in ids):
        raise ModelError(f"{key} must be a token id or a list of them, not {show(value)}")
    return tuple(dict.fromkeys(ids))


# generation_config.json

_MAX_INT: Final = (1 << 31) - 1
_INTEGERS: Final = {"top_k": 0, "json_max_length": 1, "json_max_items": 1}
"""Minimum value of each integer key."""
_NUMBERS: Final = {
    "temperature": (0.0, 100.0), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "repetition_penalty": (0.01, 100.0)}
_NOT_SAMPLING: Final = ("eos_token_ids", "json_max_length", "json_max_items")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling parameters for requests that do not set them. `None`: the model has no recommendation.

    temperature: 0 is greedy.
    top_k: 0 keeps all tokens.
    eos_token_ids: any of them ends an answer.
    json_max_length, json_max_items: bounds of strings and lists in JSON answers if the schema has none, for models that
        are too small to end them.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    json_max_length: int | None = None
    json_max_items: int | None = None

    @classmethod
    def from_hf(cls, mapping: Mapping[str, Any], eos_token_ids: Iterable[int] = ()) -> GenerationDefaults:
        """Reads a generation_config.json; `eos_token_ids` (the model config's) are appended to its own.

        `do_sample: false` means temperature 0. Raises ModelError naming the key that is out of range.
        """
        if not isinstance(mapping, Mapping):
            raise ModelError("generation_config.json must hold one JSON object")
        given = {key: value for key, value in mapping.items() if value is not None}
        found: dict[str, Any] = {}
        found |= {key: integer(given, key, low, _MAX_INT) for key, low in _INTEGERS.items() if key in given}
        found |= {key: number(given, key, *bounds) for key, bounds in _NUMBERS.items() if key in given}
        if not flag(given, "do_sample", True):
            found["temperature"] = 0.0
        return cls(**found).with_eos(token_ids(given, "eos_token_id")).with_eos(eos_token_ids)

    def with_eos(self, token_ids: Iterable[int]) -> GenerationDefaults:
        """Adds end tokens from another source, such as the tokenizer."""
        return replace(self, eos_token_ids=tuple(dict.fromkeys((*self.eos_token_ids, *token_ids))))

    def sampling(self) -> dict[str, float | int]:
        """Returns the parameters for `SamplingParams.with_defaults`."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _NOT_SAMPLING}
        return {name: value for name, value in values.items() if value is not None}
