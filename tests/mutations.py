"""Bytes that are changed at random, for readers of files that anybody may have written."""

from __future__ import annotations

import random
import struct

INTERESTING = [struct.pack("<Q", value) for value in (0, 1, 255, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 64) - 1)]


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The data with one to four bytes or words changed, or runs put in, taken out, doubled."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, length = rng.randrange(len(found) + 1), rng.choice((1, 2, 4, 8, 16, rng.randint(1, 64)))
        kind = rng.randrange(6)
        if kind == 0 and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            found[at:at + 1] = bytes([rng.randrange(256)])
        elif kind == 2:
            found[at:at + 8] = rng.choice(INTERESTING)
        elif kind == 3:
            found[at:at] = rng.randbytes(length)
        elif kind == 4:
            del found[at:at + length]
        else:
            found[at:at] = found[at:at + length]
    return bytes(found)
