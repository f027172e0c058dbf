"""OpenAI's answers: what a choice looks like whole and in pieces."""

from __future__ import annotations

import codecs
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deltic import __version__
from deltic.server.collect import Piece, Score, Whole
from deltic.server.desk import Words
from deltic.text.deltas import Answer, AnswerCall, Delta, ToolDelta
from deltic.types import Finish, Usage

_LEAST = -9999.0  # what OpenAI says where a probability is 0: JSON has no infinity

Json = dict[str, Any]


def usage_form(usage: Usage) -> Json:
    """The `usage` of an answer; guesses are what OpenAI calls predictions."""
    return {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": usage.accepted_tokens,
                "rejected_prediction_tokens": usage.drafted_tokens - usage.accepted_tokens}}


@dataclass(frozen=True, slots=True)
class Envelope:
    """What surrounds the choices of one answer."""

    kind: str
    model: str
    prefix: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, choices: Iterable[Json], **more: Any) -> Json:
        return {"id": self.prefix + self.id, "object": self.kind, "created": self.created, "model": self.model,
                "system_fingerprint": f"deltic-{__version__}", "choices": choices, **more}


class ChatForm:
    """Choices of /v1/chat/completions. One per answer, as pieces depend on those before."""

    whole_kind, piece_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, words: Words, scored: bool) -> None:
        self._words, self._scored = words, scored
        self._begun: set[int] = set()
        self._called: set[int] = set()
        self._scores: dict[int, list[Score]] = {}

    def whole(self, whole: Whole) -> Json:
        """A finished choice."""
        return {"index": whole.choice, "message": _message(whole.answer), "logprobs": self._logprobs(whole.scores),
                "finish_reason": _reason(whole.finish, bool(whole.answer.calls))}

    def pieces(self, piece: Piece) -> list[Json]:
        """The choices of the chunks that this piece becomes, one each; scores wait for a text to go with."""
        self._scores.setdefault(piece.choice, []).extend(piece.scores)
        bodies: list[Json] = [_delta(delta) for delta in piece.deltas]
        if any(delta.call for delta in piece.deltas):
            self._called.add(piece.choice)
        if piece.finish:
            bodies.append({})
        if bodies and piece.choice not in self._begun:
            self._begun.add(piece.choice)
            bodies.insert(0, {"role": "assistant", "content": ""})
        choices = [self._piece(piece.choice, body) for body in bodies]
        if piece.finish:
            choices[-1]["finish_reason"] = _reason(piece.finish, piece.choice in self._called)
        return choices

    def _piece(self, choice: int, body: Json) -> Json:
        scores: list[Score] = []
        if "role" not in body:
            scores = self._scores.pop(choice, [])
        return {"index": choice, "delta": body, "logprobs": self._logprobs(scores) if scores else None,
                "finish_reason": None}

    def _logprobs(self, scores: Iterable[Score]) -> Json | None:
        if not self._scored:
            return None
        return {"content": map(self._scored_token, scores), "refusal": None}

    def _scored_token(self, score: Score) -> Json:
        token, found = score
        return self._score(token, found.token) | {"top_logprobs": [self._score(*other) for other in found.top]}

    def _score(self, token: int, logprob: float) -> Json:
        spelled = self._words.token_bytes(token)
        return {"token": spelled.decode("utf-8", "replace"), "logprob": max(logprob, _LEAST), "bytes": list(spelled)}


@dataclass(frozen=True, slots=True)
class Echo:
    """The texts of the prompts, each of which is put before so many choices."""

    prompts: Sequence[str] = ()
    choices: int = 1

    def before(self, choice: int) -> str:
        """What stands before a choice."""
        return self.prompts[choice // self.choices] if self.prompts else ""


class TextForm:
    """Choices of /v1/completions. One per answer."""

    whole_kind, piece_kind, prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(self, words: Words, scored: bool, echo: Echo = Echo()) -> None:
        self._words, self._scored, self._echo = words, scored, echo
        self._begun: set[int] = set()
        self._offsets: dict[int, _Offsets] = {}

    def whole(self, whole: Whole) -> Json:
        """A finished choice."""
        return self._choice(whole.choice, whole.answer.content, whole.scores, whole.finish)

    def pieces(self, piece: Piece) -> list[Json]:
        """The choices of the chunks that this piece becomes."""
        text = "".join(delta.text for delta in piece.deltas)
        if not (text or piece.scores or piece.finish):
            return []
        return [self._choice(piece.choice, text, piece.scores, piece.finish)]

    def _choice(self, choice: int, text: str, scores: Sequence[Score], finish: Finish | None) -> Json:
        if choice not in self._begun:
            self._begun.add(choice)
            text = self._echo.before(choice) + text
        return {"index": choice, "text": text,
                "logprobs": self._logprobs(choice, scores), "finish_reason": finish}

    def _logprobs(self, choice: int, scores: Sequence[Score]) -> Json | None:
        if not self._scored:
            return None
        offsets = self._offsets.setdefault(choice, _Offsets())
        tops = ({self._name(token): max(logprob, _LEAST) for token, logprob in reversed(found.top)}
                for _, found in scores)
        return {"tokens": (self._name(token) for token, _ in scores),
                "token_logprobs": (max(found.token, _LEAST) for _, found in scores),
                "top_logprobs": tops if any(found.top for _, found in scores) else None,
                "text_offset": (offsets.next(self._words.visible_bytes(token)) for token, _ in scores)}

    def _name(self, token: int) -> str:
        spelled = self._words.token_bytes(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


class _Offsets:
    """Where in the text of a choice its tokens begin."""

    def __init__(self) -> None:
        self._utf8, self._position = codecs.getincrementaldecoder("utf-8")("replace"), 0

    def next(self, spelled: bytes) -> int:
        """The position of the next token."""
        position = self._position
        self._position += len(self._utf8.decode(spelled))
        return position


def _message(answer: Answer) -> Json:
    message: Json = {"role": "assistant", "content": answer.content, "refusal": None,
                     "reasoning_content": answer.reasoning or None}
    if answer.calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [_call(call) for call in answer.calls]
    return message


def _call(call: AnswerCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _delta(delta: Delta) -> Json:
    if delta.call:
        return {"tool_calls": [_call_piece(delta.call)]}
    return {"reasoning_content" if delta.kind == "reasoning" else "content": delta.text}


def _call_piece(call: ToolDelta) -> Json:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, "id": call.id, "type": "function",
            "function": {"name": call.name, "arguments": call.arguments}}


def _reason(finish: Finish, called: bool) -> str:
    return "tool_calls" if called and finish == "stop" else finish
