"""Frames: memory that holds either one state or some pages, and changes between the two at run time. No torch.

The pools of pages and of slots are views of one block of memory. Kernels find a unit by a base address and a number:

    block        [ frame 0        ][ frame 1        ][ frame 2        ] ...
    as states    [ slot 0         ][ slot L         ][ slot 2 L       ]        L layers: slots are L numbers apart
    as pages     [ 0 1 2 ... n-1  ][ P ... P+n-1    ][ 2 P ...        ]        P pages of one tensor fill a frame

Layer l of the state tensor begins l states after the start of the block, so that all layers of slot f * L lie in frame
f. Part t of the K/V (keys or values of one attention layer) begins t * n pages after the start, so that all parts of
the n pages from P * f on lie in frame f. Addresses never change; the accounts give each frame one role at a time.

Slots take the lowest frames, pages the highest ones. If a slot finds no free frame although the pages fit into fewer
frames, the pages of the emptiest frame move to free pages of others.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from deltic.cache.block_pool import BlockPool


@dataclass(frozen=True, slots=True)
class FrameLayout:
    """size: bytes of a frame.
    pages: number of pages that a frame holds.
    page_step: bytes between two pages with consecutive numbers in one tensor.
    slot_step: difference between the slot numbers of consecutive frames.
    side: bytes of a slot outside of its frame that are never used by pages, such as convolution inputs.
    """

    size: int
    pages: int
    page_step: int
    slot_step: int
    side: int = 0

    @property
    def unit(self) -> int:
        """Bytes of a frame that may become a slot."""
        return self.size + self.side

    def of_shards(self, count: int) -> FrameLayout:
        """Returns the layout of `count` shards together, whose units have the same numbers."""
        return replace(self, size=count * self.size, page_step=count * self.page_step, side=count * self.side)

    def first_page(self, frame: int) -> int:
        return -(-frame * self.size // self.page_step)

    def frame_of(self, page: int) -> int:
        return page * self.page_step // self.size

    def frames_for(self, pages: int) -> int:
        return -(-pages // self.pages)


class FixedUnits:
    """Pages and slots in separate memory."""

    def __init__(self, pages: int, slots: int) -> None:
        self.pages, self.slots = BlockPool("page", pages), BlockPool("slot", slots)

    def room(self, slots: int) -> int:
        """Returns the number of pages that fit while `slots` slots are in use; negative if the slots do not fit."""
        return self.pages.size if slots <= self.slots.size else -1

    def free_pages(self, slots: int = 0) -> int:
        """Returns the number of free pages after taking `slots` more slots; negative if the slots do not fit."""
        return self.pages.free if slots <= self.slots.free else -1

    def take_slot(self) -> tuple[int, dict[int, int] | None]:
        """Takes a slot; one must be free. Returns its number and the new numbers of the pages that moved for it, by old
        ones; instead of these None, if the slot's memory held no pages since it was last a slot."""
        taken = self.slots.take()
        assert taken, "no slot is free"
        return taken[0], None


class SharedUnits:
    """Pages and slots in frames. The first `slots` frames may become slots."""

    def __init__(self, layout: FrameLayout, frames: int, slots: int) -> None:
        self.layout, self.frames = layout, frames
        self.unused = [*range(frames)]  # ascending
        self.had_pages = set[int]()  # frames that held pages since they were last a slot
        self.pages, self.slots = FramePages(self), FrameSlots(self, min(slots, frames))

    def room(self, slots: int) -> int:
        """As `FixedUnits.room`."""
        return (self.frames - slots) * self.layout.pages if slots <= self.slots.size else -1

    def free_pages(self, slots: int = 0) -> int:
        """As `FixedUnits.free_pages`."""
        return self.room(self.slots.used + slots) - self.pages.used

    def take_slot(self) -> tuple[int, dict[int, int] | None]:
        """As `FixedUnits.take_slot`."""
        assert self.free_pages(1) >= 0, "no slot is free"
        moved = {} if self.unused and self.unused[0] < self.slots.size else self.pages.vacate(self.slots.size)
        frame = self.unused[0]
        slot = self.slots.take()
        assert slot
        if frame not in self.had_pages:
            return slot[0], None
        self.had_pages.remove(frame)
        return slot[0], moved


class FramePages:
    """The pages of frames, with the methods of a `BlockPool`."""

    name = "page"

    def __init__(self, units: SharedUnits) -> None:
        self._units, self._layout = units, units.layout
        self.size = units.frames * units.layout.pages
        self._owners = dict[int, int]()
        self._holes = dict[int, list[int]]()  # free pages of each frame that holds pages, ascending
        self._open = list[int]()  # frames with free pages, ascending

    @property
    def used(self) -> int:
        return len(self._owners)

    @property
    def free(self) -> int:
        """Number of pages that can be taken now."""
        return max(self._units.free_pages(), 0)

    def take(self, count: int = 1) -> list[int] | None:
        """As `BlockPool.take`; takes pages of the highest frames first."""
        if count > self.free:
            return None
        taken = list[int]()
        while len(taken) < count:
            if not self._open:
                self._add(self._units.unused.pop())
            frame = self._open[-1]
            holes = self._holes[frame]
            few = holes[:count - len(taken)]
            del holes[:len(few)]
            taken += few
            if not holes:
                self._open.pop()
        self._owners.update(dict.fromkeys(taken, 1))
        return taken

    def share(self, pages: Iterable[int], more: int = 1) -> None:
        """As `BlockPool.share`."""
        owners = self._owners
        for page in pages:
            assert page in owners, f"page {page} is shared but has no owner"
            owners[page] += more

    def release(self, pages: Iterable[int]) -> None:
        """As `BlockPool.release`. A frame becomes unused with the release of its last page."""
        for page in pages:
            assert page in self._owners, f"page {page} is released but has no owner"
            self._owners[page] -= 1
            if not self._owners[page]:
                del self._owners[page]
                self._free(page)

    def owned(self, page: int) -> bool:
        return page in self._owners

    def alone(self, pages: Iterable[int]) -> bool:
        """As `BlockPool.alone`."""
        return all(self._owners.get(page) == 1 for page in pages)

    def vacate(self, below: int) -> dict[int, int]:
        """Moves the pages of the emptiest frame before `below` to other frames. Returns the new numbers by old ones."""
        frames = (frame for frame in self._holes if frame < below)
        frame = max(frames, key=lambda frame: (len(self._holes[frame]), -frame))
        holes = self._holes.pop(frame)
        if holes:
            del self._open[bisect_left(self._open, frame)]
        first = self._layout.first_page(frame)
        old = sorted({*range(first, first + self._layout.pages)}.difference(holes))
        new = self.take(len(old)) or []
        for source, target in zip(old, new, strict=True):
            self._owners[target] = self._owners.pop(source)
        insort(self._units.unused, frame)
        return dict(zip(old, new, strict=True))

    def check(self, owned: Iterable[int]) -> None:
        """As `BlockPool.check`; also checks the roles of the frames."""
        counts = Counter(owned)
        wrong = [f"{page}: {counts[page]} found, {self._owners.get(page, 0)} known"
                 for page in sorted({*counts, *self._owners}) if counts[page] != self._owners.get(page, 0)]
        assert not wrong, f"page: owners do not add up: {'; '.join(wrong[:8])}"
        roles = [*self._units.unused, *self._holes, *self._units.slots.frames]
        assert sorted(roles) == [*range(self._units.frames)], "a frame has two roles, or none"
        assert self._open == sorted(frame for frame, holes in self._holes.items() if holes), "free pages are not found"
        for frame, holes in self._holes.items():
            first = self._layout.first_page(frame)
            within = {*range(first, first + self._layout.pages)}
            assert holes == sorted(within.difference(counts)) != sorted(within), f"frame {frame} has other free pages"
        assert all(self._layout.frame_of(page) in self._holes for page in counts), "a page lies outside of its frame"

    def _add(self, frame: int) -> None:
        self._units.had_pages.add(frame)
        first = self._layout.first_page(frame)
        self._holes[frame] = [*range(first, first + self._layout.pages)]
        insort(self._open, frame)

    def _free(self, page: int) -> None:
        frame = self._layout.frame_of(page)
        holes = self._holes[frame]
        if not holes:
            insort(self._open, frame)
        insort(holes, page)
        if len(holes) == self._layout.pages:
            del self._holes[frame], self._open[bisect_left(self._open, frame)]
            insort(self._units.unused, frame)


class FrameSlots:
    """The slots of frames, with the methods of a `BlockPool` except `share`."""

    name = "slot"

    def __init__(self, units: SharedUnits, size: int) -> None:
        self._units, self.size = units, size
        self._owned = set[int]()

    @property
    def used(self) -> int:
        return len(self._owned)

    @property
    def frames(self) -> list[int]:
        """The frames that are slots now."""
        return [slot // self._units.layout.slot_step for slot in self._owned]

    @property
    def free(self) -> int:
        """Number of slots that can be taken now, including those for which pages must move."""
        pages = self._units.layout.frames_for(self._units.pages.used)
        return min(self.size, self._units.frames - pages) - self.used

    def take(self) -> list[int] | None:
        """Takes the slot of the lowest unused frame; None if there is none."""
        if not self._units.unused or self._units.unused[0] >= self.size:
            return None
        slot = self._units.unused.pop(0) * self._units.layout.slot_step
        self._owned.add(slot)
        return [slot]

    def release(self, slots: Iterable[int]) -> None:
        """As `BlockPool.release`."""
        for slot in slots:
            assert slot in self._owned, f"slot {slot} is released but has no owner"
            self._owned.remove(slot)
            insort(self._units.unused, slot // self._units.layout.slot_step)

    def owned(self, slot: int) -> bool:
        return slot in self._owned

    def check(self, owned: Iterable[int]) -> None:
        """As `BlockPool.check`."""
        counts = Counter(owned)
        assert counts == Counter(self._owned), f"slot: owners do not add up: {sorted(counts)}, {sorted(self._owned)}"


Units = FixedUnits | SharedUnits
PagePool = BlockPool | FramePages
SlotPool = BlockPool | FrameSlots
