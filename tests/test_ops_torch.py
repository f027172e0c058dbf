"""The vectorised ops against the naive ones: outputs, what they write, and what they must leave alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from op_cases import (
    ATTENTION,
    ROPE,
    Case,
    Row,
    assert_close,
    attention_weights,
    build_batch,
    cases,
    clone_state,
    frozen,
    gdn_weights,
    generator,
    hidden_states,
    kv_errors,
    kv_view,
    randn,
    rope_table,
    same_bits,
    state_errors,
    state_view,
    uniform,
)
from support import every
from torch import Tensor

from deltic.ops import Ops, backends, explain, reference, select
from deltic.ops.types import GdnSpec, GdnWeights, KvView, MlpWeights, RopeSpec, StateView

CASES = cases()
FAST = backends()["torch"]
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
TOLERANCE = {torch.float64: 1e-13, torch.float32: 5e-6, torch.bfloat16: 2.5e-2}
"""Relative RMS. bfloat16 rounds at other places: 2^-8 for each of several roundings."""

by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def copy_kv(view: KvView) -> KvView:
    return KvView(view.keys.clone(), view.values.clone())


@by_dtype
@by_case
@pytest.mark.covering
def test_gdn_mixer(case: Case, dtype: torch.dtype) -> None:
    x, weights, before = hidden_states(case, dtype), gdn_weights(1, dtype), state_view(case, dtype)
    kept, slow_view, fast_view = x.clone(), clone_state(before), clone_state(before)
    unchanged = frozen(weights, case.batch)
    wanted = reference.gdn_mixer(x, weights, slow_view, case.fresh())
    output = FAST.gdn_mixer(x, weights, fast_view, case.fresh())
    assert same_bits(x, kept) and unchanged()
    assert output.dtype == dtype
    assert_close(output, wanted, TOLERANCE[dtype])
    errors = state_errors(case, fast_view, slow_view, before)
    assert max(errors.values()) <= TOLERANCE[dtype], errors


@by_dtype
@by_case
@pytest.mark.covering
def test_attention_mixer(case: Case, dtype: torch.dtype) -> None:
    x, weights, before = hidden_states(case, dtype), attention_weights(1, dtype), kv_view(case, dtype)
    kept, slow_view, fast_view = x.clone(), copy_kv(before), copy_kv(before)
    rope = rope_table(reference.OPS, case)
    unchanged = frozen(weights, case.batch, rope)
    wanted = reference.attention_mixer(x, weights, slow_view, case.fresh(), rope)
    output = FAST.attention_mixer(x, weights, fast_view, case.fresh(), rope)
    assert same_bits(x, kept) and unchanged()
    assert output.dtype == dtype
    assert_close(output, wanted, TOLERANCE[dtype])
    assert kv_errors(case, fast_view, slow_view, before) <= TOLERANCE[dtype]


@pytest.mark.parametrize("case", CASES[:8], ids=lambda case: case.name)
def test_attention_without_gate(case: Case) -> None:
    weights = attention_weights(2, torch.float32, replace(ATTENTION, gate=False))
    x, before = hidden_states(case, torch.float32), kv_view(case, torch.float32)
    slow_view, fast_view = copy_kv(before), copy_kv(before)
    rope = rope_table(reference.OPS, case)
    wanted = reference.attention_mixer(x, weights, slow_view, case.fresh(), rope)
    assert_close(FAST.attention_mixer(x, weights, fast_view, case.fresh(), rope), wanted, 1e-5)
    assert kv_errors(case, fast_view, slow_view, before) <= 1e-5


@pytest.mark.parametrize("case", every(3, CASES), ids=lambda case: case.name)
def test_two_layers_share_a_memo(case: Case) -> None:
    """What a backend keeps in the batch in one layer must serve the next one, whose states differ."""
    x, batch = hidden_states(case, torch.float32), case.fresh()
    for layer in (1, 2):
        weights, view = gdn_weights(layer, torch.float32), state_view(replace(case, seed=layer), torch.float32)
        slow_view = clone_state(view)
        wanted = reference.gdn_mixer(x, weights, slow_view, case.fresh())
        assert_close(FAST.gdn_mixer(x, weights, view, batch), wanted, 1e-5)


@pytest.mark.parametrize("case", every(3, [case for case in CASES if not case.batch.layout.appends]),
                         ids=lambda case: case.name)
def test_slots_without_rings(case: Case) -> None:
    if any(row.ring for row in case.rows):
        pytest.skip("the case reads a ring")
    x, weights = hidden_states(case, torch.float32), gdn_weights(1, torch.float32)
    whole = state_view(case, torch.float32)
    bare = replace(clone_state(whole), delta_log=None)
    wanted = reference.gdn_mixer(x, weights, whole, case.fresh())
    assert_close(FAST.gdn_mixer(x, weights, bare, case.fresh()), wanted, 1e-5)


@pytest.mark.parametrize("width", [4, 5, 8, 64])
def test_narrow_and_wide_conv_rings(width: int) -> None:
    case = build_batch([Row(1, 9, emits=(1,)), Row(1, 0), Row(5, 3, in_place=False, emits=(1, 4)), Row(70, 33)], 5)
    x, weights = hidden_states(case, torch.float32), gdn_weights(1, torch.float32)
    before = state_view(case, torch.float32, width=width)
    slow_view, fast_view = clone_state(before), clone_state(before)
    wanted = reference.gdn_mixer(x, weights, slow_view, case.fresh())
    assert_close(FAST.gdn_mixer(x, weights, fast_view, case.fresh()), wanted, 1e-5)
    assert max(state_errors(case, fast_view, slow_view, before).values()) <= 1e-5


SHAPES = {
    "equal heads": GdnSpec(3, 3, 8, 4, 4, 1e-6),
    "one key head": GdnSpec(1, 5, 3, 9, 2, 1e-5),
    "kernel of three": GdnSpec(2, 4, 16, 16, 3, 1e-6),
}


@pytest.mark.parametrize("name", SHAPES)
def test_other_layer_shapes(name: str) -> None:
    spec = SHAPES[name]
    case = build_batch([Row(1, 5, emits=(1,)), Row(66, 0, emits=(64, 65)), Row(3, 20, in_place=False)], 6)
    x, weights = hidden_states(case, torch.float32), gdn_weights(3, torch.float32, spec)
    before = state_view(case, torch.float32, spec)
    slow_view, fast_view = clone_state(before), clone_state(before)
    wanted = reference.gdn_mixer(x, weights, slow_view, case.fresh())
    assert_close(FAST.gdn_mixer(x, weights, fast_view, case.fresh()), wanted, 1e-5)
    assert max(state_errors(case, fast_view, slow_view, before).values()) <= 1e-5


@pytest.mark.parametrize("strength", [1e-8, 1.0, 30.0, 1e4])
def test_extreme_decays(strength: float) -> None:
    """From states that never forget to decays that underflow within one token."""
    case = build_batch([Row(1, 5), Row(130, 7, emits=(1, 64, 65, 100)), Row(64, 0, emits=(63,))], 7)
    weights = gdn_weights(1, torch.float32)
    weights = replace(weights, decay=torch.full_like(weights.decay, -strength))
    x, before = hidden_states(case, torch.float32), state_view(case, torch.float32)
    slow_view, fast_view = clone_state(before), clone_state(before)
    wanted = reference.gdn_mixer(x, weights, slow_view, case.fresh())
    assert_close(FAST.gdn_mixer(x, weights, fast_view, case.fresh()), wanted, 1e-5)
    assert max(state_errors(case, fast_view, slow_view, before).values()) <= 1e-5


# Small ops


@by_dtype
def test_add_norm(dtype: torch.dtype) -> None:
    rng = generator(1)
    residual, delta, weight = randn(rng, 5, 13).to(dtype), randn(rng, 5, 13).to(dtype), uniform(rng, 13).float()
    kept = residual.clone()
    for change in (delta, None):
        for actual, wanted in zip(FAST.add_norm(residual, change, weight, 1e-6),
                                  reference.add_norm(residual, change, weight, 1e-6), strict=True):
            assert actual.dtype == dtype
            assert_close(actual, wanted, min(TOLERANCE[dtype], 4e-3))
    assert same_bits(residual, kept)


@by_dtype
def test_mlp_embed_head(dtype: torch.dtype) -> None:
    rng = generator(2)
    x, up, down = (randn(rng, *shape).to(dtype) for shape in ((5, 13), (22, 13), (13, 11)))
    table, ids = randn(rng, 40, 13).to(dtype), torch.tensor([0, 39, 7, 7])
    kept = x.clone()
    for gate_up in (up, tuple(up.split([11, 11])), tuple(up.split([4, 18]))):
        weights = MlpWeights(gate_up, down)
        assert_close(FAST.mlp(x, weights), reference.mlp(x, weights), TOLERANCE[dtype])
    assert same_bits(FAST.embed(ids, table, dtype), reference.embed(ids, table, dtype))
    assert_close(FAST.head(x, table), reference.head(x, table), TOLERANCE[dtype])
    assert FAST.head(x, table).dtype == reference.head(x, table).dtype
    assert FAST.head(x[:0], table).shape == (0, 40)
    assert same_bits(x, kept)


@pytest.mark.parametrize("spec", [ROPE, RopeSpec(1e7, 64, (11, 11, 10)), RopeSpec(1e4, 12),
                                  RopeSpec(1e6, 64, (8, 16, 8))])
def test_rope(spec: RopeSpec) -> None:
    positions = torch.randint(0, 262_144, (3, 33), generator=generator(3))
    fast, slow = FAST.rope(positions, spec), reference.rope(positions, spec)
    assert fast.cos.dtype == fast.sin.dtype == torch.float32
    torch.testing.assert_close(fast.cos, slow.cos, rtol=0, atol=1e-6)
    torch.testing.assert_close(fast.sin, slow.sin, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["copy_slots", "copy_pages"])
def test_copies(name: str) -> None:
    source, target = torch.tensor([1, 2, 4]), torch.tensor([2, 5, 0])
    pools = tuple(randn(generator(4), 2, 6, *shape).to(dtype) for shape, dtype in
                  (((3,), torch.float32), ((4, 5), torch.bfloat16)))
    wanted = tuple(pool.clone() for pool in pools)
    getattr(FAST, name)(pools, source, target)
    getattr(reference.OPS, name)(wanted, source, target)
    assert all(same_bits(actual, pool) for actual, pool in zip(pools, wanted, strict=True))


def test_select_replaces_single_ops() -> None:
    mixed = select(("attention_mixer=reference",))
    assert explain(mixed)["attention_mixer"] == "reference"
    assert explain(mixed)["gdn_mixer"] == explain(select())["gdn_mixer"] != "reference"
    assert set(explain(select(("reference",))).values()) == {"reference"}


# Drift

DRIFT = GdnSpec(2, 4, 64, 32, 4, 1e-6)
STEPS = 2048


def transparent_weights(spec: GdnSpec) -> GdnWeights:
    """Projections and taps that change nothing, so that the error is that of the delta rule and the norm."""
    hidden = spec.channels + spec.values + 2 * spec.value_heads
    taps = torch.zeros(spec.channels, spec.conv_kernel, dtype=torch.float64)
    taps[:, -1] = 1.0
    bias, norm = torch.zeros(spec.value_heads), torch.ones(spec.value_dim)
    into, out = torch.eye(hidden).double(), torch.eye(hidden, spec.values).double()
    return GdnWeights(spec, into, taps, torch.full((spec.value_heads,), -0.05), bias, norm, out)


def cast(weights: GdnWeights, dtype: torch.dtype) -> GdnWeights:
    fine = torch.promote_types(dtype, torch.float32)
    assert isinstance(weights.in_proj, Tensor) and isinstance(weights.out_proj, Tensor)
    return replace(weights, in_proj=weights.in_proj.to(dtype), conv=weights.conv.to(dtype),
                   decay=weights.decay.to(fine), dt_bias=weights.dt_bias.to(fine), norm=weights.norm.to(fine),
                   out_proj=weights.out_proj.to(dtype))


def long_run(ops: Ops, x: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """One sequence, chunk by chunk in one slot: outputs of the last 512 tokens, and the last state."""
    weights, outputs = cast(transparent_weights(DRIFT), x.dtype), []
    fine = torch.promote_types(x.dtype, torch.float32)
    view = StateView(torch.zeros(2, DRIFT.value_heads, DRIFT.key_dim, DRIFT.value_dim, dtype=fine),
                     torch.zeros(2, 7, DRIFT.channels, dtype=x.dtype))
    slot, template = torch.tensor([1]), build_batch([Row(chunk, 0)]).batch
    for done in range(0, len(x), chunk):
        batch = replace(template, done=torch.tensor([done]), base=torch.tensor([done]), source=slot, target=slot,
                        span=(1, 2, 1) if chunk == 1 else None, memo={})
        outputs.append(ops.gdn_mixer(x[done : done + chunk], weights, view, batch)[:, : DRIFT.values])
    return torch.cat(outputs)[-512:], view.recurrent[1]


@pytest.fixture(scope="module")
def exact() -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """bfloat16 inputs, and the float64 run on them."""
    spec = DRIFT
    x = randn(generator(5), STEPS, spec.channels + spec.values + 2 * spec.value_heads).bfloat16()
    return x, long_run(reference.OPS, x.double(), STEPS)


@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.slow), 64, 256])
def test_float32_does_not_drift(exact: tuple[Tensor, tuple[Tensor, Tensor]], chunk: int) -> None:
    x, (outputs, state) = exact
    output, last = long_run(FAST, x.float(), chunk)
    assert_close(output, outputs, 1.5e-6)
    assert_close(last, state, 1.5e-6)


@pytest.mark.parametrize("chunk", [1, 256])
def test_bfloat16_activations_keep_a_float32_state(exact: tuple[Tensor, tuple[Tensor, Tensor]], chunk: int) -> None:
    x, (outputs, state) = exact
    output, last = long_run(FAST, x, chunk)
    assert_close(output, outputs, 1e-2)
    assert_close(last, state, 1e-2)
