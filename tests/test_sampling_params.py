"""L8: `SamplingParams` takes every number that it says it takes, and refuses others by name, however large."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from deltic.errors import RequestError
from deltic.params import _INTEGERS, _RANGES, SamplingParams

BAD = {"no float": 10 ** 400, "no negative float": -10 ** 400, "not printable": 10 ** 5000, "nan": math.nan,
       "infinite": math.inf, "negative infinite": -math.inf, "text": "1", "flag": True, "list": [1], "long": "x" * 999}


@pytest.mark.parametrize("name", _RANGES)
def test_the_borders_are_in(name: str) -> None:
    for value in _RANGES[name]:
        if (name, value) != ("max_tokens", 0):
            assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize("name", _RANGES)
@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
def test_l8_what_is_no_such_number_is_refused_by_name_and_in_short(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name} must be ") as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == name and len(str(caught.value)) < 250


@pytest.mark.parametrize("name", _RANGES)
def test_l8_just_outside_is_out(name: str) -> None:
    low, high = _RANGES[name]
    for value in (low - 1, high + 1) if name in _INTEGERS else (math.nextafter(low, -math.inf), high * (1 + 1e-9)):
        with pytest.raises(RequestError, match=f"^{name} must be between"):
            SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), [
    ("stop", 5), ("stop", b"x"), ("stop", {"x": 1}), ("stop_token_ids", 5), ("stop_token_ids", "5"),
    ("logit_bias", [1, 2]), ("logit_bias", 5), ("ignore_eos", "yes"), ("ignore_eos", 1), ("ignore_eos", None)])
def test_l8_what_is_no_list_map_or_flag(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name} must ") as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == name


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(seed=np.int64(3), n=np.int32(2), temperature=np.float32(0.5), top_p=np.float64(1),
                            stop_token_ids=np.array([4, 5]), logit_bias={np.int64(6): np.float32(2)})
    assert params == SamplingParams(seed=3, n=2, temperature=0.5, top_p=1.0, stop_token_ids=(4, 5), logit_bias={6: 2.0})
    numbers = (params.seed, params.n, params.temperature, *params.stop_token_ids, *params.logit_bias.items())
    assert "np." not in repr(numbers) and hash(params)
    for wrong in ({"seed": np.float64(3)}, {"temperature": np.bool_(True)}, {"stop_token_ids": np.array([0.5])}):
        with pytest.raises(RequestError, match="must be"):
            SamplingParams(**wrong)


def test_a_map_that_changes_later_changes_nothing() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias["x"] = None  # type: ignore[index,assignment]
    assert params.logit_bias == {1: 2.0}


def test_none_is_none_of_them() -> None:
    nothing: dict[str, Any] = {"stop": None, "stop_token_ids": None, "logit_bias": None}
    assert SamplingParams(**nothing) == SamplingParams()
    assert SamplingParams(stop=iter("ab"), stop_token_ids=[1]).stop == ("a", "b")  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", [
    {"stop_token_ids": (10 ** 400,)}, {"stop_token_ids": (-1,)}, {"logit_bias": {10 ** 400: 1.0}},
    {"logit_bias": {1: 10 ** 400}}, {"logit_bias": {1: math.nan}}])
def test_l8_ids_and_biases_too(ids: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"^{next(iter(ids))} must be "):
        SamplingParams(**ids)
