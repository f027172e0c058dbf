"""True checkpoints that a user has: DELTIC_CHECKPOINTS names a directory of model directories and GGUF files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from deltic import LLM, SamplingParams

PLACE = os.environ.get("DELTIC_CHECKPOINTS")
TURNS = ("What is the capital of France?", "And of Italy?", "Which of the two cities is larger?")
_TOKENS = 256


def checkpoints() -> list[Path]:
    """Directories with a config.json, and GGUF files, of split ones the first part."""
    found = sorted(Path(PLACE).iterdir()) if PLACE else []
    return [path for path in found if (path / "config.json").is_file() or (
        path.suffix == ".gguf" and ("-of-" not in path.name or "-00001-of-" in path.name))]


CHECKPOINTS = [pytest.param(path, id=path.name) for path in checkpoints()] or [
    pytest.param(None, marks=pytest.mark.skip(reason="DELTIC_CHECKPOINTS does not name a directory of models"))]


def play(path: str) -> dict[str, Any]:
    """A conversation, greedily; in a process of its own, so that its memory is known."""
    with LLM(path) as llm:
        messages, finishes = list[dict[str, str]](), []
        for question in TURNS:
            messages.append({"role": "user", "content": question})
            output = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=_TOKENS), thinking=False)
            messages.append({"role": "assistant", "content": output.text})
            finishes.append(output.choices[0].finish)
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) >> 10 for line in status.splitlines() if line.startswith("VmHWM"))
    return {"answers": [message["content"] for message in messages[1::2]], "finishes": finishes, "peak_mib": peak}


@cache
def played(path: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("path", CHECKPOINTS)
def test_the_capital_of_france(path: Path) -> None:
    found = played(path)
    assert "Paris" in found["answers"][0] and found["finishes"][0] == "stop"


@pytest.mark.parametrize("path", CHECKPOINTS)
def test_three_turns(path: Path) -> None:
    found = played(path)
    assert len(found["answers"]) == len(TURNS) and all(text.strip() for text in found["answers"])
    assert set(found["finishes"]) <= {"stop", "length"}


@pytest.mark.parametrize("path", CHECKPOINTS)
def test_throughput_and_memory_are_told(path: Path) -> None:
    """Figures, and no bounds: machines differ."""
    command = [sys.executable, "-m", "deltic", "bench", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    print(f"\n{path.name}: peak memory of a conversation {played(path)['peak_mib']} MiB; {done.stdout.strip()}")


if __name__ == "__main__":
    print(json.dumps(play(sys.argv[1])))
