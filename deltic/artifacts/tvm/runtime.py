"""A compiled directory in TVM's runtime, as a `Program`."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from struct import Struct
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from deltic.artifacts.opening import LIBRARIES
from deltic.artifacts.program import ProgramInfo
from deltic.artifacts.tvm import parameters
from deltic.artifacts.tvm.functions import Functions
from deltic.artifacts.tvm.library import runtime
from deltic.artifacts.tvm.metadata import DESCRIPTORS, Metadata, check_machine, read_config
from deltic.config import EngineConfig, GenerationDefaults, ModelConfig
from deltic.errors import ConfigError, ModelError
from deltic.types import PAGE

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CPU, _POOLED = 1, 2
_ELF: Final = Struct("<4s36xQ10xHH")
"""Of a library's header: its mark, where the table of sections begins, bytes of an entry, entries."""
_BIG: Final = 1
"""The mode of TVM's threads in which their number is ours to say."""


def open_program(path: Path, options: EngineConfig) -> TvmProgram:
    """The program in a directory that `kind_of` has found."""
    if options.params is not None:
        raise ConfigError("params is for a program (.pte) of ExecuTorch's own exporter: leave it out", "params")
    return TvmProgram(path, options)


class TvmProgram:
    """A compiled directory. A slot is a sequence of TVM's caches; copies share the full pages of K/V.

    ModelError if library, parameters and metadata are missing, damaged, not of one model, of another generation, or
    compiled for another processor.
    """

    def __init__(self, folder: Path, options: EngineConfig) -> None:
        said, config, defaults = read_config(folder)
        check_machine(said, folder)
        generation = parameters.generation_of(folder)
        if generation != said.generation and said.convention == "deltic":
            raise ModelError(f"{folder} is an artifact of generation {said.generation}, but its parameters are "
                             f"described by {DESCRIPTORS[generation]}, as those of {generation} are: compile it anew")
        self._ffi, self._threads, self._thread = runtime(), options.threads_for(config.parameter_count), 0
        self._vm = self._load(folder)
        self.metadata = self._checked(folder, said, config)
        self._functions = Functions(self._ffi, self.metadata.convention, self._find)
        self._parameters = parameters.load(folder, generation, self.metadata, self._ffi)
        self._positions: dict[int, int] = {}
        self._cache = self._states = None
        self._call = {name: self._ffi.get_global_func(f"vm.builtin.{name}") for name in (
            "kv_state_add_sequence", "kv_state_remove_sequence", "kv_state_fork_sequence", "kv_state_popn",
            "kv_state_begin_forward", "kv_state_end_forward")}
        self.info = _info(folder, config, defaults, self.metadata)

    @property
    def slots(self) -> Collection[int]:
        """Those that have a sequence."""
        return self._positions.keys()

    def reserve(self, slots: int, tokens: int, history: int = 1) -> None:
        """Make room for so many slots and, in whole pages, tokens of K/V. history: states of each slot: the present
        one, and those to which `rewind` may return."""
        shape = self._ffi.Shape
        pages = -(-tokens // PAGE) + slots  # a copy has a last page of its own
        self._cache = self._functions.paged_cache()(
            shape([slots]), shape([pages * PAGE]), shape([self.metadata.prefill_chunk_size]), shape([PAGE]), shape([0]))
        if self.info.config.linear_layers:
            self._states = self._vm["create_rnn_state"](shape([slots]), shape([history]))

    def start(self, slot: int) -> None:
        """Make the slot's sequence empty."""
        self.drop(slot)
        self._each("kv_state_add_sequence", slot)
        self._positions[slot] = 0

    def copy(self, source: int, target: int) -> None:
        """Make the target's sequence a copy of the source's."""
        self.drop(target)
        self._each("kv_state_fork_sequence", source, target, -1)
        self._positions[target] = self._positions[source]

    def drop(self, slot: int) -> None:
        """Forget the slot's sequence, if it has one."""
        if self._positions.pop(slot, None) is not None:
            self._each("kv_state_remove_sequence", slot)

    def position(self, slot: int) -> int:
        """Tokens of the slot's sequence."""
        return self._positions[slot]

    def rewind(self, slot: int, count: int) -> bool:
        """Take back the slot's last tokens, in both caches; False, and no change, if the states before them are not
        there any more: those of a prompt are not, but for its end."""
        if self._states is not None:
            try:
                self._call["kv_state_popn"](self._states, slot, count)
            except Exception:
                return False
        self._call["kv_state_popn"](self._cache, slot, count)
        self._positions[slot] -= count
        return True

    def feed(self, slot: int, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append tokens; returns the logits [V] of the last one."""
        size, found = self.metadata.prefill_chunk_size, None
        for start in range(0, len(tokens), size):
            found = self._step(slot, tokens[start:start + size])
        assert found is not None, "no tokens to feed"
        return found

    def _step(self, slot: int, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append a chunk. A sequence whose step failed is gone: part of it may have come into its states."""
        shape, count = self._ffi.Shape, len(tokens)
        if self._thread != get_ident():  # each thread that calls has helpers of its own
            self._thread = get_ident()
            self._ffi.get_global_func("runtime.config_threadpool")(_BIG, self._threads)
        try:
            self._each("kv_state_begin_forward", shape([slot]), shape([count]))
            caches = [self._cache] if self._states is None else [self._cache, self._states]
            found = self._functions.logits(tokens, caches, self._parameters)
            self._each("kv_state_end_forward")
        except BaseException:
            with suppress(Exception):
                self.drop(slot)
            raise
        self._positions[slot] += count
        return found[0, :self.metadata.vocabulary]

    def _find(self, name: str) -> Any:
        """A function of the library, None if it has none of this name."""
        try:
            return self._vm[name]
        except AttributeError:
            return None

    def _each(self, name: str, *arguments: Any) -> None:
        """Call a function of both caches: they move together."""
        for cache in (self._cache, self._states):
            if cache is not None:
                self._call[name](cache, *arguments)

    def _load(self, folder: Path) -> Any:
        path = next(path for name in LIBRARIES for path in sorted(folder.glob(name)))
        _check_whole(path)
        try:
            machine = self._ffi.load_module(str(path))["vm_load_executable"]()
            machine["vm_initialization"](_CPU, 0, _POOLED)
        except Exception as error:
            raise ModelError(f"{path} cannot be loaded by TVM's runtime, compile the model anew: {_line(error)}"
                             ) from error
        return machine

    def _checked(self, folder: Path, said: Metadata, config: ModelConfig) -> Metadata:
        """What the library says of itself; ModelError if the directory says something else."""
        try:
            found = Metadata.of(json.loads(self._vm["_metadata"]()), parameters=True, config=said)
        except ModelError as error:
            raise ModelError(f"{folder}: the library's metadata: {error}") from error
        except Exception as error:
            raise ModelError(f"{folder}: the library says nothing of itself: {_line(error)}") from error
        pairs = {name: (getattr(found, name), getattr(said, name)) for name in (
            "generation", "architecture", "quantization", "vocabulary")}
        for name, (inside, outside) in pairs.items():
            if inside != outside:
                raise ModelError(f"{folder}: {name} is {inside} in the library and {outside} in its config: they are "
                                 "not of one model")
        if config.vocab_size != found.vocabulary:
            raise ModelError(f"{folder}: config.json has a vocabulary of {config.vocab_size}, the library of "
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


def _info(folder: Path, config: ModelConfig, defaults: GenerationDefaults, metadata: Metadata) -> ProgramInfo:
    linear = config.linear
    state = 0 if linear is None else 4 * (linear.num_value_heads * linear.key_head_dim * linear.value_head_dim
                                          + (linear.conv_kernel - 1) * linear.conv_dim)
    number = 2 if "16" in metadata.quantization and metadata.convention == "mlc" else 4
    token = 2 * number * config.num_key_value_heads * config.head_dim * len(config.attention_layers)
    return ProgramInfo(config, defaults, folder, metadata.context_window_size,
                       state * len(config.linear_layers), token)


def _line(error: Exception) -> str:
    """The last line of an error of TVM's, which has a traceback above it."""
    return str(error).strip().rsplit("\n", 1)[-1]
