"""Slots of recurrent states while steps run: state delta logs, and slots that change hands.

A step writes a sequence's new state either to another slot, which the sequence takes when the step is committed, or
not at all: then the token's inputs are appended to the sequence's state delta log, and the state stays at `base`.
"""

from __future__ import annotations

from deltic.cache.block_accounts import BlockAccounts
from deltic.cache.handles import SequenceCache
from deltic.cache.operations import FlushDeltaLog


class StateSlots:
    def __init__(self, accounts: BlockAccounts, recurrent: bool) -> None:
        """recurrent: False if the model has no recurrent layers, so that delta logs are not needed."""
        self._accounts, self._recurrent = accounts, recurrent

    def attach_delta_log(self, cache: SequenceCache) -> bool:
        """Gives a sequence a delta log if it has none. Returns False if it needs one and none is free."""
        if cache.delta_log is None:
            unit = self._accounts.delta_logs.take()
            cache.delta_log = unit[0] if unit else None
        return cache.delta_log is not None or not self._recurrent

    def flush(self, cache: SequenceCache) -> None:
        """Advances the state in the slot to the cursor, so that the delta log is empty."""
        self._accounts.copy_state(cache, cache.slot)
        cache.unflushed = 0

    def queue_flush(self, cache: SequenceCache, base: int, done: int) -> None:
        """Advances the state to `done` committed tokens, from the `base` tokens that it stands for after the step in
        flight. The cursor and base of the cache are not changed: `commit` sets them."""
        assert cache.delta_log is not None and done <= cache.done, "a state is brought to tokens that may not stay"
        if base < done:
            self._accounts.queue.append(FlushDeltaLog(cache.slot, cache.delta_log, base, done))

    def swap(self, first: SequenceCache, second: SequenceCache) -> None:
        """Exchanges the slots of two sequences: a step wrote the first one's state into the second one's slot."""
        first.slot, second.slot = second.slot, first.slot
        self._accounts.sequences[first.slot] = first
        self._accounts.sequences[second.slot] = second

    def allocate_spares(self, count: int) -> None:
        """Takes up to `count` spare slots; at least `count` + 1 slots stay for sequences."""
        spares, slots = self._accounts.spares, self._accounts.slots
        missing = min(count - len(spares), slots.free - count - 1)
        spares.update(dict.fromkeys(slots.take(max(missing, 0)) or ()))

    def swap_spare(self, cache: SequenceCache, spare: int) -> None:
        """Exchanges a sequence's slot for the spare one that a step wrote its state to."""
        spares = self._accounts.spares
        del spares[spare]
        spares[cache.slot] = None
        self._accounts.remove(cache)
        cache.slot = spare
        self._accounts.add(cache)
