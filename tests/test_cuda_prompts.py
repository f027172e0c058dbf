"""Prompts on the GPU against the naive ops in float64: ragged batches, edges of chunks, cached prefixes, emits."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deltic.config import EngineConfig
from deltic.engine.loading import RandomModel, load
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.ops import reference
from deltic.ops.cuda import prefill
from deltic.ops.cuda.decode import DecodeStep
from deltic.ops.cuda.prefill import PrefillStep, plan_of
from deltic.ops.quantized import QTensor
from deltic.ops.torch import OPS as TORCH
from deltic.ops.torch import gdn as torch_gdn
from deltic.ops.torch.gdn import Gates, chunked, cut
from deltic.ops.types import PAGE, AttentionWeights, Batch, GdnSpec, GdnWeights, KvView, Rope, StateView
from deltic.runner.input_batch import build
from deltic.runner.model_runner import ModelRunner

UNITS_APART = True
if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)
NAN = float("nan")


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    rng = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=rng, device="cuda").to(dtype)


def error(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.double(), wanted.double().to(found.device)
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))


@pytest.fixture(scope="module", params=["tiny", "qwen3.5-0.8b", "qwen3.5-4b", "qwen3.5-0.8b q4_k"])
def runtime(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    name, _, quant = request.param.partition(" ")
    model = None if name == "tiny" else RandomModel(name, 4, initializer_range=0.05)
    yield load(model, EngineConfig(device="cuda", dtype="bfloat16", memory="2GiB", max_batch=64, max_context=16384,
                                   speculate="off", quant=quant or "none"))
    torch.cuda.empty_cache()


def prompts_of(runtime: ModelRunner) -> PrefillStep:
    assert isinstance(runtime.step, DecodeStep) and runtime.step.prefill, "the kernels do not serve this model"
    return runtime.step.prefill


def batch_of(shape: list[tuple[int, int]], emits: dict[int, list[int]] | None = None, moved: bool = False) -> Batch:
    """Rows of (done, tokens), those of one token first. emits: by row, after how many of its tokens."""
    rng, used = torch.Generator().manual_seed(len(shape)), 0
    pages = (1 + torch.randperm(2 * sum(-(-sum(row) // PAGE) for row in shape), generator=rng)).tolist()
    rows, slot = [], 3 * len(shape)
    for index, (done, tokens) in enumerate(shape):
        count = -(-(done + tokens) // PAGE)
        wanted = (emits or {}).get(index, [])
        rows.append(PlannedRow(tuple((7 * index + 3 * token) % 500 for token in range(tokens)), done,
                        tuple(pages[used:used + count]), 3 * index, 1, 3 * index + 1 if moved else None,
                        checkpoints=tuple((done + length, slot + i) for i, length in enumerate(wanted))))
        used, slot = used + count, slot + len(wanted)
    return build(StepPlan(tuple(rows)), torch.device("cuda"))


RAGGED = [(17, 1), (0, 1), (300, 1), (0, 2), (1, 63), (64, 64), (3, 65), (100, 127), (0, 200)]
CASES = {
    "1": ([(9, 1)], {}), "2": ([(0, 2)], {}), "63": ([(0, 63)], {0: [1, 62, 63]}), "64": ([(5, 64)], {0: [64]}),
    "65": ([(2, 65)], {0: [63, 64, 65]}), "127": ([(70, 127)], {0: [17, 100]}), "640": ([(0, 640)], {0: [512]}),
    "ragged": (RAGGED, {0: [1], 2: [1], 3: [1], 5: [16, 64], 8: [64, 65, 128, 199]}),
}


def poison(state: StateView, batch: Batch, seed: int) -> StateView:
    """Random states, NaN where nothing may be read; a copy in float64."""
    state.recurrent.copy_(randn(*state.recurrent.shape, seed=seed) * 0.3)
    state.conv.copy_(randn(*state.conv.shape, seed=seed + 1))
    for row in (batch.done == 0).nonzero().flatten().tolist():
        state.recurrent[batch.source[row]] = NAN
        state.conv[batch.source[row]] = NAN
    return StateView(state.recurrent.double(), state.conv.double())


@pytest.mark.parametrize("moved", [False, True], ids=["in-place", "moved"])
@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_gdn(runtime: ModelRunner, case: str, moved: bool) -> None:
    prompts, layer = prompts_of(runtime), runtime.decoder.weights.layers[0]
    assert isinstance(layer.mixer, GdnWeights)
    state, spec = runtime.views.states[0], layer.mixer.spec
    batch = batch_of(*CASES[case], moved)
    slow = poison(state, batch, 1)
    before = StateView(slow.recurrent.clone(), slow.conv.clone())
    proj = randn(batch.layout.tokens, spec.channels + spec.values + 2 * spec.value_heads, seed=3, dtype=torch.bfloat16)
    y = mix(prompts, layer, proj, batch)
    wide = replace(layer.mixer, **{name: getattr(layer.mixer, name).double()
                                   for name in ("conv", "decay", "dt_bias", "norm")})
    core = reference.gdn_core if runtime.name == "tiny" and batch.layout.tokens < 150 else torch_gdn._core
    output = core(proj.double(), wide, slow, replace(batch, memo={}))
    assert error(y, output) < 8e-3
    written = sorted({*batch.target.tolist(), *batch.emit_slot.tolist()})
    for slot in written:
        assert error(state.recurrent[slot], slow.recurrent[slot]) < 8e-3, slot
        fresh = slow.conv[slot] != 0  # what lies before position 0 may be anything
        assert torch.equal(state.conv[slot].double()[fresh], slow.conv[slot][fresh])
    others = [slot for slot in range(len(before.recurrent)) if slot not in written]
    for found, old in ((state.recurrent, before.recurrent), (state.conv, before.conv)):
        assert torch.equal(found[others].double().nan_to_num(7), old[others].nan_to_num(7))


def mix(prompts: PrefillStep, layer: object, proj: Tensor, batch: Batch) -> Tensor:
    work, mixer = prompts._buffers(batch, plan_of(batch), _turns(prompts._step, batch)), layer.mixer
    return (prompts._gdn if isinstance(mixer, GdnWeights) else prompts._attention)(layer, mixer, proj, work)


def _turns(step: DecodeStep, batch: Batch) -> Tensor:
    table = reference.rope(batch.positions.cpu(), step.decoder.rope)
    half = table.cos.shape[1] // 2
    return torch.cat((table.cos[:, :half], table.sin[:, :half]), 1).cuda()


def delta_errors(runtime: ModelRunner, tokens: int, slow_decay: bool) -> tuple[float, float]:
    """Of the outputs and of the final state, against float64 on the same convolved bfloat16 channels."""
    prompts, layer = prompts_of(runtime), runtime.decoder.weights.layers[0]
    mixer = layer.mixer
    spec: GdnSpec = mixer.spec
    state, batch = runtime.views.states[0], batch_of([(0, tokens)])
    proj = randn(tokens, spec.channels + spec.values + 2 * spec.value_heads, seed=3, dtype=torch.bfloat16)
    if slow_decay:
        proj[:, -spec.value_heads:] -= 6
    proj[:, spec.channels:spec.channels + spec.values] = 1.5
    # a norm and a gate that change little
    y = mix(prompts, replace(layer, mixer=replace(mixer, norm=torch.ones_like(mixer.norm))), proj, batch)
    padded = torch.cat((torch.zeros(3, spec.channels, device="cuda"), proj[:, :spec.channels].float()))
    taps = mixer.conv.float()
    mixed = sum(padded[tap:tap + tokens] * taps[:, tap] for tap in range(4))
    mixed = torch.nn.functional.silu(mixed).bfloat16().double()
    a, b = proj[:, -spec.value_heads:].double(), proj[:, -2 * spec.value_heads:-spec.value_heads].double()
    gates = Gates(torch.nn.functional.softplus(a + mixer.dt_bias) * mixer.decay, b.sigmoid())
    recurrent = torch.zeros_like(state.recurrent, dtype=torch.float64)
    output = chunked(mixed, gates, spec, recurrent, replace(batch, memo={}), cut(batch))
    output = output * (output.square().mean(-1, True) + spec.eps).rsqrt()
    return error(y / (1.5 / (1 + math.exp(-1.5))), output.flatten(1)), error(state.recurrent[0], recurrent[0])


@pytest.mark.parametrize("slow_decay", [False, True])
@torch.inference_mode()
def test_delta_rule_alone(runtime: ModelRunner, slow_decay: bool) -> None:
    output, state = delta_errors(runtime, 2000, slow_decay)
    print(f"delta rule of {runtime.name}, slow decay {slow_decay}: outputs {output:.1e}, state {state:.1e}")
    assert output < 6e-3 and state < 6e-3


@pytest.mark.parametrize("large", [False, True], ids=["flash", "cudnn"])
@pytest.mark.parametrize("shape", [[(0, 2)], [(0, 65)], [(40, 130)], [(128, 64)], [(300, 200)], RAGGED,
                                   [(500, 1), (513, 300), (0, 33)], [(900, 100)]],
                         ids=lambda shape: f"{len(shape)}-{shape[-1][1]}")
@torch.inference_mode()
def test_attention(runtime: ModelRunner, shape: list[tuple[int, int]], large: bool,
                   monkeypatch: pytest.MonkeyPatch) -> None:
    if large:
        monkeypatch.setattr(prefill, "_LARGE", 60 * 60)
        monkeypatch.setattr(prefill, "_LONG", 60)
        monkeypatch.setattr(prefill, "PREFIX_GRAIN", 128)
    prompts, layer = prompts_of(runtime), runtime.decoder.weights.layers[3]
    assert isinstance(layer.mixer, AttentionWeights)
    kv, spec, batch = runtime.views.kv[0], layer.mixer.spec, batch_of(shape)
    kv.keys.fill_(NAN)
    kv.values.fill_(NAN)
    for row, done in enumerate(batch.done.tolist()):
        for position in range(done):
            page = batch.pages[row, position // PAGE]
            kv.keys[page, position % PAGE] = randn(spec.kv_heads, spec.head_dim, seed=position)
            kv.values[page, position % PAGE] = randn(spec.kv_heads, spec.head_dim, seed=position + 1)
    slow = KvView(kv.keys.double(), kv.values.double())
    width = spec.queries * 2 + 2 * spec.kv
    proj = randn(batch.layout.tokens, width, seed=3, dtype=torch.bfloat16)
    y = mix(prompts, layer, proj, batch)
    table = reference.rope(batch.positions.cpu(), runtime.decoder.weights.rope)
    mixer = AttentionWeights(spec, torch.eye(width).cuda().double(), layer.mixer.q_norm.double(),
                             layer.mixer.k_norm.double(), torch.eye(spec.queries).cuda().double())
    output = TORCH.attention_mixer(proj.double(), mixer, slow, replace(batch, memo={}),
                                   Rope(table.cos.cuda(), table.sin.cuda()))
    assert error(y, output) < 8e-3
    stored = batch.store
    for found, wanted in ((kv.keys, slow.keys), (kv.values, slow.values)):
        assert error(found.flatten(0, 1)[stored], wanted.flatten(0, 1)[stored]) < 2e-3


def widened(part: Any) -> Any:
    """Weights or views in float32 and memory of their own, with the same numbers."""
    if isinstance(part, QTensor):
        return part.dequantize().float()
    if isinstance(part, Tensor):
        return part.to(torch.float32, copy=True) if part.is_floating_point() else part
    if isinstance(part, tuple):
        return tuple(map(widened, part))
    if not is_dataclass(part) or isinstance(part, type):
        return part
    return replace(part, **{field.name: widened(getattr(part, field.name)) for field in fields(part)})


@pytest.mark.parametrize("case", ["2", "65", "ragged"])
@torch.inference_mode()
def test_steps(runtime: ModelRunner, case: str) -> None:
    """Against the torch ops in float32, on the same weights."""
    batch = batch_of(*CASES[case])
    pools, decoder = runtime.cache.pools, runtime.decoder

    def fill() -> None:
        for seed, tensor in enumerate((pools.keys, pools.values, pools.recurrent, pools.conv)):
            tensor.copy_(randn(*tensor.shape[1:], seed=seed) * 0.3)

    fill()
    views = widened(runtime.views)
    exact = replace(decoder, weights=widened(decoder.weights), dtype=torch.float32)
    wanted = exact.logits(exact.forward(replace(batch, memo={}), views))
    states = torch.stack([view.recurrent for view in views.states])
    fill()
    assert runtime.step is not None
    served = runtime.step(replace(batch, memo={}))
    assert served is not None
    assert error(served[0], wanted) < 3e-2
    assert error(pools.recurrent, states) < 2e-3
    everything = replace(batch, layout=replace(batch.layout, hidden=True), memo={})
    fill()
    both = runtime.step(everything)
    assert both and both[1] is not None and both[1].shape == (batch.layout.tokens, runtime.config.hidden_size)
    assert error(both[0], served[0]) < 1e-3


@pytest.mark.parametrize("tokens", [300, 700, 1024, 2048, 4096])
@pytest.mark.parametrize("model", ["qwen3.5-0.8b", "qwen3.5-4b", "qwen3.5-35b-a3b"])
def test_steps_are_reproducible(model: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names the first operation that does not."""
    runtime = load(RandomModel(model, 4), EngineConfig(device="cuda", dtype="bfloat16", memory="2GiB", max_batch=1,
                                                       max_context=16384, speculate="off"))
    batch, seen = batch_of([(0, tokens)]), list[tuple[str, Tensor]]()

    def watched(owner: type, name: str) -> None:
        operation = getattr(owner, name)

        def call(self: object, *arguments: object) -> Any:
            found = operation(self, *arguments)
            if isinstance(found, Generator):
                return launches(found)
            seen.append((name, found))
            return found

        def launches(parts: Generator[Any, None, Tensor]) -> Generator[Any, None, Tensor]:
            found = yield from parts
            seen.append((name, found))
            return found
        monkeypatch.setattr(owner, name, call)

    for owner, names in (
        (DecodeStep, ("linear", "normed", "_gated", "head")),
        (PrefillStep, ("_gdn", "_attention")),
    ):
        for name in names:
            watched(owner, name)

    def run() -> list[tuple[str, Tensor]]:
        seen.clear()
        runtime.run(batch)
        return [*seen]

    wanted = run()
    for _ in range(8):
        differs = [f"{index}: {name}" for index, ((name, old), (_, new)) in enumerate(zip(wanted, run(), strict=True))
                   if not torch.equal(old, new)]
        assert not differs, differs[:3]
    torch.cuda.empty_cache()
