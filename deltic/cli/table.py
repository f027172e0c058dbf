"""Facts as aligned lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def table(facts: Mapping[str, Any]) -> str:
    """A line per fact; a mapping becomes an indented block under its name."""
    return "\n".join(_lines(facts, ""))


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
