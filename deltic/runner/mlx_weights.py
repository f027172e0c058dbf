"""Matrices of MLX's files, as MLX multiplies them: codes, scales and biases stay as they are stored."""

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
    """Reads matrices. dtype: of activations, and so of scales and biases."""

    dtype: torch.dtype

    def read(self, name: str, source: Source) -> Weight | None:
        """Returns a matrix, or the matrices of a stack; None if it is stored in another format, or is several in one.
        Raises ModelError as `StoredTensor.read`."""
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
