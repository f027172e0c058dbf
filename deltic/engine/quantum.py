"""Who gets a place in the batch, and who gives one up, when more want to run than may.

Who came first runs first, but clients take turns: each waits behind one of everybody else's. So do, among a client's
own, the bodies that it sent: of the prompts of one body, or the choices of one request, each waits behind one of every
other. And an answer has its place for a turn of some steps, a short one if its client has more places: after that a
sequence of another client takes it if it waits, and the answer goes on later, from the state that it left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from itertools import filterfalse
from operator import attrgetter

from deltic.engine.policy import STEP
from deltic.engine.sequence import Sequence

TURN, SHORT_TURN, _FEW = 32, 8, 8
"""Steps for which a client's only place is safe, and one of several, where so few run. Many answers to short questions
end within one. Where more run, turns are longer: a step in which one moves takes longer than others."""
LONGEST_WAIT = 32 * TURN
"""Steps after which a sequence waits before all others of its client, and of clients that have as many places."""
_SCAN = 256
"""Waiting sequences that are looked at in one step: the first of every client, then the second of every one, and so
on."""
_SHARE = 4
"""Where going on means to read again, turns take so many times as long as that."""


def in_turn(waiting: Iterable[Sequence], running: Iterable[Sequence], step: int) -> list[Sequence]:
    """The first of those that wait, in the order in which they shall run."""
    running = list(running)
    groups = Counter(sequence.group for sequence in running)
    clients = Counter(sequence.client for sequence in running)
    ranks = list[tuple[bool, int, bool, Sequence]]()
    for sequence in _candidates(waiting):
        patient = step - sequence.turn >= LONGEST_WAIT
        ranks.append((not patient, groups[sequence.group], sequence.rest is not None, sequence))
        groups[sequence.group] += 1
    ranks.sort(key=lambda rank: rank[:-1])
    places = list[tuple[int, bool, int, bool, Sequence]]()
    for rank in ranks:
        client = rank[-1].client
        places.append((clients[client], *rank))
        clients[client] += 1
    return [place[-1] for place in sorted(places, key=lambda place: place[:-1])]


def _candidates(waiting: Iterable[Sequence]) -> list[Sequence]:
    """Those that are looked at."""
    known, own = [*waiting], Counter[str]()
    if len(known) <= _SCAN:
        return known
    places = list[int]()
    for sequence in known:
        places.append(own[sequence.client])
        own[sequence.client] += 1
    return [known[index] for index in sorted(range(len(known)), key=places.__getitem__)[:_SCAN]]


def turn_of(places: int, running: int) -> int:
    """Steps for which a place of a client with so many is safe."""
    return (TURN if places == 1 else SHORT_TURN) * max(running, _FEW) // _FEW


def settled(running: List[Sequence], step: int) -> bool:
    """Whether nobody would give way to anyone: all have one place each, and no turn is over."""
    return (len({sequence.client for sequence in running}) == len(running)
            and all(step - sequence.turn < turn_of(1, len(running)) for sequence in running))


def turn_to_read(tokens: int, running: int) -> int:
    """Steps of a turn after which so many tokens have to be read again, while all others wait: so many that little of
    the time goes into that when each of those that run comes to it."""
    return _SHARE * running * tokens // (STEP + running)


def gives_way(first: Sequence, running: Iterable[Sequence], step: int,
              turn: Callable[[Sequence], int | None]) -> Sequence | None:
    """Which running sequence gives its place to the first that waits, if one shall: of the client, then of the body
    with most places, the one that has generated most. Who has none takes an answer's place from one that has several at
    once; else it has its turn. Who has had a turn itself waits for as long as that before it takes one.
    turn: steps of its turn at least, by what it costs when a sequence goes on; None: more than it may."""
    if first.held or (first.rest and step - first.turn < TURN):
        return None
    running = list(running)
    clients, groups = (Counter(map(attrgetter(name), running)) for name in ("client", "group"))

    def may_stay(sequence: Sequence) -> bool:
        own = sequence.client == first.client
        places = groups[sequence.group] if own else clients[sequence.client]
        wanted = groups[first.group] if own else clients[first.client]
        if places <= wanted:
            return True
        if places > 1 and not wanted:
            return not sequence.generated
        return step - sequence.turn < max(turn_of(places, len(running)), least[sequence])

    least = {sequence: steps for sequence in running if (steps := turn(sequence)) is not None}
    return max(filterfalse(may_stay, least), default=None, key=lambda sequence: (
        clients[sequence.client], groups[sequence.group], sequence.generated))
