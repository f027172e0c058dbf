"""Ctrl-C, SIGTERM and a reader that goes away end a running command without a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deltic.cli import doctor, main
from deltic.cli.output import Screen

ROOT = Path(__file__).parents[1]
# A repetition penalty far below 1 repeats the prompt's words for ever.
ENDLESS = ["run", "--raw", "hello hello hello", "--repetition-penalty", "0.01", "--max-tokens", "30000",
           "--threads", "1", "--memory", "64MiB"]


def start(*argv):
    return subprocess.Popen([sys.executable, "-m", "deltic", *argv], cwd=ROOT, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.fixture
def after_three(monkeypatch):
    """Calls a function after the third delta of an answer."""
    def call(action):
        shown, show = [], Screen.show

        def show_and_call(self, delta):
            show(self, delta)
            shown.append(delta)
            if len(shown) == 3:
                action()

        monkeypatch.setattr(Screen, "show", show_and_call)
    return call


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_generation(number, code, after_three, capsys):
    after_three(lambda: os.kill(os.getpid(), number))
    assert main(ENDLESS) == code
    out, err = capsys.readouterr()
    assert out.strip() and out.endswith("\n") and err == ""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_process(number, code):
    with start(*ENDLESS) as process:
        begun = process.stdout.read(5)
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert begun.strip() and (begun + out).endswith(b"\n") and err == b""


FRAGILE = """
import os, signal
try:
    os.kill(os.getpid(), signal.{})
    sum(range(1000))
except BaseException:
    {}
"""


@pytest.mark.parametrize("swallows", [True, False])
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_waits_for_an_import(name, code, swallows, tmp_path, monkeypatch, capsys):
    """Otherwise the library would be reported as broken, or would swallow the signal."""
    def check_fragile(args):
        import fragile  # noqa: F401
        ends.append(time.monotonic() + 5)
        while time.monotonic() < ends[0]:
            pass

    ends = []
    (tmp_path / "fragile.py").write_text(FRAGILE.format(name, "pass" if swallows else "raise ImportError('broken')"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "CHECKS", (check_fragile,))
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
    try:
        assert main(["doctor"]) == code
        assert time.monotonic() < ends[0], "the signal was lost"
    finally:
        sys.modules.pop("fragile", None)
    assert capsys.readouterr() == ("", "")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_second_signal_does_not_wait_for_an_import(tmp_path, monkeypatch):
    def check_slow(args):
        import fragile  # noqa: F401

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "CHECKS", (check_slow,))
    twice = "import os, signal, time\nfor _ in range(2):\n    os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)\n"
    (tmp_path / "fragile.py").write_text(twice)
    began = time.monotonic()
    assert main(["doctor"]) == 130 and time.monotonic() - began < 5


def test_a_background_job_ignores_ctrl_c(monkeypatch):
    def check_something(args):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(doctor, "CHECKS", (check_something,))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert main(["doctor"]) == 0
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_closed_pipe_ends_a_generation_quietly(after_three, monkeypatch, capsys):
    reading, writing = os.pipe()
    with open(writing, "w", encoding="utf-8") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        after_three(lambda: os.close(reading))
        assert main(ENDLESS) == 141
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_closed_pipe_ends_a_process_quietly():
    with start(*ENDLESS) as process:
        assert process.stdout.read(5)
        process.stdout.close()
        assert process.wait(timeout=30) == 141
        assert process.stderr.read() == b""
