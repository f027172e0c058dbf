"""compute-sanitizer over the GPU's kernels: no access outside of what was allocated, no two threads at one place of
shared memory in no order, no number read that nobody has written."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
TOOLS = {
    "initcheck": (),
    # of copies that a barrier in shared memory orders it would say that they are in no order, as `SOUND` shows
    "racecheck": ("--racecheck-memcpy-async", "no"),
    "memcheck": (),
}
"""The slowest first."""
MOST = 10_000
"""Faults that a tool names."""
ROOT = Path(__file__).parent.parent
NAMES = ("k_", "product_", "packed_")
"""How the names of our kernels begin."""

ALONE = {
    "kernels": "(products and (1024-1 or 1024-5 or 2560-9 or 192-2 or 4096-2)) or draws",
    "packed": "(products and (Q4_K-1024-1003 or Q6_K-1024-868 or FP8-1024-868 or 1024-Q4_K or 2048-Q4_K-868)) or "
              "(parts and 1024) or embeddings",
    "experts": "(few_tokens and -5] and not 2048) or ties_choose",
    "packed_experts": "few_tokens and beside and not passes",
}
"""Of the files `test_cuda_*.py`: tests that launch kernels one by one, of sizes that do not fit."""
PYTEST = ("-m", "pytest", "-p", "no:xdist", "-p", "no:benchmark", "-p", "no:cacheprovider")
ENGINES = ("tiny", "0.8b", "0.8b q4_k", "4b", "4b small states", "4b fp8", "experts", "experts q4_k")
SUBJECTS: dict[str, tuple[str, ...]] = {
    **{f"tests of {name}": (*PYTEST, f"tests/test_cuda_{name}.py", "-k", tests) for name, tests in ALONE.items()},
    **{f"engine {name}": ("tests/launched_engines.py", name) for name in ENGINES}}
"""What the tools run."""

HEADER = """
import torch
from deltic.ops.cuda.driver import KernelArguments, Module, fields, headers
class Pair(KernelArguments):
    _fields_ = fields("x y", "", "")
def kernels(source):
    return Module(headers() + '''
struct Pair { const float *x; float *y; };
#define KERNEL(name) extern "C" __global__ void name(const __grid_constant__ Pair a)
''' + source, torch.device("cuda"))
"""
FAULTS = HEADER + """
module = kernels('''
KERNEL(k_memcheck) { a.y[threadIdx.x + 1] = 7; }
KERNEL(k_initcheck) { a.y[threadIdx.x] = a.x[threadIdx.x]; }
KERNEL(k_racecheck) {
    __shared__ float s[128];
    s[threadIdx.x] = a.y[threadIdx.x];
    a.y[threadIdx.x] = s[127 - threadIdx.x];
}
''')
x, y = torch.empty(128, device="cuda"), torch.zeros(128, device="cuda")
module.launch("k_TOOL", (1,), 128, Pair(x=x, y=y))
torch.cuda.synchronize()
"""
SOUND = HEADER + """
module = kernels('''
// A warp copies what another one reads; who has read says so by one lane.
KERNEL(k_ring) {
    __shared__ __align__(128) float slots[2][32];
    __shared__ u64 barriers[4];
    const u32 filled = shared_address(barriers), emptied = filled + 16;
    const int lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 4; ++i) init_barrier(filled + 8 * i, 1);
        publish_barriers();
    }
    __syncthreads();
    for (int n = 0; n < 8; ++n) {
        const u32 own = n % 2 * 8;
        if (threadIdx.x >= 32) {
            if (n >= 2) await_barrier(emptied + own, (n / 2 - 1) & 1);
            if (lane == 0) {
                expect_bytes(filled + own, 128);
                bulk_copy_kept(shared_address(slots[n % 2]), a.x + n * 32, 128, filled + own);
            }
            __syncwarp();
        } else {
            await_barrier(filled + own, n / 2 & 1);
            __syncwarp();
            a.y[n * 32 + lane] = slots[n % 2][31 - lane];
            release_slot(emptied + own);
        }
    }
}
// Four warps write what four others read, and only readers wait for it: as the manual has it for bar.arrive.
KERNEL(k_arrive) {
    __shared__ float s[128];
    const int t = threadIdx.x & 127;
    for (int n = 0; n < 8; ++n)
        if (threadIdx.x < 128) {
            if (n) asm volatile("bar.sync 2, 256;" ::: "memory");
            s[t] = a.x[n * 128 + t];
            asm volatile("bar.arrive 1, 256;" ::: "memory");
        } else {
            asm volatile("bar.sync 1, 256;" ::: "memory");
            a.y[n * 128 + t] = s[127 - t];
            if (n < 7) asm volatile("bar.arrive 2, 256;" ::: "memory");
        }
}
// A thread copies what all eight warps have read, which four others prepare: two halves that meet at the same barrier,
// each in a loop of its own.
KERNEL(k_turn) {
    __shared__ __align__(128) float slots[2][256];
    __shared__ float scales[2][128];
    __shared__ u64 barriers[2];
    const u32 filled = shared_address(barriers);
    const int t = threadIdx.x, helper = t - 256;
    if (t == 0) {
        for (int i = 0; i < 2; ++i) init_barrier(filled + 8 * i, 1);
        publish_barriers();
    }
    __syncthreads();
    if (helper >= 0) {
        scales[0][helper] = 1;
        __syncthreads();
        for (int n = 0; n < 8; ++n) {
            scales[n + 1 & 1][helper] = 1;
            __syncthreads();
        }
        return;
    }
    for (int n = 0; n < 2 && t == 224; ++n) {
        expect_bytes(filled + 8 * n, 1024);
        bulk_copy_kept(shared_address(slots[n]), a.x + n * 256, 1024, filled + 8 * n);
    }
    __syncthreads();
    for (int n = 0; n < 8; ++n) {
        const u32 own = filled + n % 2 * 8;
        await_barrier(own, n / 2 & 1);
        __syncwarp();
        const float v = slots[n % 2][255 - t];
        end_reads();
        meet_eight_warps();
        if (t == 224 && n + 2 < 8) {
            expect_bytes(own, 1024);
            bulk_copy_kept(shared_address(slots[n % 2]), a.x + (n + 2) * 256, 1024, own);
        }
        __syncwarp();
        a.y[n * 256 + t] = v * scales[n & 1][t >> 1];
        __syncthreads();
    }
}
''')
for name, width, threads in (("k_ring", 32, 64), ("k_arrive", 128, 256), ("k_turn", 256, 384)):
    x, y = torch.randn(8, width).cuda(), torch.zeros(8, width, device="cuda")
    module.launch(name, (200,), threads, Pair(x=x, y=y))
    assert y.equal(x.flip(1))
"""
ORDERED_BY = {"k_ring": ("product_", "packed_", "k_experts_gate", "k_experts_down", "k_packed_gate", "k_packed_down"),
              "k_arrive": ("k_delta_scan",), "k_turn": ("k_gdn_many",)}
"""By the kernel of `SOUND` that shows it: how the names of our kernels begin that keep order in this way."""


@cache
def sanitizer() -> str:
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(found).exists():
        pytest.skip("compute-sanitizer is not installed")
    return found


def run(folder: Path, tool: str, *arguments: str) -> str:
    """What the tool and a Python of these arguments say, which is also in a file of the folder. Torch takes memory for
    each tensor alone, so that its end is known and what was in it before is not there. A kernel begins when the last
    one has ended: racecheck takes two at a time for one."""
    ours = [word for name in NAMES for word in ("--kernel-name", f"kns={name}")]
    command = [sanitizer(), "--tool", tool, *TOOLS[tool], "--force-blocking-launches", "--show-backtrace", "device",
               "--print-limit", str(MOST),
               *(ours if tool != "initcheck" else []),  # that one has to see what torch's kernels write, too
               sys.executable, *arguments]
    with (folder / f"{tool}.txt").open("w+") as said:
        subprocess.run(command, stdout=said, stderr=subprocess.STDOUT, timeout=500, cwd=ROOT, env={
            **os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])})
        said.seek(0)
        text = said.read()
    if "Device not supported" in text:
        pytest.skip("compute-sanitizer does not run on this machine")
    count = re.search(r"SUMMARY: (\d+) ", text)
    assert count, f"{said.name}: {text[-2000:]}"
    assert int(count[1]) < MOST, f"{said.name}: {text[:2000]}"
    return text


def blamed(text: str) -> set[str]:
    """The kernels of ours in which something was found."""
    return set(re.findall(rf"^=+.*\bat ((?:{'|'.join(NAMES)})\w+)", text, re.MULTILINE))


@cache
def not_understood(folder: Path) -> tuple[str, ...]:
    """How the names of kernels begin on which racecheck's word is not to be taken, as it blames sound ones, too."""
    text = run(folder, "racecheck", "-c", SOUND)
    assert "AssertionError" not in text, text
    return tuple(name for sound in blamed(text) for name in ORDERED_BY[sound])


@pytest.mark.parametrize("tool", TOOLS)
def test_injected_faults_are_found(tool: str, tmp_path: Path) -> None:
    text = run(tmp_path, tool, "-c", FAULTS.replace("TOOL", tool))
    assert f"k_{tool}" in blamed(text), text


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("tool", TOOLS)
def test_kernels(tool: str, subject: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    text = run(tmp_path, tool, *SUBJECTS[subject])
    passed = r"^[1-9]\d* passed" if subject.startswith("tests") else f"^{SUBJECTS[subject][-1]} passed$"
    assert re.search(passed, text, re.MULTILINE), f"{tmp_path}: {text[-4000:]}"
    found = blamed(text)
    if tool == "racecheck" and found:
        found = {name for name in found if not name.startswith(not_understood(tmp_path_factory.getbasetemp()))}
    assert not found, f"{tmp_path}: {text[:4000]}"
