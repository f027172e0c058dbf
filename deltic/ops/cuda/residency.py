"""Which experts of a model are on a card, and which come there: of the host alone.

In numpy, as torch would wake all its threads for these few numbers, which then take the cores from those that compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_HALF_LIFE = 512
"""Steps after which it counts half that an expert was wanted."""
_MORE, _MARGIN = 1.25, 2.0
"""An expert comes to the card if it was wanted so many times as often as the one that leaves, and so much more."""


class Exchange(NamedTuple):
    """An expert of a layer that comes to the card, and the one that leaves it."""

    layer: int
    comes: int
    leaves: int


class Residency:
    """Of each layer equally many experts.

    resident [layers, E] bool: who is on the card. places [layers, E] int64: where there; -1: nowhere.
    scores [layers, E] float32: how often each was wanted lately.
    hits, misses: by layer, those wanted by steps that were on the card, and that were not.
    """

    def __init__(self, layers: int, count: int, refresh: int) -> None:
        """refresh: steps between two calls of `learn`."""
        self.resident = np.zeros((layers, count), bool)
        self.places = np.full((layers, count), -1, np.int64)
        self.scores = np.zeros((layers, count), np.float32)
        self.hits, self.misses = ([0] * layers for _ in range(2))
        self._known = np.zeros((layers, count), np.int64)
        self._decay = np.float32(0.5 ** (refresh / _HALF_LIFE))

    def begin(self, slots: int, scores: Sequence[Sequence[float]] | None) -> None:
        """Give so many experts of each layer a place, layer by layer: those with the highest scores, of equals, and
        without scores, the first."""
        if scores is not None:
            self.scores[:] = scores
        for layer, own in enumerate(self.scores):
            order = np.argsort(-own, kind="stable")[:slots]
            self.places[layer, order] = layer * slots + np.arange(slots)
            self.resident[layer, order] = True

    def learn(self, wanted: NDArray[np.int64]) -> list[int]:
        """wanted [layers, E]: the steps so far that wanted each. Returns by layer how many of those since the last call
        were not on the card."""
        fresh = wanted - self._known
        self._known = wanted.copy()
        hits, all_wanted = (fresh * self.resident).sum(1).tolist(), fresh.sum(1).tolist()
        missed = [every - hit for hit, every in zip(hits, all_wanted, strict=True)]
        for layer, (hit, miss) in enumerate(zip(hits, missed, strict=True)):
            self.hits[layer] += hit
            self.misses[layer] += miss
        self.scores = self.scores * self._decay + fresh.astype(np.float32)
        return missed

    def choose(self, most: int) -> list[Exchange]:
        """At most so many exchanges that pay, one of a layer, the best first."""
        worst = np.where(self.resident, self.scores, np.inf)
        best = np.where(self.resident, -1.0, self.scores)
        leaves, comes, layers = worst.argmin(1), best.argmax(1), np.arange(len(worst))
        gain = best[layers, comes] - worst[layers, leaves] * _MORE - _MARGIN
        order = np.argsort(-gain, kind="stable")[:most]
        return [Exchange(int(layer), int(comes[layer]), int(leaves[layer])) for layer in order if gain[layer] > 0]

    def exchange(self, one: Exchange, place: int) -> int:
        """It has come to this place; returns the one that is free."""
        layer, comes, leaves = one
        free = int(self.places[layer, leaves])
        self.places[layer, comes], self.places[layer, leaves] = place, -1
        self.resident[layer, comes], self.resident[layer, leaves] = True, False
        return free
