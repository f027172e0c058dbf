"""Pictures and films that a command shows to a model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from deltic.errors import RequestError, show

_PART = re.compile(r"messages\[\d+\]\.content\[(\d+)\]")


@contextmanager
def naming(files: Sequence[Path]) -> Iterator[None]:
    """Errors about one of the files, which are the first parts of a message's content, name it instead of the part."""
    try:
        yield
    except RequestError as error:
        part = _PART.match(error.field or "")
        if part is None or int(part[1]) >= len(files):
            raise
        file = str(files[int(part[1])])
        said = str(error).replace(f" ({show(file)})", "")
        raise RequestError(said.replace(part[0], file) if part[0] in said else f"{file}: {said}", error.field
                           ) from error
