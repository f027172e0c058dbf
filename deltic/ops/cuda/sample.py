"""Sampling: plain cases by deltic's kernels, all others by torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from deltic.ops.cuda.arguments import ChoiceArgs
from deltic.ops.cuda.driver import Module, headers, load_module, why_not_compiled
from deltic.ops.torch import OPS as TORCH
from deltic.ops.types import Sampled, Sampling

log = logging.getLogger("deltic")


def _parts(rows: int) -> int:
    """Returns the number of blocks per row."""
    return max(32, 128 // rows)


_SOURCE = ('extern "C" __global__ void __launch_bounds__(256) k_choose_part(const __grid_constant__ Choice a) '
           "{ choose_part(a); }\n"
           'extern "C" __global__ void __launch_bounds__(32) k_choose(const __grid_constant__ Choice a) '
           "{ choose(a); }\n")


def source() -> str:
    """Returns the CUDA source of the kernels."""
    return headers("sample") + _SOURCE


def sample(logits: Tensor, sampling: Sampling) -> Sampled:
    """Draws tokens without waiting. The kernels' result is valid until the thread samples the same number of rows."""
    plain = _is_plain(sampling) and logits.is_cuda and logits.dtype == torch.float32 and logits.is_contiguous()
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


def sample_parts(parts: Sequence[Tensor], sampling: Sampling) -> Sampled | None:
    """Works like `sample` for logits [L, V] with columns on several devices, each part contiguous. Returns None if all
    logits are needed in one place. sampling, result: on the first device."""
    modules = [_module(part.device) for part in parts] if _is_plain(sampling) else []
    known = tuple(module for module in modules if module)
    if len(known) < len(parts):
        return None
    draw = _drawer_of_parts(known, len(parts[0]), tuple(part.shape[1] for part in parts), get_ident())
    tokens, healthy = draw(parts, sampling)
    return Sampled(tokens, healthy, healthy, landed=sampling.landing is not None)


def _is_plain(sampling: Sampling) -> bool:
    return sampling.adjust is None and not sampling.filtered and sampling.top_logprobs is None


def choose(logits: Tensor, temperature: Tensor, keys: Tensor, chosen: Tensor, ids: Tensor | None) -> None:
    """Launches a draw from logits [R, V] float32, without filters and penalties.

    temperature [R] float32, keys [R] int64. chosen [2, R] int64: receives tokens, then 1 if a row's logits are healthy.
    ids [V] int64: tokens of the logits, read when the kernel runs; None: all tokens in order.
    """
    module, (rows, vocabulary) = _module(logits.device), logits.shape
    assert module is not None, "the kernels that draw cannot be compiled"
    parts = _parts(rows)
    scratch = torch.empty(3, rows * parts, dtype=torch.int64, device=logits.device)
    arguments = ChoiceArgs(
        logits=logits, temperature=temperature, key=keys, ids=ids, score=scratch[0], bounds=scratch[1],
        token=scratch[2], chosen=chosen, landing=None, vocabulary=vocabulary, parts=parts, rows=rows, first=0,
        devices=1)
    module.launch("k_choose_part", (parts, rows), 256, arguments, overlap=False)
    module.launch("k_choose", (rows,), 32, arguments, overlap=False)


@cache
def _drawer(module: Module, rows: int, vocabulary: int, thread: int
            ) -> Callable[[Tensor, Sampling], tuple[Tensor, Tensor]]:
    """Returns a function that draws from `rows` rows. Its results, tokens and health of the logits, [rows] int64 each,
    are valid until the thread's next call."""
    device = module.device
    parts = _parts(rows)
    numbers = torch.empty(rows * (2 + 3 * parts), dtype=torch.int64, device=device)
    chosen: Tensor
    chosen, token, score, bounds = numbers.split((2 * rows, *(rows * parts,) * 3))
    arguments = ChoiceArgs(
        logits=None, temperature=None, key=None, ids=None, score=score, bounds=bounds, token=token, chosen=chosen,
        landing=None, vocabulary=vocabulary, parts=parts, rows=rows, first=0, devices=1)
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
    """Returns the reason why torch samples; None if the kernels here sample."""
    return why_not_compiled(source(), device)


@cache
def _drawer_of_parts(modules: tuple[Module, ...], rows: int, widths: tuple[int, ...], thread: int
                     ) -> Callable[[Sequence[Tensor], Sampling], tuple[Tensor, Tensor]]:
    """Works like `_drawer` for logits with columns on several devices, `widths` each. Each device sends the best of its
    tokens to the first device."""
    parts = _parts(rows)
    size, total = 3 * rows * parts, sum(widths)
    numbers = torch.empty(2 * rows + size * len(modules), dtype=torch.int64, device=modules[0].device)
    chosen, joined = numbers.split((2 * rows, size * len(modules)))
    found = [joined[:size], *(torch.empty(size, dtype=torch.int64, device=module.device) for module in modules[1:])]
    arguments, steps = list[Any](), list[Callable[[], None]]()
    for index, (module, own) in enumerate(zip(modules, found, strict=True)):
        score, bounds, token = own.view(3, -1)
        arguments.append(ChoiceArgs(
            logits=None, temperature=None, key=None, ids=None, score=score, bounds=bounds, token=token, chosen=None,
            landing=None, vocabulary=widths[index], parts=parts, rows=rows, first=sum(widths[:index]), devices=1))
        steps.append(module.prepare("k_choose_part", (parts, rows), 256, arguments[-1]))
    score, bounds, token = found[0].view(3, -1)
    last = ChoiceArgs(logits=None, temperature=None, key=None, ids=None, score=score, bounds=bounds, token=token,
                      chosen=chosen, landing=None, vocabulary=total, parts=parts, rows=rows, first=0,
                      devices=len(modules))
    join = modules[0].prepare("k_choose", (rows,), 32, last)
    given, zeros = ([(torch.zeros(rows, device=module.device),
                      torch.zeros(rows, dtype=torch.int64, device=module.device)) for module in modules]
                    for _ in range(2))
    tokens, healthy = chosen.view(2, -1)

    def draw(logits: Sequence[Tensor], sampling: Sampling) -> tuple[Tensor, Tensor]:
        for rank, (part, module) in enumerate(zip(logits, modules, strict=True)):
            temperature, key = sampling.temperature, sampling.key
            if rank:
                temperature, key = (zeros if sampling.greedy else given)[rank]
            if rank and not sampling.greedy:
                temperature.copy_(sampling.temperature, non_blocking=True)
                key.copy_(sampling.key, non_blocking=True)
            own = arguments[rank]
            own.logits, own.temperature, own.key = part.data_ptr(), temperature.data_ptr(), key.data_ptr()
            with torch.cuda.device(module.device):
                steps[rank]()
            if rank:
                joined[rank * size:(rank + 1) * size].copy_(found[rank], non_blocking=True)
        last.landing = None if sampling.landing is None else sampling.landing.data_ptr()
        with torch.cuda.device(modules[0].device):
            join()
        return tokens, healthy

    return draw
