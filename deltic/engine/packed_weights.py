"""Whether a model's weights stay quantized in memory: which kernels know them, and what the memory holds otherwise."""

from __future__ import annotations

import logging

import torch

from deltic.config import DType, EngineConfig, ModelConfig
from deltic.errors import ConfigError
from deltic.loader.gguf.load import is_quantized, unserved_experts, wants_packing
from deltic.loader.model_files import ModelFiles
from deltic.ops.cpu import missing
from deltic.ops.cuda import quantized
from deltic.ops.cuda.expert_offload import pinned_form
from deltic.ops.cuda.kernel_config import knows_sizes
from deltic.ops.cuda.quantized_moe import knows_packed
from deltic.ops.quantized import PackedForm, host_form
from deltic.params import Draft

log = logging.getLogger("deltic")
_FREE_SHARE = 0.85
"""The share of a GPU's free memory that weights may fill, so that the cache and a step find room beside them."""


def packed_form(options: EngineConfig) -> PackedForm:
    """The form of quantized matrices that the device's kernels read."""
    if options.device == "cpu":
        return host_form()
    if options.offloads_experts:
        return pinned_form(torch.device(options.device))
    return quantized.tiles_form(options.device)


def not_packed(options: EngineConfig, config: ModelConfig, dtype: DType) -> str | None:
    """Why matrices cannot stay quantized; None: they can."""
    if options.device == "cpu":
        return missing().get("step")
    if dtype != "bfloat16":
        return f"on a GPU only with dtype bfloat16, not {dtype}"
    return _experts_not_packed(options, config) if config.experts else None


def dequantized_in_steps(options: EngineConfig, config: ModelConfig) -> str | None:
    """Why torch would dequantize each matrix in every step on a GPU; None: the kernels read quantized ones."""
    if options.device == "cpu" or config.experts:
        return None
    if why := _kernels_missing(options, config):
        return f"{why}: torch dequantizes each matrix in every step"
    if not knows_sizes(config.hidden_size, config.intermediate_size):
        return ("the GPU kernels know no quantized matrices as wide as this model's: torch dequantizes each matrix in "
                "every step")
    return None


def keeps_packed(files: ModelFiles, options: EngineConfig, dtype: DType) -> bool:
    """Whether the weights stay in the form of a GGUF file. Where only torch could compute with them on a GPU, they
    become plain numbers at load if these fit its memory."""
    if files.gguf is None or options.packed_weights == "off":
        return False
    config, on = files.config, options.packed_weights == "on"
    reason = not_packed(options, config, dtype)
    if reason is None and options.device != "cpu" and (types := unserved_experts(files.gguf, packed_form(options))):
        reason = f"on a GPU the kernels know no experts of type {', '.join(types)}"
    if reason and on:
        raise ConfigError(f"packed_weights=on is not possible: {reason}", "packed_weights")
    # only what is quantized already cannot be quantized
    wanted = is_quantized(files.gguf) if options.quant != "none" else wants_packing(files.gguf)
    if reason or not (on or wanted):
        return False
    slow = dequantized_in_steps(options, config)
    if slow and not on and _plain_weights_fit(options, config):
        log.info("the weights become %s when they are loaded, as %s", dtype, slow)
        return False
    if slow:
        log.warning("%s; the CPU (device=cpu) may be faster", slow)
    return True


def check_packed(files: ModelFiles | None, options: EngineConfig, drafts: bool) -> None:
    """ConfigError if weights shall stay quantized that are not. Of two models, one of which drafts for the other, the
    option may be meant for either."""
    shared = drafts or isinstance(options.speculation, Draft)
    if options.packed_weights == "on" and not shared and (files is None or files.gguf is None):
        raise ConfigError("packed_weights=on is for GGUF files, whose weights may be quantized: leave it out, or "
                          "quantize the model while it is loaded (`quant='q8_0'`)", "packed_weights")


def _plain_weights_fit(options: EngineConfig, config: ModelConfig) -> bool:
    """Whether the GPU has room for the weights in bfloat16."""
    free, _ = torch.cuda.mem_get_info(options.device)
    return 2 * config.parameter_count <= _FREE_SHARE * free


def _kernels_missing(options: EngineConfig, config: ModelConfig) -> str | None:
    """Why deltic's kernels do not serve a model on this GPU, whatever its sizes."""
    if options.ops:
        return "with `ops` torch serves the model on a GPU"
    if config.architecture not in ("qwen3_5", "qwen3_5_moe"):
        return "the GPU kernels serve Qwen3.5 only"
    if torch.cuda.get_device_capability(options.device) < (9, 0):
        return "the GPU kernels need compute capability 9.0 or later"
    return None


def _experts_not_packed(options: EngineConfig, config: ModelConfig) -> str | None:
    """Why the experts of a mixture cannot stay quantized on a GPU."""
    experts = config.experts
    assert experts
    if why := _kernels_missing(options, config):
        return f"only the kernels compute with quantized experts, and {why}"
    if options.expert_compute == "host":
        return "the host computes experts of bfloat16 only; leave out expert_compute"
    if not knows_packed(config.hidden_size, experts.size, experts.count, experts.per_token, experts.shared_size):
        return "on a GPU the kernels do not know quantized experts of these sizes"
    return None
