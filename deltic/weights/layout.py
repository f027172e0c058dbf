"""What lies in a directory or file that is given as a model, told by names and first bytes alone."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

_GGUF: Final = b"GGUF"


def is_gguf(path: Path) -> bool:
    """Whether a plain file begins as GGUF files do, whatever it is called: Ollama's blobs have no suffix."""
    with suppress(OSError, ValueError):
        if path.is_file():
            with path.open("rb") as file:
                return file.read(len(_GGUF)) == _GGUF
    return False
