"""Strings that are searched for in an answer while it is generated: region markers and stop strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

Region = Literal["reasoning", "content", "tool"]
THINK, THINK_END = "<think>", "</think>"


class MarkerVocabulary(Protocol):
    """The part of a tokenizer that output routing needs."""

    @property
    def eos_id(self) -> int | None: ...
    def token_to_id(self, token: str, /) -> int | None: ...
    def visible_bytes(self, id: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Markers:
    """Region markers, matched by token id if they are tokens of their own, else as text."""

    ids: Mapping[int, str] = field(default_factory=dict)
    texts: tuple[str, ...] = ()

    @classmethod
    def of(cls, tokenizer: MarkerVocabulary, calls: Sequence[str] = ()) -> Markers:
        """Returns the think tags and the `calls` tags of a vocabulary."""
        ids = {marker: tokenizer.token_to_id(marker) for marker in (THINK, THINK_END, *calls)}
        return cls({id: marker for marker, id in ids.items() if id is not None},
                   tuple(marker for marker, id in ids.items() if id is None))


def start_mode(prompt_ids: Sequence[int], tokenizer: MarkerVocabulary) -> Region:
    """Returns the region in which the answer begins: reasoning if the prompt leaves a think block open.

    Only ids after the last end-of-turn token count, so that a quoted think tag has no effect.
    """
    think, think_end = tokenizer.token_to_id(THINK), tokenizer.token_to_id(THINK_END)
    if think is None:
        return "content"
    for id in reversed(prompt_ids):
        if id == think:
            return "reasoning"
        if id in (think_end, tokenizer.eos_id):
            break
    return "content"


def closes_thinking(prompt_ids: Sequence[int], tokenizer: MarkerVocabulary) -> bool:
    """Returns True if the prompt ends with a closed think block of the answer."""
    think_end = tokenizer.token_to_id(THINK_END)
    ends = (id == think_end for id in reversed(prompt_ids) if id in (think_end, tokenizer.eos_id))
    return next(ends, False)


def open_suffix(text: str, needles: Sequence[str]) -> int:
    """Returns the length of the longest suffix of `text` that begins a needle. Meant for few and short needles."""
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

    Time is linear in the text for any number and length of strings. Node 0 is the root.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._children: dict[tuple[int, str], int] = {}
        self._depths = [0]
        self._ends = [0]
        self._fails = [0]  # for each node, the node of its longest proper suffix
        for stop in self.stops:
            self._insert(stop)
        for (parent, char), node in sorted(self._children.items(), key=lambda edge: self._depths[edge[1]]):
            self._fails[node] = self.step(self._fails[parent], char) if parent else 0
            self._ends[node] = self._ends[node] or self._ends[self._fails[node]]

    def depth(self, node: int) -> int:
        """Returns the length of the suffix that may become a stop string."""
        return self._depths[node]

    def found(self, node: int) -> int:
        """Returns the length of the longest stop string that ends here; 0 if none does."""
        return self._ends[node]

    def step(self, node: int, char: str) -> int:
        while not (child := self.child(node, char)) and node:
            node = self._fails[node]
        return child

    def child(self, node: int, char: str) -> int:
        """Returns the child of a node for a character, or 0 if there is none."""
        return self._children.get((node, char), 0)

    def _insert(self, stop: str) -> None:
        node = 0
        for depth, char in enumerate(stop, 1):
            node = self._children.setdefault((node, char), len(self._depths))
            if node == len(self._depths):
                self._depths.append(depth)
                self._ends.append(0)
                self._fails.append(0)
        self._ends[node] = len(stop)


@dataclass(slots=True)
class StopScanner:
    """Passes text up to the first stop string, and holds back text that may become one.

    found: the stop string that ends first. If several end together, the longest.
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
        return self.found is not None

    def push(self, text: str) -> str:
        """Takes more text. Returns the part that is certainly before any stop string."""
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
        held = self.held
        self.held = ""
        self.node = 0
        return held

    def copy(self) -> StopScanner:
        return replace(self)
