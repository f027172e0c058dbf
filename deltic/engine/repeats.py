"""Notices an answer that goes round in circles."""

from __future__ import annotations

from collections import deque
from operator import ge

LONGEST = 128
"""Tokens of the longest group whose repetition is noticed."""
_SHORT = 8  # a run of dashes or spaces and a column of zeros are no circle: shorter groups must fill as many tokens


class Repeats:
    """Whether the end of an answer is the same group of 1 to LONGEST tokens again and again.

    times: how often a group stands there in a row when it is enough, at least 2. Groups of fewer than 8 tokens must
    fill as many tokens as a group of 8 would: a single token is enough 8 * times times. Takes the same short time for
    every token, however long the answer is.
    """

    def __init__(self, times: int) -> None:
        # by period: how many of the last tokens, one after the other, equal the token a period before, and when
        # these and the period before the first of them are enough
        self._equal = [0] * LONGEST
        self._enough = [times * max(period, _SHORT) - period for period in range(1, LONGEST + 1)]
        self._last: deque[int | None] = deque([None] * LONGEST, maxlen=LONGEST)

    def push(self, token: int, /) -> bool:
        """Take the next token; True if the answer goes round in circles with it."""
        self._equal = [equal + 1 if before == token else 0
                       for equal, before in zip(self._equal, self._last, strict=True)]
        self._last.appendleft(token)
        return any(map(ge, self._equal, self._enough))
