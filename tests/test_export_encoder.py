"""Encoders compiled by TVM: equal to the engine's vectors and scores; damaged directories and wrong options refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoder_models import TEXTS, save_encoder, save_m3, save_recipe
from starlette.testclient import TestClient

from deltic import Encoder
from deltic.cli import main
from deltic.config import Limits
from deltic.embeddings.open import is_encoder
from deltic.errors import ConfigError, ModelError
from deltic.export.program import kind_of
from deltic.server.app import create_encoder_app
from deltic.server.embeddings import EmbeddingService

# its import takes seconds in each process that collects tests
pytestmark = [pytest.mark.filterwarnings("ignore"),
              pytest.mark.skipif(find_spec("tvm") is None, reason="needs deltic[tvm]")]


@pytest.fixture(scope="module")
def m3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small BGE-M3, and its directory compiled by the command."""
    place = tmp_path_factory.mktemp("m3")
    save_m3(place / "model")
    assert main(["compile", str(place / "model"), "-o", str(place / "made")]) == 0
    return place / "model", place / "made"


@pytest.fixture
def copy(m3: tuple[Path, Path], tmp_path: Path) -> Path:
    """A compiled directory that a test may damage."""
    return Path(shutil.copytree(m3[1], tmp_path / "copy"))


def test_compiled_encoder_equals_engine(m3: tuple[Path, Path]) -> None:
    """Dense vectors, sparse weights and token vectors, of a batch of texts of many lengths; a text's vector does not
    depend on the batch."""
    source, made = m3
    assert kind_of(made) == "tvm" and is_encoder(made) and not any(made.glob("model*"))
    with Encoder(source, threads=1) as engine, Encoder(made, threads=1) as compiled:
        assert (compiled.dimension, compiled.max_length) == (engine.dimension, engine.max_length)
        vectors = compiled.encode(TEXTS)
        np.testing.assert_allclose(vectors, engine.encode(TEXTS), atol=2e-6)
        np.testing.assert_array_equal(vectors[3], compiled.encode(TEXTS[3]))
        for own, other in zip(engine.encode_all(TEXTS), compiled.encode_all(TEXTS), strict=True):
            for mine, theirs in ((other.dense, own.dense), (other.colbert, own.colbert)):
                assert mine is not None and theirs is not None
                np.testing.assert_allclose(mine, theirs, atol=2e-6)
            assert other.sparse.keys() == own.sparse.keys()
            assert all(abs(other.sparse[id] - weight) < 2e-6 for id, weight in own.sparse.items())
        np.testing.assert_allclose(compiled.encode(TEXTS, kind="query"), engine.encode(TEXTS, kind="query"), atol=2e-6)


@pytest.mark.slow
def test_compiled_reranker_equals_engine(tmp_path: Path) -> None:
    """A reranker of the BERT family, whose pairs have two token types, and whose classifier is beside the library."""
    save_encoder(tmp_path / "model", "bert", labels=1, num_hidden_layers=1)
    assert main(["compile", str(tmp_path / "model"), "-o", str(tmp_path / "made"), "--dtype", "float16"]) == 0
    with Encoder(tmp_path / "model", threads=1) as engine, Encoder(tmp_path / "made", threads=1) as compiled:
        documents = [text for text in TEXTS if text]
        wanted, found = (one.score("w1 w2 w3", documents) for one in (engine, compiled))
    assert compiled.scores and max(abs(a - b) for a, b in zip(wanted, found, strict=True)) < 2e-3
    assert max(wanted) - min(wanted) > 0.02, "texts that score alike show nothing"


def test_command_and_server_run_compiled_encoder(m3: tuple[Path, Path], tmp_path: Path,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    source, made = m3
    (tmp_path / "texts.txt").write_text("w1 w2\nw3\n", encoding="utf-8")
    assert main(["embed", str(made), str(tmp_path / "texts.txt"), "-o", str(tmp_path / "found.npy")]) == 0
    with Encoder(source, threads=1) as engine, Encoder(made, threads=1) as compiled:
        wanted = engine.encode(["w1 w2", "w3"])
        np.testing.assert_allclose(np.load(tmp_path / "found.npy"), wanted, atol=2e-6)
        app = create_encoder_app([EmbeddingService("m3", compiled)], Limits())
        with TestClient(app, base_url="http://127.0.0.1") as client:
            answer = client.post("/v1/embeddings", json={"model": "m3", "input": ["w1 w2", "w3"]})
        assert answer.status_code == 200, answer.text
        np.testing.assert_allclose([each["embedding"] for each in answer.json()["data"]], wanted, atol=2e-6)
    capsys.readouterr()
    assert main(["run", str(made), "hello"]) == 2
    assert "encoder" in capsys.readouterr().err


def test_config_describes_pooling(m3: tuple[Path, Path]) -> None:
    said = json.loads((m3[1] / "mlc-chat-config.json").read_text(encoding="utf-8"))
    assert said["model_task"] == "embedding" and said["device"] == "cpu"
    assert said["embedding_metadata"] == {"model_type": "encoder", "pooling_strategy": "cls", "normalize": True}


def config(place: Path, name: str, **changes: Any) -> None:
    path = place / name
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "another vocabulary": (lambda place: config(place, "config.json", vocab_size=171), "vocabulary"),
    "another length": (lambda place: config(place, "config.json", max_position_embeddings=80), "positions"),
    "another family": (lambda place: config(place, "config.json", model_type="bert"), "not of one model"),
    "another processor": (lambda place: config(place, "mlc-chat-config.json", needs=["avx9000"]), "avx9000"),
    "a missing shard": (lambda place: (place / "params_shard_0.bin").unlink(), "params_shard_0.bin is missing"),
    "no tokenizer": (lambda place: (place / "tokenizer.json").unlink(), "tokenizer.json is absent"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_damaged_directory_is_refused(name: str, copy: Path) -> None:
    spoil, words = FAULTS[name]
    spoil(copy)
    with pytest.raises(ModelError, match=words):
        Encoder(copy)


@pytest.mark.parametrize(("option", "value"), [("quant", "q8_0"), ("dtype", "bfloat16"), ("device", "cuda")])
def test_unsupported_options_are_refused(m3: tuple[Path, Path], option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=option):
        Encoder(m3[1], **{option: value})


def test_language_model_options_are_refused(m3: tuple[Path, Path], tmp_path: Path,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", str(m3[0]), "-o", str(tmp_path / "made"), "--max-context", "8"]) == 2
    assert "--max-context" in capsys.readouterr().err and not (tmp_path / "made").exists()


@pytest.mark.parametrize(("command", "message"), [
    (["compile", "-o", "again"], "is compiled already"), (["convert", "again.gguf"], "is compiled by TVM")])
def test_compile_and_convert_need_the_original(m3: tuple[Path, Path], command: list[str], message: str,
                                                   tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verb, *rest = command
    argv = [verb, str(m3[1]), *(str(tmp_path / word) if word.startswith("again") else word for word in rest)]
    assert main(argv) == 2 and message in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["mean_tokens", "lasttoken", "mean_sqrt_len_tokens"])
def test_two_layers_of_bge_m3s_shape(tmp_path: Path, pooling: str) -> None:
    """Hidden 1024 in 16 heads, inner 4096, positions 8194; texts of 1 to 600 tokens."""
    save_encoder(tmp_path / "model", "xlm-roberta", hidden_size=1024, intermediate_size=4096,
                 num_attention_heads=16, num_hidden_layers=2, max_position_embeddings=8194, initializer_range=0.02)
    save_recipe(tmp_path / "model", pooling, max_seq_length=8192)
    assert main(["compile", str(tmp_path / "model"), "-o", str(tmp_path / "made")]) == 0
    texts = [*TEXTS, " ".join(f"w{number * 7 % 150}" for number in range(600))]
    with Encoder(tmp_path / "model", threads=1) as engine, Encoder(tmp_path / "made", threads=1) as compiled:
        np.testing.assert_allclose(compiled.encode(texts), engine.encode(texts), atol=2e-5)
