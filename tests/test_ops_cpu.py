"""The compiled kernels keep every promise of the torch ops, and some of their own (L5)."""

from __future__ import annotations

import pytest
import test_ops_torch as promises
import torch
from native_pools import pool, using
from op_cases import Row, assert_close, build_batch, gdn_weights, hidden_states, state_errors, state_view
from test_ops_ref import clone_state
from test_ops_torch import *  # noqa: F403  (its tests run here too, on the compiled backend)

from deltic.ops import backends, explain, reference, select
from deltic.ops.cpu import missing
from deltic.ops.cpu.kernels import head
from deltic.ops.memory import Arena
from deltic.ops.quantized import pack_tensor

pytestmark = pytest.mark.skipif(bool(missing()), reason=str(missing()))


@pytest.fixture(autouse=True)
def _compiled_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promises, "FAST", backends()["cpu"])


def test_compiled_backend_is_the_default() -> None:
    assert explain(select())["gdn_mixer"] == "cpu" and explain(select(("torch",)))["gdn_mixer"] == "torch"
    assert explain(select((), "cuda"))["gdn_mixer"] == "torch"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dones", [(0,), (1,), (2,), (3,), (4,), (5, 64), (0, 7, 100), (3, 0, 1, 2, 17, 31, 200, 6)])
def test_single_tokens_in_place(dones: tuple[int, ...], dtype: torch.dtype) -> None:
    case = build_batch([Row(done=done, chunk=1) for done in dones])
    x, weights, before = hidden_states(case, dtype), gdn_weights(1, dtype), state_view(case, dtype)
    slow, fast = clone_state(before), clone_state(before)
    wanted = reference.gdn_mixer(x, weights, slow, case.fresh())
    tolerance = promises.TOLERANCE.get(dtype, 4e-3)
    assert_close(backends()["cpu"].gdn_mixer(x, weights, fast, case.fresh()), wanted, tolerance)
    assert max(state_errors(case, fast, slow, before).values()) <= tolerance


@pytest.mark.parametrize("width", [64, 192, 1024])
@pytest.mark.parametrize("rows", [1, 3, 65, 4097])
def test_head_of_few_tokens(rows: int, width: int) -> None:
    """Close to float64, and bit for bit the same alone, in a batch and with more threads."""
    torch.manual_seed(rows)
    x, plain = torch.randn(19, width).bfloat16(), torch.randn(rows, width).bfloat16()
    exact, weight = x.double() @ plain.double().t(), pack_tensor(plain, Arena())
    whole = head(pool(), x, weight)
    assert whole.dtype == torch.float32 and (whole - exact).norm() <= 1e-5 * exact.norm()
    for tokens in range(1, 20):
        assert torch.equal(head(pool(), x[:tokens], weight), whole[:tokens])
    with using(threads=3):
        assert torch.equal(head(pool(), x, weight), whole)


def test_head_propagates_nan() -> None:
    x, weight = torch.zeros(2, 64).bfloat16(), pack_tensor(torch.ones(5, 64).bfloat16(), Arena())
    x[1, 3] = torch.nan
    logits = head(pool(), x, weight)
    assert not logits[0].isnan().any() and logits[1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_extreme_gates_and_norms(dtype: torch.dtype) -> None:
    """Gates far beyond the range of exp, NaN in one token, zeros: as torch does it."""
    cpu, torch_ops = backends()["cpu"], backends()["torch"]
    residual = torch.tensor([[0.0] * 40, [1e4] * 40, [1e-6] * 40]).to(dtype)
    scale = torch.linspace(-2, 2, 40)
    for delta in (None, torch.full_like(residual, 0.5)):
        for fast, slow in zip(cpu.add_norm(residual.clone(), delta, scale, 1e-6),
                              torch_ops.add_norm(residual.clone(), delta, scale, 1e-6), strict=True):
            tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
            assert torch.allclose(fast, slow, rtol=tolerance)
    residual[1, 3] = torch.nan
    normed = cpu.add_norm(residual, None, scale, 1e-6)[1]
    assert normed[1].isnan().all() and not normed[[0, 2]].isnan().any()


def test_missing_kernels_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltic.ops.cpu.load", lambda: "install g++")
    kernels = ("pack", "add_norm", "gdn_mixer", "flush_delta_log", "attention_mixer", "store_kv", "mlp", "moe", "head",
               "sample", "step", "mtp_step", "vision")
    assert missing() == dict.fromkeys(kernels, "install g++")
    assert explain(select())["gdn_mixer"] == "torch (install g++)" and explain(select())["rope"] == "torch"
