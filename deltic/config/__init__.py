"""The shape of a checkpoint (ModelConfig), options to run it (EngineConfig), sampling defaults (GenerationDefaults).

Dtypes are strings here, so that the command line can be built without importing torch.
"""

from deltic.config.engine import AUTO, EngineConfig
from deltic.config.families import ARCHITECTURES, LayerType, architecture
from deltic.config.limits import Limits
from deltic.config.machine import available_cores, available_memory, parse_bytes
from deltic.config.model import (
    DTYPE_BYTES,
    PRESETS,
    DType,
    ExpertsConfig,
    LinearConfig,
    ModelConfig,
    shard_config,
)
from deltic.config.reading import GenerationDefaults
from deltic.config.rope import RopeConfig, Yarn

__all__ = [
    "ARCHITECTURES", "AUTO", "DTYPE_BYTES", "PRESETS", "DType", "EngineConfig", "ExpertsConfig", "GenerationDefaults",
    "LayerType", "Limits", "LinearConfig", "ModelConfig", "RopeConfig", "Yarn", "architecture", "available_cores",
    "available_memory", "parse_bytes", "shard_config",
]
