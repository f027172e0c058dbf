"""What can be said of the GPU's kernels without a GPU: structs that agree, shapes that fit, sources that compile."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deltic.ops import explain, select
from deltic.ops.cuda import arguments, driver, encoder, mtp, prefill, staging, state_delta_log
from deltic.ops.cuda.driver import FOLDER, CompileError, KernelArguments, compile_source
from deltic.ops.cuda.encoder import tower_source
from deltic.ops.cuda.kernel_config import (
    ADD,
    GATE,
    MAX_GEMV_TOKENS,
    STATES,
    STORE,
    WARPS,
    WHOLE_STATE_SHARED_BYTES,
    Multiply,
    Shapes,
    heads_product,
    states_at_once,
)
from deltic.ops.cuda.quantized import PackedMultiply
from deltic.ops.cuda.quantized_moe import Kinds, PackedShape
from deltic.ops.cuda.sample import source
from deltic.ops.types import AttentionSpec, CacheViews, GdnSpec

steps = import_module("deltic.ops.cuda.decode")

MODELS = {
    "tiny": (192, 576, GdnSpec(3, 6, 32, 32, 4, 1e-6), AttentionSpec(4, 2, 64, 16, True, 1e-6)),
    "0.8B": (1024, 3584, GdnSpec(16, 16, 128, 128, 4, 1e-6), AttentionSpec(8, 2, 256, 64, True, 1e-6)),
    "4B": (2560, 9216, GdnSpec(16, 32, 128, 128, 4, 1e-6), AttentionSpec(16, 4, 256, 64, True, 1e-6)),
    "9B": (4096, 12288, GdnSpec(16, 32, 128, 128, 4, 1e-6), AttentionSpec(16, 4, 256, 64, True, 1e-6)),
}
MULTIPROCESSOR, BLOCK = 228 << 10, 227 << 10
"""Bytes of shared memory, on compute capability 9.0."""


def shapes_of(name: str) -> Shapes:
    hidden, ffn, gdn, attention = MODELS[name]
    products = {Multiply(hidden, True, STORE): None, Multiply(gdn.values, False, ADD): None,
                Multiply(attention.queries, False, ADD): None, Multiply(hidden, True, GATE): None,
                Multiply(ffn, False, ADD): None, Multiply(ffn, False, ADD, 4): None, heads_product(gdn, 4): None,
                heads_product(gdn, 8): None}
    return Shapes(tuple(products), gdn, attention)


def packed_shapes(name: str) -> Shapes:
    """Of a model whose file is Q4_K_M."""
    hidden, ffn, gdn, attention = MODELS[name]
    few, more = frozenset({"Q4_K"}), frozenset({"Q4_K", "Q6_K"})
    products = (PackedMultiply(hidden, True, STORE, few), PackedMultiply(hidden, True, STORE, more, 2, 2),
                PackedMultiply(gdn.values, False, ADD, few), PackedMultiply(hidden, True, GATE, few, 2, 2),
                PackedMultiply(ffn, False, ADD, few), PackedMultiply(ffn, False, ADD, more - few),
                PackedMultiply(hidden, True, STORE, more - few, 1, 2),
                PackedMultiply(hidden, False, STORE, more - few, 1, 2),
                PackedMultiply(gdn.values, False, ADD, few, 1, 2, gdn.value_dim, 16))
    return Shapes(products, gdn, attention, more)


def float8_shapes(name: str) -> Shapes:
    """Of a model in float8."""
    hidden, ffn, gdn, attention = MODELS[name]
    fp8, both, eight = frozenset({"FP8"}), frozenset({"FP8", "Q8_0"}), frozenset({"Q8_0"})
    products = (PackedMultiply(hidden, True, STORE, both, 4), PackedMultiply(hidden, True, STORE, fp8, 3, 2),
                PackedMultiply(gdn.values, False, ADD, fp8), PackedMultiply(hidden, True, GATE, fp8, 2, 2),
                PackedMultiply(ffn, False, ADD, fp8), PackedMultiply(hidden, True, STORE, eight, 1, 2),
                PackedMultiply(hidden, False, STORE, eight, 1, 2),
                PackedMultiply(gdn.values, False, ADD, fp8, 1, 2, gdn.value_dim, 16))
    return Shapes(products, gdn, attention, both)


def packed_mixture() -> Shapes:
    """Of 35B-A3B in Q4_K_M, with a shared expert in Q8_0."""
    _, _, gdn, attention = MODELS["4B"]
    attention = replace(attention, kv_heads=2)
    few, more = frozenset({"Q4_K"}), frozenset({"Q4_K", "Q6_K"})
    products = (Multiply(2048, True, STORE), PackedMultiply(2048, True, STORE, few, 1, 2),
                PackedMultiply(2048, True, STORE, more, 2, 2), PackedMultiply(gdn.values, False, ADD, few),
                PackedMultiply(2048, True, STORE, more - few, 1, 2),
                PackedMultiply(2048, False, STORE, more - few, 1, 2))
    routed = frozenset({Kinds("Q4_K", "Q4_K", "Q4_K"), Kinds("Q4_K", "Q4_K", "Q6_K")})
    experts = PackedShape(2048, 512, 256, 8, True, True, routed, frozenset({Kinds("Q8_0", "Q8_0", "Q8_0")}))
    return Shapes(products, gdn, attention, more, experts=experts)


def members(struct: str) -> list[str]:
    """The members of a struct of the kernels, in order."""
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.cuh")))
    found = re.search(rf"struct {struct} {{(.*?)\n}};", text, re.DOTALL)
    assert found, struct
    lines = re.sub(r"//.*", "", found[1])
    names = [name for line in lines.split(";") for name in line.split(",") if name.strip()]
    return [re.findall(r"[A-Za-z_]\w*", name)[-1] for name in names]


@pytest.mark.parametrize("name", ["Product", "Packed", "Unpack", "Gdn", "Attention", "Enter", "AddNorm", "Gate",
                                  "Choice", "PromptConv", "PromptRing", "CopySlot", "GatedNorm", "PromptHeads",
                                  "PromptGate", "GatherInt4", "DeltaTerms", "DeltaScan", "Append", "Fold", "HeadEnter",
                                  "HeadKeys", "Accept", "Numbers", "Cursors", "RowKeys", "ResidualNorm", "Turn", "TowerNorm"])
def test_struct_layouts(name: str) -> None:
    given: type[KernelArguments] = getattr(arguments, f"{name}Args")
    assert [member for member, _ in given._fields_] == members(name)


@pytest.mark.parametrize("name", ["Verify", "OverRings"])
def test_derived_struct_layouts(name: str) -> None:
    given: type[KernelArguments] = getattr(arguments, f"{name}Args")
    assert [member for member, _ in given._fields_] == [*members("Gdn"), *members(f"{name} : Gdn")]


@pytest.mark.parametrize("tokens", range(1, MAX_GEMV_TOKENS + 1))
@pytest.mark.parametrize("name", MODELS)
def test_products_fit(name: str, tokens: int) -> None:
    for product in shapes_of(name).products:
        for mine in (1, 2, 8, 240) if tokens <= product.most else ():
            group = product.group(tokens, mine)
            slots, shared = product.shared(tokens, group, mine)
            assert 2 <= slots <= 32 and MULTIPROCESSOR // 3 < shared <= BLOCK
            if tokens == 1:
                assert 2 * shared + 18 * 1024 <= MULTIPROCESSOR, "the next kernel has no room beside it"


@pytest.mark.parametrize("shapes_of", [packed_shapes, float8_shapes])
@pytest.mark.parametrize("name", ["0.8B", "4B", "9B"])
def test_products_of_tiles_fit(name: str, shapes_of: Callable[[str], Shapes]) -> None:
    shapes = shapes_of(name)
    assert shapes.shared <= BLOCK
    for product in shapes.products:
        assert isinstance(product, PackedMultiply)
        sources = {product.name(tokens): product.source(tokens) for tokens in range(1, product.most + 1)}
        assert len(sources) == len({*sources.values()}) and all(text in shapes.source() for text in sources.values())
        for mine in (1, 2, 3, 240):
            plan = product.plan(1, (mine,) * product.parts)
            assert plan.slots >= 2 and plan.round * plan.rounds >= mine
            assert MULTIPROCESSOR // 3 < plan.shared <= BLOCK
            if mine == 1 and not product.kinds & {"Q6_K", "Q8_0", "FP8"}:
                assert 2 * plan.shared + 39 * 1024 <= MULTIPROCESSOR, "the attention has no room beside it"


@pytest.mark.parametrize("name", MODELS)
def test_models_fit(name: str) -> None:
    shapes = shapes_of(name)
    assert shapes.shared <= BLOCK and shapes.gdn
    assert 4 * (prefill.terms_shared(shapes.gdn.key_dim) + 1024) <= MULTIPROCESSOR
    assert prefill.scan_shared(shapes.gdn.key_dim) <= BLOCK


def test_quantized_mixture_fits() -> None:
    shapes = packed_mixture()
    assert shapes.experts and shapes.experts.known and shapes.shared <= BLOCK and not shapes.limits_registers
    text = shapes.source()
    for name in ("k_packed_gate", "k_packed_down", "k_route", "k_grouped_gate_128", "k_unpack_experts_q8_0"):
        assert text.count(f" {name}(") == 1, name


def test_kernel_names_are_unique() -> None:
    """One name, one source: what differs in the source differs in the name."""
    for name in MODELS:
        for product in shapes_of(name).products:
            sources: dict[str, str] = {}
            for tokens in range(1, product.most + 1):
                text = product.source(tokens, shapes_of(name).limits_registers)
                assert sources.setdefault(product.name(tokens), text) == text
            assert all(text in shapes_of(name).source() for text in sources.values())


def test_importing_loads_no_driver() -> None:
    code = ("import sys, deltic.ops; deltic.ops.select(); import ctypes.util;"
            "print(any('libcuda' in line or 'nvrtc' in line for line in open('/proc/self/maps')))")
    if not Path("/proc/self/maps").exists():
        pytest.skip("no /proc")
    if torch.version.cuda:
        pytest.skip("this torch brings them along")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    *MODELS, "draws", "numbers", "folds", "encoder", "towers",
    *(f"{model} {part}" for model in MODELS for part in ("prompts", "drafts")),
    *(f"{model} {part}" for model in ("0.8B", "4B", "9B") for part in ("packed", "float8")), "packed mixture"])
def test_sources_compile(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, _, part = name.partition(" ")
    # where prompts are read; and eight heads of queries to one of keys have no room on the older cards
    newer = part == "prompts" or name == "packed mixture"
    if name == "packed mixture":
        text = replace(packed_mixture(), delta_logs=True).source()
    elif model in MODELS:
        shapes = replace(
            {"packed": packed_shapes, "float8": float8_shapes}.get(part, shapes_of)(model), delta_logs=True
        )
        text = {"": shapes.source, "packed": shapes.source, "float8": shapes.source,
                "prompts": lambda: prefill.source(shapes), "drafts": lambda: mtp.source(shapes)}[part]()
    else:
        text = {"draws": source, "numbers": staging.source, "folds": state_delta_log.flush_source,
                "encoder": lambda: encoder.encoder_source(1000), "towers": lambda: tower_source(1152, 72)}[name]()
    compiles(text, tmp_path, newer)


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["u8", "Int4"])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_sources_for_small_kv_compile(size: int, kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what reads or writes keys and values."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shapes = Shapes((), None, AttentionSpec(16, 4, size, size // 4, True, 1e-6), kv=kv)
    for text in (shapes.source(), mtp.source(shapes), prefill.source(shapes)):
        compiles(text, tmp_path, text == prefill.source(shapes))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, "folds"])
def test_sources_for_bfloat16_states_compile(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what reads or writes states."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if name == "folds":
        return compiles(state_delta_log.flush_source(STATES[torch.bfloat16]), tmp_path, False)
    shapes = replace(shapes_of(name), products=(), attention=None, delta_logs=True, state=STATES[torch.bfloat16])
    for text in (shapes.source(), prefill.source(shapes)):
        compiles(text, tmp_path, text == prefill.source(shapes))


def test_whole_states_fill_a_block() -> None:
    """Whatever their numbers are: no second block finds room beside them."""
    gdn = MODELS["4B"][2]
    for dtype, state in STATES.items():
        count = states_at_once(gdn, state)
        assert count * gdn.key_dim * gdn.value_dim * dtype.itemsize == WHOLE_STATE_SHARED_BYTES > MULTIPROCESSOR // 2
        assert f"gdn_many<128, {count}, false>" in replace(shapes_of("4B"), state=state).source()


def compiles(text: str, tmp_path: Path, newer: bool) -> None:
    """By NVRTC, or by a toolkit; skips where there is neither. newer: for cards of 9.0 alone."""
    try:
        for architecture in ("sm_90a",) if newer else ("sm_90a", "sm_80"):
            assert compile_source(text, architecture)[:4] == b"\x7fELF"
        return
    except CompileError as error:
        if "not installed" not in str(error):
            raise
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("neither NVRTC nor nvcc is installed")
    (tmp_path / "kernels.cu").write_text(text, encoding="utf-8")
    subprocess.run([compiler, "-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-cubin", "-o",
                    str(tmp_path / "kernels.cubin"), str(tmp_path / "kernels.cu")], check=True)


def test_blocks_are_whole_warps() -> None:
    assert WARPS * 32 == 256


def test_broken_kernel_falls_back_to_torch(
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    broken = tmp_path / "kernels"
    shutil.copytree(FOLDER, broken)
    (broken / "common.cuh").write_text("this is no kernel", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(driver, "FOLDER", broken)
    monkeypatch.setattr(driver, "architecture", lambda _: "sm_90a")
    monkeypatch.setattr(steps, "shapes_of", lambda *_: shapes_of("tiny"))
    monkeypatch.setattr(steps, "shared_memory", lambda _: BLOCK)
    monkeypatch.setattr(steps, "_serves_prefill", lambda _: True)
    decoder: Any = SimpleNamespace(embedding=torch.zeros(1), norm=torch.zeros(1))
    views, ops = CacheViews((), ()), select((), "cuda")
    assert ops.step(ops, decoder, views) is None
    assert "torch serves every step: the kernels cannot be compiled" in caplog.text
    served = explain(ops, decoder, views)
    for name in ("step", "sample"):
        assert served[name].startswith("torch (the kernels cannot be compiled: ")
    assert served["gdn_mixer"].startswith("torch")
