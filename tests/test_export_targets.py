"""`deltic compile --target`: processors and GPUs that TVM can build for here, and errors on other machines."""

from __future__ import annotations

import json
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoder_models import TEXTS, save_encoder
from export_cases import CHUNK, SHAPE, assert_same_answers, checkpoint, compiled, session

from deltic import Encoder
from deltic.cli import main
from deltic.config import EngineConfig, RopeConfig
from deltic.errors import ConfigError, ModelError
from deltic.export.program import open_program
from deltic.export.tvm.artifact import read_metadata

pytest.importorskip("tvm", reason="needs deltic[tvm]")

from deltic.export.tvm import compiler, gpu_kernels, kernels, network
from deltic.export.tvm.compiler import parse_target

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def no_compiler_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("TVM_CUDA_COMPILE_MODE", raising=False)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest model that can be compiled."""
    place = tmp_path_factory.mktemp("encoder")
    save_encoder(place, "bert", num_hidden_layers=1)
    return place


@pytest.mark.parametrize(("triple", "library"), [
    ("x86_64-pc-windows-gnu", "rt.dll"), ("arm64-apple-macosx", "rt.dylib"), ("arm64-apple-ios", "rt.dylib"),
    ("aarch64-linux-android", "rt.so")])
def test_library_name_follows_the_system(triple: str, library: str, monkeypatch: pytest.MonkeyPatch
                                                      ) -> None:
    monkeypatch.setenv("CXX", "c++")
    assert parse_target(f"llvm -mtriple={triple}").library == library


@pytest.mark.parametrize(("target", "machine", "system", "library", "device"), [
    ("llvm", "x86_64", "linux", "rt.so", "cpu"),
    ("llvm -mtriple=aarch64-linux-android", "aarch64", "android", "rt.tar", "cpu"),
    ("llvm -mtriple=arm64-apple-ios -mcpu=apple-a14", "arm64", "ios", "rt.tar", "cpu"),
    ("metal", "arm64", "darwin", "rt.tar", "metal"),
    ("metal -host=arm64-apple-ios", "arm64", "ios", "rt.tar", "metal"),
    ("opencl -host=aarch64-linux-android", "aarch64", "android", "rt.tar", "opencl"),
    ("opencl", "x86_64", "linux", "rt.so", "opencl")])
def test_parse_target(target: str, machine: str, system: str, library: str, device: str,
                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    goal = parse_target(target)
    assert (goal.machine, goal.system, goal.library, goal.device) == (machine, system, library, device)
    assert ("asimd" in goal.needs) == (machine != "x86_64")


def test_required_instruction_sets() -> None:
    assert {"avx2", "fma"} <= {*parse_target("llvm -mcpu=x86-64-v3").needs}
    assert not {"avx512f", "asimd"} & {*parse_target("llvm -mcpu=x86-64-v3").needs}
    assert "avx512_bf16" in parse_target("llvm -mcpu=sapphirerapids").needs


@pytest.mark.parametrize(("target", "message"), [
    ("webgpu", "only llvm, cuda, rocm, metal, opencl, vulkan"),
    ("llvm -mtriple=wasm32-unknown-unknown", "no triple of a machine"),
    ("llvm -mtriple=aarch64-linux-android -mcpu=znver4", "LLVM knows no processor 'znver4' of aarch64"),
    ("cuda -arch=", "must be of the form"), ("opencl -host=sparc", "no triple of a machine"),
    ("metal -bogus=1", "is not one that TVM knows")])
def test_invalid_target_is_refused(target: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    with pytest.raises(ConfigError, match=message):
        parse_target(target)


@pytest.mark.parametrize(("target", "message"), [
    ("vulkan", "'vulkan': the installed TVM .* has no code generator for vulkan: build TVM from source with "
               "USE_VULKAN=ON, or choose one of llvm, "),
    ("cuda", "CUDA runtime loads, which needs NVIDIA's driver .*: compile on a machine with the GPU"),
    ("cuda -arch=sm_90", "cuda-bindings, which is not installed: pip install"),
    ("rocm", "no ROCm here: install it, or set ROCM_PATH"),
    ("llvm", "linking a compiled model needs g")])
def test_missing_tools_are_reported(target: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import tvm

    find = tvm.get_global_func
    there = {"target.build.vulkan": None, "device_api.cuda": None if target == "cuda" else object()}
    monkeypatch.setattr(tvm, "get_global_func", lambda name, allow_missing=False: (
        there[name] if name in there else find(name, allow_missing=allow_missing)))
    monkeypatch.setattr(compiler, "find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match=message):
        parse_target(target)


def test_failing_linker_is_reported(encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["compile", str(encoder), "-o", str(tmp_path / "made"), "--target", "llvm -mtriple=aarch64-linux-android"]
    monkeypatch.setenv("CXX", "no-such-clang++")
    assert main(argv) == 2 and "CXX is 'no-such-clang++', which is no program here" in capsys.readouterr().err
    monkeypatch.setenv("CXX", shutil.which("g++") or "g++")
    assert main(argv) == 2
    assert "cannot link a library for aarch64 (android)" in capsys.readouterr().err and not (tmp_path / "made").exists()


@pytest.mark.parametrize(("target", "message"), [
    ("llvm -mtriple=aarch64-linux-android", r"for aarch64 \(android\) with asimd, with --target 'llvm -mtriple="),
    pytest.param("metal -host=x86_64-linux-gnu",
                 "compiled for metal, which needs a GPU of Apple's: run it on a machine that has one, .*TVM's runtime "
                 "here has no libtvm_runtime_metal", marks=pytest.mark.slow),
    ("opencl", "compiled for opencl, which needs a GPU with an OpenCL driver: run it on")])
def test_foreign_directory_reports_its_target(target: str, message: str, encoder: Path, tmp_path: Path,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", str(encoder), "-o", str(tmp_path / "made"), "--target", target, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    metadata, _ = read_metadata(tmp_path / "made")
    assert metadata.target == target and metadata.device == facts["device"] == parse_target(target).device
    with pytest.raises(ModelError, match=message):
        Encoder(tmp_path / "made")
    if facts["library"] == "rt.tar":
        with tarfile.open(tmp_path / "made" / "rt.tar") as file:
            assert any(name.endswith(".o") for name in file.getnames())


def serial(var: Any, extent: Any, tag: str, body: Any) -> Any:
    """A loop in place of a grid's threads."""
    from tvm import tirx

    return tirx.For(var, tirx.const(0, "int64"), extent, tirx.ForKind.SERIAL, body)


@pytest.fixture
def threads_in_turns(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compiles GPU kernels whose threads run one after another on the CPU. Returns the names of the used kernels.

    Products synchronize their threads, so they stay CPU kernels.
    """
    from tvm import tirx
    from tvm_ffi import structural_map

    def loops(*shape: Any) -> Any:
        taken.append("delta_rule")
        return structural_map(rule(*shape), (tirx.For, lambda loop: loop if loop.thread_binding is None else tirx.For(
            loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)))

    def spread(kernel: Any) -> Any:
        taken.append("spread")
        return whole(kernel)

    rule, whole, taken = gpu_kernels.delta_rule, gpu_kernels.spread, list[str]()
    monkeypatch.setattr(gpu_kernels, "_bound", serial)
    monkeypatch.setattr(network, "on_gpu", lambda: True)
    monkeypatch.setattr(gpu_kernels, "linear", kernels.linear)
    monkeypatch.setattr(gpu_kernels, "delta_rule", loops)
    monkeypatch.setattr(gpu_kernels, "spread", spread)
    return taken


def test_gpu_kernels_of_encoder_equal_cpu(encoder: Path, tmp_path: Path, threads_in_turns: list[str]
                                                          ) -> None:
    assert main(["compile", str(encoder), "-o", str(tmp_path / "made")]) == 0
    assert "spread" in threads_in_turns
    with Encoder(encoder, threads=1) as engine, Encoder(tmp_path / "made", threads=1) as made:
        np.testing.assert_allclose(made.encode(TEXTS), engine.encode(TEXTS), atol=2e-6)


def test_gpu_products_equal_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd numbers of tokens and panels. One thread computes the whole sum, because threads cannot synchronize here."""
    import tvm
    from tvm import tirx
    from tvm_ffi import structural_map

    monkeypatch.setattr(gpu_kernels, "_SPLIT", 1)
    kernel = gpu_kernels.linear.__wrapped__(40, 3, "float32").with_attr("tirx.is_scheduled", True)
    kernel = structural_map(kernel, [
        (tirx.For, lambda loop: loop if loop.thread_binding is None else tirx.For(
            loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)),
        (tirx.Evaluate, lambda call: tirx.Evaluate(tirx.const(0, "int32"))),
        (tirx.Buffer, lambda buffer: buffer)])
    built = tvm.compile(tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")}), target="llvm")
    draw = np.random.default_rng(1)
    x, w = draw.standard_normal((11, 40), np.float32), draw.standard_normal((3, 40, 16), np.float32)
    y = tvm.runtime.tensor(np.zeros((11, 48), np.float32))
    built["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(w), y)
    np.testing.assert_allclose(y.numpy(), np.einsum("ni,pil->npl", x, w).reshape(11, 48), atol=1e-4)


@pytest.mark.slow
def test_gpu_kernels_of_hybrid_equal_cpu(tmp_path: Path, threads_in_turns: list[str]) -> None:
    source = checkpoint(tmp_path / "model", SHAPE, 0.1)
    made = compiled(tmp_path / "made", source, chunk=CHUNK)
    assert {"spread", "delta_rule"} == {*threads_in_turns}
    assert_same_answers(session(source), session(made), count=10)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["metal", "opencl"])
def test_a_hybrid_compiles_for_a_gpu(target: str, tmp_path: Path) -> None:
    shape = replace(SHAPE, head_dim=64, rope=RopeConfig(1e4, 16, ()))
    made = compiled(tmp_path / "made", checkpoint(tmp_path / "model", shape, 0.1), target=target, chunk=CHUNK)
    with pytest.raises(ModelError, match=f"compiled for ({target}|arm64)"):
        open_program(made, EngineConfig())


def test_archive_without_config_is_refused(tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    (made / "rt.tar").write_bytes(b"objects")
    with pytest.raises(ModelError, match=r"mlc-chat-config\.json"):
        open_program(made, EngineConfig())
