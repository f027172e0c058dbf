"""A new process that answers 16 tokens and ends: deltic, and llama.cpp through llama-cpp-python, in turns.

    python bench/start.py                                          # the embedded model
    python bench/random_gguf.py --type Q4_K_M --vocabulary qwen3.5 q4.gguf
    python bench/start.py q4.gguf --llama-python PATH              # the Python that has llama_cpp

The file is in the page cache after the first round, which does not count. Processor time changes less than seconds on a
busy machine.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from common import environment, record, spread

PROMPT = "What is the capital of France?"
TOKENS, CONTEXT = 16, 2048
_LLAMA = """
import sys
from llama_cpp import Llama
path, prompt, tokens, context, threads = sys.argv[1:]
model = Llama(path, n_ctx=int(context), n_threads=int(threads), n_threads_batch=int(threads), verbose=False)
print(model.create_completion(prompt, max_tokens=int(tokens), temperature=0)["choices"][0]["text"])
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL.gguf", type=Path, nargs="?", help="default: the embedded model")
    parser.add_argument("--llama-python", metavar="PATH")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeat", type=int, default=7)
    args = parser.parse_args()
    if args.llama_python and not args.model:
        parser.error("llama.cpp needs a MODEL.gguf")
    threads = str(args.threads)
    commands = {"deltic": [sys.executable, "-m", "deltic", "run", str(args.model or "tiny"), PROMPT, "--raw",
                           "--max-tokens", str(TOKENS), "--temperature", "0", "--threads", threads,
                           "--max-context", str(CONTEXT)]}
    if args.llama_python:
        commands["llama.cpp"] = [args.llama_python, "-c", _LLAMA, str(args.model), PROMPT, str(TOKENS), str(CONTEXT),
                                 threads]
    turns: dict[str, list[tuple[float, float, float]]] = {name: [] for name in commands}
    for turn in range(args.repeat + 1):
        for name in sorted(commands, reverse=bool(turn % 2)):
            measured = _run(commands[name])
            if turn:
                turns[name].append(measured)
    record("start", {"model": args.model.name if args.model else "tiny", "tokens": TOKENS, "threads": args.threads, **{
        name: {"seconds": spread([turn[0] for turn in found]), "processor_seconds": spread([turn[1] for turn in found]),
               "peak_memory_mib": round(max(turn[2] for turn in found), 1)} for name, found in turns.items()}})


def _run(command: Sequence[str]) -> tuple[float, float, float]:
    """Returns seconds, processor time and peak memory in MiB."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment())
    _, status, usage = os.wait4(process.pid, 0)
    seconds, process.returncode = time.perf_counter() - began, status
    if status:
        raise SystemExit(f"{command[0]} failed: {' '.join(command)}")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


if __name__ == "__main__":
    main()
