"""The multi-token-prediction head: one additional attention layer, which drafts the tokens after the next one."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Final

import torch
from torch import Tensor

from deltic.config import ExpertsConfig, ModelConfig, shard_config
from deltic.errors import ModelError
from deltic.model.decoder import Decoder, WeightLoader, attention_spec, dense_parts, feed_forward, summed
from deltic.model.draft_vocabulary import DraftVocabulary, gather_rows, to_device
from deltic.model.tensor_parallel import WeightSplitter
from deltic.ops import Ops
from deltic.ops.quantized import QTensor
from deltic.ops.types import (
    AttentionWeights,
    Batch,
    Block,
    CacheViews,
    DecoderLayer,
    MoeWeights,
    MtpWeights,
    Weight,
)

log = logging.getLogger("deltic")
_LAYER: Final = "mtp.layers.0."
_POSITIVE: Final = 0.95
"""Minimum share of positive factors in a norm that was saved with the offset."""


@dataclass(frozen=True, slots=True)
class MtpHead(MtpWeights):
    """A draft head ready to run. It has no state, like a Decoder.

    Row i of its K/V is computed from the token at position i and from the trunk's hidden state at i - 1 after the final
    norm (zero for row 0). Its output there gives the logits of the token at i + 1, and replaces the hidden state at i
    for the next draft.
    dtype: dtype of the activations. vocabulary: the rows of a shortened head. others: the weights of the other devices,
    if the model is split over several: `layer` and `kv` are split, all other weights are whole.
    """

    ops: Ops
    dtype: torch.dtype
    vocabulary: DraftVocabulary | None = None
    others: tuple[MtpWeights, ...] = ()

    @property
    def shards(self) -> tuple[MtpWeights, ...]:
        """The weights of all devices."""
        return self, *self.others

    def draft(self, ids: Tensor, hidden: Tensor, batch: Batch, *views: CacheViews) -> tuple[Tensor, Tensor]:
        """Drafts the tokens that follow `ids`.

        ids [T] int64: the batch's tokens, at its positions. hidden [T, H]: the hidden states before the tokens, from
            the trunk or an earlier call, in any floating dtype. Stores the tokens' K/V in the head's layer.
        -> (hidden [T, H] in `dtype`, logits [T, V] float32, -inf for tokens without a row in a shortened head).
        """
        ops, layers = self.ops, [shard.layer for shard in self.shards]
        residual, x = self._enter(ids, hidden)
        rope = ops.rope(batch.positions, self.rope)
        delta = summed([ops.attention_mixer(x, _attention(layer), view.kv[layer.store], batch, rope)
                        for layer, view in zip(layers, views, strict=True)], x.dtype)
        residual, x = ops.add_norm(residual, delta, self.layer.post_norm, self.eps)
        delta = summed([feed_forward(ops, x, layer) for layer in layers], x.dtype)
        hidden = ops.add_norm(residual, delta, self.norm, self.eps)[1]
        logits = ops.head(hidden, self.head)
        return hidden, logits if self.vocabulary is None else self.vocabulary.spread(logits)

    def keep(self, ids: Tensor, hidden: Tensor, batch: Batch, *views: CacheViews) -> None:
        """Stores the K/V of the batch's tokens in the head's layer, and nothing else.

        ids [T] int64, hidden [T, H]: as for `draft`, but hidden states of the trunk only, so that rows can be shared.
        """
        x, rope = self._enter(ids, hidden)[1], self.ops.rope(batch.positions, self.rope)
        for shard, view in zip(self.shards, views, strict=True):
            layer, mixer = shard.layer, _attention(shard.layer)
            self.ops.store_kv(x, shard.kv, mixer.k_norm, mixer.spec, view.kv[layer.store], batch, rope)

    def _enter(self, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the residual stream at the layer's input, and the normed layer input, [T, H] each."""
        ops = self.ops
        embedded = ops.embed(ids, self.embedding, self.dtype)
        parts = [ops.add_norm(x, None, norm, self.eps)[1]
                 for x, norm in ((embedded, self.norm_embedding), (hidden.to(self.dtype), self.norm_hidden))]
        joined = ops.head(torch.cat(parts, dim=-1), self.fc).to(self.dtype)
        return ops.add_norm(joined, None, self.layer.input_norm, self.eps)


def build_head(config: ModelConfig, parts: Sequence[dict[str, Weight]], decoder: Decoder,
               tokens: Sequence[int] | None = None) -> MtpHead:
    """Builds a head for a trunk from each device's part of the canonical tensors (`loader.names.expected_head`), which
    it pops.

    tokens: the only tokens to draft, as `draft_vocabulary.draftable` returns them, with a copy of their rows; None:
        all. Embedding and matrix of logits are the trunk's, unless the head has its own.
    """
    ops = decoder.ops
    if config.experts is not None:
        _borrow_gates(config.experts, parts, decoder)
    tensors = parts[0]
    offset = 0.0 if _has_offset(tensors, decoder) else config.norm_offset
    shards = WeightSplitter(config, len(parts)).shards
    layers = [_layer(WeightLoader(part, _LAYER, ops, offset, shard))
              for part, shard in zip(parts, shards, strict=True)]
    tops = [_top(WeightLoader(part, "mtp.", ops, offset, shard), tokens is not None)
            for part, shard in zip(parts, shards, strict=True) if "mtp.fc.weight" in part]
    tops += tops[:1] * (len(parts) - len(tops))  # virtual devices of a CPU share the first one's
    heads, short = _logits(tops, decoder, tokens)
    weights = [MtpWeights(
        shard.embedding if top.embedding is None else top.embedding, top.norm_embedding, top.norm_hidden, top.fc,
        layer, kv, top.norm, head, shard.rope, shard.eps, ids)
        for shard, top, (layer, kv), (head, ids) in zip(decoder.shards, tops, layers, heads, strict=True)]
    own = {field.name: getattr(weights[0], field.name) for field in fields(MtpWeights)}
    matrices = [own["embedding"], *(block for weight in (own["fc"], own["head"], *_matrices(own["layer"]))
                                    for block in _blocks(weight))]
    # float32 as in a whole native step; plain matrices need activations of their own dtype
    dtype = torch.float32 if all(isinstance(block, QTensor) for block in matrices) else decoder.dtype
    return MtpHead(**own, ops=ops, dtype=dtype, vocabulary=short, others=tuple(weights[1:]))


@dataclass(frozen=True, slots=True)
class _Top:
    """The weights of a head that are whole on a device. embedding, head: None if the trunk's are used."""

    embedding: Block | None
    norm_embedding: Tensor
    norm_hidden: Tensor
    fc: Weight
    norm: Tensor
    head: Block | None


def _top(take: WeightLoader, shortened: bool) -> _Top:
    def own(name: str, table: bool) -> Block | None:
        return take.block(name, table) if f"mtp.{name}.weight" in take.weights else None

    return _Top(own("embed_tokens", True), take.norm("pre_fc_norm_embedding"), take.norm("pre_fc_norm_hidden"),
                take.linear("fc"), take.norm("norm"), own("shared_head.head", shortened))


def _logits(tops: Sequence[_Top], decoder: Decoder, tokens: Sequence[int] | None
            ) -> tuple[list[tuple[Weight, Tensor | None]], DraftVocabulary | None]:
    """Returns `head` and `tokens` of each device, and the vocabulary of a shortened head."""
    devices = [shard.norm.device for shard in decoder.shards]
    whole: Weight = decoder.head if tops[0].head is None else tops[0].head
    if tokens is not None:
        short = DraftVocabulary(whole, tokens, devices, decoder.ops.pack)
        return [short.copies[device] for device in devices], short
    if len({*devices}) == 1:
        return [(whole, None)] * len(devices), None
    found = list[tuple[Weight, Tensor | None]]()
    for shard, top, device in zip(decoder.shards, tops, devices, strict=True):
        own: Weight | None = shard.embedding if decoder.config.tie_word_embeddings else None
        own = own if top.head is None else top.head
        found.append((to_device(gather_rows(_blocks(whole)), device) if own is None else own, None))
    return found, None


def _layer(take: WeightLoader) -> tuple[DecoderLayer, Weight]:
    """Returns `MtpWeights.layer` and `kv` of a device."""
    config = shard_config(take.shard.config, take.shard.count)
    kv = take.linear("self_attn.k_proj", "self_attn.v_proj")
    mixer = AttentionWeights(attention_spec(config), _blocks(take.linear("self_attn.q_proj")) + _blocks(kv),
                             take.norm("self_attn.q_norm"), take.norm("self_attn.k_norm"),
                             take.linear("self_attn.o_proj"), shards=take.shard.count)
    return DecoderLayer(take.norm("input_layernorm"), mixer, take.norm("post_attention_layernorm"),
                        take.feed_forward(), len(config.attention_layers)), kv


def _matrices(layer: DecoderLayer) -> list[Weight]:
    mixer, mlp = _attention(layer), layer.mlp
    router = [mlp.router] if isinstance(mlp, MoeWeights) else []
    return [mixer.qkv, mixer.o_proj, *router,
            *(weight for part in dense_parts(mlp) for weight in (part.gate_up, part.down))]


def _attention(layer: DecoderLayer) -> AttentionWeights:
    assert isinstance(layer.mixer, AttentionWeights)
    return layer.mixer


def _borrow_gates(experts: ExpertsConfig, parts: Sequence[dict[str, Weight]], decoder: Decoder) -> None:
    """Adds the expert gates that some tools drop from a head: copies of the gates of the trunk's last attention layer,
    which are most similar."""
    rows = {"gate": slice(experts.count), "shared_expert_gate": slice(experts.count, experts.count + 1)}
    for gate, part in rows.items():
        name = f"mtp.layers.0.mlp.{gate}.weight"
        if name in parts[0] or (gate != "gate" and not experts.shared_size):
            continue
        layers = [layer.mlp for layer in decoder.weights.layers if isinstance(layer.mixer, AttentionWeights)]
        if not layers or not isinstance(layers[-1], MoeWeights):
            raise ModelError(f"tensor {name!r} is missing, and the model has no layer with attention whose gate could "
                             "stand in; use the model without its head")
        log.warning("the draft head lacks %s: that of the model's last layer with attention is used", name)
        borrowed = torch.cat([_plain(block) for block in _blocks(layers[-1].router)])[part].clone()
        for own, shard in zip(parts, decoder.shards, strict=True):
            own[name] = borrowed.to(shard.norm.device)


def _has_offset(tensors: Mapping[str, Weight], decoder: Decoder) -> bool:
    """True if a head's norms were saved with the family's offset added, as other programs' converters do.

    Such norms are positive almost everywhere. Norms saved minus the offset lie around zero, so that some of them, above
    all the embedding's, are mostly negative. If training has made all norms of a head positive, the model's last
    attention layer distinguishes it, because the norms of both have about the same size.
    """
    if not decoder.config.norm_offset:
        return False
    norms = {name: tensor.float() for name, tensor in tensors.items() if isinstance(tensor, Tensor) and "norm" in name}
    positive = all(float((norm > 0).float().mean()) > _POSITIVE for norm in norms.values())
    if not positive or not (theirs := _trunk_norms(decoder)):
        return False
    excess = median(float(norms[f"mtp.{name}.weight"].mean() - norm.mean()) for name, norm in theirs.items())
    if excess < -decoder.config.norm_offset / 2:
        return False
    log.warning("the draft head's norms have been saved with the %g that is added to them: it is not added again",
                decoder.config.norm_offset)
    return True


def _trunk_norms(decoder: Decoder) -> dict[str, Tensor]:
    """Returns the factors of the norms of the model's last attention layer, under the names of the head's norms; an
    empty dict if there is no such layer."""
    for layer in reversed(decoder.weights.layers):
        mixer = layer.mixer
        if isinstance(mixer, AttentionWeights):
            norms = {"layers.0.input_layernorm": layer.input_norm, "layers.0.post_attention_layernorm": layer.post_norm,
                     "layers.0.self_attn.q_norm": mixer.q_norm, "layers.0.self_attn.k_norm": mixer.k_norm,
                     "norm": decoder.weights.norm}
            return {name: norm for name, norm in norms.items() if norm is not None}
    return {}


def _plain(block: Block) -> Tensor:
    if isinstance(block, QTensor):
        return block.dequantize()
    return block.to_dense() if block.is_mkldnn else block


def _blocks(weight: Weight) -> tuple[Block, ...]:
    return weight if isinstance(weight, tuple) else (weight,)
