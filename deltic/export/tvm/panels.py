"""How matrices lie in a compiled directory: in panels, as its products read them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

LANES: Final = 16
"""As in `kernels`, which cannot be imported without the compiler."""


def panels(matrix: NDArray[Any]) -> NDArray[Any]:
    """matrix [outputs, inputs] -> [panels, inputs, LANES], the last one filled up with zeros."""
    outputs, inputs = matrix.shape
    count = -(-outputs // LANES)
    if count * LANES != outputs:
        matrix = np.concatenate([matrix, np.zeros((count * LANES - outputs, inputs), matrix.dtype)])
    return matrix.reshape(count, LANES, inputs).transpose(0, 2, 1)
