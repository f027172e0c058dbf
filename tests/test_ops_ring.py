"""The replay ring: whatever is appended, rejected, folded and moved, outputs and states have the bits of the plain
steps, one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_pools import at_every_level, pool, using
from op_cases import (
    GDN,
    RING_POOLS,
    Row,
    build_batch,
    clone_state,
    conv_places,
    empty_ring,
    empty_state,
    gdn_weights,
    generator,
    hidden_states,
    randn,
    same_bits,
    state_view,
)
from test_ops_gdn_cpu import core, projected
from torch import Tensor

from deltic.ops import backends, reference
from deltic.ops.cpu import kernels, missing
from deltic.ops.types import RING, Batch, DeltaLogView, GdnSpec, GdnWeights, StateView

needs_kernels = pytest.mark.skipif(bool(missing()), reason=str(missing()))
Core = Callable[[Tensor, GdnWeights, StateView, Batch], Tensor]
SPARE = 2
"""Slots that no sequence works in."""


@given(st.integers(0, 100), st.integers(0, RING), st.integers(1, 40), st.booleans())
def test_next_base(base: int, ring: int, chunk: int, append: bool) -> None:
    done = base + ring
    if append and chunk > RING:
        with pytest.raises(ValueError, match="replay ring"):
            reference.next_base(base, done, chunk, append)
        return
    after = reference.next_base(base, done, chunk, append)
    assert after == done + chunk if not append else after in (base, done)
    assert done + chunk - after <= RING


# Histories


@dataclass(eq=False)
class Story:
    """One sequence in the cache, and what the plain steps make of it: proj [T, ...], outputs [T, values], and a view
    whose slot p holds the state after p tokens."""

    proj: Tensor
    outputs: Tensor
    states: StateView
    slot: int
    unit: int
    base: int = 0
    done: int = 0


@dataclass(frozen=True, eq=False)
class Turn:
    """A row of a step: `chunk` tokens, of which the first `accepted` are the sequence's own. emit: after how many
    tokens of the chunk to emit (0: not at all). slot: where to go on (None: in place)."""

    sequence: Story
    chunk: int
    accepted: int
    append: bool
    emit: int = 0
    slot: int | None = None


class World:
    """Sequences in one cache, and whether all that was seen of them had the bits of the plain steps."""

    def __init__(self, run: Core, weights: GdnWeights, dtype: torch.dtype, seed: int, tokens: int, count: int) -> None:
        self.run, self.weights, self.same = run, weights, True
        self.rng = generator(seed)
        self.sequences = [self._plain(index, tokens, dtype) for index in range(count)]
        self.restart(dtype)

    def restart(self, dtype: torch.dtype) -> None:
        """Forget all that was done, and whether it was right."""
        count, self.same = len(self.sequences), True
        self.view = empty_state(2 * count + SPARE, dtype, self.weights.spec, units=count + 2)
        for index, sequence in enumerate(self.sequences):
            sequence.slot, sequence.unit, sequence.base, sequence.done = index, 1 + index, 0, 0

    def _plain(self, index: int, tokens: int, dtype: torch.dtype) -> Story:
        spec, outputs = self.weights.spec, []
        proj = randn(self.rng, tokens, spec.channels + spec.values + 2 * spec.value_heads).float()
        states = empty_state(tokens + 1, dtype, spec)
        for done in range(tokens):
            batch = replace(build_batch([Row(1, done)]).batch, source=torch.tensor([done]),
                            target=torch.tensor([done + 1]))
            outputs.append(self.run(proj[done : done + 1], self.weights, states, batch))
        return Story(proj, torch.cat(outputs), states, index, 1 + index)

    def pick(self, least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (1,), generator=self.rng))

    @property
    def free(self) -> int:
        """A slot that nobody works in."""
        taken = {sequence.slot for sequence in self.sequences}
        return next(slot for slot in range(len(self.sequences) + SPARE) if slot not in taken)

    def compare(self, slot: int, sequence: Story, length: int) -> None:
        places = conv_places(length, self.view.conv.shape[1])
        self.same &= same_bits(self.view.recurrent[slot], sequence.states.recurrent[length])
        self.same &= same_bits(self.view.conv[slot, places], sequence.states.conv[length, places])

    def step(self, turns: Sequence[Turn]) -> None:
        turns = sorted(turns, key=lambda turn: turn.chunk > 1)
        rows = [Row(turn.chunk, s.done, s.done - s.base, turn.append, turn.slot is None,
                    (turn.emit,) if turn.emit else ()) for turn in turns for s in [turn.sequence]]
        sources = [turn.sequence.slot for turn in turns]
        targets = [turn.sequence.slot if turn.slot is None else turn.slot for turn in turns]
        emits = {turn: len(self.sequences) + SPARE + index for index, turn in enumerate(turns) if turn.emit}
        batch = replace(build_batch(rows).batch, source=torch.tensor(sources), target=torch.tensor(targets),
                        delta_log=torch.tensor([turn.sequence.unit for turn in turns]),
                        emit_slot=torch.tensor(list(emits.values()), dtype=torch.int64))
        chunks = [torch.cat([s.proj[s.done : s.done + turn.accepted],
                             randn(self.rng, turn.chunk - turn.accepted, s.proj.shape[1]).float()])
                  for turn in turns for s in [turn.sequence]]
        outputs = self.run(torch.cat(chunks), self.weights, self.view, batch).split([len(chunk) for chunk in chunks])
        for turn, row, output, target in zip(turns, rows, outputs, targets, strict=True):
            s = turn.sequence
            self.same &= same_bits(output[: turn.accepted], s.outputs[s.done : s.done + turn.accepted])
            if 0 < turn.emit <= turn.accepted:
                self.compare(emits[turn], s, s.done + turn.emit)
            s.base, s.done, s.slot = row.after, s.done + turn.accepted, target

    def turn(self, sequence: Story, slot: int | None) -> Turn | None:
        """A random one. slot: where it may move."""
        left = len(sequence.proj) - sequence.done
        if not left:
            return None
        append, emits = self.pick(0, 4) > 0, self.pick(0, 2) == 0
        chunk = self.pick(1, (1, 4, RING)[self.pick(0, 2)])
        if not append:
            chunk = min(self.pick(1, (1, 20)[self.pick(0, 1)]), left)
        accepted = min(self.pick(1, chunk), left) if append else chunk
        return Turn(sequence, chunk, accepted, append, self.pick(1, chunk) if emits else 0,
                    None if append or self.pick(0, 1) else slot)

    def history(self, fold: Callable[..., None], corrupt: Callable[[DeltaLogView, int, int, int, bool], None]) -> bool:
        """Steps until all sequences are at their ends; whether everything had the right bits."""
        while turns := [turn for sequence in self.sequences if self.pick(0, 3)
                        for turn in [self.turn(sequence, self.free)] if turn] or self._unfinished():
            moving = [turn for turn in turns if turn.slot is not None]
            turns = [replace(turn, slot=None) if turn in moving[1:] else turn for turn in turns]
            self.step(turns)
            for turn in turns:
                s = turn.sequence
                if s.base < s.done and self.view.delta_log is not None:
                    corrupt(self.view.delta_log, s.unit, s.base, s.done, turn.accepted < turn.chunk)
            if self.pick(0, 3) == 0:
                self.fold(self.sequences[self.pick(0, len(self.sequences) - 1)], fold, bool(self.pick(0, 1)))
        for sequence in self.sequences:
            self.fold(sequence, fold, True)
        return self.same

    def _unfinished(self) -> list[Turn]:
        return [turn for sequence in self.sequences for turn in [self.turn(sequence, None)] if turn]

    def fold(self, s: Story, fold: Callable[..., None], stay: bool) -> None:
        """Fold the ring into the sequence's own slot, or into another one, and go on there."""
        target = s.slot if stay else self.free
        fold((self.view,), s.slot, s.unit, s.base, s.done, target)
        if s.done:
            self.compare(target, s, s.done)
        s.slot, s.base = target, s.done


def sound(ring: DeltaLogView, unit: int, base: int, done: int, rejected: bool) -> None:
    """Nothing is corrupted."""


SPECS = {
    "odd": GDN,
    "tiled": replace(GDN, tiled=True),
    "registers of all sizes": GdnSpec(2, 4, 20, 183, 4, 1e-6),
    "tiled, kernel of three": GdnSpec(2, 6, 17, 24, 3, 1e-6, True),
}
by_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16],
                                   ids=["float32", "float16", "bfloat16"])


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.integers(0, 1000), st.booleans())
def test_reference_has_the_bits_of_plain_steps(seed: int, tiled: bool) -> None:
    weights = gdn_weights(seed, torch.float32, replace(GDN, tiled=tiled))
    assert World(reference.gdn_core, weights, torch.float32, seed, 40, 2).history(reference.flush_delta_log, sound)


def flush_delta_log(*arguments: Any) -> None:
    kernels.flush_delta_log(pool(), *arguments)


@needs_kernels
@by_dtype
@by_spec
@pytest.mark.covering
@at_every_level
def test_kernels_have_the_bits_of_plain_steps(spec: GdnSpec, dtype: torch.dtype) -> None:
    world = World(core, gdn_weights(3, torch.float32, spec), dtype, 7, 70, 3)
    for count in (1, 2, 5):
        with using(threads=count):
            world.restart(dtype)
            assert world.history(flush_delta_log, sound)


@needs_kernels
def test_rows_cut_by_kernel_windows() -> None:
    """Long rows are computed in windows of 128 tokens, whose borders may lie in an appended chunk."""
    world = World(core, gdn_weights(3, torch.float32), torch.float32, 8, 180, 4)
    for long in range(111, 129):
        world.restart(torch.float32)
        first, *others = world.sequences
        for chunk, kept in ((5, 3), (7, 5), (4, 4)):
            world.step([Turn(other, chunk, kept, True) for other in others])
        world.step([Turn(first, long, long, False), Turn(others[1], 16, 9, True, 9), Turn(others[2], 4, 2, True)])
        world.step([Turn(others[0], 1, 1, True), Turn(others[1], 7, 7, True), Turn(others[2], 6, 6, False)])
        for sequence in world.sequences:
            world.fold(sequence, flush_delta_log, True)
        assert world.same


# Injected bugs


def _last(ring: DeltaLogView, unit: int, done: int, other: int) -> None:
    """The entry of the last token becomes that of `other`."""
    for name in ("keys", "updates", "decays"):
        pool = getattr(ring, name)
        pool[unit, (done - 1) % RING] = pool[unit, other % RING].clone()


def rounded_updates(ring: DeltaLogView, unit: int, base: int, done: int, rejected: bool) -> None:
    ring.updates[unit] = ring.updates[unit].bfloat16().float()


def doubled_decay(ring: DeltaLogView, unit: int, base: int, done: int, rejected: bool) -> None:
    ring.decays[unit, (done - 1) % RING] **= 2


def dropped_entry(ring: DeltaLogView, unit: int, base: int, done: int, rejected: bool) -> None:
    ring.decays[unit, base % RING], ring.updates[unit, base % RING] = 1.0, 0.0


def repeated_entry(ring: DeltaLogView, unit: int, base: int, done: int, rejected: bool) -> None:
    if done - base > 1:
        _last(ring, unit, done, done - 2)


def leaked_draft(ring: DeltaLogView, unit: int, base: int, done: int, rejected: bool) -> None:
    if rejected:
        _last(ring, unit, done, done)


def leaked_input(ring: DeltaLogView, unit: int, base: int, done: int, rejected: bool) -> None:
    if rejected:
        ring.inputs[unit, (done - 1) % RING] = ring.inputs[unit, done % RING]


BUGS = [rounded_updates, doubled_decay, dropped_entry, repeated_entry, leaked_draft, leaked_input]
CORES = [pytest.param(reference.gdn_core, reference.flush_delta_log, id="reference"),
         pytest.param(core, flush_delta_log, id="cpu", marks=needs_kernels)]


@pytest.mark.parametrize(("run", "fold"), CORES)
def test_injected_bugs_are_found(run: Core, fold: Callable[..., None]) -> None:
    for bug in BUGS:
        for seed in range(3):
            world = World(run, gdn_weights(seed, torch.float32), torch.float32, seed, 40, 2)
            assert not world.history(fold, bug), bug.__name__


def test_leaked_conv_input_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = reference.advance_conv
    world = World(reference.gdn_core, gdn_weights(2, torch.float32), torch.float32, 2, 40, 2)
    monkeypatch.setattr(reference, "advance_conv", lambda ring, chunk, done, length: original(
        ring, chunk.roll(1, 0), done, length))
    assert not world.history(reference.flush_delta_log, sound)


# Memory


@pytest.mark.parametrize("backend", ["reference", "torch", pytest.param("cpu", marks=needs_kernels)])
def test_flushing_writes_the_target_in_every_layer(backend: str) -> None:
    case = build_batch([Row(1, 12, ring=12), Row(1, 21, ring=16), Row(1, 30, ring=3), Row(1, 4, ring=0)], 3)
    fold = backends()[backend].flush_delta_log
    for index, row in enumerate(case.rows):
        source, unit = int(case.batch.source[index]), int(case.batch.delta_log[index])
        for target in (source, 0):
            before = tuple(state_view(replace(case, seed=seed), torch.bfloat16) for seed in (1, 2))
            wanted, views = tuple(map(clone_state, before)), tuple(map(clone_state, before))
            reference.flush_delta_log(wanted, source, unit, row.base, row.done, target)
            fold(views, source, unit, row.base, row.done, target)
            others = [slot for slot in range(case.slots) if slot != target]
            places = conv_places(row.done, views[0].conv.shape[1])
            for new, right, old in zip(views, wanted, before, strict=True):
                assert same_bits(new.recurrent[others], old.recurrent[others])
                assert same_bits(new.conv[others], old.conv[others])
                torch.testing.assert_close(new.recurrent[target], right.recurrent[target], rtol=1e-6, atol=1e-6)
                assert same_bits(new.conv[target, places], right.conv[target, places])
                assert new.delta_log is not None and old.delta_log is not None
                assert all(same_bits(getattr(new.delta_log, name), getattr(old.delta_log, name)) for name in RING_POOLS)


@pytest.mark.parametrize("backend", ["reference", "torch", pytest.param("cpu", marks=needs_kernels)])
def test_delta_log_in_another_head_order_is_refused(backend: str) -> None:
    case = build_batch([Row(2, 0, append=True)])
    view, x = state_view(case, torch.float32), hidden_states(case, torch.float32)
    weights = gdn_weights(1, torch.float32, replace(GDN, tiled=True))
    with pytest.raises(ValueError, match=r"DeltaLogView\.tiled is False"):
        backends()[backend].gdn_mixer(x, weights, view, case.batch)


@pytest.mark.parametrize("run", [reference.gdn_core, pytest.param(core, marks=needs_kernels)])
def test_unused_delta_logs_stay_untouched(run: Core) -> None:
    """Plain rows have the same bits and do not write to the logs."""
    case, weights = build_batch([Row(1, 4), Row(1, 0), Row(30, 5, emits=(7,))], 2), gdn_weights(3, torch.float32)
    case = replace(case, batch=replace(case.batch, delta_log=torch.full((3,), 1 << 40)))
    proj = projected(weights.spec, case.batch.layout.tokens)
    with_rings = replace(state_view(case, torch.float32), delta_log=empty_ring(2, torch.float32))
    without = replace(clone_state(with_rings), delta_log=None)
    wanted = run(proj, weights, without, case.fresh())
    assert same_bits(run(proj, weights, with_rings, case.fresh()), wanted)
    assert same_bits(with_rings.recurrent, without.recurrent) and same_bits(with_rings.conv, without.conv)
    assert with_rings.delta_log is not None
    assert all(getattr(with_rings.delta_log, name).isnan().all() for name in RING_POOLS)
