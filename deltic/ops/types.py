"""The records that ops take: what a batch, a cache view and a layer's weights look like. Shapes are the contract.

T tokens of R rows (sequences) are concatenated in one ragged batch; a row contributes a chunk of consecutive
tokens. Decode is a chunk of 1, verification a chunk of k + 1, prefill a chunk of n; nothing else tells them
apart. Rows with a chunk of 1 come first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from deltic.ops.drafted import Drafted
from deltic.ops.quantized import QTensor
from deltic.params import CHUNK as CHUNK
from deltic.params import PAGE as PAGE
from deltic.params import RING as RING

Block = Tensor | QTensor
Weight = Block | tuple[Block, ...]
"""A linear weight [out, in], or row blocks of one that are kept apart because their types differ."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Host-side shape of a batch: hashable, and constant for all batches of one bucket.

    chunks: tokens of each row; the first `decode_rows` rows have exactly one.
    contexts: upper bound of each row's context length after the step (done + chunk).
    logits: number of tokens whose logits are wanted. checkpoints: number of states to emit.
    appends: some row of the batch appends to its replay ring instead of writing its state.
    hidden: the hidden states of all tokens after the final norm are wanted, besides the logits.
    replays: some row of several tokens has tokens in its replay ring.
    """

    chunks: tuple[int, ...]
    contexts: tuple[int, ...]
    decode_rows: int
    logits: int
    checkpoints: int = 0
    appends: bool = False
    hidden: bool = False
    replays: bool = False

    @property
    def rows(self) -> int:
        return len(self.chunks)

    @property
    def tokens(self) -> int:
        return sum(self.chunks)


@dataclass(frozen=True, slots=True)
class Padded:
    """The integers of a step that only decodes, filled up to the shape of a bucket: steps of one bucket differ in
    nothing but these numbers.

    numbers: int64, on the device, laid out as `ops/input_columns` says; what is beyond the real rows repeats the last
    one, which does no harm, as it writes the same.
    rows, pages: of the bucket.
    tokens: of all rows together, which may have several, with drafts among them, and tokens in replay rings; rows
        beyond the real ones have none. None: one of each row, and nothing in rings.
    hidden: as in `Layout`.
    """

    numbers: Tensor
    rows: int
    pages: int
    tokens: int | None = None
    hidden: bool = False

    @property
    def bucket(self) -> tuple[int, int, int | None]:
        return self.rows, self.pages, self.tokens


@dataclass(frozen=True, slots=True)
class InputEmbeds:
    """What some tokens of a batch have in place of embeddings: batch indices [N] int64, ascending, and rows [N, H]
    float32, both contiguous and on the device."""

    tokens: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Device tensors of one step; all integers int64 unless said otherwise.

    ids [T].
    positions [3, T]: rotary positions (temporal, height, width), apart from cache indices.
    starts [R + 1]: first token of each row.
    done [R]: the cursor, tokens that the row's committed state and K/V hold before this step; the chunk's tokens get
        the cache indices done, done + 1, ...
    pages [R, P]: page table, padded with page 0.
    store [T]: flat K/V index (page * PAGE + offset) of each token.
    source, target [R]: state slots to read and to write (equal: in place). No row reads a slot that another row writes.
    base [R]: how many tokens the source slot is as of; done where there are no rings. A row with base = 0 starts from
        zero state and reads nothing from its source. base <= done <= base + RING.
    ring [R]: the row's replay ring unit, which has the entries of positions base .. done - 1 and belongs to no other
        row; any number where base = done and the row does not append.
    append [R] bool (of a bucket int64): append the chunk's entries to the ring and leave the slot alone, as long as
        base .. done + chunk - 1 fit; else the slot is first brought to `done`, and the ring then holds the chunk alone.
        Only with source = target, chunk <= RING. Rows without it bring the target to done + chunk and leave the ring
        alone. `ref.next_base` says what the slot is as of afterwards. To reject tokens, come back with a smaller
        `done`.
    emit_row, emit_length, emit_slot [E]: write the row's state after `emit_length` tokens of its sequence (done <
        emit_length <= done + chunk) to this slot.
    logit_tokens [L]: batch indices of the tokens whose logits are wanted, ascending.
    span: the slots of the leading single-token rows when they are consecutive and read and written in place, as (first,
        end), so that a backend may take a view; None otherwise.
    count [1]: how many rows are real, where the others only fill a bucket up; None: all.
    padded: the same step in the shape of a bucket; None where it has no bucket.
    input_embeds: what stands in for embeddings of some tokens.
    memo: what a backend derives from this batch once and uses in every layer.
    kept: where following batches will be this one with other numbers: what a backend derives from its layout and from
        where its tensors, all contiguous, lie; None where they will not.
    """

    layout: Layout
    ids: Tensor
    positions: Tensor
    starts: Tensor
    done: Tensor
    pages: Tensor
    store: Tensor
    source: Tensor
    target: Tensor
    base: Tensor
    delta_log: Tensor
    append: Tensor
    emit_row: Tensor
    emit_length: Tensor
    emit_slot: Tensor
    logit_tokens: Tensor
    span: tuple[int, int] | None = None
    count: Tensor | None = None
    padded: Padded | None = None
    input_embeds: InputEmbeds | None = None
    memo: dict[str, Any] = field(default_factory=dict)
    kept: dict[Any, Any] | None = None


@dataclass(frozen=True, slots=True)
class KvView:
    """One attention layer's K/V pages: keys, values [pages, PAGE, kv_heads, head_dim], in the model's dtype or as in
    `ops/kv`. arriving: copies to them under way beside the stream of steps; who uses the pages calls `wait` before."""

    keys: Tensor
    values: Tensor
    arriving: list[Any] = field(default_factory=list, compare=False)

    def wait(self) -> None:
        """Have what follows in the stream wait for all copies."""
        while self.arriving:
            self.arriving.pop(0).wait()


@dataclass(frozen=True, slots=True)
class DeltaLogView:
    """One Gated DeltaNet layer's replay rings: N units, each with an entry for the tokens that came after the state in
    a slot; that of position p at place p mod RING.

    inputs [N, RING, C] in the dtype of the slots' conv: raw convolution inputs. keys [N, RING, Hk, Dk] float32,
    normalised.
    updates [N, RING, Hv, Dv] float32: u.
    decays [N, RING, Hv] float32: a.
    tiled: which key head a value head belongs to, as in the layer's `GdnSpec`.
    """

    inputs: Tensor
    keys: Tensor
    updates: Tensor
    decays: Tensor
    tiled: bool = False


@dataclass(frozen=True, slots=True)
class StateView:
    """One Gated DeltaNet layer's slots, each wholly as of one number of tokens, and replay rings of what came after.

    recurrent [S, Hv, Dk, Dv] float32 or bfloat16: the state, rounded when it is written, computed with in float32.
    conv [S, W, C] model dtype, W >= conv_kernel: ring of raw convolution inputs; that of position p at place p mod W.
    delta_log: None where no row uses one.
    """

    recurrent: Tensor
    conv: Tensor
    delta_log: DeltaLogView | None = None

    def check_order(self, spec: GdnSpec) -> None:
        """ValueError if the rings take value heads to be in another order than the layer does."""
        if self.delta_log is not None and self.delta_log.tiled != spec.tiled:
            raise ValueError(
                f"RingView.tiled is {self.delta_log.tiled}, GdnSpec.tiled {spec.tiled}: make them the same"
            )


@dataclass(frozen=True, slots=True)
class Rope:
    """cos, sin [T, rotary_dim] float32 of this step's tokens: M-RoPE already resolved, halves repeated."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """theta: base. rotary_dim: rotated leading dimensions of a head. sections: frequencies of the temporal,
    height and width axes, interleaved as Hugging Face does; empty: plain rotary positions. factors: what each of the
    rotary_dim / 2 frequencies is divided by; empty: by 1."""

    theta: float
    rotary_dim: int
    sections: tuple[int, ...] = ()
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class GdnSpec:
    """Shape of a Gated DeltaNet layer. key_heads divides value_heads. tiled: value head i belongs to key head
    i mod key_heads, as in GGUF files, instead of to i // (value_heads / key_heads)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    eps: float
    tiled: bool = False

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """C: the convolution's channels, ordered query, key, value."""
        return 2 * self.keys + self.values


@dataclass(frozen=True, slots=True)
class GdnWeights:
    """in_proj [C + values + 2 Hv, hidden]: rows q, k, v (the C convolved ones), z, b, a. conv [C, K].
    decay [Hv] float32: -exp(A_log). dt_bias [Hv] float32. norm [Dv] float32: plain scale. out_proj [hidden, values].
    """

    spec: GdnSpec
    in_proj: Weight
    conv: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor
    out_proj: Weight


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Shape of a full-attention layer. kv_heads divides heads. gate: the output is gated by sigmoid(gate)."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    gate: bool
    eps: float

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """qkv [(2 if gate else 1) * queries + 2 * kv, hidden]: rows of q (with a gate: per head its query, then its gate),
        k, v.
    o_proj [hidden, queries].
    q_norm, k_norm [head_dim] float32: the scale itself; None: heads are not normed.
    bias [rows of qkv] float32: added to what they give, or None.
    """

    spec: AttentionSpec
    qkv: Weight
    q_norm: Tensor | None
    k_norm: Tensor | None
    o_proj: Weight
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """gate_up [2 F, hidden]: rows of gate, then up. down [hidden, F]."""

    gate_up: Weight
    down: Weight


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPool:
    """A layer's experts, of which a few lie in memory and the others in files, or on a GPU and in the host's memory.
    store: who has them, a backend's own; `layer`: the layer's number there; count: of all; nbytes: all in memory."""

    store: Any
    layer: int
    count: int
    nbytes: int

    def __len__(self) -> int:
        return self.count


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """A mixture of E experts, of which a token passes `per_token`, and with `shared` one more that every token passes.

    router [E, hidden]; with `shared` [E + 1, hidden]: the last row is of the shared expert's gate.
    normalised: the weights of a token's experts add up to 1.
    """

    router: Weight
    experts: tuple[MlpWeights, ...] | ExpertPool
    shared: MlpWeights | None
    per_token: int
    normalised: bool

    @property
    def parts(self) -> tuple[MlpWeights, ...]:
        """All experts whose weights lie in memory for good, the shared one last."""
        own = () if isinstance(self.experts, ExpertPool) else self.experts
        return own if self.shared is None else (*own, self.shared)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One decoder layer. Exactly one mixer; `store` is its index among the layers that use the same kind of store
    (K/V pages or state slots)."""

    input_norm: Tensor
    mixer: GdnWeights | AttentionWeights
    post_norm: Tensor
    mlp: MlpWeights | MoeWeights
    store: int

    @property
    def dense(self) -> MlpWeights:
        """The feed-forward of a layer without experts."""
        assert isinstance(self.mlp, MlpWeights)
        return self.mlp


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a decoder. embedding [V, H]. norm [H] float32: of the last hidden state. head [V, H]."""

    embedding: Block
    layers: tuple[DecoderLayer, ...]
    norm: Tensor
    head: Weight
    rope: RopeSpec
    eps: float


@dataclass(frozen=True, slots=True)
class CacheViews:
    """The cache as the decoder sees it: one view per attention layer and one per recurrent layer."""

    kv: tuple[KvView, ...]
    states: tuple[StateView, ...]


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """A draft head (multi-token prediction): one more attention layer beside a decoder.

    fc [H, 2 H]: columns of the embedding, then of the hidden state.
    norm_embedding, norm_hidden, norm [H] float32: the scales themselves.
    layer: an attention layer; its `store` follows those of the decoder's. kv [2 * kv, H]: the rows k, v of its qkv.
    head [N, H], tokens [N] int64: its rows, and the tokens they stand for (None: all); change in place between calls.
    """

    embedding: Block
    norm_embedding: Tensor
    norm_hidden: Tensor
    fc: Weight
    layer: DecoderLayer
    kv: Weight
    norm: Tensor
    head: Weight
    rope: RopeSpec
    eps: float
    tokens: Tensor | None


@dataclass(frozen=True, slots=True)
class MtpStep:
    """A draft head in calls of its own, over one cache.

    follow(batch, hidden [T, H] float32): after a step of the decoder, of which these are the hidden states: stores the
        head's K/V of all tokens; the slots' hidden states are those of the last tokens, where rows do not append.
    draft(batch, counts [R] int64, sampling) -> tokens [R, most] int64: what follows the tokens of a batch of
        single-token rows, counts[r] <= most of them. sampling: of R * most rows, which changes no logits.

    Where a device computes beside the host:

    draft_ahead(batch, most, chosen [T] int64, keys [R, n] int64, temperature [T] float32) -> Drafted: so many drafts of
        what follows a step that was just launched, in which `chosen` was drawn after each token. keys: of the draws
        after a row's first token and those that follow, n >= most + the tokens of a row. The slots' hidden states
        become those of the last right tokens.
    record(rows, pages, most): make ready for drafts of so many rows at once, for which as many pages are laid out.
    last [N, H] float32: the hidden states of the last step's tokens, of at most N.
    """

    follow: Callable[[Batch, Tensor], None]
    draft: Callable[[Batch, Tensor, Sampling], Tensor]
    draft_ahead: Callable[[Batch, int, Tensor, Tensor, Tensor], Drafted] | None = None
    record: Callable[[int, int, int], None] | None = None
    last: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LogitTable:
    """Changes of all logits of one row, as in `Adjust`: repetition [V], offset [V] float32; None: 1, or 0, everywhere.
    Borrowed for the call."""

    row: int
    repetition: Tensor | None
    offset: Tensor | None


@dataclass(frozen=True, slots=True)
class Adjust:
    """Changes of logits: single ones, N with distinct (row, token), and of whole rows. First repetition, then offset.

    row, token [N] int64.
    repetition [N] float32: positive logits are divided, others multiplied by it.
    offset [N] float32: added afterwards (penalties and bias; -inf forbids the token).
    tables: at most one for each row; what is said of a single token counts instead.
    """

    row: Tensor
    token: Tensor
    repetition: Tensor
    offset: Tensor
    tables: tuple[LogitTable, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """How L rows of logits are turned into tokens; tensors [L].

    temperature float32 (0: greedy), top_k int64 (0: all), top_p, min_p float32, key int64: the 64-bit key of (seed,
    choice, position) that the row's Gumbel noise is a function of.

    greedy: every row is greedy.
    filtered: some row has top_k, top_p or min_p.
    top_logprobs: how many of the most probable tokens to report (None: no log-probabilities at all).
    kept: as in `Batch`, of draws one after another; then what was drawn stays only until the next draw.
    landing [2 * L] int64: pinned memory, where a device may write tokens, then whether logits are healthy, as well.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    key: Tensor
    adjust: Adjust | None = None
    greedy: bool = True
    filtered: bool = False
    top_logprobs: int | None = None
    kept: dict[Any, Any] | None = None
    landing: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """tokens [L] int64.

    healthy [L] bool, or int64 of 0 and 1: the raw logits are finite and not all equal.
    possible [L] bool: some token is not forbidden; of healthy rows. With log-probabilities (of the raw logits):
        logprobs [L], top_tokens [L, n], top_logprobs [L, n] float32.
    landed: all of it lies in `Sampling.landing` too, as soon as the device has come so far.
    """

    tokens: Tensor
    healthy: Tensor
    possible: Tensor
    logprobs: Tensor | None = None
    top_tokens: Tensor | None = None
    top_logprobs: Tensor | None = None
    landed: bool = False
