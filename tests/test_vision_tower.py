"""The vision tower, its positions and its pictures against transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import transformers_vision_model
from vision_models import picture

from deltic.config import Limits
from deltic.config.vision import ImageConfig, VideoConfig, Vision, VisionConfig
from deltic.errors import ModelError, RequestError
from deltic.loader.disk import read_json
from deltic.loader.model_files import open_model
from deltic.loader.quantize import quantize_tower
from deltic.loader.vision import load_tower, plan_tower
from deltic.model.vision_tower import VisionTower, build_tower
from deltic.ops import backends
from deltic.ops.quantized import QTensor
from deltic.vision.images import Video, patches_of, target_size
from deltic.vision.prompt import Reading, rotary_positions

GRIDS = [(2, 2), (4, 6), (10, 2), (6, 14), (2, 8)]


def tower_of(directory: Path, backend: str = "torch", dtype: str = "float32") -> VisionTower:
    mapping = read_json(directory / "config.json")
    config = VisionConfig.from_hf(mapping, mapping["text_config"]["hidden_size"])
    assert config is not None
    weights = load_tower(plan_tower(directory, config), dtype, "cpu")
    return build_tower(config, {**weights}, backends()[backend], getattr(torch, dtype))


def encode(tower: VisionTower, patches: torch.Tensor, grids: list[tuple[int, int]]) -> torch.Tensor:
    work = tower.encode(patches, grids)
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Any, Path]]]:
    found = {}
    for name, changes in {"even": {}, "odd": {"depth": 3, "hidden_size": 60, "num_heads": 5, "intermediate_size": 72,
                                              "patch_size": 6, "num_position_embeddings": 49}}.items():
        directory = tmp_path_factory.mktemp(name)
        found[name] = (transformers_vision_model(directory, **changes), directory)
    yield found


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("name", ["even", "odd"])
def test_rows(models: dict[str, tuple[Any, Path]], name: str, backend: str) -> None:
    model, directory = models[name]
    tower = tower_of(directory, backend)
    generator = torch.Generator().manual_seed(3)
    patches = torch.randn(sum(r * c for r, c in GRIDS), tower.config.patch_values, generator=generator)
    with torch.no_grad():
        grid = torch.tensor([[1, rows, columns] for rows, columns in GRIDS])
        expected = model.model.visual(patches, grid_thw=grid).pooler_output
    found = encode(tower, patches, GRIDS)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 2e-5 * expected.abs().max()


def swapped(right: Any) -> Any:
    def turns(tower: VisionTower, grid: tuple[int, int]) -> torch.Tensor:
        return torch.cat(right(tower, grid).chunk(2, -1)[::-1], -1)
    return turns


def in_reading_order(right: Any) -> Any:
    def places(tower: VisionTower, grid: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        count = torch.arange(grid[0] * grid[1])
        return count // grid[1], count % grid[1]
    return places


def not_interpolated(right: Any) -> Any:
    def positions(tower: VisionTower, grid: tuple[int, int], part: slice) -> torch.Tensor:
        side = tower.config.grid_side
        rows, columns = (places[part] for places in tower._places(grid))
        return tower.positions[rows.clamp(max=side - 1) * side + columns.clamp(max=side - 1)]
    return positions


def to_the_other_corners(right: Any) -> Any:
    return lambda tower, grid, part: right(tower, grid, slice(None)).flip(0)[part]


MISTAKES = [("_turns", swapped), ("_places", in_reading_order), ("_positions", not_interpolated),
            ("_positions", to_the_other_corners), ("_turns", lambda right: lambda *it: 0 * right(*it)),
            ("_norm", lambda right: lambda tower, x, _: right(tower, x, tower.blocks.layers[0].output_norm))]


@pytest.mark.parametrize(("part", "mistake"), MISTAKES)
def test_mistakes_are_noticed(models: dict[str, tuple[Any, Path]], part: str, mistake: Any,
                              monkeypatch: pytest.MonkeyPatch) -> None:
    tower = tower_of(models["even"][1])
    patches = torch.randn(sum(r * c for r, c in GRIDS), tower.config.patch_values)
    right = encode(tower, patches, GRIDS)
    monkeypatch.setattr(VisionTower, part, mistake(getattr(VisionTower, part)))
    assert (right - encode(tower, patches, GRIDS)).abs().max() > 1e-3 * right.abs().max()


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_batched_pictures_equal_single_ones(models: dict[str, tuple[Any, Path]], backend: str) -> None:
    tower = tower_of(models["even"][1], backend)
    patches = torch.randn(sum(r * c for r, c in GRIDS), tower.config.patch_values)
    sizes = [rows * columns for rows, columns in GRIDS]
    together = encode(tower, patches, GRIDS).split([size // 4 for size in sizes])
    for part, grid, found in zip(patches.split(sizes), GRIDS, together, strict=True):
        alone = encode(tower, part, [grid])
        assert torch.allclose(alone, found, atol=1e-5 * float(alone.abs().max()))
        assert torch.equal(alone, encode(tower, part, [grid]))


# Pictures


def drawing(width: int, height: int, seed: int = 0) -> Image.Image:
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (max(height // 7, 1), max(width // 7, 1), 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)


def vision_shape(**changes: Any) -> VisionConfig:
    shape = VisionConfig(2, 48, 100, 4, 64, 36, 3, 16, 2, 2, 1e4, 1, 2)
    return replace(shape, **changes)


def test_patches_equal_transformers() -> None:
    """210 sizes: equal grids, and values within 1e-6."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    random = Random(5)
    config, vision = ImageConfig(min_pixels=4096, max_pixels=160 * 160), vision_shape()
    processor = Qwen2VLImageProcessorPil(patch_size=16, size={"shortest_edge": 4096, "longest_edge": 160 * 160},
                                         image_mean=[0.5] * 3, image_std=[0.5] * 3)
    sizes = [(1, 1), (1, 200), (200, 1), (16, 16), (32, 32), (160, 160), (161, 159), (31, 33), (3000, 20), (47, 48)]
    sizes += [(random.randint(1, 400), random.randint(2, 400)) for _ in range(200)]
    for index, (width, height) in enumerate(sizes):
        if max(width, height) > 200 * min(width, height):
            width = height
        image = drawing(width, height, index)
        expected = processor(images=[image], return_tensors="np")
        found = picture([image], config, vision)
        assert (1, *found.grid) == tuple(expected["image_grid_thw"][0]), (width, height)
        assert found.tokens == found.grid[0] * found.grid[1] // 4
        values = patches_of(found, config, vision)
        assert np.abs(values - expected["pixel_values"]).max() < 1e-6, (width, height)


@pytest.mark.parametrize("said", [{}, {"cap_pixels_per_frame": True, "max_video_tokens": 20},
                                  {"cap_pixels_per_frame": True}])
def test_video_frame_sizes_equal_transformers(said: dict[str, Any]) -> None:
    """An odd number of frames is counted without the repeated last one."""
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    random, vision = Random(7), vision_shape(patch_size=2)
    said = {"size": {"shortest_edge": 600, "longest_edge": 2400}, **said}
    config, processor = ImageConfig(videos=VideoConfig.from_hf(said)), Qwen3VLVideoProcessor(patch_size=2, **said)
    for count in [*range(2, 12)] * 6:
        width, height = random.randint(4, 60), random.randint(4, 60)
        reading = Reading(Vision(vision, config), lambda text: [1], Limits(max_pictures=99), 10 ** 6)
        reading.see({"video": [Image.new("RGB", (width, height))] * count}, "video", "it")
        found, = reading.read(None).values()
        assert isinstance(found, Video) and len(found.parts) == (count + 1) // 2
        patches = processor.get_num_of_video_patches(count, height, width)
        assert sum(math.prod(part.grid) for part in found.parts) == patches, (count, width, height)


def test_extreme_aspect_ratios_are_refused() -> None:
    with pytest.raises(RequestError, match="1 x 201 pixels has an aspect ratio above 200"):
        target_size(201, 1, ImageConfig(), vision_shape())


def test_digest_depends_on_pixels_and_grid() -> None:
    config, vision = ImageConfig(min_pixels=1024), vision_shape()
    wide, tall = picture([drawing(64, 32)], config, vision), picture([drawing(32, 64)], config, vision)
    other = picture([drawing(64, 32, 1)], config, vision)
    plain = Image.new("RGB", (64, 32), "red"), Image.new("RGB", (32, 64), "red")
    red = [picture([image], config, vision).digest for image in plain]
    assert len({wide.digest, tall.digest, other.digest, *red}) == 5
    assert picture([drawing(64, 32)], config, vision).digest == wide.digest


# Positions


def test_positions_equal_transformers(models: dict[str, tuple[Any, Path]]) -> None:
    """500 random conversations with pictures and videos."""
    model, _ = models["even"]
    random = Random(9)
    for _ in range(500):
        kinds, spans = list[int](), list[tuple[int, tuple[int, int]]]()
        grids: dict[int, list[list[int]]] = {1: [], 2: []}
        kinds += [0] * random.randint(0, 6)
        for _ in range(random.randint(1, 4)):
            kind, rows, columns = random.choice((1, 1, 2)), random.randint(1, 7), random.randint(1, 7)
            parts = random.randint(1, 3) if kind == 2 else 1
            grids[kind].append([parts, 2 * rows, 2 * columns])
            for _ in range(parts):
                spans.append((len(kinds), (rows, columns)))
                kinds += [kind] * (rows * columns) + [0] * random.randint(1, 9)
        ids = torch.zeros(1, len(kinds), dtype=torch.int64)
        given = {key: torch.tensor(grids[kind]) for kind, key in ((1, "image_grid_thw"), (2, "video_grid_thw"))
                 if grids[kind]}
        expected, delta = model.model.get_rope_index(ids, torch.tensor([kinds]), **given)
        found, offset = rotary_positions(len(kinds), spans)
        assert torch.tensor(found).equal(expected[:, 0])
        assert offset == int(delta)


# Configs and files


@pytest.mark.parametrize(("change", "message"), [
    ({"depth": 0}, "depth must be an integer from 1"),
    ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ({"num_heads": 5}, "hidden_size \\(48\\) must be num_heads \\(5\\)"),
    ({"num_position_embeddings": 35}, "num_position_embeddings must be a square"),
    ({"out_hidden_size": 8}, "out_hidden_size is 8, but the text model's hidden_size"),
    ({"deepstack_visual_indexes": [1]}, "deepstack_visual_indexes \\[1\\] is not supported"),
])
def test_invalid_vision_configs(models: dict[str, tuple[Any, Path]], change: dict[str, Any], message: str) -> None:
    mapping = read_json(models["even"][1] / "config.json")
    with pytest.raises(ModelError, match=message):
        VisionConfig.from_hf({**mapping, "vision_config": {**mapping["vision_config"], **change}},
                             mapping["text_config"]["hidden_size"])


SAID: dict[str, Any] = {"size": {"shortest_edge": 4096, "longest_edge": 65536}, "image_mean": [0.5] * 3,
                        "image_std": [0.25] * 3}


def test_preprocessor_config_files(models: dict[str, tuple[Any, Path]], tmp_path: Path) -> None:
    """One file each for images and videos, or one for both, which takes precedence."""
    for file in models["even"][1].iterdir():
        (tmp_path / file.name).symlink_to(file)
    other = {**SAID, "size": {"shortest_edge": 1024, "longest_edge": 2048}}

    def found(**files: Any) -> ImageConfig:
        for name, said in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(said))
        vision = open_model(str(tmp_path)).vision
        assert vision
        return vision.pictures

    assert found() == ImageConfig()
    expected = ImageConfig(4096, 65536, (0.5,) * 3, (0.25,) * 3, VideoConfig((1024, 2048)))
    assert found(preprocessor_config=SAID, video_preprocessor_config=other) == expected
    assert found(processor_config={"processor_class": "Qwen3VLProcessor"}) == expected
    swapped = replace(expected, min_pixels=1024, max_pixels=2048, videos=VideoConfig((4096, 65536)))
    assert found(processor_config={"image_processor": other, "video_processor": SAID}) == swapped


@pytest.mark.parametrize("left_out", [*SAID, None])
def test_missing_keys_have_transformers_defaults(left_out: str | None) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    said = {key: value for key, value in SAID.items() if left_out in SAID and key != left_out} | {"patch_size": 16}
    theirs, ours = Qwen2VLImageProcessorPil(**json.loads(json.dumps(said))), ImageConfig.from_hf(said, {})
    assert (ours.min_pixels, ours.max_pixels) == (theirs.size["shortest_edge"], theirs.size["longest_edge"])
    assert (ours.mean, ours.std) == (tuple(theirs.image_mean), tuple(theirs.image_std))


def test_old_size_keys_take_precedence() -> None:
    """As in Qwen2VLImageProcessor: files of Qwen2-VL have both."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    for older in ({"min_pixels": 3136}, {"max_pixels": 20000}, {"min_pixels": 3136, "max_pixels": 20000}):
        ours = ImageConfig.from_hf({**SAID, **older}, {})
        theirs = Qwen2VLImageProcessorPil(size={**SAID["size"]}, **older).size
        assert (ours.min_pixels, ours.max_pixels) == (theirs["shortest_edge"], theirs["longest_edge"])


@pytest.mark.parametrize(("change", "message"), [
    ({"rescale_factor": 1 / 127.5}, "rescale_factor .* is not supported, only 1 / 255"),
    ({"resample": 2}, r"resample 2 is not supported, only 3 \(bicubic\)"),
    ({"do_normalize": False}, "do_normalize false is not supported"),
    ({"size": {"height": 224, "width": 224}}, "size must be an object of shortest_edge and longest_edge")])
def test_invalid_preprocessor_configs(change: dict[str, Any], message: str) -> None:
    fine = {**SAID, "resample": 3, "rescale_factor": 0.00392156862745098, "do_normalize": True}
    assert ImageConfig.from_hf(fine, fine).videos == VideoConfig((4096, 65536))
    for pair in ((change, {}), ({}, change)):
        with pytest.raises(ModelError, match=message):
            ImageConfig.from_hf(*pair)
    with pytest.raises(ModelError, match="videos must be those of images"):
        ImageConfig.from_hf(fine, {**fine, "image_mean": [0.4] * 3})


def test_in_8_bits(tmp_path: Path) -> None:
    transformers_vision_model(tmp_path, hidden_size=64, intermediate_size=96, patch_size=8)
    mapping = read_json(tmp_path / "config.json")
    config = VisionConfig.from_hf(mapping, mapping["text_config"]["hidden_size"])
    assert config
    weights = quantize_tower(load_tower(plan_tower(tmp_path, config), "float32", "cpu"))
    packed = [name for name, weight in weights.items() if isinstance(weight, QTensor)]
    assert len(packed) == 2 * 4 + 3 and "visual.patch_embed.proj.weight" in packed
    tower, plain = build_tower(config, weights, backends()["cpu"], torch.float32), tower_of(tmp_path, "cpu")
    patches = torch.randn(24, config.patch_values)
    found, right = encode(tower, patches, [(4, 6)]), encode(plain, patches, [(4, 6)])
    assert 0 < (found - right).norm() < 0.05 * right.norm()
