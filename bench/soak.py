"""Many random requests against caches that are far too small: nothing may leak, grow past its budget, or go wrong.

    python bench/soak.py                    # 20,000 requests on the embedded model, some minutes
    python bench/soak.py --requests 500
"""

from __future__ import annotations

import argparse
import random
import resource
import tempfile
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path

from deltic import SamplingParams
from deltic.cache.offload.directory import ITEM_SUFFIX
from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import load
from deltic.params import PAGE, EngineRequest

CHECK_EVERY = 50
"""Finished requests between two looks at all accounts."""
LIMITS = {"memory": "6MiB", "max_context": 512, "max_batch": 8, "host_memory": "8MiB", "cache_disk_gb": 0.012,
          "token_budget": 128, "threads": 1, "dtype": "float32"}
OPENINGS = 6
INDEX_BYTES = 1 << 20
"""The index of the directory, and what else is not an item: outside of `cache_disk_gb`."""


@dataclass
class Figures:
    """What happened. tiers: for each, bytes and budget at the end, and what was given up and restored."""

    requests: int = 0
    aborted: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    checks: int = 0
    lives: int = 0
    evictions: int = 0
    tiers: dict[str, dict[str, int]] = field(default_factory=dict)
    disk_items_bytes: int = 0
    disk_index_bytes: int = 0
    peak_mib: int = 0
    seconds: float = 0.0


class Soak:
    """One random program over engines that follow each other on the same directory."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory, self._draw = directory, random.Random(seed)
        self.figures = Figures()
        self._conversations: deque[list[int]] = deque(maxlen=40)
        self._openings = [self._tokens(self._draw.randint(20, 90)) for _ in range(OPENINGS)]
        self._running: dict[str, EngineRequest] = {}
        self._answers: dict[str, list[int]] = {}

    def run(self, requests: int, lives: int) -> Figures:
        """Run so many requests, over so many engines; AssertionError where accounts or budgets are wrong."""
        began = time.perf_counter()
        for life in range(1, lives + 1):
            self._live(requests * life // lives)
        self.figures.peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        self.figures.seconds = round(time.perf_counter() - began, 1)
        return self.figures

    def _live(self, requests: int) -> None:
        self._runtime = load(None, EngineConfig(**LIMITS, cache_dir=str(self._directory)))  # type: ignore[arg-type]
        self._engine = Engine(self._runtime)
        due = sum(self.figures.ends.values())
        while self.figures.requests < requests or self._engine.has_work:
            while len(self._running) < 12 and self.figures.requests < requests:
                self._add()
            self._step()
            if self._draw.random() < 0.01 and self._running:
                self._abort()
            if sum(self.figures.ends.values()) >= due:
                due += CHECK_EVERY
                self._check()
        self._check()
        assert self._runtime.cache.idle
        self._end()

    def _add(self) -> None:
        prompt, boundaries = self._prompt()
        name = f"r{self.figures.requests}"
        sampling = SamplingParams(temperature=self._draw.choice((0.0, 1.0)), seed=self.figures.requests,
                                  max_tokens=self._draw.choice((0, 1, 3, 8, 20, 40, 100)), ignore_eos=True,
                                  stop_token_ids=tuple(self._draw.sample(range(3000), 32)))
        if sampling.max_tokens and self._draw.random() < 0.1:
            sampling = SamplingParams(temperature=1.0, seed=1, max_tokens=4, n=self._draw.randint(2, 5))
        request = EngineRequest(name, tuple(prompt), sampling, boundaries)
        self._engine.add(request)
        self._running[name], self._answers[name] = request, []
        self.figures.requests += 1
        self.figures.prompt_tokens += len(prompt)

    def _prompt(self) -> tuple[list[int], tuple[int, ...]]:
        """A new conversation under one of a few openings, the next turn of one, or one whose end was edited."""
        kind = self._draw.random()
        if kind < 0.3 or not self._conversations:
            opening = self._draw.choice(self._openings)
            prompt = opening + self._tokens(self._draw.randint(1, 60))
            return prompt, (len(opening), max(len(prompt) - 4, 1))
        known = self._draw.choice(self._conversations)
        kept = len(known) if kind < 0.85 else self._draw.randint(1, len(known))
        prompt = (known[:kept] + self._tokens(self._draw.randint(0, 50)))[-440:]
        return prompt, (max(len(prompt) - self._draw.randint(0, 20), 1),)

    def _step(self) -> None:
        for event in self._engine.step():
            if event.token is not None and event.choice == 0:
                self._answers[event.request].append(event.token)
            if event.finish:
                self.figures.ends[event.finish] = self.figures.ends.get(event.finish, 0) + 1
                assert event.finish != "error", event.error
            if event.finish and event.choice == 0:
                request = self._running.pop(event.request)
                self._conversations.append([*request.ids, *self._answers.pop(event.request)])

    def _abort(self) -> None:
        name = self._draw.choice(list(self._running))
        self._engine.abort(name)
        self.figures.aborted += 1

    def _check(self) -> None:
        self._engine.check()
        self.figures.checks += 1
        for tier in self._runtime.cache.tiers:
            assert tier.bytes <= tier.budget, f"{tier.name}: {tier.bytes} of {tier.budget}"

    def _end(self) -> None:
        """Close the engine, and add what it counted."""
        cache, figures, stats = self._runtime.cache, self.figures, self._engine.stats
        self._engine.close()
        for tier in cache.tiers:
            total = figures.tiers.setdefault(tier.name, dict.fromkeys(("evictions", "hits", "hit_tokens"), 0))
            total |= {name: total[name] + getattr(tier, name) for name in ("evictions", "hits", "hit_tokens")}
            total |= {name: getattr(tier, name) for name in ("bytes", "budget", "prefixes")}
        sizes = {path: path.stat().st_size for path in self._directory.rglob("*") if path.is_file()}
        figures.disk_items_bytes = sum(size for path, size in sizes.items() if path.suffix == ITEM_SUFFIX)
        figures.disk_index_bytes = sum(sizes.values()) - figures.disk_items_bytes
        assert figures.disk_items_bytes <= LIMITS["cache_disk_gb"] * 1e9  # type: ignore[operator]
        assert figures.disk_index_bytes <= INDEX_BYTES
        figures.reused_tokens += stats.reused_tokens
        figures.generated_tokens += stats.generated_tokens
        figures.preemptions += self._engine.scheduler.preemptions
        figures.evictions += cache.tree.evictions
        figures.lives += 1

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(3000) for _ in range(count)]



def soak(requests: int, lives: int = 4, seed: int = 0) -> Figures:
    """Run a soak in a directory of its own."""
    with tempfile.TemporaryDirectory() as directory:
        return Soak(Path(directory), seed).run(requests, lives)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    from common import record

    figures = soak(args.requests, seed=args.seed)
    record("soak", {"task": "soak", "model": "tiny", "limits": LIMITS, "page": PAGE, **asdict(figures)})


if __name__ == "__main__":
    main()
