"""A pytest plugin: writes a digest of all numbers that the native kernels gave to each test.

    PYTHONPATH=tests pytest -p kernel_bits --kernel-bits FILE tests/test_ops_cpu.py

Two compilations of the kernels are the same if their files are. The numbers are those of all tensors and arrays that
functions of the tests and of `deltic/ops/cpu` hold when they return.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Generator
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

_WATCHED = ("/ops/cpu/kernels.py", "/ops/cpu/step.py", "/ops/cpu/encoder.py", "/tests/test_ops_", "/tests/test_native_")
_LARGE = 1 << 22
"""Bytes: larger tensors are pools of weights."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernel-bits", required=True, type=Path)


def pytest_configure(config: pytest.Config) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills unwritten memory with fixed numbers
    config.pluginmanager.register(Recorder(config.getoption("--kernel-bits")))


class Recorder:
    """Digests by test."""

    def __init__(self, path: Path) -> None:
        self.path, self.digests = path, dict[str, str]()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        digest, count = blake2b(digest_size=16), 0

        def add(value: Any, depth: int = 0) -> None:
            nonlocal count
            if isinstance(value, torch.Tensor):
                plain = value.device.type == "cpu" and value.layout is torch.strided  # oneDNN's have no bytes to read
                if plain and 0 < value.numel() * value.element_size() < _LARGE:
                    whole = value.detach().clone(memory_format=torch.contiguous_format)
                    if whole.is_floating_point():
                        whole[whole.isnan()] = float("nan")  # IEEE 754 fixes no sign or payload
                    digest.update(whole.view(-1).view(torch.uint8).numpy().tobytes())
                    count += 1
            elif isinstance(value, np.ndarray) and value.dtype.kind in "fiu" and value.nbytes < _LARGE:
                digest.update(value.tobytes())
                count += 1
            elif depth < 3 and isinstance(value, (list, tuple)):
                for part in value:
                    add(part, depth + 1)
            elif depth < 3 and is_dataclass(value) and not isinstance(value, type):
                for field in fields(value):
                    add(getattr(value, field.name, None), depth + 1)

        def returned(frame: FrameType, event: str, result: object) -> None:
            if event == "return" and any(part in frame.f_code.co_filename for part in _WATCHED):
                add([*frame.f_locals.values()])
                add(result)

        sys.setprofile(returned)
        try:
            yield
        finally:
            sys.setprofile(None)
            self.digests[item.nodeid] = f"{digest.hexdigest()} {count}"

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps(self.digests, indent=1), encoding="utf-8")
