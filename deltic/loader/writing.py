"""Files that appear when they are complete, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from deltic.errors import DelticError


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file, which takes the name `path` when all went well. Errors of the system name that file."""
    temporary = path.with_name(f".{path.name[:200]}.{os.getpid()}.part")
    try:
        with explained(path):
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def replacing_files(folder: Path, old: Callable[[Path], Iterable[Path]]) -> Iterator[Path]:
    """A new directory, whose files go into `folder` when all went well, in the place of those that `old` finds in it.
    Errors of the system name `folder`."""
    place = folder.resolve()
    absent = [parent for parent in place.parents if not parent.exists()]
    made = place.with_name(f".{place.name[:200]}.{os.getpid()}.part")
    try:
        with explained(folder):
            made.mkdir(parents=True)
            yield made
            place.mkdir(exist_ok=True)
            new = {path: place / path.name for path in made.iterdir()}
            for path in {*old(place), *new.values()}:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            for path, target in new.items():
                path.rename(target)
    finally:
        shutil.rmtree(made, ignore_errors=True)
        for parent in absent:
            with suppress(OSError):  # it is in use
                parent.rmdir()


def check_room(path: Path, size: int, advice: str) -> None:
    """Raise DelticError, with `advice` on what to do, where the disk has no room for a file of `size` bytes."""
    with explained(path):
        free = shutil.disk_usage(next(place for place in path.absolute().parents if place.exists())).free
    if size > free:
        raise DelticError(f"{path} cannot be written: it needs {size_of(size)}, but its disk has {size_of(free)} "
                          f"free; {advice}")


def size_of(count: int) -> str:
    """So many bytes, in words."""
    return f"{count / 1e9:,.2f} GB" if count >= 1e8 else f"{count / 1e6:,.2f} MB"


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Errors of the system become DelticErrors that name this path, not a temporary one."""
    try:
        yield
    except OSError as error:
        raise DelticError(f"{path} cannot be written: {error.strerror or error}") from error
