"""An encoder's tensors: found under Hugging Face's names, checked, and put into the form that computes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from deltic.config import DType, available_cores
from deltic.embeddings.bert_config import EncoderConfig
from deltic.embeddings.rounding import TOKENS, q8_0_blocks, random_ids
from deltic.errors import ModelError
from deltic.loader.files import PICKLED, StoredTensor, find_tensors
from deltic.loader.gguf.blocks import BY_NAME
from deltic.loader.pickled import read_pickled
from deltic.loader.quantize import quantized
from deltic.loader.safetensors import TORCH_DTYPES, Progress, read_stored
from deltic.ops.encoder import Affine, EncoderLayer, EncoderWeights, LayerNorm, Ragged
from deltic.ops.memory import Arena
from deltic.ops.quantized import PackedForm as PackedForm
from deltic.ops.quantized import QTensor, host_form, pack_tensor
from deltic.ops.torch.basic import embed
from deltic.ops.torch.encoder import LayerStates, embeddings, normed, padded_attention, run_layer
from deltic.ops.types import Block

Shape = tuple[int, ...]
Read = Callable[[torch.dtype], Tensor]
"""Gives a tensor in a dtype."""

_BASE: Final = re.compile(r"(bert|roberta|xlm_roberta|model)\.(?=embeddings|encoder|pooler)")
_IGNORED: Final = re.compile(r"embeddings\.(position|token_type)_ids|cls\..*|lm_head\..*|pooler\..*|"
                             r"encoder\.layer\.\d+\.attention\.self\.mask")
_OLD: Final = ((".LayerNorm.gamma", ".LayerNorm.weight"), (".LayerNorm.beta", ".LayerNorm.bias"))
_FORMATS: Final[Mapping[str, tuple[str, ...]]] = {"none": (), "q8_0": ("Q8_0",), "q4_k": ("Q4_K", "Q8_0")}
"""Types of the matrices by quant: the first whose blocks their rows fit."""


@dataclass(frozen=True, slots=True)
class WeightSource:
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


def find_sources(directory: Path, config: EncoderConfig, whole: bool = True) -> dict[str, WeightSource]:
    """The tensors of `expected_tensors`, in safetensors files or, where there are none, pytorch_model.bin. whole=False:
    the classifier's alone.

    ModelError names the tensor that is unknown, missing, doubled or of another shape or dtype, or the file.
    """
    expected, sources = expected_tensors(config), dict[str, WeightSource]()
    if not whole:
        expected = {name: shape for name, shape in expected.items() if name.startswith(classifier_names(config))}
    for stored_name, source in _stored(directory) if expected else ():
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


def _stored(directory: Path) -> Iterator[tuple[str, WeightSource]]:
    if any(directory.glob("*.safetensors")) or not (directory / PICKLED).is_file():
        for name, stored in find_tensors(directory).items():
            yield name, _from_file(name, stored)
    else:
        for name, tensor in read_pickled(directory / PICKLED).items():
            yield name, WeightSource(tuple(tensor.shape), tensor.to)


def _from_file(name: str, stored: StoredTensor) -> WeightSource:
    def read(dtype: torch.dtype) -> Tensor:
        if stored.dtype not in ("F32", "F16", "BF16"):
            raise ModelError(f"tensor {name!r} is stored as {stored.dtype[:20]}; F32, BF16 and F16 can be read")
        return read_stored(name, stored, dtype, torch.device("cpu"))
    return WeightSource(stored.shape, read)


@dataclass(frozen=True, slots=True)
class WeightForm:
    """How weights are kept. packed: as the compiled kernels want them. quant: of _FORMATS."""

    dtype: DType
    device: str
    quant: str
    packed: bool

    @property
    def plain(self) -> torch.dtype:
        """Of what is no matrix."""
        return torch.float32 if self.device == "cpu" else TORCH_DTYPES[self.dtype]


def read_weights(config: EncoderConfig, sources: Mapping[str, WeightSource], form: WeightForm,
                 progress: Progress | None = None) -> EncoderWeights:
    """progress(done, total) counts numbers of the tensors that are read."""
    return _WeightReader(sources, form, progress).weights(config)


class _WeightReader:
    def __init__(self, sources: Mapping[str, WeightSource], form: WeightForm, progress: Progress | None) -> None:
        self._sources, self._form, self._progress = sources, form, progress
        self._total, self._done = sum(int(np.prod(source.shape)) for source in sources.values()), 0
        self._arena = Arena()
        self._host, self._kept = host_form(self._arena), dict[str, Tensor]()

    def weights(self, config: EncoderConfig) -> EncoderWeights:
        with ThreadPoolExecutor(available_cores()) as pool, torch.inference_mode():
            words, places, kinds = (f"embeddings.{name}_embeddings.weight" for name in ("word", "position",
                                                                                       "token_type"))
            top = EncoderWeights(self._matrix(words, pool), self._plain(places), self._plain(kinds),
                                 self._norm("embeddings.LayerNorm"), (), config.heads, config.eps)
            sample = self._sample(top, config) if self._weighs(config) else None
            layers = []
            for number in range(config.layers):
                layer = f"encoder.layer.{number}."
                states = self._states(layer, sample, top) if sample is not None else None
                layers.append(self._layer(layer, pool, states))
                sample = states.result if states else None
                self._kept.clear()
            return replace(top, layers=tuple(layers))

    def _weighs(self, config: EncoderConfig) -> bool:
        """Whether matrices become Q8_0 here, with columns that weigh as random tokens say."""
        plain = all(self._sources[name].pack is None for name in expected_tensors(config))
        sizes = (config.hidden_size, config.intermediate_size)
        return self._form.packed and self._form.quant == "q8_0" and plain and not any(size % 32 for size in sizes)

    def _sample(self, top: EncoderWeights, config: EncoderConfig) -> Tensor:
        """The first layer's input of some random tokens."""
        length = min(TOKENS[1], config.max_length)
        ids = random_ids(config.vocab_size, config.first_place + 4, length).flatten()
        places = (torch.arange(length) + config.first_place).repeat(TOKENS[0])
        batch = Ragged(ids, places, torch.zeros_like(ids), torch.arange(TOKENS[0] + 1) * length)
        return normed(embeddings(top, batch, embed(ids, top.words, torch.float32)), top)

    def _states(self, layer: str, sample: Tensor, top: EncoderWeights) -> LayerStates:
        """What the layer makes of the sample, with its matrices as they are stored, which are kept for a while."""
        names = [f"{layer}attention.self.{part}" for part in ("query", "key", "value")]
        products = [*names, *(f"{layer}{part}.dense" for part in ("attention.output", "intermediate", "output"))]
        self._kept = {f"{name}.weight": self._sources[f"{name}.weight"].read(torch.float32) for name in products}
        plain = {name: Affine(self._kept[f"{name}.weight"], self._sources[f"{name}.bias"].read(torch.float32))
                 for name in products}
        qkv = Affine(torch.cat([self._kept[f"{name}.weight"] for name in names]),
                     torch.cat([plain[name].bias for name in names]))
        norms = [LayerNorm(*(self._sources[f"{layer}{part}.LayerNorm.{kind}"].read(torch.float32)
                        for kind in ("weight", "bias"))) for part in ("attention.output", "output")]
        found = EncoderLayer(qkv, plain[products[3]], norms[0], plain[products[4]], plain[products[5]], norms[1])
        return run_layer(found, sample, padded_attention([len(sample) // TOKENS[0]] * TOKENS[0]), top)

    def _layer(self, layer: str, pool: ThreadPoolExecutor, states: LayerStates | None) -> EncoderLayer:
        parts = [f"{layer}attention.self.{part}" for part in ("query", "key", "value")]
        given = [None] * 4 if states is None else [states.qkv, states.out, states.up, states.down]
        qkv, out, up, down = (None if each is None else each.square().mean(0) for each in given)
        blocks = tuple(self._matrix(f"{part}.weight", pool, qkv) for part in parts)
        fused = blocks if self._form.packed else torch.cat([block for block in blocks if isinstance(block, Tensor)])
        return EncoderLayer(Affine(fused, torch.cat([self._plain(f"{part}.bias") for part in parts])),
                            self._affine(f"{layer}attention.output.dense", pool, out),
                            self._norm(f"{layer}attention.output.LayerNorm"),
                            self._affine(f"{layer}intermediate.dense", pool, up),
                            self._affine(f"{layer}output.dense", pool, down), self._norm(f"{layer}output.LayerNorm"))

    def _affine(self, name: str, pool: ThreadPoolExecutor, columns: Tensor | None) -> Affine:
        return Affine(self._matrix(f"{name}.weight", pool, columns), self._plain(f"{name}.bias"))

    def _norm(self, name: str) -> LayerNorm:
        return LayerNorm(self._plain(f"{name}.weight"), self._plain(f"{name}.bias"))

    def _plain(self, name: str) -> Tensor:
        return self._read(name, self._form.plain).to(self._form.device)

    def _matrix(self, name: str, pool: ThreadPoolExecutor, weights: Tensor | None = None) -> Block:
        """weights: how much each column counts, where that is known."""
        form, source = self._form, self._sources[name]
        columns = source.shape[1]
        if form.packed and source.pack is not None:
            self._count(source)
            return source.pack(self._host)
        if weights is not None and bool(torch.isfinite(self._kept[name]).all()):
            self._count(source)
            type = BY_NAME["Q8_0"]
            flat = q8_0_blocks(self._kept.pop(name), weights).reshape(-1)
            return self._host.pack(type.name, type.id, source.shape[0], columns, type.size(columns),
                                   lambda start, count: flat[start:start + count])
        types = (BY_NAME[type] for type in _FORMATS[form.quant])
        fitting = next((type for type in types if columns % type.weights == 0), None)
        if form.packed and fitting is not None:
            return quantized(name, self._read(name, torch.float32), fitting, pool, self._host)
        tensor = self._read(name, TORCH_DTYPES[form.dtype])
        return pack_tensor(tensor, self._arena) if form.packed else tensor.to(form.device)

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        self._count(self._sources[name])
        return self._sources[name].read(dtype).contiguous()

    def _count(self, source: WeightSource) -> None:
        self._done += int(np.prod(source.shape))
        if self._progress is not None:
            self._progress(self._done, self._total)
