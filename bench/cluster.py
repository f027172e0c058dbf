"""Replicas on a real Ray cluster of node processes on this machine: the state-aware router against Serve's own.

    python bench/cluster.py                          # this router, Serve's default, PrefixCacheAffinityRouter
    python bench/cluster.py --only state one         # and one engine with the memory of all four
    python bench/cluster.py --kill replica --only state
    python bench/cluster.py --kill node --only state
    python bench/cluster.py --scale --only state     # 2, 4 and 1 replicas under load

Clients hold conversations under common system prompts; they call the front's ASGI application in this process and stop
the time until the first piece of an answer. All share this machine's processors, so that only ratios mean something.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any

import ray
from common import record
from ray import serve
from ray.cluster_utils import Cluster

# ray.serve.llm has the same class, and needs vLLM's dependencies
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from starlette.applications import Starlette

from deltic.cli import command_parser
from deltic.cli.cluster import plan_of
from deltic.cluster.application import ReplicaPlan, replicas_of, running
from deltic.cluster.front import front_app
from deltic.config import Limits

NODES = 3
ESSAY: str = json.loads((Path(__file__).parent / "essays.json").read_text(encoding="utf-8"))["English"]
ROUTERS = ("state", "default", "prefix", "one")


class TextPrefixRouter(PrefixCacheAffinityRouter):  # type: ignore[misc]
    """Ray's router, which looks for the messages in an argument of its own servers' kind."""

    def _extract_text_from_request(self, pending_request: Any) -> str:
        body = json.loads(pending_request.args[1] or b"{}")
        return str(self._normalize_prompt_to_string(body.get("messages", "")))


@dataclass
class Turn:
    """first: seconds until the first piece of the answer. errors: attempts that failed. cached, prompt: tokens."""

    began: float
    first: float = 0.0
    ended: float = 0.0
    cached: int = 0
    prompt: int = 0
    tokens: int = 0
    errors: list[str] = field(default_factory=list)
    resumed: bool = True


@dataclass
class Load:
    """Clients that hold conversations at a time."""

    app: Starlette
    args: argparse.Namespace
    turns: list[Turn] = field(default_factory=list)
    lost: int = 0

    async def run(self) -> float:
        """Returns the seconds until all conversations have ended."""
        began, left = time.perf_counter(), iter(range(self.args.conversations))
        await asyncio.gather(*(self._client(left) for _ in range(self.args.clients)))
        return time.perf_counter() - began

    async def _client(self, left: Iterator[int]) -> None:
        for number in left:
            await self._conversation(Random(number))

    async def _conversation(self, random: Random) -> None:
        system = 0 if random.random() < self.args.hot else random.randrange(self.args.systems)
        messages = [{"role": "system", "content": text_of(Random(-1 - system), self.args.system_characters)}]
        for number in range(self.args.turns):
            messages.append({"role": "user", "content": text_of(random, random.randrange(50, 400))})
            turn = Turn(time.perf_counter())
            answer = await self._turn(messages, turn, self.args.retries)
            if answer is None:
                self.lost += 1
                return
            turn.resumed = not number or turn.cached > 0
            self.turns.append(turn)
            messages.append({"role": "assistant", "content": answer})
            await asyncio.sleep(random.expovariate(1 / self.args.pause))

    async def _turn(self, messages: list[dict[str, str]], turn: Turn, retries: int) -> str | None:
        body = {"messages": messages, "stream": True, "max_tokens": self.args.answer, "temperature": 0,
                "stream_options": {"include_usage": True}}
        for attempt in range(retries + 1):
            try:
                answer = await stream(self.app, body, turn)
                turn.ended = time.perf_counter()
                return answer
            except OSError as error:
                turn.errors.append(str(error)[:200])
                await asyncio.sleep(min(0.5 * (attempt + 1), 2.0))
        return None


async def stream(app: Starlette, body: dict[str, Any], turn: Turn) -> str:
    """Returns the answer. OSError: the request failed, with the error that its client got."""
    text, sent, status = list[str](), False, 0
    pending = b""
    finished = False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()
        sent = True
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message: Any) -> None:
        nonlocal status, pending, finished
        if message["type"] == "http.response.start":
            status = message["status"]
            return
        pending += message["body"]
        *events, pending = pending.split(b"\n\n")
        for event in events if status == 200 else ():
            if event == b"data: [DONE]":
                finished = True
            elif event.startswith(b"data: "):
                take(json.loads(event[6:]))

    def take(chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            raise OSError(chunk["error"]["message"])
        for choice in chunk["choices"]:
            piece = choice["delta"].get("content")
            if piece:
                turn.first = turn.first or time.perf_counter() - turn.began
                text.append(piece)
        if usage := chunk.get("usage"):
            turn.prompt, turn.tokens = usage["prompt_tokens"], usage["completion_tokens"]
            turn.cached = usage["prompt_tokens_details"]["cached_tokens"]

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "raw_path": b"/v1/chat/completions",
             "query_string": b"", "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
             "client": ("127.0.0.1", 1), "scheme": "http", "http_version": "1.1", "asgi": {"version": "3.0"}}
    await app(scope, receive, send)
    if not finished:
        raise OSError(f"status {status}: {pending[:200]!r}")
    return "".join(text)


def text_of(random: Random, characters: int) -> str:
    start = random.randrange(max(len(ESSAY) - characters, 1))
    return f"{random.randrange(10**6)} {ESSAY[start:start + characters]}"


@contextmanager
def cluster() -> Iterator[Cluster]:
    """A cluster of node processes on this machine, for four replicas and one lost node."""
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    for _ in range(NODES - 1):
        nodes.add_node(num_cpus=2)
    nodes.wait_for_nodes()
    try:
        yield nodes
    finally:
        nodes.shutdown()


def plan(args: argparse.Namespace, router: str) -> ReplicaPlan:
    replicas = 1 if router == "one" else args.replicas
    memory = args.memory * (args.replicas if router == "one" else 1)
    words = ["tiny", "--replicas", str(replicas), "--memory", f"{memory}MiB", "--threads", "1",
             "--drain-seconds", "30"]
    if args.shared:
        words += ["--cache-dir", args.shared]
    given = command_parser("serve").parse_mixed(words)
    found = plan_of(given, {}, ("*",))
    kinds: dict[str, Any] = {"default": "", "prefix": TextPrefixRouter}
    return replace(found, router=kinds.get(router, found.router), cpus=1.0)


def replica_processes() -> list[int]:
    """Returns the processes of replicas, by their titles."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                title = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if title.startswith(b"ray::ServeReplica:deltic:replica"):
                found.append(int(entry.name))
    return found


async def trouble(args: argparse.Namespace, nodes: Cluster, load: Load, chosen: ReplicaPlan) -> dict[str, Any]:
    """Does what the arguments ask for in the middle of the load."""
    while len(load.turns) < args.conversations * args.turns // 4:
        await asyncio.sleep(0.1)
    now = time.perf_counter()
    if args.kill == "replica":
        os.kill(replica_processes()[0], signal.SIGKILL)
    elif args.kill == "node":
        nodes.remove_node(nodes.worker_nodes.copy().pop(), allow_graceful=False)
    elif args.scale:
        for replicas in (4, 1):
            await asyncio.to_thread(serve.run, replicas_of(replace(chosen, replicas=replicas)), name="deltic",
                                    route_prefix=None)
            await asyncio.sleep(5)
    return {"at": now}


def result(load: Load, seconds: float, router: str, args: argparse.Namespace, at: float | None) -> dict[str, Any]:
    turns = load.turns
    found = {"router": router, "replicas": args.replicas, "turns": len(turns), "seconds": round(seconds, 1),
             "reused": round(sum(turn.cached for turn in turns) / sum(turn.prompt for turn in turns), 4),
             "prompt_tokens": sum(turn.prompt for turn in turns),
             "turns_a_second": round(len(turns) / seconds, 2),
             "first_token_ms": round(1000 * median(turn.first for turn in turns), 1),
             "conversations_lost": load.lost, "retried": sum(bool(turn.errors) for turn in turns)}
    if at is not None:
        after = sorted(turn.ended for turn in turns if turn.ended > at)
        before = [turn for turn in turns if turn.ended <= at]
        rate = len(before) / (at - min(turn.began for turn in turns))
        back = next((start - at for start in after
                     if sum(start <= ended < start + 5 for ended in after) >= 0.8 * 5 * rate), None)
        found |= {"turns_before_a_second": round(rate, 2), "back_after_s": back and round(back, 1),
                  "resumed_with_cached": round(mean(turn.resumed for turn in turns if turn.began > at), 4),
                  "errors": Counter(error[:80] for turn in turns for error in turn.errors).most_common(3)}
    return found


async def balance(app: Starlette) -> dict[str, Any]:
    """Returns the share of the busiest replica in the prompt tokens that were computed and the requests."""
    page = bytearray()

    async def send(message: Any) -> None:
        page.extend(message.get("body", b""))

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    await app({"type": "http", "method": "GET", "path": "/metrics", "raw_path": b"/metrics", "query_string": b"",
               "headers": [(b"host", b"localhost")], "client": ("127.0.0.1", 1), "scheme": "http"}, receive, send)
    counts = [float(line.rsplit(" ", 1)[1]) for line in page.decode().splitlines()
              if line.startswith("deltic_generated_tokens_total{")]
    return {"busiest_of_mean": round(max(counts) / mean(counts), 2) if counts and sum(counts) else None}


def measure(args: argparse.Namespace, router: str) -> dict[str, Any]:
    with cluster() as nodes:
        chosen = plan(args, router)
        if args.scale:
            chosen = replace(chosen, replicas=2)
        with running(chosen, nodes.address) as (handle, prefill):
            app = front_app(handle, Limits(), prefill)

            async def run() -> dict[str, Any]:
                load = Load(app, args)
                harm = asyncio.create_task(trouble(args, nodes, load, chosen))
                seconds = await load.run()
                at = (await harm)["at"] if args.kill or args.scale else None
                harm.cancel()
                return {**result(load, seconds, router, args, at), **await balance(app)}

            return asyncio.run(run())


def main(words: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ROUTERS, default=["state", "default", "prefix"])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--systems", type=int, default=6, help="common system prompts")
    parser.add_argument("--hot", type=float, default=0.0, help="share of conversations with the first of them")
    parser.add_argument("--system-characters", type=int, default=3000)
    parser.add_argument("--answer", type=int, default=12, help="tokens of an answer")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--pause", type=float, default=0.3, help="mean seconds between two turns")
    parser.add_argument("--memory", type=int, default=64, help="MiB of the cache of a replica")
    parser.add_argument("--shared", help="a cache directory that all replicas share")
    parser.add_argument("--retries", type=int, default=0)
    parser.add_argument("--kill", choices=("replica", "node"))
    parser.add_argument("--scale", action="store_true")
    parser.add_argument("--record", action="store_true", help="append the results to bench/results/cluster.jsonl")
    args = parser.parse_args(words or None)
    if args.kill or args.scale:
        args.retries = max(args.retries, 20)
    for router in args.only:
        found = measure(args, router)
        print(json.dumps(found), flush=True)
        if args.record:
            record("cluster", {"kill": args.kill, "scale": args.scale, "hot": args.hot, "memory_mib": args.memory,
                               "ray": ray.__version__, **found})


if __name__ == "__main__":
    main(sys.argv[1:])
