"""Pieces of an answer: reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Region = Literal["reasoning", "content", "tool"]


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """A piece of a tool call.

    index: of the call in the answer. id: the same for all pieces of a call. name: on the first piece only.
    arguments: concatenated, one JSON object, or the beginning of one if the answer was cut.
    written: as `arguments`, with the values as the model wrote them, before conversion to the schema's types.
    """

    index: int
    id: str
    name: str | None = None
    arguments: str = ""
    written: str = field(default="", compare=False)


class Delta(NamedTuple):
    """A piece of an answer: text, or `call` if kind is "tool".

    index: of the choice, in a stream of several. tokens: ids in place of text, for a model without a tokenizer.
    """

    kind: Region
    text: str = ""
    call: ToolDelta | None = None
    index: int = 0  # type: ignore[assignment]  # hides tuple.index
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerCall:
    """A tool call of an answer; `arguments` and `written` as in ToolDelta."""

    id: str
    name: str
    arguments: str
    written: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[AnswerCall, ...] = ()


def join(deltas: Iterable[Delta]) -> Answer:
    """Joins the pieces of one answer."""
    texts: dict[str, list[str]] = {"reasoning": [], "content": []}
    calls: dict[int, list[ToolDelta]] = {}
    for delta in deltas:
        if delta.call is None:
            texts[delta.kind].append(delta.text)
        else:
            calls.setdefault(delta.call.index, []).append(delta.call)
    return Answer("".join(texts["reasoning"]), "".join(texts["content"]),
                  tuple(_join_call(pieces) for pieces in calls.values()))


def merge(deltas: list[Delta]) -> list[Delta]:
    """Joins neighbouring pieces of one kind or call, and drops empty ones."""
    merged: list[Delta] = []
    for delta in deltas:
        before = merged[-1] if merged else None
        if before and before.kind == delta.kind and (joined := _joined(before, delta)):
            merged[-1] = joined
        elif delta.call is not None or delta.text or delta.tokens:
            merged.append(delta)
    return merged


def _joined(before: Delta, delta: Delta) -> Delta | None:
    """Returns two pieces as one; None if one of them begins a call."""
    first, second = before.call, delta.call
    if first is None or second is None:
        return Delta(delta.kind, before.text + delta.text, tokens=before.tokens + delta.tokens)
    if first.name is not None or second.name is not None:
        return None
    return Delta("tool", call=ToolDelta(first.index, first.id, None, first.arguments + second.arguments,
                                        first.written + second.written))


def _join_call(pieces: list[ToolDelta]) -> AnswerCall:
    return AnswerCall(pieces[0].id, "".join(piece.name or "" for piece in pieces),
                      "".join(piece.arguments for piece in pieces), "".join(piece.written for piece in pieces))
