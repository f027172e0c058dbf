"""Contexts lengthened by YaRN: the numbers of transformers at positions up to a million, and what must notice it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_models import metadata_of
from support import greedy, odd_shape, same_logits, serve, session_over, transformers_model
from test_gguf_metadata import stub
from transformers import LlamaConfig, Qwen3_5TextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from deltic import LLM, RandomModel, SamplingParams, Session
from deltic.cache.offload.state_manifest import StateError
from deltic.config import EngineConfig, ModelConfig, RopeConfig, Yarn
from deltic.engine.loading import load
from deltic.errors import ConfigError, ModelError
from deltic.loader.gguf.config import config_from_gguf
from deltic.loader.gguf.write import config_to_gguf
from deltic.ops import backends
from deltic.ops.reference import rope as exact_rope
from deltic.ops.torch.basic import frequencies
from deltic.ops.torch.basic import rope as torch_rope
from deltic.ops.types import Rope, RopeSpec
from deltic.runner.model_runner import ModelRunner

SMALL = ModelConfig.preset("qwen3.5-0.8b")
LONG = {"rope_type": "yarn", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
        "mrope_interleaved": True, "factor": 4.0, "original_max_position_embeddings": 262144}
QWEN3: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 128, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}


def spec_of(rope: RopeConfig) -> RopeSpec:
    return RopeSpec(rope.theta, rope.rotary_dim, rope.mrope_section, rope.factors, rope.attention_factor)


# Configs


@pytest.mark.parametrize("changes", [
    {}, {"factor": 2.0}, {"factor": 1.0}, {"factor": 16.0, "original_max_position_embeddings": 4096},
    {"attention_factor": 1.25}, {"mscale": 1.0, "mscale_all_dim": 0.5}, {"mscale": 0.7, "mscale_all_dim": 1.0},
    {"mscale": 2.0}, {"beta_fast": 16.0, "beta_slow": 2.0}, {"truncate": False}, {"factor": None},
    {"original_max_position_embeddings": 8}, {"original_max_position_embeddings": 40960, "rope_theta": 5e3},
    {"original_max_position_embeddings": None}])
def test_frequencies_and_attention_factor_equal_transformers(changes: dict[str, Any]) -> None:
    given = {key: value for key, value in {**YARN, **changes}.items() if value is not None or key == "factor"}
    rope = ModelConfig.from_hf({**QWEN3, "rope_parameters": given}).rope
    theirs = LlamaConfig(**{**QWEN3, "rope_parameters": given})
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    torch.testing.assert_close(frequencies(spec_of(rope), torch.device("cpu")), expected, rtol=3e-7, atol=0)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(("message", "changes"), [
    ("factor", {"factor": 0.5}), ("factor is absent", {"factor": None, "original_max_position_embeddings": None}),
    ("factor", {"original_max_position_embeddings": 65536, "factor": None}),
    ("original_max_position_embeddings", {"original_max_position_embeddings": 0}),
    ("beta_slow .40. must be below beta_fast", {"beta_slow": 40.0}), ("attention_factor", {"attention_factor": 0}),
    ("rope_theta must be above 1", {"rope_theta": 1.0}), ("mscale", {"mscale": -1}), ("truncate", {"truncate": 1})])
def test_impossible_scalings_are_refused_by_name(message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_hf({**QWEN3, "rope_parameters": {**YARN, **changes}})


def test_the_context_is_the_lengthened_one() -> None:
    assert ModelConfig.from_hf({**QWEN3, "rope_scaling": YARN}).max_position_embeddings == 131072
    longer = {**QWEN3, "rope_scaling": {**YARN, "factor": 1.0}}
    assert ModelConfig.from_hf(longer).max_position_embeddings == 40960


# The option


@pytest.mark.parametrize(("preset", "text", "original", "context"), [
    ("qwen3.5-0.8b", "yarn:4", 262144, 1048576), ("qwen3.5-27b", "yarn:2", 262144, 524288),
    ("qwen3-8b", "yarn:4", 32768, 131072), ("qwen3-8b", "yarn:4:40960", 40960, 163840),
    ("qwen3-8b", "yarn:1.5", 32768, 49152)])
def test_the_option_scales_as_the_model_cards_say(preset: str, text: str, original: int, context: int) -> None:
    plain = ModelConfig.preset(preset)
    scaled = plain.with_rope_scaling(text)
    assert scaled.max_position_embeddings == context and scaled.rope.yarn
    assert scaled.rope.yarn.original_context == original
    keys = {"rope_type": "yarn", "rope_theta": plain.rope.theta, "factor": scaled.rope.yarn.factor,
            "original_max_position_embeddings": original}
    expected = ModelConfig.from_hf({**QWEN3, "max_position_embeddings": 262144, "rope_scaling": keys}).rope
    assert scaled.rope.attention_factor == expected.attention_factor
    if plain.rope.rotary_dim == expected.rotary_dim:
        assert scaled.rope.factors == expected.factors
    assert plain.with_rope_scaling(None) is plain


def test_the_option_replaces_the_scaling_of_a_config() -> None:
    scaled = SMALL.with_rope_scaling("yarn:4")
    assert scaled.with_rope_scaling("yarn:2") == SMALL.with_rope_scaling("yarn:2")
    assert scaled.with_rope_scaling("none") == SMALL


@pytest.mark.parametrize("text", ["yarn", "yarn:", "yarn:0.5", "yarn:nan", "yarn:inf", "yarn:4:0", "yarn:4:x",
                                  "yarn:4:1:2", "linear:4", "", "yarn:1e9", "yarn:4:" + "9" * 5000])
def test_malformed_options_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"rope_scaling must be none, yarn:FACTOR") as caught:
        EngineConfig(rope_scaling=text)
    assert caught.value.option == "rope_scaling" and len(str(caught.value)) < 400


def test_other_scalings_are_not_replaced() -> None:
    linear = replace(SMALL, rope=replace(SMALL.rope, factors=(4.0,) * 32))
    with pytest.raises(ConfigError, match="scaled already"):
        linear.with_rope_scaling("yarn:4")
    with pytest.raises(ConfigError, match="rope_theta must be above 1"):
        replace(SMALL, rope=replace(SMALL.rope, theta=1.0)).with_rope_scaling("yarn:4")


# Far positions


@pytest.mark.parametrize("op", [exact_rope, torch_rope])
@pytest.mark.parametrize("factor", [2.0, 4.0])
def test_rotary_tables_to_a_million_tokens_equal_transformers(op: Callable[[Any, RopeSpec], Rope], factor: float
                                                              ) -> None:
    keys = {**LONG, "factor": factor}
    theirs = Qwen3_5TextRotaryEmbedding(Qwen3_5TextConfig(
        hidden_size=1024, head_dim=256, num_attention_heads=8, rope_parameters=keys, max_position_embeddings=262144))
    places = torch.cat((torch.arange(100), torch.arange(100, 1 << 20, 4093)))
    positions = torch.stack((places, (places - 5).clamp(min=0), places + 3))
    cosines, sines = theirs(torch.zeros(1, 1, 1), positions[:, None])
    found = op(positions, spec_of(SMALL.with_rope_scaling(f"yarn:{factor}").rope))
    torch.testing.assert_close(found.cos, cosines[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(found.sin, sines[0], rtol=0, atol=1e-4)


@pytest.fixture(scope="module", params=[4.0, pytest.param(2.0, marks=pytest.mark.slow)])
def far(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The 0.8B shape with four layers and few tokens, at a factor."""
    path = tmp_path_factory.mktemp("far")
    theirs = transformers_model(
        path, vocab_size=509, hidden_size=1024, intermediate_size=3584, num_attention_heads=8, num_key_value_heads=2,
        head_dim=256, linear_num_key_heads=16, linear_num_value_heads=16, linear_key_head_dim=128,
        linear_value_head_dim=128, max_position_embeddings=262144, initializer_range=0.02,
        rope_parameters={**LONG, "factor": request.param})
    return theirs, path


def logits_at(session: Session, tokens: torch.Tensor, first: int) -> torch.Tensor:
    """The logits of tokens that lie at these positions."""
    runner = session.runtime
    embeddings = runner.decoder.ops.embed(tokens, runner.decoder.weights.embedding, torch.float32)
    places = torch.arange(first, first + len(tokens)).expand(3, -1)
    return session.prefill_assembled(embeddings, places, all_logits=True)


@pytest.mark.parametrize("ops", [(), pytest.param(("torch",), marks=pytest.mark.slow),
                                 pytest.param(("reference",), marks=pytest.mark.slow)])
def test_logits_at_far_positions_equal_transformers(far: tuple[Any, Path], ops: tuple[str, ...]) -> None:
    theirs, path = far
    runner = load(str(path), EngineConfig(dtype="float32", memory="64MiB", threads=1, ops=ops, max_context=4096))
    tokens = torch.arange(3, 27) * 17 % 509
    for first in (0, 262_100, 1_048_000):
        with torch.no_grad():
            expected = theirs(tokens[None], position_ids=torch.arange(first, first + 24)[None].expand(3, 1, -1),
                              use_cache=False).logits[0]
        found = logits_at(session_over(runner, batch=2, budget=64), tokens, first)
        assert same_logits(expected, found) < 1e-4


def test_the_comparison_notices_a_lost_attention_factor(far: tuple[Any, Path]) -> None:
    theirs, path = far
    runner = load(str(path), EngineConfig(dtype="float32", memory="64MiB", threads=1, ops=("torch",)))
    weights = runner.decoder.weights
    plain = replace(weights, rope=replace(weights.rope, attention_factor=1.0))
    broken = replace(runner, decoder=replace(runner.decoder, weights=plain))
    tokens = torch.arange(3, 27)
    with torch.no_grad():
        expected = theirs(tokens[None], use_cache=False).logits[0]
    assert float((logits_at(session_over(broken, batch=2), tokens, 0) - expected).abs().max()) > 1e-3


# The engine


SHAPE = odd_shape(num_mtp_layers=1, max_position_embeddings=64)


def odd_runner(scaling: str | None, **options: Any) -> ModelRunner:
    model = RandomModel(shape=SHAPE, initializer_range=0.1, head=True)
    return load(model, EngineConfig(dtype="float32", memory="8MiB", max_batch=4, threads=1, rope_scaling=scaling,
                                    **options))


def test_drafts_and_steps_give_equal_answers_beyond_the_trained_context() -> None:
    """Compiled steps and drafts have the reference's numbers, in a context four times as long."""
    requests = [greedy([7 * place % 509 for place in range(count)], 40, name=str(count)) for count in (3, 70, 150)]
    given = [odd_runner("yarn:4", speculate="mtp:3"), odd_runner("yarn:4", speculate="off"),
             odd_runner("yarn:4", speculate="off", ops=tuple(f"{op}=torch" for op in ("add_norm",)))]
    answers = [serve(runner, requests) for runner in given]
    found = [{name: one.tokens for name, one in each.items()} for each in answers]
    assert found[0] == found[1] == found[2] and all(len(tokens) == 40 for tokens in found[0].values())
    assert given[0].mtp is not None and given[0].mtp.rope.attention_factor > 1.1
    other = serve(odd_runner("yarn:3", speculate="off"), requests)
    assert {name: one.tokens for name, one in other.items()} != found[0]


@pytest.mark.parametrize("ops", ["torch", "reference"])
def test_backends_agree(ops: str) -> None:
    tokens = [11 * place % 509 for place in range(130)]
    expected, found = (session_over(runner, budget=64).prefill(tokens, all_logits=True) for runner in
                       (odd_runner("yarn:4"), replace(odd_runner("yarn:4"), decoder=replace(
                           odd_runner("yarn:4").decoder, ops=backends()[ops]))))
    assert same_logits(expected, found) < 1e-4


def cached(scaling: str | None, folder: Path) -> int:
    """The tokens of a prompt that a process of its own finds in the folder."""
    options: dict[str, Any] = {"dtype": "float32", "memory": "16MiB", "threads": 1, "speculate": "off"}
    with LLM(RandomModel(shape=SHAPE, initializer_range=0.1), cache_dir=folder, rope_scaling=scaling,
             max_context=64, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        return llm.generate([list(range(1, 50))], params)[0].choices[0].usage.cached_tokens


def test_a_kept_state_of_another_scaling_is_never_used(tmp_path: Path) -> None:
    assert cached("yarn:4", tmp_path) == 0
    assert cached(None, tmp_path) == 0
    assert cached("yarn:2", tmp_path) == 0
    assert cached("yarn:4", tmp_path) > 0


def test_a_saved_state_of_another_scaling_is_refused(tmp_path: Path) -> None:
    transformers_model(tmp_path, max_position_embeddings=64)
    options: dict[str, Any] = {"memory": "8MiB", "threads": 1}
    session = Session(str(tmp_path), rope_scaling="yarn:4", **options)
    session.prefill([1, 2, 3, 4])
    session.save(tmp_path / "state")
    Session(str(tmp_path), rope_scaling="yarn:4", **options).load(tmp_path / "state")
    for other in (None, "yarn:2"):
        with pytest.raises(StateError, match="another model"):
            Session(str(tmp_path), rope_scaling=other, **options).load(tmp_path / "state")


# GGUF files


@pytest.mark.parametrize("yarn", [
    Yarn(4.0, 256, 1.138629436111989), Yarn(2.0, 100, 1.25), Yarn(8.0, 128, 1.3, 16.0, 2.0)])
def test_metadata_written_and_read(yarn: Yarn) -> None:
    config = odd_shape()
    config = replace(config, rope=config.rope.with_yarn(yarn), max_position_embeddings=1024)
    found = config_from_gguf(stub(config, config_to_gguf(config))).rope
    assert found.yarn and found.factors == config.rope.factors
    assert found.attention_factor == pytest.approx(yarn.attention_factor, rel=1e-6)
    assert replace(found.yarn, attention_factor=yarn.attention_factor) == yarn


def test_metadata_as_llama_cpp_reads_it() -> None:
    """Its attention factor follows from the scaling factor, times `attn_factor`; that of YaRN itself has no effect."""
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 256, "yarn_attn_factor": 3.0}
    metadata = {**metadata_of(odd_shape()), **{f"qwen35.rope.scaling.{key}": keys[key] for key in keys}}
    config = config_from_gguf(stub(odd_shape(), metadata))
    assert config.rope == odd_shape().rope.with_yarn(Yarn(4.0, 256, 1.138629436111989))
    assert config.max_position_embeddings == 1024
    more = {**metadata, "qwen35.rope.scaling.attn_factor": 0.5, "qwen35.rope.scaling.yarn_log_multiplier": 0.5}
    assert config_from_gguf(stub(odd_shape(), more)).rope.attention_factor == pytest.approx(
        0.5 * 1.138629436111989 / 1.0693147180559945)
