"""Settings of the whole test room."""

from __future__ import annotations

import asyncio
import gc
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from deltic.errors import ConfigError
from deltic.ops import capabilities
from deltic.ops.cpu import library
from deltic.ops.memory import empty_cache

if TYPE_CHECKING:
    from test_server_harness import Served

settings.register_profile("deltic", deadline=None, derandomize=True, database=None,
                          suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
settings.load_profile("deltic")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the engines of the tests run; with mlx also engines "
                     "without a device of their own")
    parser.addoption("--card-memory", type=int, default=22, help="GB of the GPU that a test takes at most: with "
                     "`--numprocesses auto` as many processes run on each as that leaves room for")


FIND_DEVICE = capabilities.find_device
"""As it is outside of tests."""


def library_fault(on_card: bool) -> str | None:
    """Why no test can say anything: the compiled library is of other sources, or not there on a machine with a card,
    where experts, quantized weights and comparisons with the CPU need it."""
    try:
        found = library.load()
    except ConfigError as error:
        return str(error)
    return f"{found}; or run `python hatch_build.py`, as `make test-gpu` does" if on_card and isinstance(
        found, str) else None


def take_own_card(worker: str | None) -> None:
    """Of several cards, each process of a run has another one as its first; tests of several devices see all."""
    cards = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    if worker and len(cards) > 1:
        first = int(worker.removeprefix("gw")) % len(cards)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(cards[first:] + cards[:first])


take_own_card(os.environ.get("PYTEST_XDIST_WORKER"))


def pytest_configure(config: pytest.Config) -> None:
    if fault := library_fault(torch.cuda.is_available()):
        raise pytest.UsageError(fault)
    os.environ["DELTIC_TEST_DEVICE"] = config.getoption("--device")
    if config.option.markexpr != "not slow":
        os.environ["DELTIC_TEST_SLOW"] = "1"
    # the default device is that of the option if that is mlx, and the CPU elsewhere, on a machine with a card, too
    chosen = "mlx" if config.getoption("--device") == "mlx" else "cpu"
    capabilities.find_device = lambda: chosen


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """With `--numprocesses auto`: as many as all cards have memory for, where there is one."""
    if not torch.cuda.is_available():
        return None
    fit = torch.cuda.mem_get_info()[1] // (config.getoption("--card-memory") * 10**9)
    return max(1, min(fit * torch.cuda.device_count(), os.cpu_count() or 1))


def pytest_collection_finish() -> None:
    """Keeps libraries and tests out of garbage collections: in a process with all of them, each takes a second.

    A server freezes all objects as well, and thaws all of them at its end. Those of tests leave that out.
    """
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a grid that is marked `covering`, all cases are slow but a few, which hold everything that the grid holds."""
    grids: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("covering") and not item.get_closest_marker("slow"):
            assert isinstance(item, pytest.Function)
            grids[item.nodeid.partition("[")[0]].append(item)
    for grid in grids.values():
        few = covering(grid)
        for item in grid:
            if item not in few:
                item.add_marker("slow")


def covering(grid: list[pytest.Function]) -> list[pytest.Function]:
    """Cases in which all values of each parameter occur; `covering(2)`: all pairs of values of two parameters."""
    held = [values_of(case, *case.get_closest_marker("covering").args) for case in grid]  # type: ignore[union-attr]
    missing, few = set().union(*held), list[pytest.Function]()
    while missing:
        best = max(range(len(grid)), key=lambda place: len(held[place] & missing))
        missing -= held[best]
        few.append(grid[best])
    return few


def values_of(case: pytest.Function, together: int = 1) -> set[tuple[Any, ...]]:
    """Values of parameters, as many together as said. Those that are no plain values are known by their identity."""
    plain = str, int, float, torch.dtype, type(None)
    values = [(name, value if isinstance(value, plain) else id(value)) for name, value in case.callspec.params.items()]
    return set(combinations(values, together))


@pytest.fixture(scope="module", autouse=True)
def _units(request: pytest.FixtureRequest) -> Iterator[None]:
    """In modules with UNITS_APART, loaded models have pages and slots apart (`support.units_apart`)."""
    from support import units_apart

    with units_apart() if getattr(request.module, "UNITS_APART", False) else nullcontext():
        yield


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Models set the threads that torch computes with; small ones are fastest with one, and by far so on a machine that
    has other work."""
    torch.set_num_threads(1)


def give_back() -> None:
    """Gives back the memory that torch keeps on the cards that were used."""
    empty_cache([torch.device("cuda", index) for index in range(torch.cuda.device_count())
                 if torch._C._cuda_hasPrimaryContext(index)])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test on a card, or what its fixtures, take there without writing to it is not zero, as it is in a fresh
    process, but NaN, and as an integer -1."""
    kept = "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ  # else what is taken is nobody's before
    if kept and item.path.name.startswith("test_cuda_") and torch.cuda.is_available():
        give_back()
        taken = [torch.full((size,), 0xff, dtype=torch.uint8, device="cuda")
                 for count, size in ((64, 1 << 20), (8, 10 << 20), (1, 1 << 30)) for _ in range(count)]
        del taken  # freed, and the first to be taken again


@pytest.fixture(autouse=True)
def _shared_card() -> Iterator[None]:
    """Processes that test on one card leave each other what they do not need any more."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 4 << 30:
        gc.collect()
        give_back()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """The embedded model behind a real server, whose accounts are right when all is over."""
    from test_server_harness import serving, tiny

    with serving(tiny()) as running:
        yield running
        running.wait_idle()
        tiny().worker.call(lambda engine: engine.check())


@pytest.fixture(scope="module")
def script_server() -> Iterator[None]:
    """What `test_server_harness.scripted` needs."""
    from test_server_harness import script_server

    with script_server():
        yield


@pytest.fixture(scope="module")
def leftovers() -> Iterator[None]:
    """Some client libraries leave connections and event loops to the garbage collector: it comes at the end of the
    module, for tests that ignore warnings about that."""
    yield
    try:
        asyncio.get_event_loop().close()
        asyncio.set_event_loop(None)
    except RuntimeError:  # there is none
        pass
    gc.collect()
