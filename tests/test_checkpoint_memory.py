"""The peak of memory while a checkpoint in 4 bits, or its tokenizer, is read."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deltic.config import ModelConfig
from deltic.errors import ModelError
from deltic.loader.gguf.tokenizer import tokenizer_from_gguf
from deltic.ops.cpu import missing

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))
import four_bit_files

counts_memory = pytest.mark.skipif(sys.platform != "linux" or bool(missing()),
                                   reason="reads the peak of memory as Linux counts it, with the kernels")

SERVING = """
import json, re, sys
from deltic import LLM, SamplingParams

def peak():
    with open("/proc/self/status") as file:
        return int(re.search(r"VmHWM:\\s+(\\d+)", file.read())[1]) << 10

def serve(model):
    llm = LLM(model, dtype="bfloat16", memory="64MiB", max_batch=1, max_context=64, threads=1, speculate="off")
    loaded = peak()
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0))
    return loaded, peak(), llm

serve(None)
before = peak()
loaded, used, llm = serve(sys.argv[1])
print(json.dumps([loaded - before, used - before, llm.runtime.decoder.weight_kinds()]))
"""


def serve(place: Path) -> tuple[int, int, dict[str, int]]:
    """Bytes beyond those of a process that has served the embedded model: after the load, and after some tokens."""
    result = subprocess.run([sys.executable, "-c", SERVING, str(place)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    loaded, used, kinds = json.loads(result.stdout)
    return loaded, used, kinds


@counts_memory
@pytest.mark.parametrize("kind, head", [("nvfp4", False), ("gptq", False), ("int4-128", True)])
def test_a_large_vocabulary_is_in_memory_once(kind: str, head: bool, tmp_path: Path) -> None:
    """Embeddings in bfloat16 are half of a small model, and were there twice."""
    config = replace(ModelConfig.preset("qwen3.5-0.8b", 4), vocab_size=100_000)
    size = four_bit_files.write(tmp_path, config, kind, head)
    loaded, _, kinds = serve(tmp_path)
    assert {"NVFP4" if kind == "nvfp4" else "INT4_128", "BF16"} <= {*kinds} and size > 200e6
    assert loaded <= 1.05 * size + 16e6, (loaded, size)


@counts_memory
@pytest.mark.slow
@pytest.mark.parametrize("kind", four_bit_files.KINDS)
def test_files_of_all_tools_need_their_size(kind: str, tmp_path: Path) -> None:
    """INT4_32 has 5 bits for a weight in the kernels' form, and 4.5 in files. The cache is added."""
    size = four_bit_files.write(tmp_path, ModelConfig.preset("qwen3.5-0.8b"), kind)
    loaded, used, _ = serve(tmp_path)
    more = 32e6 if kind == "int4-32" else 0
    assert loaded <= 1.05 * size + more, (loaded, size)
    assert used <= 1.05 * size + more + (64 << 20) + 16e6, (used, size)


def test_merges_of_a_gguf_file_stay_texts() -> None:
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"]}
    assert json.loads(tokenizer_from_gguf(metadata).tokenizer)["model"]["merges"] == ["a b"]
    metadata["tokenizer.ggml.merges"] = ["a b", "#version a"]
    assert json.loads(tokenizer_from_gguf(metadata).tokenizer)["model"]["merges"] == [["a", "b"], ["#version", "a"]]
    for wrong in ("ab", "a b c", " b", "a ", ""):
        metadata["tokenizer.ggml.merges"] = ["a b", wrong]
        with pytest.raises(ModelError, match="must hold pairs of tokens"):
            tokenizer_from_gguf(metadata)
