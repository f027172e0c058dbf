"""What `embed`, `rerank` and `serve` share: an encoder from a command's arguments, texts from a file or a pipe."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from deltic.cli import options
from deltic.cli.parser import UsageError, existing_file, text, whole
from deltic.cli.terminal import loading_bar
from deltic.errors import show

if TYPE_CHECKING:
    from deltic.embeddings.encoder import Encoder
    from deltic.embeddings.open import Task

_LONGEST = 64 << 20  # bytes of a line


def add_source(parser: argparse.ArgumentParser) -> None:
    """MODEL, FILE, and how both are read."""
    parser.add_argument("model", metavar="MODEL", type=text, help="a directory or a Hugging Face name such as "
                        "BAAI/bge-m3")
    parser.add_argument("file", metavar="FILE", type=_source, help="texts, one a line; - reads standard input")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a Hugging Face model")
    parser.add_argument("--jsonl", action="store_true",
                        help="each line is JSON: a text, or an object with one as `text`")
    parser.add_argument("--max-length", type=whole(1), metavar="N",
                        help="tokens of a text (default: as many as the model reads)")
    parser.add_argument("--no-truncate", dest="truncate", action="store_false",
                        help="refuse texts that are too long, rather than cutting them")
    options.add_engine(parser)


def open_encoder(args: argparse.Namespace, task: Task, **more: Any) -> Encoder:
    """Load what the arguments name, with a progress bar."""
    given = options.engine_options(args)
    from deltic.embeddings.encoder import Encoder

    bar = loading_bar()
    try:
        return Encoder(args.model, task=task, revision=args.revision, max_length=args.max_length, progress=bar.update,
                       **more, **given)
    finally:
        bar.close()


def open_lines(name: str) -> BinaryIO:
    """The file of this name, or standard input."""
    if name == "-":
        return sys.stdin.buffer
    try:
        return Path(name).open("rb")
    except OSError as error:
        raise UsageError(f"{show(name)} cannot be read: {error.strerror}") from error


def read_texts(file: BinaryIO, jsonl: bool) -> Iterator[str]:
    """Line by line. UsageError names the line that is no UTF-8, too long, or not of the form."""
    number = 0
    while line := _line(file, number + 1):
        number += 1
        if len(line) > _LONGEST:
            raise UsageError(f"line {number} has more than {_LONGEST >> 20} MiB")
        try:
            words = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise UsageError(f"line {number} is not valid UTF-8") from None
        yield _text_of(words, number) if jsonl else words


def _line(file: BinaryIO, number: int) -> bytes:
    try:
        return file.readline(_LONGEST + 1)
    except OSError as error:
        raise UsageError(f"line {number} cannot be read: {error.strerror}") from error


def _source(given: str) -> str:
    """An argument type: a file that is there, a pipe, or - for standard input."""
    return given if given == "-" else str(existing_file(text(given)))


def _text_of(line: str, number: int) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"line {number} is not JSON: {error}") from None
    found = value.get("text") if isinstance(value, dict) else value
    if not isinstance(found, str):
        raise UsageError(f'line {number} must be a text, or an object such as {{"text": "..."}}, not {show(value)}')
    return found


def is_seekable(file: BinaryIO) -> bool:
    """Whether it can be read again from its beginning."""
    try:
        return file is not sys.stdin.buffer and file.seekable()
    except (OSError, io.UnsupportedOperation):
        return False
