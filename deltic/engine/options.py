"""Keyword options to an `EngineConfig`, and the device that it leaves open."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final

import torch

from deltic.config import AUTO, EngineConfig
from deltic.errors import ConfigError

log = logging.getLogger("deltic")
_CAPABILITY: Final = (8, 0)
"""Of the oldest GPUs with the arithmetic that models are made for."""


def engine_config(options: Mapping[str, Any], others: Sequence[str] = ()) -> EngineConfig:
    """EngineConfig of these fields; ConfigError names an option that does not exist, and those that do. others: that
    the caller takes besides."""
    known = [f.name for f in fields(EngineConfig)]
    for name in options:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}; there are {', '.join([*others, *known])}", name)
    return EngineConfig(**options)


def settled(options: EngineConfig) -> EngineConfig:
    """The options with a device: where they leave it open the one that is there. ConfigError names an option that does
    not suit it."""
    return replace(options, device=found_device()) if options.device == AUTO else options


def found_device() -> str:
    """`cuda` where torch finds a GPU that serves, else `cpu`."""
    if not torch.cuda.is_available():
        return "cpu"
    capability = torch.cuda.get_device_capability()
    if capability >= _CAPABILITY:
        return "cuda"
    log.warning("%s has compute capability %d.%d, less than %d.%d: the model runs on the CPU (`device='cuda'` tries "
                "the GPU all the same)", torch.cuda.get_device_name(), *capability, *_CAPABILITY)
    return "cpu"
