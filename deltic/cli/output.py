"""The output of commands: tables, progress bars, answers while they are generated, the log, facts about the machine."""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from deltic.cli.parser import UsageError, as_typed
from deltic.config import available_cores

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from deltic.chat.output_router import AnswerCall, Delta
    from deltic.llm import LLM, Choice, Stream

_POLL_SECONDS = 0.1  # interval at which a progress bar of the prompt is updated


def note(text: str) -> None:
    """Prints to stderr."""
    print(text, file=sys.stderr, flush=True)


# Tables. They keep their form in a pipe, where rich would fit them to 80 columns.


def print_facts(facts: Mapping[str, Any], as_json: bool, **for_people: Any) -> None:
    """Prints facts as JSON or as a table. for_people: facts that the table shows in a different form."""
    print(json.dumps(facts, ensure_ascii=False) if as_json else table({**facts, **for_people}))


def table(facts: Mapping[str, Any], indent: str = "") -> str:
    """Returns a line for each fact. A mapping becomes an indented block under its name."""
    width = max((len(name) for name, value in facts.items() if not isinstance(value, Mapping)), default=0)
    lines = []
    for name, value in facts.items():
        label = name.replace("_", " ")
        if isinstance(value, Mapping):
            lines.append(f"{indent}{label}")
            if value:
                lines.append(table(value, indent + "  "))
        else:
            lines.append(f"{indent}{label:<{width}}  {_cell(value)}")
    return "\n".join(lines)


def grid(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a line for each row, below a line of column names. Text is aligned left, numbers right."""
    names = list(rows[0])
    cells = [[name.replace("_", " ") for name in names]]
    cells += [[_cell(row[name]) for name in names] for row in rows]
    columns = []
    for name, column in zip(names, zip(*cells, strict=True), strict=True):
        width = max(map(len, column))
        align = str.ljust if isinstance(rows[0][name], str) else str.rjust
        columns.append([align(cell, width) for cell in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def date(timestamp: float | None) -> str:
    from datetime import datetime

    try:
        return "-" if timestamp is None else datetime.fromtimestamp(timestamp).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return "?"


def gib(size: int) -> str:
    return f"{size / (1 << 30):,.1f} GiB"


def mib(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(_cell, value)) or "-"
    return f"{value:,}" if isinstance(value, int) else str(value)


# Terminal


def takes_escapes(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def takes_colors(stream: TextIO) -> bool:
    return takes_escapes(stream) and not os.environ.get("NO_COLOR")


def confirmed(question: str) -> bool:
    """Asks a question and returns True for yes. Raises UsageError without a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("nothing is deleted without asking, and there is no terminal to ask on: give --yes")
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


class Bar:
    """A progress bar on stderr, as a context. It appears after `patience` seconds, and only on a terminal."""

    def __init__(self, label: str, unit: float, unit_name: str, patience: float = 0.0) -> None:
        self._label, self._unit, self._unit_name = label, unit, unit_name
        self._due = time.monotonic() + patience
        self._shown: tuple[Progress, TaskID] | None = None
        self._enabled = takes_escapes(sys.stderr)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, done: int, total: int) -> None:
        if not self._enabled or time.monotonic() < self._due:
            return
        self._shown = self._shown or self._open()
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

        columns = TextColumn(self._label), BarColumn(), TextColumn("{task.fields[amount]}")
        progress = Progress(*columns, console=Console(stderr=True), transient=True)
        progress.start()
        return progress, progress.add_task("", amount="")


def bytes_bar(label: str) -> Bar:
    return Bar(label, 1 << 20, "MiB", 0.5)


def tokens_bar(label: str) -> Bar:
    return Bar(label, 1, "tokens", 1.0)


# Answers


@dataclass(slots=True)
class AnswerTiming:
    """The times at which an answer started, had its first tokens and ended, in seconds of `time.perf_counter`."""

    started: float
    tokens: int
    first: float | None = None
    first_tokens: int = 0
    end: float = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """The number of tokens per second after the first tokens."""
        if self.first is None or self.tokens <= self.first_tokens or self.end <= self.first:
            return None
        return (self.tokens - self.first_tokens) / (self.end - self.first)

    def timings(self) -> dict[str, float | None]:
        first = self.end if self.first is None else self.first
        rate = self.tokens_per_second
        return {"time_to_first_token_ms": round((first - self.started) * 1e3, 3),
                "total_ms": round((self.end - self.started) * 1e3, 3),
                "tokens_per_second": None if rate is None else round(rate, 3)}


def read_answer(llm: LLM, ask: Callable[[], Stream], show: Callable[[Delta], None],
                stopped: Callable[[], bool] = lambda: False) -> tuple[Stream, AnswerTiming]:
    """Starts a stream and shows its deltas until it ends or `stopped` returns True."""
    timing, before = AnswerTiming(time.perf_counter(), 0), llm.engine.stats.prompt_tokens
    with tokens_bar("reading") as bar:
        stream = ask()
        try:
            while stream.output is None and not stopped():
                deltas = stream.read(_POLL_SECONDS)
                if timing.first is None and stream.generated_tokens:
                    bar.close()
                    timing.first, timing.first_tokens = time.perf_counter(), stream.generated_tokens
                bar.update(llm.engine.stats.prompt_tokens - before, stream.prompt_tokens)
                for delta in deltas:
                    show(delta)
        finally:
            bar.close()
            stream.close()
            timing.end, timing.tokens = time.perf_counter(), stream.generated_tokens
    return stream, timing


class Screen:
    """Prints the content of an answer to stdout, and its thinking to stderr, dimmed on a terminal."""

    def __init__(self, thinking: bool = True) -> None:
        self._thinking = thinking
        self._dim = takes_colors(sys.stderr)
        self._last_content = self._last_reasoning = ""

    def show(self, delta: Delta) -> None:
        if delta.kind == "content":
            self._end_thinking()
            self._write(delta.text)
        elif delta.kind == "reasoning" and self._thinking:
            text = f"\x1b[2m{delta.text}\x1b[0m" if self._dim else delta.text
            print(text, end="", file=sys.stderr, flush=True)
            self._last_reasoning = delta.text or self._last_reasoning

    def close(self, calls: tuple[AnswerCall, ...] = ()) -> None:
        """Ends the open line, and prints the tool calls, one per line."""
        self._end_thinking()
        last = self._last_content
        if (last and not last.endswith("\n")) or not (last or calls):
            self._write("\n")
        for call in calls:
            self._write(json.dumps(call_json(call), ensure_ascii=False) + "\n")

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
        self._last_content = text or self._last_content

    def _end_thinking(self) -> None:
        if self._last_reasoning:
            note("" if self._last_reasoning.endswith("\n") else "\n")
        self._last_reasoning = ""


def call_json(call: AnswerCall) -> dict[str, Any]:
    """Returns a tool call in OpenAI's form."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def statistics_line(choice: Choice, timing: AnswerTiming) -> str:
    timings, usage = timing.timings(), choice.usage
    rate = timings["tokens_per_second"]
    speed = "" if rate is None else f" at {rate:.1f} tokens/s"
    if usage.drafted_tokens:
        speed += f" ({usage.accepted_tokens} of {usage.drafted_tokens} drafts accepted)"
    return (f"first token {timings['time_to_first_token_ms']:.0f} ms, {usage.completion_tokens} tokens{speed}, "
            f"prompt {usage.prompt_tokens} tokens ({usage.cached_tokens} cached), "
            f"peak memory {peak_memory_mib():,.0f} MiB")


# The log


class _PlainLines(logging.Formatter):
    """Formats a record as `deltic: warning: MESSAGE`. Tracebacks are shown only with --verbose."""

    def __init__(self, verbose: bool) -> None:
        super().__init__()
        self._verbose = verbose

    def format(self, record: logging.LogRecord) -> str:
        line = f"deltic: {record.levelname.lower()}: {as_typed(record.getMessage())}"
        if not record.exc_info:
            return line
        if self._verbose:
            return f"{line}\n{self.formatException(record.exc_info)}"
        kind, error, _ = record.exc_info
        return f"{line} ({kind.__name__ if kind else 'unknown'}: {as_typed(str(error))}; -v shows where)"


@contextmanager
def logging_to_stderr(verbose: bool) -> Iterator[None]:
    """Shows the warnings of the `deltic` loggers, or all records if `verbose`."""
    logger, handler = logging.getLogger("deltic"), logging.StreamHandler()
    handler.setFormatter(_PlainLines(verbose))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if verbose else logging.WARNING)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


# The machine and the code


def machine_facts() -> dict[str, Any]:
    import torch

    return {"cpu": cpu_name(), "cores": available_cores(), "memory_mib": memory_mib(),
            "python": platform.python_version(), "torch": torch.__version__}


def cpu_name() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", read_system("/proc/cpuinfo"), re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def memory_mib() -> int:
    return (os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) >> 20


def peak_memory_mib() -> float:
    """Returns the peak memory of this process. getrusage on Linux may return the peak of its parent."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", read_system("/proc/self/status"), re.MULTILINE)
    if found:
        return int(found[1]) / 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def commit() -> str | None:
    """Returns the commit of this checkout, with `+` if tracked files differ from it. None outside of a checkout."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    return None


def read_system(path: str) -> str:
    """Returns the content of a file of the operating system, or "" if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
