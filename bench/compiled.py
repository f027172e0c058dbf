"""How soon a compiled model has its first token, beside importing torch and loading the same weights; its speed.

    python bench/compiled.py --preset qwen3.5-0.8b                 # compiles into a temporary directory
    python bench/compiled.py --preset qwen3.5-0.8b --layers 4 --runs 7

Each start is a process of its own; the kinds take turns. `compiled`: from the process's start to the logits after a
prompt of one token, through TVM's runtime alone. `torch`: import torch and load the same weights, as float32, from a
safetensors file, each number once added up. `engine`: deltic's own start to the same logits.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from common import environment, record

_COMPILED = """
import sys, time
from pathlib import Path
from deltic.export.program import ProgramConversation, open_program
from deltic.config import EngineConfig
talk = ProgramConversation(open_program(Path(sys.argv[1]), EngineConfig()))
talk.read([1])
assert "torch" not in sys.modules
"""
_TORCH = """
import sys, torch
from safetensors.torch import load_file
for tensor in load_file(sys.argv[1]).values():
    tensor.sum()
"""
_ENGINE = """
import sys
from deltic import Session
Session(sys.argv[1], "float32", max_batch=1, max_context=2048).prefill([1])
"""
_SPEED = """
import json, sys, time
from pathlib import Path
from deltic.export.program import ProgramConversation, kind_of, open_program
from deltic.config import EngineConfig
path, prompt, found = Path(sys.argv[1]), list(range(1, 65)), {}
if kind_of(path):
    talk = ProgramConversation(open_program(path, EngineConfig()))
    step, start = talk.read, lambda: talk.program.start(0)
else:
    from deltic import Session
    session, read = Session(str(path), "float32", max_batch=1, max_context=2048), []
    def step(tokens):
        session.prefill(tokens[session.position:])
    start = session.reset
step(prompt)
times = []
for _ in range(3):
    start()
    began = time.perf_counter(); step(prompt); times.append(time.perf_counter() - began)
found["prefill_64_tokens_per_second"] = round(64 / min(times), 1)
times = []
for _ in range(12):
    prompt = [*prompt, 7]
    began = time.perf_counter(); step(prompt); times.append(time.perf_counter() - began)
found["decode_tokens_per_second"] = round(1 / sorted(times)[len(times) // 2], 2)
print(json.dumps(found))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="qwen3.5-0.8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the models are kept for the next time")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        model, compiled, seconds = _models(args.folder or Path(temporary), args.preset, args.layers)
        kinds = {"compiled": (_COMPILED, compiled), "torch": (_TORCH, model / "model.safetensors"),
                 "engine": (_ENGINE, model)}
        times: dict[str, list[float]] = {name: [] for name in kinds}
        for run in range(args.runs + 1):
            for name, (code, path) in kinds.items():
                spent = _start(code, path)
                if run:  # the first one finds the files on disk
                    times[name].append(spent)
        found = {name: round(median(spent), 3) for name, spent in times.items()}
        speeds = {name: json.loads(_run(_SPEED, path)) for name, path in (("compiled", compiled), ("engine", model))}
        sizes = {"library_bytes": (compiled / "rt.so").stat().st_size,
                 "parameter_bytes": sum(path.stat().st_size for path in compiled.glob("params_shard_*.bin"))}
    record("compiled", {"task": "start", "unit": "s to the first token", "preset": args.preset, "layers": args.layers,
                   **found,
                   "compiled_per_torch": round(median(a / b for a, b in zip(times["compiled"], times["torch"])), 3),
                   "compile_seconds": seconds, **sizes, "speed": speeds})


def _models(folder: Path, preset: str, layers: int | None) -> tuple[Path, Path, float | None]:
    """A checkpoint with random weights in float32, and the same compiled; how long that took, if it was done now."""
    from safetensors.torch import save_file

    from deltic.config import ModelConfig
    from deltic.export.program import hf_config
    from deltic.export.tvm.compiler import compile_model
    from deltic.loader.dummy import random_weights
    from deltic.loader.model_files import open_model

    model, compiled = folder / "model", folder / "compiled"
    if compiled.is_dir():
        return model, compiled, None
    config = ModelConfig.preset(preset, layers)
    for path in (model, compiled):
        path.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({**hf_config(config), "dtype": "float32"}), encoding="utf-8")
    save_file(random_weights(config, "float32"), model / "model.safetensors")
    began = time.perf_counter()
    compile_model(open_model(model), compiled, max_context=2048)
    return model, compiled, round(time.perf_counter() - began, 1)


def _start(code: str, path: Path) -> float:
    began = time.perf_counter()
    _run(code, path)
    return time.perf_counter() - began


def _run(code: str, path: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, env=environment(),
                          check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


if __name__ == "__main__":
    main()
