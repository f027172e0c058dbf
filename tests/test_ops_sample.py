"""Drawing tokens: exact probabilities, keyed noise, and the same draws from every backend and in every batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_cases import generator, randn, same_bits, uniform
from torch import Tensor

from deltic.ops import backends
from deltic.ops.noise import gumbel, sample_key
from deltic.ops.types import Adjust, Sampled, Sampling

OPS = backends()
WORD = 1 << 64
GOLDEN = 0x9E3779B97F4A7C15

KEYS = [
    2558736989570252433,
    7702586659592502839,
    -4878082159194234212,
    -3753958170452964443,
]
NOISE = [
    [0.4023417539302211, -0.7143951177675684, -0.15901149815063545],
    [-1.4769834823322059, -0.7127349559443142, 0.582781451988404],
    [-0.5222437860471697, 0.006437163421141465, 1.452056188506126],
    [0.04135777036111457, 0.957784642176809, -0.06442173090488383],
]

every_backend = pytest.mark.parametrize("backend", sorted(OPS))


# Noise


def finalise(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORD
    return word ^ (word >> 31)


def undo_shift(word: int, bits: int) -> int:
    result = word
    for _ in range(64 // bits):
        result = word ^ (result >> bits)
    return result


def key_of_word(word: int) -> int:
    """The signed key whose noise for token 0 comes from this finalised word."""
    word = undo_shift(word, 31) * pow(0x94D049BB133111EB, -1, WORD) % WORD
    word = undo_shift(undo_shift(word, 27) * pow(0xBF58476D1CE4E5B9, -1, WORD) % WORD, 30)
    return word - WORD if word >> 63 else word


def noise_of_word(word: int) -> float:
    return -math.log(-math.log(((word >> 11) + 0.5) * 2.0**-53))


def test_noise_is_splitmix64() -> None:
    """Its published first outputs for seed 0 are the words of key 0 and tokens 1, 2, 3."""
    words = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    noise = gumbel(torch.tensor([0]), torch.tensor([1, 2, 3]))
    assert noise.dtype == torch.float64
    torch.testing.assert_close(noise[0].tolist(), [noise_of_word(word) for word in words], rtol=1e-14, atol=0)


def test_golden_noise() -> None:
    """These numbers are a promise: a new value is other answers for old seeds."""
    assert [sample_key(0, 0, 0), sample_key(1, 2, 3), sample_key(-1, 0, 7), sample_key(1 << 63, 1, 262143)] == KEYS
    noise = gumbel(torch.tensor(KEYS), torch.tensor([0, 1, 248_319]))
    torch.testing.assert_close(noise, torch.tensor(NOISE, dtype=torch.float64), rtol=1e-13, atol=0)


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, 300_000))
def test_noise_equals_its_formula(key: int, token: int) -> None:
    noise = float(gumbel(torch.tensor([key]), torch.tensor([token]))[0, 0])
    assert math.isclose(noise, noise_of_word(finalise((key + token * GOLDEN) % WORD)), rel_tol=1e-12, abs_tol=1e-12)


@given(st.integers(-(1 << 63), WORD - 1), st.integers(0, 127), st.integers(0, 1 << 20))
def test_keys_are_int64_and_depend_on_every_part(seed: int, choice: int, position: int) -> None:
    key = sample_key(seed, choice, position)
    assert -(1 << 63) <= key < 1 << 63
    assert key == sample_key(seed % WORD, choice, position)
    assert len({key, sample_key(seed + 1, choice, position), sample_key(seed, choice + 1, position),
                sample_key(seed, choice, position + 1)}) == 4


def test_noise_is_finite_at_both_ends() -> None:
    keys = torch.tensor([key_of_word(0), key_of_word(WORD - 1)])
    low, high = gumbel(keys, torch.tensor([0]))[:, 0].tolist()
    assert math.isclose(low, noise_of_word(0))
    assert 36 < high < 37


def test_noise_is_gumbel_and_independent() -> None:
    keys = torch.tensor([sample_key(5, 0, position) for position in range(400)])
    noise = gumbel(keys, torch.arange(500))
    assert abs(float(noise.mean()) - 0.57722) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.03
    for left, right in ((noise[:, 1:], noise[:, :-1]), (noise[1:], noise[:-1])):
        correlation = torch.corrcoef(torch.stack([left.flatten(), right.flatten()]))[0, 1]
        assert abs(float(correlation)) < 0.01


def test_rows_with_different_ids() -> None:
    keys, ids = torch.tensor([3, -4]), torch.tensor([[7, 0, 2], [1, 9, 7]])
    assert same_bits(gumbel(keys, ids), gumbel(keys, torch.arange(10)).gather(1, ids))


# Probabilities


def make_sampling(rows: Sequence[tuple[float, int, float, float]], keys: Sequence[int], **more: object) -> Sampling:
    """rows: temperature, top_k, top_p, min_p of each; the hints are those that a careful caller sets."""
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    made = Sampling(
        temperature=torch.tensor(temperature, dtype=torch.float32), top_k=torch.tensor(top_k),
        top_p=torch.tensor(top_p, dtype=torch.float32), min_p=torch.tensor(min_p, dtype=torch.float32),
        key=torch.tensor(keys), greedy=not any(temperature),
        filtered=any(row[1] or row[2] < 1 or row[3] for row in rows))
    return replace(made, **more)  # type: ignore[arg-type]


def exact_chances(logits: Sequence[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """The probabilities of the draw in plain arithmetic."""
    weights = [math.exp(logit / temperature) for logit in logits]
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    order = order[:top_k] if top_k else order
    total, kept, mass = sum(weights[token] for token in order), [], 0.0
    for token in order:
        if kept and mass >= top_p:
            break
        kept.append(token)
        mass += weights[token] / total
    kept = [token for token in kept if weights[token] >= min_p * weights[order[0]]]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(logits))]


def chi_square_excess(tokens: Tensor, chances: Sequence[float]) -> float:
    """How far the chi-square statistic exceeds its 1 - 1e-5 quantile (Wilson and Hilferty); infinite if a token
    was drawn that cannot be."""
    counts = torch.bincount(tokens, minlength=len(chances)).tolist()
    if any(count and not chance for count, chance in zip(counts, chances, strict=True)):
        return math.inf
    expected = [chance * len(tokens) for chance in chances]
    statistic = sum((count - mean) ** 2 / mean for count, mean in zip(counts, expected, strict=True) if mean)
    freedom = sum(chance > 0 for chance in chances) - 1
    spread = 2 / (9 * freedom) if freedom else 0.0
    return statistic - (freedom * (1 - spread + 4.265 * math.sqrt(spread)) ** 3 if freedom else 1e-6)


LOGITS = (1.0, 2.0, 0.3, 1.0, -0.5, -1.5, 0.9)
DRAWS = 3000
SETTINGS = {
    "plain": (1.0, 0, 1.0, 0.0),
    "cold": (0.4, 0, 1.0, 0.0),
    "hot": (2.5, 0, 1.0, 0.0),
    "top_k with a tie": (1.0, 2, 1.0, 0.0),
    "top_k": (1.3, 4, 1.0, 0.0),
    "top_k of all": (1.0, 7, 1.0, 0.0),
    "top_k beyond all": (1.0, 20, 1.0, 0.0),
    "top_p": (1.0, 0, 0.7, 0.0),
    "top_p of the best alone": (1.0, 0, 0.05, 0.0),
    "top_p of nothing": (1.0, 0, 0.0, 0.0),
    "min_p": (1.0, 0, 1.0, 0.3),
    "min_p after temperature": (3.0, 0, 1.0, 0.6),
    "top_p of what top_k left": (1.0, 3, 0.7, 0.0),
    "all filters": (1.5, 5, 0.9, 0.35),
}


def draw_many(backend: str, logits: Tensor, setting: tuple[float, int, float, float], **more: object) -> Tensor:
    keys = [sample_key(11, 0, position) for position in range(DRAWS)]
    sampling = make_sampling([setting] * DRAWS, keys, **more)
    return OPS[backend].sample(logits.expand(DRAWS, -1).clone(), sampling).tokens


@every_backend
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.covering
def test_draws_have_the_exact_probabilities(name: str, backend: str) -> None:
    tokens = draw_many(backend, torch.tensor(LOGITS), SETTINGS[name])
    assert chi_square_excess(tokens, exact_chances(LOGITS, *SETTINGS[name])) <= 0


@cache
def plain_draws() -> Tensor:
    return draw_many("reference", torch.tensor(LOGITS), SETTINGS["plain"])


@pytest.mark.parametrize("other", [(1.2, 0, 1.0, 0.0), (1.0, 6, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.1)])
def test_chi_square_detects_other_settings(other: tuple[float, int, float, float]) -> None:
    assert chi_square_excess(plain_draws(), exact_chances(LOGITS, *other)) > 0


@every_backend
def test_penalties_change_the_probabilities(backend: str) -> None:
    """Repetition first, then the offset; each on its own side of zero."""
    changes = [(0, 1.5, 0.0), (1, 2.0, -0.4), (4, 1.5, 0.0), (5, 1.0, 2.5), (6, 1.0, -math.inf), (2, 0.5, 0.0)]
    wanted = list(LOGITS)
    for token, repetition, offset in changes:
        value = wanted[token]
        wanted[token] = (value / repetition if value > 0 else value * repetition) + offset
    rows = torch.arange(DRAWS).repeat_interleave(len(changes))
    tokens, repetitions, offsets = (list(column) for column in zip(*changes, strict=True))
    adjust = Adjust(rows, torch.tensor(tokens).repeat(DRAWS), torch.tensor(repetitions).repeat(DRAWS),
                    torch.tensor(offsets).repeat(DRAWS))
    for setting in ((1.0, 0, 1.0, 0.0), (0.7, 4, 0.95, 0.0)):
        drawn = draw_many(backend, torch.tensor(LOGITS), setting, adjust=adjust)
        assert chi_square_excess(drawn, exact_chances(wanted, *setting)) <= 0
        assert not (drawn == 6).any()


# Sameness


def random_settings(seed: int, count: int) -> list[tuple[float, int, float, float]]:
    rng = generator(seed)

    def pick(*options: float) -> float:
        return options[int(torch.randint(0, len(options), (1,), generator=rng))]

    return [(pick(0.0, 0.3, 0.7, 1.0, 1.0, 2.0), int(pick(0, 0, 1, 3, 40, 255, 256, 257, 900)),
             pick(1.0, 1.0, 0.1, 0.5, 0.95, 0.9999), pick(0.0, 0.0, 0.01, 0.2, 1.0)) for _ in range(count)]


def random_adjust(seed: int, rows: int, vocabulary: int) -> Adjust:
    """About three entries for every second row."""
    rng = generator(seed)
    flat = torch.randperm(rows * vocabulary, generator=rng)[: 3 * rows]
    flat = flat[(flat // vocabulary) % 2 == 0]
    offset = randn(rng, len(flat)).float()
    offset[::3] = -math.inf
    return Adjust(flat // vocabulary, flat % vocabulary, uniform(rng, len(flat), low=0.5, high=2.0).float(), offset)


SPREADS = {"peaked": 6.0, "ordinary": 2.0, "flat": 0.01}


def random_logits(seed: int, rows: int, vocabulary: int, spread: str, ties: bool) -> Tensor:
    logits = randn(generator(seed), rows, vocabulary) * SPREADS[spread]
    return (((logits / SPREADS[spread]) * 2).round() / 2 * SPREADS[spread] if ties else logits).float()


@pytest.mark.covering
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("vocabulary", [5, 300, 1000])
def test_backends_draw_the_same_tokens(vocabulary: int, spread: str, ties: bool) -> None:
    rows = 48
    logits = random_logits(vocabulary, rows, vocabulary, spread, ties)
    keys = [sample_key(3, 1, row) for row in range(rows)]
    mixed = random_settings(vocabulary, rows)
    hot = [(1.0, 0, 1.0, 0.0)] * rows
    cold = [(0.0, 0, 1.0, 0.0)] * rows
    for settings in (mixed, hot, cold):
        for adjust in (None, random_adjust(vocabulary, rows, vocabulary)):
            sampling = make_sampling(settings, keys, adjust=adjust, top_logprobs=3)
            slow = OPS["reference"].sample(logits.clone(), sampling)
            for name in ("torch", "cpu"):
                assert same_reports(OPS[name].sample(logits.clone(), sampling), slow)
                bare = OPS[name].sample(logits.clone(), replace(sampling, top_logprobs=None))
                assert bare.tokens.tolist() == slow.tokens.tolist()
                assert bare.healthy.tolist() == slow.healthy.tolist()


def same_reports(left: Sampled, right: Sampled) -> bool:
    assert left.tokens.tolist() == right.tokens.tolist()
    assert left.healthy.tolist() == right.healthy.tolist()
    for name in ("logprobs", "top_logprobs"):
        torch.testing.assert_close(getattr(left, name), getattr(right, name), rtol=1e-6, atol=1e-6)
    return left.top_tokens is None or torch.equal(left.top_tokens, right.top_tokens)  # type: ignore[arg-type]


def row_of(adjust: Adjust, row: int) -> Adjust:
    own = adjust.row == row
    return Adjust(adjust.row[own] * 0, adjust.token[own], adjust.repetition[own], adjust.offset[own])


@every_backend
@pytest.mark.parametrize("vocabulary", [7, 600])
def test_row_draws_the_same_in_a_batch(backend: str, vocabulary: int) -> None:
    rows = 40
    logits = random_logits(1, rows, vocabulary, "ordinary", False)
    keys = [sample_key(4, 0, row) for row in range(rows)]
    settings, adjust = random_settings(2, rows), random_adjust(3, rows, vocabulary)
    together = OPS[backend].sample(logits.clone(), make_sampling(settings, keys, adjust=adjust)).tokens.tolist()
    for row in range(rows):
        sampling = make_sampling(settings[row : row + 1], keys[row : row + 1], adjust=row_of(adjust, row))
        assert OPS[backend].sample(logits[row : row + 1].clone(), sampling).tokens.tolist() == [together[row]]


@every_backend
def test_greedy_takes_the_lowest_of_the_best(backend: str) -> None:
    logits = torch.zeros(3, 1000)
    logits[0, [400, 17, 999]] = 1.0
    logits[1, 999] = 2.0
    logits[2, 5:] = 3.0
    sampling = make_sampling([(0.0, 5, 0.5, 0.5)] * 3, [1, 2, 3])
    assert OPS[backend].sample(logits.clone(), sampling).tokens.tolist() == [17, 999, 5]
    mixed = make_sampling([(0.0, 0, 1.0, 0.0)] * 2 + [(0.01, 1, 1.0, 0.0)], [1, 2, 3])
    assert OPS[backend].sample(logits.clone(), mixed).tokens.tolist() == [17, 999, 5]


@every_backend
def test_single_allowed_token_is_drawn(backend: str) -> None:
    vocabulary = 40
    others = torch.tensor([token for token in range(vocabulary) if token != 23])
    adjust = Adjust(torch.zeros_like(others), others, torch.ones(len(others)), torch.full((len(others),), -math.inf))
    for setting in ((0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.5, 10, 0.9, 0.1)):
        sampling = make_sampling([setting], [77], adjust=adjust)
        assert OPS[backend].sample(randn(generator(1), 1, vocabulary).float(), sampling).tokens.tolist() == [23]


@every_backend
def test_health_and_tokens_of_broken_rows(backend: str) -> None:
    logits = randn(generator(2), 6, 30).float()
    logits[1, 4] = math.nan
    logits[2, 9] = math.inf
    logits[3, 2] = -math.inf
    logits[4] = 0.25
    logits[5] = torch.linspace(0, 2e-6, 30)
    for temperature in (0.0, 1.0):
        sampling = make_sampling([(temperature, 3, 0.9, 0.0)] * 6, list(range(6)), top_logprobs=2)
        result = OPS[backend].sample(logits.clone(), sampling)
        assert result.healthy.tolist() == [True, False, False, False, False, True]
        assert result.healthy.dtype == torch.bool and result.tokens.dtype == torch.int64
        assert ((result.tokens >= 0) & (result.tokens < 30)).all()


@every_backend
def test_forbidden_token_leaves_row_healthy(backend: str) -> None:
    adjust = Adjust(torch.tensor([0]), torch.tensor([3]), torch.tensor([1.0]), torch.tensor([-math.inf]))
    sampling = make_sampling([(1.0, 0, 1.0, 0.0)], [5], adjust=adjust)
    assert OPS[backend].sample(torch.tensor([LOGITS]), sampling).healthy.tolist() == [True]


@every_backend
@pytest.mark.parametrize("count", [0, 1, 4])
def test_log_probabilities_are_of_the_raw_logits(backend: str, count: int) -> None:
    logits = torch.tensor([LOGITS, LOGITS])
    adjust = Adjust(torch.tensor([0]), torch.tensor([5]), torch.tensor([1.0]), torch.tensor([100.0]))
    sampling = make_sampling([(0.5, 2, 0.5, 0.1), (0.0, 0, 1.0, 0.0)], [1, 2], adjust=adjust, top_logprobs=count)
    result = OPS[backend].sample(logits.clone(), sampling)
    chances = [math.log(chance) for chance in exact_chances(LOGITS, 1.0, 0, 1.0, 0.0)]
    assert result.tokens.tolist() == [5, 1]
    assert result.logprobs is not None and result.top_tokens is not None and result.top_logprobs is not None
    assert result.logprobs.dtype == result.top_logprobs.dtype == torch.float32
    torch.testing.assert_close(result.logprobs.tolist(), [chances[5], chances[1]], rtol=1e-6, atol=1e-6)
    assert result.top_tokens.tolist() == [[1, 0, 3, 6][:count]] * 2
    wanted = [[chances[token] for token in row] for row in result.top_tokens.tolist()]
    torch.testing.assert_close(result.top_logprobs, torch.tensor(wanted), rtol=1e-6, atol=1e-6)


@every_backend
def test_no_rows(backend: str) -> None:
    empty = torch.empty(0)
    sampling = Sampling(empty, empty.long(), empty, empty, empty.long())
    assert OPS[backend].sample(torch.empty(0, 9), sampling).tokens.shape == (0,)
