"""What the model's authors advise for sampling: generation_config.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from deltic.config.reading import flag, integer, number, token_ids
from deltic.errors import ModelError

_MOST = (1 << 31) - 1
_JSON = ("json_max_length", "json_max_items")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling values to use where a request has none; `None` means that the model gives no advice.

    temperature: 0 is greedy.
    top_k: 0 keeps all tokens.
    eos_token_ids: any of them ends an answer.
    json_max_length, json_max_items: bounds of texts and lists in JSON whose schema has none, for models that are too
    small to end them.
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
        """Read a generation_config.json; `eos_token_ids` (the model config's) are appended to its own.

        `do_sample: false` means temperature 0. Raises ModelError naming the key that is out of range.
        """
        if not isinstance(mapping, Mapping):
            raise ModelError("generation_config.json must hold one JSON object")
        given = {key: value for key, value in mapping.items() if value is not None}
        temperature = number(given, "temperature", 0.0, 100.0) if "temperature" in given else None
        return cls(
            temperature=temperature if flag(given, "do_sample", True) else 0.0,
            top_k=integer(given, "top_k", 0, _MOST) if "top_k" in given else None,
            top_p=number(given, "top_p", 0.0, 1.0) if "top_p" in given else None,
            min_p=number(given, "min_p", 0.0, 1.0) if "min_p" in given else None,
            repetition_penalty=(number(given, "repetition_penalty", 0.01, 100.0)
                                if "repetition_penalty" in given else None),
            json_max_length=integer(given, "json_max_length", 1, _MOST) if "json_max_length" in given else None,
            json_max_items=integer(given, "json_max_items", 1, _MOST) if "json_max_items" in given else None,
        ).with_eos(token_ids(given, "eos_token_id")).with_eos(eos_token_ids)

    def with_eos(self, token_ids: Iterable[int]) -> GenerationDefaults:
        """Add end tokens known from elsewhere, for example from the tokenizer."""
        return replace(self, eos_token_ids=tuple(dict.fromkeys((*self.eos_token_ids, *token_ids))))

    def sampling(self) -> dict[str, float | int]:
        """The advice as a mapping for `SamplingParams.with_defaults`."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("eos_token_ids", *_JSON)}
        return {name: value for name, value in values.items() if value is not None}
