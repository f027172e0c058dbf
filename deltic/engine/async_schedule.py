"""Which step can be launched while another one is in flight, whose tokens nobody has seen: the rules in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from deltic.engine.scheduler import Scheduler, defers
from deltic.engine.sequence import Sequence
from deltic.engine.step_plan import UNKNOWN, PlannedRow, StepPlan, base_after
from deltic.params import RING, common_length
from deltic.runner.launch import InFlight, ScheduledSequence
from deltic.runner.penalties import wanted
from deltic.spec_decode.pending_drafts import PendingDrafts

_LONG = 4
"""A step is long that reads more of prompts than this part of what a step may read."""
_LOOKS = 8
"""Waiting sequences whose prompts are compared with those of a step."""


def plan_ahead(scheduler: Scheduler, flight: InFlight, drafts: Callable[[], bool]
               ) -> tuple[StepPlan, list[Sequence]] | None:
    """The step after the one in flight, whose processed tokens are committed; None where it has to wait for its draws.

    It can be launched if all that it needs of the next tokens is the tokens: every sequence that draws one now takes
    it, draws one, and is followed by nothing that the host decides; all others read prompts, whose tokens are known.
    States are written to spare slots, or stay as they are with the token in a replay ring; there and in K/V it lies
    past the cursor, so that where a sequence turns out to be over, or is taken out, nothing has happened to it. drafts:
    whether there are to be drafts in it, which is asked last.
    """
    shares = [share for share in flight.scheduled if share.live and share.draw is not None]
    drawing, cache = {share.sequence for share in shares}, scheduler.cache
    others = [sequence for sequence in scheduler.running if sequence not in drawing]
    if not all(map(_is_plain, shares)) or not all(map(_reads_on, others)):
        return None
    going = [share for share in shares if len(share.sequence.tokens) + 1 < share.sequence.limit]
    leaving = drawing - {share.sequence for share in going}
    places = min(scheduler.max_batch - len(scheduler.running) + len(leaving), len(scheduler.waiting))
    if places and any(_goes_on(scheduler.waiting, share) for share in flight.scheduled if share.live):
        return None  # from a state that is kept when this step is known to be sound
    alone = not others and not places
    if not alone and flight.read > scheduler.token_budget // _LONG:
        return None  # who comes while two long steps are on their way would wait for both
    deferring = alone and scheduler.defers_state_writes(len(going))
    if alone and not deferring and any(share.cache.unflushed for share in shares):
        return None
    spares = iter(tuple(cache.accounts.spares))
    enough = len(going) + len(others) + places <= len(cache.accounts.spares)
    short = [share.cache for share in going if share.cache.done == share.cache.covered]
    if (alone and not going) or not enough or len(short) > cache.pages.free or drafts():
        return None
    for lease in short:
        cache.reserve(lease, 1)
    rows = [_row(share, next(spares), deferring and defers(cache, share.cache)) for share in going]
    return scheduler.plan_behind(rows, [share.sequence for share in going], leaving, spares)


def plan_behind_drafts(scheduler: Scheduler, flight: InFlight, depth: Callable[[], int],
                       promised: Callable[[int], PendingDrafts | None]) -> tuple[StepPlan, PendingDrafts] | None:
    """The step that verifies what is drafted behind one in flight, which has drafts itself. None where it has to wait
    for that one's tokens.

    It can be launched if the device knows by itself where every row begins: no sequence comes or goes, all draw, and
    nothing is said to them by the host. Whichever drafts are right, there are pages, and the replay ring takes all
    tokens, so that no state is written: where a sequence turns out to be over, or is taken out, nothing has happened
    to it. depth: how many drafts each row shall have, which is asked where some may be had. promised: gives so many,
    and is asked last.
    """
    cache, shares = scheduler.cache, flight.scheduled
    if scheduler.waiting or len(shares) != len(scheduler.running) or not all(map(_drafts_on, shares)):
        return None
    drafts = depth()
    if not drafts or not all(_has_room(share, drafts) for share in shares):
        return None
    # and for what is drafted behind this one in turn
    room = [(share.cache, share.tokens + 2 * drafts + 1) for share in shares]
    if any(cache.reserve(lease, count) < count for lease, count in room):
        return None
    promise = promised(drafts)
    if promise is None:
        return None
    return scheduler.plan_drafts([_drafts_row(scheduler, share, drafts) for share in shares]), promise


def _drafts_row(scheduler: Scheduler, share: ScheduledSequence, drafts: int) -> PlannedRow:
    row, lease = share.row, share.cache
    assert row is not None
    base = base_after(row)
    assert base is not None
    if row.done + share.tokens + drafts + 1 - base > RING:
        scheduler.cache.states.queue_flush(lease, base, row.done)
        share.base = base = row.done
    return PlannedRow(
        (UNKNOWN,) * (drafts + 1),
        row.done + 1,
        lease.pages,
        lease.slot,
        drafts + 1,
        base=base,
        delta_log=row.delta_log,
        append=True,
        drafts=drafts,
        accepts=row.drafts,
        rotary=row.rotary,
    )


def _has_room(share: ScheduledSequence, drafts: int) -> bool:
    """Whether so many drafts find room in the replay ring and in the answer, if all are right that are in flight."""
    sequence, most = share.sequence, share.tokens + drafts
    return most + 1 <= RING and len(sequence.tokens) + most < sequence.limit


def _drafts_on(share: ScheduledSequence) -> bool:
    """Whether the device knows by itself what follows a row with drafts, and has it drafted."""
    row = share.row
    return share.live and share.ahead and row is not None and row.append and row.drafts > 0 and _obeys(share)


def _row(share: ScheduledSequence, spare: int, append: bool) -> PlannedRow:
    lease = share.cache
    return PlannedRow(
        (UNKNOWN,),
        lease.done,
        lease.pages,
        lease.slot,
        1,
        target=None if append else spare,
        base=lease.base,
        delta_log=lease.delta_log or 0,
        append=append,
        drawn=share.draw,
        rotary=share.sequence.offset,
    )


def _is_plain(share: ScheduledSequence) -> bool:
    """Whether the sequence's next step but one needs nothing of the next one but the token."""
    return not share.draft_tokens and _obeys(share)


def _obeys(share: ScheduledSequence) -> bool:
    """Whether the host has nothing to say to what the model chooses, nor to what is done with it."""
    sequence = share.sequence
    return not (sequence.needs_fork or share.scores or sequence.guide or sequence.constraint or wanted(sequence)
                or sequence.request.logits_processors)


def _goes_on(waiting: Iterable[Sequence], share: ScheduledSequence) -> bool:
    """Whether some of those that wait could begin with a state that this sequence's prompt leaves on the way; of many
    that is taken for granted."""
    if not share.cache.checkpoint_slots:
        return False
    first, known = min(share.cache.checkpoint_slots), share.sequence.prompt_keys
    return any(index == _LOOKS or common_length(sequence.prompt_keys, known) >= first
               for index, sequence in enumerate(islice(waiting, _LOOKS + 1)))


def _reads_on(sequence: Sequence) -> bool:
    """Whether a sequence that draws nothing now goes on to read what is known of its prompt."""
    return sequence.reading and sequence.first_unencoded_image is None and not sequence.scoring
