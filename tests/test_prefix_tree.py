"""The prefix tree against a dictionary of prefixes, and the hybrid cache over it with the toy model (L1 to L4)."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support import every, examples
from test_cache_machine import PHASES, GoesBackwards, hashes, read_kv, read_state, step, toy_cache, write_state

from deltic.cache.block_pool import BlockPool
from deltic.cache.handles import CacheSnapshot, SequenceCache
from deltic.cache.manager import HybridCache
from deltic.cache.operations import CopySlot
from deltic.cache.radix_tree import Checkpoint, PrefixTree
from deltic.cache.tensors import CachePools
from deltic.params import PAGE, common_length

Prefix = tuple[int, ...]
PAGES, SLOTS = 400, 100

# Few tokens and few distinct pages, so that prefixes collide and part in the middle of pages
BLOCKS = [(0,) * PAGE, (1,) * PAGE, (*[0] * (PAGE - 1), 1)]
TAILS = st.lists(st.integers(0, 1), max_size=PAGE - 1).map(tuple)
PROMPTS = st.builds(lambda blocks, tail: (*sum(blocks, ()), *tail),
                    st.lists(st.sampled_from(BLOCKS), max_size=4), TAILS)
KEPT = PROMPTS.filter(bool)


@dataclass
class Kept:
    """What the dictionary knows of a checkpoint."""

    slot: int
    page: int | None
    logits: Any = None
    locks: int = 0


class TreeMachine(RuleBasedStateMachine):
    """Random programs over a tree and two dictionaries: prefix -> checkpoint, full pages' tokens -> page."""

    kind: type[PrefixTree] = PrefixTree

    def __init__(self) -> None:
        super().__init__()
        self.pages, self.slots = BlockPool("page", PAGES), BlockPool("slot", SLOTS)
        self.tree = self.kind(self.pages, self.slots, 30.0)
        self.checkpoints: dict[Prefix, Kept] = {}
        self.nodes: dict[Prefix, int] = {}
        self.locked: list[tuple[Prefix, Checkpoint]] = []
        self.near: list[tuple[Prefix, Any]] = []

    def needed(self) -> set[Prefix]:
        """Every full page below some checkpoint."""
        return {prefix[:end] for prefix in self.checkpoints for end in range(PAGE, len(prefix) + 1, PAGE)}

    @rule(prompt=KEPT, logits=st.sampled_from((None, "logits")), near=st.booleans())
    def insert(self, prompt: Prefix, logits: Any, near: bool) -> None:
        taken = self.slots.take(), self.pages.take(-(-len(prompt) // PAGE))
        assert taken[0] and taken[1]
        (slot,), pages = taken
        full, rest = divmod(len(prompt), PAGE)
        page = pages[full] if rest else None
        free = self.slots.free, self.pages.free
        # on the way of others that this one goes, too, or beyond its end; some are gone
        nodes = [node for other, node in self.near
                 if near and common_length(other, prompt) >= min(PAGE * node.depth, len(prompt))]
        kept = self.tree.insert(prompt, pages, slot, page, logits, nodes[-1] if nodes else None)
        passed = [prefix for prefix in self.checkpoints if len(prefix) < len(prompt) and prompt[:len(prefix)] == prefix]
        assert prompt in self.checkpoints or not passed or (kept.parent and kept.parent.done == max(map(len, passed)))
        self.near.append((prompt, kept.node))
        if prompt in self.checkpoints:
            known = self.checkpoints[prompt]
            known.logits = known.logits or logits
            assert (self.slots.free, self.pages.free) == (free[0] + 1, free[1] + bool(rest)), "a duplicate is kept"
        else:
            self.checkpoints[prompt] = Kept(slot, page, logits)
        for index in range(full):
            self.nodes.setdefault(prompt[:(index + 1) * PAGE], pages[index])
        self.pages.release(pages[:full])

    def deepest(self, prompt: Prefix) -> Prefix | None:
        fits = [prefix for prefix, kept in self.checkpoints.items()
                if prompt[:len(prefix)] == prefix and (len(prefix) < len(prompt) or kept.logits)]
        return max(fits, key=len, default=None)

    @rule(prompt=PROMPTS)
    def match(self, prompt: Prefix) -> None:
        """L2: the deepest kept position, with exactly the pages and the slot of its own tokens."""
        found, expected = self.tree.match(prompt), self.deepest(prompt)
        shared = 0
        while shared + PAGE <= len(prompt) and prompt[:shared + PAGE] in self.nodes:
            shared += PAGE
        assert found.shared == shared
        assert (found.checkpoint is None) == (expected is None)
        if found.checkpoint and expected is not None:
            self.is_checkpoint(found.checkpoint, expected)

    def is_checkpoint(self, checkpoint: Checkpoint, prefix: Prefix) -> None:
        kept = self.checkpoints[prefix]
        assert (checkpoint.done, checkpoint.logits) == (len(prefix), kept.logits)
        assert (checkpoint.slot, checkpoint.page) == (kept.slot, kept.page)
        assert tuple(tokens_of(checkpoint)) == prefix
        full = [self.nodes[prefix[:end]] for end in range(PAGE, len(prefix) + 1, PAGE)]
        assert self.tree.path(checkpoint) == full + ([] if kept.page is None else [kept.page])

    @precondition(lambda self: self.checkpoints)
    @rule(pick=st.integers(0, 99), longer=TAILS)
    def match_a_longer_prompt(self, pick: int, longer: Prefix) -> None:
        self.match((*list(self.checkpoints)[pick % len(self.checkpoints)], *longer))

    @precondition(lambda self: self.checkpoints)
    @rule(pick=st.integers(0, 99), lock=st.booleans())
    def use(self, pick: int, lock: bool) -> None:
        prefix = list(self.checkpoints)[pick % len(self.checkpoints)]
        checkpoint = self.tree.match((*prefix, 7)).checkpoint
        assert checkpoint
        self.is_checkpoint(checkpoint, prefix)
        self.tree.use(checkpoint)
        if lock:
            checkpoint.locks += 1
            self.checkpoints[prefix].locks += 1
            self.locked.append((prefix, checkpoint))

    @precondition(lambda self: self.locked)
    @rule(pick=st.integers(0, 99))
    def unlock(self, pick: int) -> None:
        prefix, checkpoint = self.locked.pop(pick % len(self.locked))
        checkpoint.locks -= 1
        self.checkpoints[prefix].locks -= 1

    @rule()
    def evict(self) -> None:
        """Exactly one checkpoint goes, never a locked one, and with it the pages that only it needed."""
        loose = {kept.slot for kept in self.checkpoints.values() if not kept.locks}
        assert self.tree.evict() == bool(loose)
        if not loose:
            return
        gone, = {kept.slot for kept in self.checkpoints.values()} - set(self.tree.owned_slots())
        assert gone in loose
        del self.checkpoints[next(prefix for prefix, kept in self.checkpoints.items() if kept.slot == gone)]
        self.nodes = {prefix: page for prefix, page in self.nodes.items() if prefix in self.needed()}

    @invariant()
    def accounts_add_up(self) -> None:
        self.tree.check()
        owned = sorted(self.tree.owned_pages())
        tails = [kept.page for kept in self.checkpoints.values() if kept.page is not None]
        assert owned == sorted([*self.nodes.values(), *tails]), "a page is not owned once per node and tail"
        assert set(self.nodes) == self.needed()
        assert sorted(self.tree.owned_slots()) == sorted(kept.slot for kept in self.checkpoints.values())
        self.pages.check(owned)
        self.slots.check(self.tree.owned_slots())
        assert len(self.tree) == len(self.checkpoints)

    def teardown(self) -> None:
        """L3: everything is free after all is evicted."""
        while self.locked:
            self.unlock(0)
        while self.tree.evict():
            pass
        assert (self.pages.free, self.slots.free, len(self.tree)) == (PAGES, SLOTS, 0)


def run_programs(machine: type[RuleBasedStateMachine], count: int, steps: int = 30, **options: Any) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=count, stateful_step_count=steps, deadline=None,
                                                         **options))


def test_l2_tree_equals_a_dictionary_of_prefixes() -> None:
    run_programs(TreeMachine, examples(120))


@pytest.mark.slow
def test_l2_tree_equals_a_dictionary_in_thousands_of_programs() -> None:
    run_programs(TreeMachine, 2500, 50, derandomize=False)


class MatchesAnyEnd(PrefixTree):
    """An exact end without logits is handed out."""

    def _deepest(self, node: Any, keys: bytes, length: int, end: bool) -> Checkpoint | None:
        return super()._deepest(node, keys, length + 1, end)


class SharesAgain(PrefixTree):
    def _extend(self, node: Any, keys: bytes, pages: Sequence[int]) -> Any:
        self._pages.share(pages)
        return super()._extend(node, keys, pages)


class KeepsStranded(PrefixTree):
    def _remove(self, checkpoint: Checkpoint) -> None:
        del self._checkpoints[checkpoint]
        del checkpoint.node.checkpoints[checkpoint.tail]
        self._slots.release([checkpoint.slot])
        self._pages.release([] if checkpoint.page is None else [checkpoint.page])


class NeverJoins(PrefixTree):
    def _join(self, node: Any) -> None:
        pass


class SplitsLate(PrefixTree):
    def _split(self, node: Any, depth: int) -> Any:
        return super()._split(node, min(depth + 1, node.depth))


class EvictsLocked(PrefixTree):
    def evict(self) -> bool:
        if self._checkpoints:
            self._remove(min(self._checkpoints, key=lambda checkpoint: checkpoint.slot))
            return True
        return False


@pytest.mark.parametrize("kind", [MatchesAnyEnd, SharesAgain, KeepsStranded, NeverJoins, SplitsLate,
                                  EvictsLocked])
def test_the_machine_notices_a_broken_tree(kind: type[PrefixTree]) -> None:
    with pytest.raises((AssertionError, ValueError, KeyError)):
        run_programs(type("Machine", (TreeMachine,), {"kind": kind}), 300, report_multiple_bugs=False, phases=PHASES)


# Directly


def filled(prompts: list[Prefix], pages: int = PAGES, slot_tokens: float = 30.0) -> PrefixTree:
    page_ledger, slot_ledger = BlockPool("page", pages), BlockPool("slot", len(prompts))
    tree = PrefixTree(page_ledger, slot_ledger, slot_tokens)
    for prompt in prompts:
        slot, own = slot_ledger.take(), page_ledger.take(-(-len(prompt) // PAGE))
        assert slot and own is not None
        full, rest = divmod(len(prompt), PAGE)
        tree.insert(prompt, own, slot[0], own[full] if rest else None)
        page_ledger.release(own[:full])
    return tree


def page_of(*tokens: int) -> Prefix:
    return (tokens * PAGE)[:PAGE]


@pytest.mark.parametrize("length", range(71))
def test_match_at_every_length_around_page_borders(length: int) -> None:
    """Kept after 1, 15, 16, 17, 48 and 64 tokens of one prompt: each length resumes at the deepest one below it."""
    prompt, kept = tuple(range(100)), (1, 15, 16, 17, 48, 64)
    match = filled([prompt[:end] for end in kept]).match(prompt[:length])
    assert (match.checkpoint.done if match.checkpoint else 0) == max((end for end in kept if end < length), default=0)
    assert match.shared == length // PAGE * PAGE


def test_an_exact_end_serves_only_with_its_logits() -> None:
    tree = filled([tuple(range(20))])
    assert tree.match(range(20)).checkpoint is None
    slot, page = tree._slots, tree._pages.take()
    slot.size += 1
    taken = slot.take()
    assert taken and page
    tree.insert(range(20), tree.path(next(iter(tree._checkpoints))), taken[0], page[0], "logits")
    checkpoint = tree.match(range(20)).checkpoint
    assert checkpoint and checkpoint.logits == "logits" and len(tree) == 1


def test_useful_checkpoints_stay_longer() -> None:
    tree = filled([page_of(1), page_of(2), page_of(3)])
    while tree.evictions < 20:
        checkpoint = tree.match((*page_of(1), 9)).checkpoint
        assert checkpoint, "the prefix in use was given up"
        tree.use(checkpoint)
        if len(tree) > 1:
            assert tree.evict()
        else:
            break
    assert tree.match((*page_of(1), 9)).checkpoint


def test_deep_positions_are_worth_more_than_shallow_ones() -> None:
    tree = filled([tuple(range(10)), tuple(range(100, 600))])
    assert tree.evict() and tree.match((*range(100, 600), 1)).checkpoint


@pytest.mark.parametrize("prompts", [[(1, 2, 3, 4, 5), (1, 2, 3)], [(1, 2, 3), (4, 5, 6)],
                                     [(*page_of(1), 2), (*page_of(1), 3)], [(*page_of(1), 2), (*page_of(1), 3, 4)],
                                     [(1,) * 5, (*[1] * 4, 2, *range(30))]])
@pytest.mark.parametrize("slot_tokens", [0.0, 2.0, 30.0])
def test_saved_tokens_counted_from_prefixes(prompts: list[Prefix], slot_tokens: float) -> None:
    """None of these begins with another one, or only the later one does: all of its tokens are saved."""
    tree = filled(prompts, slot_tokens=slot_tokens)
    for prompt in prompts:
        checkpoint = tree.match((*prompt, 9)).checkpoint
        assert checkpoint and checkpoint.saved == len(prompt)


def test_match_reads_long_prompts_in_large_trees_once() -> None:
    """100,000 tokens against 1,000 conversations of 100 pages that share their first half."""
    first = [token for index in range(50) for token in page_of(index)]
    prompts = [(*first, *range(1000 * i, 1000 * i + 50 * PAGE)) for i in range(1000)]
    tree = filled(prompts, pages=101_000)
    for i, long in enumerate([(*prompts[500], *range(98_400)), tuple(range(100_000)), (*first, *[5] * 99_200)]):
        began = time.process_time()
        found = tree.match(long)
        assert time.process_time() - began < 0.5
        assert found.shared == (1600, 0, 800)[i]
    assert tree.match((*prompts[500], 1)).checkpoint


def test_long_conversations_grow_and_shrink_without_recursion() -> None:
    tree = filled([tuple(range(100_003))], pages=7000)
    tree.check()
    assert tree.evict() and tree._pages.free == 7000


# The hybrid cache over the tree


def tokens_of(checkpoint: Checkpoint) -> list[int]:
    """The tokens that a checkpoint stands for."""
    keys, node = [checkpoint.tail], checkpoint.node
    while node.parent is not None:
        keys.append(node.keys)
        node = node.parent
    return array("q", b"".join(reversed(keys))).tolist()


@dataclass(eq=False)
class Wanted:
    """A sequence's history and the positions that it emits."""

    tokens: list[int] = field(default_factory=list)
    emitting: set[int] = field(default_factory=set)


class ReuseMachine(RuleBasedStateMachine):
    """Random programs over a cache with a tree, in pools so small that eviction and shortage are common. looks: how
    many rules until the pools are looked at, for which all that is queued is carried out."""

    kind: type[HybridCache | CachePools] = HybridCache
    looks = 1

    def __init__(self) -> None:
        super().__init__()
        self.rules = 0
        self.sequences: dict[SequenceCache, Wanted] = {}
        self.kept: dict[CacheSnapshot, list[int]] = {}

    @initialize(pages=st.sampled_from((12, 6, 4, 9, 2, 20)), slots=st.sampled_from((6, 4, 3, 8, 2)))
    def start(self, pages: int, slots: int) -> None:
        self.cache = toy_cache(pages, slots, self.kind)

    def sequence(self, pick: int) -> tuple[SequenceCache, Wanted]:
        return list(self.sequences.items())[pick % len(self.sequences)]

    def loose_slots(self) -> int:
        held = len(self.sequences) + len(self.kept) + sum(len(naive.emitting) for naive in self.sequences.values())
        return self.cache.slots.size - held

    @rule(prompt=PROMPTS, room=st.integers(0, 80))
    def admit(self, prompt: Prefix, room: int) -> None:
        """L2: what is resumed is a prefix of the prompt, at the deepest kept position."""
        match = self.cache.tree.match(prompt)
        known = self.cache.tree.cached_length(prompt)
        sequence = self.cache.admit(prompt, room)
        if sequence is None:
            assert room or self.loose_slots() <= 1 or self.sequences or self.kept, "an empty cache refuses"
            return
        self.sequences[sequence] = Wanted(list(prompt[:sequence.done]))
        given_up = self.cache.tree.cached_length(prompt) < known
        assert known == (match.checkpoint.done if match.checkpoint else 0)
        assert sequence.done == known or (given_up and sequence.done < known), "a kept position is there and not used"
        assert tuple(sequence.tokens) == prompt[:sequence.done]
        assert sequence.done <= known and sequence.shared <= match.shared
        assert self.cache.pages.free * PAGE + sequence.covered >= room

    @precondition(lambda self: self.sequences)
    @rule(pick=st.integers(0, 9), tokens=KEPT, data=st.data())
    def grow(self, pick: int, tokens: Prefix, data: st.DataObject) -> None:
        """L1, L4: a step as the engine does it, with positions whose state is emitted."""
        sequence, naive = self.sequence(pick)
        room = self.cache.reserve(sequence, len(tokens))
        assert room <= len(tokens)
        if not room:
            return
        for offset in data.draw(st.lists(st.integers(1, room), max_size=2)):
            self.emit(sequence, naive, sequence.done + offset, list(tokens[:offset]))
        step(self.cache, sequence, list(tokens[:room]))
        naive.tokens += tokens[:room]

    def emit(self, sequence: SequenceCache, naive: Wanted, position: int, fresh: list[int]) -> None:
        slot = self.cache.reserve_checkpoint(sequence, position)
        assert slot is None or position not in naive.emitting
        if slot is not None:
            naive.emitting.add(position)
            write_state(self.cache, slot, float(hashes([*naive.tokens, *fresh])[-1]))

    @precondition(lambda self: self.sequences)
    @rule(pick=st.integers(0, 9), known=st.booleans())
    def keep_emitted(self, pick: int, known: bool) -> None:
        """known: the logits of the last token are."""
        sequence, naive = self.sequence(pick)
        self.cache.commit_checkpoints(sequence, torch.ones(3) if known else None)
        naive.emitting.clear()
        assert not sequence.checkpoint_slots

    @precondition(lambda self: self.sequences)
    @rule(pick=st.integers(0, 9), keep=st.booleans())
    def release(self, pick: int, keep: bool) -> None:
        sequence, naive = self.sequence(pick)
        checkpoints = len(self.cache.tree)
        self.cache.release(sequence, keep)
        del self.sequences[sequence]
        assert len(self.cache.tree) - checkpoints <= bool(keep and naive.tokens)
        if keep and naive.tokens:
            known = self.cache.tree.cached_length([*naive.tokens, 9])
            assert known == len(naive.tokens), "what was just kept is not known"

    @precondition(lambda self: self.sequences or self.kept)
    @rule(pick=st.integers(0, 9))
    def fork(self, pick: int) -> None:
        source = [*self.sequences, *self.kept][pick % (len(self.sequences) + len(self.kept))]
        sequence = self.cache.fork(source)
        if sequence is not None:
            self.sequences[sequence] = Wanted(list(source.tokens))

    @precondition(lambda self: self.sequences)
    @rule(pick=st.integers(0, 9))
    def snapshot(self, pick: int) -> None:
        sequence, naive = self.sequence(pick)
        kept = self.cache.snapshot(sequence)
        if kept is not None:
            self.kept[kept] = list(naive.tokens)

    @precondition(lambda self: self.sequences and self.kept)
    @rule(pick=st.integers(0, 9), which=st.integers(0, 9))
    def restore(self, pick: int, which: int) -> None:
        sequence, naive = self.sequence(pick)
        if naive.emitting:
            self.keep_emitted(pick, False)
        kept = list(self.kept)[which % len(self.kept)]
        room = self.room_for_a_page(sequence)
        restored = self.cache.restore(sequence, kept)
        assert restored or not room, "restore fails although the tree, or the sequence itself, could give a page"
        if restored:
            naive.tokens = list(self.kept[kept])

    def room_for_a_page(self, sequence: SequenceCache) -> bool:
        """True if other owners leave a page. (Checkpoints may be locked: count only without any.)"""
        if any(checkpoint.locks for checkpoint in self.cache.tree._checkpoints):
            return False
        others = {page for holder in (*self.sequences, *self.kept) if holder is not sequence for page in holder.pages}
        return len(others) < self.most_pages()

    def most_pages(self) -> int:
        """Pages that fit beside the slots that are not the tree's."""
        return self.cache.pages.size

    @precondition(lambda self: self.kept)
    @rule(pick=st.integers(0, 9))
    def drop(self, pick: int) -> None:
        kept = list(self.kept)[pick % len(self.kept)]
        self.cache.release(kept)
        del self.kept[kept]

    @invariant()
    def accounts_add_up(self) -> None:
        self.cache.check()

    @invariant()
    def pools_are_right(self) -> None:
        self.rules += 1
        if not self.rules % self.looks:
            self.look()

    def look(self) -> None:
        self.all_hold_their_own_history()
        self.the_tree_holds_sound_states()

    def all_hold_their_own_history(self) -> None:
        """L1, L2, L3: cursor, tokens, state and K/V of each holder are the naive model's."""
        histories: dict[Any, list[int]] = {owner: naive.tokens for owner, naive in self.sequences.items()}
        for holder, tokens in (histories | self.kept).items():
            assert list(holder.tokens) == tokens
            expected = hashes(tokens)
            assert read_kv(self.cache, holder.pages, holder.done) == expected
            assert not expected or read_state(self.cache, holder.slot) == expected[-1]

    def the_tree_holds_sound_states(self) -> None:
        """L2: each checkpoint's slot and pages hold the state and the K/V of its very tokens."""
        tree = self.cache.tree
        for checkpoint in tree._checkpoints:
            expected = hashes(tokens_of(checkpoint))
            assert read_kv(self.cache, tree.path(checkpoint), checkpoint.done) == expected
            assert read_state(self.cache, checkpoint.slot) == expected[-1]

    def teardown(self) -> None:
        self.look()
        for sequence in [*self.sequences]:
            self.cache.release(sequence)
        for kept in [*self.kept]:
            self.cache.release(kept)
        while self.cache.tree.evict():
            pass
        self.cache.check()
        assert self.cache.idle
        assert (self.cache.pages.free, self.cache.slots.free) == (self.cache.pages.size, self.cache.slots.size)


def reuse_programs(kind: type[HybridCache | CachePools], count: int, looks: int = 1, **options: Any) -> None:
    run_programs(type("Machine", (ReuseMachine,), {"kind": kind, "looks": looks}), count, 40, **options)


def test_l2_a_cache_with_a_tree_equals_the_naive_model() -> None:
    reuse_programs(HybridCache, examples(60))


def test_l2_operations_may_wait_for_each_other() -> None:
    reuse_programs(HybridCache, examples(40), looks=9)


@pytest.mark.slow
def test_l2_a_cache_with_a_tree_equals_the_naive_model_in_thousands_of_programs() -> None:
    reuse_programs(HybridCache, 1000, derandomize=False)
    reuse_programs(HybridCache, 1000, looks=9, derandomize=False)


class SharesTails(HybridCache):
    """A checkpoint's partial page is handed out instead of copied."""

    def __init__(self, pools: Any) -> None:
        super().__init__(pools)
        self.accounts.own_page = self._share  # type: ignore[method-assign]

    def _share(self, page: int) -> int | None:
        self.pages.share([page])
        return page


class ForgetsState(CachePools):
    def apply(self, operations: Any) -> None:
        super().apply([operation for operation in operations if not isinstance(operation, CopySlot)])


class KeepsWrongPosition(HybridCache):
    """K/V without its state: the end's state is kept for an earlier position."""

    def release(self, sequence: SequenceCache, keep: bool = False) -> None:
        if keep and sequence.done > PAGE:
            sequence.done -= 1
        super().release(sequence, keep)


@pytest.mark.parametrize("kind", every(2, [SharesTails, ForgetsState, KeepsWrongPosition, GoesBackwards]))
def test_the_machine_notices_a_cache_that_breaks_l2(kind: type[HybridCache | CachePools]) -> None:
    looks = 9 if kind is GoesBackwards else 1
    with pytest.raises((AssertionError, IndexError, ValueError)):
        reuse_programs(kind, 300, looks, report_multiple_bugs=False, phases=PHASES)


def sequence_of(cache: HybridCache, tokens: list[int]) -> SequenceCache:
    sequence = cache.admit(tokens)
    assert sequence is not None
    rest = tokens[sequence.done:]
    assert cache.reserve(sequence, len(rest)) == len(rest)
    step(cache, sequence, rest)
    return sequence


@pytest.mark.parametrize("done", [1, 15, 16, 17, 32, 33])
def test_l2_a_kept_prefix_is_resumed_where_it_ended(done: int) -> None:
    cache = toy_cache(12, 4)
    cache.release(sequence_of(cache, list(range(done))), keep=True)
    sequence = cache.admit(range(done + 5))
    assert sequence is not None and sequence.done == done
    assert read_kv(cache, sequence.pages, done) == hashes(list(range(done)))
    assert read_state(cache, sequence.slot) == hashes(list(range(done)))[-1]
    cache.check()


def test_l4_a_kept_prefix_never_costs_a_lone_sequence_its_room() -> None:
    """A pool of one context, and a prompt that extends a kept prefix and needs every page of it."""
    cache = toy_cache(4, 2)
    cache.release(sequence_of(cache, list(range(20))), keep=True)
    sequence = cache.admit(range(64))
    assert sequence is not None
    assert cache.reserve(sequence, 64 - sequence.done) == 64 - sequence.done


def test_a_refused_admission_leaves_the_tree_alone() -> None:
    """What cannot be had in any case is no reason to forget what is kept."""
    cache = toy_cache(8, 4)
    cache.release(sequence_of(cache, list(range(100, 130))), keep=True)
    held = sequence_of(cache, list(range(60)))
    assert cache.admit(range(500, 505), min_tokens=128) is None
    assert cache.tree.cached_length(range(100, 131)) == 30, "the tree was emptied for nothing"
    cache.release(held)


def test_an_admission_that_is_refused_for_its_own_prefix_leaves_the_others() -> None:
    """The pages of the prefix to resume at cannot be given up for it."""
    cache = toy_cache(8, 6)
    cache.release(sequence_of(cache, list(range(100, 116))), keep=True)
    cache.release(sequence_of(cache, list(range(64))), keep=True)
    held = sequence_of(cache, list(range(200, 232)))
    assert cache.admit(range(70), min_tokens=128) is None
    assert cache.tree.cached_length(range(100, 117)) == 16, "the tree was emptied for nothing"
    cache.release(held)


@pytest.mark.parametrize("slots", [2, 6])
@pytest.mark.parametrize("done", [49, 60, 63, 64])
def test_l4_a_lone_sequence_starts_even_if_its_own_prefix_fills_the_pool(done: int, slots: int) -> None:
    cache = toy_cache(4, slots)
    cache.release(sequence_of(cache, list(range(done))), keep=True)
    sequence = cache.admit(range(done + 1))
    assert sequence is not None, "nothing runs, and nothing ever will"
    assert read_kv(cache, sequence.pages, sequence.done) == hashes(list(range(sequence.done)))
    cache.check()


def test_l2_restore_may_use_the_pages_of_the_tree() -> None:
    cache = toy_cache(4, 4)
    sequence = sequence_of(cache, list(range(5)))
    kept = cache.snapshot(sequence)
    assert kept is not None and cache.restore(sequence, None)
    cache.release(sequence_of(cache, list(range(100, 145))), keep=True)
    assert cache.pages.free == 0
    assert cache.restore(sequence, kept), "the tree did not give way"
    cache.check()


def test_l3_positions_emitted_past_the_cursor_leave_no_trace() -> None:
    cache = toy_cache(8, 6)
    sequence = sequence_of(cache, list(range(5)))
    assert cache.reserve(sequence, 30) == 30
    assert cache.reserve_checkpoint(sequence, 20) is not None and cache.reserve_checkpoint(sequence, 7) is not None
    cache.commit_checkpoints(sequence)
    cache.check()
    assert len(cache.tree) == 0


def test_without_reuse_nothing_is_kept_or_found() -> None:
    cache = toy_cache(8, 4)
    cache.reuse = False
    sequence = sequence_of(cache, list(range(20)))
    assert cache.reserve_checkpoint(sequence, 25) is None
    cache.release(sequence, keep=True)
    assert len(cache.tree) == 0 and cache.tree.cached_length(range(30)) == 0 and cache.pages.free == 8
