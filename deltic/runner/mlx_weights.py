"""Reads quantized matrices of MLX files in the form that MLX multiplies: codes, scales and biases stay unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deltic.loader.formats import mlx
from deltic.loader.names import packed_parts
from deltic.loader.tensors import PackedTensor, Source, Stack
from deltic.ops.mlx.linear import MlxMatrix, Packed, stack_of
from deltic.ops.mlx.memory import copied, dtype_of
from deltic.ops.types import Weight

_ROLES = ("codes", "scales", "biases")


@dataclass(frozen=True, slots=True)
class StoredMatrices:
    """Reads matrices. dtype: dtype of activations, to which scales and biases are converted in affine mode."""

    dtype: torch.dtype

    def read(self, name: str, source: Source) -> Weight | None:
        """Returns a matrix or the matrices of a stack. Returns None if the format is not MLX's or if several matrices
        are stored as one. Raises ModelError as `StoredTensor.read`."""
        parts = [part for part in source.parts if isinstance(part, PackedTensor)]
        if len(parts) < len(source.parts) or packed_parts(name) or not all(map(_is_served, parts)):
            return None
        found = [self._matrix(part) for part in parts]
        if not isinstance(source, Stack):
            return MlxMatrix.of(parts[0].dtype, found[0])
        if len({each.form for each in found}) > 1:
            return None
        return stack_of(parts[0].dtype, found)

    def _matrix(self, part: PackedTensor) -> Packed:
        first, end = part.first, part.first + part.shape[0]
        arrays: dict[str, Any] = {
            role: copied(part.tensors[role].rows(first, end).read()) for role in _ROLES if role in part.tensors}
        mode, columns = part.settings["mode"], part.shape[1]
        if mode == "affine":
            arrays |= {role: arrays[role].astype(dtype_of(self.dtype)) for role in ("scales", "biases")}
        group = columns // arrays["scales"].shape[1]
        return Packed(arrays["codes"], arrays["scales"], arrays.get("biases"), group, part.settings["bits"], mode)


def _is_served(part: PackedTensor) -> bool:
    return part.format in mlx.FORMATS and "factor" not in part.tensors
