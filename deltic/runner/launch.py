"""Launches a step: from its plan to its sampled tokens. Launching never waits for the device."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from deltic.cache.handles import SequenceCache
from deltic.cache.operations import CopySlot
from deltic.engine.sequence import Sequence
from deltic.engine.step_plan import PlannedRow, StepPlan, base_after
from deltic.ops.adapters import Adapter
from deltic.ops.types import Batch, Sampled, Sampling
from deltic.params import TokenLogprobs
from deltic.runner.image_embeds import ImageEmbeds
from deltic.runner.input_batch import (
    FEW_ROWS,
    DeviceTokens,
    InputBatch,
    build,
    decodes,
    decoding_adapted,
    has_bucket,
    with_adapters,
)
from deltic.runner.model_runner import Model, ModelRunner
from deltic.runner.sampling import Asked, LogitMasks, SampleRow, SamplingTable, TokenRanks, logprobs_of, scores_of
from deltic.spec_decode.mtp import PendingDrafts
from deltic.spec_decode.partial_head import TokenGroups


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """A sequence in a step, with the cache that it had at launch.

    row: its row; None if it only samples from known logits.
    start: index of the row's first token in the batch.
    draw: index of its first draw; None: it samples nothing.
    end [V]: the logits of its prompt's end, if they are kept.
    error: the exception that its constraint raised, if any.
    vector: index of its hidden state in `InFlight.vectors`.
    scores: log probabilities of its prompt's tokens.
    drafted_next: the next drafts exist already: they follow the drafts that the model has confirmed (drawn itself), and
    the slot has the hidden state of the last of these.
    base: number of tokens that the slot's state covers after the step, if the delta log was flushed since.
    hidden [T, H]: the hidden states of the step's tokens, if the next step was launched before they were used.
    last: the sequence ended while the step was in flight. Its cache stays until the step is known to be finite.
    """

    sequence: Sequence
    cache: SequenceCache
    row: PlannedRow | None = None
    start: int = 0
    draw: int | None = None
    end: Tensor | None = None
    error: Exception | None = None
    vector: int | None = None
    scores: TokenRanks | None = None
    drafted_next: bool = False
    base: int | None = None
    hidden: Tensor | None = None
    last: bool = False

    @property
    def live(self) -> bool:
        """True if the sequence still runs on this cache. Otherwise the step leaves no trace for it."""
        return self.sequence.cache is self.cache

    @property
    def tokens(self) -> int:
        """The number of its tokens in the step."""
        return len(self.row.tokens) if self.row else 0

    @property
    def writes_state(self) -> bool:
        """True if the step writes the state of a sequence that still runs to its slot."""
        return self.live and self.row is not None and not self.row.append

    @property
    def base_after(self) -> int | None:
        """The argument `base` of `HybridCache.commit` after the step."""
        return base_after(self.row) if self.base is None and self.row else self.base

    @property
    def draft_tokens(self) -> tuple[int, ...]:
        return self.row.draft_tokens if self.row and self.row.drafts else ()

    def draws(self, masks: List[bytes | None] | None) -> list[SampleRow]:
        """Returns the draws of its next token and of the token after each draft; if only the device knows the row's
        token, the draw after that. masks: one for each draw, if the sequence has a constraint."""
        if self.row and self.row.drawn is not None:
            return [SampleRow(self.sequence, self.row.tokens)]
        masks = masks or [None] * (len(self.draft_tokens) + 1)
        return [SampleRow(self.sequence, self.draft_tokens[:count], mask) for count, mask in enumerate(masks)]


@dataclass(slots=True, eq=False)
class InFlight:
    """A launched step. The host does not have its tokens yet.

    drafting: the sequences for which drafts were requested.
    drawn [L] int64: the sampled tokens on the device; on a CPU valid until the next step is launched.
    tokens: the sampled tokens, if the host has them without waiting.
    sampled: the results of sampling on the host (but see `Sampled.landed`), valid after `arrived`.
    vectors [N, H] float32: the requested hidden states on the host, valid after `arrived`.
    raw [L, V]: the model's logits, if the log probability of a forced token may be reported.
    pending: the source of the rows' drafts, which are UNKNOWN in the plan.
    batch: its rows on the device.
    sampling: its sampling parameters.
    error: the exception that launching raised, if any.
    """

    plan: StepPlan
    scheduled: list[ScheduledSequence]
    drafting: List[Sequence] = ()
    drawn: Tensor | None = None
    tokens: SampledTokens | None = None
    sampled: Sampled | None = None
    vectors: Tensor | None = None
    arrived: torch.cuda.Event | None = None
    raw: Tensor | None = None
    pending: PendingDrafts | TokenGroups | None = None
    batch: Batch | None = None
    sampling: Sampling | None = None
    error: Exception | None = None

    @property
    def live(self) -> bool:
        """True if at least one of its sequences still runs."""
        return any(each.live for each in self.scheduled)

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens in the step, without rows of one token."""
        return sum(each.tokens for each in self.scheduled if each.tokens > 1 and not each.draft_tokens)

    def resolve_positions(self) -> None:
        """Sets the cursors of rows that depend on accepted drafts, after the previous step was collected."""
        for each in self.scheduled:
            if each.live and each.row and each.row.accepts:
                each.row = replace(each.row, done=each.cache.done, accepts=0)

    def resolve_drafts(self) -> None:
        """Waits for the pending drafts and writes them to the rows."""
        pending = self.pending
        if not isinstance(pending, PendingDrafts):
            return
        for each in self.scheduled:
            if each.live and each.row and each.row.drafts:
                drafts = pending.drafts(each.sequence, each.row.drafts)
                each.row = replace(each.row, tokens=(each.sequence.tokens[-1], *drafts))


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The sampled tokens of a step. The lists have the values of the fields of `sampled`. raw: as in `InFlight`."""

    sampled: Sampled
    tokens: list[int]
    healthy: list[bool]
    possible: list[bool]
    raw: Tensor | None = None

    def logprobs(self, row: int, token: int, wanted: int | None) -> TokenLogprobs | None:
        """Returns the log probabilities of one row, for a token that was sampled or forced."""
        found = logprobs_of(self.sampled, row, wanted)
        if found is None or self.raw is None or token == self.tokens[row]:
            return found
        return replace(found, token=float(self.raw[row].double().log_softmax(-1)[token]))


class Launcher:
    """Launches the steps of one model. seconds: total time in the forward pass, or waiting for it."""

    def __init__(self, runtime: Model, pictures: ImageEmbeds | None = None) -> None:
        self._runtime, self._pictures, self.seconds = runtime, pictures, 0.0
        self._memory, self._params, self.masks = InputBatch(runtime.numbers), SamplingTable(lands=True), LogitMasks()

    def launch(self, plan: StepPlan, sequences: List[Sequence], known: List[Sequence] = (),
               before: InFlight | None = None, pending: PendingDrafts | TokenGroups | None = None) -> InFlight:
        """Carries out the plan; samples for its rows and for sequences with `known` logits. before: the step that draws
        the tokens of rows with `drawn`. pending: the rows' drafts. Never raises: errors go to `InFlight.error`."""
        flight = InFlight(plan, [], pending=pending)
        try:
            self._launch(flight, sequences, known, before)
        except Exception as error:
            flight.error = error
        return flight

    def wait(self, flight: InFlight) -> SampledTokens | None:
        """Waits for the step. Returns its sampled tokens, if any."""
        if flight.arrived:
            began = time.perf_counter()
            flight.arrived.synchronize()
            self.seconds += time.perf_counter() - began
        if flight.sampled is None:
            return None
        if flight.sampled.landed and flight.sampling and flight.sampling.landing is not None:
            numbers = flight.sampling.landing.tolist()
            sound = numbers[len(numbers) // 2:]
            return SampledTokens(flight.sampled, numbers[:len(sound)], sound, sound, flight.raw)
        return flight.tokens or _sampled_tokens(flight.sampled, flight.raw)

    @torch.inference_mode()
    def _launch(self, flight: InFlight, sequences: List[Sequence], known: List[Sequence],
                before: InFlight | None) -> None:
        runtime, logits, start = self._runtime, list[Tensor](), 0
        for row, sequence in zip(flight.plan.rows, sequences, strict=True):
            assert sequence.cache is not None
            flight.scheduled.append(ScheduledSequence(sequence, sequence.cache, row, start))
            start += len(row.tokens)
        for sequence in known:
            assert sequence.cache is not None
            flight.scheduled.append(ScheduledSequence(sequence, sequence.cache))
        if flight.plan.operations:
            runtime.cache.operations.apply(flight.plan.operations)
        drawing = [each for each in flight.scheduled if each.row is None or each.row.logits > each.row.scored]
        asked = self.masks.ask([(each.sequence, each.draft_tokens) for each in drawing])
        if flight.plan.rows:
            self._run(flight, logits, before)
        for sequence in known:
            # a copy, because sampling may write to the logits; logits from a tier are on the host
            logits.append(sequence.sampler.logits[None].to(runtime.device, copy=True))
            sequence.sampler.logits = None
        draws = _draws(drawing, asked)
        if draws:
            self._draw(flight, draws, logits[0] if len(logits) == 1 else torch.cat(logits))
        if runtime.device.type == "cuda" and (draws or flight.vectors is not None):
            flight.arrived = torch.cuda.Event()
            flight.arrived.record(torch.cuda.current_stream(runtime.device))

    def _run(self, flight: InFlight, logits: list[Tensor], before: InFlight | None) -> None:
        """Runs the plan's rows and appends their logits to `logits`."""
        runtime, wanting = self._runtime, [each for each in flight.scheduled if each.row and each.row.hidden]
        rows, adapters = flight.plan.rows, _adapters(flight)
        drawn: Tensor | DeviceTokens | None = before.drawn if before else None
        if isinstance(flight.pending, TokenGroups):
            return logits.append(self._run_groups(flight, flight.pending))
        if flight.pending and any(row.drafts for row in rows):
            drawn = flight.pending.on_device(rows, [each.sequence for each in flight.scheduled if each.row])
        began = time.perf_counter()
        if runtime.options.batch_invariant:
            assert not isinstance(drawn, DeviceTokens)
            found = self._run_alone(rows, drawn, adapters)
        elif adapters and runtime.capabilities.overlaps and not wanting:
            assert not isinstance(drawn, DeviceTokens)
            found = self._run_apart(rows, drawn, adapters)
        else:
            batch = build(flight.plan, runtime.device, hidden=bool(wanting) or runtime.mtp_runner is not None,
                          drawn=drawn, memory=self._memory,
                          image_rows=self._pictures.rows if self._pictures else None,
                          verified=runtime.capabilities.verifies)
            batch = flight.batch = with_adapters(batch, rows, adapters, self._memory)
            if wanting:
                found, hidden = runtime.run_hidden(batch)
                assert hidden is not None
                for index, each in enumerate(wanting):
                    each.vector = index
                last = [each.start + len(each.row.tokens) - 1 for each in wanting if each.row]
                flight.vectors = hidden[last].to("cpu", non_blocking=True)
            else:
                found = runtime.run(batch)
        logits.append(_scored(flight, found) if any(row.scored for row in flight.plan.rows) else found)
        self.seconds += time.perf_counter() - began

    def _run_groups(self, flight: InFlight, groups: TokenGroups) -> Tensor:
        """Runs the plan's rows token by token with their proposer, which sets the drafts. Returns logits [L, V]."""
        began, own = time.perf_counter(), [each for each in flight.scheduled if each.row]
        rows, found = groups.proposer.run(flight.plan.rows, [each.sequence for each in own])
        flight.plan = replace(flight.plan, rows=tuple(rows))
        for each, row in zip(own, rows, strict=True):
            each.row, each.base = row, row.done + 1
        self.seconds += time.perf_counter() - began
        return found

    def _run_apart(self, rows: List[PlannedRow], drawn: Tensor | None, adapters: Mapping[str, Adapter]) -> Tensor:
        """Returns the logits [L, V] of these rows, in several batches: the device has separate steps for rows without
        adapters, for few decode rows with adapters, and for other rows."""
        runtime, found = self._runtime, dict[int, Tensor]()
        entries = runtime.adapter_entries(adapters) if isinstance(runtime, ModelRunner) else {}
        for places in adapted_parts(rows, entries):
            own, hidden = tuple([rows[place] for place in places]), runtime.mtp_runner is not None
            batch = decoding_adapted(StepPlan(own), runtime.device, entries, drawn, self._memory, hidden)
            if batch is None:
                batch = build(StepPlan(own), runtime.device, hidden=hidden, drawn=drawn, memory=self._memory,
                              image_rows=self._pictures.rows if self._pictures else None,
                              verified=runtime.capabilities.verifies)
                batch = with_adapters(batch, own, adapters)
            logits = runtime.run(batch)
            if len(places) == len(rows):
                return logits
            logits = logits.clone()  # the next step overwrites them
            parts = logits.split([row.logits for row in own])
            found |= dict(zip(places, parts, strict=True))
        return torch.cat([found[place] for place in sorted(found)])

    def _run_alone(self, rows: List[PlannedRow], drawn: Tensor | None, adapters: Mapping[str, Adapter]) -> Tensor:
        """Returns the logits [L, V] of these rows, computed token by token."""
        runtime, kept = self._runtime, dict[int, Tensor]()
        for part in passes(rows):
            taken = drawn if part.rows[0].drawn is not None else None
            batch = build(StepPlan(part.rows), runtime.device, drawn=taken, memory=self._memory)
            found = runtime.run(with_adapters(batch, part.rows, adapters))
            kept |= {wanted: found[place].clone() for place, wanted in part.kept}  # the next pass overwrites them
            if part.copies:
                runtime.cache.operations.apply(part.copies)
        return torch.stack([kept[wanted] for wanted in sorted(kept)]) if kept else found[:0]

    def _draw(self, flight: InFlight, draws: list[SampleRow], logits: Tensor) -> None:
        """Samples all draws of a step. logits [L, V]: the logits of the draws; sampling may write to them."""
        for each in flight.scheduled:
            if each.draw is not None and not each.draft_tokens and _keeps_logits(each):
                each.end = logits[each.draw].clone()
        if any(draw.sequence.guide and draw.sequence.sampling.logprobs is not None for draw in draws):
            flight.raw = logits.clone()
        flight.sampling = self._params.of(draws, logits.device, logits.shape[1], _device_cursors(flight))
        sampled = self._runtime.sample(logits, flight.sampling)
        flight.drawn, flight.sampled = sampled.tokens, sampled
        if not sampled.tokens.is_cuda:
            flight.tokens = _sampled_tokens(sampled, flight.raw)
        elif not sampled.landed:
            flight.sampled = _on_host(sampled)


def adapted_parts(rows: List[PlannedRow], entries: Mapping[str, int]) -> Iterator[List[int]]:
    """Yields groups of row indices, each to be computed in one batch: rows without adapters; few decode rows with
    adapters in `entries`, joined with the first group if all fit into one bucket; all other rows."""
    plain = [place for place, row in enumerate(rows) if not row.adapter]
    single = [place for place, row in enumerate(rows) if row.adapter in entries and decodes(StepPlan((row,)))]
    rest = [place for place, row in enumerate(rows) if row.adapter and place not in single]
    together = StepPlan(tuple([rows[place] for place in sorted(plain + single)]))
    if single and len(together.rows) <= FEW_ROWS and decodes(together) and has_bucket(together):
        yield sorted(plain + single)
    else:
        unknown = [place for place in single if rows[place].drawn is not None]
        known = [place for place in single if rows[place].drawn is None]
        yield from filter(None, (plain, *_fews(unknown), *_fews(known)))
    if rest:
        yield rest


def _fews(places: List[int]) -> Iterator[List[int]]:
    for start in range(0, len(places), FEW_ROWS):
        yield places[start:start + FEW_ROWS]


def _adapters(flight: InFlight) -> dict[str, Any]:
    """Returns the adapters of a step's rows, by their identities."""
    used = [each.sequence.request.adapter for each in flight.scheduled if each.row]
    return {adapter.identity: adapter for adapter in used if adapter}


def _draws(scheduled: List[ScheduledSequence], asked: Asked) -> list[SampleRow]:
    """Returns the draws of a step, in the order of its logits."""
    draws = list[SampleRow]()
    for each in scheduled:
        masks, each.draw = None, len(draws)
        try:
            masks = asked[each.sequence].result() if each.sequence in asked else None
        except Exception as error:
            each.error = error  # ends only this sequence
        draws += each.draws(masks)
    return draws


def _device_cursors(flight: InFlight) -> Tensor | None:
    """Returns the cursors of a step's rows, if only the device has them; otherwise None."""
    unknown = any(row.accepts for row in flight.plan.rows)
    return flight.batch.done if unknown and flight.batch else None


def _scored(flight: InFlight, logits: Tensor) -> Tensor:
    """Computes the log probabilities of prompt tokens. Returns the logits to sample from."""
    drawn, at = list[Tensor](), 0
    for each in flight.scheduled:
        if each.row is None:
            continue
        end, row, sequence = at + each.row.scored, each.row, each.sequence
        if row.scored:
            first = row.done + len(row.tokens) - row.logits + 1
            each.scores = scores_of(logits[at:end], sequence.tokens[first:first + row.scored],
                                     sequence.sampling.prompt_logprobs or 0)
        drawn.append(logits[end:at + row.logits])
        at += row.logits
    return torch.cat(drawn)


def _sampled_tokens(sampled: Sampled, raw: Tensor | None) -> SampledTokens:
    return SampledTokens(sampled, sampled.tokens.tolist(), sampled.healthy.tolist(), sampled.possible.tolist(), raw)


def _keeps_logits(each: ScheduledSequence) -> bool:
    done = each.row.done + len(each.row.tokens) if each.row else each.cache.done
    return (
        done in each.cache.checkpoint_slots
        or each.sequence.needs_fork
        or bool(each.sequence.request.logits_processors)
    )


def _on_host(sampled: Sampled) -> Sampled:
    """Returns copies in pinned host memory, which are complete once the device has done its queued work."""
    tensors = {name: value for name in Sampled.__slots__ if isinstance(value := getattr(sampled, name), Tensor)}
    copies = {tensor: tensor.to("cpu", non_blocking=True) for tensor in {*tensors.values()}}
    found: dict[str, Any] = {name: copies[tensor] for name, tensor in tensors.items()}
    return replace(sampled, **found)


@dataclass(frozen=True, slots=True)
class Pass:
    """A few rows of one token each; the host knows either all of the tokens or none. kept: pairs of a row whose logits
    are wanted and their index among the step's logits. copies: checkpoints to write after the pass."""

    rows: tuple[PlannedRow, ...]
    kept: tuple[tuple[int, int], ...]
    copies: tuple[CopySlot, ...]


def passes(rows: List[PlannedRow]) -> Iterator[Pass]:
    """Yields passes of few single tokens that together equal a step of these rows, so that no sum depends on the other
    rows of the step (`--batch-invariant`). Rows must have no drafts, images or tokens in delta logs."""
    firsts, total = list[int](), 0  # per row: index that the logits of its first token would have
    for row in rows:
        assert not row.drafts and not row.append and not row.images
        firsts.append(total + row.logits - len(row.tokens))
        total += row.logits
    for index in range(max((len(row.tokens) for row in rows), default=0)):
        there = [number for number, row in enumerate(rows) if index < len(row.tokens)]
        for unknown, adapted in product((True, False), (False, True)):
            some = [number for number in there if (rows[number].drawn is not None) == unknown
                    and bool(rows[number].adapter) == adapted]
            for start in range(0, len(some), FEW_ROWS):
                yield _pass(rows, some[start:start + FEW_ROWS], index, firsts)


def _pass(rows: List[PlannedRow], numbers: List[int], index: int, firsts: List[int]) -> Pass:
    kept = tuple((place, firsts[number] + index) for place, number in enumerate(numbers)
                 if index >= len(rows[number].tokens) - rows[number].logits)
    copies = tuple(
        CopySlot(_target(rows[number]), slot)
        for number in numbers
        for position, slot in rows[number].checkpoints
        if position == rows[number].done + index + 1
    )
    return Pass(tuple(_single(rows[number], index) for number in numbers), kept, copies)


def _single(row: PlannedRow, index: int) -> PlannedRow:
    """Returns a row with only the token `index`. It asks for its logits, as all rows of a bucket must."""
    rotary = row.rotary if isinstance(row.rotary, int) else (
        row.rotary[0][index:index + 1], row.rotary[1][index:index + 1], row.rotary[2][index:index + 1])
    return replace(row, tokens=row.tokens[index:index + 1], done=row.done + index, logits=1, checkpoints=(), base=None,
                   scored=0, slot=_target(row) if index else row.slot, rotary=rotary)


def _target(row: PlannedRow) -> int:
    return row.slot if row.target is None else row.target
