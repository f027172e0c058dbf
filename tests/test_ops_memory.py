"""Host memory in large pages: what is asked for is there to its last byte, nobody else has it, it costs nothing before
it is written to, and it is given back with the last tensor in it."""

from __future__ import annotations

import gc
import mmap
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from deltic.ops import memory
from deltic.ops.memory import Arena, large_pages, reserve

KIB, MIB = 1 << 10, 1 << 20
SIZES = (0, 1, 63, 64, 65, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, MIB, 2 * MIB + 7, 20 * MIB, 32 * MIB, 33 * MIB)
on_linux = pytest.mark.skipif(not Path("/proc/self/smaps").exists() or not large_pages(),
                              reason="looks at memory as Linux shows it")
both_ways = pytest.mark.parametrize("large", [pytest.param(True, marks=pytest.mark.skipif(
    not large_pages(), reason="this system has no such pages")), False])


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """References to all maps that are made from now on."""
    made: list[weakref.ref[Any]] = []

    class Map(mmap.mmap):
        def __new__(cls, *arguments: Any, **more: Any) -> Any:
            self = super().__new__(cls, *arguments, **more)
            made.append(weakref.ref(self))
            return self

    names = {name: getattr(mmap, name) for name in dir(mmap)} | {"mmap": Map}
    monkeypatch.setattr(memory, "mmap", SimpleNamespace(**names))
    return made


def alive(maps: list[weakref.ref[Any]]) -> int:
    gc.collect()
    return sum(map() is not None for map in maps)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def set_large(monkeypatch: pytest.MonkeyPatch, large: bool) -> None:
    monkeypatch.setattr(memory, "large_pages", lambda: large)


def ends(tensors: list[Tensor]) -> Iterator[tuple[int, int]]:
    return ((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors if tensor.nbytes)


def disjoint(tensors: list[Tensor]) -> bool:
    borders = sorted(ends(tensors))
    return all(end <= begin for (_, end), (begin, _) in pairwise(borders))


@both_ways
def test_arena_allocates_aligned_tensors(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    set_large(monkeypatch, large)
    arena = Arena()
    taken = [arena.take(size) for size in (*SIZES, *reversed(SIZES))]
    for tensor, size in zip(taken, (*SIZES, *reversed(SIZES)), strict=True):
        assert tensor.dtype == torch.uint8 and tensor.shape == (size,) and tensor.is_contiguous()
        assert not size or tensor.data_ptr() % 64 == 0
    assert disjoint(taken)
    for number, tensor in enumerate(taken):
        tensor[:3], tensor[-3:] = number, number
    assert all(bool((tensor[-3:] == number).all()) and bool((tensor[:3] == number).all())
               for number, tensor in enumerate(taken))


@on_linux
def test_tensors_are_packed_into_chunks(maps: list[weakref.ref[Any]]) -> None:
    arena = Arena()
    first = [arena.take(size) for size in (MIB + 1, 64 * KIB, 30 * MIB, 30 * MIB)]
    assert len(maps) == 1, "one chunk holds them all"
    assert [begin - first[0].data_ptr() for begin, _ in ends(first)] == [0, MIB + 64, MIB + 64 + 64 * KIB,
                                                                         31 * MIB + 64 + 64 * KIB]
    assert first[0].data_ptr() % (2 * MIB) == 0
    arena.take(100), arena.take(64 * KIB - 1)
    assert len(maps) == 1, "small ones come from elsewhere"
    large = arena.take(32 * MIB)
    assert len(maps) == 2 and large.data_ptr() % (2 * MIB) == 0, "large ones have a map of their own"
    assert arena.take(MIB).data_ptr() == first[-1].data_ptr() + 30 * MIB and len(maps) == 2
    arena.take(5 * MIB)
    assert len(maps) == 3, "what does not fit goes into the next chunk"


@on_linux
def test_chunk_is_freed_with_its_last_tensor(maps: list[weakref.ref[Any]]) -> None:
    arena = Arena()
    first, second, own = arena.take(MIB), arena.take(MIB)[5:].view(-1, 1), arena.take(40 * MIB)
    assert alive(maps) == 2
    del own
    assert alive(maps) == 1
    kept = arena.take(20 * MIB), arena.take(20 * MIB), arena.take(30 * MIB)  # the last in the next chunk
    assert alive(maps) == 2
    del kept, first
    assert alive(maps) == 2, "a view still lies in the first chunk, and the arena goes on with the second"
    second.fill_(3)
    del second
    assert alive(maps) == 1
    del arena
    assert alive(maps) == 0


@on_linux
def test_freed_memory_returns_to_the_system() -> None:
    before = resident()
    tensor = Arena().take(48 * MIB)
    assert resident() - before < 4 * MIB, "it costs nothing before it is written to"
    tensor.fill_(1)
    assert resident() - before >= 48 * MIB
    del tensor
    assert resident() - before < 8 * MIB


@on_linux
def test_large_pages_are_requested() -> None:
    for tensor in (Arena().take(40 * MIB), Arena().take(MIB), reserve((5, MIB), torch.float32)):
        tensor.fill_(1)
        flags, inside = "", False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            words = line.split()
            if "-" in words[0] and ":" not in words[0]:
                begin, end = (int(word, 16) for word in words[0].split("-"))
                inside = begin <= tensor.data_ptr() < end
            elif inside and words[0] == "VmFlags:":
                flags = line
        assert " hg" in flags


def test_threads_get_separate_memory() -> None:
    """Sizes that often just do not fit into a chunk."""
    arena, interval = Arena(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            sizes = [(5 + number % 7) * MIB + number for number in range(2000)]
            taken = list(pool.map(arena.take, sizes))
    finally:
        sys.setswitchinterval(interval)
    assert [len(tensor) for tensor in taken] == sizes
    assert disjoint(taken)


@both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(3, 5), (0, 7), (4 * MIB,), (2, 3 * MIB + 1), (1, 4 * MIB, 1, 1)])
def test_reserved_tensors(shape: tuple[int, ...], dtype: torch.dtype, large: bool,
                          monkeypatch: pytest.MonkeyPatch) -> None:
    set_large(monkeypatch, large)
    tensor = reserve(shape, dtype)
    assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
    assert tensor.device == torch.device("cpu")
    if large and tensor.nbytes >= 4 * MIB:
        assert tensor.data_ptr() % (2 * MIB) == 0
    flat = tensor.view(-1)
    flat[-5:], flat[:5] = 7, 3
    assert not len(flat) or (float(flat[-1]), float(flat[0])) == (7, 3)


@on_linux
def test_reserved_memory_is_lazy(maps: list[weakref.ref[Any]]) -> None:
    before = resident()
    tensor = reserve((4096, MIB), torch.uint8)
    tensor[1000, :8] = 1
    tensor[-1, -8:] = 1
    assert resident() - before < 16 * MIB and len(maps) == 1
    del tensor
    assert alive(maps) == 0


def test_other_devices_use_torch_memory(maps: list[weakref.ref[Any]]) -> None:
    tensor = reserve((8, MIB), torch.float32, "meta")
    assert tensor.device.type == "meta" and tensor.shape == (8, MIB) and not maps


def test_other_systems_map_nothing(maps: list[weakref.ref[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not large_pages()
    assert Arena().take(40 * MIB).data_ptr() % 64 == 0 and reserve((8, MIB), torch.float32).shape == (8, MIB)
    assert not maps
