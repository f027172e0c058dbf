"""`deltic embed`: vectors of the texts in a file."""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from deltic.cli.parser import UsageError, path_name, text, whole
from deltic.cli.terminal import Bar
from deltic.cli.texts import add_source, is_seekable, open_encoder, open_lines, read_texts
from deltic.errors import show

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from deltic.embeddings.encoder import Encoder

HELP = "Vectors of the texts in a file. What was interrupted goes on where it was, if it is started again."

_WINDOW = 1024
_ROOM = "make room, and run the same command again, which goes on from what is there"
_KINDS = (".npy", ".npz")


def add(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    parser.add_argument("-o", "--output", type=_output, metavar="FILE",
                        help="a .npy or .npz file for the vectors, float32 [texts, numbers] (in .npz: `vectors`); "
                             "without it they go to standard output, a line of JSON for each text")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--query", dest="kind", action="store_const", const="query",
                      help="the texts are queries: the model's prompt for them comes first, if it has one")
    kind.add_argument("--passage", dest="kind", action="store_const", const="passage", help="the texts are passages")
    kind.add_argument("--prompt", type=text, metavar="TEXT", help="put this before each text")
    parser.add_argument("--dimensions", type=whole(1), metavar="N",
                        help="keep the first N numbers of each vector, made length 1 again")


def run(args: argparse.Namespace) -> int:
    with open_lines(args.file) as file, open_encoder(args, "embed") as encoder:
        if args.output is not None:
            _to_file(encoder, args, file)
            return 0
        for rows in _vectors(encoder, args, read_texts(file, args.jsonl), lambda _: None):
            print(*(json.dumps(row.tolist()) for row in rows), sep="\n")
    return 0


def _to_file(encoder: Encoder, args: argparse.Namespace, file: BinaryIO) -> None:
    output: Path = args.output
    part, note = output.with_name(output.name + ".part"), output.with_name(output.name + ".part.json")
    from deltic.embeddings.encoder import check_dimensions
    from deltic.loader.writing import check_room, explained

    check_dimensions(args.dimensions, encoder.dimension)
    width, total = args.dimensions or encoder.dimension, 0
    if is_seekable(file):
        digest, total = hashlib.blake2b(digest_size=16), 0
        for piece in iter(lambda: file.read(1 << 20), b""):
            digest.update(piece)
            total += piece.count(b"\n")
        file.seek(0)
        told = json.dumps({"texts": digest.hexdigest(), "model": encoder.name, "width": width, "kind": args.kind,
                           "prompt": args.prompt, "jsonl": args.jsonl, "max_length": encoder.max_length})
    else:
        told = ""  # what came through a pipe is gone
    with explained(output), _claimed(part, note, output) as target:
        done = count = _resume(target, note, told, 4 * width)
        check_room(output, 4 * width * (2 * total - done), _ROOM)  # the part stays until all is in the output
        if done:
            print(f"{done:,} vectors are there already: going on behind them", file=sys.stderr)
        bar = Bar("embedding", 1, "texts")
        try:
            for rows in _vectors(encoder, args, islice(read_texts(file, args.jsonl), done, None),
                                 lambda count: bar.update(done + count, max(total, done + count))):
                target.write(rows.tobytes())
                target.flush()
                count += len(rows)
        finally:
            bar.close()
        _finish(part, output, (count, width))
        note.unlink(missing_ok=True)
        part.unlink()


def _vectors(encoder: Encoder, args: argparse.Namespace, texts: Iterator[str], report: Any
             ) -> Iterator[NDArray[np.float32]]:
    """Window by window."""
    count = 0

    def step(number: int) -> None:
        nonlocal count
        count += number
        report(count)

    while window := list(islice(texts, _WINDOW)):
        yield encoder.encode(window, kind=args.kind, prompt=args.prompt, dimensions=args.dimensions,
                             truncate=args.truncate, progress=step)


@contextmanager
def _claimed(part: Path, note: Path, output: Path) -> Iterator[BinaryIO]:
    """The part, to be added to by this process alone; UsageError if another one writes it. note: what it is of."""
    with part.open("ab") as target:
        try:
            fcntl.flock(target, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.path.samestat(os.fstat(target.fileno()), part.stat())  # else another one has just finished it
        except (BlockingIOError, FileNotFoundError):
            mine = False
        if not mine:
            raise UsageError(f"{output} is being written by another process: wait for it, or name another file")
        try:
            yield target
        except BaseException:  # what has nothing to go on from does not stay
            if not os.fstat(target.fileno()).st_size:
                note.unlink(missing_ok=True)
                part.unlink(missing_ok=True)
            raise


def _resume(part: BinaryIO, note: Path, told: str, row: int) -> int:
    """How many vectors the part has, if it was begun in the same way; else it begins anew."""
    try:
        same = bool(told) and note.read_text(encoding="utf-8") == told
    except (OSError, UnicodeDecodeError):
        same = False
    done = os.fstat(part.fileno()).st_size // row if same else 0
    part.truncate(done * row)
    if not same:
        note.write_text(told, encoding="utf-8")
    return done


def _finish(part: Path, output: Path, shape: tuple[int, int]) -> None:
    import numpy as np

    from deltic.loader.writing import check_room, replacing

    size, wanted = part.stat().st_size, 4 * shape[0] * shape[1]
    if size != wanted:
        raise UsageError(f"{part} has {size:,} bytes instead of {wanted:,}, as another program has changed it: delete "
                         "it, and run the command again")
    rows = np.memmap(part, np.float32, "r", shape=shape) if shape[0] else np.zeros(shape, np.float32)
    check_room(output, wanted, _ROOM)
    with replacing(output) as file:
        if output.suffix == ".npz":
            np.savez(file, vectors=rows)
        else:
            np.save(file, rows)


def _output(given: str) -> Path:
    path = Path(path_name(given))
    if path.suffix not in _KINDS:
        raise argparse.ArgumentTypeError(f"must end in {' or '.join(_KINDS)}, not {given[:80]!r}")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"the directory {str(path.parent)!r} does not exist")
    if path.exists() and not path.is_file():
        kind = "directory" if path.is_dir() else "pipe or device"
        raise argparse.ArgumentTypeError(f"{show(given)} is a {kind}; name a file")
    return path
