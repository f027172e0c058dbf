"""The ARM64 levels of the kernels, compiled for that processor and run by an emulator.

Two machines run `levels/ops.cpp`: every op on the same pseudo-random inputs. All levels of ARM64 must write the bytes
of the portable level of x86-64, compiled with fused multiply-add, which every ARM64 processor has.
"""

from __future__ import annotations

import platform
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "csrc"
BUILD = runpy.run_path(str(ROOT / "hatch_build.py"), run_name="hatch_build")
LEVELS: dict[str, tuple[str, ...]] = BUILD["ARM_LEVELS"]
PER_LEVEL: tuple[str, ...] = BUILD["PER_LEVEL"]
FLAGS = [flag for flag in BUILD["FLAGS"] if flag != "-O3"]
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
PROCESSORS = {"portable": "cortex-a53", "dotprod": "neoverse-n1", "i8mm": "max"}
"""Processors of the emulator, the best level of each being that one."""


def absent() -> str:
    """Returns why the tests cannot run here."""
    if programs := [program for program in (CROSS, EMULATOR) if not shutil.which(program)]:
        return f"no {' and no '.join(programs)} (Debian: g++-aarch64-linux-gnu, qemu-user-static)"
    if platform.machine() != "x86_64" or " fma " not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        return "results are compared with those of an x86-64 processor with FMA"
    return ""


pytestmark = pytest.mark.skipif(bool(absent()), reason=absent())


def program(compiler: str, directory: Path, levels: dict[str, tuple[str, ...]], *link: str) -> Path:
    """Compiles the kernels and `levels/ops.cpp`, as hatch_build.py compiles the library, but for any machine."""
    plain = [source for source in CSRC.glob("*.cpp") if source.stem not in PER_LEVEL]
    units = [(source, "", ()) for source in [*plain, ROOT / "tests" / "levels" / "ops.cpp"]]
    units += [(CSRC / f"{name}.cpp", level, (f"-DDELTIC_LEVEL={level}", *flags))
              for name in PER_LEVEL for level, flags in levels.items()]
    objects = [str(directory / f"{source.stem}-{level}.o") for source, level, _ in units]

    def compiled(unit: tuple[Path, str, tuple[str, ...]], to: str) -> None:
        source, _, flags = unit
        subprocess.run([compiler, "-O1", *FLAGS, *flags, f"-I{CSRC}", "-c", str(source), "-o", to], check=True)

    with ThreadPoolExecutor() as pool:
        list(pool.map(compiled, units, objects))
    subprocess.run([compiler, *objects, "-pthread", "-o", str(directory / "ops"), *link], check=True)
    return directory / "ops"


def outputs(file: Path) -> Iterator[tuple[str, bytes]]:
    """Yields the name and the bytes of every case."""
    data, at = file.read_bytes(), 0
    while at < len(data):
        end = data.index(b"\n", at)
        name, _, size = data[at:end].decode().rpartition(" ")
        at = end + 1 + int(size)
        yield name, data[end + 1:at]


def difference(name: str, found: bytes, wanted: bytes) -> str:
    if len(found) != len(wanted) or len(found) % 4:
        return f"{name}: {len(found)} bytes differ from {len(wanted)} wanted ones"
    mine, theirs = (np.frombuffer(data, np.uint32) for data in (found, wanted))
    places = np.flatnonzero(mine != theirs)
    first = [words[places[:3]].view(np.float32).tolist() for words in (mine, theirs)]
    return f"{name}: {len(places)} of {len(mine)} differ from number {places[0]} on: {first[0]}, wanted {first[1]}"


def check_same(found: Path, wanted: Path) -> None:
    pairs = list(zip(outputs(found), outputs(wanted), strict=True))
    assert len(pairs) > 100 and all(mine[0] == theirs[0] for mine, theirs in pairs)
    wrong = [difference(name, mine, theirs) for (name, mine), (_, theirs) in pairs if mine != theirs]
    assert not wrong, "\n".join(wrong[:40])


@pytest.mark.slow
def test_every_op_equals_the_portable_level(tmp_path: Path) -> None:
    """To the bit; and a level is refused if the processor lacks it."""
    for machine in ("x86", "arm"):
        (tmp_path / machine).mkdir()
    # the table of levels names some that are not compiled here; they are never called
    portable = program("g++", tmp_path / "x86", {"portable": ("-mfma",)}, "-no-pie", "-ldl",
                       "-Wl,--unresolved-symbols=ignore-all")
    subprocess.run([str(portable), "0", str(tmp_path / "wanted")], check=True)
    made = program(CROSS, tmp_path / "arm", LEVELS, "-static")
    for number, level in enumerate(LEVELS):
        run = [EMULATOR, "-cpu", PROCESSORS[level], str(made)]
        subprocess.run([*run, str(number), str(tmp_path / level)], check=True)
        check_same(tmp_path / level, tmp_path / "wanted")
        beyond = subprocess.run([*run, str(number + 1), str(tmp_path / "none")], capture_output=True, text=True)
        assert beyond.returncode == 2 and "no such level" in beyond.stderr


@pytest.mark.parametrize("level", list(LEVELS)[1:])
def test_products_compile(level: str, tmp_path: Path) -> None:
    """Of three types, which takes a few seconds; the slow test compiles everything."""
    lines = (CSRC / "linear.cpp").read_text(encoding="utf-8").splitlines()
    some = [line for line in lines if not re.match(r" +case DELTIC_(?!Q8_0|Q4_K|BF16)\w+: return", line)]
    assert len(lines) - len(some) > 10
    (tmp_path / "some.cpp").write_text("\n".join(some), encoding="utf-8")
    flags = [*FLAGS, "-O0", *LEVELS[level], f"-DDELTIC_LEVEL={level}", f"-I{CSRC}"]
    subprocess.run([CROSS, *flags, "-c", "some.cpp"], cwd=tmp_path, check=True)
