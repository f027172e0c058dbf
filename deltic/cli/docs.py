"""Writes docs/cli.md from the commands' own help: `python -m deltic.cli.docs`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from deltic.cli import COMMANDS, command_parser, foreign, top_parser

_WIDTH = 100
_HEAD = "# Command line\n\nGenerated from `--help` by `python -m deltic.cli.docs`; do not edit.\n"


def page() -> str:
    """The page as it should be."""
    parsers = [top_parser(), *map(command_parser, COMMANDS)]
    return _HEAD + "".join(f"\n## {parser.prog}\n\n```\n{_help(parser)}```\n" for parser in parsers)


def main() -> int:
    for name, write in PAGES.items():
        path = Path(__file__).parents[2] / "docs" / name
        path.write_text(write(), encoding="utf-8")
        print(path)
    return 0


def _help(parser: argparse.ArgumentParser) -> str:
    """The help at a fixed width, whatever the terminal."""
    kind: Any = parser.formatter_class
    parser.formatter_class = lambda *, prog: kind(prog, width=_WIDTH)
    return parser.format_help()


PAGES = {"cli.md": page, "migrate.md": foreign.page}


if __name__ == "__main__":
    sys.exit(main())
