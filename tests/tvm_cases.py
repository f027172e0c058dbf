"""Small models compiled by TVM, for the files that test what is done with them."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from support import odd_shape

from deltic.artifacts.program import hf_config
from deltic.config import ModelConfig, RopeConfig
from deltic.weights.hub import open_model
from deltic.weights.random import random_weights

SHAPE = odd_shape(num_hidden_layers=2, layer_types=("linear_attention", "full_attention"), max_position_embeddings=256)
ATTENTION = odd_shape(architecture="qwen3", num_hidden_layers=2, layer_types=("full_attention",) * 2, linear=None,
                      attention_output_gate=False, rope=RopeConfig(1e4, 14, ()), max_position_embeddings=256)
CHUNK = 24


def checkpoint(folder: Path, shape: ModelConfig, spread: float) -> Path:
    """A directory with random weights in float32, without words."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf_config(shape)), encoding="utf-8")
    save_file(random_weights(shape, "float32", initializer_range=spread, seed=2), folder / "model.safetensors")
    return folder


def compiled(folder: Path, source: Path | None, **options: object) -> Path:
    """A model's directory, None for the embedded one, compiled."""
    from deltic.artifacts.tvm.compiler import compile_model

    folder.mkdir(parents=True)
    compile_model(open_model(source), folder, **options)  # type: ignore[arg-type]
    return folder
