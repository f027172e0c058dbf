"""Settings of the whole test room."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("deltic", deadline=None, derandomize=True, database=None,
                          suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
settings.load_profile("deltic")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Models set the threads that torch computes with; small ones are fastest with one, and by far so on a machine that
    has other work."""
    torch.set_num_threads(1)
