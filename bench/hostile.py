"""Measures an ordinary client's time to first token, undisturbed and during an attack by another client.

    python bench/hostile.py                       # all attacks, 75 seconds each
    python bench/hostile.py --attack tiny_chunks --attack small_tiffs --seconds 20

Each attack has a server of its own. The ordinary client streams short answers one after the other, first undisturbed,
then during the attack; another connection asks for /health ten times a second. The attacker (`bench/attacks.py`) is a
process of its own with the lowest priority, so that what it costs to make its requests is not measured, and has an
address of its own, by which the server tells clients apart.
Recorded: the ordinary client's time to first token (median, 95th percentile, worst) with and without the attack and
their ratio, its longest silence between two pieces, the health answers, how late the server's event loop was at worst,
its longest step and its memory at the peak.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from multiprocessing import get_context
from typing import Any

from attacks import ATTACKS, CHAT, user
from common import record
from http_load import SOURCE, Reply, get, percentile, post, serving

MEMORY = "256MiB"
CITIES = ("France", "Italy", "Japan", "Peru", "Kenya", "Norway", "Chile", "Egypt", "Spain", "Poland")
WARM_UP = 2.0
"""Seconds of the attack before its effect is measured."""


async def ordinary(port: int, until: float) -> list[Reply]:
    """One client: a question, its answer, a pause, the next question."""
    SOURCE.set("127.0.1.1")
    draw, replies = random.Random(0), []
    while time.perf_counter() < until:
        question = f"What is the capital of {draw.choice(CITIES)}? Number {draw.randrange(1000)}."
        replies.append(await post(port, CHAT, user(question, stream=True, max_tokens=24, ignore_eos=True,
                                                   enable_thinking=False)))
        await asyncio.sleep(draw.uniform(0.05, 0.15))
    return replies


async def health(port: int, until: float) -> list[Reply]:
    """The answers to /health, ten times a second."""
    SOURCE.set("127.0.1.2")
    replies = []
    while time.perf_counter() < until:
        replies.append(await get(port, "/health"))
        await asyncio.sleep(0.1)
    return replies


async def both(port: int, seconds: float) -> tuple[list[Reply], list[Reply]]:
    until = time.perf_counter() + seconds
    replies, checks = await asyncio.gather(ordinary(port, until), health(port, until))
    return replies, checks


async def repeat(port: int, name: str) -> None:
    while True:
        await ATTACKS[name](port)
        await asyncio.sleep(0.05)


def attack_on(port: int, name: str) -> None:
    """The attacker's process."""
    os.nice(19)
    SOURCE.set("127.0.0.2")
    asyncio.run(repeat(port, name))


async def measure(server: Any, name: str, undisturbed: float, seconds: float) -> dict[str, Any]:
    """The ordinary client and the server, before and during the attack."""
    for number in range(3):
        await post(server.port, CHAT, user(f"Hello {number}", max_tokens=2))
    before, _ = await both(server.port, undisturbed)
    attacker = get_context("spawn").Process(target=attack_on, args=(server.port, name), daemon=True)
    attacker.start()
    try:
        await asyncio.sleep(WARM_UP)
        await server.watch()
        during, checks = await both(server.port, seconds)
        alive = attacker.is_alive()
    finally:
        attacker.terminate()
        attacker.join()
    return {**compared(before, during, checks), **seen(await server.watch()), "attacker_alive": alive}


def firsts(replies: list[Reply]) -> dict[str, float]:
    """Time to first token of the whole answers, ms."""
    times = [reply.first for reply in replies if reply.done]
    return {"median": percentile(times, 0.5), "p95": percentile(times, 0.95), "worst": percentile(times, 1.0)}


def compared(before: list[Reply], during: list[Reply], checks: list[Reply]) -> dict[str, Any]:
    alone, attacked = firsts(before), firsts(during)
    good = [reply for reply in during if reply.done]
    times = [check.total for check in checks]
    return {"answers": len(good), "failed": len(during) - len(good), "undisturbed_ms": alone, "first_ms": attacked,
            "ratio_p95": round(attacked["p95"] / alone["p95"], 2),
            "gap_ms": percentile([one.gap for one in good], 0.99),
            "health_ms": {"p95": percentile(times, 0.95), "worst": percentile(times, 1.0)},
            "health_failed": sum(check.status != 200 for check in checks)}


def seen(watch: dict[str, Any]) -> dict[str, Any]:
    """What the server saw of itself."""
    return {"loop_late_ms": round(watch["lag_max"] * 1e3, 1), "longest_step_ms": round(watch["longest_step"] * 1e3, 1),
            "peak_mib": watch["peak_mib"], "where": [stack for _, stack in watch["stacks"][:1]]}


def run(name: str, undisturbed: float, seconds: float, options: list[str]) -> dict[str, Any]:
    """One attack on a server of its own."""
    with serving("--memory", MEMORY, *options) as server:
        result = asyncio.run(measure(server, name, undisturbed, seconds))
    return {"task": name, "seconds": seconds, "memory": MEMORY, **result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attack", action="append", choices=ATTACKS, help="may be repeated (default: all)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each attack")
    parser.add_argument("--undisturbed", type=float, default=10.0, help="seconds without the attack before it")
    parser.add_argument("--serve", action="append", default=[], metavar="OPTION", help="an option of deltic serve")
    args = parser.parse_args()
    for name in args.attack or ATTACKS:
        record("hostile", run(name, args.undisturbed, args.seconds, args.serve))


if __name__ == "__main__":
    main()
