"""`deltic connect` and `deltic ps`: settings of clients of a running server, and its models."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import stat
from collections.abc import Callable, Mapping
from copy import deepcopy
from http.client import HTTPException
from itertools import count
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from deltic.cli import options
from deltic.cli.clients import CLIENTS, KEY_VARIABLE, Client, Target
from deltic.cli.files import replace_file
from deltic.cli.output import grid, note
from deltic.cli.parser import UsageError, read_text, text

_URL = "http://127.0.0.1:8000"
_MAX_ANSWER = 1 << 20
_TIMEOUT = 10
_LOADING_TIMEOUT = 1800  # a large model may be loaded
_RECORD_NAMES = ("name", "id", "model_id")
Answer = TypeVar("Answer")


def add_connect(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show or write the settings with which a coding agent or other client uses a running server."
    known = "; ".join(f"{name}: {client.about}" for name, client in CLIENTS.items())
    parser.add_argument("client", metavar="CLIENT", choices=tuple(CLIENTS), type=text, help=known)
    _add_server(parser)
    parser.add_argument("--model", type=text, metavar="NAME",
                        help="one of several models of the server (default: its first)")
    parser.add_argument("--write", action="store_true",
                        help="add the settings to the client's own files; the old content is kept in FILE.backup")


def run_connect(args: argparse.Namespace) -> int:
    client = CLIENTS[args.client]
    target = _target(args.url, args.model, _key(args))
    if args.write:
        _write(args.client, client, target)
    else:
        for file in client.files(target):
            values = {**file.missing, **file.values} if isinstance(file.values, Mapping) else file.values
            print(f"# {file.path}\n{_dump(file.path, values).rstrip()}\n")
    for name, value in client.environment(target).items():
        print(f"export {name}={shlex.quote(value)}")
    note(f"then run: {client.start}")
    return 0


def add_ps(parser: argparse.ArgumentParser) -> None:
    parser.description = "List the models of a running server."
    _add_server(parser)
    options.add_json(parser)


def run_ps(args: argparse.Namespace) -> int:
    rows = [{"model": entry["id"], "loaded": entry.get("loaded", True), "context": entry.get("max_model_len")}
            for entry in _models(args.url, _key(args))]
    if args.json:
        print(json.dumps({"url": args.url, "models": rows}))
        return 0
    for row in rows:
        row["loaded"] = "yes" if row["loaded"] else "no"
        row["context"] = f"{row['context']:,}" if row["context"] else "-"
    print(grid(rows))
    return 0


# The server


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", type=_url, default=_URL, metavar="URL", help=f"URL of the server (default: {_URL})")
    parser.add_argument("--api-key", type=text, metavar="KEY",
                        help=f"API key of the server (default: ${KEY_VARIABLE}, else none)")


def _key(args: argparse.Namespace) -> str:
    return args.api_key or os.environ.get(KEY_VARIABLE) or ""


def _url(given: str) -> str:
    """The URL of a server, with or without /v1."""
    try:
        parts = urlsplit(given if "//" in given else f"http://{given}")
        is_valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        is_valid = False
    if not is_valid:
        raise argparse.ArgumentTypeError(f"must be like {_URL}, not {given[:80]!r}")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def _target(url: str, model: str | None, key: str) -> Target:
    served = {entry["id"]: entry for entry in _models(url, key)}
    chosen = model or next(iter(served))
    if chosen not in served:
        raise UsageError(f"the server at {url} has no model {chosen!r}: --model is one of {', '.join(served)}")
    context = served[chosen].get("max_model_len")
    if context is None and served[chosen].get("loaded") is False:
        note(f"loading {chosen}, which shows the size of its context ...")
        body = json.dumps({"model": chosen, "prompt": "?"}).encode()
        context = _request(url, "/tokenize", key, lambda answer: answer["max_model_len"], body)
    if not isinstance(context, int) or context < 1:
        raise UsageError(f"the server at {url} does not say how much context {chosen} has (max_model_len): it is not "
                         "a deltic server")
    return Target(url, chosen, context, key)


def _models(url: str, key: str) -> list[dict[str, Any]]:
    return _request(url, "/v1/models", key, _model_list)


def _model_list(answer: Any) -> list[dict[str, Any]]:
    found = list(answer["data"])
    if not found or not all(isinstance(entry["id"], str) for entry in found):
        raise ValueError("no models")
    return found


def _request(url: str, path: str, key: str, read: Callable[[Any], Answer], body: bytes | None = None) -> Answer:
    """Returns what `read` takes from the JSON answer. Raises UsageError with a hint if there is none."""
    is_local = urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {_header_value(key)}"
    request = Request(f"{url}{path}", body, headers)
    opener = build_opener(ProxyHandler({}) if is_local else ProxyHandler())
    try:
        with opener.open(request, timeout=_TIMEOUT if body is None else _LOADING_TIMEOUT) as response:
            return read(json.loads(response.read(_MAX_ANSWER)))
    except HTTPError as error:
        if error.code == 401:
            raise UsageError(f"the server at {url} wants a key: give --api-key, or set {KEY_VARIABLE}") from error
        raise UsageError(f"{url} answers with status {error.code}: --url has to be that of a deltic server") from error
    except OSError as error:
        raise UsageError(f"no server answers at {url} ({getattr(error, 'reason', error)}): start one with deltic "
                         "serve, or give its --url") from error
    except HTTPException as error:
        raise UsageError(f"the server at {url} does not speak HTTP as it should ({type(error).__name__}): --url has "
                         "to be that of a deltic server") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        missing = "lists no models" if body is None else "does not say how much context the model has"
        raise UsageError(f"the server at {url} is not a deltic server: its {path} {missing}") from None


def _header_value(key: str) -> str:
    """The key in UTF-8, as http.client sends characters of latin-1."""
    if any(char < " " or char == "\x7f" for char in key):
        raise UsageError("the API key has a control character, such as the end of a line, which no header can carry: "
                         f"see --api-key and {KEY_VARIABLE}")
    return key.encode("utf-8", "surrogateescape").decode("latin-1")


# Files of settings


def _write(name: str, client: Client, target: Target) -> None:
    """Reads all files before it writes the first, so that a file that cannot be read leaves none half done."""
    files = client.files(target)
    if not files:
        raise UsageError(f"{name} has no file of settings: leave out --write, and set the variables that are shown")
    merged = [(file.path, _merged(file.path, file.values, file.missing)) for file in files]
    for path, content in merged:
        if content is None:
            note(f"{path} has these settings already")
            continue
        backup = _replace_with_backup(path, content)
        lost = " (its comments are only there)" if backup and path.suffix in (".yml", ".yaml") else ""
        note(f"wrote {path}" + (f"; the old content is in {backup}{lost}" if backup else ""))


def _load(path: Path, content: str) -> Any:
    """Parses a file by its suffix. TOML keeps its comments."""
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


def _merged(path: Path, values: Any, missing: Mapping[str, Any]) -> str | None:
    """Returns the file's content with the values, or None if it has them. missing: added unless the file has its keys.

    Raises UsageError if the file cannot be read in its format.
    """
    if not path.exists():
        return _dump(path, {**missing, **values} if isinstance(values, Mapping) else values)
    found = _read(path)
    if found is None:
        found = type(values)()
    if isinstance(found, Mapping) != isinstance(values, Mapping) or not isinstance(found, Mapping | list):
        _raise_unreadable(path, f"it holds a {type(found).__name__} where the client expects a "
                                f"{type(values).__name__}")
    before = deepcopy(found)
    after = _merge(found, values)
    if isinstance(after, Mapping):
        for key in missing.keys() - after.keys():
            after[key] = missing[key]  # type: ignore[index]
    return _dump(path, after) if before != after else None


def _read(path: Path) -> Any:
    try:
        content = read_text(path)
        return _load(path, content) if content.strip() else None
    except RecursionError:
        _raise_unreadable(path, "it is nested too deeply")
    except Exception as error:  # each format has its own errors
        _raise_unreadable(path, str(error), error)


def _raise_unreadable(path: Path, reason: str, cause: Exception | None = None) -> NoReturn:
    name = path.suffix.lstrip(".").upper().replace("YML", "YAML")
    comments = "; JSON with comments is not read" if path.suffix == ".json" else ""
    raise UsageError(f"{path} cannot be read as {name} ({reason}){comments}. Nothing was changed: run the command "
                     "without --write, and add what it shows by hand") from cause


def _merge(old: Any, new: Any) -> Any:
    """Merges mappings key by key and lists of records by name into `old`; else returns `new`."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key, value in new.items():
            old[key] = _merge(old[key], value) if key in old else value  # type: ignore[index]
        return old
    if isinstance(old, list) and isinstance(new, list) and all(isinstance(item, Mapping) for item in new):
        for item in new:
            place = next((at for at, other in enumerate(old) if _record_name(other) == _record_name(item)), None)
            if place is None:
                old.append(item)
            else:
                old[place] = _merge(old[place], item)
        return old
    return new


def _record_name(record: Any) -> Any:
    if not isinstance(record, Mapping):
        return None
    return next((record[name] for name in _RECORD_NAMES if name in record), None)


def _replace_with_backup(path: Path, content: str) -> Path | None:
    """Replaces a file or the target of a link, and returns the backup. A new file is for its owner alone, as it may
    hold a key."""
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
