"""Where the time of a model's start goes.

    files         finding them, downloading what is not there, reading all but the weights
    weights       reading them, and quantizing them where that is asked for; the draft head's, too
    layers        what the ops compute with: packed matrices, and experts that are not all in memory
    vision tower  the same of the tower, if there is one
    cache         taking its memory, and what is kept on disk
"""

from __future__ import annotations

import time


class StartTimes:
    """Seconds of the parts of a start, by name, in the order in which they were done."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def done(self, part: str) -> None:
        """What was done since the last part, or since the beginning, is this one."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        """All of it, and of what it consists: `1.29 s (files 0.03 s, weights 1.26 s)`."""
        parts = ", ".join(f"{part} {seconds:.2f} s" for part, seconds in self.seconds.items())
        return f"{self._last - self._began:.2f} s ({parts})"
