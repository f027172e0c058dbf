"""Structured output: converts the output format of a request to masks of the allowed next tokens.

Uses llguidance, which is loaded on first use.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from deltic.chat.json_schema import Bounds, fitted, keywords_of, loosened
from deltic.chat.markers import THINK, THINK_END
from deltic.chat.output_router import AnswerText
from deltic.chat.response_format import ChoiceFormat, GrammarText, JsonSchema, OutputFormat, Regex
from deltic.chat.tokenizer import Tokenizer
from deltic.chat.tools import PARSERS
from deltic.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_MAX_CACHED = 64
_MAX_GRAMMAR_CHARS = 1 << 20
_TOKEN_SECONDS = 0.01
"""Seconds of processor time per token. Usual grammars take 0.5 ms on average, and 6 ms at most."""
_SPARE_SECONDS = 1.0
"""Seconds of processor time that one answer may take in addition. Ambiguous grammars get slower with every token, and
delay the whole batch."""
_WHITESPACE = r" |\r?\n[ \t]{0,40}"
"""White space in JSON. It is limited because small models otherwise write it without end."""
STRICT: dict[str, Any] = {"whitespace_pattern": _WHITESPACE, "lenient": False, "coerce_one_of": False}
LENIENT = STRICT | {"lenient": True, "coerce_one_of": True}
_COMPACT = {"whitespace_pattern": None, "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_OPTIONS = "x-guidance"

Part = dict[str, Any]
"""A grammar in llguidance's format. The first of several is the start; the others have names."""


class Schemas:
    """Converts JSON schemas for a grammar.

    bounds: limits for schemas that set none. loose: leaves out keywords that llguidance refuses, if a schema is not
    strict. ignored: the keywords that were left out. used: the converted schemas with their fields.
    """

    def __init__(self, bounds: Bounds | None = None, loose: bool = False) -> None:
        self.ignored, self.used = set[str](), list[tuple[str, Part]]()
        self._bounds, self._loose = bounds, loose

    def fit(self, wanted: JsonSchema) -> dict[str, Any]:
        """Returns the schema in a form that llguidance accepts."""
        schema = fitted(wanted.schema)
        if self._loose and not wanted.strict:
            schema, left_out = loosened(schema, lambda tried: objection({**tried, _OPTIONS: LENIENT}))
            self.ignored |= left_out
        return schema if self._bounds is None else self._bounds.on(schema)

    def part(self, schema: Mapping[str, Any], strict: bool, field: str) -> Part:
        """Returns a fitted schema with llguidance's options."""
        part = {**schema, _OPTIONS: (STRICT if strict else LENIENT) | (_COMPACT if self._bounds else {})}
        self.used.append((field, part))
        return part


def objection(part: Mapping[str, Any]) -> str:
    """Returns llguidance's error for a schema, or "" if the schema is valid."""
    from llguidance import LLMatcher

    reason: str = LLMatcher.validate_grammar(json.dumps({"grammars": [{"json_schema": part}]}), None)
    return _first_line(reason) if reason else ""


Source = Callable[["GrammarVocabulary", Schemas], list[Part]]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar. field: of the request. ignored: keywords of its schemas that are not enforced."""

    vocabulary: GrammarVocabulary
    prototype: LLMatcher
    field: str = ""
    ignored: tuple[str, ...] = ()

    def matcher(self) -> LLMatcher:
        return self.prototype.deep_copy()


class GrammarVocabulary:
    """The tokens of a model in llguidance's view. Added tokens, such as think tags, match by name only."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.ends = tokenizer, frozenset(tokenizer.ends)
        self.think, self.think_end = (tokenizer.added.get(tag) for tag in (THINK, THINK_END))
        calls = (tag for form in PARSERS.values() if form for tag in form.openings)
        self.not_thinking = self.ends.union(tokenizer.added[tag] for tag in calls if tag in tokenizer.added)
        if not self.ends:
            raise RequestError("the model has no token that ends an answer, which formats need: leave the format out")

    @cached_property
    def compiled(self) -> LLTokenizer:
        """The vocabulary for llguidance. Building it is slow for large vocabularies and holds the GIL."""
        from llguidance import LLTokenizer
        from llguidance._tokenizer import TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_Tokens(self._tokenizer, self)), eos_token=sorted(self.ends))

    @cached_property
    def unfinished(self) -> bytes:
        """The mask of all tokens except those that end an answer or begin a call."""
        mask = bytearray(b"\xff" * -(-self._tokenizer.vocab_size // 8))
        for token in self.not_thinking:
            mask[token >> 3] &= ~(1 << (token & 7))
        return bytes(mask)

    @cached_property
    def tags(self) -> dict[str, str]:
        """The names of added tokens in a grammar."""
        return {text: f"<[{id}]>" for text, id in self._tokenizer.added.items()}


def with_token(mask: bytes, token: int) -> bytes:
    """Returns the mask with this token's bit set."""
    changed = bytearray(mask.ljust((token >> 3) + 1, b"\0"))
    changed[token >> 3] |= 1 << (token & 7)
    return bytes(changed)


class _Tokens:
    """The tokenizer interface of llguidance."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: GrammarVocabulary) -> None:
        self._encode = tokenizer.encode
        self.tokens = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
        self.eos_token_id, self.bos_token_id = min(vocabulary.ends), tokenizer.bos_id
        self.special_token_ids = sorted(tokenizer.added.values())

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode(), parse_special=False)


@dataclass(slots=True, eq=False)
class PendingGrammar:
    """A grammar that a request needs. Compiling may be slow, so a server compiles it in a thread before it submits the
    request to the engine."""

    _compile: Callable[[], Grammar]
    _compiled: Grammar | None = None

    def compile(self) -> None:
        """Compiles the grammar. Raises RequestError if it is refused or takes too long."""
        self._compiled = self._compile()

    @property
    def grammar(self) -> Grammar:
        if self._compiled is None:
            raise RuntimeError("the grammar of this request has not been compiled")
        return self._compiled


class Grammars:
    """Compiles grammars and caches them. Thread-safe.

    seconds: limit of processor time for one grammar. bounds: limits for JSON schemas that set none.
    """

    def __init__(self, tokenizer: Tokenizer, seconds: float = 5.0) -> None:
        self._tokenizer, self._seconds = tokenizer, seconds
        self.bounds: Bounds | None = None
        self._known: OrderedDict[bytes, Future[Grammar]] = OrderedDict()
        self._lock = threading.Lock()

    @cached_property
    def vocabulary(self) -> GrammarVocabulary:
        return GrammarVocabulary(self._tokenizer)

    def warm(self) -> None:
        """Builds the vocabulary in advance."""
        with self._lock:
            _ = self.vocabulary.compiled

    def of(self, wanted: OutputFormat) -> PendingGrammar:
        """Returns the grammar of a format. Raises RequestError that names the format's field."""
        return self.grammar(lambda _, schemas: [part_of(wanted, schemas)], wanted.field)

    def grammar(self, source: Source, field: str) -> PendingGrammar:
        """Returns the grammar of a source. Raises RequestError that names the field."""
        try:
            import llguidance  # noqa: F401
        except ImportError as error:
            raise RequestError(f"{field} needs the package llguidance, which cannot be loaded ({error}): pip install "
                               "llguidance", field) from error
        schemas = Schemas(self.bounds)
        text = json.dumps({"grammars": source(self.vocabulary, schemas)})
        if len(text) > _MAX_GRAMMAR_CHARS:
            raise RequestError(f"{field} is larger than {_MAX_GRAMMAR_CHARS >> 20} MiB as a grammar: make it smaller",
                               field)
        return PendingGrammar(partial(self._of_field, text, partial(self._compile, source, schemas, text), field))

    def _of_field(self, text: str, compile: Callable[[], Grammar], field: str) -> Grammar:
        self.warm()
        try:
            return replace(self._compiled(text, compile), field=field)
        except _SlowGrammar as error:
            raise RequestError(f"{field} takes {error.args[0]:.3g} seconds of a processor to compile, and may take "
                               f"{self._seconds:g} (schema_seconds): simplify it", field) from None
        except _BadGrammar as error:
            field = error.field or field
            raise RequestError(f"{field} cannot be enforced: {error}", field) from None

    def _compile(self, source: Source, schemas: Schemas, text: str) -> Grammar:
        """Compiles a grammar, with looser schemas if llguidance refuses it."""
        try:
            return _compile(self.vocabulary, text, schemas.ignored)
        except _BadGrammar as error:
            refusal = str(error)
        loose = Schemas(self.bounds, loose=True)
        again = json.dumps({"grammars": source(self.vocabulary, loose)})
        if again != text:
            try:
                return _compile(self.vocabulary, again, loose.ignored)
            except _BadGrammar as error:
                schemas, refusal = loose, str(error)
        wrong = ((reason, field) for field, part in schemas.used if (reason := objection(part)))
        raise _BadGrammar(*next(wrong, (refusal, "")))

    def _compiled(self, text: str, compile: Callable[[], Grammar]) -> Grammar:
        """Compiles a grammar, or waits for a thread that is compiling it. Errors are cached as well."""
        key = blake2b(text.encode(), digest_size=16).digest()
        with self._lock:
            known = self._known.pop(key, None)
            future = self._known[key] = known or Future()
            while len(self._known) > _MAX_CACHED:
                self._known.popitem(last=False)
        if known is None:
            began = time.thread_time()
            try:
                grammar = compile()
                if (seconds := time.thread_time() - began) > self._seconds:
                    raise _SlowGrammar(seconds)
                future.set_result(grammar)
            except BaseException as error:
                future.set_exception(error)
        return future.result()


class _SlowGrammar(Exception):
    """Raised if compiling was slow. The argument is the processor time in seconds."""


class _BadGrammar(ValueError):
    """Raised for an invalid grammar. field: the request field with the grammar, if known."""

    def __init__(self, reason: str, field: str = "") -> None:
        super().__init__(reason)
        self.field = field


def _compile(vocabulary: GrammarVocabulary, text: str, ignored: Set[str]) -> Grammar:
    """Compiles a grammar. ignored: keywords that were left out of its schemas."""
    from llguidance import LLMatcher

    matcher = LLMatcher(vocabulary.compiled, text, log_level=0, limits=_limits())
    if not matcher.is_error():
        matcher.deep_copy().compute_bitmask()
        trial = matcher.deep_copy()
        mask = trial.compute_bitmask()
        if not trial.is_error() and mask.count(0) == len(mask):
            raise _BadGrammar("nothing satisfies it")
        matcher, trial = (trial, matcher) if trial.is_error() else (matcher, trial)
    if matcher.is_error():
        raise _BadGrammar(_first_line(matcher.get_error()))
    return Grammar(vocabulary, matcher, ignored=tuple(sorted(ignored | keywords_of(matcher.get_grammar_warnings()))))


def _limits() -> LLParserLimits:
    """Returns limits of about 1 s and tens of MiB for one grammar, and tens of ms for one token."""
    from llguidance import LLParserLimits

    return LLParserLimits(initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, step_max_items=50_000,
                          max_items_in_row=10_000, max_lexer_states=20_000, max_grammar_size=200_000)


def _first_line(message: str) -> str:
    if message.startswith("NoExtensionBias"):
        return "it refers to itself without any other keyword"
    first, _, rest = message.partition("\n")
    reason = re.search(r"^error: (.*)", rest, re.MULTILINE) if first.endswith("regex parse error:") else None
    return (first + (f" {reason[1]}" if reason else "")).strip()[:300]


def part_of(wanted: OutputFormat, schemas: Schemas) -> Part:
    """Converts a format to llguidance's format."""
    if isinstance(wanted, JsonSchema):
        return {"json_schema": schemas.part(schemas.fit(wanted), wanted.strict, wanted.field)}
    if isinstance(wanted, Regex):
        return {"lark_grammar": f"start: {slashed(wanted.pattern)}"}
    if isinstance(wanted, ChoiceFormat):
        return {"lark_grammar": "start: " + " | ".join(map(quoted, wanted.texts))}
    return {"lark_grammar": _lark(wanted)}


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def slashed(pattern: str) -> str:
    """Returns a pattern in Lark's notation."""
    return "/" + re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), pattern,
                        flags=re.DOTALL) + "/"


def _lark(wanted: GrammarText) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(wanted.text)
    except Exception as error:  # the parser raises errors of any type
        raise RequestError(f"{wanted.field} is neither Lark's notation nor GBNF: {error}", wanted.field) from error


class GrammarConstraint:
    """Constrains one answer to a grammar, after its think block.

    text: the answer's text, which takes every token first. gap: tokens between think block and content. opens: the
    answer may begin with a think block. Reasoning is unconstrained, but cannot end the answer or call a tool.
    Raises RequestError that names the grammar's field if the grammar takes too much work.
    """

    def __init__(self, grammar: Grammar, text: AnswerText, gap: Sequence[int] = (), opens: bool = False) -> None:
        self._matcher = grammar.matcher()
        self._vocabulary = grammar.vocabulary
        self._text = text
        self._field = grammar.field
        self._thinking = text.region == "reasoning"
        self._gap = tuple(gap)
        self._rest = tuple[int, ...]()
        self._opens = self._vocabulary.think if opens and not self._thinking else None
        self._taken: list[int] = []  # tokens that the matcher has not consumed yet
        self._owed = 0.0  # processor seconds beyond the limit of the tokens so far

    def fitting(self, drafts: Sequence[int], /) -> int:
        """Implements `Constraint`. Drafts end at an end token and at the end of reasoning."""
        if self._rest:
            return 0
        if self._thinking:
            if self._vocabulary.think_end is None:
                return 0  # the tag is not a token, so any draft may contain it
            return _before(drafts, {*self._vocabulary.not_thinking, self._vocabulary.think_end})
        with self._timed():
            self._follow()
            return _before(drafts[:self._matcher.validate_tokens([*drafts])], self._vocabulary.ends)

    def allowed(self, drafts: Sequence[int], /) -> list[bytes | None]:
        """Implements `Constraint`."""
        if self._thinking:
            return [self._vocabulary.unfinished] * (len(drafts) + 1)
        if self._rest:
            return [with_token(b"", self._rest[0])]
        masks: list[bytes | None] = []
        with self._timed():
            self._follow()
            # uses a copy: after rollback() llguidance 1.9 may return masks of the old state
            tried = self._matcher.deep_copy()
            masks.append(self._mask(tried))
            for draft in drafts:
                tried.consume_token(draft)
                masks.append(self._mask(tried))
        self._owed = max(0.0, self._owed - len(masks) * _TOKEN_SECONDS)
        if self._owed > _SPARE_SECONDS:
            raise RequestError(f"{self._field} takes too long to follow, as texts can match it in too many ways: "
                               "make it less ambiguous", self._field)
        return masks

    def push(self, token: int, /) -> None:
        opens, self._opens = self._opens == token, None
        if self._thinking or opens:
            self._thinking = self._text.region == "reasoning"
            self._rest = () if self._thinking else self._gap
        elif self._rest:
            self._rest = self._rest[1:] if token == self._rest[0] else ()
        elif token not in self._vocabulary.ends:
            self._taken.append(token)

    def _follow(self) -> None:
        """Passes new tokens to the matcher. `push` does not do this, because it runs in the engine's thread."""
        taken, self._taken = self._taken, []
        for token in taken:
            self._matcher.consume_token(token)
            self._check(self._matcher)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Adds the processor time of the work, which llguidance does in the calling thread."""
        began = time.thread_time()
        yield
        self._owed += time.thread_time() - began

    def _mask(self, matcher: LLMatcher) -> bytes:
        mask = matcher.compute_bitmask()
        self._check(matcher)
        return mask if self._opens is None else with_token(mask, self._opens)

    def _check(self, matcher: LLMatcher) -> None:
        if matcher.is_error():
            raise RequestError(f"{self._field} cannot be followed any further, simplify it: "
                               + _first_line(matcher.get_error()), self._field)


def _before(tokens: Sequence[int], barred: Set[int]) -> int:
    return next((place for place, token in enumerate(tokens) if token in barred), len(tokens))
