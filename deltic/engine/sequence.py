"""One answer in the making: the only mutable record that the scheduler, the sampler and the engine share."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from deltic.cache.hybrid import Checkpoint, Lease
from deltic.types import Finish, Matcher, Request, SamplingParams, Usage


@dataclass(slots=True, eq=False)
class Origin:
    """The end of a prompt that several choices continue. `waiting` choices have not forked it yet."""

    checkpoint: Checkpoint
    waiting: int


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of one request.

    tokens: prompt and answer; those after `lease.done` are still to be processed. lease: None while waiting.
    eos: ids that end the answer. limit: tokens at which it ends with reason "length". counts: occurrences of the
    answer's tokens. origin: where to fork from instead of processing the prompt.
    """

    request: Request
    choice: int
    sampling: SamplingParams
    seed: int
    eos: frozenset[int]
    limit: int
    tokens: list[int]
    matcher: Matcher | None = None
    lease: Lease | None = None
    origin: Origin | None = None
    cached: int = 0
    counts: Counter[int] = field(default_factory=Counter)
    finish: Finish | None = None

    @property
    def done(self) -> int:
        return self.lease.done if self.lease else 0

    @property
    def pending(self) -> int:
        """Tokens still to be processed before the next can be chosen."""
        return len(self.tokens) - self.done

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def usage(self) -> Usage:
        return Usage(len(self.request.prompt), self.cached, self.generated)

    def append(self, token: int) -> Finish | None:
        """Take the token that was chosen; returns why the answer ends with it, if it does."""
        self.tokens.append(token)
        self.counts[token] += 1
        matched = self.matcher.push(token) if self.matcher else False
        if token in self.eos or matched:
            self.finish = "stop"
        elif len(self.tokens) >= self.limit:
            self.finish = "length"
        return self.finish
