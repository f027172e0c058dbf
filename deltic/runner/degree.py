"""Tensor parallelism: chooses the number of GPUs of a model and checks that the weights fit, before reading them."""

from __future__ import annotations

import logging
from dataclasses import replace
from math import prod

import torch

from deltic.config import AUTO, DTYPE_BYTES, DType, EngineConfig
from deltic.errors import ConfigError
from deltic.loader.names import expected_head
from deltic.model.tensor_parallel import DEGREES
from deltic.ops import Ops
from deltic.ops.capabilities import check_devices
from deltic.params import Auto, Mtp
from deltic.runner.layer_offload import PlanCache, has_room
from deltic.runner.memory import expected_card
from deltic.runner.weights import OpenedModel, WeightReader

log = logging.getLogger("deltic")

def choose_degree(source: OpenedModel, options: EngineConfig, ops: Ops, dtype: DType, plan: PlanCache) -> EngineConfig:
    """Returns the options with the fewest GPUs that hold the weights and the context, if `tp` is auto and `device`
    names no single GPU. For a given `tp`, raises ConfigError if the weights do not fit. plan: as in `plan_layers`.
    """
    if options.tp != AUTO:
        check_room(source, options, ops, dtype)
        return options
    if options.device != "cuda" or options.offloads_experts or torch.cuda.device_count() == 1:
        return options
    for degree in DEGREES:
        try:
            given = replace(options, tp=degree)
            check_devices(given.devices)
            reader = WeightReader(source, given, ops, dtype)
            if has_room(source.config, given, _bytes_of(reader), plan):
                log.info("tp=auto: %d of %d GPUs hold %s and its context", degree, torch.cuda.device_count(),
                         source.name)
                return given
        except ConfigError:  # the model or another option does not allow this split
            continue
    return options


def check_room(source: OpenedModel, options: EngineConfig, ops: Ops, dtype: DType) -> None:
    """Raises ConfigError if the weights are split over GPUs and a GPU's part does not fit."""
    if options.shards == 1 or not options.on_gpu:
        return
    weights = _bytes_of(WeightReader(source, options, ops, dtype))
    card = expected_card(source.config, options, weights)
    if card and card.limit < card.taken:
        raise ConfigError(
            f"tp={options.tp}: a GPU's part of the weights, {weights / (1 << 30):.2f} GiB, does not fit beside what "
            f"CUDA and other programs take, {card.taken - weights >> 20} of {card.limit >> 20} MiB: use a larger tp, "
            "weights of fewer bits (a smaller GGUF file, or `quant`), or free memory of the GPUs", "tp")


def _bytes_of(reader: WeightReader) -> int:
    """Returns the bytes of weights on the GPU with the most."""
    config, head = reader.source.config, 0
    if isinstance(reader.options.speculation, Auto | Mtp) and config.num_mtp_layers == 1:
        head = sum(map(prod, expected_head(config).values())) * DTYPE_BYTES[reader.dtype]
    return reader.shard_bytes() + reader.tower_bytes() + head
