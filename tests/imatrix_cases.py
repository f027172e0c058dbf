"""Importance matrices of a model, as llama-imatrix collects and writes them."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from gguf import GGUFWriter
from numpy.typing import NDArray
from torch import Tensor

from deltic.loader.gguf.names import gguf_name
from deltic.ops.torch import basic
from deltic.ops.types import GdnWeights, MlpWeights
from deltic.session import Session

Sums = dict[str, tuple[NDArray[np.float32], int]]
"""Sums of squares of each column, and the number of tokens, by the name of a tensor in GGUF files."""
_GDN = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


def collect(session: Session, tokens: list[int]) -> Sums:
    """Reads a text with the torch ops."""
    decoder = session.runtime.decoder
    names = dict[int, list[str]]()
    for index, layer in enumerate(decoder.weights.layers):
        prefix, mixer, mlp = f"model.layers.{index}.", layer.mixer, layer.mlp
        assert isinstance(mlp, MlpWeights)
        parts: list[tuple[Any, list[str]]] = [
            (mlp.gate_up, ["mlp.gate_proj", "mlp.up_proj"]), (mlp.down, ["mlp.down_proj"])]
        if isinstance(mixer, GdnWeights):
            parts += [(mixer.in_proj, [f"linear_attn.{part}" for part in _GDN]),
                      (mixer.out_proj, ["linear_attn.out_proj"])]
        else:
            parts += [(mixer.qkv, [f"self_attn.{part}_proj" for part in "qkv"]), (mixer.o_proj, ["self_attn.o_proj"])]
        names |= {id(weight): [f"{prefix}{name}.weight" for name in own] for weight, own in parts}
    sums, counts = dict[str, Tensor](), defaultdict[str, int](int)
    config = decoder.config

    def watched(product: Any) -> Any:
        def multiply(x: Tensor, weight: Any, *more: Any) -> Tensor:
            squares = x.float().square().sum(0)
            for name in names.get(id(weight), ()):
                stored, form = gguf_name(name, config.architecture, config.layer_types)
                ordered = form.from_ours(squares[None], config)[0] if name.endswith("out_proj.weight") else squares
                sums[stored] = sums.get(stored, torch.zeros_like(squares)) + ordered
                counts[stored] += len(x)
            return product(x, weight, *more)
        return multiply

    products = {"linear": watched(basic.linear), "row_parallel": watched(basic.row_parallel)}
    with ExitStack() as stack:
        for module in ("basic", "attention", "gdn"):
            for name, product in products.items():
                stack.enter_context(patch(f"deltic.ops.torch.{module}.{name}", product))
        session.prefill(tokens)
    return {name: (total.numpy(), counts[name]) for name, total in sums.items()}


def write_gguf(path: Path, sums: Mapping[str, tuple[NDArray[np.float32], int]], kind: str = "imatrix") -> Path:
    writer = GGUFWriter(path, "")
    writer.add_type(kind)
    writer.add_array("imatrix.datasets", ["text.txt"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, (total, count) in sums.items():
        total = np.atleast_2d(total).astype(np.float32)
        writer.add_tensor(f"{name}.in_sum2", total)
        writer.add_tensor(f"{name}.counts", np.full((len(total), 1), count, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_old(path: Path, sums: Mapping[str, tuple[NDArray[np.float32], int]]) -> Path:
    """The binary form until 2025."""
    parts = [struct.pack("<i", len(sums))]
    for name, (total, count) in sums.items():
        spelled = name.encode()
        parts += [struct.pack("<i", len(spelled)), spelled, struct.pack("<ii", count, total.size),
                  total.astype("<f4").tobytes()]
    path.write_bytes(b"".join(parts) + struct.pack("<ii", 1, 8) + b"text.txt")
    return path


def divergence(expected: Tensor, found: Tensor) -> float:
    """The mean Kullback-Leibler divergence of the next token's probabilities."""
    left, right = (torch.log_softmax(logits.double(), -1) for logits in (expected, found))
    return float((left.exp() * (left - right)).sum(-1).mean())
