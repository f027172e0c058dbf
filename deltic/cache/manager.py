"""The cache manager: grants pages and slots to sequences, moves their cursors and keeps their prefixes. No torch.

A sequence's tokens by position, as half-open intervals. PAGE divides `full`; `full <= done < full + PAGE`:

    0 ............... full .......... done .......... covered
    [ full pages      )[ partial page )[ granted       )
      any owners         one owner       one owner, not written yet

    commit(n)                [done, done + n) is committed: the cursor moves (L1)
    rollback(d)              [d, done) is forgotten; its pages stay granted
    commit_checkpoints()     for a state written at p <= done: the tree shares the pages of [0, p // PAGE * PAGE),
                             copies the rest of [0, p) and takes over the state's slot; for p > done the slot is freed
    release(keep=False)      the pages of [0, covered) lose an owner: pages without another owner are freed, and so is
                             the slot. The tree owns the pages up to the node where the sequence resumed; this node
                             loses a user
    release(keep=True)       [0, full)         the tree keeps the pages that it does not have; duplicates are freed
                             [full, done)      the tree takes over the partial page and the state's slot
                             [done, covered)   all pages but the partial one are freed

The state in a sequence's slot covers the tokens [0, base). The updates of [base, done) are in its state delta log if it
has one; else base == done. The log is flushed before the state is copied or kept (fork, snapshot, end of a sequence).

A new sequence resumes at the deepest checkpoint that is a prefix of its prompt (L2). The tree evicts prefixes if a
sequence needs a page or slot; the offload tiers keep copies and load them again. The manager does not touch tensors: it
queues changes of the pools as `operations`.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from deltic.cache.block_accounts import BlockAccounts, StateSlots
from deltic.cache.handles import CacheSnapshot, PageList, PreemptedState, SequenceCache
from deltic.cache.lineage import Line, Lines
from deltic.cache.offload.tiers import LoadRequest, StoreRequest
from deltic.cache.operations import CopySlot, OperationQueue, Pools, RestoreItem, StoreItem
from deltic.cache.radix_tree import Checkpoint, PrefixMatch
from deltic.params import PAGE, RING, Lineage

if TYPE_CHECKING:
    from deltic.cache.offload.index import TierIndex

log = logging.getLogger("deltic")

_PREEMPTION_RESERVE = 8
"""Preemption leaves one in this many slots to the tree."""


class HybridCache:
    """Manages K/V pages and recurrent states of all sequences. `check` asserts that the accounts are consistent."""

    def __init__(self, pools: Pools, reuse: bool = True, tiers: Sequence[TierIndex] = (),
                 rows: int | None = None) -> None:
        """reuse: keep prefixes for later sequences. tiers: the offload tiers that also store them, fastest first. rows:
        number of positions that may be kept with their logits; None: the number of slots."""
        self.pools, self.reuse = pools, reuse
        self.sizes = pools.sizes
        self.tiers = tuple(tiers) if reuse else ()
        self.operations = OperationQueue(pools)
        self.accounts = BlockAccounts(self.sizes, self.operations)
        self.states = StateSlots(self.accounts, self.sizes.recurrent)
        self.pages, self.slots = self.accounts.pages, self.accounts.slots
        self.delta_logs, self.tree = self.accounts.delta_logs, self.accounts.tree
        self.rows = self.slots.size if rows is None else rows
        self.lines = Lines()
        self.spared = set[Checkpoint]()
        """Line ends (`lineage`) that the last admission or reservation was not allowed to evict."""
        self._preempted: list[PreemptedState] = []

    @property
    def idle(self) -> bool:
        """True if only the tree owns pages and slots and no preempted sequence waits."""
        return not self.accounts.owners and not self._preempted

    # admission

    def start_load(self, prompt: Sequence[int]) -> LoadRequest:
        """Returns a request that looks in the tiers for a deeper position than the tree has. The caller polls it until
        it is finished, then passes it to `admit`."""
        known = self.tree.cached_length(prompt) if self.tiers else 0
        return LoadRequest(prompt, known, self.tiers, self.pools.item_validator)

    def admit(self, prompt: Sequence[int] = (), min_tokens: int = 0, load: LoadRequest | None = None,
              allow_end: bool = True, keys: list[int] | None = None, lineage: Line | Lineage | None = None
              ) -> SequenceCache | None:
        """Returns a sequence cache at the deepest position that is kept for `prompt`, or at its start.

        Returns None if no slot is available, or not enough pages for `min_tokens` in total. A refusal evicts nothing;
        it leaves `spared` non-empty if a branch must wait for other sequences of its trunk. Without `min_tokens`, falls
        back to the start of the prompt: the kept position may itself occupy the memory that is missing.

        load: the finished request of `start_load`. allow_end: the sequence may resume at the very end of the prompt if
        the logits there are known. keys: the sequence's list of keys, which begins with the prompt; by default the
        prompt itself. lineage: the lineage of the request, or the sequence's line if it ran before."""
        match = self.tree.match(prompt, allow_end) if self.reuse else PrefixMatch(None, 0)
        checkpoint = match.checkpoint
        pages = -(-min_tokens // PAGE)
        line = self.lines.of(lineage or Lineage(), checkpoint) if self.reuse else None
        if line:
            line.enter()
        with self._sparing(line, checkpoint):
            cache = self._admit_loaded(load, pages, checkpoint.done if checkpoint else 0) if load else None
            if cache is None and checkpoint:
                cache = self._admit_at(checkpoint, pages)
            if cache is None and not (checkpoint and min_tokens):
                cache = self._admit_at_start(pages)
        if cache:
            cache.keys = keys or (prompt if isinstance(prompt, list) else [*prompt])
            cache.prompt = prompt if keys and isinstance(prompt, array) else array("q")
            cache.shared, cache.line = match.shared, line
        elif line:
            line.leave()
        return cache

    def _admit_at_start(self, pages: int) -> SequenceCache | None:
        if not self.accounts.make_room(pages, slots=1):
            return None
        slot = self.accounts.take_slot()
        return None if slot is None else self.accounts.add(SequenceCache(slot))

    def _admit_at(self, checkpoint: Checkpoint, pages: int) -> SequenceCache | None:
        """Starts at a checkpoint of the tree. Copies its state and partial page, so that the checkpoint may be evicted
        at once. The tree keeps the full pages on behalf of the sequence, whatever their number."""
        path, full = PageList(self.tree.path(checkpoint)), checkpoint.node.depth
        missing = max(pages - checkpoint.done // PAGE, bool(checkpoint.done % PAGE))
        with self.tree.locking([checkpoint]):  # its slot is needed until its copy is queued
            slot = self.accounts.take_slot(path) if self.accounts.make_room(missing, slots=1) else None
            if slot is None:
                return None
            path[full:], = self.accounts.share_pages(path[full:], checkpoint.done % PAGE)
        self.tree.use(checkpoint)
        checkpoint.node.users += 1
        self.operations.append(CopySlot(checkpoint.slot, slot))
        cache = SequenceCache(slot, path, done=checkpoint.done, logits=checkpoint.logits, node=checkpoint.node,
                              resumed=checkpoint, lender=checkpoint.node)
        _guard(cache, checkpoint)
        return self.accounts.add(cache)

    def _admit_loaded(self, load: LoadRequest, pages: int, known: int) -> SequenceCache | None:
        """Starts at the position that a tier loaded, if it is deeper than the tree's (`known` tokens)."""
        loaded = load.loaded
        if loaded is None or load.tier is None or loaded.done <= known:
            return None
        shared = PageList(self.tree.shared(loaded.tokens))
        loaded_pages = -(-loaded.done // PAGE)
        missing = max(pages, loaded_pages) - len(shared)
        if missing > self.accounts.attainable(missing, 1, shared):
            return None
        self.pages.share(shared)
        slot = self.accounts.take_slot(shared) if self.accounts.make_room(missing, slots=1) else None
        fresh = None if slot is None else self.pages.take(loaded_pages - len(shared))
        if slot is None or fresh is None:
            self.pages.release(shared)
            self.slots.release([] if slot is None else [slot])
            return None
        cache = SequenceCache(slot, PageList([*shared, *fresh]), [], loaded.done, loaded.logits, load.tier.name)
        self.operations.append(RestoreItem(self.pools.hold(loaded), tuple(cache.pages), len(shared) * PAGE, slot))
        load.tier.hits += 1
        load.tier.hit_tokens += loaded.done - known
        self.accounts.add(cache)
        kept = self.reserve_checkpoint(cache, cache.done)
        if kept is not None:  # for other sequences
            self.operations.append(CopySlot(cache.slot, kept))
        return cache

    @contextmanager
    def _sparing(self, line: Line | None, resumed: Checkpoint | None = None, own: SequenceCache | None = None
                ) -> Iterator[None]:
        """Locks the line ends that a sequence of this line must not evict (`spared`) for a `with` block, if sequences
        of its trunk other than `own` are running."""
        running = line and any(one.line and one is not own and one.line.trunk is line.trunk
                               for one in self.accounts.sequences.values())
        self.spared = line.needed(resumed) if line and running else set()
        with self.tree.locking(self.spared):
            yield

    # steps

    def reserve(self, cache: SequenceCache, tokens: int) -> int:
        """Grants pages for up to `tokens` tokens after the cursor; returns the number of tokens that fit now (L4)."""
        missing = -(-(cache.done + tokens) // PAGE) - len(cache.pages)
        if missing <= 0:
            return tokens
        if self.pages.free < missing:
            with self._sparing(cache.line, cache.resumed, cache):
                self.accounts.make_room(missing)
        cache.pages += self.pages.take(min(missing, self.pages.free)) or []
        return min(tokens, cache.covered - cache.done)

    def commit(self, cache: SequenceCache, count: int, base: int | None = None) -> None:
        """Moves the cursor over the next `count` keys, whose K/V and state were just written. No other method moves it
        forward (L1). base: number of tokens that the state in the slot covers, if the step appended to the state delta
        log."""
        assert cache.done + count <= cache.covered, "tokens are committed past the granted pages"
        assert 0 <= count <= len(cache.keys) - cache.done, "tokens are committed that the sequence does not have"
        cache.done += count
        cache.unflushed = cache.done - base if base is not None and self.sizes.recurrent else 0
        assert 0 <= cache.unflushed <= RING, "the cursor is not within the state delta log"

    def rollback(self, cache: SequenceCache, done: int) -> bool:
        """Moves the cursor back to `done`, over tokens that were drafts. Returns False, and changes nothing, if the
        state in the slot covers more than `done` tokens (L2). The caller changes the keys."""
        if not (cache.base if self.sizes.recurrent else 0) <= done <= cache.done:
            return False
        assert self.pages.alone(cache.pages[done // PAGE:]), "tokens are taken back that others have"
        cache.unflushed = max(cache.unflushed - (cache.done - done), 0)
        cache.done = done
        _forget_keys(cache)
        return True

    # checkpoints

    def reserve_checkpoint(self, cache: SequenceCache, position: int) -> int | None:
        """Returns a slot into which a step will write the state at `position`; None if none is available."""
        if not self.reuse or position in cache.checkpoint_slots:
            return None
        slot = self.accounts.take_slot(keeping=True)
        if slot is not None:
            cache.checkpoint_slots[position] = slot
        return slot

    def commit_checkpoints(self, cache: SequenceCache, logits: object = None) -> None:
        """Moves the states that steps have written into the tree. logits: the logits after the last committed token."""
        slots, cache.checkpoint_slots = cache.checkpoint_slots, {}
        for position, slot in slots.items():
            partial = position % PAGE > 0
            page = None
            if partial and position <= cache.done:
                page = self.accounts.own_page(cache.pages[position // PAGE])
            if position > cache.done or (partial and page is None):
                self.slots.release([slot])
                continue
            checkpoint = self._keep(cache, position, slot, page, logits if position == cache.done else None)
            if position in cache.likely_resume:
                checkpoint.likely_resume = True
                _guard(cache, checkpoint)

    def commit_if_finite(self, cache: SequenceCache) -> bool:
        """Moves the states that steps have written into the tree if all K/V and states are finite; frees them
        otherwise. For a sequence whose logits have not been checked. Returns True if all are finite."""
        if not self.reuse:
            return False
        self.states.flush(cache)
        try:
            self.operations.flush()
            states = cache.slot, *cache.checkpoint_slots.values()
            finite = cache.done > 0 and self.pools.sound(states, cache.pages, cache.done)
        except Exception:  # such as a shortage of memory
            log.exception("a prefix is not kept, as its tensors could not be checked")
            finite = False
        if finite:
            self.commit_checkpoints(cache)
        self.slots.release(cache.checkpoint_slots.values())
        cache.checkpoint_slots = {}
        return finite

    def _keep(self, cache: SequenceCache, done: int, slot: int, page: int | None, logits: Any = None,
              lasting: bool = True) -> Checkpoint:
        """Gives a slot and a partial page to the tree. lasting: the tiers also store the prefix."""
        tokens = cache.prefix(done)
        checkpoint = self.tree.insert(tokens, cache.pages, slot, page, logits, cache.node)
        if cache.node is None or not cache.node.kept or cache.node.depth < checkpoint.node.depth:
            cache.node = checkpoint.node
        self.tree.keep_logits(self.rows - self._snapshots_with_logits)
        if lasting and self.tiers:
            item = self.pools.hold(StoreRequest(tokens, checkpoint.logits, self.tiers))
            self.operations.append(StoreItem(item, tuple(cache.pages[:-(-done // PAGE)]), checkpoint.slot))
        return checkpoint

    # copies

    def fork(self, source: SequenceCache | CacheSnapshot, keys: MutableSequence[int] | None = None,
             min_tokens: int = 0) -> SequenceCache | None:
        """Returns one fork of `source`, see `BlockAccounts.forks`. min_tokens, and None: as in `admit`."""
        with self._sparing(source.line):
            roomy = self.accounts.make_room(-(-min_tokens // PAGE) - source.done // PAGE)
            forks = self.accounts.forks(source, 1, keys) if roomy else []
        return forks[0] if forks else None

    def snapshot(self, cache: SequenceCache, logits: Any = None) -> CacheSnapshot | None:
        """Returns a copy of the current position; None if pages, slots or room for logits are short."""
        if logits is not None and self._snapshots_with_logits >= self.rows:
            return None
        copies = self.accounts.forks(cache, 1, keeping=True)
        if not copies:
            return None
        copy, = copies
        self.accounts.remove(copy)
        snapshot = self.accounts.add(CacheSnapshot(copy.slot, copy.pages, copy.keys, logits, copy.line))
        self.tree.keep_logits(self.rows - self._snapshots_with_logits)
        return snapshot

    @property
    def _snapshots_with_logits(self) -> int:
        return sum(snapshot.logits is not None for snapshot in self.accounts.snapshots.values())

    def restore(self, cache: SequenceCache, snapshot: CacheSnapshot | None) -> bool:
        """Resets a sequence to a snapshot, or to its start (None). Returns False, and changes nothing, if a page is
        short."""
        self.accounts.check_owner(cache)
        if snapshot is not None:
            self.accounts.check_owner(snapshot)
            others = {page for owner in self.accounts.owners if owner is not cache for page in owner.pages}
            if snapshot.done % PAGE and len(others) >= self.accounts.units.room(self.accounts.held_slots):
                return False
        self.accounts.release_pages(cache)
        cache.pages, cache.keys = PageList(), cache.keys[:0]
        cache.done = cache.unflushed = 0
        _forget_keys(cache)
        if snapshot is not None:
            (cache.pages,), cache.keys = self.accounts.share_pages(snapshot.pages, snapshot.done), snapshot.tokens
            cache.done = snapshot.done
            self.operations.append(CopySlot(snapshot.slot, cache.slot))
        return True

    # release

    def release(self, owner: SequenceCache | CacheSnapshot, keep: bool = False, lasting: bool = True,
                ended: bool = True) -> Checkpoint | None:
        """Releases the units of a sequence or snapshot. keep: the tree takes over a sequence's state and pages as a
        checkpoint, which is returned. lasting: the tiers also store it. ended: the sequence will not go on, so that
        the checkpoint becomes an end of its line."""
        self.accounts.check_owner(owner)
        keep = keep and self.reuse and owner.done > 0 and isinstance(owner, SequenceCache)
        if isinstance(owner, SequenceCache):
            if keep:
                self.states.flush(owner)
            self.delta_logs.release([] if owner.delta_log is None else [owner.delta_log])
            self.slots.release(owner.checkpoint_slots.values())
            for checkpoint in owner.guarded:
                checkpoint.guards -= 1
        self.accounts.remove(owner)
        end = None
        if keep and isinstance(owner, SequenceCache):
            end = self._keep_end(owner, lasting, ended)
        else:
            self.accounts.release_pages(owner)
            self.slots.release([owner.slot])
        if owner.line:
            owner.line.leave()
        return end

    def _keep_end(self, cache: SequenceCache, lasting: bool, ended: bool) -> Checkpoint:
        full, rest = divmod(cache.done, PAGE)
        passed = self.tree.supersede(cache.prefix(cache.done), cache.likely_resume, cache.node, cache.line)
        partial = cache.pages[full] if rest else None
        end = self._keep(cache, cache.done, cache.slot, partial, lasting=lasting)
        end.likely_resume = True
        if cache.line and (ended or cache.resumed in cache.line.ends):
            cache.line.add(end, cache.resumed)
        _supersede(passed, end, cache.likely_resume)
        self.accounts.release_pages(cache, kept=partial)
        return end

    def can_preempt(self, more_tokens: int) -> bool:
        """Returns True if the tree can keep the prefix of a sequence that is preempted now: memory must suffice for all
        running and preempted sequences and one more, with `more_tokens` further tokens."""
        owners = self.accounts.owners
        states = len(owners) + len(self._preempted) + 1
        pages = sum(len(owner.pages) for owner in owners) + sum(state.pages for state in self._preempted)
        enough_slots = states <= self.slots.size - self.slots.size // _PREEMPTION_RESERVE
        return enough_slots and pages + -(-more_tokens // PAGE) <= self.accounts.units.room(states)

    def preempt(self, cache: SequenceCache, keep: bool) -> PreemptedState:
        """Releases a sequence that will resume soon: its prefix is guarded in the tree and not stored in the tiers."""
        preempted = PreemptedState(cache.guarded, len(cache.pages), cache.line)
        cache.guarded = []
        if cache.line:
            cache.line.enter()
        end = preempted.end = self.release(cache, keep, lasting=False, ended=False)
        if end:
            preempted.guarded.append(end)
            end.guards += 1
            end.preempted += 1
        self._preempted.append(preempted)
        return preempted

    def resume_preempted(self, preempted: PreemptedState, cache: SequenceCache | None = None) -> None:
        """Ends a preemption: the sequence continues with this cache, or never (None)."""
        self._preempted.remove(preempted)
        if preempted.end:
            preempted.end.preempted -= 1
        if preempted.line:
            preempted.line.leave()
        if cache:
            cache.guarded += preempted.guarded
        else:
            for checkpoint in preempted.guarded:
                checkpoint.guards -= 1

    # all of it

    def clear(self) -> None:
        """Evicts all prefixes. The tiers keep theirs."""
        while self.tree.evict():
            pass

    def reset(self) -> None:
        """Makes a poisoned cache empty and usable again; the tiers keep their prefixes."""
        assert not self.accounts.owners, "a sequence or snapshot still relies on the pools"
        self.clear()
        self.operations.discard()

    def close(self) -> None:
        """Carries out queued operations and closes the tiers, which first finish their writes."""
        self.operations.flush()
        for tier in self.tiers:
            tier.close()

    def check(self) -> None:
        """Asserts that free, owned and kept units add up to the pools, and that no page that will change is shared."""
        self.accounts.check()
        guarded = [cache.guarded for cache in self.accounts.sequences.values()]
        guarded += [preempted.guarded for preempted in self._preempted]
        guards = Counter(checkpoint for checkpoints in guarded for checkpoint in checkpoints)
        assert all(one.guards == count for one, count in guards.items()), "a checkpoint's guards are miscounted"
        lines = [owner.line for owner in (*self.accounts.owners, *self._preempted) if owner.line]
        active = Counter(line for own in lines for line in own.path())
        assert all(line.active == count for line, count in active.items()), "a line's sequences are miscounted"
        for tier in self.tiers:
            tier.check()


def _guard(cache: SequenceCache, checkpoint: Checkpoint) -> None:
    cache.guarded.append(checkpoint)
    checkpoint.guards += 1


def _forget_keys(cache: SequenceCache) -> None:
    """Drops data derived from the keys after the cursor, which may be replaced."""
    if cache.done < len(cache.prompt):
        cache.prompt = cache.prompt[:cache.done]
    if cache.node and cache.done < cache.node.depth * PAGE:
        cache.node = None


def _supersede(passed: Sequence[Checkpoint], end: Checkpoint, expected: set[int]) -> None:
    """Records for each passed checkpoint the later ones, which a prompt that resumes there abandons. Leaves out the
    first of several expected positions, the end of the system prompt: a prompt that resumes there is another
    conversation and abandons nothing."""
    turns = [one for one in passed if one is not end and (len(expected) == 1 or one.done > min(expected))]
    for index, one in enumerate(turns):
        one.superseded = (*turns[index + 1:], end)
