"""Short names of models: what they stand for, and what is suggested where one is misspelled."""

from __future__ import annotations

import pytest

from deltic.config import PRESETS
from deltic.errors import ModelError
from deltic.loader import hub
from deltic.loader.catalog import SHORT_NAMES, names_a_model, parse_repository, repository_of, similar


@pytest.mark.parametrize(("name", "repository"), [
    ("qwen3.5:0.8b", "Qwen/Qwen3.5-0.8B"), ("Qwen3.5:0.8B", "Qwen/Qwen3.5-0.8B"), ("qwen3.5", "Qwen/Qwen3.5-9B"),
    ("qwen3.5:latest", "Qwen/Qwen3.5-9B"), ("qwen3.5-0.8b", "Qwen/Qwen3.5-0.8B"),
    ("qwen3.5:35b", "Qwen/Qwen3.5-35B-A3B"), ("qwen3.5:35b-a3b", "Qwen/Qwen3.5-35B-A3B"),
    ("qwen3.5:0.8b-q4_K_M", "unsloth/Qwen3.5-0.8B-GGUF:Q4_K_M"),
    ("qwen3.5:35b-a3b-q8_0", "unsloth/Qwen3.5-35B-A3B-GGUF:Q8_0"),
    ("qwen3-next:80b", "Qwen/Qwen3-Next-80B-A3B-Instruct"), ("qwen3-coder-next", "Qwen/Qwen3-Coder-Next"),
    ("qwen3-coder-next:80b-q4_K_M", "unsloth/Qwen3-Coder-Next-GGUF:Q4_K_M"),
    ("smollm2:135m", "HuggingFaceTB/SmolLM2-135M-Instruct"), ("all-minilm", "sentence-transformers/all-MiniLM-L6-v2"),
    ("hf.co/a/b:Q8_0", "a/b:Q8_0"), ("https://huggingface.co/a/b", "a/b"), ("huggingface.co/a/b/tree/main", "a/b"),
    ("a/b:Q8_0", "a/b:Q8_0"), ("Hello", "Hello"), ("qwen3.5:0.7b", "qwen3.5:0.7b")])
def test_short_name_of_repository(name, repository):
    assert repository_of(name) == repository


def test_every_preset_and_short_name_is_a_repository():
    assert all(parse_repository(name) for name in (*PRESETS, *SHORT_NAMES))
    assert all(names_a_model(name) for name in SHORT_NAMES)


def test_short_names_are_downloaded_as_their_repositories(monkeypatch):
    asked = []
    monkeypatch.setattr(hub, "_download", lambda repository, wanted, *more: asked.append((repository, wanted)))
    for name in ("qwen3.5:0.8b", "qwen3.5:0.8b-q4_k_m", "hf.co/a/b:Q8_0"):
        hub.resolve(name)
    assert asked == [("Qwen/Qwen3.5-0.8B", None), ("unsloth/Qwen3.5-0.8B-GGUF", "Q4_K_M"), ("a/b", "Q8_0")]


def test_directory_precedes_short_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3.5").mkdir()
    assert hub.resolve("qwen3.5").name == "qwen3.5"


@pytest.mark.parametrize(("typed", "meant"), [
    ("qwen3.5:0.9b", "qwen3.5:0.8b"), ("Qwen3.5-08B", "Qwen/Qwen3.5-0.8B"), ("smolm2:135m", "smollm2:135m")])
def test_typing_error_suggests_short_name(typed, meant):
    with pytest.raises(ModelError, match="did you mean") as failed:
        hub.resolve(typed)
    assert meant in str(failed.value)
    assert similar("Qwn/Qwen3.5-0.8B")[0] == "Qwen/Qwen3.5-0.8B" and not similar("something/else")
