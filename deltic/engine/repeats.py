"""Notices an answer that goes round in circles."""

from __future__ import annotations

from collections import defaultdict, deque

LONGEST = 128
"""Tokens of the longest group whose repetition is noticed."""
_SHORT = 8  # a run of dashes or spaces and a column of zeros are no circle: shorter groups must fill as many tokens


class Repeats:
    """Whether the end of an answer is the same group of 1 to LONGEST tokens again and again.

    times: how often a group stands there in a row when it is enough, at least 2. Groups of fewer than 8 tokens must
    fill as many tokens as a group of 8 would: a single token is enough 8 * times times. What a token takes grows with
    how often it stands among the last LONGEST, however long the answer is.
    """

    def __init__(self, times: int) -> None:
        # by period: how many of the last tokens, one after the other, equal the token a period before, where any do;
        # and when these and the period before the first of them are enough
        self._equal: dict[int, int] = {}
        self._enough = [times * max(period, _SHORT) - period for period in range(LONGEST + 1)]
        # the last tokens, and where each of them stands
        self._last: deque[int] = deque()
        self._places: defaultdict[int, deque[int]] = defaultdict(deque)
        self._count = 0

    def push(self, token: int, /) -> bool:
        """Take the next token; True if the answer goes round in circles with it."""
        before, enough, places, count = self._equal, self._enough, self._places[token], self._count
        equal = self._equal = {count - place: before.get(count - place, 0) + 1 for place in places}
        places.append(count)
        self._last.append(token)
        self._count += 1
        if len(self._last) > LONGEST:
            first = self._last.popleft()
            self._places[first].popleft()
            if not self._places[first]:
                del self._places[first]
        return any(number >= enough[period] for period, number in equal.items())
