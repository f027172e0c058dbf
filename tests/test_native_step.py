"""A whole step in one call: with replay rings it has the bits of plain steps, and it gives the hidden states of all
tokens without changing a bit of the logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from native_pools import moved, using
from op_cases import empty_ring, generator, same_bits
from support import lively, numbers, odd_shape
from torch import Tensor

from deltic.config import EngineConfig, LinearConfig
from deltic.engine.loading import RandomModel, load
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.ops import backends, reference
from deltic.ops.cpu import missing
from deltic.ops.types import PAGE, Batch, CacheViews, GdnWeights, StateView
from deltic.runner.input_batch import build
from deltic.runner.model_runner import ModelRunner

UNITS_APART = True
needs_kernels = pytest.mark.skipif(bool(missing()), reason=str(missing()))

CPU = torch.device("cpu")
KINDS: dict[str, dict[str, Any]] = {"float32": {"dtype": "float32"}, "bfloat16": {"dtype": "bfloat16"},
                                    "float16": {"dtype": "float16"},
                                    "q4_k": {"dtype": "bfloat16", "quant": "q4_k"}}
SHAPE = odd_shape(hidden_size=256, intermediate_size=512, head_dim=64, linear=LinearConfig(2, 6, 24, 128, 4))
PAGES = 6
"""Of each sequence."""


@cache
def model(kind: str) -> ModelRunner:
    options = EngineConfig(**{"memory": "8MiB", "max_batch": 4, "threads": 1, **KINDS[kind]})
    return load(RandomModel(shape=SHAPE, initializer_range=0.1), options)


def with_rings(runtime: ModelRunner, units: int) -> CacheViews:
    specs = [layer.mixer.spec for layer in runtime.decoder.weights.layers if isinstance(layer.mixer, GdnWeights)]
    views = [StateView(view.recurrent, view.conv, empty_ring(units, view.conv.dtype, spec))
             for view, spec in zip(runtime.views.states, specs, strict=True)]
    return CacheViews(runtime.views.kv, tuple(views))


def pages(sequence: int) -> tuple[int, ...]:
    return tuple(1 + sequence + 3 * index for index in range(PAGES))


def batch_of(rows: Sequence[tuple[int, tuple[int, ...], int, int, bool]], hidden: bool) -> Batch:
    """Rows (sequence, tokens, done, base, append) with all logits."""
    plan = StepPlan(tuple(PlannedRow(tokens, done, pages(sequence), sequence, True)
                      for sequence, tokens, done, _, _ in rows))
    batch = build(plan, CPU, all_logits=True)
    return replace(batch, base=torch.tensor([base for *_, base, _ in rows]),
                   delta_log=torch.tensor([sequence for sequence, *_ in rows]),
                   append=torch.tensor([append for *_, append in rows]), memo={}, span=None,
                   layout=replace(batch.layout, appends=any(append for *_, append in rows), hidden=hidden))


def plain(runtime: ModelRunner, tokens: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Logits and hidden states of one token at a time, as sequence 0, without rings."""
    step = runtime.step
    assert step is not None
    found = [step(batch_of([(0, (token,), done, done, False)], True)) for done, token in enumerate(tokens)]
    return torch.cat([logits for logits, _ in found]), torch.cat([hidden for _, hidden in found if hidden is not None])


@needs_kernels
@pytest.mark.covering
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_delta_logs_change_no_bit(kind: str, threads: int) -> None:
    """Two sequences that get the same tokens and other drafts, each with its own ring."""
    runtime, rng = model(kind), generator(4)
    tokens = numbers(3, PAGES * PAGE - 16, SHAPE.vocab_size)
    logits, hidden = plain(runtime, tokens)
    lively(logits.argmax(-1).tolist())
    views = with_rings(runtime, 3)
    with using(threads=threads):
        ops = moved(runtime).decoder.ops
    step = ops.step(ops, runtime.decoder.weights, views)
    assert step is not None
    where = {1: (0, 0), 2: (0, 0)}
    while min(done for done, _ in where.values()) < len(tokens):
        rows = []
        for sequence, (done, base) in where.items():
            chunk, right, append = (int(torch.randint(1, most, (1,), generator=rng)) for most in (10, 10, 5))
            right = min(right, chunk, len(tokens) - done) if append > 1 else min(chunk, len(tokens) - done)
            if right:
                drafts = numbers(done, chunk - right, SHAPE.vocab_size) if append > 1 else ()
                rows.append((sequence, tokens[done:done + right] + drafts, done, base, append > 1, right))
        rows.sort(key=lambda row: len(row[1]) > 1)
        found, states = step(batch_of([row[:5] for row in rows], True))
        assert states is not None and states.dtype == torch.float32
        start = 0
        for sequence, ids, done, base, append, right in rows:
            assert same_bits(found[start:start + right], logits[done:done + right])
            assert same_bits(states[start:start + right], hidden[done:done + right])
            where[sequence] = done + right, reference.next_base(base, done, len(ids), append)
            start += len(ids)


MIXED = [(0, (5,), 0, 0, False), (1, numbers(1, 20, SHAPE.vocab_size), 0, 0, False),
         (2, numbers(2, 7, SHAPE.vocab_size), 0, 0, False)]


def some_logits(batch: Batch) -> Batch:
    wanted = torch.tensor([0, 3, 19, 27])
    return replace(batch, logit_tokens=wanted, layout=replace(batch.layout, logits=len(wanted)), memo={})


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_change_no_bit_of_the_logits(kind: str) -> None:
    runtime = model(kind)
    assert runtime.step is not None
    wanted, none = runtime.step(some_logits(batch_of(MIXED, False)))
    logits, hidden = runtime.step(some_logits(batch_of(MIXED, True)))
    assert none is None and hidden is not None and same_bits(logits, wanted)
    assert hidden.shape == (28, SHAPE.hidden_size) and hidden.dtype == torch.float32
    head = backends()["cpu"].head(hidden, runtime.decoder.weights.head)
    assert same_bits(head[[0, 3, 19, 27]], logits)
    silent = batch_of(MIXED, True)
    silent = replace(silent, logit_tokens=silent.logit_tokens[:0], layout=replace(silent.layout, logits=0))
    logits, again = runtime.step(silent)
    assert len(logits) == 0 and again is not None and same_bits(again, hidden)


@pytest.mark.parametrize("backend", ["reference", "torch", pytest.param("cpu", marks=needs_kernels)])
def test_decoder_returns_hidden_states(backend: str) -> None:
    runtime = model("float32")
    decoder = replace(runtime.decoder, ops=backends()[backend])
    wanted = decoder.forward(some_logits(batch_of(MIXED, False)), runtime.views)
    batch = some_logits(batch_of(MIXED, True))
    hidden = decoder.forward(batch, runtime.views)
    assert hidden.shape == (28, SHAPE.hidden_size) and same_bits(hidden[batch.logit_tokens], wanted)
    if runtime.step is not None:
        whole = runtime.step(replace(batch, memo={}))[1]
        assert whole is not None
        torch.testing.assert_close(hidden, whole, rtol=1e-3, atol=1e-3)
