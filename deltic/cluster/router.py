"""Chooses the replica of a request, by the seconds that its states save and the seconds of its queue. No torch.

    score = seconds saved by the deepest state that the request can resume from
          - seconds of work that wait on the replica
          - a fraction of the work that the replica has received beyond its share

Candidates are the holders of the request's deepest known boundaries and the replicas with the least work, so a
decision costs the same with 10 replicas as with 1,000. Until a replica reports, the router assumes that it keeps the
states of all requests that it was sent.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from deltic.cluster.boundaries import Boundaries
from deltic.cluster.reachable import LoadReport, ReachableReport

MOST_KEYS: Final = 1 << 20
"""Maximum number of boundaries that a router knows; a boundary with one holder takes about 160 bytes."""
_LEVELS: Final = 3
"""Number of known boundaries of a request, from the deepest on, that provide candidates."""
_HOLDERS: Final = 8
"""Maximum number of holders of one boundary that are compared. If there are more, a random sample is compared."""
_LEAST: Final = 4
"""Number of replicas with the least work that are compared."""
WORTH: Final = 3.0
"""Weight of a saved second. Work that is done twice delays this request and all requests behind it: 1 / (1 - r) times
as much in all, on a replica that is busy for a share r of the time. The conversation's next turns go there, too."""
_BALANCE: Final = 0.05
"""Fraction of the work beyond its share that counts against a replica. Without load it decides the replica of a new
prefix, and so spreads prefixes over the memory of all replicas."""
_SHARE_SECONDS: Final = 60.0
"""Maximum seconds of work by which a replica may be behind its share, so that a long idle replica is not flooded."""


@dataclass(slots=True, eq=False)
class ReplicaLoad:
    """The router's record of a replica.

    reported: seconds of work in the last report. answered: seconds of it that ended since then. sent: seconds of
    running requests sent since then. total: seconds of all work ever sent. epoch: reports so far. seen: changes so far.
    """

    name: str
    number: int
    reported: float = 0.0
    answered: float = 0.0
    sent: float = 0.0
    total: float = 0.0
    rank: float = 0.0
    epoch: int = 0
    seen: int = 0
    live: bool = True

    @property
    def queue(self) -> float:
        """Seconds of waiting work."""
        return max(self.reported - self.answered, 0.0) + self.sent


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """A request and its replica. saved: expected seconds that the replica's states save. cost: expected seconds of
    work. epoch: the replica's epoch when it was sent."""

    replica: ReplicaLoad
    saved: float
    cost: float
    epoch: int = 0


@dataclass(slots=True, eq=False)
class Holders:
    """The replicas that hold a boundary. seconds: saved seconds by replica number. order: numbers of holders, and
    perhaps of former holders, to sample from."""

    seconds: dict[int, float] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)

    def put(self, number: int, seconds: float) -> None:
        if number not in self.seconds:
            if len(self.order) > 2 * len(self.seconds) + _HOLDERS:
                self.order = [*self.seconds]
            self.order.append(number)
        self.seconds[number] = seconds

    def some(self, random: Random) -> Iterator[int]:
        """Yields the numbers of some holders."""
        if len(self.order) <= _HOLDERS:
            yield from self.seconds
        else:
            yield from (number for number in random.choices(self.order, k=_HOLDERS) if number in self.seconds)


class KeyIndex:
    """The holders of boundaries, in bounded memory. There are two generations: when the younger one has half of the
    maximum, the older one is dropped. `put` moves a boundary to the younger one."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._young: dict[int, tuple[int, float] | Holders] = {}
        self._old: dict[int, tuple[int, float] | Holders] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, key: int) -> tuple[int, float] | Holders | None:
        """Returns the only holder of a boundary and the seconds that it saves, or all holders; None if unknown."""
        return self._young.get(key) or self._old.get(key)

    def put(self, key: int, number: int, seconds: float) -> None:
        known = self._young.get(key)
        if known is None:
            known = self._old.pop(key, None)
            if len(self._young) >= self._most // 2:
                self._old, self._young = self._young, {}
        if isinstance(known, tuple) and known[0] != number:
            first, known = known, Holders()
            known.put(*first)
        if isinstance(known, Holders):
            known.put(number, seconds)
        self._young[key] = known if isinstance(known, Holders) else (number, seconds)

    def drop(self, key: int, number: int) -> None:
        """Removes a holder of a boundary."""
        for generation in (self._young, self._old):
            known = generation.get(key)
            if isinstance(known, Holders):
                known.seconds.pop(number, None)
            if (isinstance(known, tuple) and known[0] == number) or (isinstance(known, Holders) and not known.seconds):
                del generation[key]


class StateRouter:
    """Routes requests to replicas. For one thread."""

    def __init__(self, most_keys: int = MOST_KEYS, seed: int = 0) -> None:
        self.index = KeyIndex(most_keys)
        self.replicas: dict[str, ReplicaLoad] = {}
        self._numbers: dict[int, ReplicaLoad] = {}
        self._random = Random(seed)
        self._heap: list[tuple[float, int]] = []  # (rank, number); some entries are outdated
        self._next = 0
        self._total = 0.0
        self._speed = LoadReport()

    # replicas

    def set_replicas(self, names: Sequence[str]) -> None:
        """Adds new replicas, and removes replicas that are gone. Keeps the known boundaries of the others."""
        for name in self.replicas.keys() - set(names):
            gone = self.replicas.pop(name)
            gone.live = False
            self._total -= gone.total
            del self._numbers[gone.number]
        share = self._share()
        for name in dict.fromkeys(names):
            if name not in self.replicas:
                replica = ReplicaLoad(name, self._next, total=share)
                self._total += share
                self._next += 1
                self.replicas[name] = self._numbers[replica.number] = replica
                self._moved(replica)

    def report(self, name: str, report: ReachableReport) -> None:
        """Applies a replica's report."""
        replica = self.replicas.get(name)
        if replica is None:
            return
        load = report.load
        replica.reported, replica.answered, replica.sent = load.queue, 0.0, 0.0
        replica.epoch += 1
        if load.character:
            self._speed = load
        entries = [*zip(report.keys, report.seconds, strict=True)]
        known = min(max(replica.seen - report.begun, 0), report.changes)
        replica.seen = report.begun + report.changes
        for key, seconds in entries[known:]:
            if seconds:
                self.index.put(key, replica.number, seconds)
            else:
                self.index.drop(key, replica.number)
        self._moved(replica)

    # requests

    def choose(self, boundaries: Boundaries) -> RoutedRequest | None:
        """Returns the best replica for a request, with the expected savings and cost; None without replicas. The
        request counts as sent only after `sent`."""
        saved = self._savings(boundaries)
        best, score, kept = None, 0.0, 0.0
        share = self._share()
        for number in (*saved, *self._least_busy()):
            replica, seconds = self._numbers[number], saved.get(number, 0.0)
            value = WORTH * seconds - replica.queue - _BALANCE * max(replica.total - share, -_SHARE_SECONDS)
            if best is None or value > score:
                best, score, kept = replica, value, seconds
        if best is None:
            return None
        cost = max(boundaries.size * self._speed.character - kept, 0.0) + self._speed.answer
        return RoutedRequest(best, kept, cost)

    def sent(self, request: RoutedRequest, boundaries: Boundaries) -> None:
        """Records that a request was sent to the replica that was chosen for it."""
        replica = request.replica
        request.epoch = replica.epoch
        replica.sent += request.cost
        added = request.cost + max(self._share() - _SHARE_SECONDS - replica.total, 0.0)
        replica.total += added
        self._total += added
        self._moved(replica)
        if replica.live:
            character = self._speed.character or 1e-9
            for key, size in zip(boundaries.keys, boundaries.sizes, strict=True):
                self.index.put(key, replica.number, size * character)

    def ended(self, request: RoutedRequest) -> None:
        """Records that a request has ended, with an answer or an error."""
        replica = request.replica
        if request.epoch == replica.epoch:
            replica.sent = max(replica.sent - request.cost, 0.0)
        else:
            replica.answered += request.cost
        self._moved(replica)

    def redirect(self, request: RoutedRequest, name: str) -> RoutedRequest:
        """Returns the request with another replica, which received it because the chosen one had no room."""
        replica = self.replicas.get(name)
        if replica is None or replica is request.replica:
            return request
        return RoutedRequest(replica, 0.0, request.cost + request.saved)

    def _savings(self, boundaries: Boundaries) -> dict[int, float]:
        """Returns the seconds that some live replicas save, by replica number."""
        found: dict[int, float] = {}
        levels = 0
        for key in reversed(boundaries.keys):
            holders = self.index.get(key)
            if holders is None:
                continue
            if isinstance(holders, tuple):
                some: dict[int, float] = {holders[0]: holders[1]}
            else:
                some = {number: holders.seconds[number] for number in holders.some(self._random)}
            for number, seconds in some.items():
                if number in self._numbers:
                    found.setdefault(number, seconds)
            levels += 1
            if levels == _LEVELS:
                break
        return found

    def least_busy(self) -> list[str]:
        """Returns the names of some replicas with the least work."""
        return [self._numbers[number].name for number in self._least_busy()]

    def _least_busy(self) -> list[int]:
        found: list[tuple[float, int]] = []
        while self._heap and len(found) < _LEAST:
            entry = heapq.heappop(self._heap)
            replica = self._numbers.get(entry[1])
            if replica is not None and replica.rank == entry[0] and entry not in found:
                found.append(entry)
        for entry in found:
            heapq.heappush(self._heap, entry)
        return [number for _, number in found]

    def _moved(self, replica: ReplicaLoad) -> None:
        """Updates a replica's place in the order of work."""
        if not replica.live:
            return
        replica.rank = replica.queue + _BALANCE * replica.total
        heapq.heappush(self._heap, (replica.rank, replica.number))
        if len(self._heap) > 4 * len(self._numbers) + 64:
            self._heap = [(each.rank, each.number) for each in self._numbers.values()]
            heapq.heapify(self._heap)

    def _share(self) -> float:
        """Returns the seconds of work of each replica if all had received the same."""
        return self._total / len(self.replicas) if self.replicas else 0.0
