"""deltic's operators in ExecuTorch's runtime: equal to the reference at any shape, and explained where missing."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from op_cases import (
    ROPE,
    Row,
    assert_close,
    attention_weights,
    build_batch,
    empty_state,
    gdn_weights,
    generator,
    kv_view,
    randn,
)
from torch import Tensor, nn

from deltic.errors import ModelError
from deltic.ops import reference
from deltic.ops.cpu import missing
from deltic.ops.types import AttentionSpec, GdnSpec, Rope, RopeSpec

pytest.importorskip("executorch", reason="the extra deltic[executorch] is not installed")

from deltic.export.executorch import library
from deltic.export.executorch.export import lower, quiet
from deltic.export.executorch.network import DelticAttention, DelticPlace, DelticRecurrent

pytestmark = pytest.mark.skipif(bool(missing()) or not shutil.which("g++"), reason="needs g++ and the kernels")

PLACES, LONGEST = 40, 24
CHUNKS = ((24, 9), (1, 1, 1, 5, 1, 24), (7,) * 4 + (5,))
"""Chunks of a sequence of 33 tokens."""
GDN = {"odd": GdnSpec(2, 6, 5, 7, 4, 1e-6), "whole registers": GdnSpec(2, 2, 32, 128, 4, 1e-6),
       "kernel of three": GdnSpec(1, 3, 17, 24, 3, 1e-6)}
ATTENTION = {"gated": AttentionSpec(6, 2, 10, 6, True, 1e-6), "plain": AttentionSpec(4, 4, 16, 16, False, 1e-6),
             "without norms": AttentionSpec(4, 1, 12, 8, False, 1e-6)}


class Core(nn.Module):
    """A mixer without its projections: projected [T, width], position [1] -> [T, ...]."""

    def __init__(self, mixer: Any, rope: Rope) -> None:
        super().__init__()
        self.mixer = mixer
        self.register_buffer("cos", rope.cos)
        self.register_buffer("sin", rope.sin)

    def forward(self, projected: Tensor, position: Tensor) -> Tensor:
        return self.mixer.mix(projected, DelticPlace(position, self.cos, self.sin))


def method_of(core: Core, width: int, path: Path) -> Any:
    """Returns the program's method in ExecuTorch's runtime."""

    example = (torch.zeros(3, width), torch.zeros(1, dtype=torch.int64))
    with quiet(), torch.no_grad():
        traced = torch.export.export(core.eval(), example, dynamic_shapes=(
            {0: torch.export.Dim("tokens", min=1, max=LONGEST)}, None), strict=False)
        program = lower(traced, {}, "fp32")
    with path.open("wb") as file:
        program.write_to_file(file)
    library.load()
    runtime = import_module("executorch.extension.pybindings._C")
    return runtime._load_program(str(path)).load_method("forward")


def in_chunks(method: Any, projected: Tensor, chunks: Sequence[int]) -> Tensor:
    """Returns the outputs of a whole sequence. The buffers hold NaN before it."""
    for name in ("conv_state", "recurrent_state", "keys", "values"):
        with suppress(RuntimeError):
            method.get_attribute(f"mixer.{name}").fill_(torch.nan)
    outputs, done = [], 0
    for chunk in chunks:
        outputs += [method([projected[done:done + chunk].contiguous(), torch.tensor([done])])[0].clone()]
        done += chunk
    assert done == len(projected)
    return torch.cat(outputs)


@pytest.mark.parametrize("name", ["odd", pytest.param("whole registers", marks=pytest.mark.slow),
                                  pytest.param("kernel of three", marks=pytest.mark.slow)])
def test_recurrent_layer_equals_reference(name: str, tmp_path: Path) -> None:
    spec = GDN[name]
    width = spec.channels + spec.values + 2 * spec.value_heads
    weights = replace(gdn_weights(3, torch.float32, spec), in_proj=torch.eye(width), out_proj=torch.eye(spec.values))
    case, x = build_batch([Row(33)]), randn(generator(1), 33, width).float()
    view = empty_state(case.slots, torch.float32, spec)
    wanted = reference.gdn_mixer(x, weights, view, case.batch)
    method = method_of(Core(DelticRecurrent(weights, torch.float32), reference.rope(torch.zeros(3, 1), ROPE)), width,
                       tmp_path / "core.pte")
    for chunks in CHUNKS:
        assert_close(in_chunks(method, x, chunks), wanted, 5e-6)
        assert_close(method.get_attribute("mixer.recurrent_state")[0], view.recurrent[case.batch.target[0]], 5e-6)


@pytest.mark.parametrize("name", ["gated", *(pytest.param(name, marks=pytest.mark.slow)
                                             for name in ("without norms", "plain"))])
def test_attention_equals_reference(name: str, tmp_path: Path) -> None:
    spec = ATTENTION[name]
    width = spec.queries * (2 if spec.gate else 1) + 2 * spec.kv
    weights = replace(attention_weights(3, torch.float32, spec), qkv=torch.eye(width), o_proj=torch.eye(spec.queries))
    weights = replace(weights, q_norm=None, k_norm=None) if name == "without norms" else weights
    table = reference.rope(torch.arange(PLACES).expand(3, -1), RopeSpec(1e4, spec.rotary_dim))
    case, x = build_batch([Row(33)]), randn(generator(1), 33, width).float()
    wanted = reference.attention_mixer(x, weights, kv_view(case, torch.float32, spec), case.batch,
                                 Rope(table.cos[:33], table.sin[:33]))
    method = method_of(Core(DelticAttention(weights, PLACES, torch.float32), table), width, tmp_path / "core.pte")
    for chunks in CHUNKS:
        assert_close(in_chunks(method, x, chunks), wanted, 5e-6)
    with pytest.raises(RuntimeError):
        method([x[:8].contiguous(), torch.tensor([PLACES - 7])])


# What is missing


def test_library_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = library.library_path()
    assert made.is_relative_to(tmp_path) and [*made.parent.iterdir()] == [made]
    monkeypatch.setattr(library, "_compile", lambda place: pytest.fail("compiled again"))
    assert library.library_path() == made


def no_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)


def broken_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("CXX", "false")


def no_room(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "deltic").write_text("a file where a directory is wanted", encoding="utf-8")


def no_kernels(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(library, "KERNELS", folder / "libdeltic.so")


@pytest.mark.parametrize(("lack", "message"), [
    (no_compiler, "there is no C.. compiler: install g.., or export the model with --operators executorch"),
    (broken_compiler, "cannot be compiled: false failed"), (no_room, "cannot be compiled to"),
    (no_kernels, "need its compiled kernels"),
])
def test_missing_library_is_explained(lack: Callable[[pytest.MonkeyPatch, Path], None], message: str, tmp_path: Path,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lack(monkeypatch, tmp_path)
    with pytest.raises(ModelError, match=message):
        library.library_path()
    assert not [*tmp_path.rglob("*.so")]
