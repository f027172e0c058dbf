"""Who runs in the next step, and with how many tokens. Pure Python; the plan is plain data.

Running sequences come first, oldest first; each that is ready to choose its next token takes one token, and what
is left of the token budget goes to prompts, of which the oldest always gets at least one token. When pages run
out, the youngest running sequence is sent back to wait and later processed again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from deltic.cache.hybrid import HybridCache, Lease
from deltic.engine.sequence import Sequence
from deltic.types import PAGE


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a step: process `tokens` at cache indices done, done + 1, ... of these pages, read
    the state from `slot` and write it to `target` (None: in place), give the logits of the last token if `logits`."""

    tokens: tuple[int, ...]
    done: int
    pages: tuple[int, ...]
    slot: int
    logits: bool
    target: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The rows of one step, single-token rows first, those by slot."""

    rows: tuple[Row, ...]


class Scheduler:
    """Queues of waiting and running sequences over a cache that grants them pages and slots."""

    def __init__(self, cache: HybridCache, max_batch: int, token_budget: int) -> None:
        self.cache, self.max_batch, self.token_budget = cache, max_batch, token_budget
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def plan(self) -> tuple[Plan, list[Sequence]]:
        """The next step and the sequence behind each row. Every position of it is backed by granted pages (L4)."""
        self._admit()
        shares: list[tuple[Sequence, int]] = []
        prompts: list[Sequence] = []
        for sequence in list(self.running):
            if sequence.pending > 1:
                prompts.append(sequence)
            elif sequence.lease and self._grant(sequence, 1, shares):
                shares.append((sequence, 1))
        budget = max(self.token_budget - len(shares), 1)
        for sequence in prompts:
            count = min(sequence.pending, budget)
            if count and sequence.lease and (count := self._grant(sequence, count, shares)):
                shares.append((sequence, count))
                budget -= count
        shares.sort(key=_order)
        return Plan(tuple(_row(sequence, count) for sequence, count in shares)), [s for s, _ in shares]

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and give back what it owns."""
        self._forget_origin(sequence)
        if sequence.lease is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self.cache.release(sequence.lease)
        sequence.lease = None

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_batch:
            sequence = self.waiting[0]
            if self.running and not self._fits(sequence):
                return
            sequence.lease = self._lease(sequence)
            if sequence.lease is None:
                return
            self.running.append(self.waiting.popleft())

    def _fits(self, sequence: Sequence) -> bool:
        """Whether its tokens and the next one have free pages: else it would only push others out, or be pushed."""
        shared = sequence.origin.checkpoint.done // PAGE if sequence.origin else 0
        return self.cache.pages.free > len(sequence.tokens) // PAGE - shared

    def _lease(self, sequence: Sequence) -> Lease | None:
        if sequence.origin is None:
            return self.cache.admit()
        lease = self.cache.fork(sequence.origin.checkpoint)
        if lease is None and self.running:
            return None
        self._forget_origin(sequence)
        if lease is None:
            return self.cache.admit()
        sequence.cached = lease.done
        return lease

    def _grant(self, sequence: Sequence, count: int, shares: list[tuple[Sequence, int]]) -> int:
        """Pages for up to `count` tokens. Rather than stand still it takes them from the prompt ends that waiting
        choices would fork, then from the youngest running sequences."""
        assert sequence.lease is not None
        while not (granted := self.cache.reserve(sequence.lease, count)):
            if self._drop_origin():
                continue
            victim = self.running[-1]
            self._preempt(victim)
            shares[:] = [share for share in shares if share[0] is not victim]
            if victim is sequence:
                return 0
        return granted

    def _drop_origin(self) -> bool:
        """Let the youngest waiting choices process their prompt anew."""
        origin = next((s.origin for s in reversed(self.waiting) if s.origin), None)
        for sequence in list(self.waiting) if origin else ():
            if sequence.origin is origin:
                self._forget_origin(sequence)
        return origin is not None

    def _preempt(self, sequence: Sequence) -> None:
        assert sequence.lease is not None
        self.running.remove(sequence)
        self.cache.release(sequence.lease)
        sequence.lease = None
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _forget_origin(self, sequence: Sequence) -> None:
        origin, sequence.origin = sequence.origin, None
        if origin:
            origin.waiting -= 1
            if not origin.waiting:
                self.cache.drop(origin.checkpoint)


def _order(share: tuple[Sequence, int]) -> tuple[bool, int]:
    sequence, count = share
    assert sequence.lease is not None
    return count > 1, sequence.lease.slot


def _row(sequence: Sequence, count: int) -> Row:
    lease = sequence.lease
    assert lease is not None
    done = lease.done
    tokens = tuple(sequence.tokens[done:done + count])
    return Row(tokens, done, tuple(lease.pages), lease.slot, done + count == len(sequence.tokens))
