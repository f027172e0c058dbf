"""The hybrid cache: K/V pages and recurrent state slots under one account.

A sequence holds a `Lease`: pages for its K/V, one slot for its recurrent state, and the cursor `done` that says how
many tokens both contain. Only `commit` moves a cursor forward and only `restore` moves it back (L1, L2).

    tokens     0 ........ 16 ........ 32 ........ done ..... covered
    pages      [ full    ][ full     ][ partial              ]
    owners     shared      shared      one lease only         granted, not yet written

Full pages hold committed tokens, never change again and may have many owners. A partial page has exactly one
owner: whoever forks or checkpoints in the middle of a page copies it. State slots are never shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from deltic.cache.ledger import Ledger
from deltic.cache.storage import Storage
from deltic.ops import Ops
from deltic.ops.records import PAGE


@dataclass(slots=True, eq=False)
class Lease:
    """What one running sequence owns. Read it freely; only HybridCache changes it.

    tokens: the ids that the committed K/V and state stand for; `done` is their count. pages cover `covered` tokens.
    """

    slot: int
    pages: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def done(self) -> int:
        return len(self.tokens)

    @property
    def covered(self) -> int:
        return len(self.pages) * PAGE


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A position to which sequences can return: its tokens, their pages, and a copy of the state in a slot."""

    slot: int
    pages: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def done(self) -> int:
        return len(self.tokens)


class HybridCache:
    """Grants pages and slots, moves cursors, forks and restores. `check()` proves the accounts."""

    def __init__(self, storage: Storage, ops: Ops) -> None:
        self.storage, self.ops = storage, ops
        self.pages = Ledger("page", storage.keys.shape[1])
        self.slots = Ledger("slot", storage.recurrent.shape[1])
        self._leases: dict[int, Lease] = {}
        self._checkpoints: dict[int, Checkpoint] = {}

    @property
    def capacity(self) -> int:
        """Tokens of K/V that all pages together hold."""
        return self.pages.size * PAGE

    def admit(self) -> Lease | None:
        """A lease with an empty past, or None if no slot is free."""
        slot = self.slots.take()
        return None if slot is None else self._book(Lease(slot[0]))

    def reserve(self, lease: Lease, tokens: int) -> int:
        """Grant pages for up to `tokens` tokens after the cursor; returns for how many there is room now (L4)."""
        missing = -(-(lease.done + tokens) // PAGE) - len(lease.pages)
        pages = self.pages.take(max(0, min(missing, self.pages.free)))
        lease.pages += pages or []
        return min(tokens, lease.covered - lease.done)

    def commit(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Move the cursor over tokens whose K/V and state were just written: the one place that does (L1)."""
        assert lease.done + len(tokens) <= lease.covered, "tokens are committed past the granted pages"
        lease.tokens += tokens

    def exchange_slots(self, lease: Lease, other: Lease) -> None:
        """Swap slots: `lease` takes the state that a step wrote into the slot of `other` instead of its own."""
        lease.slot, other.slot = other.slot, lease.slot
        self._leases[lease.slot], self._leases[other.slot] = lease, other

    def fork(self, source: Lease | Checkpoint) -> Lease | None:
        """A new lease at the source's position, or None if pages or slots are short."""
        self._expect(source)
        slot = self.slots.take()
        if slot is None:
            return None
        pages = self._share_pages(source.pages, source.done)
        if pages is None:
            self.slots.release(slot)
            return None
        self._copy_slot(source.slot, slot[0])
        return self._book(Lease(slot[0], pages, list(source.tokens)))

    def checkpoint(self, lease: Lease) -> Checkpoint | None:
        """Keep the lease's present position, or None if pages or slots are short."""
        copy = self.fork(lease)
        if copy is None:
            return None
        del self._leases[copy.slot]
        kept = Checkpoint(copy.slot, tuple(copy.pages), tuple(copy.tokens))
        self._checkpoints[kept.slot] = kept
        return kept

    def restore(self, lease: Lease, checkpoint: Checkpoint | None) -> bool:
        """Take the lease back to a checkpoint (None: to the start); False, and no change, if a page is short."""
        self._expect(lease)
        if checkpoint is None:
            self.pages.release(lease.pages)
            lease.pages, lease.tokens = [], []
            return True
        self._expect(checkpoint)
        if checkpoint.done % PAGE and not self.pages.free + self.pages.sole(lease.pages):
            return False
        self.pages.release(lease.pages)
        pages = self._share_pages(checkpoint.pages, checkpoint.done)
        assert pages is not None
        lease.pages, lease.tokens = pages, list(checkpoint.tokens)
        self._copy_slot(checkpoint.slot, lease.slot)
        return True

    def release(self, lease: Lease) -> None:
        """Give back all that the lease owns."""
        self._expect(lease)
        del self._leases[lease.slot]
        self.pages.release(lease.pages)
        self.slots.release([lease.slot])

    def drop(self, checkpoint: Checkpoint) -> None:
        """Give back all that the checkpoint owns."""
        self._expect(checkpoint)
        del self._checkpoints[checkpoint.slot]
        self.pages.release(checkpoint.pages)
        self.slots.release([checkpoint.slot])

    def check(self) -> None:
        """Assert that free + leased + kept is all there is, and that nobody shares a page that will change."""
        holders: list[Lease | Checkpoint] = [*self._leases.values(), *self._checkpoints.values()]
        self.slots.check(holder.slot for holder in holders)
        self.pages.check(page for holder in holders for page in holder.pages)
        owners: dict[int, int] = {}
        for holder in holders:
            assert len(holder.pages) * PAGE >= holder.done, "a cursor stands past its pages"
            for page in holder.pages:
                owners[page] = owners.get(page, 0) + 1
        for holder in holders:
            changing = holder.pages[holder.done // PAGE:]
            assert all(owners[page] == 1 for page in changing), "a page that is not full is shared"

    def owns(self, holder: Lease | Checkpoint) -> bool:
        """Whether the lease or checkpoint is one of this cache and still stands."""
        return self._leases.get(holder.slot) is holder or self._checkpoints.get(holder.slot) is holder

    def _expect(self, holder: Lease | Checkpoint) -> None:
        assert self.owns(holder), "a lease or checkpoint was given back before, or belongs to another cache"

    def _book(self, lease: Lease) -> Lease:
        self._leases[lease.slot] = lease
        return lease

    def _share_pages(self, pages: Sequence[int], done: int) -> list[int] | None:
        """Own the full pages below `done` too, and a copy of the partial one."""
        full, rest = divmod(done, PAGE)
        own = self.pages.take(1 if rest else 0)
        if own is None:
            return None
        self.pages.share(pages[:full])
        if own:
            self._copy_page(pages[full], own[0])
        return [*pages[:full], *own]

    def _copy_slot(self, source: int, target: int) -> None:
        self.ops.copy_slots(self.storage.slot_tensors, self._index(source), self._index(target))

    def _copy_page(self, source: int, target: int) -> None:
        self.ops.copy_pages(self.storage.page_tensors, self._index(source), self._index(target))

    def _index(self, unit: int) -> torch.Tensor:
        return torch.tensor([unit], device=self.storage.device)
