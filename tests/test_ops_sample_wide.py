"""Draws whose filters keep more tokens than are looked at first: as the reference draws them, and each row by itself,
whoever its neighbours are (L6)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from op_cases import generator, randn, same_bits
from test_ops_sample import chi_square_excess, exact_chances, make_sampling
from torch import Tensor

from deltic.ops import backends
from deltic.ops.noise import sample_key
from deltic.ops.types import Sampled, Sampling

OPS = backends()
Setting = tuple[float, int, float, float]
"""temperature, top_k, top_p, min_p."""

both = pytest.mark.parametrize("backend", ["torch", "cpu"])


def keys_of(count: int, seed: int = 1) -> list[int]:
    return [sample_key(seed, 0, position) for position in range(count)]


def settings_of(seed: int, count: int) -> list[Setting]:
    """Few with no filter, most with several, and many whose filters keep hundreds of tokens."""
    rng = generator(seed)

    def pick(*options: float) -> float:
        return options[int(torch.randint(0, len(options), (1,), generator=rng))]

    return [(pick(0.0, 0.3, 0.7, 1.0, 2.0, 2.0, 5.0), int(pick(0, 0, 1, 40, 255, 256, 257, 258, 300, 1000, 1 << 31)),
             pick(1.0, 1.0, 0.1, 0.5, 0.7, 0.95, 0.999), pick(0.0, 0.0, 0.0, 1e-4, 0.01, 0.2)) for _ in range(count)]


def logits_of(seed: int, rows: int, vocabulary: int, kind: str) -> Tensor:
    logits = randn(generator(seed), rows, vocabulary).float()
    return {"smooth": logits, "peaked": logits * 4, "ties": (logits * 2).round() / 2,
            "flat": logits * 1e-3}[kind].contiguous()


def alone(logits: Tensor, sampling: Sampling, row: int) -> tuple[Tensor, Sampling]:
    columns = {name: getattr(sampling, name)[row:row + 1] for name in ("temperature", "top_k", "top_p", "min_p", "key")}
    filtered = bool(columns["top_k"] or columns["top_p"] < 1 or columns["min_p"])
    return logits[row:row + 1].clone(), replace(sampling, **columns, filtered=filtered,
                                                greedy=not columns["temperature"])


@both
@pytest.mark.parametrize("kind", ["smooth", "peaked", "ties", "flat"])
@pytest.mark.parametrize("vocabulary", [257, 1500])
def test_draws_match_the_reference(vocabulary: int, kind: str, backend: str) -> None:
    rows = 150
    logits = logits_of(vocabulary, rows, vocabulary, kind)
    sampling = make_sampling(settings_of(vocabulary, rows), keys_of(rows))
    wanted = OPS["reference"].sample(logits.clone(), sampling).tokens.tolist()
    assert OPS[backend].sample(logits.clone(), sampling).tokens.tolist() == wanted


@both
def test_draws_match_the_reference_in_a_large_vocabulary(backend: str) -> None:
    rows = 12
    logits = logits_of(3, rows, 248_320, "smooth")
    settings: list[Setting] = [(2.0, 1000, 0.7, 0.0), (1.0, 0, 0.95, 0.0), (0.7, 20, 0.8, 0.0), (1.0, 0, 1.0, 0.05),
                               (3.0, 0, 0.5, 0.0), (1.0, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (2.0, 5000, 0.9, 0.01),
                               (1.0, 257, 1.0, 0.0), (1.0, 256, 0.9, 0.0), (1.0, 40_000, 1.0, 0.0), (2.0, 0, 1.0, 1e-3)]
    sampling = make_sampling(settings, keys_of(rows, 9))
    wanted = OPS["reference"].sample(logits.clone(), sampling).tokens.tolist()
    assert OPS[backend].sample(logits.clone(), sampling).tokens.tolist() == wanted


def report_bits(sampled: Sampled, row: int) -> list[Tensor]:
    parts = (sampled.tokens, sampled.healthy, sampled.logprobs, sampled.top_tokens, sampled.top_logprobs)
    return [part[row].clone() for part in parts if part is not None]


@pytest.mark.parametrize("kind", ["smooth", "ties", "flat"])
@pytest.mark.parametrize("reports", [None, 2])
def test_row_draws_the_same_beside_others(kind: str, reports: int | None) -> None:
    """On the compiled kernels, reports included, not by a bit; the rows need candidates of every number."""
    rows, vocabulary = 120, 3000
    logits = logits_of(5, rows, vocabulary, kind)
    sampling = make_sampling(settings_of(6, rows), keys_of(rows, 4), top_logprobs=reports)
    together = OPS["cpu"].sample(logits.clone(), sampling)
    for row in range(rows):
        given, own = alone(logits, sampling, row)
        found = OPS["cpu"].sample(given, own)
        assert all(map(same_bits, report_bits(found, 0), report_bits(together, row))), row


@both
def test_neighbour_with_all_candidates_changes_no_draw(backend: str) -> None:
    rows, vocabulary = 60, 2000
    logits = logits_of(7, 1, vocabulary, "smooth").expand(rows, -1)
    keys = keys_of(rows, 2)
    own: Setting = (2.0, 1000, 0.7, 0.0)
    wanted = OPS[backend].sample(logits.clone(), make_sampling([own] * rows, keys)).tokens.tolist()
    for neighbour in ((5.0, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (1.0, 0, 0.9999, 0.0), (1.0, 3, 0.5, 0.0)):
        pairs = make_sampling([own, neighbour] * rows, [key for key in keys for _ in range(2)])
        beside = OPS[backend].sample(logits.repeat_interleave(2, 0).contiguous(), pairs).tokens[::2]
        assert beside.tolist() == wanted


WIDE: list[Setting] = [(2.0, 700, 0.7, 0.0), (2.0, 400, 0.95, 0.0), (1.0, 300, 1.0, 0.0), (3.0, 0, 0.6, 0.0),
                       (2.0, 600, 0.9, 0.3), (2.0, 0, 1.0, 0.2)]


@both
@pytest.mark.parametrize("setting", WIDE)
def test_wide_draws_have_the_exact_probabilities(setting: Setting, backend: str) -> None:
    """Tokens are counted in groups of about equal mass, so that each is drawn often enough."""
    vocabulary, draws, groups = 1200, 1500, 20
    logits = logits_of(8, 1, vocabulary, "smooth")
    chances = exact_chances(logits[0].tolist(), *setting)
    order = sorted(range(vocabulary), key=lambda token: -chances[token])
    group, mass, sums = [-1] * vocabulary, 0.0, [0.0] * groups
    for token in order:
        if chances[token]:
            group[token] = min(int(mass * groups), groups - 1)
            mass += chances[token]
            sums[group[token]] += chances[token]
    sampling = make_sampling([setting] * draws, keys_of(draws, 5))
    drawn = OPS[backend].sample(logits.expand(draws, -1).contiguous(), sampling).tokens
    counted = torch.tensor(group)[drawn]
    assert int(counted.min()) >= 0, "a token was drawn that the filters rule out"
    assert len(set(drawn.tolist())) > sum(1 for chance in chances if chance) // 4
    assert chi_square_excess(counted, sums) <= 0


def test_groups_detect_a_wrong_mass() -> None:
    """The check above would not pass with top_p taken of too few tokens."""
    logits = logits_of(8, 1, 1200, "smooth")[0].tolist()
    chances, narrow = (exact_chances(logits, 2.0, top_k, 0.7, 0.0) for top_k in (700, 256))
    assert math.fsum(chance for chance, other in zip(chances, narrow, strict=True) if not other) > 0.4


@both
def test_broken_rows_change_no_other_row(backend: str) -> None:
    rows, vocabulary = 40, 1200
    logits = logits_of(10, rows, vocabulary, "smooth")
    sampling = make_sampling([(2.0, 700, 0.9, 0.0)] * rows, keys_of(rows))
    wanted = OPS[backend].sample(logits.clone(), sampling).tokens
    for row, value in enumerate((math.nan, math.inf, -math.inf)):
        logits[row * 10] = value
        logits[row * 10 + 1, ::3] = value
    found = OPS[backend].sample(logits, sampling)
    sick = [row * 10 + place for row in range(3) for place in range(2)]
    assert [row for row, healthy in enumerate(found.healthy.tolist()) if not healthy] == sick
    assert ((found.tokens >= 0) & (found.tokens < vocabulary)).all()
    for row in set(range(rows)) - set(sick):
        assert found.tokens[row] == wanted[row]
