"""Memory that moves between states and pages: where units lie, who has them, and that no answer changes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis.stateful import initialize, run_state_machine_as_test
from plain_engine import PlainEngine, serve
from support import drain, embedded_runtime, every, examples, greedy, numbers, odd_runtime, units_apart
from test_cache_machine import CacheMachine, Naive, hashes, leased, read_kv, read_state
from test_prefix_tree import ReuseMachine

from deltic.cache.frames import FixedUnits, FrameLayout, SharedUnits
from deltic.cache.handles import PageList
from deltic.cache.manager import HybridCache
from deltic.cache.memory_plan import MemoryNeeds, enough, split_memory
from deltic.cache.operations import MovePages, PoolSizes
from deltic.cache.tensors import (
    CachePools,
    PoolOptions,
    allocate,
    delta_log_bytes,
    frame_layout,
    page_bytes,
    slot_bytes,
)
from deltic.config import PRESETS, EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import load
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.errors import ConfigError
from deltic.ops.kv import FP8, INT4
from deltic.ops.torch import OPS as TORCH
from deltic.params import PAGE
from deltic.runner.input_batch import PageTable
from deltic.runner.model_runner import ModelRunner

LAYOUTS = (FrameLayout(300, 3, 30, 5), FrameLayout(1000, 1, 90, 3), FrameLayout(512, 8, 16, 4, 10),
           FrameLayout(700, 2, 33, 2))
"""Of each, frames are longer than the pages in them; pages of the last one begin at no fixed distance."""
EXTRAS = PoolOptions()


# Where units lie


def spans(pools: CachePools) -> tuple[list[set[int]], list[set[int]]]:
    """The addresses of 4 bytes each that the slots and the pages of every frame have."""
    sizes, layout = pools.sizes, pools.layout
    assert layout
    frames = sizes.pages // layout.pages
    pages = [[parts(pools.page_tensors, layout.first_page(frame) + index) for index in range(layout.pages)]
             for frame in range(frames)]
    for each in pages:
        assert len(set().union(*each)) == sum(map(len, each)), "pages overlap"
    return ([parts((pools.recurrent,), frame * layout.slot_step) for frame in range(sizes.slots)],
            [set().union(*each) for each in pages])


def parts(tensors: Sequence[torch.Tensor], unit: int) -> set[int]:
    found = list[int]()
    for tensor in tensors:
        for layer in tensor:
            assert layer.is_contiguous() and not layer[unit].data_ptr() % 4
            found += range(layer[unit].data_ptr() // 4, (layer[unit].data_ptr() + layer[unit].nbytes) // 4)
    assert len(found) == len({*found}), "layers of a unit overlap"
    return {*found}


def shared_pools(runtime: ModelRunner, frames: int, slots: int | None = None, poison: int = 0xff) -> CachePools:
    """Pools whose memory is full of NaN."""
    like = runtime.pools
    extras = PoolOptions(0 if like.delta_logs is None else 8, runtime.mtp is not None, like.tiled, like.keys.dtype,
                         like.recurrent.dtype)
    layout = frame_layout(runtime.config, like.conv.dtype, extras)
    assert layout
    pools = allocate(runtime.config, frames * layout.pages, slots or frames, like.conv.dtype, runtime.decoder.ops,
                     str(like.device), replace(extras, layout=layout))
    for tensor in (*pools.page_tensors, *pools.slot_tensors, *(pools.delta_logs or ())):
        tensor.fill_(poison if tensor.dtype == torch.uint8 else float("nan"))
    return pools


def test_units_of_different_frames_share_no_byte() -> None:
    pools = shared_pools(embedded_runtime(), 5, 4)
    slots, pages = spans(pools)
    assert len(slots) == 4 and len(pages) == 5
    whole = [of_pages | (slots[frame] if frame < 4 else set()) for frame, of_pages in enumerate(pages)]
    assert sum(map(len, whole)) == len(set().union(*whole))
    assert all(len(slot & of_pages) >= 0.875 * len(slot) for slot, of_pages in zip(slots, pages, strict=False))
    first, last = min(map(min, whole)), max(map(max, whole))
    assert pools.layout and 4 * (last + 1 - first) <= 5 * pools.layout.size
    rest = [parts((pools.conv,), slot) for slot in range(0, 4 * pools.layout.slot_step, pools.layout.slot_step)]
    assert sum(map(len, rest)) == len(set().union(*rest)) and not set().union(*rest) & set().union(*whole)


@given(st.integers(1, 9999), st.integers(1, 40), st.integers(1, 400), st.integers(1, 40), st.integers(1, 60))
def test_pages_lie_within_their_frame(state: int, layers: int, step: int, parts: int, frames: int) -> None:
    """Also if a frame's length is no multiple of a page's."""
    size = state * layers
    pages = (size - (step - 1 if size % step else 0)) // (parts * step)
    if pages < 1:
        return
    layout = FrameLayout(size, pages, step, layers)
    for frame in range(frames):
        first = layout.first_page(frame)
        assert frame * size <= first * step and (first + parts * pages) * step <= (frame + 1) * size
        assert {*map(layout.frame_of, range(first, first + pages))} == {frame}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_published_models_lose_a_fiftieth_of_a_frame_to_pages(name: str) -> None:
    config = PRESETS[name]
    for head in (False, True):
        for kv in (None, FP8):
            for state in (torch.float32, torch.bfloat16):
                layout = frame_layout(config, torch.bfloat16, PoolOptions(0, head, kv=kv, state=state))
                if not config.linear_layers:
                    assert layout is None
                    continue
                assert layout and layout.pages * page_bytes(config, kv or torch.bfloat16, head) > 0.98 * layout.size
                assert layout.unit < 1.06 * slot_bytes(config, torch.bfloat16, head, state)
        assert frame_layout(config, torch.bfloat16, PoolOptions(0, head, kv=INT4)) is None, "values are smaller"


# Who has them


class Contents:
    """Pools that forget what shares memory with what is written; None where nothing is known."""

    def __init__(self, units: SharedUnits) -> None:
        self.units, self.pages, self.slots = units, dict[int, object](), dict[int, object]()

    def write_page(self, page: int, value: object) -> None:
        self.pages[page] = value
        self.slots.pop(self.units.layout.frame_of(page) * self.units.layout.slot_step, None)

    def write_slot(self, slot: int, value: object) -> None:
        self.slots[slot] = value
        frame = slot // self.units.layout.slot_step
        self.pages = {page: held for page, held in self.pages.items() if self.units.layout.frame_of(page) != frame}

    def move(self, moved: dict[int, int]) -> None:
        for source, target in moved.items():
            self.write_page(target, self.pages[source])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_unit_is_lost_or_has_two_roles(layout: FrameLayout) -> None:
    """Random programs; whatever is written stays until it is released, wherever it moves."""
    found = [program(layout, seed) for seed in range(6)]
    assert all(refused for _, refused in found) and (sum(moves for moves, _ in found) > 5 or layout.pages == 1)


def program(layout: FrameLayout, seed: int) -> tuple[int, int]:
    """How often pages moved, and how many slots were refused."""
    draw = random.Random(seed)
    units = SharedUnits(layout, draw.randint(2, 9), draw.randint(1, 9))
    contents, pages, slots = Contents(units), list[int](), list[int]()
    known, fresh, moves, refused = dict[int, object](), iter(range(1 << 30)), 0, 0
    for _ in range(1500):
        room = (units.frames - len(slots)) * layout.pages - len({*pages})
        assert units.pages.free == units.free_pages() == room
        assert units.slots.free == min(units.slots.size, units.frames - -(-len({*pages}) // layout.pages)) - len(slots)
        action = draw.random()
        if action < 0.25:
            count = draw.choice((1, 1, 2, 5, 20))
            taken = units.pages.take(count)
            assert (taken is not None) == (count <= room)
            for page in taken or ():
                known[page] = next(fresh)
                contents.write_page(page, known[page])
            pages += taken or ()
        elif action < 0.3 and pages:
            shared = draw.choices(pages, k=draw.randint(1, 3))
            units.pages.share(shared)
            pages += shared
        elif action < 0.6 and pages:
            for _ in range(min(draw.randint(1, 12), len(pages))):
                units.pages.release([pages.pop(draw.randrange(len(pages)))])
        elif action < 0.8:
            fits = room >= layout.pages and len(slots) < units.slots.size
            assert (units.free_pages(1) >= 0) == fits == (units.slots.free > 0)
            refused += not fits
            if fits:
                slot, moved = units.take_slot()
                contents.move(moved or {})
                moves += bool(moved)
                pages = [(moved or {}).get(page, page) for page in pages]
                known = {(moved or {}).get(page, page): value for page, value in known.items()}
                contents.write_slot(slot, known.setdefault(-1 - slot, next(fresh)))
                slots.append(slot)
        elif slots:
            slot = slots.pop(draw.randrange(len(slots)))
            units.slots.release([slot])
            del known[-1 - slot]
        units.pages.check(pages)
        units.slots.check(slots)
        known = {key: value for key, value in known.items() if key < 0 or key in pages}
        assert all(contents.pages[page] == known[page] for page in pages), "a page was overwritten"
        assert all(contents.slots[slot] == known[-1 - slot] for slot in slots), "a slot was overwritten"
    return moves, refused


def test_a_slot_that_was_pages_waits_for_what_is_written_to_them() -> None:
    units = SharedUnits(LAYOUTS[0], 2, 2)
    assert units.take_slot() == (0, None), "memory that never had pages"
    units.slots.release([0])
    taken = units.pages.take(4)
    assert taken == [10, 11, 12, 0], "the highest frame first"
    units.pages.release([10, 11])
    assert units.take_slot() == (0, {0: 10}), "the emptiest frame moves"
    units.slots.release([0])
    assert units.take_slot() == (0, None)


def test_checks_name_the_unit() -> None:
    units = SharedUnits(LAYOUTS[0], 3, 3)
    with pytest.raises(AssertionError, match="page 5 is released"):
        units.pages.release([5])
    with pytest.raises(AssertionError, match="page 5 is shared"):
        units.pages.share([5])
    with pytest.raises(AssertionError, match="slot 5 is released"):
        units.slots.release([5])
    taken = units.pages.take(2)
    assert taken
    with pytest.raises(AssertionError, match=f"{taken[0]}: 0 found, 1 known"):
        units.pages.check(taken[1:])
    units.pages.check(taken)
    units.unused.append(2)
    with pytest.raises(AssertionError, match="two roles"):
        units.pages.check(taken)


# The accounts, in the programs of the fixed pools


class RestlessUnits(SharedUnits):
    """Pages move for every slot."""

    def take_slot(self) -> tuple[int, dict[int, int] | None]:
        below = self.slots.size
        moved = self.pages.vacate(below) if any(frame < below for frame in self.pages._holes) else {}
        slot, more = super().take_slot()
        return slot, {**moved, **(more or {})}


RESTLESS = patch("deltic.cache.operations.SharedUnits", RestlessUnits)


def toy_shared(frames: int, n: int = 3) -> HybridCache:
    """The toy pools of `test_cache_machine` in frames: two attention layers and three recurrent ones, in float64."""
    page, parts = PAGE * 8, 4
    state = -(-(n * parts + 1) * page // 24)  # numbers of a layer
    layout = FrameLayout(24 * state, n, page, 3)
    block = torch.full((frames * layout.size // 8,), float("nan"), dtype=torch.float64)
    last, run = layout.first_page(frames - 1) + n, n * page // 8
    keys, values = (block.as_strided((2, last, PAGE, 1, 1), (run, PAGE, 1, 1, 1), part * 2 * run) for part in range(2))
    slots = (frames - 1) * 3 + 1
    recurrent = block.as_strided((3, slots, 1, 1, state), (state, state, state, state, 1))
    conv = torch.full((3, slots, 4, 1), float("nan"), dtype=torch.float64)
    return HybridCache(CachePools(keys, values, recurrent, conv, TORCH, layout=layout))


class SharedMachine(CacheMachine):
    """As its base, in frames."""

    restless = True

    @initialize(pages=st.sampled_from((6, 4, 3, 9, 2)), slots=st.sampled_from((3, 1, 5)))
    def start(self, pages: int, slots: int) -> None:
        with RESTLESS if self.restless else nullcontext():
            self.cache = toy_shared(pages, slots)

    @property
    def frames(self) -> tuple[int, int]:
        """Those that are not slots, and how many pages each holds."""
        layout = self.cache.sizes.layout
        assert layout
        return self.cache.slots.size - len(self.sequences) - len(self.kept), layout.pages

    def most_pages(self) -> int:
        left, pages = self.frames
        return left * pages

    @property
    def free_slots(self) -> int:
        left, pages = self.frames
        return left - -(-len({page for naive in self.holders() for page in naive.pages}) // pages)

    def fits(self, source: Naive, count: int = 1) -> bool:
        copies = count * bool(len(source.tokens) % PAGE)
        return self.free_slots >= count and self.free_pages - count * self.frames[1] >= copies


class SharedReuseMachine(ReuseMachine):
    """As its base, in frames."""

    restless = True

    @initialize(pages=st.sampled_from((6, 4, 9, 2, 13)), slots=st.sampled_from((3, 1, 5)))
    def start(self, pages: int, slots: int) -> None:
        with RESTLESS if self.restless else nullcontext():
            self.cache = toy_shared(pages, slots)

    def most_pages(self) -> int:
        layout = self.cache.sizes.layout
        assert layout
        return self.loose_slots() * layout.pages


@pytest.mark.covering
@pytest.mark.parametrize("kind", [SharedMachine, SharedReuseMachine])
@pytest.mark.parametrize("looks", [1, 9])
@pytest.mark.parametrize("restless", [True, False])
def test_the_cache_in_frames_equals_a_dictionary(kind: Any, looks: int, restless: bool) -> None:
    machine = type("Machine", (kind,), {"looks": looks, "restless": restless})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(120), stateful_step_count=40))


class Unmoved(HybridCache):
    """Whose pages get other numbers, but stay where they are."""

    def __init__(self, pools: Any) -> None:
        super().__init__(pools)
        self.operations.append = lambda operation: (  # type: ignore[method-assign]
            None if isinstance(operation, MovePages) else self.operations.queued.append(operation))


def test_the_machine_notices_pages_that_stay() -> None:
    class Broken(SharedMachine):
        @initialize(pages=st.sampled_from((6, 4, 3)), slots=st.sampled_from((3, 5)))
        def start(self, pages: int, slots: int) -> None:
            with RESTLESS:
                self.cache = Unmoved(toy_shared(pages, slots).pools)

    with pytest.raises(AssertionError):
        run_state_machine_as_test(Broken, settings=settings(max_examples=200, stateful_step_count=40,
                                                            report_multiple_bugs=False, phases=(Phase.generate,)))


@pytest.mark.parametrize("tokens", [5, PAGE])
@pytest.mark.parametrize("owner", ["sequence", "snapshot", "tree"])
def test_all_owners_follow_pages_that_move(owner: str, tokens: int) -> None:
    """A running sequence, a snapshot, and a prefix in the tree, with a full or a partial page."""
    cache, history = toy_shared(6), [*range(100, 100 + tokens)]
    first, gap, moving = leased(cache, [*range(20)]), leased(cache, [90] * 5), leased(cache, history)
    layout, snapshot = cache.sizes.layout, None
    assert layout and {layout.frame_of(page) for page in moving.pages} == {4}
    if owner == "snapshot":
        snapshot = cache.snapshot(moving)
    if owner != "sequence":
        cache.release(moving, keep=owner == "tree")
    cache.release(gap)
    while not any(isinstance(one, MovePages) and one.sources for one in cache.operations.queued):
        assert cache.admit()
    cache.check()
    assert read_kv(cache, first.pages, 20) == hashes([*range(20)])
    holder: Any = moving if owner == "sequence" else snapshot or cache.tree.at(history)
    pages = cache.tree.path(holder) if owner == "tree" else holder.pages
    assert {layout.frame_of(page) for page in pages} == {5} and holder.done == tokens
    assert read_kv(cache, pages, tokens) == hashes(history) and read_state(cache, holder.slot) == hashes(history)[-1]


def test_a_kept_prefix_goes_before_a_sequence_waits() -> None:
    """For slots and for pages; nothing goes for a refusal."""
    cache = toy_shared(4)
    cache.release(leased(cache, [*range(40)]), keep=True)
    assert len(cache.tree) == 1 and cache.pages.free == 6
    first = cache.admit([90], 3 * PAGE)
    assert first and len(cache.tree) == 1 and cache.reserve(first, 3 * PAGE + 1) == 3 * PAGE + 1 and not len(cache.tree)
    cache.release(first)
    cache.release(leased(cache, [*range(40)]), keep=True)
    assert cache.admit([90], 9 * PAGE + 1) is None and len(cache.tree) == 1, "ten pages and a slot never fit"
    assert cache.admit([90], 9 * PAGE) and not len(cache.tree)


@pytest.mark.parametrize("drops", [True, False])
def test_states_that_would_be_kept_go_before_a_sequence_is_preempted(drops: bool) -> None:
    """A prompt of two steps holds a slot for the state in its middle when an answer needs a page."""
    engine = PlainEngine(0, pages=15, slots=5, rings=0, batch=2, layout=LAYOUTS[0])
    if not drops:
        engine.cache.accounts.drop_checkpoint = lambda slots: False  # type: ignore[method-assign]
    engine.add("answer", tuple([1] * 15), 15)
    engine.step()
    engine.add("prompt", tuple([2] * 90), 1)
    while engine.live:
        engine.step()
    assert len(engine.answers) == 2 and (engine.scheduler.preemptions == 0) == drops


@pytest.mark.parametrize("layout", every(2, LAYOUTS))
def test_an_engine_without_torch_in_frames(layout: FrameLayout) -> None:
    """With drafts, forks, pauses, preemptions and eviction. A write to a slot erases the pages of its frame, and the
    reverse."""
    served = [serve(seed, 60, layout) for seed in range(6)]
    with RESTLESS:
        restless = [serve(seed, 60, layout) for seed in range(3)]
    assert sum(engine.pools.moved for engine in restless) > 300
    assert sum(engine.pools.moves for engine in served) > 50 and sum(engine.pools.moved for engine in served) > 30
    assert all(sum(getattr(engine, name) for engine in served) for name in ("forks", "drafted", "resumed"))
    assert any(engine.scheduler.preemptions for engine in served)


# Steps


def test_a_page_table_follows_pages_that_move() -> None:
    table, pages = PageTable(), PageList([4, 5, 6])
    row = PlannedRow((1,), 0, pages, 0, 1)
    assert table.of([row], 3)[0, :3].tolist() == [4, 5, 6]
    pages.append(7)
    pages.renumber({5: 50, 8: 9})
    assert pages == [4, 50, 6, 7] and pages.version == 1
    assert table.of([row], 4)[0, :4].tolist() == [4, 50, 6, 7]
    pages.renumber({5: 1})
    assert pages.version == 1, "none of them has moved"


def test_moves_are_data() -> None:
    plan = StepPlan((), (MovePages((1, 2), (3, 4)), MovePages((), ())))
    assert StepPlan.from_json(plan.to_json()) == plan


def test_pages_move_after_what_is_still_being_written() -> None:
    pools = shared_pools(embedded_runtime(), 10)
    layout = pools.layout
    assert layout
    old, new = ([layout.first_page(frame) + index for frame in frames for index in range(layout.pages)]
                for frames in (range(5), range(5, 10)))
    for tensor in pools.page_tensors:
        for page in (*old, *new):
            tensor[:, page] = page

    class Arrival:
        waited = False

        def wait(self) -> None:
            Arrival.waited = True
            assert float(pools.keys[0, new[0], 0, 0, 0]) == new[0], "moved before"

    pools.arriving[0].append(Arrival())
    pools.apply([MovePages(tuple(old), tuple(new))])
    assert Arrival.waited and not pools.arriving[0]
    for tensor in pools.page_tensors:
        assert (tensor[:, new] == torch.tensor(old, dtype=tensor.dtype)[:, None, None, None]).all()


def mixed_requests(count: int, seed: int, vocabulary: int) -> list[Any]:
    """Short and long prompts that share beginnings; some draw, some have several choices."""
    draw, opening = random.Random(seed), numbers(seed, 90, vocabulary)
    found = []
    for index in range(count):
        own = numbers(100 * seed + index, draw.choice((3, 25, 140)), vocabulary)
        prompt = (*opening[:draw.choice((0, 20, 90))], *own)
        found.append(greedy(prompt, draw.choice((1, 9, 40)), f"{index}", n=draw.choice((1, 1, 3)),
                            temperature=draw.choice((0.0, 1.0)), seed=index))
    return found


@pytest.mark.covering
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("frames", [16, 24])
@pytest.mark.parametrize("units", [nullcontext(), RESTLESS])
@pytest.mark.parametrize("ops", [(), ("torch",)])
def test_answers_are_the_same_bit_for_bit(frames: int, overlap: bool, units: Any, ops: tuple[str, ...]) -> None:
    """Against fixed pools with room for all. Memory begins as NaN, and moves between slots and pages."""
    runtime = with_ops(ops)
    asked = mixed_requests(9 if ops else 14, frames, runtime.config.vocab_size)  # torch's ops take much longer
    wanted = {request.id: drain_all(runtime, [request]) for request in asked}
    pools = shared_pools(runtime, frames)
    moves = list[MovePages]()
    apply = type(pools).apply

    class Watched(CachePools):
        def apply(self, operations: Any) -> None:
            moves.extend(one for one in operations if isinstance(one, MovePages))
            apply(self, operations)

    watched = Watched(*(getattr(pools, name) for name in CachePools.__dataclass_fields__))
    pages = frames * watched.sizes.layout.pages  # type: ignore[union-attr]
    with units:
        cache = HybridCache(watched)
    engine = Engine(replace(runtime, options=replace(runtime.options, token_budget=64, max_batch=8),
                            memory=replace(runtime.memory, max_batch=8, max_context=pages * PAGE // 2),
                            cache=cache), overlap=overlap)
    for request in asked:
        engine.add(request)
    answers = drain(engine, limit=5000)
    for (name, choice), answer in answers.items():
        assert answer.tokens == wanted[name][choice], name
    assert moves and any(move.sources for move in moves) and engine.runtime.cache.tree.evictions


@cache
def with_ops(ops: tuple[str, ...]) -> ModelRunner:
    if not ops:
        return embedded_runtime()
    with units_apart():
        return load(None, EngineConfig(dtype="float32", memory="16MiB", max_batch=8, max_context=512, threads=1,
                                       ops=ops, speculate="off"))


def drain_all(runtime: ModelRunner, requests: list[Any]) -> dict[int, list[int]]:
    from reuse_cases import runtime_of

    engine = Engine(runtime_of(runtime, reuse=False), overlap=False)
    for request in requests:
        engine.add(request)
    return {choice: answer.tokens for (_, choice), answer in drain(engine).items()}


# What it is for


def needs_of(runtime: ModelRunner, batch: int, **changes: Any) -> MemoryNeeds:
    config, dtype = runtime.config, torch.float32
    layout = frame_layout(config, dtype, EXTRAS)
    assert layout
    return replace(MemoryNeeds(page_bytes(config, dtype), slot_bytes(config, dtype), 32768, batch, layout=layout,
                               keeps=False), **changes)


def most_running(needs: MemoryNeeds, budget: int, tokens: int) -> int:
    """How many sequences of so many tokens the cache of a budget admits."""
    plan = split_memory(budget, needs)
    sizes = PoolSizes(plan.pages, plan.slots, 0, needs.page_bytes // PAGE, needs.slot_bytes, layout=plan.layout)
    units = sizes.units()
    count = 0
    while count < plan.max_batch and units.free_pages(1) >= -(-tokens // PAGE):
        units.take_slot()
        assert units.pages.take(-(-tokens // PAGE))
        count += 1
    return count


def test_more_short_sequences_and_a_longer_one_fit_into_the_same_memory() -> None:
    runtime, budget = embedded_runtime(), 8 << 20
    needs = needs_of(runtime, 64)
    fixed = replace(needs, layout=None)
    assert most_running(needs, budget, 40) >= 1.3 * most_running(fixed, budget, 40)
    parted, moving = split_memory(budget, fixed), split_memory(budget, needs)
    assert moving.max_context > 1.3 * parted.max_context
    length = (parted.max_context + moving.max_context) // 2
    refused, taken = (HybridCache(allocate(runtime.config, plan.pages, plan.slots, torch.float32, runtime.decoder.ops,
                                           "cpu", PoolOptions(layout=plan.layout))) for plan in (parted, moving))
    assert refused.admit([1], length) is None
    sequence = taken.admit([1], length)
    assert sequence and taken.reserve(sequence, length) == length
    taken.check()


def test_a_long_context_is_answered_where_short_ones_ran() -> None:
    """One engine: as many sequences as slots fit, then one text that takes the memory of nearly all of them."""
    runtime = embedded_runtime()
    pools = shared_pools(runtime, 12)
    layout = pools.layout
    assert layout
    pages = 11 * layout.pages
    memory = replace(runtime.memory, max_batch=9, max_context=pages * PAGE)
    engine = Engine(replace(runtime, options=replace(runtime.options, token_budget=64, max_batch=9), memory=memory,
                            cache=HybridCache(pools)))
    short = [greedy(numbers(index, 9, 1000), 5, f"{index}") for index in range(9)]
    long = greedy(numbers(99, pages * PAGE - 8, 1000), 8, "long")
    for request in short:
        engine.add(request)
    most = 0
    answers: Any = {}
    while engine.has_work:
        for event in engine.step():
            answers.setdefault(event.request, []).append(event.token)
        most = max(most, len(engine.scheduler.running))
    assert most == 9
    engine.add(long)
    found = drain(engine)["long", 0].tokens
    whole = Engine(replace(runtime, memory=replace(runtime.memory, max_context=pages * PAGE)))
    whole.add(long)
    assert drain(whole)["long", 0].tokens == found and len(found) == 8


@given(st.integers(1, 1 << 34), st.integers(1, 1 << 22), st.integers(1, 60), st.integers(1, 1 << 16),
       st.integers(1, 256), st.integers(0, 1 << 20), st.integers(0, 1 << 22), st.booleans(), st.booleans())
def test_a_plan_in_frames_never_exceeds_the_budget(budget: int, state: int, layers: int, context: int, batch: int,
                                                   row: int, log: int, keeps: bool, first: bool) -> None:
    layout = FrameLayout(state * layers, 1 + state % 90, 1, layers, layers * (state % 7))
    needs = MemoryNeeds(layout.size // layout.pages, layout.unit, context, batch, None, row, log, keeps, first,
                        layout=layout)
    try:
        plan = split_memory(budget, needs)
    except ConfigError:
        assert budget < needs.smallest_bytes
        return
    assert plan.layout is layout and plan.pages % layout.pages == 0 and plan.rows
    sizes = PoolSizes(plan.pages, plan.slots, layout=layout)
    taken = sizes.bytes + plan.delta_logs * log + plan.rows * row
    assert taken <= budget and 1 <= plan.slots <= plan.pages // layout.pages and plan.slots >= min(plan.max_batch, 2)
    assert 1 <= plan.max_context <= min(context, plan.pages * PAGE)
    units = sizes.units()
    assert isinstance(units, SharedUnits) and units.room(1) * PAGE >= plan.max_context
    clamped = (plan.max_batch < batch) + (plan.max_context < context)
    assert len(plan.warnings) == clamped
    if budget >= enough(needs, 0):
        assert not clamped


def test_fixed_units_have_room_of_their_own() -> None:
    units = FixedUnits(5, 2)
    assert units.room(2) == 5 and units.room(3) < 0 and units.free_pages(2) == 5 and units.free_pages(3) < 0
    assert units.take_slot() == (0, None) and units.free_pages(2) < 0


def test_a_model_of_an_odd_shape_has_fixed_pools() -> None:
    """Pages would leave a third of each frame unused."""
    runtime = odd_runtime()
    assert frame_layout(runtime.config, torch.float32, EXTRAS) is None and runtime.pools.layout is None
    assert delta_log_bytes(runtime.config, torch.float32) > 0
