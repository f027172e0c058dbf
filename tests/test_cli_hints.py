"""Help that fits two screens, hints for what is typed as with other engines, options in a file, completion."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from test_cli import fails
from test_server_harness import serving, tiny

from deltic.cli import COMMANDS, command_parser, docs, main
from deltic.cli.options import options_of
from deltic.cli.parser import ALIASES, foreign_names

ROOT = Path(__file__).parents[1]


def shown(capsys, *argv):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 0
    return capsys.readouterr().out


# Help


def test_help_fits_two_screens(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for command in COMMANDS:
        assert 5 < len(shown(capsys, command, "--help").splitlines()) <= 100, command


def test_long_help_has_all_options(capsys):
    short, whole = (shown(capsys, "serve", option) for option in ("-h", "--help-all"))
    options = set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", whole, re.MULTILINE))
    hidden = {name for name in options if name not in short}
    assert {"--max-body-mib", "--ops", "--expert-cap"} < hidden and len(hidden) > 40
    assert options >= {name for name in command_parser("serve")._option_string_actions
                       if name.startswith("--") and not name.startswith(("--no-", "--random", "--layers"))}
    assert "--help-all" in short and "--port" in short


def test_usage_shows_which_arguments_are_required(capsys):
    for command, usage in (("serve", "[MODEL]"), ("run", "[MODEL] [PROMPT]"), ("eval", "MODEL FILE")):
        assert shown(capsys, command, "--help").startswith(f"usage: deltic {command} [OPTION ...] {usage}\n")


# Hints


HINTS = [
    (["srve"], "did you mean serve?"), (["start"], "did you mean serve?"), (["quantize"], "did you mean convert?"),
    (["stop"], "a server ends with Ctrl-C"), (["serve", "--prot", "1"], "did you mean --port"),
    (["serve", "--enable-mtp"], "--enable-mtp of vllm-mlx is --speculate here"),
    (["serve", "--ctx-size", "4096"], "--ctx-size of llama.cpp is --max-context here"),
    (["serve", "--ctx-size=4096"], "--ctx-size of llama.cpp is --max-context here"),
    (["serve", "-ngl", "99"], "-ngl: needs no option: all layers run on --device"),
    (["serve", "-c", "4096"], "-c of llama.cpp is --max-context here"),
    (["run", "-hf", "a/b"], "-hf of llama.cpp is MODEL here"), (["run", "-p", "Hi"], "-p of llama.cpp is PROMPT here"),
    (["serve", "--tensor-parallel-size", "2"], "is --tp here"),
    (["serve", "--max-model-len", "1"], "--max-model-len of vLLM is --max-context here"),
    (["serve", "--context-length", "1"], "--context-length of SGLang is --max-context here"),
    (["run", "hi", "--max_new_tokens", "3"], "--max_new_tokens of ExecuTorch is --max-tokens here")]


def test_names_of_other_engines_get_a_hint(capsys):
    for argv, hint in HINTS:
        assert hint in fails(argv, capsys), argv


def test_hints_name_existing_options():
    known = {name for command in COMMANDS for name in command_parser(command)._option_string_actions}
    for table in foreign_names().values():
        for theirs, ours in table.items():
            assert not ours.startswith("-") or ours in known, (theirs, ours)
            assert all(option in known for option in re.findall(r"--[a-z][a-z-]+", ours)), ours
    names = {*ALIASES.values(), *(ours for ours in foreign_names()["Commands"].values() if " " not in ours)}
    assert names <= set(COMMANDS)


def test_options_have_no_foreign_names():
    """A hint would never be shown for one that exists."""
    known = {name for name in command_parser("serve")._option_string_actions if name.startswith("--")}
    assert not known & {name for table in foreign_names().values() for name in table}


def test_the_migration_page_is_up_to_date():
    found = (ROOT / "docs" / "migrate.md").read_text(encoding="utf-8")
    assert found == docs.migration_page(), "docs/migrate.md is stale: run `python -m deltic.cli.docs`"
    assert {"vLLM", "llama.cpp", "Ollama", "vllm-mlx", "RLX", "ExecuTorch", "ailoy"} <= set(foreign_names())


# Commands as in Ollama


def test_list_and_show_are_ls_and_inspect(capsys):
    for argv in (["list", "--json"], ["ls", "--json"]):
        assert main(argv) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert json.loads(first) == json.loads(second)
    assert main(["show", "tiny"]) == 0
    assert "layers" in capsys.readouterr().out


def test_ps_lists_the_models_of_a_server(capsys):
    with serving(tiny()) as served:
        assert main(["ps", "--url", served.url]) == 0
        assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["tiny", "yes"]
        assert main(["ps", "--url", served.url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["models"][0]["loaded"] is True
    assert "no server answers at" in fails(["ps", "--url", served.url], capsys)


def test_a_shell_completes_commands_and_options(capsys):
    for shell in ("bash", "zsh"):
        assert main(["completion", shell]) == 0
        script = capsys.readouterr().out
        assert "serve" in script and "--max-context" in script


# Options in a file


FILE = {".yaml": """
model: Qwen/Qwen3.5-0.8B
port: 9000
api-key: [one, two]
max_context: 4096
lenient: true
prefix-cache: false
log-text: false
models: {small: "qwen3.5:0.8b"}
max-waiting: 7
""", ".toml": """
model = "Qwen/Qwen3.5-0.8B"
port = 9000
api-key = ["one", "two"]
max_context = 4096
lenient = true
prefix-cache = false
log-text = false
max-waiting = 7
models = {small = "qwen3.5:0.8b"}
"""}


@pytest.mark.parametrize("suffix", FILE)
def test_options_in_a_file(suffix, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("deltic.cli.serve.run_serve", lambda args: seen.append(args) or 0)
    path = tmp_path / f"serve{suffix}"
    path.write_text(FILE[suffix])
    assert main(["serve", "--config", str(path)]) == 0
    assert main(["serve", "tiny", "--config", str(path), "--port", "1", "--prefix-cache"]) == 0
    first, second = seen
    assert (first.model, first.port, first.api_key, first.lenient) == ("Qwen/Qwen3.5-0.8B", 9000, ["one", "two"], True)
    assert (first.engine_max_context, first.engine_prefix_cache, first.log_text) == (4096, False, False)
    assert (first.models, first.engine_max_waiting) == ([("small", "qwen3.5:0.8b")], 7)
    assert (second.model, second.port, second.engine_prefix_cache) == ("tiny", 1, True)


WRONG_FILES = [
    ("ctx-size: 1", "there is no option 'ctx-size' .--ctx-size of llama.cpp is --max-context here"),
    ("prot: 1", "there is no option 'prot' .did you mean --port"), ("port: x", "--port: must be an integer"),
    ("port: true", "port must be text, a number or a list"), ("lenient: 3", "lenient must be true or false"),
    ("port: {a: 1}", "port must be text, a number or a list"), ("- a", "must hold options by their names"),
    ("a: [", "cannot be read as YAML"), ("model: 3", "model must be the name of a model"), ("help: true", "no option"),
    ("models: x", "models must hold"), ("config: x", "no option 'config'")]


def test_wrong_files_of_options_are_explained(tmp_path, capsys):
    path = tmp_path / "serve.yml"
    for text, message in WRONG_FILES:
        path.write_text(text)
        assert re.search(message, fails(["serve", "--config", str(path)], capsys)), text


def test_an_empty_file_has_no_options(tmp_path):
    (tmp_path / "a.yaml").write_text("")
    assert options_of(command_parser("serve"), tmp_path / "a.yaml", False) == []
