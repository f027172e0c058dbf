"""The decoder: a list of layers over Ops, from canonical weights to hidden states and logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltic.config import ModelConfig, shard_config
from deltic.model.tensor_parallel import Shard, WeightSplitter
from deltic.ops import Ops
from deltic.ops.quantized import PLAIN_TYPES, QTensor
from deltic.ops.slices import tree_sum
from deltic.ops.types import (
    AttentionSpec,
    AttentionWeights,
    Batch,
    Block,
    CacheViews,
    DecoderLayer,
    DecoderWeights,
    ExpertPool,
    GdnSpec,
    GdnWeights,
    MlpWeights,
    MoeWeights,
    Rope,
    RopeSpec,
    Weight,
)

_GGUF_NAMES = {dtype: name for dtype, (name, _) in PLAIN_TYPES.items()}
Observer = Callable[[int, Tensor], Tensor | None]
"""Called with (layer index, residual stream [T, H]) after the embedding, as layer -1, and after each layer. A result
other than None replaces the output."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model ready to run. It has no state: a step depends on its batch and views only.

    weights: the weights of the first device. dtype: dtype of the hidden states. others: the weights of the other
    devices, if the model is split over several (tensor parallel).
    """

    config: ModelConfig
    ops: Ops
    weights: DecoderWeights
    dtype: torch.dtype
    others: tuple[DecoderWeights, ...] = ()

    @property
    def shards(self) -> tuple[DecoderWeights, ...]:
        """The weights of all devices."""
        return self.weights, *self.others

    @property
    def head(self) -> Weight:
        """The matrix of logits (lm_head), with the rows of all devices."""
        if not self.others:
            return self.weights.head
        if self.config.tie_word_embeddings:
            return self.weights.embedding
        return tuple(block for shard in self.shards for block in blocks_of(shard.head))

    def forward(self, batch: Batch, *views: CacheViews, observe: Observer | None = None) -> Tensor:
        """Runs one step. Returns the hidden states after the final norm: [L, H] of the tokens `batch.logit_tokens`, or
        [T, H] of all tokens if `batch.layout.hidden`.

        views: the views of each device. The mixers write to them: K/V of every token, the rows' target slots, the emit
        slots.
        """
        ops, weights = self.ops, self.weights
        rope = ops.rope(batch.positions, weights.rope)
        residual, delta = ops.embed(batch.ids, weights.embedding, self.dtype), None
        if batch.input_embeds is not None:
            residual = residual.index_copy(0, batch.input_embeds.tokens, batch.input_embeds.rows.to(residual.dtype))
        if observe is not None and (changed := observe(-1, residual)) is not None:
            residual = changed
        for index, layers in enumerate(zip(*(shard.layers for shard in self.shards), strict=True)):
            residual, x = ops.add_norm(residual, delta, layers[0].input_norm, weights.eps)
            delta = summed([self._mix(x, layer, batch, view, rope)
                            for layer, view in zip(layers, views, strict=True)], x.dtype)
            residual, x = ops.add_norm(residual, delta, layers[0].post_norm, weights.eps)
            delta = summed([feed_forward(ops, x, layer) for layer in layers], x.dtype)
            if observe is not None and (changed := observe(index, residual + delta)) is not None:
                residual, delta = changed, None
        if not batch.layout.hidden:
            wanted = batch.logit_tokens
            residual, delta = residual[wanted], None if delta is None else delta[wanted]
        return ops.add_norm(residual, delta, weights.norm, weights.eps)[1]

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes hidden states [L, H] -> logits [L, V] float32."""
        parts = [self.ops.head(hidden, shard.head) for shard in self.shards]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Computes the last layer's output [T, H] -> hidden states, as `forward` returns them."""
        return self.ops.add_norm(hidden, None, self.weights.norm, self.weights.eps)[1]

    def _mix(self, x: Tensor, layer: DecoderLayer, batch: Batch, views: CacheViews, rope: Rope) -> Tensor:
        if isinstance(layer.mixer, GdnWeights):
            return self.ops.gdn_mixer(x, layer.mixer, views.states[layer.store], batch)
        return self.ops.attention_mixer(x, layer.mixer, views.kv[layer.store], batch, rope)

    def weight_kinds(self) -> dict[str, int]:
        """Returns the bytes of the parameters by format (a GGUF type, or a dtype). A tied head counts once."""
        weights: list[Weight] = [self.weights.embedding, self.weights.norm, self.head]
        for shard in self.shards:
            for layer in shard.layers:
                weights += _weights(layer)
        kinds: dict[str, int] = {}
        for block in {id(block): block for weight in weights for block in blocks_of(weight)}.values():
            kind = block.type if isinstance(block, QTensor) else _GGUF_NAMES.get(block.dtype, str(block.dtype))
            kinds[kind] = kinds.get(kind, 0) + block.nbytes
        return kinds

    def weight_bytes(self) -> int:
        """Returns the bytes of all parameters. A tied head counts once."""
        return sum(self.weight_kinds().values())

    def part_bytes(self) -> list[dict[str, int]]:
        """Returns the bytes of each device by part: parts of the layers, and the head. A tied head counts as 0, because
        it is the embedding."""
        tied = self.head is self.weights.embedding
        found = list[dict[str, int]]()
        for shard in self.shards:
            parts = dict.fromkeys(("attention", "gated_deltanet", "feed_forward", "head"), 0)
            for layer in shard.layers:
                kind = "gated_deltanet" if isinstance(layer.mixer, GdnWeights) else "attention"
                parts[kind] += _nbytes(_mixer_weights(layer.mixer))
                parts["feed_forward"] += _nbytes(_mlp_weights(layer.mlp))
            parts["head"] = 0 if tied else _nbytes([shard.head])
            found.append(parts)
        return found

    def token_bytes(self) -> int:
        """Returns the bytes of parameters that a token reads: all except unused experts and the other rows of an
        embedding that is not the head."""
        embedding, head = self.weights.embedding, self.head
        own = _nbytes([self.weights.norm, head])
        row = 0 if embedding is head else embedding.nbytes // len(embedding)
        count = self.config.experts.count if self.config.experts else 1
        return own + row + sum(_token_bytes(layer, count) for shard in self.shards for layer in shard.layers)


def _token_bytes(layer: DecoderLayer, count: int) -> int:
    """Returns the bytes of a layer that a token reads. count: number of experts of all devices."""
    total, mlp = _nbytes(_weights(layer)), layer.mlp
    if isinstance(mlp, MlpWeights):
        return total
    if isinstance(mlp.experts, ExpertPool):
        return total + mlp.experts.nbytes * mlp.per_token // count
    experts = _nbytes(weight for part in mlp.experts for weight in (part.gate_up, part.down))
    return total - experts + experts * mlp.per_token // count


def summed(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Returns the sum of the devices' partial results, rounded to `dtype`."""
    return tree_sum(parts).to(dtype)


def feed_forward(ops: Ops, x: Tensor, layer: DecoderLayer) -> Tensor:
    """Computes a layer's feed-forward, between norm and residual: x [T, H] -> [T, H]."""
    assert isinstance(layer.mlp, MoeWeights) or layer.mlp.pool is None, "only the GPU's own kernels copy these weights"
    return ops.moe(x, layer.mlp) if isinstance(layer.mlp, MoeWeights) else ops.mlp(x, layer.mlp)


def blocks_of(weight: Weight) -> tuple[Block, ...]:
    """Returns the blocks of a weight, in the order of their rows."""
    return weight if isinstance(weight, tuple) else (weight,)


def dense_parts(weights: MlpWeights | MoeWeights) -> tuple[MlpWeights, ...]:
    """Returns the dense parts of a feed-forward: itself, or all experts, the shared one last."""
    return (weights,) if isinstance(weights, MlpWeights) else weights.parts


def _weights(layer: DecoderLayer) -> Iterator[Weight]:
    yield from (layer.input_norm, layer.post_norm)
    yield from _mlp_weights(layer.mlp)
    yield from _mixer_weights(layer.mixer)


def _mlp_weights(mlp: MlpWeights | MoeWeights) -> Iterator[Weight]:
    for part in dense_parts(mlp):
        yield from (part.gate_up, part.down)
    if isinstance(mlp, MoeWeights):
        yield mlp.router


def _mixer_weights(mixer: GdnWeights | AttentionWeights) -> Iterator[Weight]:
    if isinstance(mixer, GdnWeights):
        yield from (mixer.in_proj, mixer.conv, mixer.decay, mixer.dt_bias, mixer.norm, mixer.out_proj)
    else:
        yield from (mixer.qkv, mixer.o_proj)
        yield from (vector for vector in (mixer.q_norm, mixer.k_norm, mixer.bias) if vector is not None)


def _nbytes(weights: Iterable[Weight]) -> int:
    return sum(block.nbytes for weight in weights for block in blocks_of(weight))


def build(config: ModelConfig, parts: Sequence[dict[str, Weight]], ops: Ops, dtype: torch.dtype,
          tiled: bool = False, pools: Sequence[ExpertPool | None] = ()) -> Decoder:
    """Builds a decoder from each device's part of the canonical tensors (loader/names), which it pops, so that joining
    projections needs memory for one layer only.

    dtype: dtype of the hidden states. tiled: value heads are in the order of GGUF files. pools: by layer, the experts,
        or the whole feed-forward, that are not among the weights.
    """
    shards, counts = WeightSplitter(config, len(parts), tiled).shards, {"linear_attention": 0, "full_attention": 0}
    layers: list[list[DecoderLayer]] = [[] for _ in shards]
    for index, kind in enumerate(config.layer_types):
        for shard, part, built in zip(shards, parts, layers, strict=True):
            take = WeightLoader(part, f"model.layers.{index}.", ops, config.norm_offset, shard)
            mixer = _gdn(take) if kind == "linear_attention" else _attention(take)
            built.append(DecoderLayer(take.norm("input_layernorm"), mixer, take.norm("post_attention_layernorm"),
                                      take.feed_forward(pools[index] if pools else None), counts[kind]))
        counts[kind] += 1
    rope = RopeSpec(config.rope.theta, config.rope.rotary_dim, config.rope.mrope_section, config.rope.factors,
                    config.rope.attention_factor)
    found = list[DecoderWeights]()
    for shard, part, built in zip(shards, parts, layers, strict=True):
        top = WeightLoader(part, "", ops, config.norm_offset, shard)
        # a device without its own embedding reads the embedding of the first device
        embedding = (top.block("model.embed_tokens", table=True) if "model.embed_tokens.weight" in part
                     else found[0].embedding)
        head = top.tied_head(embedding) if config.tie_word_embeddings else top.block("lm_head", table=len(parts) > 1)
        found.append(DecoderWeights(embedding, tuple(built), top.norm("model.norm"), head, rope, config.rms_norm_eps))
    return Decoder(config, ops, found[0], dtype, tuple(found[1:]))


class WeightLoader:
    """Pops the tensors of one module prefix, in the form of the ops. shard: the device that has these tensors."""

    def __init__(self, weights: dict[str, Weight], prefix: str, ops: Ops, norm_offset: float, shard: Shard) -> None:
        self.weights, self.prefix, self.ops, self.norm_offset = weights, prefix, ops, norm_offset
        self.shard = shard

    def plain(self, name: str) -> Tensor:
        tensor = self.weights.pop(self.prefix + name)
        assert isinstance(tensor, Tensor), f"{name} is packed"
        return tensor

    def block(self, name: str, table: bool = False) -> Block:
        """Returns a matrix in the backend's form."""
        matrix = self.weights.pop(f"{self.prefix}{name}.weight")
        assert not isinstance(matrix, tuple), f"{name} is a stack"
        return matrix if isinstance(matrix, QTensor) else self.ops.pack(matrix, table)

    def tied_head(self, embedding: Block) -> Block:
        """Returns the device's rows of the embedding as its matrix of logits, in the same memory."""
        rows = self.shard.tokens
        if self.shard.count == 1:
            return embedding
        return embedding.row_view(rows.start, rows.stop) if isinstance(embedding, QTensor) else embedding[rows]

    def float32(self, name: str) -> Tensor:
        return self.plain(name).float()

    def norm(self, name: str) -> Tensor:
        """Returns the scale of a norm. Checkpoints store it minus the family's offset."""
        return self.float32(name + ".weight") + self.norm_offset

    def linear(self, *names: str) -> Weight:
        """Returns one weight with the rows of all these modules, in blocks if some are packed already."""
        return self._joined([self.weights.pop(f"{self.prefix}{name}.weight") for name in names])

    def feed_forward(self, pool: ExpertPool | None = None) -> MlpWeights | MoeWeights:
        """Returns the feed-forward: dense if the model has no experts. pool: experts that are not in `weights`."""
        experts = self.shard.config.experts
        if experts is None and pool is not None:
            found: MlpWeights = pool.store.weights(pool.layer)
            return found
        if experts is None:
            return self._mlp("mlp.")
        own = self._experts() if pool is None else pool
        # the shared expert may be on other devices only
        has_shared = f"{self.prefix}mlp.shared_expert.down_proj.weight" in self.weights
        gates = ["mlp.gate", "mlp.shared_expert_gate"] if has_shared else ["mlp.gate"]
        shared = self._mlp("mlp.shared_expert.") if has_shared else None
        return MoeWeights(self.linear(*gates), own, shared, experts.per_token, experts.normalised,
                          self.shard.count, self.shard.experts.start)

    def _experts(self) -> tuple[MlpWeights, ...]:
        stacks = [self.weights.pop(f"{self.prefix}mlp.experts.{part}_proj.weight") for part in ("gate", "up", "down")]
        # it would not pay to copy every expert
        return self.ops.pack_experts(tuple(
            MlpWeights(self._joined([gate, up], copies=False), self._joined([down]))
            for gate, up, down in zip(*stacks, strict=True)))

    def _mlp(self, prefix: str) -> MlpWeights:
        return MlpWeights(self.linear(f"{prefix}gate_proj", f"{prefix}up_proj"), self.linear(f"{prefix}down_proj"),
                          shards=self.shard.count)

    def _joined(self, blocks: Sequence[Weight], copies: bool = True) -> Weight:
        """Returns blocks as one weight. copies: packed blocks may be copied to join them."""
        plain = [block for block in blocks if isinstance(block, Tensor)]
        if len(plain) == len(blocks):
            return self.ops.pack(plain[0] if len(plain) == 1 else torch.cat(plain), False)
        packed = list[Block]()
        for block in (block for weight in blocks for block in blocks_of(weight)):
            block = self.ops.pack(block, False) if isinstance(block, Tensor) else block
            before = packed[-1] if packed else None
            joined = (before.joined(block) if copies and isinstance(before, QTensor) and isinstance(block, QTensor)
                      else None)
            packed[len(packed) - (joined is not None):] = [block if joined is None else joined]
        return packed[0] if len(packed) == 1 else tuple(packed)


def _gdn(take: WeightLoader) -> GdnWeights:
    shard = take.shard
    config = shard_config(shard.config, shard.count)
    linear = config.linear
    assert linear is not None
    spec = GdnSpec(linear.num_key_heads, linear.num_value_heads, linear.key_head_dim, linear.value_head_dim,
                   linear.conv_kernel, config.rms_norm_eps, shard.tiled)
    parts = [f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a")]
    return GdnWeights(spec, take.linear(*parts), take.plain("linear_attn.conv1d.weight").squeeze(1).contiguous(),
                      -take.float32("linear_attn.A_log").exp(), take.float32("linear_attn.dt_bias"),
                      take.float32("linear_attn.norm.weight"), take.linear("linear_attn.out_proj"), shard.count)


def attention_spec(config: ModelConfig) -> AttentionSpec:
    return AttentionSpec(config.num_attention_heads, config.num_key_value_heads, config.head_dim,
                         config.rope.rotary_dim, config.attention_output_gate, config.rms_norm_eps)


def _attention(take: WeightLoader) -> AttentionWeights:
    config = shard_config(take.shard.config, take.shard.count)
    qkv = take.linear(*(f"self_attn.{part}_proj" for part in "qkv"))
    q_norm, k_norm = (take.norm(f"self_attn.{part}_norm") if config.qk_norm else None for part in "qk")
    bias = torch.cat([take.float32(f"self_attn.{part}_proj.bias") for part in "qkv"]) if config.qkv_bias else None
    return AttentionWeights(attention_spec(config), qkv, q_norm, k_norm, take.linear("self_attn.o_proj"), bias,
                            take.shard.count)
