"""Warm-up steps with prompts, which run before a server is ready, so that no request pays for first-use costs.

Libraries load a kernel at its first launch and choose kernels by the number of tokens; cuDNN builds a kernel for each
attention length; torch allocates the working memory of a step. Library handles and cuDNN's kernels belong to a thread,
so these steps must run in the engine's thread.
"""

from __future__ import annotations

from collections.abc import Iterator

from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.params import PAGE

_CONTEXTS = (1 << 10, 1 << 13, 1 << 15)
"""Total lengths, in tokens, of prompts that begin with cached tokens."""
_TURNS = (16, 128, 1024)
"""Numbers of new tokens in these prompts."""
_BESIDE = 512
"""Number of tokens of a prompt that shares its step with decode rows."""
_FEW_EXPERTS_SIZES = (2, 512)
"""Prompt sizes for a model that reads weights from host memory in each step."""

Part = tuple[int, int]
"""Numbers of a row's cached tokens and of its tokens in the step."""


def prompt_plans(budget: int, max_context: int, max_batch: int, few: bool = False, page: int = 0
                 ) -> Iterator[StepPlan]:
    """Yields steps with prompts of every size, with several prompts, with prompts that begin with cached tokens, and
    with prompts and decode rows. The first and the last steps have the largest prompts. Every step writes to one
    page and to slot 0. few: yield two sizes only, for a model with slow steps."""
    most = min(budget, max_context - 1)
    sizes = [size for size in _FEW_EXPERTS_SIZES if size <= most] if few else sizes_up_to(most)
    for size in reversed(sizes):
        yield _plan([(0, size)], page)
    if few:
        return
    for size in (256, most):
        if 16 <= size <= most:
            yield _plan([(0, size // 4)] * 4, page)
    for context in _CONTEXTS:
        for tokens in _TURNS:
            if context <= max_context and tokens < min(context, budget):
                yield _plan([(context - tokens, tokens)], page)
    for answers in sorted({1, min(16, max_batch - 1), max_batch - 1} - {0}):
        tokens = min(_BESIDE, most, budget - answers)
        if tokens > 1:
            yield _plan([*[(min(_CONTEXTS[0], max_context) - 1, 1)] * answers, (0, tokens)], page)
    for size in (most, most - most // 32):  # the steps in between have split the largest blocks of memory
        if size > 1:
            yield _plan([(0, size)], page)


def sizes_up_to(most: int) -> list[int]:
    """Returns powers of two, 1.5 times these, and the largest size itself: 2, 3, 4, 6, 8, 12 ... most."""
    powers = [1 << power for power in range(1, most.bit_length())]
    return sorted({most, *(size for power in powers for size in (power, power + power // 2) if size <= most)} - {0, 1})


def _plan(parts: list[Part], page: int) -> StepPlan:
    return StepPlan(tuple(_row(done, done + tokens, page) for done, tokens in parts))


def _row(done: int, end: int, page: int) -> PlannedRow:
    checkpoints = ((end, 0),) if end - done > 1 else ()
    return PlannedRow((0,) * (end - done), done, (page,) * -(-end // PAGE), 0, 1, checkpoints=checkpoints)
