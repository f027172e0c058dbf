"""The model against transformers: tiny random models, saved by it, loaded by deltic, equal logits. And, so that this
is worth something, broken models for which the same comparison must fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import (
    TAU,
    Mismatch,
    lively,
    load_directory,
    numbers,
    same_logits,
    session_over,
    stepwise_logits,
    transformers_model,
)
from torch import Tensor

from deltic.config import EngineConfig
from deltic.engine.loading import load
from deltic.model.decoder import build
from deltic.ops import Ops, backends, reference
from deltic.ops.types import Batch, GdnWeights, Rope, RopeSpec, StateView
from deltic.runner.model_runner import ModelRunner
from deltic.session import Session

LINEAR, FULL = "linear_attention", "full_attention"
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "odd": {"num_hidden_layers": 5, "layer_types": [FULL, LINEAR, FULL, LINEAR, LINEAR], "hidden_size": 44,
            "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10, "linear_num_key_heads": 3,
            "linear_num_value_heads": 9, "linear_key_head_dim": 6, "linear_value_head_dim": 14,
            "linear_conv_kernel_dim": 3, "vocab_size": 331, "rms_norm_eps": 1e-5,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.4, "mrope_section": [1, 1, 0]}},
    "eight layers": {"num_hidden_layers": 8, "layer_types": ([LINEAR] * 3 + [FULL]) * 2, "num_key_value_heads": 1,
                     "linear_num_key_heads": 4, "head_dim": 16,
                     "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0, "mrope_section": [3, 3, 2]}},
    "yarn": {"rope_parameters": {**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
                                 "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1]}},
    "qwen3, yarn": {"family": "qwen3", "num_hidden_layers": 2, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 24,
        "attention_factor": 1.5, "beta_fast": 8.0, "truncate": False}},
    "recurrent only": {"num_hidden_layers": 2, "layer_types": [LINEAR] * 2},
    "attention only": {"num_hidden_layers": 2, "layer_types": [FULL] * 2},
    "nested": {"nested": True},
    "qwen3": {"family": "qwen3"},
    "qwen3, tied": {"family": "qwen3", "tie_word_embeddings": True, "num_hidden_layers": 2, "num_attention_heads": 4,
                    "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 331, "rms_norm_eps": 1e-5},
    "llama": {"family": "llama"},
    "llama, llama3 scaling, tied": {
        "family": "llama", "tie_word_embeddings": True, "num_hidden_layers": 2, "head_dim": 16, "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    "llama, linear scaling": {"family": "llama", "num_hidden_layers": 2, "num_key_value_heads": 6, "rope_parameters": {
        "rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}},
    "mistral": {"family": "mistral", "num_hidden_layers": 2, "head_dim": 14},
    "qwen2": {"family": "qwen2"},
    "qwen2, tied": {"family": "qwen2", "tie_word_embeddings": True, "num_hidden_layers": 2, "num_key_value_heads": 1},
}


@dataclass(frozen=True)
class Pair:
    """One model in both libraries."""

    theirs: Any
    ours: ModelRunner

    def expected(self, tokens: Sequence[int]) -> Tensor:
        """transformers' logits of a whole prompt, [n, V]."""
        with torch.no_grad():
            logits: Tensor = self.theirs(torch.tensor([list(tokens)]), use_cache=False).logits[0].float()
        return logits

    def prompt(self, count: int, seed: int = 0) -> tuple[int, ...]:
        return numbers(seed, count, self.ours.config.vocab_size)

    def session(self, budget: int = 512) -> Session:
        return session_over(self.ours, batch=2, budget=budget)


def paired(directory: Path, dtype: str = "float32", seed: int = 0, **changes: Any) -> Pair:
    theirs = transformers_model(directory, seed, **changes)
    return Pair(theirs, load(str(directory), EngineConfig(dtype=dtype, memory="8MiB", threads=1)))


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return paired(tmp_path_factory.mktemp("model"), **VARIANTS[request.param])


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return paired(tmp_path_factory.mktemp("untied"))


# Layer by layer


def layer_differences(pair: Pair, tokens: Sequence[int]) -> list[float]:
    """Largest difference of the residual stream after each layer, for a whole prompt."""
    theirs, ours = list[Tensor](), list[Tensor]()
    hooks = [layer.register_forward_hook(lambda _m, _i, out: theirs.append(out if torch.is_tensor(out) else out[0]))
             for layer in pair.theirs.model.layers]
    pair.expected(tokens)
    for hook in hooks:
        hook.remove()
    one = session_over(pair.ours, batch=2, budget=512)
    with one.hook(lambda layer, output: ours.append(output.clone()) if layer >= 0 else None):
        one.prefill(tokens)
    return [float((a[0] - b).abs().max()) for a, b in zip(theirs, ours, strict=True)]


def check(pair: Pair, tokens: Sequence[int], expected: Tensor, found: Tensor, decided: float = 0.0) -> float:
    """`same_logits`; on failure with the layers' differences, so that the first bad one is named."""
    try:
        return same_logits(expected, found, TAU, decided)
    except Mismatch as mismatch:
        differences = layer_differences(pair, tokens)
        bad = next((index for index, worst in enumerate(differences) if not worst <= TAU), None)
        layers = ", ".join(f"{index}: {worst:.2g}" for index, worst in enumerate(differences))
        raise Mismatch(f"{mismatch}; first bad layer of the whole prompt: {bad} ({layers})") from mismatch


def test_the_helper_names_the_first_bad_layer(untied: Pair) -> None:
    weights = untied.ours.decoder.weights
    layers = weights.layers
    bad = replace(layers[2], post_norm=layers[2].post_norm - 1)
    decoder = replace(untied.ours.decoder, weights=replace(weights, layers=(*layers[:2], bad, *layers[3:])))
    broken = replace(untied, ours=replace(untied.ours, decoder=decoder))
    tokens = untied.prompt(20)
    with pytest.raises(Mismatch, match="first bad layer of the whole prompt: 2"):
        check(broken, tokens, untied.expected(tokens), broken.session().prefill(tokens, all_logits=True))
    assert max(layer_differences(untied, tokens)) < TAU


# Equal logits


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 63, 64, 65, 150])
def test_whole_prompt(pair: Pair, count: int) -> None:
    tokens = pair.prompt(count)
    check(pair, tokens, pair.expected(tokens), pair.session().prefill(tokens, all_logits=True))


def test_one_token_at_a_time(pair: Pair) -> None:
    tokens = pair.prompt(140, seed=1)
    check(pair, tokens, pair.expected(tokens), stepwise_logits(pair.session(), tokens))


def test_split_anywhere(pair: Pair) -> None:
    tokens = pair.prompt(70, seed=2)
    expected = pair.expected(tokens)
    session = pair.session()
    for split in range(1, len(tokens)):
        session.reset()
        parts = [session.prefill(part, all_logits=True) for part in (tokens[:split], tokens[split:])]
        check(pair, tokens, expected, torch.cat(parts))


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 16, 63, 64, 65, 100])
def test_chunks_of_any_size(untied: Pair, budget: int) -> None:
    tokens = untied.prompt(135, seed=3)
    check(untied, tokens, untied.expected(tokens), untied.session(budget).prefill(tokens, all_logits=True))


def their_answer(pair: Pair, prompt: Sequence[int], count: int) -> tuple[list[int], Tensor]:
    """transformers' greedy answer, one token at a time with its own cache, and the logits of each token."""
    rows, tokens, cache, feed = list[Tensor](), list[int](), None, list(prompt)
    for _ in range(count):
        with torch.no_grad():
            output = pair.theirs(torch.tensor([feed]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        rows.append(output.logits[0, -1].float())
        tokens.append(int(rows[-1].argmax()))
        feed = tokens[-1:]
    return tokens, torch.stack(rows)


def test_the_reference_backend_too(pair: Pair) -> None:
    tokens = pair.prompt(40, seed=5)
    slow = session_over(with_ops(pair.ours, reference.OPS), budget=13)
    check(pair, tokens, pair.expected(tokens), slow.prefill(tokens, all_logits=True))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_200_greedy_tokens_teacher_forced(untied: Pair, seed: int) -> None:
    """L6's rule against transformers itself: same logits, same best token, and a model that says much."""
    prompt = untied.prompt(12, seed=4 + seed)
    tokens, expected = their_answer(untied, prompt, 200)
    lively(tokens)
    session = untied.session()
    found = torch.stack([session.prefill(prompt), *stepwise_logits(session, tokens[:-1])])
    check(untied, prompt, expected, found, decided=0.95)
    whole = untied.session().prefill([*prompt, *tokens[:-1]], all_logits=True)[len(prompt) - 1:]
    check(untied, prompt, expected, whole, decided=0.95)


# Broken models must not pass


def gdn(change: Callable[[Ops, GdnWeights, StateView, Batch, Tensor], Tensor]) -> Callable[[Ops], Ops]:
    """Replace the recurrent mixer."""
    return lambda ops: replace(ops, gdn_mixer=lambda x, w, state, batch: change(ops, w, state, batch, x))


def doubled_decay(ops: Ops, weights: GdnWeights, state: StateView, batch: Batch, x: Tensor) -> Tensor:
    return ops.gdn_mixer(x, replace(weights, decay=2 * weights.decay), state, batch)


def at_token_40(batch: Batch) -> bool:
    return bool((batch.done == 40).any())


def dropped_token(ops: Ops, weights: GdnWeights, state: StateView, batch: Batch, x: Tensor) -> Tensor:
    before = state.recurrent[batch.source].clone()
    output = ops.gdn_mixer(x, weights, state, batch)
    if at_token_40(batch):
        state.recurrent[batch.target] = before
    return output


def doubled_token(ops: Ops, weights: GdnWeights, state: StateView, batch: Batch, x: Tensor) -> Tensor:
    output = ops.gdn_mixer(x, weights, state, batch)
    if at_token_40(batch):
        ops.gdn_mixer(x, weights, state, replace(batch, source=batch.target, memo={}))
    return output


def stale_conv_place(ops: Ops, weights: GdnWeights, state: StateView, batch: Batch, x: Tensor) -> Tensor:
    old = state.conv[batch.source].clone()
    output = ops.gdn_mixer(x, weights, state, batch)
    if at_token_40(batch):
        place = 40 % state.conv.shape[1]
        state.conv[batch.target, place] = old[:, place]
    return output


def kept_state(ops: Ops, weights: GdnWeights, state: StateView, batch: Batch, x: Tensor) -> Tensor:
    """A new sequence starts from what its slot held before."""
    if not bool(batch.done.any()):
        state.recurrent[batch.source], state.conv[batch.source] = 0.1, 0.1
        batch = replace(batch, done=batch.done + 4, base=batch.base + 4, memo={})
    return ops.gdn_mixer(x, weights, state, batch)


def norm_without_one(ops: Ops) -> Ops:
    return replace(ops, add_norm=lambda residual, delta, weight, eps: ops.add_norm(residual, delta, weight - 1, eps))


def norm_with_one_more(ops: Ops) -> Ops:
    return replace(ops, add_norm=lambda residual, delta, weight, eps: ops.add_norm(residual, delta, weight + 1, eps))


def late_rope(ops: Ops) -> Ops:
    def rope(positions: Tensor, spec: RopeSpec) -> Rope:
        return ops.rope((positions - (positions > 40).long()), spec)

    return replace(ops, rope=rope)


def lost_kv(ops: Ops) -> Ops:
    """The K/V of token 40 lands in the place of token 39."""
    def attention(x: Tensor, weights: Any, kv: Any, batch: Batch, rope: Rope) -> Tensor:
        output = ops.attention_mixer(x, weights, kv, batch, rope)
        if at_token_40(batch):
            for pool in (kv.keys, kv.values):
                flat = pool.flatten(0, 1)
                flat[batch.store - 1] = flat[batch.store]
        return output

    return replace(ops, attention_mixer=attention)


BUGS = {
    "doubled decay": gdn(doubled_decay), "dropped token": gdn(dropped_token), "doubled token": gdn(doubled_token),
    "stale conv place": gdn(stale_conv_place), "state of the slot's last user": gdn(kept_state),
    "norm without + 1": norm_without_one, "norm with one + 1 more": norm_with_one_more, "late rope": late_rope,
    "lost K/V": lost_kv,
}


@pytest.fixture(scope="module")
def long_answer(untied: Pair) -> tuple[tuple[int, ...], Tensor]:
    tokens = untied.prompt(120, seed=9)
    return tokens, untied.expected(tokens)


@pytest.mark.parametrize(("family", "other"), [("qwen3_5", "qwen3"), ("qwen3", "qwen3_5")])
def test_the_comparison_notices_norms_of_the_other_family(tmp_path: Path, family: str, other: str) -> None:
    """The same tensors, with their norm weights read as the other family stores them: in one kind of norm, or all."""
    pair = paired(tmp_path, family=family)
    runtime, tokens = pair.ours, pair.prompt(40)
    expected, config = pair.expected(tokens), replace(pair.ours.config, architecture=other)
    for kind in ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "model.norm", ""):
        weights = load_directory(tmp_path, config)
        for name, tensor in weights.items():
            if name.endswith("norm.weight") and kind not in name and "linear_attn" not in name:
                tensor += runtime.config.norm_offset - config.norm_offset
        broken = replace(runtime, decoder=build(config, [dict(weights)], runtime.decoder.ops, torch.float32))
        with pytest.raises(Mismatch, match=r"best token|differ by"):
            same_logits(expected, session_over(broken, budget=512).prefill(tokens, all_logits=True))


def with_ops(runtime: ModelRunner, ops: Ops) -> ModelRunner:
    return replace(runtime, decoder=replace(runtime.decoder, ops=ops))


@pytest.mark.parametrize("bug", BUGS)
def test_the_comparison_notices(bug: str, untied: Pair, long_answer: tuple[tuple[int, ...], Tensor]) -> None:
    tokens, expected = long_answer
    healthy = untied.ours.decoder.ops
    same_logits(expected, stepwise_logits(untied.session(), tokens))
    broken = session_over(with_ops(untied.ours, BUGS[bug](healthy)), batch=2)
    with pytest.raises(Mismatch, match=r"best token|differ by"):
        same_logits(expected, stepwise_logits(broken, tokens))


@pytest.fixture
def updates_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The reference op with u rounded to bfloat16 before it enters the state."""
    def step(state: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor,
             beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, _, update = original(state, query, key, value, decay, beta)
        update = update.bfloat16().float()
        heads = len(value)
        state = state * decay[:, None, None] + reference.spread(key, heads)[..., None] * update[:, None]
        output = (state * (reference.spread(query, heads)[..., None] / state.shape[-2] ** 0.5)).sum(-2)
        return state, output, update

    original = reference.gated_delta_step
    monkeypatch.setattr(reference, "gated_delta_step", step)
    yield


def reference_ops(pair: Pair) -> ModelRunner:
    return with_ops(pair.ours, replace(pair.ours.decoder.ops, gdn_mixer=backends()["reference"].gdn_mixer))


def test_the_reference_op_is_equal(untied: Pair, long_answer: tuple[tuple[int, ...], Tensor]) -> None:
    tokens, expected = long_answer
    check(untied, tokens, expected, session_over(reference_ops(untied), budget=512).prefill(tokens, all_logits=True))


@pytest.mark.usefixtures("updates_in_bfloat16")
def test_the_comparison_notices_updates_in_bfloat16(untied: Pair,
                                                     long_answer: tuple[tuple[int, ...], Tensor]) -> None:
    tokens, expected = long_answer
    broken = session_over(reference_ops(untied), budget=512)
    with pytest.raises(Mismatch, match=r"best token|differ by"):
        same_logits(expected, broken.prefill(tokens, all_logits=True))


def test_the_rule_can_fail() -> None:
    expected = torch.tensor([[0.0, 1.0, 3.0], [5.0, 1.0, 3.0]])
    assert same_logits(expected, expected + 0.5 * TAU) == pytest.approx(0.5 * TAU, rel=1e-2)
    for found, words in ((expected + 2 * TAU, "differ by"), (expected[:1], "shape"), (expected.flip(-1), "best token"),
                         (expected * float("nan"), "finite")):
        with pytest.raises(Mismatch, match=words):
            same_logits(expected, found)
    with pytest.raises(Mismatch, match="decided"):
        same_logits(torch.ones(3, 4), torch.ones(3, 4), decided=0.95)
    with pytest.raises(Mismatch, match="distinct"):
        lively([1, 2, 1, 2, 1])
    lively([1, 2, 3, 1])


# Half precision


BFLOAT16 = 1.25
"""deltic's bfloat16 error against float32 with the same weights may be this times that of transformers (RMS)."""


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("paths", ["whole", "stepwise"])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3", "qwen2", "llama"])
def test_bfloat16_is_as_good_as_that_of_transformers(tmp_path: Path, seed: int, paths: str, family: str) -> None:
    theirs = transformers_model(tmp_path, seed, family=family).bfloat16()
    theirs.save_pretrained(tmp_path)
    half = Pair(theirs, load(str(tmp_path), EngineConfig(dtype="auto", memory="8MiB", threads=1)))
    exact = load(str(tmp_path), EngineConfig(dtype="float32", memory="8MiB", threads=1))
    assert half.ours.views.kv[0].keys.dtype == torch.bfloat16
    tokens = half.prompt(130, seed)
    expected = session_over(exact, batch=2, budget=512).prefill(tokens, all_logits=True)
    read = partial(Session.prefill, all_logits=True) if paths == "whole" else stepwise_logits
    errors = [float((found - expected).square().mean().sqrt()) for found in
              (half.expected(tokens), read(half.session(), tokens))]
    assert 0 < errors[1] <= BFLOAT16 * errors[0], f"RMS error {errors[1]:.4f}, transformers {errors[0]:.4f}"
    assert errors[1] < 0.1
