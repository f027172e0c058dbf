"""`deltic run`: the answer on stdout, everything else on stderr."""

from __future__ import annotations

import io
import json
import sys

from deltic.chat.output_router import AnswerCall, Delta
from deltic.cli import main
from deltic.cli.output import AnswerTiming, Screen
from deltic.runner.model_runner import ModelRunner

SHORT = ["--max-tokens", "6", "--threads", "1"]


def run(capsys, *argv, code=0):
    assert main(["run", *argv]) == code
    return capsys.readouterr()


def as_json(capsys, *argv, code=0):
    out, _ = run(capsys, *argv, "--json", code=code)
    assert out.count("\n") == 1
    return json.loads(out)


def test_stdout_has_only_the_answer(capsys):
    out, err = run(capsys, "Hi", *SHORT)
    answer = as_json(capsys, "Hi", *SHORT)
    assert out == answer["text"] + ("" if answer["text"].endswith("\n") else "\n")
    assert err.count("\n") == 1
    assert "first token" in err and "prompt" in err and "(0 cached)" in err and "MiB" in err


def test_json(capsys):
    answer = as_json(capsys, "tiny", "Hi", *SHORT)
    assert set(answer) == {"model", "text", "reasoning", "tool_calls", "finish_reason", "usage", "timings"}
    assert answer["model"] == "tiny" and answer["finish_reason"] in ("stop", "length")
    assert set(answer["usage"]) == {"prompt_tokens", "cached_tokens", "completion_tokens", "drafted_tokens",
                                    "accepted_tokens"}
    assert 1 <= answer["usage"]["completion_tokens"] <= 6
    assert set(answer["timings"]) == {"load_ms", "time_to_first_token_ms", "total_ms", "tokens_per_second"}
    assert answer["timings"]["time_to_first_token_ms"] <= answer["timings"]["total_ms"]


def test_stdin_and_argument_are_the_same(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Grüße\nto all\n".encode())))
    piped = as_json(capsys, "-", *SHORT)
    given = as_json(capsys, "Grüße\nto all", *SHORT)
    assert (piped["text"], piped["usage"]) == (given["text"], given["usage"])


def test_stdin_is_not_read_without_end(capsys, monkeypatch):
    class Endless(io.RawIOBase):
        taken = 0

        def readable(self):
            return True

        def readinto(self, buffer):
            self.taken += len(buffer)
            return len(buffer)
    raw = Endless()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(raw)))
    _, err = run(capsys, "-", *SHORT, code=2)
    assert "the prompt on stdin has more than" in err and raw.taken < 100 << 20


def test_a_seed_repeats_an_answer(capsys):
    draws = ["--temperature", "3", "--max-tokens", "8", "--threads", "1"]
    first, second, other = (as_json(capsys, "Hi", *draws, "--seed", seed)["text"] for seed in ("1", "1", "2"))
    assert first == second != other


def test_raw_uses_no_template(capsys):
    raw = as_json(capsys, "One two", "--raw", *SHORT)
    chat = as_json(capsys, "One two", *SHORT)
    assert raw["usage"]["prompt_tokens"] < chat["usage"]["prompt_tokens"]


def test_system_and_template(capsys, tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}")
    plain = as_json(capsys, "Hi", "--chat-template", str(path), *SHORT)
    more = as_json(capsys, "Hi", "--system", "Be kind", "--chat-template", str(path), *SHORT)
    assert more["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]


def test_stop_ends_before_the_text(capsys):
    asked = ["one two three one two three", "--raw", "--repetition-penalty", "0.01", *SHORT]
    whole = as_json(capsys, *asked)["text"]
    word = whole.split()[1]
    cut = as_json(capsys, *asked, "--stop", word)
    assert cut["text"] == whole[:whole.index(word)] and cut["finish_reason"] == "stop"


def test_a_failed_answer_has_code_1(capsys, monkeypatch):
    def fail(self, batch):
        raise RuntimeError("the kernel is on fire")

    monkeypatch.setattr(ModelRunner, "run", fail)
    out, err = run(capsys, "Hi", *SHORT, code=1)
    assert out == "\n" and "deltic: error: internal error: the kernel is on fire" in err and "Traceback" not in err
    answer = as_json(capsys, "Hi", *SHORT, code=1)
    assert answer["finish_reason"] == "error" and "on fire" in answer["error"]
    _, err = run(capsys, "Hi", "-v", *SHORT, code=1)
    assert "Traceback" in err


def test_library_warnings_are_plain_lines(capsys):
    _, err = run(capsys, "Hello", "--memory", "1MiB", *SHORT)
    lines = err.splitlines()
    assert any(line.startswith("deltic: warning: max_context is") for line in lines)


def test_a_prompt_that_is_too_long(capsys):
    assert main(["run", "word " * 50, "--max-context", "20"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "raise --max-context" in err


CALL = AnswerCall("call_1", "weather", '{"city": "Köln"}')


def test_the_screen(capsys):
    for deltas, calls, out in (
            ([], (), "\n"),
            ([Delta("content", "Hi")], (), "Hi\n"),
            ([Delta("content", "Hi\n")], (), "Hi\n"),
            ([Delta("reasoning", "Hm"), Delta("content", "Hi")], (), "Hi\n"),
            ([Delta("reasoning", "Hm")], (), "\n"),
            ([], (CALL,), None),
            ([Delta("content", "Look:")], (CALL, CALL), None)):
        screen = Screen()
        for delta in deltas:
            screen.show(delta)
        screen.close(calls)
        shown, err = capsys.readouterr()
        assert out is None or shown == out
        lines = shown.splitlines()[len(shown.splitlines()) - len(calls):] if calls else []
        assert [json.loads(line)["function"] for line in lines] == [
            {"name": "weather", "arguments": '{"city": "Köln"}'} for _ in calls]
        assert err == ("Hm\n\n" if deltas and deltas[0].kind == "reasoning" else "")


def test_thinking_can_be_hidden(capsys):
    screen = Screen(thinking=False)
    for delta in (Delta("reasoning", "Hm"), Delta("content", "Hi")):
        screen.show(delta)
    screen.close()
    assert capsys.readouterr() == ("Hi\n", "")


def test_thinking_is_dimmed_on_a_terminal(capsys, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    Screen().show(Delta("reasoning", "Hm"))
    assert capsys.readouterr().err == "\x1b[2mHm\x1b[0m"


def test_text_is_printed_at_once(monkeypatch):
    class Pipe(io.StringIO):
        flushes = 0

        def flush(self):
            self.flushes += 1

    monkeypatch.setattr(sys, "stdout", Pipe())
    screen = Screen()
    for letter in "abc":
        screen.show(Delta("content", letter))
    assert sys.stdout.flushes == 3


def test_rates_of_an_answer():
    assert AnswerTiming(1.0, 11, 2.0, 1, 7.0).timings() == {
        "time_to_first_token_ms": 1000.0, "total_ms": 6000.0, "tokens_per_second": 2.0}
    assert AnswerTiming(1.0, 0, None, 0, 2.0).timings() == {
        "time_to_first_token_ms": 1000.0, "total_ms": 1000.0, "tokens_per_second": None}
    assert AnswerTiming(1.0, 1, 2.0, 1, 2.0).tokens_per_second is None


def test_the_embedded_model_knows_paris(capsys):
    out, _ = run(capsys, "What is the capital of France?", "--temperature", "0")
    assert "Paris" in out
