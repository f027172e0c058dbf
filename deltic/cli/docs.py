"""`deltic completion`, and the generated pages docs/cli.md and docs/migrate.md: `python -m deltic.cli.docs`."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from deltic.cli import COMMANDS, command_parser, foreign, top_parser
from deltic.cli.parser import Parser

_WIDTH = 100
_HEAD = """# Command line

Generated from `--help` by `python -m deltic.cli.docs`; do not edit. Options that several commands have are under
[Shared options](#shared-options); all commands have `-h`, `--help` and `-v`, `--verbose`.
"""
_COMMON, _POSITIONAL = "common", "positional arguments"


def add_completion(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print a script with which a shell completes commands and options."
    parser.epilog = ("in bash:  source <(deltic completion bash), for example in ~/.bashrc\n"
                     "in zsh:   deltic completion zsh > DIRECTORY/_deltic, where DIRECTORY is in fpath")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell")


def run_completion(args: argparse.Namespace) -> int:
    import shtab

    parser = argparse.ArgumentParser("deltic")
    commands = parser.add_subparsers()
    for name, about in COMMANDS.items():
        commands.add_parser(name, parents=[command_parser(name)], add_help=False, help=about)
    print(shtab.complete(parser, args.shell))
    return 0


def page() -> str:
    """The content of docs/cli.md."""
    top = top_parser()
    top.formatter_class = lambda *, prog: argparse.RawDescriptionHelpFormatter(prog, width=_WIDTH)
    parsers = [command_parser(name) for name in COMMANDS]
    counts = Counter(text for parser in parsers for _, text in _options(parser))
    shared = {text for text, count in counts.items() if count > 1}
    universal = {text for text, count in counts.items() if count == len(parsers)}
    parts = [_HEAD, f"\n## deltic\n\n```\n{top.format_help()}```\n"]
    parts += [_command(parser, shared, universal) for parser in parsers]
    sections: dict[str, dict[str, None]] = {}
    for parser in parsers:
        for title, text in _options(parser):
            if text in shared and title != _POSITIONAL:
                sections.setdefault(title, {})[text] = None
    parts.append("\n## Shared options\n")
    parts += [f"\n### {title}\n\n```\n{''.join(texts)}```\n" for title, texts in sections.items()]
    return "".join(parts)


def _command(parser: Parser, shared: set[str], universal: set[str]) -> str:
    formatter = _formatter(parser)
    formatter.add_text(parser.description)
    lines = [formatter.format_help()]
    own: dict[str, list[str]] = {}
    references: dict[str, list[str]] = {}
    for title, text in _options(parser):
        if text in universal:
            continue
        if text in shared and title != _POSITIONAL:
            references.setdefault(title, []).append(text.split()[0].rstrip(","))
        else:
            own.setdefault(title, []).append(text)
    for title, texts in own.items():
        lines.append(f"\n{'options' if title == _COMMON else title}:\n{''.join(texts)}")
    if parser.epilog:
        lines.append(f"\n{parser.epilog}\n")
    common = [f"`{name}`" for name in references.pop(_COMMON, [])]
    links = [f"[{title}](#{title.replace(' ', '-')})" for title in references]
    block = f"\n## {parser.prog}\n\n```\nusage: {parser.short_usage()}\n\n{''.join(lines)}```\n"
    return f"{block}\nShared options: {', '.join([*common, *links])}.\n" if common or links else block


def _options(parser: Parser) -> Iterable[tuple[str, str]]:
    """Yields the title of the group and the help of each argument."""
    for group in parser._action_groups:
        for action in group._group_actions:
            if action.help == argparse.SUPPRESS:
                continue
            formatter = _formatter(parser)
            formatter.start_section("")
            formatter.add_argument(action)
            formatter.end_section()
            title = _COMMON if group.title == "options" else str(group.title)
            yield title, formatter.format_help().removeprefix(":\n").lstrip("\n")


def _formatter(parser: Parser) -> argparse.HelpFormatter:
    """A formatter of fixed width, whatever the terminal."""
    kind: Any = parser.formatter_class
    formatter: argparse.HelpFormatter = kind(prog=parser.prog, width=_WIDTH)
    formatter._action_max_length = formatter._max_help_position
    return formatter


PAGES: Final[Mapping[str, Callable[[], str]]] = {"cli.md": page, "migrate.md": foreign.page}


def main() -> int:
    for name, write in PAGES.items():
        path = Path(__file__).parents[2] / "docs" / name
        path.write_text(write(), encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
