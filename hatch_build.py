"""Compiles csrc/ into the package, also for editable installs. Without a compiler the install still works: the torch
ops then serve everything."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARY = "deltic/ops/cpu/libdeltic.so"
FLAGS = ("-O3", "-std=c++20", "-fPIC", "-shared", "-pthread", "-w")


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Called by hatchling before it packs or links the package."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and tell hatchling to ship what was compiled."""
        root = Path(self.root)
        problem = compile_library(sorted((root / "csrc").glob("*.cpp")), root / LIBRARY)
        if problem:
            print(f"deltic: no native CPU kernels, torch serves all ops: {problem}", file=sys.stderr)
            return
        build_data["artifacts"].append(LIBRARY)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True


def compile_library(sources: list[Path], target: Path) -> str | None:
    """Compile `sources` to `target`; returns why it could not be done."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        return "there is no C++ compiler (install g++, then reinstall)"
    fresh = target.with_suffix(".new")
    command = [compiler, *FLAGS, *map(str, sources), "-o", str(fresh)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        fresh.unlink(missing_ok=True)
        return f"{compiler} failed: {done.stderr.strip()[-400:]}"
    fresh.replace(target)
    return None
