"""`deltic embed` and `deltic rerank`: embeddings of texts, and scores of how well texts match a query."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from deltic.cli import options
from deltic.cli.output import Bar, bytes_bar, note
from deltic.cli.parser import (
    UsageError,
    check_target,
    decoded,
    existing_file,
    lock,
    numbered_lines,
    open_lines,
    text,
    whole,
)
from deltic.errors import show

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from deltic.embeddings.encoder import Encoder
    from deltic.embeddings.open import Task

_WINDOW = 1024
_NO_ROOM = "make room, and run the same command again to continue"


def add_embed(parser: argparse.ArgumentParser) -> None:
    parser.description = "Vectors of the texts in a file. The same command continues an interrupted one."
    _add_source(parser)
    parser.add_argument("-o", "--output", type=lambda given: check_target(given, ".npy", ".npz"), metavar="FILE",
                        help="a .npy or .npz file for the vectors, float32 [texts, numbers] (in .npz: `vectors`); "
                             "without it, they are printed as a line of JSON for each text")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--query", dest="kind", action="store_const", const="query",
                      help="the texts are queries: put the model's query prompt before each, if it has one")
    kind.add_argument("--passage", dest="kind", action="store_const", const="passage", help="the texts are passages")
    kind.add_argument("--prompt", type=text, metavar="TEXT", help="put this before each text")
    parser.add_argument("--dimensions", type=whole(1), metavar="N",
                        help="keep the first N numbers of each vector, normalized again")


def run_embed(args: argparse.Namespace) -> int:
    with open_lines(args.file) as file, _open_encoder(args, "embed") as encoder:
        if args.output is not None:
            _write_vectors(encoder, args, file)
            return 0
        for rows in _vectors(encoder, args, read_texts(file, args.jsonl), lambda _: None):
            print(*(json.dumps(row.tolist()) for row in rows), sep="\n")
    return 0


def add_rerank(parser: argparse.ArgumentParser) -> None:
    parser.description = "Sort the texts in a file by how well they match a query, best first, each after its score."
    _add_source(parser)
    parser.add_argument("--query", type=text, required=True, metavar="TEXT", help="what to look for")
    parser.add_argument("--top", type=whole(1), metavar="N", help="show the best N (default: all)")
    parser.add_argument("--instruction", type=text, metavar="TEXT",
                        help="the instruction for a reranker that is a decoder (default: the one that "
                             "Qwen3-Reranker was trained with)")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each text: index, score, text")


def run_rerank(args: argparse.Namespace) -> int:
    with open_lines(args.file) as file:
        documents = list(read_texts(file, args.jsonl))
    with _open_encoder(args, "auto", instruction=args.instruction) as encoder:
        for ranked in encoder.rank(args.query, documents, top_n=args.top, truncate=args.truncate):
            document = documents[ranked.index]
            facts = {"index": ranked.index, "score": ranked.score, "text": document}
            print(json.dumps(facts, ensure_ascii=False) if args.json else f"{ranked.score:.6f}\t{document}")
    return 0


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=text,
                        help="a directory or a Hugging Face name such as BAAI/bge-m3")
    parser.add_argument("file", metavar="FILE", type=_source, help="texts, one a line; - reads standard input")
    options.add_revision(parser)
    parser.add_argument("--jsonl", action="store_true",
                        help="each line is JSON: a text, or an object with one as `text`")
    parser.add_argument("--max-length", type=whole(1), metavar="N",
                        help="maximum tokens of a text (default: the model's own)")
    parser.add_argument("--no-truncate", dest="truncate", action="store_false",
                        help="refuse texts that are too long instead of cutting them")
    options.add_engine(parser)


def _open_encoder(args: argparse.Namespace, task: Task, **more: Any) -> Encoder:
    given = options.engine_options(args)
    from deltic.embeddings.encoder import Encoder

    with bytes_bar("loading") as bar:
        return Encoder(args.model, task=task, revision=args.revision, max_length=args.max_length,
                       progress=bar.update, **more, **given)


def read_texts(file: BinaryIO, jsonl: bool) -> Iterator[str]:
    """Yields the text of each line. Raises UsageError with the number of a wrong line."""
    for number, line in numbered_lines(file):
        content = decoded(line, f"line {number}").rstrip("\r\n")
        yield _json_text(content, number) if jsonl else content


def _json_text(line: str, number: int) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"line {number} is not JSON: {error}") from None
    found = value.get("text") if isinstance(value, dict) else value
    if not isinstance(found, str):
        raise UsageError(f'line {number} must be a text, or an object such as {{"text": "..."}}, not {show(value)}')
    return found


def _source(given: str) -> str:
    """Checks an argument that names an existing file, a pipe, or - for standard input."""
    return given if given == "-" else str(existing_file(text(given)))


def _write_vectors(encoder: Encoder, args: argparse.Namespace, file: BinaryIO) -> None:
    """Appends raw rows to OUTPUT.part, so that the job can be continued. Makes the output from them at the end."""
    from deltic.embeddings.encoder import check_dimensions
    from deltic.loader.disk import check_room, explained

    output: Path = args.output
    part, job = output.with_name(output.name + ".part"), output.with_name(output.name + ".part.json")
    check_dimensions(args.dimensions, encoder.dimension)
    width = args.dimensions or encoder.dimension
    description, total = _describe(encoder, args, file, width) if os.path.isfile(args.file) else ("", 0)
    with explained(output), _locked(part, job, output) as target:
        done = count = _resume(target, job, description, 4 * width)
        check_room(output, 4 * width * (2 * total - done), _NO_ROOM)  # at the end, part and output exist together
        if done:
            note(f"{done:,} vectors exist already: continuing after them")
        texts = islice(read_texts(file, args.jsonl), done, None)
        with Bar("embedding", 1, "texts") as bar:
            for rows in _vectors(encoder, args, texts, lambda new: bar.update(done + new, max(total, done + new))):
                target.write(rows.tobytes())
                target.flush()
                count += len(rows)
        _finish(part, output, (count, width))
        job.unlink(missing_ok=True)
        part.unlink()


def _describe(encoder: Encoder, args: argparse.Namespace, file: BinaryIO, width: int) -> tuple[str, int]:
    """Returns an identification of the job, so that only the same one is continued, and the number of lines."""
    digest, total = hashlib.blake2b(digest_size=16), 0
    for chunk in iter(lambda: file.read(1 << 20), b""):
        digest.update(chunk)
        total += chunk.count(b"\n")
    file.seek(0)
    return json.dumps({"texts": digest.hexdigest(), "model": encoder.name, "width": width, "kind": args.kind,
                       "prompt": args.prompt, "jsonl": args.jsonl, "max_length": encoder.max_length}), total


def _vectors(encoder: Encoder, args: argparse.Namespace, texts: Iterator[str], report: Callable[[int], None]
             ) -> Iterator[NDArray[np.float32]]:
    """Yields vectors in windows of texts. report: called with the number of encoded texts."""
    count = 0

    def add(number: int) -> None:
        nonlocal count
        count += number
        report(count)

    while window := list(islice(texts, _WINDOW)):
        yield encoder.encode(window, kind=args.kind, prompt=args.prompt, dimensions=args.dimensions,
                             truncate=args.truncate, progress=add)


@contextmanager
def _locked(part: Path, job: Path, output: Path) -> Iterator[BinaryIO]:
    """Opens the part file for this process alone. Raises UsageError if another process writes it."""
    with part.open("ab") as target:
        lock(target.fileno(), part, output)
        try:
            yield target
        except BaseException:
            if not os.fstat(target.fileno()).st_size:  # nothing to continue from
                job.unlink(missing_ok=True)
                part.unlink(missing_ok=True)
            raise


def _resume(part: BinaryIO, job: Path, description: str, row: int) -> int:
    """Returns the number of vectors in the part file of the same job. Empties the part file of another job."""
    try:
        same = bool(description) and job.read_text(encoding="utf-8") == description
    except (OSError, UnicodeDecodeError):
        same = False
    done = os.fstat(part.fileno()).st_size // row if same else 0
    part.truncate(done * row)
    if not same:
        job.write_text(description, encoding="utf-8")
    return done


def _finish(part: Path, output: Path, shape: tuple[int, int]) -> None:
    import numpy as np

    from deltic.loader.disk import check_room, replacing

    size, wanted = part.stat().st_size, 4 * shape[0] * shape[1]
    if size != wanted:
        raise UsageError(f"{part} has {size:,} bytes instead of {wanted:,}, as another program has changed it: delete "
                         "it, and run the command again")
    rows = np.memmap(part, np.float32, "r", shape=shape) if shape[0] else np.zeros(shape, np.float32)
    check_room(output, wanted, _NO_ROOM)
    with replacing(output) as file:
        if output.suffix == ".npz":
            np.savez(file, vectors=rows)
        else:
            np.save(file, rows)
