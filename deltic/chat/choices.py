"""Assembles answers from the engine's events."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

from deltic.chat.history import AnswerEnd
from deltic.chat.output_router import Answer, AnswerCall, AnswerText, Delta, join, merge
from deltic.chat.processor import PreparedRequest
from deltic.errors import GenerationError, RequestError, show
from deltic.params import Event, Finish, TokenEvent, TokenLogprobs, Usage

_MAX_PIECES = 256  # pieces of an answer that are kept before they are joined


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer.

    error: the error message, if finish is "error"; the other fields then hold the answer up to the error.
    logprobs: one for each token, if requested.
    said: text, reasoning and calls in the order of generation.
    stop: the stop string that ended the answer.
    prompt_logprobs: one for each token of the prompt but the first, if requested.
    end: the position where other conversations can continue, if it is recorded.
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
    end: AnswerEnd | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class ChatOutput:
    """The choices of one request; `text`, `reasoning` and `calls` belong to the first choice."""

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
        """Returns itself. Raises GenerationError if a choice ended with an error."""
        for choice in self.choices:
            if choice.finish == "error":
                raise GenerationError(choice.error or "the engine gave up on the answer", self)
        return self


class TokenScore(NamedTuple):
    """A token of an answer, its logprobs, and the number of characters before it."""

    token: int
    logprobs: TokenLogprobs
    offset: int


@dataclass(slots=True)
class ChoiceDelta:
    """New output of one choice.

    number: index of the choice among those of all requests.
    done: the whole choice, set with its last piece.
    remember: records the choice for following prompts; to be called when it is done. Returns its end if it can be
        forked.
    """

    number: int
    deltas: list[Delta]
    scores: list[TokenScore]
    done: Choice | None = None
    remember: Callable[[], AnswerEnd | None] | None = None


@dataclass(slots=True)
class _OpenChoice:
    """A choice that is being generated.

    keeps: the whole choice is needed at the end.
    end: the last event of the choice.
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
        """Returns the output since the previous piece."""
        if self.end:
            ended = self.text.ended
            self.deltas += self.text.finish(cut=self.end.finish != "stop")
        deltas, scores = merge(self.deltas) if len(self.deltas) > 1 else self.deltas, self.scores
        self.deltas, self.scores = [], []
        if self.keeps:
            self.said += deltas
            if len(self.said) - self.merged > _MAX_PIECES:
                self.said[self.merged:] = merge(self.said[self.merged:])
                self.merged = len(self.said)
        if not self.end:
            return ChoiceDelta(number, deltas, scores)
        answer = join(self.said)
        return ChoiceDelta(number, deltas, scores, self._choice(answer, self.end),
                     self.remembering(answer, self.end.finish, ended))

    def remembering(self, answer: Answer, finish: Finish | None, ended: bool = False
                    ) -> Callable[[], AnswerEnd | None] | None:
        """Returns a function that records the choice."""
        if self.job.remember is None or finish is None:
            return None
        return partial(self.job.remember, self.tokens, finish, answer, ended)

    def _choice(self, answer: Answer, end: TokenEvent) -> Choice:
        assert end.finish and end.usage
        return Choice(end.choice, answer.content, answer.reasoning, answer.calls, tuple(self.tokens), end.finish,
                      replace(end.usage, reasoning_tokens=self.thoughts), tuple(self.logprobs), end.error,
                      tuple(merge(self.said)), self.text.stop if end.finish == "stop" else None)


class AnswerAssembler:
    """Assembles the answers to one or more requests, for `LLM` and the server.

    whole: sets `done` of finished choices, and `outputs` of finished requests; else keeps only data for answer records.
    tokens: number of tokens so far.
    """

    def __init__(self, jobs: Sequence[PreparedRequest], whole: bool = True) -> None:
        self.jobs, self.outputs = tuple(jobs), list[ChatOutput | None]([None] * len(jobs))
        self.tokens, self._whole = 0, whole
        self._rows = {job.request.id: row for row, job in enumerate(jobs)}
        self._firsts = [*accumulate((job.request.choices for job in jobs), initial=0)]
        self._open: dict[int, _OpenChoice] = {}  # by choice number, from its first to its last event
        self._done: list[dict[int, Choice]] = [{} for _ in jobs]
        self._stopped: set[int] = set()
        self._prompts: dict[int, tuple[TokenLogprobs, ...]] = {}  # by request: only the first choice has them

    def row(self, event: Event) -> int:
        return self._rows[event.request]

    def take(self, events: Iterable[Event]) -> list[ChoiceDelta]:
        """Takes events. Returns one piece for each choice that has events."""
        touched: dict[int, _OpenChoice] = {}
        for given in events:
            assert isinstance(given, TokenEvent), "a vector is no answer"
            row = self._rows[given.request]
            plain = not self._stopped and (given.usage or not given.finish)
            for event in (given,) if plain else self._by_choice(row, given):
                if event.prompt is not None:
                    self._prompts[row] = event.prompt
                number = self._firsts[row] + event.choice
                open_choice = self._open.get(number) or self._begin(number, row, event.choice)
                open_choice.take(event, self._whole)
                self.tokens += event.token is not None
                touched[number] = open_choice
        return [self._piece(number, open_choice) for number, open_choice in touched.items()]

    def set_end(self, number: int, end: AnswerEnd | None) -> None:
        """Sets the end of a finished choice in its output."""
        row = bisect_right(self._firsts, number) - 1
        done, choice = self._done[row], number - self._firsts[row]
        done[choice] = replace(done[choice], end=end)
        if self.outputs[row]:
            self.outputs[row] = ChatOutput(tuple(done[choice] for choice in sorted(done)))

    def stop(self, row: int) -> None:
        """Ignores all further tokens of a request: its choices end at their current position."""
        self._stopped.add(row)
        if self.jobs[row].request.matcher:  # the text may be ahead of the taken tokens
            for open_choice in (self._open[number] for number in self._numbers(row) if number in self._open):
                open_choice.text = open_choice.job.texts.again(open_choice.tokens)

    def stopped(self, row: int) -> bool:
        return row in self._stopped

    def close(self) -> list[Callable[[], AnswerEnd | None]]:
        """Drops unfinished choices. Returns functions that record the parts that clients have seen, so that answers
        with the same text and other reasoning are known to be ambiguous."""
        left = [open_choice.remembering(join(open_choice.said), "abort") for open_choice in self._open.values()]
        self._open.clear()
        return [remember for remember in left if remember]

    def _numbers(self, row: int) -> range:
        return range(self._firsts[row], self._firsts[row + 1])

    def _by_choice(self, row: int, event: TokenEvent) -> list[TokenEvent]:
        events = [event]
        if event.finish and event.usage is None:  # a failure for all choices
            prompt, first = len(self.jobs[row].request.prompt), self._firsts[row]
            events = [replace(event, choice=number - first, usage=Usage(prompt, 0, self._tokens(number)))
                      for number in self._numbers(row) if number - first not in self._done[row]]
        if row in self._stopped:  # ignores tokens after the stop
            events = [replace(event, token=None, logprobs=None, finish="abort", error=None, usage=replace(
                          event.usage, completion_tokens=self._tokens(self._firsts[row] + event.choice)))
                      for event in events if event.usage]
        return events

    def _tokens(self, number: int) -> int:
        return len(self._open[number].tokens) if number in self._open else 0

    def _begin(self, number: int, row: int, choice: int) -> _OpenChoice:
        job = self.jobs[row]
        text = job.texts.again(()) if row in self._stopped else job.texts.of(choice)
        open_choice = self._open[number] = _OpenChoice(job, text, self._whole or job.remember is not None)
        return open_choice

    def _piece(self, number: int, open_choice: _OpenChoice) -> ChoiceDelta:
        piece = open_choice.piece(number)
        if piece.done:
            row = self._rows[open_choice.job.request.id]
            if row in self._prompts:
                piece.done = replace(piece.done, prompt_logprobs=self._prompts[row])
            open_choice.job.texts.forget(piece.done.index)
            del self._open[number]
            if self._whole:
                done = self._done[row]
                done[piece.done.index] = piece.done
                if len(done) == len(self._numbers(row)):
                    self.outputs[row] = ChatOutput(tuple(done[choice] for choice in sorted(done)))
        return piece


def answer_end(output: Any) -> AnswerEnd:
    """Returns the end of an output of `chat` or of one of its choices. Raises RequestError if it cannot be forked."""
    choice = output.choices[0] if isinstance(output, ChatOutput) else output
    if not isinstance(choice, Choice):
        raise RequestError(f"fork_from must be an output of chat, or one of its choices, not {show(output)}",
                           "fork_from")
    if choice.end is None:
        raise RequestError("fork_from needs an answer of a conversation that has ended outside of think blocks and "
                           "calls, and not at a stop string", "fork_from")
    return choice.end
