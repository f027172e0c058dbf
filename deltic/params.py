"""Frozen values that cross room borders. No torch here."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, Protocol

from deltic.errors import RequestError, show

PAGE = 16
"""Tokens of one K/V page."""
CHUNK = 64
"""Tokens that the chunked delta rule takes at once."""
RING = 16
"""Entries that a replay ring holds: what came after the state that lies in its sequence's slot."""
MAX_DRAFTS = 12
"""Tokens that may be drafted at once: with the token before them they fit a replay ring, with room to spare."""

MOST_TOKENS = 1 << 31
"""The largest limit or count of tokens that may be asked for."""

Finish = Literal["stop", "length", "abort", "error"]



@dataclass(frozen=True, slots=True)
class Auto:
    """Speculate with the model's own draft head, if it has one."""


@dataclass(frozen=True, slots=True)
class Mtp:
    """Draft up to so many tokens with the model's multi-token-prediction head."""

    tokens: int = 3


@dataclass(frozen=True, slots=True)
class Ngram:
    """Draft up to so many tokens that followed the last few tokens before, in the same prompt and answer."""

    tokens: int = 4


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft up to so many tokens with another, smaller model of the same vocabulary."""

    model: str
    tokens: int = 4


Speculation = Auto | Mtp | Ngram | Draft | None
"""How tokens are drafted that the model then verifies; None: not at all. Changes the speed of answers alone."""

_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_k": (0, 1 << 31),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "seed": (-(1 << 63), (1 << 64) - 1),
    "min_tokens": (0, MOST_TOKENS),
    "max_tokens": (0, MOST_TOKENS),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "n": (1, 128),
    "max_repeat": (0, MOST_TOKENS),
}
_INTEGERS = frozenset({"top_k", "seed", "min_tokens", "max_tokens", "logprobs", "prompt_logprobs", "n", "max_repeat"})
MAX_LOGIT_BIAS = 100
MAX_STOPS = 64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. `None` means: as the model's generation_config.json says, else neutral.

    temperature: 0 is greedy.
    top_k: 0 keeps all tokens. The order is: penalties, logit_bias, temperature, top_k, top_p, min_p, then one draw.
    repetition_penalty: divides positive (multiplies negative) logits of tokens seen in prompt or answer.
    presence_penalty, frequency_penalty: subtracted once, or per occurrence, for tokens of the answer (OpenAI).
    logit_bias: added to the logit of a token id; -100 and below forbids it.
    seed: draws are a function of (seed, choice, position), so equal requests give equal answers; `None` draws a seed
        per request.
    stop: strings that end the answer and are not part of it; one may be given alone.
    stop_token_ids: ids that do the same. `None` is none, here and for stop and logit_bias.
    min_tokens: end-of-text tokens and stop ids are masked until so many tokens exist.
    max_tokens: `None` is as many as the context holds.
    logprobs: number of most probable tokens to report per position (0: the chosen token only; None: nothing).
    prompt_logprobs: the same for the tokens of the prompt but the first; then all of it is processed, whatever of it
        is known, and slowly.
    n: independent answers; the prompt is processed once.
    max_repeat: an answer ends, with reason "length", when its end is the same group of 1 to 128 tokens so many times in
        a row; groups of fewer than 8 tokens must fill as many tokens as a group of 8 would, so that a line of dashes is
        no such end. 0: never, else at least 2; `None`: as the engine's options say.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    max_repeat: int | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            object.__setattr__(self, name, _number(name, getattr(self, name), low, high))
        if self.max_tokens == 0 and self.n > 1:
            raise RequestError("n needs max_tokens of at least 1", "n")
        if self.max_repeat == 1:
            raise RequestError("max_repeat must be at least 2, or 0 for off: everything is there once", "max_repeat")
        if type(self.ignore_eos) is not bool:
            raise RequestError(f"ignore_eos must be True or False, not {show(self.ignore_eos)}", "ignore_eos")
        object.__setattr__(self, "stop", _listed("stop", (self.stop,) if isinstance(self.stop, str) else self.stop))
        _check_stops(self.stop)
        object.__setattr__(self, "stop_token_ids", tuple(_number("stop_token_ids", token, 0, 1 << 31, integer=True)
                                                         for token in _listed("stop_token_ids", self.stop_token_ids)))
        if self.logit_bias is None:
            object.__setattr__(self, "logit_bias", {})
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias must map token ids to numbers, not {show(self.logit_bias)}", "logit_bias")
        object.__setattr__(self, "logit_bias", {
            _number("logit_bias", token, 0, 1 << 31, integer=True):
            _number("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS) for token, bias in self.logit_bias.items()})

    def with_defaults(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Fill every `None` that `defaults` has a value for."""
        missing = {f.name: defaults[f.name] for f in fields(self)
                   if getattr(self, f.name) is None and defaults.get(f.name) is not None}
        return replace(self, **missing) if missing else self


def _number(name: str, value: Any, low: float, high: float, integer: bool = False) -> Any:
    """The value, of whatever kind of number it is (numpy's, too), as Python's own; None where that is allowed."""
    if value is None and name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed",
                                  "max_tokens", "logprobs", "prompt_logprobs", "max_repeat"):
        return None
    whole = integer or name in _INTEGERS
    kind: Any = Integral if whole else Real
    if isinstance(value, bool) or not isinstance(value, kind):
        expected = "an integer" if whole else "a number"
        raise RequestError(f"{name} must be {expected}, not {show(value)}", name)
    if not low <= value <= high:  # integers are compared as such, however large
        raise RequestError(f"{name} must be between {low:,} and {high:,}, not {show(value)}", name)
    return int(value) if isinstance(value, Integral) else float(value)


def _listed(name: str, values: Any) -> tuple[Any, ...]:
    """The values of an option that takes several."""
    if values is None:
        return ()
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise RequestError(f"{name} must be a list, not {show(values)}", name)
    return tuple(values)


def _check_stops(stops: tuple[Any, ...]) -> None:
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop takes at most {MAX_STOPS} strings, not {len(stops)}", "stop")
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise RequestError(f"stop must be a non-empty string or a list of them, not {show(stop)}", "stop")


class Matcher(Protocol):
    """Decides, token by token, whether an answer is over. One instance per choice; the engine knows no text."""

    def push(self, token: int, /) -> bool:
        """Take the next token of the answer; True ends the answer with this token."""


class ForcedTokens(Protocol):
    """Puts tokens into an answer that the model did not choose. One instance per choice; what it forces must depend
    on the tokens that it was given alone."""

    def forced(self) -> int | None:
        """The token that comes next, whatever the model says; None if the model may choose."""

    def push(self, token: int, /) -> None:
        """Take the next token of the answer, forced or chosen."""


class Constraint(Protocol):
    """Says which tokens may come next in an answer, such as those with which it stays within a grammar. One instance
    per choice; what it says must depend on the tokens that it was given alone. It may be asked in another thread than
    it is given tokens in, never in two at once. What it raises ends its request; RequestError if that is to blame."""

    def fitting(self, drafts: Sequence[int], /) -> int:
        """How many of these tokens, one after the other, may come."""

    def allowed(self, drafts: Sequence[int], /) -> list[bytes | None]:
        """Which tokens may come next, and which after each of the drafts, which fit: bit t % 8 of byte t // 8 is token
        t, those past the end are forbidden. None: all."""

    def push(self, token: int, /) -> None:
        """Take the next token of the answer."""


LogitsProcessor = Callable[[list[int], Any], Any]
"""Called with token ids and logits; returns other logits."""

Positions = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Rotary positions of tokens: temporal, height, width, equally many of each."""


@dataclass(frozen=True, slots=True)
class Picture:
    """Tokens of a prompt that stand for something that is seen.

    start, count: its tokens. digest: of all that it is, in hex. content: what is encoded; only who encodes looks at it.
    """

    start: int
    count: int
    digest: str
    content: Any = field(compare=False)  # the digest says what it is

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a model reads before it answers. Of text there are only ids.

    ids: what the embedding table is asked for.
    keys: what prefixes are compared by, one for each id: the id itself, or, where an id does not say what is read
        there, a negative number made of what is (`content_keys`). Prompts whose keys begin alike must begin alike in
        everything. None: the ids.
    positions: the tokens' rotary positions; None: their places in the prompt.
    offset: by how much the rotary positions of what follows the prompt differ from the places there.
    pictures: whose rows stand in for embeddings of their tokens, in order. Of these the keys must be negative.
    """

    ids: tuple[int, ...]
    keys: tuple[int, ...] | None = None
    positions: Positions | None = None
    offset: int = 0
    pictures: tuple[Picture, ...] = ()

    def __post_init__(self) -> None:
        if any(len(each) != len(self.ids) for each in (self.keys or self.ids, *(self.positions or ()))):
            raise RequestError("the prompt has more or fewer keys or positions than ids", "prompt")
        if self.keys is None and (self.positions or self.offset):
            raise RequestError("the prompt has rotary positions of its own and no keys that tell of them", "prompt")
        end = 0
        for picture in self.pictures:
            if not end <= picture.start < picture.end <= len(self.ids):
                raise RequestError("the prompt's pictures overlap, have no tokens, or lie outside of it", "prompt")
            if self.keys is None or max(self.keys[picture.start:picture.end]) >= 0:
                raise RequestError("the prompt has pictures without keys that tell of them", "prompt")
            end = picture.end

    def __len__(self) -> int:
        return len(self.ids)


def content_keys(content: bytes, count: int) -> tuple[int, ...]:
    """`Prompt.keys` of the tokens that stand for this content, such as a picture's size and pixels: all that they
    depend on besides what comes before them. Negative, so that no id is equal, and 63 bits of a hash each, so that no
    other content's is."""
    return tuple(-1 - (int.from_bytes(blake2b(content, digest_size=8, salt=index.to_bytes(8, "little")).digest()) >> 1)
                 for index in range(count))


@dataclass(frozen=True, slots=True)
class Embed:
    """Wanted is a vector: the hidden state of the prompt's last token after the model's final norm."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What the engine is asked: token ids in, token ids or a vector out.

    prompt: ids of text, or all that is to be said of other prompts.
    output: how the tokens of answers are chosen, or that a vector is wanted; then all that is said of answers below is
        of no matter.
    stable_prefixes: prompt positions (counts of tokens) that following requests are expected to share.
    matcher: makes the stop-string matcher of one choice, or None; called once for each choice, in their order. A
        matcher has a token before the guide does, and before the token's event goes out.
    guide: makes what forces tokens on one choice, or None; called as the matcher is.
    constraint: makes what says which tokens may come in one choice, or None; called as the matcher is. Tokens that a
        guide forces come nevertheless. Tokens that end the answer (min_tokens, ignore_eos) are held back only where
        another one may come.
    speculate: whether tokens may be drafted for this request; the answer is the same.
    group: requests that came together name the same.
    client: who asks, such as an address; "": each group is one of its own. Where places are short clients have equal
        parts, and of a client's part its groups.
    cache_salt: requests share cached prefixes only if they have the same salt. It does not change any token.
    logits_processors: are called one after another, for each token that is to be drawn, with the tokens of prompt and
        answer and the model's logits [V], a float32 tensor of the host, and return those to draw from, to which
        penalties, bias and filters are applied. They run in another thread while other requests go on; what one raises
        ends its request. Nothing is drafted for such a request.
    """

    id: str
    prompt: tuple[int, ...] | Prompt
    output: SamplingParams | Embed = SamplingParams()
    stable_prefixes: tuple[int, ...] = ()
    matcher: Callable[[], Matcher] | None = None
    speculate: bool = True
    guide: Callable[[], ForcedTokens] | None = None
    constraint: Callable[[], Constraint] | None = None
    group: str = ""
    client: str = ""
    cache_salt: str = ""
    logits_processors: tuple[LogitsProcessor, ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        """The prompt's token ids."""
        return self.prompt.ids if isinstance(self.prompt, Prompt) else self.prompt

    @property
    def choices(self) -> int:
        """How many answers are asked for."""
        return self.output.n if isinstance(self.output, SamplingParams) else 1


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probability that the model gave to the token of the answer, chosen or forced, and to the most
    probable ones, before the draw's filters and whatever a constraint allows. Also of tokens of a prompt; rank: of
    these, the token's place among the most probable ones, from 1."""

    token: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one choice: prompt, of those reused from the cache, and generated.

    drafted_tokens: drafts that speculation made.
    accepted_tokens: those that the model accepted, all of them generated tokens. How many depends on the time that
        steps took, so equal answers may differ in them.
    reasoning_tokens: of those generated, what lies in think blocks; the engine, which knows no text, leaves it at 0.
    queued_seconds: from the request's arrival to its first place in the batch.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    drafted_tokens: int = field(default=0, compare=False)
    accepted_tokens: int = field(default=0, compare=False)
    reasoning_tokens: int = field(default=0, compare=False)
    queued_seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One event of one choice of one request.

    token: the new token, or None if the event only ends the choice. A token that ends the answer (end of text, stop id,
        the last token of a stop string) is still reported.
    finish: set on the last event of the choice, together with `usage`; `error` says why if finish is "error".
    refused: the same, where it is the request's own fault.
    prompt: with the first event of the first choice, what `prompt_logprobs` asks for: one per token after the first.
    """

    request: str
    choice: int
    token: int | None
    logprobs: TokenLogprobs | None = None
    finish: Finish | None = None
    usage: Usage | None = None
    error: str | None = None
    prompt: tuple[TokenLogprobs, ...] | None = None
    refused: RequestError | None = None


@dataclass(frozen=True, slots=True)
class VectorEvent:
    """The one event of a request for a vector, unless it ends as others do, with a `TokenEvent` that has no token.

    vector: float32 [H], of whatever length.
    """

    request: str
    vector: array[float]
    usage: Usage
    choice: ClassVar[int] = 0
    finish: ClassVar[Finish] = "stop"
    token: ClassVar[None] = None
    error: ClassVar[None] = None
    refused: ClassVar[None] = None
    logprobs: ClassVar[None] = None
    prompt: ClassVar[None] = None


Event = TokenEvent | VectorEvent


def ring_base(base: int, done: int, chunk: int) -> int:
    """How many tokens the state in a slot stands for after `chunk` tokens were appended to its replay ring, which held
    those from `base` to `done`: they stay if all fit; else those before the chunk are folded into the state first."""
    return base if done + chunk - base <= RING else done


def common_length(left: Sequence[Any], right: Sequence[Any]) -> int:
    """How many items two sequences of one type begin with in common. Strangers are told apart at once."""
    low, step, end = 0, 16, min(len(left), len(right))
    while low < end and left[low:low + step] == right[low:low + step]:
        low, step = low + step, 2 * step
    high = min(low + step, end)
    low = min(low, high)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[low:middle] == right[low:middle] else (low, middle - 1)
    return low
