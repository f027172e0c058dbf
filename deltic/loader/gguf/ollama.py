"""GGUF files of Ollama's converter, which contain vision tower, draft head and text model.

Names and keys are those of convert/convert_qwen3next.go (before llama-server took over). The tower is translated to
llama.cpp's names and keys; the head's names are in `names`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np

from deltic.errors import ModelError
from deltic.loader.gguf.file import GgufFile
from deltic.loader.gguf.reader import GgufTensor, concatenated

_TOWER: Final = ("v.", "mm.")
_RENAMED: Final[tuple[tuple[str, str], ...]] = (
    ("v.pos_embed.", "v.position_embd."), ("v.patch_embed.bias", "v.patch_embd.bias"), ("v.merger.norm.", "v.post_ln."),
    ("v.merger.linear_fc1.", "mm.0."), ("v.merger.linear_fc2.", "mm.2."), (".mlp.linear_fc1.", ".ffn_up."),
    (".mlp.linear_fc2.", ".ffn_down."), (".norm1.", ".ln1."), (".norm2.", ".ln2."))
"""Parts of names: Ollama's, llama.cpp's."""
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
    """Returns the vision tower of a text model's file like a separate mmproj file; None if there is none."""
    stored = {name: tensor for name, tensor in file.tensors.items() if name.startswith(_TOWER)}
    if not stored:
        return None
    tensors = {_renamed(name): tensor for name, tensor in _with_fused_qkv(stored)}
    return GgufFile(file.paths, _clip_keys(file.metadata, tensors), tensors)


def _renamed(name: str) -> str:
    for old, new in _RENAMED:
        name = name.replace(old, new)
    return name


def _with_fused_qkv(stored: Mapping[str, GgufTensor]) -> Iterator[tuple[str, GgufTensor]]:
    """Concatenates queries, keys and values of a block."""
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


def bundled_heads(names: Iterable[str]) -> int:
    """Counts the layers of a multi-token-prediction head in a text model's file."""
    heads = [name for name in names if name.startswith("mtp.")]
    layers = [int(found[1]) + 1 for name in heads if (found := re.match(r"mtp\.layers\.(\d{1,4})\.", name))]
    return max(layers, default=1 if heads else 0)
