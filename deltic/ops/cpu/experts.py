"""Experts of which a few lie in memory and the others in the model's files (csrc/expert_store.cpp)."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Sequence
from ctypes import byref, c_int, c_int64
from pathlib import Path

import torch

from deltic.errors import ModelError
from deltic.ops.cpu.library import ExpertCounts, Extent, StoredLayer, ThreadPool, library
from deltic.ops.stored import ExpertStatistics, StoredExpert
from deltic.ops.types import ExpertPool

READERS = 4
"""Threads that read: while one packs what it has read, the disk is busy for another."""
_ALIGNMENT = 64
_FILE_ENDED, _FILE_CHANGED = -1, -2


class ExpertStore:
    """The experts of a model's layers, equally many in each.

    direct: they are read past the system's page cache; not where a file system has no such way of reading.
    nbytes: of the experts that can be in memory at the same time.
    """

    def __init__(self, pool: ThreadPool, layers: Sequence[Sequence[StoredExpert]], slots: Sequence[int],
                 refresh: int = 1, predict: bool = False) -> None:
        """pool: that of the ops which compute with them. slots: how many of each layer are in memory, at least one.
        refresh: of so many steps one may exchange them. predict: read what the next layer is likely to want.

        Raises ModelError naming a file that cannot be read, MemoryError.
        """
        self.slots, self.predict, self._layers = tuple(slots), predict, layers
        self.paths = list(dict.fromkeys(
            matrix.path for experts in layers for expert in experts for matrix in expert.matrices))
        opened = [_open(path) for path in self.paths]
        files = (c_int * len(opened))(*(file for file, _ in opened))
        self.direct = all(direct for _, direct in opened)
        structs, _kept = self._structs()
        made = library().deltic_expert_store_new(structs, len(layers), len(layers[0]), files, len(opened), READERS,
                                                 refresh)
        if not made:
            for file, _ in opened:
                os.close(file)
            raise MemoryError("no memory for the experts")
        self.address: int = made
        weakref.finalize(self, _free, made, [file for file, _ in opened], os.getpid()).atexit = False
        pool.unread = self._failure
        self.nbytes = sum(count * expert_bytes(experts[0]) for count, experts in zip(slots, layers, strict=True))

    def fill(self, scores: Sequence[Sequence[float]] | None = None) -> None:
        """Read as many experts of each layer as there is room for: those with the highest scores, of equals, and
        without scores, the first. To be called once, before the first step. ModelError if a file cannot be read."""
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
        """What stands for the experts of each layer."""
        return [ExpertPool(self, number, len(experts), expert_bytes(experts[0]) * len(experts))
                for number, experts in enumerate(self._layers)]

    def begin_step(self) -> None:
        """Nothing: a step itself reads and exchanges experts."""

    def scores(self) -> list[list[float]]:
        """By layer, how often each expert was wanted lately. Between steps."""
        return [self._scores(number).tolist() for number in range(len(self._layers))]

    def statistics(self) -> ExpertStatistics:
        """For any thread."""
        count = len(self._layers)
        counts, hits, misses = ExpertCounts(), (c_int64 * count)(), (c_int64 * count)()
        library().deltic_expert_store_count(self.address, byref(counts), hits, misses)
        return ExpertStatistics(tuple(hits), tuple(misses), counts.bytes, counts.promotions, counts.refreshes,
                                counts.predicted, counts.useful, counts.waited / 1e9, counts.reading / 1e9)

    def _scores(self, layer: int) -> torch.Tensor:
        """A view."""
        experts = len(self._layers[layer])
        place = library().deltic_expert_store_scores(self.address, layer)
        return torch.frombuffer((ctypes.c_float * experts).from_address(place), dtype=torch.float32)

    def _structs(self) -> tuple[ctypes.Array[StoredLayer], list[object]]:
        """The layers' structs, and what they borrow from."""
        numbers = {path: number for number, path in enumerate(self.paths)}
        structs, kept = (StoredLayer * len(self._layers))(), list[object]()
        for struct, experts, slots in zip(structs, self._layers, self.slots, strict=True):
            first = experts[0]
            extents = (Extent * (3 * len(experts)))(*(
                Extent(numbers[matrix.path], matrix.offset) for expert in experts for matrix in expert.matrices))
            kept.append(extents)
            struct.slots, struct.rows, struct.columns = slots, first.gate.rows, first.gate.columns
            struct.types, struct.extents = (c_int64 * 3)(*(matrix.type for matrix in first.matrices)), extents
        return structs, kept

    def _failure(self) -> Exception:
        file = c_int64()
        code = library().deltic_expert_store_failure(self.address, byref(file))
        path = self.paths[file.value]
        if code == _FILE_CHANGED:
            return ModelError(f"{path} has changed since the model was loaded, so that its experts cannot be read any "
                              "more: load the model again")
        why = "it has become shorter" if code == _FILE_ENDED else errno.errorcode.get(code, str(code))
        return ModelError(f"experts cannot be read from {path}: {why if code < 0 else f'{os.strerror(code)} ({why})'}")


def expert_bytes(expert: StoredExpert) -> int:
    """What an expert takes in memory."""
    sizes = (library().deltic_packed_bytes(matrix.type, matrix.rows, matrix.columns) for matrix in expert.matrices)
    return sum(-(-int(size) // _ALIGNMENT) * _ALIGNMENT for size in sizes)


def _open(path: Path) -> tuple[int, bool]:
    """A descriptor, and whether reading passes the page cache."""
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
    """Some file systems take the flag and then refuse to read."""
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
