"""The engine: requests in, token events out, one step at a time.

Single-threaded: whoever calls `step` also calls `add` and `abort`. It knows token ids only, no text.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deltic.cache.policy import distinct, grid_spacing, kept_positions
from deltic.engine.batch import build
from deltic.engine.metrics import Meter
from deltic.engine.runtime import Runtime
from deltic.engine.sampler import logprobs_of, sampling_of
from deltic.engine.scheduler import Plan, Scheduler
from deltic.engine.sequence import Origin, Sequence
from deltic.errors import RequestError
from deltic.ops.records import Sampled
from deltic.types import Request, TokenOut

log = logging.getLogger("deltic")

_SICK = ("the model's logits are NaN, infinite or all equal: weights, dtype or a kernel are broken; run with "
         "--debug-layers to find the first bad layer, or with --ops ref")


@dataclass(slots=True)
class EngineStats:
    """Counters since the start, and the seconds of the last step that were not spent in the model's forward.

    prompt_tokens: processed ones, so those of a preempted request count again. reused_tokens: prompt tokens of
    finished requests that the cache knew.
    """

    steps: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    failed: int = 0
    last_overhead: float = 0.0


class Engine:
    """Continuous batching over one `Runtime`."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime, self.stats, self.meter = runtime, EngineStats(), Meter()
        self.scheduler = Scheduler(runtime.cache, runtime.memory.max_batch, runtime.options.token_budget)
        self._spacing = grid_spacing(runtime.cache.storage.slot_tokens)
        self._sequences: dict[str, list[Sequence]] = {}
        self._events: list[TokenOut] = []

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._sequences or self._events)

    @property
    def max_context(self) -> int:
        """Tokens that one prompt and its answer may have together."""
        return self.runtime.memory.max_context

    def add(self, request: Request) -> None:
        """Queue a request; raises RequestError if it cannot be served as asked."""
        self._check(request)
        params = request.sampling.with_defaults(self._defaults())
        seed = secrets.randbits(63) if params.seed is None else params.seed
        first = self._sequence(replace(request, sampling=params), 0, seed)
        self._sequences[request.id] = [first]
        self.scheduler.add(first)

    def abort(self, request: str) -> None:
        """End a request now, in whatever state it is; its choices finish with reason "abort"."""
        for sequence in self._sequences.get(request, ())[:]:
            sequence.finish = "abort"
            self._end(sequence)

    def step(self) -> list[TokenOut]:
        """Admit, plan, run, choose, commit, emit."""
        began = time.perf_counter()
        plan, sequences = self.scheduler.plan()
        known = [sequence for sequence in self.scheduler.running if sequence.logits is not None]
        if plan.rows or known:
            try:
                began += self._advance(plan, sequences, known)
            except Exception as error:
                log.exception("a step failed; its requests end with an error")
                for sequence in [s for request in {s.request.id for s in (*sequences, *known)}
                                 for s in self._sequences.get(request, ())]:
                    self._fail(sequence, f"internal error: {error}")
            self.stats.steps += 1
        events, self._events = self._events, []
        self.stats.last_overhead = time.perf_counter() - began
        return events

    def check(self) -> None:
        """Assert the cache's accounts, and that nothing is leased when nothing is running."""
        self.runtime.cache.check()
        if not self._sequences:
            assert not self.scheduler.running and not self.scheduler.waiting, "the queues hold finished sequences"
            assert self.runtime.cache.at_rest, "a finished sequence still has a lease"

    def close(self) -> None:
        """Wait until the cache's tiers have everything; the engine must not be used afterwards."""
        self.runtime.cache.close()

    def _advance(self, plan: Plan, sequences: list[Sequence], known: list[Sequence]) -> float:
        """Run the plan, and let the sequences whose logits the cache knew draw with it; returns the seconds spent in
        the model's forward."""
        ready, spent, rows = [], 0.0, []
        if plan.rows:
            batch = build(plan, self.runtime.cache.storage.device)
            started = time.perf_counter()
            rows.append(self.runtime.run(batch))
            spent = time.perf_counter() - started
        for row, sequence in zip(plan.rows, sequences, strict=True):
            assert sequence.lease is not None
            self.runtime.cache.commit(sequence.lease, row.tokens)
            self.stats.prompt_tokens += max(0, min(len(sequence.request.prompt) - row.done, len(row.tokens)))
            if row.logits:
                ready.append(sequence)
        for sequence in known:
            rows.append(sequence.logits[None])
            sequence.logits = None
            ready.append(sequence)
        if ready:
            self._choose(ready, rows[0] if len(rows) == 1 else torch.cat(rows))
        return spent

    @torch.inference_mode()
    def _choose(self, ready: list[Sequence], logits: Tensor) -> None:
        """Draw the next token of every sequence that is ready; at the end of a prompt, of all its choices."""
        drawing, rows = [], []
        for row, sequence in enumerate(ready):
            choices = [sequence, *self._siblings(sequence)]
            drawing += choices
            rows += [row] * len(choices)
        # a draw may write into the logits
        ends = {sequence: logits[row].clone() for row, sequence in enumerate(ready) if sequence.emits_end}
        if len(drawing) > len(ready):
            logits = logits[rows]
        sampled = self.runtime.decoder.ops.sample(logits, sampling_of(drawing, logits.device))
        healthy, tokens = sampled.healthy.tolist(), sampled.tokens.tolist()
        for index, sequence in enumerate(drawing):
            if not healthy[index]:
                self._fail(sequence, _SICK)
                continue
            try:
                if sequence.lease and sequence.lease.emitting:
                    self.runtime.cache.keep_emitted(sequence.lease, ends.get(sequence))
                self._take(sequence, tokens[index], sampled, index)
            except Exception as error:
                log.exception("a request's own matcher failed; the request ends with an error")
                self._fail(sequence, f"internal error: {error}")

    def _siblings(self, sequence: Sequence) -> list[Sequence]:
        """The other choices of a request whose prompt has just been processed; they fork its end when they run."""
        count = sequence.sampling.n - 1
        if sequence.choice or sequence.generated or not count:
            return []
        assert sequence.lease is not None
        checkpoint = self.runtime.cache.checkpoint(sequence.lease)
        origin = Origin(checkpoint, count) if checkpoint else None
        siblings = [self._sequence(sequence.request, choice, sequence.seed, origin) for choice in range(1, count + 1)]
        self._sequences[sequence.request.id] += siblings
        for sibling in siblings:
            self.scheduler.add(sibling)
        return siblings

    def _take(self, sequence: Sequence, token: int, sampled: Sampled, row: int) -> None:
        if sequence.sampling.max_tokens == 0:
            sequence.finish = "length"
            self._end(sequence)
            return
        finish = sequence.append(token)
        self.stats.generated_tokens += 1
        self.meter.token(sequence)
        self._events.append(TokenOut(sequence.request.id, sequence.choice, token,
                                     logprobs_of(sampled, row, sequence.sampling.logprobs), finish,
                                     sequence.usage if finish else None))
        if finish:
            self._forget(sequence)

    def _fail(self, sequence: Sequence, message: str) -> None:
        self.stats.failed += 1
        sequence.finish = "error"
        self._end(sequence, message)

    def _end(self, sequence: Sequence, error: str | None = None) -> None:
        """Finish a sequence without a token."""
        request, choices = sequence.request, [sequence.choice]
        if not sequence.generated and len(self._sequences[request.id]) == 1:
            # the other choices, which would have forked the end of this prompt, end with it
            choices = list(range(sequence.choice, request.sampling.n))
        for choice in choices:
            self._events.append(TokenOut(request.id, choice, None, None, sequence.finish, sequence.usage, error))
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        # the state of a sequence that has drawn a token is known to be sound
        self.scheduler.remove(sequence, keep=sequence.finish != "error" and sequence.generated > 0)
        self.stats.finished += 1
        self.stats.reused_tokens += sequence.cached
        group = self._sequences[sequence.request.id]
        group.remove(sequence)
        if not group:
            del self._sequences[sequence.request.id]

    def _sequence(self, request: Request, choice: int, seed: int, origin: Origin | None = None) -> Sequence:
        params, prompt = request.sampling, request.prompt
        limit = self.max_context
        if params.max_tokens is not None:
            limit = min(limit, len(prompt) + params.max_tokens)
        eos = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos())
        boundaries = distinct(request.boundaries, len(prompt))
        wanted = kept_positions(len(prompt), boundaries, self._spacing) if not choice else ()
        return Sequence(request, choice, params, seed, eos, limit, list(prompt),
                        request.matcher() if request.matcher else None, origin=origin, boundaries=boundaries,
                        wanted=wanted)

    def _eos(self) -> frozenset[int]:
        return frozenset(self.runtime.generation.eos_token_ids) | frozenset(self.runtime.config.eos_token_ids)

    def _defaults(self) -> Mapping[str, Any]:
        return self.runtime.generation.sampling()

    def _check(self, request: Request) -> None:
        vocabulary = self.runtime.config.vocab_size
        if request.id in self._sequences:
            raise RequestError(f"a request with id {request.id!r} is already running", "id")
        if not request.prompt:
            raise RequestError("the prompt is empty: give at least one token", "prompt")
        if not all(0 <= token < vocabulary for token in request.prompt):
            raise RequestError(f"the prompt has token ids outside of 0 .. {vocabulary - 1}", "prompt")
        if len(request.prompt) >= self.max_context:
            raise RequestError(f"the prompt has {len(request.prompt)} tokens and the context holds {self.max_context}, "
                               "answer included: shorten it, or raise --max-context", "prompt")
        foreign = [t for t in (*request.sampling.logit_bias, *request.sampling.stop_token_ids) if t >= vocabulary]
        if foreign:
            raise RequestError(f"token id {foreign[0]} is outside of the vocabulary (0 .. {vocabulary - 1})",
                               "logit_bias" if foreign[0] in request.sampling.logit_bias else "stop_token_ids")

