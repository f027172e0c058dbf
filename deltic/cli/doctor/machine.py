"""The processor, threads, load and memory of this machine."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path

from deltic.cli.doctor.findings import GIB, Fault, Finding, gib
from deltic.cli.machine import cpu_name, memory_mib
from deltic.config import available_cores, available_memory

_FEATURES = {"AVX2": "avx2", "AVX-512": "avx512f", "AVX-512 VNNI": "avx512_vnni", "AVX-512 BF16": "avx512_bf16",
             "AMX BF16": "amx_bf16"}
_LITTLE_MEMORY, _NO_MEMORY, _MUCH_SWAP = 2 * GIB, GIB // 2, GIB // 4


def _is_fewer(value: str, cores: int) -> bool:
    return value.split(",")[0].isdigit() and int(value.split(",")[0]) < cores


def _is_on(value: str, cores: int) -> bool:
    return value.strip().lower() not in ("", "0", "false", "disabled", "none")


_THREAD_ADVICE = "unset it (deltic takes the physical cores; --threads says otherwise)"
_PIN_ADVICE = "unset it: pinned threads wait wherever another process has their core"
_HARMFUL: dict[str, tuple[Callable[[str, int], bool], str]] = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT"), (_is_fewer, _THREAD_ADVICE)),
    **dict.fromkeys(("KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES"), (_is_on, _PIN_ADVICE)),
    "OMP_WAIT_POLICY": (_is_on, "unset it: active threads spin where others have work, passive ones wake up late"),
}
"""Environment variables: when a value (beside so many cores) does harm, and what to do."""


def check_processor(args: argparse.Namespace) -> Finding:
    flags = _cpu_flags()
    known = [name for name, flag in _FEATURES.items() if flag in flags]
    return Finding.of("processor", f"{cpu_name()} ({', '.join(known) or 'no vector extensions that deltic knows'})")


def check_threads(args: argparse.Namespace) -> Finding:
    import torch

    cores, total = available_cores(), os.cpu_count() or 1
    given = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    harmful = {name: advice for name, (harms, advice) in _HARMFUL.items()
               if name in os.environ and harms(os.environ[name], cores)}
    values = "".join(f", {name}={os.environ[name]}" for name in harmful)
    return Finding.of("threads", f"{cores} cores to use ({given} of {total} hardware threads by affinity), torch "
                                 f"starts with {torch.get_num_threads()}{values}",
                      [("warning", f"{name}: {advice}") for name, advice in harmful.items()])


def check_load(args: argparse.Namespace) -> Finding:
    average, total = os.getloadavg()[0], os.cpu_count() or 1
    busy: list[Fault] = [("warning", "others use the cores, so that timings will be bad: end them, or lower --threads")]
    return Finding.of("load", f"{average:.1f} on {total} hardware threads", busy if average > total else [])


def check_memory(args: argparse.Namespace) -> Finding:
    free, limit, swapped = available_memory(), _memory_limit(), _swap_used()
    faults: list[Fault] = []
    if free < _LITTLE_MEMORY:
        faults.append(("problem" if free < _NO_MEMORY else "warning", "little memory is left: end other programs, "
                       "raise the container's limit, or use a smaller model"))
    if swapped > _MUCH_SWAP:
        faults.append(("warning", "memory was moved to swap, which is slow: end other programs"))
    limited = f", limited to {gib(limit)} by the container" if limit else ""
    swap = f", {gib(swapped)} in swap" if swapped else ""
    return Finding.of("memory", f"{gib(free)} free of {gib(memory_mib() << 20)}{limited}{swap}", faults)


def _cpu_flags() -> frozenset[str]:
    found = re.search(r"^(?:flags|Features)\s*:(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def _memory_limit() -> int | None:
    """What the container's cgroup allows, if less than there is."""
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = _read(name).strip()
        if limit.isdigit() and int(limit) < memory_mib() << 20:
            return int(limit)
    return None


def _swap_used() -> int:
    found = dict(re.findall(r"^(Swap\w+):\s+(\d+) kB", _read("/proc/meminfo"), re.MULTILINE))
    return (int(found.get("SwapTotal", 0)) - int(found.get("SwapFree", 0))) << 10


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
