"""A mixture of experts with memory for a part of its experts: does decoding reach what hits, misses and the disk allow?

    python bench/experts.py --make OUT.gguf --layers 8       # 4.5 GiB: the 35B-A3B's shape in Q4_K_M
    python bench/experts.py OUT.gguf                         # a quarter of the experts in memory
    python bench/experts.py OUT.gguf --share 0.5 --predict
    python bench/experts.py OUT.gguf --limit 2500MiB --llama-python PATH     # llama.cpp's mmap with as much memory

The file's routing has the skew of real models. Router row e is log(1 / rank of e) along a direction that is the same in
all tokens, in each layer by another order of ranks, plus noise: experts are drawn about as by Zipf's law, exponent 1.
Half of the variance of embeddings is their topic's, of 16, and a text stays with a topic for 48 tokens: who is popular
moves with the text. `shares` says what came out: the part of all that was wanted which fell to the most frequent 1 %,
10 %, 25 % and 50 % of a layer's experts.

Experts are read with O_DIRECT, so that the page cache has no part in it; the rate of the disk is measured in the same
run, by reading experts at random with as many threads. From a run with all experts in memory (`all`) and the bytes that
the other one (`few`) has read follows what is possible: seconds of computing and of reading one after the other
(`allowed`), or at the same time (`overlapped`), which no program can do that learns what to read as it computes.

With `--limit`, deltic with few experts and llama.cpp live in memory cgroups of their own which may have so much each,
the page cache of what they read included; before llama.cpp starts, the page cache is made to forget the file
(`cached_mib` is what others still hold of it).
"""

from __future__ import annotations

import argparse
import math
import mmap
import os
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from cgroup import forget, join, memory_cgroup
from common import Answer, Worker, record, spread, work
from llama_python import Llama
from random_gguf import _tokenizer

from deltic.config import GenerationDefaults, ModelConfig, available_cores
from deltic.config.machine import parse_bytes
from deltic.loader.gguf.blocks import Bytes
from deltic.loader.gguf.convert import FILE_TYPES, target_of
from deltic.loader.gguf.quantize import quantize
from deltic.loader.gguf.write import NewTensor, config_to_gguf, generation_to_gguf, tokenizer_to_gguf, write_gguf
from deltic.loader.names import expected_head, expected_tensors

TOPICS, STAYS, WORDS = 16, 48, 4096
COMMON, SPREAD = 12.0, 4.0
"""What all embeddings have in their first column, and the spread of the others."""
NOISE = 2.05
"""Of a router's logits. Drawing with Gumbel noise would be by Zipf's law; with normal noise of this spread the more
frequent quarter of 256 experts has the same part of what eight draws want, 74 %."""
PIECE = 64
"""Tokens of a prompt that llama.cpp reads at once, so that it needs little memory for them."""
PIECES = 256
"""Rows that are quantized; they come again and again."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL.gguf", type=Path, nargs="?")
    parser.add_argument("--make", metavar="OUT.gguf", type=Path, help="write such a file")
    parser.add_argument("--preset", default="qwen3.5-35b-a3b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--type", choices=FILE_TYPES, type=str.upper, default="Q4_K_M")
    parser.add_argument("--head", action="store_true", help="with a draft head, as `speculation.py` wants")
    parser.add_argument("--share", type=float, default=0.25, help="of the experts that there is memory for")
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--tokens", type=int, default=96, help="decoded in a round")
    parser.add_argument("--llama-tokens", type=int, default=24, help="the same for llama.cpp, which takes longer")
    parser.add_argument("--warm", type=int, default=768, help="tokens before the first round")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--llama-python", metavar="PATH", help="the Python that has llama_cpp")
    parser.add_argument("--limit", metavar="SIZE", type=parse_bytes,
                        help="memory of deltic with few experts and of llama.cpp's mmap each, such as 2500MiB")
    parser.add_argument("--without-all", action="store_true",
                        help="do not run deltic with all experts in memory, where these do not fit")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args.worker, _start)
    if args.make:
        return make(args.make, replace(ModelConfig.preset(args.preset, args.layers), num_mtp_layers=int(args.head)),
                    args.type)
    if not args.model:
        parser.error("name a MODEL.gguf, or --make one")
    compare(args)


# The file


def make(path: Path, config: ModelConfig, type: str) -> None:
    """Write a file of this shape. Matrices repeat a few random rows, so that writing is quick."""
    rng = np.random.default_rng(0)
    shapes = {**expected_tensors(config), **(expected_head(config) if config.num_mtp_layers else {})}
    targets = [target_of(name, shape, config, FILE_TYPES[type]) for name, shape in shapes.items()]
    metadata = {**config_to_gguf(config), "general.type": "model", "general.name": "experts by Zipf",
                "general.file_type": FILE_TYPES[type].id, "general.quantization_version": 2,
                **generation_to_gguf(GenerationDefaults()), **tokenizer_to_gguf(_tokenizer(), config, ())}
    size = write_gguf(path, metadata, targets, (_data(target, config, rng) for target in targets))
    print(f"{path}: {size / 2**30:.2f} GiB", file=sys.stderr)


def _data(target: NewTensor, config: ModelConfig, rng: np.random.Generator) -> Iterator[Bytes]:
    name, columns = target.name, target.shape[-1]
    rows = math.prod(target.shape) // columns
    if name == "token_embd.weight":
        topics = rng.standard_normal((TOPICS, columns), np.float32)
        found = rng.standard_normal((WORDS, columns), np.float32) + topics[np.arange(WORDS) % TOPICS]
        found *= SPREAD / math.sqrt(2)
        found[:, 0] = COMMON * SPREAD
    elif name.endswith("ffn_gate_inp.weight"):
        found = rng.standard_normal((rows, columns), np.float32) * (NOISE / math.sqrt(columns))
        found[:, 0] = -np.log(1.0 + rng.permutation(rows)) / (COMMON * 0.9)
    elif "norm" in name:
        found = np.ones((1, rows * columns), np.float32)
    elif name.endswith("ssm_a"):
        found = -np.exp(rng.standard_normal((1, columns), np.float32))
    else:
        found = rng.standard_normal((min(rows, PIECES), columns), np.float32) * np.float32(columns**-0.5)
    blocks = quantize(found, target.type) if target.type.weights > 1 or target.type.name != "F32" else found
    raw = np.ascontiguousarray(blocks).view(np.uint8).reshape(len(found), -1)
    for first in range(0, rows, len(raw)):
        yield raw[:min(len(raw), rows - first)].reshape(-1)


def text(seed: int) -> Iterator[int]:
    """Token ids: of a topic for a while, then of another one; within it by Zipf's law too."""
    draw = random.Random(seed)
    words = WORDS // TOPICS
    weights = [1 / (1 + rank) for rank in range(words)]
    while True:
        topic = draw.randrange(TOPICS)
        for word in draw.choices(range(words), weights, k=STAYS):
            yield word * TOPICS + topic


class Said:
    """A guide: the answer is this, whatever the model says."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens, self._next = tokens, 0

    def forced(self) -> int | None:
        return self._tokens[self._next] if self._next < len(self._tokens) else None

    def push(self, token: int) -> None:
        self._next += 1


# The comparison


def compare(args: argparse.Namespace) -> None:
    from deltic.loader.gguf.config import config_from_gguf
    from deltic.loader.gguf.file import GgufFile

    file = GgufFile.open(args.model)
    experts = config_from_gguf(file).experts
    assert experts, "a model without experts"
    total = sum(tensor.nbytes for name, tensor in file.tensors.items() if name.endswith("_exps.weight"))
    slots = max(1, int(args.share * experts.count))
    rounds, rates, peaks, cached = _rounds(args, file, slots, total // (experts.count * len(file.tensors)))
    record("experts", {
        "model": {"file": args.model.name, "expert_bytes": total, "experts": experts.count}, "threads": args.threads,
        "share": args.share, "slots": slots, "predict": args.predict, "disk_mb_s": spread(rates),
        "limit_mib": args.limit and args.limit >> 20, "cached_mib": cached,
        "tokens_per_second": {name: spread([turn["tokens"] / turn["seconds"] for turn in turns])
                              for name, turns in rounds.items()},
        **({"times_as_fast_as_llama": _over(rounds, "llama.cpp")} if "llama.cpp" in rounds else {}),
        **reading(rounds["few"]), **(figures(rounds, median(rates) * 1e6) if "all" in rounds else {}),
        "memory": peaks})


def _rounds(args: argparse.Namespace, file: Any, slots: int, each: int
            ) -> tuple[dict[str, list[dict[str, Any]]], list[float], dict[str, Any], float | None]:
    """What the programs did in turns, the disk's rates, the programs' memory, and what was cached as llama.cpp began.
    each: bytes of a matrix of an expert."""
    shared = {"model": str(args.model.resolve()), "threads": args.threads, "warm": args.warm, "tokens": args.tokens}
    few: dict[str, Any] = {**shared, "program": "deltic",
                           "options": {"expert_cap": slots, "expert_predict": args.predict}}
    cached = None
    with ExitStack() as ends:
        def start(name: str, settings: dict[str, Any], limited: bool, python: str = sys.executable) -> None:
            if limited and args.limit:
                settings = {**settings, "cgroup": str(ends.enter_context(memory_cgroup(name, args.limit)))}
            workers[name] = Worker(__file__, settings, python)
            ends.callback(workers[name].close)

        workers: dict[str, Worker] = {}
        start("few", few, True)
        if not args.without_all:
            start("all", {**few, "options": {"expert_cap": 4096}}, False)
        if args.llama_python:
            cached = round(forget(args.model), 1)
            start("llama.cpp", {**shared, "program": "llama", "llama_tokens": args.llama_tokens}, True,
                  args.llama_python)
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
        rates = []
        for turn in range(args.repeat):
            rates.append(disk_rate(args.model, file, each))
            for name, worker in workers.items():
                rounds[name].append(worker.ask({"seed": turn}))
        return rounds, rates, {name: worker.ask({"peak": True}) for name, worker in workers.items()}, cached


def _over(rounds: dict[str, list[dict[str, Any]]], other: str) -> float:
    """Tokens per second with few experts in memory over those of another program."""
    own, peer = (median(float(turn["tokens"] / turn["seconds"]) for turn in rounds[name]) for name in ("few", other))
    return round(own / peer, 3)


def reading(few: list[dict[str, Any]]) -> dict[str, Any]:
    """How the experts that were wanted were come by."""
    hits, misses = (sum(turn[name] for turn in few) for name in ("hits", "misses"))
    return {"hit_rate": round(hits / (hits + misses), 4),
            "mib_per_token": round(few[-1]["bytes"] / few[-1]["tokens"] / 2**20, 2),
            "waited": round(median(turn["waited"] for turn in few), 3), "shares": few[-1]["shares"]}


def figures(rounds: dict[str, list[dict[str, Any]]], rate: float) -> dict[str, Any]:
    """What could have been reached, and the share of it that was."""
    few, everything = rounds["few"], rounds["all"]
    tokens = few[0]["tokens"]
    seconds = median(turn["seconds"] for turn in everything)
    disk = median(turn["bytes"] for turn in few) / rate
    reached = median(tokens / turn["seconds"] for turn in few)
    allowed, overlapped = tokens / (seconds + disk), tokens / max(seconds, disk)
    return {
        "allowed": round(allowed, 3), "share_of_allowed": round(reached / allowed, 4),
        "overlapped": round(overlapped, 3), "share_of_overlapped": round(reached / overlapped, 4),
        "same_tokens": all(one["best"] == other["best"] for one, other in zip(few, everything, strict=True))}


def disk_rate(path: Path, file: Any, each: int, seconds: float = 1.0) -> float:
    """MB/s of reading pieces of the experts at random, past the page cache, with as many threads as deltic has."""
    from deltic.ops.cpu.experts import READER_THREADS

    size = max(4096, min(each, 1 << 20) // 4096 * 4096)
    stacks = [tensor for name, tensor in file.tensors.items() if name.endswith("_exps.weight")]
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    until, draw = time.perf_counter() + seconds, random.Random(0)

    def read(_: int) -> int:
        done = 0
        with mmap.mmap(-1, size) as buffer:
            while time.perf_counter() < until:
                stack = draw.choice(stacks)
                start = stack.offset + draw.randrange(max(stack.nbytes - size, 1))
                done += os.preadv(descriptor, [buffer], start // 4096 * 4096)
        return done

    started = time.perf_counter()
    with ThreadPoolExecutor(READER_THREADS) as pool:
        done = sum(pool.map(read, range(READER_THREADS)))
    os.close(descriptor)
    return done / (time.perf_counter() - started) / 1e6


# Workers


def _start(settings: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    if "cgroup" in settings:
        join(settings["cgroup"])
    return {"deltic": _deltic, "llama": _llama}[settings["program"]](settings)


def _deltic(settings: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    from deltic import Session
    from deltic.cli.output import peak_memory_mib
    from deltic.runner.model_runner import ModelRunner

    session = Session(settings["model"], threads=settings["threads"], memory="256MiB", max_context=8192,
                      packed_weights="on", **settings["options"])
    runtime = session.runtime
    assert isinstance(runtime, ModelRunner) and runtime.experts
    experts = runtime.experts
    words = text(1)
    session.prefill([next(words) for _ in range(settings["warm"])])
    kept = runtime.decoder.weight_bytes()

    def answer(task: dict[str, Any]) -> dict[str, Any]:
        if "peak" in task:
            peak = peak_memory_mib()
            budget = (kept + experts.store.nbytes + (256 << 20)) / 2**20
            return {"peak_mib": round(peak, 1), "experts_mib": round(experts.store.nbytes / 2**20, 1),
                    "beyond_weights_cache_and_experts_mib": round(peak - budget, 1)}
        before, best = experts.statistics(), []
        started = time.perf_counter()
        for _ in range(settings["tokens"]):
            best.append(int(session.step(next(words)).argmax()))
        seconds, after = time.perf_counter() - started, experts.statistics()
        return {"seconds": seconds, "tokens": settings["tokens"], "bytes": after.bytes - before.bytes,
                "waited": after.waited - before.waited,
                "hits": sum(after.hits) - sum(before.hits), "misses": sum(after.misses) - sum(before.misses),
                "best": best, "shares": _shares(experts.store.scores())}

    return {}, answer


def _shares(scores: list[list[float]]) -> dict[str, float]:
    """Of what was wanted lately, the part of the most frequent experts, the median of the layers."""
    def part(layer: list[float], share: float) -> float:
        return sum(sorted(layer, reverse=True)[:max(1, round(share * len(layer)))]) / sum(layer)

    return {f"{share:.0%}": round(median(part(layer, share) for layer in scores), 3)
            for share in (0.01, 0.1, 0.25, 0.5)}


def _llama(settings: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    from deltic.cli.output import peak_memory_mib

    model = Llama(settings["model"], settings["threads"], 1, 4096, PIECE, mapped=True)
    words = text(1)
    for _ in range(0, settings["warm"], PIECE):
        model.feed([list(islice(words, PIECE))])

    def answer(task: dict[str, Any]) -> dict[str, Any]:
        if "peak" in task:
            return {"peak_mib": round(peak_memory_mib(), 1)}
        tokens, started = settings["llama_tokens"], time.perf_counter()
        for _ in range(tokens):
            model.feed([[next(words)]])
        return {"seconds": time.perf_counter() - started, "tokens": tokens}

    return {}, answer


if __name__ == "__main__":
    main()
