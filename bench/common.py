"""What the benchmarks share: worker processes that take turns, and lines of results."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from deltic import __version__
from deltic.cli.output import commit, machine_facts

ROOT = Path(__file__).resolve().parents[1]
Answer = Callable[[dict[str, Any]], dict[str, Any]]


class Worker:
    """A process that loads something once and then works on tasks, one at a time and only when asked.

    python: the interpreter, where the script needs packages that this one does not have.
    """

    def __init__(self, script: str, settings: dict[str, Any], python: str = sys.executable) -> None:
        command = [python, script, "--worker", json.dumps(settings)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                         env=environment())
        self.ready = self._read()

    def ask(self, task: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with code {self._process.wait()}; its message is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def units_apart() -> AbstractContextManager[object]:
    """Models that are loaded meanwhile have pages and slots in memory of their own: for steps whose units are not those
    of the cache."""
    return patch("deltic.runner.memory.frame_layout", lambda *_: None)


def work(settings: str, start: Callable[[dict[str, Any]], tuple[dict[str, Any], Answer]]) -> None:
    """A worker's life: `start` gives what to say when ready, and the function that answers tasks."""
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get into the answers
    ready, answer = start(json.loads(settings))
    print(json.dumps(ready), file=pipe, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=pipe, flush=True)


def environment() -> dict[str, str]:
    """Ours, with this checkout's package in front. Python may keep what it compiles, as an installed package does."""
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**ours, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), ours.get("PYTHONPATH")]))}


def port_of(process: subprocess.Popen[str]) -> int:
    """The port that a server which was just started says in its first line."""
    assert process.stdout
    line = process.stdout.readline()
    found = re.search(r"http://[^:]+:(\d+)", line)
    if not found:
        raise SystemExit(f"the server did not start: {line!r}")
    return int(found[1])


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, extremes and the values."""
    return {"median": round(median(values), 4), "min": round(min(values), 4), "max": round(max(values), 4),
            "runs": [round(value, 4) for value in values]}


def _without_folder(argument: str) -> str:
    """Where files lie on one machine says nothing on another."""
    return Path(argument).name if "/" in argument and Path(argument).exists() else argument


def record(file: str, result: dict[str, Any]) -> None:
    """Append a line to results/FILE.jsonl, with what is needed to understand and repeat it, and print it."""
    line = {"bench": file, **result, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": shlex.join(["python", *map(_without_folder, sys.argv)]),
            "machine": {**machine_facts(), "threads": result.get("threads")},
            "load_average": os.getloadavg()[0], "version": __version__, "commit": commit()}
    path = ROOT / "bench" / "results" / f"{file}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as out:
        out.write(json.dumps(line) + "\n")
    print(json.dumps(line), flush=True)
