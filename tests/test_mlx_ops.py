"""The ops on MLX against the naive ones: outputs, what they write, and what they must leave alone."""

from __future__ import annotations

import pytest
import torch
from op_cases import (
    Case,
    assert_close,
    attention_weights,
    cases,
    clone_state,
    gdn_weights,
    hidden_states,
    kv_errors,
    kv_view,
    rope_table,
    state_errors,
    state_view,
)

from deltic.ops import reference
from deltic.ops.mlx import missing, overlay
from deltic.ops.types import KvView

if why := missing():
    pytest.skip(why, allow_module_level=True)

OPS = overlay()
CASES = cases()
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2.5e-2}
"""Relative RMS. bfloat16 rounds at other places: 2^-8 for each of several roundings."""
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
by_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))


@by_dtype
@by_case
def test_gdn_mixer(case: Case, dtype: torch.dtype) -> None:
    x, weights, before = hidden_states(case, dtype), gdn_weights(1, dtype), state_view(case, dtype)
    slow_view, fast_view = clone_state(before), clone_state(before)
    wanted = reference.gdn_mixer(x, weights, slow_view, case.fresh())
    output = OPS.gdn_mixer(x, weights, fast_view, case.fresh())
    assert output.dtype == dtype
    assert_close(output, wanted, TOLERANCE[dtype])
    errors = state_errors(case, fast_view, slow_view, before)
    assert max(errors.values()) <= TOLERANCE[dtype], errors


@by_dtype
@by_case
def test_attention_mixer(case: Case, dtype: torch.dtype) -> None:
    x, weights, before = hidden_states(case, dtype), attention_weights(1, dtype), kv_view(case, dtype)
    slow_view, fast_view = (KvView(before.keys.clone(), before.values.clone()) for _ in range(2))
    rope = rope_table(reference.OPS, case)
    wanted = reference.attention_mixer(x, weights, slow_view, case.fresh(), rope)
    output = OPS.attention_mixer(x, weights, fast_view, case.fresh(), rope)
    assert output.dtype == dtype
    assert_close(output, wanted, TOLERANCE[dtype])
    assert kv_errors(case, fast_view, slow_view, before) <= TOLERANCE[dtype]
