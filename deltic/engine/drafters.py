"""Who guesses the tokens that come next. A guess costs or saves time; it never changes an answer."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import Protocol

import torch

from deltic.cache.hybrid import Lease
from deltic.engine.batch import build
from deltic.engine.head import DraftHead
from deltic.engine.runtime import Runtime
from deltic.engine.sampler import Draw, sampling_of
from deltic.engine.scheduler import Plan, Row, base_after, emits_of
from deltic.engine.sequence import Sequence
from deltic.errors import ConfigError
from deltic.types import RING, Draft, Mtp, Ngram, common_length

Wants = List[tuple[Sequence, int]]
"""Sequences that are about to answer, each with the number of guesses that are wanted, at least 1."""


class Drafter(Protocol):
    """limit: the most guesses that it is ever asked for."""

    limit: int

    def draft(self, wants: Wants) -> list[list[int]]:
        """At most so many guesses of what follows in each sequence."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over."""


def drafter_of(runtime: Runtime) -> Drafter | None:
    """The drafter that the options of a loaded model ask for; None if they ask for none, or for the head of a model
    whose cache was not made for it."""
    speculation = runtime.options.speculation
    if isinstance(speculation, Ngram):
        return NgramDrafter(speculation.tokens)
    if isinstance(speculation, Draft):
        assert runtime.draft is not None
        return ModelDrafter(runtime.draft, runtime.config.vocab_size, speculation.tokens)
    if runtime.head is None or speculation is None:
        return None
    return HeadDrafter(runtime, runtime.head, speculation.tokens if isinstance(speculation, Mtp) else Mtp().tokens)


_LONGEST, _SHORTEST = 4, 2
"""Tokens at the end of a sequence that are looked for in what came before."""


class NgramDrafter:
    """Guesses that what followed the last few tokens before will follow them again (arXiv 2304.04487)."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._known: dict[Sequence, _Ngrams] = {}

    def draft(self, wants: Wants) -> list[list[int]]:
        return [self._known.setdefault(sequence, _Ngrams()).guess(sequence.tokens, count) for sequence, count in wants]

    def forget(self, sequence: Sequence) -> None:
        self._known.pop(sequence, None)


class _Ngrams:
    """Where each group of consecutive tokens of a sequence was seen last."""

    def __init__(self) -> None:
        self._read = 0
        self._after: dict[tuple[int, ...], int] = {}

    def guess(self, tokens: List[int], count: int) -> list[int]:
        for end in range(self._read + 1, len(tokens)):  # the last token has nothing after it yet
            for length in range(_SHORTEST, min(_LONGEST, end) + 1):
                self._after[tuple(tokens[end - length:end])] = end
        self._read = max(len(tokens) - 1, self._read)
        for length in range(min(_LONGEST, len(tokens)), _SHORTEST - 1, -1):
            after = self._after.get(tuple(tokens[-length:]))
            if after is not None:
                return _repeated(tokens[after:], count)
        return []


def _repeated(tokens: List[int], count: int) -> list[int]:
    """The first `count` tokens of these, again and again."""
    return [tokens[index % len(tokens)] for index in range(count)]


class HeadDrafter:
    """Guesses with the model's own draft head; draws as the model itself will, with the same noise."""

    def __init__(self, runtime: Runtime, head: DraftHead, limit: int) -> None:
        self.limit, self._runtime, self._head = limit, runtime, head

    @torch.inference_mode()
    def draft(self, wants: Wants) -> list[list[int]]:
        device, most = self._runtime.cache.storage.device, max(count for _, count in wants)
        batch = build(Plan(tuple(_next_row(sequence, sequence.tokens[-1], 0) for sequence, _ in wants)), device)
        # what is guessed before matters for penalties alone
        draws = [Draw(sequence, (0,) * depth) for sequence, _ in wants for depth in range(most)]
        counts = torch.tensor([count for _, count in wants])
        tokens = self._head.guess(batch, counts, sampling_of(draws, device))
        if tokens is None:
            return self._one_by_one(wants, most)
        return [row[:count] for row, (_, count) in zip(tokens.tolist(), wants, strict=True)]

    def _one_by_one(self, wants: Wants, most: int) -> list[list[int]]:
        device, ops = self._runtime.cache.storage.device, self._runtime.decoder.ops
        guesses: list[list[int]] = [[] for _ in wants]
        hidden = torch.empty(0)
        before: list[int] = []
        for depth in range(most):
            active = [index for index, (_, count) in enumerate(wants) if count > depth]
            rows, draws = [], []
            for index in active:
                sequence, ahead = wants[index][0], guesses[index]
                rows.append(_next_row(sequence, ahead[-1] if ahead else sequence.tokens[-1], depth))
                draws.append(Draw(sequence, tuple(ahead)))
            places = [place for place, index in enumerate(before) if index in active]
            hidden, logits = self._head.draft(build(Plan(tuple(rows)), device), hidden[places] if depth else None)
            tokens = ops.sample(logits, sampling_of(draws, device, logits.shape[1])).tokens.tolist()
            for index, token in zip(active, tokens, strict=True):
                guesses[index].append(token)
            before = active
        return guesses

    def forget(self, sequence: Sequence) -> None:
        pass


def _next_row(sequence: Sequence, token: int, depth: int) -> Row:
    """The row of a token that follows the committed ones after so many guesses."""
    lease = sequence.lease
    assert lease is not None
    return Row((token,), lease.done + depth, tuple(lease.pages), lease.slot, 1)


class ModelDrafter:
    """Guesses with a smaller model that reads what the larger one reads; its guesses stay in the replay ring until they
    are known to be right."""

    def __init__(self, runtime: Runtime, vocabulary: int, limit: int) -> None:
        if runtime.config.vocab_size != vocabulary:
            raise ConfigError(f"the draft model {runtime.name} has {runtime.config.vocab_size} tokens, the model "
                              f"itself {vocabulary}: they must share one tokenizer", "speculate")
        self.limit, self._runtime = limit, runtime
        self._leases: dict[Sequence, Lease] = {}
        self._refused: set[Sequence] = set()
        """Sequences that there was no room for, since another one was over."""

    @torch.inference_mode()
    def draft(self, wants: Wants) -> list[list[int]]:
        guesses: list[list[int]] = [[] for _ in wants]
        leased = [index for index, (sequence, count) in enumerate(wants)
                  if len(sequence.tokens) + count <= self._runtime.memory.max_context and self._ready(sequence)]
        for depth in range(max((wants[index][1] for index in leased), default=0)):
            active = [index for index in leased if wants[index][1] > depth]
            self._step([(index, wants[index][0]) for index in active], guesses)
        return guesses

    def forget(self, sequence: Sequence) -> None:
        self._refused.clear()
        self._release(sequence)

    def _ready(self, sequence: Sequence) -> bool:
        """Have the model read all tokens of the sequence but the last; False if there is no room for it."""
        if sequence in self._refused:
            return False
        lease = self._lease(sequence)
        if lease is None or not self._catch_up(lease, sequence):
            # to try again at every step would be to read again at every step
            self._release(sequence)
            self._refused.add(sequence)
            return False
        return True

    def _lease(self, sequence: Sequence) -> Lease | None:
        """The sequence's lease, rejected guesses taken back; or a new one."""
        cache, lease = self._runtime.cache, self._leases.get(sequence)
        if lease is not None and not cache.retreat(lease, _sound(lease, sequence)):
            self._release(sequence)
            lease = None
        if lease is None and (lease := cache.admit(sequence.tokens[:-1])):
            self._leases[sequence] = lease
        return lease

    def _catch_up(self, lease: Lease, sequence: Sequence) -> bool:
        """Read what is new, and keep states where the larger model keeps them; False if there is no room."""
        cache, tokens, end = self._runtime.cache, sequence.tokens, len(sequence.tokens) - 1
        missing = end - lease.done + self.limit
        if not cache.take_ring(lease) or cache.reserve(lease, missing) < missing:
            return False
        while lease.done < end:
            chunk = tokens[lease.done:end][:self._runtime.options.token_budget]
            row = Row(tuple(chunk), lease.done, tuple(lease.pages), lease.slot, 0, base=lease.base,
                      ring=lease.ring or 0, emits=emits_of(cache, lease, sequence.wanted, len(chunk)))
            self._runtime.run(build(Plan((row,)), cache.storage.device))
            cache.commit(lease, chunk)
            cache.keep_emitted(lease)
        if lease.behind + self.limit > RING:
            cache.settle(lease)  # else the ring would be folded amid guesses, which could not be taken back
        return True

    def _release(self, sequence: Sequence) -> None:
        """Give the lease back; what is sound of it may serve the conversation's next turn."""
        cache, lease = self._runtime.cache, self._leases.pop(sequence, None)
        if lease:
            cache.release(lease, keep=cache.retreat(lease, _sound(lease, sequence)))

    def _step(self, active: list[tuple[int, Sequence]], guesses: list[list[int]]) -> None:
        """One more guess for each of these sequences."""
        device, rows = self._runtime.cache.storage.device, []
        for index, sequence in active:
            lease = self._leases[sequence]
            token = guesses[index][-1] if guesses[index] else sequence.tokens[-1]
            rows.append(Row((token,), lease.done, tuple(lease.pages), lease.slot, 1, base=lease.base,
                            ring=lease.ring or 0, append=lease.ring is not None))
        logits = self._runtime.run(build(Plan(tuple(rows)), device))
        draws = [Draw(sequence, tuple(guesses[index])) for index, sequence in active]
        tokens = self._runtime.decoder.ops.sample(logits, sampling_of(draws, device, logits.shape[1])).tokens.tolist()
        for (index, sequence), row, token in zip(active, rows, tokens, strict=True):
            self._runtime.cache.commit(self._leases[sequence], row.tokens, base_after(row))
            guesses[index].append(token)


def _sound(lease: Lease, sequence: Sequence) -> int:
    """How many of the tokens that were read came true; the sequence's last one is read with the next guess."""
    return min(common_length(lease.tokens, sequence.tokens), len(sequence.tokens) - 1)
