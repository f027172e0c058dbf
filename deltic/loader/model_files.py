"""The files of a model: its config, its weights and how to load them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from torch import Tensor

from deltic.config import DType, GenerationDefaults, ModelConfig
from deltic.config.quantization import read_quantization
from deltic.config.vision import ImageConfig, Vision, VisionConfig
from deltic.errors import ConfigError, ModelError, show
from deltic.loader.catalog import is_model
from deltic.loader.checkpoint import directory_checkpoint
from deltic.loader.disk import has_weights, read_json, refuse
from deltic.loader.files import MAX_CONFIG, InMemory, find_tensors, in_memory
from deltic.loader.formats.fp8 import FLOAT8
from deltic.loader.gguf.blocks import BlockType
from deltic.loader.gguf.config import config_from_gguf, generation_from_gguf
from deltic.loader.gguf.file import GgufFile
from deltic.loader.gguf.imatrix import ImportanceMatrix
from deltic.loader.gguf.load import (
    GgufSource,
    load_gguf_head,
    load_packed_parts,
    matrices_of,
    plan_gguf,
    plan_gguf_head,
    read_file_parts,
)
from deltic.loader.gguf.tokenizer import TokenizerTexts, tokenizer_from_gguf
from deltic.loader.hub import resolve
from deltic.loader.lora_merge import LoraMerge
from deltic.loader.mtp_head import find_head, head_in_memory, load_stored_head
from deltic.loader.names import is_stack, packed_parts
from deltic.loader.safetensors import DEQUANTIZED, KeptForms, Progress, StoredWeight, plan_directory, read_parts
from deltic.loader.stored_blocks import block_type
from deltic.loader.tensors import IN_MEMORY, ITEM_BYTES, Source, StoredTensor
from deltic.loader.vision import (
    bundled_tower,
    find_mmproj,
    load_mmproj,
    load_tower,
    plan_tower,
    read_mmproj,
    vision_from_gguf,
)
from deltic.ops.parts import Split, one_device
from deltic.ops.quantized import PackedForm, host_form
from deltic.ops.stored import StoredExpert, StoredMatrix
from deltic.ops.types import Block, Weight

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk or in memory.

    gguf: the open GGUF file, if the model is one.
    mmproj: the GGUF file of the vision tower.
    weights: tensors in memory that replace the tensors of the files.
    lora: an adapter to merge into the weights when they are converted. imatrix: weights the quantization errors of that
        conversion.
    """

    path: Path
    config: ModelConfig
    generation: GenerationDefaults
    gguf: GgufFile | None = None
    vision: Vision | None = None
    mmproj: GgufFile | None = None
    weights: InMemory | None = None
    lora: LoraMerge | None = None
    imatrix: ImportanceMatrix | None = None

    @property
    def place(self) -> Path | None:
        """Returns the directory or file; None for a model in memory."""
        return None if self.path == IN_MEMORY else self.path

    @property
    def _stored(self) -> Path | InMemory:
        return self.weights or self.path

    @property
    def has_float8(self) -> bool:
        """Returns True if safetensors store matrices in float8. Reads their headers."""
        return self.gguf is None and any(tensor.dtype == FLOAT8 for tensor in find_tensors(self._stored).values())

    def float8_names(self) -> set[str]:
        """Returns the canonical names of tensors that safetensors store in float8."""
        plan = plan_directory(self._stored, self.config)
        names = [name for name, source in plan.items() if source.dtype == FLOAT8]
        return {part for name in names for part in packed_parts(name) or (name,)}

    def storages(self) -> dict[str, tuple[str, int]]:
        """Returns the dtype or format, and the columns, of each tensor of safetensors by canonical name."""
        plan = plan_directory(self._stored, self.config)
        return {part: (source.dtype, source.shape[-1]) for name, source in plan.items()
                for part in packed_parts(name) or (name,)}

    def block_types(self, form: PackedForm) -> dict[str, BlockType]:
        """Returns the block types of weights that keep the quantization of their safetensors, by canonical name."""
        if self.gguf is not None:
            return {}
        found = ((name, block_type(source, form)) for name, source in plan_directory(self._stored, self.config).items())
        return {part: type for name, type in found if type for part in packed_parts(name) or (name,)}

    def load(self, dtype: DType | Literal["auto"], device: str, progress: Progress | None) -> dict[str, Tensor]:
        """Returns the weights by canonical name."""
        found = self.parts(dtype, one_device(device), progress)
        return {name: tensor for _, name, tensor in found if isinstance(tensor, Tensor)}

    def parts(self, dtype: DType | Literal["auto"], split: Split, progress: Progress | None = None,
              experts: bool = True, kept: KeptForms = DEQUANTIZED
              ) -> Iterator[tuple[int, str, StoredWeight | Weight]]:
        """Yields each device's part of the weights in file order: device, name, and tensor on the device. experts:
        include the experts. kept: forms of the safetensors weights that stay quantized."""
        if self.gguf is not None:
            return read_file_parts(self.gguf, self.config, dtype, split, progress)
        return read_parts(self._stored, self.config, dtype, split, progress, experts, kept)

    def load_packed(self, forms: Sequence[PackedForm], split: Split, progress: Progress | None = None,
                    experts: bool = True) -> list[dict[str, Weight]]:
        """Returns each device's part of the weights of a GGUF file, still quantized (`gguf.load.load_packed_parts`)."""
        assert self.gguf is not None
        return load_packed_parts(self.gguf, self.config, forms, split, progress, experts)

    def stored_experts(self, dtype: DType) -> list[list[StoredExpert]]:
        """Locates the experts of each layer, for a model that computes in `dtype`."""
        if self.gguf is not None:
            return experts_in_gguf(self.gguf, self.config)
        return experts_in_directory(self.path, self.config, dtype)

    def load_head(self, dtype: DType | Literal["auto"], device: str, packed: bool = False) -> dict[str, Weight] | None:
        """Returns the multi-token-prediction head of `head_parts`, whole on one device; None if there is none. packed:
        use the form of the CPU's kernels."""
        return self.head_parts(dtype, one_device(device), [host_form()] if packed else ())[0] or None

    def head_parts(self, dtype: DType | Literal["auto"], split: Split, forms: Sequence[PackedForm] = ()
                   ) -> list[dict[str, Weight]]:
        """Returns each device's part of the multi-token-prediction head by canonical name (`names.expected_head` and
        `optional_head`), still quantized if there are `forms`; empty if there is no head.

        Raises ModelError naming the tensor that is missing, unknown, doubled, or of another shape or type, and for
        heads of several layers.
        """
        kept = self._dtype(dtype)
        sources = self.gguf_head()
        if sources:
            return load_gguf_head(sources, self.config, kept, split, forms)
        return [{**own} for own in load_stored_head(self.stored_head(), self.config, kept, split)]

    def load_tower(self, dtype: DType | Literal["auto"], device: str, form: PackedForm | None = None
                   ) -> dict[str, Block] | None:
        """Returns the vision tower by canonical name (`vision.expected_tower`); None if there is none. form: quantized
        matrices stay quantized, in this form."""
        if self.vision is None:
            return None
        kept = self._dtype(dtype)
        if self.mmproj is not None:
            return load_mmproj(self.mmproj, self.vision.tower, kept, device, form)
        return {**load_tower(plan_tower(self._stored, self.vision.tower), kept, device)}

    def read_tower(self, name: str) -> Tensor:
        """Returns one tensor of the vision tower in float32."""
        assert self.vision is not None
        if self.mmproj is not None:
            return read_mmproj(self.mmproj, self.vision.tower, name)
        return load_tower({name: plan_tower(self._stored, self.vision.tower)[name]}, "float32", "cpu")[name]

    def _dtype(self, dtype: DType | Literal["auto"]) -> DType:
        return self.config.dtype if dtype == "auto" else dtype

    def gguf_head(self) -> list[GgufSource]:
        """Locates the head's tensors in the GGUF file."""
        return [] if self.gguf is None else plan_gguf_head(self.gguf, self.config)

    def stored_head(self) -> dict[str, Source]:
        """Locates the head's tensors in the directory's safetensors files; for a GGUF file, in its directory."""
        if self.weights is not None:
            return head_in_memory(self.weights, self.config)
        directory = self.path if self.gguf is None else self.path.parent
        return find_head(directory_checkpoint(directory), self.config)

    def weight_files(self, head: bool) -> tuple[Path, ...]:
        """Returns the files with weights. head: include the files of the draft head."""
        found = list[Path]()
        if self.gguf is not None:
            found.extend(self.gguf.paths)
        else:
            found.extend(stored.path for source in find_tensors(self.path).values() for stored in source.stored)
        if head and not self.gguf_head():
            found.extend(stored.path for source in self.stored_head().values() for stored in source.stored)
        if self.mmproj:
            found.extend(self.mmproj.paths)
        return tuple(dict.fromkeys(found))

    def head_kinds(self) -> dict[str, int]:
        """Returns the bytes of the head by stored type. Raises ModelError like `load_head`."""
        stored = [(part.stored.type.name, part.stored.nbytes) for part in self.gguf_head()]
        stored = stored or [(tensor.dtype, tensor.nbytes) for tensor in self.stored_head().values()]
        sizes = dict[str, int]()
        for kind, nbytes in stored:
            sizes[kind] = sizes.get(kind, 0) + nbytes
        return sizes

    def tokenizer(self) -> TokenizerTexts | None:
        """Returns the tokenizer of a GGUF file. Raises ModelError if it cannot be used."""
        if self.gguf is None:
            return None
        with _errors_name(self.path):
            return tokenizer_from_gguf(self.gguf.metadata)


def open_model(
    model: str | Path | None,
    revision: str | None = None,
    token: str | None = None,
    progress: bool = True,
    mmproj: str | None = None,
    config: ModelConfig | Mapping[str, Any] | str | Path | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> ModelFiles:
    """Finds a model (see `resolve`), and reads its config.json and generation_config.json, or its GGUF metadata.

    mmproj: GGUF file of the vision tower. Default: the one in the model's folder.
    config: replaces config.json: the path of such a file, its contents, or a shape.
    weights: replaces the tensors of the files. Without `model` no files are read at all.
    Raises ModelError naming the file and key that cannot be used.
    """
    tensors = None if weights is None else in_memory(weights)
    path = IN_MEMORY if tensors and model is None else resolve(model, revision, token, progress)
    if path.is_file():
        file: Path | None = path
    else:
        file = None if tensors else only_gguf(path)
    if file is not None:
        if config is not None or tensors:
            option = "weights" if tensors else "config"
            raise ConfigError(f"{option} is for models of safetensors files: {file} is a GGUF file, which contains its "
                              f"own; leave out {option}", option)
        return _open_gguf(file, mmproj)
    if mmproj is not None:
        raise ModelError(f"{mmproj} cannot be used: {path} is no GGUF file, and would contain its own vision tower")
    return _open_directory(path, tensors, config)


def only_gguf(directory: Path) -> Path | None:
    """Returns the GGUF file of a directory without other weights. The parts of a split model count as one file."""
    if has_weights(directory):
        return None
    models = [path for path in sorted(directory.iterdir()) if is_model(path.name) and not path.is_dir()]
    if len(models) > 1:
        raise ModelError(f"{directory} has several GGUF files: name one of {', '.join(path.name for path in models)}")
    return models[0] if models else None


def _open_gguf(path: Path, mmproj: str | None) -> ModelFiles:
    gguf = GgufFile.open(path)
    config = config_from_gguf(gguf)
    vision, tower = _gguf_vision(gguf, config, mmproj)
    return ModelFiles(path, config, generation_from_gguf(gguf, config), gguf, vision, tower)


def _gguf_vision(gguf: GgufFile, config: ModelConfig, mmproj: str | None
                 ) -> tuple[Vision, GgufFile] | tuple[None, None]:
    """Finds the tower: the given file, tensors inside the text model's file, or a file in its folder."""
    try:
        if mmproj:
            file: GgufFile | None = GgufFile.open(Path(mmproj).expanduser())
        else:
            file = bundled_tower(gguf)
            if file is None and (found := find_mmproj(gguf.paths[0])):
                file = GgufFile.open(found)
        return (None, None) if file is None else (vision_from_gguf(file, gguf, config), file)
    except ModelError as error:
        if mmproj:
            raise
        logger.warning("the vision tower cannot be used, so that pictures are refused: %s", error)
        return None, None


def _open_directory(path: Path, weights: InMemory | None, config: Any) -> ModelFiles:
    tensors = weights or path
    if not weights and not has_weights(path):
        refuse(path)
    shape, mapping = _read_shape(path, config)
    if weights:
        weights = tensors = replace(weights, quantization=read_quantization(mapping))
    if not isinstance(config, ModelConfig) and not shape.tie_word_embeddings and is_tied(tensors, mapping):
        shape = replace(shape, tie_word_embeddings=True)
    generation = path / "generation_config.json"
    advice = read_json(generation, MAX_CONFIG) if generation.exists() else {}
    with _errors_name(generation):
        defaults = GenerationDefaults.from_hf(advice, shape.eos_token_ids)
    return ModelFiles(path, shape, defaults, vision=_vision(path, tensors, mapping, shape), weights=weights)


def _read_shape(directory: Path, config: Any) -> tuple[ModelConfig, Mapping[str, Any]]:
    """Returns the shape, and the contents of config.json or its replacement."""
    if not isinstance(config, ModelConfig | Mapping | str | Path | None):
        raise ConfigError(f"config must be the path of a config.json, its content, or a ModelConfig, not "
                          f"{show(config)}", "config")
    own = directory / "config.json"
    if isinstance(config, Mapping):
        return ModelConfig.from_hf(config), config
    if isinstance(config, ModelConfig):
        return config, read_json(own, MAX_CONFIG) if own.exists() else {}
    if config is None and directory == IN_MEMORY:
        raise ConfigError("weights need a config: give `config`, the path of a config.json, its content, or a "
                          "ModelConfig", "config")
    path = own if config is None else Path(config)
    if config is None and not path.exists():
        refuse(directory)
    mapping = read_json(path, MAX_CONFIG)
    with _errors_name(path):
        return ModelConfig.from_hf(mapping), mapping


def is_tied(tensors: Path | InMemory, mapping: Mapping[str, Any]) -> bool:
    """Returns True for a checkpoint without lm_head, unless its config says otherwise."""
    if "tie_word_embeddings" in {**mapping, **mapping.get("text_config", {})}:
        return False
    return not any(name.endswith("lm_head.weight") for name in find_tensors(tensors))


def _vision(directory: Path, tensors: Path | InMemory, mapping: Mapping[str, Any], config: ModelConfig
            ) -> Vision | None:
    """Returns the tower that the config describes, if its tensors exist."""
    try:
        with _errors_name(directory / "config.json"):
            tower = VisionConfig.from_hf(mapping, config.hidden_size)
        if tower is None or not plan_tower(tensors, tower):
            return None
        images, videos, path = _preprocessors(directory)
        with _errors_name(path):
            return Vision(tower, ImageConfig.from_hf(images, videos))
    except ModelError as error:
        logger.warning("the vision tower cannot be used, so that pictures are refused: %s", error)
        return None


def _preprocessors(directory: Path) -> tuple[Mapping[str, Any], Mapping[str, Any], Path]:
    """Reads the configs of the image and video preprocessors, and returns the path for error messages too.

    Since version 5, transformers writes one file for both, which overrides the separate files.
    """
    both = _read_optional(directory / "processor_config.json")
    images = both.get("image_processor", _read_optional(directory / "preprocessor_config.json"))
    videos = both.get("video_processor", _read_optional(directory / "video_preprocessor_config.json"))
    if not isinstance(images, Mapping) or not isinstance(videos, Mapping):
        raise ModelError("processor_config.json: image_processor and video_processor must be objects")
    return images, videos, directory / ("processor_config.json" if both else "preprocessor_config.json")


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path, MAX_CONFIG) if path.is_file() else {}


@contextmanager
def _errors_name(path: Path) -> Iterator[None]:
    """Adds the path to ModelErrors about keys."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


# Offloaded experts


class _Type(NamedTuple):
    dtype: DType
    gguf_id: int


_TYPES: Final[Mapping[str, _Type]] = {
    "F32": _Type("float32", 0), "F16": _Type("float16", 1), "BF16": _Type("bfloat16", 30)}
"""Keyed by safetensors dtype."""


def experts_in_directory(directory: Path, config: ModelConfig, dtype: DType) -> list[list[StoredExpert]]:
    """Returns the experts of each layer of a safetensors directory, stored as stacks, as fused stacks, or one by one.

    Raises ConfigError if their dtype is not `dtype`, because they are used as stored, and ModelError like
    `plan_directory`.
    """
    found = dict[str, list[StoredMatrix]]()
    for name, source in plan_directory(directory, config).items():
        if not is_stack(name):
            continue
        _check_dtype(source, dtype)
        type = _TYPES[source.dtype]
        parts = packed_parts(name) or (name,)
        rows, columns = source.shape[-2] // len(parts), source.shape[-1]
        nbytes = rows * columns * ITEM_BYTES[source.dtype]
        for expert in _split(source):
            for index, part in enumerate(parts):
                offset = expert.offset + index * nbytes
                found.setdefault(part, []).append(StoredMatrix(expert.path, offset, type.gguf_id, rows, columns))
    return _by_layer(found, config)


def _check_dtype(source: Source, dtype: DType) -> None:
    if source.dtype not in _TYPES:
        raise ConfigError(f"expert_memory is not possible with experts stored as {source.dtype}: they are used as they "
                          "are in the model's files; write a quantized file once (deltic convert), and run that",
                          "expert_memory")
    stored = _TYPES[source.dtype].dtype
    if stored != dtype:
        raise ConfigError(f"dtype {dtype}: offloaded experts are used as they are stored, as {stored}: use "
                          f"`dtype='{stored}'`", "dtype")


def _split(source: Source) -> Iterator[StoredTensor]:
    """Yields the matrices of a stack."""
    if not isinstance(source, StoredTensor):
        yield from (part for part in source.parts if isinstance(part, StoredTensor))
        return
    count = source.shape[0]
    nbytes = source.nbytes // count
    for index in range(count):
        yield StoredTensor(source.path, source.dtype, source.shape[1:], source.offset + index * nbytes, nbytes)


def experts_in_gguf(file: GgufFile, config: ModelConfig) -> list[list[StoredExpert]]:
    """Returns the experts of each layer of a GGUF file. Raises ModelError like `plan_gguf`."""
    found = dict[str, list[StoredMatrix]]()
    for part in plan_gguf(file, config):
        if not is_stack(part.target.names[0]):
            continue
        stored, columns = part.stored, part.stored.shape[-1]
        for first_row, name, rows in matrices_of(part):
            offset = stored.offset + first_row * stored.type.size(columns)
            found.setdefault(name, []).append(StoredMatrix(stored.path, offset, stored.type.id, rows, columns))
    return _by_layer(found, config)


def _by_layer(matrices: Mapping[str, list[StoredMatrix]], config: ModelConfig) -> list[list[StoredExpert]]:
    """Groups the matrices of each stack by layer and expert."""
    layers = []
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp.experts"
        stacks = [matrices[f"{prefix}.{part}_proj.weight"] for part in ("gate", "up", "down")]
        layers.append([StoredExpert(*parts) for parts in zip(*stacks, strict=True)])
    return layers
