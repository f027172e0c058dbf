"""The delta rule of many rows, whose states pass through shared memory: blocks with more heads than they remember."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from test_cuda_kernels import batch_of, error, randn, served

from deltic.config import EngineConfig
from deltic.engine.loading import RandomModel, load
from deltic.engine.runtime import Runtime
from deltic.ops.records import GdnWeights, StateView
from deltic.ops.torch import gdn as torch_gdn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")


@pytest.fixture(scope="module", params=["qwen3.5-0.8b", "qwen3.5-4b"])
def runtime(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    yield load(RandomModel(request.param, 4), EngineConfig(
        device="cuda", dtype="bfloat16", memory="3GiB", max_batch=256, max_context=256, speculate="off"))
    torch.cuda.empty_cache()


@pytest.mark.parametrize("real", [100, 61])
@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("blocks", [132, 5])
@torch.inference_mode()
def test_whole_states(runtime: Runtime, blocks: int, moved: bool, real: int) -> None:
    step, layer = served(runtime), runtime.decoder.weights.layers[0]
    assert isinstance(layer.mixer, GdnWeights)
    state, spec = runtime.views.states[0], layer.mixer.spec
    assert len(state.recurrent) >= 200
    state.recurrent.copy_(randn(*state.recurrent.shape, seed=1) * 0.3)
    state.conv.copy_(randn(*state.conv.shape, seed=2))
    before = StateView(state.recurrent.clone(), state.conv.clone())
    batch = batch_of([3 + 7 * row if row % 9 else 0 for row in range(100)], real, moved)
    proj = randn(100, spec.channels + spec.values + 2 * spec.value_heads, seed=3, dtype=torch.bfloat16)
    work = step._begin(batch, "many")
    known, step._blocks = step._blocks, blocks
    step._mix(layer, work, proj, proj.shape[1])
    step._blocks = known
    wide = replace(layer.mixer, **{name: getattr(layer.mixer, name).double()
                                   for name in ("conv", "decay", "dt_bias", "norm")})
    slow = StateView(before.recurrent.double(), before.conv.double())
    output = torch_gdn._core(proj.double(), wide, slow, replace(batch, memo={}))
    found, slots = work.y.view(-1)[:output.numel()].view(output.shape), batch.target[:real]
    assert error(found[:real], output[:real]) < 5e-3
    assert error(state.recurrent[slots], slow.recurrent[slots]) < 2e-5
    assert torch.equal(state.conv[slots].double(), slow.conv[slots])
    others = torch.ones(len(before.recurrent), dtype=torch.bool, device="cuda")
    others[slots] = False
    assert torch.equal(state.recurrent[others], before.recurrent[others])
    assert torch.equal(state.conv[others], before.conv[others])
