"""Pinned memory is given to tensors, and comes back when they are gone."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from torch import Tensor

from deltic.cache import pinned
from deltic.cache.pinned import PinnedMemory

released: list[int] = []


@pytest.fixture(autouse=True)
def _small_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "_FIRST", 1 << 18)


def memory(most: int = 1 << 20) -> PinnedMemory:
    def pin(memory: Tensor) -> object:
        return lambda: released.append(memory.nbytes)

    return PinnedMemory(most, pin)  # type: ignore[arg-type]


def numbers(count: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.empty(count, dtype=dtype)


def grown(room: PinnedMemory, like: Tensor) -> Tensor | None:
    """What there is when all has been made that was asked for."""
    if room.tensor(like) is not None:
        raise AssertionError("there was room at once")
    room.wait()
    return room.tensor(like)


def test_tensors_do_not_share_memory_and_give_it_back() -> None:
    """Random sizes that come and go: what one wrote is still there as long as it lives."""
    room, draw, kept, refused = memory(), random.Random(0), list[tuple[int, Tensor]](), 0
    for turn in range(2000):
        if kept and draw.random() < 0.5:
            kept.pop(draw.randrange(len(kept)))
        dtype = draw.choice([torch.bfloat16, torch.float32])
        like = torch.empty(draw.randrange(1, 5), draw.randrange(1, 10_000), dtype=dtype)
        found = room.tensor(like)
        if found is None:
            refused += 1
            room.wait()
            kept = kept[1:]
            continue
        assert found.shape == like.shape and found.dtype == like.dtype
        kept.append((turn % 200, found.fill_(turn % 200)))
        for value, tensor in kept:
            assert bool((tensor == value).all())
    assert 0 < refused < 1500 and len(room._regions) > 1
    kept.clear()
    del found, tensor
    gc.collect()
    room.tensor(numbers(1))
    assert len(room._free) == len(room._regions)


def test_a_tensor_is_a_claim() -> None:
    room = memory(1 << 18)
    first = grown(room, numbers(1 << 18))
    assert first is not None and room.tensor(numbers(1)) is None
    del first
    assert room.tensor(numbers(1)) is not None


def test_regions_grow_with_what_is_asked_for_and_end() -> None:
    room = memory()
    held = [grown(room, numbers(1)), grown(room, numbers(1 << 18))]
    assert all(part is not None for part in held) and [region.nbytes for region in room._regions] == [1 << 18, 3 << 18]
    assert grown(room, numbers(1 << 20)) is None


def test_it_is_let_go_with_its_last_owner() -> None:
    room = memory()
    assert grown(room, numbers(1)) is not None
    del room
    gc.collect()
    assert released[-1] == 1 << 18


@pytest.mark.parametrize("most", [1 << 20, 0])
def test_where_none_can_be_had_there_is_none(most: int) -> None:
    assert grown(PinnedMemory(most, lambda _: None), numbers(1)) is None
