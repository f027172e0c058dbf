"""A step as plain data: its rows with their tokens, and the operations on the cache's pools that precede them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from deltic.cache.handles import SequenceCache
from deltic.cache.operations import Operation, operation_of, plain
from deltic.params import Picture, Positions, ring_base

UNKNOWN = -1
"""Stands for a token that the host does not have yet."""


class ImageSpan(NamedTuple):
    """Image tokens of a row: `length` tokens from index `token` on use the image's embeddings from index `first` on."""

    token: int
    length: int
    digest: str
    first: int


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """The tokens of one sequence in a step, with cache indices done, done + 1, ... in these pages.

    pages: the list of the sequence's cache itself; it may grow. If pages move, operations before the step move them.
    slot: the slot of the state to read.
    logits: number of tokens, the last ones, that need logits.
    target: the slot of the state to write; None: `slot`.
    checkpoints: (position, slot) pairs: also write the state after `position` tokens to this slot.
    base: number of tokens in the slot's state; None: `done`. The updates of later tokens are in the delta log.
    delta_log: the sequence's unit in the pool of delta logs.
    append: append this step's updates to the delta log instead of writing the state.
    drafts: number of drafts; they are the last tokens.
    drawn: index of the draw in the step in flight that gives the row's only token.
    accepts: number of the sequence's drafts in the step in flight. The row begins at `done` plus the number of right
        ones, which only the device knows; the delta log has room for its tokens in any case.
    rotary: the tokens' rotary positions, or their offset from the cache indices.
    hidden: True if the hidden state of the last token is wanted.
    scored: number of logits, the first ones, that give log probabilities of prompt tokens.
    images: the row's image tokens.
    adapter: the identity of the row's adapter; "": none.
    """

    tokens: tuple[int, ...]
    done: int
    pages: List[int]
    slot: int
    logits: int
    target: int | None = None
    checkpoints: tuple[tuple[int, int], ...] = ()
    base: int | None = None
    delta_log: int = 0
    append: bool = False
    drafts: int = 0
    drawn: int | None = None
    accepts: int = 0
    rotary: Positions | int = 0
    hidden: bool = False
    scored: int = 0
    images: tuple[ImageSpan, ...] = ()
    adapter: str = ""

    @property
    def draft_tokens(self) -> tuple[int, ...]:
        """The tokens that the model has to verify."""
        return self.tokens[len(self.tokens) - self.drafts:]


def next_row(cache: SequenceCache, tokens: tuple[int, ...], logits: int, ahead: int = 0, **fields: Any) -> PlannedRow:
    """Returns the row of a sequence's next tokens. ahead: number of tokens between its cursor and the row. fields: the
    fields of `PlannedRow` that differ from their defaults."""
    fields = {"base": cache.base, "delta_log": cache.delta_log or 0, **fields}
    return PlannedRow(tokens, cache.done + ahead, cache.pages, cache.slot, logits, **fields)


def image_spans(pictures: Iterable[Picture], start: int, end: int) -> tuple[ImageSpan, ...]:
    """Returns `PlannedRow.images` of a row with the tokens from start to end."""
    spans = list[ImageSpan]()
    for picture in pictures:
        first, last = max(picture.start, start), min(picture.end, end)
        if first < last:
            spans.append(ImageSpan(first - start, last - first, picture.digest, first - picture.start))
    return tuple(spans)


def base_after(row: PlannedRow) -> int | None:
    """Returns the argument `base` of `HybridCache.commit` after a step with this row: the number of tokens in the
    slot's state; None if the row does not append to the delta log."""
    if not row.append:
        return None
    return ring_base(row.done if row.base is None else row.base, row.done, len(row.tokens))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step. rows: rows with one token first, by slot. operations: run on the pools in order, before the rows."""

    rows: tuple[PlannedRow, ...]
    operations: tuple[Operation, ...] = ()

    def to_json(self) -> str:
        """Returns the plan as JSON. On other pools that have run all earlier plans, it computes the same bits."""
        return json.dumps({"rows": [asdict(row) for row in self.rows], "operations": [*map(plain, self.operations)]})

    @classmethod
    def from_json(cls, text: str) -> StepPlan:
        found = json.loads(text)
        return cls(tuple(_row(row) for row in found["rows"]),
                   tuple(map(operation_of, found["operations"])))


def _row(fields: dict[str, Any]) -> PlannedRow:
    row = PlannedRow(**{name: _tuples(value) for name, value in fields.items()})
    return replace(row, images=tuple(ImageSpan(*seen) for seen in row.images)) if row.images else row


def _tuples(value: Any) -> Any:
    """Turns JSON's lists into tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
