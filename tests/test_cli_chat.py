"""`deltic chat`: turns, commands and interruptions."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deltic.cli import chat, main
from deltic.cli.output import Screen
from deltic.engine.worker import Worker
from deltic.llm import LLM
from deltic.runner.model_runner import ModelRunner

ROOT = Path(__file__).parents[1]
SHORT = ["--max-tokens", "4", "--threads", "1"]


@pytest.fixture
def prompts(monkeypatch):
    """The messages of every request for an answer."""
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


def test_a_path_is_not_a_command(monkeypatch, prompts):
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

    monkeypatch.setattr(ModelRunner, "run", fail)
    talk(monkeypatch, "Hi\nYou?\n", code=1)
    assert prompts[1] == [("user", "You?")]
    assert "deltic: error: internal error: on fire" in capsys.readouterr().err


def test_a_line_that_is_not_utf8(monkeypatch, capsys):
    talk(monkeypatch, b"caf\xe9\n", code=2)
    assert "line 1 on stdin is not valid UTF-8" in capsys.readouterr().err


class Keys:
    """Inputs and interruptions at the prompt."""

    def __init__(self, *events):
        self.events = iter(events)

    def __call__(self, prompt):
        event = next(self.events)
        if isinstance(event, str):
            return event
        raise event


def test_ctrl_c_at_the_prompt_hints_first_and_ends_then(monkeypatch, capsys):
    monkeypatch.setattr("builtins.input", Keys(KeyboardInterrupt, "Hi", KeyboardInterrupt, KeyboardInterrupt))
    lines = chat._messages(chat._terminal_lines())
    assert next(lines) == ("Hi", False)
    with pytest.raises(KeyboardInterrupt):
        next(lines)
    assert capsys.readouterr().err.count("Ctrl-C again") == 2


def test_ctrl_d_ends(monkeypatch):
    monkeypatch.setattr("builtins.input", Keys("Hi", EOFError))
    assert list(chat._messages(chat._terminal_lines())) == [("Hi", False)]


def test_ctrl_c_drops_what_was_begun(monkeypatch, capsys):
    monkeypatch.setattr("builtins.input", Keys('"""one', KeyboardInterrupt, "Hi", '"""two', '  three"""  ', EOFError))
    assert list(chat._messages(chat._terminal_lines())) == [("Hi", False), ("two\n  three", True)]


def test_messages_of_several_lines(monkeypatch, prompts):
    talk(monkeypatch, '"""\n/reset\n\n  two\n"""\n"""one line"""\n""""""\nsays """ inside\n"""to the end\n')
    assert [asked[-1][1] for asked in prompts] == ["/reset\n\n  two", "one line", 'says """ inside', "to the end"]
    assert len(prompts[-1]) == 7


def test_settings_change_answers(monkeypatch, capsys):
    asked, stream = [], LLM.stream

    def spy(self, messages, sampling, **options):
        asked.append((messages[0]["content"], sampling.temperature, sampling.max_tokens, options["thinking"]))
        return stream(self, messages, sampling, **options)

    monkeypatch.setattr(LLM, "stream", spy)
    talk(monkeypatch, "/set temperature 0\n/set max-tokens 2\n/set think off\n/set system Be kind to me\nHi\n"
                      "/set temperature\n/set max_tokens\n/set think\n/set system\nHi\n", "--temperature", "1")
    assert asked == [("Be kind to me", 0, 2, False), ("Hi", 1, 4, None)]
    err = capsys.readouterr().err.splitlines()
    assert err == ["temperature 0.0", "max_tokens 2", "think off", "system Be kind to me",
                   "temperature 1.0", "max_tokens 4", "think default", "system (none)"]


def test_all_settings_are_shown(monkeypatch, capsys):
    talk(monkeypatch, "/set\n", "--seed", "7")
    shown = capsys.readouterr().err
    assert "seed 7\n" in shown and "top_k (default)\n" in shown and "think default\n" in shown


WRONG = [
    ("/set flavour sweet", "there is no setting 'flavour'; the settings are system, think, temperature"),
    ("/set temperature warm", "temperature must be a number, not 'warm'"), ("/set top_k 1.5", "must be an integer"),
    ("/set temperature -1", "temperature must be between"), ("/set think maybe", "think is one of on, off, default"),
    ("/save", "/save needs the name of a file"), ("/load", "/load needs"), ("/load /nowhere/x", "cannot be read"),
    ("/save /nowhere/x", "/nowhere/x cannot be written: No such file"),
    ("/save ~nouser/x", "~nouser/x cannot be written: No such file"), ("/load ~nouser/x", "cannot be read"),
    ("/save a\0b", "'a\\x00b' is not the name of a file"), ("/image a\0b", "is not the name of a file"),
]


def test_wrong_commands_are_explained(monkeypatch, capsys, prompts):
    talk(monkeypatch, "\n".join(line for line, _ in WRONG) + "\nHi\n", code=1)
    errors = capsys.readouterr().err.split("deltic: error: ")[1:]
    for (line, words), error in zip(WRONG, errors, strict=True):
        assert words in error, line
    assert prompts == [[("user", "Hi")]]


def test_a_conversation_is_saved_and_loaded(monkeypatch, prompts, capsys, tmp_path, served):
    """Its file is a request that the server takes."""
    path = tmp_path / "talk.json"
    talk(monkeypatch, f"Hi\nAnd \"you\"?\n/save {path}\n", "--system", "Be kind", "--think")
    saved = json.loads(path.read_text())
    assert [message["role"] for message in saved["messages"]] == ["system", *("user", "assistant") * 2]
    assert served.post("/v1/chat/completions", **saved, max_tokens=1).status_code == 200
    talk(monkeypatch, f"/load {path}\nGo on\n/save {path}\n/reset\nNew\n")
    assert prompts[2] == [*((message["role"], message["content"]) for message in saved["messages"]), ("user", "Go on")]
    assert prompts[3] == [("system", "Be kind"), ("user", "New")]
    assert len(json.loads(path.read_text())["messages"]) == 7 and os.listdir(tmp_path) == ["talk.json"]
    assert "loaded 5 messages" in capsys.readouterr().err


def test_other_files_are_neither_loaded_nor_overwritten(monkeypatch, prompts, capsys, tmp_path):
    texts = ["", "{", "7", '{"messages": 3}', '["hi"]', '[{"content": "hi"}]', "[" * 99999,
             '[{"role": "bird", "content": "hi"}]', '[{"role": "user", "content": 7}]']
    paths = [tmp_path / f"{number}.txt" for number in range(len(texts))]
    for path, text in zip(paths, texts):
        path.write_text(text)
    talk(monkeypatch, "".join(f"/load {path}\n" for path in paths) + "Hi\n", code=1)
    assert prompts == [[("user", "Hi")]] and capsys.readouterr().err.count("deltic: error: ") == len(texts)
    talk(monkeypatch, "".join(f"/save {path}\n" for path in paths[:7]), code=1)
    assert capsys.readouterr().err.count("not a conversation: choose another name") == 7
    assert [path.read_text() for path in paths] == texts


def talk_at(line):
    """Says one thing at a terminal and leaves; returns the screen."""
    read_until(line, b"> ")
    os.write(line, b"Hi\n")
    seen = read_until(line, b"peak memory")
    os.write(line, b"/exit\n")
    return seen


def test_a_model_without_a_prompt_begins_a_chat_in_a_terminal(monkeypatch):
    ours, theirs = pty.openpty()
    with open(theirs, encoding="utf-8") as keys, open(os.dup(theirs), "w", encoding="utf-8") as screen:
        monkeypatch.setattr(sys, "stdin", keys)
        monkeypatch.setattr(sys, "stdout", screen)
        monkeypatch.setattr(sys, "stderr", screen)
        with ThreadPoolExecutor(1) as pool:
            user = pool.submit(talk_at, ours)
            assert main(["run", "tiny", *SHORT]) == 0
            user.result()
    os.close(ours)


@pytest.mark.slow
@pytest.mark.parametrize("command", [["chat"], ["run", "tiny"]], ids=["chat", "run"])
def test_a_process_in_a_terminal(command):
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-m", "deltic", *command, *SHORT], cwd=ROOT, stdin=theirs,
                               stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    try:
        assert b"Traceback" not in talk_at(ours)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def read_until(terminal, mark):
    seen, patience = b"", 300
    while mark not in seen and patience:
        if select.select([terminal], [], [], 0.2)[0]:
            seen += os.read(terminal, 4096)
        else:
            patience -= 1
    assert mark in seen, seen
    return seen
