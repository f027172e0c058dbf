"""deltic on MLX and mlx-lm on the same machine and shape, in turns, with random weights.

    python bench/mlx_peers.py                                 # qwen3.5-0.8b in bfloat16
    python bench/mlx_peers.py --bits 4                        # quantized at load: q4_k, and mlx-lm's 4 bits
    python bench/mlx_peers.py --dtype float32 --threads 1     # on a CPU, where MLX has no fast products in bfloat16
    python bench/mlx_peers.py --layers 4 --repeat 1           # a quick look

Tasks: decode of one sequence and of eight, prefill of 2,048 tokens, and the next turn of a conversation of 8,192 tokens
against its full prefill. mlx-lm's prompt cache continues a conversation if the new prompt begins with all earlier
tokens; `edited_turn` drops the last 32 of them, as templates do that leave out earlier reasoning. Needs mlx-lm.
MLX's wheels for CPUs bring the reference BLAS, which is 40 times slower in prompts than a fast one. To replace it,
preload a library with a `cblas_sgemm` of its own.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from itertools import count
from statistics import median
from typing import Any

from common import Answer, Worker, record, spread, work
from peers_transformers import alternate, hf_config

from deltic.config import ModelConfig, available_cores

PROGRAMS = ("deltic", "mlx-lm")
LONG, ANSWER, NEW = 8192, 32, 100
TASKS = ("decode", "decode_of_8", "prefill", "next_turn", "edited_turn")
"""Tokens per second, but for turns: the seconds of the full prompt over those of the turn."""
_QUANT = {16: "none", 8: "q8_0", 4: "q4_k"}
_GROUP = 32
Measure = Callable[[str], float]


def main() -> None:
    args = _arguments()
    if args.worker:
        return work(args.worker, _start)
    settings = {"preset": args.preset, "layers": args.layers, "bits": args.bits, "dtype": args.dtype,
                "threads": args.threads, "device": args.device, "blas": args.blas}
    workers = {name: Worker(__file__, {**settings, "program": name}) for name in PROGRAMS}
    for task in args.tasks:
        rates = alternate(workers, {"task": task}, args.repeat)
        ours, theirs = (rates[name] for name in PROGRAMS)
        record("mlx_peers", {"task": task, **settings, **{name: spread(values) for name, values in rates.items()},
                             "ratio_of_medians": round(median(ours) / median(theirs), 4),
                             "versions": {name: worker.ready["version"] for name, worker in workers.items()}})
    for worker in workers.values():
        worker.close()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="qwen3.5-0.8b")
    parser.add_argument("--layers", type=int, help="keep only the first so many, at least 4, for a quick look")
    parser.add_argument("--bits", type=int, default=16, choices=tuple(_QUANT), help="bits of the matrices")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--device", default="mlx", help="deltic's device; cpu compares its own kernels")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--blas", help="the BLAS library that you preload in place of MLX's own; it is recorded")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def _start(settings: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    version, measure = {"deltic": _deltic, "mlx-lm": _mlx_lm}[settings["program"]](settings)
    return {"version": version}, lambda task: {"rate": measure(task["task"])}


def _prompt(length: int, vocabulary: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(vocabulary) for _ in range(length))


def _deltic(settings: dict[str, Any]) -> tuple[str, Measure]:
    from deltic import LLM, RandomModel, __version__
    from deltic.cli.bench import Case, trial
    from deltic.params import EngineRequest, SamplingParams

    llm = LLM(RandomModel(settings["preset"], settings["layers"]), dtype=settings["dtype"], device=settings["device"],
              threads=settings["threads"], max_batch=8, max_context=LONG + 512, quant=_QUANT[settings["bits"]],
              memory="1GiB")
    seeds, cases = count(), {"decode": Case(128, 64), "decode_of_8": Case(128, 64, 8), "prefill": Case(2048, 1)}

    def first_token(engine: Any, prompt: tuple[int, ...], tokens: int) -> tuple[float, list[int]]:
        began, first, found = time.perf_counter(), 0.0, list[int]()
        engine.add(EngineRequest(f"turn {next(seeds)}", prompt, SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True)))
        while engine.has_work:
            for event in engine.step():
                first = first or time.perf_counter() - began
                found += [] if event.token is None else [event.token]
        return first, found

    def turn(engine: Any, dropped: int) -> float:
        vocabulary = engine.runtime.config.vocab_size
        prompt = _prompt(LONG, vocabulary, next(seeds))
        whole, answer = first_token(engine, prompt, ANSWER)
        before = (*prompt, *answer)
        again = (*before[:len(before) - dropped], *_prompt(NEW, vocabulary, next(seeds)))
        return whole / first_token(engine, again, 1)[0]

    def measure(task: str) -> float:
        if task in cases:
            found = llm.worker.call(lambda engine: trial(engine, cases[task], next(seeds)))
            rate = found.prefill_tokens_per_second if task == "prefill" else found.decode_tokens_per_second
            assert rate is not None
            return rate
        return float(llm.worker.call(lambda engine: turn(engine, ANSWER if task == "edited_turn" else 0)))

    return __version__, measure


def _mlx_lm(settings: dict[str, Any]) -> tuple[str, Measure]:
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm import __version__
    from mlx_lm.generate import BatchGenerator, generate_step
    from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache
    from mlx_lm.models.qwen3_5 import TextModel, TextModelArgs

    config = ModelConfig.preset(settings["preset"], settings["layers"])
    model = TextModel(TextModelArgs.from_dict(hf_config(config).to_dict()))
    model.set_dtype(getattr(mx, settings["dtype"]))
    if settings["bits"] < 16:
        nn.quantize(model, _GROUP, settings["bits"])
    mx.eval(model.parameters())
    seeds = count()

    def prompt(length: int) -> list[int]:
        return list(_prompt(length, config.vocab_size, next(seeds)))

    def generated(tokens: list[int], most: int, cache: Any = None) -> tuple[float, float, list[int]]:
        """Seconds until the first token, and from there to the last one."""
        began, first, found = time.perf_counter(), 0.0, list[int]()
        for token, _ in generate_step(mx.array(tokens), model, max_tokens=most, prompt_cache=cache):
            found.append(int(token))
            first = first or time.perf_counter() - began
        return first, time.perf_counter() - began - first, found

    def batch() -> float:
        generator = BatchGenerator(model, max_tokens=64)
        generator.insert([prompt(128) for _ in range(8)])
        times = list[float]()
        while len(times) < 63:
            if len(generator.next()[1]) == 8:
                times.append(time.perf_counter())
        generator.close()
        return 8 * (len(times) - 1) / (times[-1] - times[0])

    def turn(dropped: int) -> float:
        cache, before = make_prompt_cache(model), prompt(LONG)
        whole, _, answer = generated(before, ANSWER, cache)
        again = [answer[-1], *prompt(NEW)]  # the cache lacks the last token, which was drawn but not read
        if dropped:
            assert not can_trim_prompt_cache(cache), "recurrent states cannot be trimmed"
            cache, again = make_prompt_cache(model), [*before, *answer[:len(answer) - dropped], *again[1:]]
        return whole / generated(again, 1, cache)[0]

    def measure(task: str) -> float:
        if task == "decode":
            return 63 / generated(prompt(128), 64)[1]
        if task == "decode_of_8":
            return batch()
        if task == "prefill":
            return 2048 / generated(prompt(2048), 1)[0]
        return turn(ANSWER if task == "edited_turn" else 0)

    return __version__, measure


if __name__ == "__main__":
    main()
