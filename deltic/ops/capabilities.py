"""Detects devices and describes the capabilities of their backends."""

from __future__ import annotations

import logging
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from deltic.errors import ConfigError

log = logging.getLogger("deltic")

_MIN_COMPUTE_CAPABILITY: Final = (8, 0)
"""Older GPUs lack bfloat16 arithmetic."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Capabilities that a model's backend declares. The engine depends on them, never on the name of a device.

    overlaps: the device computes while the host schedules the next step.
    own_memory: the device has its own memory, and host memory is a lower tier.
    max_verify_rows: steps with drafts run in buckets of up to this many rows, without prompt rows; None: steps of any
        shape may have drafts.
    defer_from: minimum number of rows for decode steps that leave state writes in delta logs; None: they never do.
    frames: pages and slots may share memory.
    partial_heads: some rows of the logits matrix may serve as a draft head, because computing fewer logits saves time.
    adapts: decode steps of rows with adapters have buckets, so that the host need not wait for them.
    """

    overlaps: bool = False
    own_memory: bool = False
    max_verify_rows: int | None = None
    defer_from: int | None = None
    frames: bool = True
    partial_heads: bool = False
    adapts: bool = False

    @property
    def verifies(self) -> bool:
        """True if steps with drafts run in buckets."""
        return self.max_verify_rows is not None

    @property
    def defers_state_writes(self) -> bool:
        return self.defer_from is not None


_DEVICES: Final = {
    "cpu": Capabilities(partial_heads=True),
    "cuda": Capabilities(overlaps=True, own_memory=True),
    "mlx": Capabilities(frames=False),
}
"""Capabilities by device kind. MLX has no views of memory in which layers overlap."""


def device_kind(device: str | torch.device) -> str:
    """Returns `cpu`, `cuda` or `mlx` for an option or a torch device. With `mlx`, torch tensors are on the CPU."""
    return str(device).partition(":")[0]


def device_capabilities(device: str | torch.device) -> Capabilities:
    """Returns the capabilities of every model on this device. A loaded model may have more."""
    return _DEVICES[device_kind(device)]


def is_apple_silicon() -> bool:
    """Returns True on a Mac with a GPU that MLX supports."""
    return sys.platform == "darwin" and platform.machine() == "arm64"


def mlx_facts() -> list[str] | str:
    """Returns the version of MLX and its device, or the reason why it is unusable."""
    from deltic.ops import mlx

    return mlx.missing() or mlx.device_facts()


def find_device() -> str:
    """Returns `cuda` if torch finds a GPU that is new enough, `mlx` on a Mac with an Apple GPU and the mlx package,
    else `cpu`."""
    if is_apple_silicon() and find_spec("mlx") is not None:
        return "mlx"
    if not torch.cuda.is_available():
        return "cpu"
    capability = torch.cuda.get_device_capability()
    if capability >= _MIN_COMPUTE_CAPABILITY:
        return "cuda"
    log.warning("%s has compute capability %d.%d, less than %d.%d: the model runs on the CPU (`device='cuda'` tries "
                "the GPU all the same)", torch.cuda.get_device_name(), *capability, *_MIN_COMPUTE_CAPABILITY)
    return "cpu"


def check_devices(devices: Sequence[str]) -> None:
    """Raises ConfigError if this machine lacks one of the devices, or if they cannot share a model."""
    if device_kind(devices[0]) != "cuda":
        return
    if not torch.cuda.is_available():
        raise ConfigError(f"device {devices[0]}: torch finds no CUDA device here; use `device='cpu'`, or install a "
                          "CUDA build of torch", "device")
    if (several := len(devices)) == 1:
        return
    count = torch.cuda.device_count()
    if (torch.device(devices[-1]).index or 0) >= count:
        raise ConfigError(f"tp={several} needs the GPUs {devices[0]} to {devices[-1]}, and this machine has {count}, "
                          "from cuda:0 on: choose a smaller tp, or another first device", "tp")
    kinds = {torch.cuda.get_device_name(device): device for device in devices}
    if len(kinds) > 1:
        found = ", ".join(f"{device} is {name}" for name, device in kinds.items())
        raise ConfigError(f"tp={several} needs GPUs of one kind, as their bits differ: {found}; choose another first "
                          "device, hide some (CUDA_VISIBLE_DEVICES), or use tp=1", "tp")


def verifies_drafts(device: str, dtype: str) -> bool:
    """Returns True if the backend verifies a row's drafts in one pass, without running torch op by op."""
    if device_kind(device) != "cuda":
        return True
    from deltic.ops.cuda import serves_delta_logs

    return serves_delta_logs(torch.device(device), dtype)


def can_defer_state_writes(device: str, dtype: str) -> bool:
    """Returns True if the backend can leave the state writes of decode steps in delta logs."""
    return device_capabilities(device).overlaps and verifies_drafts(device, dtype)


def gpu_kernels(device: str) -> str | None:
    """Returns the variant of deltic's kernels that a GPU uses; None for other devices, or without a GPU."""
    if device_kind(device) != "cuda" or not torch.cuda.is_available():
        return None
    from deltic.ops.cuda.card import card_of

    return card_of(torch.device(device)).description


def on_device(host: Tensor, device: torch.device) -> Tensor:
    """Copies a host tensor to the device in stream order, without waiting. Returns the tensor itself on a CPU."""
    if device.type == "cpu":
        return host
    from deltic.ops.cuda import staging

    return staging.on_device(host, device)


def numeric_facts(device: str, cpu_level: str) -> dict[str, object]:
    """Returns the facts besides the ops on which the bits of results depend: the library of CPU kernels and its
    instruction set, and the GPU with its CUDA version."""
    from deltic.ops.cpu.library import LEVELS, load

    library = load()
    cpu: dict[str, object] = {"library": library}
    if not isinstance(library, str):
        best = LEVELS[library.deltic_best_level()]
        cpu = {"library": blake2b(Path(library._name).read_bytes(), digest_size=16).hexdigest(), "best": best,
               "level": best if cpu_level == "auto" else cpu_level}
    if device_kind(device) == "mlx":
        return {"cpu": cpu, "mlx": mlx_facts()}
    if device_kind(device) == "cpu":
        return {"cpu": cpu}
    from deltic.ops.cuda.card import card_of

    card = card_of(torch.device(device))
    return {"cpu": cpu, "cuda": [torch.version.cuda, torch.cuda.get_device_name(torch.device(device)),
                                 *[card.name] * card.restricted]}


def backend_summary(facts: Mapping[str, Any]) -> str:
    """Describes a backend in a few words. facts: `numeric_facts`, and as `ops` the result of `explain`."""
    if "mlx" in facts:
        return f"mlx on {facts['mlx'][1]}"
    if "cuda" in facts:
        return f"torch on {facts['cuda'][1]}"
    ops = facts["ops"]
    return f"cpu kernels ({facts['cpu']['level']})" if ops["step"] == "cpu" else f"{ops['mlp'].partition(' ')[0]} ops"
