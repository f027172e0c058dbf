"""`bench/bounds.py`: bytes of a step and operations of a prompt over measured speeds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support import moe_runtime, odd_runtime, qwen3_runtime

from deltic.cli.bench import Case
from deltic.config import ModelConfig
from deltic.ops.types import MoeWeights
from deltic.runner.model_runner import ModelRunner

BENCH = Path(__file__).resolve().parents[1] / "bench"
sys.path.insert(0, str(BENCH))
from bounds import bounds_of, prompt_operations, step_bytes  # noqa: E402

sys.path.remove(str(BENCH))


def state_bytes(runtime: ModelRunner) -> int:
    return int(runtime.pools.recurrent[:, 0].nbytes)


def key_bytes(runtime: ModelRunner) -> int:
    """Of a token's keys and values in all layers."""
    return 2 * int(runtime.pools.keys[:, 0, 0].nbytes)


def test_a_step_reads_weights_once_and_states_twice() -> None:
    runtime = odd_runtime()
    one, eight = step_bytes(runtime, 1, 100), step_bytes(runtime, 8, 100)
    assert one == runtime.decoder.token_bytes() + 2 * state_bytes(runtime) + 100 * key_bytes(runtime)
    assert eight - one == 7 * (2 * state_bytes(runtime) + 100 * key_bytes(runtime))


def test_without_recurrent_layers_there_are_no_states() -> None:
    runtime = qwen3_runtime()
    assert step_bytes(runtime, 3, 0) == runtime.decoder.token_bytes()


def test_more_sequences_select_more_experts() -> None:
    runtime = moe_runtime()
    weights = [step_bytes(runtime, batch, 0) - 2 * batch * state_bytes(runtime) for batch in (1, 2, 8, 512)]
    assert weights[0] == runtime.decoder.token_bytes() and weights == sorted({*weights})
    tied = runtime.decoder.weights.embedding is runtime.decoder.weights.head
    whole = runtime.decoder.weight_bytes() - (0 if tied else runtime.decoder.weights.embedding.nbytes)
    assert weights[-1] == pytest.approx(whole, rel=0.01)
    layers = [layer.mlp for layer in runtime.decoder.weights.layers if isinstance(layer.mlp, MoeWeights)]
    experts = sum(part.gate_up.nbytes + part.down.nbytes for layer in layers for part in layer.experts)
    share = layers[0].per_token / len(layers[0].experts)
    assert weights[1] - weights[0] == pytest.approx(experts * (1 - (1 - share)**2 - share), rel=0.01)


def test_a_prompt_is_two_operations_for_each_weight() -> None:
    config = ModelConfig.preset("qwen3.5-4b")
    embedding = config.vocab_size * config.hidden_size
    assert prompt_operations(config, 1) == pytest.approx(2 * (config.parameter_count - embedding), rel=0.01)
    assert prompt_operations(config, 4096) > 4096 * prompt_operations(config, 1)


def test_the_bound_is_speed_over_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bounds._READ_BYTES", 1 << 20)
    found = bounds_of(odd_runtime(), Case(64, 16, 2))
    allowed = 2 * found["memory_gb_per_second"] * 1e9 / (found["step_mib"] * (1 << 20))
    assert found["allowed_decode_tokens_per_second"] == pytest.approx(allowed, rel=0.1)
    assert "multiply_tflops" not in found, "only a GPU multiplies"
