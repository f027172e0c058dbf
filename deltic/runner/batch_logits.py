"""The logits of many prompts at once, each from its own start."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deltic.cache.handles import SequenceCache
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.errors import RequestError
from deltic.runner.input_batch import build
from deltic.runner.model import Model


def batch_logits(model: Model, prompts: Sequence[Sequence[int]], all_logits: bool, check: Callable[[Tensor], None]
                 ) -> list[Tensor]:
    """Of each prompt the float32 logits of its last token [V], or of all [n, V]. As many prompts are read together as
    there is room for; what other leases have stays as it is. check: is given the logits of each step's rows."""
    cache, parts = model.cache, [list[Tensor]() for _ in prompts]
    waiting, running = deque(range(len(prompts))), dict[int, SequenceCache]()
    try:
        while waiting or running:
            while waiting and (lease := _admit(model, prompts[waiting[0]])):
                running[waiting.popleft()] = lease
            if not running:
                raise RequestError(f"no room for a prompt of {len(prompts[waiting[0]])} tokens: drop snapshots, or "
                                   "raise memory", "rows")
            rows = _rows(running, prompts, model.options.token_budget)
            cache.operations.flush()
            batch = build(StepPlan(tuple(rows.values())), model.device, all_logits, model.mtp_runner is not None,
                          verified=model.verifies)
            sizes = [len(row.tokens) if all_logits else 1 for row in rows.values()]
            for (place, row), logits in zip(rows.items(), model.run(batch).clone().split(sizes), strict=True):
                check(logits)
                parts[place].append(logits)
                cache.commit(running[place], len(row.tokens))
                if running[place].done == len(prompts[place]):
                    cache.release(running.pop(place))
    finally:
        for lease in running.values():
            cache.release(lease)
    return [torch.cat(found) if all_logits else found[-1][0] for found in parts]


def _admit(model: Model, prompt: Sequence[int]) -> SequenceCache | None:
    lease = model.cache.admit()
    if lease is None:
        return None
    lease.keys = [*prompt]
    if model.cache.reserve(lease, len(prompt)) < len(prompt):
        model.cache.release(lease)
        return None
    return lease


def _rows(running: dict[int, SequenceCache], prompts: Sequence[Sequence[int]], budget: int) -> dict[int, PlannedRow]:
    """The next tokens of those that are read, as many as a step takes; those of single tokens first, by slot."""
    rows = dict[int, PlannedRow]()
    for place, lease in running.items():
        tokens = tuple(prompts[place][lease.done:lease.done + budget])
        if tokens:
            rows[place] = PlannedRow(tokens, lease.done, lease.pages, lease.slot, 1)
            budget -= len(tokens)
    return dict(sorted(rows.items(), key=lambda item: (len(item[1].tokens) > 1, item[1].slot)))
