"""How many tokens are drafted follows what was measured."""

from __future__ import annotations

import random

import pytest

from deltic.config import ModelConfig
from deltic.config.engine import parse_speculation
from deltic.errors import ConfigError
from deltic.params import Auto, Draft, Mtp, Ngram
from deltic.spec_decode.draft_length import Acceptance, AdaptiveDraftLength, Growth

BASE, PER_DRAFT = 0.02, 0.003


def served(share: float, steps: int, seconds: list[float], limit: int = 3, rows: int = 1,
           depth: AdaptiveDraftLength | None = None) -> tuple[float, list[int], AdaptiveDraftLength]:
    """Tokens per second of sequences whose every draft is right with this probability; `seconds`: of a step with so
    many drafts."""
    rng, depth = random.Random(1), depth or AdaptiveDraftLength(limit)
    known = [Acceptance.hopeful(limit) for _ in range(rows)]
    tokens, spent, chosen = 0, 0.0, []
    for _ in range(steps):
        drafts = depth.choose(known, rows)
        for acceptance in known:
            right = 0
            while right < drafts and rng.random() < share:
                right += 1
            acceptance.learn(drafts, right)
            tokens += right + 1
        spent += seconds[drafts]
        chosen.append(drafts)
        depth.timed(rows, drafts, seconds[drafts])
    return tokens / spent, chosen, depth


def linear(slope: float, limit: int = 3) -> list[float]:
    return [BASE * (1 + slope * drafts) for drafts in range(limit + 1)]


def test_good_drafts_are_used_fully() -> None:
    rate, chosen, _ = served(0.8, 400, linear(0.15))
    assert chosen[-100:].count(3) >= 95
    assert rate > 0.93 * (1 + 0.8 + 0.64 + 0.512) / linear(0.15)[3]


@pytest.mark.parametrize("rows", [1, 8])
def test_bad_drafts_cost_little(rows: int) -> None:
    rate, chosen, _ = served(0.0, 250, linear(0.25), rows=rows)
    assert rate >= 0.95 * rows / BASE
    assert 0 < sum(drafts > 0 for drafts in chosen[100:]) < 10, "it is tried again, but rarely"


def test_dear_drafts_are_not_made() -> None:
    """At large batches every row costs; then even good drafts do not pay."""
    rate, chosen, _ = served(0.6, 300, linear(0.9), rows=8)
    assert rate >= 0.95 * 8 / BASE and chosen[-1] == 0


MIXTURE = Growth.of(ModelConfig.preset("qwen3.5-35b-a3b"))


def test_each_draft_may_pass_other_experts() -> None:
    """Two tokens read nearly twice the experts of one; the thousandth token hardly any that nobody has read."""
    dense = Growth.of(ModelConfig.preset("qwen3.5-0.8b"))
    few = [MIXTURE.factor(1, drafts) - dense.factor(1, drafts) for drafts in range(4)]
    assert few[0] == 0 and few[1] == pytest.approx(0.34 * (1 - 8 / 256), abs=0.01)
    assert few[2] - few[1] > 0.9 * few[1] and few[3] - few[2] > 0.9 * (few[2] - few[1])
    assert MIXTURE.factor(512, 1) == pytest.approx(dense.factor(512, 1), abs=1e-3)


def test_bad_drafts_of_a_mixture_cost_little_from_the_first_on() -> None:
    """Who knows that they are dear gives up after fewer of them."""
    seconds = [BASE * MIXTURE.factor(1, drafts) for drafts in range(4)]
    lost = {}
    for name, growth in (("told", MIXTURE), ("not told", Growth())):
        rate, _, _ = served(0.0, 64, seconds, depth=AdaptiveDraftLength(3, growth))
        lost[name] = 1 - rate * BASE
    assert lost["told"] <= 0.025 and lost["not told"] > 1.5 * lost["told"], lost


def test_unmeasured_times_grow_as_in_a_mixture() -> None:
    """From that of one draft to that of three."""
    depth = AdaptiveDraftLength(3, MIXTURE)
    for drafts in (0, 0, 0, 1, 1):
        depth.timed(1, drafts, BASE * MIXTURE.factor(1, drafts))
    for drafts in range(4):
        assert depth._estimate(1, drafts) == pytest.approx(BASE * MIXTURE.factor(1, drafts))


def test_a_slow_minute_is_forgotten() -> None:
    """Steps without drafts that were measured while the machine was busy do not make drafts look good for ever."""
    depth = AdaptiveDraftLength(3)
    for _ in range(3):
        depth.timed(8, 0, 3 * BASE)
    _, chosen, _ = served(0.6, 600, linear(0.9), rows=8, depth=depth)
    assert chosen[-200:].count(0) > 180


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("at", [0, 1, 40])
def test_a_spike_does_not_decide(at: int, drafts: int) -> None:
    """Neither that drafts look bad, nor that they look good, for long."""
    for share, slope, wanted in ((0.8, 0.15, 3), (0.3, 0.5, 0)):
        depth = AdaptiveDraftLength(3)
        if at:
            served(share, at, linear(slope), depth=depth)
        depth.timed(1, drafts, 50 * BASE)
        _, chosen, _ = served(share, 60, linear(slope), depth=depth)
        assert sum((drafts > 0) == (wanted > 0) for drafts in chosen[30:]) >= 27, (share, chosen)


def test_step_right_after_drafts_is_not_timed_as_plain() -> None:
    """It brings the state forward, too. Else drafts look better than they are, and go on because of it."""
    depth = AdaptiveDraftLength(3)
    for _ in range(3):
        depth.timed(1, 0, BASE)
    for _ in range(9):
        depth.timed(1, 3, 2 * BASE)
        depth.timed(1, 0, 1.5 * BASE)
    assert depth.plain_seconds(1) == BASE
    for _ in range(9):
        depth.timed(1, 0, 1.2 * BASE)
    assert depth.plain_seconds(1) == 1.2 * BASE


def test_a_plain_step_is_measured_now_and_then_amid_good_drafts() -> None:
    """Two of them, of which the second counts."""
    _, chosen, depth = served(0.9, 300, linear(0.15))
    pairs = [place for place in range(20, 299) if chosen[place] == chosen[place + 1] == 0]
    assert len(pairs) >= 3 and chosen[20:].count(0) == 2 * len(pairs)
    assert depth.plain_seconds(1) == BASE


def test_it_comes_back() -> None:
    _, chosen, depth = served(0.0, 300, linear(0.15))
    assert chosen[-1] == 0
    _, chosen, _ = served(0.9, 2000, linear(0.15), depth=depth)
    assert chosen[-100:].count(3) >= 95


def test_the_best_depth_lies_between() -> None:
    """Where the second draft is mostly wrong, one is drafted."""
    rng, depth, known, chosen = random.Random(2), AdaptiveDraftLength(4), [Acceptance.hopeful(4)], list[int]()
    for _ in range(500):
        drafts = depth.choose(known, 1)
        right = 0
        while right < drafts and rng.random() < (0.9, 0.1, 0.1, 0.1)[right]:
            right += 1
        known[0].learn(drafts, right)
        depth.timed(1, drafts, linear(0.2, 4)[drafts])
        chosen.append(drafts)
    assert chosen[-100:].count(1) >= 90


def test_drafts_after_a_rejected_one_do_not_count() -> None:
    acceptance = Acceptance([0.5] * 3, [8] * 3)
    acceptance.learn(3, 1)
    assert acceptance.shares[0] > 0.5 > acceptance.shares[1] and acceptance.shares[2] == 0.5
    assert Acceptance([0.5, 0.5], [8, 8]).expected(2) == 1.75


@pytest.mark.parametrize(("text", "wanted"), [
    ("auto", Auto()), ("off", None), ("mtp", Mtp()), ("mtp:1", Mtp(1)), ("ngram:12", Ngram(12)), ("ngram", Ngram()),
    ("draft:org/name", Draft("org/name")), ("draft:org/name:5", Draft("org/name", 5)),
    ("draft:C:/models/x:2", Draft("C:/models/x", 2)), ("draft:C:/models/x", Draft("C:/models/x"))])
def test_options(text: str, wanted: object) -> None:
    assert parse_speculation(text) == wanted


@pytest.mark.parametrize(("text", "words"), [
    ("mtp:0", "write speculate=off"), ("ngram:13", "from 1 to 12"), ("mtp:-1", "from 1 to 12"), ("mtp:x", "from 1 to"),
    ("mtp:", "from 1 to 12"), ("draft", "names no model"), ("draft:", "names no model"), ("draft::3", "names no model"),
    ("draft:m:0", "write speculate=off"), ("on", "must be auto, off"), ("", "must be auto"), (3, "must be auto"),
    ("mtp:" + "9" * 5000, "from 1 to 12")])
def test_meaningless_options_are_refused(text: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse_speculation(text)
    assert caught.value.option == "speculate" and len(str(caught.value)) < 300
