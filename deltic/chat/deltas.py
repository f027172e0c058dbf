"""What a stream of tokens becomes: pieces of reasoning, of content and of tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Region = Literal["reasoning", "content", "tool"]


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """A piece of a tool call.

    index counts the calls of one answer; `id` is the same on all pieces of a call. `name` is set on the first
    piece only. Concatenated, the `arguments` of a call are one JSON object, or the beginning of one where the answer
    was cut; so is what is `written`: the same with the values as the model wrote them, whatever the schema says.
    """

    index: int
    id: str
    name: str | None = None
    arguments: str = ""
    written: str = field(default="", compare=False)


class Delta(NamedTuple):
    """A piece of an answer: text, or `call` if kind is "tool". index: of the choice that it belongs to, in a stream of
    several. tokens: the ids, of a model without a tokenizer, which has no text for them."""

    kind: Region
    text: str = ""
    call: ToolDelta | None = None
    index: int = 0  # type: ignore[assignment]  # a tuple's method, which nobody needs here
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
    """Put the pieces of one answer together."""
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
    """The same pieces, with neighbouring ones of one kind or call as one and empty ones left out."""
    merged: list[Delta] = []
    for delta in deltas:
        before = merged[-1] if merged else None
        if before and before.kind == delta.kind and (joined := _joined(before, delta)):
            merged[-1] = joined
        elif delta.call is not None or delta.text or delta.tokens:
            merged.append(delta)
    return merged


def _joined(before: Delta, delta: Delta) -> Delta | None:
    """One of two; a name comes alone."""
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
