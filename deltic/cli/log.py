"""What the library has to say goes to stderr as plain lines."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _PlainLines(logging.Formatter):
    """`deltic: warning: MESSAGE`; tracebacks only for those who asked for them."""

    def __init__(self, verbose: bool) -> None:
        super().__init__("deltic: %(lowered)s: %(message)s")
        self._verbose = verbose

    def format(self, record: logging.LogRecord) -> str:
        record.lowered = record.levelname.lower()
        if not self._verbose:
            record.exc_info = record.exc_text = None
        return super().format(record)


@contextmanager
def logging_to_stderr(verbose: bool) -> Iterator[None]:
    """Show warnings of the `deltic` loggers, with `verbose` everything."""
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
