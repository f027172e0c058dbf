"""Reads the quantization of a checkpoint: `quantization_config` of config.json, ModelOpt's hf_quant_config.json, and
`quantization` of MLX."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from deltic.errors import ModelError, show

KEY: Final = "quantization_config"
MLX_KEY: Final = "quantization"
"""MLX's key. Newer versions of MLX write both this key and KEY."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantization that a checkpoint's config declares. The tensors show which weights are quantized, and how; the
    config has the rest.

    method: quant_method; empty for an unquantized checkpoint.
    settings: the whole JSON object.
    """

    method: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def groups(self) -> Iterator[Any]:
        """Yields `weights` of each group of compressed-tensors."""
        groups = self.settings.get("config_groups")
        for group in groups.values() if isinstance(groups, Mapping) else ():
            yield group.get("weights") if isinstance(group, Mapping) else None


MLX: Final = "mlx"
"""Method for configs that MLX wrote, which do not name a method."""
PLAIN: Final = Quantization()
"""The quantization of an unquantized checkpoint."""
_UNQUANTIZED: Final = ("take the unquantized checkpoint (`quant='q4_k'` quantizes it while it is loaded), or a GGUF "
                       "file of the model")
_ALGORITHMS: Final = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "fp8_pb_wo", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "mxfp4",
                      "MXFP4", "W4A8_MXFP4_FP8", "MXFP8")
_AUTO_AWQ: Final = "auto_round:auto_awq"
"""AutoRound's packing format that equals AWQ's."""
_METHODS: Final[Mapping[str, Mapping[str, tuple[Any, ...]]]] = {
    "fp8": {"fmt": ("e4m3", None), "weight_block_size": ([128, 128], None)},
    "compressed-tensors": {"format": ("float-quantized", "naive-quantized", "nvfp4-pack-quantized",
                                      "mxfp4-pack-quantized", "mxfp8-quantized", "pack-quantized", "int-quantized",
                                      "mixed-precision")},
    "modelopt": {"quant_algo": (*_ALGORITHMS, "MIXED_PRECISION")},
    "gptq": {"checkpoint_format": ("gptq", "gptq_v2", None), "format": ("gptq", "gptq_v2", None)},
    "awq": {"version": ("gemm", "GEMM", None), "format": ("gemm", "GEMM", None)},
    "auto-round": {"packing_format": ("auto_round:auto_gptq", "auto_round", "auto_round:gptqmodel",
                                      _AUTO_AWQ, "auto_round:llm_compressor", None),
                   "rotation_config": (None, {})},
    "bitsandbytes": {"bnb_4bit_quant_storage": ("uint8", None)},
}
"""Supported methods, with the values that their keys may have."""
_NAMES: Final = {"intel/auto-round": "auto-round"}
"""Older names of methods."""
_GROUPS: Final = (("float", 8), ("float", 4), *(("int", bits) for bits in range(2, 9)))
"""Supported (type, num_bits) of weights in `config_groups`."""


def read_quantization(mapping: Mapping[str, Any], modelopt: Mapping[str, Any] | None = None) -> Quantization:
    """Reads a config.json, and hf_quant_config.json, which older versions of ModelOpt write instead.

    Raises ModelError naming the key of an unsupported quantization.
    """
    nested = mapping.get("text_config")
    text = nested if isinstance(nested, Mapping) else {}
    given = mapping.get(KEY) or text.get(KEY) or mapping.get(MLX_KEY)
    if isinstance(given, Mapping) and "group_size" in given and "quant_method" not in given:
        return Quantization(MLX, given)
    if given:
        return _checked(given if isinstance(given, Mapping) else {}, KEY)
    given = modelopt.get("quantization") if modelopt else None
    if isinstance(given, Mapping) and given.get("quant_algo"):
        return _checked({**given, "quant_method": "modelopt"}, "hf_quant_config.json: quantization")
    return PLAIN


def _checked(given: Mapping[str, Any], place: str) -> Quantization:
    method = _NAMES.get(str(given.get("quant_method")), given.get("quant_method"))
    known = _METHODS.get(method) if isinstance(method, str) else None
    if known is None:
        raise ModelError(f"{place}: quant_method {show(method)} is not supported, only {', '.join(_METHODS)}; "
                         f"{_UNQUANTIZED}")
    for key, values in known.items():
        _check(place, key, given.get(key), values)
    layers = given.get("quantized_layers")
    for name, layer in layers.items() if isinstance(layers, Mapping) else ():
        algorithm = layer.get("quant_algo") if isinstance(layer, Mapping) else layer
        _check(place, f"quantized_layers: {name[:200]}: quant_algo", algorithm, (*_ALGORITHMS, None))
    found = Quantization("awq" if given.get("packing_format") == _AUTO_AWQ else str(method), given)
    for weights in found.groups():
        kind = (weights.get("type"), weights.get("num_bits")) if isinstance(weights, Mapping) else None
        if kind not in _GROUPS:
            allowed = ", ".join(f"{type} with num_bits {bits}" for type, bits in _GROUPS)
            raise ModelError(f"{place}: config_groups has weights {show(weights)}, only {allowed} is supported; "
                             f"{_UNQUANTIZED}")
    return found


def _check(place: str, key: str, value: Any, values: tuple[Any, ...]) -> None:
    if value not in values:
        allowed = " or ".join(show(each) for each in values if each)
        raise ModelError(f"{place}: {key} {show(value)} is not supported, only {allowed}; {_UNQUANTIZED}")
