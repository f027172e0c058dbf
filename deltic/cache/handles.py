"""What sequences own in the cache. Read it freely; only `HybridCache` changes it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

from deltic.cache.radix_tree import Checkpoint, Node
from deltic.params import PAGE


@dataclass(slots=True, eq=False)
class SequenceCache:
    """What one running sequence owns. Read it freely; only HybridCache changes it.

    slot: of its state.
    pages: of its K/V; they cover `covered` tokens.
    keys: what the sequence's tokens are known by (`Prompt.keys`), the very list that its owner appends to.
    done: the cursor: committed K/V and state stand for so many of the tokens.
    logits: those of the last token where it started, if known.
    source: the tier that it came from, if any.
    shared: tokens of K/V that the tree knew of its prompt.
    checkpoint_slots: slots that steps write the state at a position to, to be kept by `keep_emitted`.
    likely_resume: positions where following prompts are expected to part.
    guarded: the checkpoints to which the sequence would return.
    delta_log: its replay ring, if it has one.
    unflushed: committed tokens that are in the ring and not in the state.
    prompt: what the keys begin with, once more as an array, of which parts are quickly had; it never changes.
    node: of the tree, on the way of the keys.
    """

    slot: int
    pages: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    done: int = 0
    logits: Any = None
    source: str = ""
    shared: int = 0
    checkpoint_slots: dict[int, int] = field(default_factory=dict)
    likely_resume: set[int] = field(default_factory=set)
    guarded: list[Checkpoint] = field(default_factory=list)
    delta_log: int | None = None
    unflushed: int = 0
    prompt: array[int] = field(default_factory=lambda: array("q"))
    node: Node | None = None

    def prefix(self, done: int) -> array[int]:
        """The first `done` keys."""
        known = self.prompt[:done]
        return known if len(known) == done else known + array("q", self.keys[len(known):done])

    @property
    def tokens(self) -> list[int]:
        """The keys of the committed tokens, a copy."""
        return self.keys[:self.done]

    @property
    def base(self) -> int:
        """Tokens that the state in the slot stands for."""
        return self.done - self.unflushed

    @property
    def covered(self) -> int:
        return len(self.pages) * PAGE


@dataclass(frozen=True, slots=True, eq=False)
class CacheSnapshot:
    """A position to which sequences can return: its tokens' keys, their pages, and a copy of the state in a slot.
    logits: those of the last token, if they are kept."""

    slot: int
    pages: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: Any = None

    @property
    def done(self) -> int:
        return len(self.tokens)


@dataclass(slots=True, eq=False)
class PreemptedState:
    """What a sequence that gave its place to another one would return to, and how many pages it had."""

    guarded: list[Checkpoint]
    pages: int
