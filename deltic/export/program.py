"""Compiled models: how to find and open them, the interface that they implement, and the files next to them.

This module does not import torch: a program that runs through its own runtime starts without it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from deltic.config import AUTO, EngineConfig, GenerationDefaults, ModelConfig
from deltic.errors import ConfigError, ModelError, RequestError
from deltic.params import common_length

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from deltic.loader.model_files import ModelFiles

Kind = Literal["executorch", "tvm"]

LIBRARIES: Final = ("rt.so", "rt.dylib", "rt.dll", "lib*.so", "lib*.dylib", "lib*.dll")
"""File names of a TVM directory's library; the first match is used."""
OBJECTS: Final = "rt.tar"
"""Object files of a library that was compiled on a machine without a linker for the target."""
_PACKAGES: Final = {"executorch": ("executorch", "torchao"), "tvm": ("tvm", "tvm_ffi")}
_FIXED_OPTIONS: Final = (
    "device", "dtype", "tp", "kv_dtype", "state_dtype", "quant", "packed_weights", "batch_invariant", "debug_layers",
    "rope_scaling", "cache_dir", "host_memory", "aot_dir", "mmproj", "expert_memory", "expert_cap", "gpu_memory",
    "gpu_memory_utilization")
"""Engine options that a compiled program cannot follow: they are compiled in, or act on data that is not exposed."""


@dataclass(frozen=True, slots=True)
class ProgramInfo:
    """Describes a compiled model."""

    config: ModelConfig
    generation: GenerationDefaults
    sidecar: Path | None
    """Directory with the tokenizer's files; None without a tokenizer."""
    max_context: int
    slot_bytes: int
    """Bytes of one sequence's state, including its KV cache unless sequences share pages."""
    token_bytes: int = 0
    """Bytes of KV cache per token if sequences share pages, else 0."""
    max_batch: int | None = None


class Program(Protocol):
    """A compiled model and its sequences, each in a numbered slot.

    A call serves one sequence. All calls come from the same thread.
    """

    @property
    def info(self) -> ProgramInfo: ...

    @property
    def slots(self) -> Collection[int]:
        """Slots that hold a sequence."""

    def reserve(self, slots: int, tokens: int) -> None:
        """Allocates slots and, if sequences share pages, KV cache for `tokens`. Called once, before other methods."""

    def start(self, slot: int) -> None:
        """Replaces the slot's sequence by an empty sequence."""

    def copy(self, source: int, target: int) -> None:
        """Replaces the target slot's sequence by a copy of the source slot's sequence."""

    def drop(self, slot: int) -> None:
        """Frees the slot's sequence, if there is one."""

    def position(self, slot: int) -> int:
        """Returns the length of the slot's sequence in tokens."""

    def feed(self, slot: int, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Appends tokens. Returns the logits [V] of the last one, valid until the next call."""


class RewindableProgram(Program, Protocol):
    """A program that can remove the last tokens of a sequence."""

    def reserve(self, slots: int, tokens: int, history: int = 1) -> None:
        """Allocates like `Program.reserve`. history: states kept for each slot, including the current one."""

    def rewind(self, slot: int, count: int) -> bool:
        """Removes the last `count` tokens. Returns False and changes nothing if the earlier state is no longer kept."""


def require_extra(extra: Literal["executorch", "tvm"], *packages: str) -> None:
    """Raises ModelError with the pip command if a package of the extra is missing (default: any of them)."""
    missing = [name for name in packages or _PACKAGES[extra] if find_spec(name) is None]
    if missing:
        raise ModelError(f"the package {missing[0]} is not installed: pip install 'deltic[{extra}]'")


def check_options(options: EngineConfig) -> None:
    """Raises ConfigError for an option that a compiled program cannot follow."""
    plain = EngineConfig(device="cpu" if options.device == "cpu" else AUTO)
    for name in _FIXED_OPTIONS:
        value = getattr(options, name)
        if value != getattr(plain, name):
            raise ConfigError(f"{name}={value} has no meaning for a compiled program: leave it out, "
                              "or load the model itself", name)


def state_size(config: ModelConfig) -> int:
    """Returns the number of values in the recurrent states of a sequence."""
    if config.linear is None:
        return 0
    linear = config.linear
    recurrent = linear.num_value_heads * linear.key_head_dim * linear.value_head_dim
    return len(config.linear_layers) * (recurrent + (linear.conv_kernel - 1) * linear.conv_dim)


def kv_size(config: ModelConfig) -> int:
    """Returns the number of values in the KV cache per token."""
    return 2 * len(config.attention_layers) * config.num_key_value_heads * config.head_dim


# Opening


def kind_of(path: str | Path) -> Kind | None:
    """Returns the kind of compiled model at a path; None if there is none."""
    path = Path(path)
    try:
        if path.is_file() and path.suffix.lower() == ".pte":
            return "executorch"
        if path.is_dir() and any(next(path.glob(name), None) for name in (*LIBRARIES, OBJECTS)):
            return "tvm"
    except (OSError, ValueError):  # not a path at all, such as a long prompt
        pass
    return None


def open_program(path: Path, options: EngineConfig) -> Program:
    """Opens a compiled model. Raises ModelError if it cannot be used here."""
    kind = kind_of(path)
    if kind is None:
        raise ModelError(f"{path} is not a compiled model")
    program: Program = import_module(f"deltic.export.{kind}.runtime").open_program(path, options)
    return program


# A conversation without the engine

_LIVE, _KEPT = 0, 1
_HISTORY: Final = 4


class ProgramConversation:
    """Runs one conversation in a program, and computes only the tokens after the prefix shared with the last call.

        talk = ProgramConversation(open_program(Path("compiled"), EngineConfig()))
        logits = talk.read(prompt)
        while token not in ends: logits = talk.read([*prompt, *answer])

    The KV cache can be cut anywhere. Recurrent states are kept for the last single tokens and for the end of the
    last prompt. Without a usable state the prompt is computed from its start.
    """

    def __init__(self, program: RewindableProgram) -> None:
        self.program = program
        self.computed = 0
        """Number of tokens that the last call computed."""
        self._history: list[int] = []
        self._prompt = 0
        program.reserve(2, 2 * program.info.max_context, _HISTORY)
        program.start(_LIVE)

    def read(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Returns the logits [V] after these tokens, which are the whole conversation. Valid until the next call.

        Raises RequestError for an empty list, or for more tokens than the context holds.
        """
        prompt, limit = [*tokens], self.program.info.max_context
        if not prompt:
            raise RequestError("there are no tokens to read: give at least one", "tokens")
        if len(prompt) > limit:
            raise RequestError(f"{len(prompt)} tokens are more than the context of {limit} holds", "tokens")
        # the last token always runs, because its logits are needed
        start = self._return_to(min(common_length(self._history, prompt), len(prompt) - 1))
        self._history = prompt[:start]
        self.computed = len(prompt) - start
        logits = self.program.feed(_LIVE, prompt[start:])
        self._history = prompt
        if self.computed > 1:
            self.program.copy(_LIVE, _KEPT)
            self._prompt = len(prompt)
        return logits

    def _return_to(self, common: int) -> int:
        """Rewinds to a position of at most `common` tokens, and returns the new position."""
        program, known = self.program, len(self._history)
        if _LIVE not in program.slots or program.position(_LIVE) != known:
            program.start(_LIVE)  # an earlier call failed halfway
            return 0
        if known == common or program.rewind(_LIVE, known - common):
            if self._prompt > common:
                self._prompt = 0
            return common
        if 0 < self._prompt <= common:
            program.copy(_KEPT, _LIVE)
            return self._prompt
        program.start(_LIVE)
        self._prompt = 0
        return 0


# The files next to a program: config, sampling defaults, tokenizer, chat template

_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.json", "chat_template.jinja")
_TEMPLATES: Final = "additional_chat_templates"
_CONFIG: Final = "config.json"
_GENERATION: Final = "generation_config.json"


def write_sidecar(files: ModelFiles, folder: Path, config: ModelConfig | None = None) -> None:
    """Writes config.json, generation_config.json and the tokenizer's files of a model into a directory.

    config: replaces the model's own config, for example without a draft head. Raises ModelError if a config.json cannot
    express the config.
    """
    config = config or files.config
    mapping = hf_config(config)
    if ModelConfig.from_hf(mapping) != config:
        raise ModelError(f"{files.path}: the scaled rotary frequencies of this model cannot be compiled")
    write_json(folder / _CONFIG, mapping)
    write_json(folder / _GENERATION, generation_config(files.generation))
    stored = files.tokenizer()
    if stored is not None:
        (folder / "tokenizer.json").write_text(stored.tokenizer, encoding="utf-8")
        templates = [{"name": name, "template": text} for name, text in stored.templates.items()]
        write_json(folder / "tokenizer_config.json", {**stored.special_tokens, "chat_template": templates})
        return
    for name in _FILES:
        if (files.path / name).is_file():
            shutil.copyfile(files.path / name, folder / name)
    if (files.path / _TEMPLATES).is_dir():
        shutil.copytree(files.path / _TEMPLATES, folder / _TEMPLATES, dirs_exist_ok=True)


def sidecar_files(folder: Path) -> list[Path]:
    """Returns the files that `write_sidecar` may have left in a directory."""
    paths = [folder / name for name in (_CONFIG, _GENERATION, *_FILES, _TEMPLATES)]
    return [path for path in paths if path.exists()]


def read_sidecar(folder: Path) -> tuple[ModelConfig, GenerationDefaults]:
    """Reads the files of `write_sidecar`. Raises ModelError naming the file and key."""
    path = folder / _CONFIG
    try:
        config = ModelConfig.from_hf(load_json(path))
        path = folder / _GENERATION
        generation = load_json(path) if path.is_file() else {}
        return config, GenerationDefaults.from_hf(generation, config.eos_token_ids)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """Returns a config.json that `ModelConfig.from_hf` reads back unchanged."""
    rope: dict[str, Any] = {
        "rope_type": "default", "rope_theta": config.rope.theta,
        "partial_rotary_factor": config.rope.rotary_dim / config.head_dim}
    if config.rope.mrope_section:
        rope |= {"mrope_section": [*config.rope.mrope_section], "mrope_interleaved": True}
    mapping: dict[str, Any] = {
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "layer_types": [*config.layer_types],
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "attn_output_gate": config.attention_output_gate,
        "rope_parameters": rope,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "dtype": config.dtype,
        "eos_token_id": [*config.eos_token_ids],
        "bos_token_id": config.bos_token_id,
        "pad_token_id": config.pad_token_id,
        "mtp_num_hidden_layers": config.num_mtp_layers,
    }
    if linear := config.linear:
        mapping |= {
            "linear_num_key_heads": linear.num_key_heads, "linear_num_value_heads": linear.num_value_heads,
            "linear_key_head_dim": linear.key_head_dim, "linear_value_head_dim": linear.value_head_dim,
            "linear_conv_kernel_dim": linear.conv_kernel}
    if experts := config.experts:
        mapping |= {
            "num_experts": experts.count, "num_experts_per_tok": experts.per_token,
            "moe_intermediate_size": experts.size, "shared_expert_intermediate_size": experts.shared_size,
            "norm_topk_prob": experts.normalised}
    return mapping


def generation_config(generation: GenerationDefaults) -> dict[str, Any]:
    """Returns a generation_config.json that `GenerationDefaults.from_hf` reads back unchanged."""
    mapping = {**generation.sampling(), "eos_token_id": [*generation.eos_token_ids]}
    for name in ("json_max_length", "json_max_items"):
        bound = getattr(generation, name)
        if bound is not None:
            mapping[name] = bound
    return mapping


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises ModelError if the file has none."""
    if not path.is_file():
        raise ModelError(f"there is no {path.name}; the compiled model is incomplete: make or copy it again")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"it cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError("it must hold one JSON object")
    return value
