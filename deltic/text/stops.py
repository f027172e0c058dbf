"""Finds strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def open_suffix(text: str, needles: Sequence[str]) -> int:
    """Length of the longest end of `text` that may be the beginning of a needle."""
    longest = 0
    for needle in needles:
        at = text.find(needle[0], max(len(text) - len(needle) + 1, 0), len(text) - longest)
        while at >= 0:
            if needle.startswith(text[at:]):
                longest = len(text) - at
                break
            at = text.find(needle[0], at + 1, len(text) - longest)
    return longest


@dataclass(slots=True)
class StopScanner:
    """Lets text pass up to the first stop string, and holds back what may become one.

    The stop string that is complete first wins; of several that end together, the one that began first. found: it.
    """

    stops: tuple[str, ...]
    held: str = ""
    found: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self.found is not None

    def push(self, text: str) -> str:
        """Take more text, give the part that is certain to come before any stop string."""
        if not self.stops:
            return text
        text = self.held + text
        ends = [(start + len(stop), start) for stop in self.stops if (start := text.find(stop)) >= 0]
        if ends:
            end, start = min(ends)
            self.found, self.held = text[start:end], ""
            return text[:start]
        cut = len(text) - open_suffix(text, self.stops)
        self.held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Give what was held back: the text ends here, or goes on elsewhere."""
        held, self.held = self.held, ""
        return held

    def copy(self) -> StopScanner:
        """An independent scanner in the same state."""
        return StopScanner(self.stops, self.held, self.found)
