"""A step as plain data: the tokens of its rows, and the operations on the pools before them."""

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
    """Image tokens of a row: `length` from the row's `token` on take the image's embeddings from `first` on."""

    token: int
    length: int
    digest: str
    first: int


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """The tokens of one sequence in a step, with cache indices done, done + 1, ... in these pages.

    pages: the list of the sequence's cache. It becomes longer; if pages move, the operations before the step move them.
    slot: the state to read.
    logits: the last tokens whose logits are wanted.
    target: the slot to write; None: `slot`.
    checkpoints: (position, slot) pairs: also write the state after `position` tokens to this slot.
    base: tokens in the slot's state; None: done. Those after it are in the delta log.
    delta_log: the sequence's unit of the delta log.
    append: leave this step's tokens in the delta log instead of writing the state.
    drafts: drafts among the tokens, the last ones.
    drawn: the draw of the step in flight that gives the only token.
    accepts: drafts of the step in flight that may be right. The row begins so many tokens after `done` as are right,
        which only the device knows; the delta log has room for its tokens in any case.
    rotary: the tokens' rotary positions, or their offset from the cache indices.
    hidden: the hidden state of the last token is wanted.
    scored: logits, the first ones, of prompt tokens whose log probabilities are wanted.
    images: the image tokens.
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
    """The row of a sequence's next tokens. ahead: tokens between its cursor and the row. fields: those of `PlannedRow`
    that differ from their defaults."""
    fields = {"base": cache.base, "delta_log": cache.delta_log or 0, **fields}
    return PlannedRow(tokens, cache.done + ahead, cache.pages, cache.slot, logits, **fields)


def image_spans(pictures: Iterable[Picture], start: int, end: int) -> tuple[ImageSpan, ...]:
    """`PlannedRow.images` of a row with the tokens from start to end."""
    spans = list[ImageSpan]()
    for picture in pictures:
        first, last = max(picture.start, start), min(picture.end, end)
        if first < last:
            spans.append(ImageSpan(first - start, last - first, picture.digest, first - picture.start))
    return tuple(spans)


def base_after(row: PlannedRow) -> int | None:
    """The argument `base` of `HybridCache.commit` after a step with this row: tokens in the slot's state, if the row
    was appended to the delta log."""
    if not row.append:
        return None
    return ring_base(row.done if row.base is None else row.base, row.done, len(row.tokens))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """rows: those of single tokens first, by slot. operations: on the pools, in order, before the rows run."""

    rows: tuple[PlannedRow, ...]
    operations: tuple[Operation, ...] = ()

    def to_json(self) -> str:
        """The plan as JSON. On other pools that have had all plans before, it computes the same bits."""
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
