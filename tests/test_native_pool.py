"""The threads of the compiled kernels: whatever else the machine does, a call ends, and with the same bits; between
calls they take no time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from ctypes import byref
from pathlib import Path

import pytest
import torch
from native_pools import best_level
from op_cases import same_bits
from torch import Tensor

from deltic.ops.cpu import kernels, missing
from deltic.ops.cpu.kernels import native_weight
from deltic.ops.cpu.library import ThreadPool, library
from deltic.ops.memory import Arena
from deltic.ops.quantized import QTensor, pack_tensor

pytestmark = pytest.mark.skipif(bool(missing()), reason=str(missing()))

PATIENCE = 120.0
"""Seconds after which a call hangs."""
TOKENS = 13


def layer() -> QTensor:
    """Returns a matrix of 17 pieces of work."""
    return pack_tensor(torch.randn(535, 512, generator=torch.Generator().manual_seed(1)), Arena())


def activations() -> Tensor:
    return torch.randn(TOKENS, 512, generator=torch.Generator().manual_seed(2))


@pytest.fixture(params=[pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3, 8])
def pool(request: pytest.FixtureRequest) -> Iterator[int]:
    made = library().deltic_pool_new(request.param, best_level())
    assert made
    yield made
    library().deltic_pool_free(made)


def multiply(pool: int, weight: QTensor, x: Tensor) -> Tensor:
    y, struct = torch.full((len(x), weight.rows), torch.nan), native_weight(weight)
    assert library().deltic_linear(pool, x.data_ptr(), len(x), byref(struct), y.data_ptr()) == 0
    return y


def alone() -> tuple[QTensor, Tensor, Tensor]:
    """A layer, its input, and its output by one thread."""
    weight, x = layer(), activations()
    pool = library().deltic_pool_new(1, best_level())
    wanted = multiply(pool, weight, x)
    library().deltic_pool_free(pool)
    return weight, x, wanted


def many(pool: int, calls: int) -> None:
    """Alternates calls of few and many tokens, some after a pause in which the threads fall asleep."""
    weight, x, wanted = alone()
    for call in range(calls):
        tokens = (1, 2, TOKENS, 1, 5)[call % 5]
        assert same_bits(multiply(pool, weight, x[:tokens]), wanted[:tokens]), call
        if call % 50 == 0:
            time.sleep(0.001)


def in_time(*tasks: Callable[[], None]) -> None:
    """Runs tasks concurrently, each in a Python thread; fails if one hangs."""
    failures: list[BaseException] = []

    def run(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            failures.append(error)

    running = [threading.Thread(target=run, args=(task,), daemon=True) for task in tasks]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a call hangs"
    for failure in failures:
        raise failure


def test_many_small_calls(pool: int) -> None:
    in_time(lambda: many(pool, 600))


def test_calls_on_a_busy_machine() -> None:
    pool = library().deltic_pool_new(8, best_level())
    program = "print(flush=True)\nwhile True: pass"
    others = [subprocess.Popen([sys.executable, "-S", "-c", program], stdout=subprocess.PIPE)
              for _ in range(2 * (os.cpu_count() or 1))]
    try:
        for other in others:
            assert other.stdout and other.stdout.readline()
        in_time(lambda: many(pool, 200))
        assert all(other.poll() is None for other in others)
    finally:
        for other in others:
            other.kill()
            other.communicate()
        library().deltic_pool_free(pool)


def test_idle_threads_take_no_time(pool: int) -> None:
    many(pool, 5)
    time.sleep(0.01)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.02


def test_pools_work_side_by_side(pool: int) -> None:
    other = library().deltic_pool_new(3, best_level())
    in_time(lambda: many(pool, 300), lambda: many(other, 300))
    library().deltic_pool_free(other)


@pytest.mark.parametrize("threads", [1, 3])
def test_concurrent_calls_of_python_threads(threads: int) -> None:
    """Three threads call one pool."""
    weight, x, wanted = alone()
    shared = ThreadPool(best_level(), threads)

    def work() -> None:
        for call in range(200):
            tokens = (1, 5, TOKENS)[call % 3]
            assert same_bits(kernels.linear(shared, x[:tokens], weight), wanted[:tokens])

    in_time(work, work, work)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads as Linux shows them")
def test_thread_lifetime() -> None:
    weight, x, _ = alone()
    known = len(os.listdir("/proc/self/task"))
    for _ in range(5):
        shared = ThreadPool(best_level(), 4)
        assert len(os.listdir("/proc/self/task")) == known
        kernels.linear(shared, x, weight)
        assert len(os.listdir("/proc/self/task")) == known + 3
        del shared
        end = time.monotonic() + 10
        while len(os.listdir("/proc/self/task")) > known:
            assert time.monotonic() < end


def test_unknown_level_is_refused() -> None:
    assert not library().deltic_pool_new(1, -1)
    assert not library().deltic_pool_new(1, best_level() + 1)


@pytest.mark.parametrize("threads", [-1, 0, 1, 2, 9])
def test_many_pools_in_turn(threads: int) -> None:
    """Also before their threads start, and right after a call."""
    weight, x, wanted = alone()

    def work() -> None:
        for number in range(50):
            pool = library().deltic_pool_new(threads, best_level())
            if number % 2:
                assert same_bits(multiply(pool, weight, x[:2]), wanted[:2])
            library().deltic_pool_free(pool)
        library().deltic_pool_free(None)

    in_time(work)


def test_scratch_memory_grows_with_the_work(pool: int) -> None:
    weight, x, wanted = alone()
    for tokens in (1, 400, 3, 4000, 13, 1):
        given = x.repeat(-(-tokens // TOKENS), 1)[:tokens]
        assert same_bits(multiply(pool, weight, given), wanted.repeat(-(-tokens // TOKENS), 1)[:tokens])


FORK = """
import os, sys
import test_native_pool as tests
weight, x, wanted = tests.alone()
pool = tests.ThreadPool(tests.best_level(), int(sys.argv[1]))
assert tests.same_bits(tests.kernels.linear(pool, x, weight), wanted)
child = os.fork()
for _ in range(50):
    assert tests.same_bits(tests.kernels.linear(pool, x, weight), wanted)
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_forked_process_keeps_computing(threads: int) -> None:
    """The child's pool has only the calling thread, and the child exits normally."""
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", FORK, str(threads)], cwd=Path(__file__).parent,
                            capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr
