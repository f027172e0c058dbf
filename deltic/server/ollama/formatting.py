"""What Ollama's clients get: lines of JSON, counts and durations, and errors."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response

from deltic.chat.choices import ChoiceDelta, TokenScore
from deltic.chat.deltas import AnswerCall
from deltic.server.http import EventStream, Problem, dump, json_response, problem_of

Json = dict[str, Any]
PATH = "/api/"
"""Where Ollama's clients ask."""


class JsonLines(EventStream):
    """A stream of JSON values, each of them a line."""

    media_type = "application/x-ndjson"


def error_response(problem: Problem) -> Response:
    """A problem in Ollama's shape."""
    response = json_response({"error": problem.message}, problem.status)
    if problem.retry_after is not None:
        response.headers["retry-after"] = str(problem.retry_after)
    return response


def error_line(error: Exception) -> bytes:
    """The end of a stream that failed."""
    return line({"error": problem_of(error).message})


def line(data: Any) -> bytes:
    return dump(data) + b"\n"


def stamp(seconds: float) -> str:
    """A time as Ollama writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class OllamaFormatter:
    """The lines of an answer. chat: of a conversation, rather than of a prompt. spell: what a token looks like; None:
    no probabilities are wanted."""

    model: str
    chat: bool
    spell: Callable[[int], bytes] | None

    def said(self, text: str, thinking: str = "", calls: Sequence[AnswerCall] = (), scores: Iterable[TokenScore] = (),
             done: bool = False) -> Json:
        """What came, or nothing of it."""
        more: Json = {"thinking": thinking} if thinking else {}
        if found := [*map(_called, _whole(calls))]:
            more["tool_calls"] = found
        message = {"message": {"role": "assistant", "content": text, **more}} if self.chat else {
            "response": text, **more}
        shown = {"logprobs": [self._score(score) for score in scores]} if self.spell and scores else {}
        return {"model": self.model, "created_at": stamp(time.time()), **message, "done": done, **shown}

    def piece(self, piece: ChoiceDelta) -> list[Json]:
        """The lines of a part of an answer; calls come when all of them are there."""
        text = "".join(delta.text for delta in piece.deltas if delta.kind == "content")
        thinking = "".join(delta.text for delta in piece.deltas if delta.kind == "reasoning")
        calls = _whole(piece.done.calls) if piece.done else ()
        if not (text or thinking or calls or (self.spell and piece.scores)):
            return []
        return [self.said(text, thinking, calls, piece.scores)]

    def _score(self, score: TokenScore) -> Json:
        top = [self._token(*other) for other in score.logprobs.top]
        return {**self._token(score.token, score.logprobs.token), **({"top_logprobs": top} if top else {})}

    def _token(self, token: int, logprob: float) -> Json:
        assert self.spell
        spelled = self.spell(token)
        return {"token": spelled.decode("utf-8", "replace"), "logprob": max(logprob, -9999.0), "bytes": list(spelled)}


def _whole(calls: Sequence[AnswerCall]) -> list[AnswerCall]:
    """Calls that are not cut: Ollama's have objects as arguments, not text."""
    return [call for call in calls if _arguments(call) is not None]


def _arguments(call: AnswerCall) -> Json | None:
    with suppress(ValueError):
        found = json.loads(call.arguments or "{}")
        return found if isinstance(found, dict) else None
    return None


def _called(call: AnswerCall) -> Json:
    return {"id": call.id, "function": {"name": call.name, "arguments": _arguments(call)}}
