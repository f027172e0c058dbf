"""Without a GPU: the delta rule of decode steps of few rows, whose blocks have one or two slices of a value head. The
kernel runs on the processor, thread by thread."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.ops import reference
from deltic.ops.cuda.arguments import GdnArgs
from deltic.ops.cuda.driver import FOLDER
from deltic.ops.cuda.kernel_config import gdn_slice, heads_stride
from deltic.ops.cuda.state_delta_log import gdn_arguments
from deltic.ops.types import GdnSpec, GdnWeights, StateView
from deltic.runner.input_batch import build

DONE = (0, 1, 9)
"""Tokens before those of each row."""


def compiled(spec: GdnSpec, size: int, each: int, folder: Path) -> Any:
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    target = folder / f"gdn_{each}.so"
    shape, source = f"{spec.key_dim},{spec.value_dim},{size},float,{each}", Path(__file__).with_name("emulated_gdn.cpp")
    subprocess.run(["g++", "-std=c++20", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC", f"-I{FOLDER}",
                    f"-DSHAPE={shape}", str(source), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


def weights_of(spec: GdnSpec, rng: torch.Generator) -> GdnWeights:
    heads = spec.value_heads
    return GdnWeights(
        spec, None, torch.randn(spec.channels, spec.conv_kernel, generator=rng).bfloat16(),
        -torch.rand(heads, generator=rng), torch.randn(heads, generator=rng),
        torch.rand(spec.value_dim, generator=rng) + 0.5, None)


def normed(core: Tensor, spec: GdnSpec, size: int) -> Tensor:
    """What the output projection makes of slices of heads and of their sums of squares."""
    values, squares = core[:, :spec.values], core[:, spec.values:spec.values + spec.values // size]
    mean = squares.unflatten(1, (spec.value_heads, -1)).sum(-1) / spec.value_dim
    return values * (mean + spec.eps).rsqrt().repeat_interleave(spec.value_dim, 1)


@pytest.mark.parametrize(("spec", "shards"), [
    (GdnSpec(1, 3, 128, 128, 4, 1e-6), 8),
    pytest.param(GdnSpec(2, 4, 128, 128, 4, 1e-6, tiled=True), 1, marks=pytest.mark.slow),
], ids=["32 columns", "16 columns, tiled"])
def test_blocks_of_one_or_two_slices(spec: GdnSpec, shards: int, tmp_path: Path) -> None:
    """Both give the reference's numbers, and the same bits. Slots that no row writes stay as they are."""
    rng, size = torch.Generator().manual_seed(1), gdn_slice(spec, "few", shards)
    weights, rows, stride = weights_of(spec, rng), len(DONE), spec.channels + spec.values + 2 * spec.value_heads
    before = StateView(torch.randn(2 * rows, spec.value_heads, 128, 128, generator=rng) * 0.3,
                       torch.randn(2 * rows, 4, spec.channels, generator=rng).bfloat16())
    libraries = {each: compiled(spec, size, each, tmp_path) for each in (1, 2)}
    for tokens in (1, 3):
        moved = (tokens > 1, True, tokens > 1)  # rows of several tokens never write the slot that they read
        plan = StepPlan(tuple(PlannedRow((7,) * tokens, done, [1], 2 * row, 1, target=2 * row + moved[row])
                              for row, done in enumerate(DONE)))
        batch = replace(build(plan, torch.device("cpu")), count=torch.tensor([rows]))
        proj = torch.randn(rows * tokens, stride, generator=rng).bfloat16().float()
        slow, found = StateView(before.recurrent.clone(), before.conv.clone()), []
        wanted = reference.gdn_core(proj, weights, slow, batch)
        for each, library in libraries.items():
            state = StateView(before.recurrent.clone(), before.conv.clone())
            core = torch.zeros(rows * tokens, heads_stride(spec, shards))
            heads = rows * spec.value_heads
            blocks = heads * spec.value_dim // size // each + 2  # two have nothing to do
            arguments = GdnArgs(**gdn_arguments(weights, state, batch, proj, stride, core), heads=heads)
            assert library.run_gdn(ctypes.byref(arguments), blocks, 128 * each) == blocks
            torch.testing.assert_close(normed(core, spec, size), wanted, rtol=2e-4, atol=2e-4)
            torch.testing.assert_close(state.recurrent, slow.recurrent, rtol=1e-4, atol=1e-5)
            assert torch.equal(state.conv, slow.conv)
            found.append((core, state))
        (one, first), (two, second) = found
        assert torch.equal(one, two) and torch.equal(first.recurrent, second.recurrent)
