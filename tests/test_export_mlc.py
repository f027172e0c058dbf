"""Directories made by mlc-llm's conventions: metadata, functions and quantized parameters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from export_cases import ATTENTION, CHUNK, assert_same_answers, forced, session
from mlc_artifact import build
from safetensors.torch import save_file
from support import numbers

from deltic import Session
from deltic.config import EngineConfig
from deltic.errors import ModelError
from deltic.export.program import hf_config, open_program
from deltic.loader.dummy import random_weights

pytest.importorskip("tvm_ffi", reason="needs deltic[tvm]")
pytestmark = pytest.mark.filterwarnings("ignore")

SINGLE, BATCHED = ("prefill", "decode"), ("batch_prefill", "batch_decode")
V1, V2 = "ndarray-cache.json", "tensor-cache.json"


def made(folder: Path, quantization: str, descriptor: str, functions: tuple[str, ...]) -> tuple[Session, Session]:
    """Returns sessions over the dequantized weights in the engine, and over the artifact."""
    weights = random_weights(ATTENTION, "float32", initializer_range=0.1, seed=2)
    stand = build(folder / "mlc", ATTENTION, {name: tensor.numpy() for name, tensor in weights.items()}, quantization,
                  descriptor, functions, CHUNK)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(hf_config(ATTENTION)), encoding="utf-8")
    save_file({name: torch.from_numpy(value).contiguous() for name, value in stand.items()},
              folder / "model" / "model.safetensors")
    return session(folder / "model"), session(folder / "mlc")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mlc")


@pytest.fixture(scope="module")
def sessions(folder: Path) -> tuple[Session, Session]:
    return made(folder, "q4f32_1", V1, SINGLE)


@pytest.mark.slow
def test_artifact_equals_engine(sessions: tuple[Session, Session]) -> None:
    assert_same_answers(*sessions, count=30)


@pytest.mark.slow
def test_batched_artifact_equals_engine(tmp_path: Path) -> None:
    assert_same_answers(*made(tmp_path, "q4f32_1", V2, SINGLE + BATCHED), count=30)


@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "descriptor", "functions"), [
    ("q3f16_0", V1, SINGLE),
    *((quantization, V2, BATCHED) for quantization in ("q3f16_0", "q3f16_1", "q4f16_0", "q4f16_1"))])
def test_half_precision_artifact_is_close_to_engine(
        tmp_path: Path, quantization: str, descriptor: str, functions: tuple[str, ...]) -> None:
    """In both layouts of the words, with a prompt longer than a chunk and single tokens after it."""
    engine, artifact = made(tmp_path, quantization, descriptor, functions)
    ids = numbers(4, 2 * CHUNK + 3, ATTENTION.vocab_size)
    wanted, found = (forced(one, ids[:-5], ids[-5:]) for one in (engine, artifact))
    assert (wanted - found).abs().max() < 0.02 * wanted.abs().max(), "float16 has 11 bits"


@pytest.mark.usefixtures("sessions")
@pytest.mark.slow
def test_artifact_metadata(folder: Path) -> None:
    """Vocabulary and stop tokens come from the config, the size of K/V from the artifact."""
    artifact = open_program(folder / "mlc", EngineConfig())
    same = ("architecture", "vocab_size", "num_hidden_layers", "num_key_value_heads", "head_dim", "rope")
    assert all(getattr(artifact.info.config, name) == getattr(ATTENTION, name) for name in same)
    assert artifact.info.token_bytes == 2 * 4 * 2 * ATTENTION.num_key_value_heads * ATTENTION.head_dim
    assert artifact.info.generation.eos_token_ids == (3, 4) and artifact.info.generation.temperature == 0.6
    assert artifact.info.max_context == ATTENTION.max_position_embeddings
    path = folder / "mlc" / "mlc-chat-config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), "quantization": "q4f16_ft"}),
                    encoding="utf-8")
    with pytest.raises(ModelError, match="quantization 'q4f16_ft'"):
        open_program(folder / "mlc", EngineConfig())
