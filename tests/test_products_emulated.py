"""Without a GPU: products of decode steps, whose warps copy and multiply at the same time. The kernels run on the
processor, thread by thread; some copies come late."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deltic.ops.cuda.arguments import ProductArgs, StageArgs
from deltic.ops.cuda.card import CARDS
from deltic.ops.cuda.driver import FOLDER
from deltic.ops.cuda.kernel_config import ADD, GATE, PART, STORE, Multiply
from deltic.ops.cuda.sliced_product import WHOLE, ColumnSlices

EPS = 1e-6


@dataclass
class Case:
    """tokens, of a weight of so many rows and columns; blocks: of the launch."""

    columns: int
    out: int
    rows: int
    tokens: int = 1
    blocks: int = 1
    norm: bool = False
    unit: int = 8
    split: ColumnSlices = WHOLE
    tiles: int = 3

    def __str__(self) -> str:
        return re.sub(r"\W+", " ", self.product.name(self.tokens) + f" {self.tokens}")

    @property
    def product(self) -> Multiply:
        return Multiply(self.columns, self.norm, self.out, self.unit, split=self.split, tiles=self.tiles,
                        card=CARDS["sm_90"])


QUICK = [Case(2560, STORE, 150, blocks=2, norm=True), Case(6144, ADD, 90, blocks=2), Case(192, ADD, 70, 2),
         Case(2048, PART, 90, 3, split=ColumnSlices(2, 2)), Case(512, GATE, 96, 16, blocks=2, norm=True, tiles=2),
         Case(192, ADD, 70, 9), Case(2048, PART, 90, 7, split=ColumnSlices(2, 2), tiles=1)]
"""Of each form one; pieces of slices, slices that are not equal, several runs; many tokens."""
CASES = [
    Case(5120, GATE, 96, 3, blocks=2, norm=True), Case(2560, STORE, 100, 7, norm=True),
    Case(1024, STORE, 60, norm=True), Case(17408, ADD, 60, 4), Case(6144, ADD, 40, 6, tiles=2), Case(4096, ADD, 90),
    Case(9216, ADD, 50, unit=4), Case(1152, ADD, 70), Case(8704, PART, 120, split=ColumnSlices(4)),
    Case(4352, PART, 120, blocks=2, split=ColumnSlices(2)), Case(1088, PART, 90, split=ColumnSlices(1))]


def library_of(case: Case, tokens: int, target: Path) -> ctypes.CDLL:
    """The product of so many tokens, compiled for the processor."""
    call, source = re.search(r"\{ (\w+<.*?>)\(a\)", case.product.source(tokens)), Path(__file__).parent
    assert call
    subprocess.run(["g++", "-std=c++20", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC", f"-I{FOLDER}",
                    f"-DPRODUCT={call[1]}", f"-DSTAGED=stage_many<{case.columns}>",
                    str(source / "emulated_products.cpp"), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


def multiply(case: Case, library: ctypes.CDLL, weight: Tensor, x: Tensor, scale: Tensor | None, y: Tensor) -> None:
    """Writes the product to y, or adds it."""
    product, tokens, group, slots = case.product, len(x), 0, 0
    units = -(-case.rows // case.unit)
    if tokens <= product.few:
        group = product.group(tokens, -(-units // case.blocks))
        slots, _ = product.shared(tokens, group, -(-units // case.blocks))
    elif scale is not None:
        staged, factors = torch.empty(x.numel(), dtype=torch.bfloat16), torch.empty(tokens)
        assert library.run_stage(ctypes.byref(StageArgs(x=x, scale=scale, y=staged, factors=factors, eps=EPS,
                                                        tokens=tokens)), 256) == tokens
        x, scale = staged, factors
    copies = library.run_product(ctypes.byref(ProductArgs(
        weight=weight, x=x, scale=scale, y=y, eps=EPS, tokens=tokens, rows=case.rows, whole=units // case.blocks,
        rest=units % case.blocks, group=group, inverse=65536 // tokens + 1, slots=slots)),
        case.blocks, product.threads(tokens))
    assert copies > 0


@pytest.mark.parametrize("case", [*QUICK, *[pytest.param(case, marks=pytest.mark.slow) for case in CASES]], ids=str)
def test_products(case: Case, tmp_path: Path) -> None:
    """Of bfloat16 weights, added in float32. Many tokens have the bits that each of them has alone."""
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    tokens, rng = case.tokens, torch.Generator().manual_seed(1)
    weight = (torch.randn(case.rows, case.columns, generator=rng) * 0.05).bfloat16()
    x, scale = torch.randn(tokens, case.columns, generator=rng), torch.rand(case.columns, generator=rng) + 0.5
    normed = F.rms_norm(x, scale.shape, scale, EPS)
    x = x if case.norm else x.bfloat16()
    wanted = (normed if case.norm else x).double() @ weight.double().t()
    y = torch.randn(tokens, case.rows, generator=rng)
    if case.out == ADD:
        wanted += y
    elif case.out == GATE:
        gate, up = wanted.chunk(2, 1)
        wanted, y = F.silu(gate) * up, torch.zeros(tokens, case.rows // 2, dtype=torch.bfloat16)
    alone, given = y.clone(), scale if case.norm else None
    multiply(case, library_of(case, tokens, tmp_path / "product.so"), weight, x, given, y)
    assert float((y - wanted).norm() / wanted.norm()) < (5e-3 if case.norm else 1e-6)
    if tokens > case.product.few:
        one = library_of(case, 1, tmp_path / "alone.so")
        for token in range(tokens):
            multiply(case, one, weight, x[token:token + 1], given, alone[token:token + 1])
        assert torch.equal(y, alone)
