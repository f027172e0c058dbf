"""The thread pool of the kernels under test: one at a time, at any level and with any number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, ParamSpec

import pytest

from deltic.ops import Ops, backends
from deltic.ops.cpu import missing
from deltic.ops.cpu.library import LEVELS, ThreadPool, library

if TYPE_CHECKING:
    from deltic.runner.model_runner import ModelRunner

Parameters = ParamSpec("Parameters")

_IN_USE: list[ThreadPool] = []


def best_level() -> int:
    return int(library().deltic_best_level())


def pool() -> ThreadPool:
    """Returns the pool in use; by default one thread at the best level."""
    if not _IN_USE:
        _IN_USE.append(ThreadPool(best_level(), 1))
    return _IN_USE[-1]


def native_ops() -> Ops:
    """Returns the compiled backend on the pool in use."""
    return on_pool(backends()["cpu"])


def on_pool(ops: Ops) -> Ops:
    """Returns the ops with their kernels on the pool in use."""
    return replace(ops, **{entry.name: MethodType(getattr(ops, entry.name).__func__, pool()) for entry in fields(ops)
                           if isinstance(getattr(ops, entry.name), MethodType)})


def moved(runtime: ModelRunner) -> ModelRunner:
    """Returns the model with its kernels on the pool in use."""
    return replace(runtime, decoder=replace(runtime.decoder, ops=on_pool(runtime.decoder.ops)))


@contextmanager
def using(level: int | None = None, threads: int | None = None) -> Iterator[None]:
    """Uses a pool of another level or number of threads."""
    known = pool()
    _IN_USE.append(ThreadPool(known.level if level is None else level, threads or known.threads))
    try:
        yield
    finally:
        _IN_USE.pop()


def at_every_level(test: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Runs a test once at each level of this processor; a failure names the level."""

    @wraps(test)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        if missing():
            pytest.skip(str(missing()))
        for level in range(best_level() + 1):
            with using(level=level), naming(f"level {LEVELS[level]}"):
                test(*args, **kwargs)

    return run


@contextmanager
def naming(case: object) -> Iterator[None]:
    """Adds the case to the message of a failure inside."""
    try:
        yield
    except Exception as error:
        error.add_note(f"case: {case}")
        raise
