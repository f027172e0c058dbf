"""Sums over several GPUs by stores into each other's memory: right, in the order of the tree, replayed, and bounded.

Without a second GPU, several streams of one play the devices."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deltic.errors import UnavailableError
from deltic.ops.cuda.allreduce import AllReduce, RowNorm
from deltic.ops.cuda.driver import record
from deltic.ops.slices import tree_sum

UNITS_APART = True
__test__ = torch.cuda.is_available()
EPS = 1e-6
COUNT = torch.cuda.device_count() if torch.cuda.is_available() else 0
PLACES = [(2, "streams"), (4, "streams"),
          *((count, kind) for count in (2, 4, 8) if count <= COUNT for kind in ("peers", "host"))]
each_case = [pytest.param((*place, dtype), id=f"{place[0]} {place[1]} {str(dtype)[6:]}")
             for dtype in (torch.float32, torch.bfloat16) for place in PLACES]


class Devices:
    """One stream of each device, and its residual [T, H] and part."""

    def __init__(self, count: int, kind: str, dtype: torch.dtype, seconds: float = 5.0) -> None:
        self.devices = [torch.device("cuda", 0 if kind == "streams" else rank) for rank in range(count)]
        self.streams = [torch.cuda.Stream(device) for device in self.devices]
        hidden = 1032 if kind == "streams" else 5120  # all blocks of all streams must find room
        self.tokens = 16 if dtype == torch.float32 else 48 if kind == "streams" else 256
        self.sums = AllReduce(self.devices, hidden, 16, self.tokens, seconds, kind == "host" or None)
        assert self.sums.through_host == (kind == "host")
        self.parts = [torch.zeros(self.tokens, hidden, device=device, dtype=dtype) for device in self.devices]
        self.residuals = [torch.zeros(self.tokens, hidden, device=device) for device in self.devices]
        self.scales = [torch.linspace(-1, 2, hidden, device=device) for device in self.devices]
        self.normed = [torch.zeros_like(residual, dtype=torch.bfloat16) for residual in self.residuals]
        for device in set(self.devices):
            torch.cuda.synchronize(device)  # the default stream's zeros must not overwrite later copies

    @contextmanager
    def on(self, rank: int) -> Iterator[None]:
        with torch.cuda.device(self.devices[rank]), torch.cuda.stream(self.streams[rank]):
            yield

    def fill(self, seed: int) -> tuple[list[Tensor], Tensor]:
        """Sets new numbers; returns the parts and the residual on the CPU."""
        rng = torch.Generator().manual_seed(seed)
        size, dtype = self.parts[0].shape, self.parts[0].dtype
        parts = [(torch.randn(size, generator=rng) * 10.0**(rank % 3)).to(dtype) for rank in range(len(self.devices))]
        residual = torch.randn(size, generator=rng)
        for rank, part in enumerate(parts):
            with self.on(rank):
                self.parts[rank].copy_(part)
                self.residuals[rank].copy_(residual)
        self.wait()
        return parts, residual

    def add(self, rank: int, sixteenths: int = 16) -> None:
        """sixteenths: of the tokens."""
        tokens = self.tokens * sixteenths // 16
        part, residual = self.parts[rank][:tokens], self.residuals[rank][:tokens]
        if part.dtype == torch.float32:
            self.sums.add(rank, part, residual)
        else:
            self.sums.add_norm(rank, part, residual, RowNorm(self.normed[rank][:tokens], self.scales[rank], EPS))

    def wait(self) -> None:
        for stream in self.streams:
            stream.synchronize()

    def run(self, launch: Callable[[int], None]) -> None:
        for rank in range(len(self.devices)):
            with self.on(rank):
                launch(rank)
        self.wait()
        self.sums.check()


def sum_of(parts: list[Tensor]) -> Tensor:
    """Returns what a sum adds to the residual. Two devices do not round sums of bfloat16 numbers."""
    if parts[0].dtype == torch.float32:
        return tree_sum(parts)
    total = torch.zeros(parts[0].shape)
    for part in parts:
        total += part.float()
    return total if len(parts) == 2 else total.bfloat16().float()


@pytest.fixture(params=each_case)
def devices(request: pytest.FixtureRequest) -> Devices:
    return Devices(*request.param)


def test_sums(devices: Devices) -> None:
    """With all numbers of tokens, so that a box still has what other sums left there."""
    for seed, part in enumerate([*range(1, 17), 1, 1, 1, 16, 2]):
        parts, residual = devices.fill(seed)
        devices.run(lambda rank, part=part: devices.add(rank, part))  # type: ignore[misc]
        wanted, tokens = residual.clone(), devices.tokens * part // 16
        wanted[:tokens] += sum_of(parts)[:tokens]
        for found in devices.residuals:
            assert torch.equal(found.cpu(), wanted), f"{tokens} tokens"
        if parts[0].dtype == torch.bfloat16:
            norm = F.rms_norm(wanted.double(), wanted.shape[1:], devices.scales[0].double().cpu(), EPS)[:tokens]
            for normed in devices.normed:
                assert torch.equal(normed[:tokens].cpu(), devices.normed[0][:tokens].cpu())
                assert bool(((normed[:tokens].cpu().double() - norm).abs() <= 0.005 * norm.abs()).all())


def test_wide_norms() -> None:
    """The kernel writes the norms in float32 and in bfloat16."""
    devices = Devices(2, "streams", torch.bfloat16)
    devices.fill(1)
    wide = [torch.zeros_like(residual) for residual in devices.residuals]
    torch.cuda.synchronize()
    devices.run(lambda rank: devices.sums.add_norm(rank, devices.parts[rank], devices.residuals[rank], RowNorm(
        devices.normed[rank], devices.scales[rank], EPS, wide[rank])))
    norm = F.rms_norm(devices.residuals[0].double(), wide[0].shape[1:], devices.scales[0].double(), EPS)
    for rank in range(2):
        assert torch.equal(devices.normed[rank], wide[rank].bfloat16())
        assert bool(((wide[rank] - norm).abs() <= 1e-5 * norm.abs()).all())


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
            wanted = wanted + sum_of(parts)
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
                devices.add(rank, 1 + index % 16)
    devices.wait()
    devices.sums.check()
    for index in range(50):
        tokens = devices.tokens * (1 + index % 16) // 16
        residual[:tokens] += sum_of(parts)[:tokens]
    for found in devices.residuals:
        assert torch.equal(found.cpu(), residual)


@pytest.mark.parametrize("case", each_case)
def test_a_device_that_never_comes(case: tuple[int, str, torch.dtype]) -> None:
    """The others end in time, say who was missing, and give NaN; later sums do not wait,
    and are right after the check."""
    devices, last = Devices(*case, seconds=0.3), case[0] - 1
    devices.run(devices.add)
    devices.fill(1)
    began = time.monotonic()
    for _ in range(20):  # in turns: launches that wait for an earlier one of their stream take room, too
        for rank in range(last):
            with devices.on(rank):
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
        residual += sum_of(parts)
    assert all(torch.equal(found.cpu(), residual) for found in devices.residuals), "the sums did not begin again"


def test_sums_of_kernels_of_both_kinds_in_turns() -> None:
    """They count the same sums, and each has boxes of its own."""
    devices = Devices(4, "streams", torch.bfloat16)
    parts, residual = devices.fill(3)
    few = [part[:8].float().contiguous() for part in devices.parts]
    for turn in range(7):
        devices.run(devices.add)
        residual += sum_of(parts)
        for _ in range(turn % 3):
            devices.run(lambda rank: devices.sums.add(rank, few[rank], devices.residuals[rank][:8]))
            residual[:8] += tree_sum([part[:8].float() for part in parts])
    assert all(torch.equal(found.cpu(), residual) for found in devices.residuals)


@pytest.mark.parametrize("count", [2, 4])
def test_numbers_that_are_none(count: int) -> None:
    """Not a number with all bits set, which stands for a number that has not come."""
    devices = Devices(count, "streams", torch.bfloat16)
    devices.fill(4)
    for rank in range(count):
        with devices.on(rank):
            devices.parts[rank].view(torch.int16).fill_(-1)
    devices.wait()
    devices.run(devices.add)
    assert all(bool(found.isnan().all()) for found in (*devices.residuals, *devices.normed))


def test_bad_numbers_of_devices() -> None:
    with pytest.raises(ValueError, match="3 devices: sums are made over 2, 4 or 8"):
        AllReduce([torch.device("cuda", 0)] * 3, 64, 1, 1)
