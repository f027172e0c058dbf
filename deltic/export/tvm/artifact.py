"""The files of a compiled directory: metadata, and parameters in shards.

mlc-chat-config.json and the library hold the same metadata, which must agree. Both generations use the same layout of
parameters under two file names. Shards are memory-mapped, and their digests are checked at each start. The layout's own
digest is MD5, which reads 0.3 GB/s; deltic's own ("sums") reads as fast as memory, and detects damage, not forgery.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import platform
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from deltic.config import GenerationDefaults, ModelConfig, available_cores
from deltic.config.reading import FORMATS, GENERATIONS, canonical, integer
from deltic.errors import ModelError, show
from deltic.export.program import load_json, read_sidecar, write_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

Generation = Literal["v1", "v2"]
Convention = Literal["deltic", "mlc"]
Spec = tuple[str, tuple[int, ...], str]
"""Name, shape and dtype of a parameter."""

CONFIG: Final = "mlc-chat-config.json"
VERSION: Final = "0.1.0"
"""Version of the layout of `CONFIG`."""
DESCRIPTORS: Final[Mapping[Generation, str]] = {"v2": "tensor-cache.json", "v1": "ndarray-cache.json"}
"""The file that describes the parameters, by generation, in order of preference."""
ENCODERS: Final = ("bert", "roberta")
"""Architectures whose libraries return states instead of logits."""
FLAGS: Final = ("sse4_2", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "asimd")
"""Instruction sets that compiled code may require."""
LANES: Final = 16
"""Outputs in a panel: the float32 values of a 512-bit register."""
ALIGNMENT: Final = 64
"""Alignment in bytes that kernels assume for their inputs."""
_SHARD_BYTES: Final = 128 << 20
_GROUP_QUANTIZED: Final = re.compile(r"q[348](f16|bf16|f32)_[012]")
"""mlc-llm's names of 3-, 4- and 8-bit weights, which its libraries dequantize themselves."""


def quantization_name(dtype: str) -> str:
    return "q0f16" if dtype == "float16" else "q0f32"


@dataclass(frozen=True, slots=True)
class Metadata:
    """The metadata that both the config and the library contain."""

    generation: Generation
    """v1: attention layers only; v2: with recurrent layers."""
    architecture: str
    quantization: str
    parameters: tuple[Spec, ...]
    """Parameters in the order in which the library's functions take them."""
    context_window_size: int
    prefill_chunk_size: int
    vocabulary: int
    """Number of token ids of the model; logits may have more entries."""
    machine: str
    needs: tuple[str, ...] = ()
    """Instruction sets that the processor must have."""
    convention: Convention = "deltic"
    """Calling convention of the library's functions: deltic's own or mlc-llm's."""
    device: str = "cpu"
    """TVM's name of the device that runs the kernels."""
    system: str = sys.platform
    target: str = "llvm"
    """The target option of the compilation."""

    def to_json(self) -> str:
        """Returns the text that the library's function `_metadata` returns."""
        parameters = [{"name": name, "shape": shape, "dtype": dtype} for name, shape, dtype in self.parameters]
        return json.dumps({**self.mapping(), "params": parameters})

    def mapping(self) -> dict[str, Any]:
        """Returns all metadata except the parameters."""
        return {"generation": self.generation, "model_type": self.architecture, "quantization": self.quantization,
                "context_window_size": self.context_window_size, "prefill_chunk_size": self.prefill_chunk_size,
                "sliding_window_size": -1, "attention_sink_size": -1, "tensor_parallel_shards": 1,
                "vocab_size": self.vocabulary, "machine": self.machine, "needs": [*self.needs],
                "device": self.device, "system": self.system, "target": self.target}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], config: Metadata | None = None) -> Metadata:
        """Reads deltic's or mlc-llm's metadata. Raises ModelError naming the key.

        config: metadata of the directory's config, with the vocabulary size, which mlc-llm's libraries omit.
        """
        from deltic.config.families import architecture

        name = mapping.get("model_type")
        if not isinstance(name, str):
            raise ModelError("model_type is absent")
        if mapping.get("sliding_window_size", -1) not in (-1, None):
            raise ModelError(f"sliding_window_size {show(mapping['sliding_window_size'])} is not supported, only -1")
        if mapping.get("tensor_parallel_shards", 1) != 1:
            raise ModelError("tensor_parallel_shards must be 1")
        found = name if name in ENCODERS else architecture(name)
        ours = "generation" in mapping
        default = "v2" if found in ("qwen3_5", "qwen3_5_moe") else "v1"
        generation = canonical(GENERATIONS, str(mapping.get("generation", default)), "generation")
        context = integer(mapping, "context_window_size", 1, 1 << 31)
        inherited = {} if config is None or ours else {"vocab_size": config.vocabulary}
        vocabulary = integer({**inherited, **mapping}, "vocab_size", 2, 1 << 24)
        quantization = str(mapping.get("quantization", "q0f32"))
        if not _GROUP_QUANTIZED.fullmatch(quantization):
            quantization = canonical(FORMATS, quantization, "quantization")
        return cls(
            generation="v1" if generation == "v1" else "v2",
            architecture=found,
            quantization=quantization,
            parameters=tuple(_spec(each, vocabulary) for each in mapping.get("params", ())),
            context_window_size=context,
            prefill_chunk_size=integer({"prefill_chunk_size": context, **mapping}, "prefill_chunk_size", 1, 1 << 31),
            vocabulary=vocabulary,
            machine=str(mapping.get("machine", platform.machine())),
            needs=tuple(map(str, mapping.get("needs", ()))),
            convention="deltic" if ours else "mlc",
            **{key: str(mapping[key]) for key in ("device", "system", "target") if key in mapping})


def _spec(mapping: Any, vocabulary: int) -> Spec:
    try:
        shape = [vocabulary if size == "vocab_size" else int(size) for size in mapping["shape"]]
        return str(mapping["name"]), tuple(shape), str(mapping["dtype"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"params has an entry without name, shape and dtype: {show(mapping)}") from error


def write_config(folder: Path, metadata: Metadata, config: ModelConfig, hf_config: Mapping[str, Any]) -> None:
    """Writes `CONFIG`. hf_config: the model's config.json."""
    files = sorted(path.name for path in folder.iterdir() if path.name.startswith(("tokenizer", "chat_template")))
    write_json(folder / CONFIG, {
        "version": VERSION, **metadata.mapping(), "model_config": hf_config, "tokenizer_files": files,
        "eos_token_id": [*config.eos_token_ids], "bos_token_id": config.bos_token_id,
        "pad_token_id": config.pad_token_id})


def read_config(folder: Path) -> tuple[Metadata, ModelConfig, GenerationDefaults]:
    """Reads a language model's directory. Raises ModelError naming the file and key that cannot be used."""
    metadata, mapping = read_metadata(folder)
    if metadata.architecture in ENCODERS:
        raise ModelError(f"{folder} is a compiled encoder, which gives vectors or scores and no text: use "
                         "`deltic embed`, `deltic rerank`, `deltic serve` or Encoder")
    if (folder / "config.json").is_file():
        config, generation = read_sidecar(folder)
    else:
        config, generation = _nested_config(folder, mapping)
    check_architecture(folder, metadata, config.architecture)
    return metadata, config, generation


def read_metadata(folder: Path) -> tuple[Metadata, dict[str, Any]]:
    """Reads `CONFIG`. Returns its metadata and its whole contents. Raises ModelError naming the key."""
    path = folder / CONFIG
    try:
        mapping = load_json(path)
        version = mapping.get("version", VERSION)
        if version != VERSION:
            raise ModelError(f"version {show(version)} is not known, only {VERSION}: compile the model again")
        return Metadata.from_mapping(mapping), mapping
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def check_architecture(folder: Path, metadata: Metadata, architecture: str) -> None:
    """Raises ModelError if the architecture in config.json differs from the metadata's."""
    if architecture != metadata.architecture:
        raise ModelError(f"{folder / CONFIG} is of a {metadata.architecture}, but {folder / 'config.json'} of a "
                         f"{architecture}: they are not of one model")


def _nested_config(folder: Path, mapping: Mapping[str, Any]) -> tuple[ModelConfig, GenerationDefaults]:
    """Reads model and sampling defaults from `CONFIG` itself, where mlc-llm keeps them."""
    nested = mapping.get("model_config")
    if not isinstance(nested, Mapping):
        raise ModelError(f"{folder} has neither config.json nor a model_config in {CONFIG}")
    defaults = {key: mapping[key] for key in ("temperature", "top_p", "eos_token_id") if key in mapping}
    try:
        config = ModelConfig.from_hf({"model_type": mapping["model_type"],
                                      "max_position_embeddings": mapping.get("context_window_size"), **nested})
        return config, GenerationDefaults.from_hf(defaults, config.eos_token_ids)
    except ModelError as error:
        raise ModelError(f"{folder / CONFIG}: {error}") from error


# Reading parameters

_TVM_CACHE: Final = threading.Lock()
"""Lock held while parameters pass through TVM's single cache of the process."""
_WORDS: Final = 1 << 17
"""Number of 8-byte words in a block of `sums`."""


@dataclass(frozen=True, slots=True)
class StoredParameter:
    """The location of a parameter in its shard.

    form: raw, or f32-to-bf16 for float32 values stored as their upper halves.
    """

    content: NDArray[np.uint8]
    shape: tuple[int, ...]
    dtype: str
    start: int
    nbytes: int
    form: str = "raw"


def generation_of(folder: Path) -> Generation:
    """Returns the generation of a directory's parameters. Raises ModelError if there are none."""
    for generation, name in DESCRIPTORS.items():
        if (folder / name).is_file():
            return generation
    raise ModelError(f"{folder} has no parameters: neither {' nor '.join(DESCRIPTORS.values())} is there; copy all "
                     "files of the compiled model")


def load_parameters(folder: Path, generation: Generation, metadata: Metadata, tvm_ffi: Any,
                    to_tensor: Callable[[NDArray[Any]], Any]) -> Any:
    """Returns the parameters as a TVM array in the metadata's order.

    Raises ModelError naming a shard or parameter that is missing, damaged or of another shape.
    """
    path = folder / DESCRIPTORS[generation]
    try:
        stored = read_descriptor(folder, load_json(path))
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    arrays = [(spec[0], _array(path, spec, stored)) for spec in metadata.parameters]
    tensors = [(name, to_tensor(array)) for name, array in arrays]
    if generation == "v1" and metadata.convention == "deltic":
        return tvm_ffi.convert([tensor for _, tensor in tensors])
    return _through_tvm_cache(tensors, tvm_ffi)


def _through_tvm_cache(tensors: Sequence[tuple[str, Any]], tvm_ffi: Any) -> Any:
    """Returns the array that TVM's cache builds: packed functions require the tensors that the cache holds."""
    update, array, clear = (tvm_ffi.get_global_func(f"vm.builtin.{name}") for name in (
        "tensor_cache.update", "param_array_from_cache_by_name", "tensor_cache.clear"))
    with _TVM_CACHE:
        clear()
        try:
            for name, tensor in tensors:
                update(name, tensor, True)
            return array([name for name, _ in tensors])
        finally:
            clear()


def read_descriptor(folder: Path, mapping: Mapping[str, Any]) -> dict[str, StoredParameter]:
    """Returns the parameters by name, after checking sizes and digests of their shards. Raises ModelError."""
    records = mapping.get("records")
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise ModelError("records must be a list of objects")
    with ThreadPoolExecutor(max(available_cores(), 1)) as pool:
        contents = [*pool.map(lambda record: _checked_shard(folder, record), records)]
    try:
        return {
            str(item["name"]): StoredParameter(
                content, tuple(item["shape"]), str(item["dtype"]), int(item["byteOffset"]), int(item["nbytes"]),
                str(item.get("format", "raw")))
            for content, record in zip(contents, records, strict=True) for item in record["records"]}
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"a record of a parameter must have name, shape, dtype, byteOffset and nbytes: "
                         f"{type(error).__name__} {show(str(error))}") from error


def _checked_shard(folder: Path, record: Mapping[str, Any]) -> NDArray[np.uint8]:
    """Maps a shard copy-on-write. Raises ModelError if it is missing or damaged."""
    name, size = record.get("dataPath"), record.get("nbytes")
    if not isinstance(name, str) or Path(name).name != name or not isinstance(record.get("records"), list):
        raise ModelError(f"a record has the dataPath {show(name)}, which is no file of this directory, or no records")
    path = folder / name
    if not path.is_file():
        raise ModelError(f"the shard {name} is missing: copy all files of the compiled model")
    if path.stat().st_size != size or not size:
        raise ModelError(f"the shard {name} has {path.stat().st_size} bytes instead of {size}: copy it again")
    with path.open("rb") as file:
        content = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
    for key, digest in (("sums", sums), ("md5sum", _md5)):  # older layouts have neither
        expected = record.get(key)
        if not isinstance(expected, str):
            continue
        found = digest(content)
        if found != expected:
            raise ModelError(f"the shard {name} is damaged ({key} {found[:12]}..., not {expected[:12]}...): copy it "
                             "again")
        break
    return content


def sums(content: NDArray[np.uint8]) -> str:
    """Returns SHA-256 of multilinear hashes of a shard [bytes].

    A hash is the sum modulo 2^64 of a block's little-endian 8-byte words, each multiplied by its own odd factor. Blocks
    have 1 MiB, padded with zeros. A single wrong word always changes the hash, several wrong words almost certainly do.
    """
    # factors: splitmix64 of the word's index
    factor = np.arange(1, _WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        factor = (factor ^ (factor >> np.uint64(shift))) * np.uint64(multiplier)
    factor = (factor ^ (factor >> np.uint64(31))) | np.uint64(1)
    block = 8 * _WORDS
    whole = len(content) // block * block
    rest = np.zeros(block, np.uint8)
    rest[:len(content) - whole] = content[whole:]
    hashes = [np.einsum("rw,w->r", part.view(np.dtype("<u8")).reshape(-1, _WORDS), factor)
              for part in (content[:whole], rest)]
    return hashlib.sha256(np.concatenate(hashes).astype("<u8").tobytes()).hexdigest()


def _md5(content: NDArray[np.uint8]) -> str:
    return hashlib.md5(content.data, usedforsecurity=False).hexdigest()


def _array(path: Path, spec: Spec, stored: Mapping[str, StoredParameter]) -> NDArray[Any]:
    """Returns a parameter's values, memory-mapped if aligned. path: the descriptor's path, for messages."""
    name, shape, dtype = spec
    found = stored.get(name)
    if found is None:
        raise ModelError(f"{path} has no parameter {name}, which the library takes: they are not of one model")
    if dtype == "bfloat16":
        raise ModelError(f"{path}: parameter {name} is bfloat16, which is not supported: convert the model with "
                         "q4f16_1, q4f32_1, q0f16 or q0f32")
    if (found.shape, found.dtype) != (shape, dtype):
        raise ModelError(f"{path}: parameter {name} is {found.dtype} {list(found.shape)}, but the library takes "
                         f"{dtype} {list(shape)}: they are not of one model")
    halved = found.form == "f32-to-bf16" and dtype == "float32"
    size = int(np.prod(shape)) * (2 if halved else np.dtype(dtype).itemsize)
    end = found.start + found.nbytes
    if found.start < 0 or end > len(found.content) or found.nbytes != size:
        raise ModelError(f"{path}: parameter {name} lies outside its shard, or has a wrong size")
    content = aligned(found.content[found.start:end])
    if halved:
        return (content.view(np.uint16).astype(np.uint32) << 16).view(dtype).reshape(shape)
    return content.view(dtype).reshape(shape)


def aligned(content: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns the bytes at an aligned address: the given array, or a copy."""
    if content.ctypes.data % ALIGNMENT == 0:
        return content
    room = np.empty(len(content) + ALIGNMENT, np.uint8)
    skip = -room.ctypes.data % ALIGNMENT
    room[skip:skip + len(content)] = content
    return room[skip:skip + len(content)]


# Writing parameters


def panels(matrix: NDArray[Any]) -> NDArray[Any]:
    """Converts a matrix [outputs, inputs] to the layout of products, [panels, inputs, LANES], padded with zeros."""
    outputs, inputs = matrix.shape
    count = -(-outputs // LANES)
    if count * LANES != outputs:
        matrix = np.concatenate([matrix, np.zeros((count * LANES - outputs, inputs), matrix.dtype)])
    return matrix.reshape(count, LANES, inputs).transpose(0, 2, 1)


def as_stored(spec: Spec, array: NDArray[Any]) -> tuple[str, NDArray[Any]]:
    """Returns a parameter's name, and its array in the library's layout and dtype."""
    name, shape, dtype = spec
    array = panels(array) if len(shape) == 3 else array
    assert array.shape == shape, f"{name} is {array.shape} instead of {shape}"
    return name, np.ascontiguousarray(array.astype(dtype))


def write_parameters(folder: Path, generation: Generation, parameters: Iterable[tuple[str, NDArray[Any]]]) -> int:
    """Writes shards and their descriptor. Returns the number of bytes of all parameters."""
    records: list[dict[str, Any]] = []
    total = count = 0
    for index, shard in enumerate(_shards(parameters)):
        name = f"params_shard_{index}.bin"
        items: list[dict[str, Any]] = []
        content = bytearray()
        for key, array in shard:
            content += bytes(-len(content) % ALIGNMENT)
            items.append({"name": key, "shape": [*array.shape], "dtype": str(array.dtype), "format": "raw",
                          "nbytes": array.nbytes, "byteOffset": len(content)})
            content += array.tobytes()
            total += array.nbytes
            count += array.size
        (folder / name).write_bytes(content)
        view = np.frombuffer(content, np.uint8)
        records.append({"dataPath": name, "format": "raw-shard", "nbytes": len(content), "md5sum": _md5(view),
                        "sums": sums(view), "records": items})
    summary = {"ParamSize": sum(len(record["records"]) for record in records), "ParamBytes": total,
               "BitsPerParam": 8 * total / max(count, 1)}
    text = json.dumps({"metadata": summary, "records": records})
    (folder / DESCRIPTORS[generation]).write_text(text, encoding="utf-8")
    return total


def _shards(parameters: Iterable[tuple[str, NDArray[Any]]]) -> Iterator[list[tuple[str, NDArray[Any]]]]:
    """Groups parameters into shards of at most `_SHARD_BYTES`; a larger parameter gets its own shard."""
    group: list[tuple[str, NDArray[Any]]] = []
    size = 0
    for name, array in parameters:
        if group and size + array.nbytes > _SHARD_BYTES:
            yield group
            group, size = [], 0
        group.append((name, array))
        size += array.nbytes
    if group:
        yield group
