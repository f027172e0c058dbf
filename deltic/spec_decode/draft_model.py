"""Drafts of a smaller model that reads what the larger one reads."""

from __future__ import annotations

from collections.abc import Sequence as List

import torch
from torch import Tensor

from deltic.cache.handles import SequenceCache
from deltic.cache.manager import HybridCache
from deltic.engine.scheduler import emits_of
from deltic.engine.sequence import Sequence
from deltic.engine.step_plan import PlannedRow, StepPlan, base_after
from deltic.errors import ConfigError
from deltic.params import RING, common_length
from deltic.runner.input_batch import build
from deltic.runner.model import Model
from deltic.runner.sampling import SampleRow, sampling_of
from deltic.spec_decode.pending_drafts import Wants


class DraftModelProposer:
    """A drafter with a cache of its own, in which drafts stay in the replay ring until they are known to be right."""

    def __init__(self, runtime: Model, vocabulary: int, limit: int) -> None:
        if runtime.config.vocab_size != vocabulary:
            raise ConfigError(f"the draft model {runtime.name} has {runtime.config.vocab_size} tokens, the model "
                              f"itself {vocabulary}: they must share one tokenizer", "speculate")
        self.limit, self._runtime = limit, runtime
        self._leases: dict[Sequence, SequenceCache] = {}
        self._refused: set[Sequence] = set()
        """Sequences that there was no room for, since another one was over."""

    @torch.inference_mode()
    def draft(self, wants: Wants) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in wants]
        wanting = {sequence for sequence, _ in wants}
        for waiting in [other for other in self._leases if other.cache is None and other not in wanting]:
            self.forget(waiting)  # it gave its place to one that needs the room here, too
        leased = [index for index, (sequence, count) in enumerate(wants)
                  if len(sequence.tokens) + count <= self._runtime.memory.max_context and self._has_room(sequence)]
        self._read([wants[index][0] for index in leased])
        ready = [index for index in leased if self._is_ready(wants[index][0])]
        for depth in range(max((wants[index][1] for index in ready), default=0)):
            active = [index for index in ready if wants[index][1] > depth]
            self._step([(index, wants[index][0]) for index in active], drafts)
        return drafts

    def forget(self, sequence: Sequence) -> None:
        self._refused.clear()
        self._release(sequence)

    def _has_room(self, sequence: Sequence) -> bool:
        """Whether there is room for the sequence and as many drafts as there may be."""
        if sequence in self._refused or self._awaits(sequence):
            return False
        cache, lease = self._runtime.cache, self._lease(sequence)
        if lease is not None:
            missing = len(sequence.tokens) - 1 - lease.done + self.limit
            if cache.states.attach_delta_log(lease) and cache.reserve(lease, missing) >= missing:
                return True
        # to try again at every step would be to read again at every step
        self._release(sequence)
        self._refused.add(sequence)
        return False

    def _awaits(self, sequence: Sequence) -> bool:
        """Whether another sequence is just being read as far as a state that this one can begin with."""
        if sequence in self._leases:
            return False
        keys = sequence.keys[:-1]
        known, reading = self._runtime.cache.tree.cached_length(keys), [
            (other, lease.done) for other, lease in self._leases.items() if lease.done < len(other.request.prompt)]
        return any(max(known, done) < position <= common for other, done in reading
                   if (common := common_length(keys, other.keys)) for position in other.wanted)

    def _lease(self, sequence: Sequence) -> SequenceCache | None:
        """The sequence's lease, rejected drafts taken back; or a new one."""
        cache, lease = self._runtime.cache, self._leases.get(sequence)
        if lease is not None and not cache.rollback(lease, _sound(lease, sequence)):
            self._release(sequence)
            lease = None
        if lease is None and (lease := cache.admit(sequence.keys[:-1])):
            self._leases[sequence] = lease
        return lease

    def _read(self, sequences: List[Sequence]) -> None:
        """Read what is new, all but the last tokens, and keep states where the larger model keeps them. As in a step of
        that one there is a limit, so that nobody's answer stands still while a long prompt is read."""
        cache, left, rows = self._runtime.cache, self._runtime.options.token_budget, list[tuple[Sequence, PlannedRow]]()
        for sequence in sequences:
            lease = self._leases[sequence]
            done, chunk = lease.done, tuple(sequence.tokens[lease.done:-1][:left])
            left -= len(chunk)
            if chunk:
                rows.append((sequence, PlannedRow(chunk, done, lease.pages, lease.slot, 0, base=lease.base,
                                           delta_log=lease.delta_log or 0, rotary=sequence.rotary(done, len(chunk)),
                                           checkpoints=emits_of(cache, lease, sequence.wanted, len(chunk)))))
        if not rows:
            return
        rows.sort(key=lambda item: (len(item[1].tokens) > 1, item[1].slot))
        self._run([row for _, row in rows])
        for sequence, row in rows:
            lease = self._leases[sequence]
            _commit(cache, lease, row, sequence.keys[row.done:row.done + len(row.tokens)])
            cache.commit_checkpoints(lease)

    def _is_ready(self, sequence: Sequence) -> bool:
        """Whether drafts can follow: all is read, and they fit the replay ring."""
        lease = self._leases[sequence]
        if lease.done < len(sequence.tokens) - 1:
            return False
        if lease.unflushed + self.limit > RING:
            # else the ring would be folded amid them; they could not be taken back
            self._runtime.cache.states.flush(lease)
        return True

    def _release(self, sequence: Sequence) -> None:
        """Give the lease back; what is sound of it may serve the conversation's next turn."""
        cache, lease = self._runtime.cache, self._leases.pop(sequence, None)
        if lease:
            cache.release(lease, keep=cache.rollback(lease, _sound(lease, sequence)))

    def _run(self, rows: List[PlannedRow]) -> Tensor:
        self._runtime.cache.operations.flush()
        return self._runtime.run(build(StepPlan(tuple(rows)), self._runtime.device))

    def _step(self, active: list[tuple[int, Sequence]], drafts: list[list[int]]) -> None:
        """One more draft for each of these sequences."""
        rows = []
        for index, sequence in active:
            lease = self._leases[sequence]
            token = drafts[index][-1] if drafts[index] else sequence.tokens[-1]
            rows.append(PlannedRow((token,), lease.done, lease.pages, lease.slot, 1, base=lease.base,
                            delta_log=lease.delta_log or 0, append=lease.delta_log is not None, rotary=sequence.offset))
        logits = self._run(rows)
        draws = [SampleRow(sequence, tuple(drafts[index])) for index, sequence in active]
        sampling = sampling_of(draws, logits.device, logits.shape[1])
        tokens = self._runtime.sample(logits, sampling).tokens.tolist()
        for (index, sequence), row, token in zip(active, rows, tokens, strict=True):
            _commit(self._runtime.cache, self._leases[sequence], row, row.tokens)
            drafts[index].append(token)


def _commit(cache: HybridCache, lease: SequenceCache, row: PlannedRow, keys: List[int]) -> None:
    """Its keys are its own: drafts are among them."""
    lease.keys[lease.done:] = keys
    cache.commit(lease, len(row.tokens), base_after(row))


def _sound(lease: SequenceCache, sequence: Sequence) -> int:
    """How many of the tokens that were read came true; the sequence's last one is read with the next draft."""
    return min(common_length(lease.keys, sequence.keys), lease.done, len(sequence.tokens) - 1)
