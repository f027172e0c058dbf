"""Experts on the host: streamed from model files (csrc/expert_store.cpp) or computed for a GPU (csrc/beside.cpp)."""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import time
import weakref
from collections.abc import Sequence
from ctypes import byref, c_int, c_int64, c_uint32, c_void_p
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from deltic.errors import ModelError
from deltic.ops.cpu.library import (
    BesideModel,
    Expert,
    ExpertCounts,
    Extent,
    LinearWeight,
    MailboxStruct,
    MatrixStruct,
    StoredLayer,
    ThreadPool,
    library,
)
from deltic.ops.quantized import QTensor
from deltic.ops.stored import ExpertStatistics, StoredExpert
from deltic.ops.types import PAGE, ExpertPool

READER_THREADS = 4
"""Number of reader threads: while one thread packs, another keeps the disk busy."""
_ALIGNMENT = 64
_FILE_ENDED, _FILE_CHANGED = -1, -2


class ExpertStore:
    """The experts of a model; each layer has the same number. Some are in memory, the others are read when needed.

    direct: reads bypass the page cache, if the file system supports it. nbytes: of the experts that fit in memory.
    """

    def __init__(self, pool: ThreadPool, layers: Sequence[Sequence[StoredExpert]], slots: Sequence[int],
                 refresh: int = 1, predict: bool = False) -> None:
        """Opens the files. pool: of the ops that compute with the experts. slots: experts in memory per layer, >= 1.

        refresh: number of steps between exchanges. predict: read experts ahead that the next layer will likely use.
            Raises ModelError naming an unreadable file, or MemoryError.
        """
        self.slots, self.predict, self._layers = tuple(slots), predict, layers
        self.paths = list(dict.fromkeys(
            matrix.path for experts in layers for expert in experts for matrix in expert.matrices))
        opened = [_open(path) for path in self.paths]
        files = (c_int * len(opened))(*(file for file, _ in opened))
        self.direct = all(direct for _, direct in opened)
        structs, _kept = self._structs()
        made = library().deltic_expert_store_new(structs, len(layers), len(layers[0]), files, len(opened),
                                                 READER_THREADS, refresh)
        if not made:
            for file, _ in opened:
                os.close(file)
            raise MemoryError("no memory for the experts")
        self.address: int = made
        weakref.finalize(self, _free, made, [file for file, _ in opened], os.getpid()).atexit = False
        pool.unread = self._failure
        self.nbytes = sum(count * expert_bytes(experts[0]) for count, experts in zip(slots, layers, strict=True))

    def fill(self, scores: Sequence[Sequence[float]] | None = None) -> None:
        """Reads the experts with the highest scores of each layer, as many as fit; among equal scores the first. Call
        it once, before the first step. Raises ModelError if a file cannot be read."""
        for number, count in enumerate(self.slots):
            own = [0.0] * len(self._layers[number]) if scores is None else scores[number]
            order = sorted(range(len(own)), key=own.__getitem__, reverse=True)[:count]
            status = library().deltic_expert_store_fill(self.address, number, (c_int64 * count)(*order), count)
            if status == -1:
                raise MemoryError("no memory for the experts")
            if status:
                raise self._failure()
            if scores is not None:
                self._scores(number)[:] = torch.tensor(own, dtype=torch.float32)

    def pools(self) -> list[ExpertPool]:
        """Returns an `ExpertPool` for each layer, which takes the place of its experts in a model."""
        return [ExpertPool(self, number, len(experts), expert_bytes(experts[0]) * len(experts))
                for number, experts in enumerate(self._layers)]

    def begin_step(self) -> None:
        """Does nothing, because the step itself reads and exchanges experts."""

    def scores(self) -> list[list[float]]:
        """Returns the recent usage of each expert, by layer. Call it between steps."""
        return [self._scores(number).tolist() for number in range(len(self._layers))]

    def statistics(self) -> ExpertStatistics:
        """Returns the counters so far. Thread-safe."""
        count = len(self._layers)
        counts, hits, misses = ExpertCounts(), (c_int64 * count)(), (c_int64 * count)()
        library().deltic_expert_store_count(self.address, byref(counts), hits, misses)
        return ExpertStatistics(tuple(hits), tuple(misses), counts.bytes, counts.promotions, counts.refreshes,
                                counts.predicted, counts.useful, counts.waited / 1e9, counts.reading / 1e9)

    def _scores(self, layer: int) -> torch.Tensor:
        """Returns a view of a layer's scores."""
        experts = len(self._layers[layer])
        place = library().deltic_expert_store_scores(self.address, layer)
        return torch.frombuffer((ctypes.c_float * experts).from_address(place), dtype=torch.float32)

    def _structs(self) -> tuple[ctypes.Array[StoredLayer], list[object]]:
        """Returns the layers' structs, and the objects that they borrow."""
        numbers = {path: number for number, path in enumerate(self.paths)}
        structs, borrowed = (StoredLayer * len(self._layers))(), list[object]()
        for struct, experts, slots in zip(structs, self._layers, self.slots, strict=True):
            first = experts[0]
            extents = (Extent * (3 * len(experts)))(*(
                Extent(numbers[matrix.path], matrix.offset) for expert in experts for matrix in expert.matrices))
            borrowed.append(extents)
            struct.slots, struct.rows, struct.columns = slots, first.gate.rows, first.gate.columns
            struct.types, struct.extents = (c_int64 * 3)(*(matrix.type for matrix in first.matrices)), extents
        return structs, borrowed

    def _failure(self) -> Exception:
        file = c_int64()
        code = library().deltic_expert_store_failure(self.address, byref(file))
        path = self.paths[file.value]
        if code == _FILE_CHANGED:
            return ModelError(f"{path} has changed since the model was loaded, so its experts cannot be read any "
                              "more: load the model again")
        why = "it has become shorter" if code == _FILE_ENDED else errno.errorcode.get(code, str(code))
        return ModelError(f"experts cannot be read from {path}: {why if code < 0 else f'{os.strerror(code)} ({why})'}")


def expert_bytes(expert: StoredExpert) -> int:
    """Returns the bytes of an expert in memory."""
    sizes = (library().deltic_packed_bytes(matrix.type, matrix.rows, matrix.columns) for matrix in expert.matrices)
    return sum(-(-int(size) // _ALIGNMENT) * _ALIGNMENT for size in sizes)


def _open(path: Path) -> tuple[int, bool]:
    """Returns a file descriptor, and True if reads bypass the page cache."""
    try:
        direct = getattr(os, "O_DIRECT", 0)
        if direct:
            try:
                file = os.open(path, os.O_RDONLY | direct)
                if _reads(file):
                    return file, True
                os.close(file)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        return os.open(path, os.O_RDONLY), False
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


def _reads(file: int) -> bool:
    """Returns True if reads work; some file systems accept O_DIRECT but then reject reads."""
    with mmap.mmap(-1, 4096) as page:
        try:
            os.preadv(file, [page], 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
    return True


def _free(address: int, files: list[int], process: int) -> None:
    if os.getpid() == process:
        library().deltic_expert_store_free(address)
        for file in files:
            os.close(file)


MAX_TOKENS = PAGE
"""Maximum number of tokens in a request."""
_CACHE_LINE = 64
_PASSES = 4
"""Passes of a measurement. The first one warms up threads and pages; other programs may disturb the others."""
_TIMEOUT = 60.0
"""Timeout in seconds for the host's own requests."""


class OffloadedExperts:
    """Threads that compute experts, and their mailbox in memory that host and GPU share.

    Threads start at once and end with `close`, with this object, or at interpreter exit. Memory is released after that.
    counts [16] and experts [16, most] int32, shares [16, most] and factors [16] float32, input [16, hidden] bfloat16,
    sums [16, hidden] float32: as in `deltic_mailbox`.
    words: request [3] and answer [1] int32, for kernels. request, answer: the same memory, for the host.
    """

    def __init__(self, weights: Sequence[Tensor | PackedExpert], hidden: int, most: int, threads: tuple[int, int],
                 pinned: bool = False) -> None:
        """weights: per layer [E, 3 * size * hidden] bfloat16: gate and up [2 size, hidden], then down; or packed
        matrices gate, up and down of the only expert.

        most: maximum number of experts per token. threads: number of threads, and their instruction level. pinned: a
            GPU uses the mailbox. Raises MemoryError if threads or memory ran out.
        """
        self._weights, self._turn = tuple(weights), Lock()
        self._count, self.size, self.expert_bytes = _sizes(self._weights[0], hidden)
        words, numbers = torch.int32, torch.float32
        parts = _laid_out(
            {
                "request": ((3,), words),
                "answer": ((1,), words),
                "counts": ((MAX_TOKENS,), words),
                "experts": ((MAX_TOKENS, most), words),
                "shares": ((MAX_TOKENS, most), numbers),
                "factors": ((MAX_TOKENS,), numbers),
                "input": ((MAX_TOKENS, hidden), torch.bfloat16),
                "sums": ((MAX_TOKENS, hidden), numbers),
            },
            pinned,
        )
        self.counts, self.experts, self.shares = parts["counts"], parts["experts"], parts["shares"]
        self.factors, self.input, self.sums = parts["factors"], parts["input"], parts["sums"]
        self.words = parts["request"], parts["answer"]
        self.request = (c_uint32 * 3).from_address(parts["request"].data_ptr())
        self.answer = (c_uint32 * 1).from_address(parts["answer"].data_ptr())
        plain = (c_void_p * len(weights))(*(
            layer.data_ptr() if isinstance(layer, Tensor) else None for layer in weights))
        packed = (Expert * len(weights))(*(
            Expert() if isinstance(layer, Tensor) else _expert(layer) for layer in weights))
        any_packed = not all(isinstance(layer, Tensor) for layer in weights)
        model = BesideModel(hidden, self.size, self._count, len(weights), most, ctypes.cast(plain, c_void_p),
                            ctypes.cast(packed, c_void_p) if any_packed else None)
        mailbox = MailboxStruct(**{name: part.data_ptr() for name, part in parts.items()})
        made = library().deltic_beside_new(byref(model), byref(mailbox), *threads)
        if not made:
            raise MemoryError("no memory for the threads that compute experts beside the GPU")
        self._address: int = made
        self._counted = 0, 0.0
        self._end = weakref.finalize(self, _free_threads, made, os.getpid())

    def wake(self) -> None:
        """Wakes the threads, because requests may come."""
        with self._turn:
            if self._end.alive:
                library().deltic_beside_wake(self._address)

    def computed(self) -> int:
        """Number of experts computed so far, counted once per request. Thread-safe."""
        return self._counts()[0]

    def computing(self) -> float:
        """Seconds spent on computing experts. Thread-safe."""
        return self._counts()[1]

    def _counts(self) -> tuple[int, float]:
        experts, nanoseconds = c_int64(), c_int64()
        with self._turn:
            if self._end.alive:
                library().deltic_beside_count(self._address, byref(experts), byref(nanoseconds))
                self._counted = experts.value, nanoseconds.value / 1e9
            return self._counted

    def close(self) -> None:
        """Ends the threads after the current request; later requests get no answer. May be called again."""
        self.computed()
        with self._turn:
            self._end()

    def ask(self, layer: int, tokens: int) -> None:
        """Runs the request in the mailbox, as the GPU would. Raises RuntimeError if the threads do not answer."""
        self.wake()
        number, until = (self.request[0] + 1) & 0xffffffff, time.monotonic() + _TIMEOUT
        self.request[1], self.request[2] = layer, tokens
        self.request[0] = number  # written last: it starts the request
        while self.answer[0] != number:
            if time.monotonic() > until:
                raise RuntimeError("the threads that compute experts beside the GPU do not answer")

    def rate(self) -> float:
        """Measures the speed of computing one layer's experts for one token at a time, in bytes of weights per second.
        Returns the best of _PASSES passes over all experts."""
        count, most = self._count, self.experts.shape[1]
        self.input.fill_(0.01)
        self.factors.fill_(1.0)
        self.shares.fill_(1.0 / most)
        self.counts[0] = most
        whole = range(0, count - most + 1, most)
        seconds = float("inf")
        for _ in range(_PASSES):
            before = self.computing()
            for first in whole:
                self.experts[0] = torch.arange(first, first + most)
                self.ask(0, 1)
            seconds = min(seconds, self.computing() - before)
        return len(whole) * most * self.expert_bytes / seconds


PackedExpert = tuple[QTensor, QTensor, QTensor]
"""Gate and up [size, hidden], down [hidden, size], in the format of the CPU kernels."""


def _sizes(layer: Tensor | PackedExpert, hidden: int) -> tuple[int, int, int]:
    """Returns the number of a layer's experts, the rows of a gate, and the bytes of an expert."""
    if isinstance(layer, Tensor):
        return len(layer), layer.shape[1] // (3 * hidden), layer[0].nbytes
    return 1, layer[0].rows, sum(matrix.nbytes for matrix in layer)


def _expert(layer: PackedExpert) -> Expert:
    gate, up, down = layer
    return Expert(_weight(gate, up), _weight(down))


def _weight(*blocks: QTensor) -> LinearWeight:
    return LinearWeight(len(blocks), (MatrixStruct * 4)(*(block.matrix for block in blocks)))


def _laid_out(sizes: dict[str, tuple[tuple[int, ...], torch.dtype]], pinned: bool) -> dict[str, Tensor]:
    """Returns consecutive zero tensors in one block of memory, each aligned to a cache line."""
    total, starts = 0, {}
    for name, (shape, dtype) in sizes.items():
        starts[name] = total
        total += -(-math.prod(shape) * dtype.itemsize // _CACHE_LINE) * _CACHE_LINE
    memory = torch.zeros(total + _CACHE_LINE, dtype=torch.uint8)
    memory = memory.pin_memory() if pinned else memory
    skip = -memory.data_ptr() % _CACHE_LINE
    return {name: memory[skip + starts[name]:][:math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for name, (shape, dtype) in sizes.items()}


def _free_threads(address: int, process: int) -> None:
    if os.getpid() == process:
        library().deltic_beside_free(address)
