"""What sequences own in the cache. Read it freely; only the manager and its parts change it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, MutableSequence
from dataclasses import dataclass, field
from typing import Any

from deltic.cache.lineage import Line
from deltic.cache.radix_tree import Checkpoint, Node
from deltic.params import PAGE


class PageList(list[int]):
    """The pages of a sequence. version: grows when entries change, not when the list becomes longer."""

    __slots__ = ("version",)

    def __init__(self, pages: Iterable[int] = ()) -> None:
        super().__init__(pages)
        self.version = 0

    def renumber(self, moved: Mapping[int, int]) -> None:
        """Replaces the numbers of pages that have moved."""
        if not moved.keys().isdisjoint(self):
            self[:] = [moved.get(page, page) for page in self]
            self.version += 1


@dataclass(slots=True, eq=False)
class SequenceCache:
    """The units of one running sequence.

    slot: of its recurrent state.
    pages: of its K/V; they cover `covered` tokens.
    keys: the keys of its tokens (`Prompt.keys`), the very list that the sequence appends to.
    done: the cursor: K/V and state of so many tokens are committed.
    logits: of the last token where the sequence started, if known.
    source: name of the tier that it started from, if any.
    shared: tokens of K/V that the tree had of its prompt.
    checkpoint_slots: by position, slots that steps write the state at that position to.
    likely_resume: positions where following prompts are likely to resume.
    guarded: checkpoints that the sequence would return to.
    delta_log: its state delta log, if it has one.
    unflushed: committed tokens that are in the delta log and not in the state.
    prompt: the first keys once more, as an array that never changes and is quickly sliced.
    node: a node of the tree on the path of the keys.
    line: the conversation that it belongs to, if known.
    resumed: the checkpoint where it started, if any.
    lender: the node of that checkpoint, up to which the tree owns the pages for it.
    """

    slot: int
    pages: PageList = field(default_factory=PageList)
    keys: MutableSequence[int] = field(default_factory=list)
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
    line: Line | None = None
    resumed: Checkpoint | None = None
    lender: Node | None = None

    @property
    def own_pages(self) -> list[int]:
        """The pages that it is an owner of."""
        return self.pages[self.lender.depth:] if self.lender else self.pages

    def prefix(self, done: int) -> array[int]:
        """Returns the first `done` keys."""
        known = self.prompt[:done]
        return known if len(known) == done else known + array("q", self.keys[len(known):done])

    @property
    def tokens(self) -> MutableSequence[int]:
        """A copy of the keys of the committed tokens."""
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
    """A position that sequences can return to: keys, which do not change, pages and a copy of the state. logits: of the
    last token. line: the conversation that it belongs to."""

    slot: int
    pages: PageList
    keys: MutableSequence[int]
    logits: Any = None
    line: Line | None = None

    @property
    def own_pages(self) -> list[int]:
        return self.pages

    @property
    def tokens(self) -> MutableSequence[int]:
        """A copy of the keys."""
        return self.keys[:]

    @property
    def done(self) -> int:
        return len(self.keys)


@dataclass(slots=True, eq=False)
class PreemptedState:
    """The checkpoints that a preempted sequence would return to, the number of pages that it had, its line, and the
    checkpoint where it goes on."""

    guarded: list[Checkpoint]
    pages: int
    line: Line | None
    end: Checkpoint | None = None
