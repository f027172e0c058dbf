"""Which kernels a model needs: their shapes, and the source that instantiates them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deltic.ops.cuda.nvrtc import headers
from deltic.ops.records import AttentionSpec, GdnSpec, GdnWeights, Stack, Stores, Weight

FEW, MOST = 8, 16
"""Tokens of a step that the products take at once: one or two rows of eight."""
WARPS = 8
"""Of a block that multiplies."""
_HELD = 10
"""Fragments of input that a thread keeps in registers."""
_INPUT = 88 << 10
"""Bytes of input that a block keeps in shared memory at most."""
HALF = 84 << 10
"""More than a third of what a multiprocessor has: see kernels/common.cuh."""
_NORMALISED, _PLAIN = 4096, 12288
"""Columns that products take at most."""
STORE, ADD, GATE = range(3)


@dataclass(frozen=True, slots=True)
class Multiply:
    """A product: columns of its weight, whether its input is normalised, what becomes of its sums."""

    columns: int
    norm: bool
    out: int

    @property
    def loads(self) -> int:
        """Loads of a thread for a unit of 8 rows."""
        return 2 * -(-self.columns // (64 * WARPS))

    @property
    def units(self) -> int:
        """Units that are multiplied at the same time."""
        return max(1, min(4, 16 // self.loads))

    def depth(self, tokens: int) -> int:
        """Copies of 16 bytes that a thread has on their way. More would leave no room for the next kernel's blocks
        beside these, or for the input."""
        if 2 < tokens <= FEW or (self.norm and tokens * self.columns * 2 > _INPUT):
            return 16
        return 24 if self.columns <= 4096 else 20

    def held(self, tokens: int) -> bool:
        """Whether a thread keeps its share of so many tokens of input in registers."""
        return self.loads * (2 if tokens > FEW else 1) <= _HELD

    def direct(self, tokens: int) -> bool:
        """Whether so many tokens of input are too large for shared memory, and are read again for every unit."""
        return not self.norm and not self.held(tokens) and tokens * self.columns * 2 > _INPUT

    def name(self, tokens: int) -> str:
        return (f"product_{self.columns}_{'norm' if self.norm else 'plain'}_{('store', 'add', 'gate')[self.out]}"
                f"_{'many' if tokens > FEW else 'few'}{'_direct' if self.direct(tokens) else ''}_{self.depth(tokens)}")

    def source(self, tokens: int) -> str:
        many, norm, direct = (str(flag).lower() for flag in (tokens > FEW, self.norm, self.direct(tokens)))
        return (f'extern "C" __global__ void __launch_bounds__({WARPS * 32}, 2) {self.name(tokens)}'
                f"(const __grid_constant__ Product a) {{ product<{self.columns}, {norm}, {self.out}, {many}, "
                f"{self.units}, {self.depth(tokens)}, {direct}>(a); }}\n")

    def group(self, tokens: int, units: int) -> int:
        """Units of a block between two sums over the warps: as many as fit, a multiple of `units`."""
        fit = max(1, (16 << 10) // (WARPS * 8 * tokens * 4))
        return max(1, min(fit, units) // self.units) * self.units

    def shared(self, tokens: int, group: int, single: bool) -> int:
        """Bytes of shared memory. single: one group is all there is."""
        inputs = 0 if self.direct(tokens) or self.held(tokens) else tokens * self.columns * 2 + 64
        sums = (1 if single else 2) * group * WARPS * 8 * tokens * 4
        return max(HALF, 512 + self.depth(tokens) * WARPS * 512 + inputs + sums)


@dataclass(frozen=True, slots=True)
class Shapes:
    """All kernels of a model: products, and the specs of its layers."""

    products: tuple[Multiply, ...]
    gdn: GdnSpec | None
    attention: AttentionSpec | None

    @property
    def shared(self) -> int:
        """Bytes of shared memory that the largest block takes."""
        return max(product.shared(tokens, product.group(tokens, 1 << 20), False)
                   for product in self.products for tokens in range(1, MOST + 1))

    def source(self) -> str:
        text = [headers("product", "gdn", "attention", "small")]
        text += {product.source(tokens): None for product in self.products for tokens in range(1, MOST + 1)}
        text += [entry(name, type, "256", name) for name, type in (
            ("enter", "Enter"), ("add_norm", "AddNorm"), ("gate", "Gate"))]
        for kind, name in (("float", "few"), ("u16", "many")):
            if self.gdn:
                text.append(entry(f"gdn_{name}", "Gdn", f"{gdn_threads(self.gdn)}, 2",
                                   f"gdn<{self.gdn.key_dim}, {self.gdn.value_dim}, {kind}>"))
            if self.attention:
                size, share = self.attention.head_dim, self.attention.heads // self.attention.kv_heads
                text.append(entry(f"attention_{name}", "Attention", "256, 2", f"attention<{size}, {share}, {kind}>"))
        return "".join(text)


def entry(name: str, type: str, bounds: str, call: str) -> str:
    """The text of a kernel that calls a function of the kernel files."""
    inner = call if "<" in call else f"::{call}"
    return (f'extern "C" __global__ void __launch_bounds__({bounds}) k_{name}(const __grid_constant__ {type} a) '
            f"{{ {inner}(a); }}\n")


def gdn_threads(spec: GdnSpec) -> int:
    return 512 if spec.key_dim * spec.value_dim >= 16384 else 128


def shapes_of(stack: Stack, stores: Stores) -> Shapes | None:
    """None where the kernels do not know the model: another dtype, packed weights, unusual sizes."""
    products: dict[Multiply, None] = {}
    gdn: GdnSpec | None = None
    attention: AttentionSpec | None = None
    weights: list[Weight] = [stack.embedding, stack.head]
    for layer in stack.layers:
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
        weights += [inner, outer, layer.mlp.gate_up, layer.mlp.down]
        if not all(map(_plain, weights)):
            return None
        for weight, norm, out in ((inner, True, STORE), (outer, False, ADD), (layer.mlp.gate_up, True, GATE),
                                  (layer.mlp.down, False, ADD)):
            assert isinstance(weight, Tensor)
            products[Multiply(weight.shape[1], norm, out)] = None
    assert isinstance(stack.head, Tensor)
    products[Multiply(stack.head.shape[1], True, STORE)] = None
    shapes = Shapes(tuple(products), gdn, attention)
    return shapes if _known(shapes) and _stored(stores) else None


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


def _stored(stores: Stores) -> bool:
    keys = all(view.keys.dtype == torch.bfloat16 for view in stores.kv)
    return keys and all(view.conv.dtype == torch.bfloat16 and view.conv.shape[1] == 4
                        and view.recurrent.dtype == torch.float32 for view in stores.states)
