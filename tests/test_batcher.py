"""A batcher's clients take turns and have equal shares of what may wait: one with many jobs costs no other one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from deltic.embeddings.batcher import Batcher, EncodeJob
from deltic.embeddings.types import Item, Output, Vectors
from deltic.errors import BusyError

DENSE: frozenset[Output] = frozenset({"dense"})


class Model:
    """Notes the items of its batches, of four tokens each, and waits with them until it may go on."""

    budget, overlaps = 4, False

    def __init__(self) -> None:
        self.batches, self.begun, self.free = list[list[int]](), threading.Event(), threading.Event()

    def start(self, items: Sequence[Item], wanted: frozenset[Output]) -> Callable[[], list[Vectors]]:
        self.batches.append([item.ids[0] for item in items])
        self.begun.set()
        assert self.free.wait(60)
        return lambda: [Vectors() for _ in items]


@contextmanager
def held(most: int = 1000) -> Iterator[tuple[Model, Batcher]]:
    """A batcher whose model is busy with the first batch, of one item, until the end of the block."""
    model: Any = Model()
    batcher = Batcher(model, most)
    batcher.submit(EncodeJob([Item([0, 0, 0, 0])], DENSE, client="first"))
    assert model.begun.wait(60)
    try:
        yield model, batcher
    finally:
        model.free.set()
        batcher.close()


def job(client: str, number: int, items: int = 1, tokens: int = 1) -> EncodeJob:
    return EncodeJob([Item([number] * tokens)] * items, DENSE, client=client)


def test_clients_take_turns_and_not_their_jobs() -> None:
    with held() as (model, batcher):
        flood = [batcher.submit(job("flood", 1)) for _ in range(50)]
        other = batcher.submit(job("other", 2, items=3))
        model.free.set()
        other.future.result(60)
        for each in flood:
            each.future.result(60)
    assert model.batches[1:3] == [[1, 2, 1, 2], [1, 2, 1, 1]]


def test_jobs_of_no_client_are_each_one_of_their_own() -> None:
    with held() as (model, batcher):
        large, small = batcher.submit(job("", 1, items=20)), batcher.submit(job("", 2))
        model.free.set()
        small.future.result(60)
        large.future.result(60)
    assert model.batches[1] == [1, 2, 1, 1]


def test_a_newcomer_gets_a_share_of_a_full_room() -> None:
    """The newest job of the client that holds most gives up its place; that client itself is refused."""
    with held(most=100) as (model, batcher):
        flood = [batcher.submit(job("flood", 1, items=12)) for _ in range(8)]
        assert batcher.waiting == 100
        with pytest.raises(BusyError, match="max_live_tokens"):
            batcher.submit(job("flood", 1))
        other = batcher.submit(job("other", 2, items=10))
        with pytest.raises(BusyError, match=r"given their place to another client's \(max_live_tokens\)"):
            flood[-1].future.result(0)
        assert [each.future.done() for each in flood] == [False] * 7 + [True]
        assert batcher.waiting == 98 and batcher.displaced == 1
        model.free.set()
        assert len(other.future.result(60)) == 10
        assert all(len(each.future.result(60)) == 12 for each in flood[:-1])
    assert batcher.waiting == 0


def test_abandoned_requests_are_dropped_at_once() -> None:
    with held(most=100) as (model, batcher):
        left = batcher.submit(job("flood", 1, items=90))
        left.future.cancel()
        assert batcher.waiting == 4
        batcher.submit(job("flood", 2, items=90))
    assert not any(1 in batch for batch in model.batches)
