"""PyTorch's own files. They are pickles, which can run code when opened: they are read by torch with weights_only,
which knows tensors and containers and calls nothing else, or not at all."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from deltic.errors import ModelError


def read_pickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a file such as pytorch_model.bin, on the CPU. ModelError names a file that holds anything else."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # whatever the bytes make of the reader
        reason = str(error).strip().split("\n")[0][:200]
        raise ModelError(f"{path} is no file of weights that can be opened without running code from it ({reason}): "
                         "download it again, or take the safetensors file") from error
    if not isinstance(found, dict) or not all(isinstance(name, str) and type(tensor) is Tensor
                                              for name, tensor in found.items()):
        raise ModelError(f"{path} must hold tensors by their names, and nothing else; take the safetensors file")
    return dict(found)
