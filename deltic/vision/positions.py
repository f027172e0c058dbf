"""Rotary positions of prompts with pictures (M-RoPE), as `get_rope_index` of transformers' Qwen3_5Model gives them."""

from __future__ import annotations

from collections.abc import Iterable

from deltic.params import Positions


def rotary_positions(length: int, pictures: Iterable[tuple[int, tuple[int, int]]]) -> tuple[Positions, int]:
    """The positions of a prompt's tokens by time, height and width, and by how much those that follow the prompt
    differ from their places.

    length: tokens of the prompt. pictures: where the tokens of each begin, in order, and by how many rows and columns
    of tokens. A picture moves the text behind it on by its longer side.
    """
    axes: tuple[list[int], list[int], list[int]] = ([], [], [])
    shift = 0
    for start, (rows, columns) in pictures:
        place = start + shift
        for axis in axes:
            axis.extend(range(len(axis) + shift, place))
        axes[0].extend([place] * (rows * columns))
        axes[1].extend(place + row for row in range(rows) for _ in range(columns))
        axes[2].extend(list(range(place, place + columns)) * rows)
        shift += max(rows, columns) - rows * columns
    for axis in axes:
        axis.extend(range(len(axis) + shift, length + shift))
    return (tuple(axes[0]), tuple(axes[1]), tuple(axes[2])), shift
