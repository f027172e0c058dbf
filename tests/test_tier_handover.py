"""Items that one process writes to a cache directory and another one uses without a scan."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from test_cache_tiers import check_loaded, source_of

from deltic import LLM, SamplingParams
from deltic.cache.offload.directory import CacheDirectory
from deltic.cache.offload.disk import DiskStore
from deltic.cache.offload.index import TierIndex
from deltic.cache.offload.tiers import LoadRequest
from deltic.params import EngineRequest

Tokens = Sequence[int]


def tier(directory: Path, budget: int = 1 << 20) -> TierIndex:
    return TierIndex(DiskStore(directory, "feed", budget), threads=False)


def loaded_length(index: TierIndex, tokens: Tokens) -> int:
    """Loads the deepest prefix, and checks every number of it. Returns its length."""
    load = LoadRequest(tokens, 0, (index,))
    assert load.poll()
    if load.loaded is None:
        return 0
    check_loaded(load.loaded, tokens[:load.loaded.done])
    return load.loaded.done


def test_an_item_is_used_without_a_scan(tmp_path: Path) -> None:
    one, two = tier(tmp_path), tier(tmp_path)
    tokens = [*range(100)]
    one.offer(source_of(tokens[:40]))
    one.offer(source_of(tokens, logits=True))
    assert loaded_length(two, tokens) == 0
    two.adopt(one.written(tokens))
    assert loaded_length(two, tokens) == 100 and loaded_length(two, tokens[:60]) == 40
    assert (two.bytes, two.prefixes) == (one.bytes, 2)
    two.adopt(one.written(tokens))
    assert (two.bytes, two.prefixes) == (one.bytes, 2)
    two.check()


def test_a_state_with_logits_replaces_one_without(tmp_path: Path) -> None:
    one, two = tier(tmp_path), tier(tmp_path)
    tokens = [*range(50)]
    two.offer(source_of(tokens))
    one.adopt(two.written(tokens))
    one.offer(source_of(tokens, logits=True))
    two.adopt(one.written(tokens))
    entry = two.find(tokens)
    assert entry and entry.done == 50 and entry.state and entry.state.kind == "final"
    assert loaded_length(two, tokens) == 50
    one.adopt(tier(tmp_path).written(tokens))
    assert loaded_length(one, tokens) == 50
    for index in (one, two):
        index.check()


@pytest.mark.parametrize("seed", range(12))
def test_two_tiers_that_adopt_at_random_stay_sound(seed: int, tmp_path: Path) -> None:
    """What is adopted can be loaded, whatever either has of it already; budgets hold."""
    random = Random(seed)
    budget = 1 << 20 if seed % 3 else 6000
    tiers = [tier(tmp_path, budget), tier(tmp_path, 1 << 20)]
    common = [random.randrange(3) for _ in range(60)]
    texts = [common + [1000 * number + random.randrange(3) for _ in range(140)] for number in range(3)]
    for _ in range(80):
        giver, taker = random.sample(tiers, 2)
        tokens = random.choice(texts)[:random.randrange(1, 200)]
        if random.random() < 0.5:
            giver.offer(source_of(tokens, logits=random.random() < 0.3))
        else:
            before, expected = loaded_length(taker, tokens), loaded_length(giver, tokens)
            items = giver.written(tokens)
            random.shuffle(items)
            some = random.random() < 0.2
            taker.adopt(items[:random.randrange(len(items) + 1)] if some else items)
            if budget > 6000:  # else files of either are deleted
                assert loaded_length(taker, tokens) >= (before if some else max(before, expected))
        for index in tiers:
            index.check()


def test_an_adopted_item_that_is_gone_is_lost_alone(tmp_path: Path) -> None:
    one, two = tier(tmp_path), tier(tmp_path)
    tokens = [*range(100)]
    one.offer(source_of(tokens[:40]))
    one.offer(source_of(tokens, logits=True))
    items = one.written(tokens)
    one.store.delete(next(item for item in items if item.done == 100 and item.kind == "kv"))
    two.adopt(items)
    assert loaded_length(two, tokens) == 40
    two.check()


def test_items_that_are_being_written_are_not_named(tmp_path: Path) -> None:
    index = TierIndex(DiskStore(tmp_path, "feed", 1 << 20), threads=True)
    tokens = [*range(100)]
    index.offer(source_of(tokens, logits=True))
    for future in index.writing(tokens):
        future.result()
    assert [item.kind for item in index.written(tokens)] == ["kv", "final"]
    assert all(item.size for item in index.written(tokens)) and not index.writing(tokens)
    index.close()


def test_a_prefix_is_stored_without_a_copy_of_the_pool(tmp_path: Path) -> None:
    """Pages of memory that are touched for the first time show every copy."""
    with LLM(max_context=2048, memory="256MiB", threads=1, cache_dir=tmp_path) as llm, llm.worker.hold() as engine:
        def touched(number: int) -> int:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            engine.add(EngineRequest(f"{number}", tuple([5 + number] * 1500), SamplingParams(max_tokens=1)))
            while engine.has_work:
                engine.step()
            with engine.resting_cache():
                pass
            return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize()

        touched(0)
        assert touched(1) < 128 << 20


def test_processes_know_a_directory_by_its_number(tmp_path: Path) -> None:
    one = CacheDirectory(tmp_path / "a")
    assert one.number and CacheDirectory(tmp_path / "a").number == one.number
    assert CacheDirectory(tmp_path / "b").number not in (0, one.number)
    with one.transaction() as index:
        index.execute("PRAGMA application_id = 0")  # as directories of earlier versions have
    again = CacheDirectory(tmp_path / "a")
    assert again.number and again.number == one.number
