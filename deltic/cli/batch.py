"""`deltic batch`: answers a file of requests."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import time
import uuid
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from deltic.cli import options
from deltic.cli.options import check_source, open_llm
from deltic.cli.output import Bar, note
from deltic.cli.parser import UsageError, existing_file, lock, numbered_lines, path_name, text
from deltic.cli.process import Terminated
from deltic.errors import show

if TYPE_CHECKING:
    from httpx2 import AsyncClient, Response

    from deltic.llm import LLM

_URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_QUEUED = 2  # requests in flight per request that can run, so that the batch stays full

Json = dict[str, Any]


def add_batch(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Answer the requests of a file of OpenAI's batch lines: {\"custom_id\": ..., \"method\": \"POST\", \"url\": "
        "\"/v1/chat/completions\", \"body\": {...}}. Answers and errors go to a second file. Requests that it has are "
        "skipped, so that the same command continues an interrupted one.")
    parser.add_argument("source", metavar="IN.jsonl", type=existing_file,
                        help="the requests, one a line. custom_id is a text that no other line has; url is "
                             f"{', '.join(_URLS)}; body is a request of the server without stream")
    parser.add_argument("target", metavar="OUT.jsonl", type=path_name,
                        help="the answers, as they are completed: custom_id, response with status_code and body, and "
                             "error, which is null or has a code and a message")
    options.add_model(parser)
    parser.add_argument("--served-name", type=text, metavar="NAME",
                        help="the model's name in the requests, which may leave it out (default: its own name)")
    options.add_template(parser)
    options.add_engine(parser)


def run_batch(args: argparse.Namespace) -> int:
    """Answers a file of requests. Checks both files before it loads the model. Returns 1 if an answer is an error."""
    check_source(args)
    options.engine_options(args)
    lines = _checked(args.source)
    with Results(Path(args.target), args.source) as results:
        if missing := lines - results.done:
            with open_llm(args) as llm:
                _answer_all(llm, args, results, missing)
        note(f"{len(lines):,} answers are in {args.target}, {results.failed:,} of them errors")
    return 1 if results.failed else 0


def _answer_all(llm: LLM, args: argparse.Namespace, results: Results, missing: set[bytes]) -> None:
    from deltic.server.app import create_app

    batch = _Batch(create_app(llm, served_name=args.served_name), results, len(missing))
    began, before = time.monotonic(), llm.engine.stats.generated_tokens
    wanted = (line for _, line in _lines(args.source) if _key(line["custom_id"]) in missing)
    try:
        _run_until_signal(batch.answer(wanted, _QUEUED * llm.runtime.memory.max_batch))
    except BaseExceptionGroup as group:  # the failure of one task ends all tasks
        raise group.exceptions[0] from None
    finally:
        batch.bar.close()
        seconds, tokens = time.monotonic() - began, llm.engine.stats.generated_tokens - before
        note(f"{batch.count:,} of {len(missing):,} requests, {tokens:,} tokens in {seconds:.1f} s "
             f"({tokens / seconds:,.0f} tokens/s)")
        if batch.count < len(missing):
            note("run the same command again to continue")


def _run_until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` like asyncio.run, but SIGINT and SIGTERM cancel the work, and are raised after it has ended."""
    received: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in handlers.items() if handler != signal.SIG_IGN}

    async def cancellable() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def cancel(number: int) -> None:
            received.append(number)
            task.cancel()

        for number in handlers:
            loop.add_signal_handler(number, cancel, number)
        await work

    try:
        asyncio.run(cancellable())
    except asyncio.CancelledError:
        if not received:
            raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if received:
        raise Terminated if received[0] == signal.SIGTERM else KeyboardInterrupt


@dataclass(slots=True)
class _Batch:
    """Sends requests to the server's application in this process, without HTTP connections."""

    app: Any
    results: Results
    total: int
    count: int = 0
    bar: Bar = field(default_factory=lambda: Bar("answering", 1, "requests"))

    async def answer(self, lines: Iterator[Json], concurrency: int) -> None:
        from httpx2 import ASGITransport, AsyncClient

        async with (self.app.router.lifespan_context(self.app),
                    AsyncClient(transport=ASGITransport(self.app), base_url="http://localhost") as client,
                    asyncio.TaskGroup() as tasks):
            for _ in range(min(concurrency, self.total)):
                tasks.create_task(self._work(client, lines))

    async def _work(self, client: AsyncClient, lines: Iterator[Json]) -> None:
        for line in lines:
            self.results.write(await self._result(client, line))
            self.count += 1
            self.bar.update(self.count, self.total)

    async def _result(self, client: AsyncClient, line: Json) -> Json:
        result = {"id": "batch_req_" + uuid.uuid4().hex, "custom_id": line["custom_id"], "response": None}
        if problem := _problem(line):
            return result | {"error": {"code": "invalid_request", "message": problem}}
        answer = await _send(client, line)
        status, body = answer.status_code, answer.json()
        error = body.get("error") if status != 200 else None
        if error:
            error = {"code": error["code"] or error["type"], "message": error["message"]}
        response = {"status_code": status, "request_id": body.get("id"), "body": body}
        return result | {"response": response, "error": error}


async def _send(client: AsyncClient, line: Json) -> Response:
    """Sends a request, and repeats it while the server is full."""
    body, headers = json.dumps(line["body"]), {"content-type": "application/json"}
    while True:
        answer = await client.post(line["url"], content=body, headers=headers)
        if answer.status_code != 503:
            return answer
        if "retry-after" not in answer.headers:
            raise UsageError(answer.json()["error"]["message"])
        await asyncio.sleep(int(answer.headers["retry-after"]))


def _problem(line: Json) -> str | None:
    """Returns the reason why a line cannot be sent to the server, or None."""
    method, url, body = line.get("method", "POST"), line.get("url"), line.get("body")
    if method != "POST":
        return f"method must be POST, not {show(method)}"
    if url not in _URLS:
        return f"url must be one of {', '.join(_URLS)}, not {show(url)}"
    if not isinstance(body, dict):
        return f"body must be an object, not {show(body)}"
    return "stream must be left out: a batch has complete answers" if body.get("stream") else None


class Results:
    """The file of answers, which only one process may write. Existing answers stay; an incomplete last line is cut off.

    done: keys of the answered requests. failed: number of answers that are errors.
    """

    def __init__(self, path: Path, source: Path) -> None:
        self._path = path
        self.done, self.failed = set[bytes](), 0
        self._created = False
        try:
            exists = path.exists()
            if exists and not path.is_file():
                raise UsageError(f"{path} is not a file: name another one for the answers")
            if exists and path.samefile(source):
                raise UsageError(f"{path} has the requests: name another file for the answers")
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from error
        try:
            lock(self._file, path, path)
            self._created = not exists
            self._read()
        except BaseException:
            self._close(failed=True)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close(failed=kind is not None)

    def _close(self, failed: bool) -> None:
        """Closes the file. After a failure, removes it if this process created it and it is empty."""
        if failed and self._created and not os.fstat(self._file).st_size:
            self._path.resolve().unlink(missing_ok=True)
        os.close(self._file)

    def write(self, result: Json) -> None:
        """Appends an answer as a whole. Raises UsageError if the disk is full."""
        end, rest = os.lseek(self._file, 0, os.SEEK_END), memoryview(_encoded(result))
        try:
            while rest:
                rest = rest[os.write(self._file, rest):]
        except OSError as error:
            os.ftruncate(self._file, end)
            raise UsageError(f"{self._path} cannot be written: {error.strerror}; its answers are kept, and the same "
                             "command continues from there") from error
        self.failed += result["error"] is not None

    def _read(self) -> None:
        complete = 0
        with open(self._file, "rb", closefd=False) as file:
            for number, raw in enumerate(iter(file.readline, b""), 1):
                if not raw.endswith(b"\n"):
                    break
                found = _object(raw)
                if found is None or not isinstance(found.get("custom_id"), str) or "response" not in found:
                    raise UsageError(f"line {number} of {self._path} is not an answer of a batch: name another file "
                                     "for the answers")
                self.done.add(_key(found["custom_id"]))
                self.failed += found.get("error") is not None
                complete += len(raw)
        os.ftruncate(self._file, complete)


def _checked(path: Path) -> set[bytes]:
    """Returns the keys of all requests. Raises UsageError with the number of a wrong line."""
    if not path.is_file():
        raise UsageError(f"{path} must be a file, not a pipe: it is read twice")
    seen: dict[bytes, int] = {}
    for number, line in _lines(path):
        key = _key(line["custom_id"])
        if key in seen:
            raise UsageError(f"line {number} of {path} has the custom_id {show(line['custom_id'])} of line "
                             f"{seen[key]}: it must be unique")
        seen[key] = number
    return set(seen)


def _lines(path: Path) -> Iterator[tuple[int, Json]]:
    """Yields the requests of a file with their line numbers."""
    with path.open("rb") as file:
        for number, raw in numbered_lines(file, f" of {path}"):
            if not raw.strip():
                continue
            found = _object(raw)
            if found is None:
                raise UsageError(f"line {number} of {path} is not a JSON object")
            if not isinstance(found.get("custom_id"), str):
                raise UsageError(f"line {number} of {path} has no custom_id, which must be a text")
            yield number, found


def _object(raw: bytes) -> Json | None:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _encoded(result: Json) -> bytes:
    try:
        return json.dumps(result, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair, which only escapes can express
        return json.dumps(result).encode() + b"\n"


def _key(custom_id: str) -> bytes:
    """Returns a digest of fixed size, so that long ids take no memory."""
    return blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
