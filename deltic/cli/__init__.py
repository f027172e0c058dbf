"""The command line. A command NAME is a pair of functions, `add_NAME(parser)` and `run_NAME(args)`.

Only the module of the requested command is imported, and torch only after the command's arguments were checked.
"""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module

from deltic import __version__
from deltic.cli.parser import ALIASES, HelpAll, Parser, UsageError, as_typed, clipped, command_hint, is_advanced
from deltic.cli.process import Terminated, discard_stdout, open_closed_streams, signals_raise
from deltic.errors import ConfigError, DelticError

__all__ = ["COMMANDS", "command_parser", "main", "top_parser"]

COMMANDS = {
    "run": "answer one prompt",
    "chat": "hold a conversation in the terminal",
    "serve": "serve models over HTTP",
    "batch": "answer a file of requests",
    "embed": "compute vectors of the texts in a file",
    "rerank": "sort texts by how well they match a query",
    "eval": "measure the perplexity of a text",
    "bench": "measure the speed of this machine",
    "inspect": "show a model's shape and how it would run here",
    "convert": "write a model as a GGUF file",
    "export": "export a model as a program for phones",
    "compile": "compile a model with TVM",
    "mtp": "extract the multi-token-prediction head of a model",
    "ps": "list the models of a running server",
    "top": "show what a running server and its replicas do",
    "pull": "download a model",
    "ls": "list downloaded models",
    "rm": "delete a downloaded model",
    "connect": "show or write client settings for a running server",
    "cache": "show or clear the contents of a cache directory",
    "state": "save, load and copy what a model has read, as files",
    "doctor": "check the installation and suggest fixes",
    "completion": "print a script that completes commands in a shell",
}
_MODULES = {"rerank": "embed", "export": "convert", "compile": "convert", "mtp": "convert", "ps": "connect",
            "pull": "cache", "ls": "cache", "rm": "cache", "completion": "docs"}
"""The module of each command that has no module of its own name."""
_INTERRUPTED, _TERMINATED, _BROKEN_PIPE = 130, 143, 141
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_EPILOG = f"""exit codes:
  0              success
  1              an answer failed, doctor found a problem, or a confirmation was refused
  2              an error that you can fix: the message says how
  {_INTERRUPTED}, {_TERMINATED}, {_BROKEN_PIPE}  ended by Ctrl-C, by SIGTERM, because the reader of the output has gone

environment variables:
  DELTIC_API_KEY    API key if --api-key is not given (serve, connect, ps, top)
  DELTIC_CARD       restrict the GPU kernels to another card: sm_80, sm_86, sm_89, sm_90, sm_100 or sm_120
  HF_HOME           where models of the Hugging Face hub are kept
  HF_TOKEN          token for the hub
  HF_HUB_OFFLINE    1: never ask the hub
  XDG_CACHE_HOME    compiled files are kept below its directory deltic (default: ~/.cache)
  DELTIC_TVM_LIBRARY_PATH
                    directory of TVM's runtime if the package tvm is not installed
  CXX               the C++ compiler (default: g++, else clang++)
  NO_COLOR          no colours in the terminal"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, 1 for a failed answer, 2 for an error that the caller can fix."""
    open_closed_streams()
    try:
        with signals_raise():
            code = _dispatch(sys.argv[1:] if argv is None else argv)
            sys.stdout.flush()
            return code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Terminated:
        return _TERMINATED
    except BrokenPipeError:
        discard_stdout()
        return _BROKEN_PIPE
    except (DelticError, OSError) as error:
        message = str(error)
        if isinstance(error, OSError) and error.filename is None and error.errno in _DISK_ERRORS:
            message = f"standard output cannot be written: {error.strerror}"  # errors of other files name their file
        with suppress(OSError):
            print(f"deltic: error: {clipped(as_typed(message))}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:
            discard_stdout()
        return 2


def top_parser() -> Parser:
    """Returns the parser of the arguments before the command's own."""
    commands = "\n".join(f"  {name:<11}{text}" for name, text in COMMANDS.items())
    parser = Parser("deltic", description="Inference for models that mix recurrent and attention layers.",
                    epilog=f"commands:\n{commands}\n\n`deltic COMMAND --help` explains a command. list is an alias of "
                           f"ls, and show of inspect.\n\n{_EPILOG}",
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"deltic {__version__}")
    parser.add_argument("command", metavar="COMMAND", choices=tuple(COMMANDS), help="see below")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="arguments of the command")
    return parser


def command_parser(name: str) -> Parser:
    """Returns the parser of one command's arguments."""
    parser = Parser(f"deltic {name}", add_help=False)
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.add_argument("-v", "--verbose", action="store_true", help="log details to stderr")
    _function(f"add_{name}", name)(parser)
    if any(map(is_advanced, parser._actions)):
        parser.add_argument("--help-all", action=HelpAll, nargs=0, dest=argparse.SUPPRESS, default=argparse.SUPPRESS,
                            help="show all options and exit")
    return parser


def _function(function: str, command: str) -> Callable[..., int]:
    module = import_module(f"deltic.cli.{_MODULES.get(command, command)}")
    found: Callable[..., int] = getattr(module, function)
    return found


def _dispatch(argv: Sequence[str]) -> int:
    if not argv:
        top_parser().print_help()
        return 0
    name = ALIASES.get(argv[0], argv[0])
    if name not in COMMANDS and not name.startswith("-") and (hint := command_hint(name, (*COMMANDS, *ALIASES))):
        raise UsageError(f"there is no command {name!r}: {hint} (see deltic --help)")
    top = top_parser().parse_args([name, *argv[1:]])
    parser = command_parser(name)
    args = parser.parse_mixed(top.arguments)
    if getattr(args, "config", None):
        from deltic.cli.options import options_of

        args = parser.parse_mixed([*options_of(parser, args.config, args.model is not None), *top.arguments])
    from deltic.cli.output import logging_to_stderr

    with logging_to_stderr(args.verbose):
        try:
            return _function(f"run_{name}", name)(args)
        except ConfigError as error:
            raise UsageError(parser.as_option(str(error), error.option)) from error
