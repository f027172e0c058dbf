"""The five changes that newcomers make most, as patches: each touches as few files as CONTRIBUTING.md says.

A patch in `tests/patches` holds a whole small change with its test and its documentation. When code around it changes,
apply it by hand, and write it again: `git diff --unified=1 > tests/patches/NAME.patch`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PATCHES = Path(__file__).parent / "patches"
FILES = {"sampling_parameter": 6, "architecture": 8, "gguf_type": 1, "endpoint": 3, "gpu_kernel_variant": 8}
"""The most files that each change may touch, its test and its page of the documentation among them."""


@pytest.fixture(params=FILES)
def changed(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, list[str]]:
    """A task, a copy of the sources with its patch applied, and the files that the patch touches."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, tmp_path / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.hardlink_to(source)
    patch = str(PATCHES / f"{request.param}.patch")
    touched = subprocess.run(["git", "apply", "--numstat", patch], cwd=tmp_path, capture_output=True, check=True,
                             text=True)
    names = [line.split("\t")[2] for line in touched.stdout.splitlines()]
    for name in names:  # a copy of its own, not a link to the file of the checkout
        target = tmp_path / name
        if target.exists():
            content = target.read_bytes()
            target.unlink()
            target.write_bytes(content)
    subprocess.run(["git", "apply", patch], cwd=tmp_path, check=True)
    return request.param, tmp_path, names


def test_a_task_touches_few_files(changed: tuple[str, Path, list[str]]) -> None:
    task, _, names = changed
    assert len(names) <= FILES[task], names
    assert task == "gguf_type" or any(name.startswith("tests/test_") for name in names)


@pytest.mark.slow
def test_a_task_passes_its_own_test(changed: tuple[str, Path, list[str]]) -> None:
    task, root, names = changed
    library = ROOT / "deltic" / "ops" / "cpu"
    for name in ("libdeltic.so", "deltic.h"):
        (root / "deltic" / "ops" / "cpu" / name).hardlink_to(library / name)
    tests = [name for name in names if name.startswith("tests/test_")] or ["tests/test_gguf_blocks.py"]
    found = subprocess.run([sys.executable, "-m", "pytest", *tests, "-k", task], cwd=root, capture_output=True,
                           text=True, check=False)
    assert found.returncode == 0 and " passed" in found.stdout, found.stdout
