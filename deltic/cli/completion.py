"""`deltic completion`: a script with which a shell completes commands and options."""

from __future__ import annotations

import argparse

HELP = "Print a script with which a shell completes commands and options."
_EPILOG = """in bash:  source <(deltic completion bash), for example in ~/.bashrc
in zsh:   deltic completion zsh > DIRECTORY/_deltic, where DIRECTORY is in fpath"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = _EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell")


def run(args: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(whole_parser(), args.shell))
    return 0


def whole_parser() -> argparse.ArgumentParser:
    """All commands in one parser, as only completion needs them."""
    from deltic.cli import COMMANDS, command_parser

    parser = argparse.ArgumentParser("deltic")
    commands = parser.add_subparsers()
    for name, about in COMMANDS.items():
        commands.add_parser(name, parents=[command_parser(name)], add_help=False, help=about)
    return parser
