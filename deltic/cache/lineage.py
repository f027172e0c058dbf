"""Lines of conversations: which kept positions are a main line's while its branches run. No torch.

A branch is a sub-agent, a title, a retry or a fork: a request that is not the next turn of its main line. While a
sequence of a line or of one of its branches runs, the positions where the line would go on are evicted after all that
other sequences have left (`PrefixTree._order`). A branch does not evict them at all while other sequences of its trunk
run: it waits for these (`Line.needed`). So a branch evicts its main line only for what it cannot run without alone.
Lines without a running sequence have no effect.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from deltic.params import Lineage

if TYPE_CHECKING:
    from deltic.cache.radix_tree import Checkpoint

_LEVELS: Final = 4
"""Levels of branches that are distinguished. Deeper branches count as branches of their parent's trunk."""
_MOST_ENDS: Final = 4
"""Ends of one line. Beyond it the shortest one is no end any more."""
_MOST_LINES: Final = 1024
"""Named lines. Beyond it the least recently used one is forgotten."""


class Line:
    """A conversation that goes on at its ends, such as its last answer.

    active: number of its running sequences and of those of its branches.
    ends: kept positions, oldest first.
    trunk: the main line.
    """

    __slots__ = ("active", "depth", "ends", "parent", "trunk")
    parent: Line | None
    depth: int
    trunk: Line

    def __init__(self, parent: Line | None = None) -> None:
        self.parent = parent.parent if parent is not None and parent.depth + 1 == _LEVELS else parent
        self.depth = 0 if self.parent is None else self.parent.depth + 1
        self.trunk = self if self.parent is None else self.parent.trunk
        self.active = 0
        self.ends: list[Checkpoint] = []

    @property
    def rank(self) -> int:
        """0 if it is not active, else more for a line than for its branches."""
        return _LEVELS - self.depth if self.active else 0

    def path(self) -> Iterator[Line]:
        """Yields the line, the one that it branches off, and so on up to the main line."""
        line: Line | None = self
        while line is not None:
            yield line
            line = line.parent

    def needed(self, resumed: Checkpoint | None) -> set[Checkpoint]:
        """Returns the ends that a sequence must not evict which resumed there: those of its line and of those above. Of
        its own line none if it goes on from one of them."""
        return {end for line in self.path() if not (line is self and resumed in line.ends)
                for end in line.ends if end.likely_resume}

    def enter(self) -> None:
        """A sequence begins to run."""
        for line in self.path():
            line.active += 1

    def leave(self) -> None:
        for line in self.path():
            line.active -= 1

    def add(self, end: Checkpoint, resumed: Checkpoint | None = None) -> None:
        """Adds an end. It replaces the one that its sequence resumed at and all older ones, which the conversation has
        left behind. Nothing changes if it is the end of another line."""
        if end.line is not None and end.line is not self:
            return
        passed = self.ends.index(resumed) + 1 if resumed in self.ends else 0
        for one in [*self.ends[:passed], *(one for one in self.ends if not one.likely_resume), end]:
            self.drop(one)
        self.ends.append(end)
        end.line = self
        if len(self.ends) > _MOST_ENDS:
            self.drop(min(self.ends[:-1], key=lambda one: one.done))

    def drop(self, end: Checkpoint) -> None:
        """Removes an end, if it is one."""
        if end.line is self:
            self.ends.remove(end)
            end.line = None


class Lines:
    """The lines that clients name."""

    def __init__(self) -> None:
        self._named: OrderedDict[str, Line] = OrderedDict()

    def of(self, lineage: Line | Lineage, resumed: Checkpoint | None) -> Line | None:
        """Returns the line of a request that would resume at a checkpoint: a new one for a fork, that of its name, or
        the one that goes on there."""
        if isinstance(lineage, Line):
            return lineage
        known = resumed.line if resumed else None
        if not lineage.forks:
            return self._line(lineage.name, lineage.parent) if lineage.name else known
        trunk = known or (self._line(lineage.name, lineage.parent) if lineage.name else Line())
        if resumed is not None and known is None:
            trunk.add(resumed)
        return Line(trunk)

    def _line(self, name: str, parent: str = "") -> Line:
        line = self._named.get(name)
        if line is None:
            line = Line(self._line(parent) if parent and parent != name else None)
            self._named[name] = line
        self._named.move_to_end(name)
        while len(self._named) > _MOST_LINES:
            self._named.popitem(last=False)
        return line
