"""Sampling defaults recommended by the model's authors: generation_config.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from deltic.config.reading import flag, integer, number, token_ids
from deltic.errors import ModelError

_MAX_INT: Final = (1 << 31) - 1
_INTEGERS: Final = {"top_k": 0, "json_max_length": 1, "json_max_items": 1}
"""Lowest value of each."""
_NUMBERS: Final = {
    "temperature": (0.0, 100.0), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "repetition_penalty": (0.01, 100.0)}
_NOT_SAMPLING: Final = ("eos_token_ids", "json_max_length", "json_max_items")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling parameters for requests that do not set them. `None`: the model recommends nothing.

    temperature: 0 is greedy.
    top_k: 0 keeps all tokens.
    eos_token_ids: any of them ends an answer.
    json_max_length, json_max_items: bounds of strings and lists in JSON without bounds in its schema, for models that
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
