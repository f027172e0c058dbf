"""Backend on MLX, for Apple GPUs by Metal and for any CPU. It imports the package `mlx` only if it is selected."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec

from deltic.errors import ConfigError
from deltic.ops import Ops
from deltic.ops.cpu import overlay as cpu_overlay
from deltic.ops.torch import OPS as TORCH_OPS

_WITHOUT_METAL = 4 << 30


def missing() -> str | None:
    """Returns the reason why MLX is unusable here, or None."""
    if find_spec("mlx") is None:
        return "device mlx needs the package mlx: pip install 'deltic[mlx]'"
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:
        return f"device mlx: the package mlx cannot be loaded ({error}); install it anew: pip install 'deltic[mlx]'"
    return None


def overlay(level: str = "auto", threads: int = 1) -> Ops:
    """Returns the ops on MLX, with the CPU backend's sampling. Raises ConfigError without MLX."""
    if why := missing():
        raise ConfigError(why, "device")
    from deltic.ops.mlx import step
    from deltic.ops.mlx.draft_head import mtp_step
    from deltic.ops.mlx.feed_forward import pack_experts
    from deltic.ops.mlx.linear import pack
    from deltic.ops.mlx.memory import reserve

    host = cpu_overlay(level, threads)
    return replace(
        TORCH_OPS,
        pack=pack,
        pack_experts=pack_experts,
        reserve=reserve,
        gdn_mixer=step.gdn_mixer,
        attention_mixer=step.attention_mixer,
        store_kv=step.store_kv,
        mlp=step.mlp,
        moe=step.moe,
        head=step.head,
        step=step.step,
        mtp_step=mtp_step,
        sample=host.sample,
    )


def device_facts() -> list[str]:
    """Returns the facts on which the bits of results depend: the version of MLX, and the device."""
    import mlx.core as mx

    device = "Metal" if mx.metal.is_available() else "the CPU"
    return [version("mlx"), device]


def working_set() -> int:
    """Returns Metal's recommended maximum of bytes, less the bytes in use. Without Metal, where the backend is for
    tests, it returns a few GiB, because MLX writes zeros to a whole cache."""
    import mlx.core as mx

    if not mx.metal.is_available():
        return _WITHOUT_METAL
    limit = int(mx.device_info()["max_recommended_working_set_size"])
    return max(limit - int(mx.get_active_memory()), 0)
