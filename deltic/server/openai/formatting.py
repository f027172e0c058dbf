"""What OpenAI's clients get: choices, whole and in pieces, and errors."""

from __future__ import annotations

import time
import uuid
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.responses import Response

from deltic import __version__
from deltic.chat.choices import Choice, ChoiceDelta, TokenScore
from deltic.chat.deltas import AnswerCall, Delta, ToolDelta
from deltic.chat.output_router import AnswerText
from deltic.params import Finish, TokenLogprobs, Usage
from deltic.server.http import Problem, dump, event, json_response, problem_of

_LEAST = -9999.0  # what OpenAI says where a probability is 0: JSON has no infinity

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}

_UNKNOWN = TokenLogprobs(0.0)
"""Of a prompt's first token."""

Json = dict[str, Any]
Spell = Callable[[int], bytes]
"""What a token looks like."""


def error_response(problem: Problem, headers: dict[str, str] | None = None) -> Response:
    """A problem in OpenAI's shape."""
    response = json_response(error_fields(problem), problem.status)
    response.headers.update(headers or {})
    if problem.retry_after is not None:
        response.headers["retry-after"] = str(problem.retry_after)
    return response


def error_event(error: Exception) -> bytes:
    """The end of a stream that failed."""
    return event(error_fields(problem_of(error)))


def error_fields(problem: Problem) -> Json:
    """The body of an error."""
    kind = _TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "server_error")
    return {"error": {"message": problem.message, "type": kind, "param": problem.param, "code": problem.code}}


def total_tokens(prompt: int, completion: int) -> Json:
    """The `usage` of an answer that goes on."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def usage_fields(usage: Usage) -> Json:
    """The `usage` of an answer; drafts are what OpenAI calls predictions."""
    return {**total_tokens(usage.prompt_tokens, usage.completion_tokens),
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": usage.reasoning_tokens,
                "accepted_prediction_tokens": usage.accepted_tokens,
                "rejected_prediction_tokens": usage.drafted_tokens - usage.accepted_tokens}}


@dataclass(frozen=True, slots=True)
class AnswerChunk:
    """What surrounds the choices of one answer."""

    kind: str
    model: str
    prefix: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, choices: Iterable[Json], **more: Any) -> Json:
        return {"id": self.prefix + self.id, "object": self.kind, "created": self.created, "model": self.model,
                "system_fingerprint": f"deltic-{__version__}", "choices": choices, **more}

    def events(self, **more: Any) -> Callable[[Json], bytes]:
        """Writes events with one choice each; all around it is written once."""
        before, after = event(self.wrap((), **more)).split(b'"choices":[]')
        return lambda choice: before + b'"choices":[' + dump(choice) + b"]" + after


class ChatFormatter:
    """Choices of /v1/chat/completions. One per answer, as pieces depend on those before."""

    whole_kind, piece_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, token_bytes: Spell, scored: bool, fresh: Callable[[], AnswerText] | None = None) -> None:
        """fresh: gives the text of an answer that has no tokens yet, if the thinking is not wanted: it tells which
        tokens are thinking."""
        self._token_bytes, self._scored, self._fresh = token_bytes, scored, fresh
        self._begun: set[int] = set()
        self._texts: dict[int, AnswerText] = {}
        self._scores: dict[int, list[TokenScore]] = {}

    def whole(self, piece: ChoiceDelta) -> Json:
        """A choice that is done."""
        assert piece.done
        return {"index": piece.number, "message": self._message(piece.done),
                "logprobs": self._logprobs(self._shown(piece)),
                "finish_reason": _reason(piece.done.finish, bool(piece.done.calls))}

    def pieces(self, piece: ChoiceDelta) -> list[Json]:
        """The choices of the chunks that this piece becomes, one each; scores wait for a text to go with."""
        self._scores.setdefault(piece.number, []).extend(self._shown(piece))
        bodies: list[Json] = [_delta(delta) for delta in piece.deltas
                              if not self._fresh or delta.kind != "reasoning"]
        if piece.done:
            bodies.append({})
        if bodies and piece.number not in self._begun:
            self._begun.add(piece.number)
            bodies.insert(0, {"role": "assistant", "content": ""})
        choices = [self._piece(piece.number, body) for body in bodies]
        if piece.done:
            choices[-1]["finish_reason"] = _reason(piece.done.finish, bool(piece.done.calls))
        return choices

    def _message(self, choice: Choice) -> Json:
        message: Json = {"role": "assistant", "content": choice.text, "refusal": None,
                         "reasoning_content": None if self._fresh else choice.reasoning or None}
        if choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [_call(call) for call in choice.calls]
        return message

    def _piece(self, choice: int, body: Json) -> Json:
        scores: list[TokenScore] = []
        if "role" not in body:
            scores = self._scores.pop(choice, [])
        return {"index": choice, "delta": body, "logprobs": self._logprobs(scores) if scores else None,
                "finish_reason": None}

    def _shown(self, piece: ChoiceDelta) -> list[TokenScore]:
        """The scores of a piece, but for those of thinking and its tags, which would spell it, if it is not wanted."""
        if not self._fresh or not piece.scores:
            return piece.scores
        text = self._texts.get(piece.number) or self._texts.setdefault(piece.number, self._fresh())
        shown: list[TokenScore] = []
        for score in piece.scores:
            before = text.region
            text.take(score.token)
            if "reasoning" not in (before, text.region):
                shown.append(score)
        return shown

    def _logprobs(self, scores: Iterable[TokenScore]) -> Json | None:
        if not self._scored:
            return None
        return {"content": map(self._scored_token, scores), "refusal": None}

    def _scored_token(self, score: TokenScore) -> Json:
        found = score.logprobs
        return self._score(score.token, found.token) | {"top_logprobs": [self._score(*other) for other in found.top]}

    def _score(self, token: int, logprob: float) -> Json:
        spelled = self._token_bytes(token)
        return {"token": spelled.decode("utf-8", "replace"), "logprob": max(logprob, _LEAST), "bytes": list(spelled)}


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """What is said of the prompts, of so many choices each.

    ids: their tokens.
    texts: to be put before the choices, or none.
    scored: with the tokens' probabilities.
    """

    ids: Sequence[Sequence[int]]
    texts: Sequence[str] = ()
    choices: int = 1
    scored: bool = False

    def before(self, choice: int) -> str:
        """What stands before a choice."""
        return self.texts[choice // self.choices] if self.texts else ""

    def scores(self, choice: int, found: Sequence[TokenLogprobs], spell: Spell) -> list[TokenScore]:
        """The prompt's tokens; the first has no probability."""
        ids, offset, scores = self.ids[choice // self.choices], 0, list[TokenScore]()
        decoder = getincrementaldecoder("utf-8")("replace")
        text = self.before(choice)
        for token, logprobs in zip(ids, (_UNKNOWN, *found), strict=True):
            scores.append(TokenScore(token, logprobs, offset))
            shown = decoder.decode(spell(token))
            offset += len(shown) if len(scores) > 1 or text.startswith(shown.strip()) else 0  # a bos token is not
        return scores


def prompt_scores(ids: Sequence[int], found: Sequence[TokenLogprobs], spell: Spell) -> Iterator[Json | None]:
    """vLLM's `prompt_logprobs`: by token id, of each token of the prompt and of the most probable ones."""
    yield None
    for token, score in zip(ids[1:], found, strict=True):
        ranked = [(token, score.token, score.rank),
                  *((other, logprob, rank) for rank, (other, logprob) in enumerate(score.top, 1) if other != token)]
        yield {str(other): {"logprob": max(logprob, _LEAST), "rank": rank,
                            "decoded_token": spell(other).decode("utf-8", "replace")}
               for other, logprob, rank in ranked}


class CompletionFormatter:
    """Choices of /v1/completions. One per answer."""

    whole_kind, piece_kind, prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(self, token_bytes: Spell, scored: bool, echo: PromptEcho) -> None:
        self._token_bytes, self._scored, self._echo = token_bytes, scored, echo
        self._begun: set[int] = set()

    def whole(self, piece: ChoiceDelta) -> Json:
        """A choice that is done."""
        assert piece.done
        found, place = piece.done.prompt_logprobs, piece.number
        if found is None:
            return self._choice(piece, piece.done.text)
        if not self._echo.scored:
            return self._choice(piece, piece.done.text) | self._prompt(place, found)
        before, length = self._echo.scores(place, found, self._token_bytes), len(self._echo.before(place))
        after = [score._replace(offset=score.offset + length) for score in piece.scores]
        if len(piece.done.tokens) > len(after):  # evaluations count on every token, the end of the text too
            after.append(TokenScore(piece.done.tokens[-1], piece.done.logprobs[-1], length + len(piece.done.text)))
        return self._choice(replace(piece, scores=[*before, *after]), piece.done.text) | self._prompt(place, found)

    def pieces(self, piece: ChoiceDelta) -> list[Json]:
        """The choices of the chunks that this piece becomes."""
        text = "".join(delta.text for delta in piece.deltas)
        return [self._choice(piece, text)] if text or piece.scores or piece.done else []

    def _choice(self, piece: ChoiceDelta, text: str) -> Json:
        if piece.number not in self._begun:
            self._begun.add(piece.number)
            text = self._echo.before(piece.number) + text
        return {"index": piece.number, "text": text, "logprobs": self._logprobs(piece.scores),
                "finish_reason": piece.done.finish if piece.done else None}

    def _logprobs(self, scores: Sequence[TokenScore]) -> Json | None:
        if not self._scored:
            return None
        tops = ({self._name(token): max(logprob, _LEAST) for token, logprob in reversed(score.logprobs.top)}
                if score.logprobs is not _UNKNOWN else None for score in scores)
        return {"tokens": (self._name(score.token) for score in scores),
                "token_logprobs": (max(score.logprobs.token, _LEAST) if score.logprobs is not _UNKNOWN else None
                                   for score in scores),
                "top_logprobs": tops if any(score.logprobs.top for score in scores) else None,
                "text_offset": (score.offset for score in scores)}

    def _prompt(self, choice: int, found: Sequence[TokenLogprobs]) -> Json:
        return {"prompt_logprobs": prompt_scores(self._echo.ids[choice // self._echo.choices], found,
                                                 self._token_bytes)}

    def _name(self, token: int) -> str:
        spelled = self._token_bytes(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


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
