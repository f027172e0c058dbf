"""Serves a compiled program as a model in the engine: for sessions, `LLM` and the server."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from deltic.cache.manager import HybridCache
from deltic.cache.memory_plan import MemoryNeeds, MemoryPlan, split_memory
from deltic.cache.offload.types import ItemValidator
from deltic.cache.operations import CopyPage, CopySlot, Operation, PoolSizes
from deltic.config import EngineConfig, GenerationDefaults, ModelConfig, available_memory
from deltic.errors import ConfigError
from deltic.export.program import Program, ProgramInfo, check_options, open_program
from deltic.ops import Ops, select
from deltic.ops.capabilities import Capabilities
from deltic.ops.types import Batch, Sampled, Sampling
from deltic.params import PAGE

log = logging.getLogger("deltic")


@dataclass(frozen=True, slots=True)
class ProgramPools:
    """Cache pools in which a slot is a whole sequence of a program, with state and KV cache. Pages are only counted."""

    program: Program
    sizes: PoolSizes

    @property
    def item_validator(self) -> ItemValidator:
        raise AssertionError("a program has no tiers")

    def apply(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            match operation:
                case CopySlot(source, target):
                    self.program.copy(source, target)
                case CopyPage():
                    pass
                case _:
                    raise AssertionError(f"a program has neither state delta logs nor tiers: {operation}")

    def forget(self, operations: Sequence[Operation]) -> None:
        """Does nothing: operations hold no data."""

    def sound(self, slots: Sequence[int], pages: Sequence[int], done: int) -> bool:
        """Returns False: the states of a program cannot be inspected."""
        return False

    def hold(self, content: object) -> int:
        raise AssertionError("a program has no tiers")


@dataclass(slots=True, eq=False)
class ProgramModel:
    """Runs steps in a program, one sequence after another. The fields match those of `ModelRunner`."""

    name: str
    path: Path | None
    config: ModelConfig
    options: EngineConfig
    generation: GenerationDefaults
    memory: MemoryPlan
    cache: HybridCache
    program: Program
    ops: Ops
    threads: int
    tokenizer: Any = None
    notes: Any = None
    numbers: Any = field(default_factory=dict)
    vision = mtp_runner = partial_head = draft = encode = experts = layers = hooks = cast(Any, None)
    capabilities = Capabilities()

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def run(self, batch: Batch) -> Tensor:
        """Runs one step. Returns the logits [L, V] float32 of its `logit_tokens`."""
        return self.run_hidden(batch)[0]

    @torch.inference_mode()
    def run_hidden(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Runs one step like `run`. Raises ConfigError if hidden states are requested."""
        if batch.layout.hidden:
            raise ConfigError("a compiled program gives logits, not hidden states: load the model itself for vectors")
        self._drop_unowned()
        logits = torch.empty(batch.layout.logits, self.config.vocab_size)
        index = 0
        for row in _rows(batch):
            for found in self._feed(row):
                logits[index] = found
                index += 1
        return logits, None

    def sample(self, logits: Tensor, sampling: Sampling) -> Sampled:
        """Samples from logits [L, V] float32. May overwrite the logits."""
        return self.ops.sample(logits, sampling)

    def _drop_unowned(self) -> None:
        """Frees the sequences of slots without an owner, and with them their KV cache."""
        if self.cache.operations.queued:  # queued copies may still read them
            return
        for slot in tuple(self.program.slots):
            if not self.cache.slots.owned(slot):
                self.program.drop(slot)

    def _feed(self, row: _ProgramRow) -> Iterator[Tensor]:
        """Appends the row's tokens and writes its state checkpoints. Yields the requested logits [V]."""
        program, done = self.program, 0
        if not row.done:
            program.start(row.target)
        elif row.source != row.target:
            program.copy(row.source, row.target)
        # feeding a position twice would corrupt the recurrent state (L1)
        assert program.position(row.target) == row.done, "the program's position differs from the cursor"
        for end in sorted({*row.checkpoints, *row.wanted, len(row.tokens)}):
            logits = program.feed(row.target, row.tokens[done:end])
            done = end
            if end in row.wanted:
                yield torch.from_numpy(logits)
            if end in row.checkpoints:
                program.copy(row.target, row.checkpoints[end])


@dataclass(frozen=True, slots=True)
class _ProgramRow:
    """A batch row as plain Python values. Lengths count the row's own tokens."""

    tokens: list[int]
    done: int
    source: int
    target: int
    wanted: set[int]
    """Lengths after which logits are requested."""
    checkpoints: dict[int, int]
    """Length -> slot of the state checkpoint at this length."""


def _rows(batch: Batch) -> Iterator[_ProgramRow]:
    ids, wanted, start = batch.ids.tolist(), batch.logit_tokens.tolist(), 0
    columns = (column.tolist() for column in (batch.done, batch.source, batch.target))
    emits = [*zip(batch.emit_row.tolist(), batch.emit_length.tolist(), batch.emit_slot.tolist(), strict=True)]
    for index, (count, done, source, target) in enumerate(zip(batch.layout.chunks, *columns, strict=True)):
        lengths = {token - start + 1 for token in wanted if start <= token < start + count}
        checkpoints = {length - done: slot for row, length, slot in emits if row == index}
        yield _ProgramRow(ids[start:start + count], done, source, target, lengths, checkpoints)
        start += count


def load_program(path: Path, options: EngineConfig) -> ProgramModel:
    """Opens a compiled model and plans its cache. Raises ConfigError for an option that it cannot follow."""
    program = open_program(path, options)
    info = program.info
    options = effective_options(options, info)
    needs = MemoryNeeds(info.token_bytes * PAGE, info.slot_bytes, info.max_context, options.max_batch,
                        options.max_context, 4 * info.config.vocab_size)
    memory = split_memory(options.memory_bytes or available_memory() // 2, needs)
    for warning in memory.warnings:
        log.warning("%s", warning)
    program.reserve(memory.slots, memory.pages * PAGE)
    # a slot holds a whole sequence: it cannot be cut, even without recurrent layers
    sizes = PoolSizes(memory.pages, memory.slots, 0, info.token_bytes, info.slot_bytes, recurrent=True)
    threads = options.threads_for(info.config.parameter_count)
    ops = select(options.ops, "cpu", options.cpu_level, threads)
    cache = HybridCache(ProgramPools(program, sizes), options.prefix_cache, (), memory.rows)
    return ProgramModel(str(path), info.sidecar, info.config, options, info.generation, memory, cache, program, ops,
                        threads)


def effective_options(options: EngineConfig, info: ProgramInfo) -> EngineConfig:
    """Returns the options with which a program runs. Raises ConfigError for an option that it cannot follow."""
    check_options(options)
    if options.speculate not in ("auto", "off"):
        raise ConfigError(f"speculate={options.speculate} is not possible: a compiled program verifies no drafts",
                          "speculate")
    if options.max_context is not None and options.max_context > info.max_context:
        raise ConfigError(f"max_context {options.max_context} is more than the {info.max_context} tokens that this "
                          "program was compiled for: choose less, or compile it again", "max_context")
    batch = options.max_batch if info.max_batch is None else min(options.max_batch, info.max_batch)
    return replace(options, device="cpu", speculate="off", max_batch=batch)
