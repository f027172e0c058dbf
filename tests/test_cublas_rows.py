"""Products of many tokens have one of few numbers of rows, and read no memory that is not theirs."""

from __future__ import annotations

import pytest
import torch

from deltic.ops.cuda.cublas_rows import empty_rows, padded, padded_rows


@pytest.mark.parametrize(("tokens", "rows"), [(0, 0), (1, 1), (256, 256), (257, 384), (384, 384), (8000, 8064)])
def test_long_prompts_have_multiples_of_128_rows(tokens: int, rows: int) -> None:
    x = empty_rows(tokens, 8, torch.device("cpu"))
    assert padded_rows(tokens) == rows and x.shape == (tokens, 8)
    whole = padded(x)
    assert whole.shape == (rows, 8) and whole.data_ptr() == x.data_ptr()


def test_tensors_without_such_memory_stay() -> None:
    x = torch.zeros(300, 8, dtype=torch.bfloat16)
    for own in (x, empty_rows(300, 8, x.device)[20:], empty_rows(300, 8, x.device)[:, :4]):
        assert padded(own) is own
