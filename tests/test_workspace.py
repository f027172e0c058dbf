"""Memory that is one model's alone is given back where nobody takes any, in whatever thread; without a device."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Barrier, Thread

import pytest
import torch

from deltic.ops.memory import Guard, Workspace, guard

DEVICE = torch.device("cuda", 0)


class Pool:
    def __init__(self, card: Card) -> None:
        self.card = card

    def __del__(self) -> None:
        self.card.given += 1
        self.card.wrong += self.card.used > 0


class Card:
    """torch's memory, which may not be given back while it is used."""

    def __init__(self) -> None:
        self.used, self.given, self.wrong = 0, 0, 0

    def pool(self) -> object:
        return Pool(self)

    @contextmanager
    def use(self, pool: object, index: int) -> Iterator[None]:
        self.used += 1
        yield
        self.used -= 1


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    monkeypatch.setattr(torch.cuda, "MemPool", card.pool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", card.use)
    return card


def cyclic() -> Workspace:
    space = Workspace()
    space.itself = space  # type: ignore[attr-defined]
    return space


def test_memory_is_freed_with_its_owner(card: Card) -> None:
    space = Workspace()
    with space.use(DEVICE):
        assert card.used == 1
    assert not card.given
    del space
    assert card.given == 1


def test_free_is_deferred_during_a_step(card: Card) -> None:
    space = Workspace()
    cyclic()
    with space.use(DEVICE):
        gc.collect()
        with Workspace().use(DEVICE):
            pass
        assert not card.given
    assert (card.given, card.wrong) == (2, 0)


def test_free_is_deferred_during_recording(card: Card) -> None:
    cyclic()
    with guard().inside():
        gc.collect()
        assert not card.given
    assert card.given == 1


def test_free_from_other_threads_is_deferred(card: Card) -> None:
    """The last who is inside gives back."""
    space, ready = Workspace(), Barrier(2, timeout=10)

    def run() -> None:
        with Workspace().use(DEVICE):
            ready.wait()
            ready.wait()

    thread = Thread(target=run)
    thread.start()
    ready.wait()
    del space
    with Workspace().use(DEVICE):
        pass
    assert not card.given
    ready.wait()
    thread.join()
    assert (card.given, card.wrong) == (3, 0)


def test_garbage_collection_never_blocks(card: Card) -> None:
    way = Guard()
    with way._lock:
        way.leave([card.pool()])  # type: ignore[list-item]
        assert not card.given
    with way.inside():
        pass
    assert card.given == 1
