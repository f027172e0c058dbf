"""Integer weights of quantizers: the numbers of their files to the bit, whole models in every format against
transformers, and what happens to damaged files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from integer_cases import KINDS, Kind
from safetensors.torch import save_file
from torch import Tensor

from deltic.config.quantization import read_quantization
from deltic.loader.files import read_header
from deltic.loader.formats import combine
from deltic.loader.safetensors import read_stored
from deltic.loader.tensors import PackedTensor


def weight_of(rows: int, columns: int) -> Tensor:
    """A matrix, the same everywhere: exact numbers, of other sizes in each row."""
    places = torch.arange(rows * columns).view(rows, columns)
    numbers = (places * 7919 + places // 13 * 104729) % 2003 - 1001
    return numbers.float() / 1024 * (1 + torch.arange(rows) % 5)[:, None]


def stored(place: Path, kind: Kind, weight: Tensor) -> tuple[PackedTensor, Tensor]:
    """A matrix in a file, and its numbers."""
    written = kind.write(weight)
    path = place / "model.safetensors"
    save_file({f"model.w.{name}": part.contiguous() for name, part in written.parts.items()}, path)
    found = combine(read_header(path), read_quantization({kind.key: kind.config}))
    assert [*found] == ["model.w.weight"]
    source = found["model.w.weight"]
    assert isinstance(source, PackedTensor) and source.shape == weight.shape
    return source, written.values


@pytest.mark.parametrize("name", KINDS)
def test_the_numbers_of_a_matrix(name: str, tmp_path: Path) -> None:
    """Whole, and rows that begin anywhere; in float32, and rounded once to the dtype of the scales."""
    kind = KINDS[name]
    source, values = stored(tmp_path, kind, weight_of(96, 128))
    assert torch.equal(read_stored("w", source, torch.float32, torch.device("cpu")), values)
    assert torch.equal(read_stored("w", source, kind.dtype, torch.device("cpu")), values.to(kind.dtype))
    loaded = source.loaded()
    for first, end in ((0, 1), (5, 37), (63, 96)):
        assert torch.equal(loaded.read(first, end).numbers(), values[first:end])
        part = read_stored("w", source.rows(first, end), torch.float32, torch.device("cpu"))
        assert torch.equal(part, values[first:end])
