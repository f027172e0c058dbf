"""Prompts with pictures, from token ids and what is to be seen."""

from __future__ import annotations

from collections.abc import Sequence

from deltic.config.vision import VisionConfig
from deltic.errors import RequestError
from deltic.params import Picture, Prompt, content_keys
from deltic.vision.patches import Pixels, Video
from deltic.vision.positions import rotary_positions


def with_pictures(ids: Sequence[int], pictures: Sequence[Pixels | Video], vision: VisionConfig,
                  boundaries: Sequence[int] = ()) -> tuple[Prompt, tuple[int, ...]]:
    """The prompt in which each token of a picture (`image_token_id`) is repeated for as many tokens as it stands for,
    and that of a film (`video_token_id`) is replaced by its parts: when, and what, between the tokens that are around
    it. And where the boundaries of the ids lie in it. ids: with one such token for each of the pictures, in order.

    RequestError if there are more or fewer.
    """
    marks = {vision.image_token_id: Pixels, vision.video_token_id: Video}
    places = [place for place, token in enumerate(ids) if token in marks]
    if [marks[ids[place]] for place in places] != [type(each) for each in pictures]:
        raise RequestError(f"the prompt has {len(places)} places for {len(pictures)} pictures, or they are of other "
                           "kinds: no text may have the tokens that stand for them, and the chat template has to show "
                           "each once", "messages")
    found, keys, placed, starts = list[int](), list[int](), list[Picture](), list[int]()

    def show(pixels: Pixels, token: int) -> None:
        placed.append(Picture(len(found), pixels.tokens, pixels.digest, pixels))
        found.extend([token] * pixels.tokens)
        keys.extend(content_keys(pixels.digest.encode(), pixels.tokens))

    def write(tokens: Sequence[int]) -> None:
        found.extend(tokens)
        keys.extend(tokens)

    rest = iter(pictures)
    for place, token in enumerate(ids):
        starts.append(len(found))
        each = next(rest) if token in marks else None
        if each is None:
            write((token,))
        elif isinstance(each, Pixels):
            show(each, token)
        else:
            around = ids[place - 1:place], ids[place + 1:place + 2]
            for part, stamp in zip(each.parts, each.stamps, strict=True):
                write((*stamp, *around[0]))
                show(part, token)
                write(around[1])
    starts.append(len(found))
    merge = vision.merge_size
    grids = [(picture.start, picture.content.grid) for picture in placed]
    positions, offset = rotary_positions(len(found), [(start, (rows // merge, columns // merge))
                                                      for start, (rows, columns) in grids])
    prompt = Prompt(tuple(found), tuple(keys), positions, offset, tuple(placed))
    return prompt, tuple(starts[boundary] for boundary in boundaries)
