"""deltic beside llama.cpp, ik_llama.cpp and OpenVINO GenAI on a CPU: the same models and threads, in turns.

    python bench/random_gguf.py --type Q4_K_M q4.gguf
    python bench/cpu_peers.py q4.gguf --llama-bench PATH --llama-batched-bench PATH      # 5 repetitions
    python bench/cpu_peers.py q4.gguf --llama-bench PATH --only decode --quick           # does it work at all

Nothing is built or fetched here: programs that are not named are left out. One line per file and task:

decode    64 tokens behind a prompt of 128, the prompt not counted; then 8 sequences with prompts of their own, 64
          tokens each: tokens of all sequences together
prefill   a prompt of 512 tokens, and one of 2,048
          --long replaces all tasks by a prompt of 8,192 tokens and by 64 tokens after it; a round takes minutes
start     seconds from the start of the process until a prompt of one token is answered, the file in the page cache

Beside decoding, the rate is measured at which as many threads read memory. With the bytes that a step must move (all
weights once; each sequence's recurrent states, read and written) it gives the limit of which each program has a share.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from common import Answer, Worker, record, spread, work
from programs import Measured, Program, Resident, Task, ik_llama_bench, llama_batched_bench, llama_bench

from deltic.config import available_cores

TASKS = (Task("decode", 128, 64), Task("decode", 128, 64, 8), Task("prefill", 512, 1), Task("prefill", 2048, 1),
         Task("start", 1, 1))
LONG = (Task("prefill", 8192, 1), Task("decode", 8192, 64))
MEMORY = "memory"
"""The program that only reads memory, in GB/s."""
_BUFFER = 1 << 30
_CONTEXT = 8704


def main() -> None:
    args = _arguments()
    if args.worker:
        return work(args.worker, _start)
    for path in args.models:
        model = _model(path)
        for task in LONG if args.long else TASKS:
            if not args.only or task.name in args.only:
                _compare(args, path.resolve(), model, task.small() if args.quick else task)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", metavar="MODEL.gguf", type=Path, nargs="*")
    for name in ("llama", "ik-llama"):
        parser.add_argument(f"--{name}-bench", metavar="PATH", type=Path)
        parser.add_argument(f"--{name}-batched-bench", metavar="PATH", type=Path)
    parser.add_argument("--openvino-python", metavar="PATH", default=sys.executable,
                        help="the Python that has openvino_genai (default: this one)")
    parser.add_argument("--openvino-model", metavar="DIR", type=Path,
                        help="an exported model, which stands beside every MODEL.gguf")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", action="append", choices=sorted({task.name for task in TASKS}))
    parser.add_argument("--long", action="store_true", help="measure one sequence of 8,192 tokens, and nothing else")
    parser.add_argument("--quick", action="store_true", help="small sizes, once: only shows that everything works")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.repeat = 1 if args.quick else args.repeat
    if not args.models and not args.worker:
        parser.error("name at least one MODEL.gguf")
    return args


# One comparison


def _compare(args: argparse.Namespace, path: Path, model: Model, task: Task) -> None:
    """Measure a task with every program that can do it, and record the line."""
    programs = _programs(args, path, task)
    try:
        turns = _alternate(programs, args.repeat)
    finally:
        for program in programs.values():
            program.close()
    values = {name: [turn.value for turn in measured] for name, measured in turns.items()}
    memory = values.pop(MEMORY, None)
    line = {
        "task": task.name, "unit": task.unit, **asdict(task), "threads": args.threads, "model": asdict(model),
        **{name: spread(figures) for name, figures in values.items()},
        "ratios": {name: _ratios(task, values["deltic"], values[name]) for name in values if name != "deltic"},
        **(_shares(model, task, values, memory) if memory else {}),
        "peak_memory_mib": {name: round(max(turn.peak_mib for turn in turns[name]), 1) for name in values},
        "programs": {name: programs[name].facts for name in values}}
    del line["name"]
    record("cpu_peers", line)
    print(_summary(line, list(values)), file=sys.stderr)


def _programs(args: argparse.Namespace, path: Path, task: Task) -> dict[str, Program]:
    """Each under its name. OpenVINO runs one sequence at a time here."""
    settings = {"model": str(path), "threads": args.threads, "batch": task.batch}
    found: dict[str, Program] = {
        "deltic": Resident(partial(Worker, __file__, {**settings, "program": "deltic"}), task)}
    single, more = task.batch == 1, (path, task, args.threads)
    if single and args.llama_bench:
        found["llama.cpp"] = llama_bench(args.llama_bench.resolve(), *more)
    if not single and args.llama_batched_bench:
        found["llama.cpp"] = llama_batched_bench(args.llama_batched_bench.resolve(), *more)
    if single and args.ik_llama_bench:
        found["ik_llama.cpp"] = ik_llama_bench(args.ik_llama_bench.resolve(), *more)
    if not single and args.ik_llama_batched_bench:
        found["ik_llama.cpp"] = llama_batched_bench(args.ik_llama_batched_bench.resolve(), *more, "-rtr")
    if single and args.openvino_model:
        found["openvino"] = Resident(partial(
            Worker, str(Path(__file__).with_name("openvino_worker.py")),
            {**settings, "model": str(args.openvino_model.resolve())}, args.openvino_python), task)
    if task.name == "decode":
        found[MEMORY] = Resident(partial(Worker, __file__, {**settings, "program": MEMORY}), task)
    return found


def _alternate(programs: Mapping[str, Program], repeat: int) -> dict[str, list[Measured]]:
    """One unmeasured round, then `repeat` rounds in which the programs take turns at going first."""
    turns: dict[str, list[Measured]] = {name: [] for name in programs}
    for round in range(repeat + 1):
        for name in sorted(programs, reverse=bool(round % 2)):
            measured = programs[name].measure()
            if round:
                turns[name].append(measured)
    return turns


def _ratios(task: Task, ours: list[float], theirs: list[float]) -> dict[str, float]:
    """How many times as fast as the peer deltic is."""
    if task.unit == "s":
        ours, theirs = theirs, ours
    return {"ratio_of_medians": round(median(ours) / median(theirs), 4),
            "median_of_ratios": round(median(a / b for a, b in zip(ours, theirs, strict=True)), 4)}


def _summary(line: Mapping[str, Any], names: list[str]) -> str:
    """The line for a reader: medians, extremes, ratios."""
    def show(name: str) -> str:
        figures, ratios = line[name], line["ratios"].get(name)
        share = line.get("share_of_limit", {}).get(name)
        return (f"  {name:13} {figures['median']:9.2f} ({figures['min']:.2f} to {figures['max']:.2f}) {line['unit']}, "
                f"{line['peak_memory_mib'][name]:.0f} MiB" + (f", {share:.0%} of the limit" if share else "")
                + (f"; deltic is {ratios['ratio_of_medians']:.2f} times as fast" if ratios else ""))

    title = (f"{line['model']['file']}: {line['task']}, {line['batch']} x {line['prompt_tokens']} + "
             f"{line['new_tokens']} tokens, {line['threads']} threads")
    return "\n".join([title, *map(show, names)])


# The limit


@dataclass(frozen=True, slots=True)
class Model:
    """A file: how many of its tensors are of each type, the bytes of weights that every step reads, those of experts,
    the share of these that a token passes, and the bytes that one sequence's recurrent states are read and written
    with."""

    file: str
    layers: int
    tensors: Mapping[str, int]
    weight_bytes: int
    expert_bytes: int
    passed: float
    state_bytes: int


def _model(path: Path) -> Model:
    """Of a file with a head of its own, the embedding is not counted: a step reads one row of it."""
    from deltic.loader.gguf.config import config_from_gguf
    from deltic.loader.gguf.file import GgufFile

    file = GgufFile.open(path)
    config, tensors = config_from_gguf(file), file.tensors
    looked_up = {"token_embd.weight"} if "output.weight" in tensors else set()
    linear = config.linear
    state = linear.num_value_heads * linear.key_head_dim * linear.value_head_dim * 4 if linear else 0
    types = Counter(tensor.type.name for tensor in tensors.values())
    experts = sum(tensor.nbytes for name, tensor in tensors.items() if name.endswith("_exps.weight"))
    return Model(path.name, config.num_hidden_layers, dict(types),
                 sum(tensor.nbytes for name, tensor in tensors.items() if name not in looked_up) - experts, experts,
                 config.experts.per_token / config.experts.count if config.experts else 0.0,
                 2 * state * len(config.linear_layers))


def _shares(model: Model, task: Task, values: Mapping[str, list[float]], memory: list[float]) -> dict[str, Any]:
    """The limit that memory sets, and what share of it the programs reach. (K/V of so few tokens is left out.) Of
    experts a step reads those that one of its sequences passes, each as likely as any other."""
    met = 1 - (1 - model.passed) ** task.batch
    step_bytes = model.weight_bytes + met * model.expert_bytes + task.batch * model.state_bytes
    limit = task.batch * median(memory) * 1e9 / step_bytes
    return {"memory_read_gb_s": spread(memory), "limit": round(limit, 2),
            "share_of_limit": {name: round(median(figures) / limit, 4) for name, figures in values.items()}}


# Workers


def _start(settings: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    from deltic.cli.output import peak_memory_mib

    facts, measure = {"deltic": _deltic, MEMORY: _memory}[settings["program"]](settings)
    return facts, lambda task: {"value": measure(Task(**task)), "peak_mib": peak_memory_mib()}


def _deltic(settings: dict[str, Any]) -> Any:
    """The prefix cache is off: no prompt comes twice, and the peers keep nothing either."""
    from deltic import LLM, __version__
    from deltic.cli.bench import Case, trial
    from deltic.ops import explain

    started = time.perf_counter()
    llm = LLM(settings["model"], threads=settings["threads"], max_batch=settings["batch"], max_context=_CONTEXT,
              prefix_cache=False)
    load_seconds, seeds = round(time.perf_counter() - started, 3), count()

    def measure(task: Task) -> float | None:
        run = llm.worker.call(
            lambda engine: trial(engine, Case(task.prompt_tokens, task.new_tokens, task.batch), next(seeds)))
        return run.decode_tokens_per_second if task.name == "decode" else run.prefill_tokens_per_second
    return {"version": __version__, "dtype": llm.runtime.config.dtype, "load_seconds": load_seconds,
            "ops": explain(llm.runtime.ops)}, measure


def _memory(settings: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """GB/s of the best of some passes over large pages that no cache holds."""
    import torch

    from deltic.ops.memory import reserve

    torch.set_num_threads(settings["threads"])
    buffer = reserve((_BUFFER // 4,), torch.float32).fill_(1)

    def measure(task: Task) -> float:
        seconds = []
        for _ in range(5):
            started = time.perf_counter()
            buffer.sum()
            seconds.append(time.perf_counter() - started)
        return _BUFFER / min(seconds) / 1e9
    return {}, measure


if __name__ == "__main__":
    main()
