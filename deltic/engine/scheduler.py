"""Selects the sequences of the next step and their token counts. Pure Python.

Running sequences come first, oldest first: each that is ready to decode takes one token and its drafts. Prompts share
the rest of the token budget (`policy.share`), at least one token. When pages run out, the youngest running sequence is
preempted and processed again later.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Collection, Iterable
from collections.abc import Sequence as List
from functools import partial

from deltic.cache.handles import SequenceCache
from deltic.cache.lineage import Line
from deltic.cache.manager import HybridCache
from deltic.engine.policy import (
    QUANTUM,
    PrefixWait,
    StepTimes,
    hurry,
    in_turn,
    is_burst,
    no_preemption,
    preempted_by,
    quantum_to_process,
    share,
)
from deltic.engine.sequence import Sequence
from deltic.engine.step_plan import PlannedRow, StepPlan, image_spans, next_row
from deltic.params import PAGE, RING, common_length

log = logging.getLogger("deltic")

_MAX_NEW_WAITS = 8
"""Sequences per step that may start to wait for another one's prefix. They are not examined again until that prefix is
processed, so that scheduling does not slow down with the number of waiting sequences."""
_MAX_HELD = 256
"""Sequences per step that are passed over because they wait for others."""
_MAX_LOADS = 4
"""Prompts that tiers may read at the same time: their content waits in memory. As many branches that wait for relatives
may have content, too."""
_MAX_SCORED = 32
"""Prompt tokens per step whose log probabilities are computed: each costs as much as the end of a prompt, and as much
memory as the vocabulary is large."""
_LOAD_WAIT = 0.01
"""Seconds to sleep at a time if all there is to do is to wait for a tier."""
DEFERRED = 5
"""One in so many tokens of a sequence writes its state; the others stay in the delta log. More of them would cost more
to replay than they save."""


def defers(pool: HybridCache, cache: SequenceCache) -> bool:
    """True if the next token's state update stays in the delta log. One in `DEFERRED` tokens writes the state, in
    different steps for different sequences."""
    if not pool.states.attach_delta_log(cache) or cache.delta_log is None:
        return False
    return cache.unflushed + 1 < RING and (cache.done + cache.delta_log) % DEFERRED != 0


def checkpoints_of(pool: HybridCache, cache: SequenceCache, wanted: Iterable[int], count: int
                   ) -> tuple[tuple[int, int], ...]:
    """`PlannedRow.checkpoints` of a row with the next `count` tokens: the wanted positions in it for which a slot is
    free."""
    if not wanted:
        return ()
    return tuple((position, slot) for position in wanted if cache.done < position <= cache.done + count
                 and (slot := pool.reserve_checkpoint(cache, position)) is not None)


Scheduled = tuple[Sequence, int]
"""A sequence and its tokens in a step."""


class Scheduler:
    """Queues of waiting and running sequences over a cache that grants them pages and slots."""

    def __init__(self, cache: HybridCache, max_batch: int, token_budget: int, times: StepTimes | None = None,
                 mixes: bool = True, defer_from: int | None = None, adapts: bool = False) -> None:
        """times: limits the prompt tokens of a step; None: the token budget alone does. mixes: prompts and drafts may
        be in one step. defer_from: number of rows from which on state writes are deferred; None: never. adapts: as in
        `Capabilities`."""
        self.cache, self.max_batch, self.token_budget, self.times = cache, max_batch, token_budget, times
        self.mixes, self.defer_from, self.adapts = mixes, defer_from, adapts
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.paused: list[Sequence] = []
        self.leaving: list[SequenceCache] = []
        """Caches of ended sequences, whose last row is in flight."""
        self.failed: list[tuple[Sequence, Exception]] = []
        """Waiting sequences that could not be admitted, and why. The engine ends them."""
        self.preemptions = self.turns = self._step = 0
        self._hurried = self._in_burst = False

    def add(self, sequence: Sequence) -> None:
        sequence.queue.turn = self._step
        self.waiting.append(sequence)

    def schedule(self) -> tuple[StepPlan, list[Sequence]]:
        """Returns the next step and the sequence of each row. Every position in it has its page (L4)."""
        self._step += 1
        self._take_turns()
        awaited = self._admit()
        if not self.mixes and any(map(_is_prompt, self.running)):
            for sequence in self.running:
                sequence.drafts.tokens = ()
        prompts, scheduled = list(filter(_is_prompt, self.running)), list[Scheduled]()
        for sequence in list(self.running):
            if _is_prompt(sequence) or not sequence.pending or sequence.awaits_mask or not sequence.cache:
                continue
            if granted := self._grant(sequence, 1 + len(sequence.drafts.tokens), scheduled):
                scheduled.append((sequence, granted))
        for sequence, count in self._share_budget(prompts, awaited, sum(count for _, count in scheduled)):
            if sequence.cache and (count := self._grant(sequence, count, scheduled)):
                scheduled.append((sequence, count))
        scheduled.sort(key=_order)
        deferring = self.defers_state_writes(len(scheduled)) and all(
            count == 1 and sequence.generated for sequence, count in scheduled)
        rows = [self.row(sequence, count, deferring) for sequence, count in scheduled]
        return self.plan(rows), [sequence for sequence, _ in scheduled]

    def schedule_prompts(self, decoded: int, leaving: Collection[Sequence]) -> list[Scheduled] | None:
        """Prompts for the step behind one in flight, beside `decoded` tokens of answers. leaving: sequences that end
        with the step in flight, so that their places are free. Takes pages only if they are free. None: a sequence
        would be preempted; then nothing has changed."""
        staying = [sequence for sequence in self.running if sequence not in leaving]
        if self.waiting and self._due(self._step + 1, staying):
            return None
        self._step += 1
        awaited, scheduled = self._admit(len(leaving)), list[Scheduled]()
        for sequence, count in self._share_budget(list(filter(_is_prompt, self.running)), awaited, decoded):
            assert sequence.cache is not None
            if count := self.cache.reserve(sequence.cache, count):
                scheduled.append((sequence, count))
        return sorted(scheduled, key=_order)

    def schedule_drafts(self) -> None:
        """Counts a step behind one in flight that has the same sequences, all that run."""
        self._step += 1

    def plan(self, rows: Iterable[PlannedRow]) -> StepPlan:
        """The step of these rows, and of all operations that were queued before."""
        return StepPlan(tuple(rows), self.cache.operations.take())

    def row(self, sequence: Sequence, count: int, deferring: bool = False) -> PlannedRow:
        """The row of a sequence's next `count` tokens, drafts among them."""
        cache = sequence.cache
        assert cache is not None
        done, end = cache.done, cache.done + count
        tokens = (*sequence.tokens[done:end], *sequence.drafts.tokens)[:count]
        drafts, ends = max(end - len(sequence.tokens), 0), end >= len(sequence.tokens)
        scored = max(end - ends - max(done, len(sequence.scores)), 0) if sequence.scoring else 0
        drawn = drafts + 1 if ends and not sequence.embeds else 0
        append = (defers(self.cache, cache) if deferring and not sequence.adapter
                  else drafts > 0 and self.cache.states.may_defer(cache))
        return next_row(
            cache,
            tokens,
            scored + drawn,
            scored=scored,
            checkpoints=checkpoints_of(self.cache, cache, sequence.wanted, count),
            append=append,
            drafts=drafts,
            rotary=sequence.rotary(done, count) if sequence.images.positions else sequence.images.offset,
            hidden=ends and sequence.embeds,
            images=image_spans(sequence.images.pictures, done, end),
            adapter=sequence.adapter,
        )

    def defers_state_writes(self, rows: int) -> bool:
        """True if a decode step of so many rows may defer state writes."""
        return self.defer_from is not None and rows >= self.defer_from

    def _share_budget(self, prompts: List[Sequence], awaited: dict[Sequence, int], decoded: int) -> list[Scheduled]:
        """The prompts of a step and their token counts. decoded: tokens of answers in the same step."""
        budget = max(self.token_budget - decoded, 1)
        readable = _readable([sequence for sequence in prompts if sequence.cache])
        goals = [min(most, awaited.get(sequence, len(sequence.tokens)) - sequence.done)
                 for sequence, most in readable.items()]
        limit = self.times.limit(budget, decoded > 0, self._burst(readable, goals)) if self.times else budget
        counts = given = share(limit, [*readable.values()], goals)
        if limit < budget and not self._hurried:
            first = any(not (sequence.generated or sequence.pending or sequence.awaits_mask)
                        for sequence in self.running)
            counts = hurry(given, goals, first)
        self._hurried = counts != given
        return [(sequence, count) for sequence, count in zip(readable, counts, strict=True) if count]

    def _burst(self, prompts: Iterable[Sequence], goals: Iterable[int]) -> bool:
        """`is_burst` for the prompts that one step could bring to their first token."""
        near = [sequence for sequence, goal in zip(prompts, goals, strict=True)
                if sequence.reading and goal <= self.token_budget]
        answers = (sequence for sequence in self.running if not _is_prompt(sequence))
        self._in_burst = bool(near) and is_burst(near, answers, self._in_burst)
        return self._in_burst

    def pause(self, sequence: Sequence) -> None:
        """Stops a sequence until `resume`. It owns nothing meanwhile; what it has processed is cached like any
        prefix."""
        if sequence in self.paused:
            return
        self._leave_fork(sequence)
        self._end_rest(sequence)
        if sequence.cache is None:
            self.waiting.remove(sequence)
        else:
            self._release(sequence)
        sequence.queue.load = sequence.queue.prefix_wait = None
        self.paused.append(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Queues a paused sequence again, before later ones."""
        if sequence not in self.paused:
            return
        self.paused.remove(sequence)
        place = next(
            (i for i, other in enumerate(self.waiting) if other.times.arrived > sequence.times.arrived),
            len(self.waiting),
        )
        self.waiting.insert(place, sequence)

    def remove(self, sequence: Sequence, keep: bool = False) -> None:
        """Removes a sequence and releases what it owns. keep: its state may be reused."""
        self._leave_fork(sequence)
        self._end_rest(sequence)
        if sequence.cache is None:
            (self.paused if sequence in self.paused else self.waiting).remove(sequence)
            return
        self.running.remove(sequence)
        self.cache.release(sequence.cache, keep)
        sequence.cache = None

    def leave(self, sequence: Sequence) -> None:
        """Removes a running sequence whose last row is in flight: its cache stays until `release_left`."""
        assert sequence.cache is not None
        self.leaving.append(sequence.cache)
        self._leave_fork(sequence)
        self._end_rest(sequence)
        self.running.remove(sequence)
        sequence.cache = None

    def release_left(self, cache: SequenceCache, keep: bool) -> None:
        """Releases the cache of a sequence that has left. keep: its last row is finite."""
        self.leaving.remove(cache)
        self.cache.release(cache, keep)

    def start_over(self, sequence: Sequence) -> None:
        """Makes a running sequence, whose state may be wrong, process its tokens again."""
        self._preempt(sequence, sound=False)

    def start_all_over(self) -> None:
        """As `start_over` for all running sequences. Waiting choices process their prompts themselves."""
        for sequence in reversed(self.running[:]):
            self.start_over(sequence)
        for cache in self.leaving[:]:
            self.release_left(cache, keep=False)
        while self._drop_fork():
            pass

    def _take_turns(self) -> None:
        """Orders the waiting sequences; if no place is free, preempts at most one running sequence for them."""
        leaving = self._due(self._step, self.running)
        if leaving:
            self._release(leaving, resting=True)
            self.add(leaving)
            self.turns += 1

    def _due(self, step: int, running: List[Sequence]) -> Sequence | None:
        """Orders the waiting sequences. Returns the running sequence that the first of them preempts, if any."""
        if not self.waiting:
            return None
        full = len(running) >= self.max_batch
        if full and (not self.cache.reuse or no_preemption(running, step)):
            return None
        ordered = in_turn(self.waiting, running, step)
        first = set(ordered)
        self.waiting = deque([*ordered, *(sequence for sequence in self.waiting if sequence not in first)])
        if not full:
            return None
        room = len(ordered[0].tokens) + 2 * QUANTUM * len(running)  # the others go on while one rests
        rests = self.cache.can_preempt(room)
        return preempted_by(ordered[0], running, step, partial(self._turn, rests=rests))

    def _turn(self, sequence: Sequence, rests: bool) -> int | None:
        """The least quantum of a sequence, by the cost of resuming it; None: that takes more than a step. rests: its
        state stays in the cache."""
        if rests:
            return 0
        return quantum_to_process(sequence.done, len(self.running)) if sequence.done <= self.token_budget else None

    def _admit(self, leaving: int = 0) -> dict[Sequence, int]:
        """Starts waiting sequences in order, except those whose prefix a running sequence processes or a tier loads.
        leaving: running sequences whose places become free. Returns the running sequences that others wait for, each
        with the nearest position that is waited for."""
        held, awaited, examined, loads = list[Sequence](), dict[Sequence, int](), 0, Counter[bool]()
        while (self.waiting and len(self.running) - leaving < self.max_batch
               and examined < _MAX_NEW_WAITS and len(held) < _MAX_HELD):
            sequence = self.waiting.popleft()
            if not sequence.held:
                examined += 1
                try:
                    waits = self._await_prefix(sequence) or self._await_load(
                        sequence, loads[sequence.queue.passed] < _MAX_LOADS)
                    if not waits:
                        sequence.cache = self._allocate(sequence)
                except Exception as error:
                    self.failed.append((sequence, error))
                    waits = True
                if not waits:
                    if sequence.cache is not None:
                        sequence.queue.turn, sequence.queue.passed = self._step, False
                        self._end_rest(sequence)
                        self.running.append(sequence)
                        examined -= 1
                        continue
                    if not self.cache.spared:
                        self.waiting.appendleft(sequence)
                        break
                    if not sequence.queue.passed:  # what it has loaded must not keep others from loading
                        sequence.queue.passed, sequence.queue.load = True, None
            held.append(sequence)
            loads[sequence.queue.passed] += sequence.queue.load is not None and sequence.queue.load.begun
            if sequence.queue.prefix_wait:
                position, other = sequence.queue.prefix_wait
                awaited[other] = min(position, awaited.get(other, position))
        self.waiting.extendleft(reversed(held))
        if held and not self.running and held[0].queue.load:
            held[0].queue.load.wait(_LOAD_WAIT)
        return awaited

    def _await_load(self, sequence: Sequence, begin: bool) -> bool:
        """True if a tier still loads more of this sequence's prompt than the tree has. begin: it may start to."""
        if sequence.queue.fork_point or sequence.scoring or not self.cache.tiers:
            return False
        keys = sequence.key_array
        sequence.queue.load = sequence.queue.load or self.cache.start_load(keys[:-1] if sequence.embeds else keys)
        return not sequence.queue.load.poll(begin)

    def _known(self, sequence: Sequence) -> int:
        """Tokens of the sequence that the tree has; compared again only if the tree has changed."""
        known, changes = sequence.queue.known
        if changes != self.cache.tree.changes:
            known = self.cache.tree.cached_length(sequence.key_array, not sequence.embeds)
            sequence.queue.known = known, self.cache.tree.changes
        return known

    def _await_prefix(self, sequence: Sequence) -> bool:
        """Makes a sequence wait for one that processes a prefix of it, if that pays. The other one will keep a
        checkpoint at the end of the prefix."""
        sequence.queue.prefix_wait = None
        if not self.cache.reuse or sequence.queue.fork_point or sequence.scoring:
            return False
        reading = [other for other in self.running if other.reading]
        others, found, passed = sum(other.pending for other in reading), list[tuple[int, Sequence]](), (0, sequence)
        for other in reading:
            common = _common(sequence, other)
            passed = max(passed, (_passed(other, common), other), key=_position)
            # a state less than a page after another one is not worth its slot
            position = max((wanted for wanted in other.wanted if common - PAGE < wanted <= common), default=common)
            known = max(self._known(sequence), passed[0])
            own = len(sequence.tokens) - known
            nearer = sum(one.pending for one in reading if one is not other and one.pending < own)
            wait = PrefixWait(own, position - known, position - other.done, others, len(reading) == 1, nearer)
            if wait.away > 0 and wait.pays(self.token_budget):
                found.append((position, other))
        if found:
            position, other = max(found, key=_position)
            other.wanted = tuple(sorted({*other.wanted, position}))
            sequence.queue.prefix_wait = position, other
        elif passed[0] > self._known(sequence) + PAGE and passed[1].cache:
            # otherwise it enters the tree with the first token of its sequence
            self.cache.commit_if_finite(passed[1].cache)
        return sequence.queue.prefix_wait is not None

    def _allocate(self, sequence: Sequence) -> SequenceCache | None:
        # beside others it must fit with its next token, or one of them would be preempted at once
        room = len(sequence.tokens) + 1 if self.running else 0
        fork, cache, keys, known = sequence.queue.fork_point, None, sequence.own_keys(), sequence.key_array
        if fork is not None:
            cache = self.cache.fork(fork.snapshot, keys, room)
            if cache is None and self.running:
                return None
            self._leave_fork(sequence)
        if cache is None:
            diverged = self.cache.tree.diverged(known) if log.isEnabledFor(logging.DEBUG) else 0
            # up to the first token without a log probability
            known = known[:len(sequence.scores) + 1] if sequence.scoring else known
            end = not (sequence.embeds or sequence.scoring)
            lineage = sequence.queue.line or sequence.request.lineage
            cache = self.cache.admit(known, room, sequence.queue.load, end, keys, lineage)
            if cache is not None:
                log.debug("%s: %s", sequence.request.id, _reuse(len(sequence.tokens), diverged, cache))
            fork = None
        if cache is not None:
            sequence.start(cache)
            sequence.queue.line = cache.line
            sequence.sampler.logits = fork.snapshot.logits if fork else sequence.sampler.logits
        return cache

    def _grant(self, sequence: Sequence, count: int, scheduled: list[Scheduled]) -> int:
        """Returns up to `count` tokens that have pages, at least one if possible: takes them from the prompt ends that
        waiting choices would fork, then from the youngest running sequences."""
        assert sequence.cache is not None
        while not (granted := self.cache.reserve(sequence.cache, count)):
            if self._drop_fork():
                continue
            victim = self._youngest(sequence.cache.line if self.cache.spared else None)
            self._preempt(victim)
            scheduled[:] = [each for each in scheduled if each[0] is not victim]
            if victim is sequence:
                return 0
        return granted

    def _youngest(self, line: Line | None) -> Sequence:
        """The youngest running sequence, of the trunk of a line if one is given."""
        lines = ((one, one.cache and one.cache.line) for one in reversed(self.running))
        return next(one for one, own in lines if line is None or (own and own.trunk is line.trunk))

    def _drop_fork(self) -> bool:
        """Makes the youngest waiting choices process their prompt themselves."""
        fork = next((s.queue.fork_point for s in reversed(self.waiting) if s.queue.fork_point), None)
        for sequence in list(self.waiting) if fork else ():
            if sequence.queue.fork_point is fork:
                self._leave_fork(sequence)
        return fork is not None

    def _preempt(self, sequence: Sequence, sound: bool = True) -> None:
        self._release(sequence, sound=sound)
        sequence.queue.turn = self._step
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _release(self, sequence: Sequence, resting: bool = False, sound: bool = True) -> None:
        """Releases a running sequence's cache. What it has processed goes to the tree if it is finite. resting: it will
        resume soon, so the state is kept for it."""
        cache = sequence.cache
        assert cache is not None
        sound = sound and (sequence.generated > 0 or self.cache.commit_if_finite(cache))
        self.running.remove(sequence)
        if resting:
            sequence.queue.rest = self.cache.preempt(cache, keep=sound)
        else:
            self.cache.release(cache, keep=sound, ended=False)
        # drafts need the delta log that they were made for
        sequence.cache, sequence.drafts.tokens, sequence.sampler.logits = None, (), None

    def _end_rest(self, sequence: Sequence) -> None:
        if sequence.queue.rest:
            self.cache.resume_preempted(sequence.queue.rest, sequence.cache)
            sequence.queue.rest = None

    def _leave_fork(self, sequence: Sequence) -> None:
        fork, sequence.queue.fork_point = sequence.queue.fork_point, None
        if fork:
            fork.waiting -= 1
            if not fork.waiting:
                self.cache.release(fork.snapshot)


def _is_prompt(sequence: Sequence) -> bool:
    return sequence.pending > 1 or sequence.reading


def _readable(prompts: Iterable[Sequence]) -> dict[Sequence, int]:
    """The prompts that a step can process, with their largest token counts."""
    found, left = dict[Sequence, int](), _MAX_SCORED
    for sequence in prompts:
        count = min(sequence.readable, left) if sequence.scoring else sequence.readable
        left -= count if sequence.scoring else 0
        if count:
            found[sequence] = count
    return found


def _reuse(tokens: int, diverged: int, cache: SequenceCache) -> str:
    """Explains how much of a prompt was reused."""
    source = f" of the {cache.source} tier" if cache.source else ""
    resumed = f"resumed at checkpoint {cache.done:,}{source}" if cache.done else "no checkpoint before that: read anew"
    if cache.done == tokens:
        return f"all of {tokens:,} tokens known{source}"
    if diverged <= cache.done:
        return f"{resumed} of {tokens:,} tokens" if cache.done else f"{tokens:,} tokens, none known"
    return f"diverged at token {diverged:,} of {tokens:,}; {resumed}"


def _common(sequence: Sequence, other: Sequence) -> int:
    """The last position of another sequence's prompt whose state this one could resume from."""
    common, vector = common_length(sequence.prompt_keys, other.prompt_keys), sequence.embeds or other.embeds
    return common if common == len(other.request.prompt) and not vector else min(common, len(sequence.tokens) - 1)


def _passed(sequence: Sequence, common: int) -> int:
    """The last position up to `common` at which a running prompt has left a state."""
    assert sequence.cache is not None
    return max((position for position in sequence.cache.checkpoint_slots if position <= common), default=0)


def _position(place: tuple[int, Sequence]) -> int:
    return place[0]


def _order(scheduled: Scheduled) -> tuple[bool, int]:
    sequence, count = scheduled
    assert sequence.cache is not None
    return count > 1, sequence.cache.slot
