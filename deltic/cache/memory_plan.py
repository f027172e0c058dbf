"""How memory is split: pure functions, no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from deltic.errors import ConfigError
from deltic.params import PAGE

_MIN_SPACING = 1024
_MAX_KEPT = 1024
"""States that the prefix tree may keep: beyond that, looking for the one to give up takes longer than it saves."""
_ROWS = 16
"""The part of the budget that kept logits may take is one in so many."""


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """page_bytes, slot_bytes: cost of one unit.
    model_context: tokens the model was made for.
    max_batch: sequences that should run at once.
    max_context: tokens that one of them may have (None: the model's).
    row_bytes: cost of the logits that are kept with the end of a prompt.
    ahead: steps are launched while others are in flight, for which a sequence has two slots.
    """

    page_bytes: int
    slot_bytes: int
    model_context: int
    max_batch: int
    max_context: int | None = None
    row_bytes: int = 0
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """pages and slots to allocate, and the limits that they can honour.

    warnings: what was clamped, and why.
    rows: prompt ends whose logits are kept at the same time; None: as many as there are slots.
    """

    pages: int
    slots: int
    max_batch: int
    max_context: int
    warnings: tuple[str, ...] = field(default=())
    rows: int | None = None


def split_memory(budget: int, needs: MemoryNeeds) -> MemoryPlan:
    """Split a budget in bytes between K/V pages and state slots.

    The batch is clamped so that slots take at most half of the budget, then the context to the pages that remain;
    both with a warning instead of a refusal to start. One slot beyond the batch is for the prompt end that several
    choices fork; of what is left beside one whole context, half goes to slots for states worth keeping, the rest to
    pages: for whole contexts of all that run, and for the K/V in which each kept state lies. Logits of prompts' ends
    get a sixteenth, and room for one at least.
    """
    context, own = needs.max_context or needs.model_context, 1 + needs.ahead
    smallest = needs.page_bytes + (own + 1) * needs.slot_bytes + needs.row_bytes
    if budget < smallest:
        raise ConfigError(f"memory: {_mib(budget)} cannot hold one sequence, which takes at least {_mib(smallest)}; "
                          "raise `memory`", "memory")
    rows = _MAX_KEPT
    if needs.row_bytes:
        rows = 1 + min(rows - 1, budget // _ROWS // needs.row_bytes, (budget - smallest) // needs.row_bytes)
    budget -= rows * needs.row_bytes
    batch, warnings = needs.max_batch, []
    if needs.slot_bytes:
        batch = max(1, min(batch, (budget // 2 // needs.slot_bytes - 1) // own))
    if context > needs.model_context:
        warnings.append(f"max_context {context} is more than the {needs.model_context} that the model is made for")
    if batch < needs.max_batch:
        warnings.append(f"max_batch is {batch} instead of {needs.max_batch}: a state slot takes "
                        f"{_mib(needs.slot_bytes)} and the cache has {_mib(budget)} (raise `memory`)")
    slots = own * batch + 1
    kept = _kept_slots(budget, needs, slots, context)
    slots += kept
    pages = (budget - slots * needs.slot_bytes) // needs.page_bytes if needs.page_bytes else 1 << 20
    wanted = -(-context // PAGE)
    if pages < wanted:
        context = pages * PAGE
        warnings.append(f"max_context is {context} instead of {needs.max_context or needs.model_context}: that is "
                        f"what {_mib(budget)} of cache hold (raise `memory`)")
    most = batch * wanted + kept * _pages_of_a_state(needs)
    return MemoryPlan(min(pages, most), slots, batch, context, tuple(warnings), min(rows, slots))


def enough(needs: MemoryNeeds, tokens: int) -> int:
    """A budget that `split_memory` can make room of for a whole context, so many more tokens, and every sequence."""
    pages = (-(-(needs.max_context or needs.model_context) // PAGE) + -(-tokens // PAGE)) * needs.page_bytes
    slots = ((1 + needs.ahead) * needs.max_batch + 1) * needs.slot_bytes
    # half of what is left beside the slots and a context goes to states, where there are any
    shared = max(2 * slots, slots + 2 * pages) if needs.slot_bytes else pages
    return shared * _ROWS // (_ROWS - 1) + 2 * needs.row_bytes + needs.page_bytes


def _kept_slots(budget: int, needs: MemoryNeeds, slots: int, context: int) -> int:
    left = budget - slots * needs.slot_bytes - -(-context // PAGE) * needs.page_bytes
    return max(0, min(_MAX_KEPT, left // 2 // needs.slot_bytes)) if needs.slot_bytes else _MAX_KEPT


def _pages_of_a_state(needs: MemoryNeeds) -> int:
    """Of the K/V from one kept state to the next."""
    return grid_spacing(needs.slot_bytes * PAGE / needs.page_bytes) // PAGE if needs.page_bytes else 0


def distinct(boundaries: Iterable[int], prompt: int) -> tuple[int, ...]:
    """Those boundaries of a prompt of so many tokens that are worth a state: less than a page after another one, the
    tokens in between are cheaper."""
    found: list[int] = []
    for position in sorted(set(boundaries)):
        if 0 < position <= prompt and (not found or position >= found[-1] + PAGE):
            found.append(position)
    return tuple(found)


def kept_positions(prompt: int, boundaries: Iterable[int], spacing: int) -> tuple[int, ...]:
    """Where the state is worth keeping while a prompt of so many tokens is read, ascending.

    Its boundaries, which following prompts are expected to share; its end, for the same prompt again; and, so that an
    edit in the middle of a long text does not cost all of it, a sparse grid of `spacing` tokens.
    """
    grid = range(spacing, prompt - spacing // 2, spacing)
    return tuple(sorted({*boundaries, *grid, prompt}))


def grid_spacing(slot_tokens: float) -> int:
    """Tokens between grid positions: a state then costs about as much memory as the K/V that it lies in."""
    return max(_MIN_SPACING, round(slot_tokens / PAGE) * PAGE)


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB"
