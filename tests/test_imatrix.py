"""Importance matrices: files of llama-imatrix are read, quantization loses less with them, wrong ones are refused."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from imatrix_cases import Sums, collect, divergence, write_gguf, write_old
from numpy.typing import NDArray
from support import tiny_texts

import deltic
from deltic.chat.tokenizer import Tokenizer
from deltic.cli import main
from deltic.errors import ModelError
from deltic.loader.gguf.blocks import BY_NAME, decode
from deltic.loader.gguf.convert import convert
from deltic.loader.gguf.file import GgufFile
from deltic.loader.gguf.imatrix import ImportanceMatrix, read_imatrix
from deltic.loader.gguf.quantize import quantize, quantize_in_pieces
from deltic.loader.gguf.write import NewTensor
from deltic.loader.model_files import open_model
from deltic.session import Session

ROOT = Path(__file__).resolve().parents[1]
OPTIONS: dict[str, Any] = {"dtype": "float32", "ops": ("torch",), "memory": "16MiB", "threads": 1, "max_context": 512}
SUMS: Sums = {"blk.0.attn_q.weight": (np.array([2, 4, 6, 0], np.float32), 2)}


@pytest.fixture(scope="module")
def texts() -> tuple[list[int], list[int]]:
    """Tokens to collect from, and others."""
    essay = json.loads((ROOT / "bench" / "essays.json").read_text(encoding="utf-8"))["English"]
    ids = Tokenizer.from_directory(Path(deltic.__file__).parent / "models" / "tiny").encode(essay)
    return ids[:400], ids[600:900]


@pytest.fixture(scope="module")
def sums(texts: tuple[list[int], list[int]]) -> Sums:
    found = collect(Session(None, **OPTIONS), texts[0])
    assert {count for _, count in found.values()} == {len(texts[0])}
    return found


# Files


@pytest.mark.parametrize("write", [write_gguf, write_old])
def test_both_forms(write: Any, tmp_path: Path) -> None:
    found = read_imatrix(write(tmp_path / "m", {**SUMS, "b": (np.ones(3, np.float32), 4)}))
    assert found.datasets == ("text.txt",) and found.chunks == 1
    assert found.means["blk.0.attn_q.weight"].tolist() == [[1, 2, 3, 0]] and found.means["b"].tolist() == [[0.25] * 3]
    assert found.metadata() == {"quantize.imatrix.file": "m", "quantize.imatrix.entries_count": 2,
                                "quantize.imatrix.dataset": "text.txt", "quantize.imatrix.chunks_count": 1}


def test_importance_is_relative_and_bounded(tmp_path: Path) -> None:
    target = NewTensor("blk.0.attn_q.weight", BY_NAME["Q4_0"], (8, 4))
    found = read_imatrix(write_gguf(tmp_path / "m", SUMS)).of(target)
    assert found is not None
    np.testing.assert_allclose(found, [[2 / 3, 4 / 3, 2, 1e-4]], rtol=1e-6)
    assert ImportanceMatrix(tmp_path, {}).of(target) is None
    unused = ImportanceMatrix(tmp_path, {target.name: np.zeros((1, 4), np.float32)}).of(target)
    assert unused is not None and unused.tolist() == [[1, 1, 1, 1]]


def test_experts(tmp_path: Path) -> None:
    """Each has its own importance; all columns of one that no token has reached count the same."""
    path = write_gguf(tmp_path / "m", {"blk.0.ffn_up_exps.weight": (np.array([[1, 3], [0, 0]], np.float32), 1)})
    target = NewTensor("blk.0.ffn_up_exps.weight", BY_NAME["Q4_0"], (2, 8, 2))
    found = read_imatrix(path).of(target)
    assert found is not None and found.tolist() == [[0.5, 1.5], [1, 1]]
    matrix, importance = torch.randn(6, 64), np.linspace(0.1, 2, 128, dtype=np.float32).reshape(2, 64)
    with ThreadPoolExecutor(2) as pool:
        blocks = np.concatenate([*quantize_in_pieces("m", matrix, BY_NAME["Q4_0"], pool, importance)])
    own = [quantize(part.numpy(), BY_NAME["Q4_0"], row) for part, row in zip(matrix.chunk(2), importance, strict=True)]
    assert np.array_equal(blocks, np.concatenate(own))


def test_wrong_files(tmp_path: Path) -> None:
    path, old = tmp_path / "m", tmp_path / "old"
    for value in (float("nan"), float("inf"), -1.0):
        for write in (write_gguf, write_old):
            with pytest.raises(ModelError, match=r"/m: tensor 'blk\.1\.x' has values that are negative or not finite"):
                read_imatrix(write(path, {**SUMS, "blk.1.x": (np.array([1, value], np.float32), 1)}))
    with pytest.raises(ModelError, match="/m is a GGUF file of type 'model', not of an importance matrix"):
        read_imatrix(write_gguf(path, SUMS, "model"))
    with pytest.raises(ModelError, match="/m has no tensors"):
        read_imatrix(write_gguf(path, {}))
    with pytest.raises(ModelError, match="absent cannot be read"):
        read_imatrix(tmp_path / "absent")
    whole = write_old(old, SUMS).read_bytes()
    for end in range(4, len(whole) - 16):
        path.write_bytes(whole[:end])
        with pytest.raises(ModelError, match="/m is no importance matrix, or ends too early"):
            read_imatrix(path)
    path.write_bytes(b"no matrix at all")
    with pytest.raises(ModelError, match="/m is no importance matrix"):
        read_imatrix(path)


# Quantization


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
def test_errors_are_smaller_where_they_count(kind: str) -> None:
    rng = np.random.default_rng(1)
    values: NDArray[np.float32] = rng.normal(0, 1, (64, 512)).astype(np.float32)
    importance = np.exp(rng.normal(0, 2, 512)).astype(np.float32)
    type = BY_NAME[kind]

    def error(weights: NDArray[np.float32] | None) -> float:
        found = decode(quantize(values, type, weights).reshape(-1), type).reshape(values.shape)
        return float((importance * (found - values) ** 2).mean() / importance.mean())

    assert error(importance) < 0.97 * error(None)
    zero = np.zeros((2, 512), np.float32)
    assert not decode(quantize(zero, type, importance).reshape(-1), type).any()


def test_types_without_a_search_stay(tmp_path: Path) -> None:
    values = np.random.default_rng(1).normal(0, 1, (4, 64)).astype(np.float32)
    for kind in ("Q8_0", "BF16", "F32"):
        importance = np.arange(64, dtype=np.float32) + 1
        assert np.array_equal(quantize(values, BY_NAME[kind], importance), quantize(values, BY_NAME[kind]))


@pytest.mark.parametrize("kind", ["Q4_K_M", "Q4_0"])
def test_a_model_is_nearer_to_the_original(kind: str, texts: tuple[list[int], list[int]], sums: Sums, tmp_path: Path
                                           ) -> None:
    """On another text than that of the matrix. Most of the embedded model's rows fit no blocks of 256, so that Q4_K_M
    is mostly Q5_0."""
    files, held = open_model(None), texts[1]
    expected = Session(None, **OPTIONS).prefill(held, all_logits=True)
    found = dict[str, float]()
    for name, imatrix in (("plain", None), ("weighted", read_imatrix(write_gguf(tmp_path / "m", sums)))):
        path = tmp_path / f"{name}.gguf"
        convert(replace(files, imatrix=imatrix), tiny_texts(), name, path, kind)
        logits = Session(path, packed_weights="off", **OPTIONS).prefill(held, all_logits=True)
        found[name] = divergence(expected, logits)
    assert found["weighted"] < 0.95 * found["plain"], found


def test_matrix_of_another_model(sums: Sums, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "t.gguf"
    command = ["convert", "tiny", str(target), "--type", "q4_0", "--imatrix", str(tmp_path / "m"), "--mmproj", "none"]
    write_old(tmp_path / "m", sums)
    assert main([*command, "--json"]) == 0
    assert GgufFile.open(target).metadata["quantize.imatrix.entries_count"] == len(sums)
    target.unlink()
    name = "blk.3.attn_output.weight"
    write_gguf(tmp_path / "m", {**sums, name: (np.ones(64, np.float32), 1)})
    assert main(command) == 2
    wrong = f"/m: tensor '{name}' has the shape [192, 256], but the importance matrix has [1, 64]"
    assert wrong in capsys.readouterr().err
    write_gguf(tmp_path / "m", {key: value for key, value in sums.items() if key != name})
    assert main(command) == 2 and not target.exists()
    assert f"/m: the importance matrix has no values for tensor '{name}'" in capsys.readouterr().err
