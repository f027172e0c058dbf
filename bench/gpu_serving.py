"""deltic serve on an NVIDIA GPU, with random weights of true shapes: how long it takes to be ready, and how much of the
engine's own speed is left over HTTP when requests come as they like.

    python bench/gpu_serving.py start --model qwen3.5-4b      # twice: with nothing compiled yet, and again
    python bench/gpu_serving.py poisson --requests 1000
    python bench/gpu_serving.py loop --clients 64 --requests 400 --prompt 512 --new 128
    python bench/gpu_serving.py loop --clients 64 --requests 64 --prompt 512 --new 128      # all at once
    python bench/gpu_serving.py poisson --device cpu --layers 4 --requests 20 --offline 8 --prompt 64 --new 16 --batch 4
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from common import environment, port_of, record
from http_load import Reply, percentile, post

if TYPE_CHECKING:
    from deltic.engine.engine import Engine
    from deltic.params import Event

SHARE = 0.9
"""Of the requests that the engine can answer in a second, so many come."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("start", "poisson", "loop"))
    parser.add_argument("--model", default="qwen3.5-4b")
    parser.add_argument("--device", default="cuda", help="cpu only shows that everything works")
    parser.add_argument("--layers", type=int, help="of the model; default: all")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=64, help="of a loop, each with one request at a time")
    parser.add_argument("--offline", type=int, default=256, help="requests that the engine answers alone")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--directory", type=Path, help="where the model to start with is kept, or lies already")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        _serve(args)
    elif args.task == "start":
        _start(args)
    else:
        _poisson(args)


# Start


def _start(args: argparse.Namespace) -> None:
    """From the process's start to its line that says it is ready; and a prompt of 3,000 tokens, the first request and
    the tenth."""
    with tempfile.TemporaryDirectory() as directory:
        model, cache = args.directory or Path(directory) / "model", Path(directory) / "cache"
        if not model.exists():
            subprocess.run([sys.executable, "-c", _MAKE, args.model, str(model), args.device, str(args.layers or 0)],
                           check=True, env=environment())
        runs = [_ready(args, model, cache) for _ in range(2)]
    record("gpu", {"task": "start", "model": args.model, "batch": args.batch,
                   **{f"{name}_s": [run[name] for run in runs] for name in runs[0]}})


_MAKE = """
import json, shutil, sys
from pathlib import Path
from safetensors.torch import save_file
from deltic.config import ModelConfig
from deltic.loader.hub import resolve
from deltic.loader.dummy import random_tensors
target, device = Path(sys.argv[2]), sys.argv[3]
config = ModelConfig.preset(sys.argv[1], int(sys.argv[4]) or None)
shutil.copytree(resolve(None), target, ignore=shutil.ignore_patterns("*.safetensors"))
file = target / "config.json"
linear, rope = config.linear, config.rope
known = json.loads(file.read_text()) | {
    "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size, "head_dim": config.head_dim,
    "layer_types": list(config.layer_types), "num_hidden_layers": config.num_hidden_layers,
    "num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads,
    "linear_key_head_dim": linear.key_head_dim, "linear_value_head_dim": linear.value_head_dim,
    "linear_num_key_heads": linear.num_key_heads, "linear_num_value_heads": linear.num_value_heads,
    "vocab_size": config.vocab_size, "tie_word_embeddings": config.tie_word_embeddings, "mtp_num_hidden_layers": 0}
known["rope_parameters"]["mrope_section"] = list(rope.mrope_section or known["rope_parameters"]["mrope_section"])
file.write_text(json.dumps(known))
assert ModelConfig.from_hf(known).parameter_count == config.parameter_count
save_file({name: tensor.cpu() for name, tensor in random_tensors(config, "bfloat16", device=device)},
          target / "model.safetensors")
"""


def _ready(args: argparse.Namespace, model: Path, cache: Path) -> dict[str, float]:
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "deltic", "serve", str(model), "--port", "0", "--device", args.device, "--max-batch",
         str(args.batch)], stdout=subprocess.PIPE, text=True, env={**environment(), "XDG_CACHE_HOME": str(cache)})
    try:
        port, ready = port_of(process), time.perf_counter() - began
        compiled = _files(cache)
        lengths = (*[3000] * 10, 10, 900)
        replies = [asyncio.run(post(port, "/v1/completions", {
            "prompt": [(7 * token + index) % 3000 for token in range(length)], "max_tokens": 1, "ignore_eos": True,
            "temperature": 0})) for index, length in enumerate(lengths)]
        assert all(reply.done for reply in replies), replies
        assert _files(cache) == compiled, "something was compiled after the server was ready"
        return {"ready": round(ready, 2), "first_prompt": round(replies[0].total, 4),
                "tenth_prompt": round(replies[9].total, 4)}
    finally:
        process.terminate()
        process.wait(60)


def _files(cache: Path) -> list[str]:
    return sorted(str(path) for path in cache.rglob("*.cubin"))


# Requests as they come


def _poisson(args: argparse.Namespace) -> None:
    command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--serve"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    try:
        assert process.stdout
        line = process.stdout.readline()
        if not line:
            raise SystemExit("the server ended before it was ready; what it said stands above")
        offline = json.loads(line)
        print(f"alone: {offline}", file=sys.stderr, flush=True)
        port = port_of(process)
        if args.task == "loop":
            found = asyncio.run(_loop(args, port))
        else:
            found = asyncio.run(_requests(args, port, SHARE * offline["requests_per_second"]))
        process.terminate()
        found["steps"] = json.loads(process.stdout.readlines()[-1])
    finally:
        process.terminate()
        process.wait(60)
    share = found["tokens_per_second"] / offline["tokens_per_second"]
    task = "loop" if args.task == "loop" else "serving"
    record("gpu", {"task": task, "model": args.model, "batch": args.batch, "requests": args.requests,
                   "prompt": args.prompt, "new": args.new, "offline": offline, "http": found,
                   "share": round(share, 3)})


async def _requests(args: argparse.Namespace, port: int, rate: float) -> dict[str, Any]:
    """What came in the middle four fifths of the time in which requests are sent."""
    draw, began = random.Random(1), time.perf_counter()
    jobs, ends = list[asyncio.Task[Reply]](), list[float]()

    async def one(index: int) -> Reply:
        reply = await _complete(args, port, index)
        ends.append(time.perf_counter() - began)
        if len(ends) % max(args.requests // 10, 1) == 0:
            print(f"{len(ends)} of {args.requests} answered after {ends[-1]:.0f} s", file=sys.stderr, flush=True)
        return reply

    due = 0.0
    for index in range(args.requests):
        due += draw.expovariate(rate)
        await asyncio.sleep(max(0.0, due - (time.perf_counter() - began)))
        jobs.append(asyncio.create_task(one(index)))
    replies = await asyncio.gather(*jobs)
    assert all(reply.done for reply in replies), next(reply for reply in replies if not reply.done)
    first, last = 0.1 * due, 0.9 * due
    answered = sum(first <= end < last for end in ends)
    return {"tokens_per_second": round(answered * args.new / (last - first), 1), "requests_per_second": round(rate, 2),
            "seconds": round(due, 1), **_times(replies)}


async def _loop(args: argparse.Namespace, port: int) -> dict[str, Any]:
    """Clients that send their next request when they have an answer. tokens_per_second counts answers, all_per_second
    prompts, too."""
    indices, began, replies = iter(range(args.requests)), time.perf_counter(), list[Reply]()

    async def client() -> None:
        for index in indices:
            replies.append(await _complete(args, port, index))

    await asyncio.gather(*[client() for _ in range(args.clients)])
    seconds = time.perf_counter() - began
    assert all(reply.done for reply in replies), next(reply for reply in replies if not reply.done)
    return {"clients": args.clients, "seconds": round(seconds, 2),
            "tokens_per_second": round(args.requests * args.new / seconds, 1),
            "all_per_second": round(args.requests * (args.prompt + args.new) / seconds, 1), **_times(replies)}


async def _complete(args: argparse.Namespace, port: int, index: int) -> Reply:
    body = {"prompt": _prompt(args, index), "max_tokens": args.new, "ignore_eos": True, "stream": True,
            "temperature": 0, "max_repeat": 0}
    return await post(port, "/v1/completions", body, 300.0)


def _times(replies: list[Reply]) -> dict[str, dict[float, float]]:
    return {f"{name}_ms": {share: percentile([getattr(reply, name) for reply in replies], share)
                           for share in (0.5, 0.99, 1.0)} for name in ("first", "gap", "total")}


def _prompt(args: argparse.Namespace, index: int) -> list[int]:
    draw = random.Random(index)
    return [draw.randrange(3000) for _ in range(args.prompt)]


# In the server's process


def _serve(args: argparse.Namespace) -> None:
    import deltic.server.app as app_module
    from deltic import LLM, RandomModel
    from deltic.loader.hub import resolve
    from deltic.params import EngineRequest, SamplingParams

    options = {"max_batch": args.batch, "max_context": 2048}
    llm = LLM(RandomModel(args.model, args.layers), device=args.device, dtype="bfloat16", speculate="off", **options)
    words = LLM(max_context=2048, device="cpu").chat_processor
    for token in range(llm.runtime.config.vocab_size):
        if not words.tokenizer.token_bytes(token):
            words.tokenizer._bytes[token] = f" w{token}".encode()
    llm._chat_processor, llm.runtime.path = words, resolve(None)
    params = SamplingParams(temperature=0, max_tokens=args.new, ignore_eos=True, max_repeat=0)
    llm.warm_up()
    with llm.worker.hold() as engine:
        for first, count in ((1 << 20, args.batch), (1 << 21, args.offline)):  # the first ones warm up
            for index in range(count):
                engine.add(EngineRequest(str(index), tuple(_prompt(args, first + index)), params))
            began = time.perf_counter()
            while engine.has_work:
                failed = [event.error for event in engine.step() if event.error]
                assert not failed, failed[0]
            seconds = time.perf_counter() - began
        engine.runtime.cache.clear()  # the server warms up once more, in pages that nobody may have
    print(json.dumps({"requests_per_second": round(args.offline / seconds, 2), "requests": args.offline,
                      "tokens_per_second": round(args.offline * args.new / seconds, 1)}), flush=True)
    steps = _Steps(llm.engine)
    app_module.serve(llm, port=0)
    print(json.dumps(steps.report()), flush=True)


class _Steps:
    """How long the engine's steps take: those in which no prompt is read, and of these apart such as launch one behind
    them in which some is."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._step = engine, engine.step
        self._times: dict[str, list[float]] = {"decode": [], "before_prompts": [], "with_prompts": []}
        engine.step = self._timed  # type: ignore[method-assign]

    def _timed(self) -> list[Event]:
        began, read = time.perf_counter(), self._engine.stats.prompt_tokens
        events = self._step()
        following = self._engine._flight
        if self._engine.stats.prompt_tokens > read:
            kind = "with_prompts"
        else:
            kind = "before_prompts" if following and any(row.drawn is None for row in following.plan.rows) else "decode"
        if events:
            self._times[kind].append(time.perf_counter() - began)
        return events

    def report(self) -> dict[str, Any]:
        usual = median(self._times["decode"])
        found = {kind: {"steps": len(times), "median_ms": round(median(times) * 1e3, 3),
                        "longest_ms": round(max(times) * 1e3, 3)} for kind, times in self._times.items() if times}
        return {**found, "later_than_three_medians": sum(time > 3 * usual for time in self._times["decode"])}


if __name__ == "__main__":
    main()
