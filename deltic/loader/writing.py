"""Atomic writing of files and directories."""

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
    """Opens a temporary file that is renamed to `path` on success. OSErrors become DelticErrors that name `path`."""
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
    """Creates a temporary directory whose files are moved to `folder` on success, where they replace those that `old`
    finds. OSErrors become DelticErrors that name `folder`."""
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
            with suppress(OSError):
                parent.rmdir()


def check_room(path: Path, size: int, advice: str) -> None:
    """Raises DelticError with `advice` if the disk has no room for a file of `size` bytes."""
    with explained(path):
        free = shutil.disk_usage(next(place for place in path.absolute().parents if place.exists())).free
    if size > free:
        raise DelticError(f"{path} cannot be written: it needs {size_of(size)}, but its disk has {size_of(free)} "
                          f"free; {advice}")


def size_of(count: int) -> str:
    """Formats a number of bytes."""
    return f"{count / 1e9:,.2f} GB" if count >= 1e8 else f"{count / 1e6:,.2f} MB"


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns OSErrors into DelticErrors that name this path."""
    try:
        yield
    except OSError as error:
        raise DelticError(f"{path} cannot be written: {error.strerror or error}") from error
