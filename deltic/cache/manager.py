"""The hybrid cache: K/V pages and recurrent state slots under one account. Accounting alone: what is to be done to the
pools is queued (`operations`).

A sequence holds a `SequenceCache`: pages for its K/V, one slot for its recurrent state, and the cursor `done` that says
how many tokens both contain. Only `commit` moves a cursor forward and only `restore` moves it back (L1, L2).

    tokens     0 ........ 16 ........ 32 ........ done ..... covered
    pages      [ full    ][ full     ][ partial              ]
    owners     shared      shared      one lease only         granted, not yet written

A sequence that speculates also has a replay ring: its slot then stays as of `base` tokens, and the ring holds what came
after. What leaves the lease (a fork, a kept end) is folded first; what is rejected is not committed.

What a finished sequence leaves, and the states emitted while prompts are read, go to the prefix tree; a new sequence
resumes there at the deepest state that its prompt begins with. The tree gives way whenever a sequence needs a unit;
what it has been given lies in the tiers too (host memory, disk), and comes back from there.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deltic.cache.block_accounts import BlockAccounts
from deltic.cache.handles import CacheSnapshot, PreemptedState, SequenceCache
from deltic.cache.offload.tiers import NOTHING, LoadRequest, StoreRequest
from deltic.cache.operations import CopySlot, FlushDeltaLog, Operation, Pools, RestoreItem, StoreItem
from deltic.cache.radix_tree import Checkpoint, PrefixMatch
from deltic.errors import UnavailableError
from deltic.params import PAGE, RING

if TYPE_CHECKING:
    from deltic.cache.offload.index import TierIndex

log = logging.getLogger("deltic")


class HybridCache:
    """Grants pages and slots, moves cursors, forks and restores. `check()` proves the accounts."""

    def __init__(self, pools: Pools, reuse: bool = True, tiers: Sequence[TierIndex] = (),
                 rows: int | None = None) -> None:
        """reuse: keep prefixes of finished sequences for following ones. tiers: where to keep them too, fastest
        first. rows: positions that may be kept with their logits; None: as many as there are slots."""
        self.pools, self.reuse, self.sizes = pools, reuse, pools.sizes
        self.tiers = tuple(tiers) if reuse else ()
        self.accounts = BlockAccounts(self.sizes)
        self.pages, self.slots, self.delta_logs = self.accounts.pages, self.accounts.slots, self.accounts.delta_logs
        self.tree = self.accounts.tree
        self.rows = self.slots.size if rows is None else rows
        self._preempted: list[PreemptedState] = []
        self.poisoned = False
        """Not all was done to the pools that should have been: nothing in them is what the accounts say, until all
        leases and snapshots are given back and `start_anew` is called."""

    def take_operations(self) -> tuple[Operation, ...]:
        """What is to be done to the pools before anything else is, in order; it is the caller's to have it done."""
        operations = tuple(self.accounts.queue)
        self.accounts.queue.clear()
        return operations

    def flush_operations(self) -> None:
        """Have all that is queued done now, outside of a plan."""
        if self.accounts.queue:
            self.apply_operations(self.take_operations())

    def apply_operations(self, operations: Sequence[Operation]) -> None:
        """Have these done, which were taken from the queue. Where that raises, the cache is `lost`."""
        try:
            if self.poisoned:
                raise UnavailableError("the cache's memory is not what its accounts say, as an earlier operation on it "
                                       "failed: load the model anew")
            self.pools.apply(operations)
        except BaseException:
            self.poisoned = True
            self.pools.forget(operations)
            raise

    def reset(self) -> None:
        """Give up all prefixes, and what was still to be done, of a cache that is `lost`; the tiers keep theirs. Only
        where nothing is leased, and no snapshot kept."""
        assert not self.accounts.sequences and not self.accounts.snapshots, "somebody still relies on the pools"
        self.clear()
        self.pools.forget(self.take_operations())
        self.poisoned = False

    @property
    def idle(self) -> bool:
        """Whether nothing is leased or kept outside of the tree."""
        return not self.accounts.sequences and not self.accounts.snapshots and not self._preempted

    def admit(self, prompt: Sequence[int] = (), room: int = 0, fetch: LoadRequest = NOTHING,
              end: bool = True, keys: list[int] | None = None) -> SequenceCache | None:
        """A lease at the deepest kept position that `prompt` begins with, or at its start. Its keys are `keys`, which
        begin with the prompt and will do so; by default the prompt: that very list, if it is one.

        None, and nothing is given up for it, if no pages for `room` tokens in all could be had; None if no slot could.
        Without `room`, for a sequence that is alone, a start from nothing comes before none: the kept position itself
        may be what stands in the way. fetch: what `fetch` brought for this prompt. end: the prompt's very end will do,
        where its logits are known.
        """
        match = self.tree.match(prompt, end) if self.reuse else PrefixMatch(None, 0)
        checkpoint = match.checkpoint
        pages = -(-room // PAGE)
        lease = self._arrive(fetch, pages, checkpoint.done if checkpoint else 0)
        if lease is None and checkpoint:
            lease = self._resume(checkpoint, pages)
        if lease is None and not (checkpoint and room):
            lease = self._begin(pages)
        if lease:
            lease.keys = keys or (prompt if isinstance(prompt, list) else [*prompt])
            lease.prompt = prompt if keys and isinstance(prompt, array) else array("q")
            lease.shared = match.shared
        return lease

    def _begin(self, room: int) -> SequenceCache | None:
        """A lease at the start."""
        if room > self.accounts.attainable(room) or not self.make_room(room):
            return None
        slot = self.accounts.take_slot()
        return None if slot is None else self.accounts.book(SequenceCache(slot))

    def start_load(self, prompt: Sequence[int]) -> LoadRequest:
        """Have the tiers look for a deeper position than `known` ones; to be polled, then given to `admit`."""
        return (
            LoadRequest(prompt, self.cached_length(prompt), self.tiers, self.pools.item_validator)
            if self.tiers
            else NOTHING
        )

    def _arrive(self, fetch: LoadRequest, room: int, known: int) -> SequenceCache | None:
        """A lease at a position that came from a tier."""
        loaded = fetch.loaded
        if loaded is None or fetch.tier is None or loaded.done <= known:
            return None
        full = self.tree.shared(loaded.tokens)
        missing = max(room, -(-loaded.done // PAGE)) - len(full)
        if missing > self.accounts.attainable(missing, full):
            return None
        self.pages.share(full)
        slot = self.accounts.take_slot() if self.make_room(missing) else None
        fresh = None if slot is None else self.pages.take(-(-loaded.done // PAGE) - len(full))
        if slot is None or fresh is None:
            self.pages.release(full)
            self.slots.release([] if slot is None else [slot])
            return None
        lease = self.accounts.book(
            SequenceCache(slot, [*full, *fresh], [], loaded.done, loaded.logits, fetch.tier.name)
        )
        self._queue(RestoreItem(self.pools.hold(loaded), tuple(lease.pages), len(full) * PAGE, slot))
        fetch.tier.hits += 1
        fetch.tier.hit_tokens += loaded.done - known
        self._emit_here(lease)
        return lease

    def _emit_here(self, lease: SequenceCache) -> None:
        """Have the present position kept, for other sequences."""
        slot = self.reserve_checkpoint(lease, lease.done)
        if slot is not None:
            self._queue(CopySlot(lease.slot, slot))

    def _resume(self, checkpoint: Checkpoint, room: int) -> SequenceCache | None:
        """A lease at a checkpoint, which may go at once: the lease owns a copy of the state and of the partial page."""
        path = self.tree.path(checkpoint)
        missing = room - checkpoint.done // PAGE
        if missing > self.accounts.attainable(missing, path):
            return None
        checkpoint.locks += 1
        lease = self._copy_checkpoint(checkpoint, path) if self.make_room(missing) else None
        checkpoint.locks -= 1
        return lease

    def _copy_checkpoint(self, checkpoint: Checkpoint, path: Sequence[int]) -> SequenceCache | None:
        copy = self.accounts.take_copy(path, checkpoint.done)
        if copy is None:
            return None
        slot, pages = copy
        self.tree.use(checkpoint)
        self._queue(CopySlot(checkpoint.slot, slot))
        lease = self.accounts.book(SequenceCache(slot, pages, done=checkpoint.done, logits=checkpoint.logits,
                                         node=checkpoint.node))
        _guard(lease, checkpoint)
        return lease

    def cached_length(self, prompt: Sequence[int], end: bool = True) -> int:
        """Tokens that `admit` would find done."""
        checkpoint = self.tree.match(prompt, end).checkpoint if self.reuse else None
        return checkpoint.done if checkpoint else 0

    def make_room(self, pages: int) -> bool:
        """Have the tree give up prefixes until so many pages are free, or as many as can be; True if all are."""
        return self.accounts.make_room(pages)

    def reserve(self, lease: SequenceCache, tokens: int) -> int:
        """Grant pages for up to `tokens` tokens after the cursor; returns for how many there is room now (L4)."""
        missing = -(-(lease.done + tokens) // PAGE) - len(lease.pages)
        if missing <= 0:
            return tokens
        self.make_room(missing)
        pages = self.pages.take(max(0, min(missing, self.pages.free)))
        lease.pages += pages or []
        return min(tokens, lease.covered - lease.done)

    def reserve_checkpoint(self, lease: SequenceCache, position: int) -> int | None:
        """A slot for a step to write the lease's state at `position` to; None if none can be had."""
        if not self.reuse or position in lease.checkpoint_slots:
            return None
        slot = self.accounts.take_slot()
        if slot is not None:
            lease.checkpoint_slots[position] = slot
        return slot

    def commit_checkpoints(self, lease: SequenceCache, logits: object = None) -> None:
        """Put the states emitted so far into the tree. logits: of the last committed token, kept with its state."""
        emitting, lease.checkpoint_slots = lease.checkpoint_slots, {}
        for position, slot in emitting.items():
            tail = position % PAGE
            page = self.accounts.own_page(lease.pages[position // PAGE]) if tail and position <= lease.done else None
            if position > lease.done or (tail and page is None):
                self.slots.release([slot])
                continue
            checkpoint = self._keep(lease, position, slot, page, logits if position == lease.done else None)
            if position in lease.likely_resume:
                checkpoint.likely_resume = True
                _guard(lease, checkpoint)

    def _keep(self, lease: SequenceCache, done: int, slot: int, page: int | None, logits: Any = None,
              lasting: bool = True) -> Checkpoint:
        """Put a state of the lease into the tree, which takes over its slot and partial page, and into the tiers if it
        shall be lasting."""
        tokens = lease.prefix(done)
        checkpoint = self.tree.insert(tokens, lease.pages, slot, page, logits, lease.node)
        if lease.node is None or not lease.node.kept or lease.node.depth < checkpoint.node.depth:
            lease.node = checkpoint.node
        self.tree.keep_logits(self.rows - self._rows_held)
        if lasting and self.tiers:
            item = self.pools.hold(StoreRequest(tokens, checkpoint.logits, self.tiers))
            self._queue(StoreItem(item, tuple(lease.pages[:-(-done // PAGE)]), checkpoint.slot))
        return checkpoint

    def commit_if_finite(self, lease: SequenceCache) -> bool:
        """Put the states emitted so far into the tree although no logits were seen that depend on them, if all that the
        lease holds is finite; else give them up. Returns whether it is."""
        if not self.reuse:
            return False
        self.flush_delta_log(lease)
        try:
            self.flush_operations()
            sound = self.pools.sound((lease.slot, *lease.checkpoint_slots.values()), lease.pages, lease.done)
        except Exception:  # such as that a look takes memory that is not there
            log.exception("a prefix is not kept, as nobody can say whether it is sound")
            sound = False
        if sound:
            self.commit_checkpoints(lease)
        self.slots.release(lease.checkpoint_slots.values())
        lease.checkpoint_slots = {}
        return sound

    def commit(self, lease: SequenceCache, count: int, base: int | None = None) -> None:
        """Move the cursor over the next `count` keys, whose K/V and state were just written: the one place that does
        (L1).

        base: tokens that the state in the slot stands for now, where the step appended to the replay ring; those of
        the step's tokens that are not committed leave nothing behind.
        """
        assert lease.done + count <= lease.covered, "tokens are committed past the granted pages"
        assert 0 <= count <= len(lease.keys) - lease.done, "tokens are committed that the sequence does not have"
        lease.done += count
        lease.unflushed = 0 if base is None else lease.done - base
        assert 0 <= lease.unflushed <= RING, "the cursor is not within the replay ring"

    def rollback(self, lease: SequenceCache, done: int) -> bool:
        """Take back the last committed tokens, which were drafts that nobody else has seen; False, and no change, if
        they lie before the replay ring. Where no layer is recurrent they may lie anywhere (L2). The keys are the
        caller's to change."""
        if not (lease.base if self.sizes.recurrent else 0) <= done <= lease.done:
            return False
        assert self.pages.alone(lease.pages[done // PAGE:]), "tokens are taken back that others have"
        lease.unflushed = max(lease.unflushed - (lease.done - done), 0)
        lease.done = done
        self._cut(lease)
        return True

    def _cut(self, lease: SequenceCache) -> None:
        """The keys after the cursor may become others."""
        if lease.done < len(lease.prompt):
            lease.prompt = lease.prompt[:lease.done]
        if lease.node and lease.done < lease.node.depth * PAGE:
            lease.node = None

    def flush_delta_log(self, lease: SequenceCache) -> None:
        """Bring the state in the slot forward to the cursor, so that all of the replay ring is free."""
        self.accounts.copy_state(lease, lease.slot)
        lease.unflushed = 0

    def queue_delta_flush(self, lease: SequenceCache, base: int, done: int) -> None:
        """Bring the state in the slot, which stands for `base` tokens as soon as a step in flight is over, forward to
        `done` tokens, which are committed. The lease knows of neither: `commit` tells it."""
        assert lease.delta_log is not None and done <= lease.done, "a state is brought to tokens that may not stay"
        if base < done:
            self.accounts.queue.append(FlushDeltaLog(lease.slot, lease.delta_log, base, done))

    def attach_delta_log(self, lease: SequenceCache) -> bool:
        """Give the lease a replay ring, if it has none; False if there is none to be had. Where no layer is recurrent
        nobody needs one."""
        if lease.delta_log is None:
            unit = self.delta_logs.take()
            lease.delta_log = unit[0] if unit else None
        return lease.delta_log is not None or not self.sizes.recurrent

    def swap_slots(self, lease: SequenceCache, other: SequenceCache) -> None:
        """Swap slots: `lease` takes the state that a step wrote into the slot of `other` instead of its own."""
        lease.slot, other.slot = other.slot, lease.slot
        self.accounts.sequences[lease.slot], self.accounts.sequences[other.slot] = lease, other

    def allocate_spare_slots(self, count: int) -> None:
        """Have so many spare slots, or as many as leave one for each of as many sequences and one more."""
        spares, free = self.accounts.spares, self.slots.free
        spares.update(dict.fromkeys(self.slots.take(max(min(count - len(spares), free - count - 1), 0)) or ()))

    def swap_spare_slot(self, lease: SequenceCache, spare: int) -> None:
        """The lease's state is the one that a step wrote to this spare slot; its own becomes a spare one."""
        spares = self.accounts.spares
        del spares[spare]
        spares[lease.slot] = None
        del self.accounts.sequences[lease.slot]
        lease.slot = spare
        self.accounts.book(lease)

    def fork(self, source: SequenceCache | CacheSnapshot, keys: list[int] | None = None) -> SequenceCache | None:
        """A new lease at the source's position, or None if pages or slots are short. keys: its own, which begin as the
        source's; by default a copy of those."""
        self.accounts.expect(source)
        copy = self.accounts.take_copy(source.pages, source.done)
        if copy is None:
            return None
        slot, pages = copy
        self.accounts.copy_state(source, slot)
        return self.accounts.book(SequenceCache(slot, pages, [*source.tokens] if keys is None else keys, source.done))

    def snapshot(self, lease: SequenceCache, logits: Any = None) -> CacheSnapshot | None:
        """Keep the lease's present position, or None if pages, slots or room for its logits are short."""
        copy = self.fork(lease) if logits is None or self._rows_held < self.rows else None
        if copy is None:
            return None
        del self.accounts.sequences[copy.slot]
        kept = CacheSnapshot(copy.slot, tuple(copy.pages), tuple(copy.tokens), logits)
        self.accounts.snapshots[kept.slot] = kept
        self.tree.keep_logits(self.rows - self._rows_held)
        return kept

    @property
    def _rows_held(self) -> int:
        """Snapshots with logits."""
        return sum(kept.logits is not None for kept in self.accounts.snapshots.values())

    def restore(self, lease: SequenceCache, snapshot: CacheSnapshot | None) -> bool:
        """Take the lease back to a snapshot (None: to the start); False, and no change, if a page is short."""
        self.accounts.expect(lease)
        if snapshot is None:
            self.pages.release(lease.pages)
            lease.pages, lease.keys, lease.done, lease.unflushed = [], [], 0, 0
            self._cut(lease)
            return True
        self.accounts.expect(snapshot)
        others = {page for holder in self.accounts.holders if holder is not lease for page in holder.pages}
        if snapshot.done % PAGE and len(others) == self.pages.size:
            return False
        self.pages.release(lease.pages)
        lease.pages = []
        pages = self.accounts.share_pages(snapshot.pages, snapshot.done)
        assert pages is not None
        lease.pages, lease.keys, lease.done, lease.unflushed = pages, [*snapshot.tokens], snapshot.done, 0
        lease.prompt, lease.node = array("q"), None
        self._queue(CopySlot(snapshot.slot, lease.slot))
        return True

    def clear(self) -> None:
        """Give up all prefixes in the pools. The tiers keep theirs."""
        while self.tree.evict():
            pass

    def pin(self, tokens: Sequence[int]) -> bool:
        """Keep the state at the end of these tokens for as long as anything can be kept; False if there is none."""
        checkpoint = self.tree.at(tokens)
        if checkpoint is None:
            return False
        checkpoint.pinned = True
        return True

    def close(self) -> None:
        """Wait until the tiers have written what they were given."""
        self.flush_operations()
        for tier in self.tiers:
            tier.close()

    def prepare(self) -> None:
        """Have the tiers do before what would hold up a GPU later."""
        for tier in self.tiers:
            tier.prepare()

    def can_preempt(self, room: int) -> bool:
        """Whether what a lease holds would stay in the tree if it rested, beside all that runs and rests, and a
        newcomer, where all together take `room` tokens more."""
        holders = self.accounts.holders
        states = len(holders) + len(self._preempted) + 1
        pages = (
            sum(len(holder.pages) for holder in holders) + sum(rest.pages for rest in self._preempted) - (-room // PAGE)
        )
        return states <= self.slots.size - self.slots.size // 8 and pages <= self.pages.size

    def preempt(self, lease: SequenceCache, keep: bool) -> PreemptedState:
        """Give back all that the lease owns, as `release`, for a sequence that will go on soon: what it would return to
        stays guarded until `wake`, and the tiers get nothing."""
        rest, lease.guarded = PreemptedState(lease.guarded, len(lease.pages)), []
        end = self.release(lease, keep, lasting=False)
        if end:
            rest.guarded.append(end)
            end.guards += 1
        self._preempted.append(rest)
        return rest

    def resume_preempted(self, rest: PreemptedState, lease: SequenceCache | None = None) -> None:
        """The sequence goes on with this lease, or never."""
        self._preempted.remove(rest)
        if lease:
            lease.guarded += rest.guarded
        else:
            for checkpoint in rest.guarded:
                checkpoint.guards -= 1

    def release(self, lease: SequenceCache, keep: bool = False, lasting: bool = True) -> Checkpoint | None:
        """Give back all that the lease owns; keep: the tree takes over its state and pages, as the checkpoint that is
        returned. lasting: the tiers get them too."""
        self.accounts.expect(lease)
        if keep and self.reuse:
            self.flush_delta_log(lease)
        del self.accounts.sequences[lease.slot]
        self.delta_logs.release([] if lease.delta_log is None else [lease.delta_log])
        self.slots.release(lease.checkpoint_slots.values())
        full, rest = divmod(lease.done, PAGE)
        for checkpoint in lease.guarded:
            checkpoint.guards -= 1
        if keep and self.reuse and lease.done:
            passed = self.tree.supersede(lease.prefix(lease.done), lease.likely_resume, lease.node)
            end = self._keep(lease, lease.done, lease.slot, lease.pages[full] if rest else None, lasting=lasting)
            end.likely_resume = True
            _succeed(passed, end, lease.likely_resume)
            self.pages.release([*lease.pages[:full], *lease.pages[full + bool(rest):]])
            return end
        self.pages.release(lease.pages)
        self.slots.release([lease.slot])
        return None

    def release_snapshot(self, snapshot: CacheSnapshot) -> None:
        """Give back all that the snapshot owns."""
        self.accounts.expect(snapshot)
        del self.accounts.snapshots[snapshot.slot]
        self.pages.release(snapshot.pages)
        self.slots.release([snapshot.slot])

    def check(self) -> None:
        """Assert that free + leased + kept is all there is, and that nobody shares a page that will change."""
        self.accounts.check()
        guards = Counter(one for guards in self._guarded() for one in guards)
        assert all(one.guards == count for one, count in guards.items()), "a checkpoint's guards are miscounted"
        for tier in self.tiers:
            tier.check()

    def _queue(self, operation: Operation) -> None:
        self.accounts.queue.append(operation)

    def _guarded(self) -> list[list[Checkpoint]]:
        return [
            *(lease.guarded for lease in self.accounts.sequences.values()),
            *(rest.guarded for rest in self._preempted),
        ]

    def owns(self, holder: SequenceCache | CacheSnapshot) -> bool:
        """Whether the lease or snapshot is one of this cache and still stands."""
        return self.accounts.owns(holder)


def _guard(lease: SequenceCache, checkpoint: Checkpoint) -> None:
    lease.guarded.append(checkpoint)
    checkpoint.guards += 1


def _succeed(passed: Sequence[Checkpoint], end: Checkpoint, expected: set[int]) -> None:
    """A prompt that resumes where the conversation's next turn was expected leaves what came after. It is another
    conversation that resumes at the first of several positions, the end of the opening."""
    turns = [one for one in passed if one is not end and (len(expected) == 1 or one.done > min(expected))]
    for index, one in enumerate(turns):
        one.superseded = (*turns[index + 1:], end)
