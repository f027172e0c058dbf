"""Keeps answers within a grammar: from what a request asks for to the tokens that may come next.

The work is done by llguidance, which is loaded when it is first needed.
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

_MOST_KEPT = 64
_MOST_TEXT = 1 << 20
_TOKEN_SECONDS = 0.01
"""Of a processor, that a token may take: honest grammars need half a millisecond on average, the worst of their
tokens some six."""
_SPARE_SECONDS = 1.0
"""That an answer may take beyond these, all its tokens together: slow tokens are few, while those of an ambiguous
grammar take longer and longer, and the whole batch waits for each."""
_WHITESPACE = r" |\r?\n[ \t]{0,40}"
"""Between the parts of JSON, as people indent it: without a bound small models write nothing else, again and again."""
STRICT: dict[str, Any] = {"whitespace_pattern": _WHITESPACE, "lenient": False, "coerce_one_of": False}
LENIENT = STRICT | {"lenient": True, "coerce_one_of": True}
_COMPACT = {"whitespace_pattern": None, "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_OPTIONS = "x-guidance"

Part = dict[str, Any]
"""A grammar in llguidance's form; the first of several is the whole, the others have names."""


class Schemas:
    """Puts JSON schemas into a grammar. bounds: for schemas that have none. loose: without what the library refuses,
    where a schema is not strict.

    ignored: keywords that were left out. used: what was put there, by its fields.
    """

    def __init__(self, bounds: Bounds | None = None, loose: bool = False) -> None:
        self.ignored, self.used = set[str](), list[tuple[str, Part]]()
        self._bounds, self._loose = bounds, loose

    def fit(self, wanted: JsonSchema) -> dict[str, Any]:
        """The schema as the library takes it."""
        schema = fitted(wanted.schema)
        if self._loose and not wanted.strict:
            schema, left_out = loosened(schema, lambda tried: objection({**tried, _OPTIONS: LENIENT}))
            self.ignored |= left_out
        return schema if self._bounds is None else self._bounds.on(schema)

    def part(self, schema: Mapping[str, Any], strict: bool, field: str) -> Part:
        """A schema that fits, with the library's options."""
        part = {**schema, _OPTIONS: (STRICT if strict else LENIENT) | (_COMPACT if self._bounds else {})}
        self.used.append((field, part))
        return part


def objection(part: Mapping[str, Any]) -> str:
    """What the library has against a schema; "" if nothing."""
    from llguidance import LLMatcher

    said: str = LLMatcher.validate_grammar(json.dumps({"grammars": [{"json_schema": part}]}), None)
    return _first_line(said) if said else ""


Source = Callable[["GrammarVocabulary", Schemas], list[Part]]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that was compiled, and the tokens that it is about. field: of the request that asks for it; ignored:
    keywords of its schemas that are left to the model."""

    vocabulary: GrammarVocabulary
    prototype: LLMatcher
    field: str = ""
    ignored: tuple[str, ...] = ()

    def matcher(self) -> LLMatcher:
        return self.prototype.deep_copy()


class GrammarVocabulary:
    """The tokens of a model as grammars see them. Those that were added to the vocabulary, such as the tags of think
    blocks and calls, spell nothing: a grammar has to name them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.ends = tokenizer, frozenset(tokenizer.ends)
        self.think, self.think_end = (tokenizer.added.get(tag) for tag in (THINK, THINK_END))
        calls = (tag for form in PARSERS.values() if form for tag in form.openings)
        self.not_thinking = self.ends.union(tokenizer.added[tag] for tag in calls if tag in tokenizer.added)
        if not self.ends:
            raise RequestError("the model has no token that ends an answer, so that no answer can be given a form")

    @cached_property
    def compiled(self) -> LLTokenizer:
        """Takes a while for a large vocabulary, in which no other thread runs."""
        from llguidance import LLTokenizer
        from llguidance._tokenizer import TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_Tokens(self._tokenizer, self)), eos_token=sorted(self.ends))

    @cached_property
    def unfinished(self) -> bytes:
        """The mask of all tokens but those that end an answer, or begin a call."""
        mask = bytearray(b"\xff" * -(-self._tokenizer.vocab_size // 8))
        for token in self.not_thinking:
            mask[token >> 3] &= ~(1 << (token & 7))
        return bytes(mask)

    @cached_property
    def tags(self) -> dict[str, str]:
        """How a grammar names the tokens that spell nothing."""
        return {text: f"<[{id}]>" for text, id in self._tokenizer.added.items()}


def with_token(mask: bytes, token: int) -> bytes:
    """The mask with this token's bit."""
    changed = bytearray(mask.ljust((token >> 3) + 1, b"\0"))
    changed[token >> 3] |= 1 << (token & 7)
    return bytes(changed)


class _Tokens:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: GrammarVocabulary) -> None:
        self._encode = tokenizer.encode
        self.tokens = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
        self.eos_token_id, self.bos_token_id = min(vocabulary.ends), tokenizer.bos_id
        self.special_token_ids = sorted(tokenizer.added.values())

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode(), parse_special=False)


@dataclass(slots=True, eq=False)
class PendingGrammar:
    """A grammar that a request needs, before it is compiled. That takes its time: a server has it done in a thread, in
    the client's turn, before the engine gets the request."""

    _compile: Callable[[], Grammar]
    _compiled: Grammar | None = None

    def compile(self) -> None:
        """RequestError if it cannot be compiled, or not within the limit."""
        self._compiled = self._compile()

    @property
    def grammar(self) -> Grammar:
        if self._compiled is None:
            raise RuntimeError("the grammar of this request has not been compiled")
        return self._compiled


class Grammars:
    """Compiles grammars, and keeps the last ones. Threads may share it. seconds: of a processor that one may take; what
    waits for other work does not count. bounds: for JSON whose schema has none, if there are such."""

    def __init__(self, tokenizer: Tokenizer, seconds: float = 5.0) -> None:
        self._tokenizer, self._seconds = tokenizer, seconds
        self.bounds: Bounds | None = None
        self._known: OrderedDict[bytes, Future[Grammar]] = OrderedDict()
        self._lock = threading.Lock()

    @cached_property
    def vocabulary(self) -> GrammarVocabulary:
        return GrammarVocabulary(self._tokenizer)

    def warm(self) -> None:
        """Make what all grammars need, before anybody waits for it."""
        with self._lock:
            _ = self.vocabulary.compiled

    def of(self, wanted: OutputFormat) -> PendingGrammar:
        """That of a format; RequestError names its field."""
        return self.grammar(lambda _, schemas: [part_of(wanted, schemas)], wanted.field)

    def grammar(self, source: Source, field: str) -> PendingGrammar:
        """The grammar with this source, to be compiled. RequestError with this field if there can be none."""
        try:
            import llguidance  # noqa: F401
        except ImportError as error:
            raise RequestError(f"{field} needs the package llguidance, which cannot be loaded ({error}): pip install "
                               "llguidance", field) from error
        schemas = Schemas(self.bounds)
        text = json.dumps({"grammars": source(self.vocabulary, schemas)})
        if len(text) > _MOST_TEXT:
            raise RequestError(f"{field} is larger than {_MOST_TEXT >> 20} MiB as a grammar: make it smaller", field)
        return PendingGrammar(partial(self._of_field, text, partial(self._compile, source, schemas, text), field))

    def _of_field(self, text: str, compile: Callable[[], Grammar], field: str) -> Grammar:
        """The compiled grammar; errors name the field."""
        self.warm()
        try:
            return replace(self._compiled(text, compile), field=field)
        except _SlowGrammar as error:
            raise RequestError(f"{field} takes {error.seconds:.3g} seconds of a processor to compile, and may take "
                               f"{self._seconds:g} (schema_seconds): simplify it", field) from None
        except _BadGrammar as error:
            field = error.field or field
            raise RequestError(f"{field} cannot be enforced: {error}", field) from None

    def _compile(self, source: Source, schemas: Schemas, text: str) -> Grammar:
        """The grammar; where the library refuses it, that of looser schemas."""
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
        wrong = ((said, field) for field, part in schemas.used if (said := objection(part)))
        raise _BadGrammar(*next(wrong, (refusal, "")))

    def _compiled(self, text: str, compile: Callable[[], Grammar]) -> Grammar:
        """Compiles a grammar, or waits for a thread that does; what is refused is remembered as well."""
        key = blake2b(text.encode(), digest_size=16).digest()
        with self._lock:
            known = self._known.pop(key, None)
            future = self._known[key] = known or Future()
            while len(self._known) > _MOST_KEPT:
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
    """seconds: of a processor that it has taken."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class _BadGrammar(ValueError):
    """field: of the request, where it is known."""

    def __init__(self, said: str, field: str = "") -> None:
        super().__init__(said)
        self.field = field


def _compile(vocabulary: GrammarVocabulary, text: str, ignored: Set[str] = frozenset()) -> Grammar:
    """ignored: keywords that were left out of its schemas."""
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
    """Of one grammar: a second or so, and some tens of MiB; of each token a few tens of milliseconds."""
    from llguidance import LLParserLimits

    return LLParserLimits(initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, step_max_items=50_000,
                          max_items_in_row=10_000, max_lexer_states=20_000, max_grammar_size=200_000)


def _first_line(message: str) -> str:
    """What is wrong, without the state of the parser; of an expression, which is shown with marks below, that is said
    last."""
    if message.startswith("NoExtensionBias"):
        return "it refers to itself with nothing in between, so that it says nothing"
    first, _, rest = message.partition("\n")
    said = re.search(r"^error: (.*)", rest, re.MULTILINE) if first.endswith("regex parse error:") else None
    return (first + (f" {said[1]}" if said else "")).strip()[:300]


def part_of(wanted: OutputFormat, schemas: Schemas) -> Part:
    """A format in llguidance's form."""
    if isinstance(wanted, JsonSchema):
        return {"json_schema": schemas.part(schemas.fit(wanted), wanted.strict, wanted.field)}
    if isinstance(wanted, Regex):
        pattern = re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), wanted.pattern,
                         flags=re.DOTALL)
        return {"lark_grammar": f"start: /{pattern}/"}
    if isinstance(wanted, ChoiceFormat):
        return {"lark_grammar": "start: " + " | ".join(map(quoted, wanted.texts))}
    return {"lark_grammar": _lark(wanted)}


def quoted(text: str) -> str:
    """Text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


def _lark(wanted: GrammarText) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(wanted.text)
    except Exception as error:  # whatever it meets
        raise RequestError(f"{wanted.field} is neither Lark's notation nor GBNF: {error}", wanted.field) from error


class GrammarConstraint:
    """Keeps one answer within a grammar, from the end of its think block on.

    text: that of the answer, which gets every token before the constraint does. gap: the tokens that stand between a
    think block and the answer. opens: whether the answer may begin with a think block. Thinking is free, but the answer
    cannot end in it, nor call a tool. RequestError names the grammar's field if it cannot be followed any further.
    """

    def __init__(self, grammar: Grammar, text: AnswerText, gap: Sequence[int] = (), opens: bool = False) -> None:
        self._matcher, self._vocabulary, self._text = grammar.matcher(), grammar.vocabulary, text
        self._field = grammar.field
        self._thinking, self._gap, self._rest = text.region == "reasoning", tuple(gap), tuple[int, ...]()
        self._opens = self._vocabulary.think if opens and not self._thinking else None
        self._taken: list[int] = []  # tokens that the matcher has not been told yet
        self._owed = 0.0  # seconds of a processor, beyond what its tokens may take

    def fitting(self, drafts: Sequence[int], /) -> int:
        """As in `Constraint`. Ends are not drafted, nor is what follows thinking."""
        if self._rest:
            return 0
        if self._thinking:
            if self._vocabulary.think_end is None:
                return 0  # spelled in letters, it may be in any of the drafts
            return _before(drafts, {*self._vocabulary.not_thinking, self._vocabulary.think_end})
        with self._timed():
            self._follow()
            return _before(drafts[:self._matcher.validate_tokens([*drafts])], self._vocabulary.ends)

    def allowed(self, drafts: Sequence[int], /) -> list[bytes | None]:
        """As in `Constraint`."""
        if self._thinking:
            return [self._vocabulary.unfinished] * (len(drafts) + 1)
        if self._rest:
            return [with_token(b"", self._rest[0])]
        masks: list[bytes | None] = []
        with self._timed():
            self._follow()
            # drafts are tried on a copy: after rollback() llguidance 1.9 may have masks of what was taken back
            tried = self._matcher.deep_copy()
            masks.append(self._mask(tried))
            for draft in drafts:
                tried.consume_token(draft)
                masks.append(self._mask(tried))
        self._owed = max(0.0, self._owed - len(masks) * _TOKEN_SECONDS)
        if self._owed > _SPARE_SECONDS:
            raise RequestError(f"{self._field} takes too long to follow, as what it describes can be read in too many "
                               "ways: make it less ambiguous", self._field)
        return masks

    def push(self, token: int, /) -> None:
        """Take the next token of the answer."""
        opens, self._opens = self._opens == token, None
        if self._thinking or opens:
            self._thinking = self._text.region == "reasoning"
            self._rest = () if self._thinking else self._gap
        elif self._rest:
            self._rest = self._rest[1:] if token == self._rest[0] else ()
        elif token not in self._vocabulary.ends:
            self._taken.append(token)

    def _follow(self) -> None:
        """Tell the matcher of the tokens that have come. That takes its time, and `push` is called in the engine's
        thread."""
        taken, self._taken = self._taken, []
        for token in taken:
            self._matcher.consume_token(token)
            self._check(self._matcher)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Count what the work takes of a processor: on the wall's clock a busy machine would make all grammars slow.
        llguidance does it in the calling thread."""
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
    """How many tokens come before the first of these."""
    return next((place for place, token in enumerate(tokens) if token in barred), len(tokens))
