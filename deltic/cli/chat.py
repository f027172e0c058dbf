"""`deltic chat`: a conversation. Where stdin is a terminal, lines are edited; where it is a pipe, each is a turn."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from deltic.cli import options
from deltic.cli.answer import Screen, read_answer, statistics_line
from deltic.cli.models import open_llm
from deltic.cli.parser import MOST_BYTES, UsageError
from deltic.cli.signals import Interruption
from deltic.errors import RequestError

if TYPE_CHECKING:
    from deltic.engine.llm import LLM, Choice
    from deltic.text.deltas import Delta
    from deltic.types import SamplingParams

HELP = "Hold a conversation. Every line is a message; /help lists the commands. Ctrl-C stops an answer."

_COMMANDS = "/reset forgets the conversation, /exit (or Ctrl-D) ends, /help shows this; Ctrl-C stops an answer"
_PROMPT = "> "

Message = dict[str, Any]


def add(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    options.add_conversation(parser)
    options.add_sampling(parser)
    options.add_engine(parser)
    options.add_random(parser, hidden=True)


def run(args: argparse.Namespace) -> int:
    options.refuse_random(args)
    sampling = options.sampling(args)
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    with open_llm(args) as llm:
        chat = Conversation(llm, args, sampling)
        if interactive:
            with suppress(ImportError):
                import readline  # noqa: F401  (input() uses it)
            _note(_COMMANDS)
        for line in _typed_lines() if interactive else _piped_lines():
            if line == "/exit":
                break
            chat.take(line)
    return 1 if chat.failed and not interactive else 0


class Conversation:
    """The messages so far, and how the next answer is made. `failed`: an answer could not be given."""

    def __init__(self, llm: LLM, args: argparse.Namespace, sampling: SamplingParams) -> None:
        self.failed = False
        self._llm, self._sampling = llm, sampling
        self._thinking, self._thinking_output = args.think, args.thinking_output
        self._opening: list[Message] = [] if args.system is None else [{"role": "system", "content": args.system}]
        self._messages = list(self._opening)

    def take(self, line: str) -> None:
        """One line of the user: a command or a message."""
        if line == "/reset":
            self._messages = list(self._opening)
            _note("the conversation is forgotten")
        elif line == "/help" or (line.startswith("/") and line[1:].isalpha()):
            _note(_COMMANDS if line == "/help" else f"there is no command {line}: {_COMMANDS}")
        elif line.strip():
            self._answer({"role": "user", "content": line})

    def _answer(self, question: Message) -> None:
        """Answer, and keep question and answer if there was one."""
        messages = [*self._messages, question]
        deltas: list[Delta] = []
        screen = Screen(self._thinking_output)
        try:
            deltas, choice = self._play(messages, screen)
        except RequestError as error:
            self._fail(str(error))
            return
        if choice and choice.finish == "error":
            self._fail(str(choice.error))
            return
        self._messages = [*messages, _as_message(deltas)]

    def _play(self, messages: list[Message], screen: Screen) -> tuple[list[Delta], Choice | None]:
        """Show an answer; its choice is None if it was interrupted."""
        deltas: list[Delta] = []

        def show(delta: Delta) -> None:
            deltas.append(delta)
            screen.show(delta)

        with Interruption() as interruption:
            stream, meter = read_answer(
                self._llm, lambda: self._llm.stream(messages, self._sampling, thinking=self._thinking),
                show, lambda: interruption.requested)
            screen.close()
        choice = stream.output.choices[0] if stream.output else None
        if sys.stderr.isatty():
            _note(statistics_line(choice, meter) if choice else "stopped")
        return deltas, choice

    def _fail(self, message: str) -> None:
        self.failed = True
        _note(f"deltic: error: {message}")


def _as_message(deltas: list[Delta]) -> Message:
    from deltic.text.deltas import join

    answer = join(deltas)
    reasoning = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
    return {"role": "assistant", "content": answer.content, **reasoning}


def _typed_lines() -> Iterator[str]:
    """Lines from a person; Ctrl-C twice in a row ends, once gives a hint."""
    warned = False
    while True:
        try:
            line = input(_PROMPT)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            if warned:
                raise
            warned = True
            _note("Ctrl-C again, /exit or Ctrl-D end the program")
            continue
        warned = False
        yield line


def _piped_lines() -> Iterator[str]:
    for number, line in enumerate(iter(lambda: sys.stdin.buffer.readline(MOST_BYTES + 1), b""), 1):
        if len(line) > MOST_BYTES:
            raise UsageError(f"line {number} on stdin has more than {MOST_BYTES >> 20} MiB, which no context holds")
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise UsageError(f"line {number} on stdin is not valid UTF-8 (byte {error.start}): convert it "
                             "first, for example with iconv") from error


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
