"""Reads parts of a repository's files over HTTP. Every request is bounded in bytes and time: servers are untrusted."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final
from urllib.parse import quote

from deltic.errors import ModelError, show

_FIRST: Final = 256 << 10
"""Bytes of a file that the first request fetches: most headers fit in them."""
_MAX_LISTING: Final = 32 << 20
_MAX_SKIPPED: Final = 16 << 20
"""Maximum bytes to receive and drop from a server that sends files from their start only."""
_MAX_ERROR: Final = 64 << 10
_TIMEOUT: Final = 10.0
"""Maximum seconds without a byte."""
_PATIENCE: Final = 60.0
_SLOWEST: Final = 50_000
"""A request may take _PATIENCE seconds, plus one second for each of this many bytes."""


class Repository:
    """A commit of a repository. sizes: bytes of each file.

    Endpoint, token, proxies and offline mode are the settings of huggingface_hub. Errors are those of huggingface_hub,
    plus ModelErrors about the server's responses.
    """

    def __init__(self, name: str, revision: str | None, token: str | None) -> None:
        """Lists the files of a branch, tag or commit."""
        from huggingface_hub import constants
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined, unused-ignore]

        validate_repo_id(name)
        self.name, self._token = name, token
        place = f"/revision/{quote(revision, safe='')}" if revision else ""
        with self._get(f"{constants.ENDPOINT}/api/models/{name}{place}?blobs=true", {}, _MAX_LISTING) as (_, pieces):
            text = _taken(pieces, 0, _MAX_LISTING + 1)
        self.commit, self.sizes = _parse_listing(name, text)
        self._first = lru_cache(8)(self._read_first)

    def read(self, name: str, offset: int, count: int) -> bytes:
        """Returns bytes of a file, fewer at its end."""
        end = min(offset + count, self.sizes[name])
        if offset >= min(_FIRST, end):
            return self._fetch(name, offset, end - offset) if offset < end else b""
        known = self._first(name)
        more = self._fetch(name, len(known), end - len(known)) if end > len(known) else b""
        return known[offset:end] + more

    def _read_first(self, name: str) -> bytes:
        return self._fetch(name, 0, min(_FIRST, self.sizes[name]))

    def _fetch(self, name: str, offset: int, count: int) -> bytes:
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(self.name, name, revision=self.commit)
        wanted = {"Range": f"bytes={offset}-{offset + count - 1}"}
        with self._get(url, wanted, count) as (response, pieces):
            skipped = 0 if response.status_code == 206 else offset
            if response.status_code == 206:
                self._check_range(name, response.headers.get("Content-Range", ""), offset)
            elif skipped > _MAX_SKIPPED:
                raise ModelError(f"the hub ignores byte ranges (it answers {response.status_code} to Range), so that "
                                 f"parts of {self.name}/{show(name)} cannot be read: download the model (deltic pull), "
                                 "and name its directory, or set HF_ENDPOINT to another hub")
            found = _taken(pieces, skipped, count)
        if len(found) < count:
            raise ModelError(f"{self.name}/{show(name)} ended after {offset + len(found)} bytes while it was read; the "
                             f"hub lists {self.sizes[name]}: try again, or name another revision")
        return found

    def _check_range(self, name: str, given: str, offset: int) -> None:
        found = re.fullmatch(r"bytes (\d{1,19})-\d{1,19}/(\d{1,19}|\*)", given.strip())
        if found is None or int(found[1]) != offset or found[2] not in ("*", str(self.sizes[name])):
            raise ModelError(f"the hub sends {show(given)} of {self.name}/{show(name)}, which has "
                             f"{self.sizes[name]} bytes, instead of those from {offset}; try again, or set "
                             "HF_ENDPOINT to another hub")

    @contextmanager
    def _get(self, url: str, headers: Mapping[str, str], count: int) -> Iterator[tuple[Any, Iterator[bytes]]]:
        """Yields a response and the pieces of its body, which is not compressed."""
        from huggingface_hub import get_session
        from huggingface_hub.utils import (  # type: ignore[attr-defined, unused-ignore]
            build_hf_headers,
            hf_raise_for_status,
        )

        deadline = time.monotonic() + _PATIENCE + count / _SLOWEST
        sent = {**build_hf_headers(token=self._token), **headers, "Accept-Encoding": "identity"}
        with get_session().stream("GET", url, headers=sent, timeout=_TIMEOUT, follow_redirects=True) as response:
            pieces = _in_time(response.iter_raw(), deadline)
            if response.status_code >= 400:
                kept = {key: value for key, value in response.headers.items() if key.lower().startswith("x-")}
                hf_raise_for_status(type(response)(response.status_code, headers=kept, request=response.request,
                                                   content=_taken(pieces, 0, _MAX_ERROR)))
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise ModelError(f"the hub compresses {url[:200]}, which was not asked for; set HF_ENDPOINT to another")
            yield response, pieces


def _in_time(pieces: Iterator[bytes], deadline: float) -> Iterator[bytes]:
    for piece in pieces:
        yield piece
        if time.monotonic() > deadline:
            raise TimeoutError("the hub sends too slowly")


def _taken(pieces: Iterator[bytes], skipped: int, count: int) -> bytes:
    """Returns `count` bytes after the first `skipped` bytes, or fewer if the pieces end earlier."""
    found = bytearray()
    for piece in pieces:
        found += piece[skipped:]
        skipped = max(skipped - len(piece), 0)
        if len(found) >= count:
            break
    return bytes(found[:count])


def _parse_listing(name: str, text: bytes) -> tuple[str, dict[str, int]]:
    """Returns the commit and the bytes of each file."""
    try:
        listing = json.loads(text)
        commit = listing["sha"]
        sizes = {file["rfilename"]: file.get("size") or (file.get("lfs") or {}).get("size") or 0
                 for file in listing["siblings"]}
    except (ValueError, RecursionError, TypeError, LookupError, AttributeError) as error:
        raise _malformed(name) from error
    if not isinstance(commit, str) or not re.fullmatch("[0-9a-f]{40,64}", commit):
        raise _malformed(name)
    if not all(isinstance(file, str) and type(size) is int and size >= 0 for file, size in sizes.items()):
        raise _malformed(name)
    return commit, sizes


def _malformed(name: str) -> ModelError:
    return ModelError(f"the hub's list of the files of {name} is not readable; set HF_ENDPOINT to a Hugging Face hub, "
                      "or name a directory")
