"""Strict readers of JSON values. Each error names the key and the allowed values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deltic.errors import ModelError, show


def required(source: Mapping[str, Any], key: str) -> Any:
    value = source.get(key)
    if value is None:
        raise ModelError(f"{key} is absent; take the config.json that belongs to the weights")
    return value


def integer(source: Mapping[str, Any], key: str, low: int, high: int) -> int:
    value = required(source, key)
    if type(value) is not int or not low <= value <= high:
        raise ModelError(f"{key} must be an integer from {low} to {high}, not {show(value)}")
    return value


def number(source: Mapping[str, Any], key: str, low: float, high: float) -> float:
    value = required(source, key)
    if type(value) not in (int, float) or not low <= value <= high:
        raise ModelError(f"{key} must be a number from {low:g} to {high:g}, not {show(value)}")
    return float(value)


def flag(source: Mapping[str, Any], key: str, default: bool) -> bool:
    value = source.get(key)
    if value is not None and type(value) is not bool:
        raise ModelError(f"{key} must be true or false, not {show(value)}")
    return default if value is None else value


def token_ids(source: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Reads one id or a list of ids."""
    value = source.get(key)
    ids = [] if value is None else value if isinstance(value, list | tuple) else [value]
    if any(type(token) is not int or not 0 <= token < 1 << 31 for token in ids):
        raise ModelError(f"{key} must be a token id or a list of them, not {show(value)}")
    return tuple(dict.fromkeys(ids))
