"""The source of the Metal kernel, compiled as C++: the same numbers as the operations on arrays."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from deltic.ops.mlx import missing

if why := missing():
    pytest.skip(why, allow_module_level=True)

import mlx.core as mx

from deltic.ops.mlx.gdn import DeltaHeads, step
from deltic.ops.mlx.memory import copied, seen
from deltic.ops.mlx.metal import INPUTS, OUTPUTS, SOURCE

COMPILER = shutil.which("c++") or shutil.which("clang++")
ROWS, HEADS, KEYS, VALUES = 3, 4, 6, 10
_WHOLE = ("slots", "begun")


def compiled(folder: Path) -> ctypes.CDLL:
    """A function of the kernel's inputs and outputs that runs all threads one after another."""
    arguments = ", ".join([f"const {'int' if name in _WHOLE else 'float'} *{name}" for name in INPUTS]
                          + [f"float *{name}" for name in OUTPUTS])
    text = f"""
#include <cstddef>
typedef unsigned int uint;
struct uint3 {{ uint x, y, z; }};
constexpr int HEADS = {HEADS}, KEYS = {KEYS}, VALUES = {VALUES};
static void kernel(uint3 thread_position_in_grid, {arguments}) {{ {SOURCE} }}
extern "C" void run({arguments}) {{
    for (uint z = 0; z < {ROWS}; ++z) for (uint y = 0; y < HEADS; ++y) for (uint x = 0; x < VALUES; ++x)
        kernel(uint3{{x, y, z}}, {", ".join([*INPUTS, *OUTPUTS])});
}}"""
    (folder / "kernel.cpp").write_text(text)
    assert COMPILER
    subprocess.run([COMPILER, "-shared", "-fPIC", "-std=c++17", "-Wall", "-Werror", "-o", folder / "kernel.so",
                    folder / "kernel.cpp"], check=True)
    return ctypes.CDLL(str(folder / "kernel.so"))


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_the_kernel_computes_the_step(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    states, slots = random(7, HEADS, KEYS, VALUES), torch.tensor([5, 0, 2], dtype=torch.int32)
    states[0] = float("nan")  # a row without a state reads nothing
    begun = torch.tensor([1, 0, 1], dtype=torch.int32)
    query, key, value = random(ROWS, HEADS, KEYS), random(ROWS, HEADS, KEYS), random(ROWS, HEADS, VALUES)
    log_decay, beta = -random(ROWS, HEADS).abs(), random(ROWS, HEADS).sigmoid()
    outputs = [torch.empty(ROWS, HEADS, VALUES), torch.empty(ROWS, HEADS, KEYS, VALUES),
               torch.empty(ROWS, HEADS, VALUES)]
    inputs = [states, slots, begun, query, key, value, log_decay.exp(), beta]
    compiled(tmp_path).run(*(ctypes.c_void_p(each.data_ptr()) for each in (*inputs, *outputs)))
    start = states[slots.long()]
    start[1] = 0
    heads = DeltaHeads(*map(copied, (query, key, value, key, log_decay, beta)))
    wanted = step(heads, copied(start))
    mx.eval(*wanted)
    for found, expected in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(found, seen(expected), rtol=1e-5, atol=1e-5)
