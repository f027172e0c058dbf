"""Every kind of artifact equals the engine, token by token, for the embedded model and a real shape."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from export_cases import assert_same_answers, checkpoint, session

from deltic.config import ModelConfig

pytestmark = pytest.mark.slow

TRUE = replace(ModelConfig.preset("qwen3.5-0.8b", 4), num_mtp_layers=0, max_position_embeddings=512)
KINDS = {
    "dynamic": ("executorch", "export", "made.pte"),
    "static": ("executorch", "export", "made.pte", "--static"),
    "dynamic-deltic": ("executorch", "export", "made.pte", "--operators", "deltic"),
    "static-deltic": ("executorch", "export", "made.pte", "--operators", "deltic", "--static"),
    "tvm": ("tvm", "compile", "made"),
}
"""The package that each kind needs, and the command that makes it, in a process of its own to free its memory."""


def made(kind: str, folder: Path, source: Path | str) -> Path:
    package, command, name, *options = KINDS[kind]
    if find_spec(package) is None:
        pytest.skip(f"needs deltic[{package}]")
    done = subprocess.run([sys.executable, "-m", "deltic", command, source, "-o", folder / name, "--max-context", "512",
                           *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / name


@pytest.mark.parametrize("kind", KINDS)
def test_embedded_model(kind: str, tmp_path: Path) -> None:
    assert_same_answers(session(None, "64MiB"), session(made(kind, tmp_path, "tiny"), "64MiB"), count=200)


@pytest.mark.parametrize("kind", KINDS)
def test_four_layers_of_a_real_shape(kind: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "model", TRUE, 0.1)
    assert_same_answers(session(source, "512MiB"), session(made(kind, tmp_path, source), "512MiB"), count=200)
