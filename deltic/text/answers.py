"""From the engine's events of one request to its answers; knows no engine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from deltic.errors import GenerationError
from deltic.text.deltas import AnswerCall, Delta, join
from deltic.text.front import Job, Remember
from deltic.text.stream import Router
from deltic.types import Finish, TokenLogprobs, TokenOut, Usage


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer. error: what went wrong, if finish is "error"; the rest is what came before that.
    logprobs: one per token, if asked for."""

    index: int
    text: str
    reasoning: str
    calls: tuple[AnswerCall, ...]
    tokens: tuple[int, ...]
    finish: Finish
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Output:
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

    def sound(self) -> Output:
        """The same, if the engine gave up on none of the choices; else GenerationError."""
        for choice in self.choices:
            if choice.finish == "error":
                raise GenerationError(choice.error or "the engine gave up on the answer", self)
        return self


@dataclass(slots=True)
class _Answer:
    """One choice while it grows. hidden: the request's stop ids. remember: as in Job."""

    router: Router
    hidden: frozenset[int] = frozenset()
    remember: Remember | None = None
    deltas: list[Delta] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def take(self, event: TokenOut) -> list[Delta]:
        fresh: list[Delta] = []
        if event.token is not None:
            self.tokens.append(event.token)
            # a stop id ends the answer and, like a stop string, is no part of its text
            if not (event.finish == "stop" and event.token in self.hidden):
                fresh = self.router.feed(event.token)
        if event.logprobs is not None:
            self.logprobs.append(event.logprobs)
        if event.finish:
            fresh = fresh + self.router.finish()
        self.deltas += fresh
        return fresh

    def finished(self, event: TokenOut) -> Choice:
        answer = join(self.deltas)
        assert event.finish and event.usage
        if self.remember:
            self.remember(self.tokens, event.finish)
        return Choice(event.choice, answer.content, answer.reasoning, answer.calls, tuple(self.tokens), event.finish,
                      event.usage, tuple(self.logprobs), event.error)


class Reply:
    """The choices of one job while they grow; `output` when all have ended. stopped: a callback has ended it early."""

    def __init__(self, job: Job) -> None:
        params = job.request.sampling
        self.request, self.stopped = job.request, False
        self.output: Output | None = None
        self._answers = [_Answer(job.router.copy(), frozenset(params.stop_token_ids), job.remember)
                         for _ in range(params.n)]
        self._choices: dict[int, Choice] = {}

    @property
    def tokens(self) -> int:
        """Tokens so far, of all choices."""
        return sum(len(answer.tokens) for answer in self._answers)

    def take(self, event: TokenOut) -> list[Delta]:
        """What one more event brings."""
        if event.finish and event.usage is None:  # a failure outside of any request, told once for all choices
            usage = [Usage(len(self.request.prompt), 0, len(answer.tokens)) for answer in self._answers]
            return [delta for choice, answer in enumerate(self._answers) if choice not in self._choices
                    for delta in self._take(replace(event, choice=choice, usage=usage[choice]))]
        return self._take(event)

    def _take(self, event: TokenOut) -> list[Delta]:
        answer = self._answers[event.choice]
        if self.stopped:  # what else the last steps brought is not wanted
            if not event.finish:
                return []
            event = _aborted(event, len(answer.tokens))
        deltas = answer.take(event)
        if event.finish:
            self._choices[event.choice] = answer.finished(event)
            if len(self._choices) == len(self._answers):
                self.output = Output(tuple(self._choices[index] for index in range(len(self._answers))))
        return deltas


def _aborted(event: TokenOut, tokens: int) -> TokenOut:
    """The end of an answer that was stopped after so many tokens."""
    assert event.usage
    return replace(event, token=None, logprobs=None, finish="abort", error=None,
                   usage=replace(event.usage, completion_tokens=tokens))
