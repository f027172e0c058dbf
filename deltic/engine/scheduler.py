"""Who runs in the next step, and with how many tokens. Pure Python.

Running sequences come first, oldest first; each that is ready to choose its next token takes one token, beside those
that were drafted for it, and what is left of the token budget is shared among prompts (`fairness`), at least one token.
When pages run out, the youngest running sequence is sent back to wait and later processed again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as List
from dataclasses import replace
from functools import partial

from deltic.cache.handles import SequenceCache
from deltic.cache.manager import HybridCache
from deltic.engine.policy import PrefixWait, StepTimes, hurry, share
from deltic.engine.quantum import TURN, gives_way, in_turn, settled, turn_to_read
from deltic.engine.sequence import Sequence
from deltic.engine.step_plan import ImageSpan, PlannedRow, StepPlan
from deltic.params import PAGE, RING, common_length

log = logging.getLogger("deltic")

_LOOKS = 8
"""Sequences that may be found to have to wait for another one in one step. They are looked at again only when that one
has come far enough, so that a step's planning does not grow with the number that wait."""
_SCAN = 256
"""Sequences that wait for others and may be passed over in one step."""
_FETCHES = 4
"""Prompts for which tiers may be reading at the same time: what they bring waits in memory."""
_SCORED = 32
"""Tokens of prompts whose next tokens' probabilities are worked out in one step: each takes as long as the end of a
prompt, and as much memory as the vocabulary is large."""
_PATIENCE = 0.01
"""Seconds to sleep at a time while there is nothing to do but to wait for a tier."""
DEFERRED = 5
"""Tokens of a sequence among which one has its state written, where the others stay in the replay ring. More would have
to be replayed for what is saved."""


def defers(cache: HybridCache, lease: SequenceCache) -> bool:
    """Whether what the next token does to the state is left in the lease's replay ring. Of a few tokens in a row one is
    not, so that the state is written; of different sequences not in the same step."""
    if not cache.states.attach_delta_log(lease) or lease.delta_log is None:
        return False
    return lease.unflushed + 1 < RING and (lease.done + lease.delta_log) % DEFERRED != 0


def emits_of(
    cache: HybridCache, lease: SequenceCache, wanted: Iterable[int], count: int
) -> tuple[tuple[int, int], ...]:
    """`PlannedRow.emits` of a row with the next `count` tokens: those of the wanted positions that lie in it and have
    room."""
    if not wanted:
        return ()
    return tuple((position, slot) for position in wanted if lease.done < position <= lease.done + count
                 and (slot := cache.reserve_checkpoint(lease, position)) is not None)


class Scheduler:
    """Queues of waiting and running sequences over a cache that grants them pages and slots."""

    def __init__(self, cache: HybridCache, max_batch: int, token_budget: int, times: StepTimes | None = None,
                 mixes: bool = True, defer_from: int | None = None) -> None:
        """times: limit the prompt tokens of a step; None: the token budget alone does. mixes: prompts and drafts may be
        in one step. defer_from: rows of a step from which on updates of states are deferred
        (`Model.defers`); None: they never are."""
        self.cache, self.max_batch, self.token_budget, self.times = cache, max_batch, token_budget, times
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.paused: list[Sequence] = []
        self.failed: list[tuple[Sequence, Exception]] = []
        """Those that could not be admitted, which still wait, and why: whoever steps ends them."""
        self.mixes, self.preemptions, self.turns, self._step = mixes, 0, 0, 0
        self.defer_from = defer_from
        self._hurried = False

    def add(self, sequence: Sequence) -> None:
        sequence.turn = self._step
        self.waiting.append(sequence)

    def plan(self) -> tuple[StepPlan, list[Sequence]]:
        """The next step and the sequence behind each row. Every position of it is backed by granted pages (L4)."""
        self._step += 1
        self._take_turns()
        awaited = self._admit()
        shares: list[tuple[Sequence, int]] = []
        prompts: list[Sequence] = []
        if not self.mixes and any(sequence.pending > 1 or sequence.reading for sequence in self.running):
            for sequence in self.running:
                sequence.draft_tokens = ()
        for sequence in list(self.running):
            if sequence.pending > 1 or sequence.reading:
                prompts.append(sequence)
            elif sequence.pending and not sequence.awaits_mask and sequence.cache and (
                    granted := self._grant(sequence, 1 + len(sequence.draft_tokens), shares)):
                shares.append((sequence, granted))
        for sequence, count in self._read(prompts, awaited, sum(count for _, count in shares)):
            if sequence.cache and (count := self._grant(sequence, count, shares)):
                shares.append((sequence, count))
        shares.sort(key=_order)
        deferring = self.defers_state_writes(len(shares)) and all(
            count == 1 and sequence.generated for sequence, count in shares
        )
        rows = tuple(self._row(sequence, count, deferring) for sequence, count in shares)
        return StepPlan(rows, self.cache.operations.take()), [sequence for sequence, _ in shares]

    def defers_state_writes(self, rows: int) -> bool:
        """Whether updates of states may be deferred in a step of so many rows that only decode."""
        return self.defer_from is not None and rows >= self.defer_from

    def plan_behind(self, rows: List[PlannedRow], known: List[Sequence], leaving: set[Sequence], spares: Iterator[int]
                    ) -> tuple[StepPlan, list[Sequence]] | None:
        """As `plan`, of a step behind one in flight, which draws tokens of these known sequences: `rows` take them.
        leaving: whose answers end with that step, so that their places are free. All others that run read prompts, to
        whose states the step leaves their slots, as it is committed later: it writes to spare ones. None, and nothing
        has changed, where `plan` would move somebody from his place."""
        staying = [sequence for sequence in self.running if sequence not in leaving]
        if self.waiting and self._due(self._step + 1, staying):
            return None
        self._step += 1
        awaited, shares = self._admit(len(leaving)), list[tuple[Sequence, int]]()
        prompts = [sequence for sequence in self.running if sequence.reading or sequence.pending > 1]
        for sequence, count in self._read(prompts, awaited, len(rows)):
            assert sequence.cache is not None
            if count := self.cache.reserve(sequence.cache, count):
                shares.append((sequence, count))
        shares.sort(key=_order)
        others = tuple(replace(self._row(sequence, count, False), target=next(spares)) for sequence, count in shares)
        return StepPlan((*rows, *others), self.cache.operations.take()), [*known, *(sequence for sequence, _ in shares)]

    def plan_drafts(self, rows: List[PlannedRow]) -> StepPlan:
        """The step of these rows with drafts, behind one in flight that has the same sequences, all that run."""
        self._step += 1
        return StepPlan(tuple(rows), self.cache.operations.take())

    def _read(self, prompts: List[Sequence], awaited: dict[Sequence, int], answers: int
              ) -> list[tuple[Sequence, int]]:
        """The prompts that a step reads and their token counts. answers: tokens of answers in the same step."""
        budget = max(self.token_budget - answers, 1)
        readable = _readable([sequence for sequence in prompts if sequence.cache])
        goals = [min(most, awaited.get(sequence, len(sequence.tokens)) - sequence.done)
                 for sequence, most in readable.items()]
        limit = self.times.limit(budget, answers > 0) if self.times else budget
        counts = given = share(limit, [*readable.values()], goals)
        if limit < budget and not self._hurried:
            first = any(not (sequence.generated or sequence.pending or sequence.awaits_mask)
                        for sequence in self.running)
            counts = hurry(given, goals, first)
        self._hurried = counts != given
        return [(sequence, count) for sequence, count in zip(readable, counts, strict=True) if count]

    def pause(self, sequence: Sequence) -> None:
        """Have a sequence neither run nor wait until `resume`. It owns nothing meanwhile; what it has read is kept like
        any other prefix."""
        if sequence in self.paused:
            return
        self._forget_origin(sequence)
        self._wake(sequence)
        if sequence.cache is None:
            self.waiting.remove(sequence)
        else:
            self._yield(sequence)
        sequence.load = sequence.prefix_wait = None
        self.paused.append(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Have a paused sequence wait again, before those that came after it."""
        if sequence not in self.paused:
            return
        self.paused.remove(sequence)
        place = next((i for i, other in enumerate(self.waiting) if other.arrived > sequence.arrived), len(self.waiting))
        self.waiting.insert(place, sequence)

    def remove(self, sequence: Sequence, keep: bool = False) -> None:
        """Take a sequence out, wherever it is, and give back what it owns. keep: its state is good for others."""
        self._forget_origin(sequence)
        self._wake(sequence)
        if sequence.cache is None:
            (self.paused if sequence in self.paused else self.waiting).remove(sequence)
            return
        self.running.remove(sequence)
        self.cache.release(sequence.cache, keep)
        sequence.cache = None

    def start_over(self, sequence: Sequence) -> None:
        """Have a running sequence, whose state may be no good, read all again that was not kept before."""
        self._preempt(sequence, sound=False)

    def start_all_over(self) -> None:
        """As `start_over`, of all that run; those that wait read themselves what they would have forked."""
        for sequence in reversed(self.running[:]):
            self.start_over(sequence)
        while self._drop_origin():
            pass

    def _take_turns(self) -> None:
        """Put those that wait in order; where no place is free, have at most one running sequence give up its own."""
        leaving = self._due(self._step, self.running)
        if leaving:
            self._yield(leaving, resting=True)
            self.add(leaving)
            self.turns += 1

    def _due(self, step: int, running: List[Sequence]) -> Sequence | None:
        """Put those that wait in order; returns who of those that run gives his place to the first of them, where no
        other is free."""
        if not self.waiting:
            return None
        full = len(running) >= self.max_batch
        if full and (not self.cache.reuse or settled(running, step)):
            return None
        ordered = in_turn(self.waiting, running, step)
        first = set(ordered)
        self.waiting = deque([*ordered, *(sequence for sequence in self.waiting if sequence not in first)])
        if not full:
            return None
        room = len(ordered[0].tokens) + 2 * TURN * len(running)  # they go on while one rests
        rests = self.cache.can_preempt(room)
        return gives_way(ordered[0], running, step, partial(self._turn, rests=rests))

    def _turn(self, sequence: Sequence, rests: bool) -> int | None:
        """Steps for which it keeps its place, by what it costs to go on later; None: more than a step reads. rests: its
        state stays beside all that runs and rests."""
        if rests:
            return 0
        return turn_to_read(sequence.done, len(self.running)) if sequence.done <= self.token_budget else None

    def _admit(self, leaving: int = 0) -> dict[Sequence, int]:
        """Start waiting sequences in order, except those that would read what a running one, or a tier, is reading.
        leaving: how many of those that run give up their places. Returns which running sequences are waited for, and
        the nearest position of each that is."""
        held, awaited, looks, fetches = list[Sequence](), dict[Sequence, int](), 0, 0
        while (self.waiting and len(self.running) - leaving < self.max_batch
               and looks < _LOOKS and len(held) < _SCAN):
            sequence = self.waiting.popleft()
            if not sequence.held:
                looks += 1
                try:
                    waits = self._await_prefix(sequence) or self._await_fetch(sequence, fetches < _FETCHES)
                    if not waits:
                        sequence.cache = self._lease(sequence)
                except Exception as error:
                    self.failed.append((sequence, error))
                    waits = True
                if not waits:
                    if sequence.cache is None:
                        self.waiting.appendleft(sequence)
                        break
                    sequence.turn = self._step
                    self._wake(sequence)
                    self.running.append(sequence)
                    looks -= 1
                    continue
            held.append(sequence)
            fetches += sequence.load is not None and sequence.load.begun
            if sequence.prefix_wait:
                position, other = sequence.prefix_wait
                awaited[other] = min(position, awaited.get(other, position))
        self.waiting.extendleft(reversed(held))
        if held and not self.running and held[0].load:
            held[0].load.wait(_PATIENCE)
        return awaited

    def _await_fetch(self, sequence: Sequence, begin: bool) -> bool:
        """Whether a tier still has to bring more of this sequence's prompt than the tree knows. begin: it may begin
        to."""
        if sequence.fork_point or sequence.scoring or not self.cache.tiers:
            return False
        keys = sequence.key_array
        sequence.load = sequence.load or self.cache.start_load(keys[:-1] if sequence.embeds else keys)
        return not sequence.load.poll(begin)

    def _known(self, sequence: Sequence) -> int:
        """Tokens of it that the tree knows; a long prompt is compared once per change of the tree."""
        known, changes = sequence.known
        if changes != self.cache.tree.changes:
            known = self.cache.tree.cached_length(sequence.key_array, not sequence.embeds)
            sequence.known = known, self.cache.tree.changes
        return known

    def _await_prefix(self, sequence: Sequence) -> bool:
        """Have a sequence wait for one that is reading a prefix of it, if that pays; then that one will keep a state at
        the end of it."""
        sequence.prefix_wait = None
        if not self.cache.reuse or sequence.fork_point or sequence.scoring:
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
            meeting = PrefixWait(own, position - known, position - other.done, others, len(reading) == 1, nearer)
            if meeting.away > 0 and meeting.pays(self.token_budget):
                found.append((position, other))
        if found:
            position, other = max(found, key=_position)
            other.wanted = tuple(sorted({*other.wanted, position}))
            sequence.prefix_wait = position, other
        elif passed[0] > self._known(sequence) + PAGE and passed[1].cache:
            # otherwise it enters the tree once its reader has drawn a sound token
            self.cache.commit_if_finite(passed[1].cache)
        return sequence.prefix_wait is not None

    def _lease(self, sequence: Sequence) -> SequenceCache | None:
        # beside others it must fit with its next token: else it would only push them out, or be pushed
        room = len(sequence.tokens) + 1 if self.running else 0
        origin, lease, keys, known = sequence.fork_point, None, sequence.own_keys(), sequence.key_array
        if origin is not None:
            if self.cache.accounts.make_room(-(-room // PAGE) - origin.snapshot.done // PAGE):
                lease = self.cache.fork(origin.snapshot, keys)
            if lease is None and self.running:
                return None
            self._forget_origin(sequence)
        if lease is None:
            diverged = self.cache.tree.diverged(known) if log.isEnabledFor(logging.DEBUG) else 0
            # from the first token that has no probability yet: at the end of what is looked for nothing is found
            known = known[:len(sequence.scores) + 1] if sequence.scoring else known
            end = not (sequence.embeds or sequence.scoring)
            lease = self.cache.admit(known, room, sequence.load, end, keys)
            if lease is not None:
                log.debug("%s: %s", sequence.request.id, _reuse(len(sequence.tokens), diverged, lease))
            origin = None
        if lease is not None:
            sequence.start(lease)
            sequence.logits = origin.snapshot.logits if origin else sequence.logits
        return lease

    def _grant(self, sequence: Sequence, count: int, shares: list[tuple[Sequence, int]]) -> int:
        """Pages for up to `count` tokens. Rather than stand still it takes them from the prompt ends that waiting
        choices would fork, then from the youngest running sequences."""
        assert sequence.cache is not None
        while not (granted := self.cache.reserve(sequence.cache, count)):
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
        origin = next((s.fork_point for s in reversed(self.waiting) if s.fork_point), None)
        for sequence in list(self.waiting) if origin else ():
            if sequence.fork_point is origin:
                self._forget_origin(sequence)
        return origin is not None

    def _preempt(self, sequence: Sequence, sound: bool = True) -> None:
        self._yield(sequence, sound=sound)
        sequence.turn = self._step
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _yield(self, sequence: Sequence, resting: bool = False, sound: bool = True) -> None:
        """Take a running sequence's lease; what it has read goes to the tree, where it will find it again, if it is
        sound. resting: it will go on soon, so that nobody shall take that."""
        lease = sequence.cache
        assert lease is not None
        sound = sound and (sequence.generated > 0 or self.cache.commit_if_finite(lease))
        self.running.remove(sequence)
        if resting:
            sequence.rest = self.cache.preempt(lease, keep=sound)
        else:
            self.cache.release(lease, keep=sound)
        # drafts need the replay ring that they were made for
        sequence.cache, sequence.draft_tokens, sequence.logits = None, (), None

    def _wake(self, sequence: Sequence) -> None:
        if sequence.rest:
            self.cache.resume_preempted(sequence.rest, sequence.cache)
            sequence.rest = None

    def _row(self, sequence: Sequence, count: int, deferring: bool) -> PlannedRow:
        lease = sequence.cache
        assert lease is not None
        done, end = lease.done, lease.done + count
        tokens = (*sequence.tokens[done:end], *sequence.draft_tokens)[:count]
        drafts, ends = max(end - len(sequence.tokens), 0), end >= len(sequence.tokens)
        scored = max(end - ends - max(done, len(sequence.scores)), 0) if sequence.scoring else 0
        drawn = drafts + 1 if ends and not sequence.embeds else 0
        append = defers(self.cache, lease) if deferring else drafts > 0 and lease.delta_log is not None
        return PlannedRow(
            tokens,
            done,
            lease.pages,
            lease.slot,
            scored + drawn,
            scored=scored,
            checkpoints=emits_of(self.cache, lease, sequence.wanted, count),
            base=lease.base,
            delta_log=lease.delta_log or 0,
            append=append,
            drafts=drafts,
            rotary=sequence.rotary(done, count) if sequence.positions else sequence.offset,
            hidden=ends and sequence.embeds,
            images=_seen(sequence, done, end),
        )

    def _forget_origin(self, sequence: Sequence) -> None:
        origin, sequence.fork_point = sequence.fork_point, None
        if origin:
            origin.waiting -= 1
            if not origin.waiting:
                self.cache.release(origin.snapshot)


def _readable(prompts: Iterable[Sequence]) -> dict[Sequence, int]:
    """As many tokens of each as a step may read, where that is any."""
    found, left = dict[Sequence, int](), _SCORED
    for sequence in prompts:
        count = min(sequence.readable, left) if sequence.scoring else sequence.readable
        left -= count if sequence.scoring else 0
        if count:
            found[sequence] = count
    return found


def _seen(sequence: Sequence, start: int, end: int) -> tuple[ImageSpan, ...]:
    """`PlannedRow.seen` of a row with the tokens from start to end."""
    parts = ((max(picture.start, start), min(picture.end, end), picture) for picture in sequence.pictures)
    return tuple(ImageSpan(first - start, last - first, picture.digest, first - picture.start)
                 for first, last, picture in parts if first < last)


def _reuse(tokens: int, diverged: int, lease: SequenceCache) -> str:
    """Why so much of a prompt was reused, and no more."""
    source = f" of the {lease.source} tier" if lease.source else ""
    resumed = f"resumed at checkpoint {lease.done:,}{source}" if lease.done else "no checkpoint before that: read anew"
    if lease.done == tokens:
        return f"all of {tokens:,} tokens known{source}"
    if diverged <= lease.done:
        return f"{resumed} of {tokens:,} tokens" if lease.done else f"{tokens:,} tokens, none known"
    return f"diverged at token {diverged:,} of {tokens:,}; {resumed}"


def _common(sequence: Sequence, other: Sequence) -> int:
    """The last position of another sequence's prompt whose state this one could begin with."""
    common, vector = common_length(sequence.prompt_keys, other.prompt_keys), sequence.embeds or other.embeds
    return common if common == len(other.request.prompt) and not vector else min(common, len(sequence.tokens) - 1)


def _passed(sequence: Sequence, common: int) -> int:
    """The last position up to there whose state a sequence has left while it reads."""
    assert sequence.cache is not None
    return max((position for position in sequence.cache.checkpoint_slots if position <= common), default=0)


def _position(place: tuple[int, Sequence]) -> int:
    return place[0]


def _order(share: tuple[Sequence, int]) -> tuple[bool, int]:
    sequence, count = share
    assert sequence.cache is not None
    return count > 1, sequence.cache.slot
