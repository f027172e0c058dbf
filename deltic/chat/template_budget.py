"""What the rendering of a chat template may spend."""

from __future__ import annotations

from collections.abc import Callable, MappingView, Sequence
from functools import reduce
from itertools import chain
from typing import Any, NoReturn

MAX_CHARACTERS = 1 << 26
MAX_RANGE = 1_000_000
ENTRY = 8  # characters that an entry of a list counts for
_MOST_NESTED = 1 << 24  # characters of a list or mapping that is written out


class RenderBudget:
    """What one rendering may spend: characters made on the way, and steps over `range`. OverflowError says what is
    spent. So no step is long in itself, and a `Watchdog` can bound the time of all of them.
    """

    def __init__(self) -> None:
        self._characters, self._range = MAX_CHARACTERS, MAX_RANGE
        self._weights: dict[int, tuple[int, object]] = {}  # by identity; the object is kept, so that it stays its own

    def tick(self, characters: int = 0) -> None:
        """One step more, which shows so much of the template's own text."""
        self._characters -= characters
        if self._characters < 0:
            self._refuse()

    def charge(self, characters: int) -> None:
        """So much is made."""
        self._characters -= max(characters, 0)
        if self._characters < 0:
            self._refuse()

    def range(self, *args: int) -> range:
        """As Python's."""
        numbers = range(*args)
        self._range -= len(numbers)
        if self._range < 0:
            raise OverflowError(f"more than {MAX_RANGE} iterations over range")
        return numbers

    def shown(self, text: str) -> str:
        """A text that is made."""
        self._characters -= len(text)
        if self._characters < 0:
            self._refuse()
        return text

    def joined(self, join: Callable[[Sequence[Any]], str], items: tuple[Any, ...]) -> str:
        """Of the `~` operator."""
        size, plain = 0, True
        for item in items:
            if type(item) is str:
                size += len(item)
            else:
                size, plain = size + self.weigh(item), False
        self.charge(size)
        return "".join(items) if plain else join(items)

    def added(self, *items: Any) -> Any:
        """Of the `+` operator, as often as it stands in a row."""
        size = 0
        for item in items:
            if type(item) is not str:
                return reduce(self._sum, items)
            size += len(item)
        self.charge(size)
        return "".join(items)

    def _sum(self, left: Any, right: Any) -> Any:
        if isinstance(left, list | tuple) and isinstance(right, list | tuple):
            self.charge(ENTRY * (len(left) + len(right)))
            return self._weighed(self.weigh(left) + self.weigh(right), left + right)  # type: ignore[operator]
        return self.made(left + right)

    def built(self, value: Any) -> Any:
        """A list, tuple or mapping that the template writes."""
        self.charge(ENTRY * len(value))
        self.weigh(value)
        return value

    def made(self, value: Any, elements_known: bool = False) -> Any:
        """What a call or filter gives back. elements_known: none of it is there more often than in what was given."""
        if isinstance(value, str):
            return self.shown(value)
        if isinstance(value, list | tuple | dict):
            self.charge(ENTRY * len(value))
            if not elements_known:
                self.weigh(value)
        return value

    def sliced(self, value: Any) -> Any:
        """A slice."""
        return self.made(value, True)

    def weigh(self, value: Any) -> int:
        """About the characters of a value that is written out, with all that is in it, however often."""
        if isinstance(value, str):
            return len(value)
        if isinstance(value, int):
            return 1 + (value.bit_length() >> 1)
        known = self._weights.get(id(value))
        if known:
            return known[0]
        if not isinstance(value, dict | list | tuple | MappingView):
            return ENTRY
        items: Any = chain(value.keys(), value.values()) if isinstance(value, dict) else value
        self._weighed(weight := sum([ENTRY + self.weigh(item) for item in items], ENTRY), value)
        return weight

    def _weighed(self, weight: int, value: Any) -> Any:
        if weight > _MOST_NESTED:
            raise OverflowError(f"a list or mapping of more than {_MOST_NESTED} characters")
        self._weights[id(value)] = weight, value
        return value

    def _refuse(self) -> NoReturn:
        raise OverflowError(f"more than {MAX_CHARACTERS} characters")


def check_size(size: int) -> None:
    """OverflowError for what is too large to be made at once."""
    if size > _MOST_NESTED:
        raise OverflowError(f"more than {_MOST_NESTED} characters at once")
