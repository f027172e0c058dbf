"""Sums over several GPUs by stores into each other's memory: right, in the order of the tree, replayed, and bounded.

Without a second GPU, several streams of one play the devices."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from deltic.errors import UnavailableError
from deltic.ops.cuda.allreduce import AllReduce
from deltic.ops.cuda.driver import record
from deltic.ops.slices import tree_sum

UNITS_APART = True
__test__ = torch.cuda.is_available()
TOKENS = 16
COUNT = torch.cuda.device_count() if torch.cuda.is_available() else 0
PLACES = [(2, "streams"), (4, "streams"),
          *((count, kind) for count in (2, 4, 8) if count <= COUNT for kind in ("peers", "host"))]


class Devices:
    """One stream of each device, and its residual [T, H] and part."""

    def __init__(self, count: int, kind: str, seconds: float = 5.0) -> None:
        self.devices = [torch.device("cuda", 0 if kind == "streams" else rank) for rank in range(count)]
        self.streams = [torch.cuda.Stream(device) for device in self.devices]
        hidden = 1024 if kind == "streams" else 5120  # all blocks of all streams must find room
        self.sums = AllReduce(self.devices, TOKENS * hidden, seconds, kind == "host" or None)
        assert self.sums.through_host == (kind == "host")
        self.parts = [torch.zeros(TOKENS, hidden, device=device) for device in self.devices]
        self.residuals = [torch.zeros(TOKENS, hidden, device=device) for device in self.devices]
        for device in set(self.devices):
            torch.cuda.synchronize(device)  # the default stream's zeros must not overwrite later copies

    @contextmanager
    def on(self, rank: int) -> Iterator[None]:
        with torch.cuda.device(self.devices[rank]), torch.cuda.stream(self.streams[rank]):
            yield

    def fill(self, seed: int) -> tuple[list[Tensor], Tensor]:
        """Sets new numbers; returns the parts and the residual on the CPU."""
        rng = torch.Generator().manual_seed(seed)
        size = self.parts[0].shape
        parts = [torch.randn(size, generator=rng) * 10.0**(rank % 3) for rank in range(len(self.devices))]
        residual = torch.randn(size, generator=rng)
        for rank, part in enumerate(parts):
            with self.on(rank):
                self.parts[rank].copy_(part)
                self.residuals[rank].copy_(residual)
        self.wait()
        return parts, residual

    def add(self, rank: int, tokens: int = TOKENS) -> None:
        self.sums.add(rank, self.parts[rank][:tokens], self.residuals[rank][:tokens])

    def wait(self) -> None:
        for stream in self.streams:
            stream.synchronize()

    def run(self, launch: Callable[[int], None]) -> None:
        for rank in range(len(self.devices)):
            with self.on(rank):
                launch(rank)
        self.wait()
        self.sums.check()


@pytest.fixture(params=PLACES, ids=lambda place: f"{place[0]} {place[1]}")
def devices(request: pytest.FixtureRequest) -> Devices:
    return Devices(*request.param)


def test_sums(devices: Devices) -> None:
    """With all numbers of tokens, so that a box still has what other sums left there."""
    for seed, tokens in enumerate([*range(1, TOKENS + 1), 1, 1, 1, 16, 2]):
        parts, residual = devices.fill(seed)
        devices.run(lambda rank, tokens=tokens: devices.add(rank, tokens))  # type: ignore[misc]
        wanted = residual.clone()
        wanted[:tokens] += tree_sum(parts)[:tokens]
        for found in devices.residuals:
            assert torch.equal(found.cpu(), wanted), f"{tokens} tokens"


def test_replayed_graphs(devices: Devices) -> None:
    """A graph of three sums, a hundred times, on devices that begin at other times."""
    devices.run(devices.add)  # the modules are loaded
    graphs = []
    for rank in range(len(devices.devices)):
        with devices.on(rank):
            graph, _ = record(lambda rank=rank: [devices.add(rank) for _ in range(3)])
            graphs.append(graph)
    rng = random.Random(1)
    for turn in range(100):
        parts, wanted = devices.fill(turn)
        slow = rng.randrange(len(graphs) + 1)

        def launch(rank: int, slow: int = slow) -> None:
            if rank == slow:
                torch.cuda._sleep(rng.randrange(1, 2_000_000))
            graphs[rank].replay()

        devices.run(launch)
        for _ in range(3):
            wanted = wanted + tree_sum(parts)
        for found in devices.residuals:
            assert torch.equal(found.cpu(), wanted), turn


def test_many_sums_in_a_row(devices: Devices) -> None:
    """Devices run ahead of each other as far as boxes allow; every sum is the next one's part."""
    parts, residual = devices.fill(5)
    order = random.Random(2)
    for index in range(50):
        ranks = list(range(len(devices.devices)))
        order.shuffle(ranks)
        for rank in ranks:
            with devices.on(rank):
                if order.random() < 0.3:
                    torch.cuda._sleep(order.randrange(1, 300_000))
                devices.add(rank, 1 + index % TOKENS)
    devices.wait()
    devices.sums.check()
    for index in range(50):
        residual[:1 + index % TOKENS] += tree_sum(parts)[:1 + index % TOKENS]
    for found in devices.residuals:
        assert torch.equal(found.cpu(), residual)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0]} {place[1]}")
def test_a_device_that_never_comes(place: tuple[int, str]) -> None:
    """The others end in time, say who was missing, and give NaN; later sums do not wait,
    and are right after the check."""
    devices, last = Devices(*place, seconds=0.3), place[0] - 1
    devices.run(devices.add)
    devices.fill(1)
    began = time.monotonic()
    for rank in range(last):
        with devices.on(rank):
            for _ in range(20):
                devices.add(rank)
    devices.wait()
    assert 0.25 < time.monotonic() - began < 2
    assert int(devices.sums._reports[0, 0]) == 1 + last
    with pytest.raises(UnavailableError, match="in vain"):
        devices.sums.check()
    for found in devices.residuals[:last]:
        assert bool(found.isnan().all())
    parts, residual = devices.fill(2)
    for _ in range(3):
        devices.run(devices.add)
        residual += tree_sum(parts)
    assert all(torch.equal(found.cpu(), residual) for found in devices.residuals), "the sums did not begin again"


def test_bad_numbers_of_devices() -> None:
    with pytest.raises(ValueError, match="3 devices: sums are made over 2, 4 or 8"):
        AllReduce([torch.device("cuda", 0)] * 3, 64)
