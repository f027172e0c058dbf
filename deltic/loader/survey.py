"""Surveys a checkpoint by its configs and the headers of its files, on this machine or on the hub. Reads no weights,
and describes models that deltic does not support, too."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Final

import torch

from deltic.config import GenerationDefaults, ModelConfig
from deltic.config.quantization import PLAIN, Quantization, read_quantization
from deltic.config.vision import ImageConfig, Vision, VisionConfig
from deltic.errors import ModelError, show
from deltic.loader.catalog import parse_repository, select, tower_of
from deltic.loader.checkpoint import HEAD_FILES, CheckpointFiles, directory_checkpoint, hub_checkpoint
from deltic.loader.disk import has_weights
from deltic.loader.files import (
    CONFIG,
    COPIES,
    INDEX,
    MODELOPT,
    PICKLED,
    PICKLED_INDEX,
    SINGLE,
    InMemory,
    all_shards,
    check_weight_map,
)
from deltic.loader.formats import combine
from deltic.loader.gguf.config import config_from_gguf
from deltic.loader.gguf.file import GgufFile, GgufTensor, Header
from deltic.loader.gguf.file import parse_header as parse_gguf_header
from deltic.loader.gguf.file import read_header as read_gguf_header
from deltic.loader.gguf.load import complete_plan, plan_gguf_head
from deltic.loader.gguf.names import ROPE_FACTORS
from deltic.loader.hub import local_path, resolve
from deltic.loader.model_files import ModelFiles, is_tied, only_gguf
from deltic.loader.mtp_head import head_in_memory
from deltic.loader.names import is_head, is_unused_scale
from deltic.loader.safetensors import plan_directory
from deltic.loader.tensors import Source, StoredTensor
from deltic.loader.vision import bundled_tower, find_mmproj, plan_tower, vision_from_gguf

_READERS: Final = 8
"""Number of headers that are read concurrently."""
MAX_SHARDS: Final = 1024
_MAX_HEADERS: Final = 256 << 20
_MAX_NAMED: Final = 3
_MAX_STORAGE: Final = 20
_MAX_TEMPLATE: Final = 4 << 20
_NO_TEMPLATE: Final = "there is no chat template ({}): conversations need `chat_template`"
VISION: Final = "vision"
MTP_HEAD: Final = "MTP head"
NORMS: Final = "norms and routers"
GDN: Final = "GDN"
ATTENTION: Final = "attention"
_KINDS: Final[Mapping[str, re.Pattern[str]]] = {kind: re.compile(pattern) for kind, pattern in {
    VISION: r"(^|\.)(visual|vision_tower|vision_model|multi_modal_projector)\.|^(v|mm)\.",
    MTP_HEAD: r"(^|\.)mtp\.|\.nextn\.",
    "embeddings": r"(^|\.)(embed_tokens|token_embd)\b",
    "head": r"(^|\.)(lm_head|output)\.",
    "experts": r"\.experts\.|_exps\.",
    "shared experts": r"\.shared_expert\.|_shexp\.",
    GDN: r"\.linear_attn\.|\.ssm_|\.attn_(qkv|gate)\.",
    ATTENTION: r"\.self_attn\.|\.attn_(q|k|v|output|q_norm|k_norm)\.",
    "MLP": r"\.mlp\.(gate|up|down|gate_up)_proj\b|\.ffn_(gate|up|down)\.",
    NORMS: ""}.items()}
"""Kinds of weights, each with a pattern for tensor names of safetensors and GGUF files; the first match applies."""
_ORDER: Final = ("embeddings", GDN, ATTENTION, "MLP", "experts", "shared experts", NORMS, "head",
                 MTP_HEAD, VISION)
_LAYER: Final = re.compile(r"(?:^|\.)(?:layers|blocks|blk)\.(\d+)\.")
_LAST_NAME: Final = re.compile(r"([^.]+?)(?:\.(?:weight|bias))?$")
_PLAIN_TYPES: Final = ("F64", "F32", "F16", "BF16")
_ORDER_NAMES: Final = (".g_idx", "_g_idx")
_CODES: Final = ("U8", "I32", "U32", "I64", "U64")
"""Dtypes that may hold several weights each."""


@dataclass(frozen=True, slots=True)
class SurveyedWeight:
    """A weight, or several weights that a file has in one tensor.

    kind: a key of _KINDS.
    storage: dtype, GGUF type, or name of a format.
    shape: the shape in the file.
    parameters: number of parameters; None if the format is not known.
    nbytes: bytes including scales.
    """

    name: str
    kind: str
    storage: str
    shape: tuple[int, ...]
    parameters: int | None
    nbytes: int

    @property
    def bits(self) -> float | None:
        """Returns the bits of a parameter, including its share of the scales."""
        return 8 * self.nbytes / self.parameters if self.parameters else None

    @property
    def quantized(self) -> bool:
        return self.storage not in _PLAIN_TYPES


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Weights of one kind that are stored alike.

    names: last parts of the weights' names, the largest weight's first.
    columns: the distinct numbers of columns.
    layers: number of layers that have such weights; 0 for weights outside of layers.
    """

    kind: str
    storage: str
    names: tuple[str, ...]
    columns: tuple[int, ...]
    layers: int
    parameters: int | None
    nbytes: int

    @property
    def bits(self) -> float | None:
        return 8 * self.nbytes / self.parameters if self.parameters else None


@dataclass
class Survey:
    """The contents of a checkpoint, and whether deltic can load it.

    place: the checkpoint's directory, file or repository.
    config: the shape of the model; None if the architecture is not supported.
    files: the model's files, for code that reads no weights; None if the model cannot be loaded.
    refusal: the reason why deltic cannot load the model.
    whole: True if the weights are on this machine.
    """

    place: Path
    config: ModelConfig | None = None
    files: ModelFiles | None = None
    refusal: str | None = None
    whole: bool = True
    weights: list[SurveyedWeight] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    tokenizer: bool = False
    chat_template: bool = False

    @cached_property
    def groups(self) -> list[WeightGroup]:
        """Returns the weights grouped by kind and storage, the largest group of a kind first."""
        found = defaultdict[tuple[str, str], list[SurveyedWeight]](list)
        for weight in self.weights:
            found[weight.kind, weight.storage].append(weight)
        groups = [_group(kind, storage, weights) for (kind, storage), weights in found.items()]
        return sorted(groups, key=lambda group: (_ORDER.index(group.kind), -group.nbytes))

    def refuse(self, reason: str) -> None:
        """Records a reason why the model is refused; the first reason is kept."""
        self.refusal = self.refusal or reason


def _kind_of(name: str) -> str:
    return next(kind for kind, pattern in _KINDS.items() if pattern.search(name))


def _group(kind: str, storage: str, weights: Sequence[SurveyedWeight]) -> WeightGroup:
    largest = sorted(weights, key=lambda weight: -weight.nbytes)
    names = dict.fromkeys(found[1] for weight in largest if (found := _LAST_NAME.search(weight.name)))
    layers = {found[1] for weight in weights if (found := _LAYER.search(weight.name))}
    counts = [weight.parameters for weight in weights]
    known = sum(count for count in counts if count is not None) if None not in counts else None
    columns = {weight.shape[-1] for weight in weights if weight.shape}
    return WeightGroup(kind, storage, tuple(names), tuple(columns), len(layers), known,
                       sum(weight.nbytes for weight in weights))


def survey(model: str | None, revision: str | None = None, token: str | None = None) -> Survey | None:
    """Surveys a directory, a GGUF file, or a repository of the hub. Fetches only headers and configs. Returns None for
    a local model of another kind, such as a compiled one.

    Raises ModelError with a remedy if the model does not exist or its files cannot be read.
    """
    name = None if model is None or local_path(model) else parse_repository(model, revision)
    if name is not None:
        files = hub_checkpoint(name.repository, name.revision, token)
        chosen = select(name.repository, files.sizes, name.file)
        if chosen.file is None:
            return _survey_directory(files, local=False)
        return _survey_gguf(files, chosen.file, tower_of(chosen.file, files.sizes), local=False)
    path = resolve(model, revision, token)
    if path.is_dir() and has_weights(path):
        files = directory_checkpoint(path)
        return _survey_directory(files, local=True) if any(map(_is_safetensors, files.sizes)) else None
    file = only_gguf(path) if path.is_dir() else path
    if file is None or file.suffix == ".pte":
        return None
    return _survey_gguf(directory_checkpoint(file.parent), file.name, None, local=True)


def _is_safetensors(name: str) -> bool:
    return name.endswith((".safetensors", INDEX))


# Safetensors


def _survey_directory(files: CheckpointFiles, local: bool) -> Survey:
    files, found = replace(files, whole=False), Survey(files.place, whole=local)
    mapping = files.json(CONFIG)
    quantization = _read_configs(files, mapping, found)
    tensors = _with_orders(_read_tensors(files, found), quantization)
    problems: list[str] = []
    sources = combine(tensors, quantization, problems)
    for problem in problems:
        found.refuse(problem)
    if problems:
        found.warnings.append(f"{len(problems)} weights cannot be read: {problems[0]}")
    found.weights += [_surveyed_weight(name, source) for name, source in sources.items() if not is_unused_scale(name)]
    if found.config and tensors and found.refusal is None:
        _plan(InMemory(tensors, quantization, str(files.place)), mapping, found)
    _check_texts(files, found)
    found.warnings += quality_warnings(found)
    return found


def _read_configs(files: CheckpointFiles, mapping: dict[str, Any], found: Survey) -> Quantization:
    """Reads the shape and the quantization. Returns the quantization, even if it is not supported."""
    plain = {key: value for key, value in mapping.items() if key not in ("quantization_config", "quantization")}
    if isinstance(nested := plain.get("text_config"), Mapping):
        plain["text_config"] = {key: value for key, value in nested.items() if key != "quantization_config"}
    try:
        found.config = ModelConfig.from_hf(plain)
    except ModelError as error:
        found.refuse(f"{files.place / CONFIG}: {error}")
    try:
        return read_quantization(mapping, files.json(MODELOPT) if MODELOPT in files.sizes else None)
    except ModelError as error:
        found.refuse(f"{files.place / CONFIG}: {error}")
    return PLAIN


def _read_tensors(files: CheckpointFiles, found: Survey) -> dict[str, StoredTensor]:
    """Returns the tensors of the model and of its draft head, as stored."""
    names = _weight_files(files, found)
    heads = [name for name in HEAD_FILES if name in files.sizes and name not in names][:1]
    if len(names) > MAX_SHARDS:
        raise ModelError(f"{files.place} has {len(names)} safetensors files, more than any model; name a directory "
                         "with the files of one model")
    sizes = list[int]()

    def read(name: str) -> dict[str, StoredTensor]:
        if sum(sizes) > _MAX_HEADERS:
            raise ModelError(f"{files.place} has more than {_MAX_HEADERS} bytes of headers; take another checkpoint")
        header = files.header(name)
        sizes.append(min((stored.offset for stored in header.values()), default=0))
        return header

    with ThreadPoolExecutor(_READERS) as pool:
        try:
            headers = dict(zip([*names, *heads], pool.map(read, [*names, *heads]), strict=True))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    tensors = dict[str, StoredTensor]()
    for name, header in headers.items():
        for tensor, stored in header.items():
            if tensor in tensors:
                found.refuse(f"tensor {show(tensor)} is in both {tensors[tensor].path.name} and {name}; keep the files "
                             "of one revision")
            tensors[tensor] = stored
        end = max((stored.offset + stored.nbytes for stored in header.values()), default=0)
        start = min((stored.offset for stored in header.values()), default=0)
        _check_whole(files.place / name, files.sizes[name], start, end, found)
    if not any(map(is_head, tensors)) and found.config and found.config.num_mtp_layers:
        found.warnings.append("config.json announces a multi-token-prediction head, and no file has one: drafts are "
                              "n-grams; take the head from the original model with deltic mtp extract")
    return tensors


def _with_orders(tensors: Mapping[str, StoredTensor], quantization: Quantization) -> dict[str, StoredTensor]:
    """Replaces the tensors of column groups (g_idx), which determine if weights stay packed: removes them if the config
    orders no columns, and otherwise replaces their data by zeros, which are not in group order."""
    groups = [quantization.settings, *filter(None, quantization.groups())]
    ordered = any(group.get("desc_act") or group.get("actorder") == "group" for group in groups)
    zero = torch.zeros((), dtype=torch.int32)
    return {name: replace(stored, data=zero.expand(stored.shape)) if name.endswith(_ORDER_NAMES) else stored
            for name, stored in tensors.items() if ordered or not name.endswith(_ORDER_NAMES)}


def _weight_files(files: CheckpointFiles, found: Survey) -> list[str]:
    """Returns the safetensors files of the model that exist."""
    names = [name for name in files.sizes if name.endswith(".safetensors") and "/" not in name]
    if SINGLE in names:
        return [SINGLE]
    if INDEX in files.sizes:
        weight_map = check_weight_map(files.json(INDEX), files.place / INDEX)
        shards = sorted(set(weight_map.values()))
        absent = [shard for shard in shards if shard not in files.sizes]
        if absent:
            found.refuse(f"{files.place / INDEX} names the shard {show(absent[0])}, which is absent; download it too")
            found.warnings.append(f"{len(absent)} of {len(shards)} shards are absent: {_named(absent)}")
        return [shard for shard in shards if shard in files.sizes]
    own = [name for name in names if not name.startswith((*COPIES, "mtp"))] or names
    if len(own) > 1:
        try:
            all_shards(files.place, [files.place / name for name in own])
        except ModelError as error:
            found.refuse(str(error))
            found.warnings.append(str(error))
    if not own:
        pickles = [name for name in (PICKLED, PICKLED_INDEX) if name in files.sizes]
        found.warnings.append(f"{files.place} has weights in {_named(pickles)} alone, which have no headers"
                              if pickles else f"{files.place} has no weights")
    return own


def _check_whole(path: Path, size: int, start: int, end: int, found: Survey) -> None:
    """Reports a file that is shorter than its tensors. start, end: offsets at which the tensors begin and end."""
    if end <= size:
        return
    found.whole = False
    if size <= start:
        found.warnings.append(f"{path.name} has its header alone, and no weights")
    else:
        found.refuse(f"{path} has {size} bytes, but its header describes {end}; the file is truncated or corrupt, "
                     "download it again")


def _surveyed_weight(name: str, source: Source) -> SurveyedWeight:
    count = None if source.dtype in _CODES else prod(source.shape)
    return SurveyedWeight(name, _kind_of(name), source.dtype[:_MAX_STORAGE], source.shape, count, source.nbytes)


def _plan(stored: InMemory, mapping: Mapping[str, Any], found: Survey) -> None:
    """Checks the tensors of a supported model by the rules of the loader."""
    config = found.config
    assert config is not None
    if not config.tie_word_embeddings and is_tied(stored, mapping):
        config = found.config = replace(config, tie_word_embeddings=True)
    try:
        plan_directory(stored, config)
    except ModelError as error:
        found.refuse(str(error))
        return
    tower: VisionConfig | None = None
    try:
        tower = VisionConfig.from_hf(mapping, config.hidden_size)
        if tower and not plan_tower(stored, tower):
            found.warnings.append("config.json describes a vision tower, and no file has one: pictures are refused")
            tower = None
    except ModelError as error:
        found.warnings.append(f"the vision tower cannot be used, so that pictures are refused: {error}")
    try:
        head_in_memory(stored, config)
    except ModelError as error:
        found.warnings.append(f"the draft head cannot be used, so that nothing is drafted: {error}")
    found.files = ModelFiles(found.place, config, GenerationDefaults(), weights=stored,
                             vision=Vision(tower, ImageConfig()) if tower else None)


def _check_texts(files: CheckpointFiles, found: Survey) -> None:
    """Looks for a tokenizer and a chat template."""
    sizes = files.sizes
    found.tokenizer = "tokenizer.json" in sizes or {"vocab.json", "merges.txt"} <= sizes.keys()
    found.chat_template = bool({"chat_template.jinja", "chat_template.json"} & sizes.keys())
    if not found.chat_template and 0 < sizes.get("tokenizer_config.json", 0) <= _MAX_TEMPLATE:
        try:
            found.chat_template = bool(files.json("tokenizer_config.json").get("chat_template"))
        except ModelError as error:
            found.warnings.append(str(error))
    if not found.tokenizer:
        found.warnings.append("tokenizer.json is absent, and so are vocab.json with merges.txt: take the tokenizer of "
                              "the original model")
    if not found.chat_template:
        found.warnings.append(_NO_TEMPLATE.format("chat_template.jinja, or in tokenizer_config.json"))



# GGUF files


def _survey_gguf(files: CheckpointFiles, name: str, tower: str | None, local: bool) -> Survey:
    """Surveys a GGUF file. tower: the vision tower's file in a repository; in a directory it is searched for."""
    place = files.place / name
    found = Survey(place, whole=local)

    def name_of(path: Path) -> str:
        return path.relative_to(files.place).as_posix() if path.is_relative_to(files.place) else ""

    def read(path: Path) -> Header:
        own = name_of(path)
        if own not in files.sizes:  # a vision tower in a folder above
            return read_gguf_header(path)
        header = parse_gguf_header(path, files.sizes[own], files.open(own), whole=False)
        ends = [tensor.offset + tensor.nbytes for tensor in header.tensors]
        starts = [tensor.offset for tensor in header.tensors]
        _check_whole(path, files.sizes[own], min(starts, default=0), max(ends, default=0), found)
        return header

    gguf = GgufFile.open(place, read, lambda path: name_of(path) in files.sizes)
    _plan_gguf(gguf, found)
    try:
        given = bundled_tower(gguf)
        path = find_mmproj(place) if local else tower and files.place / tower
        mmproj = given or (GgufFile.open(path, read) if path else None)
        if mmproj and found.files and found.config:
            vision = vision_from_gguf(mmproj, gguf, found.config)
            found.files = replace(found.files, vision=vision, mmproj=mmproj)
        if mmproj and mmproj is not given:
            found.weights += _stored_in(mmproj)
    except ModelError as error:
        found.warnings.append(f"the vision tower cannot be used, so that pictures are refused: {error}")
    _check_gguf_texts(gguf, found)
    found.warnings += quality_warnings(found)
    return found


def _plan_gguf(gguf: GgufFile, found: Survey) -> None:
    """Checks the tensors of a file by the rules of the loader."""
    try:
        if not found.whole:  # their values, which are a part of the config, are not read
            gguf = replace(gguf, tensors={name: each for name, each in gguf.tensors.items() if name != ROPE_FACTORS})
        config = found.config = config_from_gguf(gguf)
        sources = complete_plan(gguf, config)
        found.files = ModelFiles(found.place, config, GenerationDefaults(), gguf)
    except ModelError as error:
        found.refuse(str(error))
        found.weights += _stored_in(gguf)
        return
    try:
        sources += plan_gguf_head(gguf, config)
    except ModelError as error:
        found.warnings.append(f"the draft head cannot be used, so that nothing is drafted: {error}")
    found.weights += [_gguf_weight(" ".join(source.target.names), source.stored) for source in sources]
    found.weights += [weight for weight in _stored_in(gguf) if weight.kind == VISION]


def _stored_in(gguf: GgufFile) -> list[SurveyedWeight]:
    return [_gguf_weight(name, tensor) for name, tensor in gguf.tensors.items()]


def _gguf_weight(name: str, tensor: GgufTensor) -> SurveyedWeight:
    return SurveyedWeight(name, _kind_of(name), tensor.type.name, tensor.shape, prod(tensor.shape), tensor.nbytes)


def _check_gguf_texts(gguf: GgufFile, found: Survey) -> None:
    found.tokenizer = "tokenizer.ggml.tokens" in gguf.metadata
    found.chat_template = bool(gguf.metadata.get("tokenizer.chat_template"))
    if not found.tokenizer:
        found.warnings.append("tokenizer.ggml.tokens is absent: take a file with its tokenizer")
    if not found.chat_template:
        found.warnings.append(_NO_TEMPLATE.format("tokenizer.chat_template"))


# Warnings about what was quantized


_FEW_BITS: Final = 5.0
"""Bits of a parameter, including scales, below which the codes of a weight have at most four bits."""
_FLOAT4: Final = re.compile("FP4")
_GATED: Final = re.compile(r"\.self_attn\.q_proj\b")
_DECAYS: Final = re.compile(r"\.in_proj_(a|b|ba)\b")


def quality_warnings(found: Survey) -> list[str]:
    """Returns warnings about weights that suffer more from quantization than other weights do."""
    warnings = []
    gguf = found.files is not None and found.files.gguf is not None
    quantized = [weight for weight in found.weights if weight.quantized and weight.parameters]
    gates = [weight for weight in quantized if weight.kind == ATTENTION and _GATED.search(weight.name)]
    gates = [weight for weight in gates
             if _fewer_bits(weight, _FEW_BITS) and (not gguf or _FLOAT4.search(weight.storage))]
    if gates and found.config and found.config.attention_output_gate:
        warnings.append(f"self_attn.q_proj has 4 bits in {len(gates)} layers ({_storages(gates)}), also in the half of "
                        "its rows that is the output gate; in NVFP4 that was measured to make perplexity 2 to 6 times "
                        "worse: take a checkpoint with q_proj in 8 or 16 bits")
    decays = [weight for weight in quantized if _DECAYS.search(weight.name) and (not gguf or _fewer_bits(weight, 8))]
    if decays:
        warnings.append(f"in_proj_a or in_proj_b is quantized in {_layers(decays)} layers ({_storages(decays)}): they "
                        "control what the recurrent state keeps, so that errors add up over a text; take a checkpoint "
                        "with both in 16 bits")
    heads = [weight for weight in quantized if weight.kind == MTP_HEAD and (not gguf or _fewer_bits(weight, 8))]
    if heads:
        warnings.append(f"the MTP head is quantized ({_storages(heads)}): answers stay the same, but fewer drafts may "
                        "be accepted; take the head from the original model with deltic mtp extract")
    return warnings


def _fewer_bits(weight: SurveyedWeight, bits: float) -> bool:
    return weight.bits is not None and weight.bits < bits


def _layers(weights: Iterable[SurveyedWeight]) -> int:
    return len({found[1] for weight in weights if (found := _LAYER.search(weight.name))})


def _storages(weights: Iterable[SurveyedWeight]) -> str:
    return ", ".join(dict.fromkeys(weight.storage for weight in weights))


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(map(show, names[:_MAX_NAMED])) + more
