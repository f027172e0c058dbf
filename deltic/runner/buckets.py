"""Which steps' graphs are recorded when a server starts: all that there may be, or those in a file beside the weights.

    {"rows": [1, 2, 64], "contexts": [4096, 32768]}

Each number of rows with each context, in tokens, rounded up to what buckets have. What is not in the file is recorded
when it is first needed, which holds up the step that needs it for tens of milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from deltic.errors import ConfigError, show
from deltic.runner.input_batch import bucket_of, buckets

NAME = "deltic-buckets.json"
_KEYS = ("rows", "contexts")
_LONGEST_FILE, _MOST, _LARGEST = 1 << 16, 64, 1 << 24


def recorded_buckets(model: Path | None, max_rows: int, max_context: int) -> Iterator[tuple[int, int]]:
    """Rows and pages of the buckets to be recorded, the largest first. model: its directory or file, None: without
    files. ConfigError names the file where that is not as it should be."""
    path = _file(model)
    if path is None or not path.is_file():
        yield from buckets(max_rows, max_context)
        return
    rows, contexts = _read(path)
    wanted = {bucket_of(min(count, max_rows), min(context, max_context)) for count in rows for context in contexts}
    yield from sorted(wanted, reverse=True)


def _file(model: Path | None) -> Path | None:
    if model is None:
        return None
    return model / NAME if model.is_dir() else model.with_name(f"{model.name}.{NAME}")


def _read(path: Path) -> tuple[list[int], list[int]]:
    try:
        with path.open("rb") as file:
            text = file.read(_LONGEST_FILE + 1)
        if len(text) > _LONGEST_FILE:
            raise ConfigError(f"{path} is longer than {_LONGEST_FILE} bytes")
        found = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {show(str(error))}") from error
    if not isinstance(found, dict) or found.keys() != {*_KEYS}:
        raise ConfigError(f'{path} must be an object with "rows" and "contexts"')
    for name in _KEYS:
        numbers = found[name]
        if not isinstance(numbers, list) or not 0 < len(numbers) <= _MOST or not all(map(_is_size, numbers)):
            raise ConfigError(f"{path}: {name} must be a list of 1 to {_MOST} integers from 1 to {_LARGEST}")
    return found["rows"], found["contexts"]


def _is_size(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 1 <= number <= _LARGEST
