"""Drafts tokens with a smaller model that processes the same tokens."""

from __future__ import annotations

from collections.abc import Sequence as List

import torch
from torch import Tensor

from deltic.cache.handles import SequenceCache
from deltic.cache.manager import HybridCache
from deltic.engine.scheduler import checkpoints_of
from deltic.engine.sequence import Sequence
from deltic.engine.step_plan import PlannedRow, StepPlan, base_after, next_row
from deltic.errors import ConfigError
from deltic.params import RING, common_length
from deltic.runner.input_batch import build
from deltic.runner.model_runner import Model
from deltic.runner.sampling import SampleRow, sampling_of
from deltic.spec_decode.mtp import Wants


class DraftModelProposer:
    """A proposer with a cache of its own. Drafts stay in the cache's delta log until they are verified."""

    def __init__(self, runtime: Model, vocabulary: int, limit: int) -> None:
        if runtime.config.vocab_size != vocabulary:
            raise ConfigError(f"the draft model {runtime.name} has {runtime.config.vocab_size} tokens, the model "
                              f"itself {vocabulary}: they must share one tokenizer", "speculate")
        self.limit, self._runtime = limit, runtime
        self._caches: dict[Sequence, SequenceCache] = {}
        self._refused: set[Sequence] = set()
        """Sequences that had no room. They are tried again after another sequence finishes."""

    @torch.inference_mode()
    def draft(self, wants: Wants) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in wants]
        wanting = {sequence for sequence, _ in wants}
        for waiting in [other for other in self._caches if other.cache is None and other not in wanting]:
            self.forget(waiting)  # it was preempted by a sequence that needs the room here, too
        admitted = [index for index, (sequence, count) in enumerate(wants)
                  if len(sequence.tokens) + count <= self._runtime.memory.max_context and self._has_room(sequence)]
        self._prefill([wants[index][0] for index in admitted])
        ready = [index for index in admitted if self._is_ready(wants[index][0])]
        for depth in range(max((wants[index][1] for index in ready), default=0)):
            active = [index for index in ready if wants[index][1] > depth]
            self._step([(index, wants[index][0]) for index in active], drafts)
        return drafts

    def forget(self, sequence: Sequence) -> None:
        self._refused.clear()
        self._release(sequence)

    def _has_room(self, sequence: Sequence) -> bool:
        """True if there is room for the sequence and all its drafts."""
        if sequence in self._refused or self._awaits(sequence):
            return False
        cache, sequence_cache = self._runtime.cache, self._cache_of(sequence)
        if sequence_cache is not None:
            missing = len(sequence.tokens) - 1 - sequence_cache.done + self.limit
            if cache.states.attach_delta_log(sequence_cache) and cache.reserve(sequence_cache, missing) >= missing:
                return True
        # if it kept its place, it would process its tokens again in each step
        self._release(sequence)
        self._refused.add(sequence)
        return False

    def _awaits(self, sequence: Sequence) -> bool:
        """True if another sequence is being processed up to a state that this one can resume from."""
        if sequence in self._caches:
            return False
        keys = sequence.keys[:-1]
        known, reading = (
            self._runtime.cache.tree.cached_length(keys),
            [
                (other, sequence_cache.done)
                for other, sequence_cache in self._caches.items()
                if sequence_cache.done < len(other.request.prompt)
            ],
        )
        return any(max(known, done) < position <= common for other, done in reading
                   if (common := common_length(keys, other.keys)) for position in other.wanted)

    def _cache_of(self, sequence: Sequence) -> SequenceCache | None:
        """Returns the sequence's cache without rejected drafts, or a new cache; None if there is no room."""
        cache, sequence_cache = self._runtime.cache, self._caches.get(sequence)
        if sequence_cache is not None and not cache.rollback(
            sequence_cache, _verified_tokens(sequence_cache, sequence)
        ):
            self._release(sequence)
            sequence_cache = None
        if sequence_cache is None and (sequence_cache := cache.admit(sequence.keys[:-1])):
            self._caches[sequence] = sequence_cache
        return sequence_cache

    def _prefill(self, sequences: List[Sequence]) -> None:
        """Processes the new tokens of each sequence except the last one, with checkpoints where the larger model has
        them. The token budget limits the step, so that a long prompt does not stall other answers."""
        cache, left, rows = self._runtime.cache, self._runtime.options.token_budget, list[tuple[Sequence, PlannedRow]]()
        for sequence in sequences:
            sequence_cache = self._caches[sequence]
            done, chunk = sequence_cache.done, tuple(sequence.tokens[sequence_cache.done:-1][:left])
            left -= len(chunk)
            if chunk:
                row = next_row(sequence_cache, chunk, 0, rotary=sequence.rotary(done, len(chunk)),
                               checkpoints=checkpoints_of(cache, sequence_cache, sequence.wanted, len(chunk)))
                rows.append((sequence, row))
        if not rows:
            return
        rows.sort(key=lambda item: (len(item[1].tokens) > 1, item[1].slot))
        self._run([row for _, row in rows])
        for sequence, row in rows:
            sequence_cache = self._caches[sequence]
            _commit(cache, sequence_cache, row, sequence.keys[row.done:row.done + len(row.tokens)])
            cache.commit_checkpoints(sequence_cache)

    def _is_ready(self, sequence: Sequence) -> bool:
        """True if drafts can follow: all tokens but the last are processed. Flushes the delta log if it lacks room."""
        sequence_cache = self._caches[sequence]
        if sequence_cache.done < len(sequence.tokens) - 1:
            return False
        if sequence_cache.unflushed + self.limit > RING:
            # a flush of the log between the drafts would make them impossible to roll back
            self._runtime.cache.states.flush(sequence_cache)
        return True

    def _release(self, sequence: Sequence) -> None:
        """Releases a sequence's cache. Its verified tokens may serve the conversation's next turn."""
        cache, sequence_cache = self._runtime.cache, self._caches.pop(sequence, None)
        if sequence_cache:
            cache.release(
                sequence_cache, keep=cache.rollback(sequence_cache, _verified_tokens(sequence_cache, sequence))
            )

    def _run(self, rows: List[PlannedRow]) -> Tensor:
        self._runtime.cache.operations.flush()
        return self._runtime.run(build(StepPlan(tuple(rows)), self._runtime.device))

    def _step(self, active: list[tuple[int, Sequence]], drafts: list[list[int]]) -> None:
        """Adds one draft to each of these sequences."""
        rows = []
        for index, sequence in active:
            sequence_cache = self._caches[sequence]
            token = drafts[index][-1] if drafts[index] else sequence.tokens[-1]
            append = self._runtime.cache.states.may_defer(sequence_cache)
            rows.append(next_row(sequence_cache, (token,), 1, append=append, rotary=sequence.images.offset))
        logits = self._run(rows)
        draws = [SampleRow(sequence, tuple(drafts[index])) for index, sequence in active]
        sampling = sampling_of(draws, logits.device, logits.shape[1])
        tokens = self._runtime.sample(logits, sampling).tokens.tolist()
        for (index, sequence), row, token in zip(active, rows, tokens, strict=True):
            _commit(self._runtime.cache, self._caches[sequence], row, row.tokens)
            drafts[index].append(token)


def _commit(cache: HybridCache, sequence_cache: SequenceCache, row: PlannedRow, keys: List[int]) -> None:
    """Commits a row. keys: the keys of its tokens, including drafts."""
    sequence_cache.keys[sequence_cache.done:] = keys
    cache.commit(sequence_cache, len(row.tokens), base_after(row))


def _verified_tokens(sequence_cache: SequenceCache, sequence: Sequence) -> int:
    """Returns the number of processed tokens that were right. The last one is processed with the next draft."""
    return min(common_length(sequence_cache.keys, sequence.keys), sequence_cache.done, len(sequence.tokens) - 1)
