"""HTTP requests of commands to a running server."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from deltic.cli.parser import UsageError, text

KEY_VARIABLE = "DELTIC_API_KEY"
DEFAULT_URL = "http://127.0.0.1:8000"
MAX_BYTES = 32 << 20
"""Upper bound for a server's answer: large enough for the metrics of 1,000 replicas."""
_TIMEOUT, _LOADING_TIMEOUT = 10, 1800  # the server may have to load a large model
Answer = TypeVar("Answer")


def add_server(parser: argparse.ArgumentParser, name: str = "--url") -> None:
    """Adds arguments for the URL (an option or a positional argument) and for the API key."""
    optional: dict[str, Any] = {} if name.startswith("-") else {"nargs": "?"}
    parser.add_argument(name, type=_server_url, default=DEFAULT_URL, metavar="URL", **optional,
                        help=f"URL of the server (default: {DEFAULT_URL})")
    parser.add_argument("--api-key", type=text, metavar="KEY",
                        help=f"API key of the server (default: ${KEY_VARIABLE}, else none)")


def client_of(args: argparse.Namespace, name: str = "--url") -> ServerClient:
    """Returns the client for the server in the arguments. name: as in `add_server`."""
    return ServerClient(args.url, args.api_key or os.environ.get(KEY_VARIABLE) or "", name)


def _server_url(given: str) -> str:
    """Returns the base URL of a server that was given with or without /v1."""
    try:
        parts = urlsplit(given if "//" in given else f"http://{given}")
        is_valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        is_valid = False
    if not is_valid:
        raise UsageError(f"must be like {DEFAULT_URL}, not {given[:80]!r}")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


@dataclass(frozen=True, slots=True)
class ServerClient:
    """url: without /v1. key: "" if there is none. name: name of the argument with the URL, for errors."""

    url: str
    key: str = ""
    name: str = "--url"

    def ask_json(self, path: str, read: Callable[[Any], Answer], body: bytes | None = None) -> Answer:
        """Returns the result of `read` for the JSON answer. Otherwise like `ask`."""
        return self.ask(path, lambda content: read(json.loads(content)), body)

    def ask(self, path: str, read: Callable[[bytes], Answer], body: bytes | None = None) -> Answer:
        """Returns the result of `read` for the answer. Raises UsageError with a hint if there is no valid answer."""
        opener = build_opener(ProxyHandler({}) if self._is_local() else ProxyHandler())
        headers = self._headers()
        try:
            with opener.open(Request(f"{self.url}{path}", body, headers),
                             timeout=_TIMEOUT if body is None else _LOADING_TIMEOUT) as response:
                content = response.read(MAX_BYTES + 1)
                if len(content) > MAX_BYTES:
                    raise ValueError("too long")
                return read(content)
        except HTTPError as error:
            raise self._refused(error.code) from error
        except OSError as error:
            raise UsageError(f"no server answers at {self.url} ({getattr(error, 'reason', error)}): start one with "
                             f"deltic serve, or give its {self.name}") from error
        except (HTTPException, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(f"the answer of {self.url} to {path} cannot be read ({type(error).__name__}): "
                             f"{self.name} has to be that of a deltic server") from error

    def _refused(self, status: int) -> UsageError:
        if status == 401:
            wants = "another key" if self.key else "a key"
            return UsageError(f"the server at {self.url} wants {wants}: give --api-key, or set {KEY_VARIABLE}")
        if status == 503:
            return UsageError(f"the server at {self.url} is busy, starting or shutting down (status 503): try again")
        return UsageError(f"{self.url} answers with status {status}: {self.name} has to be that of a deltic server")

    def _is_local(self) -> bool:
        return urlsplit(self.url).hostname in ("127.0.0.1", "localhost", "::1")

    def _headers(self) -> dict[str, str]:
        if any(char < " " or char == "\x7f" for char in self.key):
            raise UsageError("the API key has a control character, such as the end of a line, which no header can "
                             f"carry: see --api-key and {KEY_VARIABLE}")
        headers = {"content-type": "application/json"}
        if self.key:  # encoded in UTF-8, as http.client sends text in latin-1
            headers["authorization"] = f"Bearer {self.key.encode('utf-8', 'surrogateescape').decode('latin-1')}"
        return headers
