"""The router in a simulated cluster: reuse against one cache with the memory of all, balance, the cost of a decision.

    python bench/routing.py                                    # 10, 100 and 1,000 replicas, 20,000 conversations
    python bench/routing.py --conversations 1000000 --record   # an hour of one core
    python bench/routing.py --replicas 10 --policy two-choices

The router is the real one (deltic.cluster.router); the clock, the replicas and their caches are simulated. A replica
computes one prompt after another and keeps the states that were used last: one for each conversation, one for each
system prompt. Numbers of turns and lengths of messages have heavy tails. Every turn is also looked up in a cache with
the memory of all replicas, which is the ideal. Decisions are timed in processor time.
"""

from __future__ import annotations

import argparse
import heapq
import time
import tracemalloc
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from statistics import mean, quantiles
from typing import Any

from common import record

from deltic.cluster.boundaries import Boundaries
from deltic.cluster.reachable import LoadReport, ReachableReport
from deltic.cluster.router import MOST_KEYS, RoutedRequest, StateRouter

TOKEN, ANSWER_TOKEN = 1 / 8000, 1 / 4000
"""Seconds of a replica for a token of a prompt, and of an answer in a full batch."""
STEP = 1 / 80
"""Seconds between two tokens of an answer."""
SLOT = 1600
"""Tokens that take as much memory as a state."""
MEMORY = 1_000_000
"""Tokens that fit in the cache of a replica."""
CONTEXT = 32_000
"""Tokens at which a conversation ends."""
SYSTEMS, CHARACTERS = 60, 4
PERIOD = 2.0
"""Seconds between two reports of a replica."""
CHANGES, REPEATED, TURNS_SENT = 512, 512, 24


@dataclass(slots=True, eq=False)
class Conversation:
    """lengths: characters up to the end of each request so far. context: tokens up to the end of the last answer."""

    number: int
    system: int
    turns: int
    context: int
    lengths: list[int] = field(default_factory=list)


class StateCache:
    """The states that were used last, in so many tokens of memory."""

    def __init__(self, memory: int) -> None:
        self.memory, self.used = memory, 0
        self.states: OrderedDict[int, tuple[int, int]] = OrderedDict()  # depth and cost by key

    def resume(self, conversation: Conversation, systems: list[int]) -> int:
        """Returns the depth of the deepest state of a conversation."""
        for key in (-1 - conversation.number, conversation.system):
            if key in self.states:
                self.states.move_to_end(key)
                if key >= 0 or not conversation.lengths:
                    return systems[conversation.system] if key >= 0 else 0
                return self.states[key][0]
        return 0

    def keep(self, key: int, depth: int, cost: int) -> list[int]:
        """Keeps a state; returns the keys that were evicted for it."""
        gone, known = [], self.states.pop(key, None)
        self.used += cost - (known[1] if known else 0)
        self.states[key] = depth, cost
        while self.used > self.memory:
            old, (_, freed) = self.states.popitem(last=False)
            self.used -= freed
            gone.append(old)
        return gone


class SimulatedReplica:
    """A replica and its reports."""

    def __init__(self, name: str) -> None:
        self.name, self.cache = name, StateCache(MEMORY)
        self.free_at = self.work = 0.0
        self.unfinished: dict[int, float] = {}
        self.keys: dict[int, list[int]] = {}  # keys of boundaries by those of states
        self.held: dict[int, float] = {}
        self.changes: deque[tuple[int, float]] = deque(maxlen=CHANGES)
        self.changed = self.place = 0

    def change(self, key: int, seconds: float) -> None:
        if seconds:
            self.held[key] = seconds
        else:
            self.held.pop(key, None)
        self.changes.append((key, seconds))
        self.changed += 1

    def report(self, now: float) -> ReachableReport:
        keys = [*islice(self.held, self.place, self.place + REPEATED)] if self.place < 4096 else []
        self.place = self.place + REPEATED if len(keys) == REPEATED else 0
        entries = [*self.changes, *((key, self.held[key]) for key in keys)]
        load = LoadReport(max(self.free_at - now, 0.0), TOKEN / CHARACTERS, ANSWER_TOKEN * 250)
        return ReachableReport(load, self.changed - len(self.changes), len(self.changes),
                               array("Q", [key for key, _ in entries]), array("f", [value for _, value in entries]))

    def serve(self, now: float, conversation: Conversation, boundaries: Boundaries, new: int, systems: list[int],
              answer: int) -> tuple[int, float, float]:
        """Returns the reused tokens, and when the first and the last token come."""
        reused = self.cache.resume(conversation, systems)
        prompt = conversation.context + new
        first = max(now, self.free_at) + (prompt - reused) * TOKEN
        self.work += (prompt - reused) * TOKEN + answer * ANSWER_TOKEN
        self.free_at = first + answer * ANSWER_TOKEN
        for key, depth, cost, own in (
                (conversation.system, systems[conversation.system], systems[conversation.system] + SLOT,
                 boundaries.keys[0]),
                (-1 - conversation.number, prompt + answer, prompt + answer - systems[conversation.system] + SLOT,
                 boundaries.keys[-1])):
            for gone in self.cache.keep(key, depth, cost):
                for known in self.keys.pop(gone, ()):
                    self.change(known, 0.0)
            self.keys.setdefault(key, []).append(own)
            self.change(own, depth * TOKEN)
        return reused, first, first + answer * STEP


class Simulation:
    """Runs until all conversations have begun: from then on the cluster would only drain."""

    def __init__(self, replicas: int, conversations: int, policy: str, load: float, seed: int = 1) -> None:
        self.random, self.policy = Random(seed), policy
        self.replicas = {f"replica-{number}": SimulatedReplica(f"replica-{number}") for number in range(replicas)}
        self.names = [*self.replicas]
        self.ideal = StateCache(MEMORY * replicas)
        self.router = StateRouter()
        self.router.set_replicas(self.names)
        self.systems = [self.random.randrange(300, 4000) for _ in range(SYSTEMS)]
        self.weights = [1 / (rank + 1) for rank in range(SYSTEMS)]  # Zipf's law
        self.left, self.rate = conversations, load * replicas
        self.prompts = self.reused = self.best = self.turns = 0
        self.first, self.seconds, self.noting = array("d"), array("d"), array("d")

    def run(self) -> dict[str, Any]:
        events: list[tuple[float, int, Any, Any]] = []
        ids = iter(range(1 << 60))
        began = self.conversations(ids)
        heapq.heappush(events, (0.0, next(ids), "begin", None))
        for place, replica in enumerate(self.replicas.values()):
            heapq.heappush(events, (PERIOD * place / len(self.replicas), next(ids), "report", replica))
        now = 0.0
        while self.left:
            now, _, kind, what = heapq.heappop(events)
            if kind == "begin":
                self.left -= 1
                heapq.heappush(events, (now + self.random.expovariate(self.rate), next(ids), "begin", None))
                heapq.heappush(events, (now, next(ids), "turn", next(began)))
            elif kind == "report":
                self.router.report(what.name, what.report(now))
                heapq.heappush(events, (now + PERIOD, next(ids), "report", what))
            elif kind == "end":
                self.router.ended(what)
            elif kind == "turn":
                routed, last = self.turn(now, what)
                if routed:
                    heapq.heappush(events, (last, next(ids), "end", routed))
                if len(what.lengths) < what.turns and what.context < CONTEXT:
                    pause = min(self.random.paretovariate(1.5) * 10, 600)
                    heapq.heappush(events, (last + pause, next(ids), "turn", what))
        return self.result(now)

    def conversations(self, ids: Iterator[int]) -> Iterator[Conversation]:
        while True:
            system, = self.random.choices(range(SYSTEMS), self.weights)
            turns = min(int(self.random.paretovariate(1.2)), 200)
            yield Conversation(next(ids), system, turns, self.systems[system])

    def turn(self, now: float, conversation: Conversation) -> tuple[RoutedRequest | None, float]:
        new = min(int(self.random.lognormvariate(4.5, 1.3)) + 8, 20_000)
        answer = min(int(self.random.lognormvariate(5.0, 1.0)) + 1, 4000)
        sent = conversation.context + new
        begin = max(len(conversation.lengths) - TURNS_SENT, 0)
        ends = range(begin, len(conversation.lengths) + 1)
        sizes = [*conversation.lengths[begin:], sent * CHARACTERS]
        boundaries = Boundaries((conversation.system + 1, *(_key(conversation.number, turn) for turn in ends)),
                                (self.systems[conversation.system] * CHARACTERS, *sizes))
        routed = None
        if self.policy == "state":
            clock = time.thread_time()
            routed = self.router.choose(boundaries)
            chosen = time.thread_time()
            assert routed
            self.router.sent(routed, boundaries)
            self.seconds.append(chosen - clock)
            self.noting.append(time.thread_time() - chosen)
            replica = self.replicas[routed.replica.name]
        elif self.policy == "two-choices":
            replica = min((self.replicas[name] for name in self.random.choices(self.names, k=2)),
                          key=lambda each: each.free_at)
        else:  # by system prompt, as routers by the beginning of the text do
            replica = self.replicas[self.names[conversation.system * 7919 % len(self.names)]]
        reused, first, last = replica.serve(now, conversation, boundaries, new, self.systems, answer)
        self.best += self.ideal.resume(conversation, self.systems)
        system = self.systems[conversation.system]
        self.ideal.keep(conversation.system, system, system + SLOT)
        self.ideal.keep(-1 - conversation.number, sent + answer, sent + answer - system + SLOT)
        self.prompts += sent
        self.reused += reused
        self.turns += 1
        self.first.append(first - now)
        conversation.lengths.append(sent * CHARACTERS)
        conversation.context = sent + answer
        return routed, last

    def result(self, now: float) -> dict[str, Any]:
        work = [replica.work for replica in self.replicas.values()]
        found = {"replicas": len(self.replicas), "policy": self.policy, "turns": self.turns,
                 "simulated_s": round(now), "busy": round(sum(work) / now / len(work), 3),
                 "reused_of_prompts": round(self.reused / self.prompts, 4),
                 "reused_of_ideal": round(self.reused / self.best, 4),
                 "busiest_of_mean": round(max(work) / mean(work), 2),
                 "first_token_ms": [round(1000 * each, 1) for each in _spread(self.first)]}
        if self.seconds:
            found |= {"decision_us": [round(1e6 * each, 1) for each in _spread(self.seconds)],
                      "noting_us": [round(1e6 * each, 1) for each in _spread(self.noting)],
                      "keys": len(self.router.index)}
        return found


def _key(conversation: int, turn: int) -> int:
    return (conversation * 1021 + turn + 1) * 0x9E3779B97F4A7C15 & (1 << 64) - 1


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """Returns median and 99th percentile."""
    cuts = quantiles(values, n=100)
    return cuts[49], cuts[98]


def router_memory(replicas: int) -> dict[str, Any]:
    """Returns the bytes of a router that knows as many boundaries as it may."""
    tracemalloc.start()
    router, random = StateRouter(), Random(1)
    router.set_replicas([f"replica-{number}" for number in range(replicas)])
    while len(router.index) < MOST_KEYS - 1:
        router.index.put(random.getrandbits(64), random.randrange(replicas), random.random())
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {"replicas": replicas, "keys": len(router.index), "bytes": size, "bytes_per_key": size // len(router.index)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--conversations", type=int, default=20_000)
    parser.add_argument("--policy", nargs="+", choices=("state", "two-choices", "by-system-prompt"), default=["state"])
    parser.add_argument("--load", type=float, default=1.6, help="conversations a second that begin by replica")
    parser.add_argument("--record", action="store_true", help="append the results to bench/results/routing.jsonl")
    args = parser.parse_args()
    for replicas in args.replicas:
        for policy in args.policy:
            found = Simulation(replicas, args.conversations, policy, args.load).run()
            print(found, flush=True)
            if args.record:
                record("routing", {"conversations": args.conversations, **found})
    memory = router_memory(max(args.replicas))
    print(memory)
    if args.record:
        record("routing", memory)


if __name__ == "__main__":
    main()
