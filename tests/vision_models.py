"""A random model that sees, with the embedded one's words, and pictures to ask it about."""

from __future__ import annotations

import base64
import io
import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import transformers_vision_model
from test_chat_support import QWEN_LIKE

import deltic
from deltic.config.vision import ImageConfig, VisionConfig
from deltic.params import SamplingParams
from deltic.vision.images import Pixels, pixels, target_size

TINY = Path(deltic.__file__).parent / "models" / "tiny"
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that sees, with the embedded model's vocabulary. All files of tests share it: do not change it."""
    return _seeing_model(tmp_path_factory.getbasetemp())


@cache
def _seeing_model(base: Path) -> Path:
    place = base / "seeing-model"
    place.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, place)
    tokens = json.loads((place / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in tokens["added_tokens"]}
    config = json.loads((place / "tokenizer_config.json").read_text())
    (place / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": QWEN_LIKE}))
    (place / "preprocessor_config.json").write_text(json.dumps({"size": {
        "shortest_edge": 8 * 8 * 4, "longest_edge": 8 * 8 * 60}, "patch_size": 4, "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5]}))
    (place / "video_preprocessor_config.json").write_text(json.dumps({"size": {
        "shortest_edge": 8 * 8 * 4, "longest_edge": 8 * 8 * 60}}))
    transformers_vision_model(place, vocabulary=8 + max(ids.values()),
                              image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"])
    return place


def drawing(seed: int, width: int = 40, height: int = 24) -> Image.Image:
    random = np.random.default_rng(seed)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))


def picture(images: Sequence[Image.Image], config: ImageConfig, vision: VisionConfig,
            size: tuple[int, int] | None = None) -> Pixels:
    """As transformers scales it, in the plainest way. size: height and width; None: those of the first alone."""
    height, width = size or target_size(images[0].height, images[0].width, config, vision)
    return pixels([np.asarray(image.resize((width, height), Image.Resampling.BICUBIC)) for image in images], vision)


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def data_url(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


def shows(image: Any, text: str = "What is this?") -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}
