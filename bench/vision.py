"""Encoding a picture: deltic's vision tower, plain and in 8 bits, beside transformers', in turns.

    python bench/vision.py [--size 1024] [--depth 12 --width 768 --inner 3072 --heads 12] [--repeat 3]
    python bench/vision.py --turns        # the first token of the first question about a picture, and of the second
    python bench/vision.py --device cuda  # one picture and many at once on a GPU, with its share of what that could do

Random weights; bfloat16; the text model is of the 0.8B shape. `tflop`: products and attention of one picture.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from common import record, spread
from PIL import Image
from safetensors.torch import save_file

import deltic
from deltic import LLM, SamplingParams
from deltic.config import ModelConfig
from deltic.config.vision import VisionConfig
from deltic.export.program import hf_config
from deltic.loader.dummy import random_tensors
from deltic.loader.quantize import quantize_tower
from deltic.loader.vision import expected_tower
from deltic.model.vision_tower import VisionTower, build_tower
from deltic.ops import select
from deltic.ops.cpu import use_torch_threads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("size", 1024), ("depth", 12), ("width", 768), ("inner", 3072), ("heads", 12), ("repeat", 3),
                        ("threads", 2), ("pictures", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--turns", action="store_true", help="time two turns about a picture instead")
    parser.add_argument("--limit", type=float, default=989.0, help="TFLOP/s that the GPU could do")
    args = parser.parse_args()
    config = VisionConfig(args.depth, args.width, args.inner, args.heads, 1024, 2304, 3, 16, 2, 2, 1e4, 0, 1)
    (turns if args.turns else on_gpu if args.device == "cuda" else beside_transformers)(args, config)


def beside_transformers(args: argparse.Namespace, config: VisionConfig) -> None:
    side = args.size // 16
    patches, grid = torch.randn(side * side, config.patch_values), (side, side)
    model = transformers_tower(config)
    weights = {name: tensor.detach() for name, tensor in model.state_dict(prefix="visual.").items()}
    ops = select((), "cpu", "auto", args.threads)
    use_torch_threads(ops, args.threads)
    wanted = kept(config, weights)
    plain = build_tower(config, {**wanted}, ops, torch.bfloat16)
    packed = build_tower(config, {**quantize_tower(wanted)}, ops, torch.bfloat16)
    programs: dict[str, Callable[[], torch.Tensor]] = {
        "deltic": lambda: encode(plain, patches, [grid]), "deltic q8_0": lambda: encode(packed, patches, [grid]),
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


def kept(config: VisionConfig, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights as they are loaded: norms, biases and positions float32."""
    return {name: weights[name].float() if len(shape) == 1 or "pos_embed" in name else weights[name]
            for name, shape in expected_tower(config).items()}


def on_gpu(args: argparse.Namespace, config: VisionConfig) -> None:
    """One picture, and many at once, from patches on the GPU to rows there; milliseconds by the GPU's clock."""
    side = args.size // 16
    weights = {name: (torch.randn(shape, device="cuda") * 0.02).bfloat16()
               for name, shape in expected_tower(config).items()}
    tower = build_tower(config, {**kept(config, weights)}, select((), "cuda"), torch.bfloat16)
    found: dict[str, Any] = {}
    for count in (1, args.pictures):
        patches = torch.randn(count * side * side, config.patch_values, device="cuda")
        grids, times = [(side, side)] * count, []
        for turn in range(3 + max(args.repeat, 10)):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            encode(tower, patches, grids)
            after.record()
            torch.cuda.synchronize()
            times += [before.elapsed_time(after)] if turn >= 3 else []
        work = count * tflop(config, side * side)
        found |= {f"{count} pictures, ms": spread(times), f"{count} pictures, of the limit":
                  round(work / (median(times) / 1000) / args.limit, 3)}
        del patches
    record("vision", {"task": "encode", "device": torch.cuda.get_device_name(), "size": args.size,
                      "tower": f"{args.depth} x {args.width}", "tflop": round(tflop(config, side * side), 3),
                      "limit": args.limit, **found})


def turns(args: argparse.Namespace, config: VisionConfig) -> None:
    """Seconds to the first token of a question about a picture never seen, and of the next question about it."""
    with TemporaryDirectory() as folder, model_that_sees(Path(folder), config, args.threads) as llm:
        random = np.random.default_rng(0)
        first, second, cached = list[float](), list[float](), list[int]()
        for _ in range(args.repeat):
            pixels = random.integers(0, 256, (args.size, args.size, 3), dtype=np.uint8)
            messages: list[Any] = [{"role": "user", "content": [
                {"type": "image", "image": Image.fromarray(pixels)}, {"type": "text", "text": "What is this?"}]}]
            for times in (first, second):
                began = time.perf_counter()
                done = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
                times.append(time.perf_counter() - began)
                cached.append(done.choices[0].usage.cached_tokens)
                messages += [{"role": "assistant", "content": "A picture."}, {"role": "user", "content": "And else?"}]
        record("vision", {"task": "turns", "size": args.size, "tower": f"{args.depth} x {args.width}",
                          "threads": args.threads, "first": spread(first), "second": spread(second),
                          "cached_tokens": cached[1], "ratio": round(median(first) / median(second), 1)})


def model_that_sees(folder: Path, config: VisionConfig, threads: int) -> LLM:
    """Random weights of the 0.8B shape and of the tower, with the embedded model's words."""
    shape, embedded = ModelConfig.preset("qwen3.5-0.8b"), Path(deltic.__file__).parent / "models" / "tiny"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded / name, folder)
    tower = {f"model.{name}": (torch.randn(size) * 0.02).bfloat16() for name, size in expected_tower(config).items()}
    save_file({**dict(random_tensors(shape, "bfloat16")), **tower}, folder / "model.safetensors")
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in tokens}
    marks = {"image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"]}
    outer = hf_config(shape) | marks | {"vision_config": {**asdict(config), "spatial_merge_size": config.merge_size}}
    (folder / "config.json").write_text(json.dumps(outer))
    return LLM(str(folder), threads=threads, memory="1GiB")


def encode(tower: VisionTower, patches: torch.Tensor, grids: list[tuple[int, int]]) -> torch.Tensor:
    work = tower.encode(patches, grids)
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
