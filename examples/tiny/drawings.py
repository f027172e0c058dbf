"""Made-up pictures for the tiny model: what is on one, and the picture, drawn with Pillow; a seed decides all."""

from __future__ import annotations

import colorsys
import io
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFilter, ImageFont

SHAPES = ("circle", "square", "triangle", "star")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "black")
DIGITS = tuple("0123456789")
MOST = 5  # of a kind

Point = tuple[float, float]
Rgb = tuple[int, int, int]


@dataclass(frozen=True)
class Piece:
    """A shape or a digit; where its centre is and how far it reaches, in shorter sides of the picture."""

    kind: str
    colour: str
    x: float
    y: float
    reach: float


@dataclass(frozen=True)
class Scene:
    """What is on a picture of this width and height, the shorter of which is 1: one piece, some of one kind and colour,
    or two of different kinds, the left one first."""

    width: float
    height: float
    pieces: tuple[Piece, ...]

    def side(self, piece: Piece) -> str | None:
        """"left" or "right"; None for what is nearly in the middle."""
        off = piece.x / self.width - 0.5
        return None if abs(off) < 0.08 else "left" if off < 0 else "right"


def _spots(rng: random.Random, width: float, height: float, reach: float, count: int) -> list[Point] | None:
    """Centres of pieces that do not touch."""
    found: list[Point] = []
    for _ in range(60):
        spot = rng.uniform(reach, width - reach), rng.uniform(reach, height - reach)
        if all(math.dist(spot, other) > 2.15 * reach for other in found):
            found.append(spot)
            if len(found) == count:
                return found
    return None


def make_scene(rng: random.Random, aspect: float) -> Scene:
    """A scene whose width is `aspect` times its height."""
    width, height = max(aspect, 1.0), max(1 / aspect, 1.0)
    theme = rng.choices(["shape", "some", "digit", "pair"], [30, 25, 25, 20])[0]
    colour = rng.choice(COLOURS)
    if theme in ("shape", "digit"):
        kind = rng.choice(SHAPES if theme == "shape" else DIGITS)
        reach = rng.uniform(0.13, 0.47) if theme == "shape" else rng.uniform(0.22, 0.48)
        [(x, y)] = _spots(rng, width, height, reach, 1) or [(width / 2, height / 2)]
        if rng.random() < 0.3:
            x, y = width / 2, height / 2
        return Scene(width, height, (Piece(kind, colour, x, y, reach),))
    if theme == "pair":
        kinds, colours = rng.sample(SHAPES, 2), (colour, rng.choice(COLOURS))
        while True:
            reach = rng.uniform(0.12, 0.23)
            found = _spots(rng, width, height, reach, 2)
            if found and abs(found[0][0] - found[1][0]) > 0.2 * width:
                scene = Scene(width, height, tuple(Piece(kind, shade, x, y, reach)
                                                   for (x, y), kind, shade in zip(sorted(found), kinds, colours,
                                                                                  strict=True)))
                if [scene.side(piece) for piece in scene.pieces] == ["left", "right"]:
                    return scene
    count, kind = rng.randint(2, MOST), rng.choice(SHAPES)
    while True:
        reach = rng.uniform(0.09, 0.24 if count < 4 else 0.2)
        found = _spots(rng, width, height, reach, count)
        if found:
            return Scene(width, height, tuple(Piece(kind, colour, x, y, reach) for x, y in found))


# Hue in degrees, saturation, value: from, to.
_SHADES = {
    "red": ((-9, 6), (0.75, 1.0), (0.65, 1.0)), "orange": ((24, 36), (0.8, 1.0), (0.88, 1.0)),
    "yellow": ((50, 61), (0.7, 1.0), (0.85, 1.0)), "green": ((95, 150), (0.55, 1.0), (0.4, 0.9)),
    "blue": ((205, 245), (0.6, 1.0), (0.5, 1.0)), "purple": ((268, 292), (0.5, 1.0), (0.4, 0.8)),
    "pink": ((318, 348), (0.25, 0.6), (0.92, 1.0)), "black": ((0, 360), (0.0, 0.3), (0.0, 0.13)),
}  # fmt: skip


def _rgb(hue: float, saturation: float, value: float) -> Rgb:
    red, green, blue = colorsys.hsv_to_rgb(hue / 360 % 1, saturation, value)
    return round(255 * red), round(255 * green), round(255 * blue)


def _shade(rng: random.Random, colour: str) -> Rgb:
    hue, saturation, value = (rng.uniform(*bounds) for bounds in _SHADES[colour])
    return _rgb(hue, saturation, value)


def _ground(rng: random.Random, colours: set[str]) -> Rgb:
    """A background: white, light, pale, or dark where nothing dark is on it."""
    draw = rng.random()
    if draw < 0.45:
        return 255, 255, 255
    if draw < 0.6:
        return (rng.randint(200, 254),) * 3
    if draw < 0.85 or colours & {"black", "blue", "purple"}:
        return _rgb(rng.uniform(0, 360), rng.uniform(0.02, 0.12), rng.uniform(0.88, 1.0))
    return _rgb(rng.uniform(0, 360), rng.uniform(0.0, 0.3), rng.uniform(0.0, 0.22))


def corners(kind: str, rng: random.Random) -> list[Point]:
    """The corners of a shape that reaches as far as 1 from its centre."""
    turn = {"square": rng.choice([math.pi / 4, rng.uniform(0, math.pi)]),
            "triangle": rng.choice([-math.pi / 2, rng.uniform(0, 2 * math.pi)]),
            "star": rng.choice([-math.pi / 2, rng.uniform(0, 2 * math.pi)])}[kind]
    if kind == "star":
        inner = rng.uniform(0.36, 0.5)
        radii = [1.0, inner] * 5
    else:
        radii = [1.0] * {"square": 4, "triangle": 3}[kind]
    step = 2 * math.pi / len(radii)
    slack = 0.12 if kind == "triangle" else 0.03
    found = []
    for index, radius in enumerate(radii):
        angle = turn + step * index + (rng.uniform(-slack, slack) if kind != "square" else 0)
        found.append((radius * math.cos(angle), radius * math.sin(angle)))
    return found


# Strokes from 0 to 1, to the right and down, of digits as they are written.
_STROKES: dict[str, tuple[tuple[Point, ...], ...]] = {
    "0": (((0.5, 0), (0.8, 0.12), (0.9, 0.5), (0.8, 0.88), (0.5, 1), (0.2, 0.88), (0.1, 0.5), (0.2, 0.12), (0.5, 0)),),
    "1": (((0.28, 0.22), (0.55, 0), (0.55, 1)),),
    "2": (((0.12, 0.25), (0.25, 0.06), (0.5, 0), (0.78, 0.08), (0.86, 0.28), (0.75, 0.5), (0.1, 1), (0.9, 1)),),
    "3": (((0.12, 0.12), (0.4, 0), (0.75, 0.06), (0.84, 0.25), (0.72, 0.43), (0.42, 0.48), (0.75, 0.54), (0.9, 0.74),
           (0.76, 0.95), (0.45, 1), (0.1, 0.88)),),
    "4": (((0.68, 1), (0.68, 0), (0.08, 0.68), (0.94, 0.68)),),
    "5": (((0.85, 0), (0.22, 0), (0.16, 0.45), (0.5, 0.38), (0.82, 0.5), (0.88, 0.72), (0.74, 0.94), (0.45, 1),
           (0.1, 0.9)),),
    "6": (((0.8, 0.06), (0.5, 0.06), (0.22, 0.34), (0.12, 0.68), (0.25, 0.94), (0.52, 1), (0.8, 0.92), (0.88, 0.7),
           (0.76, 0.5), (0.5, 0.44), (0.22, 0.54), (0.13, 0.7)),),
    "7": (((0.1, 0), (0.9, 0), (0.4, 1)),),
    "8": (((0.5, 0.47), (0.2, 0.36), (0.18, 0.14), (0.5, 0), (0.82, 0.14), (0.8, 0.36), (0.5, 0.47), (0.16, 0.6),
           (0.12, 0.85), (0.5, 1), (0.88, 0.85), (0.84, 0.6), (0.5, 0.47)),),
    "9": (((0.87, 0.3), (0.74, 0.5), (0.48, 0.56), (0.2, 0.48), (0.12, 0.28), (0.24, 0.06), (0.5, 0), (0.78, 0.08),
           (0.87, 0.3), (0.8, 0.64), (0.6, 1)),),
}  # fmt: skip
# The same as on a display: sides of two squares.
_SEGMENTS = {"a": ((0.1, 0), (0.9, 0)), "b": ((0.9, 0), (0.9, 0.5)), "c": ((0.9, 0.5), (0.9, 1)),
             "d": ((0.1, 1), (0.9, 1)), "e": ((0.1, 0.5), (0.1, 1)), "f": ((0.1, 0), (0.1, 0.5)),
             "g": ((0.1, 0.5), (0.9, 0.5))}  # fmt: skip
_DISPLAY = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg")


def _written(digit: str, rng: random.Random) -> list[list[Point]]:
    """Strokes of a digit around (0, 0) that reach about as far as 1 from it."""
    if rng.random() < 0.15:
        strokes: Sequence[Sequence[Point]] = [_SEGMENTS[name] for name in _DISPLAY[int(digit)]]
    else:
        strokes = _STROKES[digit]
        if digit == "1" and rng.random() < 0.5:
            strokes = (((0.5, 0), (0.5, 1)),) if rng.random() < 0.4 else (*strokes, ((0.25, 1), (0.85, 1)))
        if digit == "7" and rng.random() < 0.25:
            strokes = (*strokes, ((0.35, 0.5), (0.8, 0.5)))
    wide, slant, turn, slack = rng.uniform(0.45, 0.8), rng.uniform(-0.2, 0.3), rng.gauss(0, 0.09), rng.uniform(0, 0.03)
    cos, sin = math.cos(turn), math.sin(turn)
    found = []
    for stroke in strokes:
        points = []
        for right, down in stroke:
            x = (right - 0.5 + rng.uniform(-slack, slack)) * 2 * wide - slant * (down - 0.5)
            y = (down - 0.5 + rng.uniform(-slack, slack)) * 1.7
            points.append((x * cos - y * sin, x * sin + y * cos))
        found.append(points)
    return found


def smooth(points: list[Point], parts: int = 6) -> list[Point]:
    """More points on a curve through these (Catmull and Rom)."""
    if len(points) < 4:
        return points
    closed = points[0] == points[-1]
    around = [points[-2] if closed else points[0], *points, points[1] if closed else points[-1]]
    found = []
    for a, b, c, d in zip(around, around[1:], around[2:], around[3:], strict=False):
        for part in range(parts):
            t = part / parts
            found.append(tuple(0.5 * (2 * b[i] + (c[i] - a[i]) * t + (2 * a[i] - 5 * b[i] + 4 * c[i] - d[i]) * t ** 2
                                      + (3 * b[i] - a[i] - 3 * c[i] + d[i]) * t ** 3) for i in (0, 1)))
    return [(x, y) for x, y in (*found, points[-1])]


def _draw_digit(draw: ImageDraw.ImageDraw, piece: Piece, place: tuple[float, float, float], ink: Rgb,
                rng: random.Random) -> None:
    x, y, reach = place
    if rng.random() < 0.3:
        font = ImageFont.load_default(max(8.0, 2.2 * reach))
        stroke = round(rng.choice([0, 0, 0.03, 0.07]) * reach)
        draw.text((x, y), piece.kind, ink, font, anchor="mm", stroke_width=stroke)
        return
    width = max(1.0, rng.uniform(0.1, 0.42) * reach)
    curved = rng.random() < 0.75
    for stroke in _written(piece.kind, rng):
        points = [(x + 0.92 * reach * a, y + 0.92 * reach * b) for a, b in (smooth(stroke) if curved and len(stroke) > 5
                                                                             else stroke)]
        draw.line(points, ink, round(width), "curve")
        if width > 2:
            for a, b in (points[0], points[-1]):
                draw.ellipse((a - width / 2, b - width / 2, a + width / 2, b + width / 2), ink)


def _draw_shape(draw: ImageDraw.ImageDraw, piece: Piece, place: tuple[float, float, float], ink: Rgb,
                rng: random.Random, line: float) -> None:
    """line: how thick a shape that is not filled is drawn, in its reach; 0: filled."""
    x, y, reach = place
    if piece.kind == "circle":
        wide, tall = reach * rng.uniform(0.9, 1.0), reach * rng.uniform(0.9, 1.0)
        points = [(x + wide * math.cos(a / 24 * math.pi), y + tall * math.sin(a / 24 * math.pi)) for a in range(48)]
    else:
        points = [(x + reach * a, y + reach * b) for a, b in corners(piece.kind, rng)]
    if line:
        draw.line([*points, *points[:2]], ink, max(1, round(line * reach)), "curve")
    else:
        draw.polygon(points, ink)


def draw(scene: Scene, rng: random.Random, width: int, height: int) -> Image.Image:
    """The scene in so many pixels, stretched if they have other proportions."""
    colours = {piece.colour for piece in scene.pieces}
    ground = _ground(rng, colours)
    image = Image.new("RGB", (width, height), ground)
    if rng.random() < 0.15:  # brighter or darker to one side
        other = Image.new("RGB", (width, height), tuple(max(0, min(255, c + rng.randint(-22, 22))) for c in ground))
        ramp = Image.linear_gradient("L").rotate(90 * rng.randrange(4)).resize((width, height))
        image = Image.composite(other, image, ramp)
    canvas = ImageDraw.Draw(image)
    unit = (width / scene.width + height / scene.height) / 2
    line = rng.uniform(0.12, 0.25) if rng.random() < 0.15 else 0.0
    shades = {colour: _shade(rng, colour) for colour in colours}
    for piece in scene.pieces:
        place = piece.x * width / scene.width, piece.y * height / scene.height, piece.reach * unit
        ink = shades[piece.colour] if rng.random() < 0.8 else _shade(rng, piece.colour)
        if piece.kind in DIGITS:
            _draw_digit(canvas, piece, place, ink, rng)
        else:
            _draw_shape(canvas, piece, place, ink, rng, line)
    return image


def worn(image: Image.Image, rng: random.Random) -> Image.Image:
    """Mostly the picture itself, at times blurred or as a JPEG file has it."""
    chance = rng.random()
    if chance < 0.1:
        return image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 0.012 * min(image.size))))
    if chance < 0.25:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=rng.randint(25, 95))
        return Image.open(file).convert("RGB")
    return image
