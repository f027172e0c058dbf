"""A compiled directory that is opened: its library in TVM's virtual machine, its parameters, its device."""

from __future__ import annotations

import json
from pathlib import Path
from struct import Struct
from threading import get_ident
from typing import Any, Final

from deltic.errors import ModelError
from deltic.export.opening import LIBRARIES, OBJECTS
from deltic.export.tvm import parameters
from deltic.export.tvm.device import open_device
from deltic.export.tvm.library import runtime
from deltic.export.tvm.metadata import DESCRIPTORS, Metadata, check_machine

_ELF: Final = Struct("<4s36xQ10xHH")
"""Of a library's header: its mark, where the table of sections begins, bytes of an entry, entries."""
_BIG: Final = 1
"""The mode of TVM's threads in which their number is ours to say."""


class OpenedLibrary:
    """The library and the parameters of a directory, whose config says `said` and whose model has so many tokens.

    ModelError if they are missing, damaged, not of one model, of another generation, or compiled for another processor
    or device.
    """

    def __init__(self, folder: Path, said: Metadata, vocabulary: int, threads: int) -> None:
        check_machine(said, folder)
        generation = parameters.generation_of(folder)
        if generation != said.generation and said.convention == "deltic":
            raise ModelError(f"{folder} is an artifact of generation {said.generation}, but its parameters are "
                             f"described by {DESCRIPTORS[generation]}, as those of {generation} are: compile it anew")
        self._ffi, self._threads, self._thread = runtime(), threads, 0
        self.device = open_device(self._ffi, said.device, folder)
        self._vm = self._load(folder)
        self.metadata = self._checked(folder, said, vocabulary)
        self.parameters = parameters.load(folder, generation, self.metadata, self._ffi, self.device.put)

    def find(self, name: str) -> Any:
        """A function of the library, None if it has none of this name."""
        try:
            return self._vm[name]
        except AttributeError:
            return None

    def function(self, name: str) -> Any:
        """A function of the library, which it must have."""
        return self._vm[name]

    def enter(self) -> None:
        """Have the calls of this thread use the number of threads that was asked for."""
        if self._thread != get_ident():  # each thread that calls has helpers of its own
            self._thread = get_ident()
            self._ffi.get_global_func("runtime.config_threadpool")(_BIG, self._threads)

    def _load(self, folder: Path) -> Any:
        path = next((path for name in LIBRARIES for path in sorted(folder.glob(name))), None)
        if path is None:
            raise ModelError(f"{folder / OBJECTS} is not linked: link its objects to a library on the machine that "
                             "it was compiled for, or compile the model anew with CXX naming a compiler for it")
        _check_whole(path)
        try:
            machine = self._ffi.load_module(str(path))["vm_load_executable"]()
            machine["vm_initialization"](*self.device.types)
        except Exception as error:
            raise ModelError(f"{path} cannot be loaded by TVM's runtime, compile the model anew: {_line(error)}"
                             ) from error
        return machine

    def _checked(self, folder: Path, said: Metadata, vocabulary: int) -> Metadata:
        """The library's own metadata; ModelError if it differs from the directory's."""
        try:
            found = Metadata.of(json.loads(self._vm["_metadata"]()), parameters=True, config=said)
        except ModelError as error:
            raise ModelError(f"{folder}: the library's metadata: {error}") from error
        except Exception as error:
            raise ModelError(f"{folder}: the library says nothing of itself: {_line(error)}") from error
        pairs = {name: (getattr(found, name), getattr(said, name)) for name in (
            "generation", "architecture", "quantization", "vocabulary", "device")}
        for name, (inside, outside) in pairs.items():
            if inside != outside:
                raise ModelError(f"{folder}: {name} is {inside} in the library and {outside} in its config: they are "
                                 "not of one model")
        if vocabulary != found.vocabulary:
            raise ModelError(f"{folder}: config.json has a vocabulary of {vocabulary}, the library of "
                             f"{found.vocabulary}: they are not of one model")
        return found


def _check_whole(path: Path) -> None:
    """A library is mapped, and one that is cut would end the process; of ELF files the table of sections comes last."""
    if not path.is_file():
        raise ModelError(f"{path} is no file: compile the model anew")
    with path.open("rb") as file:
        mark, start, size, count = _ELF.unpack(file.read(_ELF.size).ljust(_ELF.size, b"\0"))
    wanted, found = start + size * count, path.stat().st_size
    if mark == b"\x7fELF" and found < wanted:
        raise ModelError(f"{path} has {found:,} bytes instead of {wanted:,}: it is cut off; copy it again")




def _line(error: Exception) -> str:
    """The last line of an error of TVM's, which has a traceback above it."""
    return str(error).strip().rsplit("\n", 1)[-1]
