"""Programs that take turns: workers that stay alive, and command lines of llama.cpp and its relatives."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from common import Worker

_FACTS = ("build_commit", "build_number", "n_batch", "n_ubatch", "type_k", "type_v", "flash_attn", "repack")
"""What llama-bench says of itself and of its settings; flash_attn -1 is automatic."""
_ROW = re.compile(r"^\|" + r"\s*([\d.]+)\s*\|" * 10 + r"\s*$", re.MULTILINE)
"""A line of llama-batched-bench's table; the eighth number is the tokens per second of the generation."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is measured: `decode`, `prefill` or `start`, with `batch` sequences of so many tokens each."""

    name: str
    prompt_tokens: int
    new_tokens: int
    batch: int = 1

    @property
    def unit(self) -> str:
        return "s" if self.name == "start" else "tokens/s"

    def small(self) -> Task:
        """The same with few tokens, which shows only that it works."""
        return replace(self, prompt_tokens=min(self.prompt_tokens, 64), new_tokens=min(self.new_tokens, 8))


@dataclass(frozen=True, slots=True)
class Measured:
    """One turn: its figure in the task's unit, and the process's peak memory in MiB."""

    value: float
    peak_mib: float
    facts: Mapping[str, Any] = field(default_factory=dict)


class Program(Protocol):
    """What can be measured again and again. facts: its version and settings."""

    facts: Mapping[str, Any]

    def measure(self) -> Measured: ...

    def close(self) -> None: ...


class Resident:
    """A worker that stays alive between its turns; where `start` is measured, every turn has a new one.

    A worker answers a task with `value` and `peak_mib`.
    """

    def __init__(self, start: Callable[[], Worker], task: Task) -> None:
        self._start, self._task = start, task
        self._worker = None if task.name == "start" else start()
        self.facts: Mapping[str, Any] = self._worker.ready if self._worker else {}

    def measure(self) -> Measured:
        if self._worker is not None:
            return Measured(**self._worker.ask(asdict(self._task)))
        started = time.perf_counter()
        worker = self._start()
        answer = worker.ask(asdict(self._task))
        seconds = time.perf_counter() - started
        worker.close()
        self.facts = worker.ready
        return Measured(seconds, answer["peak_mib"])

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()


class Command:
    """A program that runs from start to end in every turn. read: its output to tokens per second and its facts."""

    def __init__(self, command: list[str], task: Task, read: Callable[[str], tuple[float, dict[str, Any]]]) -> None:
        self._command, self._task, self._read = command, task, read
        self.facts: Mapping[str, Any] = {}

    def measure(self) -> Measured:
        output, seconds, peak = _run(self._command)
        try:
            rate, self.facts = self._read(output)
        except (ValueError, LookupError, AttributeError) as error:
            raise SystemExit(f"{shlex.join(self._command)} printed something unexpected:\n{output[-2000:]}") from error
        return Measured(seconds if self._task.name == "start" else rate, peak)

    def close(self) -> None:
        pass


def llama_bench(path: Path, model: Path, task: Task, threads: int) -> Command:
    """llama.cpp's llama-bench. Its warm-up is left out where `start` is measured."""
    sizes = {"decode": ["-p", "0", "-n", str(task.new_tokens), "-d", str(task.prompt_tokens)],
             "prefill": ["-p", str(task.prompt_tokens), "-n", "0"],
             "start": ["-p", "1", "-n", "0", "--no-warmup"]}
    return Command([*_bench(path, model, threads), *sizes[task.name]], task, _json)


def ik_llama_bench(path: Path, model: Path, task: Task, threads: int) -> Command:
    """ik_llama.cpp's llama-bench, with weights repacked while they are loaded: so it is fastest."""
    sizes = {"decode": ["-p", "0", "-n", "0", "-gp", f"{task.prompt_tokens},{task.new_tokens}"],
             "prefill": ["-p", str(task.prompt_tokens), "-n", "0"],
             "start": ["-p", "1", "-n", "0", "-w", "0"]}
    return Command([*_bench(path, model, threads), "-rtr", "1", *sizes[task.name]], task, _json)


def llama_batched_bench(path: Path, model: Path, task: Task, threads: int, *more: str) -> Command:
    """llama-batched-bench of either: sequences with prompts of their own, which generate in step."""
    context = task.batch * (task.prompt_tokens + task.new_tokens)
    command = [str(path), "-m", str(model), "-t", str(threads), "-c", str(context), "-npp", str(task.prompt_tokens),
               "-ntg", str(task.new_tokens), "-npl", str(task.batch), *more]
    return Command(command, task, _table)


def _bench(path: Path, model: Path, threads: int) -> list[str]:
    return [str(path), "-m", str(model), "-t", str(threads), "-r", "1", "-o", "json"]


def _json(output: str) -> tuple[float, dict[str, Any]]:
    """Of llama-bench's only test. Other lines may stand around the list."""
    (test,), _ = json.JSONDecoder().raw_decode(output, output.index("[\n"))
    return float(test["avg_ts"]), {name: test[name] for name in _FACTS if name in test}


def _table(output: str) -> tuple[float, dict[str, Any]]:
    rate = float(list(_ROW.finditer(output))[-1][8])
    settings = re.search(r"n_batch = (\d+), n_ubatch = (\d+), flash_attn = (-?\d+)", output)
    names = ("n_batch", "n_ubatch", "flash_attn")
    return rate, dict(zip(names, map(int, settings.groups()), strict=True)) if settings else {}


def _run(command: list[str]) -> tuple[str, float, float]:
    """What a process prints, the seconds of its life, and its peak memory in MiB.

    Linux counts this process's own memory as the least peak of any that it starts: little beside a model.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors, tempfile.TemporaryDirectory() as place:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, cwd=place)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        text, message = (_text(file) for file in (out, errors))
    if process.returncode:
        raise SystemExit(f"{shlex.join(command)} ended with code {process.returncode}:\n{message[-2000:]}")
    return text, seconds, usage.ru_maxrss / 1024


def _text(file: Any) -> str:
    file.seek(0)
    found: str = file.read().decode(errors="replace")
    return found
