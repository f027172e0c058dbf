"""Empty kernels that mark places in a stream for a profiler, and the mapping from kernel names to operators."""

from __future__ import annotations

import re

import torch

from deltic.ops.cuda.driver import KernelArguments, Module, fields

NAMES = ("prefill", "decode", "mixed", "sample", "mtp", "draft_model", "model")
_PREFIX = "k_mark_"
_SOURCE = "struct Mark { int unused; };\n" + "".join(
    f'extern "C" __global__ void {_PREFIX}{name}(const __grid_constant__ Mark a) {{}}\n' for name in NAMES)

OPERATORS = {
    "mtp": r"k_(head_enter|head_keys|accept)",
    "sample": r"k_choose",
    "gdn_mixer": r"k_(gdn|delta|fold|append|prompt_conv|prompt_ring|gated_norm|copy_slot)",
    "attention_mixer": r"k_(attention|prompt_heads|prompt_gate|combine)|.*(flash|fmha|sdpa|softmax)",
    "adapters": r"k_(shrink|expand)",
    "moe": r"k_(experts|packed_gate|packed_down|grouped|group|route|rows|stack|tiles|unpack_experts|ask_host|add_host)",
    "embed": r"k_(enter|numbers|cursors|row_keys)",
    "add_norm": r"k_add_norm",
    "products": r"k_(gate|stage|unpack)|product_|packed_|.*(gemm|gemv|cutlass|cublas|nvjet|splitK|wgmma)",
    "copies": r"Memcpy|Memset",
}
"""Patterns of the names of deltic's and torch's kernels, by operator. Matrix products of all operators are `products`,
because their names do not contain the operator."""


class _Mark(KernelArguments):
    _fields_ = fields("", "", "unused")


class Marks:
    """Launches marks in the current stream of a device."""

    def __init__(self, device: torch.device) -> None:
        self._module, self._arguments = Module(_SOURCE, device), _Mark(unused=0)

    def put(self, name: str) -> None:
        """Marks the current place in the stream. name: one of `NAMES`."""
        self._module.launch(_PREFIX + name, (1,), 32, self._arguments, overlap=False)


def mark_of(kernel: str) -> str | None:
    """Returns a mark's name from the name of its kernel; None for other kernels."""
    return kernel.removeprefix(_PREFIX) if kernel.startswith(_PREFIX) else None


def operator_of(kernel: str) -> str:
    """Returns a kernel's operator; `other` if its name is unknown."""
    return next((operator for operator, pattern in OPERATORS.items() if re.match(pattern, kernel)), "other")
