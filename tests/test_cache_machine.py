"""The hybrid cache against a dictionary that copies everything (laws L1 to L4), and its pure parts by brute force.

A toy model stands in for the network: the recurrent state is a running hash of all tokens, and each token's K/V
depends on that hash. Whatever reads, keeps or returns to anything but the very history of one sequence shows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support import every, examples

from deltic.cache.block_pool import BlockPool
from deltic.cache.handles import CacheSnapshot, PageList, SequenceCache
from deltic.cache.manager import HybridCache
from deltic.cache.memory_plan import MemoryNeeds, enough, grid_spacing, split_memory
from deltic.cache.operations import CopyPage, CopySlot
from deltic.cache.tensors import CachePools
from deltic.errors import ConfigError, DelticError
from deltic.ops import backends
from deltic.params import PAGE

MODULUS = 2_147_483_647
NAN = float("nan")
PHASES = (Phase.generate,)


def toy_pools(pages: int, slots: int, kind: type[CachePools] = CachePools) -> CachePools:
    """Two attention and three recurrent layers of toy size, in float64 so that hashes are exact; all NaN."""
    def full(*shape: int) -> torch.Tensor:
        return torch.full(shape, NAN, dtype=torch.float64)

    return kind(keys=full(2, pages, PAGE, 1, 1), values=full(2, pages, PAGE, 1, 2),
                recurrent=full(3, slots, 1, 1, 2), conv=full(3, slots, 4, 1), ops=backends()["torch"])


def toy_cache(pages: int, slots: int, kind: type[HybridCache | CachePools] = HybridCache) -> HybridCache:
    """kind: of the accounts, or of the pools under them."""
    if issubclass(kind, HybridCache):
        return kind(toy_pools(pages, slots))
    return HybridCache(toy_pools(pages, slots, kind))


def advance(state: int, token: int) -> int:
    return (state * 31 + token + 7) % MODULUS


def hashes(tokens: list[int]) -> list[int]:
    """The toy state after each token."""
    found = [0]
    for token in tokens:
        found.append(advance(found[-1], token))
    return found[1:]


def read_state(cache: HybridCache, slot: int) -> int:
    """The hash in a slot, which every layer and part of it must agree on."""
    cache.operations.flush()
    values = torch.cat([cache.pools.recurrent[:, slot].flatten(), cache.pools.conv[:, slot].flatten()]).unique()
    assert len(values) == 1, f"slot {slot} is mixed from several states: {values.tolist()}"
    return int(values[0])


def read_kv(cache: HybridCache, pages: tuple[int, ...] | list[int], count: int) -> list[int]:
    """The first `count` K/V values of these pages, on which all layers must agree."""
    cache.operations.flush()
    index = [pages[i // PAGE] * PAGE + i % PAGE for i in range(count)]
    pools = [pool.flatten(3).flatten(1, 2)[:, index] for pool in cache.pools.page_tensors]
    values = torch.cat([pool.transpose(1, 2).flatten(0, 1) for pool in pools])
    assert bool((values == values[:1]).all()), "layers hold different K/V"
    return [int(value) for value in values[0].tolist()]


def write_kv(cache: HybridCache, pages: list[int], start: int, values: list[float]) -> None:
    cache.operations.flush()
    index = [pages[i // PAGE] * PAGE + i % PAGE for i in range(start, start + len(values))]
    for pool in cache.pools.page_tensors:
        flat = pool.flatten(1, 2)
        flat[:, index] = torch.tensor(values, dtype=pool.dtype)[None, :, None, None].expand_as(flat[:, index])


def write_state(cache: HybridCache, slot: int, value: float) -> None:
    cache.operations.flush()
    for pool in cache.pools.slot_tensors:
        pool[:, slot] = value


def step(cache: HybridCache, sequence: SequenceCache, tokens: list[int]) -> None:
    """What a step of the engine does: read the state, write K/V and state, commit."""
    state = read_state(cache, sequence.slot) if sequence.done else 0
    values = []
    for token in tokens:
        state = advance(state, token)
        values.append(state)
    write_kv(cache, sequence.pages, sequence.done, [float(value) for value in values])
    write_state(cache, sequence.slot, float(state))
    sequence.keys[sequence.done:] = tokens
    cache.commit(sequence, len(tokens))


@dataclass(eq=False)
class Naive:
    """A holder in the dictionary cache: its whole history, copied, and the identities of the pages it must own."""

    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


class CacheMachine(RuleBasedStateMachine):
    """Random programs over sequences and snapshots, in pools so small that most of them meet a shortage. looks: number
    of rules between two flushes of the queue, after which the pools are compared."""

    kind: type[HybridCache | CachePools] = HybridCache
    looks = 1

    def __init__(self) -> None:
        super().__init__()
        self.rules = 0
        self.sequences: dict[SequenceCache, Naive] = {}
        self.kept: dict[CacheSnapshot, Naive] = {}
        self.fresh = iter(range(1 << 30))

    @initialize(pages=st.sampled_from((6, 4, 3, 9, 2, 1)), slots=st.sampled_from((4, 3, 5, 2, 4, 1)))
    def start(self, pages: int, slots: int) -> None:
        self.cache = toy_cache(pages, slots, self.kind)

    # The dictionary's own account

    @property
    def free_pages(self) -> int:
        held = {page for naive in self.holders() for page in naive.pages}
        return self.most_pages() - len(held)

    def most_pages(self) -> int:
        """Pages that fit beside the slots."""
        return self.cache.pages.size

    @property
    def free_slots(self) -> int:
        return self.cache.slots.size - len(self.sequences) - len(self.kept)

    def holders(self) -> Iterator[Naive]:
        yield from self.sequences.values()
        yield from self.kept.values()

    def copied(self, source: Naive) -> Naive:
        """Share full pages, own a new partial one."""
        full, rest = divmod(len(source.tokens), PAGE)
        return Naive(list(source.tokens), source.pages[:full] + [next(self.fresh)] * bool(rest))

    def fits(self, source: Naive, count: int = 1) -> bool:
        return self.free_slots >= count and self.free_pages >= count * bool(len(source.tokens) % PAGE)

    def sequence(self, pick: int) -> tuple[SequenceCache, Naive]:
        return list(self.sequences.items())[pick % len(self.sequences)]

    def snapshot(self, pick: int) -> tuple[CacheSnapshot, Naive]:
        return list(self.kept.items())[pick % len(self.kept)]

    # Programs

    @rule()
    def admit(self) -> None:
        """L4: a sequence is granted exactly while a slot is free."""
        expected, sequence = self.free_slots > 0, self.cache.admit()
        assert (sequence is not None) == expected
        if sequence is not None:
            assert sequence.done == 0 and not sequence.pages
            self.sequences[sequence] = Naive()

    @precondition(lambda self: self.sequences)
    @rule(pick=st.integers(0, 9), count=st.integers(1, 45))
    def reserve(self, pick: int, count: int) -> None:
        """L4: room is granted for as much as the free pages hold, and no more."""
        sequence, naive = self.sequence(pick)
        wanted = max(0, -(-(len(naive.tokens) + count) // PAGE) - len(naive.pages))
        naive.pages += [next(self.fresh) for _ in range(min(wanted, self.free_pages))]
        granted = min(count, len(naive.pages) * PAGE - len(naive.tokens))
        assert self.cache.reserve(sequence, count) == granted

    @precondition(lambda self: self.sequences)
    @rule(pick=st.integers(0, 9), tokens=st.lists(st.integers(0, 999), min_size=1, max_size=45))
    def run(self, pick: int, tokens: list[int]) -> None:
        """L1: a step writes what was granted and moves the cursor over it, once."""
        sequence, naive = self.sequence(pick)
        room = sequence.covered - sequence.done
        if room:
            step(self.cache, sequence, tokens[:room])
            naive.tokens += tokens[:room]

    @precondition(lambda self: self.sequences)
    @rule(pick=st.integers(0, 9), tokens=st.lists(st.integers(0, 999), min_size=1, max_size=45))
    def grow(self, pick: int, tokens: list[int]) -> None:
        """L1, L4: a whole step as the engine does it."""
        self.reserve(pick, len(tokens))
        self.run(pick, tokens)

    @precondition(lambda self: self.sequences)
    @rule(pick=st.integers(0, 9))
    def scribble(self, pick: int) -> None:
        """L3: K/V written past the cursor and never committed leaves no trace."""
        sequence, _ = self.sequence(pick)
        write_kv(self.cache, sequence.pages, sequence.done, [NAN] * (sequence.covered - sequence.done))

    @precondition(lambda self: self.sequences)
    @rule(pick=st.integers(0, 9), count=st.integers(1, 3))
    def fork(self, pick: int, count: int) -> None:
        """L2: forks have the K/V and the state of one and the same position."""
        self.forked(*self.sequence(pick), count)

    @precondition(lambda self: self.kept)
    @rule(pick=st.integers(0, 9), count=st.integers(1, 3))
    def fork_snapshot(self, pick: int, count: int) -> None:
        """L2: so have forks of a snapshot."""
        self.forked(*self.snapshot(pick), count)

    def forked(self, source: SequenceCache | CacheSnapshot, naive: Naive, count: int) -> None:
        expected = self.fits(naive, count)
        forks = self.cache.accounts.forks(source, count)
        assert len(forks) == count * expected
        for sequence in forks:
            self.sequences[sequence] = self.copied(naive)

    @precondition(lambda self: self.sequences)
    @rule(pick=st.integers(0, 9))
    def keep(self, pick: int) -> None:
        """L2: a snapshot keeps pages and state of the sequence's position."""
        sequence, naive = self.sequence(pick)
        expected = self.fits(naive)
        kept = self.cache.snapshot(sequence)
        assert (kept is not None) == expected
        if kept is not None:
            self.kept[kept] = self.copied(naive)

    @precondition(lambda self: self.sequences and self.kept)
    @rule(pick=st.integers(0, 9), which=st.integers(0, 9))
    def restore(self, pick: int, which: int) -> None:
        """L2: recurrent state cannot be cut, only restored, together with its K/V."""
        self.restored(pick, *self.snapshot(which))

    @precondition(lambda self: self.sequences)
    @rule(pick=st.integers(0, 9))
    def restart(self, pick: int) -> None:
        """L2: restoring nothing is the start."""
        self.restored(pick, None, Naive())

    def restored(self, pick: int, kept: CacheSnapshot | None, naive: Naive) -> None:
        sequence, own = self.sequence(pick)
        others = {page for holder in self.holders() if holder is not own for page in holder.pages}
        room = self.most_pages() > len(others) or not len(naive.tokens) % PAGE
        pages = list(sequence.pages)
        assert self.cache.restore(sequence, kept) == room, "the sequence's own pages are room too"
        if room:
            self.sequences[sequence] = self.copied(naive)
        else:
            assert sequence.pages == pages

    @precondition(lambda self: self.sequences)
    @rule(pick=st.integers(0, 9))
    def release(self, pick: int) -> None:
        """L3: what is released leaves no trace in the accounts."""
        sequence, _ = self.sequence(pick)
        self.cache.release(sequence)
        del self.sequences[sequence]

    @precondition(lambda self: self.kept)
    @rule(pick=st.integers(0, 9))
    def drop(self, pick: int) -> None:
        kept, _ = self.snapshot(pick)
        self.cache.release(kept)
        del self.kept[kept]

    # What must hold after each of them

    @invariant()
    def accounts_add_up(self) -> None:
        self.cache.check()
        assert self.cache.pages.free == self.free_pages
        assert self.cache.slots.free == self.free_slots

    @invariant()
    def every_holder_has_its_own_history(self) -> None:
        """L1, L2, L3: cursor, tokens, state and every committed K/V value are those of the copied history."""
        self.rules += 1
        if not self.rules % self.looks:
            self.look()

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.look()

    def look(self) -> None:
        holders: dict[Any, Naive] = {**self.sequences, **self.kept}
        for holder, naive in holders.items():
            assert list(holder.tokens) == naive.tokens and holder.done == len(naive.tokens)
            assert len(holder.pages) == len(naive.pages)
            expected = hashes(naive.tokens)
            assert read_kv(self.cache, holder.pages, holder.done) == expected
            assert not expected or read_state(self.cache, holder.slot) == expected[-1]


class SmallPoolsMachine(CacheMachine):
    """In the smallest pools that forks fit in: programs find bugs in the order of operations several times sooner."""

    @initialize(pages=st.sampled_from((3, 2)), slots=st.sampled_from((4, 3)))
    def start(self, pages: int, slots: int) -> None:
        self.cache = toy_cache(pages, slots, self.kind)


def programs(count: int, kind: type[HybridCache | CachePools] = HybridCache, looks: int = 1,
             base: type[CacheMachine] = CacheMachine, **options: Any) -> None:
    machine = type("Machine", (base,), {"kind": kind, "looks": looks})
    run_state_machine_as_test(machine, settings=settings(max_examples=count, stateful_step_count=40, **options))


def test_cache_equals_a_dictionary_that_copies_everything() -> None:
    programs(examples(120))


def test_operations_may_wait_for_each_other() -> None:
    """Units change hands while what is to be done with them still waits: its order keeps it right."""
    programs(examples(80), looks=9)


@pytest.mark.slow
def test_cache_equals_a_dictionary_in_thousands_of_programs() -> None:
    programs(1500, derandomize=False)
    programs(1500, looks=9, derandomize=False)


class SharesPartialPages(HybridCache):
    def __init__(self, pools: Any) -> None:
        super().__init__(pools)
        self.accounts.share_pages = self._share  # type: ignore[method-assign]

    def _share(self, pages: Any, done: int, count: int = 1) -> list[PageList]:
        self.pages.share(pages[:-(-done // PAGE)], count)
        return [PageList(pages[:-(-done // PAGE)]) for _ in range(count)]


class ForgetsToCopyState(CachePools):
    def apply(self, operations: Any) -> None:
        for operation in operations:
            match operation:
                case CopySlot(source, target):
                    self.recurrent[:, target] = self.recurrent[:, source]
                case _:
                    super().apply([operation])


class CopiesOneLayer(CachePools):
    def apply(self, operations: Any) -> None:
        for operation in operations:
            match operation:
                case CopyPage(source, target):
                    for pool in self.page_tensors:
                        pool[0, target] = pool[0, source]
                case _:
                    super().apply([operation])


class GoesBackwards(CachePools):
    """What was queued last is done first."""

    def apply(self, operations: Any) -> None:
        super().apply(operations[::-1])


class CommitsTwice(HybridCache):
    def commit(self, sequence: SequenceCache, count: int, base: int | None = None) -> None:
        sequence.keys.append(0)
        super().commit(sequence, count + (sequence.covered - sequence.done > count), base)


class PromisesMore(HybridCache):
    def reserve(self, sequence: SequenceCache, tokens: int) -> int:
        super().reserve(sequence, tokens)
        return tokens


class LeaksPages(HybridCache):
    def release(self, owner: Any, keep: bool = False, lasting: bool = True) -> Any:
        if isinstance(owner, SequenceCache):
            return super().release(owner, keep, lasting)
        del self.accounts.snapshots[owner.slot]
        self.slots.release([owner.slot])


class CutsState(HybridCache):
    def restore(self, sequence: SequenceCache, snapshot: CacheSnapshot | None) -> bool:
        done = super().restore(sequence, snapshot)
        queued = self.operations.queued
        queued[:] = [operation for operation in queued if not isinstance(operation, CopySlot)]
        return done


@pytest.mark.parametrize("kind", every(3, [SharesPartialPages, ForgetsToCopyState, CopiesOneLayer, GoesBackwards,
                                           PromisesMore, LeaksPages, CommitsTwice, CutsState]))
def test_the_machine_notices_a_broken_cache(kind: type[HybridCache | CachePools]) -> None:
    looks, base = (9, SmallPoolsMachine) if kind is GoesBackwards else (1, CacheMachine)
    with pytest.raises((AssertionError, IndexError)):
        programs(2400, kind, looks, base, report_multiple_bugs=False, phases=PHASES)


# Directly


def leased(cache: HybridCache, tokens: list[int]) -> SequenceCache:
    sequence = cache.admit()
    assert sequence is not None and cache.reserve(sequence, len(tokens)) == len(tokens)
    step(cache, sequence, tokens)
    return sequence


@pytest.mark.parametrize("done", [0, 1, 15, 16, 17, 31, 32, 33])
def test_l2_a_fork_shares_full_pages_and_copies_the_partial_one(done: int) -> None:
    cache = toy_cache(8, 3)
    sequence = leased(cache, list(range(done)))
    fork = cache.fork(sequence)
    assert fork is not None and fork.slot != sequence.slot
    full = done // PAGE
    assert fork.pages[:full] == sequence.pages[:full]
    assert not set(fork.pages[full:]) & set(sequence.pages)
    assert len(fork.pages) == -(-done // PAGE)
    cache.check()


def test_l2_a_fork_does_not_take_pages_that_were_granted_but_not_written() -> None:
    cache = toy_cache(8, 3)
    sequence = leased(cache, list(range(20)))
    assert cache.reserve(sequence, 60) == 60
    fork = cache.fork(sequence)
    assert fork is not None and len(fork.pages) == 2 and cache.pages.free == 8 - 5 - 1


def test_l2_branches_grow_apart_without_touching_each_other() -> None:
    cache = toy_cache(8, 3)
    sequence = leased(cache, list(range(20)))
    fork = cache.fork(sequence)
    assert fork is not None and cache.reserve(fork, 9) == 9 and cache.reserve(sequence, 9) == 9
    step(cache, fork, [500] * 9)
    step(cache, sequence, [600] * 9)
    for holder, tail in ((sequence, 600), (fork, 500)):
        expected = hashes([*range(20), *[tail] * 9])
        assert read_kv(cache, holder.pages, 29) == expected and read_state(cache, holder.slot) == expected[-1]


@pytest.mark.parametrize("action", ["fork", "snapshot"])
@pytest.mark.parametrize(("pages", "slots"), [(2, 5), (5, 1)])
def test_l4_shortage_returns_none_and_changes_nothing(action: str, pages: int, slots: int) -> None:
    cache = toy_cache(pages, slots)
    sequence = leased(cache, list(range(20)))
    before = (cache.pages.free, cache.slots.free, list(sequence.pages), sequence.slot)
    assert getattr(cache, action)(sequence) is None
    assert (cache.pages.free, cache.slots.free, sequence.pages, sequence.slot) == before
    cache.check()
    assert read_kv(cache, sequence.pages, 20) == hashes(list(range(20)))


def test_l4_a_snapshot_at_the_end_of_a_page_costs_no_page() -> None:
    cache = toy_cache(2, 2)
    sequence = leased(cache, list(range(32)))
    assert cache.pages.free == 0 and cache.snapshot(sequence) is not None
    cache.check()


def test_l4_reserve_grants_what_there_is() -> None:
    cache = toy_cache(3, 2)
    first, second = cache.admit(), cache.admit()
    assert first and second
    assert cache.reserve(first, 20) == 20 and cache.reserve(second, 100) == 16 and cache.reserve(first, 33) == 32
    assert cache.reserve(second, 1) == 1 and cache.reserve(first, 5) == 5
    cache.check()


def test_l1_commit_past_the_granted_pages_is_refused() -> None:
    cache = toy_cache(3, 2)
    sequence = leased(cache, list(range(10)))
    with pytest.raises(AssertionError, match="past the granted pages"):
        sequence.keys += range(7)
        cache.commit(sequence, 7)


def test_l1_commit_of_unknown_tokens_refused() -> None:
    cache = toy_cache(3, 2)
    sequence = leased(cache, list(range(10)))
    for count in (1, -1):
        with pytest.raises(AssertionError, match="does not have"):
            cache.commit(sequence, count)


def test_l1_sequence_cache_shares_the_token_list() -> None:
    cache = toy_cache(3, 2)
    tokens = list(range(10))
    sequence = cache.admit(tokens)
    assert sequence is not None and cache.reserve(sequence, 12) == 12
    step(cache, sequence, tokens[:10])
    tokens += [10, 11]
    step(cache, sequence, tokens[10:])
    assert sequence.keys is tokens and sequence.tokens == tokens and sequence.done == 12


def test_l2_restore_as_often_as_wanted_and_to_the_start() -> None:
    cache = toy_cache(6, 2)
    sequence = leased(cache, list(range(20)))
    kept = cache.snapshot(sequence)
    assert kept is not None
    for tail in (700, 800):
        assert cache.reserve(sequence, 30) == 30
        step(cache, sequence, [tail] * 30)
        assert cache.restore(sequence, kept) and sequence.done == 20
        assert read_state(cache, sequence.slot) == hashes(list(range(20)))[-1]
    assert cache.restore(sequence, None) and (sequence.done, sequence.pages) == (0, [])
    cache.release(kept)
    cache.check()
    assert cache.pages.free == 6


def test_restore_reuses_pages_of_its_sequence() -> None:
    cache = toy_cache(3, 2)
    sequence = leased(cache, list(range(5)))
    kept = cache.snapshot(sequence)
    assert kept is not None and cache.reserve(sequence, 27) == 27
    step(cache, sequence, [1] * 27)
    assert cache.pages.free == 0
    assert cache.restore(sequence, kept), "the sequence's own two pages are more than enough"
    assert read_kv(cache, sequence.pages, 5) == hashes(list(range(5)))
    cache.check()


def test_l8_released_holder_cannot_be_used() -> None:
    cache = toy_cache(6, 4)
    sequence = leased(cache, list(range(5)))
    kept = cache.snapshot(sequence)
    assert kept is not None
    cache.release(kept)
    again = cache.snapshot(sequence)
    assert again is not None and again.slot == kept.slot
    for use in (lambda: cache.release(kept), lambda: cache.restore(sequence, kept), lambda: cache.fork(kept)):
        with pytest.raises((AssertionError, KeyError, DelticError)):
            use()
        cache.check()
    cache.release(sequence)
    other = cache.admit()
    assert other is not None and other.slot == sequence.slot
    with pytest.raises((AssertionError, KeyError)):
        cache.release(sequence)
    cache.check()


def test_check_notices_a_partial_page_with_two_owners() -> None:
    cache = toy_cache(6, 3)
    sequence = leased(cache, list(range(5)))
    other = cache.admit()
    assert other is not None
    cache.pages.share(sequence.pages)
    other.pages = list(sequence.pages)
    other.keys, other.done = sequence.tokens, sequence.done
    with pytest.raises(AssertionError, match="shared"):
        cache.check()


@pytest.mark.parametrize("wreck", [
    lambda cache, sequence: cache.pages.take(1),
    lambda cache, sequence: cache.slots.take(1),
    lambda cache, sequence: sequence.pages.pop(),
    lambda cache, sequence: setattr(sequence, "done", 99),
    lambda cache, sequence: sequence.keys.pop(),
])
def test_check_notices_wrong_accounts(wreck: Any) -> None:
    cache = toy_cache(6, 3)
    sequence = leased(cache, list(range(20)))
    cache.check()
    wreck(cache, sequence)
    with pytest.raises(AssertionError):
        cache.check()


# Ledger


def test_unused_units_cost_nothing() -> None:
    block_pool = BlockPool("page", 1 << 40)
    assert block_pool.take(200) == [*range(200)] and block_pool.free == (1 << 40) - 200
    block_pool.release([7, 3])
    assert block_pool.take(4) == [3, 7, 200, 201] and not block_pool.owned(202)
    block_pool.check(range(202))
    with pytest.raises(AssertionError, match="page 202 is released but has no owner"):
        block_pool.release([202])
    with pytest.raises(AssertionError, match="never taken"):
        block_pool.check(range(203))


@pytest.mark.parametrize("size", [1, 70, 3000])
def test_the_lowest_free_units_are_taken(size: int) -> None:
    """Against a set of them."""
    block_pool, draw, free, taken = BlockPool("page", size), random.Random(size), {*range(size)}, list[int]()
    for _ in range(400):
        count = draw.choice([1, 2, 64, 65, 500, size])
        if draw.random() < 0.5:
            found = block_pool.take(count)
            wanted = sorted(free)[:count] if count <= len(free) else None
            assert found == wanted
            taken += found or ()
            free -= {*(found or ())}
        else:
            draw.shuffle(taken)
            block_pool.release(taken[:count])
            free |= {*taken[:count]}
            del taken[:count]
        assert block_pool.free == len(free)
    block_pool.check(taken)


def test_block_pool_takes_lowest_units_or_none() -> None:
    block_pool = BlockPool("unit", 4)
    assert block_pool.take(3) == [0, 1, 2] and block_pool.take(2) is None and block_pool.free == 1
    block_pool.release([1])
    assert block_pool.take(2) == [1, 3] and block_pool.take(0) == [] and block_pool.take() is None


def test_block_pool_frees_a_unit_with_its_last_owner() -> None:
    block_pool = BlockPool("unit", 2)
    assert block_pool.take(1) == [0]
    block_pool.share([0, 0])
    block_pool.release([0, 0])
    assert block_pool.free == 1
    block_pool.check([0])
    block_pool.release([0])
    assert block_pool.free == 2
    block_pool.check([])


def test_block_pool_refuses_units_without_owner() -> None:
    block_pool = BlockPool("page", 2)
    with pytest.raises(AssertionError, match="page 1 is released"):
        block_pool.release([1])
    with pytest.raises(AssertionError, match="page 0 is shared"):
        block_pool.share([0])


def test_block_pool_check_names_the_unit() -> None:
    block_pool = BlockPool("page", 3)
    block_pool.take(2)
    with pytest.raises(AssertionError, match="1: 0 found, 1 known"):
        block_pool.check([0])
    with pytest.raises(AssertionError, match="0: 2 found, 1 known"):
        block_pool.check([0, 0, 1])


# Memory split


def splits() -> Iterator[tuple[int, MemoryNeeds]]:
    for page in (0, 1, 3, 64, 1000):
        for slot in (0, 1, 7, 500):
            for batch in (1, 2, 5, 40):
                for context in (1, 15, 16, 17, 100, 5000):
                    for limit in (None, 1, 40):
                        for budget in (1, 2, 3, 9, 50, 333, 1001, 2064, 9999, 40000, 10**6):
                            yield budget, MemoryNeeds(page, slot, context, batch, limit, (budget + context) % 3 * 20,
                                                      slot // 3 * (budget % 4 == 1), budget % 5 > 0,
                                                      budget % 2 > 0)


def test_l4_memory_split_never_exceeds_the_budget_and_uses_it() -> None:
    held = refused = 0
    for budget, needs in splits():
        smallest = needs.page_bytes + needs.log_bytes + 2 * needs.slot_bytes + needs.row_bytes
        if budget < smallest:
            with pytest.raises(ConfigError, match="memory") as caught:
                split_memory(budget, needs)
            assert caught.value.option == "memory"
            refused += 1
            continue
        plan, asked = split_memory(budget, needs), needs.max_context or needs.model_context
        held += 1
        assert plan.rows is not None and 1 <= plan.rows <= plan.slots
        assert plan.rows * needs.row_bytes <= needs.row_bytes + budget // 16
        assert plan.delta_logs == (plan.max_batch if needs.log_bytes else 0)
        budget -= plan.rows * needs.row_bytes + plan.delta_logs * needs.log_bytes
        assert plan.pages * needs.page_bytes + plan.slots * needs.slot_bytes <= budget
        assert plan.pages >= 1 and 1 <= plan.max_batch <= needs.max_batch
        kept = plan.slots - plan.max_batch - 1 - plan.max_batch // 16
        assert kept >= 0 and (needs.keeps or not kept)
        assert 1 <= plan.max_context <= asked and plan.max_context <= plan.pages * PAGE
        clamped = (plan.max_batch < needs.max_batch) + (plan.max_context < asked)
        assert sum("`memory`" in warning for warning in plan.warnings) == clamped
        assert len(plan.warnings) == clamped + (asked > needs.model_context)
        assert not kept or not needs.slot_bytes or plan.max_context == asked, "kept at the cost of the context"
        spare = budget - plan.pages * needs.page_bytes - plan.slots * needs.slot_bytes
        most = plan.max_batch * -(-plan.max_context // PAGE)
        if needs.page_bytes:
            most += kept * (grid_spacing(needs.slot_bytes * PAGE / needs.page_bytes) // PAGE)
        assert plan.pages == most or spare < needs.page_bytes
    assert held > 1000 and refused > 1000


def test_l4_sequences_come_before_checkpoints_and_behind_a_context_that_was_asked_for() -> None:
    """In units: a page takes 1, a slot 100, a delta log 30."""
    needs = MemoryNeeds(1, 100, 1600, 64, log_bytes=30)
    roomy = split_memory(20_000, needs)
    assert roomy.max_batch == 64 and roomy.max_context == 1600 and not roomy.warnings
    assert roomy.slots > 64 + 5 and roomy.delta_logs == 64
    bare = split_memory(20_000, replace(needs, keeps=False))
    assert bare.slots == 64 + 5 and bare.pages == 64 * 100
    # less than half is left for K/V, but that is a whole context and a few pages for each of the others
    tight = split_memory(11_200, needs)
    assert tight.max_batch == 64 and tight.slots <= 64 + 6 and tight.pages >= 100 + 63 * 32
    long = replace(needs, model_context=160_000)
    halved = split_memory(11_200, long)
    assert halved.max_batch == 40 and halved.max_context < 160_000
    long = replace(long, context_first=True)
    asked = split_memory(11_200, replace(long, max_context=150_000))
    assert asked.max_context == 150_000 and asked.max_batch == 13, "one that is asked for comes first"
    whole = split_memory(11_200, replace(long, max_context=320_000))
    assert whole.max_batch == 10 and 140_000 < whole.max_context < 160_000, "an eighth is for sequences"


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 24), st.integers(0, 1 << 26), st.integers(1, 1 << 18),
       st.integers(1, 256), st.integers(0, 1 << 20))
def test_l4_memory_split_holds_one_whole_sequence(budget: int, page: int, slot: int, context: int, batch: int,
                                                  row: int) -> None:
    try:
        plan = split_memory(budget, MemoryNeeds(page, slot, context, batch, row_bytes=row))
    except ConfigError:
        assert budget < page + 2 * slot + row
        return
    assert plan.rows and plan.pages * page + plan.slots * slot + plan.rows * row <= budget
    assert plan.pages * PAGE >= plan.max_context >= 1


@given(st.integers(1, 1 << 24), st.integers(0, 1 << 26), st.integers(1, 1 << 18), st.integers(1, 256),
       st.integers(0, 1 << 20), st.integers(0, 1 << 16), st.booleans())
def test_memory_plan_takes_no_more_than_needed(page: int, slot: int, context: int, batch: int, row: int, tokens: int,
                                               logs: bool) -> None:
    """A whole context beside so many tokens, for as many sequences as are asked for."""
    needs = MemoryNeeds(page, slot, context, batch, row_bytes=row, log_bytes=slot // 3 * logs)
    plan = split_memory(enough(needs, tokens), needs)
    assert plan.max_batch == batch and plan.max_context == context and not plan.warnings
    whole = -(-context // PAGE)
    assert plan.pages >= min(whole + -(-tokens // PAGE), batch * whole)


def test_clamped_sizes_reported_with_cause() -> None:
    plan = split_memory(1000, MemoryNeeds(page_bytes=100, slot_bytes=100, model_context=4096, max_batch=16))
    assert (plan.max_batch, plan.slots, plan.pages, plan.max_context) == (4, 5, 5, 80)
    assert "max_batch is 4 instead of 16" in plan.warnings[0]
    assert "max_context is 80 instead of 4096" in plan.warnings[1]
