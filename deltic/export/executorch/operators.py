"""deltic's operators as `torch.export` has to know them: names, arguments, what comes out. They are computed by the
library of `operators.cpp` alone, in ExecuTorch's runtime."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

_SCHEMAS: Final = {
    "gated_delta_net": "(Tensor projected, Tensor position, Tensor conv, Tensor decay, Tensor dt_bias, Tensor norm, "
                       "Tensor(a!) conv_state, Tensor(b!) recurrent_state, int key_heads, float eps",
    "attention": "(Tensor joined, Tensor position, Tensor cosines, Tensor sines, Tensor? q_norm, Tensor? k_norm, "
                 "Tensor(a!) keys, Tensor(b!) values, int heads, bool gate, float eps",
}
_LIBRARY: Final = torch.library.Library("deltic", "DEF")
for _name, _schema in _SCHEMAS.items():
    _LIBRARY.define(f"{_name}{_schema}) -> Tensor")
    _LIBRARY.define(f"{_name}.out{_schema}, *, Tensor(c!) out) -> Tensor(c!)")


@torch.library.impl(_LIBRARY, "gated_delta_net", "Meta")
def _gated_delta_net(projected: Tensor, *others: Any) -> Tensor:
    _, heads, _, columns = others[6].shape  # of the recurrent state
    return projected.new_empty(projected.shape[0], heads * columns)


@torch.library.impl(_LIBRARY, "attention", "Meta")
def _attention(joined: Tensor, *others: Any) -> Tensor:
    keys, _, heads, _, _ = others[5:]
    return joined.new_empty(joined.shape[0], heads * keys.shape[3])
