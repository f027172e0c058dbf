"""A .pte file that ExecuTorch's own exporter wrote (`executorch.examples.models.llama.export_llama`).

Such a program has the same inputs and outputs, but its buffers have no names. A sequence is therefore kept as its
tokens, and a sequence that becomes live computes those that the buffers do not hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from deltic.config import GenerationDefaults, ModelConfig
from deltic.errors import ModelError
from deltic.export.executorch.calls import ProgramCalls
from deltic.export.executorch.runtime import CALL, ExecutorchProgram, Saved
from deltic.export.program import ProgramInfo
from deltic.export.sidecar import load_json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SIZES: Final[Mapping[str, str]] = {
    "dim": "hidden_size", "hidden_dim": "intermediate_size", "n_heads": "num_attention_heads",
    "norm_eps": "rms_norm_eps", "vocab_size": "vocab_size", "head_dim": "head_dim", "rope_theta": "rope_theta",
    "partial_rotary_factor": "partial_rotary_factor", "layer_types": "layer_types",
    **{name: name for name in ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
                               "linear_value_head_dim", "linear_conv_kernel_dim")}}
"""Keys of a params.json of ExecuTorch's examples, and those of a config.json."""


class ForeignProgram(ExecutorchProgram):
    """As `ExecutorchProgram`, of a program without named buffers."""

    def __init__(self, path: Path, info: ProgramInfo, calls: ProgramCalls, chunk: int) -> None:
        super().__init__(path, info, calls, chunk, ())
        self._tokens: list[int] = []
        self._proven = True

    def _call(self, tokens: Sequence[int]) -> NDArray[np.float32] | None:
        try:
            found = super()._call(tokens)
        except ModelError:
            self._tokens.clear()
            raise
        self._tokens += tokens
        return found

    def _take(self) -> Saved:
        return Saved(self._position, tokens=tuple(self._tokens))

    def _put(self, saved: Saved) -> None:
        """K/V below a position stay valid whatever comes after; recurrent states are those of the last token alone."""
        common = next((index for index, (one, other) in enumerate(zip(self._tokens, saved.tokens, strict=False))
                       if one != other), min(len(self._tokens), len(saved.tokens)))
        if common < len(self._tokens) and self.info.config.linear_layers:
            common = 0
        del self._tokens[common:]
        self._position = common
        while self._position < saved.position:
            self._call(saved.tokens[self._position:self._position + self._chunk])


def read_params(path: Path, said: Mapping[str, Any]) -> tuple[ModelConfig, GenerationDefaults]:
    """The shape in a params.json of ExecuTorch's examples, or in a Hugging Face config.json. said: the program's
    metadata, which has the ids that end an answer. ModelError naming the file and key."""
    try:
        mapping = load_json(path)
        config = ModelConfig.from_hf(mapping if "model_type" in mapping or "architectures" in mapping
                                     else _hf(mapping, said))
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    ends = said.get("get_eos_ids", said.get("get_eos_id", ()))
    ends = ends if isinstance(ends, list) else [ends] if isinstance(ends, int) else []
    return config, GenerationDefaults.from_hf({"eos_token_id": [*ends, *config.eos_token_ids]}, config.eos_token_ids)


def _hf(params: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a params.json."""
    if params.get("moe"):
        raise ModelError("moe is not supported; take a program of a dense model")
    layers, heads = params.get("n_layers"), params.get("n_heads")
    for name, value in (("n_layers", layers), ("n_heads", heads), ("dim", params.get("dim"))):
        if type(value) is not int or value < 1:
            raise ModelError(f"{name} must be a number of at least 1; is this the params.json of the program?")
    attention = "qwen3" if params.get("use_qk_norm") else "llama"
    return {
        "model_type": "qwen3_5" if "linear_attention" in (params.get("layer_types") or ()) else attention,
        "num_hidden_layers": layers, "num_key_value_heads": params.get("n_kv_heads") or heads,
        "head_dim": params["dim"] // heads, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "vocab_size": said.get("get_vocab_size"), "intermediate_size": 4 * params["dim"],
        "max_position_embeddings": said.get("get_max_context_len", said.get("get_max_seq_len")),
        **{ours: params[theirs] for theirs, ours in _SIZES.items() if params.get(theirs) is not None}}


def call_size(said: Mapping[str, Any]) -> int:
    """Tokens that one call takes: the exporter leaves one out of the length that it plans for."""
    return min(CALL, max(said["get_max_seq_len"] - 1, 1)) if said.get("enable_dynamic_shape") else 1
