"""An engine without torch: the scheduler and the accounts of the cache over pools that only remember which tokens they
stand for. Run as a program it serves random requests in a process where importing torch raises.

Whatever a row reads or an operation moves is compared with the tokens that its sequence has (L1, L2), so that a plan
whose operations are missing, late or in another order shows.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import Any

from deltic.cache.frames import FrameLayout
from deltic.cache.manager import HybridCache
from deltic.cache.offload.types import ANYTHING, AcceptAllItems
from deltic.cache.operations import (
    CopyPage,
    CopySlot,
    FlushDeltaLog,
    MovePages,
    Operation,
    PoolSizes,
    RestoreItem,
    StoreItem,
)
from deltic.engine.scheduler import Scheduler
from deltic.engine.sequence import ForkPoint, Sequence
from deltic.engine.step_plan import PlannedRow, StepPlan, base_after
from deltic.params import PAGE, RING, EngineRequest, Lineage, SamplingParams

State = tuple[int, ...]
"""A state: the tokens that it has seen."""


@dataclass
class PlainPools:
    """Pages of tokens, slots of states, rings of tokens; None where nobody wrote. If pages and slots share memory, a
    write to one of them erases the others."""

    sizes: PoolSizes
    item_validator: AcceptAllItems = ANYTHING
    pages: list[list[int | None]] = field(init=False)
    slots: list[State | None] = field(init=False)
    rings: list[list[int | None]] = field(init=False)
    held: dict[int, Any] = field(default_factory=dict)
    numbers: int = 0
    applied: int = 0
    moves: int = 0
    moved: int = 0

    def __post_init__(self) -> None:
        layout, pages, slots = self.sizes.layout, self.sizes.pages, self.sizes.slots
        if layout:
            pages, slots = layout.first_page(pages // layout.pages), (slots - 1) * layout.slot_step + 1
        self.pages = [[None] * PAGE for _ in range(pages)]
        self.slots = [None] * slots
        self.rings = [[None] * RING for _ in range(self.sizes.delta_logs)]

    def write_page(self, page: int) -> list[int | None]:
        """The page, to be written to."""
        if layout := self.sizes.layout:
            slot = layout.frame_of(page) * layout.slot_step
            self.slots[slot:slot + 1] = [None] if slot < len(self.slots) else []
        return self.pages[page]

    def write_slot(self, slot: int, state: State | None) -> None:
        if layout := self.sizes.layout:
            first, end = map(layout.first_page, (slot // layout.slot_step, slot // layout.slot_step + 1))
            self.pages[first:end] = [[None] * PAGE for _ in range(first, end)]
        self.slots[slot] = state

    def hold(self, content: object) -> int:
        self.numbers += 1
        self.held[self.numbers] = content
        return self.numbers

    def forget(self, operations: List[Operation]) -> None:
        for operation in operations:
            self.held.pop(getattr(operation, "item", 0), None)

    def sound(self, slots: List[int], pages: List[int], done: int) -> bool:
        assert all(token is not None for token in self.read(pages, done)) and all(self.slots[slot] for slot in slots)
        return True

    def apply(self, operations: List[Operation]) -> None:
        self.applied += len(operations)
        for operation in operations:
            match operation:
                case CopyPage(source, target):
                    self.write_page(target)[:] = self.pages[source]
                case MovePages(sources, targets):
                    self.moves += 1
                    self.moved += len(sources)
                    for source, target in zip(sources, targets, strict=True):
                        self.write_page(target)[:] = self.pages[source]
                case CopySlot(source, target):
                    self.write_slot(target, self.slots[source])
                case FlushDeltaLog(slot, ring, base, done):
                    self.fold(slot, ring, base, done)
                case StoreItem(item, pages, slot):
                    tokens = tuple(self.held.pop(item).tokens)
                    assert self.slots[slot] == tokens == tuple(self.read(pages, len(tokens)))
                case RestoreItem():
                    raise AssertionError("there is no tier")

    def fold(self, slot: int, ring: int, base: int, done: int) -> None:
        state = self.slots[slot]
        assert state is not None and len(state) == base, "a state is brought forward from where it is not"
        fresh = [self.rings[ring][position % RING] for position in range(base, done)]
        self.write_slot(slot, (*state, *(token for token in fresh if token is not None)))

    def read(self, pages: List[int], done: int) -> list[int | None]:
        return [self.pages[pages[i // PAGE]][i % PAGE] for i in range(done)]

    def run(self, row: PlannedRow, expected: List[int]) -> State:
        """What a step does with a row; the state after it. expected: the committed tokens of the row's sequence."""
        base = row.done if row.base is None else row.base
        state = self.slots[row.slot] if base else ()
        assert state == tuple(expected[:base]), "L1: the state is not that of the cursor"
        assert self.read(row.pages, row.done) == list(expected), "L2: K/V and state have different histories"
        for offset, token in enumerate(row.tokens):
            place = row.done + offset
            self.write_page(row.pages[place // PAGE])[place % PAGE] = token
        whole = (*expected, *row.tokens)
        if row.append:
            after = base_after(row)
            assert after is not None and row.target is None
            if after != base:
                self.write_slot(row.slot, tuple(expected))
            for offset, token in enumerate(row.tokens):
                self.rings[row.delta_log][(row.done + offset) % RING] = token
        else:
            self.write_slot(row.slot if row.target is None else row.target, whole)
        for position, slot in row.checkpoints:
            self.write_slot(slot, whole[:position])
        return whole


class PlainEngine:
    """Serves requests as the engine does; draws tokens that depend on all before."""

    def __init__(self, seed: int, pages: int, slots: int, rings: int, batch: int, tiers: tuple[Any, ...] = (),
                 layout: FrameLayout | None = None) -> None:
        self.random = random.Random(seed)
        self.pools = PlainPools(PoolSizes(pages, slots, rings, 64, 4096, layout=layout))
        self.cache = HybridCache(self.pools, tiers=tiers)
        self.scheduler = Scheduler(self.cache, batch, 48)
        self.answers: dict[tuple[str, int], tuple[int, ...]] = {}
        self.live: set[Sequence] = set()
        self.forks = self.drafted = self.resumed = 0

    def add(self, name: str, prompt: tuple[int, ...], new: int, choices: int = 1, lineage: Lineage | None = None
            ) -> None:
        request = EngineRequest(name, prompt, SamplingParams(n=choices, max_tokens=new, temperature=0.0),
                          stable_prefixes=(len(prompt) // 2,), lineage=lineage or Lineage())
        sequence = self._sequence(request, 0)
        sequence.wanted = tuple({len(prompt) // 2, len(prompt)} - {0})
        self._queue(sequence)

    def _sequence(self, request: EngineRequest, choice: int) -> Sequence:
        assert request.output.max_tokens
        return Sequence(request, choice, request.output, 0, frozenset(),
                        len(request.prompt) + request.output.max_tokens, request.prompt,
                        stable_prefixes=request.stable_prefixes, prompt_keys=bytes(request.prompt) * 8)

    def _queue(self, sequence: Sequence) -> None:
        self.live.add(sequence)
        self.scheduler.add(sequence)

    def step(self) -> None:
        for sequence in self.scheduler.running:
            if sequence.answering:
                self._draft(sequence)
        plan, sequences = self.scheduler.schedule()
        known = [sequence for sequence in self.scheduler.running if sequence.sampler.logits is not None]
        plan = StepPlan.from_json(plan.to_json())
        self.pools.apply(plan.operations)
        for row, sequence in zip(plan.rows, sequences, strict=True):
            assert sequence.cache
            state = self.pools.run(row, sequence.cache.tokens)
            self._follow(sequence, row, state)
        for sequence in known:
            sequence.sampler.logits = None
            assert sequence.cache and sequence.done == len(sequence.tokens)
            self._draw(sequence, tuple(sequence.tokens))
        self.cache.check()

    def _draft(self, sequence: Sequence) -> None:
        """Some drafts are right, some are not."""
        cache, count = sequence.cache, min(self.random.randint(0, 3), sequence.limit - len(sequence.tokens) - 1)
        sequence.drafts.tokens = ()
        if cache and count > 0 and self.cache.states.attach_delta_log(cache):
            count = self.cache.reserve(cache, count + 1) - 1
            tokens = list(sequence.tokens)
            for _ in range(count):
                tokens.append(drawn(tokens, sequence.choice) ^ (self.random.random() < 0.3))
            sequence.drafts.tokens = tuple(tokens[len(sequence.tokens):])
            self.drafted += len(sequence.drafts.tokens)

    def _follow(self, sequence: Sequence, row: PlannedRow, state: State) -> None:
        cache = sequence.cache
        assert cache
        if not row.drafts:
            self.cache.commit(cache, len(row.tokens))
            if row.logits:
                self._draw(sequence, state)
            return
        for index in range(row.drafts + 1):
            self.cache.commit(cache, 1, base_after(row))
            token = self._draw(sequence, state[:row.done + index + 1])
            if sequence not in self.live or index == row.drafts or token != row.draft_tokens[index]:
                return

    def _draw(self, sequence: Sequence, state: State) -> int:
        assert state == tuple(sequence.tokens), "the logits are of other tokens"
        cache = sequence.cache
        assert cache
        if cache.checkpoint_slots:
            self.cache.commit_checkpoints(cache, "logits" if cache.done in cache.checkpoint_slots else None)
        if sequence.sampling.n > 1 and not sequence.choice and not sequence.generated:
            self._split(sequence)
        token = drawn(list(state), sequence.choice)
        if sequence.append(token):
            self.answers[sequence.request.id, sequence.choice] = tuple(sequence.tokens)
            self.remove(sequence, keep=True)
        return token

    def _split(self, sequence: Sequence) -> None:
        assert sequence.cache
        kept = self.cache.snapshot(sequence.cache, "logits")
        origin = ForkPoint(kept, sequence.sampling.n - 1) if kept else None
        self.forks += kept is not None
        for choice in range(1, sequence.sampling.n):
            sibling = self._sequence(sequence.request, choice)
            sibling.queue.fork_point = origin
            self._queue(sibling)

    def remove(self, sequence: Sequence, keep: bool = False) -> None:
        self.live.remove(sequence)
        self.resumed += sequence.cached
        self.scheduler.remove(sequence, keep)


def drawn(tokens: list[int], choice: int) -> int:
    """The token that follows: any function of all of them."""
    state = choice
    for token in tokens:
        state = (state * 31 + token + 7) % 2_147_483_647
    return state % 4


def serve(seed: int, requests: int, layout: FrameLayout | None = None) -> PlainEngine:
    """Random requests that begin like each other, in pools too small for those that run; some are aborted, some are
    paused, and now and then all prefixes are given up. Every answer is checked."""
    chance = random.Random(seed)
    pages, slots, rings = chance.choice((14, 22, 40)), chance.choice((6, 12, 30)), chance.choice((0, 2, 4))
    if layout:
        frames = chance.choice((2, 5, 9)) + layout.frames_for(12)
        pages, slots = frames * layout.pages, min(slots, frames)
    engine = PlainEngine(seed, pages, slots, rings, batch=4, layout=layout)
    openings = [tuple(chance.choices(range(4), k=chance.randint(1, 60))) for _ in range(4)]
    news: dict[str, int] = {}
    for index in range(requests):
        opening = chance.choice(openings)
        prompt = (*opening[:chance.randint(1, len(opening))], *chance.choices(range(4), k=chance.randint(0, 40)))
        news[str(index)] = chance.randint(1, 30)
        engine.add(str(index), prompt, news[str(index)], chance.choice((1, 1, 1, 3)))
        for _ in range(chance.randint(0, 12)):
            engine.step()
        if chance.random() < 0.1 and engine.live:
            engine.remove(chance.choice(sorted(engine.live, key=lambda one: one.times.arrived)))
        if chance.random() < 0.1 and engine.live:
            one = chance.choice(sorted(engine.live, key=lambda one: one.times.arrived))
            engine.scheduler.pause(one)
            engine.scheduler.resume(one)
        if chance.random() < 0.03:
            engine.cache.clear()
    for _ in range(20_000):
        if not engine.live:
            break
        engine.step()
    assert not engine.live and engine.cache.idle
    for (name, choice), tokens in engine.answers.items():
        expected = list(tokens[:len(tokens) - news[name]])
        while len(expected) < len(tokens):
            expected.append(drawn(expected, choice))
        assert tuple(expected) == tokens
    engine.cache.operations.flush()
    engine.cache.clear()
    engine.cache.check()
    assert engine.cache.pages.free == engine.cache.pages.size and not engine.pools.held
    return engine


if __name__ == "__main__":
    loaded = {name.partition(".")[0] for name in sys.modules} & {"torch", "numpy"}
    assert not loaded, loaded
    served = [serve(seed, 60) for seed in range(int(sys.argv[1]))]
    print(len([answer for engine in served for answer in engine.answers]),
          *(sum(getattr(engine, name) for engine in served) for name in ("forks", "drafted", "resumed")),
          sum(engine.scheduler.preemptions for engine in served), sum(engine.cache.tree.evictions for engine in served))
