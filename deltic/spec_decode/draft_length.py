"""Chooses the number of drafts that is fastest by measured acceptance and time; it may be 0. Pure Python."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median_low
from typing import Protocol

from deltic.config import ModelConfig

_LEARNING = 0.08
"""Minimum weight of the newest draft in a position's acceptance rate; the first drafts weigh more."""
_OBSERVING = 0.02
"""Minimum weight of a token that could have been a draft. It is smaller, because there are more such tokens."""
_PRIOR = 3
"""The weight of the initial rate, in drafts."""
_TIMINGS = 5
"""Number of steps in the median time of a draft count, at least two. A median ignores outliers."""
_HOPE = 0.8
"""The initial acceptance rate."""
_GROWTH = 0.12
"""The assumed increase of a step's time per draft, without experts, until it is measured."""
_RENEWAL = 64
"""Number of steps with drafts after which a step without drafts is measured again, because times drift."""
_SURE = 3
"""Number of measured steps without drafts before the first draft."""
_WORTH = 1.03
"""Minimum speed-up at which drafts are used. It is above 1, because times vary."""
_BURST = 3
"""Number of consecutive steps with drafts in a new trial after steps without drafts."""
_SHORTEST, LONGEST = 64, 1024
"""Number of steps without drafts before the next trial: at first, and at most."""


@dataclass(slots=True)
class Acceptance:
    """Acceptance rates, from 0 to 1, at each position, of drafts after right drafts only. weights: number of drafts in
    each rate."""

    shares: list[float]
    weights: list[int]

    @classmethod
    def hopeful(cls, limit: int) -> Acceptance:
        return cls([_HOPE] * limit, [_PRIOR] * limit)

    @classmethod
    def like(cls, other: Acceptance) -> Acceptance:
        """Returns statistics that start with the rates of `other`."""
        return cls([*other.shares], [_PRIOR] * len(other.shares))

    def observe(self, right: bool) -> None:
        """Records, for all positions, if a draft of one more token would have been right."""
        weight = self.weights[0] + 1
        share = self.shares[0] + max(_OBSERVING, 1 / weight) * (right - self.shares[0])
        self.shares[:], self.weights[:] = [share] * len(self.shares), [weight] * len(self.weights)

    def learn(self, drafted: int, accepted: int) -> None:
        """Records verified drafts. Drafts after the first wrong one do not count."""
        for position in range(min(accepted + 1, drafted)):
            share, weight = self.shares[position], self.weights[position] + 1
            self.shares[position] = share + max(_LEARNING, 1 / weight) * ((position < accepted) - share)
            self.weights[position] = weight

    def expected(self, drafts: int) -> float:
        """Returns the expected number of tokens from a row with this number of drafts."""
        total, chain = 1.0, 1.0
        for share in self.shares[:drafts]:
            chain *= share
            total += chain
        return total


class TimeGrowth(Protocol):
    """The assumed growth of a step's time with its drafts, until it is measured."""

    def factor(self, rows: int, drafts: int) -> float:
        """Returns the time of a step with drafts, relative to a step without drafts."""


@dataclass(frozen=True, slots=True)
class HeadGrowth:
    """The growth if each draft passes all layers and a part of the matrix of logits. head: share of this matrix in the
    bytes that a token reads. part: share of the part in the matrix."""

    head: float
    part: float

    def factor(self, rows: int, drafts: int) -> float:
        """Returns the time of a step with drafts, relative to a step without drafts."""
        return 1 + drafts * (1 - self.head + self.head * self.part)


@dataclass(frozen=True, slots=True)
class Growth:
    """The assumed growth of a step's time with its tokens, until it is measured. In a mixture of experts each draft may
    use other experts, and their weights must be read, too.

    experts: the fraction of the weights read for one token that are experts.
    passed: the fraction of a layer's experts that a token uses.
    """

    experts: float = 0.0
    passed: float = 1.0

    @classmethod
    def of(cls, config: ModelConfig) -> Growth:
        experts = config.experts
        if experts is None:
            return cls()
        embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
        routed = 3 * experts.size * experts.per_token * config.hidden_size * config.num_hidden_layers
        return cls(routed / (config.active_parameter_count - embedding), experts.per_token / experts.count)

    def factor(self, rows: int, drafts: int) -> float:
        """Returns the time of a step with drafts, relative to a step without drafts."""
        return self._read(rows * (drafts + 1)) / self._read(rows) + _GROWTH * drafts

    def _read(self, tokens: int) -> float:
        """Returns the weights read for this number of tokens, relative to one token, if each uses random experts."""
        met = (1 - (1 - self.passed) ** tokens) / self.passed
        return 1 + self.experts * (met - 1)


class DraftLength(Protocol):
    """Chooses the number of tokens to draft."""

    limit: int

    def choose(self, known: Sequence[Acceptance], rows: int) -> int:
        """Returns the number of drafts of each sequence in a step with `rows` rows. known: their acceptance."""

    def timed(self, rows: int, drafts: int, seconds: float) -> None:
        """Records the duration of a decode step, including drafting."""

    def plain_seconds(self, rows: int) -> float | None:
        """Returns the seconds of a step with this number of rows without drafts; None if unknown."""


@dataclass(slots=True)
class FixedDraftLength:
    """Always drafts `limit` tokens."""

    limit: int

    def choose(self, known: Sequence[Acceptance], rows: int) -> int:
        return self.limit

    def timed(self, rows: int, drafts: int, seconds: float) -> None:
        pass

    def plain_seconds(self, rows: int) -> float | None:
        return None


@dataclass(slots=True)
class AdaptiveDraftLength:
    """Chooses the number of drafts with the most tokens per second. If that is 0, tries drafts again from time to time.

    A step without drafts right after one with them is not measured: it still has to apply the delta log.

    growth: estimates the times that are not measured yet.
    shortest: number of steps without drafts before the first new trial.
    seconds: time of a step by (sequences, drafts).
    recent: the last measured times.
    last: number of drafts in the last step.
    busy: steps since a step without drafts was last measured.
    quiet: steps since drafts stopped paying.
    wait: value of `quiet` at which the next trial starts.
    burst: remaining steps of a trial.
    """

    limit: int
    growth: TimeGrowth = field(default_factory=Growth)
    shortest: int = _SHORTEST
    seconds: dict[tuple[int, int], float] = field(default_factory=dict)
    recent: defaultdict[tuple[int, int], deque[float]] = field(
        default_factory=lambda: defaultdict(partial(deque[float], maxlen=_TIMINGS)))
    last: int = 0
    busy: int = 0
    quiet: int = 0
    wait: int = 0
    burst: int = 0

    def __post_init__(self) -> None:
        self.wait = self.wait or self.shortest

    def choose(self, known: Sequence[Acceptance], rows: int) -> int:
        if len(self.recent[rows, 0]) < _SURE:
            return 0
        if self.busy >= _RENEWAL:
            self.busy = (self.busy + 1) % (_RENEWAL + 2)
            return 0
        best = max(range(self.limit + 1), key=lambda drafts: self._rate(known, rows, drafts))
        if best and self._rate(known, rows, best) > _WORTH * self._rate(known, rows, 0):
            self.busy, self.quiet, self.burst = self.busy + 1, 0, 0
            if all(acceptance.shares[0] > _HOPE / 2 for acceptance in known):
                self.wait = self.shortest
            return best
        self.quiet += 1
        if self.quiet >= self.wait:
            self.quiet, self.burst, self.wait = 0, _BURST, min(2 * self.wait, LONGEST)
        if self.burst:
            self.burst -= 1
            return min(2, self.limit)
        return 0

    def timed(self, rows: int, drafts: int, seconds: float) -> None:
        last, self.last = self.last, drafts
        if last and not drafts:
            return
        recent = self.recent[rows, drafts]
        recent.append(seconds)
        if len(recent) > 1:
            self.seconds[rows, drafts] = median_low(recent)

    def plain_seconds(self, rows: int) -> float | None:
        return self.seconds.get((rows, 0))

    def _rate(self, known: Sequence[Acceptance], rows: int, drafts: int) -> float:
        tokens = rows - len(known) + sum(acceptance.expected(drafts) for acceptance in known)
        return tokens / self._estimate(rows, drafts)

    def _estimate(self, rows: int, drafts: int) -> float:
        """Returns the seconds of a step: measured, or scaled by `growth` from the nearest measured number of drafts."""
        if (rows, drafts) in self.seconds:
            return self.seconds[rows, drafts]
        plain, grown = self.seconds[rows, 0], self.growth.factor(rows, drafts)
        measured = [depth for depth in range(1, self.limit + 1) if (rows, depth) in self.seconds]
        if not measured:
            return plain * grown
        nearest = min(measured, key=lambda depth: abs(depth - drafts))
        return plain + (self.seconds[rows, nearest] - plain) * (grown - 1) / (self.growth.factor(rows, nearest) - 1)
