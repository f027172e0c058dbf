"""Reads and writes the hidden states that a draft head keeps for each state slot."""

from __future__ import annotations

import torch
from torch import Tensor

from deltic.ops.types import Batch


def hidden_before(slots: Tensor, batch: Batch, hidden: Tensor) -> Tensor:
    """Returns the hidden state before each token of a step [T, H]. slots [S, H]: last hidden state of each slot. hidden
    [T, H]: hidden states of the tokens."""
    before = hidden.roll(1, 0)
    before[batch.starts[:-1]] = last_hidden(slots, batch)
    return before


def last_hidden(slots: Tensor, batch: Batch) -> Tensor:
    """Returns the hidden states [R, H] of the rows' last tokens before a step; zero for a row without such tokens."""
    return torch.where((batch.done > 0)[:, None], slots[batch.source], 0.0)


def keep_hidden(slots: Tensor, batch: Batch, hidden: Tensor) -> None:
    """Writes the hidden states of checkpoints, and of the last tokens of rows that do not append."""
    if batch.layout.checkpoints:
        rows = batch.emit_row
        slots[batch.emit_slot] = hidden[batch.starts[rows] + batch.emit_length - batch.done[rows] - 1]
    targets, ends = batch.target, batch.starts[1:] - 1
    if batch.layout.appends:
        targets, ends = targets[~batch.append], ends[~batch.append]
    slots[targets] = hidden[ends]
