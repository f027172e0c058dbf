"""What becomes of those that run where a step fails, or what the cache was to do to its pools (L8)."""

from __future__ import annotations

import logging
from collections.abc import Callable

from deltic.engine.scheduler import Scheduler
from deltic.engine.step_plan import StepPlan
from deltic.ops.memory import is_shortage
from deltic.runner.launch import InFlight
from deltic.runner.model import Model
from deltic.spec_decode.controller import SpeculationController

log = logging.getLogger("deltic")


Fail = Callable[[str, str], None]
"""Ends a request, by its id, with an error of this text."""


class Failures:
    """Those of one engine."""

    def __init__(self, runtime: Model, scheduler: Scheduler, speculator: SpeculationController) -> None:
        self._runtime, self._scheduler, self._speculator = runtime, scheduler, speculator

    def lose(self, flight: InFlight, error: Exception, fail: Fail) -> None:
        """The step has raised this error: the requests in it end. Where memory ran out only the one that took most of
        it; what the step has done for the others is not known, so that they read what they have again."""
        live = [share for share in flight.scheduled if share.live]
        if is_shortage(error) and live:
            log.error("a step of %d tokens finds no memory; the request that has most of them ends with an error",
                      sum(share.tokens for share in live), exc_info=error)
            largest = max(live, key=lambda share: share.tokens)
            lost, message = {largest.sequence.request.id}, (
                f"there is no memory for a step with {largest.tokens} tokens of this request: let the server have a "
                "smaller `token_budget`, `memory` or `gpu_memory_utilization`")
        else:
            log.error("a step failed; its requests end with an error", exc_info=error)
            lost, message = {share.sequence.request.id for share in live}, f"internal error: {error}"
        for request in lost:
            fail(request, message)
        for share in live:
            if share.live:
                self._speculator.forget(share.sequence)
                self._scheduler.start_over(share.sequence)
        self.recover()

    def end_refused(self, fail: Fail) -> None:
        """The requests end that could not be admitted."""
        while self._scheduler.failed:
            sequence, error = self._scheduler.failed.pop()
            log.error("a request could not be admitted and ends with an error", exc_info=error)
            fail(sequence.request.id, f"internal error: {error}")

    def flush(self) -> None:
        """Have all done now that is to be done to the pools."""
        try:
            self._runtime.cache.operations.flush()
        except Exception:
            log.exception("an operation on the cache failed")
        self.recover()

    def gives_up(self, plan: StepPlan) -> bool:
        """Whether the plan is of no use, as the cache was lost while it was made."""
        if self._runtime.cache.operations.poisoned:
            self._runtime.cache.pools.forget(plan.operations)
        return self._runtime.cache.operations.poisoned

    def recover(self) -> None:
        """Of a cache that is lost nothing is used again: all that run read anew what they have."""
        if not self._runtime.cache.operations.poisoned:
            return
        log.error("what the cache kept is given up, as an operation on it failed; all that run read their prompts anew")
        for sequence in self._scheduler.running:
            self._speculator.forget(sequence)
        self._scheduler.start_all_over()
        self._speculator.promise = None
        self._runtime.cache.reset()
