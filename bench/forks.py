"""Eight branches of a conversation of 100,000 tokens: milliseconds and bytes, random qwen3.5-0.8b in bfloat16.

    python bench/forks.py           # about a minute
    python bench/forks.py --quick   # does it work at all

The conversation is not prefilled: its tokens are committed over zeroed K/V, in the very pages and slot that a prefill
fills. A branch costs the same whatever the K/V holds. Times are processor time: `fork` of the call, `copy` of copying
states and last pages, which comes before the next step of any branch. `ids` is what every request costs before it is
admitted: its token ids are checked and copied.
"""

from __future__ import annotations

import argparse
import time
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

from common import record, spread

from deltic import RandomModel, Session
from deltic.cache.manager import HybridCache
from deltic.engine.admission import keys_of
from deltic.params import PAGE, EngineRequest

_UNIT = "ms of processor time"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes: only shows that everything works")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--branches", type=int, default=8)
    args = parser.parse_args()
    tokens = 5_001 if args.quick else 100_001  # the last page is not full, so that each branch copies it
    session = Session(RandomModel("qwen3.5-0.8b", layers=4 if args.quick else None), "bfloat16", max_batch=12,
                      max_context=131_072, memory="3GiB")
    cache, trunk = session.runtime.cache, session._cache
    assert cache.reserve(trunk, tokens) == tokens
    for pool in cache.pools.shards[0].page_tensors:  # type: ignore[attr-defined]
        pool[:, trunk.pages] = 0
    trunk.keys.extend(place % session.vocab_size for place in range(tokens))
    cache.commit(trunk, tokens)
    session.step(1)
    _measure("session", cache, tokens, lambda count: lambda: session.fork(count), lambda fork: fork.__exit__(), args)
    kept, = cache.accounts.forks(trunk, 1)
    cache.release(kept, keep=True)
    _measure("requests", cache, tokens, partial(_prompts, cache, trunk.prefix(trunk.done)), cache.release, args)
    request, times = EngineRequest("", tuple(trunk.keys)), list[float]()
    for _ in range(args.repeat):
        began = time.thread_time()
        for _ in range(args.branches):
            keys_of(request, session.vocab_size, session.max_context, False).tolist()
        times.append(1e3 * (time.thread_time() - began))
    record("forks", {"task": "ids", "unit": _UNIT, "tokens": tokens, "branches": args.branches, "ids": spread(times)})


def _prompts(cache: HybridCache, keys: array[int], count: int) -> Callable[[], list[Any]]:
    """What requests with `fork_from` cost in the cache: prompts that continue a kept conversation are found in the
    prefix tree and admitted."""
    prompts = [keys + array("q", [place]) for place in range(count)]
    lists = [prompt.tolist() for prompt in prompts]
    return lambda: [cache.admit(prompt, keys=own) for prompt, own in zip(prompts, lists, strict=True)]


def _measure(name: str, cache: HybridCache, tokens: int, prepare: Callable[[int], Callable[[], list[Any]]],
             close: Callable[[Any], object], args: argparse.Namespace) -> None:
    """prepare: returns the function that makes so many branches. close: of a branch."""
    sizes, forking, copying, taken = cache.sizes, list[float](), list[float](), set[tuple[int, int]]()
    for _ in range(args.repeat):
        cache.operations.flush()
        fork, before = prepare(args.branches), (cache.pages.used, cache.slots.used)
        began = time.thread_time()
        forks = fork()
        forking.append(1e3 * (time.thread_time() - began))
        taken.add((cache.pages.used - before[0], cache.slots.used - before[1]))
        began = time.thread_time()
        cache.operations.flush()
        copying.append(1e3 * (time.thread_time() - began))
        cache.check()
        for each in forks:
            assert each is not None
            close(each)
        del fork, forks, each  # freeing millions of keys is not a part of the next ones
    (pages, slots), = taken
    page_bytes = PAGE * sizes.token_bytes
    record("forks", {"task": name, "unit": _UNIT, "tokens": tokens, "branches": args.branches, "fork": spread(forking),
                     "copy": spread(copying), "states": slots, "pages": pages,
                     "bytes_per_branch": (slots * sizes.slot_bytes + pages * page_bytes) // args.branches,
                     "bytes_of_the_conversation": sizes.slot_bytes + -(-tokens // PAGE) * page_bytes})


if __name__ == "__main__":
    main()
