"""Inputs and outputs of embedding models and rerankers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from numpy.typing import NDArray

from deltic.embeddings.sentence_transformers import Recipe

Vector = NDArray[Any]
"""float32 [D]"""
Output = Literal["dense", "sparse", "colbert", "score"]


@dataclass(frozen=True, slots=True)
class Item:
    """A text, or a pair of texts, as tokens."""

    ids: Sequence[int]
    """Token ids, including all special tokens."""
    token_types: Sequence[int] = ()
    """Token type of each token; empty if all are 0."""
    prompt: int = 0
    """Number of leading tokens that belong to the prompt before the text."""
    cut: bool = False
    """True if the text was truncated."""
    cache_salt: str = ""

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Vectors:
    """The requested outputs of an item, or an error."""

    dense: Vector | None = None
    sparse: Mapping[int, float] = field(default_factory=dict)
    """Weights by token id."""
    colbert: Vector | None = None
    """float32 [tokens after the first, D]"""
    score: float = 0.0
    """From 0 to 1."""
    error: str | None = None


class TextModel(Protocol):
    """A model that returns vectors or scores."""

    name: str
    recipe: Recipe
    outputs: frozenset[Output]
    dimension: int
    max_length: int
    budget: int
    """Maximum tokens of a batch."""
    overlaps: bool
    """True if a batch may start before the results of the previous batch are fetched."""

    def start(self, items: Sequence[Item], wanted: frozenset[Output]) -> Callable[[], list[Vectors]]:
        """Starts a batch. Returns a function that waits for its results and returns one for each item."""

    def close(self) -> None:
        """Frees the model's resources."""
