"""Without a GPU: the kernels compile for every card, within its shared memory and its registers."""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_cuda_source import MODELS, float8_shapes, packed_mixture, packed_shapes, shapes_of

from deltic.errors import ConfigError
from deltic.ops.capabilities import gpu_kernels
from deltic.ops.cuda import (
    adapters,
    allreduce,
    arguments,
    driver,
    encoder,
    mtp,
    nvrtc,
    prefill,
    staging,
    state_delta_log,
)
from deltic.ops.cuda.card import CARDS, Card, card_of, common_card, default_card
from deltic.ops.cuda.driver import compile_source, load_module, parts_of, tensor_map, why_not_compiled
from deltic.ops.cuda.kernel_config import ADD, GATE, PART, STORE, Multiply, Shapes, attention_bytes
from deltic.ops.cuda.moe import ExpertsShape, tile_bytes
from deltic.ops.cuda.nvrtc import CompileError
from deltic.ops.cuda.quantized_moe import Kinds, PackedShape
from deltic.ops.cuda.quantized_product import PackedMultiply
from deltic.ops.cuda.sample import source as draws_source
from deltic.ops.cuda.sliced_product import ColumnSlices
from deltic.ops.types import AttentionSpec

MOST_SPILLED = 192
"""Bytes of a thread's registers that lie in memory, at most; most kernels have none."""


def few_kernels(card: Card) -> Shapes:
    """Of the 27B: a product of each form, and what else a step without drafts needs; the host computes some layers."""
    hidden, _, gdn, attention = MODELS["27B"]
    products = (Multiply(hidden, True, STORE, card=card),
                Multiply(gdn.values // 2, False, PART, split=ColumnSlices(4, 3), card=card),
                PackedMultiply(hidden, True, STORE, frozenset({"Q4_K"}), card=card))
    return Shapes(products, gdn, attention, frozenset({"Q4_K", "MXFP4", "NVFP4", "INT4_128"}), host=hidden, card=card)


def mixture(card: Card) -> Shapes:
    """Of 35B-A3B in bfloat16."""
    _, _, gdn, attention = MODELS["4B"]
    products = (Multiply(2048, True, STORE, card=card), Multiply(gdn.values, False, ADD, card=card))
    experts = ExpertsShape(2048, 512, 256, 8, True, True, card=card)
    return Shapes(products, gdn, replace(attention, kv_heads=2), experts=experts, card=card)


WHOLE: dict[str, Callable[[Card], Shapes]] = {
    "0.8B": partial(shapes_of, "0.8B"), "27B": partial(shapes_of, "27B"), "27B Q4_K": partial(packed_shapes, "27B"),
    "4B float8": partial(float8_shapes, "4B"), "35B-A3B": mixture, "35B-A3B Q4_K": packed_mixture,
    "tiny": partial(shapes_of, "tiny")}


QUICK = [pytest.param(card, id=name, marks=() if name in ("sm_86", "sm_90") else pytest.mark.slow)
         for name, card in CARDS.items()]
"""The smallest shared memory, and the largest with instructions of its own."""


@pytest.mark.parametrize("card", QUICK)
def test_a_few_kernels_compile(card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shapes = few_kernels(card)
    check(shapes.source(), shapes)
    if card.name not in ("sm_80", "sm_89"):  # which have the instructions of sm_86
        check(prefill.source(shapes), shapes)


@pytest.mark.parametrize("card", QUICK)
def test_kernels_for_adapters_compile(card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As fields of their structs lie on the host."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    hidden, _, gdn, _ = MODELS["4B"]
    products = (Multiply(hidden, True, GATE, card=card), Multiply(gdn.values, False, ADD, 4, card=card),
                PackedMultiply(hidden, True, GATE, frozenset({"Q4_K"}), 2, card=card))
    shapes = Shapes(products, None, None, frozenset({"Q4_K"}), card=card)
    sizes = "".join(f"static_assert(sizeof({name}) == {ctypes.sizeof(getattr(arguments, f'{name}Args'))});\n"
                    for name in ("AddedProduct", "AddedPacked", "Shrink", "Expand"))
    check(adapters.source(shapes) + sizes, shapes)


@pytest.mark.slow
@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
@pytest.mark.parametrize("name", WHOLE)
def test_all_kernels_compile(name: str, card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shapes = replace(WHOLE[name](card), delta_logs=True)
    assert shapes.shared <= card.shared_memory
    for text in (shapes.source(), prefill.source(shapes), mtp.source(shapes, shapes.products[0].columns),
                 adapters.source(shapes)):
        check(text, shapes)


@pytest.mark.slow
@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_small_kernels_compile(card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    bfloat16 = replace(few_kernels(card), products=(), delta_logs=True, state="unsigned short", kv="u8")
    for text in (draws_source(), staging.source(), state_delta_log.flush_source(), encoder.encoder_source(1000),
                 encoder.tower_source(1152, 72), bfloat16.source(), prefill.source(bfloat16)):
        check(text, bfloat16)
    for size, kv in ((64, "u8"), (128, "u8"), (64, "Int4"), (128, "Int4"), (256, "Int4")):
        small = Shapes((), None, AttentionSpec(16, 4, size, size // 4, True, 1e-6), kv=kv, card=card)
        for text in (small.source(), mtp.source(small, 2048), prefill.source(small)):
            check(text, small)


@pytest.mark.parametrize("card", QUICK)
def test_sums_over_devices_compile(card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for devices, hidden in ((2, 5120), (4, 1024), (8, 8192)):
        check(allreduce.source(devices, hidden), Shapes((), None, None, card=card))


SPLIT = ((1024, 1, 8), (1152, 1, 4), (3584, 1, 8), (2048, 2, 2), (6144, 3, 8), (1088, 1, 1), (9216, 1, 8),
         (17408, 1, 8))
"""Columns, runs, and slices of a device."""


@pytest.mark.slow
@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_split_products_compile(card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    products: list[Multiply | PackedMultiply] = []
    for columns, runs, slices in SPLIT:
        out, split = ADD if slices == 8 else PART, ColumnSlices(slices, runs)
        products.append(Multiply(columns, False, out, 4 if slices == 4 else 8, split=split, card=card))
        if columns in (2048, 6144, 17408):
            products.append(PackedMultiply(columns, False, out, frozenset({"Q4_K"}), 1, 2, split=split, card=card))
    experts = ExpertsShape(2048, 512, 256, 8, True, True, shards=2, card=card)
    shapes = Shapes(tuple(products), None, None, frozenset({"Q4_K"}), experts=experts, card=card)
    check(shapes.source(), shapes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["MXFP4", "NVFP4", "INT4_128", "INT4_64", "INT4_32"])
@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_products_of_four_bits_compile(card: Card, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kinds = frozenset({kind})
    products = [PackedMultiply(2560, norm, out, kinds, 1, high, card=card) for high in (1, 2)
                for norm, out in ((True, STORE), (False, ADD))]
    own = frozenset({Kinds(kind, kind, kind)})
    experts = PackedShape(2048, 512, 256, 8, True, True, own, own, card=card)
    shapes = Shapes(tuple(products), None, None, kinds, experts=experts, card=card)
    check(shapes.source(), shapes)


def test_restricted_cards() -> None:
    """What the driver compiles for the present card from the instructions of another."""
    hopper, ampere, blackwell = CARDS["sm_90"], CARDS["sm_86"], CARDS["sm_120"]
    assert common_card(hopper, hopper) == hopper
    assert common_card(hopper, ampere) == replace(ampere, target="compute_86")
    assert common_card(hopper, blackwell) == replace(blackwell, target="compute_90")
    assert common_card(ampere, hopper) == replace(ampere, name="sm_90", target="compute_86")
    for other in CARDS.values():
        both = common_card(hopper, other)
        assert both.shared_memory <= other.shared_memory and (both.wgmma or other is not hopper)


def test_restricted_kernels_are_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (text,) = compiled(state_delta_log.flush_source(), "compute_86")
    assert b".target sm_86" in text and text.endswith(b"\0")


SMALL = "__device__ int one() {{ return 1; }}\n" + "".join(
    f'extern "C" __global__ void k_{index}(int *a) {{{{ *a = {{}} + one(); }}}}\n' for index in range(7))


def test_parts_are_compiled_by_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = SMALL.format(*range(7))
    found = compiled(source, "sm_90")
    assert len(found) == len(parts_of(source)) == 3
    assert found == [nvrtc.compile_here(nvrtc.library(), part, "sm_90") for part in parts_of(source)]
    assert {name for code in found for name, _ in usage(code)} == {f"k_{index}" for index in range(7)}
    monkeypatch.setattr(nvrtc, "compile_all", lambda sources, architecture: [b"" for _ in sources])
    changed = compile_source(source.replace("= 4", "= 9"), "sm_90")
    assert [one == other for one, other in zip(changed, found, strict=True)] == [True, False, True]


def test_a_kernel_is_found_in_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake driver sets the handle to null where it finds no kernel, like CUDA's."""
    def find(handle: Any, module: str, name: bytes) -> int:
        handle._obj.value = 7 if name.decode() in module else 0
        return 0 if handle._obj.value else 201 if module == "broken" else 500

    monkeypatch.setattr(driver, "_driver", lambda: SimpleNamespace(
        cuModuleGetFunction=find, cuFuncSetAttribute=lambda function, attribute, value: 0 if function else 400,
        cuGetErrorName=lambda result, text: 0))
    module = driver.Module.__new__(driver.Module)
    module._functions, module._modules = {}, ["k_0 k_3", "k_1", "k_2"]
    for name in ("k_0", "k_1", "k_2", "k_3"):
        assert module._function(name).value == 7
    with pytest.raises(ValueError, match="no kernel is called k_4"):
        module._function("k_4")
    module._modules = ["broken", "k_4"]
    with pytest.raises(RuntimeError, match="201"):
        module._function("k_4")


def test_an_error_in_a_part_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(CompileError, match='identifier "two" is undefined'):
        compiled(SMALL.format(*range(6), "two"), "sm_90")
    assert not [*tmp_path.rglob("*.cubin")]


def test_without_processes_parts_are_compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "library", lambda: SimpleNamespace(_name="libnvrtc.so"))
    monkeypatch.setattr(nvrtc, "compile_here", lambda library, source, architecture: source.encode())
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert nvrtc.compile_all(["a", "b"], "sm_90") == [b"a", b"b"]


@pytest.fixture
def restrict(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """A function that restricts the kernels of models that are loaded afterwards to a card."""
    def forget() -> None:
        for known in (card_of, default_card, load_module, why_not_compiled):
            known.cache_clear()

    def to(name: str) -> None:
        monkeypatch.setenv("DELTIC_CARD", name)
        forget()

    forget()
    yield to
    forget()


def test_the_option_names_a_card(restrict: Callable[[str], None]) -> None:
    restrict("sm_86")
    assert card_of(torch.device("cpu")).name == default_card().name == "sm_86"
    assert gpu_kernels("cpu") is None and default_card().description == (
        "for sm_86 (99 KiB a block, copies of 16 bytes, mma.sync); we have not measured this card")
    restrict("rtx")
    with pytest.raises(ConfigError, match="DELTIC_CARD=rtx is no card: use one of sm_80, sm_86"):
        card_of(torch.device("cpu"))


def test_a_matrix_without_tensor_maps(restrict: Callable[[str], None]) -> None:
    """Its address, bytes from row to row, rows and columns."""
    restrict("sm_80")
    matrix = torch.zeros(5, 128, dtype=torch.bfloat16)[:, :72]
    words = struct.unpack("16Q", tensor_map(matrix, 64, 64))
    assert words == (matrix.data_ptr(), 256, 5, 72, *[0] * 12)


def compiled(text: str, target: str) -> list[bytes]:
    try:
        return compile_source(text, target)
    except CompileError as error:
        if "not installed" not in str(error):
            raise
        pytest.skip("NVRTC is not installed: pip install nvidia-cuda-nvrtc")


def check(text: str, shapes: Shapes) -> None:
    """Compiles a source for the shapes' card; looks at the shared memory and the registers of its kernels."""
    kernels = dict(found for code in compiled(text, shapes.card.target) for found in usage(code))
    assert kernels and len(kernels) == text.count("__global__")
    launched = dynamic_bytes(shapes)
    for name, (own, spilled) in kernels.items():
        shared = own + next((most for part, most in launched.items() if name.startswith(part)), 0)
        assert shared <= shapes.card.shared_memory, f"{name} has {shared} bytes of shared memory"
        assert spilled <= MOST_SPILLED, f"{name} has {spilled} bytes of registers in memory"


def dynamic_bytes(shapes: Shapes) -> dict[str, int]:
    """Shared memory with which kernels are launched, at most, by how their names begin."""
    card, gdn, attention, experts = shapes.card, shapes.gdn, shapes.attention, shapes.experts
    found = dict.fromkeys(("product_", "packed_"), shapes.shared if shapes.products else 0)
    if gdn:
        size = gdn.key_dim * gdn.value_dim * (4 if shapes.state == "float" else 2)
        whole = card.whole_state_bytes if gdn.key_dim == 128 else size
        found |= {"k_gdn_few": size, "k_gdn_many": whole, "k_delta_terms": prefill.terms_shared(gdn.key_dim),
                  "k_delta_scan": prefill.scan_shared(gdn.key_dim, card)}
    if attention:
        found["k_attention_"] = attention_bytes(attention, card)
    if experts:
        found |= {f"k_grouped_{kind}_{tile}": tile_bytes(card, tile) for kind in ("gate", "down")
                  for tile in (128, 64, 32, 16)}
        found |= {"k_experts_": experts.shared_memory, "k_packed_": experts.shared_memory}
    return found


def usage(code: bytes) -> Iterator[tuple[str, tuple[int, int]]]:
    """Of each kernel of a cubin (ELF) its shared memory, and a thread's registers in memory, in bytes."""
    table, count, names_at = (struct.unpack_from(kind, code, at)[0] for kind, at in
                              (("<Q", 0x28), ("<H", 0x3c), ("<H", 0x3e)))
    headers = [struct.unpack_from("<IIQQQQIIQQ", code, table + 64 * index) for index in range(count)]

    def text_at(place: int) -> str:
        return code[place:code.index(b"\0", place)].decode()

    sections = {text_at(headers[names_at][4] + header[0]): header for header in headers}
    symbols, strings, info = (sections[name][4] for name in (".symtab", ".strtab", ".nv.info"))
    frames, at, end = dict[str, int](), info, info + sections[".nv.info"][5]
    while at < end:
        form, attribute, size = struct.unpack_from("<BBH", code, at)
        if (form, attribute) == (4, 0x11):  # the size of a frame
            symbol, frame = struct.unpack_from("<II", code, at + 4)
            frames[text_at(strings + struct.unpack_from("<I", code, symbols + 24 * symbol)[0])] = frame
        at += 4 + (size if form == 4 else 0)
    for section in sections:
        if section.startswith(".text."):
            name = section.removeprefix(".text.")
            shared = sections.get(f".nv.shared.{name}")
            yield name, (shared[5] if shared else 0, frames[name])
