"""The engine: requests in, token events out, one step at a time.

Single-threaded: whoever calls `step` also calls `add` and `abort`. It knows token ids only, no text.
"""

from __future__ import annotations

import logging
import secrets
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from typing import Any

from torch import Tensor

from deltic.cache.memory_plan import distinct, grid_spacing, kept_positions
from deltic.engine.admission import keys_of, salted
from deltic.engine.async_schedule import plan_ahead, plan_behind_drafts
from deltic.engine.failures import Failures
from deltic.engine.policy import StepTimes
from deltic.engine.repeats import Repeats
from deltic.engine.scheduler import Scheduler
from deltic.engine.sequence import ForkPoint, Sequence
from deltic.engine.stats import RequestProgress, TokenMeter, progress
from deltic.engine.step_plan import base_after
from deltic.errors import RequestError
from deltic.params import Embed, EngineRequest, Event, Finish, SamplingParams, TokenEvent, TokenLogprobs, VectorEvent
from deltic.runner.image_embeds import ImageEmbeds
from deltic.runner.input_batch import FEW_ROWS
from deltic.runner.known_logits import KnownLogits
from deltic.runner.launch import InFlight, Launcher, SampledTokens, ScheduledSequence
from deltic.runner.model import Model
from deltic.spec_decode.controller import SpeculationController
from deltic.spec_decode.draft_length import DraftLength
from deltic.spec_decode.proposers import Proposer

log = logging.getLogger("deltic")

_SICK = ("the model's logits are NaN, infinite or all equal: weights, dtype or a kernel are broken; run with "
         "`debug_layers` to find the first bad layer, or with the reference ops (`ops=['reference']`)")
_NONE_LEFT = ("no token is left to choose from: logit_bias forbids every one that a grammar allows, or all but "
              "those that min_tokens forbids too; allow at least one more")

_PICTURE_ROOM = 256 << 20
"""Bytes of rows of pictures that may wait for prompts, or for others that show the same picture."""
_NO_TOKENS = SamplingParams(temperature=0.0, max_tokens=0, max_repeat=0)
"""How the tokens of a request for a vector are chosen: there are none."""


@dataclass(slots=True)
class EngineStats:
    """Counters since the start, and the seconds of the last step that were not spent in the model's forward.

    ahead: steps that were launched before the tokens of the one before were seen.
    prompt_tokens: processed ones, so those of a preempted request count again.
    reused_tokens: prompt tokens of finished requests that the cache knew.
    """

    steps: int = 0
    ahead: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    failed: int = 0
    last_overhead: float = 0.0


class Engine:
    """Continuous batching over one `Model`."""

    def __init__(self, runtime: Model, drafter: Proposer | None = None, depth: DraftLength | None = None,
                 ahead: bool | None = None) -> None:
        """drafter, depth: who drafts tokens, and how many; by default what the runtime's options say. ahead: launch
        steps before the one in flight is collected; by default where a device computes beside the host."""
        self.runtime, self.stats, self.meter = runtime, EngineStats(), TokenMeter()
        options = runtime.options
        longest = None if options.max_stall_ms is None else options.max_stall_ms / 1000
        self.scheduler = Scheduler(runtime.cache, runtime.memory.max_batch, options.token_budget, StepTimes(longest),
                                   not runtime.verifies,
                                   FEW_ROWS + 1 if runtime.defers_state_writes else None)
        self.speculator = SpeculationController(runtime, self.scheduler, drafter, depth)
        self.pictures = ImageEmbeds(runtime.encode, _PICTURE_ROOM) if runtime.encode else None
        self.launcher = Launcher(runtime, self.pictures)
        self._known = KnownLogits(runtime.config.vocab_size, runtime.memory.max_batch)
        self._failures = Failures(runtime, self.scheduler, self.speculator)
        self.ahead = runtime.device.type != "cpu" if ahead is None else ahead
        if self.ahead:
            runtime.cache.states.allocate_spares(runtime.memory.max_batch)
        self._flight: InFlight | None = None
        self._sound: dict[Sequence, ScheduledSequence] = {}
        """Those that have drawn a sound token since what they have emitted was kept."""
        self._spacing = grid_spacing(runtime.cache.sizes.slot_tokens)
        self._sequences: dict[str, list[Sequence]] = {}
        self._events: list[Event] = []
        self._public: list[array[int]] = []

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything: not if all requests are paused."""
        return bool(self.scheduler.running or self.scheduler.waiting or self._events)

    @property
    def max_context(self) -> int:
        """Tokens that one prompt and its answer may have together."""
        return self.runtime.memory.max_context

    def add(self, request: EngineRequest) -> None:
        """Queue a request; raises RequestError if it cannot be served as asked."""
        if request.id in self._sequences:
            raise RequestError(f"a request with id {request.id!r} is already running", "id")
        keys = self.keys_of(request)
        if isinstance(request.output, SamplingParams):
            request = replace(request, output=request.output.with_defaults(self._defaults()))
        first = self._sequence(request, 0, None, keys)
        self._sequences[request.id] = [first]
        self.scheduler.add(first)

    def keys_of(self, request: EngineRequest) -> array[int]:
        """The keys of its prompt; RequestError if it cannot be served as asked. For any thread."""
        if isinstance(request.output, Embed) and self.runtime.options.batch_invariant:
            raise RequestError("this model was loaded with batch_invariant, which is for answers: load it without for "
                               "vectors", "output")
        keys = keys_of(request, self.runtime.config.vocab_size, self.max_context, self.pictures is not None)
        return salted(keys, request.cache_salt, self._public)

    def pin(self, prompt: tuple[int, ...]) -> bool:
        """Pins the prefix of a prompt that was prefilled. Requests with any `cache_salt` share it. Returns False if the
        cache does not hold it."""
        keys = array("q", prompt)
        self._public += [] if keys in self._public else [keys]
        return self.runtime.cache.tree.pin(prompt)

    def abort(self, request: str) -> None:
        """End a request now, in whatever state it is; its choices finish with reason "abort"."""
        self._keep_emitted()
        for sequence in self._sequences.get(request, ())[:]:
            sequence.finish = "abort"
            self._end(sequence)

    def progress(self, request: EngineRequest) -> RequestProgress:
        """How far a request is; of one that it does not know, that it is finished. For any thread."""
        return progress(self._sequences.get(request.id, []), len(request.prompt))

    def pause(self, request: str) -> None:
        """Have a request give up its places until `resume`; what it has read stays as long as there is room for it.
        Its answers are the same. Unknown and paused requests stay as they are."""
        self._keep_emitted()
        for sequence in self._sequences.get(request, ()):
            self.speculator.forget(sequence)
            self.scheduler.pause(sequence)
        self._failures.flush()

    def resume(self, request: str) -> None:
        """Have a paused request go on, before those that came after it. Others stay as they are."""
        for sequence in self._sequences.get(request, ()):
            self.scheduler.resume(sequence)

    def step(self) -> list[Event]:
        """Collect a step: the one in flight, or else one that is launched now. Where the step after it needs nothing
        that the host has to see first, it is launched before that, so that no device waits for the host."""
        began, before, read = time.perf_counter(), self.launcher.seconds, self.stats.prompt_tokens
        self._keep_emitted()
        flight = self._flight if self._flight and self._flight.live else self._launch()
        self._flight = None
        if flight:
            try:
                if flight.error:
                    raise flight.error
                self._commit(flight)
                self._flight = self._launch_ahead(flight) if self.ahead else None
                self._collect(flight)
                self._draft_on(self._flight)
            except Exception as error:
                self._failures.lose(flight, error, self._fail_request)
            self.stats.steps += 1
            self._timed(flight, time.perf_counter() - began, self.stats.prompt_tokens - read)
        self._failures.end_refused(self._fail_request)
        if not self.scheduler.running and not self.scheduler.waiting:
            self._failures.flush()  # no plan will follow soon
        events, self._events = self._events, []
        self.stats.last_overhead = time.perf_counter() - began - (self.launcher.seconds - before)
        return events

    def check(self) -> None:
        """Assert the cache's accounts, and that nothing is leased when nothing is running."""
        self._keep_emitted()
        self.runtime.cache.check()
        queued = [*self.scheduler.running, *self.scheduler.waiting, *self.scheduler.paused]
        live = {sequence for group in self._sequences.values() for sequence in group}
        assert len(queued) == len(live) and live.issuperset(queued), "the queues hold other sequences than the engine"
        if not self.scheduler.running and not self.scheduler.waiting:
            assert self.runtime.cache.idle, "a finished or paused sequence still has a lease"

    def close(self) -> None:
        """Wait until the cache's tiers have everything; the engine must not be used afterwards."""
        self._known.close()
        self._keep_emitted()
        self.runtime.cache.close()
        if self.runtime.experts:
            self.runtime.experts.close()

    def _launch(self) -> InFlight | None:
        """Draft, admit, plan, run and draw; None if there is nothing to do."""
        self._failures.recover()
        self.launcher.masks.begin(self.scheduler.running)
        drafting = self.speculator.draft()
        self._failures.recover()
        if self.pictures and (failed := self.pictures.work(self.scheduler.running)):
            self._blame_picture(*failed)
        plan, sequences = self.scheduler.plan()
        if self._failures.gives_up(plan):
            self._failures.recover()
            return None
        promise = self.speculator.promise
        if promise and not promise.covers(sequences):
            plan, promise = promise.fulfil(plan, sequences), None  # somebody has come whom the device knows nothing of
        ready = self._known.ready(self.scheduler.running, self._fail)
        flight = self.launcher.launch(plan, sequences, ready, promise=promise)
        flight.drafting = drafting
        self.speculator.draft_ahead(flight)
        return flight if flight.scheduled or flight.error else None

    def _launch_ahead(self, flight: InFlight) -> InFlight | None:
        """The step after the one in flight; None where it has to wait for that one's tokens."""
        if any(share.draft_tokens for share in flight.scheduled):
            return self._launch_behind_drafts(flight)
        live = [share.sequence for share in flight.scheduled if share.live]
        ahead = plan_ahead(self.scheduler, flight, partial(self.speculator.drafts_next, live))
        if ahead is None:
            return None
        plan, sequences = ahead
        if self._failures.gives_up(plan):
            return None
        self.stats.ahead += 1
        ready = self._known.ready(self.scheduler.running, self._fail)
        following = self.launcher.launch(plan, sequences, ready, before=flight)
        if all(row.drawn is not None for row in plan.rows):
            following.drafting = sequences if self.speculator.drafter else ()
        else:
            flight.drafting = ()  # what it takes from here on is not what an answer's step takes
        return following

    def _launch_behind_drafts(self, flight: InFlight) -> InFlight | None:
        """As `_launch_ahead`, behind a step with drafts: the device finds where its rows begin."""
        speculator = self.speculator
        ahead = plan_behind_drafts(self.scheduler, flight, partial(speculator.drafts_behind, flight),
                                   partial(speculator.promised_behind, flight))
        if ahead is None:
            return None
        self.stats.ahead += 1
        plan, promise = ahead
        if self.runtime.mtp_runner:
            hidden = self.runtime.mtp_runner.hidden(sum(share.tokens for share in flight.scheduled))
            for share in flight.scheduled:
                share.hidden = hidden
        sequences = [share.sequence for share in flight.scheduled]
        following = self.launcher.launch(plan, sequences, promise=promise)
        following.drafting = sequences
        return following

    def _draft_on(self, following: InFlight | None) -> None:
        """The step before this one, if there is one in flight, was collected: have drafted what follows it."""
        if following and following.promise:
            following.resolve_positions()
            if all(share.live for share in following.scheduled):
                self.speculator.draft_ahead(following)

    def _commit(self, flight: InFlight) -> None:
        """Move the cursors over what the step has processed, but for drafts: all of it is known to be right by now."""
        cache = self.runtime.cache
        for share in flight.scheduled:
            row, sequence = share.row, share.sequence
            if row is None or not share.live:
                continue
            if not row.drafts:
                cache.commit(share.cache, len(row.tokens), base_after(row))
            if row.target is not None:
                cache.states.swap_spare(share.cache, row.target)
            self.stats.prompt_tokens += max(0, min(len(sequence.request.prompt) - row.done, len(row.tokens)))

    def _collect(self, flight: InFlight) -> None:
        """See what the step has drawn, and follow it in every sequence that still runs."""
        flight.resolve_drafts()
        for share in flight.scheduled:
            if share.live and share.scores:
                self._score(share.sequence, share.scores.report())
        if flight.sampled is None and flight.vectors is None:
            return
        chosen = self.launcher.wait(flight)
        for share in flight.scheduled:
            if share.live and share.vector is not None and flight.vectors is not None:
                self._give(share, flight.vectors[share.vector])
            if share.draw is None or chosen is None or not share.live:
                continue
            sequence = share.sequence
            try:
                if share.error:
                    raise share.error
                if self._known.postpone(share, chosen.healthy[share.draw]):
                    continue
                if chosen.healthy[share.draw] and share.cache.checkpoint_slots:
                    self._sound[sequence] = share
                if chosen.healthy[share.draw] and sequence.needs_fork:
                    self._keep_emitted()
                    self._split(sequence, share.end)
                self._follow(share, chosen, share.draw)
            except Exception as error:
                self._blame(sequence, error)

    def _keep_emitted(self) -> None:
        """Put the states that sound sequences have emitted into the tree: once their tokens are out, as a long prompt
        has many pages, and before anybody looks there."""
        while self._sound:
            sequence, share = self._sound.popitem()
            try:
                if share.live:
                    self.runtime.cache.commit_checkpoints(share.cache, share.end)
            except Exception as error:
                self._blame(sequence, error)

    def _score(self, sequence: Sequence, found: list[TokenLogprobs]) -> None:
        """More tokens of a prompt have their probabilities."""
        if not all(isfinite(score.token) for score in found):
            return self._fail(sequence, _SICK)
        sequence.scores += found

    def _give(self, share: ScheduledSequence, vector: Tensor) -> None:
        """A sequence has come to the end of its prompt, and this is the vector [H] that was wanted of it."""
        sequence = share.sequence
        if not bool(vector.isfinite().all()) or bool((vector == vector[0]).all()):
            return self._fail(sequence, _SICK)
        if share.cache.checkpoint_slots:
            self.runtime.cache.commit_checkpoints(share.cache)
        self._events.append(VectorEvent(sequence.request.id, array("f", vector.tolist()), sequence.usage))
        self._forget(sequence)

    def _timed(self, flight: InFlight, seconds: float, read: int) -> None:
        """The step took so long, and read so many tokens of prompts."""
        if self.scheduler.times:
            self.scheduler.times.add(read, seconds)
        if flight.drafting and len(flight.drafting) == len(flight.scheduled) == len(flight.plan.rows):
            self.speculator.timed(flight.plan, seconds, sum(event.token is not None for event in self._events))

    def _follow(self, share: ScheduledSequence, chosen: SampledTokens, place: int) -> None:
        """Take the tokens that were chosen for a sequence, from `place` on, as far as its drafts are right."""
        sequence, draft, right, last = share.sequence, share.draft_tokens, 0, 0
        while True:
            if not chosen.healthy[place + right]:
                return self._fail(sequence, _SICK)
            if draft:
                last = right
                self.runtime.cache.commit(share.cache, 1, share.base_after)
            forced = sequence.forced_tokens
            if forced is None and not chosen.possible[place + right]:
                return self._fail(sequence, _NONE_LEFT)
            token = chosen.tokens[place + right] if forced is None else forced
            accepted = right < len(draft) and token == draft[right]
            judged = right + (right < len(draft))
            sequence.drafted += right < len(draft)
            sequence.accepted += accepted
            finish = self._take(sequence, token, chosen, place + right)
            right += accepted
            if finish or not accepted:
                break
        if draft:
            # what was drafted after the end was neither right nor wrong
            drafted = judged if finish else len(draft)
            sequence.drafted += drafted - judged
            self.speculator.learn(sequence, drafted, right)
            self._settle(share, last, chosen.tokens[place:])
        if finish and sequence.generated:
            self._forget(sequence)
        elif finish:
            self._end(sequence)

    def _split(self, sequence: Sequence, logits: Tensor | None) -> None:
        """Make the request's other choices. They fork the prompt's end when they run, and draw from its logits [V]."""
        count = sequence.sampling.n - 1
        siblings = [self._sequence(sequence.request, choice, sequence.seed, sequence.prompt_keys)
                    for choice in range(1, count + 1)]
        assert sequence.cache is not None
        snapshot = self.runtime.cache.snapshot(sequence.cache, logits)
        origin = ForkPoint(snapshot, count) if snapshot else None
        self._sequences[sequence.request.id] += siblings
        for sibling in siblings:
            sibling.fork_point = origin
            self.scheduler.add(sibling)

    def _settle(self, share: ScheduledSequence, last: int, drawn: list[int]) -> None:
        """Of a step with drafts the last token that was committed is this one of its row. drawn: after each of them."""
        known = next((index for index, draft in enumerate(share.draft_tokens) if draft != drawn[index]),
                     len(share.draft_tokens))
        if self.runtime.mtp_runner and not (share.ahead and known == last):
            self.runtime.mtp_runner.settle(share.cache.slot, share.start + last, share.hidden)
            self.speculator.disagree(share.sequence)

    def _take(self, sequence: Sequence, token: int, chosen: SampledTokens, row: int) -> Finish | None:
        """Take one token that was chosen or forced; returns why the answer ends with it, if it does."""
        if sequence.sampling.max_tokens == 0:
            sequence.finish = "length"
            return sequence.finish
        finish = sequence.append(token)
        self.stats.generated_tokens += 1
        self.meter.token(sequence)
        self._events.append(TokenEvent(sequence.request.id, sequence.choice, token,
                                     chosen.logprobs(row, token, sequence.sampling.logprobs), finish,
                                     sequence.usage if finish else None, prompt=sequence.report))
        return finish

    def _blame(self, sequence: Sequence, error: Exception) -> None:
        """What a request brought along has raised this error, which is being handled."""
        if isinstance(error, RequestError):
            return self._fail(sequence, str(error), error)
        log.exception("a request's own matcher, guide or constraint failed; the request ends with an error")
        self._fail(sequence, f"internal error: {error}")

    def _blame_picture(self, sequence: Sequence, error: Exception) -> None:
        """A picture of this one cannot be encoded."""
        log.error("a picture could not be encoded; its request ends with an error", exc_info=error)
        self._fail(sequence, f"internal error: {error}")

    def _fail_request(self, request: str, message: str) -> None:
        for sequence in self._sequences.get(request, ())[:]:
            self._fail(sequence, message)

    def _fail(self, sequence: Sequence, message: str, refused: RequestError | None = None) -> None:
        sequence.finish = "error"
        self._end(sequence, message, refused)

    def _end(self, sequence: Sequence, error: str | None = None, refused: RequestError | None = None) -> None:
        """Finish a sequence without a token."""
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
        if sequence in self._sound:
            self._keep_emitted()
        # the state of a sequence that has drawn a token is known to be sound
        self.scheduler.remove(sequence, keep=sequence.finish != "error" and sequence.generated > 0)
        if sequence.mask:
            sequence.mask.cancel()  # nobody wants it any more
        self.speculator.forget(sequence)
        self.stats.finished += 1
        self.meter.end(sequence, unbegun)
        self.stats.reused_tokens += sequence.cached
        group = self._sequences[sequence.request.id]
        group.remove(sequence)
        if not group:
            del self._sequences[sequence.request.id]

    def _sequence(self, request: EngineRequest, choice: int, seed: int | None, keys: array[int]) -> Sequence:
        """seed: of the request's other choices. keys: of its prompt."""
        params, prompt = request.output if isinstance(request.output, SamplingParams) else _NO_TOKENS, request.ids
        if seed is None:
            seed = secrets.randbits(63) if params.seed is None else params.seed
        limit = self.max_context
        if params.max_tokens is not None:
            limit = min(limit, len(prompt) + params.max_tokens)
        goes_on = params.ignore_eos and not request.constraint  # which knows where an answer has to end
        eos = frozenset(params.stop_token_ids) | (frozenset() if goes_on else self._eos())
        boundaries = distinct(request.stable_prefixes, len(prompt))
        wanted = kept_positions(len(prompt), boundaries, self._spacing) if not choice else ()
        if isinstance(request.output, Embed):
            wanted = wanted[:-1]  # nobody goes on after its end
        return Sequence(request, choice, params, seed, eos, limit, tuple(prompt),
                        request.matcher() if request.matcher else None, request.guide() if request.guide else None,
                        request.constraint() if request.constraint else None,
                        Repeats(params.max_repeat) if params.max_repeat else None, prompt_keys=keys,
                        stable_prefixes=boundaries, wanted=wanted)

    def _eos(self) -> frozenset[int]:
        return frozenset(self.runtime.generation.eos_token_ids) | frozenset(self.runtime.config.eos_token_ids)

    def _defaults(self) -> Mapping[str, Any]:
        return {**self.runtime.generation.sampling(), "max_repeat": self.runtime.options.max_repeat}
