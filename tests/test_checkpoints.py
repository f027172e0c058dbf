"""`deltic doctor --deep`: what a user runs with true checkpoints, tried with models that are here. DELTIC_CHECKPOINTS
names a directory of more models, all of which are examined too."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from support import transformers_model

from deltic.cli import doctor_model, main
from deltic.config import PRESETS
from deltic.loader.hub import resolve

QUIET = ["--json"]


@pytest.fixture
def examine(capsys):
    """Findings about models and the report, by the exit code that must come."""
    def run(*argv, code=0):
        assert main(["doctor", "--deep", *QUIET, *argv]) == code
        found = json.loads(capsys.readouterr().out)
        return [finding for finding in found["findings"] if finding["name"] == "model"], found["report"]
    return run


@pytest.fixture
def broken(tmp_path):
    """A model with random weights and a real tokenizer: it answers, and nothing right."""
    transformers_model(tmp_path / "broken", vocab_size=3072)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve(None) / name, tmp_path / "broken" / name)
    return tmp_path / "broken"


def test_a_sound_model_keeps_its_context_over_three_turns(examine):
    (finding,), report = examine("--model", "tiny")
    assert finding["state"] == "ok"
    (model,) = report["models"]
    assert [turn["finish"] for turn in model["conversation"]] == ["stop"] * 3
    assert [word in turn["answer"] for turn, (_, word) in zip(model["conversation"], doctor_model.TURNS)] == [True] * 3
    assert model["conversation"][2]["cached_tokens"] > model["conversation"][1]["cached_tokens"] > 0
    assert model["faults"] == [] and model["architecture"] == "qwen3_5" and model["bytes"] > 1_000_000
    assert report["deltic"] and report["checks"]["python"].startswith("ok")


def test_a_report_names_no_path_of_the_machine(examine, tmp_path):
    shutil.copytree(resolve(None), tmp_path / "private" / "mine")
    _, report = examine(str(tmp_path / "private" / "mine"))
    assert report["models"][0]["name"] == "mine" and "private" not in json.dumps(report)
    assert not [text for text in report["checks"].values() if str(Path.cwd()) in text]


def test_a_model_that_answers_wrongly_is_a_problem(examine, broken):
    (finding,), report = examine(str(broken), code=1)
    assert finding["state"] == "problem" and "turn 1 does not know Paris" in finding["advice"]
    assert len(report["models"][0]["faults"]) >= 3


def test_a_directory_of_models_without_their_vision_towers(examine, broken):
    place = broken.parent
    for name in ("mmproj-F16.gguf", "imatrix.gguf", "m-00002-of-00002.gguf", "notes.txt"):
        (place / name).write_bytes(b"")
    (place / "bad.gguf").write_bytes(b"GGUF")
    findings, report = examine(str(place), code=1)
    assert [model["name"] for model in report["models"]] == ["bad.gguf", "broken"]
    assert "it cannot be run" in findings[0]["advice"]


def test_a_directory_without_models_and_no_directory(tmp_path, capsys):
    assert main(["doctor", "--deep", *QUIET, str(tmp_path)]) == 2
    assert "has no models" in capsys.readouterr().err
    assert main(["doctor", "--deep", *QUIET]) == 2
    assert "--deep loads a model: name it" in capsys.readouterr().err


# The published answer


class Published:
    """A model that gives these tokens."""

    def __init__(self, tokens):
        self.tokens = tuple(tokens)

    def generate(self, prompts, sampling):
        assert prompts == [doctor_model.published_answer()["prompt"]] and sampling.temperature == 0
        return [type("Output", (), {"choices": [type("Choice", (), {"tokens": self.tokens, "text": "x"})]})]


@pytest.mark.parametrize(("change", "faults", "fact"), [
    (lambda ids: ids, 0, "all of 59"), (lambda ids: ids[:-1], 0, "all of 59"),
    (lambda ids: [*ids[:10], 1, *ids[11:]], 1, "10 of 59"), (lambda ids: ids[:5], 1, "5 of 59")])
def test_the_published_answer_is_compared_token_by_token(change, faults, fact):
    ids = doctor_model.published_answer()["ids"]
    facts = {}
    assert len([*doctor_model._compared(Published(change(list(ids))), facts, exact=True)]) == faults
    assert facts["golden"].startswith(fact.replace("59", str(len(ids))))
    assert not [*doctor_model._compared(Published(change(list(ids))), {}, exact=False)]


def test_published_answer_reference():
    known = doctor_model.published_answer()
    assert "2fc06364715b967f1860aea9cf38778875588b17" in known["source"] and known["preset"] in PRESETS
    assert max(known["ids"]) < PRESETS[known["preset"]].vocab_size
    assert known["ids"][-1] in PRESETS[known["preset"]].eos_token_ids


# True checkpoints, where there are some


@pytest.mark.parametrize("place", [os.environ.get("DELTIC_CHECKPOINTS", "tiny")])
def test_true_checkpoints(place, examine):
    findings, report = examine(place)
    assert findings and all(finding["state"] == "ok" for finding in findings), json.dumps(report, indent=1)
