"""Facts as aligned lines, and rows as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any


def table(facts: Mapping[str, Any]) -> str:
    """A line per fact; a mapping becomes an indented block under its name."""
    return "\n".join(_lines(facts, ""))


def grid(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line per row, which all have the keys of the first; text stands left, numbers right."""
    names = list(rows[0])
    cells = [[name.replace("_", " ") for name in names], *([_show(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    left = [isinstance(rows[0][name], str) for name in names]
    return "\n".join("  ".join(cell.ljust(width) if is_left else cell.rjust(width) for cell, width, is_left
                               in zip(line, widths, left, strict=True)).rstrip() for line in cells)


def date(seconds: float | None) -> str:
    """Seconds since 1970 as a day and a minute."""
    try:
        return "-" if seconds is None else datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return "?"


def _lines(facts: Mapping[str, Any], indent: str) -> list[str]:
    width = max((len(name) for name, value in facts.items() if not isinstance(value, Mapping)), default=0)
    lines: list[str] = []
    for name, value in facts.items():
        label = name.replace("_", " ")
        if isinstance(value, Mapping):
            lines += [f"{indent}{label}", *_lines(value, indent + "  ")]
        else:
            lines.append(f"{indent}{label:<{width}}  {_show(value)}")
    return lines


def _show(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(_show, value)) or "-"
    return f"{value:,}" if isinstance(value, int) else str(value)
