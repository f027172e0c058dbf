"""What a check says, and how it is shown."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "problem"]
Fault = tuple[State, str]
"""How bad it is, and what to do about it."""

GIB = 1 << 30
_MARKS: dict[State, str] = {"ok": "ok", "warning": "warn", "problem": "FAIL"}  # from good to bad


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found. fact: one line; advice: what to do, empty if all is well."""

    name: str
    state: State
    fact: str
    advice: str = ""

    @classmethod
    def of(cls, name: str, fact: str, faults: Sequence[Fault] = ()) -> Finding:
        """As bad as the worst of its faults."""
        states: list[State] = ["ok", *(state for state, _ in faults)]
        return cls(name, max(states, key=list(_MARKS).index), " ".join(fact.split()),
                   "; ".join(advice for _, advice in faults))

    def lines(self, width: int) -> str:
        """The mark, the name in so many columns, and the fact; below them the advice."""
        advice = f"\n{'':{width + 8}}-> {self.advice}" if self.advice else ""
        return f"{_MARKS[self.state]:<4}  {self.name.replace('_', ' '):<{width}}  {self.fact}{advice}"


Check = Callable[[argparse.Namespace], Finding | None]
"""None: the check was not asked for. Its function is named after the finding."""


def gib(size: int) -> str:
    return f"{size / GIB:,.1f} GiB"
