"""A replica's report to routers: boundaries of requests at which it can resume, and the seconds that each saves.

A prefix of 8,000 tokens with its deepest state at 1,200 saves 1,200 tokens, so the states count and not the matching
tokens. `learn` connects the boundaries of a finished request with the states on its path. `report` checks for each
state if the device or a tier still has it. No torch.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Protocol

from deltic.cache.offload.types import PrefixHash
from deltic.cache.radix_tree import Checkpoint, PrefixTree
from deltic.cluster.boundaries import Boundaries

MOST_KEYS: Final = 4096
"""Maximum number of reported boundaries. The least recently used are forgotten, even if their states are kept."""
_CHANGES, _REPEATED = 512, 512
"""Numbers of entries in a report: the last changes, and the next part of all entries in turn. A router that is new, or
that has missed a report, has all entries after MOST_KEYS / 512 reports."""
_STATES: Final = 2
"""Number of states per boundary: if the deepest is evicted, the next one counts."""
_SLACK, _SLACK_TOKENS = 1.02, 16
"""Tolerance (factor, tokens): a boundary's position is estimated from characters, and a state may lie behind it."""
_TIER_SHARE: Final = 0.9
"""Fraction of the seconds that a state in a tier saves: loading takes a few percent of computing (docs/cache.md)."""


class StateTier(Protocol):
    """A tier below the device."""

    def refresh(self) -> bool:
        """Works like `TierIndex.refresh`."""

    def holds(self, key: str) -> bool:
        """True if the tier has the state of a prefix. Thread-safe."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The measured load and speed of a replica.

    queue: seconds until it has computed all its current prompts, and answered all its current requests.
    character: seconds to compute a prompt, per character of the request. answer: seconds of an answer after the prompt.
    """

    queue: float = 0.0
    character: float = 0.0
    answer: float = 0.0


@dataclass(frozen=True, slots=True)
class ReachableReport:
    """A replica's report. keys, seconds: boundaries, and the seconds that their states save; 0 for states that are
    gone. The first `changes` entries are changes, in order. begun: number of changes before the first of these."""

    load: LoadReport
    begun: int
    changes: int
    keys: array[int]
    seconds: array[float]


@dataclass(frozen=True, slots=True)
class _State:
    """A state that was kept after `done` tokens. key: the key of the prefix in tiers; empty without tiers."""

    checkpoint: Checkpoint | None
    done: int
    key: str


class ReachableStates:
    """The boundaries of the last requests of a replica."""

    def __init__(self, tree: PrefixTree, tiers: Sequence[StateTier] = (), most: int = MOST_KEYS) -> None:
        self._tree, self._tiers, self._most = tree, tiers, most
        self._learned: deque[dict[int, tuple[_State, ...]]] = deque(maxlen=most)
        self._states: dict[int, tuple[_State, ...]] = {}  # the least recently used first
        self._reported: dict[int, float] = {}
        self._changes: deque[tuple[int, float]] = deque(maxlen=_CHANGES)
        self._changed = self._place = 0

    def learn(self, boundaries: Boundaries, tokens: array[int], prompt: int, system: int = 0) -> None:
        """Records the states on the path of a finished request. Must be called where the tree may be read.

        tokens: keys of its prompt and its answer. prompt: number of prompt tokens. system: number of tokens of the
        system prompt and the tools, if known."""
        path = [*_path(self._tree.match(tokens).checkpoint)]
        if not path or not boundaries.keys:
            return
        prefix = PrefixHash(tokens) if self._tiers else None
        states = [_State(each, each.done, prefix.key(each.done) if prefix else "") for each in path]
        positions = [state.done for state in states]
        found: dict[int, tuple[_State, ...]] = {}
        for key, size in zip(boundaries.keys, boundaries.sizes, strict=True):
            last = key == boundaries.keys[-1]
            limit = len(tokens) if last else _position(boundaries, size, prompt, system)
            reached = bisect_right(positions, limit)
            if reached:
                found[key] = tuple(states[max(reached - _STATES, 0):reached][::-1])
        self._learned.append(found)

    def learn_end(self, key: int, boundaries: Boundaries) -> None:
        """Adds a key for the end of the request that was just learned, such as the key of a stored response."""
        if self._learned and boundaries.keys[-1] in (last := self._learned[-1]):
            last[key] = last[boundaries.keys[-1]]

    def knows(self, boundaries: Boundaries) -> bool:
        """Returns False for the next turn of a conversation that another replica has had so far."""
        inner = [key for key, size in zip(boundaries.keys[:-1], boundaries.sizes) if size > boundaries.system]
        return not inner or any(key in known for key in inner for known in (self._states, *self._learned))

    def refresh(self) -> bool:
        """Calls `TierIndex.refresh` of all tiers. Must be called where the tree may be read."""
        pending = [tier.refresh() for tier in self._tiers]
        return any(pending)

    def report(self, load: LoadReport, token: float) -> ReachableReport:
        """Returns the report. For one thread, which need not be that of `learn`. token: seconds per prompt token."""
        while self._learned:
            for key, states in self._learned.popleft().items():
                known = self._states.pop(key, ())
                deeper = known and known[0].done > states[0].done and self._saved(known, 1.0)
                self._states[key] = known if deeper else states
        for key in [*islice(self._states, max(len(self._states) - self._most, 0))]:
            del self._states[key]
            self._change(key, 0.0)
        for key, states in [*self._states.items()]:
            seconds = self._saved(states, token)
            if not seconds:
                del self._states[key]
            elif any(state.checkpoint and not self._tree.holds(state.checkpoint) for state in states):
                self._states[key] = tuple(self._without_evicted(states))
            # the speed of prefill always varies a little, so only large changes are reported
            if not 0.8 * seconds <= self._reported.get(key, 0.0) <= 1.25 * seconds:
                self._change(key, seconds)
        return self._packed(load)

    def _saved(self, states: Sequence[_State], token: float) -> float:
        """Returns the seconds that the deepest kept state saves; 0 if all are gone."""
        for state in states:
            if state.checkpoint and self._tree.holds(state.checkpoint):
                return state.done * token
            if any(tier.holds(state.key) for tier in self._tiers):
                return state.done * token * _TIER_SHARE
        return 0.0

    def _without_evicted(self, states: Sequence[_State]) -> Iterator[_State]:
        """Yields the states that may still be used. An evicted checkpoint would keep its tokens in memory."""
        for state in states:
            kept = state.checkpoint is not None and self._tree.holds(state.checkpoint)
            if kept or self._tiers:
                yield state if kept else _State(None, state.done, state.key)

    def _change(self, key: int, seconds: float) -> None:
        if seconds:
            self._reported[key] = seconds
        elif self._reported.pop(key, None) is None:
            return
        self._changes.append((key, seconds))
        self._changed += 1

    def _packed(self, load: LoadReport) -> ReachableReport:
        repeated = [*islice(self._reported.items(), self._place, self._place + _REPEATED)]
        self._place = self._place + _REPEATED if len(repeated) == _REPEATED else 0
        entries = [*self._changes, *repeated]
        return ReachableReport(load, self._changed - len(self._changes), len(self._changes),
                               array("Q", [key for key, _ in entries]), array("f", [value for _, value in entries]))


def _position(boundaries: Boundaries, size: int, prompt: int, system: int) -> float:
    """Returns the largest token position of a state that may belong to a boundary after `size` characters."""
    head = boundaries.system if 0 < system < prompt and boundaries.system < boundaries.size else 0
    if size == head:
        return system
    if size < head:
        return system * size / head
    rest = prompt - system if head else prompt
    share = (size - head) / max(boundaries.size - head, 1)
    return (system if head else 0) + _SLACK * rest * share + _SLACK_TOKENS


def _path(checkpoint: Checkpoint | None) -> list[Checkpoint]:
    """Returns the checkpoints from the root to this one."""
    path = []
    while checkpoint is not None:
        path.append(checkpoint)
        checkpoint = checkpoint.parent
    return path[::-1]
