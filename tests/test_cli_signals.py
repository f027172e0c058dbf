"""Ctrl-C, SIGTERM and a reader that goes away end a running command without a traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A repetition penalty far below 1 repeats the prompt's words for ever.
ENDLESS = ["run", "--raw", "hello hello hello", "--repetition-penalty", "0.01", "--max-tokens", "30000",
           "--threads", "1"]


def start(*argv):
    return subprocess.Popen([sys.executable, "-m", "deltic", *argv], cwd=ROOT, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_generation(number, code):
    with start(*ENDLESS) as process:
        begun = process.stdout.read(5)
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert begun.strip() and (begun + out).endswith(b"\n") and err == b""


def test_a_closed_pipe_ends_quietly():
    with start(*ENDLESS) as process:
        assert process.stdout.read(5)
        process.stdout.close()
        assert process.wait(timeout=30) == 141
        assert process.stderr.read() == b""
