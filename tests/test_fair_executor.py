"""Clients share threads by the processor time that they use: deterministic, on clocks that only the tests move."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltic.engine.fair_executor import HALF_LIFE, FairExecutor

PATIENCE = 30.0


class Clocks:
    """Time that passes only when a task spends it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []

    def read(self) -> float:
        return self.now

    def spend(self, client: str, seconds: float) -> str:
        self.now += seconds
        self.order.append(client)
        return client


@contextmanager
def held(executor: FairExecutor, client: str = "holder") -> Iterator[None]:
    """One thread is taken until the end of the block."""
    begun, over = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        over.wait(PATIENCE)
    future = executor.submit(client, hold)
    assert begun.wait(PATIENCE)
    try:
        yield
    finally:
        over.set()
        future.result(PATIENCE)


def one_thread() -> tuple[Clocks, FairExecutor]:
    clocks = Clocks()
    return clocks, FairExecutor(1, "test", clock=clocks.read, processor=clocks.read)


def results(futures: list[Future[str]]) -> list[str]:
    return [future.result(PATIENCE) for future in futures]


def test_a_newcomer_goes_before_a_flood() -> None:
    clocks, executor = one_thread()
    with held(executor):
        flood = [executor.submit("flood", partial(clocks.spend, "flood", 1.0)) for _ in range(50)]
        other = executor.submit("other", partial(clocks.spend, "other", 1.0))
    results([*flood, other])
    assert clocks.order.index("other") <= 1


def test_clients_get_equal_time_not_equal_numbers() -> None:
    clocks, executor = one_thread()
    with held(executor):
        tasks = [executor.submit(client, partial(clocks.spend, client, seconds))
                 for client, seconds in (("heavy", 0.1), ("light", 0.01)) for _ in range(100)]
    results(tasks)
    last = max(index for index, client in enumerate(clocks.order) if client == "light")
    assert 8 <= clocks.order[:last].count("heavy") <= 12, "a hundred light tasks take as long as ten heavy ones"


def test_a_client_alone_keeps_its_order() -> None:
    clocks, executor = one_thread()
    with held(executor):
        tasks = [executor.submit("one", partial(clocks.spend, str(number), 0.1)) for number in range(20)]
    results(tasks)
    assert clocks.order == [str(number) for number in range(20)]


def test_use_is_forgotten_by_half_in_a_half_life() -> None:
    clocks, executor = one_thread()
    executor.submit("one", partial(clocks.spend, "one", 4.0)).result(PATIENCE)
    executor.submit("other", lambda: None).result(PATIENCE)  # the thread has charged the first task by then
    assert executor.used("one") == pytest.approx(4.0)
    clocks.now += HALF_LIFE
    assert executor.used("one") == pytest.approx(2.0)
    clocks.now += 20 * HALF_LIFE
    executor.submit("other", lambda: None).result(PATIENCE)
    executor.submit("third", lambda: None).result(PATIENCE)
    assert executor.used("one") == 0.0 and len(executor._idle) <= 2


def test_only_processor_time_is_charged() -> None:
    executor = FairExecutor(1, "test")
    executor.submit("sleeper", lambda: time.sleep(0.2)).result(PATIENCE)
    executor.submit("worker", lambda: sum(range(3_000_000))).result(PATIENCE)
    executor.submit("other", lambda: None).result(PATIENCE)
    assert executor.used("sleeper") < executor.used("worker")


def test_a_client_leaves_threads_to_others() -> None:
    executor = FairExecutor(4, "test")
    begun, over = threading.Semaphore(0), threading.Event()

    def hold() -> None:
        begun.release()
        over.wait(PATIENCE)
    flood = [executor.submit("flood", hold) for _ in range(8)]
    try:
        assert all(begun.acquire(timeout=PATIENCE) for _ in range(2))
        assert executor.submit("other", lambda: "done").result(PATIENCE) == "done"
        assert executor.waiting() == 6, "two of four threads are for one client, the others stay free"
    finally:
        over.set()
    for task in flood:
        task.result(PATIENCE)


def test_errors_reach_the_caller_and_are_charged() -> None:
    clocks, executor = one_thread()

    def fail() -> None:
        clocks.spend("one", 3.0)
        raise ValueError("no")
    with pytest.raises(ValueError, match="no"):
        executor.submit("one", fail).result(PATIENCE)
    executor.submit("other", lambda: None).result(PATIENCE)
    assert executor.used("one") == pytest.approx(3.0)


def test_cancelled_work_is_dropped_with_its_data() -> None:
    class Data:
        pass

    executor, data, ran = FairExecutor(1, "test"), Data(), list[Data]()
    seen = weakref.ref(data)
    with held(executor):
        future = executor.submit("one", partial(ran.append, data))
        assert executor.waiting() == 1 and future.cancel()
        del data
        gc.collect()
        assert executor.waiting() == 0 and seen() is None
    assert not ran
    with pytest.raises(CancelledError):
        future.result(PATIENCE)


def test_results_are_not_kept() -> None:
    class Data:
        pass

    executor = FairExecutor(1, "test")
    seen = weakref.ref(executor.submit("one", Data).result(PATIENCE))
    executor.submit("one", lambda: None).result(PATIENCE)
    gc.collect()
    assert seen() is None


def test_a_caller_that_is_cancelled_takes_its_work_along() -> None:
    async def work() -> None:
        executor, ran = FairExecutor(1, "test"), list[int]()
        with held(executor):
            task = asyncio.create_task(executor.run("one", partial(ran.append, 1)))
            await asyncio.sleep(0)
            assert executor.waiting() == 1
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert executor.waiting() == 0
        assert await executor.run("two", lambda: 7) == 7 and not ran
    asyncio.run(work())


def test_work_after_the_end_is_refused() -> None:
    executor = FairExecutor(1, "test")
    done = executor.submit("one", lambda: 1)
    executor.shutdown()
    assert done.result(0) == 1 and executor.waiting() == 0
    with pytest.raises(RuntimeError):
        executor.submit("one", lambda: 1)
    assert executor.waiting() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own elsewhere")
def test_its_threads_have_less_of_the_processor_than_others() -> None:
    executor = FairExecutor(1, "test")
    found = executor.submit("one", lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result()
    executor.shutdown()
    assert found == min(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) + 4, 19)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.01, 0.2)), min_size=1, max_size=60))
@settings(deadline=None, max_examples=60)
def test_no_client_with_work_falls_behind(tasks: list[tuple[str, float]]) -> None:
    """While several clients wait, their shares differ by no more than one task."""
    clocks, executor = one_thread()
    with held(executor):
        found = [executor.submit(client, partial(clocks.spend, client, seconds)) for client, seconds in tasks]
    results(found)
    costs = {client: iter([seconds for name, seconds in tasks if name == client]) for client in "abc"}
    left, used = {client: sum(name == client for name, _ in tasks) for client in "abc"}, dict.fromkeys("abc", 0.0)
    for client in clocks.order:
        behind = min(used[name] for name in "abc" if left[name])
        assert used[client] <= behind * 1.05 + 1e-6, "decay is all that may change the order"
        used[client] += next(costs[client])
        left[client] -= 1
