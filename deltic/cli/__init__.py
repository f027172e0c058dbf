"""The command line. Each command is a module with `HELP`, `add(parser)` and `run(args)`; only the one that is asked
for is imported, and torch not before its arguments are known to be good."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, TextIO, cast

from deltic import __version__
from deltic.cli.foreign import ALIASES, command_hint
from deltic.cli.parser import Parser, ShowHelp, UsageError, as_typed, clipped, is_advanced
from deltic.cli.signals import Terminated, orderly_ends
from deltic.errors import ConfigError, DelticError

__all__ = ["COMMANDS", "command_parser", "main", "top_parser"]

COMMANDS = {
    "run": "answer one prompt",
    "chat": "hold a conversation in the terminal",
    "serve": "serve the model over HTTP",
    "batch": "answer a file of requests",
    "embed": "vectors of the texts in a file",
    "rerank": "put texts in order of how well they fit a query",
    "eval": "measure how well a model predicts a text (perplexity)",
    "bench": "measure the speed of this machine",
    "inspect": "show what a model is and how it would run here",
    "convert": "write the model as a GGUF file",
    "export": "export the model as a program for phones",
    "compile": "compile the model with TVM",
    "mtp": "take the multi-token-prediction head out of a model",
    "ps": "list the models of a running server",
    "pull": "download a model",
    "ls": "list the models that were downloaded",
    "rm": "delete a model that was downloaded",
    "connect": "show or write the settings of clients of a running server",
    "cache": "show or clear what a cache directory keeps",
    "doctor": "check the installation, and say what to do",
    "completion": "print a script that completes commands in a shell",
}
_INTERRUPTED, _TERMINATED, _BROKEN_PIPE = 130, 143, 141
_SURROUNDINGS = f"""exit codes:
  0              all is well
  1              an answer failed, doctor found a problem, or the question was answered with no
  2              an error that can be mended: the message says how
  {_INTERRUPTED}, {_TERMINATED}, {_BROKEN_PIPE}  ended by Ctrl-C, by SIGTERM, because nobody reads the output any more

variables of the environment:
  DELTIC_API_KEY    a key, where --api-key is not given (serve, connect)
  HF_HOME, HF_TOKEN, HF_HUB_OFFLINE
                    where models of the hub lie, who asks for them, and 1: do not ask
  XDG_CACHE_HOME    what deltic compiles lies below its directory deltic (default: ~/.cache)
  DELTIC_TVM_LIBRARY_PATH
                    the directory of TVM's runtime, where the package tvm is not installed
  CXX               the C++ compiler (default: g++, else clang++)
  NO_COLOR          no colours in the terminal"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 for a failed answer, 2 for an error that the caller can mend."""
    _fill_streams()
    _be_lenient()
    try:
        with orderly_ends(), _named_output():
            code = _dispatch(sys.argv[1:] if argv is None else argv)
            sys.stdout.flush()
            return code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Terminated:
        return _TERMINATED
    except BrokenPipeError:
        _drop_output()
        return _BROKEN_PIPE
    except (DelticError, OSError) as error:
        with suppress(OSError):
            print(f"deltic: error: {clipped(as_typed(str(error)))}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:
            _drop_output()
        return 2


def top_parser() -> Parser:
    """The parser of what stands before the command's own arguments."""
    commands = "\n".join(f"  {name:<11}{text}" for name, text in COMMANDS.items())
    parser = Parser("deltic", description="Inference for models that mix recurrent and attention layers.",
                    epilog=f"commands:\n{commands}\n\n`deltic COMMAND --help` explains one of them. list is another "
                           "name of ls, and show of inspect.\n\n"
                           f"{_SURROUNDINGS}",
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"deltic {__version__}")
    parser.add_argument("command", metavar="COMMAND", choices=tuple(COMMANDS), help="see below")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="of the command")
    return parser


def command_parser(name: str) -> Parser:
    """The parser of one command's arguments."""
    module = import_module(f"deltic.cli.{name}")
    parser = Parser(f"deltic {name}", description=module.HELP, add_help=False)
    parser.add_argument("-h", "--help", action=ShowHelp, show=Parser.format_short_help, help="show this help and exit")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what happens, to stderr")
    parser.set_defaults(run=module.run)
    module.add(parser)
    if any(map(is_advanced, parser._actions)):
        parser.add_argument("--help-all", action=ShowHelp, show=Parser.format_help, help="show all options and exit")
    return parser


def _dispatch(argv: Sequence[str]) -> int:
    from deltic.cli.log import logging_to_stderr

    if not argv:
        top_parser().print_help()
        return 0
    argv = [ALIASES.get(argv[0], argv[0]), *argv[1:]]
    if argv[0] not in COMMANDS and (hint := command_hint(argv[0], (*COMMANDS, *ALIASES))):
        raise UsageError(f"there is no command {argv[0]!r}: {hint} (see deltic --help)")
    top = top_parser().parse_args(argv)
    parser = command_parser(top.command)
    args = parser.parse_mixed(top.arguments)
    if getattr(args, "config", None):
        from deltic.cli.config_file import words

        args = parser.parse_mixed([*words(parser, args.config, args.model is not None), *top.arguments])
    with logging_to_stderr(args.verbose):
        try:
            code: int = args.run(args)
        except ConfigError as error:
            raise UsageError(parser.as_option(str(error), error.option)) from error
        return code


def _fill_streams() -> None:
    """Streams that were closed lead nowhere. Left closed, the next file to be opened would become one of them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def _be_lenient() -> None:
    """A terminal that cannot show a character is no reason to end an answer."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]


class _Output:
    """stdout, whose errors say so: the system's name no file."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with _named():
            return self._stream.write(text)

    def flush(self) -> None:
        with _named():
            self._stream.flush()


@contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(f"standard output cannot be written: {error.strerror}") from error


@contextmanager
def _named_output() -> Iterator[None]:
    before, sys.stdout = sys.stdout, cast("TextIO", _Output(sys.stdout))
    try:
        yield
    finally:
        sys.stdout = before


def _drop_output() -> None:
    """Nobody reads stdout any more: let what is left in its buffer go nowhere, also at the interpreter's exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
