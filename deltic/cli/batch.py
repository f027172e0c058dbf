"""`deltic batch`: a file of requests in, a file of answers out."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from deltic.cli import options
from deltic.cli.models import check_source, open_llm
from deltic.cli.parser import existing_file, path_name, text
from deltic.cli.signals import Terminated
from deltic.cli.terminal import Bar
from deltic.errors import DelticError, show

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message

    from deltic.llm import LLM

HELP = ("Answer the requests of a file of OpenAI's batch lines: {\"custom_id\": ..., \"method\": \"POST\", \"url\": "
        "\"/v1/chat/completions\", \"body\": {...}}. Their answers, and errors, go to another such file, each as soon "
        "as it is there. What the second file has already is not asked again, so the same command goes on where it was "
        "interrupted.")

_URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_AHEAD = 2  # so many times the requests that run at once are taken in, so that no place stays empty
_LONGEST = 64 << 20  # bytes of a line

Json = dict[str, Any]


class BatchError(DelticError):
    """A file of requests, or of answers, cannot be used."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="IN.jsonl", type=existing_file,
                        help="the requests, one line each. custom_id is any text that no other line has; url is "
                             f"{', '.join(_URLS)}; body is what the server takes there, but for stream")
    parser.add_argument("target", metavar="OUT.jsonl", type=lambda given: Path(path_name(given)),
                        help="where the answers go, in the order in which they are done: custom_id, response with "
                             "status_code and body, and error, which is null or has a code and a message")
    options.add_model(parser)
    parser.add_argument("--served-name", type=text, metavar="NAME",
                        help="what the requests call the model (default: its own name; they may leave it out)")
    options.add_thinking(parser)
    options.add_template(parser)
    options.add_engine(parser)
    options.add_random(parser, hidden=True)


def run(args: argparse.Namespace) -> int:
    """The files are looked at before the model is loaded. 1 if a request was answered with an error."""
    options.refuse_random(args)
    check_source(args)
    options.engine_options(args)
    lines = _checked(args.source)
    with Results(args.target, args.source) as results:
        if missing := lines - results.done:
            with open_llm(args) as llm:
                _answer_all(llm, args, results, missing)
        print(f"{len(lines):,} answers are in {args.target}, {results.failed:,} of them errors", file=sys.stderr)
    return 1 if results.failed else 0


def _answer_all(llm: LLM, args: argparse.Namespace, results: Results, missing: set[bytes]) -> None:
    from deltic.server.app import create_app

    batch = _Batch(create_app(llm, served_name=args.served_name), results, len(missing))
    began, before = time.monotonic(), llm.engine.stats.generated_tokens
    wanted = (line for _, line in _lines(args.source) if _key(line["custom_id"]) in missing)
    try:
        _run_until_signal(batch.answer(wanted, _AHEAD * llm.runtime.memory.max_batch))
    except BaseExceptionGroup as group:  # what ends one request's task ends all
        raise group.exceptions[0] from None
    finally:
        batch.bar.close()
        seconds, tokens = time.monotonic() - began, llm.engine.stats.generated_tokens - before
        print(f"{batch.count:,} of {len(missing):,} requests, {tokens:,} tokens in {seconds:.1f} s "
              f"({tokens / seconds:,.0f} tokens/s)", file=sys.stderr)
        if batch.count < len(missing):
            print("the same command goes on from here", file=sys.stderr)


def _run_until_signal(work: Coroutine[Any, Any, None]) -> None:
    """As asyncio.run, where SIGINT and SIGTERM cancel the work instead of raising somewhere within the loop; then they
    raise as elsewhere."""
    came: list[int] = []

    async def cancellable() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def end(number: int) -> None:
            came.append(number)
            task.cancel()

        for number in before:
            loop.add_signal_handler(number, end, number)
        await work

    before = {number: handler for number in (signal.SIGINT, signal.SIGTERM)
              if (handler := signal.getsignal(number)) != signal.SIG_IGN}
    try:
        asyncio.run(cancellable())
    except asyncio.CancelledError:
        if not came:
            raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise Terminated if came[0] == signal.SIGTERM else KeyboardInterrupt


@dataclass(slots=True)
class _Batch:
    """Requests on their way through the server's application, without HTTP."""

    app: Any
    results: Results
    total: int
    count: int = 0
    bar: Bar = field(default_factory=lambda: Bar("answering", 1, "requests"))

    async def answer(self, lines: Iterator[Json], at_once: int) -> None:
        """Answer the lines, so many at once."""
        async with self.app.router.lifespan_context(self.app), asyncio.TaskGroup() as tasks:
            for _ in range(min(at_once, self.total)):
                tasks.create_task(self._work(lines))

    async def _work(self, lines: Iterator[Json]) -> None:
        for line in lines:
            result = await self._result(line)
            self.results.write(result)
            self.count += 1
            self.bar.update(self.count, self.total)

    async def _result(self, line: Json) -> Json:
        result = {"id": "batch_req_" + uuid.uuid4().hex, "custom_id": line["custom_id"], "response": None}
        if wrong := _wrong(line):
            return result | {"error": {"code": "invalid_request", "message": wrong}}
        status, answer = await self._asked(line["url"], json.dumps(line["body"]).encode())
        body = json.loads(answer)
        said = body.get("error") if status != 200 else None
        return result | {"response": {"status_code": status, "request_id": body.get("id"), "body": body},
                         "error": said and {"code": said["code"] or said["type"], "message": said["message"]}}

    async def _asked(self, url: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer; asked again for as long as there is no room."""
        while True:
            status, headers, answer = await _called(self.app, url, body)
            if status != 503:
                return status, answer
            if b"retry-after" not in headers:
                raise BatchError(json.loads(answer)["error"]["message"])
            await asyncio.sleep(int(headers[b"retry-after"]))


async def _called(app: ASGIApp, url: str, body: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
    """One request to an ASGI application."""
    given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    start: Message = {}
    pieces = []

    async def receive() -> Message:
        return given.pop() if given else await asyncio.get_running_loop().create_future()

    async def send(message: Message) -> None:
        start.update(message if message["type"] == "http.response.start" else {})
        pieces.append(message.get("body", b""))

    await app({"type": "http", "method": "POST", "path": url, "raw_path": url.encode(), "query_string": b"",
               "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
               "http_version": "1.1", "scheme": "http", "root_path": "", "client": None, "server": None}, receive, send)
    return start["status"], dict(start["headers"]), b"".join(pieces)


def _wrong(line: Json) -> str | None:
    """What keeps a line from being asked at all."""
    method, url, body = line.get("method", "POST"), line.get("url"), line.get("body")
    if method != "POST":
        return f"method must be POST, not {show(method)}"
    if url not in _URLS:
        return f"url must be one of {', '.join(_URLS)}, not {show(url)}"
    if not isinstance(body, dict):
        return f"body must be an object, not {show(body)}"
    return "stream must be left out: answers of a batch come whole" if body.get("stream") else None


class Results:
    """The file of answers, for one writer. done: the requests that it has; failed: how many of them with an error.

    What is in it stays; a last line that was not written to its end is cut off.
    """

    def __init__(self, path: Path, source: Path) -> None:
        self._path, self.done, self.failed = path, set[bytes](), 0
        self._made = False  # by us, and nobody else writes it
        try:
            absent = not path.exists()
            if path.exists() and not path.is_file():
                raise BatchError(f"{path} is no file: name another one for the answers")
            if path.exists() and path.samefile(source):
                raise BatchError(f"{path} has the requests: name another file for the answers")
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise BatchError(f"{path} cannot be written: {error.strerror}") from error
        try:
            self._claim()
            self._made = absent
            self._read()
        except BaseException:
            self._close(failed=True)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close(failed=kind is not None)

    def _close(self, failed: bool) -> None:
        """A failure leaves no new file in which nothing is."""
        if failed and self._made and not os.fstat(self._file).st_size:
            self._path.resolve().unlink(missing_ok=True)
        os.close(self._file)

    def write(self, result: Json) -> None:
        """Add an answer; BatchError, and nothing of it is there, if the disk does not take it."""
        end, rest = os.lseek(self._file, 0, os.SEEK_END), memoryview(_written(result))
        try:
            while rest:
                rest = rest[os.write(self._file, rest):]
        except OSError as error:
            os.ftruncate(self._file, end)
            raise BatchError(f"{self._path} cannot be written: {error.strerror}; the answers that it has are kept, and "
                             "the same command goes on from there") from error
        self.failed += result["error"] is not None

    def _claim(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.path.samestat(os.fstat(self._file), self._path.stat())  # else another one has just deleted it
        except OSError:
            mine = False
        if not mine:
            raise BatchError(f"{self._path} is being written by another process: wait for it, or name another file")

    def _read(self) -> None:
        whole = 0
        with open(self._file, "rb", closefd=False) as file:
            for number, raw in enumerate(iter(file.readline, b""), 1):
                if not raw.endswith(b"\n"):
                    break
                found = _object(raw)
                if found is None or not isinstance(found.get("custom_id"), str) or "response" not in found:
                    raise BatchError(f"line {number} of {self._path} is no answer of a batch: name another file for "
                                     "the answers")
                self.done.add(_key(found["custom_id"]))
                self.failed += found.get("error") is not None
                whole += len(raw)
        os.ftruncate(self._file, whole)


def _checked(path: Path) -> set[bytes]:
    """The requests of a file; BatchError names the line that is none, or has another's custom_id."""
    if not path.is_file():
        raise BatchError(f"{path} must be a file, not a pipe: it is read twice")
    seen: dict[bytes, int] = {}
    for number, line in _lines(path):
        key = _key(line["custom_id"])
        if key in seen:
            raise BatchError(f"line {number} of {path} has the custom_id {show(line['custom_id'])}, and so has line "
                             f"{seen[key]}: answers are told apart by it")
        seen[key] = number
    return set(seen)


def _lines(path: Path) -> Iterator[tuple[int, Json]]:
    """The requests of a file one by one, with the numbers of their lines."""
    with path.open("rb") as file:
        for number, raw in enumerate(iter(lambda: file.readline(_LONGEST + 1), b""), 1):
            if len(raw) > _LONGEST:
                raise BatchError(f"line {number} of {path} has more than {_LONGEST >> 20} MiB")
            if not raw.strip():
                continue
            found = _object(raw)
            if found is None:
                raise BatchError(f"line {number} of {path} is no JSON object")
            if not isinstance(found.get("custom_id"), str):
                raise BatchError(f"line {number} of {path} has no custom_id, which must be a text")
            yield number, found


def _object(raw: bytes) -> Json | None:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _written(result: Json) -> bytes:
    try:
        return json.dumps(result, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # half a character, which only JSON's own notation can say
        return json.dumps(result).encode() + b"\n"


def _key(custom_id: str) -> bytes:
    """What is kept of an id, however long it is."""
    return blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
