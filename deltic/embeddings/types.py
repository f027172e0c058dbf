"""What models of texts are asked, and what they give."""

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
    """A text, or a pair of them, as a model reads it. ids: with all special tokens. kinds: token types, empty: all 0.
    prompt: so many of the first tokens are those of what was put before the text. cut: the text was longer. cache_salt:
    as in `EngineRequest`."""

    ids: Sequence[int]
    kinds: Sequence[int] = ()
    prompt: int = 0
    cut: bool = False
    cache_salt: str = ""

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Vectors:
    """What a text gives, of which there is what was asked for.

    dense: float32 [D]. sparse: weights by token id. colbert: float32 [tokens after the first, D]. score: of a pair or
    a text, from 0 to 1. error: why there is nothing.
    """

    dense: Vector | None = None
    sparse: Mapping[int, float] = field(default_factory=dict)
    colbert: Vector | None = None
    score: float = 0.0
    error: str | None = None


class TextModel(Protocol):
    """A model that gives vectors or scores. outputs: what it can give. budget: tokens that are worth a batch. ahead: a
    batch may be started before what came of the last one is fetched, as a device computes meanwhile."""

    name: str
    recipe: Recipe
    outputs: frozenset[Output]
    dimension: int
    max_length: int
    budget: int
    ahead: bool

    def start(self, items: Sequence[Item], wanted: frozenset[Output]) -> Callable[[], list[Vectors]]:
        """Begin with a batch. What is returned waits for it, and gives one for each item. One thread at a time."""

    def close(self) -> None:
        """Give back what it holds."""
