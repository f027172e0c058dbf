"""Pinned memory is given to tensors, and comes back when they are gone."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from torch import Tensor

from deltic.cache.offload import host
from deltic.cache.offload.host import PinnedMemory

released: list[int] = []


@pytest.fixture(autouse=True)
def _small_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_REGION_BYTES", 1 << 18)


def memory(most: int = 1 << 20) -> PinnedMemory:
    def pin(memory: Tensor) -> object:
        return lambda: released.append(memory.nbytes)

    return PinnedMemory(most, pin)  # type: ignore[arg-type]


def numbers(count: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.empty(count, dtype=dtype)


def test_tensors_do_not_share_memory_and_give_it_back() -> None:
    """Random sizes that come and go: what one wrote is still there as long as it lives."""
    room, draw, kept, refused = memory(), random.Random(0), list[tuple[int, Tensor]](), 0
    for turn in range(600):
        if kept and draw.random() < 0.5:
            kept.pop(draw.randrange(len(kept)))
        dtype = draw.choice([torch.bfloat16, torch.float32])
        like = torch.empty(draw.randrange(1, 5), draw.randrange(1, 10_000), dtype=dtype)
        found = room.tensor(like)
        if found is None:
            refused += 1
            kept = kept[1:]
            continue
        assert found.shape == like.shape and found.dtype == like.dtype
        kept.append((turn % 200, found.fill_(turn % 200)))
        for value, tensor in kept:
            assert bool((tensor == value).all())
    assert 0 < refused < 450 and len(room._regions) > 1
    kept.clear()
    del found, tensor
    gc.collect()
    room.tensor(numbers(1))
    assert len(room._free) == len(room._regions)


def test_a_tensor_is_a_claim() -> None:
    room = memory(1 << 18)
    first = room.tensor(numbers(1 << 18))
    assert first is not None and room.tensor(numbers(1)) is None
    del first
    assert room.tensor(numbers(1)) is not None


def test_regions_have_room_for_what_is_asked_for_and_end() -> None:
    room = memory()
    held = [room.tensor(numbers(count)) for count in (1, 1 << 18, 1 << 17, 1 << 19)]
    assert all(part is not None for part in held)
    assert [region.nbytes for region in room._regions] == [1 << 18, 1 << 18, 1 << 19], "the third is beside the first"
    assert room.tensor(numbers((1 << 17) + 1)) is None


def test_what_is_prepared_is_pinned_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_FIRST_REGION_BYTES", 1 << 18)
    room = memory()
    for _ in range(2):
        room.prepare()
        assert [region.nbytes for region in room._regions] == [1 << 18, 3 << 18]
    held = [room.tensor(numbers(size << 18)) for size in (3, 1)]
    assert all(part is not None for part in held) and len(room._regions) == 2


def test_slow_pinning_happens_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A region for each second, and there is patience for two."""
    seconds = iter(range(10))
    monkeypatch.setattr(host, "_FIRST_REGION_BYTES", 1 << 18)
    monkeypatch.setattr(host, "_PREPARE_SECONDS", 2.0)
    monkeypatch.setattr(host.time, "perf_counter", lambda: next(seconds))
    room = memory()
    room.prepare()
    assert [region.nbytes for region in room._regions] == [1 << 18, 2 << 18]
    assert room.tensor(numbers(1 << 18)) is not None and room.tensor(numbers(3 << 18)) is None


def test_freed_with_the_last_owner() -> None:
    room = memory()
    assert room.tensor(numbers(1)) is not None
    del room
    gc.collect()
    assert released[-1] == 1 << 18


@pytest.mark.parametrize("most", [1 << 20, 0])
def test_no_pinned_memory_available(most: int) -> None:
    asked = list[int]()
    room = PinnedMemory(most, lambda memory: asked.append(memory.nbytes))
    assert [room.tensor(numbers(1)) for _ in range(2)] == [None, None] and len(asked) == bool(most)
