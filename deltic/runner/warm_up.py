"""The prompt steps that run before a server is ready, so that no request pays for what is made at first use.

Libraries load a kernel when it is first launched and choose kernels by the number of tokens; cuDNN builds one for each
length of an attention; torch allocates the working memory of a step. Handles and cuDNN's kernels belong to a thread:
the steps must run in the engine's.
"""

from __future__ import annotations

from collections.abc import Iterator

from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.params import PAGE

_CONTEXTS = (1 << 10, 1 << 13, 1 << 15)
"""Tokens up to the end of prompts that begin behind cached tokens."""
_TURNS = (16, 128, 1024)
"""Their new tokens."""
_BESIDE = 512
"""Tokens of a prompt beside answers."""
_FEW_EXPERTS_SIZES = (2, 512)
"""Sizes for a model whose experts are read from the host's memory in each step."""

Part = tuple[int, int]
"""A row's cached tokens, and its tokens in the step."""


def prompt_plans(budget: int, max_context: int, max_batch: int, few: bool = False, page: int = 0
                 ) -> Iterator[StepPlan]:
    """Yields steps with prompts of every size, with several prompts, with prompts behind cached tokens, and with
    prompts next to answers. The first and the last steps have the largest prompts. Every step writes to one page and
    to slot 0. few: yields two sizes only, for a model with slow steps."""
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
    """Powers of two, their halves more, and the largest size itself: 2, 3, 4, 6, 8, 12 ... most."""
    powers = [1 << power for power in range(1, most.bit_length())]
    return sorted({most, *(size for power in powers for size in (power, power + power // 2) if size <= most)} - {0, 1})


def _plan(parts: list[Part], page: int) -> StepPlan:
    return StepPlan(tuple(_row(done, done + tokens, page) for done, tokens in parts))


def _row(done: int, end: int, page: int) -> PlannedRow:
    checkpoints = ((end, 0),) if end - done > 1 else ()
    return PlannedRow((0,) * (end - done), done, (page,) * -(-end // PAGE), 0, 1, checkpoints=checkpoints)
