"""Encoding a picture: deltic's vision tower, plain and in 8 bits, beside transformers', in turns.

    python bench/vision.py [--size 1024] [--depth 12 --width 768 --inner 3072 --heads 12] [--repeat 3]

Random weights; bfloat16. `tflop`: products and attention of one picture.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from common import record, spread

from deltic.config.vision import VisionConfig
from deltic.model.vision import Tower, build_tower
from deltic.ops import select
from deltic.ops.cpu import use_torch_threads
from deltic.weights.quant import quantize_tower
from deltic.weights.vision import expected_tower


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("size", 1024), ("depth", 12), ("width", 768), ("inner", 3072), ("heads", 12), ("repeat", 3),
                        ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    config = VisionConfig(args.depth, args.width, args.inner, args.heads, 1024, 2304, 3, 16, 2, 2, 1e4, 0, 1)
    side = args.size // 16
    patches, grid = torch.randn(side * side, config.patch_values), (side, side)
    model = transformers_tower(config)
    weights = {name: tensor.detach() for name, tensor in model.state_dict(prefix="visual.").items()}
    ops = select((), "cpu", "auto", args.threads)
    use_torch_threads(ops, args.threads)
    wanted = {name: weights[name].float() if tensor == () or len(tensor) == 1 or "pos_embed" in name else weights[name]
              for name, tensor in expected_tower(config).items()}
    plain = build_tower(config, {**wanted}, ops, torch.bfloat16)
    packed = build_tower(config, {**quantize_tower(wanted)}, ops, torch.bfloat16)
    programs: dict[str, Callable[[], torch.Tensor]] = {
        "deltic": lambda: encode(plain, patches, grid), "deltic q8_0": lambda: encode(packed, patches, grid),
        "transformers": lambda: theirs(model, patches, grid)}
    expected = programs["transformers"]()
    errors = {name: float((run() - expected).norm() / expected.norm()) for name, run in programs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(args.repeat):
        for name in (list(programs) if turn % 2 else list(programs)[::-1]):
            began = time.perf_counter()
            programs[name]()
            seconds[name].append(time.perf_counter() - began)
    record("vision", {"task": "encode", "size": args.size, "tower": f"{args.depth} x {args.width}",
                      "tflop": round(tflop(config, side * side), 3), "threads": args.threads, "relative_error": errors,
                      **{name: spread(values) for name, values in seconds.items()}})


def encode(tower: Tower, patches: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    work = tower.encode(patches, [grid])
    while True:
        try:
            next(work)
        except StopIteration as done:
            rows: torch.Tensor = done.value
            return rows


def transformers_tower(config: VisionConfig) -> Any:
    from transformers import Qwen3_5VisionConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

    torch.manual_seed(0)
    made = Qwen3_5VisionConfig(depth=config.depth, hidden_size=config.hidden_size, num_heads=config.num_heads,
                               intermediate_size=config.intermediate_size, out_hidden_size=config.out_hidden_size)
    model: Any = Qwen3_5VisionModel(made)
    return model.to(torch.bfloat16).eval()


@torch.inference_mode()
def theirs(model: Any, patches: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    rows: torch.Tensor = model(patches.bfloat16(), grid_thw=torch.tensor([[1, *grid]])).pooler_output
    return rows.float()


def tflop(config: VisionConfig, patches: int) -> float:
    width, merged = config.hidden_size, config.hidden_size * config.merge_size ** 2
    block = patches * width * (4 * width + 2 * config.intermediate_size) + 2 * patches ** 2 * width
    rest = patches * width * config.patch_values + patches // 4 * merged * (merged + config.out_hidden_size)
    return 2 * (config.depth * block + rest) / 1e12


if __name__ == "__main__":
    main()
