"""Which kernels a model needs: their shapes, and the source that instantiates them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deltic.ops.cuda.driver import headers
from deltic.ops.cuda.layout import ALONE, FOUR, HALF, INPUT, MOST, SPREAD, SQUEEZED, WARPS, WHOLE
from deltic.ops.cuda.moe import ExpertsShape
from deltic.ops.cuda.quantized_gemm import PackedMultiply, kinds_entries, parts_of, product_of
from deltic.ops.cuda.quantized_moe import PackedShape, experts_shape
from deltic.ops.cuda.quantized_tiles import Tiles
from deltic.ops.types import AttentionSpec, CacheViews, DecoderWeights, GdnSpec, GdnWeights, MoeWeights, Weight

SEGMENT = 1024
"""Columns that are copied at once."""
_ON_THEIR_WAY = 60 << 10
"""Bytes of weights for which there must be room in a block that has several tokens; else it takes that of the next
kernel's, too."""
_SUMS = 8 << 10
"""Bytes of a group's sums."""
_NORMALISED, _PLAIN = 4096, 12288
"""Columns that products take at most."""
STORE, ADD, GATE = range(3)
_KV = {torch.bfloat16: "u16", torch.float8_e4m3fn: "u8"}
"""What keys and values are in the kernels."""
STATES = {torch.float32: "float", torch.bfloat16: "unsigned short"}
"""What a number of a state in its slot is there."""
PASSING, PASSING_ROOM = 384, 192 << 10
"""Threads of a block through which whole states pass, and bytes of those that it has at once: so many that no two
blocks come to lie on one multiprocessor."""


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
        return min(SPREAD if self.head else MOST, INPUT // (self.columns * 2))

    def name(self, tokens: int) -> str:
        kind = "norm" if self.norm else "heads" if self.head else "plain"
        return (f"product_{self.columns}_{kind}_{('store', 'add', 'gate')[self.out]}"
                f"_{self.unit}_{'many' if tokens > FOUR else 'few'}")

    def source(self, tokens: int, squeezed: bool = False) -> str:
        """The kernel's text. squeezed: with few registers."""
        fours, norm = MOST // FOUR if tokens > FOUR else 1, str(self.norm).lower()
        threads = SQUEEZED if squeezed and tokens <= FOUR else WARPS * 32 + 32
        return (f'extern "C" __global__ void __launch_bounds__({threads}, 2) {self.name(tokens)}'
                f"(const __grid_constant__ Product a) {{ product<{self.columns}, {norm}, {self.out}, {fours}, "
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
        return slots, max(ALONE, self._fixed(tokens) + sums + slots * self._slot)

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
    """All kernels of a model: products, and the specs of its layers.

    kinds: of tiles that have to be turned into plain numbers.
    parts: by the id of a weight that is quantized, its tiles.
    rings: states have replay rings beside them.
    experts: of layers that are mixtures of them.
    kv: the kernels' type of keys and values in the pages (kernels/kv.cuh).
    state: that of states in their slots.
    """

    products: tuple[Multiply | PackedMultiply, ...]
    gdn: GdnSpec | None
    attention: AttentionSpec | None
    kinds: frozenset[str] = frozenset()
    parts: Mapping[int, tuple[Tiles, ...]] = field(default_factory=dict, compare=False)
    rings: bool = False
    experts: ExpertsShape | None = None
    kv: str = "u16"
    state: str = "float"

    @property
    def shared(self) -> int:
        """Bytes of shared memory that the largest block takes."""
        products = max(product.shared if isinstance(product, PackedMultiply) else
                       max(product.shared(tokens, product.group(tokens, 1 << 20), 1 << 20)[1]
                           for tokens in range(1, product.most + 1)) for product in self.products)
        return max(products, self.experts.shared_memory if self.experts else 0)

    @property
    def squeezed(self) -> bool:
        """Whether products take few registers, so that a block of the delta rule finds room beside two of them. They
        cannot where rows are one segment, whose input they keep in some; quantized ones of one token do, but are faster
        where its blocks are alone; with experts it has not been tried."""
        plain = all(isinstance(product, Multiply) and product.columns > SEGMENT for product in self.products)
        return plain and self.experts is None

    def source(self) -> str:
        text = [state_header(self.state),
                headers("input", "product", "gdn", "gdn_many", "kv", "attention", "small", *["verify"] * self.rings,
                        *["packed"] * (bool(self.kinds) or isinstance(self.experts, PackedShape)),
                        *(self.experts.files if self.experts else ()))]
        text += {product.source(tokens) if isinstance(product, PackedMultiply)
                 else product.source(tokens, self.squeezed): None
                 for product in self.products for tokens in range(1, product.most + 1)}
        text += [entry(name, type, "256", name) for name, type in (
            ("enter", "Enter"), ("add_norm", "AddNorm"), ("gate", "Gate"))]
        text += [entry(*row) for row in kinds_entries(self.kinds)]
        for kind, name in (("float", "few"), ("u16", "many")):
            if gdn := self.gdn:
                size = gdn_slice(gdn, name)
                shape, block = f"{gdn.key_dim}, {gdn.value_dim}, {size}, {kind}", gdn.value_dim // size * 128
                if name == "few":
                    text.append(entry("gdn_spread", "Gdn", "128, 6", f"gdn_spread<{shape}>"))
                if name == "many" and passes_whole(gdn):
                    passing = f"gdn_many<{gdn.key_dim}, {states_at_once(gdn, self.state)}"
                    text.append(entry("gdn_many", "Gdn", f"{PASSING}, 1", f"{passing}, false>"))
                    if self.rings:
                        text.append(entry("gdn_many_rings", "OverRings", f"{PASSING}, 1", f"{passing}, true>"))
                else:
                    text.append(entry(f"gdn_{name}", "Gdn", f"{block}, {1024 // block}", f"gdn_stream<{shape}>"))
                if self.rings:
                    text.append(entry(f"gdn_verify_{name}", "Verify", "128, 4", f"gdn_verify<{shape}>"))
            if self.attention:
                size, share = self.attention.head_dim, self.attention.heads // self.attention.kv_heads
                text.append(entry(f"attention_{name}", "Attention", "256, 2",
                                  f"attention<{size}, {share}, {kind}, {self.kv}>"))
        if self.gdn and self.rings:
            text.append(entry("append", "Append", "256", "append"))
        text += self.experts.entries() if self.experts else ()
        return "".join(text)


def state_header(state: str) -> str:
    """The first line of a source whose kernels touch states. state: as of `Shapes`."""
    return f"typedef {state} State;\n"


def entry(name: str, type: str, bounds: str, call: str) -> str:
    """The text of a kernel that calls a function of the kernel files."""
    inner = call if "<" in call else f"::{call}"
    return (f'extern "C" __global__ void __launch_bounds__({bounds}) k_{name}(const __grid_constant__ {type} a) '
            f"{{ {inner}(a); }}\n")


def gdn_slice(spec: GdnSpec, kind: str) -> int:
    """Columns of a value head that four warps have; of few rows so few that a row's heads spread over the card."""
    return 16 if kind == "few" and spec.value_dim == 128 and spec.value_heads <= 16 else 32


def heads_stride(spec: GdnSpec) -> int:
    """Floats from token to token of what heads in slices give."""
    return (spec.values + spec.values // gdn_slice(spec, "few") + 3) // 4 * 4


def passes_whole(spec: GdnSpec) -> bool:
    """Whether states of many rows pass through shared memory as a whole (kernels/gdn_many.cuh)."""
    return (spec.key_dim, spec.value_dim) == (128, 128)


def states_at_once(spec: GdnSpec, state: str) -> int:
    """Whole states that a block has at once through which they pass. state: as of `Shapes`."""
    return PASSING_ROOM // (spec.key_dim * spec.value_dim * (4 if state == "float" else 2))


def heads_product(spec: GdnSpec, unit: int) -> Multiply:
    """The output projection of heads in slices."""
    return Multiply(spec.values, False, ADD, unit, spec.value_dim, gdn_slice(spec, "few"))


def shapes_of(decoder: DecoderWeights, views: CacheViews, also: Sequence[tuple[Weight, bool]] = ()) -> Shapes | None:
    """None where the kernels do not know the model: another dtype, unusual sizes or forms of weights. also: weights of
    further products whose sums are stored, and whether their input is normalised."""
    if not decoder.norm.is_cuda:
        return None
    found = _Found(blocks_of(decoder.norm.device))
    gdn: GdnSpec | None = None
    attention: AttentionSpec | None = None
    experts: ExpertsShape | None = None
    for layer in decoder.layers:
        mixer = layer.mixer
        if isinstance(mixer, GdnWeights):
            if mixer.spec != (gdn or mixer.spec) or mixer.conv.dtype != torch.bfloat16:
                return None
            gdn = mixer.spec
            inner, outer = mixer.in_proj, mixer.out_proj
        else:
            if mixer.spec != (attention or mixer.spec) or mixer.q_norm is None or mixer.bias is not None:
                return None
            attention = mixer.spec
            inner, outer = mixer.qkv, mixer.o_proj
        found.add(inner, True, STORE)
        found.add(outer, False, ADD, gdn if isinstance(mixer, GdnWeights) else None)
        if isinstance(layer.mlp, MoeWeights):
            own = experts_shape(layer.mlp)
            experts = own.joined(experts) if own and experts else own
            if experts is None:
                return None
            found.add(layer.mlp.router, True, STORE)
        else:
            found.add(layer.dense.gate_up, True, GATE)
            found.add(layer.dense.down, False, ADD)
    found.add(decoder.head, True, STORE)
    if isinstance(decoder.head, Tiles):
        found.add(decoder.head, False, STORE)
    for weight, norm in also:
        found.add(weight, norm, STORE)
    if isinstance(decoder.embedding, Tiles):
        found.kinds.add(decoder.embedding.type)
    elif not _plain(decoder.embedding):
        return None
    rings = any(state.delta_log is not None for state in views.states)
    shapes = Shapes(tuple(found.products), gdn, attention, frozenset(found.kinds), found.parts, rings,
                    experts, _KV.get(views.kv[0].keys.dtype, "") if views.kv else "u16",
                    STATES.get(views.states[0].recurrent.dtype, "") if views.states else "float")
    return shapes if found.all_known and _known(shapes) and _stored(views) else None


@dataclass(slots=True)
class _Found:
    """What a model's weights ask for, collected. blocks: of a product."""

    blocks: int
    products: dict[Multiply | PackedMultiply, None] = field(default_factory=dict)
    parts: dict[int, tuple[Tiles, ...]] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)
    all_known: bool = True

    def add(self, weight: Weight, norm: bool, out: int, heads: GdnSpec | None = None) -> None:
        """heads: the weight may be given outputs of heads in slices."""
        if isinstance(weight, Tensor) and _plain(weight):
            self.products[Multiply(weight.shape[1], norm, out, unit_of(weight.shape[0], out, self.blocks))] = None
            if heads:
                self.products[heads_product(heads, unit_of(weight.shape[0], ADD, self.blocks))] = None
        elif parts := self.parts.get(id(weight)) or parts_of(weight, out == GATE):
            self.parts[id(weight)] = parts
            self.kinds.update(part.type for part in parts)
            self.products[product_of(parts, norm, out, self.blocks)] = None
            if heads:
                product = product_of(parts, norm, out, self.blocks, heads.value_dim, gdn_slice(heads, "few"))
                self.products[product] = None
        else:
            self.all_known = False


def blocks_of(device: torch.device) -> int:
    """Blocks of a product: one for each multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _plain(weight: Weight) -> bool:
    return (isinstance(weight, Tensor) and weight.is_cuda and weight.dtype == torch.bfloat16
            and weight.is_contiguous())


def knows_sizes(hidden: int, intermediate: int) -> bool:
    """Whether the products of a dense model have no more columns than the kernels take."""
    return hidden <= _NORMALISED and intermediate <= _PLAIN


def _known(shapes: Shapes) -> bool:
    gdn, attention = shapes.gdn, shapes.attention
    return (all(product.columns % 64 == 0 and product.columns <= (_NORMALISED if product.norm else _PLAIN)
                for product in shapes.products)
            and (gdn is None or (gdn.conv_kernel == 4 and (gdn.key_dim, gdn.value_dim) in ((128, 128), (32, 32))))
            and (attention is None or (attention.gate and attention.head_dim in (64, 128, 256)
                                       and attention.rotary_dim % (attention.head_dim // 16) == 0)))


def _stored(views: CacheViews) -> bool:
    keys, states = {view.keys.dtype for view in views.kv}, {view.recurrent.dtype for view in views.states}
    return (len(keys) < 2 and keys <= {*_KV} and len(states) < 2 and states <= {*STATES}
            and all(view.conv.dtype == torch.bfloat16 and view.conv.shape[1] == 4 for view in views.states))
