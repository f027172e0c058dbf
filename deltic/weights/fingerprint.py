"""Which model it is: what was computed with one must never be used with another under the same name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256

from deltic.ops.qtensor import QTensor
from deltic.ops.records import Block

_SAMPLES = 4096


def fingerprint(weights: Mapping[str, Block], more: Iterable[object] = ()) -> str:
    """32 hexadecimal digits that change with names, shapes, dtypes and values of the tensors, and with `more`.

    Of each tensor, values at up to 4,096 evenly spaced places are read: enough for any training or conversion, and
    fast for weights of any size.
    """
    digest = sha256(repr(list(more)).encode())
    for name, tensor in sorted(weights.items()):
        kind, numbers = (tensor.type, tensor.data) if isinstance(tensor, QTensor) else (tensor.dtype, tensor)
        flat = numbers.detach().flatten()
        sample = flat[::max(1, flat.numel() // _SAMPLES)].float().cpu()
        digest.update(f"{name} {tuple(tensor.shape)} {kind}".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:32]
