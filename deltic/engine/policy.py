"""Scheduling policy as pure functions, without torch: how prompts share a step, which sequences get a place in the
batch, and which waiting request is given up.

Prompts: one half of a step's token budget goes to the prompts nearest to their goal, so that a short prompt need not
wait for a long one. The other half, and the rest of the first, goes to the oldest prompts, so that a long prompt makes
progress even if many short ones arrive.

Places: sequences run in order of arrival, but clients take turns, and so do the groups of one client (the prompts of
one body, the choices of one request). A sequence keeps its place for a quantum of steps, which is short if its client
has more places. Then a sequence of another client may preempt it; it resumes later from the state that it left.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import filterfalse
from operator import attrgetter
from statistics import median
from typing import Protocol, TypeVar

from deltic.engine.sequence import Sequence as Running
from deltic.params import PAGE

# The token budget


STEP = 2 * PAGE
"""The fixed cost of a step (weights are read, rows laid out), in tokens."""
_RECENT = 5
"""Number of steps in the median of durations. A median ignores outliers."""
_SLOPES = 3
"""Minimum number of pairs of steps, one with twice the tokens of the other, to estimate the fixed cost of a step."""
_STALL = 0.03
"""Duration in seconds of a step with prompts that readers of running answers do not notice."""
_MARGIN = 0.9
"""Fraction of the longest allowed step that is the target, because durations vary."""
_BURST = 0.12
"""Target duration in seconds of a step with prompts in a burst (`is_burst`): each step has a fixed cost, so that fewer
steps bring all requests to their first token, and to their end, sooner."""
_LASTS = 3
"""A burst lasts until this many times more answers run than prompts wait: its last prompts have waited longest."""
_BESIDE_ANSWERS, _ALONE, _UNKNOWN = 4, 20, 0.02
"""A step with prompts may last this many times as long as one without, so that reading weights takes at most a quarter
of the time if answers run, else a twentieth. `_UNKNOWN`: seconds of a step without prompts until one has run."""


def share(budget: int, pending: Sequence[int], goals: Sequence[int]) -> list[int]:
    """Returns the tokens that each prompt gets in a step, for prompts in order of age, oldest first.

    pending: unprocessed tokens of each prompt, at least 1. goals: tokens of each until its first token, or until a
    state that others wait for. The sum of the result is the lesser of the budget and all pending tokens.

    The oldest prompt gets half of the budget, rounded up, if it can use it: a prompt with W tokens pending up to its
    own end, older prompts included, is done after 2 W / budget steps at the latest, whatever arrives later. A prompt
    reaches its goal after as many steps as half of the budget takes for its own goal and all nearer goals.
    """
    counts, left = [0] * len(pending), budget // 2
    for index in sorted(range(len(goals)), key=goals.__getitem__):
        counts[index] = min(goals[index], left)
        left -= counts[index]
    left += budget - budget // 2
    for index, tokens in enumerate(pending):
        more = min(tokens - counts[index], left)
        counts[index] += more
        left -= more
    return counts


def hurry(counts: Sequence[int], goals: Sequence[int], first: bool = False) -> list[int]:
    """Keeps only the prompts that reach their goal in this step, so that the step is short. Keeps all prompts if none
    reaches its goal and the step draws no first token. Meant for every other step at most: the others continue in the
    next."""
    near = [count if count >= goal else 0 for count, goal in zip(counts, goals, strict=True)]
    return near if first or any(near) else list(counts)


@dataclass(frozen=True, slots=True)
class PrefixWait:
    """A prompt that could wait until another one has processed their common prefix. All numbers are tokens.

    own: tokens that the prompt must process if it starts now.
    saved: tokens of `own` that waiting saves.
    away: tokens that the other prompt still processes up to the end of the prefix.
    others: tokens pending in all running prompts, including the other one.
    alone: True if the other one is the only running prompt.
    nearer: tokens pending in prompts that are nearer to their goal than `own`, and therefore go first.
    """

    own: int
    saved: int
    away: int
    others: int
    alone: bool
    nearer: int = 0

    def pays(self, budget: int) -> bool:
        """True if waiting pays. Compares the tokens of all steps until this prompt's first token, with and without
        waiting: waiting may add no more of them than it saves later prompts."""
        if self.saved < STEP:
            return False
        half = max(budget // 2, 1)
        steps = -(-self.away // (budget if self.alone else half))
        left = max(self.others - steps * budget, 0)
        waited = steps * (STEP + min(self.others, budget)) + _reading(budget, left, self.own - self.saved)
        return waited <= _reading(budget, self.others, self.own, self.nearer) + self.saved


def _reading(budget: int, others: int, own: int, nearer: int = 0) -> int:
    """Returns the total tokens of all steps until a prompt of `own` tokens is done. nearer: tokens that go first."""
    steps = 1 if others + own <= budget else -(-(own + nearer) // max(budget // 2, 1))
    return steps * (STEP + min(others + own, budget))


@dataclass(slots=True)
class StepTimes:
    """Limits the duration of a step with prompts: running answers and new requests wait for its end. The limit is a
    number of prompt tokens, computed from the durations of the last steps.

    longest: upper bound in seconds while an answer runs; None: the default, which grows with the duration of a step
    without prompts, and with the fixed cost of a step with prompts.
    """

    longest: float | None = None
    without: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Durations in seconds of the last steps without prompt tokens."""
    by_token: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Seconds per prompt token of the last steps with at least a page of prompt tokens."""
    steps: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=2 * _RECENT))
    """Prompt tokens and seconds of these steps."""
    fixed: float = 0.0
    """Fixed cost in seconds of such a step, whatever its tokens: weights are dequantized, or come from the host."""

    def add(self, tokens: int, seconds: float) -> None:
        """Records the prompt tokens of a step and its duration in seconds."""
        if not tokens:
            self.without.append(seconds)
        elif tokens >= PAGE:
            self.by_token.append(seconds / tokens)
            self.steps.append((tokens, seconds))
            slopes = [(longer - shorter) / (more - few) for more, longer in self.steps for few, shorter in self.steps
                      if more >= 2 * few]
            if len(slopes) >= _SLOPES:
                slope = max(median(slopes), 0.0)
                self.fixed = max(median(taken - slope * size for size, taken in self.steps), 0.0)

    def limit(self, budget: int, answers: bool, burst: bool = False) -> int:
        """Returns the maximum prompt tokens of a step. answers: the step also decodes. burst: as `is_burst`."""
        if not self.by_token:
            wanted = budget // 4 if answers else budget
        else:
            wanted = self._tokens(_MARGIN * self._seconds(answers, burst), answers and self.longest is not None)
        return min(max(wanted, PAGE), budget)

    def _tokens(self, seconds: float, strictly: bool) -> int:
        """Returns the prompt tokens that a step processes in this time. Unless `strictly`, they may take as long as the
        fixed cost of a step: shorter pieces would spend most of the time on that cost."""
        recent = [*self.steps][-_RECENT:]
        fixed = min(self.fixed, *(_MARGIN * taken for _, taken in recent))
        by_token = median((taken - fixed) / tokens for tokens, taken in recent)
        wanted = (seconds - fixed) / by_token
        if not strictly:
            wanted = max(wanted, min(fixed / by_token, 2 * max(tokens for tokens, _ in recent)))
        return int(wanted)

    def _seconds(self, answers: bool, burst: bool) -> float:
        if answers and self.longest is not None:
            return self.longest
        times = _BESIDE_ANSWERS if answers else _ALONE
        usual = median(self.without) if self.without else 0.0 if answers else _UNKNOWN
        return max(_BURST if answers and burst else _STALL, times * usual)


def is_burst(prompts: Iterable[Running], answers: Iterable[Running], lasts: bool = False) -> bool:
    """True if there are at least as many prompts as answers: in all, and for every client with answers. A client's
    prompts are counted as its own, plus one for each other client with prompts except one: no client alone makes the
    answers of another one stall. lasts: a burst of the last step continues with a third as many prompts."""
    factor = _LASTS if lasts else 1
    waiting, running = (Counter(sequence.client for sequence in some) for some in (prompts, answers))
    return factor * waiting.total() >= running.total() and all(
        factor * (waiting[client] + max(len(waiting) - (client in waiting) - 1, 0)) >= count
        for client, count in running.items())


# Places in the batch


QUANTUM, SHORT_QUANTUM, _FEW = 32, 8, 8
"""The quantum in steps, for a client with one place and for a client with several, if at most `_FEW` sequences run.
Many short answers end within one quantum. If more sequences run, it grows with their number, because a preemption makes
a step longer."""
LONGEST_WAIT = 32 * QUANTUM
"""Steps after which a waiting sequence precedes all others of its client, and of clients with as many places."""
_SCAN = 256
"""Number of waiting sequences examined in a step: the first of each client, then the second of each, and so on."""
_SHARE = 4
"""If a sequence must process tokens again to resume, its quantum lasts this many times as long as that."""


def in_turn(waiting: Iterable[Running], running: Iterable[Running], step: int) -> list[Running]:
    """Returns the first waiting sequences, in the order in which they should run."""
    running = list(running)
    groups = Counter(sequence.group for sequence in running)
    clients = Counter(sequence.client for sequence in running)
    ranks = list[tuple[bool, int, bool, Running]]()
    for sequence in _candidates(waiting):
        patient = step - sequence.queue.turn >= LONGEST_WAIT
        ranks.append((not patient, groups[sequence.group], sequence.queue.rest is not None, sequence))
        groups[sequence.group] += 1
    ranks.sort(key=lambda rank: rank[:-1])
    places = list[tuple[int, bool, int, bool, Running]]()
    for rank in ranks:
        client = rank[-1].client
        places.append((clients[client], *rank))
        clients[client] += 1
    return [place[-1] for place in sorted(places, key=lambda place: place[:-1])]


def _candidates(waiting: Iterable[Running]) -> list[Running]:
    """Returns the waiting sequences that are examined, at most `_SCAN`."""
    known, own = [*waiting], Counter[str]()
    if len(known) <= _SCAN:
        return known
    places = list[int]()
    for sequence in known:
        places.append(own[sequence.client])
        own[sequence.client] += 1
    return [known[index] for index in sorted(range(len(known)), key=places.__getitem__)[:_SCAN]]


def quantum_of(places: int, running: int) -> int:
    """Returns the quantum in steps for a client with this number of places."""
    return (QUANTUM if places == 1 else SHORT_QUANTUM) * max(running, _FEW) // _FEW


def no_preemption(running: Sequence[Running], step: int) -> bool:
    """True if no sequence can be preempted, because all clients have one place and no quantum is over."""
    return (len({sequence.client for sequence in running}) == len(running)
            and all(step - sequence.queue.turn < quantum_of(1, len(running)) for sequence in running))


def quantum_to_process(tokens: int, running: int) -> int:
    """Returns the quantum in steps if a sequence must process this number of tokens again to resume, while all others
    wait. It is long enough that the processing takes a small part of the time."""
    return _SHARE * running * tokens // (STEP + running)


def preempted_by(first: Running, running: Iterable[Running], step: int,
              turn: Callable[[Running], int | None]) -> Running | None:
    """Returns the running sequence that the first waiting one preempts, if any: from the client, then the group with
    most places, the one that has generated most. A client without a place preempts an answer of a client with several
    places at once; otherwise the quantum must be over. A preempted sequence waits at least one quantum. turn: returns
    the minimum quantum of a sequence, from the cost of resuming it; None if it cannot be preempted."""
    if first.held or (first.queue.rest and step - first.queue.turn < QUANTUM):
        return None
    running = list(running)
    clients, groups = (Counter(map(attrgetter(name), running)) for name in ("client", "group"))

    def may_stay(sequence: Running) -> bool:
        own = sequence.client == first.client
        places = groups[sequence.group] if own else clients[sequence.client]
        wanted = groups[first.group] if own else clients[first.client]
        if places <= wanted:
            return True
        if places > 1 and not wanted:
            return not sequence.generated
        return step - sequence.queue.turn < max(quantum_of(places, len(running)), least[sequence])

    least = {sequence: steps for sequence in running if (steps := turn(sequence)) is not None}
    return max(filterfalse(may_stay, least), default=None, key=lambda sequence: (
        clients[sequence.client], groups[sequence.group], sequence.generated))


# The queue of waiting requests


class HeldRequest(Protocol):
    """A request that runs or waits."""

    @property
    def client(self) -> str:
        """The client to which the request is charged."""

    @property
    def waiting(self) -> int:
        """Number of answers without a token."""

    @property
    def begun(self) -> int:
        """Number of unfinished answers with a token."""


Request = TypeVar("Request", bound=HeldRequest)


def to_give_up(held: Sequence[tuple[Request, int]], client: str, size: int, most: int) -> list[Request] | None:
    """Returns the requests to end so that one more request of a client fits; None if the new one must be refused.

    held: requests in order of arrival, each with its size (answers, or prompt tokens). most: bound for all sizes
    together; a larger request fits only alone. The client that holds most loses its newest waiting request, a begun
    one only if it has no other, but only while it holds more than the new request's client would.
    """
    total = sum(taken for _, taken in held)
    if not total or total + size <= most:
        return []
    clients = Counter[str]()
    for request, taken in held:
        clients[request.client] += taken
    own, going = clients.pop(client, 0) + size, list[Request]()
    sizes = {id(request): taken for request, taken in held}
    while total + size > most:
        largest = max(clients, key=clients.__getitem__, default=None)
        if largest is None or clients[largest] <= own:
            return None
        candidates = [request for request, taken in held if request.client == largest and request.waiting and taken
                      and request not in going]
        if not candidates:  # all its requests are running
            del clients[largest]
            continue
        newest = max(range(len(candidates)), key=lambda index: (not candidates[index].begun, index))
        going.append(candidates[newest])
        clients[largest] -= sizes[id(candidates[newest])]
        total -= sizes[id(candidates[newest])]
    return going
