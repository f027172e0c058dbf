"""A server in a process of its own, and clients that cost little and measure when what came."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import environment, port_of

HERE = Path(__file__).resolve().parent
SOURCE = ContextVar("SOURCE", default="127.0.0.1")
"""The address of this machine from which the present task sends: the server tells clients apart by it."""


@dataclass
class Reply:
    """One answer: status, when the first token came and the longest silence after it (seconds), the body, why it is
    not whole, and whether the client may come again."""

    status: int = 0
    first: float = 0.0
    gap: float = 0.0
    total: float = 0.0
    body: bytes = b""
    broken: str = ""
    retry: bool = False

    @property
    def text(self) -> str:
        """What a stream or a whole answer said."""
        return "".join(_texts(self.body))

    @property
    def done(self) -> bool:
        """Whether the answer is there to its end."""
        return self.status == 200 and not self.broken and b'"error"' not in self.body[:40]


@dataclass
class Server:
    """Where a server listens; its process."""

    port: int
    process: subprocess.Popen[str]
    looks: list[dict[str, Any]] = field(default_factory=list)

    async def watch(self) -> dict[str, Any]:
        """What the server noticed of itself since the last look."""
        reply = await get(self.port, "/watch")
        self.looks.append(json.loads(reply.body))
        return self.looks[-1]


@contextmanager
def serving(*options: str, watched: bool = True) -> Iterator[Server]:
    """`deltic serve` with these options, until the block ends."""
    command = [sys.executable, str(HERE / "watched.py")] if watched else [sys.executable, "-m", "deltic"]
    process = subprocess.Popen([*command, "serve", "--port", "0", *options], stdout=subprocess.PIPE, text=True,
                               env=environment())
    try:
        yield Server(port_of(process), process)
    finally:
        process.terminate()
        process.wait(30)


async def get(port: int, path: str) -> Reply:
    """One GET on a connection of its own."""
    return await send(port, f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())


async def post(port: int, path: str, body: dict[str, Any] | bytes, patience: float = 120.0) -> Reply:
    """One POST on a connection of its own."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await send(port, head(path, len(data)) + data, patience)


def head(path: str, length: int) -> bytes:
    """The head of a POST."""
    return (f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
            f"content-length: {length}\r\n\r\n").encode()


async def send(port: int, request: bytes, patience: float = 120.0) -> Reply:
    """Send the bytes, and read to the end."""
    reply, began = Reply(), time.perf_counter()
    try:
        async with asyncio.timeout(patience):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24,
                                                           local_addr=(SOURCE.get(), 0))
            try:
                writer.write(request)
                await _read(reader, reply, began)
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        reply.broken = repr(error)
    reply.total = time.perf_counter() - began
    return reply


async def _read(reader: asyncio.StreamReader, reply: Reply, began: float) -> None:
    header = await reader.readuntil(b"\r\n\r\n")
    reply.status = int(header.split(None, 2)[1])
    pieces, last = [], 0.0
    while piece := await reader.read(1 << 16):
        now = time.perf_counter()
        tells = b'"content":"' in piece.replace(b'"content":""', b"") or b'"text":"' in piece
        if tells and last:
            reply.gap = max(reply.gap, now - last)
        if tells:
            reply.first = reply.first or now - began
            last = now
        pieces.append(piece)
    body, chunked = b"".join(pieces), b"chunked" in header.lower()
    length = re.search(rb"content-length: (\d+)", header.lower())
    if not body.endswith(b"0\r\n\r\n") if chunked else length and len(body) < int(length[1]):
        reply.broken = "torn"
    reply.body = body if reply.broken or not chunked else _unchunked(body)
    reply.retry = b"retry-after:" in header.lower()


def _unchunked(body: bytes) -> bytes:
    pieces = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        pieces.append(rest[:length])
        body = rest[length + 2:]
    return b"".join(pieces)


def _texts(body: bytes) -> Iterator[str]:
    lines = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: {")] or [body]
    for line in lines:
        try:
            data = json.loads(line)
        except ValueError:
            continue
        for choice in data.get("choices", ()) if isinstance(data, dict) else ():
            delta = choice.get("delta") or choice.get("message") or choice
            yield (delta.get("reasoning_content") or "") + (delta.get("content") or delta.get("text") or "")
            yield json.dumps(delta["tool_calls"]) if delta.get("tool_calls") else ""


def percentile(values: list[float], share: float) -> float:
    """The value below which so large a share of them lies, in milliseconds."""
    ordered = sorted(values)
    return round(1e3 * ordered[min(int(len(ordered) * share), len(ordered) - 1)], 1) if ordered else 0.0
