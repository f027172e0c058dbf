"""Batches the texts of many callers and runs the model on them in one thread.

Batches are filled item by item. Clients take turns, and so do the jobs of one client. A client with ten thousand texts
delays another client's single text by at most the running batch; on a device, by the running and the next batch. When
the queue is full, the client with the most tokens loses its newest job.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from deltic.embeddings.types import Item, Output, TextModel, Vectors
from deltic.engine.compute_thread import ComputeThread
from deltic.engine.policy import to_give_up
from deltic.errors import BusyError, DelticError, RequestError, UnavailableError, forked_from

log = logging.getLogger("deltic")


@dataclass(eq=False, slots=True, weakref_slot=True)
class EncodeJob:
    """Items of one caller, and what came of them. future: done when all are; whoever cancels it wants no more.
    on_item: called in the batcher's thread for each item that is done; what it raises ends the job. client: who has one
    turn and one share of all; "": the job is one of its own.

    taken: items that run or ran. left: those that are not done. queued, running: tokens of those that wait, that run.
    """

    items: Sequence[Item]
    wanted: frozenset[Output]
    on_item: Callable[[int], None] | None = None
    client: str = ""
    future: Future[list[Vectors]] = field(default_factory=Future)
    found: list[Vectors | None] = field(default_factory=list)
    taken: int = 0
    left: int = 0
    queued: int = 0
    running: int = 0

    def __post_init__(self) -> None:
        self.found, self.left = [None] * len(self.items), len(self.items)
        self.queued = sum(map(len, self.items))

    @property
    def turn(self) -> Hashable:
        """What takes turns with others."""
        return self.client or id(self)

    @property
    def waiting(self) -> int:
        """Items that no batch has taken."""
        return len(self.items) - self.taken

    @property
    def begun(self) -> int:
        """Items that one has."""
        return self.taken

    @property
    def size(self) -> int:
        """Tokens that are not done."""
        return self.queued + self.running

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
        self._queues: OrderedDict[Hashable, OrderedDict[EncodeJob, None]] = OrderedDict()  # by client, the next first
        self._unfinished: dict[EncodeJob, None] = {}  # in order of arrival; includes jobs whose items all run
        self._process = os.getpid()
        self._closed: str | None = None  # why
        self._leaving = False  # the process ends
        self._changed = threading.Condition()
        self._thread: ComputeThread | None = None
        self.texts = self.tokens = self.batches = self.displaced = 0

    @property
    def waiting(self) -> int:
        """Tokens that are not done."""
        with self._changed:
            return sum(job.size for job in self._unfinished)

    def submit(self, job: EncodeJob) -> EncodeJob:
        """Have a job done. BusyError if too much waits already and no client has more; UnavailableError after `close`,
        and where none of this process's threads would do it; RequestError in the thread that would do it itself."""
        if self._forked:
            raise forked_from(self._process)
        if threading.current_thread() is self._thread:
            raise RequestError("progress is called in the thread that runs the model, which cannot wait for itself: "
                               "call the encoder in another thread", "progress")
        with self._changed:
            if self._closed:
                raise UnavailableError(f"{self._closed}: load it anew")
            if not job.items:
                job.future.set_result([])
                return job
            self._make_room(job)
            self._queues.setdefault(job.turn, OrderedDict())[job] = None
            self._unfinished[job] = None
            job.future.add_done_callback(partial(_forget, weakref.ref(self), weakref.ref(job)))
            if self._thread is None:
                self._thread = ComputeThread(self._serve, "deltic-texts", self._leave)
                self._thread.start()
            self._changed.notify()
        return job

    def _make_room(self, job: EncodeJob) -> None:
        """End jobs of clients that hold more, if that makes room for this one; else BusyError."""
        going = to_give_up([(each, each.size) for each in self._unfinished], job.client, job.size, self._most)
        if going is None:
            raise BusyError(f"the texts that wait have more than {self._most} tokens (max_live_tokens): try again "
                            "later")
        self.displaced += len(going)
        for each in going:
            each.fail(BusyError("the server is full, and this client has most of the texts in it: these have given "
                                "their place to another client's (max_live_tokens): try again later"))

    def forget(self, job: EncodeJob) -> None:
        """Remove a job that is done, failed or cancelled."""
        if self._forked:
            return
        with self._changed:
            job.queued = 0
            queue = self._queues.get(job.turn, OrderedDict())
            queue.pop(job, None)
            if not queue:
                self._queues.pop(job.turn, None)
            if not job.running:
                self._unfinished.pop(job, None)

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
            for job in tuple(self._unfinished):
                job.fail(UnavailableError(reason))
            self._unfinished.clear()

    def _run(self) -> None:
        running: list[Callable[[], None]] = []  # the batch that a device computes while the next one is made
        while (batch := self._next(wait=not running)) or running:
            by_output: dict[frozenset[Output], list[tuple[EncodeJob, int]]] = {}
            for job, index in batch:
                by_output.setdefault(job.wanted, []).append((job, index))
            started = [self._start(places, wanted) for wanted, places in by_output.items()]
            ended, running = (running, started) if self._model.ahead else (started, [])
            for finish in ended:
                finish()

    def _start(self, places: Sequence[tuple[EncodeJob, int]], wanted: frozenset[Output]) -> Callable[[], None]:
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
                self.texts, self.tokens, self.batches = (
                    self.texts + len(items), self.tokens + sum(map(len, items)), self.batches + 1)
                for (job, _), item in zip(places, items, strict=True):
                    job.running -= len(item)
            for (job, index), vectors in zip(places, found, strict=True):
                job.put(index, vectors)
                if job.future.done():
                    self.forget(job)
        return end

    def _next(self, wait: bool) -> list[tuple[EncodeJob, int]]:
        """The items of the next batch; none when it is over, or, unless `wait`, when there are none now."""
        with self._changed:
            while True:
                if self._closed or self._leaving:
                    return []
                batch = self._take()
                if batch or not wait:
                    return batch
                self._changed.wait()

    def _take(self) -> list[tuple[EncodeJob, int]]:
        """One item of each client in turn, of its jobs in turn, as many as fit the budget, at least one."""
        batch: list[tuple[EncodeJob, int]] = []
        tokens = 0
        while self._queues:
            client, queue = next(iter(self._queues.items()))
            job = next(iter(queue))
            size = len(job.items[job.taken])
            if batch and tokens + size > self._model.budget:
                break
            batch.append((job, job.taken))
            tokens += size
            job.taken, job.queued, job.running = job.taken + 1, job.queued - size, job.running + size
            queue.move_to_end(job)
            if not job.waiting:
                del queue[job]
            self._queues.move_to_end(client)
            if not queue:
                del self._queues[client]
        return batch


def _forget(batcher: weakref.ref[Batcher], job: weakref.ref[EncodeJob], future: Future[list[Vectors]]) -> None:
    """Remove a finished job from its batcher. A future keeps its callbacks: with strong references, job and future
    would form a cycle that keeps the batcher and its model alive until the next garbage collection."""
    owner, over = batcher(), job()
    if owner is not None and over is not None:
        owner.forget(over)


def _failed(items: Sequence[Item], error: Exception) -> list[Vectors]:
    """A batch that fails, fails those in it, and nobody else."""
    if not isinstance(error, DelticError | MemoryError):
        log.error("a batch of texts failed", exc_info=error)
    return [Vectors(error=str(error) or type(error).__name__)] * len(items)
