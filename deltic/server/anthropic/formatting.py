"""What Anthropic's clients get: content blocks, whole and as events, and errors."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import groupby
from typing import Any

from pydantic_core import from_json
from starlette.responses import Response

from deltic.chat.choices import Choice
from deltic.chat.deltas import Delta
from deltic.params import Usage
from deltic.server.anthropic.schema import NO_THREADS
from deltic.server.http import Problem, event, json_response, problem_of

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
          429: "rate_limit_error", 529: "overloaded_error"}
_OVERLOADED = 529
_REASONS = {"stop": "end_turn", "length": "max_tokens"}

Json = dict[str, Any]
PATH = "/v1/messages"
"""Where Anthropic's clients ask."""
PING = event({"type": "ping"}, "ping")


def error_response(problem: Problem) -> Response:
    """A problem in Anthropic's shape; what may be served later has the status that its clients know for that."""
    status = _OVERLOADED if problem.status == 503 and problem.retry_after is not None else problem.status
    response = json_response(error_fields(problem, status) | {"request_id": problem.request_id}, status)
    if problem.retry_after is not None:
        response.headers["retry-after"] = str(problem.retry_after)
    return response


def error_event(error: Exception) -> bytes:
    """The end of a stream that failed."""
    problem = problem_of(error)
    return event(error_fields(problem), "error")


def error_fields(problem: Problem, status: int | None = None) -> Json:
    """The body of an error. status: that it has here, if that is another one."""
    status = status or problem.status
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    named = problem.param is None or problem.param in problem.message
    details = {"details": {"error_code": NO_THREADS, "unsupported": [problem.param]}}
    return {"type": "error", "error": {
        "type": kind, "message": problem.message if named else f"{problem.param}: {problem.message}",
        **(details if problem.code == NO_THREADS else {})}}


def usage_fields(usage: Usage) -> Json:
    """The `usage` of an answer. What is kept for later costs nothing and is not counted."""
    return {"input_tokens": usage.prompt_tokens - usage.cached_tokens, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens, "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens}}


def message(model: str, usage: Usage, content: Iterable[Json], stopped: Json) -> Json:
    """A message, or the empty one that a stream begins with. stopped: its stop fields."""
    return {"id": "msg_" + uuid.uuid4().hex, "type": "message", "role": "assistant", "model": model,
            "content": content, **stopped, "usage": usage_fields(usage)}


UNSTOPPED: Json = {"stop_reason": None, "stop_sequence": None}
"""The stop fields of a message that goes on."""


def stop_fields(choice: Choice, context: int) -> Json:
    """Why an answer ended. context: tokens that the prompt and the answer may have together."""
    if choice.finish == "length" and choice.usage.prompt_tokens + choice.usage.completion_tokens >= context:
        return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
    if choice.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop}
    called = choice.calls and choice.finish == "stop"
    return {"stop_reason": "tool_use" if called else _REASONS[choice.finish], "stop_sequence": None}


def blocks(said: Iterable[Delta], shows_thinking: bool) -> Iterator[Json]:
    """The content of a whole answer."""
    for (kind, _), group in groupby(said, _key):
        deltas = list(group)
        if kind == "tool":
            yield _call(deltas) | {"input": _input(deltas)}
            continue
        text = "".join(delta.text for delta in deltas)
        yield _thought(text, shows_thinking) if kind == "reasoning" else {"type": "text", "text": text}


class Blocks:
    """The content of one answer as events, while it comes."""

    def __init__(self, shows_thinking: bool) -> None:
        self._shows_thinking, self._index = shows_thinking, -1
        self._open: Any = None
        self._thoughts: list[str] = []

    def events(self, deltas: Iterable[Delta]) -> Iterator[Json]:
        """What these deltas become."""
        for delta in deltas:
            if _key(delta) != self._open:
                yield from self.close()
                self._open, self._index = _key(delta), self._index + 1
                yield {"type": "content_block_start", "index": self._index, "content_block": _begun(delta)}
            if piece := self._piece(delta):
                yield {"type": "content_block_delta", "index": self._index, "delta": piece}

    def close(self) -> Iterator[Json]:
        """The end of the open block."""
        if self._open is None:
            return
        if self._open[0] == "reasoning":
            signed = signature("".join(self._thoughts))
            yield {"type": "content_block_delta", "index": self._index,
                   "delta": {"type": "signature_delta", "signature": signed}}
            self._thoughts.clear()
        self._open = None
        yield {"type": "content_block_stop", "index": self._index}

    def _piece(self, delta: Delta) -> Json | None:
        if delta.call:
            arguments = delta.call.arguments
            return {"type": "input_json_delta", "partial_json": arguments} if arguments else None
        if delta.kind != "reasoning":
            return {"type": "text_delta", "text": delta.text}
        self._thoughts.append(delta.text)
        return {"type": "thinking_delta", "thinking": delta.text} if self._shows_thinking else None


def signature(thoughts: str) -> str:
    """What stands for a signature: nobody checks it, as thinking is told by its text."""
    return "deltic-" + blake2b(thoughts.encode("utf-8", "replace"), digest_size=16).hexdigest()


def _key(delta: Delta) -> tuple[str, int | None]:
    return delta.kind, delta.call.index if delta.call else None


def _begun(delta: Delta) -> Json:
    if delta.kind == "tool":
        return _call([delta]) | {"input": {}}
    if delta.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _call(deltas: Sequence[Delta]) -> Json:
    calls = [delta.call for delta in deltas if delta.call]
    return {"type": "tool_use", "id": calls[0].id, "name": "".join(call.name or "" for call in calls)}


def _input(deltas: Sequence[Delta]) -> Any:
    """The arguments as an object; of a call that was cut, those that are whole."""
    text = "".join(delta.call.arguments for delta in deltas if delta.call)
    return from_json(text or "{}", allow_partial=True)


def _thought(text: str, shown: bool) -> Json:
    return {"type": "thinking", "thinking": text if shown else "", "signature": signature(text)}
