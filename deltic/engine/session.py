"""`Session`: one sequence by hand, over the same cache, batches and ops as the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deltic.cache.hybrid import Checkpoint, Lease
from deltic.engine.batch import build
from deltic.engine.options import engine_config
from deltic.engine.runtime import RandomModel, load
from deltic.engine.scheduler import Plan, Row
from deltic.errors import DegenerateError, RequestError

_FLAT = 1e-6


class Session:
    """Feed tokens, read logits. Needs no tokenizer.

        session = Session("org/name")
        logits = session.prefill([1, 2, 3])      # float32 [vocabulary], of the last token
        logits = session.step(int(logits.argmax()))
        mark = session.checkpoint()
        session.commit([5, 6]); session.restore(mark)

    Every token enters the state exactly once. Errors leave the session where it was.
    """

    def __init__(self, model: str | RandomModel | None = None, dtype: str = "float32", *,
                 revision: str | None = None, **options: Any) -> None:
        self.runtime = load(model, engine_config({"dtype": dtype, **options}), revision)
        # each step writes the state into the other lease's slot, so that a failed one leaves no trace (L3)
        lease, scratch = self.runtime.cache.admit(), self.runtime.cache.admit()
        assert lease is not None and scratch is not None
        self._lease: Lease = lease
        self._scratch: Lease = scratch

    @property
    def position(self) -> int:
        """Tokens in the state."""
        return self._lease.done

    @property
    def max_context(self) -> int:
        """Tokens that the state can take."""
        return self.runtime.memory.max_context

    @property
    def vocab_size(self) -> int:
        return self.runtime.config.vocab_size

    def prefill(self, tokens: Sequence[int], all_logits: bool = False) -> Tensor:
        """Append tokens; returns the float32 logits of the last one [V], or of every one [n, V]."""
        logits = self._feed(tokens, all_logits)
        return logits if all_logits else logits[-1]

    def step(self, token: int) -> Tensor:
        """Append one token; returns its float32 logits [V]."""
        return self._feed([token], False)[-1]

    def commit(self, tokens: Sequence[int]) -> None:
        """Append tokens whose logits nobody wants."""
        self._feed(tokens, False)

    def checkpoint(self) -> Checkpoint:
        """Keep the present position; RequestError when no more can be kept."""
        kept = self.runtime.cache.checkpoint(self._lease)
        if kept is None:
            raise RequestError("no room for another checkpoint: drop one, or raise max_batch or memory")
        return kept

    def restore(self, checkpoint: Checkpoint | None) -> None:
        """Return to a checkpoint, as often as wanted; None is the start."""
        self._check_checkpoint(checkpoint)
        if not self.runtime.cache.restore(self._lease, checkpoint):
            raise RequestError("no page is free to return to the checkpoint: drop one, or raise memory")

    def drop(self, checkpoint: Checkpoint) -> None:
        """Give a checkpoint's memory back."""
        self._check_checkpoint(checkpoint)
        self.runtime.cache.drop(checkpoint)

    def reset(self) -> None:
        """Forget all tokens; checkpoints stay."""
        self.restore(None)

    def _feed(self, tokens: Sequence[int], all_logits: bool) -> Tensor:
        """Process tokens in chunks. The state moves from the lease's slot into the scratch slot and on in there;
        only when all is well do slots and cursor change (L3)."""
        tokens = self._checked(tokens)
        cache, lease, scratch, start = self.runtime.cache, self._lease, self._scratch, self.position
        if cache.reserve(lease, len(tokens)) < len(tokens):
            raise RequestError("no pages are left: drop checkpoints, or raise memory")
        parts, size = [], self.runtime.options.token_budget
        for offset in range(0, len(tokens), size):
            chunk = tuple(tokens[offset:offset + size])
            source = scratch.slot if offset else lease.slot
            row = Row(chunk, start + offset, tuple(lease.pages), source, True, scratch.slot)
            parts.append(self.runtime.run(build(Plan((row,)), cache.storage.device, all_logits)).clone())
            _check_health(parts[-1])
        cache.exchange_slots(lease, scratch)
        cache.commit(lease, tokens)
        return torch.cat(parts) if all_logits else parts[-1]

    def _check_checkpoint(self, checkpoint: Checkpoint | None) -> None:
        if checkpoint is not None and not self.runtime.cache.owns(checkpoint):
            raise RequestError("this checkpoint was dropped, or belongs to another session", "checkpoint")

    def _checked(self, tokens: Sequence[int]) -> list[int]:
        tokens = [int(token) for token in tokens]
        if not tokens:
            raise RequestError("no tokens: give at least one", "tokens")
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise RequestError(f"token id {token} is outside of the vocabulary (0 .. {self.vocab_size - 1})",
                                   "tokens")
        if self.position + len(tokens) > self.max_context:
            raise RequestError(f"{self.position} + {len(tokens)} tokens exceed the context of {self.max_context}: "
                               "reset, or raise max_context", "tokens")
        return tokens


def _check_health(logits: Tensor) -> None:
    low, high = float(logits.min()), float(logits.max())
    if not low - high <= -_FLAT or low == -torch.inf or high == torch.inf:
        raise DegenerateError(f"the logits range from {low} to {high}: weights, dtype or a kernel are broken; set "
                              "debug_layers=True to find the first bad layer, or ops=('ref',)")
