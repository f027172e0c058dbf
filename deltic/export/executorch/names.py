"""What a program's buffers and the files beside it are called."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from deltic.config import ModelConfig

Buffer = Literal["keys", "values", "conv_state", "recurrent_state"]
BUFFERS: Final[dict[str, tuple[Buffer, ...]]] = {
    "full_attention": ("keys", "values"), "linear_attention": ("conv_state", "recurrent_state")}


def buffer_names(config: ModelConfig) -> list[tuple[str, Buffer]]:
    """What a sequence consists of: each layer's buffers by the names that a program gives them
    (`Method::get_attribute`), and their kind."""
    return [(f"layers.{index}.mixer.{kind}", kind) for index, layer in enumerate(config.layer_types)
            for kind in BUFFERS[layer]]


def sidecar_of(path: Path) -> Path:
    """The directory beside a program, with its config and tokenizer: `model.files` of `model.pte`."""
    return path.with_suffix(".files")
