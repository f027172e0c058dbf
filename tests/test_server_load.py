"""Many clients, some of them bad, and the server's ends in the middle of that: `bench/clients.py`, shortened."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"
sys.path.insert(0, str(BENCH))
import clients  # noqa: E402

sys.path.remove(str(BENCH))


@pytest.mark.slow
def test_load_with_disconnects_and_clients_that_do_not_read() -> None:
    found = clients.run(clients.Load(clients=100, deaf=6, minutes=0.4, memory="128MiB"))
    assert all(found["holds"].values()), found
    assert found["answers"] > 100 and found["vanished"] > 30
