"""Two hundred clients for ten minutes, thirty of which ask for long answers and never read them.

    python bench/clients.py
    python bench/clients.py --clients 50 --deaf 8 --seconds 30

The others hold conversations: each turn is a streamed answer to the conversation so far. Printed: their time to first
token and longest silence, answers that failed, reuse, the event loop's worst lateness, and memory at the peak.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import time
from typing import Any

from common import record
from hostile import CHAT, CITIES, TEXT, user
from http_load import Reply, Server, get, head, percentile, post, serving

TURNS = 6


async def talk(port: int, number: int, until: float, replies: list[Reply]) -> None:
    """Conversations of some turns, one after the other."""
    draw = random.Random(number)
    await asyncio.sleep(draw.uniform(0, 5))
    while time.perf_counter() < until:
        messages: list[dict[str, Any]] = [{"role": "system", "content": f"You are assistant {number % 7}."}]
        for _ in range(TURNS):
            messages.append({"role": "user", "content": f"What is the capital of {draw.choice(CITIES)}?"})
            reply = await post(port, CHAT, {"messages": messages, "stream": True, "max_tokens": 32,
                                            "enable_thinking": False, "seed": number})
            replies.append(reply)
            messages.append({"role": "assistant", "content": reply.text})
            await asyncio.sleep(draw.uniform(0.5, 3.0))
            if time.perf_counter() > until:
                return


async def never_read(port: int, number: int, until: float) -> int:
    """Ask for a long answer, and leave it unread until the server hangs up; then again. Returns how often it did."""
    body, ended = json.dumps(user(f"Story {number}", stream=True, max_tokens=20_000, ignore_eos=True)).encode(), 0
    while time.perf_counter() < until:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
            await asyncio.get_running_loop().sock_sendall(sock, head(CHAT, len(body)) + body)
            while time.perf_counter() < until and not _hung_up(sock):
                await asyncio.sleep(1)
            ended += 1
        except OSError:
            await asyncio.sleep(1)
        finally:
            sock.close()
    return ended


def _hung_up(sock: socket.socket) -> bool:
    """Whether the other side has closed, without reading what it sent."""
    import select

    poll = select.poll()
    poll.register(sock, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
    return bool(poll.poll(0))


async def look(server: Server, until: float) -> None:
    """Note the server's memory and lateness every second."""
    while time.perf_counter() < until:
        await server.watch()
        await asyncio.sleep(1)


async def work(server: Server, clients: int, deaf: int, seconds: float) -> tuple[list[Reply], int, str]:
    replies: list[Reply] = []
    await post(server.port, CHAT, user("Hello", max_tokens=2))
    await server.watch()
    until = time.perf_counter() + seconds
    results = await asyncio.gather(
        look(server, until), *(never_read(server.port, number, until) for number in range(deaf)),
        *(talk(server.port, number, until, replies) for number in range(clients - deaf)))
    await asyncio.sleep(2)
    await server.watch()
    alive = await get(server.port, "/health")
    answer = await post(server.port, TEXT, {"prompt": "The capital of France is", "max_tokens": 4})
    return replies, sum(filter(None, results[1:deaf + 1])), f"{alive.body.decode()} {answer.status}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--deaf", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--memory", default="256MiB")
    args = parser.parse_args()
    with serving("--memory", args.memory) as server:
        replies, ended, health = asyncio.run(work(server, args.clients, args.deaf, args.seconds))
    good = [reply for reply in replies if reply.done]
    firsts, gaps = [reply.first for reply in good], [reply.gap for reply in good]
    lags = [look["lag_max"] for look in server.looks[1:]]
    record("clients", {
        "task": "clients", "clients": args.clients, "deaf": args.deaf, "seconds": args.seconds, "memory": args.memory,
        "answers": len(good), "failed": len(replies) - len(good), "deaf_hung_up_on": ended, "health": health,
        "first_ms": {"median": percentile(firsts, 0.5), "p99": percentile(firsts, 0.99),
                     "worst": percentile(firsts, 1.0)},
        "gap_ms": {"median": percentile(gaps, 0.5), "p99": percentile(gaps, 0.99), "worst": percentile(gaps, 1.0)},
        "loop_late_ms": {"median": percentile(lags, 0.5), "worst": percentile(lags, 1.0)},
        "longest_step_ms": round(1e3 * max(look["longest_step"] for look in server.looks), 1),
        "rss_mib": [look["rss_mib"] for look in server.looks[::30]], "peak_mib": server.looks[-1]["peak_mib"]})


if __name__ == "__main__":
    main()
