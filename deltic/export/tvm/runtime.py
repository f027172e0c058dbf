"""A compiled directory in TVM's runtime, as a `Program`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltic.config import EngineConfig, GenerationDefaults, ModelConfig
from deltic.errors import ConfigError
from deltic.export.program import ProgramInfo
from deltic.export.tvm.functions import Functions
from deltic.export.tvm.metadata import Metadata, read_config
from deltic.export.tvm.opened import OpenedLibrary
from deltic.params import PAGE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


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
        self._library = OpenedLibrary(folder, said, config.vocab_size, options.threads_for(config.parameter_count))
        self._ffi, self.metadata = self._library.device.ffi, self._library.metadata
        self._functions = Functions(self._library.device, self.metadata.convention, self._library.find)
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
            self._states = self._library.function("create_rnn_state")(shape([slots]), shape([history]))

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
        self._library.enter()
        try:
            self._each("kv_state_begin_forward", shape([slot]), shape([count]))
            caches = [self._cache] if self._states is None else [self._cache, self._states]
            found = self._functions.logits(tokens, caches, self._library.parameters)
            self._each("kv_state_end_forward")
        except BaseException:
            with suppress(Exception):
                self.drop(slot)
            raise
        self._positions[slot] += count
        return found[0, :self.metadata.vocabulary]

    def _each(self, name: str, *arguments: Any) -> None:
        """Call a function of both caches: they move together."""
        for cache in (self._cache, self._states):
            if cache is not None:
                self._call[name](cache, *arguments)


def _info(folder: Path, config: ModelConfig, defaults: GenerationDefaults, metadata: Metadata) -> ProgramInfo:
    linear = config.linear
    state = 0 if linear is None else 4 * (linear.num_value_heads * linear.key_head_dim * linear.value_head_dim
                                          + (linear.conv_kernel - 1) * linear.conv_dim)
    number = 2 if "16" in metadata.quantization and metadata.convention == "mlc" else 4
    token = 2 * number * config.num_key_value_heads * config.head_dim * len(config.attention_layers)
    return ProgramInfo(config, defaults, folder, metadata.context_window_size,
                       state * len(config.linear_layers), token)
