"""Selects the sequences of the next step and their token counts. Pure Python.

Running sequences that are ready to decode come first, oldest first; each takes one token and its drafts. Prompts share
the rest of the token budget (`policy.share`), which is at least one token. When pages run out, the youngest running
sequence is preempted and processed again later.
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
"""Number of sequences per step that may start to wait for a prefix of another one. They are not examined again until
that prefix is processed, so that scheduling does not slow down with the number of waiting sequences."""
_MAX_HELD = 256
"""Number of sequences per step that may be skipped because they wait for others."""
_MAX_LOADS = 4
"""Number of prompts that tiers may load at the same time, because their content waits in memory. Branches that wait for
relatives (`QueueState.passed`) are counted apart, with the same limit."""
_MAX_SCORED = 32
"""Number of prompt tokens per step that may get log probabilities. Each costs as much as the end of a prompt, and
memory in proportion to the vocabulary."""
_LOAD_WAIT = 0.01
"""Seconds to sleep at a time if the scheduler only waits for a tier."""
DEFERRED = 5
"""One in `DEFERRED` tokens of a sequence writes the state; the updates of the others stay in the delta log. More
updates there would cost more to replay than they save."""


def defers(pool: HybridCache, cache: SequenceCache) -> bool:
    """True if the next token's state update stays in the delta log. One in `DEFERRED` tokens writes the state, in
    different steps for different sequences."""
    if not pool.states.attach_delta_log(cache) or cache.delta_log is None:
        return False
    return cache.unflushed + 1 < RING and (cache.done + cache.delta_log) % DEFERRED != 0


def checkpoints_of(pool: HybridCache, cache: SequenceCache, wanted: Iterable[int], count: int
                   ) -> tuple[tuple[int, int], ...]:
    """Returns `PlannedRow.checkpoints` of a row with the next `count` tokens: the wanted positions in the row, as far
    as slots are free."""
    if not wanted:
        return ()
    return tuple((position, slot) for position in wanted if cache.done < position <= cache.done + count
                 and (slot := pool.reserve_checkpoint(cache, position)) is not None)


Scheduled = tuple[Sequence, int]
"""A sequence and the number of its tokens in a step."""


class Scheduler:
    """Holds the queues of waiting and running sequences. The cache grants them pages and slots."""

    def __init__(self, cache: HybridCache, max_batch: int, token_budget: int, times: StepTimes | None = None,
                 mixes: bool = True, defer_from: int | None = None, adapts: bool = False) -> None:
        """times: limits the prompt tokens of a step; None: only the token budget limits them. mixes: a step may have
        both prompts and drafts. defer_from: least number of rows at which state writes are deferred; None: never.
        adapts: as in `Capabilities`."""
        self.cache, self.max_batch, self.token_budget, self.times = cache, max_batch, token_budget, times
        self.mixes, self.defer_from, self.adapts = mixes, defer_from, adapts
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.paused: list[Sequence] = []
        self.leaving: list[SequenceCache] = []
        """Caches of ended sequences that still have a row in flight."""
        self.failed: list[tuple[Sequence, Exception]] = []
        """Waiting sequences that could not be admitted, with the errors. The engine ends them."""
        self.preemptions = self.turns = self._step = 0
        self._hurried = self._in_burst = False

    def add(self, sequence: Sequence) -> None:
        sequence.queue.turn = self._step
        self.waiting.append(sequence)

    def schedule(self) -> tuple[StepPlan, list[Sequence]]:
        """Returns the next step and the sequence of each row. Every position in the step has its page (L4)."""
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
        """Returns the prompts of the step after the one in flight, and takes free pages for them. Returns None if a
        sequence would have to be preempted; then no page is taken. decoded: tokens of answers in the same step.
        leaving: sequences that end with the step in flight, so that their places are free."""
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
        """Counts a step after the one in flight. Both steps have the same sequences: all running ones."""
        self._step += 1

    def plan(self, rows: Iterable[PlannedRow]) -> StepPlan:
        """Returns the plan of a step with these rows, and with all operations that were queued before."""
        return StepPlan(tuple(rows), self.cache.operations.take())

    def row(self, sequence: Sequence, count: int, deferring: bool = False) -> PlannedRow:
        """Returns the row of a sequence's next `count` tokens, including its drafts."""
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
        """True if a decode step with this number of rows may defer state writes."""
        return self.defer_from is not None and rows >= self.defer_from

    def _share_budget(self, prompts: List[Sequence], awaited: dict[Sequence, int], decoded: int) -> list[Scheduled]:
        """Returns the prompts of a step and their token counts. decoded: tokens of answers in the same step."""
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
        """Returns `is_burst` for the prompts that one step could bring to their first token."""
        near = [sequence for sequence, goal in zip(prompts, goals, strict=True)
                if sequence.reading and goal <= self.token_budget]
        answers = (sequence for sequence in self.running if not _is_prompt(sequence))
        self._in_burst = bool(near) and is_burst(near, answers, self._in_burst)
        return self._in_burst

    def pause(self, sequence: Sequence) -> None:
        """Stops a sequence until `resume`. Meanwhile it has no pages and no slot; its processed tokens are cached like
        any prefix."""
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
        """Queues a paused sequence again, before sequences that arrived later."""
        if sequence not in self.paused:
            return
        self.paused.remove(sequence)
        place = next(
            (i for i, other in enumerate(self.waiting) if other.times.arrived > sequence.times.arrived),
            len(self.waiting),
        )
        self.waiting.insert(place, sequence)

    def remove(self, sequence: Sequence, keep: bool = False) -> None:
        """Removes a sequence and releases its cache. keep: its state may be reused."""
        self._leave_fork(sequence)
        self._end_rest(sequence)
        if sequence.cache is None:
            (self.paused if sequence in self.paused else self.waiting).remove(sequence)
            return
        self.running.remove(sequence)
        self.cache.release(sequence.cache, keep)
        sequence.cache = None

    def leave(self, sequence: Sequence) -> None:
        """Removes a running sequence that still has a row in flight. Its cache stays until `release_left`."""
        assert sequence.cache is not None
        self.leaving.append(sequence.cache)
        self._leave_fork(sequence)
        self._end_rest(sequence)
        self.running.remove(sequence)
        sequence.cache = None

    def release_left(self, cache: SequenceCache, keep: bool) -> None:
        """Releases the cache of a sequence that `leave` has removed. keep: its last row is finite."""
        self.leaving.remove(cache)
        self.cache.release(cache, keep)

    def start_over(self, sequence: Sequence) -> None:
        """Makes a running sequence process its tokens again, because its state may be wrong."""
        self._preempt(sequence, sound=False)

    def start_all_over(self) -> None:
        """Applies `start_over` to all running sequences. Waiting choices then process their prompts themselves."""
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
        room = len(ordered[0].tokens) + 2 * QUANTUM * len(running)  # the others continue while one rests
        rests = self.cache.can_preempt(room)
        return preempted_by(ordered[0], running, step, partial(self._turn, rests=rests))

    def _turn(self, sequence: Sequence, rests: bool) -> int | None:
        """Returns the minimum quantum of a sequence, from the cost of resuming it; None if resuming takes more than one
        step. rests: its state stays in the cache."""
        if rests:
            return 0
        return quantum_to_process(sequence.done, len(self.running)) if sequence.done <= self.token_budget else None

    def _admit(self, leaving: int = 0) -> dict[Sequence, int]:
        """Starts waiting sequences in order, but skips a sequence while another one processes its prefix, or a tier
        loads it. Returns the running sequences that others wait for, each with the nearest awaited position. leaving:
        number of running sequences that make their places free."""
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
                    if not sequence.queue.passed:  # its loaded content must not keep others from loading
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
        """True if a tier still loads more of the sequence's prompt than the tree has. begin: the tier may start."""
        if sequence.queue.fork_point or sequence.scoring or not self.cache.tiers:
            return False
        keys = sequence.key_array
        sequence.queue.load = sequence.queue.load or self.cache.start_load(keys[:-1] if sequence.embeds else keys)
        return not sequence.queue.load.poll(begin)

    def _known(self, sequence: Sequence) -> int:
        """Returns the number of the sequence's tokens that the tree has. Counts again only if the tree has changed."""
        known, changes = sequence.queue.known
        if changes != self.cache.tree.changes:
            known = self.cache.tree.cached_length(sequence.key_array, not sequence.embeds)
            sequence.queue.known = known, self.cache.tree.changes
        return known

    def _await_prefix(self, sequence: Sequence) -> bool:
        """Makes a sequence wait for another one that processes their common prefix, if waiting pays. The other one will
        keep a checkpoint at the end of the prefix. Returns True if the sequence waits."""
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
            # otherwise this checkpoint would enter the tree only with the first token of its sequence
            self.cache.commit_if_finite(passed[1].cache)
        return sequence.queue.prefix_wait is not None

    def _allocate(self, sequence: Sequence) -> SequenceCache | None:
        # if others run, its next token must fit, too, or one of them would be preempted at once
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
        """Reserves pages for up to `count` tokens. Returns the number of tokens; 0 if the sequence itself is preempted.
        Frees pages of prompt ends that waiting choices would fork, then of the youngest running sequences."""
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
        """Returns the youngest running sequence; if a line is given, the youngest with the same trunk."""
        lines = ((one, one.cache and one.cache.line) for one in reversed(self.running))
        return next(one for one, own in lines if line is None or (own and own.trunk is line.trunk))

    def _drop_fork(self) -> bool:
        """Makes the youngest waiting choices process their prompt instead of forking its end. False if none wait."""
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
        """Releases a running sequence's cache. The processed tokens go to the tree if their state is finite. resting:
        the sequence will resume soon, so its state is kept. sound: False if the state may be wrong."""
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
    """Returns the prompts that a step can process, each with its largest token count."""
    found, left = dict[Sequence, int](), _MAX_SCORED
    for sequence in prompts:
        count = min(sequence.readable, left) if sequence.scoring else sequence.readable
        left -= count if sequence.scoring else 0
        if count:
            found[sequence] = count
    return found


def _reuse(tokens: int, diverged: int, cache: SequenceCache) -> str:
    """Returns a text for the log: how much of a prompt was reused."""
    source = f" of the {cache.source} tier" if cache.source else ""
    resumed = f"resumed at checkpoint {cache.done:,}{source}" if cache.done else "no checkpoint before that: read anew"
    if cache.done == tokens:
        return f"all of {tokens:,} tokens known{source}"
    if diverged <= cache.done:
        return f"{resumed} of {tokens:,} tokens" if cache.done else f"{tokens:,} tokens, none known"
    return f"diverged at token {diverged:,} of {tokens:,}; {resumed}"


def _common(sequence: Sequence, other: Sequence) -> int:
    """Returns the last position of another sequence's prompt from which this one could resume."""
    common, vector = common_length(sequence.prompt_keys, other.prompt_keys), sequence.embeds or other.embeds
    return common if common == len(other.request.prompt) and not vector else min(common, len(sequence.tokens) - 1)


def _passed(sequence: Sequence, common: int) -> int:
    """Returns the last position up to `common` at which a running prompt has left a state."""
    assert sequence.cache is not None
    return max((position for position in sequence.cache.checkpoint_slots if position <= common), default=0)


def _position(place: tuple[int, Sequence]) -> int:
    return place[0]


def _order(scheduled: Scheduled) -> tuple[bool, int]:
    sequence, count = scheduled
    assert sequence.cache is not None
    return count > 1, sequence.cache.slot
