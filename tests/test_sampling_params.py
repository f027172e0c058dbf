"""L8: `SamplingParams` accepts every number in its declared range and refuses others by name, however large."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltic.errors import RequestError
from deltic.params import PARAMETERS, SamplingParams

SERVER = Path(__file__).parents[1] / "docs" / "server.md"
BAD = (10 ** 400, -10 ** 400, 10 ** 5000, math.nan, math.inf, -math.inf, "1", True, [1], "x" * 999)


def refused(**given: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**given)
    return caught.value


@pytest.mark.parametrize("name", PARAMETERS)
def test_l8_range_of_each_parameter(name: str) -> None:
    parameter = PARAMETERS[name]
    for value in (parameter.low, parameter.high):
        if (name, value) != ("max_tokens", 0):
            assert getattr(SamplingParams(**{name: value}), name) == value
    outside = (parameter.low - 1, parameter.high + 1) if parameter.kind is int else (
        math.nextafter(parameter.low, -math.inf), parameter.high * (1 + 1e-9))
    for wrong in outside:
        assert str(refused(**{name: wrong})).startswith(f"{name} must be between")
    for wrong in BAD:
        error = refused(**{name: wrong})
        assert str(error).startswith(f"{name} must be ") and error.field == name and len(str(error)) < 250, wrong


def test_server_page_has_a_row_for_each_shared_parameter() -> None:
    page = SERVER.read_text(encoding="utf-8")
    rows = [f"| `{name}` | {parameter.low:,} to {parameter.high:,} | {parameter.help} |"
            for name, parameter in PARAMETERS.items() if parameter.shared]
    assert [row for row in rows if row not in page] == []


def test_l8_lists_maps_and_flags_of_a_wrong_type() -> None:
    for name, value in [("stop", 5), ("stop", b"x"), ("stop", {"x": 1}), ("stop_token_ids", 5), ("stop_token_ids", "5"),
                        ("logit_bias", [1, 2]), ("logit_bias", 5), ("ignore_eos", "yes"), ("ignore_eos", 1),
                        ("ignore_eos", None), ("stop_token_ids", (10 ** 400,)), ("stop_token_ids", (-1,)),
                        ("logit_bias", {10 ** 400: 1.0}), ("logit_bias", {1: 10 ** 400}),
                        ("logit_bias", {1: math.nan})]:
        error = refused(**{name: value})
        assert str(error).startswith(f"{name} must ") and error.field == name, (name, value)


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(seed=np.int64(3), n=np.int32(2), temperature=np.float32(0.5), top_p=np.float64(1),
                            stop_token_ids=np.array([4, 5]), logit_bias={np.int64(6): np.float32(2)})
    assert params == SamplingParams(seed=3, n=2, temperature=0.5, top_p=1.0, stop_token_ids=(4, 5), logit_bias={6: 2.0})
    numbers = (params.seed, params.n, params.temperature, *params.stop_token_ids, *params.logit_bias.items())
    assert "np." not in repr(numbers) and hash(params)
    for wrong in ({"seed": np.float64(3)}, {"temperature": np.bool_(True)}, {"stop_token_ids": np.array([0.5])}):
        assert "must be" in str(refused(**wrong))


def test_later_changes_of_a_given_map_have_no_effect() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias["x"] = None  # type: ignore[index,assignment]
    assert params.logit_bias == {1: 2.0}


def test_none_means_no_stops_and_no_biases() -> None:
    nothing: dict[str, Any] = {"stop": None, "stop_token_ids": None, "logit_bias": None}
    assert SamplingParams(**nothing) == SamplingParams()
    assert SamplingParams(stop=iter("ab"), stop_token_ids=[1]).stop == ("a", "b")  # type: ignore[arg-type]
