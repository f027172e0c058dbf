"""A hub on this machine: the endpoints that huggingface_hub asks, over HTTP."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

REPOSITORY = "org/name"
_PIECE = 1 << 16
_LARGE = (".safetensors", ".gguf", ".bin", ".pt")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class LocalHub:
    """A repository with one commit, main. files: what is there; large ones lie in LFS. sent: what is delivered instead.
    asked: paths of downloads. ranges: parts of files are sent to those who ask for parts. zeros: bytes that follow a
    file's content, without being anywhere. instead: what serves a path, or its last part, instead of the hub.
    headers: those of each request. delivered: (file, bytes sent) of each download."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    sent: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    ranges: bool = True
    zeros: dict[str, int] = field(default_factory=dict)
    instead: dict[str, Callable[[BaseHTTPRequestHandler], None]] = field(default_factory=dict)
    headers: list[dict[str, str]] = field(default_factory=list)
    delivered: list[tuple[str, int]] = field(default_factory=list)

    def size(self, name: str) -> int:
        return len(self.files[name]) + self.zeros.get(name, 0)

    def bytes_delivered(self) -> int:
        return sum(count for _, count in self.delivered)

    def facts(self, name: str) -> tuple[str, str | None]:
        """git's name of the blob, and the SHA-256 of a large file."""
        data = self.files[name]
        blob = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
        return blob, hashlib.sha256(data).hexdigest() if name.endswith(_LARGE) else None

    def info(self) -> dict[str, Any]:
        siblings = []
        for name in self.files:
            blob, digest = self.facts(name)
            lfs = {"sha256": digest, "size": self.size(name), "pointerSize": 134} if digest else None
            siblings.append({"rfilename": name, "size": self.size(name), "blobId": blob,
                             **({"lfs": lfs} if lfs else {})})
        return {"id": REPOSITORY, "modelId": REPOSITORY, "sha": COMMIT, "private": False, "siblings": siblings}

    def tree(self) -> list[dict[str, Any]]:
        found = []
        for name, data in self.files.items():
            blob, digest = self.facts(name)
            lfs = {"lfs": {"oid": digest, "size": len(data), "pointerSize": 134}} if digest else {}
            found.append({"type": "file", "path": name, "size": len(data), "oid": blob, **lfs})
        return found


@contextmanager
def local_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """The hub of this process, with a cache of its own."""
    hub = LocalHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            path = self.path.split("?")[0]
            name = path.partition("/resolve/")[2].partition("/")[2]
            if name not in hub.files:
                return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            blob, digest = hub.facts(name)
            data = hub.sent.get(name, hub.files[name])
            linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))} if digest else {}
            facts = {"ETag": f'"{digest or blob}"', "X-Repo-Commit": COMMIT, **linked}
            if self.command == "HEAD":
                return self._answer(200, data, facts)
            hub.asked.append(name)
            self._deliver(name, data, facts)

        def _deliver(self, name: str, data: bytes, facts: dict[str, str]) -> None:
            size = len(data) + hub.zeros.get(name, 0)
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            start, end = 0, size
            if wanted and hub.ranges:
                start, end = int(wanted[1]), min(int(wanted[2]) + 1, size)
                facts = {**facts, "Content-Range": f"bytes {start}-{end - 1}/{size}"}
            self._head(206 if wanted and hub.ranges else 200, end - start, facts)
            done = start
            try:
                while done < end:
                    piece = data[done:min(end, done + _PIECE)] or bytes(min(_PIECE, end - done))
                    self.wfile.write(piece)
                    done += len(piece)
            except OSError:  # the client has enough
                self.close_connection = True
            hub.delivered.append((name, done - start))

        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            hub.headers.append(dict(self.headers))
            instead = hub.instead.get(path) or hub.instead.get(path.rpartition("/")[2])
            if instead:
                instead(self)
            elif re.fullmatch(f"/api/models/{REPOSITORY}(/revision/(main|{COMMIT}))?", path):
                self._answer(200, json.dumps(hub.info()).encode())
            elif path.startswith(f"/api/models/{REPOSITORY}/tree/"):
                self._answer(200, json.dumps(hub.tree()).encode())
            elif path.startswith("/api/"):
                self._answer(404, b"", {"X-Error-Code": "RevisionNotFound" if "revision" in path else "RepoNotFound"})
            else:
                self.do_HEAD()

        def _answer(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
            self._head(status, len(data), headers or {})
            if self.command == "GET":
                self.wfile.write(data)

        def _head(self, status: int, length: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(length), **headers}.items():
                self.send_header(key, value)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """Clients that have enough close the connection."""

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        hub.url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE",
                            hub.url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        try:
            yield hub
        finally:
            close_session()  # who asked keeps the connections, also when the hub has gone
            server.shutdown()
