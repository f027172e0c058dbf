"""Prompts on standard input, and standard streams that are closed, broken or endless."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from argparse import ArgumentTypeError
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from deltic.chat.output_router import AnswerCall, Delta
from deltic.cli import command_parser, main, run
from deltic.cli.output import Screen, takes_colors, takes_escapes
from deltic.cli.parser import UsageError, text
from deltic.params import Usage

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / "deltic" / "models" / "tiny")
# The command line with a model that echoes its prompt; it starts quickly, as it does not import torch.
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
        super().__init__(self)

run.open_llm = lambda args: Model(args.model or "tiny")
run._ask = lambda llm, args, prompt, sampling: (llm.runtime.name, prompt)
run.read_answer = read_answer
sys.exit(main(sys.argv[1:]))
"""


def echo(*argv: str, shell: str = "", **options: object) -> subprocess.CompletedProcess[str]:
    """Runs the command line with redirections of a shell."""
    return subprocess.run(["sh", "-c", f'exec "$@" {shell}', "sh", sys.executable, "-c", ECHO, *argv], cwd=ROOT,
                          capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload]


@pytest.mark.parametrize(("shell", "out", "err"), [
    ("<&- >&- 2>&-", False, False), ("<&- 2>&-", True, False),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("2>&-", True, False), (">&-", False, True), ("<&-", True, True)))])
def test_closed_streams(shell, out, err):
    done = echo("run", "hi", shell=shell)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert done.stdout == ("('tiny', 'hi')\n" if out else "") and ("first token" in done.stderr) == err


def test_no_prompt_on_a_closed_stdin():
    done = echo("run", shell="<&-")
    assert done.returncode == 2 and "the prompt is missing" in done.stderr


def test_a_prompt_on_stdin():
    assert echo("run", "a/b", input="hi\n").stdout == "('a/b', 'hi')\n"


@pytest.fixture
def read_words(monkeypatch):
    """The model and the prompt of `deltic run` with these words, and standard input open on a file descriptor."""
    def read(reading, *argv):
        with open(reading, encoding="utf-8", closefd=False) as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            args = command_parser("run").parse_mixed(argv)
            model, prompt = run.model_and_prompt(args.model, args.prompt)
            return model or "tiny", run._read_prompt("-" if prompt is None else prompt)
    return read


def test_the_prompt_is_read_from_stdin_only_if_it_is_missing(read_words):
    for argv, expected in (
            ([], ("tiny", "hi")), (["tiny"], ("tiny", "hi")), ([TINY], (TINY, "hi")), (["-"], ("tiny", "hi")),
            (["nope.gguf"], ("nope.gguf", "hi")), (["a/b"], ("a/b", "hi")), (["and/or?"], ("tiny", "and/or?")),
            (["word"], ("tiny", "word")), (["tiny", "word"], ("tiny", "word")), (["a/b", "word"], ("a/b", "word")),
            (["two.gguf files"], ("tiny", "two.gguf files"))):
        reading, writing = os.pipe()
        try:
            if expected[1] == "hi":  # else the pipe stays open and empty, so that reading it would never end
                os.write(writing, b"hi\n")
                os.close(writing)
            assert read_words(reading, *argv) == expected
        finally:
            os.close(reading)
            with suppress(OSError):
                os.close(writing)


def test_dev_null_is_not_a_prompt(read_words):
    with open(os.devnull, "rb") as null:
        for argv in ([], [TINY], ["tiny"], ["Qwen/Qwen3.5-0.8B"], ["qwen3.5:0.8b"]):
            with pytest.raises(UsageError, match="the prompt is missing"):
                read_words(null.fileno(), *argv)
        assert read_words(null.fileno(), "1/2") == ("tiny", "1/2")


def test_a_closed_pipe_ends_the_command():
    done = subprocess.run(["sh", "-c", '"$@" | head -c 1', "sh", sys.executable, "-c", ECHO, "run", "x" * 120_000],
                          cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "(" and "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


MODELS = [TINY, "tiny", "nope.gguf", "./nope", "nope/", "Qwen/Qwen3.5-0.8B", "unsloth/Qwen3.5-0.8B-GGUF:Q4_K_M",
          "Qwn/Qwen3.5-0.8", "qwen3.5:0.8b", "qwen3.5", "Qwen3.5-0.8B", "llama3:8b", "llama3.2:latest",
          "hf.co/unsloth/Qwen3.5-0.8B-GGUF:Q8_0", "https://huggingface.co/Qwen/Qwen3.5-0.8B"]
PROMPTS = ["What is the capital of France?", "1+1=", "1/2", "24/7", "and/or?", "Hello", "Qwen", "a:b", "TODO:fix", "{}",
           "Qwen/Qwen3.5-0.8B is what?", "10:30", "x.y", "llama", "x" * 5000, "/" * 5000]


def test_a_model_without_a_prompt_is_a_chat_on_a_terminal_alone(monkeypatch):
    monkeypatch.setattr(run, "_stdin_mode", lambda: 0o20620)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    for word in MODELS:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        assert run.model_and_prompt(word, None) == (word, None)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
        with pytest.raises(UsageError, match="the prompt is missing"):
            run.model_and_prompt(word, None)


def test_text_is_a_prompt_with_and_without_a_terminal(monkeypatch):
    for terminal in (False, True):
        monkeypatch.setattr(run, "on_terminal", lambda found=terminal: found)
        for word in PROMPTS:
            assert run.model_and_prompt(word, None) == (None, word)


def test_a_terminal_is_not_read(monkeypatch):
    monkeypatch.setattr(run, "on_terminal", lambda: True)
    with pytest.raises(UsageError, match="the prompt is missing"):
        run.model_and_prompt(None, None)


def test_the_name_of_an_incomplete_model_is_no_prompt(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("adapter_config.json", "model.safetensors", "x.GGUF", "config.json"):
        (tmp_path / "word").mkdir()
        assert run.model_and_prompt("word", None) == (None, "word")
        (tmp_path / "word" / name).write_bytes(b"")
        with pytest.raises(UsageError, match="'word' is a model"):
            run.model_and_prompt("word", None)
        shutil.rmtree(tmp_path / "word")


def test_a_file_may_be_a_pipe(tmp_path, capsys):
    tools = '[{"type": "function", "function": {"name": "f"}}]'
    reading, writing = os.pipe()
    os.write(writing, tools.encode())
    os.close(writing)
    args = command_parser("run").parse_mixed(["hi", "--tools", f"/dev/fd/{reading}"])
    os.close(reading)
    assert args.tools == json.loads(tools)
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    assert main(["run", "hi", "--tools", str(path)]) == 2
    assert "cannot be read as JSON" in capsys.readouterr().err


def test_endless_input_ends():
    done = echo("run", "-", shell="</dev/zero")
    assert done.returncode == 2 and "the prompt on stdin has more than 64 MiB" in done.stderr


def test_devices_and_directories_are_not_read(capsys):
    for path, message in (("/dev/zero", "neither a file nor a pipe"), ("/", "is a directory")):
        assert main(["run", "hi", "--tools", path]) == 2
        assert message in capsys.readouterr().err


def test_prompts_are_utf8_in_every_locale(monkeypatch):
    monkeypatch.setattr(os, "fsencode", lambda given: given.encode("ascii", "surrogateescape"))
    assert text("Gr\udcc3\udcbc\udcc3\udc9fe") == "Gr\u00fc\u00dfe"
    with pytest.raises(ArgumentTypeError, match="not valid UTF-8"):
        text("caf\udce9")


def test_control_characters_in_errors_are_escaped(capsys):
    assert main(["convert", "tiny", "\x1b[2J\u202ex"]) == 2
    assert "\\x1b[2J\\u202ex must end in .gguf" in capsys.readouterr().err


def test_a_full_disk_is_reported():
    for argv, more in ((["run", "--help"], {}), (["run", "hi"], {}), (["run", "hi"], {"PYTHONUNBUFFERED": ""})):
        done = echo(*argv, shell=">/dev/full", env=os.environ | more)
        assert done.returncode == 2 and done.stderr == (
            "deltic: error: standard output cannot be written: No space left on device\n")
    assert echo("run", "hi", shell="2>/dev/full").stdout == "('tiny', 'hi')\n"


CALL = AnswerCall("call_1", "f", "{}")


def test_json_has_the_finish_reason_of_calls():
    for finish, calls, shown in (("stop", (CALL,), "tool_calls"), ("stop", (), "stop"), ("length", (CALL,), "length"),
                                 ("error", (), "error")):
        choice = SimpleNamespace(text="", reasoning="", calls=calls, finish=finish, error=None, usage=Usage(1, 0, 1))
        assert run._as_json("tiny", choice, {})["finish_reason"] == shown


@pytest.mark.parametrize(("terminal", "variables", "colors", "escapes"), [
    (True, {"TERM": "xterm"}, True, True), (True, {"TERM": "dumb"}, False, False),
    (False, {"TERM": "xterm"}, False, False),
    (True, {"TERM": "xterm", "NO_COLOR": "1"}, False, True), (True, {"TERM": "xterm", "NO_COLOR": ""}, True, True)])
def test_colors_depend_on_the_terminal(terminal, variables, colors, escapes, monkeypatch, capsys):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert (takes_colors(sys.stderr), takes_escapes(sys.stderr)) == (colors, escapes)
    Screen().show(Delta("reasoning", "Hm"))
    assert ("\x1b" in capsys.readouterr().err) == colors


def test_random_weights_that_do_not_fit_are_not_made(monkeypatch, capsys):
    monkeypatch.setattr("deltic.cli.options.available_memory", lambda: 20 << 30)
    monkeypatch.setattr("deltic.engine.loading.random_tensors", lambda *args, **options: pytest.fail("made"))
    assert main(["bench", "--random", "qwen3.5-27b"]) == 2
    message = capsys.readouterr().err
    assert "take 50.1 GiB, and 20.0 GiB of memory is available: keep fewer layers (--layers)" in message
