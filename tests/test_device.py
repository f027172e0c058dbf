"""`--device auto`: the device that a machine has."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from conftest import FIND_DEVICE

from deltic import LLM
from deltic.config import EngineConfig
from deltic.engine.arguments import settled
from deltic.errors import ConfigError
from deltic.ops import capabilities


def machine(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    """One with a GPU of this compute capability, or with none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA T4")
    monkeypatch.setattr(capabilities, "find_device", FIND_DEVICE)


@pytest.mark.parametrize(("capability", "device", "budget"), [
    (None, "cpu", 512), ((8, 0), "cuda", 8192), ((9, 0), "cuda", 8192), ((7, 5), "cpu", 512)])
def test_auto_device_selects_a_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None,
                                          device: str, budget: int) -> None:
    machine(monkeypatch, capability)
    found = settled(EngineConfig())
    assert (found.device, found.token_budget) == (device, budget)


def test_too_old_gpu_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    machine(monkeypatch, (7, 5))
    with caplog.at_level(logging.WARNING, "deltic"):
        settled(EngineConfig())
    assert "T4 has compute capability 7.5, less than 8.0: the model runs on the CPU (`device='cuda'`" in caplog.text


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_given_device_is_kept(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    machine(monkeypatch, (9, 0))
    given = EngineConfig(device=device, token_budget=100)
    assert settled(given) is given


def test_a_budget_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, (9, 0))
    assert settled(EngineConfig(token_budget=100)).token_budget == 100


@pytest.mark.parametrize(("given", "name"), [
    ({"kv_dtype": "fp8"}, "kv_dtype"), ({"quant": "fp8"}, "quant"), ({"gpu_memory_utilization": 0.5},
                                                                    "gpu_memory_utilization")])
def test_gpu_options_are_refused_without_a_gpu(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any],
                                                            name: str) -> None:
    machine(monkeypatch, None)
    with pytest.raises(ConfigError, match="give device cuda") as caught:
        LLM("tiny", **given)
    assert caught.value.option == name
