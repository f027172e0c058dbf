"""The GPU's kernels against the naive ops in float64: what they give, what they write, what they leave alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deltic.config import EngineConfig
from deltic.engine.loading import RandomModel, load
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.ops import reference
from deltic.ops.cuda.decode import DecodeStep
from deltic.ops.cuda.driver import Module
from deltic.ops.cuda.gemv import launch_plain
from deltic.ops.cuda.kernel_config import (
    ADD,
    GATE,
    STORE,
    Multiply,
    Shapes,
    gdn_slice,
    heads_product,
    heads_stride,
)
from deltic.ops.cuda.sample import sample
from deltic.ops.torch import OPS as TORCH
from deltic.ops.torch import gdn as torch_gdn
from deltic.ops.types import (
    PAGE,
    AttentionWeights,
    Batch,
    GdnSpec,
    GdnWeights,
    KvView,
    Padded,
    Rope,
    Sampling,
    StateView,
)
from deltic.runner.input_batch import build, step_of
from deltic.runner.model_runner import ModelRunner

UNITS_APART = True
__test__ = torch.cuda.is_available()  # without a device only the helpers below are of use
NAN = float("nan")


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    rng = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=rng, device="cuda").to(dtype)


def error(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.double(), wanted.double().to(found.device)
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))


# Products

COLUMNS = (192, 576, 1024, 2560, 4096, 3584, 9216)


@pytest.fixture(scope="module")
def products() -> Module:
    known = [heads_product(spec, 8) for spec in HEADS]
    shapes = Shapes((*known, *some_products(*COLUMNS)), None, None)
    assert not shapes.limits_registers
    return Module(shapes.source(), torch.device("cuda"))


@pytest.fixture(scope="module")
def limits_registers() -> Module:
    """With few registers."""
    shapes = Shapes(tuple(some_products(2560, 9216)), None, None)
    assert shapes.limits_registers
    return Module(shapes.source(), torch.device("cuda"))


def some_products(*columns: int) -> list[Multiply]:
    return [Multiply(each, norm, out, unit) for each in columns for norm, out, unit in
            ((True, STORE, 8), (True, GATE, 8), (False, ADD, 8), (False, ADD, 4))]


HEADS = (GdnSpec(3, 6, 32, 32, 4, 1e-6), GdnSpec(16, 16, 128, 128, 4, 1e-6), GdnSpec(16, 32, 128, 128, 4, 1e-6))
BLOCKS = 24
"""Few, so that every one has several groups of units."""


def multiply(module: Module, weight: Tensor, x: Tensor, scale: Tensor | None, y: Tensor, out: int,
             unit: int = 8) -> None:
    product = Multiply(weight.shape[1], scale is not None, out, unit)
    if len(x) > product.most:
        pytest.skip("no such product")
    launch(module, product, weight, x, y, scale)


def launch(module: Module, product: Multiply, weight: Tensor, x: Tensor, y: Tensor, scale: Tensor | None) -> None:
    launch_plain(module, product, weight, len(x), BLOCKS, x=x, scale=scale, y=y, eps=1e-6)
    torch.cuda.synchronize()


def check_norm(products: Module, weight: Tensor, tokens: int) -> None:
    rows, columns = weight.shape
    x, scale = randn(tokens, columns, seed=1) * 3, randn(columns, seed=2) * 0.1 + 1
    y = torch.full((tokens, rows), NAN, device="cuda")
    multiply(products, weight, x, scale, y, STORE)
    factor = (x.double().square().mean(-1, True) + 1e-6).rsqrt()
    normalised = (x * scale).bfloat16().double() * factor
    assert error(y, normalised @ weight.double().t()) < 1e-5
    alone = torch.full((1, rows), NAN, device="cuda")
    for token in range(tokens):
        multiply(products, weight, x[token:token + 1], scale, alone, STORE)
        assert torch.equal(alone[0], y[token]), "a token's sums depend on the batch"


@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 8, 9, 16])
@pytest.mark.parametrize("columns", COLUMNS)
def test_products(products: Module, columns: int, tokens: int) -> None:
    for rows in (588, 1003):
        weight = randn(rows, columns, seed=rows, dtype=torch.bfloat16) * columns**-0.5
        if columns in (192, 576, 1024, 2560, 4096):
            check_norm(products, weight, tokens)
        packed, old = randn(tokens, columns, seed=4, dtype=torch.bfloat16), randn(tokens, rows, seed=5)
        for unit in (8, 4):
            y = old.clone()
            multiply(products, weight, packed, None, y, ADD, unit)
            assert error(y, old.double() + packed.double() @ weight.double().t()) < 1e-5


@pytest.mark.parametrize("tokens", [1, 8, 9])
@pytest.mark.parametrize("columns", [2560, 9216])
def test_products_with_few_registers(limits_registers: Module, columns: int, tokens: int) -> None:
    test_products(limits_registers, columns, tokens)


@pytest.mark.parametrize("tokens", [1, 5, 16])
@pytest.mark.parametrize("columns", [192, 1024])
def test_gated_products(products: Module, columns: int, tokens: int) -> None:
    weight = randn(2 * 576, columns, seed=3, dtype=torch.bfloat16) * columns**-0.5
    x, scale = randn(tokens, columns, seed=1), randn(columns, seed=2) * 0.1 + 1
    y = torch.full((tokens, 576), NAN, device="cuda", dtype=torch.bfloat16)
    multiply(products, weight, x, scale, y, GATE)
    normalised = x.double() * (x.double().square().mean(-1, True) + 1e-6).rsqrt() * scale.double()
    gate, up = (normalised @ weight.double().t()).chunk(2, -1)
    assert error(y, gate * gate.sigmoid() * up) < 5e-3


def normed(core: Tensor, gate: Tensor, spec: GdnSpec, norm: Tensor) -> Tensor:
    """What heads give, normed and gated: [T, values] each."""
    heads = core.view(len(core), -1, spec.value_dim)
    heads = heads * (heads.square().mean(-1, True) + spec.eps).rsqrt() * norm
    return heads.flatten(1) * gate * gate.sigmoid()


def in_slices(core: Tensor, gate: Tensor, spec: GdnSpec, norm: Tensor) -> Tensor:
    """As heads in slices leave it: all but the factors of the norm, and behind it the squares of slices."""
    heads = core * norm.repeat(spec.value_heads) * gate * gate.sigmoid()
    squares = core.unflatten(1, (-1, gdn_slice(spec, "few"))).square().sum(-1)
    return F.pad(torch.cat((heads, squares), 1), (0, heads_stride(spec) - spec.values - squares.shape[1]))


def normed_slices(left: Tensor, spec: GdnSpec) -> Tensor:
    """What `in_slices` has left, normed."""
    slices = spec.values // gdn_slice(spec, "few")
    squares = left[:, spec.values:spec.values + slices].unflatten(1, (spec.value_heads, -1)).sum(-1, keepdim=True)
    heads = left[:, :spec.values].unflatten(1, (spec.value_heads, -1))
    found: Tensor = (heads * (squares / spec.value_dim + spec.eps).rsqrt()).flatten(1)
    return found


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("spec", HEADS, ids=lambda spec: str(spec.values))
def test_products_of_heads(products: Module, spec: GdnSpec, tokens: int) -> None:
    for rows in (588, 1003):
        weight = randn(rows, spec.values, seed=rows, dtype=torch.bfloat16) * spec.values**-0.5
        core, gates = randn(tokens, spec.values, seed=1), randn(tokens, spec.values + 60, seed=2)[:, 8:8 + spec.values]
        norm, old = randn(spec.value_dim, seed=3) * 0.1 + 1, randn(tokens, rows, seed=5)
        y = old.clone()
        left = in_slices(core, gates, spec, norm)
        launch(products, heads_product(spec, 8), weight, left, y, None)
        x = normed(core.double(), gates.double(), spec, norm.double())
        assert error(y, old.double() + x @ weight.double().t()) < 4e-3
        launch(products, heads_product(spec, 8), weight, left[:1], old[:1], None)
        assert torch.equal(old[0], y[0])


# Mixers


@pytest.fixture(scope="module", params=["tiny", "qwen3.5-0.8b", "qwen3.5-4b", "qwen3.5-0.8b q4_k"])
def runtime(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    name, _, quant = request.param.partition(" ")
    model = None if name == "tiny" else RandomModel(name, 4, initializer_range=0.05)
    yield load(model, EngineConfig(device="cuda", dtype="bfloat16", memory="1GiB", max_batch=64, max_context=4096,
                                   speculate="off", quant=quant or "none"))
    torch.cuda.empty_cache()


def served(runtime: ModelRunner) -> DecodeStep:
    assert isinstance(runtime.step, DecodeStep), "the kernels do not serve this model"
    return runtime.step


def batch_of(done: list[int], real: int, moved: bool = False) -> Batch:
    """Rows with these cursors; the ones after `real` only fill the bucket up, and repeat the last real one."""
    rows, pages = len(done), 64
    rng = torch.Generator().manual_seed(rows)
    table = (1 + torch.randperm(rows * pages, generator=rng)).view(rows, pages)
    slots = torch.randperm(2 * rows, generator=rng)
    source, target = slots[:rows], slots[rows:] if moved else slots[:rows]
    cursor = torch.tensor(done)
    store = torch.tensor([int(table[row, d // PAGE]) * PAGE + d % PAGE for row, d in enumerate(done)])
    flat = torch.cat([torch.tensor([real]), torch.arange(rows) + 5, cursor.repeat(3), torch.arange(rows + 1), cursor,
                      store, source, target, torch.full((rows,), -1), table.flatten()]).cuda()
    return step_of(Padded(flat, rows, pages))


CURSORS = [[1], [0], [8, 0], [17, 0, 300, 15], [16 * row + row for row in range(16)], [13 * row for row in range(32)]]


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("done", CURSORS, ids=lambda done: f"{len(done)}-{done[0]}")
def test_gdn(runtime: ModelRunner, done: list[int], moved: bool) -> None:
    step, layer = served(runtime), runtime.decoder.weights.layers[0]
    assert isinstance(layer.mixer, GdnWeights)
    state, spec = runtime.views.states[0], layer.mixer.spec
    state.recurrent.copy_(randn(*state.recurrent.shape, seed=1) * 0.3)
    state.conv.copy_(randn(*state.conv.shape, seed=2))
    before = StateView(state.recurrent.double(), state.conv.double())
    batch = batch_of(done, len(done), moved)
    few = len(done) <= 16
    proj = randn(len(done), spec.channels + spec.values + 2 * spec.value_heads, seed=3,
                 dtype=torch.float32 if few else torch.bfloat16)
    work = step.begin(batch, "few" if few else "many")
    work.y.fill_(NAN)
    step.mix(layer, work, proj, proj.shape[1])
    wide = replace(layer.mixer, **{name: getattr(layer.mixer, name).double()
                                   for name in ("conv", "decay", "dt_bias", "norm")})
    wanted = proj.double()
    wanted[:, :spec.channels] = wanted[:, :spec.channels].bfloat16().double()
    slow = StateView(before.recurrent.clone(), before.conv.clone())
    core = reference.gdn_core if runtime.name == "tiny" else torch_gdn._core
    output = core(wanted, wide, slow, replace(batch, memo={}))
    found = work.y.view(-1)[:output.numel()].view(output.shape)
    if step.splits_heads(spec, work):
        found = normed_slices(work.core, spec)
    assert error(found, output) < 5e-3
    assert error(state.recurrent, slow.recurrent) < 2e-5
    if core is reference.gdn_core or not {1, 2} & {*done}:  # the torch op clears places of positions before 0
        assert torch.equal(state.conv.double(), slow.conv)
    others = torch.ones(len(before.recurrent), dtype=torch.bool, device="cuda")
    others[batch.target] = False
    assert torch.equal(state.recurrent[others].double(), before.recurrent[others])


STEPS, LAST = 4096, 512


@torch.inference_mode()
def test_states_do_not_drift(runtime: ModelRunner) -> None:
    """Against float64 on the same inputs, with states that remember hundreds of tokens: after 4,096 steps the roundings
    of float32 (6e-8) have added up to no more than if they were independent (64 of them)."""
    step, layer = served(runtime), runtime.decoder.weights.layers[0]
    assert isinstance(layer.mixer, GdnWeights)
    state, spec = runtime.views.states[0], layer.mixer.spec
    state.recurrent.zero_()
    proj = randn(STEPS, spec.channels + spec.values + 2 * spec.value_heads, seed=5)
    proj[:, :spec.channels] = proj[:, :spec.channels].bfloat16().float()
    proj[:, -spec.value_heads:] -= 6  # states that remember hundreds of tokens
    found = []
    for done in range(STEPS):
        batch = batch_of([done % (64 * PAGE)], 1)
        cursor = batch.done * 0 + done
        batch = replace(batch, done=cursor, base=cursor)
        work = step.begin(batch, "few")
        step.mix(layer, work, proj[done:done + 1], proj.shape[1])
        found.append(work.core.clone() if step.splits_heads(spec, work) else work.y[:, :spec.values].float())
    weights = replace(layer.mixer, **{name: getattr(layer.mixer, name).double()
                                      for name in ("conv", "decay", "dt_bias", "norm")})
    slow = StateView(torch.zeros_like(state.recurrent[:2]).double(), torch.zeros_like(state.conv[:2]).double())
    slot, outputs = batch.source * 0, []
    for first in range(0, STEPS, LAST):
        chunk = prompt_of(first, LAST, slot)
        outputs.append(torch_gdn._core(proj[first:first + LAST].double(), weights, slow, chunk))
    wanted, mine = torch.cat(outputs), torch.cat(found)
    if step.splits_heads(spec, work):
        mine = normed_slices(mine, spec)
    assert error(mine[-LAST:], wanted[-LAST:]) < 4e-6
    assert error(state.recurrent[int(batch.source)], slow.recurrent[0]) < 4e-6


def prompt_of(done: int, tokens: int, slot: Tensor) -> Batch:
    """One row of a prompt whose state is in that slot."""
    row = PlannedRow((7,) * tokens, done, (1,) * (-(-(done + tokens) // PAGE)), int(slot), 1)
    return build(StepPlan((row,)), slot.device)


@pytest.mark.parametrize("done", CURSORS, ids=lambda done: f"{len(done)}-{done[0]}")
def test_attention(runtime: ModelRunner, done: list[int]) -> None:
    step, layer = served(runtime), runtime.decoder.weights.layers[3]
    assert isinstance(layer.mixer, AttentionWeights)
    kv, spec = runtime.views.kv[0], layer.mixer.spec
    batch, few = batch_of(done, len(done)), len(done) <= 16
    assert int(batch.pages.max()) < len(kv.keys)
    kv.keys.copy_(randn(*kv.keys.shape, seed=1))
    kv.values.copy_(randn(*kv.values.shape, seed=2))
    slow = KvView(kv.keys.double(), kv.values.double())
    width = spec.queries * 2 + 2 * spec.kv
    proj = randn(len(done), width, seed=3, dtype=torch.float32 if few else torch.bfloat16)
    work = step.begin(batch, "few" if few else "many")
    for tensor in (work.y, work.mixed, work.mass):
        tensor.fill_(NAN)
    step.mix(layer, work, proj, width)
    table = reference.rope(batch.positions.cpu(), runtime.decoder.weights.rope)
    half = table.cos.shape[1] // 2
    assert error(work.turns, torch.cat((table.cos[:, :half], table.sin[:, :half]), 1)) < 1e-6
    mixer = AttentionWeights(spec, torch.eye(width).cuda().double(), layer.mixer.q_norm.double(),
                             layer.mixer.k_norm.double(), torch.eye(spec.queries).cuda().double())
    naive = reference if runtime.name == "tiny" else TORCH
    output = naive.attention_mixer(proj.double(), mixer, slow, replace(batch, memo={}),
                                   Rope(table.cos.cuda(), table.sin.cuda()))
    assert error(work.y.view(-1)[:output.numel()].view(output.shape), output) < 6e-3
    assert error(kv.keys, slow.keys) < 2e-3 and error(kv.values, slow.values) < 2e-3


# Steps


def row_alone(whole: Batch, row: int) -> Batch:
    """A step of one row of a batch of single tokens."""
    numbers = torch.cat([torch.ones_like(whole.ids[:1]), whole.ids[row:row + 1], whole.done[row:row + 1].repeat(3),
                         torch.arange(2, device=whole.ids.device), *(tensor[row:row + 1] for tensor in (
                             whole.done, whole.store, whole.source, whole.target)),
                         torch.full_like(whole.ids[:1], -1), whole.pages[row]])
    return step_of(Padded(numbers, 1, whole.pages.shape[1]))


def fill(runtime: ModelRunner) -> None:
    pools = runtime.pools
    for seed, tensor in enumerate((pools.keys, pools.values, pools.recurrent, pools.conv)):
        tensor.copy_(randn(*tensor.shape[1:], seed=seed) * 0.3)


@pytest.mark.parametrize("done", CURSORS, ids=lambda done: f"{len(done)}-{done[0]}")
@torch.inference_mode()
def test_steps(runtime: ModelRunner, done: list[int]) -> None:
    fill(runtime)
    batch = batch_of(done, len(done))
    wanted = runtime.decoder.logits(runtime.decoder.forward(batch, runtime.views))
    states = runtime.pools.recurrent.clone()
    fill(runtime)
    served_logits = served(runtime)(replace(batch, memo={}))
    assert served_logits is not None
    # bfloat16 puts the embedded model's logits up to 4 % off float32's over random states, whichever ops compute
    assert error(served_logits[0], wanted) < (1e-1 if runtime.name == "tiny" else 3e-2)
    assert error(runtime.pools.recurrent, states) < 2e-2


def check_replays(runtime: ModelRunner, rows: int) -> None:
    """A recorded step gives the same bits whenever it is replayed."""
    plan = StepPlan(
        tuple(PlannedRow((7 + row,), 20 + row, tuple(range(4 * row, 4 * row + 4)), row, 1) for row in range(rows))
    )
    batch = build(plan, runtime.pools.device)
    assert runtime.graphs and batch.padded
    fill(runtime)
    wanted = runtime.run(batch).clone()  # records
    for _ in range(2):
        fill(runtime)
        assert torch.equal(runtime.run(build(plan, runtime.pools.device)), wanted)


def check_alone(runtime: ModelRunner) -> None:
    """Tokens of a step have the bits that they have alone, and leave the same behind."""
    done = [16 * row + row for row in range(16)]
    whole = batch_of(done, 16)
    fill(runtime)
    together = served(runtime)(whole)
    after = [tensor.clone() for tensor in (runtime.pools.recurrent, runtime.pools.keys)]
    fill(runtime)
    for row in range(16):
        alone = served(runtime)(row_alone(whole, row))
        assert together and alone and torch.equal(alone[0][0], together[0][row])
    for tensor, wanted in zip((runtime.pools.recurrent, runtime.pools.keys), after, strict=True):
        assert torch.equal(tensor, wanted)


@torch.inference_mode()
def test_token_bits_do_not_depend_on_batch(runtime: ModelRunner) -> None:
    check_alone(runtime)


@torch.inference_mode()
def test_padding_rows_write_nothing(runtime: ModelRunner) -> None:
    fill(runtime)
    before = runtime.pools.recurrent.clone()
    batch = batch_of([5, 9, 20, 30], 2)
    served(runtime)(batch)
    changed = (runtime.pools.recurrent != before).flatten(2).any(-1).any(0).nonzero().flatten().tolist()
    assert sorted(changed) == sorted(batch.source[:2].tolist())


# Draws


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_draws(rows: int) -> None:
    logits = randn(rows, 5003, seed=rows) * 4
    logits[0, 17] = logits[0, 4001] = logits[0].max() + 1  # equals: the lower id
    temperature = torch.rand(rows, generator=torch.Generator().manual_seed(1)).cuda() + 0.1
    temperature[0] = 0
    key = torch.randint(-2**62, 2**62, (rows,), generator=torch.Generator().manual_seed(2)).cuda()
    zeros, ones = torch.zeros(rows, dtype=torch.int64, device="cuda"), torch.ones(rows, device="cuda")
    drawn = Sampling(temperature, zeros, ones, ones * 0, key, greedy=False)
    for sampling in (drawn, Sampling(ones * 0, zeros, ones, ones * 0, zeros)):
        wanted, found = TORCH.sample(logits.clone(), sampling), sample(logits, sampling)
        assert found.tokens.tolist() == wanted.tokens.tolist() and found.healthy.tolist() == wanted.healthy.tolist()
    for bad in (NAN, float("inf"), float("-inf")):
        sick = logits.clone()
        sick[-1, 77] = bad
        assert sample(sick, drawn).healthy.tolist() == [True] * (rows - 1) + [False]
    assert not sample(torch.ones(1, 300, device="cuda"), Sampling(ones[:1] * 0, zeros[:1], ones[:1], ones[:1] * 0,
                                                                  zeros[:1])).healthy.any()
