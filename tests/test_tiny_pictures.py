"""Vision of the embedded model: its training pictures, its tower in training and in the engine, its answers."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from test_vision_tower import encode
from vision_models import picture

import deltic
from deltic import LLM, SamplingParams
from deltic.config.vision import ImageConfig, VisionConfig
from deltic.loader.disk import read_json
from deltic.loader.vision import load_tower, plan_tower
from deltic.model.vision_tower import build_tower
from deltic.ops import backends
from deltic.params import Prompt
from deltic.vision.images import patches_of, target_size

pytest.importorskip("safetensors.torch")

MODEL = Path(deltic.__file__).parent / "models" / "tiny"
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "tiny"

sys.path.insert(0, str(EXAMPLE))
import drawings  # noqa: E402
import evaluate_pictures  # noqa: E402
import model as training  # noqa: E402
import questions  # noqa: E402
import sketches  # noqa: E402
import tower as trained  # noqa: E402
import train_tower  # noqa: E402

sys.path.remove(str(EXAMPLE))

GREEDY = SamplingParams(temperature=0.0, max_tokens=32)


def scenes(count: int) -> Iterator[tuple[drawings.Scene, random.Random]]:
    for seed in range(count):
        rng = random.Random(seed)
        yield drawings.make_scene(rng, 3 ** rng.uniform(-1, 1)), rng


def configs() -> tuple[VisionConfig, ImageConfig]:
    found = VisionConfig.from_hf(read_json(MODEL / "config.json"), 192)
    assert found
    return found, ImageConfig.from_hf(read_json(MODEL / "preprocessor_config.json"), {})


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(memory="64MiB", threads=1) as model:
        yield model


def shown(image: object, text: str) -> dict[str, object]:
    return {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}


def test_questions_match_their_scenes() -> None:
    for scene, _ in scenes(400):
        assert min(scene.width, scene.height) == 1
        for number, piece in enumerate(scene.pieces):
            assert piece.reach <= piece.x <= scene.width - piece.reach + 1e-9
            assert piece.reach <= piece.y <= scene.height - piece.reach + 1e-9
            assert all(math.dist((piece.x, piece.y), (other.x, other.y)) > piece.reach + other.reach
                       for other in scene.pieces[number + 1:])
        asked = questions.questions(scene)
        said = {question.intent: question.answer for question in asked}
        for piece in scene.pieces:
            assert piece.kind in said["what"]
        if len(scene.pieces) > 1 and "count" in said:
            assert f" {len(scene.pieces)} " in said["count"] and len({piece.kind for piece in scene.pieces}) == 1
        for question in asked:
            if question.intent == "on side":
                piece = scene.pieces[0 if question.slots["side"] == "left" else 1]
                assert scene.side(piece) == question.slots["side"] and piece.kind in question.answer


@pytest.mark.parametrize("way", evaluate_pictures.WAYS)
def test_pictures_show_their_scenes(way: str) -> None:
    """The middle of a shape has its colour, and drawings depend on the seed alone."""
    right = total = 0
    for scene, rng in scenes(40 if way == "drawn" else 24):
        state = rng.getstate()
        size = round(200 * scene.width), round(200 * scene.height)
        image = evaluate_pictures.WAYS[way](scene, rng, *size)
        rng.setstate(state)
        assert image.tobytes() == evaluate_pictures.WAYS[way](scene, rng, *size).tobytes()
        pixels = np.asarray(image, float)
        for piece in scene.pieces:
            if piece.kind in drawings.SHAPES:
                x, y = round(200 * piece.x), round(200 * piece.y)
                seen = pixels[y - 2:y + 3, x - 2:x + 3].mean((0, 1))
                nearest = min(sketches.INKS, key=lambda name: min(
                    math.dist(seen, ink) for ink in sketches.INKS[name]))
                right, total = right + (nearest == piece.colour), total + 1
    assert right > 0.7 * total > 14, "some are outlines"


def test_training_scales_and_cuts_pictures_as_inference_does() -> None:
    config, pictures = configs()
    rng = random.Random(0)
    for _ in range(200):
        size = rng.randint(20, 900), rng.randint(20, 900)
        assert trained.target_size(*size) == target_size(*size, pictures, config)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (128, 192, 3), dtype=np.uint8))
    cut = picture([image], pictures, config)
    pixels = torch.from_numpy(cut.frames).permute(0, 3, 1, 2).float() / 127.5 - 1
    found = trained.patches_of(pixels)[0].view(-1, 3, 1, 256).expand(-1, -1, 2, -1).flatten(1)
    torch.testing.assert_close(found, torch.from_numpy(patches_of(cut, pictures, config)))


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_the_tower_equals_the_trained_one(backend: str) -> None:
    config, pictures = configs()
    tower = build_tower(config, {**load_tower(plan_tower(MODEL, config), "float32", "cpu")}, backends()[backend],
                        torch.float32)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (100, 230, 3), dtype=np.uint8))
    cut = picture([image], pictures, config)
    found = encode(tower, torch.from_numpy(patches_of(cut, pictures, config)), [cut.grid])
    with torch.no_grad():
        wanted = training.load_tower(MODEL)(torch.from_numpy(cut.frames).permute(0, 3, 1, 2).float() / 127.5 - 1)[0]
    assert (found - wanted).norm() < 1e-4 * wanted.norm()


def test_training_reads_conversations_as_inference_does(llm: LLM) -> None:
    """Ids, positions and labels are equal."""
    [(scene, rng)] = scenes(1)
    image = drawings.draw(scene, rng, 150, 130)
    prompt = llm.chat_processor.chat([shown(image, "What is this?")]).request.prompt
    assert isinstance(prompt, Prompt)
    [shot] = prompt.pictures
    sample = train_tower.Sample("", [{"role": "user", "content": train_tower.PICTURE + "What is this?"}],
                                {"role": "assistant", "content": "x"}, None, False)
    tokenizer = train_tower.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    row = train_tower.row_of(tokenizer, sample, (shot.content.grid[0] // 2, shot.content.grid[1] // 2))
    assert row
    ids, labels, turned = row
    assert tuple(ids[:len(prompt)]) == prompt.ids
    assert [tuple(axis) for axis in zip(*turned[:len(prompt)], strict=True)] == list(prompt.positions)
    assert set(labels[:len(prompt) - 1]) == {-100} and labels[len(prompt) - 1] == tokenizer.encode("x").ids[0]


def test_a_red_circle(llm: LLM) -> None:
    circle = EXAMPLE / "red_circle.png"
    said = llm.chat([shown(circle, "What is this?")], GREEDY)
    assert said.text == "This is a red circle."
    history = [shown(circle, "What is this?"), {"role": "assistant", "content": said.text}]
    asked = {"role": "user", "content": "What colour is it?"}
    assert llm.chat([*history, asked], GREEDY).text == "It is red."
    assert "Paris" in llm.chat([*history, {"role": "user", "content": "What is the capital of France?"}], GREEDY).text


@pytest.mark.parametrize("way", evaluate_pictures.WAYS)
def test_answers_about_pictures(llm: LLM, way: str) -> None:
    """A sample of the slow test below."""
    check(llm, way, 40, 0.85)


@pytest.mark.slow
@pytest.mark.parametrize("way", evaluate_pictures.WAYS)
def test_nine_in_ten_answers_about_pictures_are_right(llm: LLM, way: str) -> None:
    check(llm, way, 500, 0.9)


def check(llm: LLM, way: str, count: int, share: float) -> None:
    some = list(evaluate_pictures.cases(way, count))
    said = evaluate_pictures.answers(llm, some)
    right = sum(case.answer == text for case, text in zip(some, said, strict=True))
    assert right >= share * count, [(case.question, case.answer, text) for case, text in zip(some, said, strict=True)
                                    if case.answer != text][:5]
