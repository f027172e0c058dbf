"""Async scheduling: schedules the step after the one in flight, before the host has the tokens of the one in flight.

On the host, nothing in such a step may depend on the value of these tokens. The new K/V lies past the cursor; state
updates stay in the delta logs or go to the sequences' own slots. If a sequence turns out to have ended, its slot may
therefore contain one token more than its cursor counts: the token that ended it. That token is committed, too, and the
state is kept once the step is known to be finite (`Engine._forget`). `Engine.pause` waits for the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from deltic.engine.scheduler import Scheduler, defers
from deltic.engine.sequence import Sequence
from deltic.engine.step_plan import UNKNOWN, PlannedRow, StepPlan, base_after, next_row
from deltic.params import RING, common_length
from deltic.runner.launch import InFlight, ScheduledSequence
from deltic.runner.sampling import changes_logits
from deltic.spec_decode.controller import SpeculationController
from deltic.spec_decode.mtp import PendingDrafts

_LONG = 4
"""A step is long if it processes more prompt tokens than one `_LONG`-th of the token budget."""
_MAX_COMPARED = 8
"""Number of waiting sequences that are compared with the prompts of a step."""


class AsyncStep(NamedTuple):
    """A step plan, the sequence of each row, and the drafts of the rows, which only the device has."""

    plan: StepPlan
    sequences: list[Sequence]
    drafts: PendingDrafts | None = None


def schedule_async(scheduler: Scheduler, flight: InFlight, speculator: SpeculationController) -> AsyncStep | None:
    """Returns the step after the one in flight; None if it depends on tokens that the host does not have yet. The
    inputs of the step in flight are committed already, except for drafts."""
    if any(each.draft_tokens for each in flight.scheduled):
        return _behind_drafts(scheduler, flight, speculator)
    return _behind_tokens(scheduler, flight, speculator)


def _behind_tokens(scheduler: Scheduler, flight: InFlight, speculator: SpeculationController) -> AsyncStep | None:
    """Schedules rows after a step without drafts: decode rows take their token from the device; all others prefill."""
    cache, live = scheduler.cache, [each for each in flight.scheduled if each.live]
    drawing = [each for each in live if each.draw is not None]
    sequences = {each.sequence for each in drawing}
    others = [sequence for sequence in scheduler.running if sequence not in sequences]
    if not all(map(_needs_no_host, drawing)) or not all(map(_prefills_on, others)):
        return None
    if not scheduler.adapts and any(each.sequence.adapter for each in drawing):
        return None
    going = [each for each in drawing if len(each.sequence.tokens) + 1 < each.sequence.limit]
    leaving = sequences - {each.sequence for each in going}
    places = min(scheduler.max_batch - len(scheduler.running) + len(leaving), len(scheduler.waiting))
    if places and any(_leaves_state_for(scheduler.waiting, each) for each in live):
        return None  # the state can be resumed only once the step in flight is known to be finite
    alone = not others and not places
    if not alone and flight.prompt_tokens > scheduler.token_budget // _LONG:
        return None  # a request that arrives now would wait for two long steps
    deferring = alone and scheduler.defers_state_writes(len(going))
    if deferring and any(each.sequence.adapter for each in going):
        return None  # rows with adapters write their states, and need steps of their own
    if alone and not deferring and any(each.cache.unflushed for each in drawing):
        return None
    full = [each.cache for each in going if each.cache.done == each.cache.covered]
    if (alone and not going) or len(full) > cache.pages.free:
        return None
    if speculator.wants_drafts([each.sequence for each in live]):
        return None
    for sequence_cache in full:
        cache.reserve(sequence_cache, 1)
    rows = list[PlannedRow]()
    for each in going:
        append = deferring and defers(cache, each.cache)
        rows.append(next_row(each.cache, (UNKNOWN,), 1, append=append, drawn=each.draw,
                             rotary=each.sequence.images.offset, adapter=each.sequence.adapter))
    prompts = scheduler.schedule_prompts(len(rows), leaving)
    if prompts is None:
        return None
    rows += [scheduler.row(sequence, count) for sequence, count in prompts]
    return AsyncStep(scheduler.plan(rows), [*(each.sequence for each in going), *(sequence for sequence, _ in prompts)])


def _behind_drafts(scheduler: Scheduler, flight: InFlight, speculator: SpeculationController) -> AsyncStep | None:
    """Schedules the drafts that follow a step with drafts. The device finds the position at which each row begins, so
    no sequence may join or leave. Pages and delta log have room for the case that all drafts are right."""
    cache, scheduled = scheduler.cache, flight.scheduled
    if scheduler.waiting or len(scheduled) != len(scheduler.running) or not all(map(_drafts_on, scheduled)):
        return None
    count = speculator.drafts_behind(flight)
    if not count or not all(_has_room(each, count) for each in scheduled):
        return None
    # room for the drafts after this step, too
    room = [(each.cache, each.tokens + 2 * count + 1) for each in scheduled]
    if any(cache.reserve(sequence_cache, tokens) < tokens for sequence_cache, tokens in room):
        return None
    drafts = speculator.pending_behind(flight, count)
    if drafts is None:
        return None
    scheduler.schedule_drafts()
    plan = scheduler.plan([_drafts_row(scheduler, each, count) for each in scheduled])
    return AsyncStep(plan, [each.sequence for each in scheduled], drafts)


def _drafts_row(scheduler: Scheduler, each: ScheduledSequence, count: int) -> PlannedRow:
    row, sequence_cache = each.row, each.cache
    assert row is not None and row.done == sequence_cache.done
    base = base_after(row)
    assert base is not None
    if row.done + each.tokens + count + 1 - base > RING:
        scheduler.cache.states.queue_flush(sequence_cache, base, row.done)
        each.base = base = row.done
    return next_row(
        sequence_cache,
        (UNKNOWN,) * (count + 1),
        count + 1,
        ahead=1,
        base=base,
        delta_log=row.delta_log,
        append=True,
        drafts=count,
        accepts=row.drafts,
        rotary=row.rotary,
        adapter=row.adapter,
    )


def _has_room(each: ScheduledSequence, count: int) -> bool:
    """True if the delta log and the answer have room for `count` drafts after all tokens in flight."""
    most = each.tokens + count
    return most + 1 <= RING and len(each.sequence.tokens) + most < each.sequence.limit


def _drafts_on(each: ScheduledSequence) -> bool:
    """True if the tokens after the row's drafts are drafted already, and need nothing from the host."""
    row = each.row
    if row is None or not row.append or not row.drafts:
        return False
    return each.live and each.drafted_next and _needs_no_host(each) and not each.sequence.adapter


def _needs_no_host(each: ScheduledSequence) -> bool:
    """True if sampling needs no host-side input (no grammar, penalty, processor or fork), and its only result is the
    token."""
    sequence = each.sequence
    return not (sequence.needs_fork or each.scores or sequence.guide or sequence.constraint or changes_logits(sequence)
                or sequence.request.logits_processors)


def _leaves_state_for(waiting: Iterable[Sequence], each: ScheduledSequence) -> bool:
    """True if a waiting sequence could resume from a checkpoint of this sequence's prompt. Assumed if more than
    `_MAX_COMPARED` sequences wait."""
    if not each.cache.checkpoint_slots:
        return False
    first, known = min(each.cache.checkpoint_slots), each.sequence.prompt_keys
    return any(index == _MAX_COMPARED or common_length(sequence.prompt_keys, known) >= first
               for index, sequence in enumerate(islice(waiting, _MAX_COMPARED + 1)))


def _prefills_on(sequence: Sequence) -> bool:
    """True if a sequence that draws no token continues with prompt tokens that need nothing from the host."""
    return sequence.reading and sequence.images.first_unencoded is None and not sequence.scoring
