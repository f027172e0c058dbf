"""Collects the kernels that a model needs: their shapes, and the CUDA source that instantiates them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deltic.ops.cuda.card import Card, card_of, default_card
from deltic.ops.cuda.driver import entry, headers
from deltic.ops.cuda.layout import (
    BOUND_FOR_72_REGISTERS,
    MAX_GEMV_TOKENS,
    MAX_SPLIT_HEAD_TOKENS,
    OVERLAP_SHARED_BYTES,
    PLAIN_MMA_TOKENS,
    TWO_BLOCKS_SHARED_BYTES,
    WARPS,
)
from deltic.ops.cuda.moe import ExpertsShape, host_entries
from deltic.ops.cuda.quantized import KINDS, Tiles
from deltic.ops.cuda.quantized_moe import PackedShape, experts_shape
from deltic.ops.cuda.quantized_product import PackedMultiply, parts_of, product_of
from deltic.ops.cuda.sliced_product import WHOLE, ColumnSlices, SliceShape, split_of
from deltic.ops.kv import INT4
from deltic.ops.types import (
    AttentionSpec,
    AttentionWeights,
    CacheViews,
    DecoderWeights,
    GdnSpec,
    GdnWeights,
    MlpWeights,
    MoeWeights,
    Weight,
)

SEGMENT = 1024
"""Columns of a weight that are copied to shared memory at once."""
_MOST_TILES, _MANY_RING_BYTES = 3, 96 << 10
"""Products of many tokens: largest number of tiles of 16 rows at once, and largest size of the ring in bytes."""
_MIN_BYTES_IN_FLIGHT = 60 << 10
"""Bytes of weights in flight below which a block with several tokens takes the next kernel's shared memory, too."""
STORE, ADD, GATE, PART = range(4)
"""Use of a product's sums. STORE writes them, ADD adds them to y, GATE writes silu(first half) * second half, PART
writes the sums over one device's columns. ADD and PART sum in the order of `ops.slices`."""
_KV = {torch.bfloat16: "u16", torch.float8_e4m3fn: "u8", INT4: "Int4"}
"""The kernels' types of keys and values."""
STATES = {torch.float32: "float", torch.bfloat16: "unsigned short"}
"""The kernels' types of states in their slots."""
WHOLE_STATE_THREADS = 384
"""Threads per block of the kernels that pass whole states through shared memory (kernels/gdn_many.cuh)."""


@dataclass(frozen=True, slots=True)
class Multiply:
    """A product with a bfloat16 weight.

    columns: the weight's columns. norm: the input is RMS-normed first. out: STORE, ADD, GATE or PART.
    unit: rows that a block multiplies at once, if there are few tokens.
    tiles: tiles of 16 rows that a block multiplies at once, if there are many.
    head, slice: columns of a value head and of one of its slices if the input is the output of split heads, which the
        product norms and gates; else 0.
    split: slices of the columns, used with ADD and PART.
    terms: the product adds the terms of adapters to its sums (kernels/lora.cuh).
    """

    columns: int
    norm: bool
    out: int
    unit: int = 8
    head: int = 0
    slice: int = 0
    split: ColumnSlices = WHOLE
    tiles: int = _MOST_TILES
    card: Card = field(default_factory=default_card)
    terms: bool = False

    @property
    def most(self) -> int:
        """Largest number of tokens."""
        return self.few if self.head else MAX_GEMV_TOKENS

    @property
    def few(self) -> int:
        """Largest number of tokens whose input fits in shared memory. More are many (kernels/product_many.cuh)."""
        most = MAX_SPLIT_HEAD_TOKENS if self.head else PLAIN_MMA_TOKENS
        return min(most, self._room // (self.columns * 2 + 2 * self._least_sums(1)))

    @property
    def _room(self) -> int:
        """Bytes of shared memory for the input and the sums if the ring has the least number of slots."""
        return min(self.card.product_bytes, self.card.max_shared_bytes - 1024 - self._least_slots * self._slot)

    @property
    def _least_slots(self) -> int:
        return self._shape.teams if self._sliced else 2

    @property
    def _sliced(self) -> bool:
        return self.out in (ADD, PART)

    @property
    def _shape(self) -> SliceShape:
        return SliceShape(self.columns, self.split, self.unit, self.card.max_shared_bytes < OVERLAP_SHARED_BYTES)

    def name(self, tokens: int) -> str:
        kind = "norm" if self.norm else "heads" if self.head else "plain"
        out = ("store", "add", "gate", "part")[self.out]
        form = f"{self.unit}_few" if tokens <= self.few else f"{self.tiles}_many"
        return f"product_{self.columns}_{kind}_{out}_{form}" + self.split.suffix + "_terms" * self.terms

    def source(self, tokens: int, limits_registers: bool = False) -> str:
        """Returns the kernel's CUDA source."""
        norm, split = str(self.norm).lower(), f"{self.split.slices}, {self.split.runs}"
        type, more = ("AddedProduct", ", true") if self.terms else ("Product", "")
        threads, resident, check = self.threads(tokens), self.card.resident(TWO_BLOCKS_SHARED_BYTES), ""
        if tokens > self.few:
            resident, stages = 1, self.many(tokens)[0]
            call = f"product_many<{self.columns}, {norm}, {self.out}, {self.tiles}, {stages}, {split}{more}>"
        elif self._sliced:
            check, short = self._shape.check, str(self._shape.short).lower()
            call = f"sliced<{self.columns}, {self.out}, {self.unit}, {self.head}, {self.slice}, {split}, {short}{more}>"
        else:
            call = f"product<{self.columns}, {norm}, {self.out}, {self.unit}{more}>"
        if limits_registers and resident > 1:
            threads = BOUND_FOR_72_REGISTERS
        return (f'extern "C" __global__ void __launch_bounds__({threads}, {resident}) {self.name(tokens)}'
                f"(const __grid_constant__ {type} a) {{ {call}(a); }}\n{check}")

    def many(self, tokens: int) -> tuple[int, int]:
        """Returns the stages of the ring of many tokens, and the bytes of shared memory of a block."""
        stage, sums = (2 * self.tiles + 2) * WARPS * 32 * 16, WARPS * self.tiles * 16 * 4  # bytes; sums: of a token
        stages = min(_MANY_RING_BYTES, self.card.max_shared_bytes - MAX_GEMV_TOKENS * sums) // stage
        return stages, stages * stage + tokens * sums

    def threads(self, tokens: int) -> int:
        """Returns the threads per block."""
        copying = 0 if tokens > self.few else self._shape.copying if self._sliced else 1
        return (WARPS + copying) * 32

    def group(self, tokens: int, units: int) -> int:
        """Returns the units that a block multiplies between two sums over its warps: as many as fit."""
        rest = (self._room + 1024 - self._fixed(tokens)) // 2
        if tokens == 1 and self._sliced:  # with the least number of slots, the next kernel's block must still fit
            rest = min(rest, (OVERLAP_SHARED_BYTES - self._fixed(tokens) - self._least_slots * self._slot) // 2)
        at_once = self._shape.units if self._sliced else 1
        return at_once * max(1, min(min(self.card.sum_bytes, rest) // self._least_sums(tokens), -(-units // at_once)))

    def _slots(self, tokens: int, sums: int) -> int:
        """Returns the most slots of a block's ring of weight segments. sums: bytes of shared memory for sums."""
        slot, fixed, least, most = self._slot, self._fixed(tokens) + sums, self._least_slots, self.card.max_shared_bytes
        slots = (min(OVERLAP_SHARED_BYTES, most) - fixed) // slot
        if slots < max(3, least * self._sliced) or (tokens > 1 and slots * slot < _MIN_BYTES_IN_FLIGHT):
            slots = (most - fixed) // slot
        slots = max(least, min(slots, 24 if slot < self.unit * SEGMENT * 2 else 12))
        return slots // least * least if self._sliced else slots

    def shared(self, tokens: int, group: int, units: int) -> tuple[int, int]:
        """Returns the slots and the bytes of shared memory of a block that multiplies `units` units."""
        at_once, steps = 1, units * -(-self.columns // SEGMENT)
        if self._sliced:
            at_once = self._shape.units
            steps = -(-units // at_once) * self._shape.rounds * self._shape.teams
        sums = (1 if group >= units else 2) * group // at_once * self._least_sums(tokens)
        slots = max(2, min(self._slots(tokens, sums), steps))
        return slots, max(TWO_BLOCKS_SHARED_BYTES, self._fixed(tokens) + sums + slots * self._slot)

    def _least_sums(self, tokens: int) -> int:
        """Returns the bytes of shared memory for the sums of all warps over the units that are multiplied at once."""
        return WARPS * (self.unit if self._sliced else 8) * tokens * 4

    @property
    def _slot(self) -> int:
        if self._sliced:
            return self._shape.slot
        return self.unit * (self.columns * 2 if self.columns <= SEGMENT else SEGMENT * 2 + 64)

    def _fixed(self, tokens: int) -> int:
        return 1024 + tokens * self.columns * 2


def plain_product(weight: Tensor, norm: bool, out: int, blocks: int, split: ColumnSlices, card: Card) -> Multiply:
    """Returns the product with a bfloat16 weight. blocks: blocks of a launch."""
    rows, columns = weight.shape
    tiles = -(-rows // (8 * blocks * (WARPS // split.slices))) / 2
    least = math.ceil(tiles / math.ceil(tiles / _MOST_TILES))  # with which a block has as few passes
    return Multiply(columns, norm, out, unit_of(rows, out, blocks), split=split, tiles=least, card=card)


def unit_of(rows: int, out: int, blocks: int) -> int:
    """Returns the rows of a unit: 4 instead of 8 if this divides the rows more evenly among the blocks."""
    most = {unit: -(-rows // (unit * blocks)) * unit for unit in (8, 4)}
    return 4 if out in (ADD, PART) and most[4] < 0.95 * most[8] else 8


@dataclass(frozen=True, slots=True)
class Shapes:
    """All kernels of a model: its products, and the specs of its layers.

    kinds: tile formats of the quantized weights, which are dequantized for many tokens.
    parts: tiles of each quantized weight, by the weight's id.
    delta_logs: states have delta logs.
    experts: shape of the mixture-of-experts layers.
    host: hidden size if the host computes feed-forwards of dense layers; else 0.
    kv, state: the kernels' types of keys and values (kernels/kv.cuh), and of states.
    form: form of the attention layers, as `form_of` returns it (kernels/attention.cuh).
    card: the card for which the kernels are compiled.
    shards: devices over which the layers are split; specs and products describe one device's part.
    """

    products: tuple[Multiply | PackedMultiply, ...]
    gdn: GdnSpec | None
    attention: AttentionSpec | None
    kinds: frozenset[str] = frozenset()
    parts: Mapping[int, tuple[Tiles, ...]] = field(default_factory=dict, compare=False)
    delta_logs: bool = False
    experts: ExpertsShape | None = None
    host: int = 0
    kv: str = "u16"
    state: str = "float"
    form: int = 3
    card: Card = field(default_factory=default_card)
    shards: int = 1

    @property
    def shared(self) -> int:
        """Bytes of shared memory of the largest block."""
        products = max(map(_shared_bytes, self.products))
        return max(products, self.experts.shared_memory if self.experts else 0)

    @property
    def limits_registers(self) -> bool:
        """True if products take at most 72 registers, so that a delta rule block fits next to two of their blocks.

        False if a row is one segment, because such a product keeps its input in registers. Quantized products of one
        token would fit, but are faster without such a block next to them. With experts it is untested.
        """
        plain = all(isinstance(product, Multiply) and product.columns > SEGMENT for product in self.products)
        return plain and self.experts is None

    def source(self) -> str:
        """Returns the CUDA source of all kernels for decode steps."""
        files = ["input", "product", "sliced", "product_many", "gdn", "gdn_many", "kv", "attention", "small"]
        if self.delta_logs:
            files.append("verify")
        if self.kinds or isinstance(self.experts, PackedShape):
            files.append("packed")
        if self.experts:
            files += self.experts.files
        if self.host:
            files += ["experts", "beside"]
        text = [state_header(self.state), headers(*files), *self.product_sources()]
        text += [entry(name, type, "256", name) for name, type in (
            ("enter", "Enter"), ("add_norm", "AddNorm"), ("gate", "Gate"))]
        for kind, number in ((kind, KINDS[kind].number) for kind in sorted(self.kinds)):
            text.append(entry(f"unpack_{kind.lower()}", "Unpack", "256", f"unpack<{number}>"))
            text.append(entry(f"enter_{kind.lower()}", "Enter", "256", f"enter_packed<{number}>"))
        for kind, name in (("float", "few"), ("u16", "many")):
            if self.gdn:
                text += self._gdn(self.gdn, kind, name)
            if self.attention:
                size, share = self.attention.head_dim, self.attention.heads // self.attention.kv_heads
                shape = f"<{size}, {share}, {kind}, {self.kv}, {self.form}>"
                room = attention_bytes(self.attention, self.card)
                text.append(entry(f"attention_{name}", "Attention", f"256, {self.card.resident(room)}",
                                  f"attention{shape}"))
                if room:
                    text.append(f"static_assert(sizeof(Attend{shape}::Shared) <= {room});\n")
        if self.gdn and self.delta_logs:
            text.append(entry("append", "Append", "256", "append"))
        text += self.experts.entries() if self.experts else ()
        text += host_entries(f"{self.host}, 1, 1, false, false") if self.host else ()
        return "".join(text)

    def product_sources(self) -> list[str]:
        """Returns each kernel's source once, although a kernel serves several numbers of tokens."""
        text: dict[str, None] = {}
        for product in self.products:
            for tokens in range(1, product.most + 1):
                limits = () if isinstance(product, PackedMultiply) else (self.limits_registers,)
                text[product.source(tokens, *limits)] = None
            if isinstance(product, Multiply) and product.norm:
                text[entry(f"stage_{product.columns}", "Stage", "256", f"stage_many<{product.columns}>")] = None
        return list(text)

    def _gdn(self, gdn: GdnSpec, kind: str, name: str) -> list[str]:
        """Returns the sources of the Gated DeltaNet kernels. kind: C type of the projections. name: `few` or `many`."""
        text, size = list[str](), gdn_slice(gdn, name, self.shards)
        shape, block = f"{gdn.key_dim}, {gdn.value_dim}, {size}, {kind}", gdn.value_dim // size * 128
        if name == "few":
            text += [entry(f"gdn_spread_{each}", "Gdn", f"{128 * each}, {6 // each}", f"gdn_spread<{shape}, {each}>")
                     for each in (1, 2) if gdn.value_dim // size % each == 0]
        if name == "many" and passes_whole(gdn):
            whole = f"gdn_many<{gdn.key_dim}, {states_at_once(gdn, self.state, self.card)}"
            text.append(entry("gdn_many", "Gdn", f"{WHOLE_STATE_THREADS}, 1", f"{whole}, false>"))
            if self.delta_logs:
                text.append(entry("gdn_many_rings", "OverRings", f"{WHOLE_STATE_THREADS}, 1", f"{whole}, true>"))
        else:
            alone = self.card.resident(gdn.key_dim * gdn.value_dim * 4 + (16 << 10)) == 1  # one state fits, not two
            fit = min(1024 // block, 1 if alone else 8)
            text.append(entry(f"gdn_{name}", "Gdn", f"{block}, {fit}", f"gdn_stream<{shape}>"))
        if self.delta_logs:
            text.append(entry(f"gdn_verify_{name}", "Verify", "128, 4", f"gdn_verify<{shape}>"))
        return text


def _shared_bytes(product: Multiply | PackedMultiply) -> int:
    if isinstance(product, PackedMultiply):
        return product.shared
    few = (product.shared(tokens, product.group(tokens, 1 << 20), 1 << 20)[1] for tokens in range(1, product.few + 1))
    return max([*few, product.many(product.most)[1]])


def state_header(state: str) -> str:
    """Returns the first line of a source with kernels that access states. state: as in `Shapes`."""
    return f"typedef {state} State;\n"


def gdn_slice(spec: GdnSpec, kind: str, shards: int = 1) -> int:
    """Returns the columns of a value head that four warps process: 32, or 16 if few rows with few heads would not fill
    the card. spec: one device's part. The sums of a head depend on this size, so it does not depend on `shards`."""
    return 16 if kind == "few" and spec.value_dim == 128 and spec.value_heads * shards <= 16 else 32


def heads_stride(spec: GdnSpec, shards: int = 1) -> int:
    """Returns the floats per token in the output of split heads: the values, then each slice's sum of squares."""
    return (spec.values + spec.values // gdn_slice(spec, "few", shards) + 3) // 4 * 4


def attention_bytes(spec: AttentionSpec, card: Card) -> int:
    """Returns attention's bytes of dynamic shared memory: 0 on 9.0, where static memory may exceed 48 KiB."""
    share = spec.heads // spec.kv_heads
    floats = (share + WARPS * max(share, 3)) * spec.head_dim + (2 * WARPS + 64) * share + 4
    return 0 if card.wgmma else 4 * floats


def passes_whole(spec: GdnSpec) -> bool:
    """True if states of many rows pass through shared memory as a whole (kernels/gdn_many.cuh)."""
    return (spec.key_dim, spec.value_dim) == (128, 128)


def states_at_once(spec: GdnSpec, state: str, card: Card) -> int:
    """Returns the number of whole states that fit in a block's shared memory. state: as in `Shapes`."""
    return card.whole_state_bytes // (spec.key_dim * spec.value_dim * (4 if state == "float" else 2))


def heads_product(spec: GdnSpec, unit: int, card: Card | None = None, shards: int = 1) -> Multiply:
    """Returns the output projection of split heads. spec: one device's part of the layer."""
    return Multiply(spec.values, False, summed(shards), unit, spec.value_dim, gdn_slice(spec, "few", shards),
                    split_of(shards, spec), card=card or default_card())


def summed(shards: int) -> int:
    """Returns `out` of a product with columns that are split over `shards` devices."""
    return ADD if shards == 1 else PART


def shapes_of(decoder: DecoderWeights, views: CacheViews, also: Sequence[tuple[Weight, bool]] = ()) -> Shapes | None:
    """Returns the kernels of a model; None if its dtype, sizes or weight formats are not supported.

    also: weights of further products with STORE, each with True if its input is normed.
    """
    if not decoder.norm.is_cuda or not _supported_stores(views):
        return None
    found = _Found(blocks_of(decoder.norm.device), card_of(decoder.norm.device))
    gdn: GdnSpec | None = None
    attention, form = None, 0
    experts: ExpertsShape | None = None
    for layer in decoder.layers:
        mixer = layer.mixer
        if isinstance(mixer, GdnWeights):
            if mixer.spec != (gdn or mixer.spec) or mixer.conv.dtype != torch.bfloat16:
                return None
            gdn = mixer.spec
            found.add(mixer.in_proj, True, STORE)
            found.add(mixer.out_proj, False, summed(mixer.shards), mixer.shards, gdn)
        else:
            own_form = form_of(mixer)
            if attention and (mixer.spec, own_form) != (attention, form):
                return None
            attention, form = mixer.spec, own_form
            found.add(mixer.qkv, True, STORE)
            found.add(mixer.o_proj, False, summed(mixer.shards), mixer.shards)
        if isinstance(layer.mlp, MoeWeights):
            own = experts_shape(layer.mlp)
            experts = own.joined(experts) if own and experts else own
            if experts is None:
                return None
            found.add(layer.mlp.router, True, STORE)
        else:
            found.add_dense(layer.dense)
    heads = [(decoder.head, True), (decoder.head, False)]
    for weight, norm in (*heads[:1 + isinstance(decoder.head, Tiles)], *also):  # a quantized head without a norm, too
        found.add(weight, norm, STORE)
    if isinstance(decoder.embedding, Tiles):
        found.kinds.add(decoder.embedding.type)
    elif not _plain(decoder.embedding):
        return None
    shapes = Shapes(
        products=tuple(found.products),
        gdn=gdn,
        attention=attention,
        kinds=frozenset(found.kinds),
        parts=found.parts,
        delta_logs=any(state.delta_log is not None for state in views.states),
        experts=experts,
        host=decoder.embedding.shape[1] if found.asks_host else 0,
        kv=_KV[views.kv[0].keys.dtype] if views.kv else "u16",
        state=STATES[views.states[0].recurrent.dtype] if views.states else "float",
        form=form,
        card=found.card,
        shards=max(layer.mixer.shards for layer in decoder.layers),
    )
    return shapes if found.all_known and _supported(shapes) else None


@dataclass(slots=True)
class _Found:
    """Collects the kernels that a model's weights need. blocks: blocks of a product."""

    blocks: int
    card: Card
    products: dict[Multiply | PackedMultiply, None] = field(default_factory=dict)
    parts: dict[int, tuple[Tiles, ...]] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)
    asks_host: bool = False
    all_known: bool = True

    def add(self, weight: Weight, norm: bool, out: int, shards: int = 1, heads: GdnSpec | None = None) -> None:
        """Adds the product with a weight. shards: devices over which the weight's columns are split. heads: spec of the
        layer if the weight may also be multiplied with outputs of split heads."""
        split = split_of(shards, heads)
        if isinstance(weight, Tensor) and _plain(weight):
            product = plain_product(weight, norm, out, self.blocks, split, self.card)
            self.products[product] = None
            if heads:
                self.products[heads_product(heads, product.unit, self.card, shards)] = None
        elif parts := self._parts_of(weight, out):
            self.products[product_of(parts, norm, out, self.blocks, split=split)] = None
            if heads:
                size = gdn_slice(heads, "few", shards)
                self.products[product_of(parts, norm, out, self.blocks, heads.value_dim, size, split)] = None
        else:
            self.all_known = False

    def _parts_of(self, weight: Weight, out: int) -> tuple[Tiles, ...] | None:
        parts = self.parts.get(id(weight)) or parts_of(weight, out == GATE)
        if parts:
            self.parts[id(weight)] = parts
            self.kinds.update(part.type for part in parts)
        return parts

    def add_dense(self, weights: MlpWeights) -> None:
        self.add(weights.gate_up, True, GATE)
        self.add(weights.down, False, summed(weights.shards), weights.shards)
        self.asks_host |= weights.pool is not None and weights.pool.store.host is not None


def form_of(weights: AttentionWeights) -> int:
    """Returns `Shapes.form`, a sum of bits: 1 for a gate, 2 for norms of the heads, 4 for a bias."""
    return weights.spec.gate + 2 * (weights.q_norm is not None) + 4 * (weights.bias is not None)


def blocks_of(device: torch.device) -> int:
    """Returns the number of blocks of a product: one per multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _plain(weight: Weight) -> bool:
    return (isinstance(weight, Tensor) and weight.is_cuda and weight.dtype == torch.bfloat16
            and weight.is_contiguous())


def _supported(shapes: Shapes) -> bool:
    gdn, attention = shapes.gdn, shapes.attention
    if any(product.columns % 64 or product.most < 1 for product in shapes.products):
        return False
    if gdn and (gdn.conv_kernel != 4 or (gdn.key_dim, gdn.value_dim) not in ((128, 128), (32, 32))):
        return False
    if attention and shapes.kv == "Int4" and attention.head_dim == 256 and attention.kv_heads % 2:
        return False  # a token's heads would then begin at addresses that are only multiples of two bytes
    return attention is None or (attention.head_dim in (64, 128, 256)
                                 and attention.rotary_dim % (attention.head_dim // 16) == 0)


def _supported_stores(views: CacheViews) -> bool:
    keys, states = {view.keys.dtype for view in views.kv}, {view.recurrent.dtype for view in views.states}
    return (len(keys) < 2 and keys <= {*_KV} and len(states) < 2 and states <= {*STATES}
            and all(view.conv.dtype == torch.bfloat16 and view.conv.shape[1] == 4 for view in views.states))
