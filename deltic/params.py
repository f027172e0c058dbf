"""Defines the frozen records that cross package borders. Does not import torch."""

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
"""Tokens per chunk of the chunked delta rule."""
RING = 16
"""Entries of a state delta log, one for each token after the state in the sequence's slot."""
MAX_DRAFTS = 12
"""Maximum number of tokens drafted at once. With the token before them they fit a delta log, with room to spare."""

MOST_TOKENS = 1 << 31
"""The largest limit or count of tokens in a request."""

Finish = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Auto:
    """Speculates with the model's own draft head if it has one, else like `Head` where that is faster."""


@dataclass(frozen=True, slots=True)
class Mtp:
    """Drafts up to `tokens` tokens with the model's multi-token-prediction head."""

    tokens: int = 3


@dataclass(frozen=True, slots=True)
class Ngram:
    """Drafts up to `tokens` tokens that followed an earlier occurrence of the last few in prompt or answer."""

    tokens: int = 4


@dataclass(frozen=True, slots=True)
class Draft:
    """Drafts up to `tokens` tokens with a smaller model that has the same vocabulary."""

    model: str
    tokens: int = 4


@dataclass(frozen=True, slots=True)
class Head:
    """Drafts up to `tokens` tokens with the model itself and some rows of its logits matrix."""

    tokens: int = 3


Speculation = Auto | Mtp | Ngram | Draft | Head | None
"""How tokens are drafted for the model to verify; None disables speculation. It changes only the speed of answers."""

MAX_LOGIT_BIAS = 100
MAX_STOPS = 64
_FEW = 20
"""Maximum number of alternatives that logprobs report for each token."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """Declares a numeric sampling parameter; the APIs and the command line derive their fields and options from it.

    kind, optional: the type; optional parameters may be None. low, high: the range, inclusive.
    help: one line. metavar: placeholder in the help of its command-line option; "": there is no option.
    shared: all APIs have a field with this name. aliases: names that other servers use for the field.
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
        """Converts a number of any type, including numpy's, to int or float. Raises RequestError if it is invalid."""
        return None if value is None and self.optional else _number(self.name, value, self.low, self.high, self.kind)


def _parameter(default: float | None, low: float, high: float, help: str, *, metavar: str = "", shared: bool = False,
               aliases: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"": Parameter(low, high, help, metavar, shared, aliases)})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are sampled. `None` takes the value of the model's generation_config.json, or else the neutral value.

    The order is: penalties, logit_bias, temperature, top_k, top_p, min_p, then one draw.

    repetition_penalty: divides positive (multiplies negative) logits.
    logit_bias: maps token ids to numbers that are added to their logits; -100 forbids the token.
    seed: draws are a function of (seed, choice, position), so equal requests give equal answers; `None` draws a seed
        per request.
    stop: strings that end the answer and are excluded from it; a single string is allowed.
    stop_token_ids: ids that end the answer in the same way. For this field, stop and logit_bias, `None` is empty.
    logprobs: 0 reports only the chosen token, None reports nothing.
    prompt_logprobs: for all prompt tokens except the first. The whole prompt is then computed, slowly and without the
        prefix cache.
    n: number of answers; the prompt is processed once.
    max_repeat: end the answer, with reason "length", when it ends with the same 1 to 128 tokens so many times in a row.
        Groups of fewer than 8 tokens must fill as many tokens as a group of 8 would, so that a line of dashes does not
        end the answer. `None`: as in the engine's options.
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
        """Returns a copy in which each `None` is replaced by the value in `defaults`, if it has one."""
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
    if not low <= value <= high:  # integers of any size are compared exactly
        raise RequestError(f"{name} must be between {low:,} and {high:,}, not {show(value)}", name)
    return int(value) if isinstance(value, Integral) else float(value)


def _listed(name: str, values: Any) -> tuple[Any, ...]:
    """Returns the values of a list-valued option as a tuple. Raises RequestError if it is no list."""
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
    """Decides after each token if the answer ends. One instance per choice. The engine itself does not handle text."""

    def push(self, token: int, /) -> bool:
        """Takes the next token of the answer. Returns True if the answer ends with this token."""


class ForcedTokens(Protocol):
    """Forces tokens of an answer, in place of the model's choice. One instance per choice. Results must depend only on
    the pushed tokens."""

    def forced(self) -> int | None:
        """Returns the forced next token, or None if the model chooses."""

    def push(self, token: int, /) -> None:
        """Takes the next token of the answer, forced or chosen."""


class Constraint(Protocol):
    """Restricts the next tokens of an answer, for example to a grammar. One instance per choice.

    Results must depend only on the pushed tokens. `allowed` and `push` may be called from different threads, but never
    at the same time. An exception ends the request; raise RequestError if the request itself is at fault.
    """

    def fitting(self, drafts: Sequence[int], /) -> int:
        """Returns the length of the longest prefix of `drafts` that is allowed."""

    def allowed(self, drafts: Sequence[int], /) -> list[bytes | None]:
        """Returns the mask for the next token and for the token after each draft; the drafts themselves are allowed.
        Bit t % 8 of byte t // 8 is token t; tokens past the end are forbidden. None allows all tokens."""

    def push(self, token: int, /) -> None:
        """Takes the next token of the answer."""


LogitsProcessor = Callable[[list[int], Any], Any]
"""Called with token ids and logits; returns the new logits."""

Positions = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Rotary positions of tokens: temporal, height and width axis, all of one length."""


@dataclass(frozen=True, slots=True)
class Picture:
    """The tokens of a prompt that stand for one image or video.

    start, count: the range of tokens. digest: hash of the whole content, in hex. content: input of the vision tower.
    """

    start: int
    count: int
    digest: str
    content: Any = field(compare=False)  # the digest identifies it

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Prompt:
    """The input of a model. A text prompt needs only ids.

    ids: token ids, looked up in the embedding table.
    keys: one number per id, by which prefixes are compared: the id, or a negative hash of the content where the id does
        not identify it (`content_keys`). Equal prefixes of keys must mean equal inputs. None: the ids.
    positions: the tokens' rotary positions; None: their indices.
    offset: rotary position minus index for tokens after the prompt.
    pictures: images in order. Their embeddings replace those of their tokens, whose keys must be negative.
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
    """Returns `Prompt.keys` for `count` tokens that stand for content, such as an image's size and pixels. `content`
    must hold everything that these tokens depend on, besides the tokens before them. Keys are negative to differ from
    all ids, and have 63 bits of a hash to differ from keys of other content."""
    return tuple(-1 - (int.from_bytes(blake2b(content, digest_size=8, salt=index.to_bytes(8, "little")).digest()) >> 1)
                 for index in range(count))


@dataclass(frozen=True, slots=True)
class Embed:
    """Requests a vector: the hidden state of the prompt's last token after the model's final norm."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """The conversation of a request. The cache evicts positions of a conversation's branches before its own positions.

    name: name of the conversation; "": unknown. parent: name of the conversation that it branches off, e.g. a
    sub-agent's main line. forks: the request is a branch of the conversation at whose kept position it resumes.
    """

    name: str = ""
    parent: str = ""
    forks: bool = False


class LoadedAdapter(Protocol):
    """A LoRA adapter for the model's weights. identity: a digest of its content."""

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> str: ...


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request to the engine: token ids in, token ids or a vector out.

    prompt: token ids of text, or a `Prompt`.
    output: how answer tokens are sampled, or `Embed`; with `Embed` all fields about answers are ignored.
    stable_prefixes: lengths of prompt prefixes, in tokens, that later requests are expected to share.
    matcher: creates the stop-string matcher of one choice, or None; called once for each choice, in order. A matcher
        gets a token before `guide` does, and before the token's event is sent.
    guide: creates the `ForcedTokens` of one choice, or None; called like matcher.
    constraint: creates the `Constraint` of one choice, or None; called like matcher. It does not apply to forced
        tokens. min_tokens and ignore_eos mask tokens that end the answer only if another token is allowed.
    speculate: allow drafts; the answer is the same.
    group: a name shared by requests that arrived together.
    client: name of the client, e.g. an address; "": each group is a client. Under load, clients get equal shares, and
        so do the groups of a client.
    cache_salt: requests share cached prefixes only if their salts are equal. It changes no token.
    logits_processors: called in order for each token to draw, with the tokens of prompt and answer and the model's
        logits [V], a float32 tensor on the host. They return the logits to draw from, before penalties, bias and
        filters, and run in another thread while other requests proceed. An exception ends the request. Such a request
        has no drafts.
    lineage: the conversation that the request belongs to. It changes no token.
    adapter: the adapter that computes the answer. Requests with different adapters share no cached prefixes.
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
        """The salt of the prompt's keys; "": not salted."""
        return f"{self.adapter.identity}\0{self.cache_salt}" if self.adapter else self.cache_salt

    @property
    def choices(self) -> int:
        """Number of requested answers."""
        return self.output.n if isinstance(self.output, SamplingParams) else 1


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of a token, chosen or forced, and of the most probable tokens, before filters and
    constraints. rank: position of a prompt token in the order of probability, from 1."""

    token: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one choice. cached_tokens: of the prompt, reused from the cache. completion_tokens: generated.

    drafted_tokens: number of drafts that were proposed.
    accepted_tokens: drafts that the model accepted; completion_tokens includes them. Depends on timing, so equal
        answers may differ in it.
    reasoning_tokens: generated tokens in think blocks; the engine leaves it at 0, as it does not handle text.
    queued_seconds: time from the request's arrival until it first runs in a batch.
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
    refused: the error, if the request itself is at fault.
    prompt: the result of `prompt_logprobs`, one entry per prompt token after the first; only on the first event of the
        first choice.
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
    """The only event of an `Embed` request. A failed request ends with a `TokenEvent` without a token instead.

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
    """Returns the number of tokens in a slot's state after `chunk` tokens were appended to its delta log, which held
    entries `base` to `done`. It stays `base` if all entries fit; otherwise the old entries are flushed first."""
    return base if done + chunk - base <= RING else done


def common_length(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Returns the length of the common prefix of two sequences of the same type. Fast if they differ early."""
    low, step, end = 0, 16, min(len(left), len(right))
    while low < end and left[low:low + step] == right[low:low + step]:
        low, step = low + step, 2 * step
    high = min(low + step, end)
    low = min(low, high)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[low:middle] == right[low:middle] else (low, middle - 1)
    return low
