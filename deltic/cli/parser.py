"""An argument parser whose complaints are errors like all others, and types that name what is wrong."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from deltic.errors import DelticError


class UsageError(DelticError):
    """The command line asks for what cannot be."""


# Marks what came after "--"; an argument of a process cannot hold it.
_WORD = "\0"


class Parser(argparse.ArgumentParser):
    """Takes long options in full only, and raises UsageError instead of leaving the program."""

    def __init__(self, prog: str, **settings: Any) -> None:
        super().__init__(prog, allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.replace(_WORD, '')} (see {self.prog} --help)")

    def parse_mixed(self, argv: Sequence[str]) -> argparse.Namespace:
        """Options may stand between positional arguments; what follows `--` is positional, whatever it looks like.

        The positional arguments must be of the type `text`.
        """
        end = argv.index("--") if "--" in argv else len(argv)
        return self.parse_intermixed_args([*argv[:end], *(_WORD + word for word in argv[end + 1:])])


def whole(low: int, high: int = 1 << 31) -> Callable[[str], int]:
    """An argument type: an integer from `low` to `high`."""
    def read(given: str) -> int:
        value = int(given) if re.fullmatch(r"-?\d{1,19}", given, re.ASCII) else None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be an integer from {low} to {high}, not {given[:40]!r}")
        return value
    return read


def existing_file(given: str) -> Path:
    """An argument type: a file that is there."""
    if not os.path.isfile(given):
        raise argparse.ArgumentTypeError(f"there is no file {given!r}")
    return Path(given)


def json_file(given: str) -> Any:
    """An argument type: the value in a JSON file."""
    try:
        return json.loads(existing_file(given).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{given} cannot be read as JSON: {error}") from error


def text(given: str) -> str:
    """An argument type: text; arguments that were not valid UTF-8 are refused."""
    try:
        given.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("is not valid UTF-8") from None
    return given.removeprefix(_WORD)
