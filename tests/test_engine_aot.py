"""What a start has packed the next one reads: the same bits, and nothing that is torn or of something else."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support import odd_shape

import deltic
from deltic import RandomModel, Session
from deltic.errors import ConfigError
from deltic.ops.cpu import missing
from deltic.runner import weights

pytestmark = pytest.mark.skipif("step" in missing(), reason="needs the compiled kernels")
TINY = Path(deltic.__file__).parent / "models" / "tiny"
LONG_AGO = 1_700_000_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = Path(shutil.copytree(TINY, tmp_path_factory.mktemp("aot") / "model"))
    return settled(place)


def settled(place: Path) -> Path:
    """The model, as if it had come long ago, even for who looks at when its files were last changed in any way."""
    for path in place.iterdir():
        os.utime(path, (LONG_AGO, LONG_AGO))
    return place


def start(model: Path | RandomModel, folder: Path, **options: Any) -> tuple[torch.Tensor, bool]:
    """The logits after some tokens, and whether weights had to be packed for that."""
    made = []

    def quantize(*arguments: Any) -> Any:
        made.append(True)
        return kept(*arguments)

    kept, given = weights.quantize_parts, {"quant": "q8_0", "threads": 1, "memory": "16MiB", **options}
    # a file that was changed in the last two seconds might change again without a trace
    with patch.object(weights, "quantize_parts", quantize), patch(
            "deltic.cache.offload.identity.FileMark.settled", True):
        session = Session(model if isinstance(model, RandomModel) else str(model), aot_dir=str(folder), **given)
    return session.prefill([1, 2, 3, 4, 5]).clone(), bool(made)


def test_a_second_start_packs_nothing(model: Path, tmp_path: Path) -> None:
    first, second = start(model, tmp_path), start(model, tmp_path)
    assert (first[1], second[1]) == (True, False) and len(list(tmp_path.iterdir())) == 1
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[0], Session(str(model), quant="q8_0", threads=1).prefill([1, 2, 3, 4, 5]))


def test_random_weights_too(tmp_path: Path) -> None:
    shape = odd_shape(hidden_size=64, intermediate_size=96)
    first, again, other = (start(RandomModel(shape=shape, seed=seed), tmp_path, dtype="float32") for seed in (1, 1, 2))
    assert (first[1], again[1], other[1]) == (True, False, True)
    assert torch.equal(first[0], again[0]) and not torch.equal(first[0], other[0])


@pytest.mark.parametrize("change", [{"quant": "q4_k"}, {"dtype": "bfloat16"}])
def test_changed_models_are_packed_again(model: Path, tmp_path: Path, change: dict[str, str]) -> None:
    start(model, tmp_path)
    assert start(model, tmp_path, **change)[1] and len(list(tmp_path.iterdir())) == 2
    assert not start(model, tmp_path, **change)[1]


def test_another_version_or_kernel_packs_anew(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(model, tmp_path)
    monkeypatch.setattr("deltic.cache.offload.identity.__version__", "0.0.0")
    assert start(model, tmp_path)[1]


def test_changed_weights_are_packed_anew(model: Path, tmp_path: Path) -> None:
    other = settled(Path(shutil.copytree(model, tmp_path / "other")))
    before, _ = start(other, tmp_path / "aot")
    content = bytearray((other / "model.safetensors").read_bytes())
    middle = len(content) // 2  # of the text model's weights
    content[middle:middle + 2000] = bytes(2000)
    (other / "model.safetensors").write_bytes(content)
    os.utime(other / "model.safetensors", (LONG_AGO, LONG_AGO))
    after, made = start(other, tmp_path / "aot")
    assert made and not torch.equal(before, after)


def test_recently_changed_weights_are_not_stored(model: Path, tmp_path: Path) -> None:
    with patch("deltic.cache.offload.identity.FileMark.settled", False):
        Session(str(model), quant="q8_0", threads=1, aot_dir=str(tmp_path))
    assert not list(tmp_path.iterdir())


def spoil(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "torn":
        del content[-100:]
    elif how == "flipped":
        content[-5000] ^= 1
    elif how == "of something else":
        content[:4] = b"PK\3\4"
    elif how == "of a later version":
        content[12] ^= 1
    elif how == "of another model":
        content = content.replace(b'"key": "', b'"key": "0', 1)[:len(content)]
    elif how == "empty":
        content.clear()
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["torn", "flipped", "of something else", "of a later version", "of another model",
                                 "empty"])
def test_a_spoilt_file_is_ignored_with_a_warning(model: Path, tmp_path: Path, how: str,
                                                 caplog: pytest.LogCaptureFixture) -> None:
    expected, _ = start(model, tmp_path)
    path, = tmp_path.iterdir()
    spoil(path, how)
    with caplog.at_level(logging.WARNING, "deltic"):
        found, made = start(model, tmp_path)
    assert made and torch.equal(expected, found)
    assert any(str(path) in record.getMessage() and "ignored" in record.getMessage() for record in caplog.records)
    assert not start(model, tmp_path)[1]


def test_a_directory_that_cannot_be_made_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="aot_dir"):
        start(model, tmp_path / "file" / "below")
