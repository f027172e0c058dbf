"""The command line as a whole: quick help, errors with the names of options, inspect, bench, generated pages."""

from __future__ import annotations

import io
import json
import logging
import re
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from deltic import __version__
from deltic.cli import COMMANDS, command_parser, docs, main, run
from deltic.cli.output import logging_to_stderr
from deltic.cli.parser import as_typed, text
from deltic.config import EngineConfig, Limits
from deltic.errors import ConfigError

ROOT = Path(__file__).parents[1]


def fails(argv, capsys):
    """The message of a command that must fail with code 2 and leave stdout alone."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("deltic: error: ") and "Traceback" not in err
    return err


HELP = """import contextlib, io, sys, time
from deltic.cli import COMMANDS, main
for argv in (["run", "--help"], ["--help"], *([command, "--help"] for command in COMMANDS)):
    shown, began = io.StringIO(), time.process_time() if argv != ["run", "--help"] else 0.0
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        main(argv)
    print(*argv, shown.getvalue().startswith("usage: deltic"), time.process_time() - began)
print([name for name in ("torch", "rich", "transformers") if name in sys.modules])
"""


def test_help_answers_at_once_and_without_torch():
    """The first command's time includes the start of the interpreter."""
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, cwd=ROOT)
    *lines, loaded = done.stdout.splitlines()
    assert done.returncode == 0 and loaded == "[]" and len(lines) == 2 + len(COMMANDS)
    for line in lines:
        *_, usage, seconds = line.split()
        assert usage == "True" and float(seconds) < 0.3, line


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"deltic {__version__}\n"


def test_without_arguments_help_is_shown(capsys):
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("usage: deltic") and all(command in out for command in COMMANDS) and err == ""


WITHOUT_ENGINE = {"compile", "cache", "completion", "connect", "convert", "doctor", "export", "ls", "mtp", "ps", "pull",
                  "rm", "top"}


def test_cli_page_is_up_to_date():
    found = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert found == docs.page(), "docs/cli.md is stale: run `python -m deltic.cli.docs`"


def test_environment_variables_are_documented():
    read = {name for path in (ROOT / "deltic").rglob("*.py")
            for name in re.findall(r'environ\.get\("(\w+)"', path.read_text(encoding="utf-8"))}
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    assert len(read) > 5 and {name for name in read if not re.search(rf"\b{name}\b", pages)} == {"TERM"}


def test_commands_that_load_a_model_have_every_engine_option():
    for command in COMMANDS.keys() - WITHOUT_ENGINE:
        shown = command_parser(command)._option_string_actions
        options = [field.name for field in fields(EngineConfig) if field.name != "limits"]
        options += [field.name for field in fields(Limits)] if command == "serve" else []
        assert {f"--{name.replace('_', '-')}" for name in options} <= shown.keys(), command


def test_engine_options_reach_the_engine():
    from deltic.cli.options import engine_options

    argv = ["--device", "cpu", "--dtype", "float32", "--threads", "2", "--memory", "1GiB", "--max-context", "9",
            "--max-batch", "3", "--token-budget", "64",
            "--ops", "mlp=reference", "--ops", "rope=reference", "--debug-layers"]
    options = engine_options(command_parser("bench").parse_mixed(argv))
    assert options == {"device": "cpu", "dtype": "float32", "threads": 2, "memory": "1GiB", "max_context": 9,
                       "max_batch": 3, "token_budget": 64, "ops": ["mlp=reference", "rope=reference"],
                       "debug_layers": True}
    assert engine_options(command_parser("bench").parse_mixed([])) == {}


BAD = [
    (["--bogus"], "required: COMMAND"),
    (["fly"], "invalid choice: 'fly'"),
    (["run"], "the prompt is missing"),
    (["run", "nope.gguf"], "the prompt is missing: 'nope.gguf' is a model"),
    (["run", "nope.gguf", "hi"], "there is no file 'nope.gguf'; a model is"),
    (["run", "-hello"], "text that begins with a dash goes after --"),
    (["run", "--hello"], "text that begins with a dash goes after --"),
    (["run", "hi", "--tools", str(ROOT)], "is a directory; name a file"),
    (["run", ""], "the prompt is empty"),
    (["run", "hi", "--bogus"], "--bogus"),
    (["run", "hi", "--temp", "1"], "--temp"),
    (["run", "hi", "--temperature"], "--temperature: expected one argument"),
    (["run", "hi", "--temperature", "warm"], "--temperature: invalid float value: 'warm'"),
    (["run", "hi", "--temperature", "-1"], "temperature must be between 0 and 100"),
    (["run", "hi", "--temperature", "nan"], "temperature"),
    (["run", "hi", "--top-p", "1.5"], "top_p"),
    (["run", "hi", "--top-k", "1.5"], "--top-k"),
    (["run", "hi", "--min-p", "2"], "min_p"),
    (["run", "hi", "--max-tokens", "-1"], "max_tokens"),
    (["run", "hi", "--seed", "x"], "--seed"),
    (["run", "hi", "--seed", "1" + "0" * 400], "seed must be between"),
    (["run", "hi", "--presence-penalty", "3"], "presence_penalty"),
    (["run", "hi", "--frequency-penalty", "x"], "--frequency-penalty"),
    (["run", "hi", "--repetition-penalty", "0"], "repetition_penalty"),
    (["run", "hi", "--stop", ""], "stop"),
    (["run", "hi", "--threads", "0"], "threads must be from 1"),
    (["run", "hi", "--threads", "two"], "--threads"),
    (["run", "hi", "--dtype", "int3"], "--dtype"),
    (["run", "hi", "--device", "tpu"], "device must be"),
    (["run", "hi", "--memory", "lots"], "memory must be a size"),
    (["run", "hi", "--max-batch", "0"], "--max-batch"),
    (["run", "hi", "--ops", "mlp"], "ops"),
    (["run", "hi", "--ops", "fly=reference"], "fly=reference"),
    (["run", "hi", "--chat-template", "/nowhere.jinja"], "--chat-template: there is no file '/nowhere.jinja'"),
    (["run", "hi", "--tools", "/nowhere.json"], "--tools: there is no file"),
    (["run", "hi", "--random", "qwen3.5-0.8b"], "random weights have no tokenizer"),
    (["run", "hi", "--raw", "--system", "x"], "--raw uses no chat template, so --system"),
    (["run", "hi", "--raw", "--no-think"], "--think"),
    (["run", "/nowhere/at/all", "hi"], "/nowhere/at/all"),
    (["run", "a", "b", "c"], "unrecognized arguments: c"),
    (["run", "--", "a", "b", "--c"], "unrecognized arguments: --c"),
    (["chat", "--random", "qwen3.5-0.8b"], "random weights have no tokenizer"),
    (["serve", "--port", "99999"], "--port: must be an integer from 0 to 65535"),
    (["serve", "--host", "not a host"], "host 'not a host' is not known"),
    (["serve", "--threads", "0"], "threads must be from 1"),
    (["serve", "--unix-socket", "s", "--port", "1"], "--unix-socket and --host or --port exclude each other"),
    (["serve", "--unix-socket", "/nowhere/s"], "cannot listen on the Unix socket /nowhere/s: No such file"),
    (["serve", "--unix-socket-mode", "9"], "--unix-socket-mode: must be three octal digits"),
    (["serve", "--tls-key", __file__], "--tls-certificate and --tls-key belong together"),
    (["serve", "--tls-key", __file__, "--tls-certificate", __file__], "cannot be used"),
    (["serve", "--drain-seconds", "-1"], "--drain-seconds: must be a number of seconds"),
    (["serve", "--drain-seconds", "nan"], "--drain-seconds: must be a number of seconds"),
    (["serve", "--api-key", ""], "--api-key is empty"),
    (["serve", "--api-key-file", "/dev/null"], "is neither a file nor a pipe"),
    (["serve", "--port", "0", "--request-log", "/nowhere/log"], "the request log /nowhere/log cannot be opened"),
    (["serve", "--port", "0", "--max-running-per-key", "2"], "--max-running-per-key needs API keys"),
    (["serve", "--max-running-per-key", "0"], "--max-running-per-key must be from 1"),
    (["bench", "--prompt-tokens", "0"], "--prompt-tokens"),
    (["bench", "--repeat", "many"], "--repeat"),
    (["bench", "--layers", "2"], "--layers needs --random"),
    (["bench", "tiny", "--random", "qwen3.5-0.8b"], "exclude each other"),
    (["bench", "--random", "qwen9"], "no preset 'qwen9'"),
    (["bench", "--prompt-tokens", "40", "--max-context", "50"], "--prompt-tokens and --new-tokens are 104 together"),
    (["bench", "--batch", "4", "--max-batch", "2"], "--batch 4"),
    *((["run", "hi", option, ""], f"{option} is empty") for option in (
        "--cache-dir", "--aot-dir", "--mmproj", "--expert-profile")),
    *(([*command, ""], "is empty: name a file or directory") for command in (
        ["compile", "tiny", "-o"], ["convert", "tiny"], ["export", "tiny", "-o"], ["cache", "ls"], ["embed", "tiny",
        __file__, "-o"], ["serve", "--unix-socket"], ["serve", "--request-log"],
        ["batch", __file__])),
    (["inspect", "--random", "qwen3.5-0.8b", "--layers", "99"], "has 24 layers"),
    (["inspect", "--random", "qwen3.5-0.8b", "--memory", "1MiB"], "raise --memory"),
]


def test_wrong_arguments_are_named(capsys):
    for argv, message in BAD:
        assert message in fails(argv, capsys), argv


def test_a_model_without_prompt(capsys):
    assert "the prompt is missing" in fails(["run", str(ROOT / "deltic" / "models" / "tiny")], capsys)


def test_wrong_tools(tmp_path, capsys):
    path = tmp_path / "tools.json"
    for content, message in (("{", "cannot be read as JSON"), ('{"a": 1}', "tools"), ("[1]", "tools[0]"),
                             ('[{"function": {}}]', "tools[0]")):
        path.write_text(content)
        assert message in fails(["run", "hi", "--tools", str(path)], capsys), content


def test_a_wrong_chat_template(tmp_path, capsys):
    path = tmp_path / "template.jinja"
    path.write_text("{% if %}")
    assert "not valid jinja, line 1" in fails(["run", "hi", "--chat-template", str(path)], capsys)


def test_arguments_that_are_not_utf8(capsys):
    assert "is not valid UTF-8" in fails(["run", "caf\udce9"], capsys)


def test_stdin_that_is_not_utf8(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9")))
    assert "stdin is not valid UTF-8 (byte 3)" in fails(["run", "-"], capsys)


def test_empty_stdin(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    assert "nothing came on stdin" in fails(["run", "-"], capsys)


WORDS = [
    (["hi"], (None, "hi")),
    (["tiny", "hi"], ("tiny", "hi")),
    (["tiny", "--temperature", "0", "hi"], ("tiny", "hi")),
    (["-"], (None, "-")),
    (["-5 plus 3"], (None, "-5 plus 3")),
    (["-5+3="], (None, "-5+3=")),
    (["tiny", "-5+3=", "--seed", "1"], ("tiny", "-5+3=")),
    (["--stop", "-1-", "---"], (None, "---")),
    (["-\u00e9", "--seed", "-1"], (None, "-\u00e9")),
    (["--", "-5+3="], (None, "-5+3=")),
    (["--json", "--", "-h"], (None, "-h")),
    (["--json", "--", "--help"], (None, "--help")),
    (["--", "tiny", "--"], ("tiny", "--"))]


def test_where_the_prompt_may_stand():
    for argv, words in WORDS:
        args = command_parser("run").parse_mixed(argv)
        assert run.model_and_prompt(args.model, args.prompt) == words, argv


def test_paths_may_begin_with_a_dash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-5.png").write_bytes(b"")
    args = command_parser("batch").parse_mixed(["--cache-dir", "-5dir", "--chat-template", "-5.png", "--",
                                                "-5.png", "-out.jsonl", "tiny"])
    assert (args.engine_cache_dir, str(args.chat_template)) == ("-5dir", "-5.png")
    assert [str(args.source), str(args.target), args.model] == ["-5.png", "-out.jsonl", "tiny"]
    assert [str(path) for path in command_parser("run").parse_mixed(["--image", "-5.png", "hi"]).image] == ["-5.png"]


LONG = [
    ["run", "x" * 100_000, "--chat-template", "y" * 100_000], ["run", "--" + "x" * 100_000],
    ["run", "hi", "--tools", "x" * 3000], ["serve", "--port", "1" * 100_000], ["x" * 100_000],
    ["run", "hi", "--temperature", "x" * 100_000], ["run", "y" * 5000 + ".gguf", "hi"], ["cache", "ls", "x" * 5000],
    ["convert", "x" * 5000, "a.gguf"], ["convert", "tiny", "x" * 100_000], ["run", "hi", "--memory", "x" * 100_000],
    ["bench", "--random", "x" * 100_000], ["run", "hi", "--speculate", "x" * 100_000],
    ["run", "hi", "--ops", "x" * 100_000], ["serve", "--host", "x" * 100_000], ["doctor", "x" * 5000],
    ["run", "hi", "--revision", "x" * 5000], ["inspect", "a/" + "b" * 5000],
]


def test_long_arguments_are_quoted_briefly(capsys):
    for argv in LONG:
        assert main(argv) in (1, 2)
        out, err = capsys.readouterr()
        assert len(err) < 2000 and len(out) < 4000 and "Traceback" not in err, argv[:2]


def test_a_long_prompt_is_not_a_path(capsys):
    assert "raise --max-context" in fails(["run", "word " * 3000, "--max-context", "64"], capsys)


def test_keywords_in_messages_become_options(capsys):
    for keyword, option in (
            ("raise `max_context`", "raise --max-context"), ("(`memory`), or `ops`", "(--memory), or --ops"),
            ("use `device='cpu'`", "use --device cpu"), ("leave out `vision=False`", "leave out --no-vision"),
            ("with `allow_image_urls=True`", "with --allow-image-urls"),
            ("tensors `mtp.*`, `a b`", "tensors `mtp.*`, `a b`")):
        assert as_typed(keyword) == option
    for argv, message in (
            (["--max-context", "0"], "--max-context must be from 1"), (["--aot-dir", ""], "--aot-dir is empty"),
            (["--quant", "fp8"], "--quant fp8 is for NVIDIA GPUs"),
            (["--speculate", "foo"], "--speculate must be auto")):
        assert f"error: {message}" in fails(["run", "hi", *argv], capsys)


def test_keywords_in_the_log_become_options(capsys):
    with logging_to_stderr(False):
        logging.getLogger("deltic").warning("%d MiB are too few (raise `host_memory`)", 5)
        try:
            raise ConfigError("lower `token_budget`", "token_budget")
        except ConfigError:
            logging.getLogger("deltic").exception("a step failed")
    assert capsys.readouterr().err == ("deltic: warning: 5 MiB are too few (raise --host-memory)\n"
                                       "deltic: error: a step failed (ConfigError: lower --token-budget; -v shows "
                                       "where)\n")


def test_text_arguments_keep_spaces_and_newlines():
    assert text(" \u00e9\n") == " \u00e9\n"


def test_a_used_port_is_found_before_loading(monkeypatch, capsys):
    monkeypatch.setattr("deltic.cli.serve.open_llm", lambda args: pytest.fail("loaded"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        message = fails(["serve", "--port", str(port)], capsys)
    assert "cannot listen on 127.0.0.1" in message and str(port) in message and "in use" in message


def test_serve_passes_its_options_on(monkeypatch):
    calls, server = [], ModuleType("deltic.server.app")
    server.serve = lambda llm, host, listener, **options: calls.append(
        (llm.runtime.name, listener.getsockname()[0], options))
    monkeypatch.setitem(sys.modules, "deltic.server.app", server)
    monkeypatch.setenv("DELTIC_API_KEY", "secret")
    argv = ["serve", "tiny", "--port", "0", "--served-name", "demo", "--cors-origin", "*", "--lenient"]
    assert main(argv) == main([*argv, "--api-key", "mine", "--drain-seconds", "5"]) == 0
    given = {"served_name": "demo", "encoders": [], "state_dir": None, "lora_dir": None, "cors_origins": ["*"],
             "lenient": True, "tls": None, "api_keys": {"secret": None}, "share_prefix_cache": False,
             "allowed_hosts": [], "drain_seconds": 30, "request_log": None}
    own = {**given, "api_keys": {"mine": None}, "drain_seconds": 5}
    assert calls == [("tiny", "127.0.0.1", given), ("tiny", "127.0.0.1", own)]


def test_inspect(capsys):
    assert main(["inspect", "--json", "--memory", "64MiB", "--ops", "mlp=reference"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["config"]["pattern"] == "2 x (3 linear_attention + 1 full_attention)"
    assert facts["weights"]["dtype"] == "bfloat16"
    assert facts["weights"]["parameters"] == 4548808
    memory = facts["memory"]
    assert memory["pages_share_memory_with_slots"] and 50 < memory["pages_and_slots_mib"] <= 64
    assert memory["max_batch"] == 16 and memory["max_context"] == 32768
    assert facts["tokenizer"]["ends_with"] == ["<|im_end|>", "<|endoftext|>"] and facts["tokenizer"]["chat_template"]
    assert facts["ops"]["mlp"] == "reference" and len(facts["ops"]) > 5


def test_inspect_shows_the_source_of_drafts(capsys):
    for option, who, rings in (("mtp:2", "the model's draft head, up to 2 tokens at a time", True), ("off", "", False),
                               ("ngram", "n-grams, up to 4 tokens at a time", True),
                               ("draft:tiny:1", "the draft model tiny, which has 4.0 MiB of cache, up to 1", True)):
        assert main(["inspect", "tiny", "--json", "--memory", "16MiB", "--speculate", option]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert (facts["speculation"] or "").startswith(who) and bool(facts["speculation"]) == bool(who)
        memory = facts["memory"]
        taken = memory["pages_and_slots_mib"] * (1 << 20) + memory["rings"] * memory["ring_bytes"]
        assert (memory["rings"] > 0) == rings and (12 if "draft" in option else 16) << 20 >= taken > 11 << 20
    assert main(["inspect", "--random", "0.8b", "--json", "--memory", "4GiB", "--speculate", "ngram"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["rings"] == 16


def test_inspect_a_shape_without_its_weights(monkeypatch, capsys):
    monkeypatch.setattr("deltic.engine.loading.random_tensors", lambda *args, **options: pytest.fail("allocated"))
    assert main(["inspect", "--random", "qwen3.5-27b", "--memory", "4GiB"]) == 0
    shown = capsys.readouterr().out
    assert "16 x (3 linear_attention + 1 full_attention)" in shown and "26,895,998,464" in shown
    assert main(["inspect", "--random", "0.8b", "--layers", "5", "--memory", "4GiB", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["config"]["pattern"] == "1 x (3 linear_attention + 1 full_attention + 1 linear_attention)"
    assert main(["inspect", "--random", "qwen3-0.6b", "--layers", "2", "--memory", "4GiB", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["config"]["pattern"] == "2 x (1 full_attention)" and facts["config"]["architecture"] == "qwen3"
    assert facts["memory"]["slot_bytes"] == 0 and facts["memory"]["max_context"] == 40960


def test_a_traceback_is_logged_only_with_verbose(capsys):
    for verbose in (False, True):
        with logging_to_stderr(verbose):
            try:
                raise MemoryError("no room")
            except MemoryError:
                logging.getLogger("deltic").exception("drafting failed")
    line, *rest = capsys.readouterr().err.splitlines()
    assert line == "deltic: error: drafting failed (MemoryError: no room; -v shows where)"
    assert rest[:2] == ["deltic: error: drafting failed", "Traceback (most recent call last):"]


def test_bench(capsys):
    argv = ["bench", "--prompt-tokens", "24", "--new-tokens", "4", "--batch", "2", "--threads", "1", "--memory",
            "16MiB"]
    assert main([*argv, "--repeat", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {"prefill_tokens_per_second", "decode_tokens_per_second", "time_to_first_token_ms", "peak_memory_mib",
            "machine", "version", "commit", "ops", "model", "dtype", "overhead_ms", "runs"} <= set(result)
    assert len(result["runs"]) == 2 and result["model"] == "tiny" and result["dtype"] == "bfloat16"
    assert all(result[name] > 0 for name in ("prefill_tokens_per_second", "decode_tokens_per_second", "overhead_ms",
                                             "peak_memory_mib"))
    assert result["machine"]["threads"] == 1
    assert main([*argv, "--repeat", "1"]) == 0
    assert "decode tokens per second" in capsys.readouterr().out
    assert main(["bench", "--prompt-tokens", "5", "--new-tokens", "1", "--repeat", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["decode_tokens_per_second"] is None and result["prefill_tokens_per_second"] > 0
