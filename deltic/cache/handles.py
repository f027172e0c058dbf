"""Records of what sequences own in the cache. Any module may read them; only the manager and its parts change them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, MutableSequence
from dataclasses import dataclass, field
from typing import Any

from deltic.cache.lineage import Line
from deltic.cache.radix_tree import Checkpoint, Node
from deltic.params import PAGE


class PageList(list[int]):
    """The page numbers of a sequence. version: grows when existing entries change, not when pages are appended."""

    __slots__ = ("version",)

    def __init__(self, pages: Iterable[int] = ()) -> None:
        super().__init__(pages)
        self.version = 0

    def renumber(self, moved: Mapping[int, int]) -> None:
        """Replaces the numbers of moved pages. moved: new numbers by old ones."""
        if not moved.keys().isdisjoint(self):
            self[:] = [moved.get(page, page) for page in self]
            self.version += 1


@dataclass(slots=True, eq=False)
class SequenceCache:
    """The units of one running sequence.

    slot: slot of its recurrent state.
    pages: pages of its K/V; they cover `covered` tokens.
    keys: keys of its tokens (`Prompt.keys`): the same list object that the engine's sequence appends to.
    done: the cursor: number of tokens with committed K/V and state.
    logits: logits after the last token of the position where it started, if known.
    source: name of the tier that it was loaded from; empty if none.
    shared: number of tokens of its prompt with K/V in the tree at admission.
    checkpoint_slots: slots into which steps write states for checkpoints, by position.
    likely_resume: positions where later prompts are likely to resume.
    guarded: checkpoints to which the sequence would return after a preemption.
    delta_log: its state delta log, if it has one.
    unflushed: number of committed tokens that are in the delta log and not in the state.
    prompt: a copy of the first keys, as an array that never changes and is fast to slice.
    node: a node of the tree on the path of the keys.
    line: the conversation that it belongs to, if known.
    resumed: the checkpoint where it started, if any.
    lender: the node of that checkpoint. The tree owns the pages up to this node on behalf of the sequence.
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
        """The pages that it owns itself, without those that the tree owns for it."""
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
        """Number of tokens that the state in the slot covers."""
        return self.done - self.unflushed

    @property
    def covered(self) -> int:
        return len(self.pages) * PAGE


@dataclass(frozen=True, slots=True, eq=False)
class CacheSnapshot:
    """A position to which sequences can return: fixed keys, their pages and a copy of the state. logits: logits after
    the last token, if known. line: the conversation that it belongs to, if known."""

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
    """A preempted sequence. guarded: checkpoints to which it would return. pages: number of pages that it had. line:
    its line. end: the checkpoint where it resumes, if its prefix was kept."""

    guarded: list[Checkpoint]
    pages: int
    line: Line | None
    end: Checkpoint | None = None
