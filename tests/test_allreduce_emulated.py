"""Sums over devices without a GPU. The kernels run on the processor with one thread for each device. A device stores
its numbers into the memory of the other devices."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deltic.ops.cuda.arguments import AllReduceArgs, AllReduceNormArgs
from deltic.ops.cuda.driver import FOLDER, KernelArguments
from deltic.ops.slices import tree_sum

HIDDEN, FEW, MANY, EPS = 264, 5, 7, 1e-6
"""Columns: not as many as threads of a block. Tokens of both kinds of sums: no multiple of the devices."""


slow = partial(pytest.param, marks=pytest.mark.slow)


class Devices:
    """The memory of so many devices, and what runs their kernels. They wait for each other for five seconds of a clock
    that stands still while one of them has something to do."""

    def __init__(self, count: int, library: Any) -> None:
        self.count, self._library, self._rng = count, library, torch.Generator().manual_seed(count)
        self.start = self._draw(MANY)
        self.residuals = [self.start.clone() for _ in range(count)]
        self.normed = [torch.zeros(MANY, HIDDEN, dtype=torch.bfloat16) for _ in range(count)]
        self.wide = [torch.zeros(MANY, HIDDEN) for _ in range(count)]
        self.scale, self._states = self._draw(1)[0], torch.zeros(count, 4, dtype=torch.int32)
        self.reports = torch.zeros(count, 4, dtype=torch.int32)
        self._rooms = FEW * HIDDEN // 2, (MANY if count == 2 else -(-MANY // count)) * HIDDEN // 8
        self._memory = [torch.zeros(count, 2 * count * self._rooms[0] * 4, dtype=torch.int32),
                        torch.full((count, 2 * 2 * count * self._rooms[1] * 4), -1, dtype=torch.int32)]
        self._boxes = [(ctypes.c_void_p * 8)(*[box.data_ptr() for box in memory]) for memory in self._memory]

    def _draw(self, tokens: int) -> Tensor:
        return torch.randn(tokens, HIDDEN, generator=self._rng)

    def parts(self, kinds: str) -> list[list[Tensor]]:
        """Returns what each device has of each sum: `f` of few tokens, `m` of many."""
        return [[self._draw(FEW) * 10.0**(rank % 3) if kind == "f" else self._draw(MANY).bfloat16()
                 for rank in range(self.count)] for kind in kinds]

    def run(self, sums: list[list[Tensor]], absent: int = -1) -> None:
        """Makes sums one after the other."""
        many = [parts[0].dtype == torch.bfloat16 for parts in sums]
        given = [self._arguments(rank, parts[rank]) for rank in range(self.count) for parts in sums]
        self._library.run_sums(len(sums), (ctypes.c_int * len(sums))(*many),
                               (ctypes.c_void_p * len(given))(*map(ctypes.addressof, given)), absent)

    def _arguments(self, rank: int, part: Tensor) -> KernelArguments:
        many = part.dtype == torch.bfloat16
        common: dict[str, Any] = {
            "x": part, "y": self.residuals[rank], "state": self._states[rank], "report": self.reports[rank],
            "limit": 5 * 10**9, "rank": rank, "fences": rank % 2, "boxes": self._boxes[many],
            "room": self._rooms[many]}
        if not many:
            return AllReduceArgs(**common, cells=self._rooms[0])
        return AllReduceNormArgs(**common, cells=MANY, scale=self.scale, normed=self.normed[rank], wide=self.wide[rank],
                                 eps=EPS)

    def wanted(self, sums: list[list[Tensor]]) -> Tensor:
        """Returns the residual after these sums, to the bit. Two devices do not round sums of bfloat16 numbers."""
        residual = self.start.clone()
        for parts in sums:
            if parts[0].dtype == torch.float32:
                residual[:FEW] += tree_sum(parts)
                continue
            total = torch.zeros(MANY, HIDDEN)
            for part in parts:
                total += part.float()
            residual += total if self.count == 2 else total.bfloat16().float()
        return residual


@pytest.fixture(scope="module")
def library_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Any]:
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    source = Path(__file__).with_name("emulated_allreduce.cpp")

    @cache
    def compiled(count: int) -> Any:
        target = tmp_path_factory.mktemp("emulated") / "allreduce.so"
        subprocess.run(["g++", "-std=c++20", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC", "-pthread",
                        f"-I{FOLDER}", f"-DDEVICES={count}", f"-DHIDDEN={HIDDEN}", str(source), "-o", str(target)],
                       check=True)
        return ctypes.CDLL(str(target))

    return compiled


@pytest.mark.parametrize("count", [2, 4, slow(8)])
@pytest.mark.parametrize("kinds", [slow("fffff"), slow("mmmmm"), "mffmfmmmfm"])
def test_sums(library_of: Callable[[int], Any], kinds: str, count: int) -> None:
    """Devices run ahead of each other as far as boxes allow. All have the same bits."""
    devices = Devices(count, library_of(count))
    sums = devices.parts(kinds)
    devices.run(sums)
    wanted = devices.wanted(sums)
    assert all(torch.equal(found, wanted) for found in devices.residuals) and not bool(devices.reports.any())
    if kinds[-1] == "m":
        norm = F.rms_norm(wanted, (HIDDEN,), devices.scale, EPS)
        for normed, wide in zip(devices.normed, devices.wide, strict=True):
            assert torch.allclose(wide, norm, rtol=1e-5, atol=1e-5) and torch.equal(normed, wide.bfloat16())
            assert torch.equal(wide, devices.wide[0])


@pytest.mark.parametrize("count", [slow(2), 4])
@pytest.mark.parametrize("kinds", [slow("fmf"), "mfm"])
def test_a_device_that_never_comes(library_of: Callable[[int], Any], kinds: str, count: int) -> None:
    """The others say who was missing, and give NaN."""
    devices = Devices(count, library_of(count))
    devices.run(devices.parts(kinds), absent=count - 1)
    for rank in range(count - 1):
        assert int(devices.reports[rank, 0]) == count
        assert bool(devices.residuals[rank].isnan().all())


@pytest.mark.parametrize("count", [slow(2), 4])
def test_numbers_that_are_none(library_of: Callable[[int], Any], count: int) -> None:
    """Not a number with all bits set, which stands for a number that has not come."""
    devices = Devices(count, library_of(count))
    sums = devices.parts("mm")
    for part in sums[0]:
        part.view(torch.int16)[3] = -1
    devices.run(sums)
    assert all(bool(found[3].isnan().all()) and bool(found[:3].isfinite().all()) for found in devices.residuals)
