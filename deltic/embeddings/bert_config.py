"""What an encoder's checkpoint is: shapes and constants, read from a Hugging Face config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from deltic.config.reading import integer, number
from deltic.errors import ModelError, show

ARCHITECTURES: Final[Mapping[str, str]] = {"bert": "bert", "roberta": "roberta", "xlmroberta": "roberta"}
"""model_type without punctuation -> family. The families differ in where positions begin, and in the classifier."""
_MOST: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """An encoder of the BERT family.

    places: rows of the position table. first_place: the position of a sequence's first token.
    kinds: token types. labels: scores that the classifier gives; 0: there is none.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    places: int
    first_place: int
    kinds: int
    eps: float
    labels: int

    def __post_init__(self) -> None:
        if self.hidden_size % self.heads:
            raise ModelError(f"num_attention_heads ({self.heads}) must divide hidden_size ({self.hidden_size})")
        if self.first_place >= self.places:
            raise ModelError(f"pad_token_id leaves no positions of max_position_embeddings ({self.places})")

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        return self.places - self.first_place

    @classmethod
    def from_hf(cls, mapping: Mapping[str, Any]) -> EncoderConfig:
        """From config.json. ModelError names the key that is missing, of a wrong type, or asks for what is not there.
        """
        family = family_of(mapping)
        if family is None:
            raise ModelError(f"model_type {show(mapping.get('model_type'))} is no encoder that deltic runs: bert, "
                             "roberta and xlm-roberta are")
        for key, fine in (("hidden_act", ("gelu",)), ("position_embedding_type", ("absolute",)),
                          ("is_decoder", (False,)), ("add_cross_attention", (False,))):
            if mapping.get(key, fine[0]) not in (None, *fine):
                raise ModelError(f"{key} is {show(mapping[key])}; only {show(fine[0])} is supported")
        sizes = {name: integer(mapping, key, 1, _MOST) for name, key in (
            ("vocab_size", "vocab_size"), ("hidden_size", "hidden_size"), ("intermediate_size", "intermediate_size"),
            ("layers", "num_hidden_layers"), ("heads", "num_attention_heads"), ("places", "max_position_embeddings"))}
        pad = integer({"pad_token_id": 1, **mapping}, "pad_token_id", 0, _MOST) if family == "roberta" else -1
        return cls(family, **sizes, first_place=pad + 1, labels=_labels(mapping),
                   kinds=integer({"type_vocab_size": 2, **mapping}, "type_vocab_size", 1, 1024),
                   eps=number({"layer_norm_eps": 1e-12, **mapping}, "layer_norm_eps", 0, 1))


def family_of(mapping: Mapping[str, Any]) -> str | None:
    """Of ARCHITECTURES, for what a config.json says; None if it is no encoder."""
    return ARCHITECTURES.get(re.sub(r"[^a-z0-9]", "", str(mapping.get("model_type", "")).lower()))


def _labels(mapping: Mapping[str, Any]) -> int:
    names = mapping.get("architectures")
    if not any(str(name).endswith("ForSequenceClassification") for name in names or ()):
        return 0
    labels = mapping.get("id2label")
    if isinstance(labels, dict) and labels:
        return len(labels)
    return integer({"num_labels": 2, **mapping}, "num_labels", 1, _MOST)
