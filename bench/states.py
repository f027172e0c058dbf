"""What a state as files saves over reading the prompt again: random qwen3.5-0.8b in bfloat16, two processes.

    python bench/states.py           # some minutes
    python bench/states.py --quick   # does it work at all
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, TypeVar

from common import record, spread

from deltic import LLM, RandomModel, SamplingParams

NEW = 50
Result = TypeVar("Result")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes: only shows that everything works")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--import-from", metavar="DIR", help="the second process")
    args = parser.parse_args()
    if args.import_from:
        print(json.dumps(_import(args)))
        return
    with tempfile.TemporaryDirectory() as store:
        found = _export(args, store)
        command = [sys.executable, __file__, "--import-from", store, "--repeat", str(args.repeat), "--tokens",
                   str(args.tokens), *["--quick"] * args.quick]
        result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found |= json.loads(result.stdout.splitlines()[-1])
    assert found["answer"] == found.pop("expected"), "the answers differ"
    del found["answer"]
    ratios = {f"read_over_import_{kind}": round(found[f"read_{kind}"]["median"] / found[f"import_{kind}"]["median"], 1)
              for kind in ("wall", "cpu")}
    record("states", {"task": "import", "unit": "s", **found, **ratios,
                      "note": "import: verify the files and put the prefix into the cache of a fresh process, model "
                              "load excluded; cpu: user and system time of the process"})


def _model(args: argparse.Namespace) -> LLM:
    return LLM(RandomModel("qwen3.5-0.8b", layers=4 if args.quick else None), dtype="bfloat16", max_batch=2,
               max_context=args.tokens + 2000, memory="3GiB")


def _prompt(llm: LLM, args: argparse.Namespace, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(llm.runtime.config.vocab_size) for _ in range(args.tokens)]


def _following(llm: LLM, args: argparse.Namespace) -> list[int]:
    return [*_prompt(llm, args, 0), *range(100, 100 + NEW)]


def _timed(work: Callable[[], Result]) -> tuple[Result, float, float]:
    """Returns the result, seconds, and seconds of the processor."""
    began, spent = time.perf_counter(), time.process_time()
    found = work()
    return found, time.perf_counter() - began, time.process_time() - spent


def _answer(llm: LLM, prompt: list[int], most: int = 16) -> Any:
    sampling = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, logprobs=2)
    return llm.generate([prompt], sampling)[0].choices[0]


def _export(args: argparse.Namespace, store: str) -> dict[str, Any]:
    """Times reading, each time another prompt, and saving."""
    with _model(args) as llm:
        reads = [_timed(lambda seed=seed: _answer(llm, _prompt(llm, args, seed), 1))[1:]  # type: ignore[misc]
                 for seed in range(args.repeat)]
        saved, wall, cpu = _timed(lambda: llm.save_state(_prompt(llm, args, 0), store))
        choice = _answer(llm, _following(llm, args))
        return {"model": llm.runtime.name, "dtype": "bfloat16", "threads": llm.runtime.threads,
                "prompt_tokens": args.tokens, "bytes": saved.bytes, "boundaries": list(saved.boundaries),
                "read_wall": spread([wall for wall, _ in reads]), "read_cpu": spread([cpu for _, cpu in reads]),
                "export_wall": round(wall, 4), "export_cpu": round(cpu, 4),
                "expected": [list(choice.tokens), repr(choice.logprobs)]}


def _import(args: argparse.Namespace) -> dict[str, Any]:
    """Times importing into an empty cache, and the next turn."""
    with _model(args) as llm:
        _answer(llm, [1, 2, 3])
        times = []
        for _ in range(args.repeat):
            llm.worker.call(lambda engine: engine.runtime.cache.clear())
            times.append(_timed(lambda: llm.load_state(args.import_from))[1:])
        choice, turn_wall, turn_cpu = _timed(lambda: _answer(llm, _following(llm, args), 1))
        assert choice.usage.cached_tokens == args.tokens, choice.usage
        whole = _answer(llm, _following(llm, args))
        return {"import_wall": spread([wall for wall, _ in times]), "import_cpu": spread([cpu for _, cpu in times]),
                "new_tokens": NEW, "turn_wall": round(turn_wall, 4), "turn_cpu": round(turn_cpu, 4),
                "answer": [list(whole.tokens), repr(whole.logprobs)]}


if __name__ == "__main__":
    main()
