"""deltic and transformers on the same machine, shape, dtype and threads, in turns, with random weights.

    python bench/peers_transformers.py                        # qwen3.5-0.8b, 5 repetitions
    python bench/peers_transformers.py --layers 4 --repeat 2  # a quick look

Each program lives in its own process and computes only while the other one waits. transformers runs a bare loop of
forward calls, without the costs of `generate`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from itertools import count
from statistics import median
from typing import Any

from common import Answer, Worker, record, spread, work

from deltic.config import ModelConfig, available_cores

PROGRAMS = ("deltic", "transformers")
TASKS = {"decode": {"prompt_tokens": 128, "new_tokens": 64}, "prefill": {"prompt_tokens": 512, "new_tokens": 1}}


def main() -> None:
    args = _arguments()
    if args.worker:
        return work(args.worker, _start)
    settings = {"preset": args.preset, "layers": args.layers, "dtype": args.dtype, "threads": args.threads}
    workers = {name: Worker(__file__, {**settings, "program": name}) for name in PROGRAMS}
    for task, sizes in TASKS.items():
        sizes = {"prompt_tokens": args.prompt_tokens or sizes["prompt_tokens"],
                 "new_tokens": min(sizes["new_tokens"], args.new_tokens)}
        rates = alternate(workers, {"task": task, **sizes}, args.repeat)
        record("peers_transformers", {
            "task": task, "unit": "tokens/s", **settings, **sizes, **_compare(rates),
            "peak_memory_mib": {name: worker.ask({"task": "memory"})["mib"] for name, worker in workers.items()},
            "versions": {name: worker.ready["version"] for name, worker in workers.items()}})
    for worker in workers.values():
        worker.close()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="qwen3.5-0.8b")
    parser.add_argument("--layers", type=int,
                        help="keep only the first so many, for a quick look (transformers needs at least 4)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, help="instead of 128 for decode and 512 for prefill")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def alternate(workers: dict[str, Worker], task: dict[str, Any], repeat: int) -> dict[str, list[float]]:
    """One unmeasured round, then `repeat` rounds in which the programs take turns at going first."""
    rates: dict[str, list[float]] = {name: [] for name in workers}
    for round in range(repeat + 1):
        for name in sorted(workers, reverse=bool(round % 2)):
            rate = workers[name].ask(task)["rate"]
            if round:
                rates[name].append(rate)
    return rates


def _compare(rates: dict[str, list[float]]) -> dict[str, Any]:
    ours, theirs = (rates[name] for name in PROGRAMS)
    return {**{name: spread(values) for name, values in rates.items()},
            "ratio_of_medians": round(median(ours) / median(theirs), 4),
            "median_of_ratios": round(median(a / b for a, b in zip(ours, theirs, strict=True)), 4)}


def _start(settings: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    from deltic.cli.output import peak_memory_mib

    version, measure = {"deltic": _deltic, "transformers": _transformers}[settings["program"]](settings)

    def answer(task: dict[str, Any]) -> dict[str, Any]:
        if task["task"] == "memory":
            return {"mib": round(peak_memory_mib(), 1)}
        return {"rate": measure(task["task"], task["prompt_tokens"], task["new_tokens"])}
    return {"version": version}, answer


def _deltic(settings: dict[str, Any]) -> Any:
    from deltic import LLM, RandomModel, __version__
    from deltic.cli.bench import Case, trial

    llm = LLM(RandomModel(settings["preset"], settings["layers"]), dtype=settings["dtype"],
              threads=settings["threads"], max_batch=1, max_context=4096)
    seeds = count()  # no prompt comes twice

    def measure(task: str, prompt_tokens: int, new_tokens: int) -> float | None:
        result = llm.worker.call(lambda engine: trial(engine, Case(prompt_tokens, new_tokens), next(seeds)))
        return result.prefill_tokens_per_second if task == "prefill" else result.decode_tokens_per_second
    return __version__, measure


def _transformers(settings: dict[str, Any]) -> Any:
    import torch
    import transformers

    torch.set_num_threads(settings["threads"])
    config = hf_config(ModelConfig.preset(settings["preset"], settings["layers"]))
    model = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=getattr(torch, settings["dtype"])).eval()

    @torch.inference_mode()
    def measure(task: str, prompt_tokens: int, new_tokens: int) -> float:
        ids = torch.randint(config.vocab_size, (1, prompt_tokens))
        started = time.perf_counter()
        output = model(ids, use_cache=True, logits_to_keep=1)
        token = output.logits[:, -1:].argmax(-1)
        if task == "prefill":
            return prompt_tokens / (time.perf_counter() - started)
        started = time.perf_counter()
        for _ in range(new_tokens - 1):
            output = model(token, past_key_values=output.past_key_values, use_cache=True)
            token = output.logits[:, -1:].argmax(-1)
        return (new_tokens - 1) / (time.perf_counter() - started)
    return transformers.__version__, measure


def hf_config(config: ModelConfig) -> Any:
    from transformers import Qwen3_5TextConfig

    assert config.linear
    linear = {f"linear_{name}": value for name, value in asdict(config.linear).items() if name != "conv_kernel"}
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings")
    rope = {"rope_type": "default", "rope_theta": config.rope.theta, "mrope_interleaved": True,
            "mrope_section": list(config.rope.mrope_section),
            "partial_rotary_factor": config.rope.rotary_dim / config.head_dim}
    return Qwen3_5TextConfig(**{name: getattr(config, name) for name in same}, **linear,
                             linear_conv_kernel_dim=config.linear.conv_kernel, layer_types=list(config.layer_types),
                             rope_parameters=rope)


if __name__ == "__main__":
    main()
