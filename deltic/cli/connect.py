"""`deltic connect`: the settings with which other programs use a running server."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable
from http.client import HTTPException
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from deltic.cli import settings
from deltic.cli.clients import CLIENTS, KEY_VARIABLE, Client, Target
from deltic.cli.parser import UsageError, text

HELP = "Show or write the settings with which a coding agent or other client uses a running server."
_MOST_ANSWER = 1 << 20
_SECONDS = 10
_LOADING = 1800  # seconds that a large model may take to be loaded
Answer = TypeVar("Answer")


def add(parser: argparse.ArgumentParser) -> None:
    known = "; ".join(f"{name}: {client.about}" for name, client in CLIENTS.items())
    parser.add_argument("client", metavar="CLIENT", choices=tuple(CLIENTS), type=text, help=known)
    add_server(parser)
    parser.add_argument("--model", type=text, metavar="NAME",
                        help="one of several models of the server (default: its first)")
    parser.add_argument("--write", action="store_true",
                        help="add the settings to the client's own files; what was there before is kept in FILE.backup")


def add_server(parser: argparse.ArgumentParser) -> None:
    """Where a running server is."""
    parser.add_argument("--url", type=_url, default="http://127.0.0.1:8000", metavar="URL",
                        help="where the server listens (default: http://127.0.0.1:8000)")
    parser.add_argument("--api-key", type=text, metavar="KEY",
                        help=f"what the server wants clients to send (default: ${KEY_VARIABLE}, else nothing)")


def run(args: argparse.Namespace) -> int:
    client = CLIENTS[args.client]
    target = _target(args.url, args.model, args.api_key or os.environ.get(KEY_VARIABLE) or "")
    if args.write:
        _write(args.client, client, target)
    else:
        _show(client, target)
    for name, value in client.environment(target).items():
        print(f"export {name}={shlex.quote(value)}")
    print(f"then run: {client.start}", file=sys.stderr)
    return 0


def _show(client: Client, target: Target) -> None:
    for file in client.files(target):
        values = {**file.missing, **file.values} if isinstance(file.values, dict) else file.values
        print(f"# {file.path}\n{settings.shown(file.path, values).rstrip()}\n")


def _write(name: str, client: Client, target: Target) -> None:
    """All files are read before the first is written, so that nothing is half done where one cannot be."""
    files = client.files(target)
    if not files:
        raise UsageError(f"{name} has no file of settings: leave out --write, and set the variables that are shown")
    for path, (content, new) in [(file.path, settings.merged(file.path, file.values, file.missing)) for file in files]:
        if not new:
            print(f"{path} already says so", file=sys.stderr)
            continue
        backup = settings.write(path, content)
        lost = " (and its comments only there)" if backup and path.suffix in (".yml", ".yaml") else ""
        print(f"wrote {path}" + (f"; what it said before is in {backup}{lost}" if backup else ""), file=sys.stderr)


def _url(given: str) -> str:
    """An argument type: the URL of a server, with or without /v1."""
    try:
        parts = urlsplit(given if "//" in given else f"http://{given}")
        sound = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        sound = False
    if not sound:
        raise argparse.ArgumentTypeError(f"must be like http://127.0.0.1:8000, not {given[:80]!r}")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def _target(url: str, model: str | None, key: str) -> Target:
    served = {entry["id"]: entry for entry in models_of(url, key)}
    chosen = model or next(iter(served))
    if chosen not in served:
        raise UsageError(f"the server at {url} has no model {chosen!r}: --model is one of {', '.join(served)}")
    context = served[chosen].get("max_model_len")
    if context is None and served[chosen].get("loaded") is False:
        print(f"loading {chosen}, to know how much context it has ...", file=sys.stderr)
        body = json.dumps({"model": chosen, "prompt": "?"}).encode()
        context = _ask(url, "/tokenize", key, lambda answer: answer["max_model_len"], body)
    if not isinstance(context, int) or context < 1:
        raise UsageError(f"the server at {url} does not say how much context {chosen} has (max_model_len): it is no "
                         "deltic server")
    return Target(url, chosen, context, key)


def models_of(url: str, key: str) -> list[dict[str, Any]]:
    """What /v1/models lists. UsageError if nobody answers, or not as deltic does."""
    return _ask(url, "/v1/models", key, _listed)


def _listed(answer: Any) -> list[dict[str, Any]]:
    found = list(answer["data"])
    if not found or not all(isinstance(entry["id"], str) for entry in found):
        raise ValueError("no models")
    return found


def _ask(url: str, path: str, key: str, read: Callable[[Any], Answer], body: bytes | None = None) -> Answer:
    """What the server answers, as `read` takes it out of the JSON. UsageError says why there is none."""
    proxies = ProxyHandler({}) if urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1") else ProxyHandler()
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {_in_header(key)}"} if key else {})}
    request = Request(f"{url}{path}", body, headers)
    try:
        with build_opener(proxies).open(request, timeout=_SECONDS if body is None else _LOADING) as response:
            return read(json.loads(response.read(_MOST_ANSWER)))
    except HTTPError as error:
        if error.code == 401:
            raise UsageError(f"the server at {url} wants a key: give --api-key, or set {KEY_VARIABLE}") from error
        raise UsageError(f"{url} answers with status {error.code}: --url has to be that of a deltic server") from error
    except OSError as error:
        raise UsageError(f"no server answers at {url} ({getattr(error, 'reason', error)}): start one with deltic "
                         "serve, or say with --url where it is") from error
    except HTTPException as error:
        raise UsageError(f"what answers at {url} does not speak HTTP as it should ({type(error).__name__}): --url has "
                         "to be that of a deltic server") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise UsageError(f"what answers at {url} is no deltic server: its {path} "
                     f"{'lists no models' if body is None else 'does not say how much context the model has'}")


def _in_header(key: str) -> str:
    """The key as UTF-8, which the server takes, in the characters that http.client writes as these bytes."""
    if any(character < " " or character == "\x7f" for character in key):
        raise UsageError("the API key has a control character, such as the end of a line, which no header can carry: "
                         f"see --api-key and {KEY_VARIABLE}")
    return key.encode("utf-8", "surrogateescape").decode("latin-1")
