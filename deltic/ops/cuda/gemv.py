"""Products of up to 16 tokens with the weights of a model, by deltic's own kernels."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from deltic.ops.cuda import arguments as args
from deltic.ops.cuda import quantized_product
from deltic.ops.cuda.adapters import ProductTerms
from deltic.ops.cuda.driver import Module
from deltic.ops.cuda.kernel_config import GATE, Multiply, Shapes, plain_product
from deltic.ops.cuda.layout import MAX_GEMV_TOKENS, WARPS
from deltic.ops.cuda.quantized_product import PackedMultiply
from deltic.ops.cuda.sliced_product import WHOLE, ColumnSlices


class GemvProducts:
    """The products of one model. blocks: blocks per kernel. eps: epsilon of the norms."""

    def __init__(self, module: Module, shapes: Shapes, blocks: int, eps: float) -> None:
        self._module, self._shapes, self._blocks, self._eps = module, shapes, blocks, eps

    def multiply(self, weight: object, x: Tensor, scale: Tensor | None, y: Tensor, out: int,
                 split: ColumnSlices = WHOLE, terms: ProductTerms | None = None) -> None:
        """Multiplies few tokens x [T, columns] with a weight. scale: scale of the norm before it, if any. out: STORE,
        ADD, GATE or PART, to y. split: slices of the columns, with ADD and PART. terms: added to the product."""
        parts = self._shapes.parts.get(id(weight))
        product: Multiply | PackedMultiply
        if parts:
            product = quantized_product.product_of(parts, scale is not None, out, self._blocks, split=split)
        else:
            assert isinstance(weight, Tensor)
            product = plain_product(weight, scale is not None, out, self._blocks, split, self._shapes.card)
        if terms:
            product = replace(product, terms=True)
        tokens, launches = len(x), -(-len(x) // product.most)
        if launches > 1:
            x = compact(x, tokens, columns_of(weight))
            y = compact(y, tokens, rows_of(weight) // (2 if out == GATE else 1))
        for first, end in pairwise(tokens * index // launches for index in range(launches + 1)):
            part = slice(first, end)
            values = {"x": x[part], "scale": scale, "y": y[part], "eps": self._eps}
            module, more = (terms.module, terms.arguments(part)) if terms else (self._module, {})
            self.launch(product, weight, end - first, module, **values, **more)

    def launch(self, product: Multiply | PackedMultiply, weight: object, tokens: int, module: Module, **values: Any
               ) -> None:
        """Launches a product of `tokens` tokens. values: the members of `arguments.ProductArgs`, or of
        `arguments.AddedProductArgs`, that do not follow from the weight."""
        if isinstance(product, PackedMultiply):
            quantized_product.launch(module, product, self._shapes.parts[id(weight)], tokens, self._blocks, **values)
        else:
            assert isinstance(weight, Tensor)
            launch_plain(module, product, weight, tokens, self._blocks, **values)


def launch_plain(module: Module, product: Multiply, weight: Tensor, tokens: int, blocks: int, **values: Any) -> None:
    """Launches a product with a bfloat16 weight. values: as in `GemvProducts.launch`."""
    rows, units = len(weight), -(-len(weight) // product.unit)
    if tokens > product.few:
        shared, sizes = product.many(tokens)[1], dict.fromkeys(("whole", "rest", "group", "inverse", "slots"), 0)
        if product.norm:
            values |= _stage(module, product.columns, tokens, values["x"], values["scale"], values["eps"])
    else:
        group = product.group(tokens, -(-units // blocks))
        slots, shared = product.shared(tokens, group, -(-units // blocks))
        sizes = {"whole": units // blocks, "rest": units % blocks, "group": group, "inverse": 65536 // tokens + 1,
                 "slots": slots}
    arguments = args.AddedProductArgs if product.terms else args.ProductArgs
    module.launch(product.name(tokens), (blocks,), product.threads(tokens), arguments(
        weight=weight, tokens=tokens, rows=rows, **sizes, **values), shared)


def _stage(module: Module, columns: int, tokens: int, x: Tensor, scale: Tensor, eps: float) -> dict[str, Tensor]:
    """Norms the input of many tokens. Returns what a product reads in place of x and scale."""
    staged, factors = x.new_empty(tokens * columns, dtype=torch.bfloat16), x.new_empty(tokens)
    module.launch(f"k_stage_{columns}", (tokens,), WARPS * 32, args.StageArgs(
        x=x, scale=scale, y=staged, factors=factors, eps=eps, tokens=tokens), WARPS * MAX_GEMV_TOKENS * 4)
    return {"x": staged, "scale": factors}


def compact(memory: Tensor, tokens: int, width: int) -> Tensor:
    """Returns the first tokens * width elements as [tokens, width]. The memory may be allocated for wider rows."""
    return memory.view(-1)[:tokens * width].view(tokens, width)


def rows_of(weight: Any) -> int:
    return sum(map(len, weight)) if isinstance(weight, tuple) else int(weight.shape[0])


def columns_of(weight: Any) -> int:
    return int((weight[0] if isinstance(weight, tuple) else weight).shape[1])
