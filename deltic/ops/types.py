"""The records that ops take: batches, views of the cache, weights and sampling. Shapes are the contract.

T tokens of R rows (sequences) form one ragged batch; a row contributes a chunk of consecutive tokens. Decode is a chunk
of 1, verification a chunk of k + 1, prefill a chunk of n; nothing else distinguishes them. Rows with a chunk of 1 come
first.
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
"""A linear weight [out, in], or row blocks of one whose formats differ."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The shape of a batch on the host: hashable, and the same for all batches of a bucket.

    chunks: tokens of each row; the first `decode_rows` rows have exactly one.
    contexts: upper bound of each row's context length after the step (done + chunk).
    logits: number of tokens whose logits are wanted. checkpoints: number of states to emit.
    appends: some row appends to its delta log instead of writing its state.
    hidden: all tokens' hidden states after the final norm are wanted, besides the logits.
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
    """The integers of a decode step, padded to the shape of a bucket: steps of a bucket differ only in these.

    numbers: int64, on the device, laid out as in runner/input_batch. Padding repeats the last real row, which is
        harmless: it writes the same values.
    rows, pages: of the bucket.
    tokens: of all rows together, which may have several, with drafts, and entries in delta logs; padding rows have
    none. None: each row has one token and no entries.
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
    """Rows that replace embeddings: tokens [N] int64, ascending batch indices, and rows [N, H] float32, both contiguous
    and on the device."""

    tokens: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Device tensors of one step; integers are int64 unless said otherwise.

    ids [T].
    positions [3, T]: rotary positions (temporal, height, width), independent of cache indices.
    starts [R + 1]: first token of each row.
    done [R]: the cursor: tokens that the row's committed state and K/V cover before this step; the chunk's tokens get
        the cache indices done, done + 1, ...
    pages [R, P]: page table, padded with page 0.
    store [T]: flat K/V index (page * PAGE + offset) of each token.
    source, target [R]: state slots to read and to write (equal: in place). No row reads a slot that another row writes.
    base [R]: tokens that the state in the source slot covers; equals done without delta logs. A row with base = 0
    starts from zero state and reads nothing from its source. base <= done <= base + RING.
    delta_log [R]: the row's delta log, which holds the entries of positions base .. done - 1 and belongs to no other
        row; any number where base = done and the row does not append.
    append [R] bool (of a bucket int64): append the chunk's entries to the delta log and leave the slot alone, as long
    as base .. done + chunk - 1 fit; otherwise the slot is first brought to `done`, and the log then holds the chunk
        alone. Only with source = target, chunk <= RING. Rows without it bring the target to done + chunk and leave the
        log alone. `reference.next_base` computes the slot's base afterwards. To reject tokens, come back with a smaller
        `done`.
    emit_row, emit_length, emit_slot [E]: write the row's state after `emit_length` tokens of its sequence (done <
        emit_length <= done + chunk) to this slot.
    logit_tokens [L]: batch indices of the tokens whose logits are wanted, ascending.
    span: the slice (first, end, step) of the slots of the leading single-token rows if they are evenly spaced, read and
        written in place, so that a backend may take a view.
    count [1]: number of real rows, if the others are padding; None: all.
    padded: the same step in the shape of a bucket, if it has one.
    input_embeds: rows that replace the embeddings of some tokens.
    adapters: of the tokens; None: no token has one, or the entries name them.
    adapter_entries [T]: each token's entry in the table of adapters that a backend has, or -1; None: no token has one.
    memo: what a backend derives from this batch once and uses in every layer.
    kept: what a backend derives from the layout and from the addresses of the tensors, all contiguous, for later
        batches that differ only in numbers; None if there are none.
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
    arriving: copies to the pages in other streams; call `wait` before using the pages.
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
    """The state delta logs of one Gated DeltaNet layer: N logs of what came after the state in a slot.

    A log is a ring: the entry of position p lies at place p mod RING.
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
    """The state slots of one Gated DeltaNet layer. All of a slot stands for the same number of tokens.

    recurrent [S, Hv, Dk, Dv] float32 or bfloat16: the state, rounded when written; computation is in float32.
    conv [S, W, C] model dtype, W >= conv_kernel: ring of raw convolution inputs; position p lies at place p mod W.
    delta_log: what came after the states; None if no row uses one.
    """

    recurrent: Tensor
    conv: Tensor
    delta_log: DeltaLogView | None = None

    def check_order(self, spec: GdnSpec) -> None:
        """Raises ValueError if delta logs and layer disagree about the order of value heads."""
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

    theta: base. rotary_dim: rotated leading dimensions of a head.
    sections: frequencies of the temporal, height and width axes, interleaved as in Hugging Face; empty: plain
    positions. factors: divisors of the rotary_dim / 2 frequencies; empty: 1. attention_factor: of cosines and sines.
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
        """C: the convolution's channels, ordered query, key, value."""
        return 2 * self.keys + self.values

    @property
    def value_runs(self) -> int:
        """Runs of value heads that belong to the key heads in order, so that a slice of key heads has a range of
        each."""
        return self.value_heads // self.key_heads if self.tiled else 1


@dataclass(frozen=True, slots=True)
class GdnWeights:
    """in_proj [C + values + 2 Hv, hidden]: rows q, k, v (the C convolved ones), z, b, a. conv [C, K].
    decay [Hv] float32: -exp(A_log). dt_bias [Hv] float32. norm [Dv] float32: plain scale. out_proj [hidden, values].
    shards: number of devices that share the layer's heads; the weights belong to one device.
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
    """The shape of an attention layer. kv_heads divides heads. gate: the output is gated by sigmoid(gate)."""

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
    """qkv [(2 if gate else 1) * queries + 2 * kv, hidden]: rows of q (with a gate: for each head query, then gate), k,
    v. o_proj [hidden, queries].
    q_norm, k_norm [head_dim] float32: the scale itself; None: heads are not normed.
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
    """gate_up [2 F, hidden]: rows of gate, then up. down [hidden, F]. pool: the weights lie in host memory, and each
    step copies them here. shards: number of devices that share F; the weights belong to one device."""

    gate_up: Weight
    down: Weight
    pool: ExpertPool | None = None
    shards: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPool:
    """A layer's experts that are not all in memory (or not all on the GPU). The feed-forward of a dense layer is its
    only expert.

    store: the backend's expert store. layer: the layer's number there. count: of all experts. nbytes: of all of them.
    """

    store: Any
    layer: int
    count: int
    nbytes: int

    def __len__(self) -> int:
        return self.count


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """A mixture of E experts: a token passes `per_token` of them, and the shared one if there is one.

    router [E, hidden]; with `shared` [E + 1, hidden]: the last row is the shared expert's gate.
    normalised: the weights of a token's experts add up to 1.
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
        """The experts that always are in memory, the shared one last."""
        own = () if isinstance(self.experts, ExpertPool) else self.experts
        return own if self.shared is None else (*own, self.shared)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One decoder layer. `store`: its index among the layers with the same kind of store (K/V pages or state slots)."""

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
    """All weights of a decoder. embedding [V, H]. norm [H] float32: of the last hidden state. head [V, H]."""

    embedding: Block
    layers: tuple[DecoderLayer, ...]
    norm: Tensor
    head: Weight
    rope: RopeSpec
    eps: float


@dataclass(frozen=True, slots=True)
class CacheViews:
    """The cache as the decoder sees it: a view for each attention layer and for each recurrent layer."""

    kv: tuple[KvView, ...]
    states: tuple[StateView, ...]


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """A draft head (multi-token prediction): one attention layer on top of a decoder.

    fc [H, 2 H]: columns of the embedding, then of the hidden state.
    norm_embedding, norm_hidden, norm [H] float32: the scales themselves.
    layer: an attention layer; its `store` follows the decoder's. kv [2 * kv, H]: rows k, v of its qkv.
    head [N, H], tokens [N] int64: rows of the logits, and their tokens (None: all); both change in place between calls.
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
    """Changes of all logits of one row, as in `Adjust`: repetition [V], offset [V] float32; None: no change. Borrowed
    for the call."""

    row: int
    repetition: Tensor | None
    offset: Tensor | None


@dataclass(frozen=True, slots=True)
class Adjust:
    """Changes of logits: N single ones with distinct (row, token), and of whole rows. First repetition, then offset.

    row, token [N] int64.
    repetition [N] float32: positive logits are divided by it, others multiplied.
    offset [N] float32: added afterwards (penalties and bias; -inf forbids the token).
    tables: at most one for each row; a single change replaces the table's.
    """

    row: Tensor
    token: Tensor
    repetition: Tensor
    offset: Tensor
    tables: tuple[LogitTable, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """How L rows of logits become tokens; tensors [L].

    temperature float32 (0: greedy), top_k int64 (0: all), top_p, min_p float32.
    key int64: the 64-bit key of (seed, choice, position), which determines the row's Gumbel noise.
    greedy: every row is greedy. filtered: some row has top_k, top_p or min_p.
    top_logprobs: number of the most probable tokens to report (None: no log-probabilities).
    kept: as in `Batch`, for a series of draws; results then stay valid only until the next draw.
    landing [2 * L] int64: pinned memory to which a device may also write tokens, then whether logits are healthy.
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
    landed: `Sampling.landing` receives all of it once the device gets there.
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
    """Drafts that follow a step, in the device's memory until the next ones. rows: the first ones are the step's.

    numbers [2 * rows * (drafts + 1)] int64: [drafts, 2, rows], tokens and whether their logits were healthy; then
        [rows, 2], the token that a row's drafts follow, after the step's own drafts were verified, and its position.
    """

    numbers: Tensor
    rows: int
    drafts: int

    def draft_at(self, row: int, draft: int) -> int:
        """The index of a drafted token."""
        return 2 * self.rows * draft + row

    def token_at(self, row: int) -> int:
        """The index of the token that the row's drafts follow; its position comes next."""
        return 2 * (self.rows * self.drafts + row)


@runtime_checkable
class PreparesPrompts(Protocol):
    """A step of a device that builds or loads kernels by the number of a prompt's tokens."""

    def prepare_prompts(self, most: int) -> None:
        """Does so for prompts of up to so many tokens, for the calling thread."""


@dataclass(frozen=True, slots=True)
class MtpStep:
    """A draft head in calls of its own, over one cache.

    follow(batch, hidden [T, H] float32): call it after a step of the decoder with its hidden states. Stores the head's
        K/V of all tokens; the slots' hidden states become those of the last tokens of rows that do not append.
    draft(batch, counts [R] int64, sampling) -> tokens [R, most] int64: drafts after a batch of single-token rows,
        counts[r] <= most each. sampling: of R * most rows, without changes of logits.

    On devices that run beside the host:

    draft_ahead(batch, most, chosen [T] int64, keys [R, n] int64, temperature [T] float32) -> Drafted: `most` drafts of
        what follows a step that was just launched. chosen: the token drawn after each token. keys: of the draws after a
        row's first token and the following ones, n >= most + tokens of a row. The slots' hidden states become those of
        the last accepted tokens.
    record(rows, pages, most): record the graph for drafts of so many rows and pages.
    last [N, H] float32: the hidden states of the last step's tokens, at most N.
    """

    follow: Callable[[Batch, Tensor], None]
    draft: Callable[[Batch, Tensor, Sampling], Tensor]
    draft_ahead: Callable[[Batch, int, Tensor, Tensor, Tensor], Drafted] | None = None
    record: Callable[[int, int, int], None] | None = None
    last: Tensor | None = None
