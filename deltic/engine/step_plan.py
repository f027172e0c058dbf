"""A step as plain data: which tokens of which sequences, and what is to be done to the pools before."""

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
"""Stands for a token that is not on the host yet."""


class ImageSpan(NamedTuple):
    """Tokens of a row that stand for a part of a picture: `length` from the row's `token` on, for its rows from `first`
    on."""

    token: int
    length: int
    digest: str
    first: int


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """One sequence's share of a step: process `tokens` at cache indices done, done + 1, ... of these pages, read the
    state from `slot` and write it to `target` (None: in place), give the logits of the last `logits` tokens.

    pages: the lease's own list, which only becomes longer.
    checkpoints: (position, slot) pairs: also write the state after `position` tokens to this slot.
    base: tokens that the state in the slot stands for (None: done); those after it are in the replay ring `delta_log`.
    append: leave this step's tokens there too.
    drafts: how many of the tokens, the last ones, are drafts.
    drawn: the one token is what this draw of the step in flight gives, and is not known yet.
    accepts: how many drafts of the step in flight may be right; only the device knows how many are. So many tokens
        further on than `done` the row begins, and the ring has room for its tokens in any case.
    hidden: give the hidden state of the last token.
    scored: how many of the logits, the first ones, are of tokens whose next one is known, and has its probability told.
    images: which tokens stand for pictures.
    rotary: the tokens' rotary positions, or what makes them of their cache indices when added.
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
    """What `HybridCache.commit` is to be told after a step with this row: tokens that the state in the slot stands for,
    if the row was appended to the replay ring."""
    if not row.append:
        return None
    return ring_base(row.done if row.base is None else row.base, row.done, len(row.tokens))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step as plain data. operations: what is to be done to the pools before, in order. rows: those of single tokens
    first, by slot."""

    rows: tuple[PlannedRow, ...]
    operations: tuple[Operation, ...] = ()

    def to_json(self) -> str:
        """All of it: who carries it out on other pools, which have had all plans before, does the same."""
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
    """JSON knows lists alone."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
