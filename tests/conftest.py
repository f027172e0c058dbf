"""Settings of the whole test room."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("deltic", deadline=None, derandomize=True, database=None,
                          suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
settings.load_profile("deltic")



def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the engines of the tests run")


def pytest_configure(config: pytest.Config) -> None:
    os.environ["DELTIC_TEST_DEVICE"] = config.getoption("--device")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Models set the threads that torch computes with; small ones are fastest with one, and by far so on a machine that
    has other work."""
    torch.set_num_threads(1)
