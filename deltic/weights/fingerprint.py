"""Which model it is: what was computed with one must never be used with another under the same name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256

from torch import Tensor

_SAMPLES = 4096


def fingerprint(weights: Mapping[str, Tensor], more: Iterable[object] = ()) -> str:
    """32 hexadecimal digits that change with names, shapes, dtypes and values of the tensors, and with `more`.

    Of each tensor, values at up to 4,096 evenly spaced places are read: enough for any training or conversion, and
    fast for weights of any size.
    """
    digest = sha256(repr(list(more)).encode())
    for name, tensor in sorted(weights.items()):
        flat = tensor.detach().flatten()
        sample = flat[::max(1, flat.numel() // _SAMPLES)].float().cpu()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:32]
