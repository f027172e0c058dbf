"""Which experts come to a card, against the same rules written out one number at a time."""

from __future__ import annotations

import random

import numpy as np
import pytest

from deltic.ops.cuda.expert_offload import Exchange, Residency

LAYERS, COUNT, SLOTS = 3, 11, 4


def begun(scores: list[list[float]] | None = None) -> Residency:
    residency = Residency(LAYERS, COUNT, 1)
    residency.begin(SLOTS, scores)
    return residency


def test_initial_residency() -> None:
    assert begun().places.tolist() == [[*range(4 * layer, 4 * layer + 4), *[-1] * 7] for layer in range(LAYERS)]
    known = [[float(expert % 5) for expert in range(COUNT)]] * LAYERS
    residency = begun(known)
    assert [np.flatnonzero(own).tolist() for own in residency.resident] == [[3, 4, 8, 9]] * LAYERS
    assert residency.scores.tolist() == known
    assert residency.places[1, [4, 9, 3, 8]].tolist() == [4, 5, 6, 7]  # best first, of equals the first


def test_hits_and_misses_since_the_last_call() -> None:
    residency, wanted = begun(), np.zeros((LAYERS, COUNT), np.int64)
    wanted[0, [1, 7]], wanted[2, 10] = 3, 1
    assert residency.learn(wanted) == [3, 0, 1]
    assert (residency.hits, residency.misses) == ([3, 0, 0], [3, 0, 1])
    wanted[0, 1] += 2  # what was given is the caller's, and changes
    assert residency.learn(wanted) == [0, 0, 0]
    assert (residency.hits, residency.misses) == ([5, 0, 0], [3, 0, 1])


@pytest.mark.parametrize("seed", range(4))
def test_exchanges_are_ordered_by_gain(seed: int) -> None:
    draw, residency = random.Random(seed), begun()
    wanted, free = np.zeros((LAYERS, COUNT), np.int64), [LAYERS * SLOTS, LAYERS * SLOTS + 1]
    scores = [[0.0] * COUNT for _ in range(LAYERS)]
    exchanged = 0
    for _ in range(300):
        for layer in range(LAYERS):
            for expert in draw.choices(range(COUNT), weights=[1 + (expert * 7 + layer) % 5 for expert in range(COUNT)],
                                       k=6):
                wanted[layer, expert] += 1
        before = residency._known.copy()
        residency.learn(wanted)
        expected = list[tuple[float, Exchange]]()
        for layer in range(LAYERS):
            scores[layer] = [old * 0.5 ** (1 / 512) + int(wanted[layer, expert] - before[layer, expert])
                             for expert, old in enumerate(scores[layer])]
            there = [expert for expert in range(COUNT) if residency.resident[layer, expert]]
            away = [expert for expert in range(COUNT) if expert not in there]
            leaves = min(there, key=scores[layer].__getitem__)
            comes = max(away, key=scores[layer].__getitem__)
            expected.append((scores[layer][comes] - scores[layer][leaves] * 1.25 - 2, Exchange(layer, comes, leaves)))
        assert np.allclose(residency.scores, scores, rtol=1e-4)
        worth = sorted((pair for pair in expected if pair[0] > 0), key=lambda pair: -pair[0])[:len(free)]
        found = residency.choose(len(free))
        gains = {one: gain for gain, one in expected}
        assert [gain for gain, _ in worth] == pytest.approx([gains[one] for one in found], abs=1e-3)
        for one in found:
            place = free.pop(0)
            free.append(residency.exchange(one, place))
            assert residency.places[one.layer, one.comes] == place and residency.resident[one.layer, one.comes]
            exchanged += 1
        there = residency.places[residency.resident].tolist()
        assert sorted([*there, *free]) == list(range(LAYERS * SLOTS + 2)), "two experts in one place, or none"
        assert (residency.places[~residency.resident] == -1).all() and (residency.resident.sum(1) == SLOTS).all()
    assert exchanged > 5
