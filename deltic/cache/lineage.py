"""Lines of conversations: protect the kept positions of a main line while its branches run. No torch.

A branch is a sub-agent, a title, a retry or a fork: a request that is not the next turn of its main line. While a
sequence of a line or of one of its branches runs, the positions where the line would go on are evicted after the
checkpoints of other sequences (`PrefixTree._order`). A branch does not evict them at all while other sequences of its
trunk run: it waits for these (`Line.needed`). So a branch evicts its main line only if it runs alone and cannot run
otherwise. Lines without a running sequence have no effect.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from deltic.params import Lineage

if TYPE_CHECKING:
    from deltic.cache.radix_tree import Checkpoint

_LEVELS: Final = 4
"""Number of branch levels that are distinguished. A deeper branch gets the level of the branch that it starts from."""
_MOST_ENDS: Final = 4
"""Maximum number of ends of a line. Beyond it, the line drops the end at the smallest position."""
_MOST_LINES: Final = 1024
"""Maximum number of named lines. Beyond it, the least recently used line is forgotten."""


class Line:
    """A conversation that goes on at its ends, such as its last answer.

    active: number of running or preempted sequences, and of snapshots, of the line and its branches.
    ends: checkpoints where it goes on, oldest first.
    trunk: its main line, at the root of all branches.
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
        """Eviction rank: 0 if the line is not active, else a number that is higher for a line than for its branches."""
        return _LEVELS - self.depth if self.active else 0

    def path(self) -> Iterator[Line]:
        """Yields the line, the line that it branches off, and so on up to the main line."""
        line: Line | None = self
        while line is not None:
            yield line
            line = line.parent

    def needed(self, resumed: Checkpoint | None) -> set[Checkpoint]:
        """Returns the ends that a sequence of this line must not evict: the likely ends of the line and its ancestors.
        Leaves out the ends of the line itself if the sequence goes on from one of them. resumed: where it started."""
        return {end for line in self.path() if not (line is self and resumed in line.ends)
                for end in line.ends if end.likely_resume}

    def enter(self) -> None:
        """Counts a sequence that begins to run."""
        for line in self.path():
            line.active += 1

    def leave(self) -> None:
        for line in self.path():
            line.active -= 1

    def add(self, end: Checkpoint, resumed: Checkpoint | None = None) -> None:
        """Adds an end. It replaces the end at which its sequence resumed and all older ones, which the conversation has
        left behind. Changes nothing if the checkpoint is an end of another line."""
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
        """Removes an end of this line; ignores other checkpoints."""
        if end.line is self:
            self.ends.remove(end)
            end.line = None


class Lines:
    """The lines that clients have named."""

    def __init__(self) -> None:
        self._named: OrderedDict[str, Line] = OrderedDict()

    def of(self, lineage: Line | Lineage, resumed: Checkpoint | None) -> Line | None:
        """Returns the line of a request that would resume at a checkpoint: a new branch for a fork, otherwise the line
        of the request's name, or without a name the line that goes on at the checkpoint."""
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
