"""A step from its plan to the tokens that it draws. Launching waits for nothing that a device computes."""

from __future__ import annotations

import time
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deltic.cache.handles import SequenceCache
from deltic.engine.sequence import Sequence
from deltic.engine.step_plan import PlannedRow, StepPlan, base_after
from deltic.ops.types import Batch, Sampled, Sampling
from deltic.params import TokenLogprobs
from deltic.runner.image_embeds import ImageEmbeds
from deltic.runner.input_batch import BatchMemory, Promised, build
from deltic.runner.logit_masks import Asked, LogitMasks
from deltic.runner.model import Model
from deltic.runner.passes import passes
from deltic.runner.sampling import SampleRow, SamplingTable, TokenRanks, logprobs_of, scores_of
from deltic.spec_decode.pending_drafts import PendingDrafts


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """One sequence's share of a step, on the lease that it had then.

    row: None if it only draws from logits that were known.
    start: the row's first token in the batch.
    draw: the first of its draws; None: it draws nothing.
    end [V]: the logits of its prompt's end, where they will be kept.
    error: what its constraint raised.
    vector: which of the step's is its own.
    scores: of tokens of its prompt.
    ahead: what follows its drafts is drafted already, as far as the model has drawn them, and the slot has the hidden
        state of the last one that it has.
    base: tokens that the state in the slot stands for behind the step, where it was brought forward since.
    hidden [T, H]: the hidden states of the step's tokens, where another step follows that nobody waits to launch.
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
    ahead: bool = False
    base: int | None = None
    hidden: Tensor | None = None

    @property
    def live(self) -> bool:
        """Whether the sequence still runs; else what the step did for it is of no use, and leaves no trace."""
        return self.sequence.cache is self.cache

    @property
    def tokens(self) -> int:
        """How many it has in the step."""
        return len(self.row.tokens) if self.row else 0

    @property
    def base_after(self) -> int | None:
        """Tokens that the state in the slot stands for behind the step, as `HybridCache.commit` wants it."""
        return base_after(self.row) if self.base is None and self.row else self.base

    @property
    def draft_tokens(self) -> tuple[int, ...]:
        return self.row.draft_tokens if self.row and self.row.drafts else ()

    def draws(self, masks: List[bytes | None] | None) -> list[SampleRow]:
        """The sequence's next token, and those after each draft; after a token that is not known yet, where it takes
        one from the step before. masks: of each, where the sequence is constrained."""
        if self.row and self.row.drawn is not None:
            return [SampleRow(self.sequence, self.row.tokens)]
        masks = masks or [None] * (len(self.draft_tokens) + 1)
        return [SampleRow(self.sequence, self.draft_tokens[:count], mask) for count, mask in enumerate(masks)]


@dataclass(slots=True, eq=False)
class InFlight:
    """A step that was launched, whose tokens the host has not seen.

    drafting: the sequences that drafts were asked for.
    drawn [L] int64: the tokens, on the device; of a CPU until the next step has been launched.
    tokens: what was drawn; None where it has not been waited for.
    sampled: the same, on the host but for what has landed there (`Sampled.landed`).
    vectors [N, H] float32: the hidden states that were asked for. Both on the host as soon as `arrived`.
    raw [L, V]: the model's logits, where the probability of another token than the drawn one may be reported.
    promise: has the rows' drafts, which are UNKNOWN.
    batch: its rows, on the device.
    sampling: how it has drawn.
    error: what launching raised.
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
    promise: PendingDrafts | None = None
    batch: Batch | None = None
    sampling: Sampling | None = None
    error: Exception | None = None

    @property
    def live(self) -> bool:
        """Whether any of its sequences still runs."""
        return any(share.live for share in self.scheduled)

    @property
    def read(self) -> int:
        """Tokens of prompts in it, but for single ones."""
        return sum(share.tokens for share in self.scheduled if share.tokens > 1 and not share.draft_tokens)

    def resolve_positions(self) -> None:
        """The step before was collected, so that it is known where the rows begin."""
        for share in self.scheduled:
            if share.live and share.row and share.row.accepts:
                share.row = replace(share.row, done=share.cache.done, accepts=0)

    def resolve_drafts(self) -> None:
        """Give the rows their drafts, for which this waits."""
        promise = self.promise
        if promise is None:
            return
        for share in self.scheduled:
            if share.live and share.row and share.row.drafts:
                drafts = promise.drafts(share.sequence, share.row.drafts)
                share.row = replace(share.row, tokens=(share.sequence.tokens[-1], *drafts))


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What a step has drawn; the lists are those of `sampled`. raw: as in `InFlight`."""

    sampled: Sampled
    tokens: list[int]
    healthy: list[bool]
    possible: list[bool]
    raw: Tensor | None = None

    def logprobs(self, row: int, token: int, wanted: int | None) -> TokenLogprobs | None:
        """The report of one row that gave this token, drawn or forced."""
        found = logprobs_of(self.sampled, row, wanted)
        if found is None or self.raw is None or token == self.tokens[row]:
            return found
        return replace(found, token=float(self.raw[row].double().log_softmax(-1)[token]))


class Launcher:
    """Launches steps of one runtime. seconds: spent in the model's forward so far, or waiting for it."""

    def __init__(self, runtime: Model, pictures: ImageEmbeds | None = None) -> None:
        self._runtime, self._pictures, self.seconds = runtime, pictures, 0.0
        self._memory, self._params, self.masks = BatchMemory(runtime.numbers), SamplingTable(lands=True), LogitMasks()

    def launch(self, plan: StepPlan, sequences: List[Sequence], known: List[Sequence] = (),
               before: InFlight | None = None, promise: PendingDrafts | None = None) -> InFlight:
        """Carry the plan out; draw for its rows, and for the sequences whose logits are known. before: the step whose
        tokens those rows take that say so. promise: has the rows' drafts. Never raises."""
        flight = InFlight(plan, [], promise=promise)
        try:
            self._launch(flight, sequences, known, before)
        except Exception as error:
            flight.error = error
        return flight

    def wait(self, flight: InFlight) -> SampledTokens | None:
        """What the step has drawn, if anything; then all that it gives is there."""
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
        return flight.tokens or _chosen(flight.sampled, flight.raw)

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
        drawing = [share for share in flight.scheduled if share.row is None or share.row.logits > share.row.scored]
        asked = self.masks.ask([(share.sequence, share.draft_tokens) for share in drawing])
        if flight.plan.rows:
            self._run(flight, logits, before)
        for sequence in known:
            # a draw may write into them, and what came from a tier lies on the host
            logits.append(sequence.logits[None].to(runtime.device, copy=True))
            sequence.logits = None
        draws = _draws(drawing, asked)
        if draws:
            self._draw(flight, draws, logits[0] if len(logits) == 1 else torch.cat(logits))
        if runtime.device.type == "cuda" and (draws or flight.vectors is not None):
            flight.arrived = torch.cuda.Event()
            flight.arrived.record(torch.cuda.current_stream(runtime.device))

    def _run(self, flight: InFlight, logits: list[Tensor], before: InFlight | None) -> None:
        """Run the plan's rows."""
        runtime, wanting = self._runtime, [share for share in flight.scheduled if share.row and share.row.hidden]
        rows = flight.plan.rows
        drawn: Tensor | Promised | None = before.drawn if before else None
        if flight.promise and any(row.drafts for row in rows):
            drawn = flight.promise.on_device(rows, [share.sequence for share in flight.scheduled if share.row])
        began = time.perf_counter()
        if runtime.options.batch_invariant:
            assert not isinstance(drawn, Promised)
            found = self._run_alone(rows, drawn)
        else:
            batch = build(flight.plan, runtime.device, hidden=bool(wanting) or runtime.mtp_runner is not None,
                          drawn=drawn, memory=self._memory,
                          rows_of=self._pictures.rows if self._pictures else None, verified=runtime.verifies)
            flight.batch = batch
            if wanting:
                found, hidden = runtime.run_hidden(batch)
                assert hidden is not None
                for index, share in enumerate(wanting):
                    share.vector = index
                last = [share.start + len(share.row.tokens) - 1 for share in wanting if share.row]
                flight.vectors = hidden[last].to("cpu", non_blocking=True)
            else:
                found = runtime.run(batch)
        logits.append(_scored(flight, found) if any(row.scored for row in flight.plan.rows) else found)
        self.seconds += time.perf_counter() - began

    def _run_alone(self, rows: List[PlannedRow], drawn: Tensor | None) -> Tensor:
        """The logits [L, V] of these rows, whose tokens are computed one by one."""
        runtime, kept = self._runtime, dict[int, Tensor]()
        for part in passes(rows):
            taken = drawn if part.rows[0].drawn is not None else None
            found = runtime.run(build(StepPlan(part.rows), runtime.device, drawn=taken, memory=self._memory))
            kept |= {wanted: found[place].clone() for place, wanted in part.kept}  # the next pass writes over them
            if part.copies:
                runtime.cache.operations.apply(part.copies)
        return torch.stack([kept[wanted] for wanted in sorted(kept)]) if kept else found[:0]

    def _draw(self, flight: InFlight, draws: list[SampleRow], logits: Tensor) -> None:
        """logits [L, V]: those of all draws; a draw may write into them."""
        for share in flight.scheduled:
            if share.draw is not None and not share.draft_tokens and _keeps_end(share):
                share.end = logits[share.draw].clone()
        if any(draw.sequence.guide and draw.sequence.sampling.logprobs is not None for draw in draws):
            flight.raw = logits.clone()
        flight.sampling = self._params.of(draws, logits.device, logits.shape[1], _begins(flight))
        sampled = self._runtime.sample(logits, flight.sampling)
        flight.drawn, flight.sampled = sampled.tokens, sampled
        if not sampled.tokens.is_cuda:
            flight.tokens = _chosen(sampled, flight.raw)
        elif not sampled.landed:
            flight.sampled = _on_host(sampled)


def _draws(shares: List[ScheduledSequence], asked: Asked) -> list[SampleRow]:
    """All draws of a step, in the order of its logits."""
    draws = list[SampleRow]()
    for share in shares:
        masks, share.draw = None, len(draws)
        try:
            masks = asked[share.sequence].result() if share.sequence in asked else None
        except Exception as error:
            share.error = error  # the others of the step have nothing to do with it
        draws += share.draws(masks)
    return draws


def _begins(flight: InFlight) -> Tensor | None:
    """The cursors of a step's rows, where only the device knows them."""
    unknown = any(row.accepts for row in flight.plan.rows)
    return flight.batch.done if unknown and flight.batch else None


def _scored(flight: InFlight, logits: Tensor) -> Tensor:
    """Have the shares score what they are to score; returns the logits that are drawn from."""
    drawn, at = list[Tensor](), 0
    for share in flight.scheduled:
        if share.row is None:
            continue
        end, row, sequence = at + share.row.scored, share.row, share.sequence
        if row.scored:
            first = row.done + len(row.tokens) - row.logits + 1
            share.scores = scores_of(logits[at:end], sequence.tokens[first:first + row.scored],
                                     sequence.sampling.prompt_logprobs or 0)
        drawn.append(logits[end:at + row.logits])
        at += row.logits
    return torch.cat(drawn)


def _chosen(sampled: Sampled, raw: Tensor | None) -> SampledTokens:
    return SampledTokens(sampled, sampled.tokens.tolist(), sampled.healthy.tolist(), sampled.possible.tolist(), raw)


def _keeps_end(share: ScheduledSequence) -> bool:
    done = share.row.done + len(share.row.tokens) if share.row else share.cache.done
    return (
        done in share.cache.checkpoint_slots
        or share.sequence.needs_fork
        or bool(share.sequence.request.logits_processors)
    )


def _on_host(sampled: Sampled) -> Sampled:
    """Copies in pinned memory, which are there when the device has come so far."""
    tensors = {name: value for name in Sampled.__slots__ if isinstance(value := getattr(sampled, name), Tensor)}
    copies = {tensor: tensor.to("cpu", non_blocking=True) for tensor in {*tensors.values()}}
    found: dict[str, Any] = {name: copies[tensor] for name, tensor in tensors.items()}
    return replace(sampled, **found)
