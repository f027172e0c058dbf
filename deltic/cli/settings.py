"""Settings of other programs: JSON, TOML and YAML files that are added to, and kept as they were beside it."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from deltic.cli.parser import UsageError, read_text

_NAMES = ("name", "id", "model_id")  # of a record in a list: two that agree in the first that they have are the same


@dataclass(frozen=True, slots=True)
class _Format:
    read: Callable[[str], Any]
    write: Callable[[Any], str]


def _read_toml(text: str) -> Any:
    import tomlkit

    return tomlkit.parse(text)


def _write_toml(value: Any) -> str:
    import tomlkit

    return tomlkit.dumps(value)


def _read_yaml(text: str) -> Any:
    import yaml

    return yaml.safe_load(text)


def _write_yaml(value: Any) -> str:
    import yaml

    written: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
    return written


def _write_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


_YAML = _Format(_read_yaml, _write_yaml)
_FORMATS = {".json": _Format(json.loads, _write_json), ".toml": _Format(_read_toml, _write_toml),
            ".yaml": _YAML, ".yml": _YAML}


def shown(path: Path, values: Any) -> str:
    """The values in the format of the file."""
    return _FORMATS[path.suffix].write(values)


def merged(path: Path, values: Any, missing: Mapping[str, Any]) -> tuple[str, bool]:
    """What the file says with the values, and whether that is new; TOML keeps its comments. missing: said only where
    the file does not. UsageError where it cannot be read as what its ending says."""
    kind = _FORMATS[path.suffix]
    if not path.exists():
        return kind.write({**missing, **values} if isinstance(values, Mapping) else values), True
    found = _read(path, kind)
    if found is None:  # YAML without a word
        found = type(values)()
    if isinstance(found, Mapping) != isinstance(values, Mapping) or not isinstance(found, Mapping | list):
        raise _unreadable(path, f"it holds a {type(found).__name__} where the client expects a "
                                f"{type(values).__name__}")
    before = deepcopy(found)
    after = _merge(found, values)
    for key in missing.keys() - (after if isinstance(after, Mapping) else {}).keys():
        after[key] = missing[key]
    return kind.write(after), before != after


def write(path: Path, text: str) -> Path | None:
    """Replace the file, in one move; returns where what it said before lies, if it was there.

    A file that is new is for its owner alone, as it may hold a key. Links stay links.
    """
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    backup = None
    if path.exists():
        backup = next(found for number in count() if not (found := _backup(path, number)).exists())
        shutil.copy2(path, backup)
    replace_file(path, text, stat.S_IMODE(path.stat().st_mode) if backup else 0o600)
    return backup


def replace_file(path: Path, text: str, mode: int) -> None:
    """What the file says from now on: all of it or, if that fails, what it said before. UsageError names the file."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        part.chmod(mode)
        part.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _backup(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.backup{number or ''}")


def _read(path: Path, kind: _Format) -> Any:
    try:
        text = read_text(path)
        return kind.read(text) if text.strip() else None
    except RecursionError:
        raise _unreadable(path, "it is nested too deeply") from None
    except Exception as error:  # each library has errors of its own
        raise _unreadable(path, str(error)) from error


def _unreadable(path: Path, why: str) -> UsageError:
    name = path.suffix.lstrip(".").upper().replace("YML", "YAML")
    comments = "; JSON with comments is not read" if path.suffix == ".json" else ""
    return UsageError(f"{path} cannot be read as {name} ({why}){comments}. Nothing was changed: run the command "
                      "without --write, and put what it shows there by hand")


def _merge(old: Any, new: Any) -> Any:
    """Mappings key by key, lists of records by their names; else the new value. Changes the old one."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key, value in new.items():
            old[key] = _merge(old[key], value) if key in old else value  # type: ignore[index]
        return old
    if isinstance(old, list) and isinstance(new, list) and all(isinstance(item, Mapping) for item in new):
        for item in new:
            place = next((at for at, other in enumerate(old) if _name(other) == _name(item)), None)
            if place is None:
                old.append(item)
            else:
                old[place] = _merge(old[place], item)
        return old
    return new


def _name(record: Any) -> Any:
    names = [record[name] for name in _NAMES if name in record] if isinstance(record, Mapping) else []
    return names[0] if names else None
