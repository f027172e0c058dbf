"""Memory that MLX and torch share."""

from __future__ import annotations

import gc

import pytest
import torch

from deltic.ops.mlx import missing

if why := missing():
    pytest.skip(why, allow_module_level=True)

import mlx.core as mx

from deltic.ops.mlx.attention import AttentionRows, _joined
from deltic.ops.mlx.memory import array_of, copied, reserve, seen, share, whole_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_one_writes_the_other_reads(dtype: torch.dtype) -> None:
    pool = reserve((3, 4, 5), dtype)
    assert pool.dtype == dtype and not pool.any()
    arrays = [array_of(pool), *(array_of(layer) for layer in pool)]
    mx.eval(*arrays)
    pool[1, 2] = 3
    assert int(arrays[0].sum()) == int(arrays[2].sum()) == 15 and not int(arrays[1].sum())
    assert int(array_of(pool.view(12, 5)).sum()) == 15


def test_a_result_is_not_copied() -> None:
    array = mx.arange(6).astype(mx.float32).reshape(2, 3)
    tensor = seen(array)
    tensor[1, 0] = 9
    assert array.tolist() == [[0, 1, 2], [9, 4, 5]] and tensor.is_contiguous()


def test_others_are_copied() -> None:
    """Tensors of torch, parts of MLX's memory that are no leading entries, and other dtypes."""
    pool, plain = reserve((4, 6), torch.float32), torch.zeros(4, 6)
    for tensor in (plain, pool[:, 2:4], pool[1:3], pool[0, :3], pool.view(torch.int32).double()):
        array = array_of(tensor.float())
        mx.eval(array)
        tensor.fill_(5)
        assert array.shape == tuple(tensor.shape) and not float(array.sum())
        tensor.fill_(0)


def test_memory_lives_as_long_as_a_tensor_or_an_array() -> None:
    gc.collect()
    before = mx.get_active_memory()
    layer = reserve((4, 1 << 18), torch.float32)[2]
    gc.collect()
    assert mx.get_active_memory() - before >= 1 << 22
    array = array_of(layer)
    mx.eval(array)
    layer[0] = 4
    del layer
    gc.collect()
    assert float(array[0]) == 4
    del array
    gc.collect()
    assert mx.get_active_memory() - before < 1 << 20


def test_a_stack_is_found_again() -> None:
    stack = list(share(mx.arange(24).reshape(4, 2, 3)))
    whole = whole_of(stack)
    assert whole is not None and whole.shape == (4, 2, 3)
    assert whole_of(stack[::-1]) is None and whole_of(stack[:3]) is None and whole_of([torch.zeros(2, 3)]) is None


def test_copies_keep_the_bits() -> None:
    values = torch.tensor([1.0, -2.5, float("inf"), 3e-39])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(seen(copied(values.to(dtype))), values.to(dtype))


@pytest.mark.parametrize("done", [None, [1590, 3]], ids=["a lone row", "two rows"])
def test_a_step_copies_the_pages_of_its_rows_once(done: list[int] | None) -> None:
    pool, tokens = mx.ones((150, 16, 2, 64)), 1591
    rows = AttentionRows(slice(0, 1), 1, mx.arange(100)[None], tokens - 1)
    if done is not None:
        rows = AttentionRows(slice(0, 2), 2, mx.zeros((2, 100), mx.int32), done=mx.array(done))
    new = mx.full((rows.count, 1, 2, 64), 3.0)
    mx.eval(pool, rows.table, new)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    found = _joined(pool, new, rows)
    mx.eval(found)
    copies = (mx.get_peak_memory() - before) / (rows.count * 1600 * 2 * 64 * 4)
    assert copies < (1.1 if done is None else 2.1)  # the second time to leave out what is not the row's
    for row, count in enumerate(done or [tokens - 1]):
        assert found[row, :, :count].min() == found[row, :, :count].max() == 1 and float(found[row, 0, count, 0]) == 3


def test_too_much_is_refused_as_a_shortage() -> None:
    with pytest.raises(MemoryError):
        reserve((1 << 20, 1 << 24), torch.float32)
