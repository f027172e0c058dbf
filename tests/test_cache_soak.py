"""Random requests against caches that are far too small, over several lives of an engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"
sys.path.insert(0, str(BENCH))
import soak  # noqa: E402

sys.path.remove(str(BENCH))


def check(figures: soak.Figures, requests: int) -> None:
    """Everything that can happen has happened; the accounts were checked on the way."""
    assert figures.requests == requests and sum(figures.ends.values()) >= requests
    assert set(figures.ends) == {"stop", "length", "abort"}
    assert figures.lives > 1 and figures.evictions and figures.checks >= requests // soak.CHECK_EVERY
    assert figures.reused_tokens > figures.prompt_tokens // 3
    assert all(tier["bytes"] <= tier["budget"] and tier["hits"] for tier in figures.tiers.values())


def test_soak_of_a_hundred_requests() -> None:
    check(soak.soak(100, lives=2), 100)


@pytest.mark.slow
def test_soak_of_twenty_thousand_requests() -> None:
    figures = soak.soak(20_000)
    check(figures, 20_000)
    assert figures.preemptions and all(tier["evictions"] for tier in figures.tiers.values())
