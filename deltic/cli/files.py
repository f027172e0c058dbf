"""Files that commands read line by line, and files that they write."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from deltic.cli.parser import MAX_BYTES, UsageError
from deltic.errors import show


def open_lines(name: str) -> BinaryIO:
    """Opens a file, or standard input for `-`."""
    if name == "-":
        return sys.stdin.buffer
    try:
        return Path(name).open("rb")
    except OSError as error:
        raise UsageError(f"{show(name)} cannot be read: {error.strerror}") from error


def numbered_lines(file: BinaryIO, source: str = "") -> Iterator[tuple[int, bytes]]:
    """Yields each line and its number, from 1. source: such as ` on stdin`, for errors."""
    number = 0
    while True:
        number += 1
        try:
            line = file.readline(MAX_BYTES + 1)
        except OSError as error:
            raise UsageError(f"line {number}{source} cannot be read: {error.strerror}") from error
        if len(line) > MAX_BYTES:
            raise UsageError(f"line {number}{source} has more than {MAX_BYTES >> 20} MiB")
        if not line:
            return
        yield number, line


def decoded(content: bytes, name: str, *, first: bool = True) -> str:
    """Decodes UTF-8. Raises UsageError with the name of the content. first: it may begin with a byte order mark."""
    try:
        return content.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not valid UTF-8 (byte {error.start}): convert it first, for example with "
                         "iconv") from error


def lock(file: int, path: Path, output: Path) -> None:
    """Locks the open file of a path. Raises UsageError with the output if another process has locked or replaced it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_mine = os.path.samestat(os.fstat(file), path.stat())
    except OSError:
        is_mine = False
    if not is_mine:
        raise UsageError(f"{output} is being written by another process: wait for it, or name another file")


def check_target(given: str, suffix: str, kind: str) -> Path:
    """Returns the path of a file to write. Raises UsageError without the suffix or the directory."""
    path = Path(given)
    if path.suffix.lower() != suffix:
        raise UsageError(f"{given} must end in {suffix}, the suffix of {kind}")
    if not path.parent.is_dir():
        raise UsageError(f"there is no directory {str(path.parent)!r}")
    if path.is_dir():
        raise UsageError(f"{given} is a directory; name a file")
    return path


def check_absent(paths: Iterable[Path], force: bool) -> None:
    for path in paths:
        if path.exists() and not force:
            raise UsageError(f"{path} exists; give --force to replace it, or another name")


def replace_file(path: Path, content: str, mode: int) -> None:
    """Replaces a file as a whole, or leaves it as it is. Raises UsageError with the path."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(content)
        part.chmod(mode)
        part.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
