"""How prompts share a step, and when one waits for another: pure functions, no torch.

A step has a budget of tokens. Half of it is for the prompts that are nearest to their goal, so that a short one is
answered at once beside long ones; the other half, and what the first leaves over, is for the oldest, so that a long one
is read however many short ones come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from deltic.types import PAGE

STEP = 2 * PAGE
"""Tokens that a step costs as much as, besides those that it reads: weights are read, rows laid out."""
_RECENT = 5
"""Steps whose median is the time of a prompt token: one that others disturbed does not count."""
_STALL = 0.05
"""Seconds of a step with prompts that readers of answers do not notice."""
_MARGIN = 0.9
"""Share of the longest stall that is aimed at: times scatter."""


def share(budget: int, pending: Sequence[int], goals: Sequence[int]) -> list[int]:
    """How many of a step's tokens each prompt gets, for prompts in order of age, oldest first.

    pending: tokens that each has still to read, at least 1. goals: how many of them until something comes of it: its
    first token, or a state that others wait for. All that can be given is given: the sum is the lesser of the budget
    and what is pending.

    The oldest gets half of the budget, rounded up, if it can use it: a prompt before which, itself included, W tokens
    are pending is read after 2 W / budget steps at the latest, whatever comes after it. And a prompt reaches its goal
    after as many steps as half of the budget takes for its own goal and all that are nearer.
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


def hurry(counts: Sequence[int], goals: Sequence[int]) -> list[int]:
    """Of a step's shares those of the prompts that reach their goal in it, so that it is soon over; all, if none does.

    Meant for every other step at most: the others go on in the next.
    """
    near = [count if count >= goal else 0 for count, goal in zip(counts, goals, strict=True)]
    return near if any(near) else list(counts)


@dataclass(frozen=True, slots=True)
class Meeting:
    """A prompt that could wait until another one has read what they have in common.

    own: tokens that it would have to read if it began now.
    saved: those of them that it need not read if it waits.
    away: tokens that the other one still has to read to that point.
    others: tokens pending in all prompts that are being read, the other one's among them.
    alone: nobody else reads beside the other one.
    nearer: tokens pending in those that are nearer to their goal than `own`, which are read first.
    """

    own: int
    saved: int
    away: int
    others: int
    alone: bool
    nearer: int = 0

    def pays(self, budget: int) -> bool:
        """Whether all come out ahead. Counted in tokens that steps read until this prompt's first token: waiting may
        make them more, but by no more than it spares those that come after."""
        if self.saved < STEP:
            return False
        half = max(budget // 2, 1)
        steps = -(-self.away // (budget if self.alone else half))
        left = max(self.others - steps * budget, 0)
        waited = steps * (STEP + min(self.others, budget)) + _reading(budget, left, self.own - self.saved)
        return waited <= _reading(budget, self.others, self.own, self.nearer) + self.saved


def _reading(budget: int, others: int, own: int, nearer: int = 0) -> int:
    """Tokens that steps read until a prompt of `own` tokens is read beside others, some of them before it."""
    steps = 1 if others + own <= budget else -(-(own + nearer) // max(budget // 2, 1))
    return steps * (STEP + min(others + own, budget))


@dataclass(slots=True)
class Stall:
    """Keeps steps in which answers wait for prompts below a time: the prompts' share is scaled by how long it took
    lately, so that it needs no model of the machine. seconds: the longest step; None: no limit. least: prompt tokens
    of a step however long they take."""

    seconds: float | None
    least: int = PAGE
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def timed(self, tokens: int, seconds: float) -> None:
        """A step that read so many prompt tokens took so long, with all else in it."""
        if tokens:
            self.recent.append(seconds / tokens)

    def limit(self, budget: int) -> int:
        """Prompt tokens of a step in which answers wait for them: as few as may be as long as nothing is known."""
        if self.seconds is None:
            return budget
        wanted = int(_MARGIN * self.seconds / median(self.recent)) if self.recent else self.least
        return min(max(wanted, self.least), budget)


def stall_of(max_stall_ms: int | None, token_budget: int) -> Stall:
    """As the options say it. By default a step that is too long reads a quarter of the budget at least: much less, and
    most of its time would go into reading the weights."""
    if max_stall_ms is None:
        return Stall(_STALL, max(token_budget // 4, PAGE))
    return Stall(max_stall_ms / 1000)
