"""The worker of cpu_peers.py that runs an exported model with OpenVINO GenAI, under a Python that has it.

Export: `optimum-cli export openvino --model DIR --task text-generation-with-past --weight-format int4 --group-size 64
--ratio 1.0 OUT`, or `--weight-format int8`.
"""

from __future__ import annotations

import sys
from typing import Any

from common import Answer, work


def _start(settings: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    import numpy as np
    import openvino
    import openvino_genai

    from deltic.cli.output import peak_memory_mib

    pipeline = openvino_genai.LLMPipeline(settings["model"], "CPU", INFERENCE_NUM_THREADS=settings["threads"])
    draw = np.random.default_rng(0)

    def answer(task: dict[str, Any]) -> dict[str, Any]:
        ids = draw.integers(0, 1000, (1, task["prompt_tokens"]))
        prompt = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        metrics = pipeline.generate(prompt, max_new_tokens=task["new_tokens"], ignore_eos=True,
                                    do_sample=False).perf_metrics
        first, each = metrics.get_ttft().mean / 1e3, metrics.get_tpot().mean / 1e3
        return {"value": 1 / each if task["name"] == "decode" else task["prompt_tokens"] / first,
                "peak_mib": peak_memory_mib()}
    return {"version": openvino_genai.__version__, "threads": settings["threads"]}, answer


if __name__ == "__main__":
    work(sys.argv[2], _start)
