"""OpenAI's chat completions and completions."""

from __future__ import annotations

import time
import uuid
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deltic import __version__
from deltic.chat.choices import Choice, ChoiceDelta, TokenScore
from deltic.chat.output_router import AnswerText, Delta, ToolDelta
from deltic.params import Finish, TokenLogprobs, Usage
from deltic.server.errors import openai_event
from deltic.server.generation import GenerationStream, ServedModel, id_name
from deltic.server.http import EventStream, dump, event, written
from deltic.server.models import ModelRegistry
from deltic.server.openai_schema import (
    ChatRequest,
    CompletionRequest,
    PromptEcho,
    prepare_chat,
    prepare_completions,
)
from deltic.server.records import record_of
from deltic.server.routing import ApiRoute, Check

LEAST: Final = -9999.0
"""Logprob of an impossible token in OpenAI's answers, because JSON has no infinity."""
_DONE: Final = b"data: [DONE]\n\n"
_UNKNOWN: Final = TokenLogprobs(0.0)
"""Placeholder for the logprob of a prompt's first token, which has none."""

Json = dict[str, Any]
Spell = Callable[[int], bytes]
"""Function that returns the bytes of a token."""


def routes(models: ModelRegistry, check: Check) -> list[Route]:
    async def chat(request: Request) -> Response:
        served, body, prepared = await models.read(request, ChatRequest, prepare_chat)
        id = ChatFormatter.prefix + uuid.uuid4().hex
        run = await served.start(request, [prepared], "messages", not body.stream, body.notes.sent,
                                 "" if body.store is False else id)
        hidden = prepared.texts.again if body.include_reasoning is False else None
        formatter = ChatFormatter(served.token_bytes, bool(body.logprobs), hidden,
                                  bool(body.return_tokens_as_token_ids))
        return await _answer(request, served, run, formatter, body, id, prepared.request.ids)

    async def complete(request: Request) -> Response:
        served, body, (prepared, echo) = await models.read(request, CompletionRequest, prepare_completions)
        run = await served.start(request, prepared, "prompt", not body.stream, body.notes.sent)
        formatter = CompletionFormatter(served.token_bytes, body.logprobs is not None, echo,
                                        bool(body.return_tokens_as_token_ids))
        return await _answer(request, served, run, formatter, body, CompletionFormatter.prefix + uuid.uuid4().hex)

    return [ApiRoute("/v1/chat/completions", chat, check, body=ChatRequest),
            ApiRoute("/v1/completions", complete, check, body=CompletionRequest)]


async def _answer(request: Request, served: ServedModel, run: GenerationStream, formatter: Formatter,
                  body: ChatRequest | CompletionRequest, id: str, ids: Sequence[int] = ()) -> Response:
    """Returns or streams an answer. id: of the answer. ids: the prompt's ids, for a chat that wants its logprobs."""
    if body.stream:
        chunk = AnswerChunk(formatter.chunk_kind, served.name, id)
        return EventStream(_stream(run, formatter, chunk, body), openai_event, run.close)
    done = await served.gather(request, run)
    if isinstance(body, CompletionRequest) and body.best_of:
        done = await record_of(request).work(partial(_best, done, body.best_of, body.n or 1), run.size)
    found = done[0].done.prompt_logprobs if ids and done[0].done else None
    more = {} if found is None else {"prompt_logprobs": _prompt_logprobs(ids, found, served.token_bytes)}
    choices = (formatter.whole(done.pop(0)) for _ in range(len(done)))
    answer = AnswerChunk(formatter.whole_kind, served.name, id)
    return await written(request, answer.wrap(choices, usage=usage_fields(run.usage), **more), run.size)


def _best(choices: list[ChoiceDelta], made: int, wanted: int) -> list[ChoiceDelta]:
    """Keeps the choices of each prompt with the highest mean token probability."""
    def mean(choice: ChoiceDelta) -> float:
        return sum(score.logprobs.token for score in choice.scores) / max(len(choice.scores), 1)

    found = list[ChoiceDelta]()
    for start in range(0, len(choices), made):
        found += sorted(choices[start:start + made], key=mean, reverse=True)[:wanted]
    return [replace(choice, number=number) for number, choice in enumerate(found)]


async def _stream(run: GenerationStream, formatter: Formatter, chunk: AnswerChunk,
                  body: ChatRequest | CompletionRequest) -> AsyncIterator[bytes]:
    def with_usage(choice: Json) -> bytes:
        return event(chunk.wrap([choice], usage=total_tokens(*run.tokens)))

    encode = with_usage if body.wants_usage_always else chunk.events(**({"usage": None} if body.wants_usage else {}))
    async for deltas in run.deltas():
        if events := [encode(choice) for delta in deltas for choice in formatter.chunks(delta)]:
            yield b"".join(events)
    if body.wants_usage:
        yield event(chunk.wrap([], usage=usage_fields(run.usage)))
    yield _DONE


def total_tokens(prompt: int, completion: int) -> Json:
    """Returns the `usage` of an unfinished answer."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def usage_fields(usage: Usage) -> Json:
    """Returns the `usage` of an answer. OpenAI calls drafts "predictions"."""
    return {**total_tokens(usage.prompt_tokens, usage.completion_tokens),
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": usage.reasoning_tokens,
                "accepted_prediction_tokens": usage.accepted_tokens,
                "rejected_prediction_tokens": usage.drafted_tokens - usage.accepted_tokens}}


@dataclass(frozen=True, slots=True)
class AnswerChunk:
    """The fields of an answer other than its choices."""

    kind: str
    model: str
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, choices: Iterable[Json], **more: Any) -> Json:
        return {"id": self.id, "object": self.kind, "created": self.created, "model": self.model,
                "system_fingerprint": f"deltic-{__version__}", "choices": choices, **more}

    def events(self, **more: Any) -> Callable[[Json], bytes]:
        """Returns a function that encodes an event with one choice. All other fields are encoded once."""
        before, after = event(self.wrap((), **more)).split(b'"choices":[]')
        return lambda choice: before + b'"choices":[' + dump(choice) + b"]" + after


class ChatFormatter:
    """Formats the choices of one chat completion.

    scored: logprobs are wanted. hidden: given if the client does not want the thinking; returns an AnswerText without
    tokens, which detects the tokens of the thinking. as_ids: logprobs name tokens by their ids.
    """

    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl-"

    def __init__(self, token_bytes: Spell, scored: bool, hidden: Callable[[], AnswerText] | None = None,
                 as_ids: bool = False) -> None:
        self._token_bytes = token_bytes
        self._scored = scored
        self._hidden = hidden
        self._as_ids = as_ids
        self._begun: set[int] = set()
        self._texts: dict[int, AnswerText] = {}
        self._scores: dict[int, list[TokenScore]] = {}

    def whole(self, delta: ChoiceDelta) -> Json:
        """Returns a finished choice."""
        assert delta.done
        return {"index": delta.number, "message": self._message(delta.done),
                "logprobs": self._logprobs(self._shown(delta)),
                "finish_reason": _reason(delta.done.finish, bool(delta.done.calls))}

    def chunks(self, delta: ChoiceDelta) -> list[Json]:
        """Returns the choices of the chunks for a delta. Scores are held back until a chunk has text to carry them."""
        self._scores.setdefault(delta.number, []).extend(self._shown(delta))
        bodies: list[Json] = [_delta(part) for part in delta.deltas if not self._hidden or part.kind != "reasoning"]
        if delta.done:
            bodies.append({})
        if bodies and delta.number not in self._begun:
            self._begun.add(delta.number)
            bodies.insert(0, {"role": "assistant", "content": ""})
        choices = [self._chunk(delta.number, body) for body in bodies]
        if delta.done:
            choices[-1]["finish_reason"] = _reason(delta.done.finish, bool(delta.done.calls))
        return choices

    def _message(self, choice: Choice) -> Json:
        message: Json = {"role": "assistant", "content": choice.text, "refusal": None,
                         "reasoning_content": None if self._hidden else choice.reasoning or None}
        if choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in choice.calls]
        return message

    def _chunk(self, choice: int, body: Json) -> Json:
        scores = [] if "role" in body else self._scores.pop(choice, [])
        return {"index": choice, "delta": body, "logprobs": self._logprobs(scores) if scores else None,
                "finish_reason": None}

    def _shown(self, delta: ChoiceDelta) -> list[TokenScore]:
        """Returns the scores of a delta, without scores of hidden thinking and its tags."""
        if not self._hidden or not delta.scores:
            return delta.scores
        text = self._texts.get(delta.number) or self._texts.setdefault(delta.number, self._hidden())
        shown: list[TokenScore] = []
        for score in delta.scores:
            before = text.region
            text.take(score.token)
            if "reasoning" not in (before, text.region):
                shown.append(score)
        return shown

    def _logprobs(self, scores: Iterable[TokenScore]) -> Json | None:
        return {"content": map(self._scored_token, scores), "refusal": None} if self._scored else None

    def _scored_token(self, score: TokenScore) -> Json:
        found = score.logprobs
        tops = [scored_token(self._token_bytes, *other, self._as_ids) for other in found.top]
        return scored_token(self._token_bytes, score.token, found.token, self._as_ids) | {"top_logprobs": tops}


def scored_token(spell: Spell, token: int, logprob: float, as_id: bool = False) -> Json:
    """Returns a token and its logprob. as_id: names the token by its id."""
    spelled = spell(token)
    name = id_name(token) if as_id else spelled.decode("utf-8", "replace")
    return {"token": name, "logprob": max(logprob, LEAST), "bytes": list(spelled)}


def _delta(delta: Delta) -> Json:
    if delta.call:
        return {"tool_calls": [_call(delta.call)]}
    return {"reasoning_content" if delta.kind == "reasoning" else "content": delta.text}


def _call(call: ToolDelta) -> Json:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, "id": call.id, "type": "function",
            "function": {"name": call.name, "arguments": call.arguments}}


def _reason(finish: Finish, called: bool) -> str:
    return "tool_calls" if called and finish == "stop" else finish


class CompletionFormatter:
    """Formats the choices of one completion. scored: logprobs are wanted. as_ids: logprobs name tokens by their ids."""

    whole_kind = "text_completion"
    chunk_kind = "text_completion"
    prefix = "cmpl-"

    def __init__(self, token_bytes: Spell, scored: bool, echo: PromptEcho, as_ids: bool = False) -> None:
        self._token_bytes = token_bytes
        self._scored = scored
        self._as_ids = as_ids
        self._echo = echo
        self._begun: set[int] = set()

    def whole(self, delta: ChoiceDelta) -> Json:
        """Returns a finished choice."""
        assert delta.done
        found = delta.done.prompt_logprobs
        if found is None:
            return self._choice(delta, delta.done.text)
        ids = self._echo.ids[delta.number // self._echo.choices]
        if self._echo.scored:
            delta = replace(delta, scores=self._echoed(delta, delta.done, ids, found))
        logprobs = {"prompt_logprobs": _prompt_logprobs(ids, found, self._token_bytes)}
        return self._choice(delta, delta.done.text if delta.done else "") | logprobs

    def chunks(self, delta: ChoiceDelta) -> list[Json]:
        """Returns the choices of the chunks for a delta."""
        text = "".join(part.text for part in delta.deltas)
        return [self._choice(delta, text)] if text or delta.scores or delta.done else []

    def _echoed(self, delta: ChoiceDelta, done: Choice, ids: Sequence[int], found: Sequence[TokenLogprobs]
                ) -> list[TokenScore]:
        """Returns the scores of the prompt's tokens and of the answer's tokens."""
        text = self._echo.before(delta.number)
        scores = _prompt_scores(ids, found, text, self._token_bytes)
        scores += [score._replace(offset=score.offset + len(text)) for score in delta.scores]
        if len(done.tokens) > len(delta.scores):  # evaluations need every token, including the end-of-text token
            scores.append(TokenScore(done.tokens[-1], done.logprobs[-1], len(text) + len(done.text)))
        return scores

    def _choice(self, delta: ChoiceDelta, text: str) -> Json:
        if delta.number not in self._begun:
            self._begun.add(delta.number)
            text = self._echo.before(delta.number) + text
        return {"index": delta.number, "text": text, "logprobs": self._logprobs(delta.scores),
                "finish_reason": delta.done.finish if delta.done else None}

    def _logprobs(self, scores: Sequence[TokenScore]) -> Json | None:
        if not self._scored:
            return None
        has_tops = any(score.logprobs.top for score in scores)
        return {"tokens": (self._name(score.token) for score in scores),
                "token_logprobs": (_known(score, max(score.logprobs.token, LEAST)) for score in scores),
                "top_logprobs": (_known(score, self._tops(score)) for score in scores) if has_tops else None,
                "text_offset": (score.offset for score in scores)}

    def _tops(self, score: TokenScore) -> Json:
        return {self._name(token): max(logprob, LEAST) for token, logprob in reversed(score.logprobs.top)}

    def _name(self, token: int) -> str:
        if self._as_ids:
            return id_name(token)
        spelled = self._token_bytes(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


Formatter = ChatFormatter | CompletionFormatter


def _known(score: TokenScore, value: Any) -> Any:
    """Returns the value, or None for a prompt's first token."""
    return None if score.logprobs is _UNKNOWN else value


def _prompt_scores(ids: Sequence[int], found: Sequence[TokenLogprobs], text: str, spell: Spell) -> list[TokenScore]:
    """Returns the scores of a prompt's tokens. text: the prompt's text, to which the token offsets refer."""
    scores, offset = list[TokenScore](), 0
    decoder = getincrementaldecoder("utf-8")("replace")
    for token, logprobs in zip(ids, (_UNKNOWN, *found), strict=True):
        scores.append(TokenScore(token, logprobs, offset))
        shown = decoder.decode(spell(token))
        if len(scores) > 1 or text.startswith(shown.strip()):  # a BOS token is not in the text
            offset += len(shown)
    return scores


def _prompt_logprobs(ids: Sequence[int], found: Sequence[TokenLogprobs], spell: Spell) -> Iterator[Json | None]:
    """Yields vLLM's `prompt_logprobs`: for each prompt token its own and the most probable tokens, keyed by id."""
    yield None
    for token, score in zip(ids[1:], found, strict=True):
        ranked = [(token, score.token, score.rank)]
        ranked += [(other, logprob, rank) for rank, (other, logprob) in enumerate(score.top, 1) if other != token]
        yield {str(other): {"logprob": max(logprob, LEAST), "rank": rank,
                            "decoded_token": spell(other).decode("utf-8", "replace")}
               for other, logprob, rank in ranked}
