"""The shape of an encoder of the BERT family, from a Hugging Face config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from deltic.config.reading import integer, number
from deltic.errors import ModelError, show

FAMILIES: Final[Mapping[str, str]] = {"bert": "bert", "roberta": "roberta", "xlmroberta": "roberta"}
"""Families by model_type without punctuation. They differ in the first position and in the classifier."""
_MAX_SIZE: Final = 1 << 20
_SUPPORTED: Final[Mapping[str, Any]] = {
    "hidden_act": "gelu", "position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
"""The only supported value of a key, which is also its default."""


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    positions: int
    """Rows of the position table."""
    first_position: int
    """Position of a sequence's first token."""
    token_types: int
    eps: float
    labels: int
    """Scores of the classifier; 0 without one."""

    def __post_init__(self) -> None:
        if self.hidden_size % self.heads:
            raise ModelError(f"num_attention_heads ({self.heads}) must divide hidden_size ({self.hidden_size})")
        if self.first_position >= self.positions:
            raise ModelError(f"pad_token_id leaves no positions of max_position_embeddings ({self.positions})")

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        return self.positions - self.first_position

    @classmethod
    def from_hf(cls, mapping: Mapping[str, Any]) -> EncoderConfig:
        """Reads a config.json. Raises ModelError naming the key that is missing, of a wrong type, or not supported."""
        family = family_of(mapping)
        if family is None:
            raise ModelError(f"model_type {show(mapping.get('model_type'))} is no encoder that deltic runs: bert, "
                             "roberta and xlm-roberta are")
        for key, supported in _SUPPORTED.items():
            if mapping.get(key) not in (None, supported):
                raise ModelError(f"{key} is {show(mapping[key])}; only {show(supported)} is supported")
        optional = {"pad_token_id": 1, "type_vocab_size": 2, "layer_norm_eps": 1e-12, **mapping}
        return cls(
            family=family,
            vocab_size=integer(mapping, "vocab_size", 1, _MAX_SIZE),
            hidden_size=integer(mapping, "hidden_size", 1, _MAX_SIZE),
            intermediate_size=integer(mapping, "intermediate_size", 1, _MAX_SIZE),
            layers=integer(mapping, "num_hidden_layers", 1, _MAX_SIZE),
            heads=integer(mapping, "num_attention_heads", 1, _MAX_SIZE),
            positions=integer(mapping, "max_position_embeddings", 1, _MAX_SIZE),
            first_position=integer(optional, "pad_token_id", 0, _MAX_SIZE) + 1 if family == "roberta" else 0,
            token_types=integer(optional, "type_vocab_size", 1, 1024),
            eps=number(optional, "layer_norm_eps", 0, 1),
            labels=_labels(mapping))


def family_of(mapping: Mapping[str, Any]) -> str | None:
    """Returns the family of a config.json, None if it is no encoder."""
    return FAMILIES.get(re.sub(r"[^a-z0-9]", "", str(mapping.get("model_type", "")).lower()))


def _labels(mapping: Mapping[str, Any]) -> int:
    names = mapping.get("architectures")
    if not any(str(name).endswith("ForSequenceClassification") for name in names or ()):
        return 0
    labels = mapping.get("id2label")
    if isinstance(labels, dict) and labels:
        return len(labels)
    return integer({"num_labels": 2, **mapping}, "num_labels", 1, _MAX_SIZE)
