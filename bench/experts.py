"""A mixture of experts with memory for a part of its experts: does decoding reach what hits, misses and the disk allow?

    python bench/experts.py --make OUT.gguf --layers 8       # 4.5 GiB: the 35B-A3B's shape in Q4_K_M
    python bench/experts.py OUT.gguf                         # a quarter of the experts in memory
    python bench/experts.py OUT.gguf --share 0.5 --predict

The file's routing has the skew of real models. Router row e is log(1 / rank of e) along a direction that is the same in
all tokens, in each layer by another order of ranks, plus noise: experts are drawn about as by Zipf's law, exponent 1.
Half of the variance of embeddings is their topic's, of 16, and a text stays with a topic for 48 tokens: who is popular
moves with the text. `shares` says what came out: the part of all that was wanted which fell to the most frequent 1 %,
10 %, 25 % and 50 % of a layer's experts.

Experts are read with O_DIRECT, so that the page cache has no part in it; the rate of the disk is measured in the same
run, by reading experts at random with as many threads. From a run with all experts in memory (`all`) and the bytes that
the other one (`few`) has read follows what is possible: seconds of computing and of reading one after the other
(`allowed`), or at the same time (`overlapped`), which no program can do that learns what to read as it computes.
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
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import Answer, Worker, record, spread, work
from random_gguf import _tokenizer

from deltic.config import GenerationDefaults, ModelConfig, available_cores
from deltic.weights.gguf.blocks import Bytes
from deltic.weights.gguf.convert import FILE_TYPES, target_of
from deltic.weights.gguf.metadata import config_to_gguf, generation_to_gguf, tokenizer_to_gguf
from deltic.weights.gguf.quantize import quantize
from deltic.weights.gguf.write import NewTensor, write_gguf
from deltic.weights.names import expected_tensors

TOPICS, STAYS, WORDS = 16, 48, 4096
COMMON, SPREAD = 12.0, 4.0
"""What all embeddings have in their first column, and the spread of the others."""
NOISE = 2.05
"""Of a router's logits. Drawing with Gumbel noise would be by Zipf's law; with normal noise of this spread the more
frequent quarter of 256 experts has the same part of what eight draws want, 74 %."""
PIECES = 256
"""Rows that are quantized; they come again and again."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL.gguf", type=Path, nargs="?")
    parser.add_argument("--make", metavar="OUT.gguf", type=Path, help="write such a file")
    parser.add_argument("--preset", default="qwen3.5-35b-a3b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--type", choices=FILE_TYPES, type=str.upper, default="Q4_K_M")
    parser.add_argument("--share", type=float, default=0.25, help="of the experts that there is memory for")
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--tokens", type=int, default=96, help="decoded in a round")
    parser.add_argument("--warm", type=int, default=768, help="tokens before the first round")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--llama-python", metavar="PATH", help="the Python that has llama_cpp")
    parser.add_argument("--llama-cgroup", metavar="DIR", type=Path,
                        help="a memory cgroup (version 1 or 2) with the limit under which llama.cpp's mmap runs")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args.worker, _start)
    if args.make:
        return make(args.make, replace(ModelConfig.preset(args.preset, args.layers), num_mtp_layers=0), args.type)
    if not args.model:
        parser.error("name a MODEL.gguf, or --make one")
    compare(args)


# The file


def make(path: Path, config: ModelConfig, type: str) -> None:
    """Write a file of this shape. Matrices repeat a few random rows, so that writing is quick."""
    rng = np.random.default_rng(0)
    targets = [target_of(name, shape, config, FILE_TYPES[type]) for name, shape in expected_tensors(config).items()]
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


# The comparison


def compare(args: argparse.Namespace) -> None:
    from deltic.weights.gguf.config import config_from_gguf
    from deltic.weights.gguf.file import GgufFile

    file = GgufFile.open(args.model)
    experts = config_from_gguf(file).experts
    assert experts, "a model without experts"
    total = sum(tensor.nbytes for name, tensor in file.tensors.items() if name.endswith("_exps.weight"))
    slots = max(1, int(args.share * experts.count))
    shared = {"model": str(args.model.resolve()), "threads": args.threads, "warm": args.warm, "tokens": args.tokens}
    programs: dict[str, dict[str, Any]] = {
        "all": {"options": {"expert_cap": experts.count}},
        "few": {"options": {"expert_cap": slots, "expert_predict": args.predict}}}
    workers = {name: Worker(__file__, {**shared, "program": "deltic", **more}) for name, more in programs.items()}
    if args.llama_python:
        limit = str(args.llama_cgroup) if args.llama_cgroup else None
        workers["llama.cpp"] = Worker(__file__, {**shared, "program": "llama", "cgroup": limit}, args.llama_python)
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    rates = []
    for turn in range(args.repeat):
        rates.append(disk_rate(args.model, file, total // (experts.count * len(file.tensors))))
        for name, worker in workers.items():
            rounds[name].append(worker.ask({"seed": turn}))
    peaks = {name: worker.ask({"peak": True}) for name, worker in workers.items()}
    for worker in workers.values():
        worker.close()
    record("experts", {
        "model": {"file": args.model.name, "expert_bytes": total, "experts": experts.count}, "threads": args.threads,
        "share": args.share, "slots": slots, "predict": args.predict, "disk_mb_s": spread(rates),
        **figures(rounds, median(rates) * 1e6, args.tokens),
        "memory": {"few": peaks["few"], "all": peaks["all"]}})


def figures(rounds: dict[str, list[dict[str, Any]]], rate: float, tokens: int) -> dict[str, Any]:
    """What was reached, and what could have been."""
    few, everything = rounds["few"], rounds["all"]
    seconds = median(turn["seconds"] for turn in everything)
    reading = median(turn["bytes"] for turn in few) / rate
    reached = median(tokens / turn["seconds"] for turn in few)
    allowed, overlapped = tokens / (seconds + reading), tokens / max(seconds, reading)
    hits, misses = (sum(turn[name] for turn in few) for name in ("hits", "misses"))
    return {
        "tokens_per_second": {name: spread([tokens / turn["seconds"] for turn in turns])
                              for name, turns in rounds.items()},
        "hit_rate": round(hits / (hits + misses), 4), "mib_per_token": round(few[-1]["bytes"] / tokens / 2**20, 2),
        "allowed": round(allowed, 3), "share_of_allowed": round(reached / allowed, 4),
        "overlapped": round(overlapped, 3), "share_of_overlapped": round(reached / overlapped, 4),
        "waited": round(median(turn["waited"] for turn in few), 3),
        "shares": few[-1]["shares"], "same_tokens": all(
            one["best"] == other["best"] for one, other in zip(few, everything, strict=True))}


def disk_rate(path: Path, file: Any, each: int, seconds: float = 1.0) -> float:
    """MB/s of reading pieces of the experts at random, past the page cache, with as many threads as deltic has."""
    from deltic.ops.cpu.experts import READERS

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
    with ThreadPoolExecutor(READERS) as pool:
        done = sum(pool.map(read, range(READERS)))
    os.close(descriptor)
    return done / (time.perf_counter() - started) / 1e6


# Workers


def _start(settings: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    return {"deltic": _deltic, "llama": _llama}[settings["program"]](settings)


def _deltic(settings: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    from deltic import Session
    from deltic.cli.machine import peak_memory_mib
    from deltic.engine.runtime import Runtime

    session = Session(settings["model"], threads=settings["threads"], memory="256MiB", max_context=8192,
                      packed_weights="on", **settings["options"])
    runtime = session.runtime
    assert isinstance(runtime, Runtime) and runtime.experts
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
        return {"seconds": seconds, "bytes": after.bytes - before.bytes, "waited": after.waited - before.waited,
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
    if settings["cgroup"]:
        (Path(settings["cgroup"]) / "cgroup.procs").write_text(str(os.getpid()))
    import llama_cpp  # type: ignore[import-not-found, unused-ignore]

    from deltic.cli.machine import peak_memory_mib

    defaults = llama_cpp.llama_cpp.llama_model_default_params

    def mapped() -> Any:  # weights in another order would be a copy in memory of their own
        params = defaults()
        params.use_extra_bufts = False
        return params

    llama_cpp.llama_cpp.llama_model_default_params = mapped
    model = llama_cpp.Llama(settings["model"], n_ctx=4096, n_threads=settings["threads"], n_batch=64, use_mmap=True,
                            verbose=False)
    words = text(1)
    model.eval([next(words) for _ in range(settings["warm"])])

    def answer(task: dict[str, Any]) -> dict[str, Any]:
        if "peak" in task:
            return {"peak_mib": round(peak_memory_mib(), 1)}
        started = time.perf_counter()
        for _ in range(settings["tokens"]):
            model.eval([next(words)])
        return {"seconds": time.perf_counter() - started}

    return {}, answer


if __name__ == "__main__":
    main()
