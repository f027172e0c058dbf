"""The log of requests: a line of JSON for each. A thread writes it, so that a full disk or pipe loses lines, but delays
no request."""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deltic.errors import ConfigError
from deltic.server.http import dump

log = logging.getLogger("deltic")

_MOST_WAITING = 10_000
_AT_ONCE = 256
"""Lines that wait, and that are written together."""
_QUIET = 10.0
"""Seconds between two log lines about the same problem."""
_PATIENCE = 2.0
"""Seconds that the end of the server waits for the last lines."""


class RequestLog:
    """Appends to a file, or writes to standard output. texts: lines have prompts and answers. lost: lines that could
    not be written."""

    def __init__(self, path: str, texts: bool = False) -> None:
        """path: a file, or "-" for standard output. ConfigError if it cannot be opened."""
        self.texts, self.lost = texts, 0
        self._path = None if path == "-" else Path(path).absolute()
        try:
            self._file = _open(self._path) if self._path else os.dup(1)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the request log {path} cannot be opened: {error}", "request_log") from error
        self._lines: queue.Queue[Mapping[str, Any] | None] = queue.Queue(_MOST_WAITING)
        self._torn, self._logged = False, -math.inf
        self._thread = threading.Thread(target=self._run, name="deltic-request-log", daemon=True)
        self._thread.start()

    def write(self, line: Mapping[str, Any]) -> None:
        """Queues a line."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.lost += 1

    def close(self) -> None:
        """Writes the queued lines, unless that takes too long."""
        try:
            self._lines.put(None, timeout=_PATIENCE)
        except queue.Full:
            return
        self._thread.join(_PATIENCE)

    def _run(self) -> None:
        while True:
            lines = [self._lines.get()]
            while lines[-1] is not None and len(lines) < _AT_ONCE and not self._lines.empty():
                lines.append(self._lines.get())
            self._reopen()
            self._write([dump(line) for line in lines if line is not None])
            if lines[-1] is None:
                os.close(self._file)
                return

    def _reopen(self) -> None:
        """Opens the path again after a rotation. If that fails, the old file is used."""
        if self._path is None:
            return
        try:
            now = self._path.stat() if self._path.exists() else None
            if now is None or not os.path.samestat(os.fstat(self._file), now):
                file = _open(self._path)
                os.close(self._file)
                self._file, self._torn = file, False
        except OSError as error:
            self._warn(f"cannot be opened again: {error}")

    def _write(self, lines: list[bytes]) -> None:
        """Writes lines. A half-written line is ended before the next one."""
        for at, line in enumerate(lines):
            left = b"\n" * self._torn + line + b"\n"
            try:
                while left:
                    count = os.write(self._file, left)
                    left, self._torn = left[count:], count < len(left)
            except OSError as error:
                self.lost += len(lines) - at
                self._warn(f"cannot be written, and has lost {self.lost} lines: {error.strerror}")
                return

    def _warn(self, trouble: str) -> None:
        if time.monotonic() - self._logged > _QUIET:
            self._logged = time.monotonic()
            log.error("the request log %s", trouble)


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
