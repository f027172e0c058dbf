"""Capabilities of cards for which kernels differ: instructions, and the shared memory that limits the blocks' sizes."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import torch

from deltic.errors import ConfigError

OPTION: Final = "DELTIC_CARD"
"""Environment variable: names a card. Kernels then use only that card's instructions and shared memory."""
_LEAST_SHARED_BYTES: Final = 99 << 10
"""Shared memory of a block that every card of 8.0 or later offers."""
_STATE_BYTES: Final = 64 << 10
"""Bytes of a state of 128 x 128 float32."""


@dataclass(frozen=True, slots=True)
class Card:
    """A kind of card.

    name: compute capability, such as sm_86. target: NVRTC's target; compute_86 for PTX that the driver compiles.
    shared_memory: largest shared memory of a block, in bytes.
    bulk_copies: one thread copies kilobytes, or boxes of a matrix, to shared memory; else each lane copies 16 bytes.
    overlaps: a kernel may start while the previous one still runs (programmatic dependent launch).
    wgmma: warp groups multiply matrices in shared memory; otherwise warps multiply matrices in registers.
    """

    name: str
    target: str
    shared_memory: int
    bulk_copies: bool
    overlaps: bool
    wgmma: bool

    @property
    def capability(self) -> tuple[int, int]:
        number = int(self.name.removeprefix("sm_"))
        return number // 10, number % 10

    @property
    def measured(self) -> bool:
        """True if the project's figures were measured on this kind of card."""
        return self.wgmma

    @property
    def restricted(self) -> bool:
        """True if the kernels are restricted to another card than the installed one."""
        return self.target.startswith("compute_")

    @property
    def description(self) -> str:
        """One line of text on the form of the kernels for this card."""
        copies = "bulk copies" if self.bulk_copies else "copies of 16 bytes"
        products = "wgmma and mma.sync" if self.wgmma else "mma.sync"
        note = "" if self.measured else "; we have not measured this card"
        return f"for {self.name} ({self.shared_memory >> 10} KiB a block, {copies}, {products}){note}"

    @property
    def max_shared_bytes(self) -> int:
        """Largest shared memory that a launch requests for a block. The rest is for the kernel's static variables."""
        return self.shared_memory - 1024

    def resident(self, shared: int) -> int:
        """Returns the number of blocks with `shared` bytes that fit on a multiprocessor, at most two. A multiprocessor
        has 1 KiB more than a block may take, and reserves 1 KiB per block."""
        return 2 if 2 * (shared + 1024) <= self.shared_memory + 1024 else 1

    @property
    def product_bytes(self) -> int:
        """Shared memory for the input and the sums of a product of several tokens. The rest is for barriers and the
        ring of weights. Larger inputs are staged in chunks, or several launches share the tokens."""
        ring = 48 if self.shared_memory > _LEAST_SHARED_BYTES else 34
        return self.max_shared_bytes - (ring << 10) - 1024

    @property
    def sum_bytes(self) -> int:
        """Shared memory for the sums of a group of units. A block has room for two groups."""
        return (8 if self.shared_memory > _LEAST_SHARED_BYTES else 4) << 10

    @property
    def whole_state_bytes(self) -> int:
        """Shared memory for whole states in a block of kernels/gdn_many.cuh, which itself needs 34 KiB more."""
        return (self.shared_memory - (34 << 10)) // _STATE_BYTES * _STATE_BYTES


def _card(major: int, minor: int, shared_memory: int = _LEAST_SHARED_BYTES) -> Card:
    newer, hopper, name = major >= 9, (major, minor) == (9, 0), f"sm_{major}{minor}"
    return Card(name, name + "a" * hopper, shared_memory, bulk_copies=newer, overlaps=newer, wgmma=hopper)


CARDS: Final = {card.name: card for card in (
    _card(8, 0, 163 << 10), _card(8, 6), _card(8, 9), _card(9, 0, 227 << 10), _card(10, 0, 227 << 10), _card(12, 0))}
"""The known cards by name: A100, RTX 30, RTX 40, H100, B200, RTX 50."""


@cache
def card_of(device: torch.device) -> Card:
    """Returns a device's card, restricted to the card that DELTIC_CARD names. For a CPU, returns the card of torch's
    current GPU, or sm_90 if there is none."""
    wanted = os.environ.get(OPTION)
    if wanted and wanted not in CARDS:
        raise ConfigError(f"{OPTION}={wanted} is no card: use one of {', '.join(CARDS)}, or leave it out", OPTION)
    if device.type != "cuda":
        return card_of(torch.device("cuda")) if torch.cuda.is_available() else CARDS[wanted or "sm_90"]
    major, minor = torch.cuda.get_device_capability(device)
    own = CARDS.get(f"sm_{major}{minor}") or _card(major, minor)
    return common_card(own, CARDS[wanted]) if wanted else own


def common_card(own: Card, other: Card) -> Card:
    """Returns `own`, restricted to the instructions and the shared memory that `other` also has."""
    if own.name == other.name:
        return own
    older = min(own, other, key=lambda card: card.capability)
    return replace(
        own,
        name=other.name,
        target=f"compute_{older.name.removeprefix('sm_')}",
        shared_memory=min(own.shared_memory, other.shared_memory),
        bulk_copies=older.bulk_copies,
        overlaps=older.overlaps,
        wgmma=False,
    )


@cache
def default_card() -> Card:
    """Returns the card of torch's current device."""
    return card_of(torch.device("cpu"))
