"""`deltic connect` and `deltic ps`: configure clients for a running server, and list its models."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import stat
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from deltic.cli import options
from deltic.cli.client import KEY_VARIABLE, ServerClient, add_server, client_of
from deltic.cli.output import grid, note
from deltic.cli.parser import UsageError, read_text, replace_file, text

_MAX_ANSWER = 32_000  # maximum number of tokens that a client reserves for an answer
_RECORD_NAMES = ("name", "id", "model_id")


def add_connect(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show or write the settings with which a coding agent or other client uses a running server."
    clients = known_clients()
    known = "; ".join(f"{name}: {client['about']}" for name, client in clients.items())
    parser.add_argument("client", metavar="CLIENT", choices=tuple(clients), type=text, help=known)
    add_server(parser)
    parser.add_argument("--model", type=text, metavar="NAME",
                        help="one of several models of the server (default: its first)")
    parser.add_argument("--write", action="store_true",
                        help="add the settings to the client's own files; the old content is kept in FILE.backup")


def run_connect(args: argparse.Namespace) -> int:
    client = known_clients()[args.client]
    target = _target(client_of(args), args.model)
    files = [Settings(**_filled(file, target)) for file in client.get("files", ())]
    if not args.write:
        for file in files:
            print(f"# {file.path}\n{_dump(file.path, file.all).rstrip()}\n")
    elif files:
        _write(files)
    else:
        raise UsageError(f"{args.client} has no file of settings: leave out --write, and set the variables that are "
                         "shown")
    key = {client["key"]: target.key} if "key" in client and target.key else {}
    for name, value in {**key, **_filled(client.get("environment", {}), target)}.items():
        print(f"export {name}={shlex.quote(value)}")
    note(f"then run: {client['start']}")
    return 0


def known_clients() -> dict[str, Any]:
    """Returns the known client programs by name, with `about`, `start`, `files`, `key` (the variable from which the
    program reads the server's key) and `environment` (other variables)."""
    import yaml

    found: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("clients.yaml").read_text(encoding="utf-8"))
    return found


def _filled(value: Any, target: Target) -> Any:
    """Replaces {model} and similar fields by attributes of the target. Leaves out settings that are then empty."""
    if isinstance(value, Mapping):
        filled = {_filled(name, target): _filled(part, target) for name, part in value.items()}
        return {name: part for name, part in filled.items() if part != ""}
    if isinstance(value, list):
        return [_filled(part, target) for part in value]
    if not isinstance(value, str):
        return value
    only = re.fullmatch(r"\{(\w+)\}", value)
    if only:  # a placeholder alone keeps the type of its value
        return getattr(target, only[1])
    return re.sub(r"\{(\w+)(:d)?\}", lambda found: str(getattr(target, found[1])), value)


def add_ps(parser: argparse.ArgumentParser) -> None:
    parser.description = "List the models of a running server."
    add_server(parser)
    options.add_json(parser)


def run_ps(args: argparse.Namespace) -> int:
    rows = [{"model": entry["id"], "loaded": entry.get("loaded", True), "context": entry.get("max_model_len")}
            for entry in _models(client_of(args))]
    print(json.dumps({"url": args.url, "models": rows}) if args.json else grid(rows))
    return 0


# The server


@dataclass(frozen=True, slots=True)
class Target:
    """A model of a server. url: without /v1. context: maximum tokens of prompt and answer. key: "" if there is none."""

    url: str
    model: str
    context: int
    key: str

    @property
    def base(self) -> str:
        """The base URL for clients of OpenAI's API."""
        return f"{self.url}/v1"

    @property
    def key_variable(self) -> str:
        return KEY_VARIABLE if self.key else ""

    @property
    def some_key(self) -> str:
        """The key, or a placeholder for clients that require a key."""
        return self.key or "none"

    @property
    def answer(self) -> int:
        """The number of tokens that a client should reserve for the answer."""
        return max(1, min(self.context // 4, _MAX_ANSWER))


def _target(client: ServerClient, model: str | None) -> Target:
    served = {entry["id"]: entry for entry in _models(client)}
    chosen = model or next(iter(served))
    if chosen not in served:
        raise UsageError(f"the server at {client.url} has no model {chosen!r}: --model is one of {', '.join(served)}")
    context = served[chosen].get("max_model_len")
    if context is None:
        note(f"loading {chosen}, which shows the size of its context ...")
        body = json.dumps({"model": chosen, "prompt": "?"}).encode()
        context = client.ask_json("/tokenize", lambda answer: int(answer["max_model_len"]), body)
    return Target(client.url, chosen, context, client.key)


def _models(client: ServerClient) -> list[dict[str, Any]]:
    def listed(answer: Any) -> list[dict[str, Any]]:
        found = list(answer["data"])
        if not found or not all(isinstance(entry["id"], str) for entry in found):
            raise ValueError("no models")
        return found

    return client.ask_json("/v1/models", listed)


# Files of settings


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings in a file. The suffix of the file is its format.

    folder: below the home directory; the environment's `variable` overrides it. missing: values to add if absent.
    """

    name: str
    values: Mapping[str, Any] | list[Any]
    folder: str = ""
    variable: str = ""
    missing: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        given = os.environ.get(self.variable)
        return (Path(given) if given else Path.home() / self.folder) / self.name

    @property
    def all(self) -> Mapping[str, Any] | list[Any]:
        """All settings: the content of a new file."""
        return {**self.missing, **self.values} if isinstance(self.values, Mapping) else self.values


def _write(files: list[Settings]) -> None:
    """Writes the files. Reads all of them first, so that an unreadable file leaves no partial result."""
    merged = [(file.path, _merged(file)) for file in files]
    for path, content in merged:
        if content is None:
            note(f"{path} has these settings already")
            continue
        backup = _replace_with_backup(path, content)
        lost = " (its comments are only there)" if backup and path.suffix in (".yml", ".yaml") else ""
        note(f"wrote {path}" + (f"; the old content is in {backup}{lost}" if backup else ""))


def _merged(file: Settings) -> str | None:
    """Returns the content of a file with the settings added, or None if it already has them. Raises UsageError if it
    cannot be read in its format."""
    path = file.path
    try:
        content = read_text(path) if path.exists() else ""
        found = _load(path, content) if content.strip() else None
        if found is None:
            return _dump(path, file.all)
        if isinstance(found, Mapping) != isinstance(file.values, Mapping) or not isinstance(found, Mapping | list):
            raise TypeError(f"it holds a {type(found).__name__} where the client expects a "
                            f"{type(file.values).__name__}")
    except Exception as error:  # each format raises its own errors
        kind = path.suffix.lstrip(".").upper().replace("YML", "YAML")
        comments = "; JSON with comments is not read" if path.suffix == ".json" else ""
        raise UsageError(f"{path} cannot be read as {kind} ({error}){comments}. Nothing was changed: run the command "
                         "without --write, and add what it shows by hand") from error
    before = deepcopy(found)
    after = _merge(found, file.values)
    if isinstance(after, Mapping):
        for key in file.missing.keys() - after.keys():
            after[key] = file.missing[key]  # type: ignore[index]
    return _dump(path, after) if before != after else None


def _load(path: Path, content: str) -> Any:
    """Parses a file according to its suffix. TOML files keep their comments."""
    if path.suffix == ".json":
        return json.loads(content)
    if path.suffix == ".toml":
        import tomlkit

        return tomlkit.parse(content)
    import yaml

    return yaml.safe_load(content)


def _dump(path: Path, value: Any) -> str:
    if path.suffix == ".json":
        return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    if path.suffix == ".toml":
        import tomlkit

        return tomlkit.dumps(value)
    import yaml

    written: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
    return written


def _merge(old: Any, new: Any) -> Any:
    """Merges mappings key by key, and lists of records by name, into `old`. Returns `new` for other values."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key, value in new.items():
            old[key] = _merge(old[key], value) if key in old else value  # type: ignore[index]
        return old
    if not (isinstance(old, list) and isinstance(new, list) and all(isinstance(item, Mapping) for item in new)):
        return new
    for item in new:
        place = next((at for at, other in enumerate(old) if _record_name(other) == _record_name(item)), None)
        if place is None:
            old.append(item)
        else:
            old[place] = _merge(old[place], item)
    return old


def _record_name(record: Any) -> Any:
    names = _RECORD_NAMES if isinstance(record, Mapping) else ()
    return next((record[name] for name in names if name in record), None)


def _replace_with_backup(path: Path, content: str) -> Path | None:
    """Replaces a file or the target of a link, and returns the path of the backup. A new file is readable by its owner
    only, as it may contain a key."""
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        replace_file(path, content, 0o600)
        return None
    names = (path.with_name(f"{path.name}.backup{number or ''}") for number in count())
    backup = next(name for name in names if not name.exists())
    shutil.copy2(path, backup)
    replace_file(path, content, stat.S_IMODE(path.stat().st_mode))
    return backup
