"""An argument parser whose complaints are errors like all others, and types that name what is wrong."""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from deltic.cli.foreign import option_hint
from deltic.errors import DelticError, show


class UsageError(DelticError):
    """The command line asks for what cannot be."""


# Marks what is no option: it came after "--", or no option begins so. An argument of a process cannot hold it.
_WORD = "\0"
MOST_BYTES = 64 << 20  # of what is read from files and pipes
_MOST_HINTS = 4
_SHORT = re.compile(r"-[a-z]{2,4}")
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
        unknown = message.partition("unrecognized arguments: ")[2].split()[:_MOST_HINTS] if dashed else []
        hints = [option_hint(word, self._shown_options) for word in unknown if word.startswith("-")]
        meant = "".join(f": {found}" for found in hints if found)
        raise UsageError(f"{message.replace(_WORD, '')}{meant} (see {self.prog} --help{hint})")

    @property
    def _shown_options(self) -> list[str]:
        return [name for name, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS]

    def format_short_help(self) -> str:
        """The help without options for experts (`advanced`), of which it says how they are shown, and with the first
        sentence of each text; whole where there are none of these."""
        hidden = {action for action in self._actions if is_advanced(action)}
        if not hidden:
            return self.format_help()
        brief = copy.deepcopy(self)
        for action in brief._actions:
            action.help = argparse.SUPPRESS if is_advanced(action) else _brief(action.help)
        for group in brief._action_groups:
            if all(action.help == argparse.SUPPRESS for action in group._group_actions):
                group.description = None
        words = " ".join(f"[{action.metavar}]" for action in self._actions if not action.option_strings)
        brief.usage = f"{self.prog} [OPTION ...] {words}"
        shown = [name for name in self._option_string_actions if name.startswith("--help-")]
        brief.epilog = f"{len(hidden)} more options: {', '.join(f'{self.prog} {name}' for name in shown)}"
        return brief.format_help()

    def format_group(self, title: str) -> str:
        """The help of one group of options."""
        formatter = self._get_formatter()
        for group in self._action_groups:
            if group.title == title:
                formatter.start_section(group.title)
                formatter.add_text(group.description)
                formatter.add_arguments(group._group_actions)
                formatter.end_section()
        return formatter.format_help()

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
        for word in argv[:end]:
            if _SHORT.fullmatch(word) and option_hint(word, ()):  # or -hf would be -h
                self.error(f"unrecognized arguments: {word}")
        words = [_WORD + word if _DASHED.match(word) and not _is_number(word) else word for word in argv[:end]]
        return self.parse_intermixed_args([*words, *(_WORD + word for word in argv[end + 1:])])

    def as_option(self, message: str, keyword: str | None) -> str:
        """What the library says of a keyword, with which it begins, as a message about this command's option."""
        if keyword and flag(keyword) in self._option_string_actions:
            return re.sub(rf"^{keyword}(=\w+)?(?!\w)", r"`\g<0>`", message)
        return message


class ShowHelp(argparse.Action):
    """Prints a part of the help: what `show` makes of the parser."""

    def __init__(self, option_strings: Sequence[str], dest: str, show: Callable[[Parser], str], help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)
        self.show = show

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, Parser)
        parser._print_message(self.show(parser), sys.stdout)
        parser.exit()


def advanced(parser: argparse.ArgumentParser, *names: str) -> None:
    """Leave options out of the short help."""
    for name in names:
        parser._option_string_actions[name].advanced = True  # type: ignore[attr-defined]


def is_advanced(action: argparse.Action) -> bool:
    return getattr(action, "advanced", False)


def _brief(help: str | None) -> str | None:
    """The first sentence, with a short default."""
    if help in (None, argparse.SUPPRESS):
        return help
    first = re.split(r"(?<=[^0-9])[.;:] |, such as| \(default", str(help))[0].rstrip(".")
    default = re.search(r"\(default: [^)]{1,24}\)", str(help))
    return f"{first} {default[0]}" if default and default[0] not in first else first


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
