"""Who gets a place in the batch, and who gives one up, when more want to run than may.

Who came first runs first, but of those that came together (the prompts of one body, the choices of one request) each
waits behind one of everybody else. And an answer has its place for a turn of some steps, a short one if its client has
more places: after that a sequence of another client takes it if it waits, and the answer goes on later, from the state
that it left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice

from deltic.engine.sequence import Sequence

TURN, SHORT_TURN = 32, 8
"""Steps for which a client's only place is safe, and one of several. Many answers to short questions end within one."""
LONGEST_WAIT = 32 * TURN
"""Steps after which a sequence waits before all that came after it, whoever runs of its client."""
_SCAN = 256
"""Waiting sequences that are looked at in one step."""


def in_turn(waiting: Iterable[Sequence], running: Iterable[Sequence], step: int) -> list[Sequence]:
    """The first of those that wait, in the order in which they shall run."""
    before = Counter(sequence.group for sequence in running)
    ranks = list[tuple[bool, int, bool, Sequence]]()
    for sequence in islice(waiting, _SCAN):
        patient = step - sequence.turn >= LONGEST_WAIT
        ranks.append((not patient, 0 if patient else before[sequence.group], sequence.rest is not None, sequence))
        before[sequence.group] += 1
    return [rank[-1] for rank in sorted(ranks, key=lambda rank: rank[:-1])]


def gives_way(first: Sequence, running: Iterable[Sequence], step: int) -> Sequence | None:
    """Which running sequence gives its place to the first that waits, if one shall: of the client with most places the
    one that has generated most. Who has had a turn itself waits for as long as that before it takes one."""
    if first.held or (first.rest and step - first.turn < TURN):
        return None
    places = Counter(sequence.group for sequence in running)
    over = [sequence for sequence in running if places[sequence.group] > places[first.group]
            and step - sequence.turn >= (TURN if places[sequence.group] == 1 else SHORT_TURN)]
    return max(over, key=lambda sequence: (places[sequence.group], sequence.generated), default=None)
