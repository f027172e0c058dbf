"""One thread that runs a model for many callers: what they ask for at the same time shares batches.

Batches are filled item by item from all that wait, in turn, so that whoever asks for ten thousand texts holds up nobody
who asks for one by more than the batch that is running, on a device by that and the next one.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from deltic.encoders.items import Item, Output, TextModel, Vectors
from deltic.engine.exit import ComputeThread
from deltic.errors import BusyError, DelticError, RequestError, UnavailableError, forked_from

log = logging.getLogger("deltic")


@dataclass(eq=False, slots=True)
class Job:
    """Items of one caller, and what came of them. future: done when all are; whoever cancels it wants no more.
    on_item: called in the batcher's thread for each item that is done; what it raises ends the job."""

    items: Sequence[Item]
    wanted: frozenset[Output]
    on_item: Callable[[int], None] | None = None
    future: Future[list[Vectors]] = field(default_factory=Future)
    found: list[Vectors | None] = field(default_factory=list)
    taken: int = 0
    left: int = 0

    def __post_init__(self) -> None:
        self.found, self.left = [None] * len(self.items), len(self.items)

    def fail(self, error: BaseException) -> None:
        """End it, if it is not done."""
        with suppress(InvalidStateError):
            self.future.set_exception(error)

    def put(self, index: int, vectors: Vectors) -> None:
        self.found[index] = vectors
        self.left -= 1
        if self.on_item is not None and not self.future.done():
            try:
                self.on_item(1)
            except BaseException as error:
                self.fail(error)
        if not self.left:
            with suppress(InvalidStateError):
                self.future.set_result([each for each in self.found if each is not None])


class Batcher:
    """Runs a model in a thread of its own, which starts with the first job. max_tokens: of all items that wait.

    The thread holds it until `close` or `end`. UnavailableError where a process was forked from the one that made it.
    """

    def __init__(self, model: TextModel, max_tokens: int) -> None:
        self._model, self._most = model, max_tokens
        self._jobs: deque[Job] = deque()
        self._unfinished: set[Job] = set()  # also those of which all items are running
        self._waiting, self._process = 0, os.getpid()
        self._closed: str | None = None  # why
        self._leaving = False  # the process ends
        self._changed = threading.Condition()
        self._thread: ComputeThread | None = None
        self.texts = self.tokens = self.batches = 0

    @property
    def waiting(self) -> int:
        """Tokens that are not done."""
        return self._waiting

    def submit(self, job: Job) -> Job:
        """Have a job done. BusyError if too much waits already; UnavailableError after `close`, and where none of this
        process's threads would do it; RequestError in the thread that would do it itself."""
        if self._forked:
            raise forked_from(self._process)
        if threading.current_thread() is self._thread:
            raise RequestError("progress is called in the thread that runs the model, which cannot wait for itself: "
                               "call the encoder in another thread", "progress")
        size = sum(map(len, job.items))
        with self._changed:
            if self._closed:
                raise UnavailableError(f"{self._closed}: load it anew")
            if self._waiting and self._waiting + size > self._most:
                raise BusyError(f"the texts that wait have more than {self._most} tokens (max_live_tokens): try again "
                                "later")
            if not job.items:
                job.future.set_result([])
                return job
            self._waiting += size
            self._jobs.append(job)
            self._unfinished.add(job)
            if self._thread is None:
                self._thread = ComputeThread(self._serve, "deltic-texts", self._leave)
                self._thread.start()
            self._changed.notify()
        return job

    def close(self) -> None:
        """End the thread after the batch that is running; what waits fails. The thread itself does not wait."""
        self.end()
        if self._thread is not None and self._thread is not threading.current_thread() and not self._forked:
            self._thread.join()

    def end(self) -> None:
        """As `close`, without waiting for it."""
        if not self._forked:  # where another thread may have held the lock for ever
            with self._changed:
                self._closed = self._closed or "the model has been closed"
                self._changed.notify()

    def _leave(self) -> None:
        """End the thread at the process's end. Only daemon threads still wait then, which an error would make write a
        traceback."""
        if not self._forked:
            with self._changed:
                self._leaving = True
                self._changed.notify()

    @property
    def _forked(self) -> bool:
        """Whether this process is not the one that made it."""
        return os.getpid() != self._process

    def _serve(self) -> None:
        reason = "the model has been closed"
        try:
            self._run()
        except BaseException as error:
            log.critical("the thread of a model of texts has ended", exc_info=True)
            reason = f"the model's thread has ended: {type(error).__name__}"
        if self._leaving:
            return
        with self._changed:
            self._closed = reason
            for job in self._unfinished:
                job.fail(UnavailableError(reason))
            self._unfinished.clear()

    def _run(self) -> None:
        running: list[Callable[[], None]] = []  # the batch that a device computes while the next one is made
        while (batch := self._next(wait=not running)) or running:
            by_output: dict[frozenset[Output], list[tuple[Job, int]]] = {}
            for job, index in batch:
                by_output.setdefault(job.wanted, []).append((job, index))
            started = [self._start(places, wanted) for wanted, places in by_output.items()]
            ended, running = (running, started) if self._model.ahead else (started, [])
            for finish in ended:
                finish()

    def _start(self, places: Sequence[tuple[Job, int]], wanted: frozenset[Output]) -> Callable[[], None]:
        """Begin with a batch. What is returned waits for it, and hands out what came of it."""
        items = [job.items[index] for job, index in places]
        try:
            finish = self._model.start(items, wanted)
        except Exception as error:
            finish = partial(_failed, items, error)

        def end() -> None:
            try:
                found = finish()
            except Exception as error:
                found = _failed(items, error)
            with self._changed:
                self._waiting -= sum(map(len, items))
                self.texts, self.tokens, self.batches = (
                    self.texts + len(items), self.tokens + sum(map(len, items)), self.batches + 1)
            for (job, index), vectors in zip(places, found, strict=True):
                job.put(index, vectors)
                if job.future.done():
                    self._unfinished.discard(job)
        return end

    def _next(self, wait: bool) -> list[tuple[Job, int]]:
        """The items of the next batch; none when it is over, or, unless `wait`, when there are none now."""
        with self._changed:
            while True:
                if self._closed or self._leaving:
                    return []
                batch = self._take()
                if batch or not wait:
                    return batch
                self._changed.wait()

    def _take(self) -> list[tuple[Job, int]]:
        """One item of each job in turn, as many as fit the budget, at least one."""
        batch: list[tuple[Job, int]] = []
        tokens = 0
        while self._jobs:
            job = self._jobs[0]
            if job.future.done():  # nobody wants it any more
                self._waiting -= sum(map(len, job.items[job.taken:]))
                self._jobs.popleft()
                self._unfinished.discard(job)
                continue
            size = len(job.items[job.taken])
            if batch and tokens + size > self._model.budget:
                break
            batch.append((job, job.taken))
            tokens += size
            job.taken += 1
            self._jobs.popleft()
            if job.taken < len(job.items):
                self._jobs.append(job)
        return batch


def _failed(items: Sequence[Item], error: Exception) -> list[Vectors]:
    """A batch that fails, fails those in it, and nobody else."""
    if not isinstance(error, DelticError | MemoryError):
        log.error("a batch of texts failed", exc_info=error)
    return [Vectors(error=str(error) or type(error).__name__)] * len(items)
