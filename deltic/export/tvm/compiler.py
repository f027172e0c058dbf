"""Compiles a model into a directory that TVM's runtime runs: targets, libraries and parameters."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor

from deltic.config import ModelConfig
from deltic.errors import ConfigError, ModelError
from deltic.export.program import OBJECTS, hf_config, require_extra, write_sidecar
from deltic.export.tvm.artifact import (
    FLAGS,
    Generation,
    Metadata,
    Spec,
    as_stored,
    quantization_name,
    write_config,
    write_parameters,
)
from deltic.export.tvm.runtime import last_line
from deltic.loader.model_files import ModelFiles

# Targets


KINDS: Final[Mapping[str, str]] = {"llvm": "cpu", "cuda": "cuda", "rocm": "rocm", "metal": "metal", "opencl": "opencl",
                                   "vulkan": "vulkan"}
"""Kinds of targets, and the devices that run their code."""
_HOSTS: Final[Mapping[str, str]] = {"metal": "arm64-apple-macosx"}
"""Default triples of `-host` for devices that exist on only one kind of machine."""
_SYSTEMS: Final = {"android": "android", "ios": "ios", "darwin": "darwin", "macos": "darwin", "windows": "win32",
                   "linux": "linux"}
"""Part of a target triple -> Python's name of the operating system; the first match is used."""
_MACHINES: Final = ("x86_64", "aarch64", "arm64", "armv7a", "riscv64")
"""Processors, as spelled at the start of triples."""
_LLVM_FEATURES: Final = {"sse4_2": "sse4.2", "avx512_bf16": "avx512bf16", "asimd": "neon"}
"""LLVM's names of instruction sets that have other names in /proc/cpuinfo."""
_LIBRARY_NAMES: Final = {"darwin": "rt.dylib", "ios": "rt.dylib", "win32": "rt.dll"}
_DEFAULT_CUDA_ARCHITECTURE: Final = "sm_80"


@dataclass(frozen=True, slots=True)
class CompileTarget:
    """A target for which code can be generated on this machine."""

    target: Any
    """TVM's target object."""
    text: str
    """The text of the target option."""
    device: str
    """TVM's name of the device that runs the kernels."""
    machine: str
    system: str
    needs: tuple[str, ...]
    """Instruction sets that the processor must have."""
    linker: str | None
    """The linker; None if there is none for the target machine: the library then remains an archive of object files."""

    @property
    def library(self) -> str:
        """Returns the file name of the library."""
        return OBJECTS if self.linker is None else _LIBRARY_NAMES.get(self.system, "rt.so")


def parse_target(text: str) -> CompileTarget:
    """Parses a target such as "llvm -mcpu=x86-64-v3" or "metal -host=arm64-apple-ios".

    Raises ConfigError for an unknown target, ModelError naming what TVM or this machine lacks.
    """
    kind, options = _split(text)
    triple = options.get("mtriple") if kind == "llvm" else options.pop("host", _HOSTS.get(kind))
    if kind == "llvm":
        host = target = _cpu_target(text, options)
    else:
        host = _cpu_target(text, {"mtriple": triple} if triple else {})
        target = _gpu_target(text, kind, options, host)
    machine, system = platform.machine(), sys.platform
    if triple:
        machine = triple.partition("-")[0]
        system = next((name for part, name in _SYSTEMS.items() if part in triple), "unknown")
    return CompileTarget(target, text, KINDS[kind], machine, system, _needs(host), _linker(machine, system))


def _split(text: str) -> tuple[str, dict[str, str]]:
    kind, *options = text.split() or [""]
    if kind not in KINDS:
        raise ConfigError(f"target {text!r} is not supported, only {', '.join(KINDS)}, perhaps with options such as "
                          "-mcpu=...", "target")
    for option in options:
        if not re.fullmatch(r"--?[\w-]+=\S+", option):
            raise ConfigError(f"target {text!r}: {option!r} must be of the form -mcpu=NAME", "target")
    return kind, dict(option.lstrip("-").split("=", 1) for option in options)


def _tvm_target(text: str, options: Mapping[str, str]) -> Any:
    import tvm

    try:
        return tvm.target.Target(dict(options))
    except Exception as error:
        raise ConfigError(f"target {text!r} is not one that TVM knows: {last_line(error)}", "target") from error


def _cpu_target(text: str, options: Mapping[str, str]) -> Any:
    """Returns TVM's target for a processor; without options, for this machine's processor."""
    from tvm.target import codegen

    triple = options.get("mtriple") or codegen.llvm_get_system_triple()
    if triple.partition("-")[0] not in _MACHINES:
        raise ConfigError(f"target {text!r}: {triple!r} is no triple of a machine that TVM's runtime runs on: name one "
                          "such as aarch64-linux-android, arm64-apple-ios or x86_64-linux-gnu", "target")
    target = _tvm_target(text, {"kind": "llvm", **(options or {"mcpu": codegen.llvm_get_system_cpu()})})
    cpu = options.get("mcpu")
    if cpu and not codegen.llvm_is_valid_cpu(cpu, triple):
        raise ConfigError(f"target {text!r}: LLVM knows no processor {cpu!r} of {triple}", "target")
    return target


def _needs(processor: Any) -> tuple[str, ...]:
    """Returns the instruction sets that code for this processor may use."""
    from tvm.target import codegen

    return tuple(flag for flag in FLAGS
                 if codegen.llvm_cpu_has_features(_LLVM_FEATURES.get(flag, flag), processor))


def _gpu_target(text: str, kind: str, options: dict[str, str], host: Any) -> Any:
    import tvm

    if not _can_generate(kind):
        able = ", ".join(filter(_can_generate, KINDS))
        raise ModelError(f"target {text!r}: the installed TVM ({tvm.__version__}) has no code generator for {kind}: "
                         f"build TVM from source with USE_{kind.upper()}=ON, or choose one of {able}")
    if kind == "cuda":
        _check_cuda(text)
        options.setdefault("arch", _cuda_architecture())
    if kind == "rocm" and not Path(os.environ.get("ROCM_PATH", "/opt/rocm")).is_dir():
        raise ModelError(f"target {text!r}: TVM links AMD's device libraries, and there is no ROCm here: install it, "
                         "or set ROCM_PATH to where it is")
    return tvm.target.Target(_tvm_target(text, {"kind": kind, **options}), host=host)


def _can_generate(kind: str) -> bool:
    import tvm

    return tvm.get_global_func(f"target.build.{kind}", allow_missing=True) is not None


def _check_cuda(text: str) -> None:
    """Raises ModelError unless TVM can compile CUDA code here: else it would write source that cannot be loaded."""
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


def _cuda_architecture() -> str:
    import torch

    if not torch.cuda.is_available():
        return _DEFAULT_CUDA_ARCHITECTURE
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def _linker(machine: str, system: str) -> str | None:
    """Returns $CXX or, for this machine, the path of an installed compiler."""
    given = os.environ.get("CXX")
    if given:
        if shutil.which(given.split()[0]) is None:
            raise ModelError(f"CXX is {given!r}, which is no program here: name a compiler that links for the target")
        return given
    if (machine, system) != (platform.machine(), sys.platform):
        return None
    found = shutil.which("g++") or shutil.which("clang++")
    if found is None:
        raise ModelError("linking a compiled model needs g++ or clang++: install one, or name one in CXX")
    return found


def link(built: Any, path: Path, target: CompileTarget) -> None:
    """Writes TVM's output as a library or, if there is no linker, as an archive of object files."""
    if target.linker is None:
        built.export_library(str(path))
        return
    linker = target.linker.split()

    def run_linker(output: str, objects: list[str], options: list[str] | None = None, **unused: Any) -> None:
        command = [*linker, "-shared", "-fPIC", "-o", output, *objects, *(options or [])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = (done.stderr.strip() or done.stdout.strip() or str(done.returncode)).splitlines()
            raise ModelError(f"{command[0]} cannot link a library for {target.machine} ({target.system}): {lines[-1]}; "
                             f"name the compiler of that machine in CXX, or unset it to have the objects as {OBJECTS}")

    run_linker.output_format = "o"  # type: ignore[attr-defined]
    built.export_library(str(path), fcompile=run_linker)


# Compiling


StoredType = Literal["float32", "float16"]


@dataclass(frozen=True, slots=True)
class Compiled:
    """Size in bytes of the written library and parameters."""

    library: int
    parameters: int


def compile_model(files: ModelFiles, folder: Path, *, generation: Generation | None = None,
                  dtype: StoredType = "float32", target: str = "llvm", max_context: int | None = None,
                  chunk: int = 512) -> Compiled:
    """Compiles a language model into an existing directory.

    generation: default v2 for models with recurrent layers, else v1. dtype: dtype of the stored matrices; all else is
    float32. target: llvm, for this processor, or a target in TVM's syntax. chunk: maximum tokens of a prefill step.
    """
    require_extra("tvm")
    from deltic.export.tvm.network import AttentionNetwork, HybridNetwork, specification

    compile_target = parse_target(target)
    config = replace(files.config, num_mtp_layers=0)
    generation = _generation(config, generation)
    tensors = files.load("float32", "cpu", None)
    context = max_context or config.max_position_embeddings
    stored_config = replace(config, dtype=dtype, max_position_embeddings=context)
    write_sidecar(files, folder, stored_config)
    metadata = Metadata(generation, config.architecture, quantization_name(dtype), (), context, min(chunk, context),
                        config.vocab_size, compile_target.machine)
    network = HybridNetwork if config.linear_layers else AttentionNetwork
    library, metadata = build_library(
        lambda: network(config, dtype, compile_target.target), specification, metadata, compile_target, folder)
    size = write_parameters(folder, generation, _parameters(config, tensors, metadata.parameters))
    write_config(folder, metadata, stored_config, hf_config(stored_config))
    return Compiled(library, size)


def parameter_bytes(config: ModelConfig, dtype: StoredType) -> int:
    """Returns a lower bound for the parameters' size in bytes on disk."""
    return config.parameter_count * (2 if dtype == "float16" else 4)


def _generation(config: ModelConfig, requested: Generation | None) -> Generation:
    """Returns the generation. Raises ModelError if the model cannot be compiled, ConfigError if v1 lacks its layers."""
    if config.architecture not in ("qwen3_5", "qwen3"):
        raise ModelError(f"a {config.architecture} cannot be compiled by TVM, only dense Qwen3.5 and Qwen3")
    if not config.attention_layers:
        raise ModelError("a model without attention layers cannot be compiled by TVM")
    if config.linear_layers and requested == "v1":
        raise ConfigError("--generation v1 has attention alone, and this model has recurrent layers: leave it out",
                          "generation")
    return requested or ("v2" if config.linear_layers else "v1")


def build_library(network: Callable[[], Any], specification: Callable[[Any], Any], metadata: Metadata,
                  target: CompileTarget, folder: Path) -> tuple[int, Metadata]:
    """Writes the library of a network. Returns its size in bytes, and the metadata with parameters and target."""
    import tvm
    from tvm import relax

    try:
        with target.target:
            made = network()
            module, named = made.export_tvm(spec=specification(made))
            parameters = [(name, tuple(map(int, one.shape)), str(one.dtype)) for name, one in named]
            metadata = replace(metadata, parameters=tuple(parameters), needs=target.needs, device=target.device,
                               system=target.system, target=target.text)
            builder = relax.BlockBuilder(module)
            with builder.function("_metadata", params=[]):
                builder.emit_func_output(tvm.ir.StringImm(metadata.to_json()))
            built = relax.build(builder.get(), target=target.target,
                                relax_pipeline=relax.get_default_pipeline(target.target))
    except Exception as error:
        raise ModelError(f"TVM cannot compile this model for target {target.text!r}: {last_line(error)}") from error
    path = folder / target.library
    link(built, path, target)
    return path.stat().st_size, metadata


# Parameters


def _parameters(config: ModelConfig, tensors: dict[str, Tensor], specs: tuple[Spec, ...]
                ) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yields the library's parameters, and takes their tensors out of `tensors`."""
    for spec in specs:
        yield as_stored(spec, _parameter(config, tensors, spec[0]).numpy())


def _parameter(config: ModelConfig, tensors: dict[str, Tensor], name: str) -> Tensor:
    """Returns a parameter by its name in the network."""
    head, _, rest = name.partition(".")
    if head == "frequencies":
        size = config.rope.rotary_dim
        exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
        return 1.0 / config.rope.theta ** exponents
    if head == "norm":
        return tensors.pop("model.norm.weight").float() + config.norm_offset
    if head in ("table", "head"):
        return tensors.pop("model.embed_tokens.weight" if head == "table" else "lm_head.weight")
    layer, _, part = rest.partition(".")
    tensor = torch.cat([tensors.pop(f"model.layers.{layer}.{source}").float() for source in _SOURCES[part]])
    match part:
        case "input_norm" | "post_norm" | "mixer.q_norm" | "mixer.k_norm":
            return tensor + config.norm_offset
        case "mixer.conv":
            return tensor.squeeze(1).T
        case "mixer.decay":
            return -tensor.exp()
    return tensor


_SOURCES: Final[Mapping[str, tuple[str, ...]]] = {
    "input_norm": ("input_layernorm.weight",),
    "post_norm": ("post_attention_layernorm.weight",),
    "mixer.in_proj.weight": tuple(f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
    "mixer.out_proj.weight": ("linear_attn.out_proj.weight",),
    "mixer.conv": ("linear_attn.conv1d.weight",),
    "mixer.decay": ("linear_attn.A_log",),
    "mixer.dt_bias": ("linear_attn.dt_bias",),
    "mixer.norm": ("linear_attn.norm.weight",),
    "mixer.qkv.weight": tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
    "mixer.o_proj.weight": ("self_attn.o_proj.weight",),
    "mixer.q_norm": ("self_attn.q_norm.weight",),
    "mixer.k_norm": ("self_attn.k_norm.weight",),
    "gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down.weight": ("mlp.down_proj.weight",),
}
"""Checkpoint tensors whose rows are concatenated to a parameter of a layer."""
