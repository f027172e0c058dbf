"""Ten ordinary clients, alone and beside the worst valid requests of each resource: nobody may cost the others.

    python bench/hostile.py                       # all cases, some minutes
    python bench/hostile.py --case bodies --case fanout

Each case runs `--seconds` long on a server of its own. Ordinary clients stream short answers one after the other. The
hostile one is a process of its own at the lowest priority: what it costs to make and send its requests is not measured.
Each has an address of its own, by which the server tells clients apart.
Printed: their time to first token and the longest silence between two pieces (median, 99th percentile, worst), how
late the server's event loop was at worst, its longest step, and its memory at the peak.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import time
from collections.abc import Awaitable, Callable
from multiprocessing import get_context
from typing import Any

from common import record
from http_load import SOURCE, Reply, head, percentile, post, serving

ORDINARY = 10
MEMORY = "256MiB"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CITIES = ("France", "Italy", "Japan", "Peru", "Kenya", "Norway", "Chile", "Egypt", "Spain", "Poland")

Attack = Callable[[int], Awaitable[Any]]


def user(text: str, **more: Any) -> dict[str, Any]:
    """A chat request with one message."""
    return {"messages": [{"role": "user", "content": text}], **more}


def words(count: int, seed: int = 0) -> str:
    """Text of about so many tokens."""
    draw = random.Random(seed)
    return " ".join(draw.choice(("the", "red", "house", "is", "on", "a", "hill", "and", "we", "see", "it"))
                    for _ in range(count * 5 // 6))


async def arguments(port: int) -> None:
    """A tool call whose arguments are a megabyte of a Python literal."""
    text = "{'a': [" + "(1, 'x'), " * 100_000 + "]}"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    await post(port, CHAT, {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]},
                                         {"role": "tool", "tool_call_id": "c", "content": "y"}], "max_tokens": 1})


async def long_text(port: int) -> None:
    """A prompt of ten million characters, which no context holds."""
    await post(port, TEXT, {"prompt": "hi " * 3_300_000, "max_tokens": 1})


async def many_bodies(port: int) -> None:
    """Ten bodies of three megabytes at once."""
    await asyncio.gather(*(post(port, TEXT, {"prompt": "hi " * 1_000_000, "max_tokens": 1}) for _ in range(10)))


async def nested(port: int) -> None:
    """JSON that is small in bytes and large in objects."""
    await post(port, CHAT, b'{"messages":[' + b",".join([b"[{}]"] * 1_500_000) + b"]}")


async def fanout(port: int) -> None:
    """As many prompts, and as many answers of each, as may be asked for."""
    await post(port, TEXT, {"prompt": ["a"] * 2048, "n": 128, "max_tokens": 4, "temperature": 1.0})
    await post(port, TEXT, {"prompt": ["a"] * 16, "n": 8, "max_tokens": 4, "temperature": 1.0})


async def long_prompt(port: int) -> None:
    """A prompt that nearly fills the context."""
    await post(port, TEXT, {"prompt": words(30_000, time.time_ns()), "max_tokens": 1})


async def conversation(port: int) -> None:
    """An agent's conversation that nearly fills the context, turn after turn."""
    messages = [{"role": ("user", "assistant")[index % 2], "content": words(180, index)} for index in range(151)]
    for turn in range(3):
        reply = await post(port, CHAT, {"messages": messages, "max_tokens": 8})
        messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": words(20, turn)}]


async def penalties(port: int) -> None:
    """Penalties over a long context, and as many biases as may be given."""
    bias = {str(token): 1.0 for token in range(300)}
    await post(port, TEXT, {"prompt": words(20_000), "max_tokens": 200, "repetition_penalty": 1.1, "ignore_eos": True,
                            "frequency_penalty": 0.1, "logit_bias": bias, "logprobs": 5})


async def waiting(port: int) -> None:
    """A thousand requests with one beginning of 20,000 tokens."""
    text = words(20_000)
    await asyncio.gather(*(post(port, TEXT, {"prompt": f"{text} {number}", "max_tokens": 4, "ignore_eos": True})
                           for number in range(200)))


async def deaf(port: int) -> None:
    """Thirty streams whose clients never read."""
    body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 30_000, "ignore_eos": True, "logprobs": 5}).encode()
    sockets = []
    for _ in range(30):
        sock = socket.create_connection(("127.0.0.1", port), source_address=(SOURCE.get(), 0))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(head(TEXT, len(body)) + body)
        sockets.append(sock)
    try:
        await asyncio.sleep(3600)
    finally:
        for sock in sockets:
            sock.close()


async def idle(port: int) -> None:
    """Connections that say nothing, or half a header."""
    sockets = []
    try:
        for number in range(1500):
            sock = socket.socket()
            sock.setblocking(False)
            sock.bind((SOURCE.get(), 0))
            await asyncio.wait_for(asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port)), 5)
            if number % 3 == 0:
                sock.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n")
            sockets.append(sock)
        await asyncio.sleep(3600)
    except (OSError, TimeoutError):
        await asyncio.sleep(1)
    finally:
        for sock in sockets:
            sock.close()


async def template(port: int) -> None:
    """As many messages as may be sent, and tools with large schemas."""
    tools = [{"type": "function", "function": {"name": f"f{index}", "parameters": {
        "type": "object", "properties": {f"p{key}": {"type": "string"} for key in range(30)}}}} for index in range(500)]
    turns = [{"role": ("user", "assistant")[index % 2], "content": "x"} for index in range(4001)]
    await post(port, CHAT, {"messages": turns, "tools": tools, "max_tokens": 1})


async def scores(port: int) -> None:
    """Many answers with all the probabilities that can be asked for."""
    await post(port, CHAT, user("Tell me a story.", n=16, max_tokens=500, logprobs=True, top_logprobs=20,
                                ignore_eos=True, temperature=1.0, stop=[f"stop{index}" * 20 for index in range(60)]))


CASES: dict[str, Attack | None] = {
    "none": None, "arguments": arguments, "long_text": long_text, "many_bodies": many_bodies, "nested": nested,
    "fanout": fanout, "long_prompt": long_prompt, "conversation": conversation, "penalties": penalties,
    "waiting": waiting, "deaf": deaf, "idle": idle, "template": template, "scores": scores}


async def ordinary(port: int, number: int, until: float, replies: list[Reply]) -> None:
    """One client: a question, its answer, a pause, the next question."""
    SOURCE.set(f"127.0.1.{number + 1}")
    draw = random.Random(number)
    while time.perf_counter() < until:
        question = f"What is the capital of {draw.choice(CITIES)}? Number {draw.randrange(1000)}."
        replies.append(await post(port, CHAT, user(question, stream=True, max_tokens=24, ignore_eos=True,
                                                   enable_thinking=False)))
        await asyncio.sleep(draw.uniform(0.1, 0.4))


async def attacking(port: int, attack: Attack) -> None:
    while True:
        await attack(port)
        await asyncio.sleep(0.05)


def attack_on(port: int, case: str) -> None:
    """The hostile client's process."""
    os.nice(19)
    SOURCE.set("127.0.0.2")
    attack = CASES[case]
    assert attack
    asyncio.run(attacking(port, attack))


async def measure(port: int, case: str, seconds: float) -> list[Reply]:
    """The ordinary clients' replies."""
    replies: list[Reply] = []
    hostile = get_context("spawn").Process(target=attack_on, args=(port, case), daemon=True) if CASES[case] else None
    if hostile:
        hostile.start()
        await asyncio.sleep(1)
    until = time.perf_counter() + seconds
    await asyncio.gather(*(ordinary(port, number, until, replies) for number in range(ORDINARY)))
    if hostile:
        hostile.terminate()
        hostile.join()
    return replies


def run(case: str, seconds: float, options: list[str]) -> dict[str, Any]:
    """One case on a server of its own."""
    with serving("--memory", MEMORY, *options) as server:
        async def work() -> tuple[list[Reply], dict[str, Any]]:
            for number in range(3):
                await post(server.port, CHAT, user(f"Hello {number}", max_tokens=2))
            await server.watch()
            replies = await measure(server.port, case, seconds)
            return replies, await server.watch()
        replies, watch = asyncio.run(work())
    good = [reply for reply in replies if reply.done]
    firsts, gaps = [reply.first for reply in good], [reply.gap for reply in good]
    return {"task": case, "seconds": seconds, "memory": MEMORY,
            "answers": len(good), "failed": len(replies) - len(good),
            "first_ms": {"median": percentile(firsts, 0.5), "p99": percentile(firsts, 0.99)},
            "gap_ms": {"median": percentile(gaps, 0.5), "p99": percentile(gaps, 0.99)},
            "loop_late_ms": round(watch["lag_max"] * 1e3, 1), "longest_step_ms": round(watch["longest_step"] * 1e3, 1),
            "peak_mib": watch["peak_mib"], "where": [stack for _, stack in watch["stacks"][:1]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="one case; may be repeated (default: all)")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--serve", action="append", default=[], metavar="OPTION", help="an option of deltic serve")
    args = parser.parse_args()
    for case in args.case or CASES:
        record("hostile", run(case, args.seconds, args.serve))


if __name__ == "__main__":
    main()
