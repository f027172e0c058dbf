"""`deltic chat`: turns, commands and interruptions."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deltic.cli import chat, main
from deltic.cli.answer import Screen
from deltic.engine.llm import LLM
from deltic.engine.runtime import Runtime
from deltic.engine.worker import Worker

ROOT = Path(__file__).parents[1]
SHORT = ["--max-tokens", "4", "--threads", "1"]


@pytest.fixture
def prompts(monkeypatch):
    """The messages of every answer that was asked for."""
    asked, stream = [], LLM.stream

    def spy(self, messages, *args, **options):
        asked.append([(message["role"], message["content"]) for message in messages])
        return stream(self, messages, *args, **options)

    monkeypatch.setattr(LLM, "stream", spy)
    return asked


def talk(monkeypatch, text, *argv, code=0):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text if isinstance(text, bytes) else text.encode())))
    assert main(["chat", *SHORT, *argv]) == code


def test_turns_build_on_each_other(monkeypatch, prompts, capsys):
    talk(monkeypatch, "Hi\n\nAnd you?", "--system", "Be kind")
    out, err = capsys.readouterr()
    first, second = prompts
    assert first == [("system", "Be kind"), ("user", "Hi")]
    assert second[:2] == first and second[3] == ("user", "And you?")
    role, answer = second[2]
    assert role == "assistant" and out.startswith(answer)
    assert err == ""


def test_history_reaches_the_prompts(monkeypatch, capsys):
    asked, submit = [], Worker.submit

    def spy(self, requests, listener, reply):
        asked.extend(requests)
        submit(self, requests, listener, reply)

    monkeypatch.setattr(Worker, "submit", spy)
    for mode in ("preserve", "template"):
        talk(monkeypatch, "Hi\nAnd you?\n", "--history", mode, "--temperature", "0", "--strip-billing-header",
             "--system", "x-anthropic-billing-header: cch=1;\nBe kind")
    preserve, template = asked[:2], asked[2:]
    assert preserve[0].prompt == template[0].prompt
    assert [turns[1].prompt[:len(preserve[0].prompt)] == preserve[0].prompt
            for turns in (preserve, template)] == [True, False]


def test_commands(monkeypatch, prompts, capsys):
    talk(monkeypatch, "Hi\n/reset\n/help\n/fly\nYou?\n/exit\nnever asked\n")
    assert prompts == [[("user", "Hi")], [("user", "You?")]]
    err = capsys.readouterr().err
    assert "forgotten" in err and "/reset" in err and "there is no command /fly" in err


def test_a_path_is_no_command(monkeypatch, prompts):
    talk(monkeypatch, "/etc/hosts is what?\n")
    assert prompts == [[("user", "/etc/hosts is what?")]]


def test_ctrl_c_stops_the_answer_and_keeps_its_beginning(monkeypatch, prompts, capsys):
    show = Screen.show

    def show_and_interrupt(self, delta):
        show(self, delta)
        if len(prompts) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Screen, "show", show_and_interrupt)
    talk(monkeypatch, "Tell me a story\nGo on\n", "--temperature", "3")
    assert len(prompts) == 2
    assert [role for role, _ in prompts[1]] == ["user", "assistant", "user"]
    assert capsys.readouterr().out.startswith(prompts[1][1][1])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_turn_that_cannot_be_answered_is_dropped(monkeypatch, prompts, capsys):
    talk(monkeypatch, "word " * 60 + "\nHi\n", "--max-context", "40", code=1)
    assert "raise --max-context" in capsys.readouterr().err
    assert prompts[1] == [("user", "Hi")]


def test_a_failed_answer_is_dropped(monkeypatch, prompts, capsys):
    def fail(self, batch):
        raise RuntimeError("on fire")

    monkeypatch.setattr(Runtime, "run", fail)
    talk(monkeypatch, "Hi\nYou?\n", code=1)
    assert prompts[1] == [("user", "You?")]
    assert "deltic: error: internal error: on fire" in capsys.readouterr().err


def test_a_line_that_is_not_utf8(monkeypatch, capsys):
    talk(monkeypatch, b"caf\xe9\n", code=2)
    assert "line 1 on stdin is not valid UTF-8" in capsys.readouterr().err


class Keys:
    """What a person does at the prompt."""

    def __init__(self, *events):
        self.events = iter(events)

    def __call__(self, prompt):
        event = next(self.events)
        if isinstance(event, str):
            return event
        raise event


def test_ctrl_c_at_the_prompt_hints_first_and_ends_then(monkeypatch, capsys):
    monkeypatch.setattr("builtins.input", Keys(KeyboardInterrupt, "Hi", KeyboardInterrupt, KeyboardInterrupt))
    lines = chat._typed_lines()
    assert next(lines) == "Hi"
    with pytest.raises(KeyboardInterrupt):
        next(lines)
    assert capsys.readouterr().err.count("Ctrl-C again") == 2


def test_ctrl_d_ends(monkeypatch):
    monkeypatch.setattr("builtins.input", Keys("Hi", EOFError))
    assert list(chat._typed_lines()) == ["Hi"]


@pytest.fixture
def terminal():
    """A chat in a terminal: its process and our end of the line."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-m", "deltic", "chat", *SHORT], cwd=ROOT, stdin=theirs,
                               stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    yield process, ours
    process.kill()
    process.wait()
    os.close(ours)


def test_in_a_terminal(terminal):
    process, line = terminal
    read_until(line, b"> ")
    os.write(line, b"Hi\n")
    seen = read_until(line, b"peak memory")
    os.write(line, b"/exit\n")
    assert process.wait(timeout=30) == 0
    assert b"Traceback" not in seen


def read_until(terminal, mark):
    seen, patience = b"", 300
    while mark not in seen and patience:
        if select.select([terminal], [], [], 0.2)[0]:
            seen += os.read(terminal, 4096)
        else:
            patience -= 1
    assert mark in seen, seen
    return seen
