"""Compiles csrc/ into the package, also for editable installs. Without a compiler the install still works: the torch
ops then serve everything.

    python hatch_build.py             compiles in place, without an install
    python hatch_build.py --wheels    writes the sdist and the wheels of all platforms to dist/
    DELTIC_WHEEL_TARGET=macosx_11_0_arm64 python -m build --wheel     one wheel

Wheels are compiled with zig, which brings the headers and libraries of every platform. pip installs it for the build.
"""

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
TARGETS = {
    "manylinux_2_28_x86_64": "x86_64-linux-gnu.2.28",
    "manylinux_2_28_aarch64": "aarch64-linux-gnu.2.28",
    "macosx_11_0_arm64": "aarch64-macos.11.0",
}
"""What DELTIC_WHEEL_TARGET may be, the platform tag of the wheel, and the platform's name for zig."""
ZIG = "ziglang==0.17.1"
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
ARM_LEVELS: dict[str, tuple[str, ...]] = {
    "portable": (),
    "dotprod": ("-mcpu=generic+dotprod",),
    "i8mm": ("-mcpu=generic+dotprod+i8mm",),
}
"""In words that g++, clang and zig understand."""
ONLY = {"amx": ("linear",)}
"""Levels that have some sources of their own, and share the others with the level below."""


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Called by hatchling before it packs or links the package."""

    def dependencies(self) -> list[str]:
        """What the build needs besides hatchling."""
        return [ZIG] if wheel_target() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles, and makes hatchling ship the result. version: standard or editable."""
        root, tag = Path(self.root), "" if version == "editable" else wheel_target()
        library = root / "build" / tag / "libdeltic.so" if tag else root / LIBRARY
        problem = compile_library(root / "csrc", library, tag)
        if problem and tag:
            raise RuntimeError(problem)
        if problem:
            print(f"deltic: no native CPU kernels, torch serves all ops: {problem}", file=sys.stderr)
            return
        if tag:
            build_data["force_include"] |= {str(library.with_name(Path(name).name)): name for name in (LIBRARY, HEADER)}
        else:
            build_data["artifacts"] += [LIBRARY, HEADER]
        build_data["pure_python"] = False
        # any Python of this platform: the library does not use Python
        build_data["tag"] = f"py3-none-{tag or re.sub('[-.]', '_', sysconfig.get_platform())}"


def wheel_target() -> str:
    """The platform tag that the environment asks for; empty: this machine, with its own compiler."""
    tag = os.environ.get("DELTIC_WHEEL_TARGET", "")
    if tag and tag not in TARGETS:
        raise ValueError(f"DELTIC_WHEEL_TARGET={tag}: must be one of {', '.join(TARGETS)}")
    return tag


def compile_library(sources: Path, library: Path, tag: str = "") -> str | None:
    """Compiles the sources in parallel, and copies their header to the library's directory. Returns an error.

    tag: the platform of a wheel, which zig compiles for. Without it, this machine's compiler compiles.
    """
    compiler = [sys.executable, "-m", "ziglang", "c++", "-target", TARGETS[tag], "-g0"] if tag else [
        os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or ""]
    include = ["-include", str(sources / "glibc.h")] if "linux" in tag else []
    if not compiler[0]:
        return "there is no C++ compiler (install g++, then reinstall)"
    name, machine = ("zig", TARGETS[tag].partition("-")[0]) if tag else (compiler[0], platform.machine())
    library.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as directory, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects, fresh = Path(directory), library.with_suffix(".new")
        commands = [[*compiler, *FLAGS, *include, *flags, "-c", str(source), "-o", str(objects / f"{unit}.o")]
                    for unit, source, flags in _units(sources, machine)]
        for error in pool.map(_run, commands):
            if error:
                return f"{name} failed: {error}"
        linked = [*map(str, sorted(objects.glob("*.o"))), "-o", str(fresh), "-ldl"]
        error = _run([*compiler, "-shared", "-pthread", *linked])
        if error:
            fresh.unlink(missing_ok=True)
            return f"{name} failed: {error}"
        fresh.replace(library)
        shutil.copyfile(sources / "deltic.h", library.with_name("deltic.h"))
    return None


def build_all(root: Path) -> None:
    """Writes the sdist and the wheel of each platform to dist/, with the package `build`."""
    for tag in ("", *TARGETS):
        subprocess.run([sys.executable, "-m", "build", "--wheel" if tag else "--sdist", str(root)], check=True,
                       env=os.environ | {"DELTIC_WHEEL_TARGET": tag})


def _units(sources: Path, machine: str) -> Iterator[tuple[str, Path, tuple[str, ...]]]:
    """What is compiled: name of the object, source, flags."""
    levels = LEVELS if machine == "x86_64" else ARM_LEVELS if machine in ("aarch64", "arm64") else {"portable": ()}
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
    sys.exit(build_all(ROOT) if "--wheels" in sys.argv else compile_library(ROOT / "csrc", ROOT / LIBRARY))
