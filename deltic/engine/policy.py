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

from deltic.params import PAGE

STEP = 2 * PAGE
"""Tokens that a step costs as much as, besides those that it reads: weights are read, rows laid out."""
_RECENT = 5
"""Steps whose median counts: one that others disturbed does not."""
_STALL = 0.03
"""Seconds of a step with prompts that readers of answers do not notice."""
_MARGIN = 0.9
"""Share of the longest step that is aimed at: times scatter."""
_BESIDE_ANSWERS, _ALONE = 4, 20
"""A step with prompts may always last this many times as long as a step without prompts. Each step reads the weights
again, which then takes at most a quarter of the time while an answer runs, and a twentieth while none does."""


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


def hurry(counts: Sequence[int], goals: Sequence[int], first: bool = False) -> list[int]:
    """Of a step's shares those of the prompts that reach their goal in it, so that it is soon over. If none does, and
    the step draws no answer's first token, all: no client waits for this step.

    Meant for every other step at most: the others go on in the next.
    """
    near = [count if count >= goal else 0 for count, goal in zip(counts, goals, strict=True)]
    return near if first or any(near) else list(counts)


@dataclass(frozen=True, slots=True)
class PrefixWait:
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
class StepTimes:
    """Limits the duration of a step with prompts: running answers and new requests wait until it ends. The limit is a
    number of prompt tokens, computed from the durations of the last steps.

    longest: upper bound in seconds while an answer runs; None: the default, which grows with the time that a step
    without prompts takes.
    """

    longest: float | None = None
    without: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Seconds of the last steps without prompt tokens."""
    by_token: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Seconds by prompt token of the last steps with at least a page of them."""

    def add(self, tokens: int, seconds: float) -> None:
        """Record the duration of a step in seconds and its prompt tokens."""
        if not tokens:
            self.without.append(seconds)
        elif tokens >= PAGE:
            self.by_token.append(seconds / tokens)

    def limit(self, budget: int, answers: bool) -> int:
        """Upper bound for the prompt tokens of a step. answers: the step also decodes."""
        if not self.by_token:
            wanted = budget // 4 if answers else budget
        else:
            wanted = int(_MARGIN * self._seconds(answers) / median(self.by_token))
        return min(max(wanted, PAGE), budget)

    def _seconds(self, answers: bool) -> float:
        if answers and self.longest is not None:
            return self.longest
        times = _BESIDE_ANSWERS if answers else _ALONE
        return max(_STALL, times * median(self.without) if self.without else 0)
