"""A vision tower on a GPU: the rows that a CPU gives, alone and beside others, and an answer about a picture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_vision_tower import GRIDS, encode
from vision_models import GREEDY, directory, drawing, shows

from deltic import LLM
from deltic.config.vision import VisionConfig
from deltic.loader.disk import read_json
from deltic.loader.vision import load_tower, plan_tower
from deltic.model.vision_tower import VisionTower, build_tower
from deltic.ops import select

if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)
__all__ = ["directory"]
TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2}


def tower_on(directory: Path, device: str, dtype: str) -> VisionTower:
    mapping = read_json(directory / "config.json")
    config = VisionConfig.from_hf(mapping, mapping["text_config"]["hidden_size"])
    assert config is not None
    weights = load_tower(plan_tower(directory, config), dtype, device)  # type: ignore[arg-type]
    return build_tower(config, {**weights}, select((), device), getattr(torch, dtype))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_embeddings_equal_the_cpu(directory: Path, dtype: str) -> None:
    here, there = tower_on(directory, "cpu", "float32"), tower_on(directory, "cuda", dtype)
    patches = torch.randn(sum(r * c for r, c in GRIDS), here.config.patch_values)
    wanted, found = encode(here, patches, GRIDS), encode(there, patches.cuda(), GRIDS).cpu()
    assert found.dtype == torch.float32
    assert (found - wanted).norm() < TOLERANCE[dtype] * wanted.norm()
    first = GRIDS[0][0] * GRIDS[0][1]
    alone = encode(there, patches[:first].cuda(), GRIDS[:1]).cpu()
    assert (found[:first // 4] - alone).norm() < TOLERANCE[dtype] * alone.norm()


def test_answer_about_an_image(directory: Path) -> None:
    texts = set()
    for device in ("cpu", "cuda"):
        with LLM(str(directory), device=device, dtype="float32", memory="64MiB") as llm:
            first = llm.chat([shows(drawing(1))], GREEDY)
            again = llm.chat([shows(drawing(1)), {"role": "assistant", "content": first.text},
                              {"role": "user", "content": "And?"}], GREEDY)
            assert llm.engine.pictures and llm.engine.pictures.encoded == 1
            texts.add((first.text, again.text))
    assert len(texts) == 1
