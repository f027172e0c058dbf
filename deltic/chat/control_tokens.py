"""Prevents control tokens in client text from being encoded as control tokens.

A chat template writes control tokens such as `<|im_end|>` around client text, which may contain the same characters.
`Quoter` puts a MARK into each of those before rendering. `Tokenizer.encode(quoted=True)` cuts the rendered text at the
marks, so that they are encoded as ordinary text. Text without control tokens is rendered and encoded unchanged.

Control tokens are the special tokens of a vocabulary, and added tokens in the form of chat markup (`<think>`,
`<tool_call>`, `<|fim_prefix|>`). Added tokens for HTML tags or white space are ordinary text. Two places keep markup
that templates look for: a think block at the start of an assistant's content, and the tags around a user message that
is a tool result (`<tool_response>`).
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any, Final, Protocol

from deltic.chat.markers import THINK, THINK_END
from deltic.errors import RequestError

MARK: Final = "8062593714063829"
"""Marks the position at which the text of a control token is cut. It consists of digits, as templates may escape or
change other characters. It is not secret: it is replaced in client text."""
_REPLACED: Final = "\ufffd"

_MARKUP = re.compile(r"<\|.*\|>|</?think(?:ing)?>|</?[a-z]+[_:][a-z_:]+>|\[/?[A-Z_]+\]", re.DOTALL)
_PAIRS = {"assistant": (THINK, THINK_END), "user": ("<tool_response>", "</tool_response>")}
# Keys that templates look up; they may write others between brackets (`<KEY>VALUE</KEY>`).
_KNOWN_KEYS = frozenset({
    "role", "content", "contents", "name", "type", "text", "image", "video", "function", "tool_calls", "arguments",
    "parameters", "properties", "required", "description", "items", "enum", "default", "title", "tool_call_id", "id"})

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages, Messages | None, Mapping[str, Any]], str]
"""Function that takes messages, tools and template variables, and returns the rendered text."""


class ControlTokens:
    """The control tokens of a vocabulary.

    added: ids of added tokens by text. cuts: returns the pre-tokenizer's cuts in a text. Control tokens are cut there,
    so that their ids as ordinary text are the usual ones.
    """

    def __init__(self, added: Mapping[str, int], special: frozenset[int],
                 cuts: Callable[[str], Iterable[int]]) -> None:
        texts = {text: id for text, id in added.items()
                 if len(text) > 1 and (id in special or _MARKUP.fullmatch(text))}
        self.ids = frozenset(texts.values())
        self._markup = frozenset(text for text, id in texts.items() if id not in special)
        self._pattern = any_of(texts)
        self._cuts = {text: self._cut(text, cuts) for text in texts}
        self._longest = max(map(len, texts), default=1) - 1
        self._tails = {text[:end] for text in texts for end in range(2, len(text))}
        self._heads = {text[start:] for text in texts for start in (1, 2) if len(text) - start > 1}
        self._inners = {text[start:end] for text in texts for start in (1, 2)
                        for end in (len(text) - 2, len(text) - 1) if start < end}
        self._ends = {text[-1] for text in self._heads}
        self._starts = {text[0] for text in self._tails}

    def quote(self, text: str, keeps: Callable[[re.Match[str]], bool] = lambda match: False) -> str:
        """Puts a mark into each control token, except those that `keeps` selects, and into parts of control tokens at
        either end, which a template could complete. Returns the same object if there are none."""
        if MARK in text:
            text = text.replace(MARK, _REPLACED)
        marks = [match.start() + 1 for match in self._pattern.finditer(text) if not keeps(match)]
        tail, head = text[-self._longest:], text[:self._longest]
        marks += [len(text) - len(tail) + index + 1 for index, character in enumerate(tail)
                  if character in self._starts and tail[index:] in self._tails]
        marks += [index for index, character in enumerate(head)
                  if character in self._ends and head[:index + 1] in self._heads]
        return _marked(text, sorted(set(marks))) if marks else text

    def quote_key(self, key: str) -> str:
        """Quotes a mapping key as `quote` does. A template may write the key between brackets."""
        if key in self._inners and key not in _KNOWN_KEYS:
            return key[:1] + MARK + key[1:]
        return self.quote(key)

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Returns the spans of control tokens in the text."""
        return [match.span() for match in self._pattern.finditer(text)]

    def spells(self, text: str) -> bool:
        """Returns True if the text contains a control token."""
        return self._pattern.search(text) is not None

    def is_markup(self, text: str) -> bool:
        """Returns True for a control token that is not a special token."""
        return text in self._markup

    def settle(self, text: str) -> str:
        """Moves the marks of a rendered text to the cuts of the control tokens around them. Drops all other marks."""
        pieces = text.split(MARK)
        marks, length = set[int](), 0
        for piece in pieces[:-1]:
            length += len(piece)
            marks.add(length)
        clean = "".join(pieces)
        return _marked(clean, [match.start() + cut for match in self._pattern.finditer(clean)
                               if not marks.isdisjoint(range(match.start() + 1, match.end()))
                               for cut in self._cuts[match[0]]])

    def ordinary(self, text: str) -> str:
        """Marks all control tokens of a text, in the form that `settle` returns."""
        return MARK.join(self.pieces(text))

    def pieces(self, text: str) -> list[str]:
        """Splits a text into pieces without control tokens."""
        return _cut_at(text, [match.start() + cut for match in self._pattern.finditer(text)
                              for cut in self._cuts[match[0]]])

    def _cut(self, text: str, cuts: Callable[[str], Iterable[int]]) -> tuple[int, ...]:
        """Returns the positions at which to cut a token so that no piece is a control token."""
        inner = [cut for cut in cuts(text) if 0 < cut < len(text)]
        for cut in (*inner, *range(1, len(text))):
            if not self.spells(text[:cut]) and not self.spells(text[cut:]):
                return (cut,)
        return tuple(range(1, len(text)))


class Quoted(Protocol):
    """A value that stores its quoted form; None: the quoted form is not known yet."""

    quoted: Any


class Quoter:
    """Renders one conversation with quoted client text. read: values that are quoted once for all conversations, keyed
    by identity."""

    def __init__(self, tokens: ControlTokens, read: Mapping[int, Quoted] = MappingProxyType({})) -> None:
        self._tokens = tokens
        self._read = read
        self._known: dict[tuple[int, bool], tuple[Any, Any]] = {}

    def render(self, render: Render, messages: Messages, tools: Messages | None, variables: Mapping[str, Any],
               prefill: bool = False) -> str:
        """Renders with marks. prefill: the last message is the beginning of the answer and keeps its markup."""
        quoted = [self._once(message) for message in (messages[:-1] if prefill else messages)]
        if prefill:
            quoted.append(self._once(messages[-1], True))
        extras = self._once(tools), self._once(variables)
        if all(new is old for new, old in zip((*quoted, *extras), (*messages, tools, variables))):
            return render(messages, tools, variables)
        return self._tokens.settle(render(quoted, *extras))

    def _once(self, value: Any, prefill: bool = False) -> Any:
        """Quotes a value once. The cache holds the value, so that its id stays unique."""
        read = None if prefill else self._read.get(id(value))
        if read:
            if read.quoted is None:
                read.quoted = self._value(value)
            return read.quoted
        key = id(value), prefill
        if key not in self._known:
            self._known[key] = value, self._value(value, prefill)
        return self._known[key][1]

    def _value(self, value: Any, prefill: bool = False) -> Any:
        """Returns a copy with all texts quoted, or the value itself if there is nothing to quote."""
        if isinstance(value, str):
            return self._tokens.quote(value)
        if isinstance(value, Mapping):
            found = {self._tokens.quote_key(key): self._item(value, key, prefill) for key in value}
            same = found.keys() == value.keys() and all(new is old for new, old in zip(found.values(), value.values()))
            return value if same else found
        if isinstance(value, list | tuple):
            items = self._apart(value, [self._value(item) for item in value])
            return value if all(new is old for new, old in zip(items, value)) else items
        return value

    def _item(self, message: Mapping[str, Any], key: str, prefill: bool) -> Any:
        item = message[key]
        if key not in ("content", "contents") or not isinstance(item, str):
            return self._value(item)
        if prefill:
            return self._tokens.quote(item, lambda match: self._tokens.is_markup(match[0]))
        kept = _markup_of(message, item)
        return self._tokens.quote(item, lambda match: match.span() in kept)

    def _apart(self, parts: Sequence[Any], quoted: list[Any]) -> list[Any]:
        """Adds a mark between parts of a content that spell a control token when joined."""
        texts = [part["text"] if isinstance(part, Mapping) and isinstance(part.get("text"), str) else None
                 for part in parts]
        ends = [*accumulate(len(text or "\n") for text in texts)]
        joined = "".join(text or "\n" for text in texts) if len(texts) > 1 else ""
        for start, end in self._tokens.spans(joined):
            for index in range(bisect_right(ends, start), bisect_left(ends, end)):
                quoted[index] = {**quoted[index], "text": quoted[index]["text"] + MARK}
        return quoted


def _markup_of(message: Mapping[str, Any], text: str) -> set[tuple[int, int]]:
    """Returns the spans of markup that templates look for: a think block at the start of an assistant's content, and
    the tags around a tool result in a user message."""
    start, end = len(text) - len(text.lstrip()), len(text.rstrip())
    pair = _PAIRS.get(str(message.get("role")), ("", ""))
    if message.get("reasoning_content"):
        return set()
    opens, closes = text.startswith(pair[0], start), text.find(pair[1])
    if message.get("role") == "user":
        closes = end - len(pair[1])
        return {(start, start + len(pair[0])), (closes, end)} if opens and text.startswith(pair[1], closes) else set()
    return {(start, start + len(pair[0])), (closes, closes + len(pair[1]))}


def unmarked(text: str) -> str:
    """Returns the text without marks, as the model reads it."""
    return text.replace(MARK, "")


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern that matches the longest of the texts at each position; a trie, for up to 1,000 texts."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(_expression(tree) if tree else r"(?!)")


def _expression(tree: dict[str, Any]) -> str:
    prefix = ""
    while len(tree) == 1 and "" not in tree:
        (character, tree), = tree.items()
        prefix += re.escape(character)
    branches = [re.escape(character) + _expression(node) for character, node in tree.items() if character]
    if not branches:
        return prefix
    return f"{prefix}(?:{'|'.join(branches)}){'?' if '' in tree else ''}"


def _marked(text: str, places: Sequence[int]) -> str:
    return MARK.join(_cut_at(text, places)) if places else text


def _cut_at(text: str, places: Sequence[int]) -> list[str]:
    return [text[start:end] for start, end in pairwise((0, *places, len(text)))] if places else [text]


_FORMS: Sequence[tuple[str, str, str]] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"), ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"), ("<PRE>", "<SUF>", "<MID>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"))
"""Tokens before the prefix, the suffix and the answer: Qwen, StarCoder, SantaCoder, GLM, CodeLlama, DeepSeek."""
_ENDS = ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|endoftext|>", "<fim_pad>", "<file_sep>", "<|endofmiddle|>",
         "\u2581<EOT>", "<EOT>")
"""Further tokens that end such an answer."""


@dataclass(frozen=True, slots=True)
class Infill:
    """The fill-in-the-middle tokens of a vocabulary. ends: tokens that end an answer."""

    prefix: int
    suffix: int
    middle: int
    ends: tuple[int, ...]

    @classmethod
    def of(cls, added: Mapping[str, int]) -> Infill:
        """Finds the tokens among the tokenizer's added tokens. Raises RequestError if there are none."""
        for form in _FORMS:
            if all(token in added for token in form):
                prefix, suffix, middle = (added[token] for token in form)
                others = (added[token] for token in _ENDS if token in added)
                return cls(prefix, suffix, middle, (prefix, suffix, middle, *others))
        raise RequestError("suffix needs a model that fills in the middle: this one's tokenizer has no tokens for that "
                           "(such as fim_prefix)", "suffix")

    def ids(self, before: Sequence[int], behind: Sequence[int]) -> list[int]:
        """Returns the prompt that asks for the text between two texts."""
        return [self.prefix, *before, self.suffix, *behind, self.middle]
