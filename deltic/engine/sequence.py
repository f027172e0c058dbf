"""A sequence: the mutable record of one answer, with a small record for each owner of a part of it."""

from __future__ import annotations

import time
from array import array
from collections import Counter, defaultdict, deque
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from deltic.cache.handles import CacheSnapshot, PreemptedState, SequenceCache
from deltic.cache.lineage import Line
from deltic.cache.offload.tiers import LoadRequest
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

LONGEST = 128
"""Length in tokens of the longest group that is detected when it repeats."""
_SHORT = 8  # shorter groups must fill as many tokens: runs of dashes, spaces or zeros are legitimate


class Repeats:
    """Detects an answer that repeats the same group of 1 to LONGEST tokens at its end.

    times: number of repetitions in a row that is enough, at least 2. Groups of fewer than 8 tokens must fill as many
    tokens as a group of 8 would: a single token must occur 8 * times times. The cost of a token depends on how often it
    occurs among the last LONGEST tokens, not on the answer's length.
    """

    def __init__(self, times: int) -> None:
        # both by period: the number of last tokens in a row that equal the token one period before (if not 0), and the
        # number at which these tokens, with the period before the first of them, are enough
        self._equal: dict[int, int] = {}
        self._enough = [times * max(period, _SHORT) - period for period in range(LONGEST + 1)]
        # the last LONGEST tokens, and the positions of each
        self._last: deque[int] = deque()
        self._places: defaultdict[int, deque[int]] = defaultdict(deque)
        self._count = 0

    def push(self, token: int, /) -> bool:
        """Adds a token. Returns True if the answer now repeats itself."""
        before, enough, places, count = self._equal, self._enough, self._places[token], self._count
        equal = self._equal = {count - place: before.get(count - place, 0) + 1 for place in places}
        places.append(count)
        self._last.append(token)
        self._count += 1
        if len(self._last) > LONGEST:
            first = self._last.popleft()
            self._places[first].popleft()
            if not self._places[first]:
                del self._places[first]
        return any(number >= enough[period] for period, number in equal.items())


@dataclass(slots=True, eq=False)
class ForkPoint:
    """The end of a prompt, with its logits, that several choices continue. waiting: choices that have yet to fork."""

    snapshot: CacheSnapshot
    waiting: int


@dataclass(slots=True)
class QueueState:
    """Fields that the scheduler owns.

    fork_point: the prompt end that it forks, so that it need not process the prompt.
    prefix_wait: a position, and the running sequence that must reach it first.
    load: the request to load its prefix from the tiers.
    known: number of its tokens that the prefix tree has, and the tree's change count at that time.
    turn: the step at which it last began to run or to wait.
    rest: the state from which it resumes, if it was preempted at the end of its quantum.
    line: the conversation that it belongs to, once it has run.
    passed: True if others are admitted before it, because it waits for relatives.
    """

    fork_point: ForkPoint | None = None
    prefix_wait: tuple[int, Sequence] | None = None
    load: LoadRequest | None = None
    known: tuple[int, int] = (0, -1)
    turn: int = 0
    rest: PreemptedState | None = None
    line: Line | None = None
    passed: bool = False


@dataclass(slots=True)
class SamplerState:
    """Fields that the sampler owns.

    counts: number of occurrences of each token in the answer.
    penalties: kept penalties and biases of all tokens (`Penalties`).
    logits [V]: the logits of the last token, if known.
    processing: the request's logits processors while they change these logits (`Processing`).
    mask: the allowed next tokens, if they are computed before the step.
    mask_seconds: recent time per mask, in seconds.
    """

    counts: Counter[int] = field(default_factory=Counter)
    penalties: Any = None
    logits: Any = None
    processing: Any = None
    mask: Future[list[bytes | None]] | None = None
    mask_seconds: float = 0.0


@dataclass(slots=True)
class DraftState:
    """Fields that speculative decoding owns.

    tokens: drafts to verify in the next step.
    drafted, accepted: numbers of drafts so far, and of the right ones among them.
    acceptance: statistics for the draft length.
    """

    tokens: tuple[int, ...] = ()
    drafted: int = 0
    accepted: int = 0
    acceptance: Acceptance | None = None


@dataclass(slots=True)
class ImageState:
    """Fields that the image encoder owns.

    positions, offset, pictures: as in `Prompt`.
    first_unencoded: index of the first image token without an embedding.
    """

    positions: Positions | None = None
    offset: int = 0
    pictures: tuple[Picture, ...] = ()
    first_unencoded: int | None = None


@dataclass(slots=True)
class Times:
    """Points in time, in seconds of time.perf_counter. admitted: the time at which the sequence first ran."""

    arrived: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    last_token: float | None = None


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One choice of one request.

    tokens: ids of prompt and answer; the ids from index `cache.done` on are still to be processed. Until the sequence
        first runs, this is the request's own prompt, so that waiting sequences need no copies.
    eos: ids that end the answer.
    limit: number of tokens at which it ends with reason "length".
    repeats: ends it with reason "length" if the answer repeats itself.
    guide: forces the next tokens.
    constraint: restricts the next tokens.
    cache: None while waiting.
    prompt_keys: the prompt's keys as an array, so that parts compare quickly; choices share it.
    stable_prefixes: prompt lengths at which later prompts are expected to diverge.
    wanted: prompt positions that are worth a checkpoint.
    cached: number of prompt tokens that the cache had.
    scores: log probabilities of prompt tokens.
    keys: compared instead of tokens to find common prefixes; equal to the tokens for text without a salt.
    embeds: True if the request wants a vector and no tokens.
    group: the groups of a client share its places in the batch. client: the clients share all places.
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
    prompt_keys: array[int] = field(default_factory=lambda: array("q"))
    stable_prefixes: tuple[int, ...] = ()
    wanted: tuple[int, ...] = ()
    cached: int = 0
    finish: Finish | None = None
    scores: list[TokenLogprobs] = field(default_factory=list)
    queue: QueueState = field(default_factory=QueueState)
    sampler: SamplerState = field(default_factory=SamplerState)
    drafts: DraftState = field(default_factory=DraftState)
    images: ImageState = field(default_factory=ImageState)
    times: Times = field(default_factory=Times)
    keys: list[int] | tuple[int, ...] | array[int] = field(init=False)
    embeds: bool = field(init=False)
    group: str = field(init=False)
    client: str = field(init=False)

    def __post_init__(self) -> None:
        prompt, salt = self.request.prompt, self.request.key_salt
        own = bool(salt) or (isinstance(prompt, Prompt) and prompt.keys is not None)
        self.keys = self.prompt_keys if own else self.tokens
        self.embeds = isinstance(self.request.output, Embed)
        if isinstance(prompt, Prompt):
            pictures = tuple(replace(each, digest=each.digest + salt) for each in prompt.pictures)
            first = pictures[0].start if pictures else None
            self.images = ImageState(prompt.positions, prompt.offset, pictures, first)
        self.group = self.request.group or self.request.id
        self.client = self.request.client or self.group

    def __repr__(self) -> str:
        """Shows no content, because error messages may reach other clients."""
        return f"Sequence({self.request.id!r}, {self.choice})"

    @property
    def adapter(self) -> str:
        """The identity of the sequence's adapter; "" if it has none."""
        return self.request.adapter.identity if self.request.adapter else ""

    @property
    def key_array(self) -> array[int]:
        """The keys as an array, which must not be changed. It is `prompt_keys` itself until the answer begins."""
        return self.prompt_keys if len(self.prompt_keys) == len(self.keys) else array("q", self.keys)

    @property
    def done(self) -> int:
        return self.cache.done if self.cache else 0

    @property
    def pending(self) -> int:
        """Number of tokens to process before the next one can be sampled."""
        return len(self.tokens) - self.done

    @property
    def readable(self) -> int:
        """Number of pending tokens before the first image without embeddings."""
        return self.pending if self.images.first_unencoded is None else max(self.images.first_unencoded - self.done, 0)

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def forced_tokens(self) -> int | None:
        """The token that the guide forces next, if any."""
        return self.guide.forced() if self.guide else None

    @property
    def usage(self) -> Usage:
        queued = (self.times.admitted or time.perf_counter()) - self.times.arrived
        return Usage(len(self.request.prompt), self.cached, self.generated, self.drafts.drafted, self.drafts.accepted,
                     queued_seconds=queued)

    @property
    def reading(self) -> bool:
        """True while the prompt is processed for the first time."""
        return self.cache is not None and not self.generated and self.pending > 0

    @property
    def held(self) -> bool:
        """True while it waits for a prefix that another sequence has not processed yet."""
        if self.queue.prefix_wait is None:
            return False
        position, other = self.queue.prefix_wait
        return other.cache is not None and other.cache.done < position

    @property
    def scoring(self) -> bool:
        """True while log probabilities of prompt tokens are missing."""
        return (self.sampling.prompt_logprobs is not None and not self.choice
                and len(self.scores) < len(self.request.prompt) - 1)

    @property
    def report(self) -> tuple[TokenLogprobs, ...] | None:
        """The log probabilities of the prompt tokens, for the answer's first event."""
        wanted = self.sampling.prompt_logprobs is not None and not self.choice
        return tuple(self.scores) if wanted and not self.scoring and self.generated < 2 else None

    @property
    def answering(self) -> bool:
        """True if the next step only decodes, so that it may have drafts."""
        return self.cache is not None and self.generated > 0 and self.pending == 1 and self.sampler.logits is None

    @property
    def awaits_mask(self) -> bool:
        """True if it cannot run until its mask is computed."""
        return self.sampler.mask is not None and not self.sampler.mask.done()

    @property
    def needs_fork(self) -> bool:
        """True if the request's other choices fork from this sequence once its prompt has been processed."""
        return self.sampling.n > 1 and not self.choice and not self.generated

    def own_keys(self) -> list[int]:
        """Returns the keys as a list that the sequence owns. Copies tokens and keys at the first call."""
        if not isinstance(self.tokens, list):
            same, self.tokens = self.keys is self.tokens, list(self.tokens)
            self.keys = self.tokens if same else list(self.keys)
        assert isinstance(self.keys, list)
        return self.keys

    def rotary(self, start: int, count: int) -> Positions | int:
        """Returns the rotary positions of `count` tokens from `start` on, or their offset from the cache indices."""
        if self.images.positions is None or start >= len(self.request.prompt):
            return self.images.offset
        end, after = start + count, max(len(self.request.prompt), start)
        first, second, third = ((*axis[start:end], *range(after + self.images.offset, end + self.images.offset))
                                for axis in self.images.positions)
        return first, second, third

    def start(self, cache: SequenceCache) -> None:
        """Starts the sequence on this cache, which may already contain its first tokens."""
        self.cache, self.queue.load, self.queue.prefix_wait = cache, None, None
        self.images.first_unencoded = next(
            (picture.start for picture in self.images.pictures if picture.end > cache.done), None
        )
        if self.times.admitted is None:  # when it resumes, the cache may have its own tokens
            self.times.admitted = time.perf_counter()
            self.cached = cache.done
        self.sampler.logits = cache.logits if cache.done == len(self.tokens) else None
        cache.likely_resume.update(self.stable_prefixes)
        if cache.shared > cache.done + 2 * PAGE:
            # another prompt diverged here: keep a checkpoint for a third one
            self.wanted = tuple(sorted({*self.wanted, cache.shared}))
            cache.likely_resume.add(cache.shared)

    def append(self, token: int) -> Finish | None:
        """Appends a token. Returns the finish reason if the answer ends with it."""
        assert isinstance(self.tokens, list), "a token for a sequence that never ran"
        self.tokens.append(token)
        if self.keys is not self.tokens:
            assert isinstance(self.keys, list)
            self.keys.append(token)
        self.sampler.counts[token] += 1
        matched = self.matcher.push(token) if self.matcher else False
        repeating = self.repeats.push(token) if self.repeats else False
        if self.guide:
            self.guide.push(token)
        if self.constraint:
            self.constraint.push(token)
        if token in self.eos or matched:
            self.finish = "stop"
        elif repeating or len(self.tokens) >= self.limit:
            self.finish = "length"
        return self.finish
