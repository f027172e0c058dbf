"""A compiled encoder in TVM's runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deltic.embeddings.bert_config import EncoderConfig
from deltic.errors import ModelError
from deltic.export.tvm.metadata import check_architecture, read_metadata
from deltic.export.tvm.opened import OpenedLibrary
from deltic.ops.encoder import Ragged


class CompiledEncoder:
    """The library of an encoder's directory. ModelError as of an `OpenedLibrary`, or if it holds a language model."""

    def __init__(self, folder: Path, config: EncoderConfig, threads: int) -> None:
        said, _ = read_metadata(folder)
        check_architecture(folder, said, config.family)
        if said.context_window_size != config.max_length:
            raise ModelError(f"{folder}: config.json has {config.max_length} positions, the library "
                             f"{said.context_window_size}: they are not of one model")
        self._library = OpenedLibrary(folder, said, config.vocab_size, threads)
        self._hidden = self._library.function("hidden")

    def hidden(self, batch: Ragged) -> Tensor:
        """The last layer's states of all tokens, one sequence after another [T, H] float32."""
        starts = batch.starts.numpy()
        lengths = np.diff(starts)
        columns = (batch.ids.numpy(), batch.places.numpy(), batch.kinds.numpy(),
                   np.repeat(starts[:-1], lengths), np.repeat(starts[1:], lengths))
        self._library.enter()
        device = self._library.device
        found = self._hidden(*(device.integers(column) for column in columns), self._library.parameters)
        return torch.from_numpy(device.numpy(found).copy())
