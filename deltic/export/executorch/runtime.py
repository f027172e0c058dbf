"""A .pte file in ExecuTorch's runtime: one sequence in the program's buffers, the others beside it as copies."""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from deltic.config import EngineConfig, ModelConfig
from deltic.errors import ModelError
from deltic.export.executorch import library
from deltic.export.executorch.calls import BoundMethod, Native, ProgramCalls
from deltic.export.executorch.names import Buffer, buffer_names, sidecar_of
from deltic.export.extras import need
from deltic.export.program import ProgramInfo
from deltic.export.sidecar import read_sidecar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

log = logging.getLogger("deltic")

_HEADER: Final = struct.Struct("<4x4s4sIQQQ")
"""The beginning of a program: its kind, that of its header, the header's size, the bytes of the program itself, where
its weights begin, and their bytes."""
CALL: Final = 128
"""Most tokens that a program of another exporter is given at once: more would keep other sequences waiting."""
_OPERATORS: Final = "executorch.extension.llm.custom_ops"


@dataclass(frozen=True, slots=True)
class Saved:
    """A sequence beside the program: `position` tokens, and the buffers' content by name, K/V below the position.
    tokens: of a program whose buffers have no names."""

    position: int = 0
    content: dict[str, NDArray[Any]] | None = None
    tokens: tuple[int, ...] = ()


class ExecutorchProgram:
    """A `Program` of one live sequence. Another one becomes live when it is fed; the live one is then copied away.

    Errors of a single token are raised as ModelError. A program that cannot take several tokens in one call, whatever
    it says, is given one at a time.
    """

    def __init__(self, path: Path, info: ProgramInfo, calls: ProgramCalls, chunk: int,
                 names: Sequence[tuple[str, Buffer]]) -> None:
        self._path, self._info, self._calls = path, info, calls
        self._chunk, self._proven = chunk, chunk == 1
        self._buffers: dict[str, NDArray[Any]] = {name: self._attribute(name) for name, _ in names}
        self._growing = {name for name, kind in names if kind in ("keys", "values")}
        self._saved: dict[int, Saved] = {}
        self._live: int | None = None
        self._position = 0

    @property
    def info(self) -> ProgramInfo:
        """What the artifact says of itself."""
        return self._info

    def reserve(self, slots: int, tokens: int) -> None:
        """Copies are made when they are wanted."""

    def start(self, slot: int) -> None:
        """Make the slot's sequence empty, whatever it was before."""
        self.drop(slot)
        self._saved[slot] = Saved()

    def copy(self, source: int, target: int) -> None:
        """Make the target's sequence a copy of the source's, whatever it was before."""
        if source == target:
            return
        self.drop(target)
        # what is saved is never changed, so that two may have the same
        self._saved[target] = self._take() if source == self._live else self._saved[source]

    def drop(self, slot: int) -> None:
        """Forget the slot's sequence, if it has one."""
        self._saved.pop(slot, None)
        if slot == self._live:
            self._live = None

    @property
    def slots(self) -> list[int]:
        """Those that have a sequence."""
        return [*self._saved] + ([] if self._live is None else [self._live])

    def position(self, slot: int) -> int:
        """Tokens of the slot's sequence."""
        return self._position if slot == self._live else self._saved[slot].position

    def feed(self, slot: int, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append tokens; the logits [V] of the last one."""
        if slot != self._live:
            self._enter(slot)
        if self._position + len(tokens) > self._info.max_context:
            raise ModelError(f"{self._path.name} was exported for {self._info.max_context} tokens, which a sequence of "
                             f"{self._position} tokens and {len(tokens)} more passes: export it with a larger "
                             "--max-context")
        at = 0
        while at < len(tokens):
            count = min(self._chunk, len(tokens) - at)
            found = self._call(tokens[at:at + count])
            if found is not None:
                logits, at = found, at + count
        return logits

    def _call(self, tokens: Sequence[int]) -> NDArray[np.float32] | None:
        """One call of the program. None, with the sequence as it was, if it turns out to take single tokens only."""
        before = None if self._proven or len(tokens) == 1 else self._take()
        try:
            logits = self._calls.run(tokens, self._position)
        except RuntimeError as error:
            if before is None:
                self._live = None  # what the call has left in the buffers belongs to nobody
                raise ModelError(f"{self._path.name} fails at position {self._position}: {error}") from error
            self._put(before)
            self._chunk, self._proven = 1, True
            return None
        self._proven = self._proven or len(tokens) > 1
        self._position += len(tokens)
        return logits

    def _enter(self, slot: int) -> None:
        wanted = self._saved.pop(slot)
        if self._live is not None:
            self._saved[self._live] = self._take()
        self._put(wanted)
        self._live = slot

    def _take(self) -> Saved:
        """A copy of the live sequence."""
        return Saved(self._position, {name: (buffer[:, :self._position] if name in self._growing else buffer).copy()
                                      for name, buffer in self._buffers.items()})

    def _put(self, saved: Saved) -> None:
        self._position = saved.position
        for name, buffer in self._buffers.items():
            if saved.content is not None:
                (buffer[:, :self._position] if name in self._growing else buffer)[...] = saved.content[name]
            elif name not in self._growing:
                buffer.fill(0)

    def _attribute(self, name: str) -> NDArray[Any]:
        try:
            return self._calls.buffer(name)
        except RuntimeError as error:
            raise ModelError(f"{self._path} has no buffer {name}: it is of another model than {self._info.sidecar}, or "
                             "was not exported by deltic; export it again") from error


def open_program(path: Path, options: EngineConfig) -> ExecutorchProgram:
    """The program in a .pte file. ModelError if its sidecar is missing or of another model, if the file is not whole,
    or if the runtime has not what it needs."""
    need("executorch", "executorch")
    sidecar = sidecar_of(path)
    if options.params is not None:
        return _open_foreign(path, Path(options.params), options)
    if not sidecar.is_dir():
        raise ModelError(f"{path.name} comes with a directory {sidecar.name} (config and tokenizer), which is not "
                         "beside it: copy it too, or export the model again. For a program of another exporter give "
                         "its shape (--params params.json) and tokenizer (--tokenizer tokenizer.json)")
    config, generation = read_sidecar(sidecar)
    _check_whole(path)
    program, said = _load(path, options.threads_for(config.parameter_count))
    _check_facts(path, f"{sidecar.name}/config.json", said, config)
    info = ProgramInfo(config, generation, sidecar, said["get_max_context_len"],
                       _slot_bytes(config, said["get_max_context_len"]))
    calls = _calls(path, program, said)
    chunk = said["get_max_seq_len"] if said.get("enable_dynamic_shape", True) else 1
    return ExecutorchProgram(path, info, calls, chunk, buffer_names(config))


def _open_foreign(path: Path, params: Path, options: EngineConfig) -> ExecutorchProgram:
    from deltic.export.executorch.foreign import ForeignProgram, call_size, read_params

    _check_whole(path)
    program, said = _load(path, options.threads_for(path.stat().st_size // 4))
    config, generation = read_params(params, said)
    _check_facts(path, params.name, said, config)
    if not said.get("use_kv_cache", True):
        raise ModelError(f"{path} was exported without a K/V cache: export it again with model.use_kv_cache=True")
    words = None if options.tokenizer is None else Path(options.tokenizer).parent
    context = said["get_max_context_len"]
    info = ProgramInfo(config, generation, words, context, _slot_bytes(config, context))
    return ForeignProgram(path, info, _calls(path, program, said), call_size(said))


def _load(path: Path, threads: int) -> tuple[Any, dict[str, Any]]:
    """The program, and what its methods beside `forward` say."""
    import torch  # noqa: F401  whose libraries the next one needs

    # not portable_lib or executorch.runtime, which bring along all that exporting needs
    portable = import_module("executorch.extension.pybindings._C")
    portable._unsafe_reset_threadpool(threads)
    try:
        whole = portable.Verification.InternalConsistency  # else what is damaged ends the process
        program = portable._load_program(str(path), program_verification=whole)
        names = [program.get_method_name(index) for index in range(program.num_methods())]
        said = {name: program.load_method(name)([]) for name in names if name != "forward"}
    except RuntimeError as error:
        raise ModelError(f"{path} cannot be loaded ({error}): export it again with this version of executorch") from (
            error)
    facts = {name: found[0] if len(found) == 1 else [*found] for name, found in said.items()}
    return program, facts


def llama_operators() -> list[Path]:
    """The operator libraries in executorch's package; none if it has not got any."""
    place = find_spec(_OPERATORS)
    folders = [] if place is None else [Path(folder) for folder in place.submodule_search_locations or ()]
    return [file for folder in folders for file in sorted(folder.glob("*custom_ops_aot_lib.*"))]


def _load_llama_operators() -> None:
    """Register the operators of ExecuTorch's llama library in this process."""
    import torch

    found = llama_operators()
    if not found:
        raise ModelError(f"the operator library of {_OPERATORS} is not there, which programs need for the delta rule "
                         "and for attention: install executorch from its wheel (pip install 'deltic[executorch]')")
    try:
        torch.ops.load_library(str(found[0]))
    except OSError as error:
        raise ModelError(f"{found[0]} cannot be loaded: {error}") from error


def _calls(path: Path, program: Any, said: dict[str, Any]) -> ProgramCalls:
    """The program with its operators. Without deltic's library a program that needs none of its operators is called
    through ExecuTorch's binding."""
    own, vocabulary = bool(said.get("use_deltic_operators")), said["get_vocab_size"]
    if not own:
        _load_llama_operators()
    try:
        native = library.load()
    except ModelError as error:
        if own:
            raise
        native = None
        log.info("nothing else runs while the program computes: %s", error)
    try:
        return (
            BoundMethod(program.load_method("forward"), vocabulary)
            if native is None
            else Native(native, path, vocabulary)
        )
    except (RuntimeError, KeyError) as error:
        raise ModelError(
            f"{path} cannot be run: {error}. It may need operators or a backend that this executorch does "
            "not have, or not be whole"
        ) from error


def _check_whole(path: Path) -> None:
    """A program is mapped, and a file that is cut would end the process where it is read."""
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
    size, found = path.stat().st_size, _HEADER.unpack(head.ljust(_HEADER.size, b"\0"))
    if found[0][:2] != b"ET" or found[1][:2] != b"eh":
        raise ModelError(f"{path} is no ExecuTorch program: export it again")
    wanted = max(found[3], found[4] + found[5])
    if size < wanted:
        raise ModelError(f"{path} has {size} bytes, but should have {wanted}: it is cut off; copy or export it again")


def _check_facts(path: Path, source: str, said: dict[str, Any], config: ModelConfig) -> None:
    for name, own in (("get_vocab_size", config.vocab_size), ("get_n_layers", config.num_hidden_layers)):
        if said.get(name, own) != own:
            raise ModelError(f"{path} says {name} {said[name]}, but {source} {own}: they are of "
                             "different models; take the one that was written with the program")
    for name in ("get_max_seq_len", "get_vocab_size"):
        if not isinstance(said.get(name), int):
            raise ModelError(f"{path} does not say {name}: it is no language model of ExecuTorch's exporters; "
                             "export it again")
    said.setdefault("get_max_context_len", said["get_max_seq_len"])


def _slot_bytes(config: ModelConfig, max_context: int) -> int:
    kv = 2 * len(config.attention_layers) * max_context * config.num_key_value_heads * config.head_dim
    linear = config.linear
    if linear is None:
        return 4 * kv
    state = linear.num_value_heads * linear.key_head_dim * linear.value_head_dim
    return 4 * (kv + len(config.linear_layers) * (state + (linear.conv_kernel - 1) * config.conv_dim))
