"""One answer in the making: the only mutable record that the scheduler, the sampler and the engine share."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from deltic.cache.handles import CacheSnapshot, PreemptedState, SequenceCache
from deltic.cache.offload.tiers import LoadRequest
from deltic.engine.repeats import Repeats
from deltic.params import (
    PAGE,
    Constraint,
    Embed,
    EngineRequest,
    Finish,
    ForcedTokens,
    Matcher,
    Picture,
    Positions,
    Prompt,
    SamplingParams,
    TokenLogprobs,
    Usage,
)
from deltic.spec_decode.draft_length import Acceptance


@dataclass(slots=True, eq=False)
class ForkPoint:
    """The end of a prompt, with its logits, that several choices continue. `waiting` choices have not forked it yet."""

    snapshot: CacheSnapshot
    waiting: int


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One choice of one request.

    tokens: ids of prompt and answer; those after `lease.done` are still to be processed. Until it first runs they are
        the request's own prompt, of which many that wait need no copies.
    keys: what prefixes are compared by, of text without a salt the tokens themselves.
    prompt_keys: those of the prompt as an array, of which parts are quickly compared; choices share it.
    cache: None while waiting.
    positions, offset, pictures: as in `Prompt`.
    first_unencoded_image: the first position that stands for a picture nobody has encoded yet; None: there is none.
    embeds: wanted is a vector, and no token.
    eos: ids that end the answer.
    limit: tokens at which it ends with reason "length".
    repeats: ends it so too, if it goes round in circles.
    guide: forces tokens on it.
    constraint: says which tokens may come.
    counts: occurrences of the answer's tokens.
    penalties: what the sampler knows of them.
    fork_point: where to fork from instead of processing the prompt.
    stable_prefixes: where following prompts are expected to part.
    wanted: prompt positions whose state is worth keeping.
    prefix_wait: up to which position it waits for another one to read.
    load: what the tiers bring for it.
    known: tokens that the tree knows of it, and as of which of the tree's changes.
    turn: the step since which it runs, or waits, without a break.
    rest: what it returns to, where it waits because its turn was over.
    arrived, admitted, last_token: when it came, when it first got a lease, and when it drew its last token, in seconds
        of time.perf_counter.
    logits [V]: those of the last token, if known.
    processing: what the request's logits processors make of them, where they are at work.
    mask: the tokens that may come next, where that is worked out before the step; mask_seconds: of a processor that
    each of the last ones took.
    draft_tokens: what may come next, to be verified in the next step.
    drafted, accepted: drafts so far, and those of them that were right.
    acceptance: what is known of them.
    group: what came together has one share of its client's places.
    client: who has one share of all.
    """

    request: EngineRequest
    choice: int
    sampling: SamplingParams
    seed: int
    eos: frozenset[int]
    limit: int
    tokens: list[int] | tuple[int, ...]
    matcher: Matcher | None = None
    guide: ForcedTokens | None = None
    constraint: Constraint | None = None
    repeats: Repeats | None = None
    cache: SequenceCache | None = None
    fork_point: ForkPoint | None = None
    prompt_keys: array[int] = field(default_factory=lambda: array("q"))
    stable_prefixes: tuple[int, ...] = ()
    wanted: tuple[int, ...] = ()
    prefix_wait: tuple[int, Sequence] | None = None
    load: LoadRequest | None = None
    known: tuple[int, int] = (0, -1)
    logits: Any = None
    processing: Any = None
    mask: Future[list[bytes | None]] | None = None
    mask_seconds: float = 0.0
    cached: int = 0
    turn: int = 0
    rest: PreemptedState | None = None
    arrived: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    last_token: float | None = None
    counts: Counter[int] = field(default_factory=Counter)
    penalties: Any = None
    finish: Finish | None = None
    draft_tokens: tuple[int, ...] = ()
    drafted: int = 0
    accepted: int = 0
    acceptance: Acceptance | None = None
    scores: list[TokenLogprobs] = field(default_factory=list)
    keys: list[int] | tuple[int, ...] | array[int] = field(init=False)
    positions: Positions | None = field(init=False, default=None)
    offset: int = field(init=False, default=0)
    pictures: tuple[Picture, ...] = field(init=False, default=())
    first_unencoded_image: int | None = field(init=False, default=None)
    embeds: bool = field(init=False)
    group: str = field(init=False)
    client: str = field(init=False)

    def __post_init__(self) -> None:
        prompt, salt = self.request.prompt, self.request.cache_salt
        own = bool(salt) or (isinstance(prompt, Prompt) and prompt.keys is not None)
        self.keys = self.prompt_keys if own else self.tokens
        self.embeds = isinstance(self.request.output, Embed)
        if isinstance(prompt, Prompt):
            self.positions, self.offset = prompt.positions, prompt.offset
            self.pictures = tuple(replace(each, digest=each.digest + salt) for each in prompt.pictures)
            self.first_unencoded_image = self.pictures[0].start if self.pictures else None
        self.group = self.request.group or self.request.id
        self.client = self.request.client or self.group

    def __repr__(self) -> str:
        """Without what was asked: what an error says may reach others."""
        return f"Sequence({self.request.id!r}, {self.choice})"

    @property
    def key_array(self) -> array[int]:
        """The keys as an array that nobody changes: the same one until there is an answer."""
        return self.prompt_keys if len(self.prompt_keys) == len(self.keys) else array("q", self.keys)

    @property
    def done(self) -> int:
        return self.cache.done if self.cache else 0

    @property
    def pending(self) -> int:
        """Tokens still to be processed before the next can be chosen."""
        return len(self.tokens) - self.done

    @property
    def readable(self) -> int:
        """Those of them that can be processed now."""
        return self.pending if self.first_unencoded_image is None else max(self.first_unencoded_image - self.done, 0)

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def forced_tokens(self) -> int | None:
        """The token that comes next whatever the model says, if there is one."""
        return self.guide.forced() if self.guide else None

    @property
    def usage(self) -> Usage:
        queued = (self.admitted or time.perf_counter()) - self.arrived
        return Usage(len(self.request.prompt), self.cached, self.generated, self.drafted, self.accepted,
                     queued_seconds=queued)

    @property
    def reading(self) -> bool:
        """Whether the prompt is still being processed for the first time."""
        return self.cache is not None and not self.generated and self.pending > 0

    @property
    def held(self) -> bool:
        """Whether what it waits for is still being read."""
        if self.prefix_wait is None:
            return False
        position, other = self.prefix_wait
        return other.cache is not None and other.cache.done < position

    @property
    def scoring(self) -> bool:
        """Whether probabilities of the prompt's tokens are wanted that are not known yet."""
        return (self.sampling.prompt_logprobs is not None and not self.choice
                and len(self.scores) < len(self.request.prompt) - 1)

    @property
    def report(self) -> tuple[TokenLogprobs, ...] | None:
        """Those that go out with the first event, if they are wanted."""
        wanted = self.sampling.prompt_logprobs is not None and not self.choice
        return tuple(self.scores) if wanted and not self.scoring and self.generated < 2 else None

    @property
    def answering(self) -> bool:
        """Whether the next step would do nothing but choose the next token, so that drafts of more are welcome."""
        return self.cache is not None and self.generated > 0 and self.pending == 1 and self.logits is None

    @property
    def awaits_mask(self) -> bool:
        """Whether it sits out steps until its mask is there."""
        return self.mask is not None and not self.mask.done()

    @property
    def needs_fork(self) -> bool:
        """Whether the request's other choices go on from here: its prompt has just been processed."""
        return self.sampling.n > 1 and not self.choice and not self.generated

    def own_keys(self) -> list[int]:
        """The keys, in a list that from now on is the sequence's own, as the tokens are."""
        if not isinstance(self.tokens, list):
            same, self.tokens = self.keys is self.tokens, list(self.tokens)
            self.keys = self.tokens if same else list(self.keys)
        assert isinstance(self.keys, list)
        return self.keys

    def rotary(self, start: int, count: int) -> Positions | int:
        """The rotary positions of `count` tokens from there on, or the offset, which makes them of their places."""
        if self.positions is None or start >= len(self.request.prompt):
            return self.offset
        end, after = start + count, max(len(self.request.prompt), start)
        first, second, third = ((*axis[start:end], *range(after + self.offset, end + self.offset))
                                for axis in self.positions)
        return first, second, third

    def start(self, lease: SequenceCache) -> None:
        """Run on this lease, which may hold the beginning of the tokens already."""
        self.cache, self.load, self.prefix_wait = lease, None, None
        self.first_unencoded_image = next(
            (picture.start for picture in self.pictures if picture.end > lease.done), None
        )
        if self.admitted is None:  # later it may find what it has read itself
            self.admitted = time.perf_counter()
            self.cached = lease.done
        self.logits = lease.logits if lease.done == len(self.tokens) else None
        lease.likely_resume.update(self.stable_prefixes)
        if lease.shared > lease.done + 2 * PAGE:
            # another prompt went on differently here: the third one shall not read this again
            self.wanted = tuple(sorted({*self.wanted, lease.shared}))
            lease.likely_resume.add(lease.shared)

    def append(self, token: int) -> Finish | None:
        """Take the token that was chosen; returns why the answer ends with it, if it does."""
        assert isinstance(self.tokens, list), "a token for a sequence that never ran"
        self.tokens.append(token)
        if self.keys is not self.tokens:
            assert isinstance(self.keys, list)
            self.keys.append(token)
        self.counts[token] += 1
        matched = self.matcher.push(token) if self.matcher else False
        circling = self.repeats.push(token) if self.repeats else False
        if self.guide:
            self.guide.push(token)
        if self.constraint:
            self.constraint.push(token)
        if token in self.eos or matched:
            self.finish = "stop"
        elif circling or len(self.tokens) >= self.limit:
            self.finish = "length"
        return self.finish
