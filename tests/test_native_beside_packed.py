"""Feed-forwards of dense layers with packed weights that host threads compute beside a GPU: right up to sixteen bits of
the input, and bits that do not depend on other tokens or the number of threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from native_pools import best_level
from op_cases import same_bits
from torch import Tensor

from deltic.loader.gguf.blocks import BY_NAME
from deltic.loader.gguf.quantize import quantize_in_pieces
from deltic.ops import reference
from deltic.ops.cpu import missing
from deltic.ops.cpu.experts import MAX_TOKENS, OffloadedExperts, PackedExpert
from deltic.ops.memory import Arena
from deltic.ops.quantized import QTensor, pack_rows, pack_tensor
from deltic.ops.types import MlpWeights

pytestmark = pytest.mark.skipif(bool(missing()), reason=str(missing()))

HIDDEN, SIZE = 512, 768
TYPES = [("Q4_K", "Q4_K", "Q6_K"), ("Q8_0", "Q8_0", "Q8_0"), ("Q5_K", "Q4_K", "BF16"), ("BF16", "BF16", "Q4_K")]


def matrix(type: str, rows: int, columns: int, seed: int) -> QTensor:
    numbers = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * columns**-0.5
    if type == "BF16":
        return pack_tensor(numbers.bfloat16(), Arena())
    kind = BY_NAME[type]
    with ThreadPoolExecutor(1) as pool:
        raw = torch.from_numpy(np.concatenate([*quantize_in_pieces(type, numbers, kind, pool)])).flatten()
    return pack_rows(type, kind.id, rows, columns, kind.size(columns), lambda start, count: raw[start:start + count],
                     Arena())


def layer_of(types: tuple[str, str, str], seed: int = 0) -> PackedExpert:
    gate, up, down = types
    return (matrix(gate, SIZE, HIDDEN, seed), matrix(up, SIZE, HIDDEN, seed + 1), matrix(down, HIDDEN, SIZE, seed + 2))


def ask(of: OffloadedExperts, layer: int, x: Tensor, factors: Tensor) -> Tensor:
    tokens = len(x)
    of.sums.fill_(torch.nan)
    of.counts[:tokens], of.experts[:tokens], of.shares[:tokens] = 1, 0, 1.0
    of.input[:tokens], of.factors[:tokens] = x, factors
    of.ask(layer, tokens)
    return of.sums[:tokens].clone()


def inputs(tokens: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=rng)
    x[:, 5] *= 40  # columns of outliers cost eight bits the precision of their neighbours
    return x.bfloat16(), torch.rand(tokens, generator=rng) + 0.5


def wanted(layer: PackedExpert, x: Tensor, factors: Tensor) -> Tensor:
    """By the reference op, with the inner numbers rounded to bfloat16 as on the card."""
    gate, up, down = (own.dequantize() for own in layer)
    normed = x.float() * factors[:, None]
    inner = reference.mlp(normed, MlpWeights(torch.cat((gate, up)), torch.eye(SIZE))).bfloat16().float()
    return (inner.double() @ down.double().t()).float()


@pytest.mark.parametrize("types", TYPES, ids=str)
def test_sums(types: tuple[str, str, str]) -> None:
    """At every level of the processor, of two layers with different weights."""
    layers = [layer_of(types), layer_of(types, 10)]
    for level in range(best_level() + 1):
        of = OffloadedExperts(layers, HIDDEN, 1, (2, level))
        for number, tokens in ((0, 1), (1, 3), (0, MAX_TOKENS)):
            x, factors = inputs(tokens)
            found, right = ask(of, number, x, factors), wanted(layers[number], x, factors)
            assert (found - right).norm() < 2e-3 * right.norm(), (level, number, tokens)
        of.close()


def test_inputs_have_sixteen_bits() -> None:
    """Eight alone would be off by more, with one large column."""
    layer, (x, factors) = layer_of(TYPES[1]), inputs(4)
    of = OffloadedExperts([layer], HIDDEN, 1, (1, best_level()))
    found, right = ask(of, 0, x, factors).double(), wanted(layer, x, factors).double()
    assert (found - right).norm() < 1e-3 * right.norm()
    of.close()


@pytest.mark.parametrize("types", TYPES[:2], ids=str)
def test_token_bits_do_not_depend_on_batch(types: tuple[str, str, str]) -> None:
    layer, (x, factors), found = layer_of(types), inputs(MAX_TOKENS), list[Tensor]()
    for threads in (1, 3):
        of = OffloadedExperts([layer], HIDDEN, 1, (threads, best_level()))
        found.append(ask(of, 0, x, factors))
        for token in range(MAX_TOKENS):
            assert same_bits(ask(of, 0, x[token:token + 1], factors[token:token + 1])[0], found[-1][token])
        of.close()
    assert same_bits(*found)


def test_tokens_without_the_expert_are_left_out() -> None:
    layer, (x, factors) = layer_of(TYPES[0]), inputs(5)
    of = OffloadedExperts([layer], HIDDEN, 1, (2, best_level()))
    whole = ask(of, 0, x, factors)
    of.sums.fill_(torch.nan)
    of.counts[1] = of.counts[4] = 0  # padding
    of.ask(0, 5)
    assert same_bits(of.sums[[0, 2, 3]], whole[[0, 2, 3]]) and bool(of.sums[[1, 4]].isnan().all())
    of.counts[:5] = 0
    before = of.computed()
    of.ask(0, 5)
    assert of.computed() == before
    of.close()


def test_numbers_that_are_none_stay_so() -> None:
    layer, (x, factors) = layer_of(TYPES[0]), inputs(3)
    of = OffloadedExperts([layer], HIDDEN, 1, (2, best_level()))
    whole = ask(of, 0, x, factors)
    for bad in (torch.nan, torch.inf):
        x[1, 7] = bad
        found = ask(of, 0, x, factors)
        assert same_bits(found[[0, 2]], whole[[0, 2]]) and bool(found[1].isnan().any())
    of.close()


def test_plain_and_packed_layers_side_by_side() -> None:
    rng = torch.Generator().manual_seed(3)
    plain = (torch.randn(1, 3 * SIZE * HIDDEN, generator=rng) * HIDDEN**-0.5).bfloat16()
    packed = layer_of(TYPES[0])
    of = OffloadedExperts([plain, packed], HIDDEN, 1, (2, best_level()))
    x, factors = inputs(2)
    gate, up, down = (plain[0, part * SIZE * HIDDEN:][:SIZE * HIDDEN] for part in range(3))
    both = torch.cat((gate, up)).view(2 * SIZE, HIDDEN).float()
    inner = reference.mlp(x.float() * factors[:, None], MlpWeights(both, torch.eye(SIZE))).bfloat16().float()
    right = inner @ down.view(HIDDEN, SIZE).float().t()
    assert (ask(of, 0, x, factors) - right).norm() < 2e-3 * right.norm()
    right = wanted(packed, x, factors)
    assert (ask(of, 1, x, factors) - right).norm() < 2e-3 * right.norm()
    assert of.rate() > 0
    of.close()
