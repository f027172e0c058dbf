"""Which options of the engine mean nothing to what is compiled."""

from __future__ import annotations

from typing import Final

from deltic.config import AUTO, EngineConfig
from deltic.errors import ConfigError

_COMPILED: Final = ("device", "dtype", "kv_dtype", "state_dtype", "quant", "packed_weights", "batch_invariant",
                    "debug_layers", "cache_dir", "host_memory", "aot_dir", "mmproj", "expert_memory", "expert_cap",
                    "gpu_memory_utilization")
"""Options of the engine that a compiled program cannot use: the compiler fixed their values, or the program hides the
data that they act on."""


def check_compiled(options: EngineConfig) -> None:
    """ConfigError naming an option that something compiled cannot follow."""
    plain = EngineConfig(device="cpu" if options.device == "cpu" else AUTO)  # where programs run
    for name in _COMPILED:
        if getattr(options, name) != getattr(plain, name):
            raise ConfigError(f"{name}={getattr(options, name)} has no meaning for a compiled program: leave it out, "
                              "or load the model itself", name)
