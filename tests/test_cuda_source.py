"""What can be said of the GPU's kernels without a GPU: structs that agree, shapes that fit, sources that compile."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deltic.ops import explain, select
from deltic.ops.cuda import arguments, driver, prefill
from deltic.ops.cuda.card import CARDS, Card, default_card
from deltic.ops.cuda.driver import FOLDER, KernelArguments
from deltic.ops.cuda.kernel_config import (
    ADD,
    GATE,
    MAX_GEMV_TOKENS,
    PART,
    STATES,
    STORE,
    WARPS,
    Multiply,
    Shapes,
    heads_product,
    states_at_once,
)
from deltic.ops.cuda.quantized_moe import Kinds, PackedShape
from deltic.ops.cuda.quantized_product import KINDS, PackedMultiply
from deltic.ops.types import AttentionSpec, CacheViews, GdnSpec

steps = import_module("deltic.ops.cuda.decode")

MODELS = {
    "tiny": (192, 576, GdnSpec(3, 6, 32, 32, 4, 1e-6), AttentionSpec(4, 2, 64, 16, True, 1e-6)),
    "0.8B": (1024, 3584, GdnSpec(16, 16, 128, 128, 4, 1e-6), AttentionSpec(8, 2, 256, 64, True, 1e-6)),
    "4B": (2560, 9216, GdnSpec(16, 32, 128, 128, 4, 1e-6), AttentionSpec(16, 4, 256, 64, True, 1e-6)),
    "9B": (4096, 12288, GdnSpec(16, 32, 128, 128, 4, 1e-6), AttentionSpec(16, 4, 256, 64, True, 1e-6)),
    "27B": (5120, 17408, GdnSpec(16, 48, 128, 128, 4, 1e-6), AttentionSpec(24, 4, 256, 64, True, 1e-6)),
}
HOPPER = CARDS["sm_90"]
MULTIPROCESSOR, BLOCK = 228 << 10, 227 << 10
"""Bytes of shared memory, on compute capability 9.0."""


def shapes_of(name: str, card: Card = HOPPER) -> Shapes:
    hidden, ffn, gdn, attention = MODELS[name]
    multiply = partial(Multiply, card=card)
    products = {multiply(hidden, True, STORE): None, multiply(gdn.values, False, ADD): None,
                multiply(attention.queries, False, ADD): None, multiply(hidden, True, GATE): None,
                multiply(ffn, False, ADD): None, multiply(ffn, False, ADD, 4): None, heads_product(gdn, 4, card): None,
                heads_product(gdn, 8, card): None}
    return Shapes(tuple(products), gdn, attention, card=card)


def packed_shapes(name: str, card: Card = HOPPER) -> Shapes:
    """Of a model whose file is Q4_K_M."""
    hidden, ffn, gdn, attention = MODELS[name]
    few, more = frozenset({"Q4_K"}), frozenset({"Q4_K", "Q6_K"})
    multiply = partial(PackedMultiply, card=card)
    products = (multiply(hidden, True, STORE, few), multiply(hidden, True, STORE, more, 2, 2),
                multiply(gdn.values, False, ADD, few), multiply(hidden, True, GATE, few, 2, 2),
                multiply(ffn, False, ADD, few), multiply(ffn, False, ADD, more - few),
                multiply(hidden, True, STORE, more - few, 1, 2),
                multiply(hidden, False, STORE, more - few, 1, 2),
                multiply(gdn.values, False, ADD, few, 1, 2, gdn.value_dim, 16))
    return Shapes(products, gdn, attention, more, card=card)


def float8_shapes(name: str, card: Card = HOPPER) -> Shapes:
    """Of a model in float8."""
    hidden, ffn, gdn, attention = MODELS[name]
    fp8, both, eight = frozenset({"FP8"}), frozenset({"FP8", "Q8_0"}), frozenset({"Q8_0"})
    multiply = partial(PackedMultiply, card=card)
    products = (multiply(hidden, True, STORE, both, 4), multiply(hidden, True, STORE, fp8, 3, 2),
                multiply(gdn.values, False, ADD, fp8), multiply(hidden, True, GATE, fp8, 2, 2),
                multiply(ffn, False, ADD, fp8), multiply(hidden, True, STORE, eight, 1, 2),
                multiply(hidden, False, STORE, eight, 1, 2),
                multiply(gdn.values, False, ADD, fp8, 1, 2, gdn.value_dim, 16))
    return Shapes(products, gdn, attention, both, card=card)


def packed_mixture(card: Card = HOPPER) -> Shapes:
    """Of 35B-A3B in Q4_K_M, with a shared expert in Q8_0."""
    _, _, gdn, attention = MODELS["4B"]
    attention = replace(attention, kv_heads=2)
    few, more = frozenset({"Q4_K"}), frozenset({"Q4_K", "Q6_K"})
    multiply = partial(PackedMultiply, card=card)
    products = (Multiply(2048, True, STORE, card=card), multiply(2048, True, STORE, few, 1, 2),
                multiply(2048, True, STORE, more, 2, 2), multiply(gdn.values, False, ADD, few),
                multiply(2048, True, STORE, more - few, 1, 2),
                multiply(2048, False, STORE, more - few, 1, 2))
    routed = frozenset({Kinds("Q4_K", "Q4_K", "Q4_K"), Kinds("Q4_K", "Q4_K", "Q6_K")})
    experts = PackedShape(2048, 512, 256, 8, True, True, routed, frozenset({Kinds("Q8_0", "Q8_0", "Q8_0")}),
                          card=card)
    return Shapes(products, gdn, attention, more, experts=experts, card=card)


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
                                  "HeadKeys", "Accept", "Numbers", "Cursors", "RowKeys", "ResidualNorm", "Turn",
                                  "TowerNorm", "AllReduce", "Shrink", "Expand"])
def test_struct_layouts(name: str) -> None:
    given: type[KernelArguments] = getattr(arguments, f"{name}Args")
    assert [member for member, _ in given._fields_] == members(name)


@pytest.mark.parametrize(("name", "base"), [("Verify", "Gdn"), ("OverRings", "Gdn"), ("AddedProduct", "Product"),
                                            ("AddedPacked", "Packed"), ("AllReduceNorm", "AllReduce")])
def test_derived_struct_layouts(name: str, base: str) -> None:
    given: type[KernelArguments] = getattr(arguments, f"{name}Args")
    assert [member for member, _ in given._fields_] == [*members(base), *members(f"{name} : {base}")]


@pytest.mark.parametrize("tokens", range(1, MAX_GEMV_TOKENS + 1))
@pytest.mark.parametrize("name", MODELS)
def test_products_fit(name: str, tokens: int) -> None:
    for product in shapes_of(name).products:
        if product.few < tokens <= product.most:
            assert product.many(tokens)[1] <= BLOCK
        for mine in (1, 2, 8, 240) if tokens <= product.few else ():
            group = product.group(tokens, mine)
            slots, shared = product.shared(tokens, group, mine)
            assert 2 <= slots <= 32 and MULTIPROCESSOR // 3 < shared <= BLOCK
            if tokens == 1:
                assert 2 * shared + 18 * 1024 <= MULTIPROCESSOR, "the next kernel has no room beside it"


@pytest.mark.parametrize("shapes_of", [packed_shapes, float8_shapes])
@pytest.mark.parametrize("name", ["0.8B", "4B", "9B", "27B"])
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
            if mine == 1 and product.columns < 16384 and not product.kinds & {"Q6_K", "Q8_0", "FP8"}:
                assert 2 * plan.shared + 39 * 1024 <= MULTIPROCESSOR, "the attention has no room beside it"


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_chunk_of_few_columns_has_a_tile_of_each_slice(kind: str, card: Card) -> None:
    """Inputs of fewer tiles are staged as a whole, of fewer tokens at once."""
    for columns in range(256, 4096, 256):
        for out in (STORE, ADD, PART):
            product = PackedMultiply(columns, False, out, frozenset({kind}), card=card)
            chunked = any("chunked" in product.name(tokens) for tokens in range(1, product.most + 1))
            assert product.most >= 7 and not (chunked and columns // 256 < product.split.slices), (columns, out)


@pytest.mark.parametrize(("tokens", "units"), [(8, 12), (8, 236), (16, 12), (16, 236)])
def test_warps_have_equal_shares_of_tiles(tokens: int, units: int) -> None:
    """With several tokens, of a row of ten tiles, of which a warp would have one or two."""
    product = PackedMultiply(2560, True, STORE, frozenset({"Q4_K"}), high=2, card=HOPPER)
    assert "_high" in product.name(tokens)
    round = product.plan(tokens, (units,)).round
    pairs = [-(-min(round, units - first) // 2) * 10 for first in range(0, units, round)]
    assert sum(pairs) >= 0.9 * WARPS * sum(-(-tiles // WARPS) for tiles in pairs)


@pytest.mark.parametrize("name", MODELS)
def test_models_fit(name: str) -> None:
    shapes = shapes_of(name)
    assert shapes.shared <= BLOCK and shapes.gdn
    assert 4 * (prefill.terms_shared(shapes.gdn.key_dim) + 1024) <= MULTIPROCESSOR
    assert prefill.scan_shared(shapes.gdn.key_dim, HOPPER) <= BLOCK


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


def test_whole_states_fill_a_block() -> None:
    """Whatever their numbers are: no second block finds room beside them."""
    gdn = MODELS["4B"][2]
    for card in CARDS.values():
        assert card.whole_state_bytes > card.shared_memory // 2
        for dtype, state in STATES.items():
            count = states_at_once(gdn, state, card)
            assert count * gdn.key_dim * gdn.value_dim * dtype.itemsize == card.whole_state_bytes
            assert f"gdn_many<128, {count}, false>" in replace(shapes_of("4B", card), state=state).source()


def test_blocks_are_whole_warps() -> None:
    assert WARPS * 32 == 256


def test_broken_kernel_falls_back_to_torch(
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    broken = tmp_path / "kernels"
    shutil.copytree(FOLDER, broken)
    (broken / "common.cuh").write_text("this is no kernel", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(driver, "FOLDER", broken)
    monkeypatch.setattr(steps, "shapes_of", lambda *_: shapes_of("tiny", default_card()))
    decoder: Any = SimpleNamespace(embedding=torch.zeros(1), norm=torch.zeros(1))
    views, ops = CacheViews((), ()), select((), "cuda")
    assert ops.step(ops, decoder, views) is None
    assert "torch serves every step: the kernels cannot be compiled" in caplog.text
    served = explain(ops, decoder, views)
    for name in ("step", "sample"):
        assert served[name].startswith("torch (the kernels cannot be compiled: ")
    assert served["gdn_mixer"].startswith("torch")
