"""Questions, and progress bars, which appear only where somebody may be watching and there is something to wait for."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, TextIO

from deltic.cli.parser import UsageError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_LOAD_PATIENCE, _READ_PATIENCE = 0.5, 1.0


def takes_escapes(stream: TextIO) -> bool:
    """Whether somebody sees this stream on a terminal that does more than show characters."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def takes_colors(stream: TextIO) -> bool:
    """Whether colours and the like are wanted there, too."""
    return takes_escapes(stream) and not os.environ.get("NO_COLOR")


def confirmed(question: str) -> bool:
    """Whether somebody says yes. UsageError where nobody can be asked."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("nothing is deleted without asking, and there is no terminal to ask on: give --yes")
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


class Bar:
    """A progress bar on stderr, shown from `patience` seconds on, and only on a terminal."""

    def __init__(self, label: str, unit: float, unit_name: str, patience: float = 0.0) -> None:
        self._label, self._unit, self._unit_name = label, unit, unit_name
        self._due = time.monotonic() + patience
        self._shown: tuple[Progress, TaskID] | None = None
        self._enabled = takes_escapes(sys.stderr)

    def update(self, done: int, total: int) -> None:
        if not self._enabled or time.monotonic() < self._due:
            return
        if self._shown is None:
            self._shown = self._open()
        progress, task = self._shown
        amount = f"{done / self._unit:,.0f}/{total / self._unit:,.0f} {self._unit_name}"
        progress.update(task, completed=done, total=total, amount=amount)

    def close(self) -> None:
        if self._shown:
            self._shown[0].stop()
        self._shown, self._enabled = None, False

    def _open(self) -> tuple[Progress, TaskID]:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        progress = Progress(TextColumn(self._label), BarColumn(), TextColumn("{task.fields[amount]}"),
                            console=Console(stderr=True), transient=True)
        progress.start()
        return progress, progress.add_task("", amount="")


def loading_bar() -> Bar:
    return Bar("loading", 1 << 20, "MiB", _LOAD_PATIENCE)


def reading_bar() -> Bar:
    return Bar("reading", 1, "tokens", _READ_PATIENCE)
