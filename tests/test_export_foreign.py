"""Programs (.pte) of ExecuTorch's own exporter, with files named by options."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export_cases import ATTENTION, SHAPE, assert_same_answers, checkpoint, session

from deltic import LLM, SamplingParams, Session
from deltic.cli import main
from deltic.config import EngineConfig, GenerationDefaults, ModelConfig
from deltic.errors import ConfigError, ModelError
from deltic.export.program import ProgramInfo, hf_config
from deltic.loader.dummy import random_weights

pytest.importorskip("executorch", reason="the extra deltic[executorch] is not installed")

from deltic.export.executorch.runtime import ForeignProgram, foreign_chunk, read_params

TINY = Path(__file__).parents[1] / "deltic" / "models" / "tiny"
WORDS = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
MODEL = replace(SHAPE, vocab_size=WORDS.get("text_config", WORDS)["vocab_size"])
EXPORT = """
import json, sys
from executorch.examples.models.llama.export_llama_lib import export_llama
from executorch.extension.llm.export.config.llm_config import LlmConfig, ModelType
config = LlmConfig()
config.base.model_class = ModelType.qwen3_5_0_8b
config.base.checkpoint, config.base.params = "weights.pth", "params.json"
config.base.metadata = json.dumps({"get_eos_ids": [1, 2]})
config.model.use_kv_cache = config.model.use_sdpa_with_kv_cache = True
config.model.enable_dynamic_shape = sys.argv[1] == "dynamic"
config.export.max_seq_length = config.export.max_context_length = 96
config.export.output_name = "foreign.pte"
config.backend.xnnpack.enabled = config.backend.xnnpack.extended_ops = True
export_llama(config)
"""


def params_of(config: ModelConfig) -> dict[str, Any]:
    """Returns the params.json of ExecuTorch's examples for this shape."""
    assert config.linear
    linear = config.linear
    return {
        "dim": config.hidden_size, "n_layers": config.num_hidden_layers, "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads, "vocab_size": config.vocab_size,
        "hidden_dim": config.intermediate_size, "head_dim": config.head_dim, "norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta, "partial_rotary_factor": config.rope.rotary_dim / config.head_dim,
        "use_scaled_rope": False, "use_hf_rope": True, "use_qk_norm": True, "qk_norm_before_rope": True,
        "attention_qkv_bias": False, "attention_type": "mha", "rms_norm_add_unit_offset": True, "use_q_gate": True,
        "linear_conv_kernel_dim": linear.conv_kernel, "linear_key_head_dim": linear.key_head_dim,
        "linear_value_head_dim": linear.value_head_dim, "linear_num_key_heads": linear.num_key_heads,
        "linear_num_value_heads": linear.num_value_heads, "layer_types": [*config.layer_types]}


@pytest.fixture(scope="module", params=["static", "dynamic"])
def foreign(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid model's program, and the same weights for the engine."""
    from executorch.examples.models.qwen3_5.convert_weights import qwen_3_5_to_meta

    folder = tmp_path_factory.mktemp("foreign")
    weights = random_weights(MODEL, "float32", initializer_range=0.1, seed=2)
    torch.save(qwen_3_5_to_meta(weights), folder / "weights.pth")
    (folder / "params.json").write_text(json.dumps(params_of(MODEL)), encoding="utf-8")
    checkpoint(folder / "model", MODEL, 0.1)
    done = subprocess.run([sys.executable, "-c", EXPORT, request.param], cwd=folder, capture_output=True, text=True,
                          timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_foreign_program_equals_engine(foreign: Path) -> None:
    made = Session(foreign / "foreign.pte", memory="16MiB", threads=1, max_batch=2, params=foreign / "params.json")
    assert made.max_context == 96
    assert_same_answers(session(foreign / "model"), made, count=30)


@pytest.mark.slow
def test_foreign_program_runs_with_named_files(
        foreign: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / f"my-{name}").write_bytes((TINY / name).read_bytes())
        (foreign / "model" / name).write_bytes((TINY / name).read_bytes())
    words = {"tokenizer": tmp_path / "my-tokenizer.json", "tokenizer_config": tmp_path / "my-tokenizer_config.json"}
    flags = [text for name, path in words.items() for text in (f"--{name.replace('_', '-')}", str(path))]
    common = ["Hi", "--max-tokens", "12", "--temperature", "0", "--no-think", "--threads", "1"]
    assert main(["run", str(foreign / "foreign.pte"), *common, "--params", str(foreign / "params.json"), *flags]) == 0
    answer = capfd.readouterr().out
    assert main(["run", str(foreign / "model"), *common, "--dtype", "float32"]) == 0
    assert capfd.readouterr().out == answer and answer.strip()
    with LLM(foreign / "foreign.pte", params=foreign / "model" / "config.json", threads=1, **words) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        first, again = (llm.generate([[5, 6, 7]], params)[0].choices[0] for _ in range(2))
        assert {1, 2} <= {*llm.runtime.generation.eos_token_ids}, "the program's metadata names the ends of an answer"
        assert first.tokens == again.tokens


class Recorder:
    """Calls of a program that returns the position and the sum of its tokens."""

    def __init__(self) -> None:
        self.given: list[tuple[int, tuple[int, ...]]] = []

    def buffer(self, name: str) -> Any:
        raise RuntimeError("buffers have no names")

    def run(self, tokens: Sequence[int], position: int) -> Any:
        self.given.append((position, tuple(tokens)))
        return np.full(4, sum(tokens), np.float32)


@pytest.mark.parametrize(("shape", "read"), [(ATTENTION, [(2, (8,))]), (SHAPE, [(0, (1, 2)), (2, (8,))])])
def test_foreign_sequence_is_recomputed_only_if_needed(shape: ModelConfig, read: list[Any]) -> None:
    """K/V of earlier tokens is reused; their recurrent states are lost."""
    calls = Recorder()
    info = ProgramInfo(shape, GenerationDefaults(), None, 64, 1)
    program = ForeignProgram(Path("x.pte"), info, calls, 4)
    program.start(0)
    program.feed(0, [1, 2])
    program.copy(0, 1)
    program.feed(0, [3, 4, 5, 6, 7])
    program.copy(0, 2)
    program.feed(2, [9])
    assert calls.given == [(0, (1, 2)), (2, (3, 4, 5, 6)), (6, (7,)), (7, (9,))]
    calls.given.clear()
    program.feed(1, [8])
    assert calls.given == read and program.position(1) == 3 and sorted(program.slots) == [0, 1, 2]


def test_params_and_config_agree(tmp_path: Path) -> None:
    said = {"get_max_context_len": SHAPE.max_position_embeddings, "get_vocab_size": SHAPE.vocab_size, "get_eos_id": 7}
    found = []
    for name, mapping in (("params.json", params_of(SHAPE)), ("config.json", hf_config(SHAPE))):
        (tmp_path / name).write_text(json.dumps(mapping), encoding="utf-8")
        config, generation = read_params(tmp_path / name, said)
        assert 7 in generation.eos_token_ids
        found.append((config.layer_types, config.linear, config.head_dim, config.num_key_value_heads, config.vocab_size,
                      config.architecture, config.intermediate_size))
    assert found[0] == found[1]
    assert foreign_chunk({"get_max_seq_len": 96, "enable_dynamic_shape": True}) == 95
    assert foreign_chunk({"get_max_seq_len": 4096, "enable_dynamic_shape": True}) == 128
    assert foreign_chunk({"get_max_seq_len": 96}) == 1


@pytest.mark.parametrize(("mapping", "message"), [
    ({}, "n_layers must be a number"), ({"n_layers": 2, "n_heads": 2, "dim": "x"}, "dim must be a number"),
    ({"moe": True}, "moe is not supported"), ({"n_layers": 1, "n_heads": 3, "dim": 6, "n_kv_heads": 2}, "multiple"),
])
def test_invalid_params_are_named(tmp_path: Path, mapping: dict[str, Any], message: str) -> None:
    (tmp_path / "params.json").write_text(json.dumps(mapping), encoding="utf-8")
    with pytest.raises(ModelError, match=f"params.json: .*{message}"):
        read_params(tmp_path / "params.json", {"get_max_seq_len": 9, "get_vocab_size": 9})


def test_foreign_options_need_a_foreign_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="tokenizer is for a program"):
        EngineConfig(tokenizer="tokenizer.json")
    with pytest.raises(ConfigError, match="tokenizer_config belongs to"):
        EngineConfig(params="params.json", tokenizer_config="tokenizer_config.json")
    with pytest.raises(ConfigError, match="params is for a program"):
        LLM(params="params.json")
    (tmp_path / "alone.pte").write_bytes(b"nothing")
    assert main(["run", str(tmp_path / "alone.pte"), "hello"]) == 2
    assert "--params params.json" in capsys.readouterr().err
