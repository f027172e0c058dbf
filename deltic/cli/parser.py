"""An argument parser whose complaints are errors like all others, and types that name what is wrong."""

from __future__ import annotations

import argparse
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from deltic.errors import DelticError, show


class UsageError(DelticError):
    """The command line asks for what cannot be."""


# Marks what is no option: it came after "--", or no option begins so. An argument of a process cannot hold it.
_WORD = "\0"
MOST_BYTES = 64 << 20  # of what is read from files and pipes
_MOST = 1200  # characters of a message
_OPTION = re.compile(r"`([a-z_]+)(?:='?(\w+)'?)?`")
_DASHED = re.compile(r"-(?![A-Za-z]|-[A-Za-z]|-?\Z)", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """Takes long options in full only, and raises UsageError instead of leaving the program."""

    def __init__(self, prog: str, **settings: Any) -> None:
        super().__init__(prog, allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        dashed = "unrecognized arguments: -" in message or "ignored explicit argument" in message
        hint = "; text that begins with a dash goes after --" if dashed else ""
        raise UsageError(f"{message.replace(_WORD, '')} (see {self.prog} --help{hint})")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Unlike argparse's, says when nothing can be written."""
        (file or sys.stderr).write(message)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Types and choices see what was given, without the mark."""
        return super()._get_value(action, arg_string.removeprefix(_WORD))

    def parse_mixed(self, argv: Sequence[str]) -> argparse.Namespace:
        """Options may stand between positional arguments; what follows `--` is positional, whatever it looks like, and
        so is what no option looks like, such as -5+3=.
        """
        end = argv.index("--") if "--" in argv else len(argv)
        words = [_WORD + word if _DASHED.match(word) and not _is_number(word) else word for word in argv[:end]]
        return self.parse_intermixed_args([*words, *(_WORD + word for word in argv[end + 1:])])

    def as_option(self, message: str, keyword: str | None) -> str:
        """What the library says of a keyword, with which it begins, as a message about this command's option."""
        if keyword and flag(keyword) in self._option_string_actions:
            return re.sub(rf"^{keyword}(=\w+)?(?!\w)", r"`\g<0>`", message)
        return message


def flag(name: str) -> str:
    """The option that a keyword of the library is on the command line."""
    return "--" + name.replace("_", "-")


def as_typed(message: str) -> str:
    """A message of the library with the options that it names as they are typed here: `max_context` is --max-context,
    `vision=False` --no-vision, `device='cpu'` --device cpu."""
    return _OPTION.sub(lambda found: _typed(*found.groups()), message)


def _typed(name: str, value: str | None) -> str:
    if value == "False":
        return flag("no_" + name)
    return flag(name) if value in (None, "True") else f"{flag(name)} {value}"


def clipped(message: str) -> str:
    """A message with its beginning and its end, where the advice is, and nothing that moves a terminal's cursor.

    It may quote files and arguments without end.
    """
    if len(message) > _MOST:
        message = f"{message[:_MOST // 2]} ... {message[-_MOST // 2:]}"
    return "".join(character if character.isprintable() or character == "\n" else repr(character)[1:-1]
                   for character in message)


def _is_number(word: str) -> bool:
    with suppress(ValueError):
        return bool(float(word)) or True
    return False


def whole(low: int, high: int = 1 << 31) -> Callable[[str], int]:
    """An argument type: an integer from `low` to `high`."""
    def read(given: str) -> int:
        value = int(given) if re.fullmatch(r"-?\d{1,19}", given, re.ASCII) else None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be an integer from {low} to {high}, not {given[:40]!r}")
        return value
    return read


def existing_file(given: str) -> Path:
    """An argument type: a file that is there, or a pipe."""
    try:
        mode = os.stat(given).st_mode
    except (OSError, ValueError):
        raise argparse.ArgumentTypeError(f"there is no file {show(given)}") from None
    if stat.S_ISDIR(mode):
        raise argparse.ArgumentTypeError(f"{show(given)} is a directory; name a file")
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        raise argparse.ArgumentTypeError(f"{show(given)} is neither a file nor a pipe")
    return Path(given)


def plain_file(given: str) -> Path:
    """An argument type: a file that is there, and no pipe, as it is read more than once."""
    path = existing_file(given)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{show(given)} is a pipe; name a file")
    return path


def read_bytes(path: Path) -> bytes:
    """The content of a file or pipe; ValueError or OSError says why not."""
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES >> 20} MiB")
    return content


def read_text(path: Path) -> str:
    """The UTF-8 text of a file or pipe; ValueError or OSError says why not."""
    return read_bytes(path).decode("utf-8-sig")


def json_file(given: str) -> Any:
    """An argument type: the value in a JSON file."""
    try:
        return json.loads(read_text(existing_file(given)))
    except (OSError, ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{given} cannot be read as JSON: {error}") from error


def text(given: str) -> str:
    """An argument type: text; arguments that were not valid UTF-8 are refused."""
    try:
        return os.fsencode(given).decode() if _has_bytes(given) else given
    except (UnicodeDecodeError, UnicodeEncodeError):
        raise argparse.ArgumentTypeError("is not valid UTF-8") from None


def path_name(given: str) -> str:
    """An argument type: the name of a file or directory, which need not be there."""
    if not given:
        raise argparse.ArgumentTypeError("is empty: name a file or directory")
    return text(given)


def _has_bytes(given: str) -> bool:
    """Whether the locale could not read it, as with LANG=C; it may be UTF-8 all the same."""
    return any("\ud800" <= character <= "\udfff" for character in given)
