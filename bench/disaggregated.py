"""Long prompts beside running streams: plain replicas against decode and prefill replicas, on Ray on this machine.

    python bench/disaggregated.py                    # 2 plain replicas; then 1 that decodes and 1 that prefills
    python bench/disaggregated.py --shape qwen3.5-0.8b --layers 8   # random weights of a public shape

Streams generate all the time, and long prompts that share nothing arrive at random. Both runs have the same engines,
threads and requests. The time between two pieces of a stream is stopped in the front's process, which shares the
processors with the replicas.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import ray
from cluster import Turn, stream, text_of
from common import record
from starlette.applications import Starlette

from deltic.cli import command_parser
from deltic.cli.cluster import plan_of
from deltic.cluster.application import running
from deltic.cluster.front import front_app
from deltic.config import Limits

KINDS = ("plain", "split")


def body_of(text: str, tokens: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "stream": True, "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "stream_options": {"include_usage": True}}


async def streams(app: Starlette, args: argparse.Namespace, until: float, turns: list[Turn]) -> None:
    """Generates one answer after another."""
    random = Random(len(turns))
    while time.perf_counter() < until:
        turn = Turn(time.perf_counter())
        turns.append(turn)
        await stream(app, body_of(text_of(random, 60), args.answer), turn)


async def long_prompts(app: Starlette, args: argparse.Namespace, until: float, turns: list[Turn]) -> None:
    random, pending = Random(args.seed), list[asyncio.Task[Any]]()
    while time.perf_counter() < until:
        await asyncio.sleep(random.expovariate(1 / args.every))
        text = " ".join(text_of(random, 1500) for _ in range(args.characters // 1500))
        turns.append(Turn(time.perf_counter()))
        pending.append(asyncio.create_task(stream(app, body_of(text, 4), turns[-1])))
    await asyncio.gather(*pending)


async def page(app: Starlette) -> str:
    """Returns the metrics of all replicas."""
    found = bytearray()

    async def send(message: Any) -> None:
        found.extend(message.get("body", b""))

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    await app({"type": "http", "method": "GET", "path": "/metrics", "raw_path": b"/metrics", "query_string": b"",
               "headers": [(b"host", b"localhost")], "client": ("127.0.0.1", 1), "scheme": "http"}, receive, send)
    return found.decode()


def total(metrics: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^deltic_{name}\S* (\S+)$", metrics, re.MULTILINE))


async def load(app: Starlette, args: argparse.Namespace) -> dict[str, Any]:
    short, long = list[Turn](), list[Turn]()
    for turns, work in ((short, streams), (long, long_prompts)):  # every replica computes once, and reports
        await asyncio.gather(*(work(app, args, time.perf_counter() + 1, turns) for _ in range(2)))
    await asyncio.sleep(3)
    before, began = await page(app), time.perf_counter()
    short, long = [], []
    until = began + args.seconds
    await asyncio.gather(long_prompts(app, args, until, long),
                         *(streams(app, args, until, short) for _ in range(args.streams)))
    seconds, after = time.perf_counter() - began, await page(app)
    gaps = sorted(later - earlier for turn in short for earlier, later in pairwise(turn.pieces))

    def ms(part: float) -> float:
        return round(1000 * gaps[int(part * (len(gaps) - 1))], 1)

    outcomes = {name: int(total(after, f'remote_prefills_total.*outcome="{name}"'))
                - int(total(before, f'remote_prefills_total.*outcome="{name}"')) for name in ("done", "busy", "failed")}
    return {"seconds": round(seconds, 1), "gaps": len(gaps), "gap_median_ms": ms(0.5), "gap_p90_ms": ms(0.9),
            "gap_p99_ms": ms(0.99), "gap_longest_ms": ms(1.0),
            "stream_tokens_a_second": round(sum(turn.tokens for turn in short) / seconds, 1),
            "stream_first_token_ms": round(1000 * median(turn.first for turn in short), 1),
            "long_prompts": len(long), "long_tokens": round(median(turn.prompt for turn in long)),
            "long_first_token_s": round(median(turn.first for turn in long), 3),
            "long_first_token_worst_s": round(max(turn.first for turn in long), 3), "handed_over": outcomes}


def measure(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as shared:
        decode = args.replicas - (args.prefill if kind == "split" else 0)
        words = [args.model, "--replicas", str(decode), "--memory", args.memory, "--threads", str(args.threads),
                 "--max-context", str(args.context), "--cache-dir", shared, "--cache-disk-gb", "2"]
        words += ["--prefill-replicas", str(args.prefill)] if kind == "split" else []
        given = command_parser("serve").parse_mixed(words)
        if args.shape:
            given.model, given.random, given.layers, given.served_name = None, args.shape, args.layers, "shape"
        plan = plan_of(given, {}, ("*",))
        with running(plan, None) as (handle, prefill):
            app = front_app(handle, Limits(), prefill)
            return {"kind": kind, "decode": decode, "prefill": plan.prefill, **asyncio.run(load(app, args))}


def main(words: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--shape", help="random weights of a public shape instead")
    parser.add_argument("--layers", type=int, help="of them, the first ones")
    parser.add_argument("--replicas", type=int, default=2, help="in all")
    parser.add_argument("--prefill", type=int, default=1, help="of these, with split")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", default="256MiB")
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--answer", type=int, default=200, help="tokens of an answer of a stream")
    parser.add_argument("--characters", type=int, default=15000, help="of a long prompt")
    parser.add_argument("--every", type=float, default=3.0, help="mean seconds between two long prompts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", action="store_true", help="append the results to bench/results/disaggregated.jsonl")
    args = parser.parse_args(words or None)
    for kind in args.only:
        found = measure(args, kind)
        print(json.dumps(found), flush=True)
        if args.record:
            record("disaggregated", {"model": args.shape or args.model, "layers": args.layers, "threads": args.threads,
                                     "streams": args.streams, "every": args.every, "ray": ray.__version__, **found})


if __name__ == "__main__":
    main(sys.argv[1:])
