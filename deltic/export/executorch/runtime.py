"""Runs .pte files in ExecuTorch's runtime: one live sequence in the program's buffers, other sequences as copies.

Programs of ExecuTorch's own exporter (`executorch.examples.models.llama.export_llama`) run too. Their buffers have no
names, so their sequences are kept as tokens and recomputed when they become live.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from deltic.config import EngineConfig, GenerationDefaults, ModelConfig
from deltic.errors import ModelError
from deltic.export.executorch import library
from deltic.export.executorch.library import BindingCalls, LibraryCalls, ProgramCalls
from deltic.export.program import ProgramInfo, kv_size, load_json, read_sidecar, require_extra, state_size

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

log = logging.getLogger("deltic")

Buffer = Literal["keys", "values", "conv_state", "recurrent_state"]
BUFFERS: Final[dict[str, tuple[Buffer, ...]]] = {
    "full_attention": ("keys", "values"), "linear_attention": ("conv_state", "recurrent_state")}
"""Names of a layer's buffers, by layer type."""
_HEADER: Final = struct.Struct("<4x4s4sIQQQ")
"""A program's first bytes: its magic, the header's magic and size, the program's size, the weights' start and size."""
_FOREIGN_CHUNK: Final = 128
"""Maximum tokens per call of a foreign program: longer calls would delay other sequences."""
_OPERATORS: Final = "executorch.extension.llm.custom_ops"


def sidecar_of(path: Path) -> Path:
    """Returns the directory next to a program, with its config and tokenizer: `model.files` for `model.pte`."""
    return path.with_suffix(".files")


def buffer_names(config: ModelConfig) -> list[tuple[str, Buffer]]:
    """Returns name (for `Method::get_attribute`) and kind of each buffer that belongs to a sequence."""
    return [(f"layers.{index}.mixer.{kind}", kind) for index, layer in enumerate(config.layer_types)
            for kind in BUFFERS[layer]]


@dataclass(frozen=True, slots=True)
class SavedSequence:
    """A sequence that is not live."""

    position: int = 0
    content: dict[str, NDArray[Any]] | None = None
    """Buffers by name; K/V only up to the position."""
    tokens: tuple[int, ...] = ()
    """The sequence's tokens; only for a foreign program."""


class ExecutorchProgram:
    """A `Program` with one live sequence. Feeding another sequence saves the live one first.

    A program that fails on several tokens in one call gets single tokens from then on.
    """

    def __init__(self, path: Path, info: ProgramInfo, calls: ProgramCalls, chunk: int,
                 buffers: Sequence[tuple[str, Buffer]]) -> None:
        self._path, self._info, self._calls = path, info, calls
        self._chunk = chunk
        self._proven = chunk == 1  # True once a call of `chunk` tokens has succeeded
        self._buffers: dict[str, NDArray[Any]] = {name: self._buffer(name) for name, _ in buffers}
        self._growing = {name for name, kind in buffers if kind in ("keys", "values")}
        self._saved: dict[int, SavedSequence] = {}
        self._live: int | None = None
        self._position = 0

    @property
    def info(self) -> ProgramInfo:
        return self._info

    @property
    def slots(self) -> list[int]:
        return [*self._saved] + ([] if self._live is None else [self._live])

    def reserve(self, slots: int, tokens: int) -> None:
        """Does nothing: memory for copies is allocated when they are made."""

    def start(self, slot: int) -> None:
        self.drop(slot)
        self._saved[slot] = SavedSequence()

    def copy(self, source: int, target: int) -> None:
        if source == target:
            return
        self.drop(target)
        # saved sequences never change, so slots may share them
        self._saved[target] = self._save() if source == self._live else self._saved[source]

    def drop(self, slot: int) -> None:
        self._saved.pop(slot, None)
        if slot == self._live:
            self._live = None

    def position(self, slot: int) -> int:
        return self._position if slot == self._live else self._saved[slot].position

    def feed(self, slot: int, tokens: Sequence[int]) -> NDArray[np.float32]:
        if slot != self._live:
            self._make_live(slot)
        if self._position + len(tokens) > self._info.max_context:
            raise ModelError(f"{self._path.name} was exported for {self._info.max_context} tokens, less than the "
                             f"sequence's {self._position} and {len(tokens)} more: export it with a larger "
                             "--max-context")
        done = 0
        while done < len(tokens):
            chunk = tokens[done:done + self._chunk]
            found = self._call(chunk)
            if found is not None:
                logits, done = found, done + len(chunk)
        return logits

    def _call(self, tokens: Sequence[int]) -> NDArray[np.float32] | None:
        """Runs one call. Returns None, with the sequence restored, if the program accepts only single tokens."""
        before = None if self._proven or len(tokens) == 1 else self._save()
        try:
            logits = self._calls.run(tokens, self._position)
        except RuntimeError as error:
            if before is None:
                self._live = None  # the buffers' content is undefined
                raise ModelError(f"{self._path.name} fails at position {self._position}: {error}") from error
            self._restore(before)
            self._chunk, self._proven = 1, True
            return None
        self._proven = self._proven or len(tokens) > 1
        self._position += len(tokens)
        return logits

    def _make_live(self, slot: int) -> None:
        saved = self._saved.pop(slot)
        if self._live is not None:
            self._saved[self._live] = self._save()
        self._restore(saved)
        self._live = slot

    def _save(self) -> SavedSequence:
        return SavedSequence(self._position, {name: self._used(name).copy() for name in self._buffers})

    def _restore(self, saved: SavedSequence) -> None:
        self._position = saved.position
        for name, buffer in self._buffers.items():
            if saved.content is not None:
                self._used(name)[...] = saved.content[name]
            elif name not in self._growing:
                buffer.fill(0)

    def _used(self, name: str) -> NDArray[Any]:
        """Returns the part of a buffer that holds the live sequence."""
        buffer = self._buffers[name]
        return buffer[:, :self._position] if name in self._growing else buffer

    def _buffer(self, name: str) -> NDArray[Any]:
        try:
            return self._calls.buffer(name)
        except RuntimeError as error:
            raise ModelError(f"{self._path} has no buffer {name}: it is of another model than {self._info.sidecar}, "
                             "or was not exported by deltic; export it again") from error


class ForeignProgram(ExecutorchProgram):
    """A program without named buffers, whose sequences are kept as tokens."""

    def __init__(self, path: Path, info: ProgramInfo, calls: ProgramCalls, chunk: int) -> None:
        super().__init__(path, info, calls, chunk, ())
        self._tokens: list[int] = []
        self._proven = True

    def _call(self, tokens: Sequence[int]) -> NDArray[np.float32] | None:
        try:
            logits = super()._call(tokens)
        except ModelError:
            self._tokens.clear()
            raise
        self._tokens += tokens
        return logits

    def _save(self) -> SavedSequence:
        return SavedSequence(self._position, tokens=tuple(self._tokens))

    def _restore(self, saved: SavedSequence) -> None:
        """Recomputes the missing part of the buffers. K/V before a position stays valid, recurrent states do not."""
        common = len([*takewhile(bool, map(eq, self._tokens, saved.tokens))])
        if common < len(self._tokens) and self.info.config.linear_layers:
            common = 0
        del self._tokens[common:]
        self._position = common
        while self._position < saved.position:
            self._call(saved.tokens[self._position:self._position + self._chunk])


# Opening


def open_program(path: Path, options: EngineConfig) -> ExecutorchProgram:
    """Opens a .pte file. Raises ModelError if it is damaged, of another model, or needs a library that is missing."""
    require_extra("executorch", "executorch")
    if options.params is not None:
        return _open_foreign(path, Path(options.params), options)
    sidecar = sidecar_of(path)
    if not sidecar.is_dir():
        raise ModelError(f"{path.name} comes with a directory {sidecar.name} (config and tokenizer), which is not "
                         "beside it: copy it too, or export the model again. For a program of another exporter give "
                         "its shape (--params params.json) and tokenizer (--tokenizer tokenizer.json)")
    config, generation = read_sidecar(sidecar)
    _check_complete(path)
    program, metadata = _load(path, options.threads_for(config.parameter_count))
    _check_metadata(path, f"{sidecar.name}/config.json", metadata, config)
    info = _info(config, generation, sidecar, metadata)
    chunk = metadata["get_max_seq_len"] if metadata.get("enable_dynamic_shape", True) else 1
    return ExecutorchProgram(path, info, _calls(path, program, metadata), chunk, buffer_names(config))


def _open_foreign(path: Path, params: Path, options: EngineConfig) -> ForeignProgram:
    _check_complete(path)
    program, metadata = _load(path, options.threads_for(path.stat().st_size // 4))
    config, generation = read_params(params, metadata)
    _check_metadata(path, params.name, metadata, config)
    if not metadata.get("use_kv_cache", True):
        raise ModelError(f"{path} was exported without a KV cache: export it again with model.use_kv_cache=True")
    sidecar = None if options.tokenizer is None else Path(options.tokenizer).parent
    info = _info(config, generation, sidecar, metadata)
    return ForeignProgram(path, info, _calls(path, program, metadata), foreign_chunk(metadata))


def _info(config: ModelConfig, generation: GenerationDefaults, sidecar: Path | None, metadata: Mapping[str, Any]
          ) -> ProgramInfo:
    context: int = metadata["get_max_context_len"]
    return ProgramInfo(config, generation, sidecar, context, 4 * (context * kv_size(config) + state_size(config)))


def _check_complete(path: Path) -> None:
    """Raises ModelError for a truncated file: it is memory-mapped, and reading past its end kills the process."""
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
    magic, header_magic, _, program_size, start, weights_size = _HEADER.unpack(head.ljust(_HEADER.size, b"\0"))
    if not magic.startswith(b"ET") or not header_magic.startswith(b"eh"):
        raise ModelError(f"{path} is no ExecuTorch program: export it again")
    size, expected = path.stat().st_size, max(program_size, start + weights_size)
    if size < expected:
        raise ModelError(f"{path} has {size} bytes instead of {expected}: it is cut off; copy or export it again")


def _load(path: Path, threads: int) -> tuple[Any, dict[str, Any]]:
    """Returns the program and the results of its metadata methods."""
    import torch  # noqa: F401  loads libraries that the binding needs

    # portable_lib and executorch.runtime would also load the whole exporter
    binding = import_module("executorch.extension.pybindings._C")
    binding._unsafe_reset_threadpool(threads)
    try:
        verification = binding.Verification.InternalConsistency  # otherwise a damaged file kills the process
        program = binding._load_program(str(path), program_verification=verification)
        names = [program.get_method_name(index) for index in range(program.num_methods())]
        results = {name: program.load_method(name)([]) for name in names if name != "forward"}
    except RuntimeError as error:
        raise ModelError(f"{path} cannot be loaded ({error}): export it again with this version of executorch"
                         ) from error
    return program, {name: found[0] if len(found) == 1 else [*found] for name, found in results.items()}


def _check_metadata(path: Path, source: str, metadata: dict[str, Any], config: ModelConfig) -> None:
    for name, expected in (("get_vocab_size", config.vocab_size), ("get_n_layers", config.num_hidden_layers)):
        if metadata.get(name, expected) != expected:
            raise ModelError(f"{path} has {name} {metadata[name]}, but {source} has {expected}: they are of "
                             "different models; use the one that was written with the program")
    for name in ("get_max_seq_len", "get_vocab_size"):
        if not isinstance(metadata.get(name), int):
            raise ModelError(f"{path} has no {name}: it is no language model of ExecuTorch's exporters; "
                             "export it again")
    metadata.setdefault("get_max_context_len", metadata["get_max_seq_len"])


def _calls(path: Path, program: Any, metadata: dict[str, Any]) -> ProgramCalls:
    """Loads operators and program through deltic's library if it can be built, else through ExecuTorch's binding."""
    needs_library, vocabulary = bool(metadata.get("use_deltic_operators")), metadata["get_vocab_size"]
    if not needs_library:
        _load_llama_operators()
    native = None
    try:
        native = library.load()
    except ModelError as error:
        if needs_library:
            raise
        log.info("other Python threads wait while the program computes: %s", error)
    try:
        if native is not None:
            return LibraryCalls(native, path, vocabulary)
        return BindingCalls(program.load_method("forward"), vocabulary)
    except (RuntimeError, KeyError) as error:
        raise ModelError(f"{path} cannot be run: {error}. It may be incomplete, or need operators or a backend that "
                         "this executorch lacks") from error


def llama_operators() -> list[Path]:
    """Returns the operator libraries in executorch's package."""
    spec = find_spec(_OPERATORS)
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    return [file for folder in folders for file in sorted(folder.glob("*custom_ops_aot_lib.*"))]


def _load_llama_operators() -> None:
    import torch

    found = llama_operators()
    if not found:
        raise ModelError(f"the operator library of {_OPERATORS} is not there, which programs need for the delta rule "
                         "and for attention: install executorch from its wheel (pip install 'deltic[executorch]')")
    try:
        torch.ops.load_library(str(found[0]))
    except OSError as error:
        raise ModelError(f"{found[0]} cannot be loaded: {error}") from error


# Programs of ExecuTorch's own exporter

_HF_KEYS: Final[Mapping[str, str]] = {
    "dim": "hidden_size", "hidden_dim": "intermediate_size", "n_heads": "num_attention_heads",
    "norm_eps": "rms_norm_eps",
    **{name: name for name in (
        "vocab_size", "head_dim", "rope_theta", "partial_rotary_factor", "layer_types", "linear_num_key_heads",
        "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim")}}
"""Key in params.json of ExecuTorch's examples -> key in config.json."""


def read_params(path: Path, metadata: Mapping[str, Any]) -> tuple[ModelConfig, GenerationDefaults]:
    """Reads a shape from a params.json of ExecuTorch's examples or a Hugging Face config.json.

    metadata: the program's metadata, with the ids that end an answer. Raises ModelError naming the file and key.
    """
    try:
        mapping = load_json(path)
        if "model_type" not in mapping and "architectures" not in mapping:
            mapping = _hf_from_params(mapping, metadata)
        config = ModelConfig.from_hf(mapping)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    ends = metadata.get("get_eos_ids", metadata.get("get_eos_id", []))
    if not isinstance(ends, list):
        ends = [ends] if isinstance(ends, int) else []
    return config, GenerationDefaults.from_hf({"eos_token_id": [*ends, *config.eos_token_ids]}, config.eos_token_ids)


def _hf_from_params(params: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    if params.get("moe"):
        raise ModelError("moe is not supported; use a program of a dense model")
    for name in ("n_layers", "n_heads", "dim"):
        value = params.get(name)
        if type(value) is not int or value < 1:
            raise ModelError(f"{name} must be a number of at least 1; is this the params.json of the program?")
    heads, hidden = params["n_heads"], params["dim"]
    hybrid = "linear_attention" in (params.get("layer_types") or ())
    attention = "qwen3" if params.get("use_qk_norm") else "llama"
    return {
        "model_type": "qwen3_5" if hybrid else attention,
        "num_hidden_layers": params["n_layers"],
        "num_key_value_heads": params.get("n_kv_heads") or heads,
        "head_dim": hidden // heads,
        "intermediate_size": 4 * hidden,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": metadata.get("get_vocab_size"),
        "max_position_embeddings": metadata.get("get_max_context_len", metadata.get("get_max_seq_len")),
        **{hf_key: params[key] for key, hf_key in _HF_KEYS.items() if params.get(key) is not None}}


def foreign_chunk(metadata: Mapping[str, Any]) -> int:
    """Returns the maximum tokens of one call. The exporter plans for one token less than get_max_seq_len."""
    length: int = metadata["get_max_seq_len"] if metadata.get("enable_dynamic_shape") else 1
    return min(_FOREIGN_CHUNK, max(length - 1, 1))
