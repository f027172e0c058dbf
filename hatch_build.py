"""Compiles csrc/ into the package, also for editable installs. Without a compiler the install still works: the torch
ops then serve everything. `python hatch_build.py` compiles in place, without an install."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a program, to compile in place
    BuildHookInterface = object  # type: ignore[assignment, misc]

LIBRARY = "deltic/ops/cpu/libdeltic.so"
HEADER = "deltic/ops/cpu/deltic.h"
"""The C interface, beside the library for those who call it from other languages."""
FLAGS = ("-O3", "-std=c++20", "-fPIC", "-pthread", "-w", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
         "-fno-strict-aliasing")
PER_LEVEL = ("linear", "gdn", "attention", "elementwise", "sample", "encode", "rows")
"""Sources that are compiled once for every level; the others make do with what every processor has."""
_AVX512 = ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl",
           "-mprefer-vector-width=512")
LEVELS: dict[str, tuple[str, ...]] = {
    "portable": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": _AVX512,
    "vnni": (*_AVX512, "-mavx512vnni"),
    "bf16": (*_AVX512, "-mavx512vnni", "-mavx512bf16"),
    "amx": (*_AVX512, "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
}
ONLY = {"amx": ("linear",)}
"""Levels that have some sources of their own, and share the others with the level below."""


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Called by hatchling before it packs or links the package."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and tell hatchling to ship what was compiled."""
        root = Path(self.root)
        problem = compile_library(root / "csrc", root / LIBRARY)
        if problem:
            print(f"deltic: no native CPU kernels, torch serves all ops: {problem}", file=sys.stderr)
            return
        build_data["artifacts"] += [LIBRARY, HEADER]
        build_data["pure_python"] = False
        # any Python of this machine's kind: the library knows nothing of Python
        build_data["tag"] = f"py3-none-{re.sub('[-.]', '_', sysconfig.get_platform())}"


def compile_library(sources: Path, target: Path) -> str | None:
    """Compile the sources to `target`, in parallel, their header beside it; returns why it could not be done."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        return "there is no C++ compiler (install g++, then reinstall)"
    with TemporaryDirectory() as directory, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects, fresh = Path(directory), target.with_suffix(".new")
        commands = [[compiler, *FLAGS, *flags, "-c", str(source), "-o", str(objects / f"{name}.o")]
                    for name, source, flags in _units(sources)]
        for error in pool.map(_run, commands):
            if error:
                return f"{compiler} failed: {error}"
        error = _run([compiler, "-shared", "-pthread", *map(str, sorted(objects.glob("*.o"))), "-o", str(fresh), "-ldl"])
        if error:
            fresh.unlink(missing_ok=True)
            return f"{compiler} failed: {error}"
        fresh.replace(target)
        shutil.copyfile(sources / "deltic.h", target.with_name("deltic.h"))
    return None


def _units(sources: Path) -> Iterator[tuple[str, Path, tuple[str, ...]]]:
    """What is compiled: name of the object, source, flags."""
    levels = LEVELS if platform.machine() == "x86_64" else {"portable": ()}
    for source in sorted(sources.glob("*.cpp")):
        if source.stem not in PER_LEVEL:
            yield source.stem, source, ()
            continue
        for level, flags in levels.items():
            if source.stem in ONLY.get(level, PER_LEVEL):
                yield f"{source.stem}-{level}", source, (f"-DDELTIC_LEVEL={level}", *flags)


def _run(command: list[str]) -> str | None:
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stderr.strip()[-400:] or f"exit status {done.returncode}" if done.returncode else None


if __name__ == "__main__":
    ROOT = Path(__file__).resolve().parent
    sys.exit(compile_library(ROOT / "csrc", ROOT / LIBRARY))
