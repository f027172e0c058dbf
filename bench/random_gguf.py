"""Writes a model of a known shape with random weights as a GGUF file, exactly as `deltic convert` would.

    python bench/random_gguf.py --preset qwen3.5-0.8b --type Q4_K_M OUT.gguf

The tokenizer is the embedded model's, filled up with unused tokens: the file has true speed and loads everywhere.
The weights lie beside OUT.gguf while it is written (1.5 GB for qwen3.5-0.8b).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from safetensors.torch import save_file

from deltic.config import DType, GenerationDefaults, ModelConfig
from deltic.text.files import read_tokenizer_files
from deltic.weights.gguf.convert import FILE_TYPES, Written, convert
from deltic.weights.gguf.tokenizer import TokenizerTexts
from deltic.weights.hub import ModelFiles, resolve
from deltic.weights.random import random_weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", metavar="OUT.gguf", type=Path, help="the file to write")
    parser.add_argument("--preset", default="qwen3.5-0.8b")
    parser.add_argument("--layers", type=int, help="keep only the first so many, for a quick look")
    parser.add_argument("--type", choices=FILE_TYPES, type=str.upper, default="Q4_K_M")
    args = parser.parse_args()
    written = random_gguf(ModelConfig.preset(args.preset, args.layers), [args.target], [args.type])[0]
    print(json.dumps({"path": str(args.target), "type": args.type, "bytes": written.nbytes, "weights": written.weights,
                      "tensors": dict(written.tensors)}))


def random_gguf(config: ModelConfig, targets: list[Path], types: list[str], dtype: DType = "bfloat16",
                initializer_range: float | None = None, seed: int = 0) -> list[Written]:
    """Write the same random weights, drawn in `dtype`, to a file of each type. initializer_range: as in
    `random_weights`."""
    with tempfile.TemporaryDirectory(dir=targets[0].parent) as directory:
        save_file(random_weights(config, dtype, seed, initializer_range=initializer_range),
                  Path(directory) / "model.safetensors")
        files = ModelFiles(Path(directory), config, GenerationDefaults())
        return [convert(files, _tokenizer(), f"random-{config.architecture}", target, type)
                for target, type in zip(targets, types, strict=True)]


def _tokenizer() -> TokenizerTexts:
    files = read_tokenizer_files(resolve(None))
    return TokenizerTexts(files.tokenizer, files.special_tokens, files.templates)


if __name__ == "__main__":
    main()
