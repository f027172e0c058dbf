"""Finds strings in a text that arrives in pieces."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass


def open_suffix(text: str, needles: Sequence[str]) -> int:
    """Returns the length of the longest suffix of `text` that begins a needle. For few and short needles."""
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
    """An Aho-Corasick automaton: its state is the longest suffix of the text that begins a stop string.

    Time is linear in the text for any number and length of strings. Node 0 is the root. The first child of a node is
    its successor in the arrays, so that a node takes 24 bytes; only other children are in a dictionary.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._parents = array("i", [-1])
        self._depths = array("i", [0])
        self._chars = ["\0"]
        self._branches: dict[tuple[int, str], int] = {}
        ends = [self._insert(stop) for stop in self.stops]
        size = len(self._parents)
        self._fails, self._ends = array("i", bytes(4 * size)), array("i", bytes(4 * size))
        for end in ends:
            self._ends[end] = self._depths[end]
        self._link()

    def depth(self, node: int) -> int:
        """Returns the length of the suffix that may become a stop string."""
        return self._depths[node]

    def found(self, node: int) -> int:
        """Returns the length of the longest stop string that ends here; 0 if none does."""
        return self._ends[node]

    def step(self, node: int, char: str) -> int:
        """Returns the node after one more character."""
        while not (child := self.child(node, char)) and node:
            node = self._fails[node]
        return child

    def child(self, node: int, char: str) -> int:
        """Returns the child of a node by a character; 0 if there is none."""
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
        """Sets the failure links: from each node to that of its longest proper suffix."""
        for node in sorted(range(1, len(self._parents)), key=self._depths.__getitem__):
            parent = self._parents[node]
            fail = self.step(self._fails[parent], self._chars[node]) if parent else 0
            self._fails[node] = fail
            self._ends[node] = self._ends[node] or self._ends[fail]


@dataclass(slots=True)
class StopScanner:
    """Passes text up to the first stop string, and holds back text that may become one.

    found: the stop string that ends first; of several that end together, the longest.
    """

    automaton: StopAutomaton
    held: str = ""
    found: str | None = None
    node: int = 0

    @classmethod
    def of(cls, stops: Sequence[str]) -> StopScanner:
        """Returns a scanner for these strings."""
        return cls(StopAutomaton(stops))

    @property
    def stops(self) -> tuple[str, ...]:
        return self.automaton.stops

    @property
    def stopped(self) -> bool:
        """True after a stop string."""
        return self.found is not None

    def push(self, text: str) -> str:
        """Takes more text; returns the part that is certainly before any stop string."""
        automaton = self.automaton
        node = self.node
        before = len(self.held)
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
        """Returns the held text: the content ends here."""
        held = self.held
        self.held = ""
        self.node = 0
        return held

    def copy(self) -> StopScanner:
        """Returns an independent scanner in the same state."""
        return StopScanner(self.automaton, self.held, self.found, self.node)
