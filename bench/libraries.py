"""Compares two compilations of the CPU kernels, such as g++'s and that of a wheel, in one process and on one thread.

Products of random matrices of a model's shape, on the same packed weights: the fastest of many alternating rounds, at
every processor level. Exit code 1 if the results differ in a bit.

    python hatch_build.py && unzip -o dist/deltic-*manylinux_2_28_x86_64.whl deltic/ops/cpu/libdeltic.so -d /tmp/wheel
    python bench/libraries.py deltic/ops/cpu/libdeltic.so /tmp/wheel/deltic/ops/cpu/libdeltic.so
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from ctypes import byref
from pathlib import Path

import numpy as np
import torch

from deltic.loader.gguf.blocks import BY_NAME
from deltic.loader.gguf.quantize import quantize
from deltic.ops.cpu.kernels import native_weight
from deltic.ops.cpu.library import _SIGNATURES, LEVELS
from deltic.ops.memory import Arena
from deltic.ops.quantized import QTensor, pack_rows

TYPES = ("F32", "BF16", "Q8_0", "Q4_K", "Q6_K")
TOKENS = (1, 4, 12, 64)


def opened(path: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(path.resolve()))
    for name in ("deltic_pool_new", "deltic_linear", "deltic_best_level"):
        getattr(loaded, name).restype, getattr(loaded, name).argtypes = _SIGNATURES[name]
    return loaded


def packed(name: str, rows: int, columns: int) -> QTensor:
    kind = BY_NAME[name]
    raw = quantize(np.random.default_rng(0).standard_normal((rows, columns), np.float32), kind).reshape(rows, -1)
    return pack_rows(name, kind.id, rows, columns, raw.shape[1],
                     lambda start, count: np.ascontiguousarray(raw[start:start + count]).reshape(-1), Arena())


def compare(libraries: list[ctypes.CDLL], pools: list[int], weight: QTensor, tokens: int, rounds: int) -> list[float]:
    """Seconds of each library, with equal results."""
    rows, columns = weight.rows, weight.columns
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(1))
    results = [torch.empty(tokens, rows) for _ in libraries]
    struct, best = native_weight((weight,)), [float("inf")] * len(libraries)
    for _ in range(rounds):
        for index, (library, pool) in enumerate(zip(libraries, pools)):
            start = time.perf_counter()
            status = library.deltic_linear(pool, x.data_ptr(), tokens, byref(struct), results[index].data_ptr())
            best[index] = min(best[index], time.perf_counter() - start)
            assert status == 0
    if not all(torch.equal(result, results[0]) for result in results):
        sys.exit(f"{weight} times {tokens} tokens: the libraries give different numbers")
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs=2, type=Path)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--columns", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args()
    libraries = [opened(path) for path in args.libraries]
    print("microseconds: first library, second library, first / second")
    for level in range(libraries[0].deltic_best_level() + 1):
        pools = [library.deltic_pool_new(1, level) for library in libraries]
        for name in TYPES:
            weight = packed(name, args.rows, args.columns)
            for tokens in TOKENS:
                first, second = compare(libraries, pools, weight, tokens, args.rounds)
                print(f"{LEVELS[level]:9}{name:6}{tokens:4} tokens {first * 1e6:10.1f} {second * 1e6:10.1f} "
                      f"{first / second:6.2f}", flush=True)


if __name__ == "__main__":
    main()
