"""Conversations as packed batches of tokens."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from data import Sample, pieces
from delta import CHUNK
from render import render
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset

IGNORE = -100
FILL = 0.99  # of a batch: what is left lets nearly all conversations find a row
Row = list[tuple[list[int], bool]]  # the tokens of each piece of a conversation, and whether the model says it


@dataclass(frozen=True)
class Batch:
    """Rows of whole conversations: `ids` and `place` (a token's place in its own) are [rows, width].

    `said` are the flat places whose next token the model says, `labels` these tokens.
    """

    ids: Tensor
    place: Tensor
    said: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(*(t.to(device, torch.long, non_blocking=True) for t in vars(self).values()))

    def pin_memory(self) -> Batch:
        return Batch(*(t.pin_memory() for t in vars(self).values()))


def tokens_of(tokenizer: Tokenizer, conversations: list[Sample]) -> list[Row]:
    cut = [list(pieces(render([*c.messages, c.target], c.tools), c.forced)) for c in conversations]
    encoded = iter(tokenizer.encode_batch_fast([text for c in cut for text, _ in c]))
    return [[(next(encoded).ids, spoken) for _, spoken in c] for c in cut]


def _first(lengths: list[int], room: float) -> int:
    """How many of the first conversations fill this room; later ones wait, be they short or long."""
    totals = itertools.accumulate(lengths)
    return sum(total <= room for total in totals)


def _fit(lengths: list[int], rows: int, width: int) -> Iterator[tuple[int, int, int]]:
    """First fit, the longest first: what is placed, in which row and from which column; the rest is left out."""
    free = [width] * rows
    for i in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        row = next((r for r in range(rows) if free[r] >= lengths[i]), None)
        if row is not None:
            yield i, row, width - free[row]
            free[row] -= lengths[i]


def pack(conversations: list[Row], rows: int, width: int) -> Batch:
    """As many of the conversations as fit, each without its last token, which is a label only."""
    ids, labels = torch.zeros(rows, width, dtype=torch.int32), torch.full((rows, width), IGNORE, dtype=torch.int32)
    place = torch.zeros(rows, width, dtype=torch.int32)
    lengths = [sum(len(tokens) for tokens, _ in c) - 1 for c in conversations]
    for i, row, at in _fit(lengths[: _first(lengths, FILL * rows * width)], rows, width):
        line = torch.tensor([token for tokens, _ in conversations[i] for token in tokens], dtype=torch.int32)
        spoken = torch.tensor([said for tokens, said in conversations[i] for _ in tokens])
        here = slice(at, at + lengths[i])
        ids[row, here] = line[:-1]
        labels[row, here] = line[1:].masked_fill(~spoken[1:], IGNORE)
        place[row, here] = torch.arange(lengths[i], dtype=torch.int32)
    said = (labels.flatten() != IGNORE).nonzero().squeeze(1)
    return Batch(ids, place, said, labels.flatten()[said])


class Steps(Dataset[Batch]):
    """Item i is the batch of step i: of `batch` conversations from number i * batch on, the first that fill it.

    `sample` gives the conversation of a number.
    """

    def __init__(
        self, folder: Path, sample: Callable[[int], Sample], steps: int, batch: int, rows: int, width: int
    ) -> None:
        self.folder, self.sample, self.steps = folder, sample, steps
        self.batch, self.rows, self.width = batch, rows, width
        self.tokenizer: Tokenizer | None = None

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> Batch:
        if self.tokenizer is None:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
            self.tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        numbers = range(step * self.batch, (step + 1) * self.batch)
        return pack(tokens_of(self.tokenizer, [self.sample(i) for i in numbers]), self.rows, self.width)


def whole(tokenizer: Tokenizer, conversations: list[Sample], width: int = 32 * CHUNK) -> list[Batch]:
    """All conversations, in as many batches of 16 rows as they take; they must fit a row."""
    rows, batches = tokens_of(tokenizer, conversations), []
    while rows:
        lengths = [sum(len(tokens) for tokens, _ in c) - 1 for c in rows]
        taken = {i for i, _, _ in _fit(lengths[: _first(lengths, FILL * 16 * width)], 16, width)}
        batches.append(pack([rows[i] for i in sorted(taken)], 16, width))
        rows = [row for i, row in enumerate(rows) if i not in taken]
    return batches
