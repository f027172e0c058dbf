"""Wheels, the sdist and the release: contents, installation without a compiler, and the same bits as of g++."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from email import message_from_bytes
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import yaml
from test_package import tomllib

import deltic
import hatch_build

ROOT = Path(__file__).parents[1]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))
HERE = "manylinux_2_28_" + sysconfig.get_platform().removeprefix("linux-")
"""The tag of this machine's wheel."""
LIMIT = 20 << 20
"""Bytes of a wheel."""
OP_TESTS = ("test_ops_linear_cpu", "test_ops_gdn_cpu", "test_ops_attention_cpu", "test_ops_cpu", "test_ops_moe",
            "test_ops_sample", "test_ops_pack", "test_ops_quantize", "test_ops_store_kv", "test_native_step")


def interpreters() -> list[Path]:
    """The Pythons of this machine that deltic supports, one of each version: on the PATH, and those of pyenv."""
    found: dict[str, Path] = {}
    for minor in range(11, 20):
        name = f"python3.{minor}"
        homes = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/{name}"))
        if place := next((path for path in (*homes, shutil.which(name)) if path), None):
            found[name] = Path(place)
    return [*found.values()]


# The release


def test_the_version_has_a_section_of_the_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    [section] = re.findall(rf"^## \[{re.escape(deltic.__version__)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)", text,
                           re.M | re.S)
    assert len(section.splitlines()) > 10


def test_jobs_need_jobs_that_exist_and_only_the_last_ones_may_publish() -> None:
    jobs = WORKFLOW["jobs"]
    needed = {name: {job["needs"]} if isinstance(job.get("needs"), str) else {*job.get("needs", ())}
              for name, job in jobs.items()}
    assert all(names < {*jobs} for names in needed.values())
    assert needed["attest"] >= {"build", "suite", "test"} and needed["publish"] == {"attest"}
    assert "ref_type == 'tag'" in jobs["attest"]["if"] and WORKFLOW["permissions"] == {}
    writes = {name for name, job in jobs.items() if "write" in job["permissions"].values()}
    assert writes == {"attest", "publish", "release"} and jobs["publish"]["environment"] == "pypi"


def test_actions_are_pinned_and_named_files_exist() -> None:
    steps = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"]) for step in steps if "uses" in step)
    commands = "\n".join(step.get("run", "") for step in steps)
    named = re.findall(r"(?:tests|docs|bench)/[\w./-]+", commands)
    assert named and not [name for name in named if not (ROOT / name).exists()]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = [name for words in re.findall(r"^make (.*)$", commands, re.M) for name in words.split()]
    assert "wheels" in targets and all(f"\n{name}:" in makefile for name in targets)


def test_every_wheel_is_tested_with_every_python() -> None:
    matrix = WORKFLOW["jobs"]["test"]["strategy"]["matrix"]
    kinds = {"ubuntu-24.04": "manylinux_2_28_x86_64", "ubuntu-24.04-arm": "manylinux_2_28_aarch64",
             "macos-15": "macosx_11_0_arm64"}
    assert {kinds[name] for name in matrix["os"]} == {*hatch_build.TARGETS}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = re.findall(r"Python :: (3\.\d+)", str(project["classifiers"]))
    assert matrix["python"] == declared


def test_the_page_names_every_wheel() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert all(f"| `{tag}` |" in page for tag in hatch_build.TARGETS)


def test_an_unknown_target_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTIC_WHEEL_TARGET", "win_amd64")
    with pytest.raises(ValueError, match=r"DELTIC_WHEEL_TARGET=win_amd64: must be one of manylinux_2_28_x86_64, "):
        hatch_build.wheel_target()


def test_no_compiler_is_an_error_with_advice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    error = hatch_build.compile_library(ROOT / "csrc", tmp_path / "libdeltic.so")
    assert error == "there is no C++ compiler (install g++, then reinstall)" and not [*tmp_path.iterdir()]


# The files (slow: each wheel is compiled, unless DELTIC_DIST names a directory that has it)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(os.environ.get("DELTIC_DIST") or tmp_path_factory.mktemp("dist"))


@cache
def built(place: Path, tag: str) -> Path:
    """The wheel of a platform, or the sdist (empty tag), which no compiler may take part in."""
    pattern = f"deltic-{deltic.__version__}-py3-none-{tag}.whl" if tag else f"deltic-{deltic.__version__}.tar.gz"
    if not (place / pattern).exists():
        variables = os.environ | {"DELTIC_WHEEL_TARGET": tag, "PATH": os.environ["PATH"] if tag else ""}
        kind = "--wheel" if tag else "--sdist"
        subprocess.run([sys.executable, "-m", "build", kind, "--outdir", str(place), str(ROOT)], check=True,
                       env=variables)
    return place / pattern


@pytest.mark.slow
def test_the_sdist_has_the_sources_and_nothing_compiled(place: Path) -> None:
    with tarfile.open(built(place, "")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert not [name for name in names if name.endswith((".so", ".o", ".whl")) or "/build/" in name]
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").iterdir()}
    assert sources | {"hatch_build.py", "pyproject.toml", "LICENSE", "CHANGELOG.md"} < names


@pytest.mark.slow
def test_the_sdist_installs_without_a_compiler_and_says_so(place: Path, tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "CXX"} | {"PATH": ""}
    done = subprocess.run([sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps", "--wheel-dir", str(tmp_path),
                           str(built(place, ""))], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    output = done.stdout + done.stderr
    assert "no native CPU kernels, torch serves all ops: there is no C++ compiler (install g++" in output
    assert [path.name for path in tmp_path.iterdir()] == [f"deltic-{deltic.__version__}-py3-none-any.whl"]


@pytest.mark.slow
@pytest.mark.parametrize("tag", hatch_build.TARGETS)
def test_a_wheel_is_what_its_tag_says(place: Path, tag: str, tmp_path: Path) -> None:
    path = built(place, tag)
    assert path.stat().st_size <= LIMIT
    with ZipFile(path) as archive:
        about = message_from_bytes(archive.read(f"deltic-{deltic.__version__}.dist-info/WHEEL"))
        compiled = [name for name in archive.namelist() if name.endswith((".so", ".h"))]
        library = Path(archive.extract(hatch_build.LIBRARY, tmp_path))
    assert (about["Tag"], about["Root-Is-Purelib"]) == (f"py3-none-{tag}", "false")
    assert sorted(compiled) == sorted([hatch_build.LIBRARY, hatch_build.HEADER])
    if tag.startswith("macosx"):
        check_apple(library.read_bytes(), tag)
    else:
        check_linux(path, library, tag)


def check_linux(wheel: Path, library: Path, tag: str) -> None:
    """auditwheel agrees with the tag; the library needs the C library alone and exports its interface alone."""
    shown = subprocess.run([sys.executable, "-m", "auditwheel", "show", str(wheel)], check=True, capture_output=True,
                           text=True).stdout
    [allowed] = re.findall(r'the\s+following\s+platform\s+tag:\s+"(\w+)"', shown)
    machine, minor = tag.split("_", 3)[3], re.fullmatch(r"manylinux_2_(\d+)_\w+", allowed)
    assert allowed.endswith(machine) and minor and int(minor[1]) <= 28, shown
    from elftools.elf.elffile import ELFFile

    with library.open("rb") as file:
        elf = ELFFile(file)
        needed = {entry.needed for entry in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")}
        exported = {symbol.name for symbol in elf.get_section_by_name(".dynsym").iter_symbols()
                    if symbol["st_shndx"] != "SHN_UNDEF"}
        imported = {symbol.name for symbol in elf.get_section_by_name(".dynsym").iter_symbols()} - exported
    loader = {"x86_64": "ld-linux-x86-64", "aarch64": "ld-linux-aarch64"}[machine]
    assert {name.partition(".")[0] for name in needed} <= {"libc", "libm", "libpthread", "libdl", loader}
    assert "deltic_forward" in exported and not [name for name in exported if name.startswith(("_ZSt", "__cxa"))]
    assert {"exp", "expf", "log", "log1pf", "sincos", "memcpy"} <= imported, "zig's own have other bits"


def check_apple(code: bytes, tag: str) -> None:
    """A library for ARM64 that runs on the macOS of its tag and needs the system's library alone."""
    magic, processor, _, kind, count = struct.unpack_from("<5I", code)
    assert (magic, processor, kind) == (0xfeedfacf, 0x0100000c, 6)  # 64 bits, ARM64, MH_DYLIB
    at, oldest, needed = 32, None, []
    for _ in range(count):
        command, size = struct.unpack_from("<2I", code, at)
        if command == 0x32:  # LC_BUILD_VERSION: platform 1 is macOS
            platform, version = struct.unpack_from("<2I", code, at + 8)
            oldest = (platform, version >> 16, version >> 8 & 255)
        elif command == 0xc:  # LC_LOAD_DYLIB
            name = at + struct.unpack_from("<I", code, at + 8)[0]
            needed.append(code[name:code.index(0, name)].decode())
        at += size
    assert oldest is not None and oldest <= (1, *map(int, tag.split("_")[1:3]))
    assert needed == ["/usr/lib/libSystem.B.dylib"]


# Installed, without a compiler


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "environment"
    shutil.rmtree(tmp_path / "environment")  # a CUDA build of torch has gigabytes


@pytest.mark.slow
@pytest.mark.parametrize("python", interpreters(), ids=lambda path: path.name)
def test_a_wheel_answers_without_a_compiler(place: Path, environment: Path, tmp_path: Path, python: Path) -> None:
    wheel = built(place, HERE)
    subprocess.run([str(python), "-m", "venv", str(environment)], check=True)
    programs = environment / "bin"
    subprocess.run([str(programs / "python"), "-m", "pip", "install", "--quiet", "--constraint",
                    str(ROOT / "constraints.txt"), str(wheel)], check=True)
    check_installed(programs, tmp_path)


def check_installed(programs: Path, home: Path) -> None:
    variables = {"PATH": str(programs), "HOME": str(home)}

    def deltic_says(*words: str) -> str:
        done = subprocess.run([str(programs / "deltic"), *words], cwd=home, env=variables, capture_output=True,
                              text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert deltic_says("run", "What is the capital of France?").strip() == "The capital of France is Paris."
    report = json.loads(deltic_says("doctor", "--json"))
    found: dict[str, Any] = {finding["name"]: finding for finding in report["findings"]}
    assert report["ok"] and f"level {best_level()};" in found["kernels"]["fact"]
    assert "cpu: " in found["operations"]["fact"] and "step" in found["operations"]["fact"].partition("torch:")[0]
    # of this machine, not of the wheel: its load, memory and disk, and which torch the index has
    warned = {name for name, finding in found.items() if finding["state"] != "ok"}
    warned -= {"load", "memory", "hub", "threads"}
    assert warned <= {"torch"} and ("torch" not in warned or "CUDA" in found["torch"]["fact"])


def best_level() -> str:
    from deltic.ops import native_kernels

    return native_kernels().level


# The same bits


@pytest.mark.slow
def test_zig_and_this_compiler_compute_the_same_bits(place: Path, tmp_path: Path) -> None:
    """All numbers of the op tests, at every level of this processor."""
    with ZipFile(built(place, HERE)) as archive:
        wheels = Path(archive.extract(hatch_build.LIBRARY, tmp_path))
    digests = {}
    for name, library in (("wheel", wheels), ("compiler", ROOT / hatch_build.LIBRARY)):
        site = package_with(library, tmp_path / name)
        out = tmp_path / f"{name}.json"
        subprocess.run([sys.executable, "-m", "pytest", "-p", "kernel_bits", "--kernel-bits", str(out), "-k",
                        "not in_torch", *(str(ROOT / "tests" / f"{test}.py") for test in OP_TESTS)],
                       check=True, cwd=site,
                       env=os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT / 'tests'}"})
        digests[name] = json.loads(out.read_text(encoding="utf-8"))
    assert len(digests["wheel"]) > 100
    assert digests["wheel"] == digests["compiler"]


def package_with(library: Path, site: Path) -> Path:
    """A directory with this package, and with another library in it."""
    source = Path(deltic.__file__).parent
    inner = library_folder = site / "deltic"
    for name in ("", "ops", "cpu"):
        source, inner = source / name, inner / name
        inner.mkdir(parents=True)
        for path in source.iterdir():
            if path.name not in ("ops", "cpu", "libdeltic.so"):
                (inner / path.name).symlink_to(path)
    shutil.copyfile(library, library_folder / "ops" / "cpu" / "libdeltic.so")
    return site
