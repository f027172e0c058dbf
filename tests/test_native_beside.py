"""Experts that host threads compute on requests through shared memory: right sums, bits that do not depend on other
tokens or the number of threads, and threads that sleep, wake and end."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time

import pytest
import torch
from native_pools import best_level
from op_cases import same_bits
from torch import Tensor

from deltic.ops.cpu import missing
from deltic.ops.cpu.experts import MAX_TOKENS, OffloadedExperts

pytestmark = pytest.mark.skipif(bool(missing()), reason=str(missing()))

LAYERS, EXPERTS, MOST = 2, 7, 4
SIZES = [(64, 8), (192, 40), (100, 24), (33, 7), (576, 200), (1024, 136)]


def weights_of(hidden: int, size: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(hidden)
    return [(torch.randn(EXPERTS, 3 * size * hidden, generator=rng) * hidden**-0.5).bfloat16() for _ in range(LAYERS)]


def beside(hidden: int, size: int, threads: int = 2, level: int | None = None) -> OffloadedExperts:
    return OffloadedExperts(weights_of(hidden, size), hidden, MOST, (threads, best_level() if level is None else level))


class Request:
    """A request of `tokens`; every third has no experts, and one has an expert twice."""

    def __init__(self, hidden: int, tokens: int) -> None:
        rng = torch.Generator().manual_seed(tokens)
        self.input = torch.randn(tokens, hidden, generator=rng).bfloat16()
        self.factors = torch.rand(tokens, generator=rng) + 0.5
        self.shares = torch.rand(tokens, MOST, generator=rng)
        self.experts = [[] if token % 3 == 2 else
                        torch.randperm(EXPERTS, generator=rng)[:1 + token % MOST].tolist() for token in range(tokens)]
        if tokens > 3:
            self.experts[3][1] = self.experts[3][0]

    def ask(self, of: OffloadedExperts, layer: int, tokens: list[int]) -> Tensor:
        """Returns the sums of these tokens; NaN where nothing was written."""
        of.sums.fill_(torch.nan)
        for row, token in enumerate(tokens):
            mine = self.experts[token]
            of.counts[row] = len(mine)
            of.experts[row, :len(mine)] = torch.tensor(mine, dtype=torch.int32)
            of.shares[row], of.factors[row], of.input[row] = self.shares[token], self.factors[token], self.input[token]
        of.ask(layer, len(tokens))
        return of.sums[:len(tokens)].clone()

    def wanted(self, weights: Tensor, size: int) -> Tensor:
        hidden = self.input.shape[1]
        found = torch.full((len(self.input), hidden), torch.nan, dtype=torch.float64)
        for token, mine in enumerate(self.experts):
            for place, expert in enumerate(mine):
                whole = weights[expert].double()
                gate, other = ((self.input[token].double() @ half.T * self.factors[token].double()) for half in
                               whole[:2 * size * hidden].view(2, size, hidden))
                inner = (gate * gate.sigmoid() * other * self.shares[token, place].double()).bfloat16().double()
                given = inner @ whole[2 * size * hidden:].view(hidden, size).T
                found[token] = given if place == 0 else found[token] + given
        return found


def everyone(request: Request) -> list[int]:
    return list(range(len(request.input)))


@pytest.mark.parametrize(("hidden", "size"), SIZES)
def test_sums(hidden: int, size: int) -> None:
    """At every level of the processor."""
    weights, requests = weights_of(hidden, size), [Request(hidden, tokens) for tokens in (1, 2, 5, MAX_TOKENS)]
    cases = [(layer, request, request.wanted(weights[layer], size)) for layer in range(LAYERS) for request in requests]
    for level in range(best_level() + 1):
        of = beside(hidden, size, level=level)
        for layer, request, wanted in cases:
            found = request.ask(of, layer, everyone(request)).double()
            for token, mine in enumerate(request.experts):
                case = level, layer, len(request.input), token
                if mine:
                    assert (found[token] - wanted[token]).norm() < 3e-3 * wanted[token].norm(), case
                else:
                    assert bool(found[token].isnan().all()), case
        of.close()


@pytest.mark.parametrize(("hidden", "size"), SIZES[1:4])
def test_token_bits_do_not_depend_on_batch(hidden: int, size: int) -> None:
    request, found = Request(hidden, MAX_TOKENS), list[Tensor]()
    for threads in (1, 2, 3, 4):
        of = beside(hidden, size, threads)
        found.append(request.ask(of, 1, everyone(request)))
        assert same_bits(request.ask(of, 1, everyone(request)[::-1]), found[-1].flip(0))
        for token in everyone(request):
            assert same_bits(request.ask(of, 1, [token])[0], found[-1][token])
        of.close()
    assert all(same_bits(other, found[0]) for other in found)


def test_request_without_experts() -> None:
    of = beside(64, 8)
    of.ask(0, 0)
    request = Request(64, 3)
    request.experts = [[], [], []]
    assert bool(request.ask(of, 0, everyone(request)).isnan().all()) and of.computed() == 0
    of.close()


def test_computed_experts_are_counted() -> None:
    of, request = beside(64, 8), Request(64, MAX_TOKENS)
    request.ask(of, 0, everyone(request))
    known = len({expert for mine in request.experts for expert in mine})
    assert of.computed() == known and of.computing() > 0
    request.ask(of, 1, [0])
    assert of.computed() == known + 1
    of.close()
    assert of.computed() == known + 1


@pytest.mark.parametrize("change", [("counts", MOST + 1), ("counts", -1), ("experts", EXPERTS), ("experts", -1)])
def test_invalid_request_returns_nan(change: tuple[str, int]) -> None:
    of, request = beside(64, 8), Request(64, 2)
    well = request.ask(of, 0, [0, 1])
    getattr(of, change[0]).view(-1)[0] = change[1]
    of.ask(0, 2)
    assert bool(of.sums.isnan().all())
    assert same_bits(request.ask(of, 0, [0, 1]), well)
    for layer, tokens in ((LAYERS, 2), (0, MAX_TOKENS + 1)):
        of.sums.zero_()
        of.ask(layer, tokens)
        assert bool(of.sums.isnan().all())
    of.close()


def test_sleeping_threads_wake_up() -> None:
    of, request = beside(192, 40, 3), Request(192, 5)
    wanted = request.ask(of, 0, everyone(request))
    for pause in (0.002, 0.03, 0.0, 0.1):
        time.sleep(pause)
        assert same_bits(request.ask(of, 0, everyone(request))[[0, 1, 3]], wanted[[0, 1, 3]])
    of.close()


def test_napping_thread_sees_an_unannounced_request() -> None:
    """A step may ask long after its launch."""
    of, request = beside(64, 8), Request(64, 1)
    wanted = request.ask(of, 0, [0])
    time.sleep(0.05)
    of.sums.zero_()
    of.request[0] += 1
    until = time.monotonic() + 60
    while of.answer[0] != of.request[0] and time.monotonic() < until:
        time.sleep(0.001)
    assert same_bits(of.sums[:1], wanted)
    of.close()


def test_idle_threads_use_little_time() -> None:
    of, request = beside(64, 8, 4), Request(64, 1)
    request.ask(of, 0, [0])
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1
    of.close()


def test_two_stores_at_once() -> None:
    one, other = beside(64, 8, 2), beside(192, 40, 3)
    first, second = Request(64, 5), Request(192, 5)
    wanted = first.ask(one, 0, [0, 1]), second.ask(other, 1, [3, 4])
    for _ in range(200):
        assert same_bits(first.ask(one, 0, [0, 1]), wanted[0]) and same_bits(second.ask(other, 1, [3, 4]), wanted[1])
    one.close()
    assert same_bits(second.ask(other, 1, [3, 4]), wanted[1])
    other.close()


def threads_of_this_process() -> set[str]:
    return set(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="counts threads as Linux shows them")
def test_threads_end() -> None:
    others = threads_of_this_process()  # of tests before: they may end meanwhile
    for closes in (True, False):
        of = beside(64, 8, 3)
        assert len(threads_of_this_process() - others) == 3
        if closes:
            of.close()
            of.close()
            of.wake()
        del of
        gc.collect()
        assert not threads_of_this_process() - others


def test_interpreter_exits_while_threads_listen() -> None:
    code = ("import torch, os; from deltic.ops.cpu.experts import OffloadedExperts\n"
            "of = OffloadedExperts([torch.zeros(3, 3 * 8 * 64, dtype=torch.bfloat16)], 64, 2, (3, 0))\n"
            "of.ask(0, 0)\n"
            "child = os.fork()\n"
            "if child == 0:\n    del of\n    os._exit(0)\n"
            "print(os.waitpid(child, 0)[1], of.ask(0, 0))")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "0 None"), done.stderr


def test_unknown_level_is_refused() -> None:
    with pytest.raises(MemoryError):
        beside(64, 8, level=99)


def test_rate() -> None:
    of = beside(64, 8)
    assert of.rate() > 0 and of.computed() == 4 * MOST
    of.close()
