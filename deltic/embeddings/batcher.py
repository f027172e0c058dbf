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
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from deltic.embeddings.types import Item, Output, TextModel, Vectors
from deltic.engine.policy import to_give_up
from deltic.errors import BusyError, DelticError, RequestError, UnavailableError, forked_from
from deltic.threads import ComputeThread

log = logging.getLogger("deltic")

CLOSED = "the model has been closed"


@dataclass(eq=False, slots=True, weakref_slot=True)
class EncodeJob:
    """Items of one caller, and their results. Cancelling the future cancels the job."""

    items: Sequence[Item]
    wanted: frozenset[Output]
    on_item: Callable[[int], None] | None = None
    """Called in the batcher's thread with 1 for each finished item; an exception fails the job."""
    client: str = ""
    """Jobs of one client share its turn and its part of the queue; "": the job has a turn and a part of its own."""
    future: Future[list[Vectors]] = field(default_factory=Future)
    found: list[Vectors | None] = field(default_factory=list)
    taken: int = 0
    """Number of items that a batch has taken."""
    left: int = 0
    """Number of items without a result."""
    queued: int = 0
    """Tokens of items that no batch has taken."""
    running: int = 0
    """Tokens of items in running batches."""

    def __post_init__(self) -> None:
        self.left = len(self.items)
        self.found = [None] * self.left
        self.queued = sum(map(len, self.items))

    @property
    def queue_key(self) -> Hashable:
        return self.client or id(self)

    @property
    def waiting(self) -> int:
        """Returns the number of items that no batch has taken."""
        return len(self.items) - self.taken

    @property
    def begun(self) -> int:
        return self.taken

    @property
    def size(self) -> int:
        """Returns the number of tokens without a result."""
        return self.queued + self.running

    def fail(self, error: BaseException) -> None:
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


Place = tuple[EncodeJob, int]
"""A job and the index of one of its items."""


class Batcher:
    """Runs a model in its own thread, which starts with the first job and ends with `close` or `end`.

    max_tokens: limit for the tokens of all unfinished items.
    """

    def __init__(self, model: TextModel, max_tokens: int) -> None:
        self._model, self._max_tokens = model, max_tokens
        self._queues: OrderedDict[Hashable, OrderedDict[EncodeJob, None]] = OrderedDict()  # by client, next one first
        self._unfinished: dict[EncodeJob, None] = {}  # in order of arrival
        self._process = os.getpid()
        self._closed: str | None = None  # why the batcher is closed
        self._exiting = False
        self._changed = threading.Condition()
        self._thread: ComputeThread | None = None
        self.texts = self.tokens = self.batches = self.displaced = 0

    @property
    def waiting(self) -> int:
        """Returns the number of tokens without a result."""
        with self._changed:
            return sum(job.size for job in self._unfinished)

    def submit(self, job: EncodeJob) -> EncodeJob:
        """Queues a job.

        Raises BusyError if the queue is full and no client has more tokens in it, UnavailableError after `close` or in
        a fork, RequestError in the batcher's own thread.
        """
        if self._forked:
            raise forked_from(self._process)
        if threading.current_thread() is self._thread:
            raise RequestError("progress is called in the thread that runs the model, which cannot wait for itself: "
                               "call the encoder in another thread", "progress")
        with self._changed:
            if self._closed:
                raise UnavailableError(f"{self._closed}: load it again")
            if not job.items:
                job.future.set_result([])
                return job
            self._make_room(job)
            self._queues.setdefault(job.queue_key, OrderedDict())[job] = None
            self._unfinished[job] = None
            job.future.add_done_callback(partial(_forget, weakref.ref(self), weakref.ref(job)))
            if self._thread is None:
                self._thread = ComputeThread(self._serve, "deltic-texts", self._exit)
                self._thread.start()
            self._changed.notify()
        return job

    def _make_room(self, job: EncodeJob) -> None:
        """Fails jobs of clients with more tokens in the queue, if that makes room. Raises BusyError otherwise."""
        displaced = to_give_up([(each, each.size) for each in self._unfinished], job.client, job.size,
                               self._max_tokens)
        if displaced is None:
            raise BusyError(f"the waiting texts have more than {self._max_tokens} tokens (max_live_tokens): try again "
                            "later")
        self.displaced += len(displaced)
        for each in displaced:
            each.fail(BusyError("the server is full, and this client has most of the texts in it: these have given "
                                "their place to another client's (max_live_tokens): try again later"))

    def forget(self, job: EncodeJob) -> None:
        """Removes a job that has finished, failed or been cancelled."""
        if self._forked:
            return
        with self._changed:
            job.queued = 0
            queue = self._queues.get(job.queue_key, OrderedDict())
            queue.pop(job, None)
            if not queue:
                self._queues.pop(job.queue_key, None)
            if not job.running:
                self._unfinished.pop(job, None)

    def close(self) -> None:
        """Ends the thread after the running batch, and waits for it. Waiting jobs fail."""
        self.end()
        if self._thread is not None and self._thread is not threading.current_thread() and not self._forked:
            self._thread.join()

    def end(self) -> None:
        """Closes the batcher like `close`, without waiting."""
        if not self._forked:  # in a forked process the lock may never be released
            with self._changed:
                self._closed = self._closed or CLOSED
                self._changed.notify()

    def _exit(self) -> None:
        """Ends the thread when the process exits, without failing jobs: only daemon threads still wait for them."""
        if not self._forked:
            with self._changed:
                self._exiting = True
                self._changed.notify()

    @property
    def _forked(self) -> bool:
        return os.getpid() != self._process

    # The thread

    def _serve(self) -> None:
        reason = CLOSED
        try:
            self._run()
        except BaseException as error:
            log.critical("the thread of an embedding model has ended", exc_info=True)
            reason = f"the model's thread has ended: {type(error).__name__}"
        if self._exiting:
            return
        with self._changed:
            self._closed = reason
            for job in tuple(self._unfinished):
                job.fail(UnavailableError(reason))
            self._unfinished.clear()

    def _run(self) -> None:
        running: list[Callable[[], None]] = []  # on a device, while the next batch is prepared
        while (batch := self._next_batch(wait=not running)) or running:
            by_output: dict[frozenset[Output], list[Place]] = defaultdict(list)
            for job, index in batch:
                by_output[job.wanted].append((job, index))
            started = [self._start(places, wanted) for wanted, places in by_output.items()]
            ended, running = (running, started) if self._model.overlaps else (started, [])
            for finish in ended:
                finish()

    def _next_batch(self, wait: bool) -> list[Place]:
        """Returns the next batch. It is empty after `close`, or if there are no items and `wait` is False."""
        with self._changed:
            while not (self._closed or self._exiting):
                batch = self._take()
                if batch or not wait:
                    return batch
                self._changed.wait()
            return []

    def _take(self) -> list[Place]:
        """Takes one item of each client in turn, until the budget is used; at least one."""
        batch: list[Place] = []
        tokens = 0
        while self._queues:
            client, queue = next(iter(self._queues.items()))
            job = next(iter(queue))
            size = len(job.items[job.taken])
            if batch and tokens + size > self._model.budget:
                break
            batch.append((job, job.taken))
            tokens += size
            job.taken += 1
            job.queued -= size
            job.running += size
            queue.move_to_end(job)
            if not job.waiting:
                del queue[job]
            self._queues.move_to_end(client)
            if not queue:
                del self._queues[client]
        return batch

    def _start(self, places: Sequence[Place], wanted: frozenset[Output]) -> Callable[[], None]:
        """Starts a batch. Returns a function that waits for the results and gives them to the jobs."""
        items = [job.items[index] for job, index in places]
        try:
            finish = self._model.start(items, wanted)
        except Exception as error:
            finish = partial(_failed, items, error)

        def hand_out() -> None:
            try:
                found = finish()
            except Exception as error:
                found = _failed(items, error)
            with self._changed:
                self.texts += len(items)
                self.tokens += sum(map(len, items))
                self.batches += 1
                for (job, _), item in zip(places, items, strict=True):
                    job.running -= len(item)
            for (job, index), vectors in zip(places, found, strict=True):
                job.put(index, vectors)
                if job.future.done():
                    self.forget(job)
        return hand_out


def _forget(batcher: weakref.ref[Batcher], job: weakref.ref[EncodeJob], future: Future[list[Vectors]]) -> None:
    """Removes a finished job from its batcher. A future keeps its callbacks: with strong references, job and future
    would form a cycle that keeps the batcher and its model alive until the next garbage collection."""
    owner, finished = batcher(), job()
    if owner is not None and finished is not None:
        owner.forget(finished)


def _failed(items: Sequence[Item], error: Exception) -> list[Vectors]:
    """Returns the results of a failed batch."""
    if not isinstance(error, DelticError | MemoryError):
        log.error("a batch of texts failed", exc_info=error)
    return [Vectors(error=str(error) or type(error).__name__)] * len(items)
