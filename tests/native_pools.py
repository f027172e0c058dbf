"""The pool that the kernels under test run on: one at a time, at any level and with any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from types import MethodType
from typing import TYPE_CHECKING

import pytest

from deltic.ops import Ops, backends
from deltic.ops.cpu import missing
from deltic.ops.cpu.library import LEVELS, ThreadPool, library

if TYPE_CHECKING:
    from deltic.runner.model_runner import ModelRunner

_IN_USE: list[ThreadPool] = []


def best_level() -> int:
    return int(library().deltic_best_level())


def pool() -> ThreadPool:
    """The one in use; by default one thread at the best level."""
    if not _IN_USE:
        _IN_USE.append(ThreadPool(best_level(), 1))
    return _IN_USE[-1]


def native_ops() -> Ops:
    """The compiled backend on the pool in use."""
    return on_pool(backends()["cpu"])


def on_pool(ops: Ops) -> Ops:
    """These ops with their kernels on the pool in use."""
    return replace(ops, **{entry.name: MethodType(getattr(ops, entry.name).__func__, pool()) for entry in fields(ops)
                           if isinstance(getattr(ops, entry.name), MethodType)})


def moved(runtime: ModelRunner) -> ModelRunner:
    """The model with its kernels on the pool in use."""
    return replace(runtime, decoder=replace(runtime.decoder, ops=on_pool(runtime.decoder.ops)))


@contextmanager
def using(level: int | None = None, threads: int | None = None) -> Iterator[None]:
    """Use another pool meanwhile, which differs from the one in use as said."""
    known = pool()
    _IN_USE.append(ThreadPool(known.level if level is None else level, threads or known.threads))
    try:
        yield
    finally:
        _IN_USE.pop()


def each_level(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a fixture with a parameter for every level does."""
    if missing():
        pytest.skip(str(missing()))
    if request.param > best_level():
        pytest.skip("this processor lacks the level")
    with using(level=request.param):
        yield


by_level = pytest.fixture(params=range(len(LEVELS)), ids=LEVELS)
"""Makes a fixture of `each_level`."""
