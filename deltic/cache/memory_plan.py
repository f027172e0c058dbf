"""Splits memory between K/V pages, state slots and delta logs, and chooses the positions of checkpoints. No torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from deltic.cache.frames import FrameLayout
from deltic.errors import ConfigError
from deltic.params import PAGE

_MIN_SPACING = 1024
_MAX_KEPT = 1024
"""Maximum number of checkpoints in the prefix tree: with more, the search for a victim costs more than they save."""
_ROWS = 16
"""Logits may take one in this many bytes of the budget."""
_EXTRA = 16
"""There is one extra slot per this many sequences."""
_LEAST_PAGES = 512 // PAGE
"""Minimum number of pages per sequence. With fewer, a further sequence would only wait for the K/V of others."""


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """page_bytes, slot_bytes, log_bytes: bytes of a page, a slot and a state delta log (0 if sequences have no logs).
    model_context: maximum context length of the model, in tokens.
    max_batch: maximum number of sequences that run at once.
    max_context: maximum number of tokens of a sequence (None: that of the model).
    row_bytes: bytes of the logits of one token.
    keeps: True if prefixes are kept for later sequences.
    context_first: the user asked for this context length, but not for the number of sequences.
    option: name of the option that raises the budget.
    layout: how pages and slots share memory, if they do.
    """

    page_bytes: int
    slot_bytes: int
    model_context: int
    max_batch: int
    max_context: int | None = None
    row_bytes: int = 0
    log_bytes: int = 0
    keeps: bool = True
    context_first: bool = False
    option: str = "memory"
    layout: FrameLayout | None = None

    @property
    def context_pages(self) -> int:
        return -(-(self.max_context or self.model_context) // PAGE)

    @property
    def sequence_bytes(self) -> int:
        """Bytes of a running sequence, without its K/V."""
        return self.slot_bytes + self.log_bytes

    @property
    def smallest_bytes(self) -> int:
        """Minimum number of bytes to run one sequence."""
        if self.layout:
            return 3 * self.layout.unit + self.log_bytes + self.row_bytes
        return self.page_bytes + self.sequence_bytes + self.slot_bytes + self.row_bytes

    @property
    def least_bytes(self) -> int:
        """Minimum bytes of K/V for each further sequence while one sequence fills a whole context."""
        return min(self.context_pages, _LEAST_PAGES) * self.page_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Numbers of units to allocate, and the limits that they allow.

    delta_logs: number of state delta logs: one for each sequence, or none.
    layout: how pages and slots share memory, if they do; then `pages` and `slots` are the maximum of each.
    warnings: limits that were lowered, and why.
    rows: number of prompt ends that may be kept with their logits; None: the number of slots.
    notes: descriptions of how the memory is divided.
    """

    pages: int
    slots: int
    max_batch: int
    max_context: int
    warnings: tuple[str, ...] = field(default=())
    rows: int | None = None
    delta_logs: int = 0
    notes: tuple[str, ...] = field(default=())
    layout: FrameLayout | None = None


def split_memory(budget: int, needs: MemoryNeeds) -> MemoryPlan:
    """Splits a budget in bytes between K/V pages, state slots and state delta logs.

    1. Logits get up to a sixteenth of the budget, and room for at least one row.
    2. Up to `max_batch` sequences get slots and logs, as long as these take at most half of the budget, or leave one
       whole context and a few pages for each other sequence. If the context has priority (`context_first`), the half
       must also leave a whole context; otherwise slots and logs take at most an eighth. `max_batch` is lowered to the
       number that fits, with a warning. `extra_slots` adds a few slots.
    3. One whole context gets pages; `max_context` is lowered to fit, with a warning.
    4. Half of the remaining memory goes to slots for checkpoints, half to pages: for whole contexts of all sequences
       and for the K/V between checkpoints. If no prefixes are kept, all of it goes to pages.

    If pages and slots share memory, only logits and logs get fixed parts, see `_share_memory`.
    """
    context, smallest = needs.max_context or needs.model_context, needs.smallest_bytes
    if budget < smallest:
        raise ConfigError(f"{needs.option}: {_mib(budget)} cannot hold one sequence, which takes at least "
                          f"{_mib(smallest)}; raise `{needs.option}`", needs.option)
    rows = _MAX_KEPT
    if needs.row_bytes:
        rows = 1 + min(rows - 1, budget // _ROWS // needs.row_bytes, (budget - smallest) // needs.row_bytes)
    budget -= rows * needs.row_bytes
    if needs.layout:
        plan = _share_memory(budget, needs, needs.layout, rows)
        spare = rows - (plan.rows or 0)  # rows that exceed the number of slots
        return _share_memory(budget + spare * needs.row_bytes, needs, needs.layout, rows - spare) if spare else plan
    batch = _batch(budget, needs)
    warnings = _batch_warnings(budget, needs, batch)
    logs = batch if needs.log_bytes else 0
    budget -= logs * needs.log_bytes
    slots = batch + extra_slots(batch)
    kept = _kept_slots(budget - (batch - 1) * needs.least_bytes, needs, slots)
    slots += kept
    budget += max(rows - slots, 0) * needs.row_bytes
    pages = (budget - slots * needs.slot_bytes) // needs.page_bytes if needs.page_bytes else 1 << 20
    if pages < needs.context_pages:
        context = pages * PAGE
        warnings.append(_context_warning(budget, needs, context))
    most = batch * needs.context_pages + kept * _pages_between_checkpoints(needs)
    return MemoryPlan(min(pages, most), slots, batch, context, tuple(warnings), min(rows, slots), logs)


def _share_memory(budget: int, needs: MemoryNeeds, layout: FrameLayout, rows: int) -> MemoryPlan:
    """Plans frames: each becomes a slot or pages at run time. budget: bytes, without the memory of `rows` logits.

    1. `max_batch` is the number of sequences that fit with one page each. If the context has priority, it is the larger
       of two numbers: the sequences whose delta logs fit after the context, and those that fit in an eighth of the
       budget. Fewer sequences run while contexts are longer.
    2. `max_context` is the number of tokens that fit after all delta logs and one slot.
    3. A frame that may become a slot needs additional memory outside of the frame (`FrameLayout.side`). There are as
       many such frames as sequences, extra slots and checkpoints.
    """
    counts, sequence = range(1, needs.max_batch + 1), layout.unit + needs.log_bytes
    batch = bisect_right(counts, budget, key=lambda count: count * sequence + layout.frames_for(count) * layout.unit)
    if needs.context_first:
        whole = (1 + layout.frames_for(needs.context_pages)) * layout.unit
        batch = min(batch, max(bisect_right(counts, budget - whole, key=lambda count: count * needs.log_bytes),
                               bisect_right(counts, budget // 8, key=lambda count: count * sequence + layout.unit)))
    batch = max(1, batch)
    warnings = _batch_warnings(budget, needs, batch)
    logs = batch if needs.log_bytes else 0
    budget -= logs * needs.log_bytes
    kept = _MAX_KEPT if needs.keeps else 0
    slots = batch + extra_slots(batch) + kept
    pages = batch * needs.context_pages + kept * _pages_between_checkpoints(needs)
    frames = budget // layout.unit
    if frames > slots:
        frames = min(slots + layout.frames_for(pages), (budget - slots * layout.side) // layout.size)
    context, fits = needs.max_context or needs.model_context, (frames - 1) * layout.pages
    if fits < needs.context_pages:
        context = fits * PAGE
        warnings.append(_context_warning(budget, needs, context))
    slots = min(frames, slots)
    return MemoryPlan(frames * layout.pages, slots, batch, context, tuple(warnings), min(rows, slots), logs,
                      layout=layout)


def _batch_warnings(budget: int, needs: MemoryNeeds, batch: int) -> list[str]:
    warnings, context = list[str](), needs.max_context or 0
    if context > needs.model_context:
        warnings.append(f"max_context {context} is more than the {needs.model_context} that the model is made for")
    if batch < needs.max_batch:
        warnings.append(f"max_batch is {batch} instead of {needs.max_batch}: a sequence takes "
                        f"{_mib(needs.sequence_bytes)} without its K/V, and the cache has {_mib(budget)} (raise "
                        f"`{needs.option}`)")
    return warnings


def _context_warning(budget: int, needs: MemoryNeeds, context: int) -> str:
    return (f"max_context is {context} instead of {needs.max_context or needs.model_context}: that is what "
            f"{_mib(budget)} of cache hold (raise `{needs.option}`)")


def enough(needs: MemoryNeeds, tokens: int) -> int:
    """Returns a budget in bytes that suffices for all sequences, a whole context and `tokens` further tokens."""
    batch = needs.max_batch
    if needs.layout:
        pages = batch * min(needs.context_pages, _LEAST_PAGES) + needs.context_pages + -(-tokens // PAGE)
        frames = batch + extra_slots(batch) + needs.layout.frames_for(pages)
        size = frames * needs.layout.unit + batch * needs.log_bytes
        return size * _ROWS // (_ROWS - 1) + 2 * needs.row_bytes + needs.layout.unit
    sequences = batch * (needs.sequence_bytes + needs.least_bytes) + extra_slots(batch) * needs.slot_bytes
    # half of the remaining memory goes to slots for checkpoints
    pages = (needs.context_pages + 2 * -(-tokens // PAGE)) * needs.page_bytes
    return (sequences + pages) * _ROWS // (_ROWS - 1) + 2 * needs.row_bytes + needs.page_bytes


def _batch(budget: int, needs: MemoryNeeds) -> int:
    """Returns the number of sequences that may run at once."""
    def states(batch: int) -> int:
        return batch * needs.sequence_bytes + extra_slots(batch) * needs.slot_bytes

    def with_kv(batch: int) -> int:
        return states(batch) + (batch - 1) * needs.least_bytes

    if not needs.slot_bytes:
        return needs.max_batch
    counts, beside_context = range(1, needs.max_batch + 1), budget - needs.context_pages * needs.page_bytes
    most = bisect_right(counts, budget // 2, key=states)
    if needs.context_first:
        most = max(min(most, bisect_right(counts, beside_context, key=states)),
                   bisect_right(counts, budget // 8, key=states))
    return max(1, most, bisect_right(counts, beside_context, key=with_kv))


def extra_slots(batch: int) -> int:
    """Returns the number of slots in addition to one for each of `batch` sequences: for the prompt end that several
    choices fork, and for sequences that are admitted while the ones that they replace are still in flight."""
    return 1 + batch // _EXTRA


def _kept_slots(budget: int, needs: MemoryNeeds, slots: int) -> int:
    if not needs.keeps:
        return 0
    if not needs.slot_bytes:
        return _MAX_KEPT
    left = budget - slots * needs.slot_bytes - needs.context_pages * needs.page_bytes
    return max(0, min(_MAX_KEPT, left // 2 // needs.slot_bytes))


def _pages_between_checkpoints(needs: MemoryNeeds) -> int:
    if not needs.page_bytes:
        return 0
    return grid_spacing(needs.slot_bytes * PAGE / needs.page_bytes) // PAGE


def distinct(boundaries: Iterable[int], prompt: int) -> tuple[int, ...]:
    """Returns the boundaries within a prompt of `prompt` tokens that are at least a page apart: computing fewer tokens
    again is cheaper than keeping a state."""
    found: list[int] = []
    for position in sorted(set(boundaries)):
        if 0 < position <= prompt and (not found or position >= found[-1] + PAGE):
            found.append(position)
    return tuple(found)


def kept_positions(prompt: int, boundaries: Iterable[int], spacing: int) -> tuple[int, ...]:
    """Returns the positions of checkpoints in a prompt of `prompt` tokens, ascending: its boundaries, which later
    prompts are likely to share; its end; and a grid of `spacing` tokens, for edits in the middle of long texts."""
    grid = range(spacing, prompt - spacing // 2, spacing)
    return tuple(sorted({*boundaries, *grid, prompt}))


def grid_spacing(slot_tokens: float) -> int:
    """Returns the number of tokens between grid positions: their K/V takes about as much memory as a state."""
    return max(_MIN_SPACING, round(slot_tokens / PAGE) * PAGE)


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB"
