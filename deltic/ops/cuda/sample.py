"""Sampling: the plain cases by our own kernels, all others by torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from threading import get_ident

import torch
from torch import Tensor

from deltic.ops.cuda.arguments import ChoiceArgs
from deltic.ops.cuda.driver import Module, headers, load_module, why_not_compiled
from deltic.ops.torch import OPS as TORCH
from deltic.ops.types import Sampled, Sampling

log = logging.getLogger("deltic")


def _parts(rows: int) -> int:
    """Blocks of a row."""
    return max(32, 128 // rows)


_SOURCE = ('extern "C" __global__ void __launch_bounds__(256) k_choose_part(const __grid_constant__ Choice a) '
           "{ choose_part(a); }\n"
           'extern "C" __global__ void __launch_bounds__(32) k_choose(const __grid_constant__ Choice a) '
           "{ choose(a); }\n")


def source() -> str:
    """Returns the CUDA source of the kernels."""
    return headers("sample") + _SOURCE


def sample(logits: Tensor, sampling: Sampling) -> Sampled:
    """Never waits. The kernels' result is valid until the thread samples from as many rows again."""
    plain = (sampling.adjust is None and not sampling.filtered and sampling.top_logprobs is None
             and logits.is_cuda and logits.dtype == torch.float32 and logits.is_contiguous())
    module = _module(logits.device) if plain else None
    if module is None:
        return TORCH.sample(logits, sampling)
    draw = _drawer(module, *logits.shape, get_ident())
    if torch.cuda.current_device() == logits.device.index:
        tokens, healthy = draw(logits, sampling)
    else:
        with torch.cuda.device(logits.device):
            tokens, healthy = draw(logits, sampling)
    return Sampled(tokens, healthy, healthy, landed=sampling.landing is not None)


def choose(logits: Tensor, temperature: Tensor, keys: Tensor, chosen: Tensor, ids: Tensor | None) -> None:
    """Launches a draw from logits [R, V] float32, without filters and penalties.

    temperature [R] float32, keys [R] int64. chosen [2, R] int64: receives tokens, then whether the logits are healthy.
    ids [V] int64: the tokens of the logits, read when the device gets there; None: all tokens in order.
    """
    module, (rows, vocabulary) = _module(logits.device), logits.shape
    assert module is not None, "the kernels that draw cannot be compiled"
    parts = _parts(rows)
    scratch = torch.empty(3, rows * parts, dtype=torch.int64, device=logits.device)
    arguments = ChoiceArgs(
        logits=logits, temperature=temperature, key=keys, ids=ids, score=scratch[0], bounds=scratch[1],
        token=scratch[2], chosen=chosen, landing=None, vocabulary=vocabulary, parts=parts, rows=rows)
    module.launch("k_choose_part", (parts, rows), 256, arguments, overlap=False)
    module.launch("k_choose", (rows,), 32, arguments, overlap=False)


@cache
def _drawer(module: Module, rows: int, vocabulary: int, thread: int
            ) -> Callable[[Tensor, Sampling], tuple[Tensor, Tensor]]:
    """Returns a draw from so many rows: tokens and whether they are healthy, [rows] int64 each, valid until the
    thread's next call."""
    device = module.device
    parts = _parts(rows)
    numbers = torch.empty(rows * (2 + 3 * parts), dtype=torch.int64, device=device)
    chosen: Tensor
    chosen, token, score, bounds = numbers.split((2 * rows, *(rows * parts,) * 3))
    arguments = ChoiceArgs(
        logits=None, temperature=None, key=None, ids=None, score=score, bounds=bounds, token=token, chosen=chosen,
        landing=None, vocabulary=vocabulary, parts=parts, rows=rows)
    tokens, healthy = chosen.view(2, -1)
    steps = (module.prepare("k_choose_part", (parts, rows), 256, arguments),
             module.prepare("k_choose", (rows,), 32, arguments))

    def draw(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        arguments.logits, arguments.temperature = logits.data_ptr(), sampling.temperature.data_ptr()
        arguments.key = sampling.key.data_ptr()
        arguments.landing = None if sampling.landing is None else sampling.landing.data_ptr()
        for step in steps:
            step()
        return tokens, healthy

    return draw


@cache
def _module(device: torch.device) -> Module | None:
    why = why_not(device)
    if why:
        log.warning("on the GPU torch serves every draw: %s", why)
    return None if why else load_module(source(), device)


def why_not(device: torch.device) -> str | None:
    """Returns why torch samples; None if the kernels here do."""
    return why_not_compiled(source(), device)
