"""Without a GPU: sums over devices, each of which stores into the memory of the others. The kernels run on the
processor, a thread for each device."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deltic.ops.cuda.arguments import AllReduceArgs, AllReduceNormArgs
from deltic.ops.cuda.driver import FOLDER
from deltic.ops.slices import tree_sum

HIDDEN, FEW, MANY, EPS = 264, 5, 7, 1e-6
"""Columns: not as many as threads of a block. Tokens of both kinds of sums: no multiple of the devices."""


class Devices:
    """The memory of so many devices, and what runs their kernels. They wait for each other for five seconds of a clock
    that stands still while one of them has something to do."""

    def __init__(self, count: int, library: Any) -> None:
        self.count, self._library, rng = count, library, torch.Generator().manual_seed(count)

        def draw(*size: int) -> list[Tensor]:
            return [torch.randn(size, generator=rng) * 10.0**(rank % 3) for rank in range(count)]

        self.few, self.many = draw(FEW, HIDDEN), [part.bfloat16() for part in draw(MANY, HIDDEN)]
        start = torch.randn(MANY, HIDDEN, generator=rng)
        self.start, self.residuals = start, [start.clone() for _ in range(count)]
        self.normed = [torch.zeros(MANY, HIDDEN, dtype=torch.bfloat16) for _ in range(count)]
        self.wide = [torch.zeros(MANY, HIDDEN) for _ in range(count)]
        self.scale, self.states = torch.rand(HIDDEN, generator=rng) + 0.5, torch.zeros(count, 4, dtype=torch.int32)
        self.reports = torch.zeros(count, 4, dtype=torch.int32)
        room, own = FEW * HIDDEN // 2, (MANY if count == 2 else -(-MANY // count)) * HIDDEN // 8
        self._memory = [torch.zeros(count, 2 * count * room * 4, dtype=torch.int32),
                        torch.full((count, 2 * 2 * count * own * 4), -1, dtype=torch.int32)]
        boxes = [(ctypes.c_void_p * 8)(*[box.data_ptr() for box in memory]) for memory in self._memory]

        def common(rank: int, part: Tensor) -> dict[str, Any]:
            return {"x": part, "y": self.residuals[rank], "state": self.states[rank], "report": self.reports[rank],
                    "limit": 5 * 10**9, "rank": rank, "fences": rank % 2}

        self._few = [AllReduceArgs(**common(rank, self.few[rank]), boxes=boxes[0], room=room, cells=room)
                     for rank in range(count)]
        self._many = [AllReduceNormArgs(
            **common(rank, self.many[rank]), boxes=boxes[1], room=own, cells=MANY, scale=self.scale,
            normed=self.normed[rank], wide=self.wide[rank], eps=EPS) for rank in range(count)]

    def run(self, kinds: str, absent: int = -1) -> None:
        """Makes sums one after the other: `f` of few tokens, `m` of many."""
        few, many = ((ctypes.c_void_p * self.count)(*map(ctypes.addressof, given)) for given in (self._few, self._many))
        of_many = (ctypes.c_int * len(kinds))(*[kind == "m" for kind in kinds])
        self._library.run_sums(len(kinds), of_many, few, many, absent)

    def wanted(self, kinds: str) -> Tensor:
        """Returns the residual after these sums, to the bit. Two devices do not round sums of bfloat16 numbers."""
        many, residual = torch.zeros(MANY, HIDDEN), self.start.clone()
        for part in self.many:
            many += part.float()
        if self.count > 2:
            many = many.bfloat16().float()
        for kind in kinds:
            if kind == "f":
                residual[:FEW] += tree_sum(self.few)
            else:
                residual += many
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


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("kinds", ["fffff", "mmmmm", "mffmfmmmfm"])
def test_sums(library_of: Callable[[int], Any], kinds: str, count: int) -> None:
    """Devices run ahead of each other as far as boxes allow. All have the same bits."""
    devices = Devices(count, library_of(count))
    devices.run(kinds)
    wanted = devices.wanted(kinds)
    assert all(torch.equal(found, wanted) for found in devices.residuals) and not bool(devices.reports.any())
    if kinds[-1] == "m":
        norm = F.rms_norm(wanted, (HIDDEN,), devices.scale, EPS)
        for normed, wide in zip(devices.normed, devices.wide, strict=True):
            assert torch.allclose(wide, norm, rtol=1e-5) and torch.equal(normed, wide.bfloat16())
            assert torch.equal(wide, devices.wide[0])


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("kinds", ["fmf", "mfm"])
def test_a_device_that_never_comes(library_of: Callable[[int], Any], kinds: str, count: int) -> None:
    """The others say who was missing, and give NaN."""
    devices = Devices(count, library_of(count))
    devices.run(kinds, absent=count - 1)
    for rank in range(count - 1):
        assert int(devices.reports[rank, 0]) == count
        assert bool(devices.residuals[rank].isnan().all())


@pytest.mark.parametrize("count", [2, 4])
def test_numbers_that_are_none(library_of: Callable[[int], Any], count: int) -> None:
    """Not a number with all bits set, which stands for a number that has not come."""
    devices = Devices(count, library_of(count))
    for part in devices.many:
        part.view(torch.int16)[3] = -1
    devices.run("mm")
    assert all(bool(found[3].isnan().all()) and bool(found[:3].isfinite().all()) for found in devices.residuals)
