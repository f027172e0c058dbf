"""Handles failures of an engine's steps, admissions and operations on the cache."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable

from deltic.engine.scheduler import Scheduler
from deltic.engine.step_plan import StepPlan
from deltic.ops.memory import is_shortage
from deltic.runner.launch import InFlight
from deltic.runner.model_runner import Model
from deltic.spec_decode.controller import SpeculationController

log = logging.getLogger("deltic")

Fail = Callable[[str, str], None]
"""Called with (request id, error message) to end a request."""
_SHORT_STEP = 256
"""A step with up to this number of tokens is not made shorter when memory runs out."""


class Failures:
    """Ends the requests of failed steps and keeps the others running."""

    def __init__(self, runtime: Model, scheduler: Scheduler, speculator: SpeculationController) -> None:
        self._runtime, self._scheduler, self._speculator = runtime, scheduler, speculator

    def lose(self, flight: InFlight, error: Exception, fail: Fail) -> None:
        """Ends the requests of a step that has raised this error. If memory ran out, it ends none, but waits for the
        copies of prefixes that the tiers are writing. Without such copies, steps are shorter from now on; if the step
        is short already, only its largest request ends. The other requests process their tokens again, because it is
        not known what the step has done for them."""
        live = [each for each in flight.scheduled if each.live]
        tokens, lost, message = sum(each.tokens for each in live), set[str](), ""
        if is_shortage(error) and self._drains_tiers():
            log.info("a step of %d tokens ran out of memory while prefixes were copied to the tiers; it is repeated",
                     tokens)
        elif is_shortage(error) and (most := min(self._scheduler.token_budget, tokens)) > _SHORT_STEP:
            self._scheduler.token_budget = max(_SHORT_STEP, most // 2)
            log.warning("a step of %d tokens ran out of memory; from now on steps have at most %d (`token_budget`)",
                        tokens, self._scheduler.token_budget, exc_info=error)
        elif is_shortage(error) and live:
            log.error("a step of %d tokens ran out of memory; its largest request ends with an error", tokens,
                      exc_info=error)
            largest = max(live, key=lambda each: each.tokens)
            lost, message = {largest.sequence.request.id}, (
                f"there is no memory for a step with {largest.tokens} tokens of this request: let the server have a "
                "smaller `token_budget` or `memory`, or a larger `gpu_memory`")
        else:
            log.error("a step failed; its requests end with an error", exc_info=error)
            lost, message = {each.sequence.request.id for each in live}, f"internal error: {error}"
        # the frames of the step refer to its tensors, and log handlers may keep the traceback
        traceback.clear_frames(error.__traceback__)
        for request in lost:
            fail(request, message)
        for each in live:
            if each.live:
                self._speculator.forget(each.sequence)
                self._scheduler.start_over(each.sequence)
        self.recover()

    def _drains_tiers(self) -> bool:
        """Waits until all tiers have written their queued items. Returns False if there were none."""
        drained = [tier.drain() for tier in self._runtime.cache.tiers]
        return any(drained)

    def end_refused(self, fail: Fail) -> None:
        """Ends the requests that could not be admitted."""
        while self._scheduler.failed:
            sequence, error = self._scheduler.failed.pop()
            log.error("a request could not be admitted and ends with an error", exc_info=error)
            fail(sequence.request.id, f"internal error: {error}")

    def flush(self) -> None:
        """Carries out all queued operations on the pools now."""
        try:
            self._runtime.cache.operations.flush()
        except Exception:
            log.exception("an operation on the cache failed")
        self.recover()

    def gives_up(self, plan: StepPlan) -> bool:
        """True if the plan must be dropped because the cache was poisoned while the plan was made."""
        if self._runtime.cache.operations.poisoned:
            self._runtime.cache.pools.forget(plan.operations)
        return self._runtime.cache.operations.poisoned

    def recover(self) -> None:
        """Empties a poisoned cache. All running sequences process their tokens again."""
        if not self._runtime.cache.operations.poisoned:
            return
        log.error("the cache is emptied because an operation on it failed; running requests process their prompts "
                  "again")
        for sequence in self._scheduler.running:
            self._speculator.forget(sequence)
        self._scheduler.start_all_over()
        self._speculator.pending = None
        self._runtime.cache.reset()
