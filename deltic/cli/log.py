"""Shows the library's log on stderr as plain lines."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy

from deltic.cli.parser import as_typed


class _PlainLines(logging.Formatter):
    """Formats a record as `deltic: warning: MESSAGE`. Tracebacks are shown only with --verbose."""

    def __init__(self, verbose: bool) -> None:
        super().__init__("deltic: %(lowered)s: %(message)s")
        self._verbose = verbose

    def format(self, record: logging.LogRecord) -> str:
        record = copy(record)
        record.lowered = record.levelname.lower()
        record.msg, record.args = as_typed(record.getMessage()), None
        if self._verbose or not record.exc_info:
            return super().format(record)
        kind, error, _ = record.exc_info
        record.exc_info = record.exc_text = None
        name = kind.__name__ if kind else "unknown"
        return f"{super().format(record)} ({name}: {as_typed(str(error))}; -v shows where)"


@contextmanager
def logging_to_stderr(verbose: bool) -> Iterator[None]:
    """Shows warnings of the `deltic` loggers, with `verbose` all records."""
    logger, handler = logging.getLogger("deltic"), logging.StreamHandler()
    handler.setFormatter(_PlainLines(verbose))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if verbose else logging.WARNING)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
