"""An encoder's tensors: found under Hugging Face's names, checked, and put into the form that computes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from deltic.config import DType, available_cores
from deltic.encoders.config import EncoderConfig
from deltic.errors import ModelError
from deltic.ops.encoder import Affine, EncoderLayer, EncoderWeights, Norm
from deltic.ops.memory import Arena
from deltic.ops.qtensor import Form as PackedForm
from deltic.ops.qtensor import QTensor, host_form, pack_tensor
from deltic.ops.records import Block
from deltic.weights.files import Stored, find_tensors
from deltic.weights.gguf.blocks import BY_NAME
from deltic.weights.pickled import read_pickled
from deltic.weights.quant import quantized
from deltic.weights.safetensors import TORCH_DTYPES, Progress, read_stored

Shape = tuple[int, ...]
Read = Callable[[torch.dtype], Tensor]
"""Gives a tensor in a dtype."""

PICKLED: Final = "pytorch_model.bin"
_BASE: Final = re.compile(r"(bert|roberta|xlm_roberta|model)\.(?=embeddings|encoder|pooler)")
_IGNORED: Final = re.compile(r"embeddings\.(position|token_type)_ids|cls\..*|lm_head\..*|pooler\..*|"
                             r"encoder\.layer\.\d+\.attention\.self\.mask")
_OLD: Final = ((".LayerNorm.gamma", ".LayerNorm.weight"), (".LayerNorm.beta", ".LayerNorm.bias"))
_FORMATS: Final[Mapping[str, tuple[str, ...]]] = {"none": (), "q8_0": ("Q8_0",), "q4_k": ("Q4_K", "Q8_0")}
"""Types of the matrices by quant: the first whose blocks their rows fit."""


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor that may be read. pack: makes a matrix that is stored in blocks what a form has of such; None: it is not
    stored so."""

    shape: Shape
    read: Read
    pack: Callable[[PackedForm], QTensor] | None = None


def expected_tensors(config: EncoderConfig) -> dict[str, Shape]:
    """Every tensor by Hugging Face's name without the model's prefix, with its shape."""
    hidden, inner = config.hidden_size, config.intermediate_size
    tensors: dict[str, Shape] = {
        "embeddings.word_embeddings.weight": (config.vocab_size, hidden),
        "embeddings.position_embeddings.weight": (config.places, hidden),
        "embeddings.token_type_embeddings.weight": (config.kinds, hidden), **_pair("embeddings.LayerNorm", hidden)}
    for number in range(config.layers):
        layer = f"encoder.layer.{number}."
        for part in ("query", "key", "value"):
            tensors |= _pair(f"{layer}attention.self.{part}", hidden, hidden)
        tensors |= {**_pair(f"{layer}attention.output.dense", hidden, hidden),
                    **_pair(f"{layer}attention.output.LayerNorm", hidden),
                    **_pair(f"{layer}intermediate.dense", inner, hidden),
                    **_pair(f"{layer}output.dense", hidden, inner),
                    **_pair(f"{layer}output.LayerNorm", hidden)}
    if config.labels:
        dense, last = classifier_names(config)
        tensors |= {**_pair(dense, hidden, hidden), **_pair(last, config.labels, hidden)}
    return tensors


def classifier_names(config: EncoderConfig) -> tuple[str, str]:
    """The two layers over the first token's state that give the labels' scores."""
    return ("pooler.dense", "classifier") if config.family == "bert" else ("classifier.dense", "classifier.out_proj")


def _pair(name: str, rows: int, *columns: int) -> dict[str, Shape]:
    return {f"{name}.weight": (rows, *columns), f"{name}.bias": (rows,)}


def find_sources(directory: Path, config: EncoderConfig) -> dict[str, Source]:
    """The tensors of `expected_tensors`, in safetensors files or, where there are none, pytorch_model.bin.

    ModelError names the tensor that is unknown, missing, doubled or of another shape or dtype, or the file.
    """
    expected, sources = expected_tensors(config), dict[str, Source]()
    for stored_name, source in _stored(directory):
        name = _BASE.sub("", stored_name, count=1)
        for old, new in _OLD:
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


def _stored(directory: Path) -> Iterator[tuple[str, Source]]:
    if any(directory.glob("*.safetensors")) or not (directory / PICKLED).is_file():
        for name, stored in find_tensors(directory).items():
            yield name, _from_file(name, stored)
    else:
        for name, tensor in read_pickled(directory / PICKLED).items():
            yield name, Source(tuple(tensor.shape), tensor.to)


def _from_file(name: str, stored: Stored) -> Source:
    def read(dtype: torch.dtype) -> Tensor:
        if stored.dtype not in ("F32", "F16", "BF16"):
            raise ModelError(f"tensor {name!r} is stored as {stored.dtype[:20]}; F32, BF16 and F16 can be read")
        return read_stored(name, stored, dtype, torch.device("cpu"))
    return Source(stored.shape, read)


@dataclass(frozen=True, slots=True)
class Form:
    """How weights are kept. packed: as the compiled kernels want them. quant: of _FORMATS."""

    dtype: DType
    device: str
    quant: str
    packed: bool

    @property
    def plain(self) -> torch.dtype:
        """Of what is no matrix."""
        return torch.float32 if self.device == "cpu" else TORCH_DTYPES[self.dtype]


def read_weights(config: EncoderConfig, sources: Mapping[str, Source], form: Form,
                 progress: Progress | None = None) -> EncoderWeights:
    """progress(done, total) counts numbers of the tensors that are read."""
    return _Reader(sources, form, progress).weights(config)


class _Reader:
    def __init__(self, sources: Mapping[str, Source], form: Form, progress: Progress | None) -> None:
        self._sources, self._form, self._progress = sources, form, progress
        self._total, self._done = sum(int(np.prod(source.shape)) for source in sources.values()), 0
        self._arena = Arena()
        self._host = host_form(self._arena)

    def weights(self, config: EncoderConfig) -> EncoderWeights:
        with ThreadPoolExecutor(available_cores()) as pool:
            words, places, kinds = (f"embeddings.{name}_embeddings.weight" for name in ("word", "position",
                                                                                       "token_type"))
            return EncoderWeights(
                self._matrix(words, pool), self._plain(places), self._plain(kinds), self._norm("embeddings.LayerNorm"),
                tuple(self._layer(f"encoder.layer.{number}.", pool) for number in range(config.layers)), config.heads,
                config.eps)

    def _layer(self, layer: str, pool: ThreadPoolExecutor) -> EncoderLayer:
        parts = [f"{layer}attention.self.{part}" for part in ("query", "key", "value")]
        blocks = tuple(self._matrix(f"{part}.weight", pool) for part in parts)
        fused = blocks if self._form.packed else torch.cat([block for block in blocks if isinstance(block, Tensor)])
        qkv = Affine(fused,
                     torch.cat([self._plain(f"{part}.bias") for part in parts]))
        return EncoderLayer(qkv, self._affine(f"{layer}attention.output.dense", pool),
                            self._norm(f"{layer}attention.output.LayerNorm"),
                            self._affine(f"{layer}intermediate.dense", pool),
                            self._affine(f"{layer}output.dense", pool), self._norm(f"{layer}output.LayerNorm"))

    def _affine(self, name: str, pool: ThreadPoolExecutor) -> Affine:
        return Affine(self._matrix(f"{name}.weight", pool), self._plain(f"{name}.bias"))

    def _norm(self, name: str) -> Norm:
        return Norm(self._plain(f"{name}.weight"), self._plain(f"{name}.bias"))

    def _plain(self, name: str) -> Tensor:
        return self._read(name, self._form.plain).to(self._form.device)

    def _matrix(self, name: str, pool: ThreadPoolExecutor) -> Block:
        form, source = self._form, self._sources[name]
        columns = source.shape[1]
        if form.packed and source.pack is not None:
            self._count(source)
            return source.pack(self._host)
        types = (BY_NAME[type] for type in _FORMATS[form.quant])
        type = next((type for type in types if columns % type.weights == 0), None)
        if form.packed and type is not None:
            return quantized(name, self._read(name, torch.float32), type, pool, self._host)
        tensor = self._read(name, TORCH_DTYPES[form.dtype])
        return pack_tensor(tensor, self._arena) if form.packed else tensor.to(form.device)

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        self._count(self._sources[name])
        return self._sources[name].read(dtype).contiguous()

    def _count(self, source: Source) -> None:
        self._done += int(np.prod(source.shape))
        if self._progress is not None:
            self._progress(self._done, self._total)
