"""Random cases for the ops: unequal odd dimensions, ragged batches, poisoned memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from deltic.ops import Ops, reference
from deltic.ops.types import (
    PAGE,
    RING,
    AttentionSpec,
    AttentionWeights,
    Batch,
    DeltaLogView,
    GdnSpec,
    GdnWeights,
    KvView,
    Layout,
    Rope,
    RopeSpec,
    StateView,
)

GDN = GdnSpec(key_heads=2, value_heads=6, key_dim=5, value_dim=7, conv_kernel=4, eps=1e-6)
ATTENTION = AttentionSpec(heads=6, kv_heads=2, head_dim=10, rotary_dim=6, gate=True, eps=1e-6)
ROPE = RopeSpec(theta=10_000.0, rotary_dim=6, sections=(1, 1, 1))
HIDDEN = 13
WIDTH = GDN.conv_kernel + 1
"""Places of a slot's ring of convolution inputs."""
CHUNKS = (1, 2, 7, 63, 64, 65, 130)
NAN = float("nan")


@dataclass(frozen=True)
class Row:
    """One row to build: the last `ring` tokens before `done` are entries of a ring unit, which its slot is not as of;
    emits are numbers of the chunk's tokens."""

    chunk: int
    done: int = 0
    ring: int = 0
    append: bool = False
    in_place: bool = True
    emits: tuple[int, ...] = ()

    @property
    def base(self) -> int:
        return self.done - self.ring

    @property
    def after(self) -> int:
        """What the target is as of after the step."""
        return reference.next_base(self.base, self.done, self.chunk, self.append)


@dataclass(frozen=True)
class Case:
    """A batch and the memory around it: rows in batch order, numbers of slots, ring units and pages that exist."""

    name: str
    rows: tuple[Row, ...]
    batch: Batch
    slots: int
    units: int
    pages: int
    seed: int = field(default=0)

    def fresh(self) -> Batch:
        """The batch with an empty memo, for another backend, layer shape or dtype."""
        return replace(self.batch, memo={})


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def uniform(rng: torch.Generator, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
    return low + (high - low) * torch.rand(*shape, generator=rng, dtype=torch.float64)


def _slots(rows: Sequence[Row], consecutive: bool,
           rng: torch.Generator) -> tuple[list[int], list[int], list[int], int]:
    """Distinct slots of sources, targets and emits, with one guard slot at either end and some in between."""
    total = 2 + sum(2 + len(row.emits) for row in rows) + 3
    singles = sum(row.chunk == 1 for row in rows)
    head = list(range(2, 2 + singles)) if consecutive else []
    free = [slot for slot in (1 + torch.randperm(total - 2, generator=rng)).tolist() if slot not in head]
    sources, targets, emits = [], [], []
    for index, row in enumerate(rows):
        source = head[index] if index < len(head) else free.pop()
        sources.append(source)
        targets.append(source if row.in_place else free.pop())
        emits.extend(free.pop() for _ in row.emits)
    return sources, targets, emits, total


def _units(rows: Sequence[Row], rng: torch.Generator) -> tuple[list[int], int]:
    """Distinct ring units; rows without a ring have unit 0, which must not be touched, as the last one."""
    users = sum(row.append or row.ring > 0 for row in rows)
    free = (1 + torch.randperm(users, generator=rng)).tolist()
    return [free.pop() if row.append or row.ring else 0 for row in rows], users + 2


def _page_table(contexts: Sequence[int], rng: torch.Generator) -> tuple[Tensor, int]:
    """Pages in random order, padded with page 0, which no row owns; some pages are owned by nobody."""
    counts = [-(-context // PAGE) for context in contexts]
    total = 1 + sum(counts) + 2
    free = (1 + torch.randperm(total - 1, generator=rng)).tolist()
    table = torch.zeros(len(contexts), max(counts) + 2, dtype=torch.int64)
    for index, count in enumerate(counts):
        table[index, :count] = torch.tensor([free.pop() for _ in range(count)])
    return table, total


def _store(rows: Sequence[Row], table: Tensor) -> Tensor:
    return torch.tensor([int(table[index, place // PAGE]) * PAGE + place % PAGE
                         for index, row in enumerate(rows) for place in range(row.done, row.done + row.chunk)])


def build_batch(rows: Iterable[Row], seed: int = 0, consecutive: bool = False, name: str = "") -> Case:
    """A batch of these rows, single-token ones first; `consecutive`: those have neighbouring slots (a span)."""
    rng = generator(seed)
    ordered = tuple(sorted(rows, key=lambda row: row.chunk > 1))
    chunks = tuple(row.chunk for row in ordered)
    contexts = tuple(row.done + row.chunk for row in ordered)
    singles = sum(chunk == 1 for chunk in chunks)
    sources, targets, emits, slots = _slots(ordered, consecutive, rng)
    rings, units = _units(ordered, rng)
    table, pages = _page_table(contexts, rng)
    emitted = [(index, row.done + tokens) for index, row in enumerate(ordered) for tokens in row.emits]
    total = sum(chunks)
    layout = Layout(chunks, contexts, singles, len(ordered), len(emits), any(row.append for row in ordered))
    batch = Batch(
        layout=layout,
        ids=torch.randint(0, 50, (total,), generator=rng),
        positions=torch.randint(0, 300, (3, total), generator=rng),
        starts=torch.tensor([0, *chunks]).cumsum(0),
        done=torch.tensor([row.done for row in ordered]),
        pages=table,
        store=_store(ordered, table),
        source=torch.tensor(sources),
        target=torch.tensor(targets),
        base=torch.tensor([row.base for row in ordered]),
        delta_log=torch.tensor(rings),
        append=torch.tensor([row.append for row in ordered]),
        emit_row=torch.tensor([index for index, _ in emitted], dtype=torch.int64),
        emit_length=torch.tensor([length for _, length in emitted], dtype=torch.int64),
        emit_slot=torch.tensor(emits, dtype=torch.int64),
        logit_tokens=torch.tensor(chunks).cumsum(0) - 1,
        span=(2, 2 + singles, 1) if consecutive and singles else None,
    )
    return Case(name, ordered, batch, slots, units, pages, seed)


def random_rows(seed: int, count: int, chunks: Sequence[int] = CHUNKS, append: bool = False) -> list[Row]:
    """Rows with random chunks, cursors, rings and emits; `append`: some of the short ones append."""
    rng = generator(seed)

    def pick(options: Sequence[int]) -> int:
        return options[int(torch.randint(0, len(options), (1,), generator=rng))]

    rows = []
    for _ in range(count):
        chunk, done = pick(chunks), pick((0, 0, 1, 2, 3, 15, 16, 17, 40, 70))
        joins = append and chunk <= RING and pick((0, 1)) == 1
        ring = pick(range(min(done, RING) + 1)) if append else 0
        emits = sorted({pick(range(1, chunk + 1)) for _ in range(pick((0, 0, 1, 3)))})
        rows.append(Row(chunk, done, ring, joins, joins or pick((0, 1)) == 1, tuple(emits)))
    return rows


def cases() -> list[Case]:
    """The named batches that every backend has to pass."""
    decode = [Row(1, done) for done in (1, 2, 3, 15, 16, 17, 40, 33)]
    moved = [Row(1, done, in_place=False, emits=(1,)) for done in (0, 5, 16, 31)]
    lengths = [Row(chunk, 0, emits=(1, chunk)) for chunk in CHUNKS if chunk > 1]
    resumed = [Row(chunk, done, in_place=False, emits=(chunk // 2, chunk)) for chunk, done in
               ((130, 3), (65, 16), (64, 1), (63, 40), (7, 2))]
    verify = [Row(4, 20, ring=5, append=True), Row(5, 40, ring=14, append=True), Row(1, 9, ring=9, append=True),
              Row(16, 30, append=True), Row(2, 0, append=True, emits=(1,)), Row(3, 17, ring=16, append=True)]
    settled = [Row(1, 20, ring=5), Row(7, 16, ring=16, in_place=False), Row(65, 3, ring=2, emits=(1, 64)),
               Row(1, 6, ring=6, in_place=False), Row(1, 18, ring=15, emits=(1,)), Row(4, 5, ring=5, emits=(1, 4))]
    full = [Row(1, 40, ring=16, append=True, emits=(1,)), Row(16, 40, ring=1, append=True, emits=(1, 5, 16)),
            Row(16, 16, ring=16, append=True), Row(9, 7, ring=7, append=True), Row(10, 7, ring=7, append=True),
            Row(1, 3, ring=3, append=True), Row(1, 0, append=True), Row(16, 2, ring=1, append=True, emits=(3,))]
    named = [
        build_batch([Row(1, 0)], 1, name="first token"),
        build_batch([Row(1, 24)], 2, True, name="one row"),
        build_batch(decode, 3, True, name="decode in a span"),
        build_batch(decode, 4, name="decode scattered"),
        build_batch(moved, 5, name="decode to other slots"),
        build_batch(lengths, 6, name="prefill"),
        build_batch(resumed, 7, name="prefill resumed"),
        build_batch([*decode[:3], *resumed[:2], *lengths[:2]], 8, True, name="decode and prefill"),
        build_batch(verify, 9, name="append"),
        build_batch([*verify[:3], *decode[:2], *lengths[:1]], 10, name="append among others"),
        build_batch(settled, 11, name="fold a ring"),
        build_batch(full, 12, True, name="append to full rings"),
    ]
    drawn = [build_batch(random_rows(seed, 1 + seed % 8), seed, name=f"random {seed}") for seed in range(20, 26)]
    rings = [build_batch(random_rows(seed, 1 + seed % 8, (1, 2, 4, 7, 16, 33), append=True), seed,
                         name=f"random with rings {seed}") for seed in range(30, 36)]
    return named + drawn + rings


# Weights


def gdn_weights(seed: int, dtype: torch.dtype, spec: GdnSpec = GDN, hidden: int = HIDDEN) -> GdnWeights:
    """in_proj comes as row blocks; decays reach from almost none to strong."""
    rng, fine = generator(seed), torch.promote_types(dtype, torch.float32)
    sizes = (spec.channels, spec.values, spec.value_heads, spec.value_heads)
    blocks = tuple((randn(rng, size, hidden) / hidden**0.5).to(dtype) for size in sizes)
    return GdnWeights(
        spec=spec,
        in_proj=blocks,
        conv=(randn(rng, spec.channels, spec.conv_kernel) / spec.conv_kernel**0.5).to(dtype),
        decay=-uniform(rng, spec.value_heads, low=-4.0, high=1.5).exp().to(fine),
        dt_bias=randn(rng, spec.value_heads).to(fine),
        norm=uniform(rng, spec.value_dim, low=0.5, high=1.5).to(fine),
        out_proj=(randn(rng, hidden, spec.values) / spec.values**0.5).to(dtype),
    )


def attention_weights(seed: int, dtype: torch.dtype, spec: AttentionSpec = ATTENTION,
                      hidden: int = HIDDEN) -> AttentionWeights:
    rng, fine = generator(seed), torch.promote_types(dtype, torch.float32)
    rows = spec.queries * (2 if spec.gate else 1) + 2 * spec.kv
    return AttentionWeights(
        spec=spec,
        qkv=(randn(rng, rows, hidden) / hidden**0.5).to(dtype),
        q_norm=uniform(rng, spec.head_dim, low=0.5, high=1.5).to(fine),
        k_norm=uniform(rng, spec.head_dim, low=0.5, high=1.5).to(fine),
        o_proj=(randn(rng, hidden, spec.queries) / spec.queries**0.5).to(dtype),
    )


# Memory


def hidden_states(case: Case, dtype: torch.dtype, hidden: int = HIDDEN) -> Tensor:
    return randn(generator(case.seed + 1000), case.batch.layout.tokens, hidden).to(dtype)


def empty_ring(units: int, dtype: torch.dtype, spec: GdnSpec = GDN) -> DeltaLogView:
    """Ring units full of NaN."""
    fine = torch.promote_types(dtype, torch.float32)
    return DeltaLogView(
        inputs=torch.full((units, RING, spec.channels), NAN, dtype=dtype),
        keys=torch.full((units, RING, spec.key_heads, spec.key_dim), NAN, dtype=fine),
        updates=torch.full((units, RING, spec.value_heads, spec.value_dim), NAN, dtype=fine),
        decays=torch.full((units, RING, spec.value_heads), NAN, dtype=fine),
        tiled=spec.tiled,
    )


def empty_state(slots: int, dtype: torch.dtype, spec: GdnSpec = GDN, width: int = WIDTH, units: int = 0) -> StateView:
    """Slots and, if any, ring units full of NaN."""
    fine = torch.promote_types(dtype, torch.float32)
    return StateView(torch.full((slots, spec.value_heads, spec.key_dim, spec.value_dim), NAN, dtype=fine),
                     torch.full((slots, width, spec.channels), NAN, dtype=dtype),
                     empty_ring(units, dtype, spec) if units else None)


def state_view(case: Case, dtype: torch.dtype, spec: GdnSpec = GDN, width: int = WIDTH) -> StateView:
    """Slots and ring units full of NaN but for what a row has to find: its source as of `base`, and its entries."""
    rng, view = generator(case.seed + 2000), empty_state(case.slots, dtype, spec, width, case.units)
    ring = view.delta_log
    assert ring is not None
    for row, slot, unit in zip(case.rows, case.batch.source.tolist(), case.batch.delta_log.tolist(), strict=True):
        if row.base:
            view.recurrent[slot] = randn(rng, *view.recurrent.shape[1:])
        for position in range(max(0, row.base - width), row.base):
            view.conv[slot, position % width] = randn(rng, spec.channels)
        for position in range(row.base, row.done):
            place = position % RING
            ring.inputs[unit, place] = randn(rng, spec.channels)
            ring.keys[unit, place] = torch.nn.functional.normalize(randn(rng, spec.key_heads, spec.key_dim), dim=-1)
            ring.updates[unit, place] = randn(rng, spec.value_heads, spec.value_dim)
            ring.decays[unit, place] = uniform(rng, spec.value_heads)
    return view


def kv_view(case: Case, dtype: torch.dtype, spec: AttentionSpec = ATTENTION) -> KvView:
    """Pages full of NaN but for the entries before each row's cursor."""
    rng = generator(case.seed + 3000)
    shape = (case.pages, PAGE, spec.kv_heads, spec.head_dim)
    keys, values = torch.full(shape, NAN, dtype=dtype), torch.full(shape, NAN, dtype=dtype)
    for row, table in zip(case.rows, case.batch.pages, strict=True):
        for place in range(row.done):
            page, offset = int(table[place // PAGE]), place % PAGE
            keys[page, offset] = randn(rng, spec.kv_heads, spec.head_dim)
            values[page, offset] = randn(rng, spec.kv_heads, spec.head_dim)
    return KvView(keys, values)


def rope_table(ops: Ops, case: Case, spec: RopeSpec = ROPE) -> Rope:
    return ops.rope(case.batch.positions, spec)


RING_POOLS = ("inputs", "keys", "updates", "decays")


def clone_state(view: StateView) -> StateView:
    ring = view.delta_log and replace(
        view.delta_log, **{name: getattr(view.delta_log, name).clone() for name in RING_POOLS}
    )
    return StateView(view.recurrent.clone(), view.conv.clone(), ring)


# Comparison


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference over that of the expected values; NaN if anything is NaN."""
    actual, expected = actual.to(torch.float64), expected.to(torch.float64)
    return float((actual - expected).square().mean().sqrt() / expected.square().mean().sqrt().clamp(min=1e-30))


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Within a relative RMS, and without NaN."""
    assert actual.shape == expected.shape
    error = relative_rms(actual, expected)
    assert error <= tolerance, f"relative RMS {error:.2e} > {tolerance:.0e}"


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Equal bit for bit, NaN included."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    return actual.dtype == expected.dtype and torch.equal(actual.contiguous().view(whole),
                                                          expected.contiguous().view(whole))


def frozen(*records: Any) -> Callable[[], bool]:
    """Whether all tensors in these records still have the bits that they have now."""
    values = [getattr(record, name) for record in records for name in record.__dataclass_fields__]
    parts = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
    tensors = [part for part in parts if isinstance(part, Tensor)]
    copies = [tensor.clone() for tensor in tensors]
    return lambda: all(same_bits(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True))


def written_slots(case: Case) -> dict[int, int]:
    """How many tokens every slot is about that a step has to write."""
    batch = case.batch
    ends = {int(slot): row.after for row, slot in zip(case.rows, batch.target, strict=True) if row.after > row.base}
    return ends | {int(slot): int(length) for slot, length in zip(batch.emit_slot, batch.emit_length, strict=True)}


def conv_places(length: int, width: int) -> list[int]:
    """Where the last `width` inputs of a sequence of `length` tokens lie."""
    return [position % width for position in range(max(0, length - width), length)]


def state_errors(case: Case, actual: StateView, expected: StateView, before: StateView) -> dict[str, float]:
    """Compare two backends' slots and ring units after one step.

    Asserts that nothing was written that must not be; returns the worst relative RMS of each kind of content.
    """
    errors, written = {"recurrent": 0.0, "conv": 0.0}, written_slots(case)
    for name in errors:
        pools = [getattr(view, name) for view in (actual, expected, before)]
        for slot, (new, wanted, old) in enumerate(zip(*pools, strict=True)):
            if slot not in written:
                assert same_bits(new, old), f"{name} of slot {slot} was written"
                continue
            if name == "conv":
                places = conv_places(written[slot], len(new))
                new, wanted = new[places], wanted[places]
            errors[name] = max(errors[name], _error(new, wanted, f"{name} of slot {slot}"))
    return errors | ring_errors(case, actual.delta_log, expected.delta_log, before.delta_log)


def ring_errors(case: Case, actual: DeltaLogView | None, expected: DeltaLogView | None,
                before: DeltaLogView | None) -> dict[str, float]:
    errors = dict.fromkeys(RING_POOLS, 0.0)
    appended = {int(unit): [(row.done + token) % RING for token in range(row.chunk)]
                for row, unit in zip(case.rows, case.batch.delta_log, strict=True) if row.append}
    for name in errors:
        pools = [getattr(view, name) for view in (actual, expected, before)]
        for unit, (new, wanted, old) in enumerate(zip(*pools, strict=True)):
            fresh = appended.get(unit, [])
            kept = [place for place in range(RING) if place not in fresh]
            assert same_bits(new[kept], old[kept]), f"{name} of unit {unit}: a kept entry was written"
            if fresh:
                errors[name] = max(errors[name], _error(new[fresh], wanted[fresh], f"{name} of unit {unit}"))
    return errors


def _error(new: Tensor, wanted: Tensor, what: str) -> float:
    error = relative_rms(new, wanted)
    assert error == error, f"{what} has NaN"
    return error


def kv_errors(case: Case, actual: KvView, expected: KvView, before: KvView) -> float:
    """Worst relative RMS of the stored K/V; asserts that nothing else was written."""
    stored = case.batch.store
    others = torch.ones(case.pages * PAGE, dtype=torch.bool).index_fill_(0, stored, False)
    worst = 0.0
    for name in ("keys", "values"):
        new, wanted, old = (getattr(view, name).flatten(0, 1) for view in (actual, expected, before))
        assert same_bits(new[others], old[others]), f"{name}: an entry of no token was written"
        worst = max(worst, relative_rms(new[stored], wanted[stored]))
    return worst
