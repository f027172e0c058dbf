"""Small models as quantizers write them, and the numbers that their weights stand for.

A quantizer takes the weight of a module, bfloat16 [out, in], and returns the tensors of the module in a file, by the
ends of their names, and the numbers, float32 and bfloat16, as its own tool dequantizes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support import same_logits, session_over, transformers_vision_model
from torch import Tensor

from deltic.config import EngineConfig, ModelConfig
from deltic.engine.loading import load
from deltic.loader.dummy import random_head
from deltic.loader.model_files import ModelFiles, open_model

Quantizer = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor, Tensor]]

SHAPE: dict[str, Any] = {
    "hidden_size": 64, "head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
    "mtp_num_hidden_layers": 1}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3_5", {**SHAPE, "intermediate_size": 160}),
    "experts": ("qwen3_5_moe", {**SHAPE, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 96})}
TOWER: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
_QUANTIZED = re.compile(r"(in_proj_qkv|in_proj_z|out_proj|[qkvo]_proj|(gate|up|down)_proj|lm_head|attn\.qkv|attn\.proj|"
                        r"linear_fc[12])\.weight$")
_STACK = re.compile(r"(.*\.mlp\.experts\.)(gate_up|gate|up|down)_proj(\.weight)?$")


@dataclass(frozen=True)
class Written:
    """A quantized model. plain: a directory with its numbers, in float32, and `rounded`, in bfloat16. theirs: the model
    of transformers with these numbers in float32. count: quantized matrices."""

    place: Path
    plain: Path
    rounded: Path
    theirs: Any
    count: int


def write_model(base: Path, kind: str, quantize: Quantizer, settings: Mapping[str, Any], *, fused: bool = False,
                kept: str = r"layers\.1\.", extra: Mapping[str, Any] | None = None) -> Written:
    """Writes a model with a draft head and a vision tower.

    settings: its quantization_config. fused: experts are in one tensor, as transformers has them. kept: modules that
    stay as they are. extra: files, by name.
    """
    family, shape = KINDS[kind]
    places = {name: base / name for name in ("quantized", "plain", "rounded")}
    theirs = transformers_vision_model(places["plain"], family=family, text=shape, **TOWER)
    own = json.loads((places["plain"] / "config.json").read_text())
    tensors = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    text = ModelConfig.from_hf(own)
    tensors |= {name: tensor.float() for name, tensor in random_head(text, "float32").items()}
    tensors = {name: tensor.bfloat16() if _quantizes(name, kept) else tensor for name, tensor in tensors.items()}
    stored, numbers, rounded, count = dict[str, Tensor](), dict[str, Tensor](), dict[str, Tensor](), 0
    for name, tensor in tensors.items():
        if not _quantizes(name, kept):
            stored[name] = numbers[name] = rounded[name] = tensor
            continue
        count += 1
        stored |= _write(name, tensor, quantize, numbers, rounded, fused)
    for place, content in ((places["quantized"], stored), (places["plain"], numbers), (places["rounded"], rounded)):
        place.mkdir(exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in content.items()}, place / "model.safetensors")
        (place / "config.json").write_text(json.dumps(own))
        (place / "preprocessor_config.json").write_text(json.dumps({"patch_size": 4}))
    if settings:
        (places["quantized"] / "config.json").write_text(json.dumps({**own, "quantization_config": settings}))
    for file, content in (extra or {}).items():
        (places["quantized"] / file).write_text(json.dumps(content))
    result = theirs.load_state_dict({name: tensor.float() for name, tensor in numbers.items()
                                     if not name.startswith("mtp.")}, strict=False)
    assert not result.unexpected_keys and not result.missing_keys, result
    return Written(places["quantized"], places["plain"], places["rounded"], theirs, count)


def _quantizes(name: str, kept: str) -> bool:
    return bool(_QUANTIZED.search(name) or _STACK.fullmatch(name)) and not re.search(kept, name)


def _write(name: str, tensor: Tensor, quantize: Quantizer, numbers: dict[str, Tensor], rounded: dict[str, Tensor],
           fused: bool) -> dict[str, Tensor]:
    """Quantizes a matrix, or a stack; returns its tensors by name."""
    stack = _STACK.fullmatch(name)
    if not stack:
        module = name.removesuffix(".weight")
        found, numbers[name], rounded[name] = quantize(module, tensor)
        return {f"{module}.{suffix}": part for suffix, part in found.items()}
    parts = {stack[2]: tensor}
    if stack[2] == "gate_up" and not fused:
        parts = dict(zip(("gate", "up"), tensor.chunk(2, 1), strict=True))
    stored, halves = dict[str, Tensor](), list[tuple[Tensor, Tensor]]()
    for part, matrices in parts.items():
        made = [quantize(f"{stack[1]}{index}.{part}_proj", one.contiguous()) for index, one in enumerate(matrices)]
        halves.append((torch.stack([each[1] for each in made]), torch.stack([each[2] for each in made])))
        for suffix in made[0][0]:
            each = [found[suffix] for found, _, _ in made]
            if fused:
                stored[f"{stack[1]}{part}_proj{suffix.removeprefix('weight')}"] = torch.stack(each)
            else:
                stored |= {f"{stack[1]}{index}.{part}_proj.{suffix}": own for index, own in enumerate(each)}
    numbers[name], rounded[name] = (torch.cat(list(found), 1) for found in zip(*halves, strict=True))
    return stored


def all_weights(files: ModelFiles, dtype: Any) -> dict[str, Any]:
    """Text model, draft head and tower."""
    head, tower = files.load_head(dtype, "cpu"), files.load_tower(dtype, "cpu")
    assert head and tower
    return {**files.load(dtype, "cpu", None), **head, **tower}


def check_weights(written: Written) -> None:
    """The numbers are the tool's, bit for bit."""
    for dtype, place in (("float32", written.plain), ("bfloat16", written.rounded)):
        found = all_weights(open_model(written.place, progress=False), dtype)
        wanted = all_weights(open_model(place, progress=False), dtype)
        assert found.keys() == wanted.keys()
        wrong = [name for name in wanted if not torch.equal(found[name], wanted[name])]
        assert not wrong, (dtype, wrong)
    assert written.count > 20


def check_logits(written: Written) -> None:
    """Those of transformers with these numbers. Of all ops the reference rounds least, like transformers itself."""
    options = EngineConfig(dtype="float32", memory="8MiB", threads=1, ops=("reference",))
    ours = load(str(written.place), options)
    tokens = torch.randint(0, ours.config.vocab_size - 8, (24,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = written.theirs(tokens[None], use_cache=False).logits[0].float()
    found = session_over(ours, batch=2, budget=512).prefill(tokens.tolist(), all_logits=True)
    same_logits(expected, found, 1e-4)
