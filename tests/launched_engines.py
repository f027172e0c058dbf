"""Engines on a GPU that launch their steps kernel by kernel instead of replaying graphs, for compute-sanitizer:
`python tests/launched_engines.py "0.8b q4_k"`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from support import numbers, serve

from deltic.config import EngineConfig, ExpertsConfig, ModelConfig
from deltic.engine import graphs
from deltic.engine.loading import RandomModel, load
from deltic.ops.cuda import draft
from deltic.ops.cuda.step import Step
from deltic.ops.records import Batch
from deltic.types import Request, SamplingParams

VOCABULARY = 5003
DENSE, MIXTURE = "qwen3.5-4b", "qwen3.5-35b-a3b"


def model(name: str, head: bool = False, **changes: Any) -> RandomModel:
    """True heads; four layers and few tokens."""
    shape = replace(ModelConfig.preset(name, 4), vocab_size=VOCABULARY, **changes)
    return RandomModel(shape=shape, head=head, initializer_range=0.05)


ENGINES: dict[str, tuple[RandomModel | None, dict[str, Any]]] = {
    "tiny": (None, {"speculate": "mtp:3"}),
    "0.8b": (model("qwen3.5-0.8b", head=True), {"speculate": "mtp:3"}),
    "0.8b q4_k": (model("qwen3.5-0.8b", head=True), {"speculate": "mtp:2", "quant": "q4_k"}),
    "4b": (model(DENSE), {"kv_dtype": "fp8"}),
    "4b small states": (model(DENSE, head=True), {"speculate": "mtp:3", "state_dtype": "bfloat16"}),
    "4b fp8": (model(DENSE), {"quant": "fp8"}),
    "experts": (model(MIXTURE, hidden_size=512, experts=ExpertsConfig(60, 9, 40, 40)), {}),
    "experts q4_k": (model(MIXTURE, hidden_size=512, experts=ExpertsConfig(16, 4, 256, 256)), {"quant": "q4_k"}),
}


class Launched:
    """Takes the place of a graph."""

    def __init__(self, launch: Callable[[], object]) -> None:
        self.replay = launch

    def pool(self) -> None:
        return None


def launch_everything() -> None:
    """Record no graph, and write what products read of rows that only fill a bucket up, whose sums nobody reads."""
    begin = Step.work

    def work(step: Step, batch: Batch, *args: Any, **options: Any) -> Any:
        found = begin(step, batch, *args, **options)
        if batch.count is not None:
            real = int(batch.starts[int(batch.count)])
            for tensor in (found.y, found.core):
                tensor[real:].zero_()
        return found

    Step.work = work  # type: ignore[method-assign]
    graphs.Graphs.capture = lambda self, padded: None  # type: ignore[method-assign]
    draft.record = lambda launch, pool=None: (Launched(launch), launch())  # type: ignore[assignment]


def run(name: str) -> None:
    """Prompts of one token, of some and of many; rows that decode, some and many; what is kept is used again."""
    weights, options = ENGINES[name]
    runtime = load(weights, EngineConfig(device="cuda", dtype="bfloat16", max_batch=40, max_context=512,
                                         host_memory="0", **{"memory": "1GiB", "speculate": "off", **options}))
    assert runtime.step is not None, "the kernels do not serve this model"
    few, many = [(1, 5), (40, 6), (300, 6)], [(1 + index % 5, 3) for index in range(36)]
    vocabulary = min(VOCABULARY, runtime.config.vocab_size)
    for again, requests in enumerate((few, many, few)):
        answers = serve(runtime, [Request(f"{again}-{index}", numbers(index, length, vocabulary), SamplingParams(
            temperature=0.8 * (index % 2), max_tokens=count, ignore_eos=True)) for index, (length, count)
            in enumerate(requests)])
        for index, (_, count) in enumerate(requests):
            assert len(answers[f"{again}-{index}", 0].tokens) == count, "a request failed"


if __name__ == "__main__":
    launch_everything()
    for chosen in sys.argv[1:] or ENGINES:
        run(chosen)
        print(chosen, "passed", flush=True)
