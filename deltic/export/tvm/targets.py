"""The targets that the installed TVM can compile for, and what each of them needs."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from deltic.errors import ConfigError, ModelError
from deltic.export.opening import OBJECTS
from deltic.export.tvm.metadata import FLAGS

KINDS: Final[Mapping[str, str]] = {"llvm": "cpu", "cuda": "cuda", "rocm": "rocm", "metal": "metal", "opencl": "opencl",
                                   "vulkan": "vulkan"}
"""Kinds of targets, and the devices that run what is compiled for them."""
_HOSTS: Final[Mapping[str, str]] = {"metal": "arm64-apple-macosx"}
"""Where a kind's device is to be found, if not on any machine: triples for `-host`."""
_SYSTEMS: Final = (("android", "android"), ("ios", "ios"), ("darwin", "darwin"), ("macos", "darwin"),
                   ("windows", "win32"), ("linux", "linux"))
"""What a triple contains, and what Python calls the system."""
_CUDA: Final = "sm_80"
"""The default CUDA architecture where the machine has no GPU."""

_MACHINES: Final = ("x86_64", "aarch64", "arm64", "armv7a", "riscv64")
"""Processors, as triples begin with them."""
_FEATURES: Final = {"sse4_2": "sse4.2", "avx512_bf16": "avx512bf16", "asimd": "neon"}
"""LLVM's names of instruction sets, where they are not those of /proc/cpuinfo."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A compilation target.

    target: TVM's object. text: the option's text. device: the TVM device that runs the kernels. machine, system: the
    library's processor and operating system. needs: instruction sets that the processor must have. compiler: the
    linker; None: there is none for this machine, and the library stays an archive of object files.
    """

    target: Any
    text: str
    device: str
    machine: str
    system: str
    needs: tuple[str, ...]
    compiler: str | None

    @property
    def library(self) -> str:
        """The file's name."""
        if self.compiler is None:
            return OBJECTS
        return {"darwin": "rt.dylib", "ios": "rt.dylib", "win32": "rt.dll"}.get(self.system, "rt.so")


def find_goal(text: str) -> Goal:
    """The goal that a text names, such as "llvm -mcpu=x86-64-v3" or "metal -host=arm64-apple-ios". ConfigError for what
    is no target, ModelError naming what TVM or this machine lacks to compile for it."""
    kind, options = _parsed(text)
    triple = options.pop("host", None) if kind != "llvm" else options.get("mtriple")
    triple = triple or _HOSTS.get(kind)
    host = _processor(text, options if kind == "llvm" else {} if triple is None else {"mtriple": triple})
    target = host if kind == "llvm" else _gpu(text, kind, options, host)
    machine, system = _place(triple)
    return Goal(target, text, KINDS[kind], machine, system, _needs(host), _compiler(machine, system))


def _parsed(text: str) -> tuple[str, dict[str, str]]:
    """Kind and options."""
    kind, *options = text.split() or [""]
    if kind not in KINDS:
        raise ConfigError(f"target {text!r} is not supported, only {', '.join(KINDS)}, perhaps with options such as "
                          "-mcpu=...", "target")
    if wrong := [option for option in options if not re.fullmatch(r"--?[\w-]+=\S+", option)]:
        raise ConfigError(f"target {text!r}: {wrong[0]!r} must be of the form -mcpu=NAME", "target")
    return kind, dict(option.lstrip("-").split("=", 1) for option in options)


def _processor(text: str, said: Mapping[str, str]) -> Any:
    """TVM's target of a processor: this one, unless the options say otherwise."""
    import tvm

    system = tvm.target.codegen
    triple = said.get("mtriple") or system.llvm_get_system_triple()
    if triple.partition("-")[0] not in _MACHINES:
        raise ConfigError(f"target {text!r}: {triple!r} is no triple of a machine that TVM's runtime runs on: name one "
                          "such as aarch64-linux-android, arm64-apple-ios or x86_64-linux-gnu", "target")
    given = {**said} or {"mcpu": system.llvm_get_system_cpu()}
    found = _target(text, {"kind": "llvm", **given})
    cpu = said.get("mcpu")
    if cpu and not system.llvm_is_valid_cpu(cpu, triple):
        raise ConfigError(f"target {text!r}: LLVM knows no processor {cpu!r} of {triple}", "target")
    return found


def _needs(processor: Any) -> tuple[str, ...]:
    """The instructions that code for a processor may use."""
    import tvm

    has = tvm.target.codegen.llvm_cpu_has_features
    return tuple(flag for flag in FLAGS if has(_FEATURES.get(flag, flag), processor))


def _gpu(text: str, kind: str, options: dict[str, str], host: Any) -> Any:
    """TVM's target of a GPU. ModelError naming what is missing to generate its code."""
    import tvm

    if tvm.get_global_func(f"target.build.{kind}", allow_missing=True) is None:
        raise ModelError(f"target {text!r}: the installed TVM ({tvm.__version__}) has no code generator for {kind}: "
                         f"build TVM from source with USE_{kind.upper()}=ON, or choose one of {_able()}")
    if kind == "cuda":
        _check_cuda(text)
        options.setdefault("arch", _card() or _CUDA)
    if kind == "rocm" and not _rocm():
        raise ModelError(f"target {text!r}: TVM links AMD's device libraries, and there is no ROCm here: install it, "
                         "or set ROCM_PATH to where it is")
    return tvm.target.Target(_target(text, {"kind": kind, **options}), host=host)


def _check_cuda(text: str) -> None:
    """ModelError unless TVM can compile CUDA code here: without its CUDA runtime it leaves unloadable source."""
    import tvm

    if tvm.get_global_func("device_api.cuda", allow_missing=True) is None:
        raise ModelError(f"target {text!r}: the installed TVM compiles CUDA code only where its CUDA runtime loads, "
                         "which needs NVIDIA's driver (libcuda.so.1) and CUDA 13's libraries: compile on a machine "
                         "with the GPU")
    nvcc = os.environ.get("TVM_CUDA_COMPILE_MODE") == "nvcc" and shutil.which("nvcc")
    if not nvcc and find_spec("cuda") is None:
        raise ModelError(f"target {text!r}: TVM compiles CUDA code with the package cuda-bindings, which is not "
                         "installed: pip install cuda-bindings, or put nvcc on the PATH and set "
                         "TVM_CUDA_COMPILE_MODE=nvcc")


def _target(text: str, mapping: Mapping[str, str]) -> Any:
    import tvm

    try:
        return tvm.target.Target(dict(mapping))
    except Exception as error:
        reason = str(error).strip().rsplit("\n", 1)[-1]
        raise ConfigError(f"target {text!r} is not one that TVM knows: {reason}", "target") from error


def _able() -> str:
    import tvm

    return ", ".join(kind for kind in KINDS if tvm.get_global_func(f"target.build.{kind}", allow_missing=True))


def _card() -> str | None:
    """The architecture of the NVIDIA GPU that is here."""
    import torch

    return "sm_{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else None


def _rocm() -> bool:
    return Path(os.environ.get("ROCM_PATH", "/opt/rocm")).is_dir()


def _place(triple: str | None) -> tuple[str, str]:
    """Machine and system that a triple names; without one those that are here."""
    if triple is None:
        return platform.machine(), sys.platform
    return triple.partition("-")[0], next((system for part, system in _SYSTEMS if part in triple), "unknown")


def _compiler(machine: str, system: str) -> str | None:
    """What links a library for a machine: CXX or, for this machine, what is there."""
    given = os.environ.get("CXX")
    here = (machine, system) == (platform.machine(), sys.platform)
    found = given or (next(filter(None, map(shutil.which, ("g++", "clang++"))), None) if here else None)
    if found is None and here:
        raise ModelError("linking a compiled model needs g++ or clang++: install one, or name one in CXX")
    if given and shutil.which(given.split()[0]) is None:
        raise ModelError(f"CXX is {given!r}, which is no program here: name a compiler that links for the target")
    return found


def link(built: Any, path: Path, goal: Goal) -> None:
    """Write what TVM has built to a library or, where nothing can link it, to an archive of its objects. ModelError if
    the compiler fails."""
    if goal.compiler is None:
        built.export_library(str(path))
        return

    def linked(output: str, objects: list[str], options: list[str] | None = None, **more: Any) -> None:
        command = [*goal.compiler.split(), "-shared", "-fPIC", "-o", output, *objects, *(options or [])]  # type: ignore[union-attr]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise ModelError(f"{command[0]} cannot link a library for {goal.machine} ({goal.system}): "
                             f"{said[-1] if said else done.returncode}; name the compiler of that machine in CXX, or "
                             f"unset it to have the objects as {OBJECTS}")

    linked.output_format = "o"  # type: ignore[attr-defined]
    built.export_library(str(path), fcompile=linked)
