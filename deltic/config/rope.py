"""Rotary embeddings: their keys in a config.json, and the scalings that extend a context."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from deltic.config.families import Family
from deltic.config.reading import flag, integer, number
from deltic.errors import ConfigError, ModelError, show

_MAX_CONTEXT: Final = 1 << 31
_MAX_FACTOR: Final = 1e6
_QWEN3_CONTEXT: Final = 40960
_QWEN3_TRAINED: Final = 32768
"""Qwen3's trained context. Its config.json adds 8192 untrained tokens for an answer; YaRN starts below."""
_FORMS: Final = "none, yarn:FACTOR or yarn:FACTOR:ORIGINAL, such as yarn:4 or yarn:4:262144"


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN (arXiv 2309.00071): divides slow frequencies by `factor`, keeps fast ones, and blends in between.

    original_context: length of the training context in tokens.
    attention_factor: multiplies the cosines and sines, so that rotated queries and keys grow by it.
    beta_fast, beta_slow: a frequency with at least beta_fast turns over the original context is kept; one with at most
        beta_slow turns is divided. truncate: the blend begins and ends at whole dimensions.
    """

    factor: float
    original_context: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @property
    def context(self) -> int:
        """Number of tokens of the extended context."""
        return min(int(self.original_context * self.factor), _MAX_CONTEXT)

    def divisors(self, theta: float, rotary_dim: int) -> tuple[float, ...]:
        """Returns the divisors of the frequencies, computed as in transformers (modeling_rope_utils.py)."""
        low, high = (self._dimension(turns, theta, rotary_dim) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        width = high - low or 0.001
        divided = [min(max((index - low) / width, 0.0), 1.0) for index in range(rotary_dim // 2)]
        return tuple(1 / (share / self.factor + 1 - share) for share in divided)

    def _dimension(self, turns: float, theta: float, rotary_dim: int) -> float:
        """Returns the (fractional) index of the frequency with this number of turns over the original context."""
        return rotary_dim * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding.

    mrope_section: number of frequencies of the time, height and width axis; empty: positions have one axis.
    factors: divisors of the rotary_dim / 2 frequencies; empty: all 1.
    yarn: the scaling that produced `factors`.
    """

    theta: float
    rotary_dim: int
    mrope_section: tuple[int, ...]
    factors: tuple[float, ...] = ()
    yarn: Yarn | None = None

    @property
    def attention_factor(self) -> float:
        """Factor for cosines and sines."""
        return self.yarn.attention_factor if self.yarn else 1.0

    def with_yarn(self, yarn: Yarn) -> RopeConfig:
        """Returns the embedding with only this scaling. Raises ModelError if that is not possible."""
        if self.theta <= 1:
            raise ModelError(f"rope_theta must be above 1 for rope_type 'yarn', not {self.theta:g}")
        return replace(self, factors=yarn.divisors(self.theta, self.rotary_dim), yarn=yarn)


def parse_scaling(text: str) -> tuple[float, int | None] | None:
    """Parses `none`, `yarn:FACTOR` or `yarn:FACTOR:ORIGINAL` to factor and original context; None for `none`.

    Raises ConfigError.
    """
    if text == "none":
        return None
    kind, *numbers = text.split(":")
    try:
        factor = float(numbers[0])
        original = int(numbers[1]) if len(numbers) == 2 else None
    except (IndexError, ValueError):
        factor, original = 0.0, None
    if kind != "yarn" or len(numbers) > 2 or not 1 <= factor <= _MAX_FACTOR or not (
            original is None or 1 <= original <= _MAX_CONTEXT):
        raise ConfigError(f"rope_scaling must be {_FORMS}, not {show(text)}", "rope_scaling")
    return factor, original


def scale_rope(rope: RopeConfig, context: int, text: str) -> tuple[RopeConfig, int]:
    """Returns the embedding and its maximum context in tokens, with the option's scaling in place of the config's.

    Raises ConfigError if the option is malformed or the embedding has another kind of scaling.
    """
    if rope.factors and rope.yarn is None:
        raise ConfigError("rope_scaling is not possible: the rotary frequencies of this model are scaled already; "
                          "leave it out", "rope_scaling")
    found = parse_scaling(text)
    trained = rope.yarn.original_context if rope.yarn else context
    if found is None:
        return replace(rope, factors=(), yarn=None), trained
    factor, original = found
    if original is None:
        original = _QWEN3_TRAINED if trained == _QWEN3_CONTEXT else trained
    yarn = Yarn(factor, original, mscale(factor))
    try:
        return rope.with_yarn(yarn), yarn.context
    except ModelError as error:
        raise ConfigError(f"rope_scaling is not possible: {error}", "rope_scaling") from error


def read_rope(text: Mapping[str, Any], head_dim: int, family: Family) -> RopeConfig:
    """Reads rope_parameters of newer configs, or the top level and rope_scaling of older ones. As in transformers,
    rope_scaling replaces rope_parameters if a config has both."""
    top_level = {key: text[key] for key in ("rope_theta", "partial_rotary_factor") if key in text}
    parameters = _rope_object(text, "rope_parameters")
    scaling = _rope_object(text, "rope_scaling")
    rope = {"partial_rotary_factor": family.rotary, **top_level, **(scaling or parameters)}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in family.rope_types:
        raise ModelError(f"rope_type {show(kind)} is not supported, only {' and '.join(family.rope_types)}")
    for key in ("rope_theta", "partial_rotary_factor", "mrope_section"):
        # it is unlikely that the model was trained with a default in place of the other object's value
        if key in parameters and parameters[key] != rope.get(key):
            raise ModelError(f"{key} of rope_parameters differs from that of rope_scaling, which replaces it: keep one "
                             "of the two objects")
    if not flag(rope, "mrope_interleaved", True):
        raise ModelError("mrope_interleaved false is not supported, only true")
    rotary = int(head_dim * number(rope, "partial_rotary_factor", 0.0 if family.rotary < 1 else 1.0, 1.0))
    sections = _mrope_section(rope, rotary // 2) if family.mrope else ()
    theta = number(rope, "rope_theta", 1.0, 1e12)
    plain = RopeConfig(theta, rotary, sections)
    if kind == "llama3":
        return replace(plain, factors=_llama3_factors(rope, theta, rotary))
    if kind == "linear":
        return replace(plain, factors=(number(rope, "factor", 1.0, _MAX_FACTOR),) * (rotary // 2))
    return plain.with_yarn(_yarn(rope, text)) if kind == "yarn" else plain


def _rope_object(text: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    given = text.get(key) or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"{key} must be an object, not {show(given)}")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ModelError(f"{key} that differs between kinds of layers is not supported")
    return given


def _yarn(rope: Mapping[str, Any], text: Mapping[str, Any]) -> Yarn:
    """Reads YaRN like transformers: missing values follow from max_position_embeddings, and the attention factor from
    the other values."""
    given = {key: value for key, value in rope.items() if value is not None}
    longest = integer(text, "max_position_embeddings", 1, _MAX_CONTEXT)
    original = integer({"original_max_position_embeddings": longest, **given}, "original_max_position_embeddings", 1,
                       _MAX_CONTEXT)
    implied = {"factor": longest / original} if "original_max_position_embeddings" in given else {}
    factor = number({**implied, **given}, "factor", 1.0, _MAX_FACTOR)
    fast, slow = (number({key: default, **given}, key, 1e-3, 1e6)
                  for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0)))
    if slow >= fast:
        raise ModelError(f"beta_slow ({slow:g}) must be below beta_fast ({fast:g})")
    scale, of_all = (number({key: 0.0, **given}, key, 0.0, 100.0) for key in ("mscale", "mscale_all_dim"))
    by_factor = mscale(factor, scale) / mscale(factor, of_all) if scale and of_all else mscale(factor)
    attention = number({"attention_factor": by_factor, **given}, "attention_factor", 1e-3, 1e3)
    return Yarn(factor, original, attention, fast, slow, flag(given, "truncate", True))


def mscale(factor: float, scale: float = 1.0) -> float:
    """Returns the attention factor for a scaling factor."""
    return 0.1 * scale * math.log(factor) + 1


def _llama3_factors(rope: Mapping[str, Any], theta: float, rotary: int) -> tuple[float, ...]:
    """Returns divisors that stretch wavelengths beyond the original context by `factor`, keep short ones, and blend in
    between (transformers, modeling_rope_utils.py)."""
    factor, low, high = (number(rope, key, 1e-3, 1e6) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    context = integer(rope, "original_max_position_embeddings", 1, _MAX_CONTEXT)
    if low >= high:
        raise ModelError(f"low_freq_factor ({low:g}) must be below high_freq_factor ({high:g})")
    factors = []
    for index in range(0, rotary, 2):
        turns = context / (2 * math.pi * theta ** (index / rotary))
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - kept) / factor + kept))
    return tuple(factors)


def _mrope_section(rope: Mapping[str, Any], frequencies: int) -> tuple[int, ...]:
    """Clips the sections to the existing frequencies, as the interleaved layout does."""
    given = rope.get("mrope_section", [11, 11, 10])
    counts = given if isinstance(given, list | tuple) else []
    if len(counts) != 3 or any(type(count) is not int or count < 0 for count in counts):
        raise ModelError(f"mrope_section must be three counts, not {show(given)}")
    height, width = (len(range(axis, min(3 * counts[axis], frequencies), 3)) for axis in (1, 2))
    return (frequencies - height - width, height, width)
