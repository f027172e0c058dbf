"""What the prefix cache saves, and what it costs: random qwen3.5-0.8b in bfloat16, one process.

    python bench/cache.py           # about ten minutes
    python bench/cache.py --quick   # does it work at all
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from common import record, spread

from deltic import LLM, RandomModel, SamplingParams
from deltic.cache.block_pool import BlockPool
from deltic.cache.manager import HybridCache
from deltic.cache.offload.disk import DiskStore
from deltic.cache.offload.host import HostStore
from deltic.cache.offload.index import TierIndex
from deltic.cache.offload.types import PrefixSource
from deltic.cache.radix_tree import PrefixTree
from deltic.cache.tensors import CachePools
from deltic.engine.engine import Engine
from deltic.params import PAGE, EngineRequest
from deltic.runner.model_runner import ModelRunner

ANSWER, NEW = 24, 50
METHODS = (
    "admit",
    "start_load",
    "reserve_checkpoint",
    "commit_checkpoints",
    "release",
    "reserve",
    "commit",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes: only shows that everything works")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", action="append", choices=("resume", "cost", "match"))
    args = parser.parse_args()
    llm = LLM(RandomModel("qwen3.5-0.8b", layers=4 if args.quick else None), dtype="bfloat16", max_batch=2,
              max_context=10_000, memory="3GiB")
    for name in args.only or ("match", "cost", "resume"):
        {"resume": _resume, "cost": _cost, "match": _match}[name](llm, args)


# What it saves


def _resume(llm: LLM, args: argparse.Namespace) -> None:
    """Time to the first token of a conversation's next turn: read whole, resumed, resumed from disk by a new cache."""
    length, draw = (400 if args.quick else 8000), random.Random(0)
    times: dict[str, list[float]] = {"cold": [], "warm": [], "disk": [], "disk_uncached": []}
    with tempfile.TemporaryDirectory() as directory:
        engine = _engine(llm, Path(directory))
        _first_token(engine, _tokens(llm, draw, 64))
        for _ in range(args.repeat):
            prompt = _tokens(llm, draw, length)
            seconds, answer, _ = _first_token(engine, prompt)
            times["cold"].append(seconds)
            prompt = [*prompt, *answer, *_tokens(llm, draw, NEW)]
            times["warm"].append(_reused(engine, prompt, length))
            for name in ("disk", "disk_uncached"):
                engine.close()
                if name == "disk_uncached":
                    _drop_from_page_cache(Path(directory))
                engine = _engine(llm, Path(directory))
                fresh = prompt[:length + ANSWER - 1] + _tokens(llm, draw, NEW)
                times[name].append(_reused(engine, fresh, length))
        engine.close()
    found = {name: spread(values) for name, values in times.items()}
    ratios = {f"cold_over_{name}": round(found["cold"]["median"] / found[name]["median"], 1)
              for name in times if name != "cold"}
    record("cache", {"task": "resume", "unit": "s to the first token", "model": llm.runtime.name, "dtype": "bfloat16",
                     "threads": llm.runtime.threads,
                     "prompt_tokens": length, "new_tokens": NEW, **found, **ratios,
                     "note": "disk: a new cache over the same directory, model load excluded; disk_uncached: the "
                             "files were dropped from the operating system's page cache before"})


def _engine(llm: LLM, directory: Path | None, reuse: bool = True) -> Engine:
    """An engine over the same pools with an empty cache, as after a restart."""
    assert isinstance(llm.runtime, ModelRunner)
    pools = llm.runtime.pools
    tiers = [TierIndex(DiskStore(directory, "bench", 20 << 30), threads=True)] if directory else []
    cache = HybridCache(pools, reuse, tiers)
    return Engine(replace(llm.runtime, cache=cache))


def _reused(engine: Engine, prompt: list[int], at_least: int) -> float:
    seconds, _, cached = _first_token(engine, prompt)
    assert cached >= at_least, f"only {cached} tokens were reused"
    return seconds


def _first_token(engine: Engine, prompt: list[int]) -> tuple[float, list[int], int]:
    """Seconds to the first token, the answer, and the tokens that were reused."""
    boundary = len(prompt) - 4
    engine.add(EngineRequest("r", tuple(prompt), SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True),
                       (64, boundary)))
    began, first, answer, cached = time.perf_counter(), 0.0, [], 0
    while engine.has_work:
        for event in engine.step():
            first = first or time.perf_counter() - began
            answer.append(event.token or 0)
            cached = event.usage.cached_tokens if event.usage else cached
    return first, answer, cached


def _drop_from_page_cache(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def _tokens(llm: LLM, draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(llm.runtime.config.vocab_size) for _ in range(count)]


# What it costs


def _cost(llm: LLM, args: argparse.Namespace) -> None:
    """Requests that share nothing, with and without the cache: time inside the cache's methods over the whole time,
    and the whole times against each other."""
    length, draw = (128 if args.quick else 512), random.Random(1)
    with tempfile.TemporaryDirectory() as directory:
        engines = {"off": _engine(llm, None, reuse=False), "on": _engine(llm, None),
                   "with_disk": _engine(llm, Path(directory))}
        whole: dict[str, list[float]] = {name: [] for name in engines}
        inside: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(args.repeat + 1):
            for name, engine in engines.items():
                with _timed(engine.runtime.cache) as spent:
                    began = time.perf_counter()
                    _first_token(engine, _tokens(llm, draw, length))
                    if turn:
                        whole[name].append(time.perf_counter() - began)
                        inside[name].append(sum(spent))
        engines["with_disk"].close()
    shares = {f"share_{name}": spread([cost / total for cost, total in zip(inside[name], whole[name], strict=True)])
              for name in engines}
    for name in ("on", "with_disk"):
        pairs = zip(whole[name], whole["off"], strict=True)
        shares[f"ratio_{name}"] = spread([kept / plain for kept, plain in pairs])
    record("cache", {"task": "cost", "model": llm.runtime.name, "dtype": "bfloat16",
                     "threads": llm.runtime.threads, "prompt_tokens": length,
                     "new_tokens": ANSWER, "methods": METHODS, **{f"seconds_{name}": spread(whole[name])
                                                                  for name in engines}, **shares})


@contextmanager
def _timed(cache: HybridCache) -> Iterator[list[float]]:
    """Seconds of each outermost call of the cache's methods, and of carrying out what they queue."""
    spent: list[float] = []
    inside = [False]

    def timer(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if inside[0]:
                return method(*args, **kwargs)
            inside[0], began = True, time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                spent.append(time.perf_counter() - began)
                inside[0] = False
        return call

    with ExitStack() as patches:
        for owner, name in (*((cache, name) for name in METHODS), (CachePools, "apply")):
            patches.enter_context(patch.object(owner, name, timer(getattr(owner, name))))
        yield spent


# How long a look takes


def _match(llm: LLM, args: argparse.Namespace) -> None:
    """A prompt of 100,000 tokens against 1,000 conversations under one system prompt, in the tree and in a tier."""
    draw, tokens = random.Random(2), (5_000 if args.quick else 100_000)
    opening = _tokens(llm, draw, 50 * PAGE)
    prompt = [*opening, *_tokens(llm, draw, tokens - len(opening))]
    tree = PrefixTree(BlockPool("page", 200_000), BlockPool("slot", 5_000), 1500.0)
    tier = TierIndex(HostStore(1 << 40), threads=False)
    for number in range(1000):
        conversation = [*opening, *_tokens(llm, draw, 1500 + number)]
        if number % 10 == 0:
            conversation = prompt[:3000 + 97 * number]
        for end in (len(opening), len(conversation) - 700, len(conversation)):
            _keep(tree, conversation[:end])
            tier.offer(PrefixSource(conversation[:end], lambda _: {}, dict))
    found = {"tree": tree.match(prompt).checkpoint, "tier": tier.find(prompt)}
    times: dict[str, list[float]] = {"tree": [], "tier": []}
    for _ in range(20):
        for name, look in (("tree", tree.match), ("tier", tier.find)):
            began = time.perf_counter()
            look(prompt)
            times[name].append((time.perf_counter() - began) * 1e3)
    record("cache", {"task": "match", "unit": "ms", "prompt_tokens": tokens, "conversations": 1000,
                     "checkpoints": len(tree), "entries": tier.prefixes,
                     "matched": {name: entry.done for name, entry in found.items() if entry},
                     **{name: spread(values) for name, values in times.items()}})


def _keep(tree: PrefixTree, tokens: list[int]) -> None:
    pages = tree._pages.take(-(-len(tokens) // PAGE))
    slot = tree._slots.take()
    assert pages and slot
    full = len(tokens) // PAGE
    tree.insert(tokens, pages, slot[0], pages[full] if len(tokens) % PAGE else None)
    tree._pages.release(pages[:full])


if __name__ == "__main__":
    main()
