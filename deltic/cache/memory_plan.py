"""Splits memory between K/V pages and state slots, and chooses the positions of checkpoints. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from deltic.errors import ConfigError
from deltic.params import PAGE

_MIN_SPACING = 1024
_MAX_KEPT = 1024
"""Checkpoints in the prefix tree: with more, the search for one to evict costs more than they save."""
_ROWS = 16
"""Logits may take one in so many bytes of the budget."""


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """page_bytes, slot_bytes: cost of a unit.
    model_context: tokens that the model was made for.
    max_batch: sequences that run at once.
    max_context: tokens of a sequence (None: the model's).
    row_bytes: cost of the logits of one token.
    ahead: steps are scheduled asynchronously, so that a sequence needs two slots.
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
    """Pages and slots to allocate, and the limits that they allow.

    warnings: limits that were lowered, and why.
    rows: prompt ends that may be kept with logits; None: as many as there are slots.
    """

    pages: int
    slots: int
    max_batch: int
    max_context: int
    warnings: tuple[str, ...] = field(default=())
    rows: int | None = None


def split_memory(budget: int, needs: MemoryNeeds) -> MemoryPlan:
    """Splits a budget in bytes between K/V pages and state slots.

    1. Logits get a sixteenth of the budget, and room for one row at least.
    2. Slots get at most half of the rest: `max_batch` is lowered to fit, with a warning. One more slot is for the
       prompt end that several choices fork.
    3. One whole context gets pages; `max_context` is lowered to fit, with a warning.
    4. Of what remains, half goes to slots for checkpoints, half to pages: for whole contexts of all sequences, and for
       the K/V between checkpoints.
    """
    context = needs.max_context or needs.model_context
    own = 1 + needs.ahead
    smallest = needs.page_bytes + (own + 1) * needs.slot_bytes + needs.row_bytes
    if budget < smallest:
        raise ConfigError(f"memory: {_mib(budget)} cannot hold one sequence, which takes at least {_mib(smallest)}; "
                          "raise `memory`", "memory")
    rows = _MAX_KEPT
    if needs.row_bytes:
        rows = 1 + min(rows - 1, budget // _ROWS // needs.row_bytes, (budget - smallest) // needs.row_bytes)
    budget -= rows * needs.row_bytes
    batch = needs.max_batch
    warnings = list[str]()
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
    most = batch * wanted + kept * _pages_between_checkpoints(needs)
    return MemoryPlan(min(pages, most), slots, batch, context, tuple(warnings), min(rows, slots))


def enough(needs: MemoryNeeds, tokens: int) -> int:
    """Returns a budget that suffices for all sequences, a whole context and so many more tokens."""
    pages = (-(-(needs.max_context or needs.model_context) // PAGE) + -(-tokens // PAGE)) * needs.page_bytes
    slots = ((1 + needs.ahead) * needs.max_batch + 1) * needs.slot_bytes
    # half of what remains goes to slots for checkpoints
    shared = max(2 * slots, slots + 2 * pages) if needs.slot_bytes else pages
    return shared * _ROWS // (_ROWS - 1) + 2 * needs.row_bytes + needs.page_bytes


def _kept_slots(budget: int, needs: MemoryNeeds, slots: int, context: int) -> int:
    if not needs.slot_bytes:
        return _MAX_KEPT
    left = budget - slots * needs.slot_bytes - -(-context // PAGE) * needs.page_bytes
    return max(0, min(_MAX_KEPT, left // 2 // needs.slot_bytes))


def _pages_between_checkpoints(needs: MemoryNeeds) -> int:
    if not needs.page_bytes:
        return 0
    return grid_spacing(needs.slot_bytes * PAGE / needs.page_bytes) // PAGE


def distinct(boundaries: Iterable[int], prompt: int) -> tuple[int, ...]:
    """Returns the boundaries in a prompt of so many tokens that are at least a page apart: between closer ones tokens
    are cheaper than a state."""
    found: list[int] = []
    for position in sorted(set(boundaries)):
        if 0 < position <= prompt and (not found or position >= found[-1] + PAGE):
            found.append(position)
    return tuple(found)


def kept_positions(prompt: int, boundaries: Iterable[int], spacing: int) -> tuple[int, ...]:
    """Returns the positions of checkpoints in a prompt of so many tokens, ascending: its boundaries, which following
    prompts are likely to share; its end; and a grid of `spacing` tokens, for edits in the middle of long texts."""
    grid = range(spacing, prompt - spacing // 2, spacing)
    return tuple(sorted({*boundaries, *grid, prompt}))


def grid_spacing(slot_tokens: float) -> int:
    """Returns the tokens between grid positions, whose K/V costs about as much memory as a state."""
    return max(_MIN_SPACING, round(slot_tokens / PAGE) * PAGE)


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB"
