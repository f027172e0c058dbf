"""The engine: requests in, token events out, one step at a time.

Single-threaded: one thread calls `step`, `add` and `abort`. The engine sees token ids only, no text.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite
from typing import Any

from torch import Tensor

from deltic.cache.manager import HybridCache
from deltic.cache.memory_plan import grid_spacing
from deltic.engine.admission import keys_of, new_sequence, salted
from deltic.engine.async_schedule import schedule_async
from deltic.engine.failures import Failures
from deltic.engine.policy import StepTimes
from deltic.engine.scheduler import Scheduler
from deltic.engine.sequence import ForkPoint, Sequence
from deltic.engine.stats import EngineStats, RequestProgress, TokenMeter, progress
from deltic.engine.step_plan import base_after
from deltic.errors import RequestError
from deltic.params import Embed, EngineRequest, Event, Finish, SamplingParams, TokenEvent, TokenLogprobs, VectorEvent
from deltic.runner.image_embeds import ImageEmbeds
from deltic.runner.known_logits import KnownLogits
from deltic.runner.launch import InFlight, Launcher, SampledTokens, ScheduledSequence
from deltic.runner.model_runner import Model
from deltic.spec_decode.controller import SpeculationController
from deltic.spec_decode.draft_length import DraftLength
from deltic.spec_decode.proposers import Proposer

log = logging.getLogger("deltic")

_BAD_LOGITS = ("the model's logits are NaN, infinite or all equal: weights, dtype or a kernel are broken; run with "
         "`debug_layers` to find the first bad layer, or with the reference ops (`ops=['reference']`)")
_ALL_FORBIDDEN = ("no token is left to choose from: logit_bias forbids every one that a grammar allows, or all but "
              "those that min_tokens forbids too; allow at least one more")

_MAX_EMBEDS_BYTES = 256 << 20
"""Upper bound in bytes for image embeddings that are kept for waiting prompts and for prompts with the same image."""


class Engine:
    """Continuous batching over one `Model`."""

    def __init__(self, runtime: Model, drafter: Proposer | None = None, depth: DraftLength | None = None,
                 overlap: bool | None = None) -> None:
        """drafter: proposes draft tokens. depth: chooses their number. Both default to the runtime's options. overlap:
        launch each step before the one in flight is collected (async scheduling); default: if the device can."""
        self.runtime, self.stats, self.meter = runtime, EngineStats(), TokenMeter()
        options = runtime.options
        longest = None if options.max_stall_ms is None else options.max_stall_ms / 1000
        self.scheduler = Scheduler(runtime.cache, runtime.memory.max_batch, options.token_budget, StepTimes(longest),
                                   not runtime.capabilities.verifies, runtime.capabilities.defer_from,
                                   runtime.capabilities.adapts)
        self.speculator = SpeculationController(runtime, self.scheduler, drafter, depth)
        self.pictures = ImageEmbeds(runtime.encode, _MAX_EMBEDS_BYTES) if runtime.encode else None
        self.launcher = Launcher(runtime, self.pictures)
        self._known = KnownLogits(runtime.config.vocab_size, runtime.memory.max_batch)
        self._failures = Failures(runtime, self.scheduler, self.speculator)
        self.overlap = runtime.capabilities.overlaps if overlap is None else overlap
        self._flight: InFlight | None = None
        self._finite: dict[Sequence, ScheduledSequence] = {}
        """Sequences that have drawn a token from finite logits, and have checkpoints that are not in the tree yet."""
        self._spacing = grid_spacing(runtime.cache.sizes.slot_tokens)
        self._sequences: dict[str, list[Sequence]] = {}
        self._events: list[Event] = []
        self._public: list[array[int]] = []

    @property
    def has_work(self) -> bool:
        """True if `step` would do anything. False if all requests are paused."""
        return bool(self.scheduler.running or self.scheduler.waiting or self.scheduler.leaving or self._events)

    @property
    def max_context(self) -> int:
        """Upper bound for the tokens of a prompt and its answer."""
        return self.runtime.memory.max_context

    def add(self, request: EngineRequest) -> None:
        """Queues a request. Raises RequestError if it cannot be served."""
        if request.id in self._sequences:
            raise RequestError(f"a request with id {request.id!r} is already running", "id")
        keys = self.keys_of(request)
        if isinstance(request.output, SamplingParams):
            request = replace(request, output=request.output.with_defaults(self._defaults()))
        first = self._sequence(request, 0, None, keys)
        self._sequences[request.id] = [first]
        self.scheduler.add(first)

    def keys_of(self, request: EngineRequest) -> array[int]:
        """Returns the keys of a request's prompt. Raises RequestError if the request cannot be served. Thread-safe."""
        if isinstance(request.output, Embed) and self.runtime.options.batch_invariant:
            raise RequestError("this model was loaded with batch_invariant, which is for answers: load it without for "
                               "vectors", "output")
        keys = keys_of(request, self.runtime.config.vocab_size, self.max_context, self.pictures is not None)
        return salted(keys, request.key_salt, () if request.adapter else self._public)

    def pin(self, prompt: tuple[int, ...]) -> bool:
        """Pins the prefix of a prompt that was prefilled. Requests with any `cache_salt` share it. Returns False if the
        cache does not hold it."""
        keys = array("q", prompt)
        self._public += [] if keys in self._public else [keys]
        return self.runtime.cache.tree.pin(prompt)

    @contextmanager
    def resting_cache(self) -> Iterator[HybridCache]:
        """Yields the cache for a `with` block, with all checkpoints in its tree. Cache operations that are queued in
        the block are carried out at its end."""
        self._commit_checkpoints()
        yield self.runtime.cache
        self._failures.flush()

    def abort(self, request: str) -> None:
        """Ends a request now; its choices finish with reason "abort"."""
        self._commit_checkpoints()
        for sequence in self._sequences.get(request, ())[:]:
            sequence.finish = "abort"
            self._end(sequence)

    def progress(self, request: EngineRequest) -> RequestProgress:
        """Returns the progress of a request; an unknown one counts as finished. Thread-safe."""
        return progress(self._sequences.get(request.id, []), len(request.prompt))

    def pause(self, request: str) -> None:
        """Removes a request's sequences from the batch until `resume`. Their processed tokens stay cached while there
        is room. The answers do not change. Does nothing for unknown and paused requests."""
        if any(self._ahead(sequence) for sequence in self._sequences.get(request, ())):
            self._collect_flight()
        self._commit_checkpoints()
        for sequence in self._sequences.get(request, ()):
            self.speculator.forget(sequence)
            self.scheduler.pause(sequence)
        self._failures.flush()

    def resume(self, request: str) -> None:
        """Queues a paused request again, before requests that arrived later. Does nothing for other requests."""
        for sequence in self._sequences.get(request, ()):
            self.scheduler.resume(sequence)

    def step(self) -> list[Event]:
        """Completes one step, and returns the events since the last call. With `overlap`, launches the next one."""
        began, before, prompt_tokens = time.perf_counter(), self.launcher.seconds, self.stats.prompt_tokens
        self._commit_checkpoints()
        flight, self._flight = self._flight, None
        if flight and not flight.live:
            self._release_left(flight)
            flight = None
        flight = flight or self._launch()
        if flight:
            self._complete(flight, self._finish_overlapped if self.overlap else self._finish)
            self.stats.steps += 1
            seconds = time.perf_counter() - began
            self.stats.busy_seconds += seconds
            self._timed(flight, seconds, self.stats.prompt_tokens - prompt_tokens)
        self._failures.end_refused(self._fail_request)
        if not self.scheduler.running and not self.scheduler.waiting:
            self._failures.flush()  # no plan will follow soon
        events, self._events = self._events, []
        self.stats.last_overhead = time.perf_counter() - began - (self.launcher.seconds - before)
        return events

    def _complete(self, flight: InFlight, finish: Callable[[InFlight], None]) -> None:
        """Finishes a step, and releases the caches of its sequences that had already ended."""
        try:
            if flight.error:
                raise flight.error
            finish(flight)
        except Exception as error:
            flight.error = error
            self._failures.lose(flight, error, self._fail_request)
        self._release_left(flight)

    def _collect_flight(self) -> None:
        """Collects the step in flight, if there is one, so that all states are at their cursors."""
        self._commit_checkpoints()
        flight, self._flight = self._flight, None
        if flight and flight.live:
            self._complete(flight, self._finish)
            self.stats.steps += 1
        elif flight:
            self._release_left(flight)

    def _finish(self, flight: InFlight) -> None:
        """Commits and collects a step. The next call of `step` launches the next one."""
        self._commit(flight)
        self._collect(flight)

    def _finish_overlapped(self, flight: InFlight) -> None:
        """Works like `_finish`, but launches the next step before it waits for the tokens of this one, so that the
        device does not wait for the host. Launches none if the next step depends on these tokens."""
        self._commit(flight)
        self._flight = self._launch_async(flight)
        self._collect(flight)
        if self._flight and self._flight.pending:
            self._draft_on(self._flight)

    def check(self) -> None:
        """Asserts that the cache's accounts are right, and that the cache is idle if nothing runs."""
        self._commit_checkpoints()
        self.runtime.cache.check()
        queued = [*self.scheduler.running, *self.scheduler.waiting, *self.scheduler.paused]
        live = {sequence for group in self._sequences.values() for sequence in group}
        assert len(queued) == len(live) and live.issuperset(queued), "the queues hold other sequences than the engine"
        if not self.scheduler.running and not self.scheduler.waiting and not self.scheduler.leaving:
            assert self.runtime.cache.idle, "a finished or paused sequence still has a cache"

    def close(self) -> None:
        """Waits until the cache's tiers have stored everything. The engine must not be used afterwards."""
        self._known.close()
        if self._flight:
            self._release_left(self._flight)
        self._commit_checkpoints()
        self.runtime.cache.close()
        for offload in (self.runtime.experts, self.runtime.layers):
            if offload:
                offload.close()

    def _launch(self) -> InFlight | None:
        """Drafts, schedules and launches a step. Returns None if there is nothing to do."""
        self._failures.recover()
        self.launcher.masks.begin(self.scheduler.running)
        drafting = self.speculator.draft()
        self._failures.recover()
        if self.pictures and (failed := self.pictures.work(self.scheduler.running)):
            sequence, error = failed
            log.error("a picture could not be encoded; its request ends with an error", exc_info=error)
            self._fail(sequence, f"internal error: {error}")
        plan, sequences = self.scheduler.schedule()
        if self._failures.gives_up(plan):
            self._failures.recover()
            return None
        pending = self.speculator.pending
        if pending and not pending.covers(sequences):  # a sequence was added that has no drafts
            plan, sequences = pending.resolve(plan, sequences)
            pending = None
        ready = self._known.ready(self.scheduler.running, self._fail)
        flight = self.launcher.launch(plan, sequences, ready, pending=pending)
        flight.drafting = drafting
        self.speculator.draft_ahead(flight)
        return flight if flight.scheduled or flight.error else None

    def _launch_async(self, flight: InFlight) -> InFlight | None:
        """Schedules and launches the step after `flight`. Returns None if it depends on the tokens of `flight`."""
        step = schedule_async(self.scheduler, flight, self.speculator)
        if step is None or self._failures.gives_up(step.plan):
            return None
        self.stats.async_steps += 1
        if step.drafts and self.runtime.mtp_runner:
            hidden = self.runtime.mtp_runner.hidden(sum(each.tokens for each in flight.scheduled))
            for each in flight.scheduled:
                each.hidden = hidden
        ready = self._known.ready(self.scheduler.running, self._fail)
        following = self.launcher.launch(step.plan, step.sequences, ready, before=flight, pending=step.drafts)
        if all(row.drawn is not None or row.drafts for row in step.plan.rows):
            following.drafting = step.sequences if self.speculator.drafter else ()
        else:
            flight.drafting = ()  # its measured time is no longer that of a decode step
        return following

    def _draft_on(self, following: InFlight) -> None:
        """Starts to draft after a step that verifies pending drafts. Called when the step before it is collected."""
        following.resolve_positions()
        if all(each.live for each in following.scheduled):
            self.speculator.draft_ahead(following)

    def _commit(self, flight: InFlight) -> None:
        """Moves the cursors over the tokens of a step, except for drafts. All of these tokens are known to be right."""
        cache = self.runtime.cache
        for each in flight.scheduled:
            row, sequence = each.row, each.sequence
            if row is None or not each.live:
                continue
            if not row.drafts:
                cache.commit(each.cache, len(row.tokens), base_after(row))
            self.stats.prompt_tokens += max(0, min(len(sequence.request.prompt) - row.done, len(row.tokens)))

    def _collect(self, flight: InFlight) -> None:
        """Waits for the tokens of a step, and appends them to the sequences that still run."""
        flight.resolve_drafts()
        for each in flight.scheduled:
            if each.live and each.scores:
                self._score(each.sequence, each.scores.report())
        if flight.sampled is None and flight.vectors is None:
            return
        sampled = self.launcher.wait(flight)
        for each in flight.scheduled:
            if each.live and each.vector is not None and flight.vectors is not None:
                self._emit_vector(each, flight.vectors[each.vector])
            if each.draw is None or sampled is None or not each.live:
                continue
            sequence = each.sequence
            try:
                if each.error:
                    raise each.error
                if self._known.postpone(each, sampled.healthy[each.draw]):
                    continue
                if sampled.healthy[each.draw] and each.cache.checkpoint_slots:
                    self._finite[sequence] = each
                if sampled.healthy[each.draw] and sequence.needs_fork:
                    self._commit_checkpoints()
                    self._fork(sequence, each.end)
                self._accept(each, sampled, each.draw)
            except Exception as error:
                self._fail_for(sequence, error)

    def _commit_checkpoints(self) -> None:
        """Puts the checkpoints of sequences with finite logits into the tree. Called after their tokens are emitted,
        because a long prompt has many pages, and before the tree is used."""
        while self._finite:
            sequence, each = self._finite.popitem()
            try:
                if each.live:
                    self.runtime.cache.commit_checkpoints(each.cache, each.end)
            except Exception as error:
                self._fail_for(sequence, error)

    def _score(self, sequence: Sequence, found: list[TokenLogprobs]) -> None:
        """Adds log probabilities of prompt tokens."""
        if not all(isfinite(score.token) for score in found):
            return self._fail(sequence, _BAD_LOGITS)
        sequence.scores += found

    def _emit_vector(self, each: ScheduledSequence, vector: Tensor) -> None:
        """Emits the vector [H] of a sequence that has processed its prompt."""
        sequence = each.sequence
        if not bool(vector.isfinite().all()) or bool((vector == vector[0]).all()):
            return self._fail(sequence, _BAD_LOGITS)
        if each.cache.checkpoint_slots:
            self.runtime.cache.commit_checkpoints(each.cache)
        self._events.append(VectorEvent(sequence.request.id, array("f", vector.tolist()), sequence.usage))
        self._forget(sequence)

    def _timed(self, flight: InFlight, seconds: float, prompt_tokens: int) -> None:
        """Records the duration of a step."""
        if self.scheduler.times:
            self.scheduler.times.add(prompt_tokens, seconds)
        if flight.drafting and len(flight.drafting) == len(flight.scheduled) == len(flight.plan.rows):
            self.speculator.timed(flight.plan, seconds, sum(event.token is not None for event in self._events))

    def _accept(self, each: ScheduledSequence, sampled: SampledTokens, place: int) -> None:
        """Appends a sequence's accepted drafts and the next token. place: index of the first token in `sampled`."""
        sequence, draft, right, last = each.sequence, each.draft_tokens, 0, 0
        while True:
            if not sampled.healthy[place + right]:
                return self._fail(sequence, _BAD_LOGITS)
            if draft:
                last = right
                self.runtime.cache.commit(each.cache, 1, each.base_after)
            forced = sequence.forced_tokens
            if forced is None and not sampled.possible[place + right]:
                return self._fail(sequence, _ALL_FORBIDDEN)
            token = sampled.tokens[place + right] if forced is None else forced
            accepted = right < len(draft) and token == draft[right]
            judged = right + (right < len(draft))
            sequence.drafts.drafted += right < len(draft)
            sequence.drafts.accepted += accepted
            finish = self._append(sequence, token, sampled, place + right)
            right += accepted
            if finish or not accepted:
                break
        if draft:
            # drafts after the end of the answer were neither right nor wrong
            drafted = judged if finish else len(draft)
            sequence.drafts.drafted += drafted - judged
            self.speculator.learn(sequence, drafted, right)
            self._settle_draft_head(each, last, sampled.tokens[place:])
        if finish and sequence.generated:
            self._forget(sequence)
        elif finish:
            self._end(sequence)

    def _fork(self, sequence: Sequence, logits: Tensor | None) -> None:
        """Adds the request's other choices. They fork the cache at the prompt's end, and sample from its logits [V]."""
        count = sequence.sampling.n - 1
        siblings = [self._sequence(sequence.request, choice, sequence.seed, sequence.prompt_keys)
                    for choice in range(1, count + 1)]
        assert sequence.cache is not None
        snapshot = self.runtime.cache.snapshot(sequence.cache, logits)
        origin = ForkPoint(snapshot, count) if snapshot else None
        self._sequences[sequence.request.id] += siblings
        for sibling in siblings:
            sibling.queue.fork_point = origin
            self.scheduler.add(sibling)

    def _settle_draft_head(self, each: ScheduledSequence, last: int, drawn: list[int]) -> None:
        """Sets the draft head's hidden state to that of the last committed token of a row with drafts. drawn: the
        tokens that the model chose in place of the drafts."""
        known = next((index for index, draft in enumerate(each.draft_tokens) if draft != drawn[index]),
                     len(each.draft_tokens))
        if self.runtime.mtp_runner and not (each.drafted_next and known == last):
            self.runtime.mtp_runner.settle(each.cache.slot, each.start + last, each.hidden)
            self.speculator.drop_pending(each.sequence)

    def _append(self, sequence: Sequence, token: int, sampled: SampledTokens, row: int) -> Finish | None:
        """Appends one token that was sampled or forced. Returns the finish reason if the answer ends with it."""
        if sequence.sampling.max_tokens == 0:
            sequence.finish = "length"
            return sequence.finish
        finish = sequence.append(token)
        self.stats.generated_tokens += 1
        self.meter.token(sequence)
        self._events.append(TokenEvent(sequence.request.id, sequence.choice, token,
                                     sampled.logprobs(row, token, sequence.sampling.logprobs), finish,
                                     sequence.usage if finish else None, prompt=sequence.report))
        return finish

    def _fail_for(self, sequence: Sequence, error: Exception) -> None:
        """Ends a sequence after its own matcher, guide, constraint or logits processor has raised this error."""
        if isinstance(error, RequestError):
            return self._fail(sequence, str(error), error)
        log.exception("a request's own matcher, guide or constraint failed; the request ends with an error")
        self._fail(sequence, f"internal error: {error}")

    def _fail_request(self, request: str, message: str) -> None:
        for sequence in self._sequences.get(request, ())[:]:
            self._fail(sequence, message)

    def _fail(self, sequence: Sequence, message: str, refused: RequestError | None = None) -> None:
        sequence.finish = "error"
        self._end(sequence, message, refused)

    def _end(self, sequence: Sequence, error: str | None = None, refused: RequestError | None = None) -> None:
        """Ends a sequence, and emits its last event, which has no token."""
        request, choices = sequence.request, [sequence.choice]
        if not sequence.generated and len(self._sequences[request.id]) == 1:
            # the other choices, which would have forked the end of this prompt, end with it
            choices = list(range(sequence.choice, request.choices))
        self.stats.finished += len(choices) - 1
        self.stats.failed += len(choices) if error else 0
        for choice in choices:
            self._events.append(TokenEvent(request.id, choice, None, None, sequence.finish, sequence.usage, error,
                                         sequence.report, refused))
        self._forget(sequence, len(choices) - 1)

    def _forget(self, sequence: Sequence, unbegun: int = 0) -> None:
        if sequence in self._finite:
            self._commit_checkpoints()
        # the state of a sequence that has drawn a token is finite
        keep = sequence.finish != "error" and sequence.generated > 0
        ahead = self._ahead(sequence) if keep else None
        if ahead:
            self.runtime.cache.commit(ahead.cache, ahead.tokens)
            ahead.last = True
            self.scheduler.leave(sequence)
        else:
            self.scheduler.remove(sequence, keep)
        if sequence.sampler.mask:
            sequence.sampler.mask.cancel()  # it is not needed any more
        self.speculator.forget(sequence)
        self.stats.finished += 1
        self.meter.end(sequence, unbegun)
        self.stats.reused_tokens += sequence.cached
        group = self._sequences[sequence.request.id]
        group.remove(sequence)
        if not group:
            del self._sequences[sequence.request.id]

    def _ahead(self, sequence: Sequence) -> ScheduledSequence | None:
        """Returns the sequence's part of the step in flight, if it moves the state in the slot past the cursor."""
        flight = self._flight.scheduled if self._flight else ()
        return next((each for each in flight if each.sequence is sequence and each.writes_state), None)

    def _release_left(self, flight: InFlight) -> None:
        """Releases the caches of sequences that ended while this step was in flight. Waits for the step, because the
        tree takes over finite states only."""
        left = [each for each in flight.scheduled if each.last and each.cache in self.scheduler.leaving]
        if not left:
            return
        sampled = None
        try:
            sampled = None if flight.error else self.launcher.wait(flight)
        except Exception:
            log.exception("a step failed after its last sequences had ended; their ends are not kept")
        for each in left:
            finite = sampled is not None and each.draw is not None and sampled.healthy[each.draw]
            self.scheduler.release_left(each.cache, keep=finite)

    def _sequence(self, request: EngineRequest, choice: int, seed: int | None, keys: array[int]) -> Sequence:
        return new_sequence(request, choice, seed, keys, self.max_context, self._eos(), self._spacing)

    def _eos(self) -> frozenset[int]:
        return frozenset(self.runtime.generation.eos_token_ids) | frozenset(self.runtime.config.eos_token_ids)

    def _defaults(self) -> Mapping[str, Any]:
        return {**self.runtime.generation.sampling(), "max_repeat": self.runtime.options.max_repeat}
