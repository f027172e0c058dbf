"""Images of requests: fetched in threads and decoded in child processes, in turns by client.

A decoder holds the interpreter's lock and cannot be interrupted, see `deltic.vision.decoder_process`. A client takes a
turn for each image, so that another client waits for one image at most.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections import Counter, deque
from functools import partial
from types import TracebackType
from typing import Final

import numpy as np

from deltic.config import Limits
from deltic.engine.fair_executor import FairExecutor
from deltic.errors import BusyError, RequestError, UnavailableError
from deltic.vision.decoder_process import DecoderProcess
from deltic.vision.fetch import fetch_all
from deltic.vision.images import DecodeJob, Frame, Video, decode
from deltic.vision.prompt import Reading, Shown, Steps

DECODERS: Final = 2
"""Number of images that are decoded at a time, at most one per client."""
DECODER_MIB: Final = 1024
"""Address space of a decoder process, in MiB."""
_FETCHERS: Final = 8
"""Number of requests whose images are fetched at a time."""


class PictureDecoder:
    """Reads the images of all requests of a server. Close it at the end."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self.held = limits, HeldBytes(limits.max_pictures_mib << 20)
        # waiting threads use no processor time, so turns go by wall time
        self._decoding = FairExecutor(DECODERS, "deltic-pictures", processor=time.monotonic)
        self._fetching = FairExecutor(_FETCHERS, "deltic-fetch", processor=time.monotonic)
        self._idle = list[DecoderProcess]()
        self.processes = list[DecoderProcess]()
        self._closed = False

    async def read(self, client: str, reading: Reading) -> Shown:
        """Returns the images of a conversation. Raises RequestError for an unreadable image, BusyError if all requests
        together have too many. Cancelling the caller ends the work."""
        with PictureShare(self.held, client) as share:
            urls = reading.urls()
            fetched = await self._fetching.run(client, partial(fetch_all, urls)) if urls else {}
            share.take(sum(map(len, fetched.values())))
            steps = reading.steps((lambda url, field: fetched[url]) if urls else None)
            run = _ConversationReading(steps, share, self._limits.picture_seconds)
            try:
                while (found := await self._decoding.run(client, partial(run.step, self))) is None:
                    pass
            except asyncio.CancelledError:
                run.cancel()
                raise
            share.keep(found)
            return found

    def close(self) -> None:
        """Ends all work and waits until it has ended."""
        self._closed = True
        for process in self.processes:
            process.stop()
        self._decoding.shutdown()
        self._fetching.shutdown()
        for process in self.processes:
            process.close()

    def borrow(self) -> DecoderProcess:
        """Returns a process for the caller's exclusive use, until `give_back`."""
        if self._closed:
            raise UnavailableError("the server is shutting down")
        if self._idle:
            return self._idle.pop()
        self.processes.append(DecoderProcess(DECODER_MIB))
        return self.processes[-1]

    def give_back(self, process: DecoderProcess) -> None:
        self._idle.append(process)


class _ConversationReading:
    """Reads the images of one conversation, one file per step. seconds: processor time for all of them."""

    def __init__(self, steps: Steps, share: PictureShare, seconds: float) -> None:
        self._steps = steps
        self._share = share
        self._seconds = seconds
        self._lock, self._cancelled = threading.Lock(), False
        self._process: DecoderProcess | None = None
        self._frame: Frame | None = None

    def step(self, decoder: PictureDecoder) -> Shown | None:
        """Decodes the next file; returns all images after the last one."""
        try:
            job = self._steps.send(self._frame)  # type: ignore[arg-type]
        except StopIteration as done:
            found: Shown = done.value
            return found
        process = decoder.borrow()
        try:
            self._frame = self._decoded(process, job)
        finally:
            decoder.give_back(process)
        self._share.take(self._frame.nbytes)
        return None

    def cancel(self) -> None:
        """Ends the running step. May be called from any thread."""
        with self._lock:
            self._cancelled = True
            if self._process:
                self._process.kill()

    def _decoded(self, process: DecoderProcess, job: DecodeJob) -> Frame:
        with self._lock:
            if self._cancelled:
                raise RequestError("the client is gone")
            self._process = process
        try:
            about, data = process.call(decode, job, seconds=max(self._seconds, 0.01), limit="picture_seconds")
        except RequestError as error:
            raise RequestError(f"{job.field}: {error}", job.field) if error.field is None else error from error
        finally:
            with self._lock:
                self._process = None
        self._seconds -= about["seconds"]
        job.budget.request = about["left"]
        return np.frombuffer(data, np.uint8).reshape(*about["size"], 3)


class HeldBytes:
    """Counts the bytes of decoded images. A client may hold at most as many bytes as stay free, so that there is always
    room for another client."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._by_client = Counter[str]()
        self._lock = threading.Lock()
        self._freed = deque[tuple[str, int]]()  # a finalizer may run during `take`

    def take(self, client: str, size: int) -> bool:
        """Adds bytes if there is room for them. Returns False if there is not."""
        with self._lock:
            if self._total() + self._by_client[client] + 2 * size > self.most:
                return False
            self._by_client[client] += size
            return True

    def free(self, client: str, size: int) -> None:
        """Removes bytes. May be called from any thread and any finalizer."""
        self._freed.append((client, size))

    def total(self) -> int:
        """Returns the total bytes of all clients."""
        with self._lock:
            return self._total()

    def _total(self) -> int:
        while self._freed:
            client, size = self._freed.popleft()
            self._by_client[client] -= size
        self._by_client = +self._by_client  # drops clients without images
        return self._by_client.total()


class PictureShare:
    """Counts the bytes of one request while its images are read."""

    def __init__(self, held: HeldBytes, client: str) -> None:
        self._held = held
        self._client = client
        self._size = 0

    def __enter__(self) -> PictureShare:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
                 ) -> None:
        self._held.free(self._client, self._size)

    def take(self, size: int) -> None:
        """Adds bytes. Raises RequestError if no request may have as many, BusyError if there is no room now."""
        if self._held.take(self._client, size):
            self._size += size
            return
        most = f"{self._held.most >> 20} MiB (max_pictures_mib)"
        if 2 * (self._size + size) > self._held.most:
            raise RequestError(f"the pictures of this request take more than half of {most}: send fewer, or smaller "
                               "ones", "messages")
        raise BusyError(f"the pictures of all requests take more than {most}, or yours most of that: try again later")

    def keep(self, found: Shown) -> None:
        """Counts the images' bytes until the images are garbage-collected."""
        for each in found.values():
            for pixels in each.parts if isinstance(each, Video) else (each,):
                size = min(pixels.frames.nbytes, self._size)  # repeated frames of a video were counted once
                self._size -= size
                weakref.finalize(pixels, self._held.free, self._client, size).atexit = False
