"""A mixture of experts, all of them in memory, beside llama.cpp on a CPU: the same file, tokens and threads, in turns.

    python bench/experts.py --make 16.gguf --layers 16         # 8 GiB: the 35B-A3B's shape in Q4_K_M
    python bench/experts.py --make 4.gguf --layers 4
    python bench/expert_peers.py 16.gguf 4.gguf                # with a Python that has llama-cpp-python

decode    64 tokens behind a prompt of 128, the prompt not counted; then 8 sequences with prompts of their own, 32
          tokens each: tokens of all sequences together
prefill   a prompt of 512 tokens

Both programs are fed the tokens of `experts.text`, whatever they would say themselves, so that the same experts are
wanted. Beside decoding, the rate is measured at which as many threads read memory in large pages. With the bytes that a
token reads (all weights that are no experts, its part of the experts, its recurrent states twice) it gives the limit of
which each program has a share.

Of a second file that differs in layers alone the difference is recorded too: what a layer takes, without the head,
which is most of what a token of a model with few layers reads.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from itertools import count, islice
from pathlib import Path
from statistics import median
from typing import Any

from common import Answer, Worker, record, spread, work
from cpu_peers import MEMORY, Model, _alternate, _memory, _model, _ratios, _shares
from experts import Said, text
from llama_python import Llama
from programs import Program, Resident, Task

from deltic.config import available_cores
from deltic.params import EngineRequest, SamplingParams

TASKS = (Task("decode", 128, 64), Task("decode", 128, 32, 8), Task("prefill", 512, 1))
PROGRAMS = ("deltic", "llama.cpp")
_CONTEXT = 1024
Figures = dict[Task, dict[str, list[float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", metavar="MODEL.gguf", type=Path, nargs="*")
    parser.add_argument("--llama-python", metavar="PATH", default=sys.executable,
                        help="the Python that has llama_cpp (default: this one)")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", action="append", choices=sorted({task.name for task in TASKS}))
    parser.add_argument("--quick", action="store_true", help="small sizes, once: only shows that everything works")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args.worker, _start)
    if not 1 <= len(args.models) <= 2:
        parser.error("name a MODEL.gguf, or two that differ in layers alone")
    tasks = [task.small() if args.quick else task for task in TASKS if not args.only or task.name in args.only]
    models = [_model(path) for path in args.models]
    found = [compare(args, path, model, tasks) for path, model in zip(args.models, models, strict=True)]
    if len(found) == 2:
        difference(args.threads, models, found)


def compare(args: argparse.Namespace, path: Path, model: Model, tasks: list[Task]) -> Figures:
    """All tasks of one file, a line for each."""
    repeat = 1 if args.quick else args.repeat
    shared = {"model": str(path.resolve()), "threads": args.threads}
    workers = {name: Worker(__file__, {**shared, "program": name},
                            args.llama_python if name == "llama.cpp" else sys.executable)
               for name in (*PROGRAMS, MEMORY)}
    found: Figures = {}
    for task in tasks:
        programs: dict[str, Program] = {name: _Turn(worker, task) for name, worker in workers.items()
                                        if name != MEMORY or task.name == "decode"}
        turns = _alternate(programs, repeat)
        values = {name: [turn.value for turn in turns[name]] for name in turns}
        memory = values.pop(MEMORY, None)
        found[task] = values
        record("expert_peers", {
            "task": task.name, "unit": task.unit, "prompt_tokens": task.prompt_tokens, "new_tokens": task.new_tokens,
            "batch": task.batch, "threads": args.threads, "model": asdict(model),
            **{name: spread(figures) for name, figures in values.items()},
            "ratios": _ratios(task, values["deltic"], values["llama.cpp"]),
            **(_shares(model, task, values, memory) if memory and task.batch == 1 else {}),
            "peak_memory_mib": {name: round(max(turn.peak_mib for turn in turns[name]), 1) for name in values},
            "programs": {name: workers[name].ready for name in values}})
    for worker in workers.values():
        worker.close()
    return found


class _Turn:
    """One task of a worker that has others too."""

    def __init__(self, worker: Worker, task: Task) -> None:
        self.facts: Mapping[str, Any] = worker.ready
        self.measure = Resident(lambda: worker, task).measure

    def close(self) -> None:
        pass


def difference(threads: int, models: list[Model], found: list[Figures]) -> None:
    """What a layer takes of the time of a token."""
    layers = models[0].layers - models[1].layers
    for task in found[0]:
        each = {name: [(1 / one - 1 / other) / layers * 1e6 for one, other in
                       zip(found[0][task][name], found[1][task][name], strict=True)] for name in PROGRAMS}
        record("expert_peers", {
            "task": f"{task.name} of a layer", "unit": "us per token", "batch": task.batch, "threads": threads,
            "models": [model.file for model in models], "layers": [model.layers for model in models],
            **{name: spread(values) for name, values in each.items()},
            "ratio_of_medians": round(median(each["llama.cpp"]) / median(each["deltic"]), 4)})


# Workers


def _start(settings: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    from deltic.cli.output import peak_memory_mib

    facts, measure = {"deltic": _deltic, "llama.cpp": _llama, MEMORY: _memory}[settings["program"]](settings)
    return facts, lambda task: {"value": measure(Task(**task)), "peak_mib": peak_memory_mib()}


def _texts(task: Task, seed: int) -> list[list[int]]:
    return [list(islice(text(1000 * seed + number), task.prompt_tokens + task.new_tokens))
            for number in range(task.batch)]


def _deltic(settings: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """The prefix cache is off: no prompt comes twice, and the peer keeps nothing either."""
    from deltic import LLM, __version__
    from deltic.engine.engine import Engine

    llm = LLM(settings["model"], threads=settings["threads"], max_batch=8, max_context=_CONTEXT, memory="512MiB",
              prefix_cache=False, speculate="off", packed_weights="on")
    seeds = count(1)

    def run(engine: Engine, task: Task) -> float:
        requests = [_request(str(number), ids, task) for number, ids in enumerate(_texts(task, next(seeds)))]
        began, steady, tokens, before = time.perf_counter(), None, 0, 0
        first = set[str]()
        for request in requests:
            engine.add(request)
        while engine.has_work:
            events = engine.step()
            tokens += sum(event.token is not None for event in events)
            first |= {event.request for event in events}
            if steady is None and len(first) == task.batch:
                steady, before = time.perf_counter(), tokens
            if any(event.finish for event in events):
                break
        now = time.perf_counter()
        while engine.has_work:
            engine.step()
        assert steady
        return task.prompt_tokens / (steady - began) if task.name == "prefill" else (tokens - before) / (now - steady)

    return {"version": __version__}, lambda task: llm.worker.call(lambda engine: run(engine, task))


def _request(name: str, ids: list[int], task: Task) -> EngineRequest:
    said = ids[task.prompt_tokens:]
    return EngineRequest(name, tuple(ids[:task.prompt_tokens]),
                   SamplingParams(temperature=0.0, max_tokens=task.new_tokens, ignore_eos=True),
                   guide=lambda: Said(said))


def _llama(settings: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    model, seeds = Llama(settings["model"], settings["threads"], 8, _CONTEXT), count(1)

    def run(task: Task) -> float:
        texts = _texts(task, next(seeds))
        model.forget()
        began = time.perf_counter()
        for number, ids in enumerate(texts):
            model.feed([[]] * number + [ids[:task.prompt_tokens]])
        steady = time.perf_counter()
        if task.name == "prefill":
            return task.prompt_tokens / (steady - began)
        for place in range(task.prompt_tokens, task.prompt_tokens + task.new_tokens - 1):
            model.feed([ids[place:place + 1] for ids in texts])
        return task.batch * (task.new_tokens - 1) / (time.perf_counter() - steady)

    return model.facts, run


if __name__ == "__main__":
    main()
