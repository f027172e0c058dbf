"""An argument parser that raises errors instead of exiting, hints for wrong names, argument types, and files.

argparse takes 15 ms to import, click 38 ms and typer 228 ms, which every command would pay. Neither of the latter
two reads -5+3= as a prompt.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn, TypeVar

from deltic.errors import DelticError, show


class UsageError(DelticError, argparse.ArgumentTypeError):
    """Raised for a wrong command line. If an argument type raises it, the parser adds the name of the argument."""


Number = TypeVar("Number", int, float)
MAX_BYTES = 64 << 20
"""Upper bound for the bytes that are read from a file or a pipe."""
_LITERAL = "\0"
"""Prefix of a word that is not an option although it begins with a dash. No process argument can contain it."""
_MAX_HINTS = 4
_MAX_MESSAGE = 1200
_SHORT_OPTION = re.compile(r"-[a-z]{2,4}")
_KEYWORD = re.compile(r"`([a-z_]+)(?:='?(\w+)'?)?`")
_NOT_AN_OPTION = re.compile(r"-(?![A-Za-z]|-[A-Za-z]|-?\Z)", re.DOTALL)
_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|-(inf|nan)", re.IGNORECASE)


class Parser(argparse.ArgumentParser):
    """Accepts long options only in full, and raises UsageError instead of exiting."""

    def __init__(self, prog: str, **settings: Any) -> None:
        super().__init__(prog, allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        _, found, unknown = message.partition("unrecognized arguments: ")
        looks_like_option = "unrecognized arguments: -" in message or "ignored explicit argument" in message
        hints = []
        if found and looks_like_option:
            known = [name for name, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS]
            options = [word for word in unknown.split()[:_MAX_HINTS] if word.startswith("-")]
            hints = [hint for word in options if (hint := option_hint(word, known))]
        dash = "; text that begins with a dash goes after --" if looks_like_option else ""
        raise UsageError(": ".join([message.replace(_LITERAL, ""), *hints]) + f" (see {self.prog} --help{dash})")

    def parse_mixed(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parses options and positional arguments in any order.

        Words after `--` are positional, and so is a word with a leading dash that cannot be an option, such as -5+3=.
        """
        end = argv.index("--") if "--" in argv else len(argv)
        words = []
        for word in argv[:end]:
            if _SHORT_OPTION.fullmatch(word) and option_hint(word, ()):  # argparse would read -hf as -h
                self.error(f"unrecognized arguments: {word}")
            literal = _NOT_AN_OPTION.match(word) and not _NUMBER.fullmatch(word)
            words.append(_LITERAL + word if literal else word)
        return self.parse_intermixed_args([*words, *(_LITERAL + word for word in argv[end + 1:])])

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        return super()._get_value(action, arg_string.removeprefix(_LITERAL))

    def format_short_help(self) -> str:
        """Returns the help without advanced options, and with only the first sentence of each text."""
        hidden = [action for action in self._actions if is_advanced(action)]
        if not hidden:
            return self.format_help()
        brief = copy.deepcopy(self)
        for action in brief._actions:
            action.help = argparse.SUPPRESS if is_advanced(action) else _first_sentence(action.help)
        for group in brief._action_groups:
            if all(action.help == argparse.SUPPRESS for action in group._group_actions):
                group.description = None
        brief.usage = self.short_usage()
        brief.epilog = f"{len(hidden)} more options: {self.prog} --help-all"
        return brief.format_help()

    def short_usage(self) -> str:
        words = [self.prog, "[OPTION ...]"]
        for action in self._actions:
            if not action.option_strings:
                words.append(str(action.metavar) if action.required else f"[{action.metavar}]")
        return " ".join(words)

    def print_help(self, file: Any = None) -> None:
        self._print_message(self.format_short_help(), file or sys.stdout)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Raises an error if nothing can be written; argparse would ignore that."""
        (file or sys.stderr).write(message)

    def as_option(self, message: str, keyword: str | None) -> str:
        """Quotes the keyword that begins a library's message, as an option if this command has one for it."""
        if keyword and flag(keyword) in self._option_string_actions:
            return re.sub(rf"^{keyword}(=\w+)?(?!\w)", r"`\g<0>`", message)
        return message


class HelpAll(argparse.Action):
    """Prints the help with all options."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        parser._print_message(parser.format_help(), sys.stdout)
        parser.exit()


def advanced(parser: argparse.ArgumentParser, *names: str) -> None:
    """Hides options from the short help."""
    for name in names:
        parser._option_string_actions[name].advanced = True  # type: ignore[attr-defined]


def is_advanced(action: argparse.Action) -> bool:
    return getattr(action, "advanced", False)


def _first_sentence(help: str | None) -> str | None:
    """Returns the first sentence of a help text, with the default if it is short."""
    if help in (None, argparse.SUPPRESS):
        return help
    first = re.split(r"(?<=[^0-9])[.;:] |, such as| \(default", str(help))[0].rstrip(".")
    default = re.search(r"\(default: [^)]{1,24}\)", str(help))
    return f"{first} {default[0]}" if default and default[0] not in first else first


def flag(keyword: str) -> str:
    """Returns the option for a keyword of the Python API."""
    return "--" + keyword.replace("_", "-")


def as_typed(message: str) -> str:
    """Replaces keywords in a library's message with options: `max_context` with --max-context, `vision=False` with
    --no-vision, `device='cpu'` with --device cpu."""
    def option(found: re.Match[str]) -> str:
        name, value = found.groups()
        if value == "False":
            return flag("no_" + name)
        return flag(name) if value in (None, "True") else f"{flag(name)} {value}"

    return _KEYWORD.sub(option, message)


def clipped(message: str) -> str:
    """Shortens a message that quotes long input, and escapes control characters."""
    if len(message) > _MAX_MESSAGE:
        message = f"{message[:_MAX_MESSAGE // 2]} ... {message[-_MAX_MESSAGE // 2:]}"
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in message)


# Hints


ALIASES: Final = {"list": "ls", "show": "inspect"}
"""Ollama's names for commands that also exist here."""
_NEED_RANDOM: Final = ("--random", "--layers")


def foreign_names() -> dict[str, dict[str, str]]:
    """Returns a table by engine, from its options to ours or to a sentence; and `Commands` in the same form."""
    import tomllib

    return tomllib.loads(Path(__file__).with_name("foreign.toml").read_text(encoding="utf-8"))


def option_hint(given: str, known: Iterable[str]) -> str | None:
    """Returns a hint for an unknown option: its name here, or similar names."""
    name = given.partition("=")[0]
    if name in _NEED_RANDOM:
        return f"{name} is for deltic bench and inspect: random weights have no tokenizer, so they cannot talk"
    for engine, table in foreign_names().items():
        ours = table.get(name) or table.get(name.replace("_", "-"))
        if ours:
            return f"{name}: {ours}" if " " in ours else f"{name} of {engine} is {ours} here"
    return _did_you_mean(name, [option for option in known if len(option) > 2])


def command_hint(given: str, known: Iterable[str]) -> str | None:
    """Returns a hint for an unknown command."""
    ours = foreign_names()["Commands"].get(given)
    if ours is None:
        return _did_you_mean(given, known)
    return ours if " " in ours else f"did you mean {ours}?"


def _did_you_mean(given: str, known: Iterable[str]) -> str | None:
    import difflib

    close = difflib.get_close_matches(given, list(known), n=2, cutoff=0.6)
    return f"did you mean {' or '.join(close)}?" if close else None


# Argument types


def whole(low: int, high: int = 1 << 31) -> Callable[[str], int]:
    """Returns the argument type for an integer from `low` to `high`."""
    return _number(int, low, high, "an integer")


def seconds(low: float = 0, high: float = 10**6) -> Callable[[str], float]:
    """Returns the argument type for a number of seconds from `low` to `high`."""
    return _number(float, low, high, "a number of seconds")


def _number(kind: Callable[[str], Number], low: Number, high: Number, noun: str) -> Callable[[str], Number]:
    def parse(given: str) -> Number:
        with suppress(ValueError):
            if low <= (value := kind(given)) <= high:
                return value
        raise UsageError(f"must be {noun} from {low} to {high}, not {given[:40]!r}")
    return parse


def existing_file(given: str) -> Path:
    """Argument type for an existing file or pipe."""
    try:
        mode = os.stat(given).st_mode
    except (OSError, ValueError):
        raise UsageError(f"there is no file {show(given)}") from None
    if stat.S_ISDIR(mode):
        raise UsageError(f"{show(given)} is a directory; name a file")
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        raise UsageError(f"{show(given)} is neither a file nor a pipe")
    return Path(given)


def plain_file(given: str) -> Path:
    """Argument type for an existing file that can be read more than once."""
    path = existing_file(given)
    if not path.is_file():
        raise UsageError(f"{show(given)} is a pipe; name a file")
    return path


def json_file(given: str) -> Any:
    """Argument type for the value in a JSON file."""
    return read_json(existing_file(given))


def text(given: str) -> str:
    """Argument type for text in UTF-8, independent of the locale."""
    if not any("\ud800" <= char <= "\udfff" for char in given):
        return given
    try:
        return os.fsencode(given).decode()
    except (UnicodeDecodeError, UnicodeEncodeError):
        raise UsageError("is not valid UTF-8") from None


def path_name(given: str) -> str:
    """Argument type for the name of a file or directory, which need not exist."""
    if not given:
        raise UsageError("is empty: name a file or directory")
    return text(given)


# Files


def read_bytes(path: Path) -> bytes:
    """Returns the content of a file or pipe."""
    try:
        with path.open("rb") as file:
            return read_all(file, str(path))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def read_all(file: BinaryIO, name: str) -> bytes:
    content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise UsageError(f"{name} has more than {MAX_BYTES >> 20} MiB, which no context holds")
    return content


def read_text(path: Path) -> str:
    return decoded(read_bytes(path), str(path))


def read_json(path: Path) -> Any:
    content = read_text(path)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}") from error


def open_lines(name: str) -> BinaryIO:
    """Opens a file, or standard input for `-`."""
    if name == "-":
        return sys.stdin.buffer
    try:
        return Path(name).open("rb")
    except OSError as error:
        raise UsageError(f"{show(name)} cannot be read: {error.strerror}") from error


def numbered_lines(file: BinaryIO, source: str = "") -> Iterator[tuple[int, bytes]]:
    """Yields each line with its number, from 1. source: a suffix for errors, such as ` on stdin`."""
    number = 0
    while True:
        number += 1
        try:
            line = file.readline(MAX_BYTES + 1)
        except OSError as error:
            raise UsageError(f"line {number}{source} cannot be read: {error.strerror}") from error
        if len(line) > MAX_BYTES:
            raise UsageError(f"line {number}{source} has more than {MAX_BYTES >> 20} MiB")
        if not line:
            return
        yield number, line


def decoded(content: bytes, name: str) -> str:
    """Decodes UTF-8. Raises UsageError with the name of the content."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not valid UTF-8 (byte {error.start}): convert it first, for example with "
                         "iconv") from error


def lock(file: int, path: Path, output: Path) -> None:
    """Locks the open file of a path. Raises UsageError for the output if another process has locked or replaced it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_mine = os.path.samestat(os.fstat(file), path.stat())
    except OSError:
        is_mine = False
    if not is_mine:
        raise UsageError(f"{output} is being written by another process: wait for it, or name another file")


def check_target(given: str, *suffixes: str) -> Path:
    """Returns the path of a file to write. Raises UsageError if the suffix is wrong or the directory is missing."""
    path = Path(path_name(given))
    if path.suffix.lower() not in suffixes:
        raise UsageError(f"{given} must end in {' or '.join(suffixes)}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"there is no directory {str(path.parent)!r}")
    if path.exists() and not path.is_file():
        raise UsageError(f"{show(given)} is a {'directory' if path.is_dir() else 'pipe or device'}; name a file")
    return path


def check_absent(paths: Iterable[Path], force: bool) -> None:
    for path in paths:
        if path.exists() and not force:
            raise UsageError(f"{path} exists; give --force to replace it, or another name")


def replace_file(path: Path, content: str, mode: int) -> None:
    """Replaces a file as a whole, or leaves it unchanged. Raises UsageError that names the path."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(content)
        part.chmod(mode)
        part.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
