"""Prompts with pictures, from token ids and what is to be seen."""

from __future__ import annotations

from collections.abc import Sequence

from deltic.config.vision import VisionConfig
from deltic.errors import RequestError
from deltic.types import Picture, Prompt, content_keys
from deltic.vision.patches import Pixels
from deltic.vision.positions import rotary_positions


def with_pictures(ids: Sequence[int], pictures: Sequence[Pixels], vision: VisionConfig,
                  boundaries: Sequence[int] = ()) -> tuple[Prompt, tuple[int, ...]]:
    """The prompt in which each token of a picture (`image_token_id`) is repeated for as many tokens as it stands for,
    and where the boundaries of the ids lie in it. ids: with one such token for each of the pictures, in order.

    RequestError if there are more or fewer.
    """
    places = [place for place, token in enumerate(ids) if token == vision.image_token_id]
    if len(places) != len(pictures):
        raise RequestError(f"the prompt has {len(places)} places for {len(pictures)} pictures: no text may have the "
                           "tokens that stand for them, and the chat template has to show each once", "messages")
    found, keys, placed = list[int](), list[int](), list[Picture]()
    rest = iter(pictures)
    for token in ids:
        if token != vision.image_token_id:
            found.append(token)
            keys.append(token)
            continue
        pixels = next(rest)
        placed.append(Picture(len(found), pixels.tokens, pixels.digest, pixels))
        found += [token] * pixels.tokens
        keys += content_keys(pixels.digest.encode(), pixels.tokens)
    merge = vision.merge_size
    grids = [(picture.start, picture.content.grid) for picture in placed]
    positions, offset = rotary_positions(len(found), [(start, (rows // merge, columns // merge))
                                                      for start, (rows, columns) in grids])
    moved = tuple(boundary + sum(pixels.tokens - 1 for place, pixels in zip(places, pictures, strict=True)
                                 if place < boundary) for boundary in boundaries)
    return Prompt(tuple(found), tuple(keys), positions, offset, tuple(placed)), moved
