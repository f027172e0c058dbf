"""A compiled program as a `Model`: what the engine, sessions, `LLM` and the server step."""

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
from deltic.export.options import check_compiled
from deltic.export.program import Program, ProgramInfo
from deltic.ops import Ops, select
from deltic.ops.types import Batch, Sampled, Sampling
from deltic.params import PAGE

log = logging.getLogger("deltic")


@dataclass(frozen=True, slots=True)
class ProgramPools:
    """The accounts' pools where a program keeps sequences: a slot is a whole sequence, state and K/V, and pages are
    counted but have no content of their own."""

    program: Program
    sizes: PoolSizes

    @property
    def item_validator(self) -> ItemValidator:
        """What comes from tiers: there are none."""
        raise AssertionError("a program has no tiers")

    def apply(self, operations: Sequence[Operation]) -> None:
        """Carry these out, in order."""
        for operation in operations:
            match operation:
                case CopySlot(source, target):
                    self.program.copy(source, target)
                case CopyPage():
                    pass
                case _:
                    raise AssertionError(f"a program has neither replay rings nor tiers: {operation}")

    def forget(self, operations: Sequence[Operation]) -> None:
        """Nothing is held for them."""

    def sound(self, slots: Sequence[int], pages: Sequence[int], done: int) -> bool:
        """Nobody can look into a program's states: what no logits have shown to be sound is not kept."""
        return False

    def hold(self, content: object) -> int:
        """Only tiers have something to be held."""
        raise AssertionError("a program has no tiers")


@dataclass(slots=True, eq=False)
class ProgramModel:
    """A `Model` whose steps run in a program, one sequence after another.

    path: the directory with the tokenizer's files, None if there are none. threads: those that compute for it.
    tokenizer, notes: as of a `ModelRunner`. What else that has, a program has not.
    """

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
    vision = mtp_runner = draft = encode = experts = hooks = cast(Any, None)
    verifies = defers_state_writes = False

    @property
    def device(self) -> torch.device:
        """Where it takes batches and gives logits."""
        return torch.device("cpu")

    def run(self, batch: Batch) -> Tensor:
        """Run one step and return the logits [L, V] float32 of its `logit_tokens`. Moves no cursor."""
        return self.run_hidden(batch)[0]

    @torch.inference_mode()
    def run_hidden(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """As `run`. ConfigError if hidden states are wanted: a program has no way out for them."""
        if batch.layout.hidden:
            raise ConfigError("a compiled program gives logits, not hidden states: load the model itself for vectors")
        self._forget()
        logits = torch.empty(batch.layout.logits, self.config.vocab_size)
        place = 0
        for row in _rows(batch):
            for found in self._feed(row):
                logits[place] = found
                place += 1
        return logits, None

    def sample(self, logits: Tensor, sampling: Sampling) -> Sampled:
        """Choose from logits [L, V] float32, which may be changed."""
        return self.ops.sample(logits, sampling)

    def warm_up(self) -> None:
        """There is nothing left to be compiled."""

    def _forget(self) -> None:
        """Drop the sequences of slots that nobody owns any more: their K/V would keep others from having it."""
        if not self.cache.operations.queued:  # what is queued may still read them
            for slot in [slot for slot in self.program.slots if not self.cache.slots.owned(slot)]:
                self.program.drop(slot)

    def _feed(self, row: _ProgramRow) -> Iterator[Tensor]:
        """Append the row's tokens to its sequence, and leave copies where states are to be kept; the logits [V] of
        those tokens that want them."""
        program, at = self.program, 0
        if not row.done:
            program.start(row.target)
        elif row.source != row.target:
            program.copy(row.source, row.target)
        # a position must never be fed twice to a recurrent layer (L1)
        assert program.position(row.target) == row.done, "the program's sequence is not where the cursor stands"
        for end in sorted({*row.checkpoints, *row.wanted, len(row.tokens)}):
            logits = program.feed(row.target, row.tokens[at:end])
            at = end
            if end in row.wanted:
                yield torch.from_numpy(logits)
            if end in row.checkpoints:
                program.copy(row.target, row.checkpoints[end])


@dataclass(frozen=True, slots=True)
class _ProgramRow:
    """A batch's row in plain numbers. wanted: lengths of its tokens after which logits are wanted. checkpoints: slots
    by such lengths."""

    tokens: list[int]
    done: int
    source: int
    target: int
    wanted: set[int]
    checkpoints: dict[int, int]


def _rows(batch: Batch) -> Iterator[_ProgramRow]:
    ids, wanted, start = batch.ids.tolist(), batch.logit_tokens.tolist(), 0
    columns = (column.tolist() for column in (batch.done, batch.source, batch.target))
    emits = [*zip(batch.emit_row.tolist(), batch.emit_length.tolist(), batch.emit_slot.tolist(), strict=True)]
    for index, (count, done, source, target) in enumerate(zip(batch.layout.chunks, *columns, strict=True)):
        yield _ProgramRow(ids[start:start + count], done, source, target,
                   {token - start + 1 for token in wanted if start <= token < start + count},
                   {length - done: slot for row, length, slot in emits if row == index})
        start += count


def model_of(program: Program, name: str, options: EngineConfig) -> ProgramModel:
    """A program with its cache; ConfigError naming an option that makes no sense for it."""
    info = program.info
    options = _checked(options, info)
    needs = MemoryNeeds(info.token_bytes * PAGE, info.slot_bytes, info.max_context, options.max_batch,
                        options.max_context, 4 * info.config.vocab_size)
    memory = split_memory(options.memory_bytes or available_memory() // 2, needs)
    for warning in memory.warnings:
        log.warning("%s", warning)
    program.reserve(memory.slots, memory.pages * PAGE)
    # a slot is all of a sequence, so that even without recurrent layers it cannot be cut anywhere
    sizes = PoolSizes(memory.pages, memory.slots, 0, info.token_bytes, info.slot_bytes, recurrent=True)
    threads = options.threads_for(info.config.parameter_count)
    ops = select(options.ops, "cpu", options.cpu_level, threads)
    cache = HybridCache(ProgramPools(program, sizes), options.prefix_cache, (), memory.rows)
    return ProgramModel(name, info.sidecar, info.config, options, info.generation, memory, cache, program, ops, threads)


def _checked(options: EngineConfig, info: ProgramInfo) -> EngineConfig:
    check_compiled(options)
    if options.speculate not in ("auto", "off"):
        raise ConfigError(f"speculate={options.speculate} is not possible: a compiled program verifies no drafts",
                          "speculate")
    if options.max_context is not None and options.max_context > info.max_context:
        raise ConfigError(f"max_context {options.max_context} is more than the {info.max_context} tokens that this "
                          "program was compiled for: choose less, or compile it anew", "max_context")
    batch = options.max_batch if info.max_batch is None else min(options.max_batch, info.max_batch)
    return replace(options, device="cpu", speculate="off", max_batch=batch)
