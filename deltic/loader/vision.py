"""Weights of vision towers: in safetensors directories, in separate GGUF files (mmproj), and in Ollama's GGUF files.

Names and keys of mmproj files follow llama.cpp's converter (conversion/qwen3vl.py) and reader (tools/mtmd/clip-impl.h).
Files of Ollama's converter (convert/convert_qwen3next.go) contain vision tower, draft head and text model; their tower
is translated to llama.cpp's names and keys.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from deltic.config import DType
from deltic.config.model import ModelConfig
from deltic.config.reading import integer, number
from deltic.config.vision import ImageConfig, VideoConfig, Vision, VisionConfig
from deltic.errors import ModelError, show
from deltic.loader.files import InMemory, find_tensors
from deltic.loader.gguf.blocks import BY_NAME, BlockType, fill
from deltic.loader.gguf.file import GgufFile, GgufTensor, concatenated
from deltic.loader.gguf.quantize import quantize_in_pieces
from deltic.loader.gguf.write import NewTensor, write_gguf
from deltic.loader.names import Shape, is_unused_scale
from deltic.loader.safetensors import TORCH_DTYPES, check_stored, read_stored
from deltic.loader.tensors import Source
from deltic.ops.quantized import PackedForm
from deltic.ops.types import Block

_TOWER: Final = re.compile(r"(?:model\.)?(visual\..*)", re.DOTALL)
FLOAT32: Final = re.compile(r"norm\d?\.weight$|\.bias$|pos_embed\.weight$")
"""Pattern for names of tensors that are float32 in memory."""


def canonical_tower(name: str) -> str | None:
    """Returns the canonical name (`visual.` ...) of a tower's tensor; `None` for any other tensor."""
    found = _TOWER.fullmatch(name)
    return found[1] if found else None


def expected_tower(config: VisionConfig) -> dict[str, Shape]:
    """Returns the shape of every tensor by canonical name."""
    width, inner = config.hidden_size, config.intermediate_size
    merged = width * config.merge_size ** 2
    side = config.patch_size

    def affine(name: str, *shape: int) -> dict[str, Shape]:
        return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}

    tensors = affine("visual.patch_embed.proj", width, config.in_channels, config.temporal_patch_size, side, side)
    tensors["visual.pos_embed.weight"] = (config.num_position_embeddings, width)
    block = {**affine("norm1", width), **affine("norm2", width), **affine("attn.qkv", 3 * width, width),
             **affine("attn.proj", width, width), **affine("mlp.linear_fc1", inner, width),
             **affine("mlp.linear_fc2", width, inner)}
    for index in range(config.depth):
        tensors |= {f"visual.blocks.{index}.{name}": shape for name, shape in block.items()}
    return {**tensors, **affine("visual.merger.norm", width), **affine("visual.merger.linear_fc1", merged, merged),
            **affine("visual.merger.linear_fc2", config.out_hidden_size, merged)}


def plan_tower(directory: Path | InMemory, config: VisionConfig) -> dict[str, Source]:
    """Locates the tower's tensors by canonical name, and checks everything but their data; empty if there is no tower.

    Raises ModelError naming a tensor that is missing, unknown, doubled, or of another shape or an unsupported dtype.
    """
    expected, found = expected_tower(config), dict[str, Source]()
    for stored_name, stored in find_tensors(directory).items():
        name = canonical_tower(stored_name)
        if name is None or is_unused_scale(name):
            continue
        if name not in expected:
            raise ModelError(f"tensor {stored_name[:200]!r} has no place in the vision tower of config.json; "
                             "take the config.json that belongs to the weights, or leave out the tower "
                             "(`vision=False`)")
        if name in found:
            raise ModelError(f"tensor {name!r} is given twice; keep the files of one revision")
        found[name] = check_stored(stored_name, stored, expected[name])
    missing = [name for name in expected if name not in found]
    if found and missing:
        raise ModelError(f"{len(missing)} tensors of the vision tower are missing in {directory}, such as "
                         f"{missing[0]!r}; download all shards, or use the text model alone (`vision=False`)")
    return found


def load_tower(stored: dict[str, Source], dtype: DType, device: str | torch.device) -> dict[str, Tensor]:
    """Loads the tensors of `plan_tower`: matrices in `dtype`, norms, biases and positions in float32."""
    found = dict[str, Tensor]()
    for name, tensor in stored.items():
        kept = torch.float32 if FLOAT32.search(name) else TORCH_DTYPES[dtype]
        found[name] = read_stored(name, tensor, kept, torch.device(device))
    return found


# GGUF files


PROJECTOR: Final = "qwen3vl_merger"
TYPES: Final[Mapping[str, int]] = {"F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7}
"""Types that can be written -> general.file_type."""
_PATCH: Final = "visual.patch_embed.proj.weight"
_FRAMES: Final = ("v.patch_embd.weight", "v.patch_embd.weight.1")
"""The patch embedding in GGUF files: one convolution for each of two frames."""
_BOTH_FRAMES: Final = "v.patch_embed.weight"
"""The patch embedding in Ollama's files: one tensor with both channel axes merged."""
_TOP: Final[Mapping[str, str]] = {
    "v.patch_embd.bias": "visual.patch_embed.proj.bias", "v.position_embd.weight": "visual.pos_embed.weight",
    "v.post_ln": "visual.merger.norm", "mm.0": "visual.merger.linear_fc1", "mm.2": "visual.merger.linear_fc2"}
_BLOCK: Final[Mapping[str, str]] = {
    "ln1": "norm1", "attn_qkv": "attn.qkv", "attn_out": "attn.proj", "ln2": "norm2", "ffn_up": "mlp.linear_fc1",
    "ffn_down": "mlp.linear_fc2"}
_IN_BLOCK: Final = re.compile(r"visual\.blocks\.(\d+)\.(.+)\.(weight|bias)")
_MARK: Final = re.compile(r"mmproj", re.IGNORECASE)
_KIND: Final = re.compile(r"(?i)(?:^|[-_.])(?:bf16|f16|f32|fp16|fp32|i?q\d\w*|ud|mxfp4|model|vision)(?=[-_.]|$)")
_EPS: Final = 1e-6
_FOLDERS: Final = 3
"""Number of folders to search upwards: some repositories have one folder per type and one tower for all."""
_VIDEO_CONFIG: Final = "deltic.films"
"""deltic's own key for a video_preprocessor_config.json, which the format does not cover. Existing files use it."""


# Finding


def find_mmproj(model: Path) -> Path | None:
    """Returns the vision tower's file in the folder of a model's GGUF file, or in one of the two folders above."""
    return next(filter(None, (_find_in(folder, model) for folder in [*model.parents][:_FOLDERS])), None)


def _find_in(folder: Path, model: Path) -> Path | None:
    """Selects a file by its name: an mmproj file with the model's name (mmproj-NAME-F16.gguf, NAME.mmproj.gguf), else
    one without any name (mmproj-BF16.gguf); the first in alphabetical order."""
    named, unnamed = list[Path](), list[Path]()
    for path in sorted(folder.glob("*.gguf")):
        if not _MARK.search(path.name) or path == model:
            continue
        name = _base_name(_MARK.sub("", path.stem))
        if not name:
            unnamed.append(path)
        elif name == _base_name(model.stem):
            named.append(path)
    return next(iter([*named, *unnamed]), None)


def _base_name(stem: str) -> str:
    """Returns a file's name without weight types and separators."""
    found = _KIND.sub("", re.sub(r"-\d{5}-of-\d{5}$", "", stem))
    return re.sub(r"[-_.]+", "-", found).strip("-").lower()


# Reading


def vision_from_gguf(file: GgufFile, text: GgufFile, config: ModelConfig) -> Vision:
    """Reads the config of a tower. text: the file of the text model, whose vocabulary has the placeholder tokens.

    Raises ModelError naming the file, and the key or tensor that is absent, absurd or not supported.
    """
    try:
        return _vision(file, text, config)
    except ModelError as error:
        raise ModelError(f"{file.paths[0]}: {error}") from error


def _vision(file: GgufFile, text: GgufFile, config: ModelConfig) -> Vision:
    keys = file.metadata
    kind = keys.get("clip.vision.projector_type", keys.get("clip.projector_type"))
    if keys.get("general.architecture") != "clip" or kind != PROJECTOR:
        raise ModelError(f"is no vision tower of Qwen3.5: clip.projector_type is {show(kind)}, not {PROJECTOR!r}")
    deep = keys.get("clip.vision.is_deepstack_layers", [])
    if any(deep if isinstance(deep, list) else [True]):
        raise ModelError("clip.vision.is_deepstack_layers is not supported: this is the tower of a Qwen3-VL model")
    eps = number(keys, "clip.vision.attention.layer_norm_epsilon", 0.0, 1.0)
    if not math.isclose(eps, _EPS, rel_tol=1e-3):
        raise ModelError(f"clip.vision.attention.layer_norm_epsilon {eps} is not supported, only {_EPS}")
    positions = file.tensors.get("v.position_embd.weight")
    if positions is None:
        raise ModelError("tensor 'v.position_embd.weight' is absent; download the file again")
    plain = ImageConfig()

    def size(key: str, high: int) -> int:
        return integer(keys, f"clip.vision.{key}", 1, high)

    tower = VisionConfig(
        depth=size("block_count", 256), hidden_size=size("embedding_length", 1 << 16),
        intermediate_size=size("feed_forward_length", 1 << 18), num_heads=size("attention.head_count", 1024),
        out_hidden_size=size("projection_dim", 1 << 17), num_position_embeddings=positions.shape[0], in_channels=3,
        patch_size=size("patch_size", 256), temporal_patch_size=2,
        merge_size=size("spatial_merge_size", 16) if "clip.vision.spatial_merge_size" in keys else 2,
        rope_theta=1e4, image_token_id=_token(text, "<|image_pad|>"), video_token_id=_token(text, "<|video_pad|>"))
    if tower.out_hidden_size != config.hidden_size:
        raise ModelError(f"its rows have {tower.out_hidden_size} values (clip.vision.projection_dim), those of "
                         f"{text.paths[0].name} {config.hidden_size}: it belongs to another model")
    least, most = (size(key, 1 << 30) if f"clip.vision.{key}" in keys else default for key, default in (
        ("image_min_pixels", plain.min_pixels), ("image_max_pixels", plain.max_pixels)))
    _plan(file, tower)
    return Vision(tower, ImageConfig(least, most, _channels(keys, "image_mean", plain.mean),
                                       _channels(keys, "image_std", plain.std), _video_config(keys)))


def _video_config(keys: Mapping[str, Any]) -> VideoConfig:
    try:
        return VideoConfig.from_hf(json.loads(keys.get(_VIDEO_CONFIG, "{}")))
    except (ValueError, TypeError, AttributeError, RecursionError, ModelError) as error:
        raise ModelError(f"{_VIDEO_CONFIG} cannot be used: {error}") from error


def _token(text: GgufFile, word: str) -> int:
    words = text.metadata.get("tokenizer.ggml.tokens")
    try:
        return list(words if isinstance(words, list) else ()).index(word)
    except ValueError as error:
        raise ModelError(f"the text model {text.paths[0].name} has no token {word}, so it cannot see "
                         "pictures") from error


def _channels(keys: Mapping[str, Any], key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    given = keys.get(f"clip.vision.{key}")
    if given is None:
        return default
    values = np.asarray(given, dtype=np.float64) if isinstance(given, np.ndarray | list) else np.zeros(0)
    if values.shape != (3,) or not (np.abs(values) < 1e6).all() or (key == "image_std" and (values < 1e-6).any()):
        raise ModelError(f"clip.vision.{key} must be three numbers, not {show(given)}")
    return tuple(float(str(np.float32(value))) for value in values)


def load_mmproj(file: GgufFile, config: VisionConfig, dtype: DType, device: str | torch.device, form: PackedForm | None
                ) -> dict[str, Block]:
    """Loads the tower by canonical name: norms, biases and positions in float32, matrices in `dtype`, or still
    quantized if `form` serves their type."""
    found, shapes = dict[str, Block](), expected_tower(config)
    for name, parts in _plan(file, config).items():
        stored = parts[0]
        columns = stored.shape[-1]
        if form and len(parts) == 1 and stored.type.weights > 1 and form.serves(stored.type.name, columns):
            found[name] = form.pack(stored.type.name, stored.type.id, stored.shape[0], columns,
                                    stored.type.size(columns), stored.read)
        else:
            kept = torch.float32 if FLOAT32.search(name) else TORCH_DTYPES[dtype]
            found[name] = _read(parts, kept, shapes[name]).to(device)
    return found


def read_mmproj(file: GgufFile, config: VisionConfig, name: str) -> Tensor:
    """Returns one tensor of the tower in float32."""
    return _read(_plan(file, config)[name], torch.float32, expected_tower(config)[name])


def _read(parts: tuple[GgufTensor, ...], dtype: torch.dtype, shape: Shape) -> Tensor:
    plain = [torch.empty(part.shape, dtype=dtype) for part in parts]
    for tensor, part in zip(plain, parts, strict=True):
        try:
            fill(tensor, part.type, part.read)
        except ModelError as error:
            raise ModelError(f"{part.path}: tensor {part.name!r}: {error}") from error
    return plain[0].view(shape) if len(plain) == 1 else torch.stack(plain, 2)


def _plan(file: GgufFile, config: VisionConfig) -> dict[str, tuple[GgufTensor, ...]]:
    """Locates the stored parts of each canonical tensor, and checks everything but the data."""
    found, known = dict[str, tuple[GgufTensor, ...]](), set[str]()
    for name, shape in expected_tower(config).items():
        names, wanted = gguf_names(name), stored_shape(name, shape)
        if name == _PATCH and _BOTH_FRAMES in file.tensors:
            names, wanted = (_BOTH_FRAMES,), (shape[0] * shape[1], *shape[2:])
        missing = [each for each in names if each not in file.tensors]
        if missing:
            raise ModelError(f"tensor {missing[0]!r} is absent; download the file again")
        found[name] = tuple(file.tensors[each] for each in names)
        known.update(names)
        for part in found[name]:
            if part.shape != wanted:
                raise ModelError(f"tensor {part.name!r} has shape {list(part.shape)}, but the metadata requires "
                                 f"{list(wanted)}")
            if not part.type.readable:
                raise ModelError(f"tensor {part.name!r} is of type {part.type.name}, which is not supported; choose "
                                 "another file, such as F16 or Q8_0")
    unknown = [name for name in file.tensors if name not in known]
    if unknown:
        raise ModelError(f"tensor {unknown[0][:200]!r} has no place in the tower that the metadata describes")
    return found


# Writing


def gguf_names(name: str) -> tuple[str, ...]:
    """Returns the names in files for a canonical tensor (`vision.expected_tower`): two for the patch embedding."""
    if name == _PATCH:
        return _FRAMES
    inner = _IN_BLOCK.fullmatch(name)
    if inner:
        part = {canonical: gguf for gguf, canonical in _BLOCK.items()}[inner[2]]
        return (f"v.blk.{inner[1]}.{part}.{inner[3]}",)
    top = {canonical: gguf for gguf, canonical in _TOP.items()}
    stem, _, kind = name.rpartition(".")
    return (top[name] if name in top else f"{top[stem]}.{kind}",)


def stored_shape(name: str, shape: Shape) -> Shape:
    """Returns the shape that each stored part of a tensor has in a file."""
    return (*shape[:2], *shape[3:]) if name == _PATCH else shape


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor to write: its canonical source, and the frame of the patch embedding."""

    source: str
    frame: int | None
    target: NewTensor


def write_mmproj(path: Path, vision: Vision, name: str, type: str, read: Callable[[str], Tensor]) -> int:
    """Writes a vision tower as a file of `type` (of TYPES) for the model called `name`. Returns the file's size.

    read: returns a canonical tensor in any float type. Norms, biases and positions become F32, and so does the patch
    embedding, except in F16 files. Matrices that fit no blocks become F16. Raises ModelError for towers that the format
    does not cover.
    """
    tower = vision.tower
    if tower.temporal_patch_size != 2 or tower.rope_theta != 1e4:
        raise ModelError("GGUF files cannot describe a vision tower with temporal_patch_size "
                         f"{tower.temporal_patch_size} and rope_theta {tower.rope_theta}, only 2 and 10000")
    parts = list[_Part]()
    for source, full_shape in expected_tower(tower).items():
        shape = stored_shape(source, full_shape)
        for frame, stored_name in enumerate(gguf_names(source)):
            target = NewTensor(stored_name, _type(source, shape, type), shape)
            parts.append(_Part(source, frame if source == _PATCH else None, target))
    with ThreadPoolExecutor(2) as pool:
        def data() -> Iterator[Iterator[Any]]:
            for part in parts:
                tensor = read(part.source)
                plain = tensor if part.frame is None else tensor[:, :, part.frame]
                matrix = plain.reshape(-1, part.target.shape[-1]).contiguous()
                yield quantize_in_pieces(part.target.name, matrix, part.target.type, pool)

        return write_gguf(path, _metadata(vision, name, type), [part.target for part in parts], data())


def _type(name: str, shape: Shape, type: str) -> BlockType:
    if FLOAT32.search(name) or (name == _PATCH and type != "F16"):
        return BY_NAME["F32"]
    wanted = BY_NAME[type]
    return wanted if shape[-1] % wanted.weights == 0 else BY_NAME["F16"]


def _metadata(vision: Vision, name: str, type: str) -> dict[str, Any]:
    tower, pictures = vision.tower, vision.pictures
    of_vision: dict[str, Any] = {
        "projection_dim": tower.out_hidden_size, "image_size": tower.grid_side * tower.patch_size,
        "patch_size": tower.patch_size, "embedding_length": tower.hidden_size,
        "feed_forward_length": tower.intermediate_size, "block_count": tower.depth,
        "attention.head_count": tower.num_heads, "attention.layer_norm_epsilon": _EPS,
        "image_mean": [*pictures.mean], "image_std": [*pictures.std], "image_min_pixels": pictures.min_pixels,
        "image_max_pixels": pictures.max_pixels, "spatial_merge_size": tower.merge_size,
        "is_deepstack_layers": [False] * tower.depth}
    return {"general.architecture": "clip", "general.type": "mmproj", "general.name": name,
            "general.file_type": TYPES[type], "general.quantization_version": 2, "clip.has_vision_encoder": True,
            "clip.projector_type": PROJECTOR, "clip.use_gelu": True, _VIDEO_CONFIG: json.dumps(pictures.videos.to_hf()),
            **{f"clip.vision.{key}": value for key, value in of_vision.items()}}


# Ollama's files


_TOWER_PREFIXES: Final = ("v.", "mm.")
_RENAMED: Final[tuple[tuple[str, str], ...]] = (
    ("v.pos_embed.", "v.position_embd."), ("v.patch_embed.bias", "v.patch_embd.bias"), ("v.merger.norm.", "v.post_ln."),
    ("v.merger.linear_fc1.", "mm.0."), ("v.merger.linear_fc2.", "mm.2."), (".mlp.linear_fc1.", ".ffn_up."),
    (".mlp.linear_fc2.", ".ffn_down."), (".norm1.", ".ln1."), (".norm2.", ".ln2."))
"""Parts of names: Ollama's -> llama.cpp's."""
_QUERIES: Final = re.compile(r"(v\.blk\.\d+\.attn_)q(\.weight|\.bias)")
_KEYS: Final[Mapping[str, str]] = {
    "vision.block_count": "block_count", "vision.embedding_length": "embedding_length",
    "vision.attention.head_count": "attention.head_count", "vision.patch_size": "patch_size",
    "vision.spatial_merge_size": "spatial_merge_size", "vision.shortest_edge": "image_min_pixels",
    "vision.longest_edge": "image_max_pixels", "vision.image_mean": "image_mean", "vision.image_std": "image_std",
    "vision.attention.layer_norm_epsilon": "attention.layer_norm_epsilon", "embedding_length": "projection_dim",
    "vision.feed_forward_length": "feed_forward_length"}
"""Keys after the architecture -> keys after clip.vision."""


def bundled_tower(file: GgufFile) -> GgufFile | None:
    """Returns the vision tower of a text model's file in the form of an mmproj file; None if there is none."""
    stored = {name: tensor for name, tensor in file.tensors.items() if name.startswith(_TOWER_PREFIXES)}
    if not stored:
        return None
    tensors = {_renamed(name): tensor for name, tensor in _with_fused_qkv(stored)}
    return GgufFile(file.paths, _clip_keys(file.metadata, tensors), tensors)


def _renamed(name: str) -> str:
    for old, new in _RENAMED:
        name = name.replace(old, new)
    return name


def _with_fused_qkv(stored: Mapping[str, GgufTensor]) -> Iterator[tuple[str, GgufTensor]]:
    """Concatenates the query, key and value tensors of each block."""
    used = set[str]()
    for name, tensor in stored.items():
        found = _QUERIES.fullmatch(name)
        if found:
            names = [f"{found[1]}{part}{found[2]}" for part in "qkv"]
            parts = [stored[each] for each in names if each in stored]
            if len(parts) < len(names):
                raise ModelError(f"{tensor.path}: {name!r} has no keys or values; download the file again")
            used.update(names)
            yield f"{found[1]}qkv{found[2]}", concatenated(f"{found[1]}qkv{found[2]}", parts)
    yield from ((name, tensor) for name, tensor in stored.items() if name not in used)


def _clip_keys(metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """Returns the metadata that llama.cpp's converter would write. Ollama omits default values."""
    prefix = f"{metadata.get('general.architecture')}."
    found = {new: metadata[prefix + old] for old, new in _KEYS.items() if prefix + old in metadata}
    inner = tensors.get("v.blk.0.ffn_up.weight")
    plain = {"attention.layer_norm_epsilon": 1e-6, **({"feed_forward_length": inner.shape[0]} if inner else {})}
    deep = np.size(metadata.get(prefix + "vision.deepstack_visual_indexes", ())) > 0
    return {"general.architecture": "clip", "clip.projector_type": "qwen3vl_merger",
            "clip.vision.is_deepstack_layers": [deep],
            **{f"clip.vision.{key}": value for key, value in {**plain, **found}.items()}}
