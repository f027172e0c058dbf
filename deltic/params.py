"""Frozen values that cross package borders. No torch here."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from numbers import Integral, Real
from typing import Any, ClassVar, Final, Literal, Protocol

from deltic.errors import RequestError, show

PAGE = 16
"""Tokens of one K/V page."""
CHUNK = 64
"""Tokens that the chunked delta rule takes at once."""
RING = 16
"""Entries of a state delta log: tokens after the state in the sequence's slot."""
MAX_DRAFTS = 12
"""Tokens that may be drafted at once: with the token before them they fit a delta log, with room to spare."""

MOST_TOKENS = 1 << 31
"""The largest limit or count of tokens in a request."""

Finish = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Auto:
    """Speculate with the model's own draft head, if it has one; else as `Head` where that pays."""


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


@dataclass(frozen=True, slots=True)
class Head:
    """Draft up to so many tokens with the model itself and a part of the matrix of its logits."""

    tokens: int = 3


Speculation = Auto | Mtp | Ngram | Draft | Head | None
"""How tokens are drafted for the model to verify; None: not at all. Changes only the speed of answers."""

MAX_LOGIT_BIAS = 100
MAX_STOPS = 64
_FEW = 20
"""The most alternatives that logprobs report for each token."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """The declaration of a numeric sampling parameter, from which the APIs and the command line derive theirs.

    kind, optional: the type; optional parameters may be None. low, high: the range, both ends included.
    help: one line. metavar: of its command-line option; "": there is no option.
    shared: all APIs have the field by this name. aliases: names that other servers use for the field.
    """

    low: float
    high: float
    help: str
    metavar: str = ""
    shared: bool = False
    aliases: tuple[str, ...] = ()
    name: str = ""
    kind: type[int] | type[float] = float
    optional: bool = False

    def read(self, value: Any) -> Any:
        """Returns a number of any type (also numpy's) as Python's own. RequestError if it is wrong."""
        return None if value is None and self.optional else _number(self.name, value, self.low, self.high, self.kind)


def _parameter(default: float | None, low: float, high: float, help: str, *, metavar: str = "", shared: bool = False,
               aliases: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"": Parameter(low, high, help, metavar, shared, aliases)})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. `None`: as in the model's generation_config.json, otherwise neutral.

    The order is: penalties, logit_bias, temperature, top_k, top_p, min_p, then one draw.

    repetition_penalty: divides positive (multiplies negative) logits.
    logit_bias: added to the logit of a token id; -100 and below forbids it.
    seed: draws are a function of (seed, choice, position), so equal requests give equal answers; `None` draws a seed
        per request.
    stop: strings that end the answer and are not part of it; one may be given alone.
    stop_token_ids: ids that do the same. `None` is none, here and for stop and logit_bias.
    logprobs: 0 reports the chosen token only, None nothing.
    prompt_logprobs: of all tokens except the first; the whole prompt is then processed slowly, without the
        prefix cache.
    n: the prompt is processed once.
    max_repeat: the answer ends, with reason "length", when it ends in the same group of 1 to 128 tokens so many times
        in a row. Groups of fewer than 8 tokens must fill as many tokens as a group of 8 would, so that a line of dashes
        is no such end. `None`: as in the engine's options.
    """

    temperature: float | None = _parameter(
        None, 0, 100, "0 always takes the most probable token", metavar="T", shared=True)
    top_k: int | None = _parameter(
        None, 0, 1 << 31, "draw from the K most probable tokens; 0: from all", metavar="K", shared=True)
    top_p: float | None = _parameter(
        None, 0, 1, "draw from the most probable tokens that together reach P", metavar="P", shared=True)
    min_p: float | None = _parameter(
        None, 0, 1, "drop tokens less probable than P times the most probable one", metavar="P", shared=True)
    repetition_penalty: float | None = _parameter(
        None, 0.01, 100, "make tokens of prompt and answer less probable; 1 is neutral", metavar="X", shared=True,
        aliases=("repeat_penalty",))
    presence_penalty: float = _parameter(
        0.0, -2, 2, "subtract X from the logit of every token in the answer", metavar="X", shared=True)
    frequency_penalty: float = _parameter(
        0.0, -2, 2, "subtract X for each time that a token is in the answer", metavar="X", shared=True)
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = _parameter(
        None, -(1 << 63), (1 << 64) - 1, "make the draws repeatable", metavar="N", shared=True)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = _parameter(
        0, 0, MOST_TOKENS, "mask end-of-text tokens and stop ids until the answer has N tokens", shared=True,
        aliases=("min_new_tokens",))
    max_tokens: int | None = _parameter(
        None, 0, MOST_TOKENS, "maximum length of the answer (default: the rest of the context)", metavar="N",
        aliases=("n_predict", "num_predict", "max_new_tokens"))
    ignore_eos: bool = False
    logprobs: int | None = _parameter(None, 0, _FEW, "report the N most probable tokens of each position")
    prompt_logprobs: int | None = _parameter(None, 0, _FEW, "report the N most probable tokens at each prompt token")
    n: int = _parameter(1, 1, 128, "number of independent answers", aliases=("n_cmpl",))
    max_repeat: int | None = _parameter(
        None, 0, MOST_TOKENS, "end an answer that repeats its last tokens N times in a row; 0: never", shared=True)

    def __post_init__(self) -> None:
        for name, parameter in PARAMETERS.items():
            object.__setattr__(self, name, parameter.read(getattr(self, name)))
        if self.max_tokens == 0 and self.n > 1:
            raise RequestError("n needs max_tokens of at least 1", "n")
        if self.max_repeat == 1:
            raise RequestError("max_repeat must be 0 (off) or at least 2", "max_repeat")
        if type(self.ignore_eos) is not bool:
            raise RequestError(f"ignore_eos must be True or False, not {show(self.ignore_eos)}", "ignore_eos")
        object.__setattr__(self, "stop", _listed("stop", (self.stop,) if isinstance(self.stop, str) else self.stop))
        _check_stops(self.stop)
        object.__setattr__(self, "stop_token_ids", tuple(
            _number("stop_token_ids", token, 0, 1 << 31, int)
            for token in _listed("stop_token_ids", self.stop_token_ids)))
        biases = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(biases, Mapping):
            raise RequestError(f"logit_bias must map token ids to numbers, not {show(biases)}", "logit_bias")
        object.__setattr__(self, "logit_bias", {
            _number("logit_bias", token, 0, 1 << 31, int):
            _number("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, float) for token, bias in biases.items()})

    def with_defaults(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Fills every `None` for which `defaults` has a value."""
        missing = {f.name: defaults[f.name] for f in fields(self)
                   if getattr(self, f.name) is None and defaults.get(f.name) is not None}
        return replace(self, **missing) if missing else self


PARAMETERS: Final[Mapping[str, Parameter]] = {
    each.name: replace(each.metadata[""], name=each.name, kind=int if "int" in each.type else float,
                       optional="None" in each.type)
    for each in fields(SamplingParams) if each.metadata}
"""The numeric sampling parameters by name."""


def _number(name: str, value: Any, low: float, high: float, kind: type[int] | type[float]) -> Any:
    accepted: Any = Integral if kind is int else Real
    if isinstance(value, bool) or not isinstance(value, accepted):
        raise RequestError(f"{name} must be {'an integer' if kind is int else 'a number'}, not {show(value)}", name)
    if not low <= value <= high:  # integers are compared as such, however large
        raise RequestError(f"{name} must be between {low:,} and {high:,}, not {show(value)}", name)
    return int(value) if isinstance(value, Integral) else float(value)


def _listed(name: str, values: Any) -> tuple[Any, ...]:
    """Returns the values of an option that takes several."""
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
    """Decides, token by token, if an answer is over. One instance per choice; the engine knows no text."""

    def push(self, token: int, /) -> bool:
        """Takes the next token of the answer; True ends the answer with this token."""


class ForcedTokens(Protocol):
    """Puts tokens into an answer that the model did not choose. One instance per choice; the result must depend on the
    pushed tokens alone."""

    def forced(self) -> int | None:
        """Returns the next token, whatever the model prefers; None if the model chooses."""

    def push(self, token: int, /) -> None:
        """Takes the next token of the answer, forced or chosen."""


class Constraint(Protocol):
    """Restricts the next tokens of an answer, for example to a grammar. One instance per choice.

    Results must depend on the pushed tokens alone. `allowed` and `push` may be called in different threads, but never
    at the same time. An exception ends the request; raise RequestError if the request is to blame.
    """

    def fitting(self, drafts: Sequence[int], /) -> int:
        """Returns how many of these tokens, one after the other, are allowed."""

    def allowed(self, drafts: Sequence[int], /) -> list[bytes | None]:
        """Returns masks of the next token and of the one after each draft; the drafts are allowed. Bit t % 8 of byte t
        // 8 is token t; tokens past the end are forbidden. None: all are allowed."""

    def push(self, token: int, /) -> None:
        """Takes the next token of the answer."""


LogitsProcessor = Callable[[list[int], Any], Any]
"""Called with token ids and logits; returns other logits."""

Positions = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Rotary positions of tokens: temporal, height, width, equally many of each."""


@dataclass(frozen=True, slots=True)
class Picture:
    """Tokens of a prompt that stand for an image or video.

    start, count: its tokens. digest: hash of the whole content, in hex. content: input of the vision tower.
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
    """The input of a model. A prompt of text is ids alone.

    ids: looked up in the embedding table.
    keys: compare prefixes, one for each id: the id itself, or a negative number made of the content if the id does not
        identify it (`content_keys`). Prompts whose keys begin alike must begin alike in everything. None: the ids.
    positions: the tokens' rotary positions; None: their indices.
    offset: of the rotary positions after the prompt from the indices there.
    pictures: their embeddings replace those of their tokens, in order. The keys of these tokens must be negative.
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
            raise RequestError("the prompt has rotary positions of its own and no keys that identify them", "prompt")
        end = 0
        for picture in self.pictures:
            if not end <= picture.start < picture.end <= len(self.ids):
                raise RequestError("the prompt's pictures overlap, have no tokens, or lie outside of it", "prompt")
            if self.keys is None or max(self.keys[picture.start:picture.end]) >= 0:
                raise RequestError("the prompt has pictures without keys that identify them", "prompt")
            end = picture.end

    def __len__(self) -> int:
        return len(self.ids)


def content_keys(content: bytes, count: int) -> tuple[int, ...]:
    """Returns `Prompt.keys` of tokens that stand for this content, such as an image's size and pixels: all that they
    depend on besides what precedes them. Negative, so that no id is equal; 63 bits of a hash each, so that other
    content differs."""
    return tuple(-1 - (int.from_bytes(blake2b(content, digest_size=8, salt=index.to_bytes(8, "little")).digest()) >> 1)
                 for index in range(count))


@dataclass(frozen=True, slots=True)
class Embed:
    """Requests a vector: the hidden state of the prompt's last token after the model's final norm."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """The conversation that a request belongs to, so that what its branches keep is evicted before its own positions.

    name: of the conversation; "": unknown. parent: name of the one that it branches off, such as a sub-agent's main
    line. forks: the request is a branch of the conversation whose kept position it resumes at.
    """

    name: str = ""
    parent: str = ""
    forks: bool = False


class LoadedAdapter(Protocol):
    """An adapter (LoRA) of the model's weights. identity: a digest of its content."""

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> str: ...


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request to the engine: token ids in, token ids or a vector out.

    prompt: ids of text, or a `Prompt`.
    output: how the tokens of answers are chosen, or `Embed`, with which all fields about answers are ignored.
    stable_prefixes: prompt positions (counts of tokens) that later requests are expected to share.
    matcher: makes the stop-string matcher of one choice, or None; called once for each choice, in order. A matcher gets
        a token before `guide` does, and before the token's event is sent.
    guide: makes the `ForcedTokens` of one choice, or None; called like matcher.
    constraint: makes the `Constraint` of one choice, or None; called like matcher. Forced tokens ignore it. Tokens that
        end the answer (min_tokens, ignore_eos) are held back only if another one is allowed.
    speculate: allow drafts; the answer is the same.
    group: common to requests that came together.
    client: such as an address; "": each group is a client. Under load clients get equal shares, and so do a client's
        groups.
    cache_salt: requests share cached prefixes only with the same salt. It changes no token.
    logits_processors: called in order for each token to draw, with the tokens of prompt and answer and the model's
        logits [V], a float32 tensor on the host; return the logits to draw from, before penalties, bias and filters.
        They run in another thread while other requests go on; an exception ends the request. Nothing is drafted for
        such a request.
    lineage: the conversation that the request belongs to. It changes no token.
    adapter: computes the answer with this adapter. Requests with different adapters share no cached prefixes.
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
    lineage: Lineage = Lineage()
    adapter: LoadedAdapter | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """The prompt's token ids."""
        return self.prompt.ids if isinstance(self.prompt, Prompt) else self.prompt

    @property
    def key_salt(self) -> str:
        """What the keys of the prompt are salted with; "": nothing."""
        return f"{self.adapter.identity}\0{self.cache_salt}" if self.adapter else self.cache_salt

    @property
    def choices(self) -> int:
        """Number of requested answers."""
        return self.output.n if isinstance(self.output, SamplingParams) else 1


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of the answer's token, chosen or forced, and of the most probable ones, before filters
    and constraints. rank: of a prompt's token among the most probable ones, from 1."""

    token: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one choice: of the prompt, of it reused from the cache, and generated.

    drafted_tokens: drafts that speculation made.
    accepted_tokens: drafts that the model accepted, which are generated tokens. Depends on timing, so equal answers may
        differ in it.
    reasoning_tokens: generated tokens in think blocks; the engine, which knows no text, leaves it at 0.
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
        the last token of a stop string) is reported too.
    finish: set on the last event of the choice, together with `usage`; with finish "error", `error` is the reason.
    refused: the reason if it is the request's own fault.
    prompt: with the first event of the first choice, the result of `prompt_logprobs`: one entry per token after the
        first.
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
    """The one event of a request for a vector. A failed request ends with a `TokenEvent` without a token.

    vector: float32 [H], not normalised.
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
    """Returns how many tokens the state in a slot stands for after `chunk` tokens were appended to its delta log, which
    held those from `base` to `done`: unchanged if all fit; otherwise the entries before the chunk are flushed first."""
    return base if done + chunk - base <= RING else done


def common_length(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Returns the length of the common prefix of two sequences of one type. Fast if they differ early."""
    low, step, end = 0, 16, min(len(left), len(right))
    while low < end and left[low:low + step] == right[low:low + step]:
        low, step = low + step, 2 * step
    high = min(low + step, end)
    low = min(low, high)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[low:middle] == right[low:middle] else (low, middle - 1)
    return low
