"""The compiled kernels give the same bits for any chunks, batch, threads and reuse, also from packed weights. They
reuse as much of every scenario's prompts as the other backends, and do not drift."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from native_pools import moved, pool, using
from op_cases import Row, build_batch, empty_state, gdn_weights, generator, randn
from reuse_cases import runtime_of, usage_of
from support import (
    Forcing,
    Reference,
    drain,
    every,
    greedy,
    lively,
    moe_shape,
    numbers,
    odd_shape,
    qwen2_shape,
    reference,
    with_sample,
)
from test_ops_gdn_cpu import core, empty_view
from torch import Tensor
from torch.nn import functional

from deltic.cli import main
from deltic.cli.bench import SCENARIOS
from deltic.config import EngineConfig, ExpertsConfig, LinearConfig, RopeConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import RandomModel, load
from deltic.ops.cpu import missing
from deltic.ops.cpu.kernels import flush_delta_log
from deltic.ops.types import GdnSpec, GdnWeights
from deltic.params import EngineRequest, SamplingParams
from deltic.runner.model_runner import ModelRunner

pytestmark = pytest.mark.skipif(bool(missing()), reason=str(missing()))

PROMPT, ANSWER, SEED = 83, 24, 77
DRAWN = SamplingParams(temperature=1.0, max_tokens=ANSWER, ignore_eos=True, seed=SEED)
KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"}, "float16": {"dtype": "float16"}, "bfloat16": {"dtype": "bfloat16"},
    "q8_0": {"dtype": "float32", "quant": "q8_0"}, "q4_k": {"dtype": "bfloat16", "quant": "q4_k"},
    "qwen2": {"dtype": "bfloat16", "quant": "q8_0"}, "experts": {"dtype": "float32"},
    "experts, q4_k": {"dtype": "bfloat16", "quant": "q4_k"},
    "qwen3 next, yarn": {"dtype": "bfloat16", "quant": "q4_k", "rope_scaling": "yarn:4:32"},
    "int4 kv": {"dtype": "float32", "kv_dtype": "int4"}, "int8 kv": {"dtype": "bfloat16", "kv_dtype": "int8"}}
BLOCKS = odd_shape(hidden_size=256, intermediate_size=512, head_dim=64, linear=LinearConfig(2, 6, 24, 128, 4))
"""A shape that can be quantized."""
SHAPES = {"qwen2": qwen2_shape(hidden_size=256, intermediate_size=512),
          **dict.fromkeys(("experts", "experts, q4_k"), moe_shape(
              hidden_size=256, head_dim=64, linear=LinearConfig(2, 6, 24, 128, 4),
              experts=ExpertsConfig(9, 3, 256, 512))),
          "qwen3 next, yarn": moe_shape(
              architecture="qwen3_next", rope=RopeConfig(1e4, 16, ()), hidden_size=256, head_dim=64,
              linear=LinearConfig(2, 6, 24, 128, 4), experts=ExpertsConfig(9, 3, 256, 512))}


@cache
def model(kind: str) -> ModelRunner:
    options = EngineConfig(**{"memory": "8MiB", "max_batch": 8, "threads": 1, **KINDS[kind]})
    return load(RandomModel(shape=SHAPES.get(kind, BLOCKS), initializer_range=0.1), options)


@cache
def expected(kind: str) -> Reference:
    """One token at a time, on one thread."""
    answer = reference(model(kind), numbers(5, PROMPT, BLOCKS.vocab_size), ANSWER)
    lively(answer.tokens)
    return answer


def recorded(kind: str, budget: int, batch: int, kept: int) -> Tensor:
    """The logits of the reference's answer, drawn among others from a prompt whose first tokens are `kept` already."""
    answer, runtime = expected(kind), moved(model(kind))
    forcing = Forcing(runtime)
    forcing.force(SEED, answer)
    engine = Engine(runtime_of(with_sample(runtime, forcing.sample), budget=budget))
    if kept:
        engine.add(greedy(answer.prompt[:kept], 1, "before"))
        drain(engine)
    seen = EngineRequest("seen", answer.prompt, DRAWN)
    others = [greedy(numbers(50 + i, 20 + 9 * i, BLOCKS.vocab_size), 30 - 2 * i, f"n{i}") for i in range(batch - 1)]
    for request in (*others[:1], seen, *others[1:]):
        engine.add(request)
    answers = drain(engine)
    assert usage_of(answers, "seen").cached_tokens == kept
    return forcing.recorded(SEED)


def slow_with_experts(threads: int, kind: str) -> Any:
    return pytest.param(threads, kind, marks=pytest.mark.slow if "experts" in kind and threads != 2 else ())


@pytest.mark.parametrize(("budget", "batch", "kept"), [(1, 1, 0), (7, 3, 0), (64, 8, 53), (512, 3, 64), (512, 1, 0),
                                                       (7, 8, 83)])
@pytest.mark.parametrize(("threads", "kind"), [slow_with_experts(*case) for case in product((1, 2, 5), KINDS)])
@pytest.mark.covering
def test_l6_bit_for_bit(kind: str, budget: int, batch: int, kept: int, threads: int) -> None:
    wanted = expected(kind).logits
    with using(threads=threads):
        assert torch.equal(recorded(kind, budget, batch, kept), wanted)


# Scenarios


def reused(scenario: str, capsys: Any, *options: str) -> list[tuple[str, int, int]]:
    assert main(["bench", "--scenario", scenario, "--prompt-tokens", "70", "--turn-tokens", "21", "--new-tokens", "10",
                 "--turns", "5", "--threads", "1", "--memory", "32MiB", "--json", *options]) == 0
    requests = json.loads(capsys.readouterr().out)["requests"]
    return [(r["request"], r["prompt_tokens"], r["cached_tokens"]) for r in requests]


@pytest.mark.parametrize("option", ["--dtype float32", "--dtype bfloat16", "--quant q8_0"])
@pytest.mark.parametrize("scenario", every(2, SCENARIOS))
@pytest.mark.covering
def test_scenarios_reuse_as_on_other_backends(scenario: str, option: str, capsys: Any) -> None:
    wanted = reused(scenario, capsys, "--dtype", "float32", "--ops", "torch")
    assert sum(cached for _, _, cached in wanted) > 0
    assert reused(scenario, capsys, *option.split(), "--ops", "cpu") == wanted


# Drift

STEPS, LAST = 8192, 512


def exact(proj: Tensor, weights: GdnWeights, conv: Tensor) -> tuple[Tensor, Tensor]:
    """What lies between a layer's projections, in float64: outputs [T, Hv Dv] and the last state."""
    spec = weights.spec
    kinds = [spec.channels, spec.values, spec.value_heads, spec.value_heads]
    mixed, gate, beta, alpha = proj.double().split(kinds, -1)
    padded = functional.pad(mixed, (0, 0, spec.conv_kernel - 1, 0))
    mixed = functional.silu(sum(padded[tap:tap + len(proj)] * conv[:, tap].double() for tap in range(spec.conv_kernel)))
    query, key, value = mixed.split([spec.keys, spec.keys, spec.values], -1)
    query, key = ((x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(
        spec.value_heads // spec.key_heads, 1) for x in (y.view(len(proj), spec.key_heads, -1) for y in (query, key)))
    value, beta = value.view(len(proj), spec.value_heads, -1), beta.sigmoid()
    decay = (weights.decay.double() * functional.softplus(alpha + weights.dt_bias.double())).exp()
    state, outputs = torch.zeros(spec.value_heads, spec.key_dim, spec.value_dim, dtype=torch.float64), []
    for q, k, v, a, b in zip(query, key, value, decay, beta, strict=True):
        state = state * a[:, None, None]
        update = (v - torch.einsum("hkv,hk->hv", state, k)) * b[:, None]
        state = state + k[:, :, None] * update[:, None, :]
        outputs.append(torch.einsum("hkv,hk->hv", state, q) / spec.key_dim ** 0.5)
    output = torch.stack(outputs)
    normed = output * (output.square().mean(-1, keepdim=True) + spec.eps).rsqrt() * weights.norm.double()
    return (normed * functional.silu(gate.view_as(normed))).flatten(1), state


SPEC = GdnSpec(2, 4, 128, 128, 4, 1e-6)
WEIGHTS = gdn_weights(3, torch.float32, SPEC)


def inputs() -> Tensor:
    return randn(generator(9), STEPS, SPEC.channels + SPEC.values + 2 * SPEC.value_heads).float()


@cache
def plain_run(chunk: int) -> tuple[Tensor, Tensor]:
    """Outputs, and the last state."""
    proj, view, outputs = inputs(), empty_view(SPEC, torch.float32, 2), []
    for done in range(0, STEPS, chunk):
        batch = replace(build_batch([Row(chunk, done)]).batch, source=torch.tensor([1]), target=torch.tensor([1]))
        outputs.append(core(proj[done:done + chunk], WEIGHTS, view, batch))
    return torch.cat(outputs), view.recurrent[1]


@cache
def exact_run() -> tuple[Tensor, Tensor]:
    return exact(inputs(), WEIGHTS, WEIGHTS.conv.float())


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 256])
def test_no_drift_over_8192_steps(chunk: int) -> None:
    """Plain float32 is 6.3e-7 off at the end, relative RMS, when each product rounds twice."""
    wanted, last = exact_run()
    found, state = plain_run(chunk)
    errors = [off(found[part], wanted[part]) for part in (slice(0, LAST), slice(STEPS - LAST, STEPS))]
    assert max(errors) <= 6.3e-7 and errors[1] <= 1.5 * errors[0] and off(state, last) <= 6.3e-7


@pytest.mark.slow
def test_no_drift_with_rejected_drafts() -> None:
    """8,192 tokens through a replay ring have the bits of the plain steps."""
    rng, proj, done, base, outputs = generator(5), inputs(), 0, 0, []
    view = empty_state(2, torch.float32, SPEC, units=1)
    place = torch.tensor([1])
    while done < STEPS:
        chunk, right = (int(torch.randint(1, most, (1,), generator=rng)) for most in (6, 6))
        right = min(right, chunk, STEPS - done)
        piece = torch.cat([proj[done:done + right], randn(rng, chunk - right, proj.shape[1]).float()])
        row = Row(chunk, done, done - base, append=True)
        batch = replace(build_batch([row]).batch, source=place, target=place, delta_log=torch.tensor([0]))
        outputs.append(core(piece, WEIGHTS, view, batch)[:right])
        done, base = done + right, row.after
    flush_delta_log(pool(), (view,), 1, 0, base, done, 1)
    wanted, last = plain_run(1)
    assert torch.equal(torch.cat(outputs), wanted) and torch.equal(view.recurrent[1], last)


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())
