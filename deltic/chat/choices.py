"""From the engine's events of one request to its answers; knows no engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from deltic.chat.deltas import Answer, AnswerCall, Delta, join, merge
from deltic.chat.output_router import AnswerText
from deltic.chat.processor import PreparedRequest
from deltic.errors import GenerationError
from deltic.params import Event, Finish, TokenEvent, TokenLogprobs, Usage

_MOST_PIECES = 256  # of an answer that are kept apart: each takes a hundred bytes besides its text


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer.

    error: what went wrong, if finish is "error"; the rest is what came before that.
    logprobs: one per token, if asked for.
    said: text, reasoning and calls in the order in which they came.
    stop: the stop string that ended it.
    prompt_logprobs: of the prompt's tokens but the first, if asked for.
    """

    index: int
    text: str
    reasoning: str
    calls: tuple[AnswerCall, ...]
    tokens: tuple[int, ...]
    finish: Finish
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
    said: tuple[Delta, ...] = field(default=(), compare=False)
    stop: str | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class ChatOutput:
    """The choices of one request. `text`, `reasoning`, `calls` are those of the first."""

    choices: tuple[Choice, ...]

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def reasoning(self) -> str:
        return self.choices[0].reasoning

    @property
    def calls(self) -> tuple[AnswerCall, ...]:
        return self.choices[0].calls

    def sound(self) -> ChatOutput:
        """The same, if the engine gave up on none of the choices; else GenerationError."""
        for choice in self.choices:
            if choice.finish == "error":
                raise GenerationError(choice.error or "the engine gave up on the answer", self)
        return self


class TokenScore(NamedTuple):
    """A token of an answer's text, its probabilities, and the characters of the answer before it."""

    token: int
    logprobs: TokenLogprobs
    offset: int


@dataclass(slots=True)
class ChoiceDelta:
    """What has come for one choice.

    number: counts the choices of all jobs.
    done: the whole choice, with its last piece.
    remember: to be called then, so that following prompts can build on it.
    """

    number: int
    deltas: list[Delta]
    scores: list[TokenScore]
    done: Choice | None = None
    remember: Callable[[], None] | None = None


@dataclass(slots=True)
class _Growing:
    """A choice while it grows.

    keeps: what it says is wanted when it is whole.
    end: its last event.
    """

    job: PreparedRequest
    text: AnswerText
    keeps: bool
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    said: list[Delta] = field(default_factory=list)
    merged: int = 0
    thoughts: int = 0
    deltas: list[Delta] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    end: TokenEvent | None = None

    def take(self, event: TokenEvent, whole: bool) -> None:
        if event.token is not None:
            self.tokens.append(event.token)
            offset, deltas, thought = self.text.take(event.token)
            self.thoughts += thought
            self.deltas += deltas
            if event.logprobs is not None and (event.finish != "stop" or self.text.stopped):
                self.scores.append(TokenScore(event.token, event.logprobs, offset))
        if event.logprobs is not None and whole:
            self.logprobs.append(event.logprobs)
        self.end = event if event.finish else None

    def piece(self, number: int) -> ChoiceDelta:
        """What has come since the last one."""
        if self.end:
            ended = self.text.ended
            self.deltas += self.text.finish(cut=self.end.finish != "stop")
        deltas, scores = merge(self.deltas) if len(self.deltas) > 1 else self.deltas, self.scores
        self.deltas, self.scores = [], []
        if self.keeps:
            self.said += deltas
            if len(self.said) - self.merged > _MOST_PIECES:
                self.said[self.merged:] = merge(self.said[self.merged:])
                self.merged = len(self.said)
        if not self.end:
            return ChoiceDelta(number, deltas, scores)
        answer = join(self.said)
        return ChoiceDelta(number, deltas, scores, self._choice(answer, self.end),
                     self.remembering(answer, self.end.finish, ended))

    def remembering(self, answer: Answer, finish: Finish | None, ended: bool = False) -> Callable[[], None] | None:
        """What notes so much of it."""
        if self.job.remember is None or finish is None:
            return None
        return partial(self.job.remember, self.tokens, finish, answer, ended)

    def _choice(self, answer: Answer, end: TokenEvent) -> Choice:
        assert end.finish and end.usage
        return Choice(end.choice, answer.content, answer.reasoning, answer.calls, tuple(self.tokens), end.finish,
                      replace(end.usage, reasoning_tokens=self.thoughts), tuple(self.logprobs), end.error,
                      tuple(merge(self.said)), self.text.stop if end.finish == "stop" else None)


class AnswerAssembler:
    """The answers to some jobs while they grow, for `LLM` and the server. tokens: so far, of all choices.

    whole: the choices are wanted when they are done, and `outputs` when all of a job are; else only as much is kept
    as has to be remembered.
    """

    def __init__(self, jobs: Sequence[PreparedRequest], whole: bool = True) -> None:
        self.jobs, self.outputs = tuple(jobs), list[ChatOutput | None]([None] * len(jobs))
        self.tokens, self._whole = 0, whole
        self._rows = {job.request.id: row for row, job in enumerate(jobs)}
        self._firsts = [*accumulate((job.request.choices for job in jobs), initial=0)]
        self._growing: dict[int, _Growing] = {}  # by number, from the first event to the last: there may be many
        self._done: list[dict[int, Choice]] = [{} for _ in jobs]
        self._stopped: set[int] = set()
        self._prompts: dict[int, tuple[TokenLogprobs, ...]] = {}  # by job: the first choice is told for all

    def row(self, event: Event) -> int:
        """Which of the jobs the event is for."""
        return self._rows[event.request]

    def take(self, events: Iterable[Event]) -> list[ChoiceDelta]:
        """What these events bring, a piece for each choice that they are for."""
        touched: dict[int, _Growing] = {}
        for news in events:
            assert isinstance(news, TokenEvent), "a vector is no answer"
            row = self._rows[news.request]
            plain = not self._stopped and (news.usage or not news.finish)
            for event in (news,) if plain else self._told(row, news):
                if event.prompt is not None:
                    self._prompts[row] = event.prompt
                number = self._firsts[row] + event.choice
                growing = self._growing.get(number) or self._begin(number, row, event.choice)
                growing.take(event, self._whole)
                self.tokens += event.token is not None
                touched[number] = growing
        return [self._piece(number, growing) for number, growing in touched.items()]

    def stop(self, row: int) -> None:
        """Take no more tokens for a job: its choices end where they are, when the engine says so."""
        self._stopped.add(row)
        if self.jobs[row].request.matcher:  # the engine may have read on
            for growing in (self._growing[number] for number in self._numbers(row) if number in self._growing):
                growing.text = growing.job.texts.again(growing.tokens)

    def stopped(self, row: int) -> bool:
        return row in self._stopped

    def close(self) -> list[Callable[[], None]]:
        """Give up the choices that are not done. What a client has seen of them is to be remembered, by calling these:
        another conversation may have had the same words, and other thinking."""
        left = [growing.remembering(join(growing.said), "abort") for growing in self._growing.values()]
        self._growing.clear()
        return [remember for remember in left if remember]

    def _numbers(self, row: int) -> range:
        return range(self._firsts[row], self._firsts[row + 1])

    def _told(self, row: int, event: TokenEvent) -> list[TokenEvent]:
        """What an event says, by choice."""
        events = [event]
        if event.finish and event.usage is None:  # a failure outside of any request, told once for all choices
            prompt, first = len(self.jobs[row].request.prompt), self._firsts[row]
            events = [replace(event, choice=number - first, usage=Usage(prompt, 0, self._tokens(number)))
                      for number in self._numbers(row) if number - first not in self._done[row]]
        if row in self._stopped:  # what else the last steps brought is not wanted
            events = [replace(event, token=None, logprobs=None, finish="abort", error=None, usage=replace(
                          event.usage, completion_tokens=self._tokens(self._firsts[row] + event.choice)))
                      for event in events if event.usage]
        return events

    def _tokens(self, number: int) -> int:
        return len(self._growing[number].tokens) if number in self._growing else 0

    def _begin(self, number: int, row: int, choice: int) -> _Growing:
        job = self.jobs[row]
        text = job.texts.again(()) if row in self._stopped else job.texts.of(choice)
        growing = self._growing[number] = _Growing(job, text, self._whole or job.remember is not None)
        return growing

    def _piece(self, number: int, growing: _Growing) -> ChoiceDelta:
        piece = growing.piece(number)
        if piece.done:
            row = self._rows[growing.job.request.id]
            if row in self._prompts:
                piece.done = replace(piece.done, prompt_logprobs=self._prompts[row])
            growing.job.texts.forget(piece.done.index)
            del self._growing[number]
            if self._whole:
                done = self._done[row]
                done[piece.done.index] = piece.done
                if len(done) == len(self._numbers(row)):
                    self.outputs[row] = ChatOutput(tuple(done[choice] for choice in sorted(done)))
        return piece
