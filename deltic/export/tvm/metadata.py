"""What a compiled directory says of itself: in mlc-chat-config.json, and again in its library, which must agree."""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from deltic.config import GenerationDefaults, ModelConfig
from deltic.config.aliases import FORMATS, GENERATIONS, canonical
from deltic.config.reading import integer
from deltic.errors import ModelError, show
from deltic.export.sidecar import load_json, read_sidecar

Generation = Literal["v1", "v2"]
Convention = Literal["deltic", "mlc"]
_GROUPED: Final = re.compile(r"q[348](f16|bf16|f32)_[012]")
"""What mlc-llm calls weights of 3, 4 or 8 bits that share a scale by groups; its libraries unpack them themselves."""
CONFIG: Final = "mlc-chat-config.json"
VERSION: Final = "0.1.0"
"""Of the layout of `CONFIG`."""
DESCRIPTORS: Final[Mapping[Generation, str]] = {"v2": "tensor-cache.json", "v1": "ndarray-cache.json"}
"""The file that describes the parameters of a generation, in the order in which they are looked for."""
_MACHINES: Final = {"arm64": "aarch64", "AMD64": "x86_64"}
"""Other names of processors."""
ENCODERS: Final = ("bert", "roberta")
"""Architectures that give states, not logits."""
FLAGS: Final = ("sse4_2", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "asimd")


@dataclass(frozen=True, slots=True)
class Metadata:
    """What both the config and the library say.

    generation: v1 has attention alone, v2 recurrent layers too.
    architecture: of the model, by its name here.
    parameters: names, shapes and dtypes in the order in which functions take them.
    context_window_size, prefill_chunk_size: in tokens.
    vocabulary: ids that the model knows; logits may be longer.
    machine, needs: for which processors the code is, and what they must have.
    convention: by which the library's functions are called: as deltic compiles them, or as mlc-llm does.
    device: what runs the kernels, by TVM's name: cpu, cuda, metal, ...
    system: the operating system that the library is for.
    target: as it was given.
    """

    generation: Generation
    architecture: str
    quantization: str
    parameters: tuple[tuple[str, tuple[int, ...], str], ...]
    context_window_size: int
    prefill_chunk_size: int
    vocabulary: int
    machine: str
    needs: tuple[str, ...] = ()
    convention: Convention = "deltic"
    device: str = "cpu"
    system: str = sys.platform
    target: str = "llvm"

    def to_json(self) -> str:
        """As the library's function `_metadata` gives it."""
        parameters = [{"name": name, "shape": shape, "dtype": dtype} for name, shape, dtype in self.parameters]
        return json.dumps({**self.plain(), "params": parameters})

    def plain(self) -> dict[str, Any]:
        """All but the parameters."""
        return {"generation": self.generation, "model_type": self.architecture, "quantization": self.quantization,
                "context_window_size": self.context_window_size, "prefill_chunk_size": self.prefill_chunk_size,
                "sliding_window_size": -1, "attention_sink_size": -1, "tensor_parallel_shards": 1,
                "vocab_size": self.vocabulary, "machine": self.machine, "needs": [*self.needs],
                "device": self.device, "system": self.system, "target": self.target}

    @classmethod
    def of(cls, mapping: Mapping[str, Any], parameters: bool, config: Metadata | None = None) -> Metadata:
        """Read what `to_json` (with parameters) or `plain` has written, or mlc's own; ModelError naming the key.
        config: what the config says, for what a library of mlc's leaves to it: the vocabulary."""
        from deltic.config.families import architecture

        if not isinstance(mapping.get("model_type"), str):
            raise ModelError("model_type is absent")
        if mapping.get("sliding_window_size", -1) not in (-1, None):
            raise ModelError(f"sliding_window_size {show(mapping['sliding_window_size'])} is not supported, only -1")
        if mapping.get("tensor_parallel_shards", 1) != 1:
            raise ModelError("tensor_parallel_shards must be 1")
        name = mapping["model_type"]
        found = name if name in ENCODERS else architecture(name)
        generation = canonical(GENERATIONS, str(mapping.get("generation", _generation_of(found))), "generation")
        size = integer(mapping, "context_window_size", 1, 1 << 31)
        known = {} if config is None or "generation" in mapping else {"vocab_size": config.vocabulary}
        vocabulary = integer({**known, **mapping}, "vocab_size", 2, 1 << 24)
        return cls(
            generation="v1" if generation == "v1" else "v2", architecture=found,
            quantization=_quantization(str(mapping.get("quantization", "q0f32"))),
            parameters=tuple(_parameter(each, vocabulary) for each in mapping.get("params", ())) if parameters else (),
            context_window_size=size,
            prefill_chunk_size=integer({"prefill_chunk_size": size, **mapping}, "prefill_chunk_size", 1, 1 << 31),
            vocabulary=vocabulary, machine=str(mapping.get("machine", platform.machine())),
            needs=tuple(map(str, mapping.get("needs", ()))),
            convention="deltic" if "generation" in mapping else "mlc",
            **{name: str(mapping[name]) for name in ("device", "system", "target") if name in mapping})


def _generation_of(architecture: str) -> Generation:
    return "v2" if architecture in ("qwen3_5", "qwen3_5_moe") else "v1"


def _quantization(name: str) -> str:
    return name if _GROUPED.fullmatch(name) else canonical(FORMATS, name, "quantization")


def _parameter(mapping: Any, vocabulary: int) -> tuple[str, tuple[int, ...], str]:
    try:
        name, dtype = mapping["name"], mapping["dtype"]
        shape = [vocabulary if size == "vocab_size" else size for size in mapping["shape"]]
        return str(name), tuple(map(int, shape)), str(dtype)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"params has an entry without name, shape and dtype: {show(mapping)}") from error


def write_config(folder: Path, metadata: Metadata, config: ModelConfig, mapping: Mapping[str, Any]) -> None:
    """Write `CONFIG`. mapping: the model's config.json."""
    from deltic.export.sidecar import write_json

    files = sorted(path.name for path in folder.iterdir() if path.name.startswith(("tokenizer", "chat_template")))
    write_json(folder / CONFIG, {
        "version": VERSION, **metadata.plain(), "model_config": mapping, "tokenizer_files": files,
        "eos_token_id": [*config.eos_token_ids], "bos_token_id": config.bos_token_id,
        "pad_token_id": config.pad_token_id})


def read_config(folder: Path) -> tuple[Metadata, ModelConfig, GenerationDefaults]:
    """What a directory says of itself; ModelError naming file and key of what cannot be used or does not agree."""
    metadata, mapping = read_metadata(folder)
    if metadata.architecture in ENCODERS:
        raise ModelError(f"{folder} is a compiled encoder, which gives vectors or scores and no text: use "
                         "`deltic embed`, `deltic rerank`, `deltic serve` or Encoder")
    config, generation = _sidecar(folder, mapping)
    check_architecture(folder, metadata, config.architecture)
    return metadata, config, generation


def read_metadata(folder: Path) -> tuple[Metadata, dict[str, Any]]:
    """What `CONFIG` says, and all of it; ModelError naming the key that cannot be used."""
    path = folder / CONFIG
    try:
        mapping = load_json(path)
        version = mapping.get("version", VERSION)
        if version != VERSION:
            raise ModelError(f"version {show(version)} is not known, only {VERSION}: compile the model anew")
        return Metadata.of(mapping, parameters=False), mapping
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def check_architecture(folder: Path, metadata: Metadata, architecture: str) -> None:
    """ModelError if config.json is of another architecture than the metadata."""
    if architecture != metadata.architecture:
        raise ModelError(f"{folder / CONFIG} is of a {metadata.architecture}, but {folder / 'config.json'} of a "
                         f"{architecture}: they are not of one model")


def _sidecar(folder: Path, mapping: Mapping[str, Any]) -> tuple[ModelConfig, GenerationDefaults]:
    """Config and advice: of their own files or, as mlc has it, in `CONFIG`."""
    if (folder / "config.json").is_file():
        return read_sidecar(folder)
    nested = mapping.get("model_config")
    if not isinstance(nested, Mapping):
        raise ModelError(f"{folder} has neither config.json nor a model_config in {CONFIG}")
    try:
        config = ModelConfig.from_hf({"model_type": mapping["model_type"],
                                      "max_position_embeddings": mapping.get("context_window_size"), **nested})
        return config, GenerationDefaults.from_hf({key: mapping[key] for key in ("temperature", "top_p", "eos_token_id")
                                                   if key in mapping}, config.eos_token_ids)
    except ModelError as error:
        raise ModelError(f"{folder / CONFIG}: {error}") from error


def check_machine(metadata: Metadata, folder: Path) -> None:
    """ModelError if the code is for another processor: it would die of an instruction that this one does not know."""
    missing = sorted(set(metadata.needs) - set(processor_flags()))
    here, there = (_MACHINES.get(name, name) for name in (platform.machine(), metadata.machine))
    if (here, sys.platform) != (there, metadata.system) or missing:
        wanted = f"{metadata.machine} ({metadata.system})" + (f" with {', '.join(missing)}" if missing else "")
        raise ModelError(f"{folder} was compiled for {wanted}, with --target {metadata.target!r}, and this machine is "
                         f"{platform.machine()} ({sys.platform}){' without' if missing else ''}: compile it here, or "
                         "with --target llvm -mcpu=...")


def processor_flags() -> tuple[str, ...]:
    """Those of this processor's instruction sets that compiled code may need."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return FLAGS  # another system, which does not tell
    lines = (line.partition(":") for line in text.splitlines())
    known = next((set(rest.split()) for name, _, rest in lines if name.strip() in ("flags", "Features")), set())
    return tuple(flag for flag in FLAGS if flag in known)
