"""Shape and tensors of an encoder of the BERT family, read under Hugging Face's names and converted for the kernels."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltic.config import available_cores
from deltic.config.reading import integer, number
from deltic.errors import ModelError, show
from deltic.loader.files import PICKLED, find_tensors, read_pickled
from deltic.loader.four_bits import TYPES as FOUR_BITS
from deltic.loader.gguf.blocks import BY_NAME, BlockType
from deltic.loader.quantize import quantized
from deltic.loader.safetensors import Progress, read_stored
from deltic.loader.tensors import Source
from deltic.ops.encoder import Affine, EncoderBackend, EncoderLayer, EncoderWeights, LayerNorm, Ragged
from deltic.ops.memory import Arena
from deltic.ops.quantized import PackedForm, QTensor, host_form, pack_tensor
from deltic.ops.torch.basic import embed
from deltic.ops.torch.encoder import LayerStates, embeddings, normed, padded_attention, run_layer
from deltic.ops.types import Block

# Config


FAMILIES: Final[Mapping[str, str]] = {"bert": "bert", "roberta": "roberta", "xlmroberta": "roberta"}
"""model_type without punctuation -> family. Families differ in the first position and in the classifier."""
_MAX_SIZE: Final = 1 << 20
_SUPPORTED: Final[Mapping[str, Any]] = {
    "hidden_act": "gelu", "position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
"""The only supported value of each key, which is also its default."""


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    positions: int
    """Number of rows of the position table."""
    first_position: int
    """Position of a sequence's first token."""
    token_types: int
    eps: float
    labels: int
    """Number of scores of the classifier; 0 without a classifier."""

    def __post_init__(self) -> None:
        if self.hidden_size % self.heads:
            raise ModelError(f"num_attention_heads ({self.heads}) must divide hidden_size ({self.hidden_size})")
        if self.first_position >= self.positions:
            raise ModelError(f"pad_token_id leaves no positions of max_position_embeddings ({self.positions})")

    @property
    def max_length(self) -> int:
        """Returns the number of tokens of the longest sequence."""
        return self.positions - self.first_position

    @classmethod
    def from_hf(cls, mapping: Mapping[str, Any]) -> EncoderConfig:
        """Reads a config.json. Raises ModelError naming the key that is missing, of a wrong type, or not supported."""
        family = family_of(mapping)
        if family is None:
            raise ModelError(f"model_type {show(mapping.get('model_type'))} is no encoder that deltic runs: bert, "
                             "roberta and xlm-roberta are")
        for key, supported in _SUPPORTED.items():
            if mapping.get(key) not in (None, supported):
                raise ModelError(f"{key} is {show(mapping[key])}; only {show(supported)} is supported")
        optional = {"pad_token_id": 1, "type_vocab_size": 2, "layer_norm_eps": 1e-12, **mapping}
        return cls(
            family=family,
            vocab_size=integer(mapping, "vocab_size", 1, _MAX_SIZE),
            hidden_size=integer(mapping, "hidden_size", 1, _MAX_SIZE),
            intermediate_size=integer(mapping, "intermediate_size", 1, _MAX_SIZE),
            layers=integer(mapping, "num_hidden_layers", 1, _MAX_SIZE),
            heads=integer(mapping, "num_attention_heads", 1, _MAX_SIZE),
            positions=integer(mapping, "max_position_embeddings", 1, _MAX_SIZE),
            first_position=integer(optional, "pad_token_id", 0, _MAX_SIZE) + 1 if family == "roberta" else 0,
            token_types=integer(optional, "type_vocab_size", 1, 1024),
            eps=number(optional, "layer_norm_eps", 0, 1),
            labels=_labels(mapping))


def family_of(mapping: Mapping[str, Any]) -> str | None:
    """Returns the family of a config.json; None if it is not an encoder."""
    return FAMILIES.get(re.sub(r"[^a-z0-9]", "", str(mapping.get("model_type", "")).lower()))


def _labels(mapping: Mapping[str, Any]) -> int:
    names = mapping.get("architectures")
    if not any(str(name).endswith("ForSequenceClassification") for name in names or ()):
        return 0
    labels = mapping.get("id2label")
    if isinstance(labels, dict) and labels:
        return len(labels)
    return integer({"num_labels": 2, **mapping}, "num_labels", 1, _MAX_SIZE)


# Tensors on disk


Shape = tuple[int, ...]

_PREFIX: Final = re.compile(r"(bert|roberta|xlm_roberta|model)\.(?=embeddings|encoder|pooler)")
_IGNORED: Final = re.compile(r"embeddings\.(position|token_type)_ids|cls\..*|lm_head\..*|pooler\..*|"
                             r"encoder\.layer\.\d+\.attention\.self\.mask")
_OLD_NAMES: Final = ((".LayerNorm.gamma", ".LayerNorm.weight"), (".LayerNorm.beta", ".LayerNorm.bias"))
_QUANT_TYPES: Final[Mapping[str, tuple[BlockType, ...]]] = {
    "none": (), "q8_0": (BY_NAME["Q8_0"],), "q4_k": (BY_NAME["Q4_K"], BY_NAME["Q8_0"]),
    "nvfp4": (FOUR_BITS["NVFP4"], BY_NAME["Q8_0"]), "int4": (FOUR_BITS["INT4_128"], BY_NAME["Q8_0"])}
"""Block types of the matrices, by quant, in order of preference: the first type that divides a row is used."""
_QKV: Final = ("attention.self.query", "attention.self.key", "attention.self.value")
_OUT, _UP, _DOWN = "attention.output.dense", "intermediate.dense", "output.dense"
_ATTENTION_NORM, _OUTPUT_NORM = "attention.output.LayerNorm", "output.LayerNorm"


@dataclass(frozen=True, slots=True)
class WeightSource:
    """A tensor on disk."""

    shape: Shape
    read: Callable[[torch.dtype], Tensor]
    pack: Callable[[PackedForm], QTensor] | None = None
    """Packs a matrix that is stored in quantized blocks; None for other tensors."""


def expected_tensors(config: EncoderConfig) -> dict[str, Shape]:
    """Returns the shape of each tensor by Hugging Face's name, without the model's prefix."""
    hidden, inner = config.hidden_size, config.intermediate_size
    tensors: dict[str, Shape] = {
        "embeddings.word_embeddings.weight": (config.vocab_size, hidden),
        "embeddings.position_embeddings.weight": (config.positions, hidden),
        "embeddings.token_type_embeddings.weight": (config.token_types, hidden)}

    def add(name: str, rows: int, *columns: int) -> None:
        tensors[f"{name}.weight"] = (rows, *columns)
        tensors[f"{name}.bias"] = (rows,)

    add("embeddings.LayerNorm", hidden)
    for index in range(config.layers):
        layer = f"encoder.layer.{index}."
        for part in (*_QKV, _OUT):
            add(layer + part, hidden, hidden)
        add(layer + _ATTENTION_NORM, hidden)
        add(layer + _UP, inner, hidden)
        add(layer + _DOWN, hidden, inner)
        add(layer + _OUTPUT_NORM, hidden)
    if config.labels:
        dense, last = classifier_names(config)
        add(dense, hidden, hidden)
        add(last, config.labels, hidden)
    return tensors


def classifier_names(config: EncoderConfig) -> tuple[str, str]:
    """Returns the names of the classifier's two layers."""
    return ("pooler.dense", "classifier") if config.family == "bert" else ("classifier.dense", "classifier.out_proj")


def find_sources(directory: Path, config: EncoderConfig, *, classifier_only: bool = False) -> dict[str, WeightSource]:
    """Returns the tensors of `expected_tensors`, from safetensors files or else pytorch_model.bin.

    Raises ModelError naming a tensor that is unknown, missing, doubled, or of another shape or dtype.
    """
    expected, sources = expected_tensors(config), dict[str, WeightSource]()
    if classifier_only:
        expected = {name: shape for name, shape in expected.items() if name.startswith(classifier_names(config))}
    for stored_name, source in _stored_tensors(directory) if expected else ():
        name = _PREFIX.sub("", stored_name, count=1)
        for old, new in _OLD_NAMES:
            name = name.replace(old, new)
        if name not in expected:
            if _IGNORED.fullmatch(name):
                continue
            raise ModelError(f"tensor {stored_name[:200]!r} is unknown; config.json says that this is an encoder with "
                             f"{config.layers} layers and {config.labels or 'no'} labels")
        if source.shape != expected[name]:
            raise ModelError(f"tensor {stored_name[:200]!r} has shape {list(source.shape)}, config.json asks for "
                             f"{list(expected[name])}; take the config.json that belongs to the weights")
        if name in sources:
            raise ModelError(f"tensor {name!r} is there twice in {directory}; keep the files of one revision")
        sources[name] = source
    missing = [name for name in expected if name not in sources]
    if missing:
        raise ModelError(f"{len(missing)} tensors are missing in {directory}, such as {missing[0]!r}; download all "
                         "files of the revision that config.json belongs to")
    return sources


def _stored_tensors(directory: Path) -> Iterator[tuple[str, WeightSource]]:
    if any(directory.glob("*.safetensors")) or not (directory / PICKLED).is_file():
        for name, stored in find_tensors(directory).items():
            yield name, _from_file(name, stored)
    else:
        for name, tensor in read_pickled(directory / PICKLED).items():
            yield name, WeightSource(tuple(tensor.shape), tensor.to)


def _from_file(name: str, stored: Source) -> WeightSource:
    def read(dtype: torch.dtype) -> Tensor:
        if stored.dtype not in ("F32", "F16", "BF16"):
            raise ModelError(f"tensor {name!r} is stored as {stored.dtype[:20]}; F32, BF16 and F16 can be read")
        return read_stored(name, stored, dtype, torch.device("cpu"))
    return WeightSource(stored.shape, read)


# Reading


def read_weights(config: EncoderConfig, sources: Mapping[str, WeightSource], backend: EncoderBackend,
                 quant: str = "none", progress: Progress | None = None) -> EncoderWeights:
    """Reads all weights. quant: a key of `_QUANT_TYPES`. progress(done, total): counts the values that were read."""
    return _WeightReader(sources, backend, quant, progress).weights(config)


class _WeightReader:
    def __init__(self, sources: Mapping[str, WeightSource], backend: EncoderBackend, quant: str,
                 progress: Progress | None) -> None:
        self._sources, self._progress = sources, progress
        self._backend, self._quant = backend, quant
        self._total = sum(int(np.prod(source.shape)) for source in sources.values())
        self._done = 0
        self._arena = Arena()
        self._host = host_form(self._arena)
        self._layer_matrices: dict[str, Tensor] = {}

    def weights(self, config: EncoderConfig) -> EncoderWeights:
        with ThreadPoolExecutor(available_cores()) as pool, torch.inference_mode():
            weights = EncoderWeights(
                self._matrix("embeddings.word_embeddings.weight", pool),
                self._vector("embeddings.position_embeddings.weight"),
                self._vector("embeddings.token_type_embeddings.weight"),
                self._norm("embeddings.LayerNorm"), (), config.heads, config.eps)
            sample = _sample(weights, config) if self._calibrates(config) else None
            layers = []
            for index in range(config.layers):
                layer = f"encoder.layer.{index}."
                states = None if sample is None else self._sample_states(layer, sample, weights)
                layers.append(self._layer(layer, pool, states))
                sample = states.result if states else None
                self._layer_matrices.clear()
            return replace(weights, layers=tuple(layers))

    def _layer(self, layer: str, pool: ThreadPoolExecutor, states: LayerStates | None) -> EncoderLayer:
        inputs: dict[str, Tensor] = {}
        if states is not None:
            inputs = {"qkv": states.qkv, _OUT: states.out, _UP: states.up, _DOWN: states.down}
        importance = {name: each.square().mean(0) for name, each in inputs.items()}

        def affine(name: str) -> Affine:
            matrix = self._matrix(f"{layer}{name}.weight", pool, importance.get(name))
            return Affine(matrix, self._vector(f"{layer}{name}.bias"))

        blocks = tuple(self._matrix(f"{layer}{part}.weight", pool, importance.get("qkv")) for part in _QKV)
        bias = torch.cat([self._vector(f"{layer}{part}.bias") for part in _QKV])
        fused = blocks if self._backend.packs else torch.cat([block for block in blocks if isinstance(block, Tensor)])
        return EncoderLayer(Affine(fused, bias), affine(_OUT), self._norm(layer + _ATTENTION_NORM), affine(_UP),
                            affine(_DOWN), self._norm(layer + _OUTPUT_NORM))

    def _norm(self, name: str) -> LayerNorm:
        return LayerNorm(self._vector(f"{name}.weight"), self._vector(f"{name}.bias"))

    def _vector(self, name: str) -> Tensor:
        return self._read(name, self._backend.vector_dtype).to(self._backend.device)

    def _matrix(self, name: str, pool: ThreadPoolExecutor, importance: Tensor | None = None) -> Block:
        """Reads a matrix. importance: importance of each column, if known."""
        packs, source = self._backend.packs, self._sources[name]
        rows, columns = source.shape
        if packs and source.pack is not None:
            self._count(source)
            return source.pack(self._host)
        if importance is not None and bool(torch.isfinite(self._layer_matrices[name]).all()):
            self._count(source)
            block_type = BY_NAME["Q8_0"]
            blocks = q8_0_blocks(self._layer_matrices.pop(name), importance).reshape(-1)
            return self._host.pack(block_type.name, block_type.id, rows, columns, block_type.size(columns),
                                   lambda start, count: blocks[start:start + count])
        types = _QUANT_TYPES[self._quant]
        fitting = next((each for each in types if columns % each.weights == 0), None)
        if packs and fitting is not None:
            return quantized(name, self._read(name, torch.float32), fitting, pool, self._host)
        tensor = self._read(name, self._backend.dtype)
        return pack_tensor(tensor, self._arena) if packs else tensor.to(self._backend.device)

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        self._count(self._sources[name])
        return self._sources[name].read(dtype).contiguous()

    def _count(self, source: WeightSource) -> None:
        self._done += int(np.prod(source.shape))
        if self._progress is not None:
            self._progress(self._done, self._total)

    # Calibration for Q8_0

    def _calibrates(self, config: EncoderConfig) -> bool:
        """Returns True if matrices are quantized here, to Q8_0, with the importance of their columns."""
        plain = all(self._sources[name].pack is None for name in expected_tensors(config))
        fits = config.hidden_size % 32 == 0 and config.intermediate_size % 32 == 0
        return self._backend.packs and self._quant == "q8_0" and plain and fits

    def _sample_states(self, layer: str, sample: Tensor, weights: EncoderWeights) -> LayerStates:
        """Runs a layer on the sample with unquantized matrices, which stay in memory until the layer is read."""
        def read(name: str, part: str) -> Tensor:
            return self._sources[f"{layer}{name}.{part}"].read(torch.float32)

        for name in (*_QKV, _OUT, _UP, _DOWN):
            self._layer_matrices[f"{layer}{name}.weight"] = read(name, "weight")

        def affine(*names: str) -> Affine:
            matrices = [self._layer_matrices[f"{layer}{name}.weight"] for name in names]
            return Affine(torch.cat(matrices) if len(names) > 1 else matrices[0],
                          torch.cat([read(name, "bias") for name in names]))

        def norm(name: str) -> LayerNorm:
            return LayerNorm(read(name, "weight"), read(name, "bias"))

        plain = EncoderLayer(affine(*_QKV), affine(_OUT), norm(_ATTENTION_NORM), affine(_UP), affine(_DOWN),
                             norm(_OUTPUT_NORM))
        sequences = _SAMPLE[0]
        return run_layer(plain, sample, padded_attention([len(sample) // sequences] * sequences), weights)


# Q8_0 blocks. In encoders a few columns of the states are many times larger than the others, so that a matrix's errors
# in these columns dominate. Random tokens run through the layers while the layers are read, and reveal these columns. A
# block that contains such a column gets the scale with the smallest weighted error.

_SAMPLE: Final = (4, 64)
"""Number of random sequences, and number of tokens of each."""
_PEAK: Final = 1.0
"""A block's scale is searched if a column weighs more than this times the block's mean."""
_SCALES: Final = tuple(1.0 + 0.0025 * step for step in range(33))
"""Factors of a block's smallest scale, the scale at which the largest value has code 127."""


def _sample(weights: EncoderWeights, config: EncoderConfig) -> Tensor:
    """Returns the first layer's inputs for the random tokens, which are the same in every run."""
    sequences, length = _SAMPLE[0], min(_SAMPLE[1], config.max_length)
    first = min(config.first_position + 4, config.vocab_size - 1)
    drawn = np.random.default_rng(0).integers(first, config.vocab_size, (sequences, length))
    ids = torch.from_numpy(drawn).flatten()
    places = (torch.arange(length) + config.first_position).repeat(sequences)
    batch = Ragged(ids, places, torch.zeros_like(ids), torch.arange(sequences + 1) * length)
    return normed(embeddings(weights, batch, embed(ids, weights.words, torch.float32)), weights)


def q8_0_blocks(matrix: Tensor, importance: Tensor) -> NDArray[Any]:
    """Quantizes matrix [rows, columns] float32 to Q8_0 blocks [rows, bytes] uint8.

    importance [columns]: weights of the columns' squared errors, the mean squares of their inputs.
    """
    rows, columns = matrix.shape
    blocks = matrix.view(rows, columns // 32, 32)
    smallest = blocks.abs().amax(2) / 127
    scale, weights = smallest.half().float(), importance.view(columns // 32, 32)
    peaks = (weights.amax(1) > _PEAK * weights.mean(1)).nonzero()[:, 0]
    if len(peaks):
        some, weigh = blocks[:, peaks], weights[peaks]
        best, chosen = torch.full(some.shape[:2], torch.inf), scale[:, peaks]
        for factor in _SCALES:
            tried = (smallest[:, peaks] * factor).half().float()
            error = ((_codes(some, tried) * tried[:, :, None] - some).square() * weigh).sum(2)
            better = error < best
            best, chosen = torch.where(better, error, best), torch.where(better, tried, chosen)
        scale[:, peaks] = chosen
    found = np.empty((rows, columns // 32), np.dtype([("d", "<f2"), ("q", "i1", 32)]))
    found["d"] = scale.half().numpy()
    found["q"] = _codes(blocks, scale).to(torch.int8).numpy()
    return found.view(np.uint8).reshape(rows, -1)


def _codes(blocks: Tensor, scale: Tensor) -> Tensor:
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    return (blocks * inverse[:, :, None]).round_().clamp_(-127, 127)
