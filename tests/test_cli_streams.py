"""What stands on stdin, and streams that are closed, broken, or not what they seem."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import ArgumentTypeError
from pathlib import Path
from types import SimpleNamespace

import pytest

from deltic.chat.output_router import AnswerCall, Delta
from deltic.cli import main, run
from deltic.cli.output import Screen, takes_colors, takes_escapes
from deltic.cli.parser import UsageError, text
from deltic.params import Usage

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / "deltic" / "models" / "tiny")
# The command line with a model that echoes its prompt; without torch it is there at once.
ECHO = """
import sys
from contextlib import nullcontext
from types import SimpleNamespace as Of
from deltic.cli import main, output, run
from deltic.chat.output_router import Delta
from deltic.params import Usage

def read_answer(llm, ask, show):
    show(Delta("content", repr(ask())))
    choice = Of(text="", reasoning="", calls=(), finish="stop", error=None, usage=Usage(1, 0, 1))
    return Of(output=Of(choices=[choice])), output.AnswerTiming(0.0, 1)

class Model(nullcontext):
    def __init__(self, name):
        self.runtime = Of(name=name)
        super().__init__()

run.timed_llm = lambda args: (Model(args.model or "tiny"), 1.0)
run._ask = lambda llm, args, prompt, sampling: (llm.runtime.name, prompt)
run.read_answer = read_answer
sys.exit(main(sys.argv[1:]))
"""


def echo(*argv: str, shell: str = "", **options: object) -> subprocess.CompletedProcess[str]:
    """Run the command line with redirections as a shell makes them."""
    return subprocess.run(["sh", "-c", f'exec "$@" {shell}', "sh", sys.executable, "-c", ECHO, *argv], cwd=ROOT,
                          capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload]


@pytest.mark.parametrize(("shell", "out", "err"), [("2>&-", True, False), (">&-", False, True), ("<&-", True, True),
                                                   ("<&- 2>&-", True, False), ("<&- >&- 2>&-", False, False)])
def test_closed_streams(shell, out, err):
    done = echo("run", "hi", shell=shell)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert done.stdout == ("('tiny', 'hi')\n" if out else "") and ("first token" in done.stderr) == err


def test_no_prompt_on_a_closed_stdin():
    done = echo("run", shell="<&-")
    assert done.returncode == 2 and "the prompt is missing" in done.stderr


@pytest.mark.parametrize(("argv", "given", "shown"), [
    ([], "hi\n", ("tiny", "hi")), (["tiny"], "hi", ("tiny", "hi")), ([TINY], "hi", (TINY, "hi")),
    (["nope.gguf"], "hi", ("nope.gguf", "hi")), (["-"], "hi", ("tiny", "hi")), (["a/b"], "hi", ("a/b", "hi")),
    (["and/or?"], "unread", ("tiny", "and/or?")), (["word"], "unread", ("tiny", "word")),
    (["tiny", "word"], "unread", ("tiny", "word")), (["two.gguf files"], "unread", ("tiny", "two.gguf files"))])
def test_the_prompt_may_come_on_stdin(argv, given, shown):
    done = echo("run", *argv, input=given)
    assert (done.returncode, done.stdout) == (0, f"{shown}\n")


@pytest.mark.parametrize("argv", [["word"], ["tiny", "word"], ["a/b", "word"]])
def test_stdin_is_not_read_with_a_prompt(argv):
    reading, writing = os.pipe()
    try:
        assert echo("run", *argv, stdin=reading).stdout.endswith("'word')\n")
    finally:
        os.close(reading)
        os.close(writing)


def test_dev_null_is_not_a_prompt():
    for argv in ([], [TINY], ["tiny"], ["Qwen/Qwen3.5-0.8B"], ["qwen3.5:0.8b"]):
        done = echo("run", *argv, shell="</dev/null")
        assert done.returncode == 2 and "the prompt is missing" in done.stderr
    assert "('tiny', '1/2')" in echo("run", "1/2", shell="</dev/null").stdout


def test_a_reader_that_leaves_ends_the_command():
    done = subprocess.run(["sh", "-c", '"$@" | head -c 1', "sh", sys.executable, "-c", ECHO, "run", "x" * 120_000],
                          cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "(" and "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


MODELS = [TINY, "tiny", "nope.gguf", "./nope", "nope/", "Qwen/Qwen3.5-0.8B", "unsloth/Qwen3.5-0.8B-GGUF:Q4_K_M",
          "Qwn/Qwen3.5-0.8", "qwen3.5:0.8b", "qwen3.5", "Qwen3.5-0.8B", "llama3:8b", "llama3.2:latest",
          "hf.co/unsloth/Qwen3.5-0.8B-GGUF:Q8_0", "https://huggingface.co/Qwen/Qwen3.5-0.8B"]
PROMPTS = ["What is the capital of France?", "1+1=", "1/2", "24/7", "and/or?", "Hello", "Qwen", "a:b", "TODO:fix", "{}",
           "Qwen/Qwen3.5-0.8B is what?", "10:30", "x.y", "llama", "x" * 5000, "/" * 5000]


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("word", MODELS)
def test_a_model_without_a_prompt_is_a_chat_on_a_terminal_alone(word, terminal, monkeypatch):
    monkeypatch.setattr(run, "_stdin_mode", lambda: 0o20620)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    if terminal:
        assert run.model_and_prompt(word, None) == (word, None)
    else:
        with pytest.raises(UsageError, match="the prompt is missing"):
            run.model_and_prompt(word, None)


@pytest.mark.parametrize("word", PROMPTS, ids=lambda word: word[:30])
def test_text_is_a_prompt_wherever_it_is_typed(word, monkeypatch):
    assert run.model_and_prompt(word, None) == (None, word)
    monkeypatch.setattr(run, "on_terminal", lambda: True)
    assert run.model_and_prompt(word, None) == (None, word)


def test_a_terminal_is_not_read(monkeypatch):
    monkeypatch.setattr(run, "on_terminal", lambda: True)
    with pytest.raises(UsageError, match="the prompt is missing"):
        run.model_and_prompt(None, None)


@pytest.mark.parametrize("files", [["adapter_config.json"], ["model.safetensors"], ["x.GGUF"], ["config.json"]])
def test_a_directory_that_was_meant_as_a_model_is_no_prompt(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "word").mkdir()
    assert run.model_and_prompt("word", None) == (None, "word")
    for name in files:
        (tmp_path / "word" / name).write_bytes(b"")
    with pytest.raises(UsageError, match="'word' is a model"):
        run.model_and_prompt("word", None)


def test_a_file_may_be_a_pipe(tmp_path, capsys):
    tools = '[{"type": "function", "function": {"name": "f"}}]'
    reading, writing = os.pipe()
    os.write(writing, tools.encode())
    os.close(writing)
    args = run_parser().parse_mixed(["hi", "--tools", f"/dev/fd/{reading}"])
    os.close(reading)
    assert args.tools == json.loads(tools)
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    assert main(["run", "hi", "--tools", str(path)]) == 2
    assert "cannot be read as JSON" in capsys.readouterr().err


def run_parser():
    from deltic.cli import command_parser

    return command_parser("run")


def test_endless_input_ends():
    done = echo("run", "-", shell="</dev/zero")
    assert done.returncode == 2 and "the prompt on stdin is longer than 64 MiB" in done.stderr


@pytest.mark.parametrize(("path", "message"), [("/dev/zero", "neither a file nor a pipe"), ("/", "is a directory")])
def test_a_file_is_a_file(path, message, capsys):
    assert main(["run", "hi", "--tools", path]) == 2
    assert message in capsys.readouterr().err


def test_a_locale_without_letters_changes_no_prompt(monkeypatch):
    monkeypatch.setattr(os, "fsencode", lambda given: given.encode("ascii", "surrogateescape"))
    assert text("Gr\udcc3\udcbc\udcc3\udc9fe") == "Gr\u00fc\u00dfe"
    with pytest.raises(ArgumentTypeError, match="not valid UTF-8"):
        text("caf\udce9")


def test_errors_move_no_cursor(capsys):
    assert main(["convert", "tiny", "\x1b[2J\u202ex"]) == 2
    assert "\\x1b[2J\\u202ex must end in .gguf" in capsys.readouterr().err


def test_a_full_disk_is_reported(tmp_path):
    for argv, more in (([], {}), (["--help"], {}), (["run", "--help"], {}), (["run", "hi"], {}),
                       (["run", "hi"], {"PYTHONUNBUFFERED": ""})):
        done = echo(*argv, shell=">/dev/full", env=os.environ | more)
        assert done.returncode == 2 and done.stderr == (
            "deltic: error: standard output cannot be written: No space left on device\n")
    assert echo("run", "hi", shell="2>/dev/full").stdout == "('tiny', 'hi')\n"


CALL = AnswerCall("call_1", "f", "{}")


@pytest.mark.parametrize(("finish", "calls", "shown"), [("stop", (CALL,), "tool_calls"), ("stop", (), "stop"),
                                                        ("length", (CALL,), "length"), ("error", (), "error")])
def test_json_has_the_finish_reason_of_calls(finish, calls, shown):
    choice = SimpleNamespace(text="", reasoning="", calls=calls, finish=finish, error=None, usage=Usage(1, 0, 1))
    assert run._as_json("tiny", choice, {})["finish_reason"] == shown


@pytest.mark.parametrize(("terminal", "variables", "colors", "escapes"), [
    (True, {"TERM": "xterm"}, True, True), (True, {"TERM": "dumb"}, False, False),
    (False, {"TERM": "xterm"}, False, False),
    (True, {"TERM": "xterm", "NO_COLOR": "1"}, False, True), (True, {"TERM": "xterm", "NO_COLOR": ""}, True, True)])
def test_escapes_go_where_they_are_understood(terminal, variables, colors, escapes, monkeypatch, capsys):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert (takes_colors(sys.stderr), takes_escapes(sys.stderr)) == (colors, escapes)
    Screen().show(Delta("reasoning", "Hm"))
    assert ("\x1b" in capsys.readouterr().err) == colors


def test_random_weights_that_do_not_fit_are_not_made(monkeypatch, capsys):
    monkeypatch.setattr("deltic.cli.models.available_memory", lambda: 20 << 30)
    monkeypatch.setattr("deltic.engine.loading.random_tensors", lambda *args, **options: pytest.fail("made"))
    assert main(["bench", "--random", "qwen3.5-27b"]) == 2
    message = capsys.readouterr().err
    assert "take 50.1 GiB, and 20.0 GiB of memory is available" in message and "--layers 18)" in message
    monkeypatch.setattr("deltic.cli.models.available_memory", lambda: 1 << 20)
    assert main(["bench", "--random", "0.8b", "--scenario", "edit"]) == 2
    assert "take a smaller preset" in capsys.readouterr().err
