"""Finds strings in a text that arrives in pieces."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass


def open_suffix(text: str, needles: Sequence[str]) -> int:
    """Length of the longest end of `text` that may be the beginning of a needle. For short needles: the time grows with
    their number and the square of their length."""
    longest = 0
    for needle in needles:
        at = text.find(needle[0], max(len(text) - len(needle) + 1, 0), len(text) - longest)
        while at >= 0:
            if needle.startswith(text[at:]):
                longest = len(text) - at
                break
            at = text.find(needle[0], at + 1, len(text) - longest)
    return longest


class StopAutomaton:
    """Aho-Corasick automaton over stop strings: its state is the longest end of the text that begins one of them.

    A character costs one look-up and, on average over the text, at most one step back, however many strings there are,
    however long they are and however nearly they match. Node 0 is the root. The first child of a node is its successor
    in the arrays, so that a node takes 24 bytes; only other children are in a dictionary.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._parents, self._depths, self._chars = array("i", [-1]), array("i", [0]), ["\0"]
        self._branches: dict[tuple[int, str], int] = {}
        ends = [self._insert(stop) for stop in self.stops]
        size = len(self._parents)
        self._fails, self._ends = array("i", bytes(4 * size)), array("i", bytes(4 * size))
        for end in ends:
            self._ends[end] = self._depths[end]
        self._link()

    def depth(self, node: int) -> int:
        """Characters of the text's end that may become a stop string."""
        return self._depths[node]

    def found(self, node: int) -> int:
        """Length of the longest stop string that is complete here; 0 if none is."""
        return self._ends[node]

    def step(self, node: int, char: str) -> int:
        """The node after one more character."""
        while not (child := self.child(node, char)) and node:
            node = self._fails[node]
        return child

    def child(self, node: int, char: str) -> int:
        """The node's child by a character; 0 if it has none."""
        following = node + 1
        if following < len(self._parents) and self._parents[following] == node and self._chars[following] == char:
            return following
        return self._branches.get((node, char), 0) if self._branches else 0

    def _insert(self, stop: str) -> int:
        node = 0
        for char in stop:
            child = self.child(node, char)
            if not child:
                child = len(self._parents)
                self._parents.append(node)
                self._depths.append(self._depths[node] + 1)
                self._chars.append(char)
                if child != node + 1:
                    self._branches[node, char] = child
            node = child
        return node

    def _link(self) -> None:
        """Set for each node where the text goes on that does not go on below it: the node of the longest proper end."""
        for node in sorted(range(1, len(self._parents)), key=self._depths.__getitem__):
            parent = self._parents[node]
            fail = self.step(self._fails[parent], self._chars[node]) if parent else 0
            self._fails[node] = fail
            self._ends[node] = self._ends[node] or self._ends[fail]


@dataclass(slots=True)
class StopScanner:
    """Lets text pass up to the first stop string, and holds back what may become one.

    The stop string that is complete first wins; of several that end together, the one that began first. found: it.
    """

    automaton: StopAutomaton
    held: str = ""
    found: str | None = None
    node: int = 0

    @classmethod
    def of(cls, stops: Sequence[str]) -> StopScanner:
        """A scanner for these strings, which are read once."""
        return cls(StopAutomaton(stops))

    @property
    def stops(self) -> tuple[str, ...]:
        return self.automaton.stops

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self.found is not None

    def push(self, text: str) -> str:
        """Take more text, give the part that is certain to come before any stop string."""
        automaton, node, before = self.automaton, self.node, len(self.held)
        if not automaton.stops:
            return text
        for place, char in enumerate(text, before + 1):
            node = automaton.step(node, char)
            if length := automaton.found(node):
                text = self.held + text
                self.found, self.held = text[place - length:place], ""
                return text[:place - length]
        text = self.held + text
        cut = len(text) - automaton.depth(node)
        self.held, self.node = text[cut:], node
        return text[:cut]

    def flush(self) -> str:
        """Give what was held back: the text ends here, or goes on elsewhere."""
        held, self.held, self.node = self.held, "", 0
        return held

    def copy(self) -> StopScanner:
        """An independent scanner in the same state."""
        return StopScanner(self.automaton, self.held, self.found, self.node)
