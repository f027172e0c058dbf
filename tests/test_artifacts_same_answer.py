"""Token for token: each kind of artifact says what the engine says of the embedded model and of a true shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from artifact_cases import checkpoint, compiled, exported, says_the_same, session

from deltic.config import ModelConfig

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TRUE = replace(ModelConfig.preset("qwen3.5-0.8b", 4), num_mtp_layers=0, max_position_embeddings=512)
KINDS: dict[str, tuple[str, Callable[..., Path]]] = {
    **{f"executorch {length} {operators}": ("executorch", partial(exported, max_context=512, chunk=chunk,
                                                                  operators=operators))
       for length, chunk in (("dynamic", 128), ("static", 1)) for operators in ("executorch", "deltic")},
    "tvm": ("tvm", partial(compiled, max_context=512)),
}
"""The package that each kind needs, and what makes it."""


def made(kind: str, folder: Path, source: Path | None) -> Path:
    package, make = KINDS[kind]
    if find_spec(package) is None:
        pytest.skip(f"needs deltic[{package}]")
    return make(folder / ("made.pte" if package == "executorch" else "made"), source)


@pytest.mark.parametrize("kind", KINDS)
def test_the_embedded_model(kind: str, tmp_path: Path) -> None:
    says_the_same(session(None, "64MiB"), session(made(kind, tmp_path, None), "64MiB"), count=200)


@pytest.mark.parametrize("kind", KINDS)
def test_four_layers_of_a_true_shape(kind: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "model", TRUE, 0.1)
    says_the_same(session(source, "512MiB"), session(made(kind, tmp_path, source), "512MiB"), count=200)
