"""The compiled Gated DeltaNet core at every processor level: right, and the same bits however the work is cut."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import replace

import pytest
import torch
from native_pools import at_every_level, native_ops, pool, using
from op_cases import (
    Case,
    Row,
    assert_close,
    build_batch,
    clone_state,
    empty_state,
    gdn_weights,
    generator,
    hidden_states,
    randn,
    same_bits,
    state_errors,
    state_view,
)
from torch import Tensor

from deltic.ops import reference
from deltic.ops.cpu import missing
from deltic.ops.cpu.kernels import gdn_layer, slots
from deltic.ops.cpu.library import address, library, step_batch
from deltic.ops.types import Batch, GdnSpec, GdnWeights, StateView

pytestmark = pytest.mark.skipif(bool(missing()), reason=str(missing()))

SPECS = {
    "odd": GdnSpec(2, 6, 5, 7, 4, 1e-6),
    "registers of all sizes": GdnSpec(2, 4, 20, 183, 4, 1e-6),
    "whole registers": GdnSpec(2, 2, 32, 128, 4, 1e-6),
    "kernel of three": GdnSpec(1, 3, 17, 24, 3, 1e-6),
}
by_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16],
                                   ids=["float32", "float16", "bfloat16"])
TOLERANCE = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}


def core(proj: Tensor, weights: GdnWeights, view: StateView, batch: Batch) -> Tensor:
    """What lies between the projections."""
    conv, mixed = weights.conv.float().contiguous(), torch.empty(len(proj), weights.spec.values)
    pool().call(library().deltic_gdn, byref(gdn_layer(weights, conv)), byref(slots(view)), step_batch(batch),
                address(proj), address(mixed))
    return mixed


def projected(spec: GdnSpec, tokens: int) -> Tensor:
    return randn(generator(9), tokens, spec.channels + spec.values + 2 * spec.value_heads).float()


def empty_view(spec: GdnSpec, dtype: torch.dtype, slots: int) -> StateView:
    return empty_state(slots, dtype, spec, width=7)


def in_chunks(proj: Tensor, weights: GdnWeights, dtype: torch.dtype, chunks: Sequence[int]) -> tuple[Tensor, StateView]:
    """One sequence in slot 1; slot 2 gets the state after 140 tokens."""
    view, outputs, done = empty_view(weights.spec, dtype, 3), [], 0
    for chunk in chunks:
        emits = (140 - done,) if done < 140 <= done + chunk else ()
        batch = build_batch([Row(chunk, done, emits=emits)]).batch
        slot = torch.tensor([1])
        batch = replace(batch, source=slot, target=slot, emit_slot=torch.full((len(emits),), 2))
        outputs.append(core(proj[done : done + chunk], weights, view, batch))
        done += chunk
    return torch.cat(outputs), view


@by_dtype
@by_spec
@pytest.mark.covering
@at_every_level
def test_against_the_reference(spec: GdnSpec, dtype: torch.dtype) -> None:
    rows = [Row(1, 9, emits=(1,)), Row(1, 0), Row(1, 3, in_place=False), Row(5, 3, in_place=False, emits=(1, 4)),
            Row(150, 33, emits=(7, 40, 149, 150)), Row(90, 0, emits=(2,)), Row(2, 0)]
    case = build_batch(rows, 5)
    x, weights = hidden_states(case, dtype), gdn_weights(3, dtype, spec)
    before = state_view(case, dtype, spec)
    slow, fast = clone_state(before), clone_state(before)
    wanted = reference.gdn_mixer(x, weights, slow, case.fresh())
    assert_close(native_ops().gdn_mixer(x, weights, fast, case.fresh()), wanted, TOLERANCE[dtype])
    assert max(state_errors(case, fast, slow, before).values()) <= TOLERANCE[dtype]


@by_dtype
@by_spec
@pytest.mark.covering
@at_every_level
def test_chunks_change_no_bit(spec: GdnSpec, dtype: torch.dtype) -> None:
    proj, weights = projected(spec, 300), gdn_weights(3, torch.float32, spec)
    wanted, whole = in_chunks(proj, weights, dtype, [300])
    assert not wanted.isnan().any()
    for chunks in ([1] * 300, [1, 2, 3, 128, 1, 129, 36], [139, 1, 160], [140, 160], [299, 1]):
        output, view = in_chunks(proj, weights, dtype, chunks)
        assert same_bits(output, wanted)
        assert same_bits(view.recurrent[1:], whole.recurrent[1:]) and same_bits(view.conv[1:], whole.conv[1:])


def _core_of(case: Case, proj: Tensor, weights: GdnWeights) -> tuple[Tensor, StateView]:
    view = state_view(case, torch.bfloat16, weights.spec)
    return core(proj, weights, view, case.fresh()), view


@at_every_level
def test_neighbours_and_threads_change_no_bit() -> None:
    """Nor does a NaN in a neighbour."""
    spec = SPECS["registers of all sizes"]
    weights = gdn_weights(3, torch.float32, spec)
    case = build_batch([Row(1, 5), Row(1, 0), Row(1, 70, in_place=False), Row(140, 2, emits=(3,)), Row(40, 0)], 4)
    proj = projected(spec, case.batch.layout.tokens)
    wanted, view = _core_of(case, proj, weights)
    for count in (1, 2, 5):
        with using(threads=count):
            output, other = _core_of(case, proj, weights)
            assert same_bits(output, wanted)
            assert same_bits(other.recurrent, view.recurrent) and same_bits(other.conv, view.conv)
    starts, slots = case.batch.starts.tolist(), case.batch.target.tolist()
    for sick in range(len(case.rows)):
        ill = proj.clone()
        ill[starts[sick]] = torch.nan
        output, other = _core_of(case, ill, weights)
        assert output[starts[sick]].isnan().all()
        for row in set(range(len(case.rows))) - {sick}:
            tokens = slice(starts[row], starts[row + 1])
            assert same_bits(output[tokens], wanted[tokens])
            assert same_bits(other.recurrent[slots[row]], view.recurrent[slots[row]])


@pytest.mark.parametrize("chunks", [[1, 1, 1], [70]])
@at_every_level
def test_tiled_heads(chunks: list[int]) -> None:
    """The heads of a layer in tiled order give what they give in plain order."""
    spec = SPECS["odd"]
    weights, proj = gdn_weights(3, torch.float32, spec), projected(spec, sum(chunks))
    group, heads, width = spec.value_heads // spec.key_heads, spec.value_heads, spec.value_dim
    # the plain number of each tiled head
    order = torch.arange(heads).reshape(spec.key_heads, group).t().flatten()
    columns = (order[:, None] * width + torch.arange(width)).flatten()
    keys, values = 2 * spec.keys, spec.values
    moved = torch.cat([torch.arange(keys), keys + columns, keys + values + columns,
                       keys + 2 * values + order, keys + 2 * values + heads + order])
    tiled = replace(weights, spec=replace(spec, tiled=True), conv=weights.conv[moved[: spec.channels]],
                    decay=weights.decay[order], dt_bias=weights.dt_bias[order])
    views, done = [empty_view(spec, torch.float32, 2) for _ in range(2)], 0
    for chunk in chunks:
        batch = build_batch([Row(chunk, done)]).batch
        batch = replace(batch, source=torch.tensor([1]), target=torch.tensor([1]))
        part = proj[done : done + chunk]
        wanted = core(part, weights, views[0], batch)
        output = core(part[:, moved].contiguous(), tiled, views[1], batch)
        assert same_bits(output, wanted[:, columns])
        assert same_bits(views[1].recurrent[1], views[0].recurrent[1][order])
        done += chunk


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@at_every_level
def test_extreme_inputs(dtype: torch.dtype) -> None:
    """Gates and inputs far beyond the range of exp stay finite and right."""
    spec = SPECS["odd"]
    case = build_batch([Row(1, 5), Row(40, 2)], 4)
    weights = gdn_weights(3, dtype, spec)
    for factor in (1e-30, 1e4, 1e9):
        x, before = hidden_states(case, dtype) * factor, state_view(case, dtype, spec)
        slow, fast = clone_state(before), clone_state(before)
        wanted = reference.gdn_mixer(x, weights, slow, case.fresh())
        output = native_ops().gdn_mixer(x, weights, fast, case.fresh())
        assert_close(output, wanted, 2 * TOLERANCE[dtype])
        assert max(state_errors(case, fast, slow, before).values()) <= 2 * TOLERANCE[dtype]
