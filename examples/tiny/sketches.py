"""The tiny model's pictures drawn without Pillow: for each pixel how far it is from an outline. For evaluation."""

from __future__ import annotations

import io
import math
import random
from itertools import pairwise

import numpy as np
from drawings import DIGITS, Piece, Point, Scene
from numpy.typing import NDArray
from PIL import Image

Field = NDArray[np.float64]  # of each pixel

INKS = {
    "red": ((220, 30, 35), (200, 0, 0), (255, 40, 40)), "orange": ((255, 140, 0), (245, 130, 30), (255, 150, 20)),
    "yellow": ((250, 225, 30), (255, 235, 0), (240, 220, 60)), "green": ((0, 150, 60), (40, 170, 50), (20, 120, 50)),
    "blue": ((30, 70, 220), (0, 90, 200), (60, 110, 240)), "purple": ((130, 30, 170), (120, 40, 160), (145, 60, 190)),
    "pink": ((255, 150, 195), (250, 130, 180), (255, 175, 210)), "black": ((0, 0, 0), (20, 20, 20), (25, 25, 30)),
}  # fmt: skip
GROUNDS = ((255, 255, 255), (245, 245, 240), (225, 225, 225), (235, 242, 250), (250, 243, 230))

# Lines and arcs of digits, 1 high and 0.6 wide around (0, 0), down is positive. An arc: centre, radii, from, to, in
# twelfths of a turn from the right on, clockwise.
Arc = tuple[float, float, float, float, float, float]
LINES: dict[str, tuple[tuple[Point, Point], ...]] = {
    "1": (((-0.2, -0.25), (0.05, -0.5)), ((0.05, -0.5), (0.05, 0.5))),
    "2": (((0.27, -0.12), (-0.3, 0.5)), ((-0.3, 0.5), (0.3, 0.5))),
    "4": (((0.12, -0.5), (-0.3, 0.2)), ((-0.3, 0.2), (0.32, 0.2)), ((0.12, -0.5), (0.12, 0.5))),
    "5": (((0.26, -0.5), (-0.22, -0.5)), ((-0.22, -0.5), (-0.27, -0.03))), "6": (((0.1, -0.5), (-0.25, 0.1)),),
    "7": (((-0.3, -0.5), (0.3, -0.5)), ((0.3, -0.5), (-0.1, 0.5))), "9": (((0.25, -0.1), (-0.1, 0.5)),),
}  # fmt: skip
ARCS: dict[str, tuple[Arc, ...]] = {
    "0": ((0, 0, 0.3, 0.5, 0, 12),), "2": ((0, -0.22, 0.29, 0.28, 6.3, 12.7),),
    "3": ((0, -0.24, 0.27, 0.26, 6.5, 15), (0, 0.24, 0.3, 0.26, 9, 17.5)), "5": ((-0.01, 0.19, 0.31, 0.31, 7.4, 17),),
    "6": ((0, 0.2, 0.29, 0.3, 0, 12),), "8": ((0, -0.25, 0.25, 0.25, 0, 12), (0, 0.25, 0.3, 0.25, 0, 12)),
    "9": ((0, -0.2, 0.29, 0.3, 0, 12),),
}  # fmt: skip


def _to_line(x: Field, y: Field, start: Point, end: Point) -> Field:
    """How far each place is from a straight line."""
    (ax, ay), (bx, by) = start, end
    along = np.clip(((x - ax) * (bx - ax) + (y - ay) * (by - ay)) / ((bx - ax) ** 2 + (by - ay) ** 2), 0, 1)
    return np.hypot(x - ax - along * (bx - ax), y - ay - along * (by - ay))


def _digit(x: Field, y: Field, digit: str, thick: float) -> Field:
    """Less than nothing where the digit is, in its heights."""
    lines = list(LINES.get(digit, ()))
    for right, down, wide, tall, begin, end in ARCS.get(digit, ()):
        turns = np.linspace(begin, end, 24) * math.pi / 6
        points = [(right + wide * math.cos(turn), down + tall * math.sin(turn)) for turn in turns]
        lines += list(pairwise(points))
    return np.minimum.reduce([_to_line(x, y, *line) for line in lines]) - thick / 2


def _shape(x: Field, y: Field, kind: str, turn: float) -> Field:
    """Less than nothing inside of a shape that reaches as far as 1."""
    if kind == "circle":
        return np.hypot(x, y) - 0.95
    x, y = x * math.cos(turn) + y * math.sin(turn), y * math.cos(turn) - x * math.sin(turn)
    if kind == "square":
        return np.maximum(np.abs(x), np.abs(y)) - math.sqrt(0.5)
    if kind == "triangle":  # one corner above
        return np.maximum(y - 0.5, np.abs(x) * math.sqrt(0.75) - (y + 1) / 2)
    # a star: the angle folded to half a point, then the edge from its tip to the next inner corner
    angle = np.abs((np.arctan2(x, -y) + math.pi / 5) % (2 * math.pi / 5) - math.pi / 5)
    radius = np.hypot(x, y)
    px, py = radius * np.cos(angle), radius * np.sin(angle)
    ix, iy = 0.42 * math.cos(math.pi / 5), 0.42 * math.sin(math.pi / 5)
    normal = np.array([iy, 1 - ix]) / math.hypot(iy, 1 - ix)
    return (px - 1) * normal[0] + py * normal[1]


def _inside(piece: Piece, x: Field, y: Field, rng: random.Random) -> Field:
    x, y = (x - piece.x) / piece.reach, (y - piece.y) / piece.reach
    if piece.kind in DIGITS:
        turn = rng.uniform(-0.12, 0.12)
        x, y = x * math.cos(turn) + y * math.sin(turn), y * math.cos(turn) - x * math.sin(turn)
        return _digit(x / 1.7, y / 1.7, piece.kind, rng.uniform(0.07, 0.2)) * 1.7 * piece.reach
    return _shape(x, y, piece.kind, rng.choice([0.0, rng.uniform(0, 2 * math.pi)])) * piece.reach


def paint(scene: Scene, rng: random.Random, width: int, height: int) -> Image.Image:
    """The scene in so many pixels: smooth outlines, at times noise, at times as JPEG."""
    unit = min(width / scene.width, height / scene.height)
    y, x = (np.mgrid[0:height, 0:width] + 0.5) / unit
    x, y = x * unit * scene.width / width, y * unit * scene.height / height
    pixels = np.empty((height, width, 3))
    pixels[:] = rng.choice(GROUNDS)
    inks = {piece.colour: np.array(rng.choice(INKS[piece.colour]), float) for piece in scene.pieces}
    for piece in scene.pieces:
        cover = np.clip(0.5 - _inside(piece, x, y, rng) * unit, 0, 1)[..., None]
        pixels = pixels * (1 - cover) + inks[piece.colour] * cover
    if rng.random() < 0.4:
        pixels += np.random.default_rng(rng.randrange(2**32)).normal(0, rng.uniform(2, 20), pixels.shape)
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    if rng.random() < 0.4:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=rng.randint(30, 90))
        image = Image.open(file).convert("RGB")
    return image


def sketch(scene: Scene, rng: random.Random, size: tuple[int, int]) -> NDArray[np.uint8]:
    """A picture of another size as the model's processor scales it to this height and width."""
    scale = rng.choice([rng.uniform(0.5, 1.0), rng.uniform(1.0, 4.0)])
    image = paint(scene, rng, round(size[1] * scale), round(size[0] * scale))
    return np.asarray(image.resize((size[1], size[0]), 3))
