"""Names, shapes and loading of a vision tower in a safetensors directory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from deltic.config import DType
from deltic.config.vision import VisionConfig
from deltic.errors import ModelError
from deltic.loader.files import InMemory, StoredTensor, find_tensors
from deltic.loader.names import Shape
from deltic.loader.safetensors import TORCH_DTYPES, check_stored, read_stored

_TOWER: Final = re.compile(r"(?:model\.)?(visual\..*)", re.DOTALL)
FLOAT32: Final = re.compile(r"norm\d?\.weight$|\.bias$|pos_embed\.weight$")
"""Names of tensors that are float32 in memory."""


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


def plan_tower(directory: Path | InMemory, config: VisionConfig) -> dict[str, StoredTensor]:
    """Locates the tower's tensors by canonical name, and checks everything but their data; empty if there is no tower.

    Raises ModelError naming a tensor that is missing, unknown, doubled, or of another shape or an unsupported dtype.
    """
    expected, found = expected_tower(config), dict[str, StoredTensor]()
    for stored_name, stored in find_tensors(directory).items():
        name = canonical_tower(stored_name)
        if name is None:
            continue
        if name not in expected:
            raise ModelError(f"tensor {stored_name[:200]!r} has no place in the vision tower of config.json; "
                             "take the config.json that belongs to the weights, or leave out the tower "
                             "(`vision=False`)")
        if name in found:
            raise ModelError(f"tensor {name!r} is given twice; keep the files of one revision")
        check_stored(stored_name, stored, expected[name])
        found[name] = stored
    missing = [name for name in expected if name not in found]
    if found and missing:
        raise ModelError(f"{len(missing)} tensors of the vision tower are missing in {directory}, such as "
                         f"{missing[0]!r}; download all shards, or use the text model alone (`vision=False`)")
    return found


def load_tower(stored: dict[str, StoredTensor], dtype: DType, device: str | torch.device) -> dict[str, Tensor]:
    """Loads the tensors of `plan_tower`: matrices in `dtype`, norms, biases and positions in float32."""
    found = dict[str, Tensor]()
    for name, tensor in stored.items():
        kept = torch.float32 if FLOAT32.search(name) else TORCH_DTYPES[dtype]
        found[name] = read_stored(name, tensor, kept, torch.device(device))
    return found
