"""Merges an adapter (LoRA, DoRA) into the weights of its base model."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from deltic.errors import ModelError
from deltic.loader.lora import LoraFiles, LowRankDelta
from deltic.loader.names import EMBEDDING, HEAD


class LoraMerge:
    """Applies an adapter to the canonical tensors of a model. Sums are computed in float32."""

    def __init__(self, files: LoraFiles) -> None:
        """Reads the adapter. Raises ModelError like `LoraFiles.deltas`, and if it needs an untied head."""
        self._deltas = defaultdict[str, list[LowRankDelta]](list)
        self._saved = dict(files.saved_tensors())
        for delta in files.deltas():
            self._deltas[delta.name].append(delta)
        if files.config.tie_word_embeddings and (self._deltas.keys() | self._saved) & {EMBEDDING, HEAD}:
            raise ModelError(f"{files.path} changes the embedding or lm_head, which are one matrix in this model: it "
                             "cannot be merged")

    def apply(self, name: str, tensor: Tensor) -> Tensor:
        """Returns the tensor plus the adapter's terms, in float32; without terms, the tensor itself."""
        tensor = self._saved.get(name, tensor)
        if name not in self._deltas:
            return tensor
        merged = tensor.to(torch.float32, copy=True)
        for delta in self._deltas[name]:
            matrix = merged if delta.expert is None else merged[delta.expert]
            matrix += delta.b @ delta.a
            if delta.magnitude is not None:
                matrix *= (delta.magnitude / torch.linalg.vector_norm(matrix, dim=1))[:, None]
        return merged
