"""The logits of many independent prompts."""

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
    """Returns the float32 logits of each prompt's last token [V], or of all [n, V]. Batches as many prompts as there is
    room for. check: called with the logits of each row."""
    cache, parts = model.cache, [list[Tensor]() for _ in prompts]
    waiting, running = deque(range(len(prompts))), dict[int, SequenceCache]()
    try:
        while waiting or running:
            while waiting and (sequence_cache := _admit(model, prompts[waiting[0]])):
                running[waiting.popleft()] = sequence_cache
            if not running:
                raise RequestError(f"no room for a prompt of {len(prompts[waiting[0]])} tokens: drop snapshots, or "
                                   "raise memory", "rows")
            rows = _rows(running, prompts, model.options.token_budget)
            cache.operations.flush()
            batch = build(StepPlan(tuple(rows.values())), model.device, all_logits, model.mtp_runner is not None,
                          verified=model.capabilities.verifies)
            sizes = [len(row.tokens) if all_logits else 1 for row in rows.values()]
            for (place, row), logits in zip(rows.items(), model.run(batch).clone().split(sizes), strict=True):
                check(logits)
                parts[place].append(logits)
                cache.commit(running[place], len(row.tokens))
                if running[place].done == len(prompts[place]):
                    cache.release(running.pop(place))
    finally:
        for sequence_cache in running.values():
            cache.release(sequence_cache)
    return [torch.cat(found) if all_logits else found[-1][0] for found in parts]


def _admit(model: Model, prompt: Sequence[int]) -> SequenceCache | None:
    sequence_cache = model.cache.admit()
    if sequence_cache is None:
        return None
    sequence_cache.keys = [*prompt]
    if model.cache.reserve(sequence_cache, len(prompt)) < len(prompt):
        model.cache.release(sequence_cache)
        return None
    return sequence_cache


def _rows(running: dict[int, SequenceCache], prompts: Sequence[Sequence[int]], budget: int) -> dict[int, PlannedRow]:
    """The rows of the next step; those of single tokens first, by slot."""
    rows = dict[int, PlannedRow]()
    for place, sequence_cache in running.items():
        tokens = tuple(prompts[place][sequence_cache.done:sequence_cache.done + budget])
        if tokens:
            rows[place] = PlannedRow(tokens, sequence_cache.done, sequence_cache.pages, sequence_cache.slot, 1)
            budget -= len(tokens)
    return dict(sorted(rows.items(), key=lambda item: (len(item[1].tokens) > 1, item[1].slot)))
