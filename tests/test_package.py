"""The package and its pages: public names, types, links, examples."""

from __future__ import annotations

import inspect
import os
import re
import runpy
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import lowest_versions
import pytest

import deltic
from deltic.ops import Ops

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_dir_has_the_public_names_and_loads_nothing() -> None:
    program = "import deltic, sys; print(*dir(deltic)); print('torch' in sys.modules)"
    names, loaded = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True,
                                   check=True).stdout.splitlines()
    assert set(deltic.__all__) <= set(names.split()) and loaded == "False"


def test_the_package_is_typed() -> None:
    assert (Path(deltic.__file__).parent / "py.typed").exists()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "Typing :: Typed" in project["classifiers"]


def test_readme_links_are_absolute() -> None:
    """Pictures may be relative: pages that cannot show them show their names."""
    relative = re.findall(r"(?<!!)\[[^]]*\]\((?!https://)([^)]+)\)", README)
    assert not relative


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ +(.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_links_have_targets() -> None:
    broken = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").glob("*.md")]:
        text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for link in re.findall(r"\]\(((?!https?://)[^)\s]+)\)", text):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken


def test_the_plot_is_up_to_date() -> None:
    plot = runpy.run_path(str(ROOT / "bench" / "plot.py"))
    assert (ROOT / "docs" / "speed.svg").read_text(encoding="utf-8") == plot["svg"]()


def test_tested_versions_are_within_the_bounds() -> None:
    """`make test-lowest` runs the lowest versions, the other tests those of constraints.txt."""
    pinned = dict(re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M))
    names = {name.lower().replace("_", "-"): version for name, version in pinned.items()}

    def numbers(version: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", version)]

    for name, low in lowest_versions.lowest().items():
        assert numbers(low) <= numbers(names[name.lower().replace("_", "-")]), name
    assert all((ROOT / "tests" / f"{name}.py").is_file() for name in lowest_versions.CORE)


def test_python_blocks_compile() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
    blocks = [(path.name, block) for path in pages
              for block in re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)]
    assert len(blocks) > 3
    for name, block in blocks:
        compile(block, name, "exec")


def test_the_readme_example_runs_without_a_server() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    loaded = "import sys; print({'starlette', 'uvicorn', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", f"{block}\n{loaded}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The capital of France is Paris.") and done.stdout.endswith("= 2.\nset()\n")


def test_files_named_in_the_readme_exist() -> None:
    named = re.findall(r"`((?:docs|bench|examples|tests)/[\w./-]+)`", README)
    assert len(named) > 5 and not [name for name in named if not (ROOT / name).exists()]


def test_kernels_page_names_every_op_and_source() -> None:
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    names = [op.name for op in fields(Ops)] + [path.name for path in (ROOT / "csrc").iterdir()]
    assert not [name for name in names if f"`{name}`" not in page]


@pytest.mark.parametrize("kind", [deltic.LLM, deltic.Session])
def test_python_page_names_every_method_and_parameter(kind: type) -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    names = {name for name in dir(kind) if not name.startswith("_")} | {*inspect.signature(kind).parameters}
    assert not {name for name in names - {"model", "options"} if not re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", page)}


def test_tests_on_a_gpu_compile_the_cpu_library_first(tmp_path: Path) -> None:
    """In a checkout that is not installed; without the package that builds wheels."""
    for name in ("Makefile", "hatch_build.py", "csrc", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    library = tmp_path / "deltic/ops/cpu/libdeltic.so"
    steps = []
    for built in (False, True):
        if built:
            library.parent.mkdir(parents=True)
            library.touch()
        done = subprocess.run(["make", "-n", "--no-print-directory", "test-gpu"], cwd=tmp_path, capture_output=True,
                              text=True, check=True, env={k: v for k, v in os.environ.items() if "MAKE" not in k})
        steps.append([line for line in done.stdout.splitlines() if "hatch_build.py" in line or "pytest" in line])
    assert "hatch_build.py" in steps[0][0] and steps[0][1:] == steps[1] and len(steps[1]) == 4
    done = subprocess.run([sys.executable, "-c", _WITHOUT_HATCHLING], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"CXX": "false"})
    assert done.returncode == 1 and done.stderr.strip() == "false failed: exit status 1"


_WITHOUT_HATCHLING = """import runpy, sys
sys.modules["hatchling"] = None
runpy.run_path("hatch_build.py", run_name="__main__")"""
