"""Defines the arguments of ops: batches, views of the cache, weights and sampling. The shapes are the contract.

T tokens of R rows (sequences) form one ragged batch; a row contributes a chunk of consecutive tokens. A decode row has
a chunk of 1, a verification row a chunk of k + 1, a prefill row a chunk of n. Only the length distinguishes them. Rows
with a chunk of 1 come first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from deltic.ops.adapters import BatchAdapters
from deltic.ops.quantized import QTensor
from deltic.params import CHUNK as CHUNK
from deltic.params import PAGE as PAGE
from deltic.params import RING as RING

Block = Tensor | QTensor
Weight = Block | tuple[Block, ...]
"""A linear weight [out, in], or its row blocks if they have different formats."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The shape of a batch, on the host. It is hashable, and equal for all batches of a bucket.

    chunks: number of tokens of each row; the first `decode_rows` rows have exactly one.
    contexts: upper bound of each row's context length after the step (done + chunk).
    logits: number of tokens with logits to compute. checkpoints: number of states to emit.
    appends: some row appends to its delta log instead of writing its state.
    hidden: the step also returns all tokens' hidden states after the final norm.
    replays: some row of several tokens has entries in its delta log.
    adapted: some token has an entry in a backend's table of adapters.
    """

    chunks: tuple[int, ...]
    contexts: tuple[int, ...]
    decode_rows: int
    logits: int
    checkpoints: int = 0
    appends: bool = False
    hidden: bool = False
    replays: bool = False
    adapted: bool = False

    @property
    def rows(self) -> int:
        return len(self.chunks)

    @property
    def tokens(self) -> int:
        return sum(self.chunks)


@dataclass(frozen=True, slots=True)
class Padded:
    """The integers of a decode step, padded to the shape of a bucket. Steps of a bucket differ only in these.

    numbers: int64, on the device, laid out as in runner/input_batch. Padding repeats the last real row, which is
        harmless because it writes the same values.
    rows, pages: the bucket's number of rows and its width of the page table.
    tokens: the bucket's number of tokens over all rows. Rows may then have several tokens (drafts) and entries in
        delta logs; padding rows have none. None: each row has one token and no entries.
    hidden, adapted: as in `Layout`.
    """

    numbers: Tensor
    rows: int
    pages: int
    tokens: int | None = None
    hidden: bool = False
    adapted: bool = False

    @property
    def bucket(self) -> tuple[int, int, int | None]:
        return self.rows, self.pages, self.tokens


@dataclass(frozen=True, slots=True)
class InputEmbeds:
    """Rows that replace token embeddings. tokens [N] int64: ascending batch indices. rows [N, H] float32. Both are
    contiguous and on the device."""

    tokens: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Device tensors of one step; integers are int64 unless noted.

    ids [T].
    positions [3, T]: rotary positions (temporal, height, width), independent of cache indices.
    starts [R + 1]: index of the first token of each row, then T.
    done [R]: the cursor: number of tokens in the row's committed state and K/V before this step; the chunk's tokens
        get the cache indices done, done + 1, ...
    pages [R, P]: page table, padded with page 0.
    store [T]: flat K/V index (page * PAGE + offset) of each token.
    source, target [R]: state slots to read and to write (equal: in place). No row reads a slot that another row writes.
    base [R]: number of tokens in the state of the source slot; equals done without delta logs. A row with base = 0
        starts from zero state and reads nothing from its source. base <= done <= base + RING.
    delta_log [R]: the row's delta log. It holds the entries of positions base .. done - 1, and no other row uses it.
        Ignored where base = done and the row does not append.
    append [R] bool (int64 in a bucket): append the chunk's entries to the delta log and do not write the slot, as long
        as base .. done + chunk - 1 fit. Otherwise the step first brings the slot to `done`, and the log then holds only
        the chunk. Requires source = target and chunk <= RING. Rows without `append` bring the target to done + chunk
        and do not write the log. `reference.next_base` computes the slot's base afterwards. To reject tokens, pass a
        smaller `done` in the next step.
    emit_row, emit_length, emit_slot [E]: write the row's state after `emit_length` tokens of its sequence (done <
        emit_length <= done + chunk) to this slot.
    logit_tokens [L]: ascending batch indices of the tokens with logits to compute.
    span: the slice (first, end, step) of the slots of the leading single-token rows, if they are evenly spaced and read
        and written in place, so that a backend may use a view.
    count [1]: number of real rows, if the others are padding; None: all.
    padded: the same step in the shape of a bucket, if it has one.
    input_embeds: rows that replace the embeddings of some tokens.
    adapters: the tokens' adapters; None: no token has one, or `adapter_entries` has them.
    adapter_entries [T]: each token's entry in the backend's table of adapters, or -1; None: no token has one.
    memo: values that a backend derives from this batch once and uses in every layer.
    kept: values that a backend derives from the layout and the addresses of the tensors, all contiguous, for later
        batches that differ only in numbers; None if there are no such batches.
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
    span: tuple[int, int, int] | None = None
    count: Tensor | None = None
    padded: Padded | None = None
    input_embeds: InputEmbeds | None = None
    adapters: BatchAdapters | None = None
    adapter_entries: Tensor | None = None
    memo: dict[str, Any] = field(default_factory=dict)
    kept: dict[Any, Any] | None = None


@dataclass(frozen=True, slots=True)
class KvView:
    """The K/V pages of one attention layer.

    keys, values [pages, PAGE, kv_heads, head_dim]: in the model's dtype or float8 (`ops/kv`).
    arriving: pending copies to the pages in other streams; call `wait` before using the pages.
    """

    keys: Tensor
    values: Tensor
    arriving: list[Any] = field(default_factory=list, compare=False)

    def wait(self) -> None:
        """Makes the current stream wait for all copies."""
        while self.arriving:
            self.arriving.pop(0).wait()


@dataclass(frozen=True, slots=True)
class DeltaLogView:
    """N state delta logs of one Gated DeltaNet layer: the state updates that follow the state in a slot.

    A log is a ring: the entry of position p is at index p mod RING.
    inputs [N, RING, C] in the dtype of the slots' conv: raw convolution inputs.
    keys [N, RING, Hk, Dk] float32: normalised. updates [N, RING, Hv, Dv] float32: u. decays [N, RING, Hv] float32: a.
    tiled: as in the layer's `GdnSpec`.
    """

    inputs: Tensor
    keys: Tensor
    updates: Tensor
    decays: Tensor
    tiled: bool = False


@dataclass(frozen=True, slots=True)
class StateView:
    """The state slots of one Gated DeltaNet layer. All tensors of a slot contain the same number of tokens.

    recurrent [S, Hv, Dk, Dv] float32 or bfloat16: the state, rounded when written; computation is in float32.
    conv [S, W, C] model dtype, W >= conv_kernel: ring of raw convolution inputs; position p is at index p mod W.
    delta_log: the updates after the states; None if no row uses a delta log.
    """

    recurrent: Tensor
    conv: Tensor
    delta_log: DeltaLogView | None = None

    def check_order(self, spec: GdnSpec) -> None:
        """Raises ValueError if delta logs and layer have different orders of value heads."""
        log = self.delta_log
        if log is not None and log.tiled != spec.tiled:
            raise ValueError(f"DeltaLogView.tiled is {log.tiled}, GdnSpec.tiled {spec.tiled}: make them the same")


@dataclass(frozen=True, slots=True)
class Rope:
    """cos, sin [T, rotary_dim] float32: rotary tables of this step's tokens, with M-RoPE resolved and halves
    repeated."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding.

    theta: base. rotary_dim: number of leading dimensions of a head that are rotated.
    sections: number of frequencies of the temporal, height and width axes, interleaved as in Hugging Face; empty: 1-D
    positions. factors: divisors of the rotary_dim / 2 frequencies; empty: 1. attention_factor: scales cos and sin.
    """

    theta: float
    rotary_dim: int
    sections: tuple[int, ...] = ()
    factors: tuple[float, ...] = ()
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class GdnSpec:
    """The shape of a Gated DeltaNet layer. key_heads divides value_heads.

    tiled: value head i belongs to key head i mod key_heads, as in GGUF files, not to i // (value_heads / key_heads).
    """

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
        """C: number of convolution channels, ordered query, key, value."""
        return 2 * self.keys + self.values

    @property
    def value_runs(self) -> int:
        """Number of runs of value heads that follow the order of key heads. A slice of key heads has one range of value
        heads in each run."""
        return self.value_heads // self.key_heads if self.tiled else 1


@dataclass(frozen=True, slots=True)
class GdnWeights:
    """Weights of a Gated DeltaNet layer. in_proj [C + values + 2 Hv, hidden]: rows q, k, v (C convolved), z, b, a.
    conv [C, K]. decay [Hv] float32: -exp(A_log). dt_bias [Hv] float32. norm [Dv] float32: plain scale.
    out_proj [hidden, values]. shards: number of devices that share the layer's heads; the weights are one device's.
    """

    spec: GdnSpec
    in_proj: Weight
    conv: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor
    out_proj: Weight
    shards: int = 1


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The shape of an attention layer. kv_heads divides heads. gate: the output is multiplied by sigmoid(gate)."""

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
    """Weights of an attention layer. qkv [(2 if gate else 1) * queries + 2 * kv, hidden]: rows of q (with a gate: per
    head query, then gate), k, v. o_proj [hidden, queries].
    q_norm, k_norm [head_dim] float32: plain scales; None: heads are not normed.
    bias [rows of qkv] float32: added to the projections, or None.
    shards: as in `GdnWeights`.
    """

    spec: AttentionSpec
    qkv: Weight
    q_norm: Tensor | None
    k_norm: Tensor | None
    o_proj: Weight
    bias: Tensor | None = None
    shards: int = 1


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """Weights of a feed-forward. gate_up [2 F, hidden]: rows of gate, then up. down [hidden, F]. pool: the weights are
    in host memory; each step copies them here. shards: number of devices that share F; the weights are one device's."""

    gate_up: Weight
    down: Weight
    pool: ExpertPool | None = None
    shards: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPool:
    """A layer's experts if not all of them fit in memory (or on the GPU). A dense layer's feed-forward is its only
    expert.

    store: the backend's expert store. layer: index of the layer in it. count, nbytes: number and bytes of all experts.
    """

    store: Any
    layer: int
    count: int
    nbytes: int

    def __len__(self) -> int:
        return self.count


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """A mixture of E experts. A token uses `per_token` of them, and the shared expert if there is one.

    router [E, hidden]; with `shared` [E + 1, hidden]: the last row is the shared expert's gate.
    normalised: scale the weights of a token's experts to a sum of 1.
    shards: number of devices that share the experts. Each device has `len(experts)` experts and all rows of the router.
    first: the number of this device's first expert. A split shared expert has the same `shards`.
    """

    router: Weight
    experts: tuple[MlpWeights, ...] | ExpertPool
    shared: MlpWeights | None
    per_token: int
    normalised: bool
    shards: int = 1
    first: int = 0

    @property
    def parts(self) -> tuple[MlpWeights, ...]:
        """The experts that are always in memory, with the shared expert last."""
        own = () if isinstance(self.experts, ExpertPool) else self.experts
        return own if self.shared is None else (*own, self.shared)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One decoder layer. store: its index among the layers with the same kind of cache (K/V pages or state slots)."""

    input_norm: Tensor
    mixer: GdnWeights | AttentionWeights
    post_norm: Tensor
    mlp: MlpWeights | MoeWeights
    store: int

    @property
    def dense(self) -> MlpWeights:
        """The feed-forward of a dense layer."""
        assert isinstance(self.mlp, MlpWeights)
        return self.mlp


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a decoder. embedding [V, H]. norm [H] float32: scale of the final norm. head [V, H]."""

    embedding: Block
    layers: tuple[DecoderLayer, ...]
    norm: Tensor
    head: Weight
    rope: RopeSpec
    eps: float


@dataclass(frozen=True, slots=True)
class CacheViews:
    """The decoder's view of the cache: one `KvView` per attention layer and one `StateView` per recurrent layer."""

    kv: tuple[KvView, ...]
    states: tuple[StateView, ...]


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """A draft head (multi-token prediction): one attention layer on top of a decoder.

    fc [H, 2 H]: columns of the embedding, then of the hidden state.
    norm_embedding, norm_hidden, norm [H] float32: plain scales.
    layer: an attention layer; its `store` follows the decoder's. kv [2 * kv, H]: rows k, v of its qkv.
    head [N, H], tokens [N] int64: rows of the logits, and their tokens (None: all); may change in place between calls.
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
class LogitTable:
    """Changes to all logits of one row, as in `Adjust`. repetition, offset [V] float32; None: no change. Ops borrow the
    tensors for the call."""

    row: int
    repetition: Tensor | None
    offset: Tensor | None


@dataclass(frozen=True, slots=True)
class Adjust:
    """Changes to logits: N single changes with distinct (row, token), and tables for rows. repetition applies first.

    row, token [N] int64.
    repetition [N] float32: positive logits are divided by it, others multiplied.
    offset [N] float32: added afterwards (penalties and bias; -inf forbids the token).
    tables: at most one per row; a single change replaces the table's change of that token.
    """

    row: Tensor
    token: Tensor
    repetition: Tensor
    offset: Tensor
    tables: tuple[LogitTable, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters that turn L rows of logits into tokens. Tensors are [L].

    temperature float32 (0: greedy), top_k int64 (0: all), top_p, min_p float32.
    key int64: the 64-bit key of (seed, choice, position), which determines the row's Gumbel noise.
    greedy: every row is greedy. filtered: some row has top_k, top_p or min_p.
    top_logprobs: number of most probable tokens to report (None: no log-probabilities).
    kept: as in `Batch`, for a series of draws; results are then valid only until the next draw.
    landing [2 * L] int64: pinned memory to which a device may also write the tokens, then the `healthy` flags.
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
    """The result of sampling. tokens [L] int64.

    healthy [L] bool, or int64 of 0 and 1: the raw logits are finite and not all equal.
    possible [L] bool: at least one token is not forbidden; valid for healthy rows.
    logprobs [L], top_tokens [L, n], top_logprobs [L, n] float32: log-probabilities of the raw logits, if requested.
    landed: `Sampling.landing` receives tokens and `healthy` when the device has computed them.
    """

    tokens: Tensor
    healthy: Tensor
    possible: Tensor
    logprobs: Tensor | None = None
    top_tokens: Tensor | None = None
    top_logprobs: Tensor | None = None
    landed: bool = False


@dataclass(frozen=True, slots=True)
class Drafted:
    """Drafts that follow a step, in device memory until the next ones. rows: all rows; the step's rows come first.

    numbers [2 * rows * (drafts + 1)] int64: first [drafts, 2, rows]: tokens, and flags for healthy logits. Then
        [rows, 2]: the token that a row's drafts follow, after the step's own drafts were verified, and its position.
    """

    numbers: Tensor
    rows: int
    drafts: int

    def draft_at(self, row: int, draft: int) -> int:
        """Returns the index of a drafted token in `numbers`."""
        return 2 * self.rows * draft + row

    def token_at(self, row: int) -> int:
        """Returns the index in `numbers` of the token that the row's drafts follow; its position is the next number."""
        return 2 * (self.rows * self.drafts + row)


@runtime_checkable
class PreparesPrompts(Protocol):
    """A step on a device that builds or loads kernels depending on the number of prompt tokens."""

    def prepare_prompts(self, most: int) -> None:
        """Builds or loads the kernels for prompts of up to `most` tokens, for the calling thread."""


@dataclass(frozen=True, slots=True)
class MtpStep:
    """The calls of a draft head, over one cache.

    follow(batch, hidden [T, H] float32): call it after a decoder step with that step's hidden states. Stores the head's
        K/V of all tokens. For rows that do not append, sets the slot's hidden state to that of the row's last token.
    draft(batch, counts [R] int64, sampling) -> tokens [R, most] int64: drafts counts[r] <= most tokens after each row
        of a batch of single-token rows. sampling: has R * most rows and no changes of logits.

    On devices that run asynchronously to the host:

    draft_ahead(batch, most, chosen [T] int64, keys [R, n] int64, temperature [T] float32) -> Drafted: drafts `most`
        tokens after a step that was just launched. chosen: the token drawn after each token. keys: the sampling keys
        of the draws after a row's first token and the tokens that follow it, n >= most + tokens of a row. The slots'
        hidden states become those of the last accepted tokens.
    record(rows, pages, most): records the graph for drafts of so many rows and pages.
    last [N, H] float32: hidden states of up to N tokens of the last step.
    """

    follow: Callable[[Batch, Tensor], None]
    draft: Callable[[Batch, Tensor, Sampling], Tensor]
    draft_ahead: Callable[[Batch, int, Tensor, Tensor, Tensor], Drafted] | None = None
    record: Callable[[int, int, int], None] | None = None
    last: Tensor | None = None
