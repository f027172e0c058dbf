"""`deltic chat`: a conversation. Where stdin is a terminal, lines are edited; where it is a pipe, each is a turn."""

from __future__ import annotations

import argparse
import base64
import json
import mimetypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltic.cli import options
from deltic.cli.answer import Screen, read_answer, statistics_line
from deltic.cli.models import open_llm
from deltic.cli.parser import MOST_BYTES, UsageError, as_typed, plain_file, read_bytes, read_text
from deltic.cli.pictures import naming
from deltic.cli.settings import replace_file
from deltic.cli.signals import Interruption
from deltic.errors import RequestError, show

if TYPE_CHECKING:
    from deltic.chat.deltas import Delta
    from deltic.llm import LLM, Choice
    from deltic.params import SamplingParams

HELP = "Hold a conversation. Every line is a message; /help lists the commands. Ctrl-C stops an answer."

_COMMANDS = {
    "/set": "[NAME [VALUE]]  show the settings, put one back, or change it: temperature, think, system, ...",
    "/save": "FILE           write the conversation as JSON, as the server takes it",
    "/load": "FILE           go on with a conversation that was saved",
    "/image": "FILE          show a picture with the next message; again for several",
    "/reset": "              forget the conversation",
    "/help": "               show this",
    "/exit": "               end, as Ctrl-D does",
}
_HINT = '/help lists the commands; """ begins and ends a message of several lines; Ctrl-C stops an answer'
_PROMPT, _MORE, _QUOTES = "> ", ". ", '"""'
_THINK = {"on": True, "off": False, "default": None}

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
        chat = ChatState(llm, args, sampling)
        if interactive:
            with suppress(ImportError):
                import readline  # noqa: F401  (input() uses it)
            _note(_HINT)
        for text, quoted in _messages(_Typed() if interactive else _Piped()):
            if quoted:
                chat.say(text)
            elif text == "/exit":
                break
            else:
                chat.take(text)
    return 1 if chat.failed and not interactive else 0


class ChatState:
    """The messages so far, and how the next answer is made. `failed`: something could not be done."""

    def __init__(self, llm: LLM, args: argparse.Namespace, sampling: SamplingParams) -> None:
        self.failed = False
        self._llm, self._given = llm, (sampling, args.think, args.system)
        self._sampling, self._thinking, self._system = self._given
        self._thinking_output = args.thinking_output
        self._messages: list[Message] = []
        self._shown: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """With the system message."""
        opening = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*opening, *self._messages]

    def take(self, line: str) -> None:
        """One line of the user: a command or a message."""
        name, _, rest = line.partition(" ")
        if name in _COMMANDS:
            try:
                self._obey(name, rest.strip())
            except (UsageError, RequestError, OSError) as error:
                self._fail(str(error))
        elif line.startswith("/") and line[1:].isalpha():
            _note(f"there is no command {line}: /help lists them")
        else:
            self.say(line)

    def say(self, text: str) -> None:
        """A message of the user; blank ones are none."""
        if text.strip():
            shown, self._shown = self._shown, []
            self._answer({"role": "user", "content": [*shown, {"type": "text", "text": text}] if shown else text})

    def _obey(self, name: str, rest: str) -> None:
        if name == "/reset":
            self._messages, self._shown = [], []
            _note("the conversation is forgotten")
        elif name == "/set":
            self._set(*rest.split(maxsplit=1))
        elif name in ("/save", "/load", "/image"):
            if not rest:
                raise UsageError(f"{name} needs the name of a file")
            if "\0" in rest:
                raise UsageError(f"{show(rest)} is no name of a file: it has a NUL character")
            path = Path(os.path.expanduser(rest))  # unlike Path's, it leaves users alone that are not known
            _note({"/save": self._save, "/load": self._load, "/image": self._show}[name](path))
        else:
            _note("\n".join(f"{command:<6} {about}" for command, about in _COMMANDS.items()) + f"\n{_HINT}")

    def _set(self, name: str = "", value: str | None = None) -> None:
        """Change a setting, or put it back where there is no value."""
        name, (sampling, thinking, system) = name.replace("-", "_"), self._given
        if name == "system":
            self._system = system if value is None else value
        elif name == "think":
            if value is not None and value not in _THINK:
                raise UsageError(f"think is one of {', '.join(_THINK)}, not {show(value)}")
            self._thinking = thinking if value is None else _THINK[value]
        elif name in options.SAMPLING:
            kind = options.SAMPLING[name][0]
            try:
                read = getattr(sampling, name) if value is None else kind(value)
            except ValueError:
                expected = "an integer" if kind is int else "a number"
                raise UsageError(f"{name} must be {expected}, not {show(value)}") from None
            self._sampling = replace(self._sampling, **{name: read})
        elif name:
            raise UsageError(f"there is no setting {show(name)}, but {', '.join(self._settings)}")
        for known, shown in self._settings.items():
            if name in ("", known):
                _note(f"{known} {shown}")

    @property
    def _settings(self) -> dict[str, str]:
        """All settings, in words."""
        numbers = {name: getattr(self._sampling, name) for name in options.SAMPLING}
        think = next(word for word, value in _THINK.items() if value is self._thinking)
        return {"system": self._system or "(none)", "think": think,
                **{name: "(default)" if value is None else str(value) for name, value in numbers.items()}}

    def _save(self, path: Path) -> str:
        """Write the messages as a request's body; a file that is something else is not overwritten."""
        if path.exists():
            try:
                _read_messages(path)
            except UsageError as error:
                raise UsageError(f"{path} is there, and no conversation: choose another name") from error
        body = {"messages": self.messages}
        replace_file(Path(os.path.realpath(path)), json.dumps(body, indent=1, ensure_ascii=False) + "\n", 0o644)
        return f"saved {len(self.messages)} messages to {path}"

    def _load(self, path: Path) -> str:
        """Take the messages of a file, if the model's template does."""
        messages = _read_messages(path)
        self._llm.chat_processor.chat([*messages, {"role": "user", "content": "?"}])
        opening = messages[0] if messages and messages[0].get("role") == "system" else None
        text = opening["content"] if opening and isinstance(opening.get("content"), str) else None
        self._system, self._messages = text, messages if text is None else messages[1:]
        return f"loaded {len(messages)} messages from {path}"

    def _show(self, path: Path) -> str:
        """Keep a picture, in the form that requests have, for the next message."""
        kind = mimetypes.guess_type(path.name)[0] or "image/png"
        try:
            content = read_bytes(plain_file(str(path)))
        except (argparse.ArgumentTypeError, ValueError) as error:
            raise UsageError(f"{path} cannot be read: {error}") from error
        url = f"data:{kind};base64,{base64.b64encode(content).decode()}"
        part = {"type": "image_url", "image_url": {"url": url}}
        with naming([path]):
            self._llm.chat_processor.chat([{"role": "user", "content": [part, {"type": "text", "text": "?"}]}])
        self._shown.append(part)
        return f"{path.name} goes with the next message"

    def _answer(self, question: Message) -> None:
        """Answer, and keep question and answer if there was one."""
        messages = [*self.messages, question]
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
        self._messages += [question, _as_message(deltas)]

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
        _note(f"deltic: error: {as_typed(message)}")


def _as_message(deltas: list[Delta]) -> Message:
    from deltic.chat.deltas import join

    answer = join(deltas)
    reasoning = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
    return {"role": "assistant", "content": answer.content, **reasoning}


def _read_messages(path: Path) -> list[Message]:
    """The messages of a request's body in a file, or a list of them. UsageError says why not."""
    try:
        found = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}") from error
    messages = found.get("messages") if isinstance(found, dict) else found
    if not isinstance(messages, list) or not all(isinstance(message, dict) and "role" in message
                                                 for message in messages):
        raise UsageError(f'{path} must be of the form {{"messages": [{{"role": ..., "content": ...}}, ...]}}')
    return messages


def _messages(read: Callable[[bool], str | None]) -> Iterator[tuple[str, bool]]:
    """What is said: lines, and texts between quotes on several lines (True).

    read: gives the next line, or None to drop the text that was begun, which it is told about; EOFError ends that.
    """
    begun: list[str] | None = None
    while True:
        try:
            line = read(begun is not None)
        except EOFError:
            break
        if line is None:
            begun = None
            continue
        if begun is None and line.startswith(_QUOTES):
            begun, line = [], line.removeprefix(_QUOTES)
        if begun is None:
            yield line, False
            continue
        text = line.rstrip()
        begun.append(text.removesuffix(_QUOTES) if text.endswith(_QUOTES) else line)
        if sum(map(len, begun)) > MOST_BYTES:
            raise UsageError(f"a message has more than {MOST_BYTES >> 20} MiB, which no context holds")
        if text.endswith(_QUOTES):
            yield "\n".join(begun).strip("\n"), True
            begun = None
    if begun is not None:
        yield "\n".join(begun).strip("\n"), True


class _Typed:
    """Lines from a person; Ctrl-C twice in a row ends, once gives a hint."""

    def __init__(self) -> None:
        self._warned = False

    def __call__(self, begun: bool) -> str | None:
        try:
            line = input(_MORE if begun else _PROMPT)
        except EOFError:
            print()
            raise
        except KeyboardInterrupt:
            print()
            if self._warned:
                raise
            self._warned = True
            _note("Ctrl-C again, /exit or Ctrl-D end the program")
            return None
        self._warned = False
        return line


class _Piped:
    """Lines of a file or pipe."""

    def __init__(self) -> None:
        self._number = 0

    def __call__(self, begun: bool) -> str:
        line, self._number = sys.stdin.buffer.readline(MOST_BYTES + 1), self._number + 1
        if not line:
            raise EOFError
        if len(line) > MOST_BYTES:
            raise UsageError(f"line {self._number} on stdin has more than {MOST_BYTES >> 20} MiB, which no context "
                             "holds")
        try:
            return line.decode("utf-8-sig" if self._number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise UsageError(f"line {self._number} on stdin is not valid UTF-8 (byte {error.start}): convert it "
                             "first, for example with iconv") from error


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
