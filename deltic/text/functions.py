"""Reads functions and their parameters in the XML form, whatever the values quote, in linear time."""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import NamedTuple

FUNCTION = re.compile(r"<function=[ \t]*([^<>\s][^<>\n]*)>")
FUNCTION_END = "</function>"
_BEGIN = "<function="
_PARAMETER = re.compile(r"<parameter=[ \t]*([^<>\s][^<>\n]*)>")
# A value may hold the text of a closing tag; the real one is followed by the next tag or by the end.
_TAG = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>|\Z))|(?=\n<parameter=)|<function=|</function>")
_QUOTES = "\"'"


def clean_name(name: str) -> str:
    """A name without the quotes that models put around it."""
    return name.strip().strip(_QUOTES) or name.strip()


def read_functions(text: str) -> list[tuple[str, dict[str, str]]]:
    """Name and parameters of each function; a tag that is missing ends with what follows."""
    functions, values = _Matches.of(FUNCTION, text), _Values(text)
    parameters, endings = _Matches.of(_PARAMETER, text), _Matches.of(re.compile(FUNCTION_END), text)
    found, at = list[tuple[str, dict[str, str]]](), 0
    while opening := functions.after(at):
        at, read = opening.end(), dict[str, str]()
        while (parameter := parameters.after(at)) and endings.start_after(at) > parameter.start():
            start = parameter.end()
            end, at = values.end(start)
            read[clean_name(parameter[1])] = text[start:end].removeprefix("\n").removesuffix("\n")
        found.append((clean_name(opening[1]), read))
    return found


class _Matches(NamedTuple):
    """All matches of a pattern."""

    starts: list[int]
    matches: list[re.Match[str]]

    @classmethod
    def of(cls, pattern: re.Pattern[str], text: str) -> _Matches:
        matches = list(pattern.finditer(text))
        return cls([match.start() for match in matches], matches)

    def after(self, at: int) -> re.Match[str] | None:
        """The first one that begins there or later."""
        index = bisect_left(self.starts, at)
        return self.matches[index] if index < len(self.matches) else None

    def start_after(self, at: int) -> float:
        match = self.after(at)
        return match.start() if match else float("inf")


class _Ahead(NamedTuple):
    """What comes first from one tag on, as indices of tags; none: the number of tags.

    value: an end of a value. level_value: one with as many functions open as here. function: the beginning of one.
    drop: the end of the function around.
    """

    value: int
    level_value: int
    function: int
    drop: int


class _Values:
    """Finds where values end: not inside of a function that they quote, if that is closed."""

    def __init__(self, text: str) -> None:
        self._length = len(text)
        self._tags = _Matches.of(_TAG, text)
        self._ahead = self._look_ahead()

    def end(self, start: int) -> tuple[int, int]:
        """Where the value that begins at `start` ends, and where its closing tag does, which may be missing."""
        here = self._ahead[bisect_left(self._tags.starts, start)]
        if here.level_value < here.drop:
            return self._tags.matches[here.level_value].span()
        none = len(self._tags.matches)
        if here.drop == none:
            return self._tags.matches[here.value].span() if here.value < none else (self._length, self._length)
        beyond = self._ahead[here.drop + 1]
        if beyond.value < beyond.function:
            return self._tags.matches[beyond.value].span()
        end = self._tags.starts[here.drop]
        return end, end

    def _look_ahead(self) -> list[_Ahead]:
        """For every tag and for the end, from behind."""
        none = value = function = len(self._tags.matches)
        level, values, drops = 0, {0: none}, {0: none}  # by level: the next value's end, the next place at that level
        found = [_Ahead(none, none, none, none)]
        for index in range(none - 1, -1, -1):
            tag = self._tags.matches[index][0]
            level += (tag == FUNCTION_END) - (tag == _BEGIN)
            if tag == _BEGIN:
                function = index
            elif tag != FUNCTION_END:
                value = values[level] = index
            drops[level] = index
            found.append(_Ahead(value, values.get(level, none), function, drops.get(level - 1, none + 1) - 1))
        return found[::-1]
