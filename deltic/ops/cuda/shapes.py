"""Which kernels a model needs: their shapes, and the source that instantiates them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deltic.ops.cuda.nvrtc import headers
from deltic.ops.records import AttentionSpec, CacheViews, DecoderWeights, GdnSpec, GdnWeights, MoeWeights, Weight

FEW, MOST = 8, 16
"""Tokens of a step that the products take at once: one or two rows of eight."""
SPREAD = 2
"""Tokens of a step whose heads are spread over the card in slices, if that many find room."""
WARPS = 8
"""Of a block that multiply; one more copies."""
SEGMENT = 1024
"""Columns that are copied at once."""
HALF, WHOLE = 105 << 10, 226 << 10
"""Bytes of shared memory of a block that leave room for the next kernel's block, and for a small one, beside it; of one
that stays alone."""
_ALONE = 84 << 10
"""Of which only two blocks fit on a multiprocessor: see kernels/common.cuh."""
_INPUT = 132 << 10
"""Bytes of input that a block keeps in shared memory at most."""
_ON_THEIR_WAY = 60 << 10
"""Bytes of weights for which there must be room in a block that has several tokens; else it takes that of the next
kernel's, too."""
_SUMS = 8 << 10
"""Bytes of a group's sums."""
_NORMALISED, _PLAIN = 4096, 12288
"""Columns that products take at most."""
STORE, ADD, GATE = range(3)


@dataclass(frozen=True, slots=True)
class Multiply:
    """A product: columns of its weight, whether its input is normalised, what becomes of its sums, rows of a unit.
    head, slice: columns of a value head, and of a slice of one, if its input is the outputs of heads that are yet to be
    normed and gated."""

    columns: int
    norm: bool
    out: int
    unit: int = 8
    head: int = 0
    slice: int = 0

    @property
    def most(self) -> int:
        """Tokens whose input fits in a block's shared memory, and that it is used for."""
        return min(SPREAD if self.head else MOST, _INPUT // (self.columns * 2))

    def name(self, tokens: int) -> str:
        kind = "norm" if self.norm else "heads" if self.head else "plain"
        return (f"product_{self.columns}_{kind}_{('store', 'add', 'gate')[self.out]}"
                f"_{self.unit}_{'many' if tokens > FEW else 'few'}")

    def source(self, tokens: int) -> str:
        many, norm = (str(flag).lower() for flag in (tokens > FEW, self.norm))
        return (f'extern "C" __global__ void __launch_bounds__({WARPS * 32 + 32}, 2) {self.name(tokens)}'
                f"(const __grid_constant__ Product a) {{ product<{self.columns}, {norm}, {self.out}, {many}, "
                f"{self.unit}, {self.head}, {self.slice}>(a); }}\n")

    def group(self, tokens: int, units: int) -> int:
        """Units of a block between two sums over the warps: as many as fit."""
        fit = max(1, _SUMS // (WARPS * 8 * tokens * 4))
        return max(1, min(fit, units))

    def slots(self, tokens: int, sums: int) -> int:
        """Segments that are on their way to a block or wait there."""
        slot, fixed = self._slot, self._fixed(tokens) + sums
        beside = (HALF - fixed) // slot
        enough = beside >= 3 and (tokens == 1 or beside * slot >= _ON_THEIR_WAY)
        return max(2, min(beside if enough else (WHOLE - fixed) // slot, 24 if self.columns < SEGMENT else 12))

    def shared(self, tokens: int, group: int, units: int) -> tuple[int, int]:
        """Slots, and bytes of shared memory, of a block with so many units."""
        sums = (1 if group >= units else 2) * group * WARPS * 8 * tokens * 4
        slots = max(2, min(self.slots(tokens, sums), units * -(-self.columns // SEGMENT)))
        return slots, max(_ALONE, self._fixed(tokens) + sums + slots * self._slot)

    @property
    def _slot(self) -> int:
        return self.unit * (self.columns * 2 if self.columns <= SEGMENT else SEGMENT * 2 + 64)

    def _fixed(self, tokens: int) -> int:
        return 1024 + tokens * self.columns * 2


def unit_of(rows: int, out: int, blocks: int) -> int:
    """Rows of a unit, so that the blocks have much the same to do."""
    most = {unit: -(-rows // (unit * blocks)) * unit for unit in (8, 4)}
    return 4 if out == ADD and most[4] < 0.95 * most[8] else 8


@dataclass(frozen=True, slots=True)
class Shapes:
    """All kernels of a model: products, and the specs of its layers. rings: states have replay rings beside them."""

    products: tuple[Multiply, ...]
    gdn: GdnSpec | None
    attention: AttentionSpec | None
    rings: bool = False

    @property
    def shared(self) -> int:
        """Bytes of shared memory that the largest block takes."""
        return max(product.shared(tokens, product.group(tokens, 1 << 20), 1 << 20)[1]
                   for product in self.products for tokens in range(1, product.most + 1))

    def source(self) -> str:
        text = [headers("product", "gdn", "attention", "small", *(["verify"] if self.rings else []))]
        text += {product.source(tokens): None for product in self.products for tokens in range(1, product.most + 1)}
        text += [entry(name, type, "256", name) for name, type in (
            ("enter", "Enter"), ("add_norm", "AddNorm"), ("gate", "Gate"))]
        for kind, name in (("float", "few"), ("u16", "many")):
            if gdn := self.gdn:
                size = gdn_slice(gdn, name)
                shape, block = f"{gdn.key_dim}, {gdn.value_dim}, {size}, {kind}", gdn.value_dim // size * 128
                if name == "few":
                    text.append(entry("gdn_spread", "Gdn", "128, 6", f"gdn_spread<{shape}>"))
                text.append(entry(f"gdn_{name}", "Gdn", f"{block}, {1024 // block}", f"gdn_stream<{shape}>"))
                if self.rings:
                    text.append(entry(f"gdn_verify_{name}", "Verify", "128, 4", f"gdn_verify<{shape}>"))
            if self.attention:
                size, share = self.attention.head_dim, self.attention.heads // self.attention.kv_heads
                text.append(entry(f"attention_{name}", "Attention", "256, 2", f"attention<{size}, {share}, {kind}>"))
        if self.gdn and self.rings:
            text.append(entry("append", "Append", "256", "append"))
        return "".join(text)


def entry(name: str, type: str, bounds: str, call: str) -> str:
    """The text of a kernel that calls a function of the kernel files."""
    inner = call if "<" in call else f"::{call}"
    return (f'extern "C" __global__ void __launch_bounds__({bounds}) k_{name}(const __grid_constant__ {type} a) '
            f"{{ {inner}(a); }}\n")


def gdn_slice(spec: GdnSpec, kind: str) -> int:
    """Columns of a value head that four warps have; of few rows so few that a row's heads spread over the card."""
    return 16 if kind == "few" and spec.value_dim == 128 and spec.value_heads <= 16 else 32


def heads_product(spec: GdnSpec, unit: int) -> Multiply:
    """The output projection of heads in slices."""
    return Multiply(spec.values, False, ADD, unit, spec.value_dim, gdn_slice(spec, "few"))


def shapes_of(decoder: DecoderWeights, views: CacheViews) -> Shapes | None:
    """None where the kernels do not know the model: another dtype, packed weights, experts, unusual sizes."""
    assert isinstance(decoder.embedding, Tensor)
    if not decoder.embedding.is_cuda or any(isinstance(layer.mlp, MoeWeights) for layer in decoder.layers):
        return None
    products: dict[Multiply, None] = {}
    blocks = blocks_of(decoder.embedding.device)
    gdn: GdnSpec | None = None
    attention: AttentionSpec | None = None
    weights: list[Weight] = [decoder.embedding, decoder.head]
    for layer in decoder.layers:
        mixer = layer.mixer
        inner, outer = ((mixer.in_proj, mixer.out_proj) if isinstance(mixer, GdnWeights)
                        else (mixer.qkv, mixer.o_proj))
        if isinstance(mixer, GdnWeights):
            if mixer.spec != (gdn or mixer.spec) or mixer.conv.dtype != torch.bfloat16:
                return None
            gdn = mixer.spec
        else:
            if mixer.spec != (attention or mixer.spec) or mixer.q_norm is None or mixer.bias is not None:
                return None
            attention = mixer.spec
        weights += [inner, outer, layer.dense.gate_up, layer.dense.down]
        if not all(map(_plain, weights)):
            return None
        for weight, norm, out in ((inner, True, STORE), (outer, False, ADD), (layer.dense.gate_up, True, GATE),
                                  (layer.dense.down, False, ADD)):
            assert isinstance(weight, Tensor)
            products[Multiply(weight.shape[1], norm, out, unit_of(weight.shape[0], out, blocks))] = None
        if isinstance(mixer, GdnWeights):
            assert isinstance(outer, Tensor)
            products[heads_product(mixer.spec, unit_of(outer.shape[0], ADD, blocks))] = None
    assert isinstance(decoder.head, Tensor)
    products[Multiply(decoder.head.shape[1], True, STORE)] = None
    rings = any(state.ring is not None for state in views.states)
    shapes = Shapes(tuple(products), gdn, attention, rings)
    return shapes if _known(shapes) and _stored(views) else None


def blocks_of(device: torch.device) -> int:
    """Blocks of a product: one for each multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _plain(weight: Weight) -> bool:
    return (isinstance(weight, Tensor) and weight.is_cuda and weight.dtype == torch.bfloat16
            and weight.is_contiguous())


def _known(shapes: Shapes) -> bool:
    gdn, attention = shapes.gdn, shapes.attention
    return (all(product.columns % 64 == 0 and product.columns <= (_NORMALISED if product.norm else _PLAIN)
                for product in shapes.products)
            and (gdn is None or (gdn.conv_kernel == 4 and (gdn.key_dim, gdn.value_dim) in ((128, 128), (32, 32))))
            and (attention is None or (attention.gate and attention.head_dim in (64, 128, 256)
                                       and attention.rotary_dim % (attention.head_dim // 16) == 0)))


def _stored(views: CacheViews) -> bool:
    keys = all(view.keys.dtype == torch.bfloat16 for view in views.kv)
    return keys and all(view.conv.dtype == torch.bfloat16 and view.conv.shape[1] == 4
                        and view.recurrent.dtype == torch.float32 for view in views.states)
