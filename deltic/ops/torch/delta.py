"""The gated delta rule in plain torch: one token of many rows at once, or whole rows in chunks of 64 tokens.

The chunked form is the WY representation of the gated delta rule (arXiv 2412.06464, section 3.3): with D(t, i) the
decay between two tokens of a chunk and S the state before it,
u = T (beta v - beta D(., 0) k S), T = (1 + tril(beta D k kT, -1))^-1, so that only one S per chunk is sequential.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deltic.ops.torch.basic import put
from deltic.ops.types import CHUNK, Batch, GdnSpec


@dataclass(frozen=True, slots=True)
class Gates:
    """log_decay: log a, [T, Hv]. beta [T, Hv]."""

    log_decay: Tensor
    beta: Tensor

    def __getitem__(self, index: slice) -> Gates:
        return Gates(self.log_decay[index], self.beta[index])


@dataclass(frozen=True, slots=True)
class Chunks:
    """How the longer rows are cut: N chunks, ordered by chunk number, then by row, longest row first.

    rows: batch rows, longest first. active: rows that have a chunk j, for each j. gather [N * CHUNK]: index into
    the rows' tokens, padded with the row's last token; None: the tokens are in this order as they are.
    real [N, 1, CHUNK]: what is not padding.
    """

    rows: tuple[int, ...]
    active: tuple[int, ...]
    gather: Tensor | None
    real: Tensor

    def split(self, x: Tensor) -> Tensor:
        """[tokens, heads, ...] -> [N, heads, CHUNK, ...], contiguous."""
        if self.gather is not None:
            x = x.index_select(0, self.gather)
        chunks: Tensor = x.unflatten(0, (-1, CHUNK))
        return chunks.transpose(1, 2).contiguous()

    def join(self, chunks: Tensor, tokens: int) -> Tensor:
        """[N, heads, CHUNK, ...] -> [tokens, heads, ...], without padding."""
        flat = chunks.transpose(1, 2).flatten(0, 1)
        if self.gather is None:
            return flat
        real, result = self.real.flatten(), flat.new_empty(tokens, *flat.shape[1:])
        result[self.gather[real]] = flat[real]
        return result


def cut(batch: Batch) -> Chunks:
    """Cut the rows of more than one token into chunks."""
    layout = batch.layout
    rows = sorted(range(layout.decode_rows, layout.rows), key=lambda row: -layout.chunks[row])
    counts = [-(-layout.chunks[row] // CHUNK) for row in rows]
    active = tuple(sum(count > j for count in counts) for j in range(counts[0]))
    first = layout.decode_rows
    offsets = {row: sum(layout.chunks[first:row]) for row in rows}
    order = [(row, j) for j, n in enumerate(active) for row in rows[:n]]
    lengths = torch.tensor([layout.chunks[row] - j * CHUNK for row, j in order])
    starts = torch.tensor([offsets[row] + j * CHUNK for row, j in order])
    within = torch.arange(CHUNK)
    gather = starts[:, None] + torch.minimum(within, lengths[:, None] - 1)
    device, real = batch.done.device, (within < lengths[:, None])[:, None]
    plain = len(rows) == 1 and layout.chunks[rows[0]] % CHUNK == 0
    return Chunks(tuple(rows), active, None if plain else gather.flatten().to(device), real.to(device))


def heads(mixed: Tensor, spec: GdnSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised queries (scaled) and keys [T, Hv, Dk], values [T, Hv, Dv] of convolved channels [T, C]."""
    both, value = mixed.split((2 * spec.keys, spec.values), dim=-1)
    both = both.unflatten(-1, (2, spec.key_heads, spec.key_dim))
    factor = torch.linalg.vector_norm(both, dim=-1, keepdim=True).square_().add_(1e-6).rsqrt_()
    factor[:, 0] *= spec.key_dim**-0.5
    query, key = (both * factor).unbind(1)
    groups = spec.value_heads // spec.key_heads
    if groups > 1:
        query, key = (x.repeat(1, groups, 1) if spec.tiled else x.repeat_interleave(groups, dim=1)
                      for x in (query, key))
    return query, key, value.unflatten(-1, (spec.value_heads, spec.value_dim))


def step(mixed: Tensor, gates: Gates, spec: GdnSpec, state: Tensor) -> Tensor:
    """One token of each row: mixed [R, C], state [R, Hv, Dk, Dv] -> [R, Hv, Dv]. Moves the state in place; it is
    read once for key and query together."""
    query, key, value = heads(mixed, spec)
    decay, beta = gates.log_decay.exp()[..., None], gates.beta[..., None]
    from_key, from_query = (torch.stack((key, query), dim=2) @ state * decay[..., None]).unbind(2)
    update = (value - from_key).mul_(beta)
    output = torch.addcmul(from_query, (key * query).sum(-1, keepdim=True), update)
    state.mul_(decay[..., None]).addcmul_(key[..., None], update[..., None, :])
    return output


@dataclass(frozen=True, slots=True)
class _Terms:
    """What a chunk needs besides the state, for N chunks: inner [N, Hv, CHUNK, Dv] and reads [.., CHUNK, Dk]: u is
    inner - reads S. query, key [.., CHUNK, Dk]. scores [.., CHUNK, CHUNK]: decayed q kT. total [.., CHUNK] float64:
    sums of log decays; from_start, to_end [.., CHUNK, 1]: decays from the chunk's start, to its end."""

    inner: Tensor
    reads: Tensor
    query: Tensor
    key: Tensor
    scores: Tensor
    total: Tensor
    from_start: Tensor
    to_end: Tensor


def chunked(mixed: Tensor, gates: Gates, spec: GdnSpec, recurrent: Tensor, batch: Batch, chunks: Chunks) -> Tensor:
    """The longer rows: mixed [tokens, C] -> [tokens, Hv, Dv]; writes their target and emit slots of `recurrent`."""
    terms = _terms(mixed, gates, spec, chunks)
    rows = torch.tensor(chunks.rows, device=mixed.device)
    state = recurrent[batch.source[rows]].to(mixed.dtype)
    state.masked_fill_((batch.done[rows] == 0)[:, None, None, None], 0)
    outputs, updates = torch.empty_like(terms.inner), torch.empty_like(terms.inner)
    emits = _emits(batch, chunks) if batch.layout.checkpoints else None
    before, start = dict[int, Tensor](), 0
    for active in chunks.active:
        here, current = slice(start, start + active), state[:active]
        if emits and (emits.known is None or any(start <= chunk < start + active for chunk in emits.known)):
            before[start] = current.clone()
        updates[here] = update = terms.inner[here] - terms.reads[here] @ current
        torch.mul(terms.query[here] @ current, terms.from_start[here], out=outputs[here])
        outputs[here] += terms.scores[here] @ update
        current.mul_(terms.from_start[here, :, -1:])
        current += terms.key[here].transpose(-1, -2) @ update.mul_(terms.to_end[here])
        start += active
    put(recurrent, batch.target[rows], state)
    if emits and before:
        _emit(recurrent, before, updates, terms, emits)
    return chunks.join(outputs, mixed.shape[0])


def _terms(mixed: Tensor, gates: Gates, spec: GdnSpec, chunks: Chunks) -> _Terms:
    query, key, value = map(chunks.split, heads(mixed, spec))
    beta, log_decay = (chunks.split(x) * chunks.real for x in (gates.beta, gates.log_decay))
    # float64: differences of long cumulative sums of logs lose digits that single decays still have
    total = log_decay.double().cumsum(-1)
    between = (total[..., :, None] - total[..., None, :]).tril_().exp_().to(mixed.dtype).tril_()
    from_start, to_end = total.exp().to(mixed.dtype), (total[..., -1:] - total).exp().to(mixed.dtype)
    system = (key @ key.transpose(-1, -2)).mul_(between).mul_(beta[..., None])
    identity = torch.eye(CHUNK, dtype=mixed.dtype, device=mixed.device).expand_as(system)
    inverse = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
    inverse = inverse * beta[..., None, :]
    inner, reads = inverse @ value, (inverse * from_start[..., None, :]) @ key
    scores = (query @ key.transpose(-1, -2)).mul_(between)
    return _Terms(inner, reads, query, key, scores, total, from_start[..., None], to_end[..., None])


@dataclass(frozen=True, slots=True)
class _Emits:
    """The states that longer rows emit: into which slots, in which chunks, after which token of these [E].
    known: the chunks as numbers, where reading them from the device costs nothing."""

    slots: Tensor
    chunk: Tensor
    within: Tensor
    known: list[int] | None


def _emits(batch: Batch, chunks: Chunks) -> _Emits:
    emits: _Emits | None = batch.memo.get("emits")
    if emits is None:
        long = batch.emit_row >= batch.layout.decode_rows
        local = batch.emit_length - batch.done[batch.emit_row] - 1
        rank = torch.zeros(batch.layout.rows, dtype=torch.long, device=local.device)
        rank[list(chunks.rows)] = torch.arange(len(chunks.rows), device=local.device)
        first = torch.tensor((0, *chunks.active), device=local.device).cumsum(0)
        chunk = (first[(local // CHUNK).clamp_(min=0)] + rank[batch.emit_row])[long]
        known = chunk.tolist() if chunk.device.type == "cpu" else None
        emits = batch.memo["emits"] = _Emits(batch.emit_slot[long], chunk, (local % CHUNK)[long], known)
    return emits


def _emit(recurrent: Tensor, before: dict[int, Tensor], updates: Tensor, terms: _Terms, emits: _Emits) -> None:
    """States inside or at the end of chunks: the chunk's first state decayed, plus its leading tokens.
    before: the first states of chunks, by the number of the first of them."""
    place = torch.zeros(len(terms.total), dtype=torch.long, device=emits.chunk.device)
    kept = torch.tensor([start + rank for start, states in before.items() for rank in range(len(states))],
                        device=place.device)
    place[kept] = torch.arange(len(kept), device=place.device)
    first = torch.cat(list(before.values()))[place[emits.chunk]]
    sums = terms.total[emits.chunk]
    at = sums.gather(-1, emits.within[:, None, None].expand(-1, sums.shape[1], 1))
    decay = (at - sums).masked_fill_(torch.arange(CHUNK, device=at.device) > emits.within[:, None, None], -torch.inf)
    keys = terms.key[emits.chunk] * decay.exp().to(first.dtype)[..., None]
    states = first * at.exp().to(first.dtype)[..., None] + keys.transpose(-1, -2) @ updates[emits.chunk]
    put(recurrent, emits.slots, states)
