"""Which step can be launched while another one is in flight, whose tokens nobody has seen: the rules in one place."""

from __future__ import annotations

from collections.abc import Callable

from deltic.engine.launch import InFlight, Share
from deltic.engine.penalties import wanted
from deltic.engine.scheduler import UNKNOWN, Plan, Row, Scheduler, defers
from deltic.engine.sequence import Sequence


def plan_ahead(scheduler: Scheduler, flight: InFlight, drafts: Callable[[], bool]
               ) -> tuple[Plan, list[Sequence]] | None:
    """The step after the one in flight, whose processed tokens are committed; None where it has to wait for its draws.

    It can be launched if all that it needs of the next tokens is the tokens: every running sequence takes one, draws
    one, and is followed by nothing that the host decides. States are written to spare slots, or stay as they are with
    the token in a replay ring; there and in K/V it lies past the cursor, so that where a sequence turns out to be over
    nothing has happened to it. drafts: whether there are to be drafts in it, which is asked last.
    """
    shares = [share for share in flight.shares if share.live]
    if len(shares) != len(scheduler.running) or not all(map(_is_plain, shares)):
        return None
    deferring = scheduler.defers(len(shares))
    if not deferring and any(share.lease.behind for share in shares):
        return None
    going = [share for share in shares if len(share.sequence.tokens) + 1 < share.sequence.limit]
    if len(going) < len(shares) and scheduler.waiting:
        return None  # the place that becomes free is not to stay so for a step
    shares, cache, spares = going, scheduler.cache, scheduler.cache.accounts.spares
    short = [share.lease for share in shares if share.lease.done == share.lease.covered]
    if (not shares or len(shares) > len(spares) or len(short) > cache.pages.free or drafts()
            or not scheduler.pass_over()):
        return None
    for lease in short:
        cache.reserve(lease, 1)
    rows = tuple(_row(share, spare, deferring and defers(cache, share.lease))
                 for share, spare in zip(shares, spares, strict=False))
    return Plan(rows, cache.take_operations()), [share.sequence for share in shares]


def _row(share: Share, spare: int, append: bool) -> Row:
    lease = share.lease
    return Row((UNKNOWN,), lease.done, lease.pages, lease.slot, 1, target=None if append else spare, base=lease.base,
               ring=lease.ring or 0, append=append, drawn=share.draw, rotary=share.sequence.offset)


def _is_plain(share: Share) -> bool:
    """Whether the sequence's next step but one needs nothing of the next one but the token."""
    row, sequence = share.row, share.sequence
    return (row is not None and len(row.tokens) == 1 and share.draw is not None and sequence.generated > 0
            and not (sequence.guide or sequence.constraint) and not wanted(sequence))
