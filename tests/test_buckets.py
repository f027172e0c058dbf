"""Which graphs are recorded when a server starts is said by a file beside the weights, if there is one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deltic.errors import ConfigError
from deltic.runner.cuda_graphs import NAME, buckets, recorded_buckets


def test_without_a_file_all_are_recorded(tmp_path: Path) -> None:
    for model in (None, tmp_path, tmp_path / "model.gguf"):
        assert [*recorded_buckets(model, 12, 5000)] == [*buckets(12, 5000)]


@pytest.mark.parametrize("gguf", [False, True])
def test_the_file_lies_beside_the_weights(gguf: bool, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf" if gguf else tmp_path
    if gguf:
        model.touch()
    file = tmp_path / (f"model.gguf.{NAME}" if gguf else NAME)
    file.write_text(json.dumps({"rows": [1, 3, 4, 500], "contexts": [100, 2000, 1 << 20]}))
    found = [*recorded_buckets(model, 64, 4096)]
    assert found == [(rows, pages) for rows in (64, 4, 1) for pages in (256, 128, 16)]
    assert {*found} <= {*buckets(64, 4096)}, "steps look for others"


@pytest.mark.parametrize("text", [
    "", "[]", "{", '{"rows": [1]}', '{"rows": [1], "contexts": [1], "more": 1}', '{"rows": [], "contexts": [1]}',
    '{"rows": [0], "contexts": [1]}', '{"rows": [true], "contexts": [1]}', '{"rows": 1, "contexts": [1]}',
    '{"rows": [1.5], "contexts": [1]}', json.dumps({"rows": [1] * 65, "contexts": [1]}), "[" * 60_000, " " * 70_000,
    '{"rows": [1' + "0" * 5000 + '], "contexts": [1]}', "\xff"])
def test_invalid_values_are_refused_by_name(text: str, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=NAME):
        [*recorded_buckets(tmp_path, 64, 4096)]
