"""The ARM64 levels of the kernels: compiled here for that processor, and run by an emulator.

Both machines run `levels/ops.cpp`, every op on the same pseudo-random inputs. All levels of ARM64 must write the bytes of
the portable level of x86-64, compiled with fused multiply-add, as every ARM64 processor has it.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "csrc"
sys.path.insert(0, str(ROOT))

import hatch_build  # noqa: E402

CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
MISSING = [program for program in (CROSS, EMULATOR) if not shutil.which(program)]
NO_FMA = platform.machine() != "x86_64" or " fma " not in Path("/proc/cpuinfo").read_text(encoding="utf-8")
LEVELS = list(hatch_build.ARM_LEVELS)
PROCESSORS = {"portable": "cortex-a53", "dotprod": "neoverse-n1", "i8mm": "max"}
"""What the emulator stands for: processors with a level's instructions and, but for the last, none of the next."""

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=f"no {' and no '.join(MISSING)} (Debian: g++-aarch64-linux-gnu, "
                                                       "qemu-user-static)"),
              pytest.mark.skipif(NO_FMA, reason="this is no x86-64 processor with FMA, which results are compared with")]


def compiled(compiler: str, source: Path, to: Path, *flags: str) -> None:
    flags = tuple(flag if flag != "-O3" else "-O1" for flag in hatch_build.FLAGS) + flags
    subprocess.run([compiler, *flags, f"-I{CSRC}", "-c", str(source), "-o", str(to)], check=True)


def program(compiler: str, directory: Path, levels: dict[str, tuple[str, ...]], *link: str) -> Path:
    """Compiles kernels and program; like `compile_library` in hatch_build.py, but for another machine, and faster."""
    units = [(source, "", ()) for source in [*CSRC.glob("*.cpp"), ROOT / "tests" / "levels" / "ops.cpp"]
             if source.stem not in hatch_build.PER_LEVEL]
    units += [(CSRC / f"{name}.cpp", level, (f"-DDELTIC_LEVEL={level}", *flags))
              for name in hatch_build.PER_LEVEL for level, flags in levels.items()]
    objects = [directory / f"{source.stem}-{level}.o" for source, level, _ in units]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda unit, to: compiled(compiler, unit[0], to, *unit[2]), units, objects))
    subprocess.run([compiler, *map(str, objects), "-pthread", "-o", str(directory / "ops"), *link], check=True)
    return directory / "ops"


def outputs(file: Path) -> Iterator[tuple[str, bytes]]:
    data, at = file.read_bytes(), 0
    while at < len(data):
        end = data.index(b"\n", at)
        name, _, size = data[at:end].decode().rpartition(" ")
        at = end + 1 + int(size)
        yield name, data[end + 1:at]


def different(name: str, found: bytes, wanted: bytes) -> str:
    if len(found) != len(wanted):
        return f"{name}: {len(found)} bytes instead of {len(wanted)}"
    width = 4 if len(found) % 4 == 0 else 1
    words = [np.frombuffer(data, np.uint32 if width == 4 else np.uint8) for data in (found, wanted)]
    places = np.flatnonzero(words[0] != words[1])
    values = [word[places[:3]].view(np.float32 if width == 4 else np.uint8).tolist() for word in words]
    return f"{name}: {len(places)} of {len(words[0])} differ from number {places[0]} on: {values[0]}, wanted {values[1]}"


def check_same(found: Path, wanted: Path) -> None:
    pairs = list(zip(outputs(found), outputs(wanted), strict=True))
    assert len(pairs) > 100 and [mine[0] for mine, _ in pairs] == [theirs[0] for _, theirs in pairs]
    wrong = [different(name, mine, theirs) for (name, mine), (_, theirs) in pairs if mine != theirs]
    assert not wrong, "\n".join(wrong[:40])


@cache
def on_x86(directory: Path) -> Path:
    """Returns the output of the portable level with fused multiply-add. (The others, which the table of levels names, are
    not there, and never called.)"""
    made = program("g++", directory, {"portable": ("-mfma",)}, "-no-pie", "-Wl,--unresolved-symbols=ignore-all", "-ldl")
    subprocess.run([str(made), "0", str(directory / "output")], check=True)
    return directory / "output"


@pytest.mark.slow
def test_every_op_equals_the_portable_level(tmp_path: Path) -> None:
    """To the bit; and a level is refused where the processor lacks it."""
    for name in ("x86", "arm"):
        (tmp_path / name).mkdir()
    wanted = on_x86(tmp_path / "x86")
    made = program(CROSS, tmp_path / "arm", hatch_build.ARM_LEVELS, "-static")
    for number, level in enumerate(LEVELS):
        file = tmp_path / level
        ran = [EMULATOR, "-cpu", PROCESSORS[level], str(made)]
        subprocess.run([*ran, str(number), str(file)], check=True)
        check_same(file, wanted)
        beyond = subprocess.run([*ran, str(number + 1), str(file)], capture_output=True, text=True)
        assert beyond.returncode == 2 and "no such level" in beyond.stderr


@pytest.mark.parametrize("level", LEVELS[1:])
def test_every_level_compiles(level: str) -> None:
    """Of the source that has most instructions of its own; the others are compiled by the slow test."""
    compiled(CROSS, CSRC / "linear.cpp", Path("/dev/null"), f"-DDELTIC_LEVEL={level}", "-fsyntax-only",
             *hatch_build.ARM_LEVELS[level])
