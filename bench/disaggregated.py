"""Long prompts while streams run: plain replicas against decode and prefill replicas.

    python bench/disaggregated.py                                  # 2 plain; then 1 that decodes, 1 for prefill
    python bench/disaggregated.py --shape qwen3.5-0.8b --layers 4  # random weights of a public shape

Real engines take turns in this process. Each has a clock of its own, which advances by the processor time of its steps,
and of writing and reading states, as if it had a core for itself: the load of the machine counts for little. Streams
generate all the time, and long prompts that share nothing arrive at random. What is handed over goes through the
replicas' code and a real directory. A call through Ray is taken to last --call milliseconds.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from random import Random
from statistics import median
from types import SimpleNamespace
from typing import Any

from common import record

from deltic import LLM, RandomModel, SamplingParams
from deltic.cluster import prefill
from deltic.cluster.prefill import PrefillClient, PrefillOrder, disk_tier
from deltic.engine.engine import Engine
from deltic.params import EngineRequest

KINDS = ("plain", "split")


@dataclass(eq=False)
class Replica:
    """An engine with a clock. times: of the tokens of each request. ended: called with a request that has ended."""

    engine: Engine
    clock: float = 0.0
    busy: float = 0.0
    times: dict[str, list[float]] = field(default_factory=dict)
    ended: dict[str, Callable[[], None]] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)
    """Tokens of the prompts without a first token."""

    def do(self, work: Callable[[], Any]) -> Any:
        """Does something whose processor time counts."""
        began = time.process_time()
        found = work()
        seconds = time.process_time() - began
        self.clock, self.busy = self.clock + seconds, self.busy + seconds
        return found

    def add(self, request: EngineRequest, ended: Callable[[], None]) -> None:
        self.do(lambda: self.engine.add(request))
        self.times[request.id], self.ended[request.id] = [], ended
        self.waiting[request.id] = len(request.prompt)

    def step(self) -> None:
        for event in self.do(self.engine.step):
            if event.token is not None:
                self.times[event.request].append(self.clock)
            self.waiting.pop(event.request, None)
            if event.finish:
                assert event.finish != "error", event.error
                self.ended.pop(event.request)()

    @property
    def queue(self) -> float:
        """Seconds of prompts that wait."""
        times = self.engine.scheduler.times
        return sum(self.waiting.values()) * median(times.by_token) if times and times.by_token else 0.0


class Simulation:
    """Replicas, and what happens at which time."""

    def __init__(self, args: argparse.Namespace, decode: list[Replica], others: list[Replica]) -> None:
        self.args, self.decode, self.others = args, decode, others
        self.random, self.numbers = Random(args.seed), count()
        self.events: list[tuple[float, int, Replica | None, Callable[[Replica], None]]] = []
        self.arrivals: dict[str, tuple[float, Replica]] = {}
        self.handed = {"done": 0, "busy": 0}
        self.clients = {replica: self._client(replica) for replica in decode}

    def _client(self, replica: Replica) -> PrefillClient | None:
        tier = disk_tier(replica.engine.runtime.cache)
        worker: Any = SimpleNamespace(engine=replica.engine)
        return PrefillClient(None, worker, tier) if tier and self.others else None

    def at(self, when: float, replica: Replica | None, work: Callable[[Replica], None]) -> None:
        """replica: which works; None: the decode replica with the least work at that time."""
        heapq.heappush(self.events, (when, next(self.numbers), replica, work))

    def run(self, until: float) -> None:
        while True:
            replica = min((each for each in (*self.decode, *self.others) if each.engine.has_work),
                          key=lambda each: each.clock, default=None)
            if self.events and (replica is None or self.events[0][0] <= replica.clock):
                when, _, target, work = heapq.heappop(self.events)
                target = target or min(self.decode, key=lambda each: each.queue)
                target.clock = max(target.clock, when)
                work(target)
            elif replica is None or replica.clock > until:
                return
            else:
                replica.step()

    def ids(self, tokens: int) -> tuple[int, ...]:
        return tuple(self.random.randrange(3, 250) for _ in range(tokens))

    def stream(self, replica: Replica) -> None:
        request = EngineRequest(f"stream-{next(self.numbers)}", self.ids(20),
                                SamplingParams(max_tokens=self.args.answer, ignore_eos=True, temperature=0))
        replica.add(request, lambda: self.stream(replica))

    def long_prompt(self, arrived: float, replica: Replica) -> None:
        sampling = SamplingParams(max_tokens=8, ignore_eos=True)
        request = EngineRequest(f"long-{next(self.numbers)}", self.ids(self.args.tokens), sampling)
        self.arrivals[request.id] = arrived, replica
        replica.add(request, lambda: None)
        client = self.clients[replica]
        order = replica.do(lambda: client.order(request)) if client else None
        if order is None:
            return
        replica.engine.pause(request.id)
        far = min(self.others, key=lambda each: each.queue)
        if far.queue > order.patience:
            self.handed["busy"] += 1
            replica.engine.resume(request.id)
            return
        replica.waiting.pop(request.id)
        self.at(replica.clock + self.args.call / 1000, far, partial(self.compute, order, replica, request.id))

    def compute(self, order: PrefillOrder, near: Replica, request: str, far: Replica) -> None:
        """A prefill replica gets an order."""
        tier = disk_tier(far.engine.runtime.cache)
        assert tier
        own = prefill._request_of(order)
        keys = far.engine.keys_of(own)

        def store() -> list[Any]:
            wait(prefill._store(far.engine, tier, keys))
            return tier.written(keys)

        def ended() -> None:
            items = far.do(store)
            self.at(far.clock + self.args.call / 1000, near, partial(adopt, items))

        def adopt(items: list[Any], near: Replica) -> None:
            found = disk_tier(near.engine.runtime.cache)
            assert found and max(item.done for item in items) == len(keys)
            near.do(lambda: found.adopt(items))
            near.engine.resume(request)
            self.handed["done"] += 1

        far.do(lambda: tier.adopt(order.items))
        far.add(own, ended)


def measure(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    split = args.prefill if kind == "split" else 0
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as shared, ExitStack() as stack:
        source = RandomModel(args.shape, args.layers) if args.shape else None
        replicas = []
        for _ in range(args.replicas):
            llm = stack.enter_context(LLM(source, max_context=args.tokens + 1024, memory=args.memory, threads=1,
                                          cache_dir=shared))
            store: Any = llm.runtime.cache.tiers[-1].store
            store._model.result()  # until then the tier does nothing
            replicas.append(Replica(stack.enter_context(llm.worker.hold())))
        found = Simulation(args, replicas[split:], replicas[:split])
        for replica in replicas:  # memory is touched for the first time, and the speed is measured
            for _ in range(2):
                replica.add(EngineRequest("warm", found.ids(args.tokens), SamplingParams(max_tokens=16)), lambda: None)
                while replica.engine.has_work:
                    replica.step()
            replica.clock = replica.busy = 0.0
        for number in range(args.streams):
            found.stream(found.decode[number % len(found.decode)])
        when, arrivals = 0.0, Random(args.seed + 1)
        while (when := when + arrivals.expovariate(1 / args.every)) < args.seconds:
            found.at(when, None, partial(found.long_prompt, when))
        found.run(args.seconds)
        return {"kind": kind, "decode": len(found.decode), "prefill": split, **result(args, found)}


def result(args: argparse.Namespace, found: Simulation) -> dict[str, Any]:
    gaps = sorted(later - earlier for replica in found.decode for id, times in replica.times.items()
                  for earlier, later in pairwise(times) if id.startswith("stream") and earlier > args.warm)
    first = [replica.times[id][0] - arrived for id, (arrived, replica) in found.arrivals.items() if replica.times[id]]

    def ms(part: float) -> float:
        return round(1000 * gaps[int(part * (len(gaps) - 1))], 2)

    return {"virtual_seconds": args.seconds, "gaps": len(gaps), "gap_median_ms": ms(0.5), "gap_p90_ms": ms(0.9),
            "gap_p99_ms": ms(0.99), "gap_longest_ms": ms(1.0),
            "stream_tokens_a_second": round(len(gaps) / (args.seconds - args.warm), 1),
            "long_prompts": len(found.arrivals), "long_answered": len(first),
            "long_first_token_s": round(median(first), 3), "long_first_token_worst_s": round(max(first), 3),
            "busy": [round(replica.busy / replica.clock, 2) for replica in (*found.decode, *found.others)],
            "handed_over": found.handed}


def main(words: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--shape", help="random weights of a public shape instead of the embedded model")
    parser.add_argument("--layers", type=int, help="of them, the first ones")
    parser.add_argument("--replicas", type=int, default=2, help="in all")
    parser.add_argument("--prefill", type=int, default=1, help="of these, with split")
    parser.add_argument("--memory", default="256MiB")
    parser.add_argument("--seconds", type=float, default=30, help="of the clocks")
    parser.add_argument("--warm", type=float, default=2.0, help="seconds that do not count")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--answer", type=int, default=200, help="tokens of an answer of a stream")
    parser.add_argument("--tokens", type=int, default=8000, help="of a long prompt")
    parser.add_argument("--every", type=float, default=4.0, help="mean seconds between two long prompts")
    parser.add_argument("--call", type=float, default=10.0, help="milliseconds of a call through Ray")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", action="store_true", help="append the results to bench/results/disaggregated.jsonl")
    args = parser.parse_args(words or None)
    for kind in args.only:
        found = measure(args, kind)
        print(json.dumps(found), flush=True)
        if args.record:
            record("disaggregated", {"model": args.shape or "tiny", "layers": args.layers, "streams": args.streams,
                                     "long_tokens": args.tokens, "every": args.every, "call_ms": args.call, **found})


if __name__ == "__main__":
    main(sys.argv[1:])
