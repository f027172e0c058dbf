"""The prefix tree's nodes are runs of pages: where these part and are joined again, and how many objects there are."""

from __future__ import annotations

import gc
import random
from array import array
from collections.abc import Callable, Sequence

import pytest
from test_cache_frames import toy_shared
from test_cache_machine import leased, step, toy_cache
from test_prefix_tree import Prefix, TreeMachine, filled, tokens_of

from deltic.cache.radix_tree import PrefixTree
from deltic.params import PAGE


def tracked() -> int:
    """How many objects a full collection looks at."""
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.parametrize("pages", [250, 2500])
def test_the_garbage_collector_sees_objects_per_prompt_and_not_per_page(pages: int) -> None:
    """Eight prompts that share their first half, of which half is kept, too."""
    opening = tuple(range(PAGE * pages // 2))
    prompts = [(*opening, *range(number, number + PAGE * pages // 2)) for number in range(1, 9)]
    prompts.append(opening[:len(opening) // 2 + 3])
    before = tracked()
    tree = filled(prompts, pages=10 * pages)
    assert sum(1 for _ in tree.owned_pages()) > 4 * pages
    assert tracked() - before < 10 * len(prompts) + 20
    while tree.evict():
        pass
    assert tracked() - before < 20


@pytest.mark.parametrize("kind", [tuple, list, lambda tokens: array("q", tokens)])
@pytest.mark.parametrize("cuts", [(), range(PAGE, 100 * PAGE, 7 * PAGE), range(3, 100 * PAGE, 5 * PAGE + 1)])
def test_prompts_diverge_anywhere_in_a_run(kind: Callable[[Prefix], Sequence[int]], cuts: Sequence[int]) -> None:
    """A prompt of 100 pages, kept at its end and at `cuts`, and those that are its beginning and then another text."""
    prompt = tuple(range(100 * PAGE + 5))
    tree = filled([prompt, *(prompt[:cut] for cut in cuts)], pages=1000)
    last = tree.at(prompt)
    assert last
    pages = tree.path(last)
    for parted in [*range(0, len(prompt), 13), *range(0, len(prompt), PAGE), len(prompt)]:
        other = kind((*prompt[:parted], *range(5000, 5000 + 40 * PAGE)))
        full = parted // PAGE
        assert tree.shared(other) == pages[:full] and tree.diverged(other) == parted
        found, kept = tree.match(other), max((cut for cut in (*cuts, len(prompt)) if cut <= parted), default=0)
        assert found.shared == full * PAGE
        assert (found.checkpoint.done if found.checkpoint else 0) == kept
        assert tree.at(other) is None
        ended = tree.at(kind(prompt[:parted]))
        assert (ended is not None) == (parted in (*cuts, len(prompt)))


def test_l2_long_runs_equal_a_dictionary_of_prefixes() -> None:
    """Prompts that begin as others do, anywhere, and go on for up to 20 pages; what is given up joins what is left."""
    for seed in range(40):
        draw, machine, prompts = random.Random(seed), TreeMachine(), list[Prefix]([()])
        for _ in range(25):
            if draw.random() < 0.3 or machine.pages.free < 100:
                machine.evict()
                machine.accounts_add_up()
                continue
            begun = draw.choice(prompts)
            begun = begun[:draw.choice((len(begun), draw.randrange(len(begun) + 1), PAGE * draw.randrange(9)))]
            prompt = (*begun, *(draw.randrange(2) for _ in range(draw.choice((1, PAGE, draw.randrange(20 * PAGE))))))
            if prompt:
                machine.insert(prompt, draw.choice((None, "logits")), draw.random() < 0.7)
                machine.accounts_add_up()
                prompts.append(prompt[:50 * PAGE])
            machine.match((*draw.choice(prompts), 1, 0, 1))
        machine.teardown()


def nodes_of(tree: PrefixTree) -> int:
    return sum(1 for _ in tree._nodes())


def test_runs_are_joined_when_no_checkpoint_ends_inside() -> None:
    prompt = tuple(range(64 * PAGE))
    tree = filled([prompt, *(prompt[:end] for end in range(PAGE, len(prompt), PAGE))])
    last = tree.at(prompt)
    assert last and nodes_of(tree) == 64
    last.locks += 1
    pages = tree.path(last)
    while tree.evict():
        tree.check()
        assert nodes_of(tree) == len(tree) and tree.path(last) == pages
    assert nodes_of(tree) == 1 and tuple(tokens_of(last)) == prompt


@pytest.mark.parametrize("joined", [True, False])
def test_removed_node_names_its_successor(joined: bool) -> None:
    """It has become a part of the run below it, or was given up; what was above it is known by it."""
    prompt, middle = tuple(range(40 * PAGE)), 20 * PAGE
    tree = filled([prompt[:PAGE], prompt[:middle], *([prompt] if joined else [])])
    opening, near = tree.at(prompt[:PAGE]), tree.at(prompt[:middle])
    assert opening and near
    for kept in [*tree._checkpoints]:
        kept.locks += kept is not near
    assert tree.evict() and not near.node.kept
    assert tree._nearest(near.node, len(prompt)) is opening.node
    (slot,), pages = tree._slots.take() or (), tree._pages.take(30) or []
    kept = tree.insert(prompt[:30 * PAGE], pages, slot, None, near=near.node)
    tree._pages.release(pages)
    assert kept.parent is opening and kept.done == 30 * PAGE
    tree.check()


@pytest.mark.parametrize("shared", [False, True])
def test_the_tree_keeps_the_pages_of_sequences_that_resume(shared: bool) -> None:
    """They are no owners of full pages, whose number therefore costs nothing. The pages stay when the checkpoint goes,
    until the last sequence leaves; what it keeps begins with them."""
    cache = toy_shared(60) if shared else toy_cache(60, 8)
    tokens = [*range(20 * PAGE + 5)]
    cache.release(leased(cache, tokens), keep=True)
    first, second = (cache.admit([*tokens, 1], keys=[*tokens, 1]) for _ in range(2))
    assert first and second and first.done == second.done == len(tokens) and first.lender is second.lender
    assert cache.pages.alone(first.pages) and first.own_pages == first.pages[20:] != second.own_pages
    cache.clear()
    cache.check()
    assert not len(cache.tree) and cache.pages.used == 22 and cache.tree.shared(tokens) == first.pages[:20]
    cache.release(first)
    assert cache.reserve(second, 1)
    step(cache, second, [1])
    end = cache.release(second, keep=True)
    cache.check()
    assert end and [*cache.tree.path(end)] == second.pages and end.done == len(tokens) + 1
    third, fourth = (cache.admit([*tokens, 1, number]) for number in range(2))
    assert third and fourth
    cache.clear()
    cache.release(third)
    cache.check()
    cache.release(fourth)
    assert cache.idle and not cache.pages.used and not cache.slots.used
