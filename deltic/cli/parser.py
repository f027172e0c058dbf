"""An argument parser whose complaints are errors like all others, and types that name what is wrong."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from deltic.errors import DelticError, show


class UsageError(DelticError):
    """The command line asks for what cannot be."""


# Marks what is no option: it came after "--", or no option begins so. An argument of a process cannot hold it.
_WORD = "\0"
_MOST = 1200  # characters of a message
_DASHED = re.compile(r"-(?![A-Za-z]|-[A-Za-z]|-?\Z)", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """Takes long options in full only, and raises UsageError instead of leaving the program."""

    def __init__(self, prog: str, **settings: Any) -> None:
        super().__init__(prog, allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        dashed = "unrecognized arguments: -" in message or "ignored explicit argument" in message
        hint = "; text that begins with a dash goes after --" if dashed else ""
        raise UsageError(f"{message.replace(_WORD, '')} (see {self.prog} --help{hint})")

    def parse_mixed(self, argv: Sequence[str]) -> argparse.Namespace:
        """Options may stand between positional arguments; what follows `--` is positional, whatever it looks like, and
        so is what no option looks like, such as -5+3=.

        The positional arguments must be of the type `text`.
        """
        end = argv.index("--") if "--" in argv else len(argv)
        words = [_WORD + word if _DASHED.match(word) and not _is_number(word) else word for word in argv[:end]]
        return self.parse_intermixed_args([*words, *(_WORD + word for word in argv[end + 1:])])


def clipped(message: str) -> str:
    """A message with its beginning and its end, where the advice is; in between it may quote without end."""
    return message if len(message) <= _MOST else f"{message[:_MOST // 2]} ... {message[-_MOST // 2:]}"


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
    if os.path.isdir(given):
        raise argparse.ArgumentTypeError(f"{show(given)} is a directory; name a file")
    if not os.path.exists(given):
        raise argparse.ArgumentTypeError(f"there is no file {show(given)}")
    return Path(given)


def json_file(given: str) -> Any:
    """An argument type: the value in a JSON file."""
    try:
        return json.loads(existing_file(given).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{given} cannot be read as JSON: {error}") from error


def text(given: str) -> str:
    """An argument type: text; arguments that were not valid UTF-8 are refused."""
    try:
        given.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("is not valid UTF-8") from None
    return given.removeprefix(_WORD)
