"""`deltic chat`: a conversation. On a terminal, lines can be edited; in a pipe, each line is a message."""

from __future__ import annotations

import argparse
import base64
import json
import mimetypes
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltic.cli import options
from deltic.cli.options import open_llm
from deltic.cli.output import Screen, note, read_answer, statistics_line
from deltic.cli.parser import (
    MAX_BYTES,
    UsageError,
    as_typed,
    decoded,
    numbered_lines,
    plain_file,
    read_bytes,
    read_json,
    replace_file,
)
from deltic.cli.process import Interruption
from deltic.errors import RequestError, show

if TYPE_CHECKING:
    from deltic.chat.output_router import Delta
    from deltic.llm import LLM, Choice
    from deltic.params import SamplingParams

_COMMANDS = {
    "/set": "[NAME [VALUE]]  show the settings, reset one, or change it: temperature, think, system, ...",
    "/save": "FILE           write the conversation as JSON, as the server takes it",
    "/load": "FILE           continue a conversation that was saved",
    "/image": "FILE          add a picture to the next message; may be repeated",
    "/reset": "              forget the conversation",
    "/help": "               show this",
    "/exit": "               end, like Ctrl-D",
}
_HINT = '/help lists the commands; """ begins and ends a message of several lines; Ctrl-C stops an answer'
_QUOTES = '"""'
_THINK = {"on": True, "off": False, "default": None}
_CONTENT_PART = re.compile(r"messages\[\d+\]\.content\[(\d+)\]")

Message = dict[str, Any]


def add_chat(parser: argparse.ArgumentParser) -> None:
    parser.description = "Hold a conversation. Every line is a message; /help lists commands. Ctrl-C stops an answer."
    options.add_model(parser)
    options.add_conversation(parser)
    options.add_sampling(parser)
    options.add_engine(parser)


def run_chat(args: argparse.Namespace) -> int:
    sampling = options.sampling(args)
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    with open_llm(args) as llm:
        chat = ChatState(llm, args, sampling)
        if interactive:
            with suppress(ImportError):
                import readline  # noqa: F401  (input() uses it)
            note(_HINT)
        for text, quoted in _messages(_terminal_lines() if interactive else _piped_lines()):
            if quoted:
                chat.send(text)
            elif text == "/exit":
                break
            else:
                chat.take(text)
    return 1 if chat.failed and not interactive else 0


class ChatState:
    """The messages and settings of a conversation. `failed`: a command or an answer has failed."""

    def __init__(self, llm: LLM, args: argparse.Namespace, sampling: SamplingParams) -> None:
        self.failed = False
        self._llm, self._sampling = llm, sampling
        self._defaults = {"system": args.system, "think": args.think,
                          **{name: getattr(sampling, name) for name in options.SAMPLING}}
        self._settings = dict(self._defaults)
        self._thinking_output = args.thinking_output
        self._messages: list[Message] = []
        self._pictures: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """The messages, preceded by the system message if there is one."""
        system = self._settings["system"]
        return self._messages if system is None else [{"role": "system", "content": system}, *self._messages]

    def take(self, line: str) -> None:
        """Executes a command or sends a message."""
        name, _, rest = line.partition(" ")
        if name in _COMMANDS:
            try:
                self._execute(name, rest.strip())
            except (UsageError, RequestError, OSError) as error:
                self._fail(str(error))
        elif line.startswith("/") and line[1:].isalpha():
            note(f"there is no command {line}: /help lists them")
        else:
            self.send(line)

    def send(self, text: str) -> None:
        """Sends a message with the images that were added, unless the text is blank."""
        if text.strip():
            pictures, self._pictures = self._pictures, []
            content = [*pictures, {"type": "text", "text": text}] if pictures else text
            self._answer({"role": "user", "content": content})

    def _execute(self, name: str, rest: str) -> None:
        if name == "/reset":
            self._messages, self._pictures = [], []
            note("the conversation is forgotten")
        elif name == "/set":
            self._set(*rest.split(maxsplit=1))
        elif name in ("/save", "/load", "/image"):
            if not rest:
                raise UsageError(f"{name} needs the name of a file")
            if "\0" in rest:
                raise UsageError(f"{show(rest)} is not the name of a file: it has a NUL character")
            path = Path(os.path.expanduser(rest))  # unlike Path.expanduser, keeps ~ of unknown users
            note({"/save": self._save, "/load": self._load, "/image": self._add_picture}[name](path))
        else:
            note("\n".join(f"{command:<6} {about}" for command, about in _COMMANDS.items()) + f"\n{_HINT}")

    def _set(self, name: str = "", value: str | None = None) -> None:
        """Changes a setting, or resets it if there is no value, and shows it. Without a name, shows all settings."""
        name = name.replace("-", "_")
        if name and name not in self._settings:
            raise UsageError(f"there is no setting {show(name)}; the settings are {', '.join(self._settings)}")
        if name:
            changed = self._defaults[name] if value is None else _parsed(name, value)
            if name in options.SAMPLING:
                self._sampling = replace(self._sampling, **{name: changed})
            self._settings[name] = changed
        for known, current in self._settings.items():
            if name in ("", known):
                note(f"{known} {_shown(known, current)}")

    def _save(self, path: Path) -> str:
        """Writes the messages as the body of a request. Overwrites only files that contain conversations."""
        if path.exists():
            try:
                _read_messages(path)
            except UsageError as error:
                raise UsageError(f"{path} exists and is not a conversation: choose another name") from error
        body = json.dumps({"messages": self.messages}, indent=1, ensure_ascii=False)
        replace_file(Path(os.path.realpath(path)), body + "\n", 0o644)
        return f"saved {len(self.messages)} messages to {path}"

    def _load(self, path: Path) -> str:
        """Replaces the messages with those of a file, if the model's template accepts them."""
        messages = _read_messages(path)
        self._llm.chat_processor.chat([*messages, {"role": "user", "content": "?"}])
        count, self._settings["system"] = len(messages), None
        if messages and messages[0].get("role") == "system" and isinstance(messages[0].get("content"), str):
            self._settings["system"], messages = messages[0]["content"], messages[1:]
        self._messages = messages
        return f"loaded {count} messages from {path}"

    def _add_picture(self, path: Path) -> str:
        """Keeps an image for the next message, if the model has vision."""
        kind = mimetypes.guess_type(path.name)[0] or "image/png"
        content = read_bytes(plain_file(str(path)))
        url = f"data:{kind};base64,{base64.b64encode(content).decode()}"
        part = {"type": "image_url", "image_url": {"url": url}}
        with naming_files([path]):
            self._llm.chat_processor.chat([{"role": "user", "content": [part, {"type": "text", "text": "?"}]}])
        self._pictures.append(part)
        return f"{path.name} goes with the next message"

    def _answer(self, question: Message) -> None:
        """Answers the question. Keeps question and answer unless the answer failed."""
        try:
            deltas, choice = self._stream([*self.messages, question])
        except RequestError as error:
            self._fail(str(error))
            return
        if choice and choice.finish == "error":
            self._fail(str(choice.error))
            return
        self._messages += [question, _as_message(deltas)]

    def _stream(self, messages: list[Message]) -> tuple[list[Delta], Choice | None]:
        """Shows an answer while it is generated. Its choice is None if it was interrupted."""
        deltas: list[Delta] = []
        screen = Screen(self._thinking_output)

        def show(delta: Delta) -> None:
            deltas.append(delta)
            screen.show(delta)

        with Interruption() as interruption:
            stream, timing = read_answer(
                self._llm, lambda: self._llm.stream(messages, self._sampling, thinking=self._settings["think"]),
                show, lambda: interruption.requested)
            screen.close()
        choice = stream.output.choices[0] if stream.output else None
        if sys.stderr.isatty():
            note(statistics_line(choice, timing) if choice else "stopped")
        return deltas, choice

    def _fail(self, message: str) -> None:
        self.failed = True
        note(f"deltic: error: {as_typed(message)}")


@contextmanager
def naming_files(files: Sequence[Path]) -> Iterator[None]:
    """Makes errors about images name their files. files: sources of a message's first parts, in order."""
    try:
        yield
    except RequestError as error:
        part = _CONTENT_PART.match(error.field or "")
        if part is None or int(part[1]) >= len(files):
            raise
        file = str(files[int(part[1])])
        message = str(error).replace(f" ({show(file)})", "")
        message = message.replace(part[0], file) if part[0] in message else f"{file}: {message}"
        raise RequestError(message, error.field) from error


def _parsed(name: str, value: str) -> Any:
    """Returns the parsed value of a setting."""
    if name == "system":
        return value
    if name == "think":
        if value not in _THINK:
            raise UsageError(f"think is one of {', '.join(_THINK)}, not {show(value)}")
        return _THINK[value]
    kind = options.SAMPLING[name][0]
    try:
        return kind(value)
    except ValueError:
        expected = "an integer" if kind is int else "a number"
        raise UsageError(f"{name} must be {expected}, not {show(value)}") from None


def _shown(name: str, value: Any) -> str:
    if name == "think":
        return next(word for word, known in _THINK.items() if known is value)
    if name == "system":
        return value or "(none)"
    return "(default)" if value is None else str(value)


def _as_message(deltas: list[Delta]) -> Message:
    from deltic.chat.output_router import join

    answer = join(deltas)
    message = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    return message


def _read_messages(path: Path) -> list[Message]:
    """Returns the messages in a file: the body of a request, or a list. Raises UsageError for anything else."""
    found = read_json(path)
    messages = found.get("messages") if isinstance(found, dict) else found
    if not isinstance(messages, list) or not all(isinstance(one, dict) and "role" in one for one in messages):
        raise UsageError(f'{path} must be of the form {{"messages": [{{"role": ..., "content": ...}}, ...]}}')
    return messages


# Lines


def _messages(read: Callable[[bool], str | None]) -> Iterator[tuple[str, bool]]:
    """Yields lines, and texts of several lines between quotes, with True for the latter.

    read: returns the next line, or None to drop the text that was begun, and raises EOFError at the end. Its argument
    is True within quotes.
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
        if begun is None:
            if not line.startswith(_QUOTES):
                yield line, False
                continue
            begun, line = [], line.removeprefix(_QUOTES)
        stripped = line.rstrip()
        ends = stripped.endswith(_QUOTES)
        begun.append(stripped.removesuffix(_QUOTES) if ends else line)
        if sum(map(len, begun)) > MAX_BYTES:
            raise UsageError(f"a message has more than {MAX_BYTES >> 20} MiB, which no context holds")
        if ends:
            yield "\n".join(begun).strip("\n"), True
            begun = None
    if begun is not None:
        yield "\n".join(begun).strip("\n"), True


def _terminal_lines() -> Callable[[bool], str | None]:
    """Returns a reader of terminal lines. The first Ctrl-C gives a hint, a second in a row ends the program."""
    warned = False

    def read(within_quotes: bool) -> str | None:
        nonlocal warned
        try:
            line = input(". " if within_quotes else "> ")
        except EOFError:
            print()
            raise
        except KeyboardInterrupt:
            print()
            if warned:
                raise
            warned = True
            note("Ctrl-C again, /exit or Ctrl-D end the program")
            return None
        warned = False
        return line

    return read


def _piped_lines() -> Callable[[bool], str]:
    """Returns a reader of lines from a file or pipe."""
    lines = numbered_lines(sys.stdin.buffer, " on stdin")

    def read(within_quotes: bool) -> str:
        for number, line in lines:
            return decoded(line, f"line {number} on stdin").rstrip("\r\n")
        raise EOFError

    return read
