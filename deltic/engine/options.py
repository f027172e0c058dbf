"""Keyword options to an `EngineConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from deltic.config import EngineConfig
from deltic.errors import ConfigError


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    """EngineConfig of these fields; ConfigError names an option that does not exist."""
    known = [f.name for f in fields(EngineConfig)]
    for name in options:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}; there are {', '.join(known)}", name)
    return EngineConfig(**options)
