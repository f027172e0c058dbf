"""Writes a checkpoint of a known shape with random weights of 4 bits, in the files of a tool that makes such.

    python bench/four_bit_files.py --kind nvfp4 DIRECTORY

Embedding, norms, convolutions and the small projections of decays and betas stay in bfloat16, as the tools' recipes
leave them. `--head` adds a matrix of logits, in 4 bits as well; the shape's own is its embedding. The tokenizer is the
embedded model's, and the config that of a text model alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from deltic.config import ModelConfig
from deltic.export.program import hf_config
from deltic.loader.dummy import random_tensors
from deltic.loader.hub import resolve

_PLAIN = ("embed_tokens.weight", "conv1d.weight", ".in_proj_a.weight", ".in_proj_b.weight")
_SCALE = 0.25
"""Times the deviation of a weight of this many columns: what a step of a code is, about."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", metavar="DIRECTORY", type=Path)
    parser.add_argument("--preset", default="qwen3.5-0.8b")
    parser.add_argument("--layers", type=int, help="keep only the first so many, for a quick look")
    parser.add_argument("--kind", choices=KINDS, default="nvfp4")
    parser.add_argument("--head", action="store_true")
    args = parser.parse_args()
    config = ModelConfig.preset(args.preset, args.layers)
    print(json.dumps({"kind": args.kind, "bytes": write(args.place, config, args.kind, args.head)}))


def write(place: Path, config: ModelConfig, kind: str, head: bool = False) -> int:
    """Writes the files; returns the bytes of the tensors. head: with a matrix of logits in 4 bits."""
    quantize, settings = KINDS[kind]
    config = replace(config, tie_word_embeddings=config.tie_word_embeddings and not head, num_mtp_layers=0)
    tensors, rng = dict[str, Tensor](), torch.Generator().manual_seed(0)
    for name, tensor in random_tensors(config, "bfloat16"):
        if tensor.dim() != 2 or name.endswith(_PLAIN):
            tensors[name] = tensor
        else:
            (rows, columns), module = tensor.shape, name.removesuffix(".weight")
            found = quantize(rows, columns, _SCALE * columns ** -0.5, rng)
            tensors |= {f"{module}.{suffix}": part.contiguous() for suffix, part in found.items()}
    place.mkdir(parents=True, exist_ok=True)
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    (place / "config.json").write_text(json.dumps({**hf_config(config), "quantization_config": settings}))
    for path in resolve(None).iterdir():
        if path.name.startswith("tokenizer") or path.suffix == ".jinja":
            shutil.copy(path, place)
    return sum(tensor.nbytes for tensor in tensors.values())


_Quantize = Callable[[int, int, float, torch.Generator], dict[str, Tensor]]


def _nvfp4(names: tuple[str, str, str], divides: bool) -> _Quantize:
    def quantize(rows: int, columns: int, step: float, rng: torch.Generator) -> dict[str, Tensor]:
        scales = torch.empty(rows, columns // 16).uniform_(64, 448, generator=rng).to(torch.float8_e4m3fn)
        factor = torch.tensor([256 / step if divides else step / 256], dtype=torch.float32)
        return dict(zip(names, (_bytes(rows, columns // 2, rng), scales, factor if divides else factor[0]),
                        strict=True))
    return quantize


def _packed(group: int) -> _Quantize:
    def quantize(rows: int, columns: int, step: float, rng: torch.Generator) -> dict[str, Tensor]:
        return {"weight_packed": _bytes(rows, columns // 2, rng).view(torch.int32),
                "weight_scale": _scales(rows, columns // group, step, rng, torch.bfloat16),
                "weight_shape": torch.tensor([rows, columns])}
    return quantize


def _gptq(group: int, order: bool) -> _Quantize:
    def quantize(rows: int, columns: int, step: float, rng: torch.Generator) -> dict[str, Tensor]:
        groups = columns // group
        found = {"qweight": _bytes(columns // 8, rows * 4, rng).view(torch.int32),
                 "scales": _scales(groups, rows, step, rng, torch.float16),
                 "qzeros": torch.full((groups, rows // 8), 0x77777777, dtype=torch.int32)}
        return found | ({"g_idx": torch.arange(columns, dtype=torch.int32) // group} if order else {})
    return quantize


def _awq(rows: int, columns: int, step: float, rng: torch.Generator) -> dict[str, Tensor]:
    groups = columns // 128
    return {"qweight": _bytes(columns, rows // 2, rng).view(torch.int32),
            "scales": _scales(groups, rows, step, rng, torch.float16),
            "qzeros": _bytes(groups, rows // 2, rng).view(torch.int32)}


def _bytes(rows: int, columns: int, rng: torch.Generator) -> Tensor:
    return torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=rng)


def _scales(rows: int, groups: int, step: float, rng: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.empty(rows, groups).uniform_(step / 2, step, generator=rng).to(dtype)


def _compressed(format: str, **weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]}


KINDS: Mapping[str, tuple[_Quantize, dict[str, Any]]] = {
    "nvfp4": (_nvfp4(("weight_packed", "weight_scale", "weight_global_scale"), True),
              _compressed("nvfp4-pack-quantized", type="float", num_bits=4, group_size=16)),
    "modelopt": (_nvfp4(("weight", "weight_scale", "weight_scale_2"), False),
                 {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    **{f"int4-{group}": (_packed(group), _compressed("pack-quantized", type="int", num_bits=4, group_size=group,
                                                     strategy="group", symmetric=True)) for group in (32, 64, 128)},
    "gptq": (_gptq(128, True), {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True,
                                "checkpoint_format": "gptq"}),
    "autoround": (_gptq(128, False), {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq",
                                      "bits": 4, "group_size": 128, "sym": True, "data_type": "int"}),
    "awq": (_awq, {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True})}

if __name__ == "__main__":
    main()
