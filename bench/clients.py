"""Five hundred clients at once: a third vanish at random moments, some never read what they asked for, the others hold
conversations. Then the server is told to end in the middle of that, and another one is killed.

    python bench/clients.py                              # ten minutes
    python bench/clients.py --clients 100 --minutes 0.5

Each client has an address of its own. Asserted, with exit code 1 if one does not hold:

- answers are whole, or refused with status 503 and Retry-After; nothing else comes
- of the answers that were not refused, 99 in 100 have their first token within ten seconds
- when all clients are gone nothing runs, and the engine's accounts are right (`check()`)
- from the end of the warm-up on, the server's memory stays within 5 % (where the run is long enough to tell)
- told to end (SIGTERM) while all are at it, the server ends by itself with code 0, and no stream is cut in the middle
- killed (SIGKILL) while all are at it, it is started again and resumes conversations from its cache directory
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from attacks import CHAT, TEXT, user
from common import record
from hostile import CITIES
from http_load import SOURCE, Reply, Server, get, head, percentile, post, serving

TURNS = 6
FIRST = 10.0
"""Seconds within which 99 of 100 first tokens come."""
FLAT = 1.05
"""By how much memory may grow after the warm-up."""
DRAIN = 60.0
"""Seconds that a server may take to end."""
SHORT = 5.0
"""Seconds that clients are at it before a server is ended."""


@dataclass(frozen=True)
class Load:
    """How much there is to be endured. deaf: how many of the clients never read. memory: of the server's cache.
    cache_disk_gb: of its cache directory, which is full when the warm-up ends: what is known of each of its files
    lies in memory. wait: seconds from which on the server refuses who would wait."""

    clients: int
    deaf: int
    minutes: float
    memory: str
    cache_disk_gb: float
    wait: float


@dataclass
class Crowd:
    """What the clients of a server have in common."""

    port: int
    until: float
    replies: list[Reply] = field(default_factory=list)
    talks: list[list[dict[str, Any]]] = field(default_factory=list)
    vanished: int = 0
    hung_up: int = 0
    ending: bool = False

    @property
    def over(self) -> bool:
        return self.ending or time.perf_counter() > self.until


async def talk(crowd: Crowd, number: int) -> None:
    """Conversations of some turns, one after the other; most answers are streamed."""
    draw = random.Random(number)
    await asyncio.sleep(draw.uniform(0, 2))
    while not crowd.over:
        messages: list[dict[str, Any]] = [{"role": "system", "content": f"You are assistant {number % 7}."}]
        for _ in range(TURNS):
            messages.append({"role": "user", "content": f"What is the capital of {draw.choice(CITIES)}?"})
            reply = await post(crowd.port, CHAT, {
                "messages": messages, "stream": draw.random() < 0.8, "max_tokens": 32, "enable_thinking": False,
                "seed": number})
            crowd.replies.append(reply)
            if reply.retry:
                await asyncio.sleep(1)
            if not reply.done or crowd.over:
                break
            messages.append({"role": "assistant", "content": reply.text})
            crowd.talks.append(messages[:])
            del crowd.talks[:-50]
            await asyncio.sleep(draw.uniform(0.5, 3.0))


async def vanish(crowd: Crowd, number: int) -> None:
    """Ask, and be gone: before all is said, before the answer begins, or while it comes."""
    draw = random.Random(number)
    while not crowd.over:
        body = json.dumps(user(f"Story {draw.random()}", stream=draw.random() < 0.7, max_tokens=400,
                               ignore_eos=True)).encode()
        said = head(CHAT, len(body)) + body
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", crowd.port, local_addr=(SOURCE.get(), 0))
            try:
                writer.write(said[:draw.choice((20, len(said) // 2, len(said), len(said), len(said)))])
                await asyncio.sleep(draw.expovariate(1.0))
            finally:
                writer.transport.abort()
        except OSError:
            await asyncio.sleep(1)
        crowd.vanished += 1
        await asyncio.sleep(draw.uniform(0.0, 2.0))


async def never_read(crowd: Crowd, number: int) -> None:
    """Ask for a long answer, and leave it unread until the server hangs up; then again."""
    body = json.dumps(user(f"Story {number}", stream=True, max_tokens=20_000, ignore_eos=True)).encode()
    while not crowd.over:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        try:
            sock.bind((SOURCE.get(), 0))
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", crowd.port))
            await asyncio.get_running_loop().sock_sendall(sock, head(CHAT, len(body)) + body)
            while not crowd.over and not _hung_up(sock):
                await asyncio.sleep(1)
            crowd.hung_up += 1
        except OSError:
            await asyncio.sleep(1)
        finally:
            sock.close()


def _hung_up(sock: socket.socket) -> bool:
    """Whether the other side has closed, without reading what it sent."""
    import select

    poll = select.poll()
    poll.register(sock, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
    return bool(poll.poll(0))


async def look(server: Server, crowd: Crowd) -> None:
    """Note the server's memory and lateness every second."""
    while not crowd.over:
        await server.watch()
        await asyncio.sleep(1)


def gather(crowd: Crowd, clients: int, deaf: int) -> list[asyncio.Task[None]]:
    """All clients, each with an address of its own."""
    kinds = [*[never_read] * deaf, *[vanish] * (clients // 3), *[talk] * (clients - deaf - clients // 3)]
    tasks = []
    for number, client in enumerate(kinds):
        SOURCE.set(f"127.1.{number // 250}.{number % 250 + 1}")
        tasks.append(asyncio.create_task(client(crowd, number)))
    SOURCE.set("127.0.0.1")
    return tasks


async def endure(server: Server, load: Load) -> tuple[Crowd, bool]:
    """All clients for the whole time; then whether the server is at rest and well."""
    await post(server.port, CHAT, user("Hello", max_tokens=2))
    await server.watch()
    crowd = Crowd(server.port, time.perf_counter() + 60 * load.minutes)
    await asyncio.gather(look(server, crowd), *gather(crowd, load.clients, load.deaf))
    for _ in range(60):
        await asyncio.sleep(1)  # longer than it takes the engine to look at its accounts
        health = json.loads((await get(server.port, "/health")).body)
        if health == {"status": "ok", "requests": 0}:
            break
    answer = await post(server.port, TEXT, {"prompt": "The capital of France is", "max_tokens": 4})
    await server.watch()
    return crowd, health == {"status": "ok", "requests": 0} and answer.status == 200


async def end(server: Server, load: Load, number: int) -> tuple[Crowd, int]:
    """A signal while all clients are at it; the process's exit code."""
    crowd = Crowd(server.port, time.perf_counter() + SHORT + DRAIN)
    tasks = gather(crowd, load.clients, load.deaf)
    await asyncio.sleep(SHORT)
    crowd.ending = True
    server.process.send_signal(number)
    code = await asyncio.to_thread(server.process.wait, DRAIN)
    await asyncio.gather(*tasks)
    return crowd, code


async def resume(server: Server, talks: list[list[dict[str, Any]]]) -> list[int]:
    """How many tokens of each conversation's next prompt are known."""
    known = []
    for messages in talks:
        reply = await post(server.port, CHAT, {"messages": [*messages, {"role": "user", "content": "And of Malta?"}],
                                               "max_tokens": 4, "enable_thinking": False})
        known.append(json.loads(reply.body)["usage"]["prompt_tokens_details"]["cached_tokens"])
    return known


def _refused(reply: Reply) -> bool:
    return reply.status == 503 and reply.retry


def _interrupted(reply: Reply) -> bool:
    """What a client may see of a server that ends: an end that says so, a refusal, or nobody there."""
    told = reply.status in (200, 503) and b"shutting down" in reply.body
    return told or _refused(reply) or (bool(reply.broken) and reply.status == 0)


def _flat(server: Server) -> float | None:
    """Memory in the last quarter of the time over that at the end of the warm-up, its second quarter."""
    held = [look["rss_mib"] for look in server.looks[1:-1]]
    quarter = len(held) // 4
    return median(held[-quarter:]) / median(held[quarter:2 * quarter]) if quarter >= 60 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--deaf", type=int, help="of them who never read (default: one in sixteen)")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--memory", default="256MiB")
    parser.add_argument("--cache-disk-gb", type=float, default=0.5)
    parser.add_argument("--wait", type=float, default=7.0)
    args = parser.parse_args()
    deaf = max(args.clients // 16, 1) if args.deaf is None else args.deaf
    found = run(Load(args.clients, deaf, args.minutes, args.memory, args.cache_disk_gb, args.wait))
    record("clients", found)
    if wrong := [name for name, held in found["holds"].items() if not held]:
        sys.exit("does not hold: " + ", ".join(wrong))


def run(load: Load) -> dict[str, Any]:
    """Everything; "holds" says of each promise whether it was kept."""
    with tempfile.TemporaryDirectory() as folder:
        options = ("--memory", load.memory, "--cache-dir", folder, "--cache-disk-gb", str(load.cache_disk_gb),
                   "--max-wait-seconds", str(load.wait))
        with serving(*options) as server:
            crowd, well = asyncio.run(endure(server, load))
            drained, code = asyncio.run(end(server, load, signal.SIGTERM))
        with serving(*options, watched=False) as second:
            killed, _ = asyncio.run(end(second, load, signal.SIGKILL))
        with serving(*options, watched=False) as third:
            talks = killed.talks[:20]  # what was written in the last moments may be lost
            known = asyncio.run(resume(third, talks))
    torn = [reply.broken or reply.status for reply in drained.replies if not reply.done and not _interrupted(reply)]
    return _figures(load, server, crowd, {
        "well": well, "drained_with": code, "cut_when_drained": torn, "conversations": len(talks),
        "resumed": sum(tokens > 20 for tokens in known)})


def _figures(load: Load, server: Server, crowd: Crowd, ends: dict[str, Any]) -> dict[str, Any]:
    good = [reply for reply in crowd.replies if reply.done]
    refused = sum(map(_refused, crowd.replies))
    failed = [reply for reply in crowd.replies if not reply.done and not _refused(reply)]
    firsts = [reply.first for reply in good if reply.first]
    gaps, lags = [reply.gap for reply in good], [look["lag_max"] for look in server.looks[1:]]
    growth = _flat(server)
    holds = {
        "no other failures": not failed and bool(good), "first token": percentile(firsts, 0.99) <= 1e3 * FIRST,
        "at rest and well": ends["well"], "memory": growth is None or growth <= FLAT,
        "drains": ends["drained_with"] == 0 and not ends["cut_when_drained"],
        "resumes": ends["conversations"] > 0 and ends["resumed"] >= ends["conversations"] * 0.9}
    return {
        "task": "clients", **asdict(load),
        "answers": len(good), "refused": refused, "vanished": crowd.vanished, "deaf_hung_up_on": crowd.hung_up,
        "failed": Counter(f"{reply.status} {reply.broken} {reply.body[:200]!r}" for reply in failed).most_common(5),
        "first_ms": {"median": percentile(firsts, 0.5), "p99": percentile(firsts, 0.99),
                     "worst": percentile(firsts, 1.0)},
        "gap_ms": {"median": percentile(gaps, 0.5), "p99": percentile(gaps, 0.99), "worst": percentile(gaps, 1.0)},
        "loop_late_ms": {"median": percentile(lags, 0.5), "worst": percentile(lags, 1.0)},
        "longest_step_ms": round(1e3 * max(look["longest_step"] for look in server.looks), 1),
        "rss_mib": [look["rss_mib"] for look in server.looks[::30]], "peak_mib": server.looks[-1]["peak_mib"],
        "growth": growth and round(growth, 4), **ends, "holds": holds}


if __name__ == "__main__":
    main()
