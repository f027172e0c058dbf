"""Feed-forwards of a dense model in host memory: the bits of the model that is all on the GPU where the GPU computes
them, and its numbers up to rounding where the host does, in steps of all kinds, in recorded ones and with drafts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import drain, greedy, numbers, serve
from test_cuda_kernels import batch_of, check_alone, check_replays, error, fill, served
from torch import Tensor

from deltic.config import EngineConfig, ModelConfig
from deltic.engine import loading
from deltic.engine.engine import Engine
from deltic.engine.loading import RandomModel, load
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.errors import RequestError
from deltic.ops.cuda import expert_offload
from deltic.runner.input_batch import build
from deltic.runner.layer_offload import LayerPlan
from deltic.runner.memory import card_memory, working_bytes
from deltic.runner.model_runner import ModelRunner
from deltic.runner.weights import weight_sizes
from deltic.session import Session

if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)

CONFIG = replace(ModelConfig.preset("qwen3.5-0.8b", 8), vocab_size=5003)
MOVED = (0, 2, 3, 5, 7)
MIB = 1 << 20
UNITS_APART = True
QUANTS = ["none", "q4_k"]


def loaded(layers: tuple[int, ...], compute: str = "card", quant: str = "none", head: bool = False, **changes: Any
           ) -> ModelRunner:
    """With these layers in host memory, whatever room the GPU has."""
    given = {"device": "cuda", "dtype": "bfloat16", "memory": "1GiB", "max_batch": 64, "max_context": 4096,
             "speculate": "off", "threads": 3, "expert_compute": compute, "quant": quant, **changes}
    with moved(layers):
        return load(RandomModel(shape=CONFIG, initializer_range=0.05, head=head), EngineConfig(**given))


@contextmanager
def moved(layers: tuple[int, ...]) -> Iterator[None]:
    """The plan of models that are loaded meanwhile."""
    plan = LayerPlan(layers, 1, 1, 4096, "a note") if layers else LayerPlan()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "plan_layers", lambda *others: plan)
        yield


@pytest.fixture(scope="module", params=QUANTS)
def runtimes(request: pytest.FixtureRequest) -> Iterator[dict[str, ModelRunner]]:
    """All on the GPU, and with layers in host memory."""
    found = {"whole": loaded((), quant=request.param)} | {
        compute: loaded(MOVED, compute, request.param) for compute in ("card", "host")}
    yield found
    for runtime in found.values():
        if runtime.layers:
            runtime.layers.close()
    found.clear()
    torch.cuda.empty_cache()


def run(runtime: ModelRunner, plan: StepPlan) -> Tensor:
    fill(runtime)
    return runtime.run(build(plan, runtime.pools.device)).clone()


def decode(rows: int) -> StepPlan:
    return StepPlan(tuple(PlannedRow((7 + row,), 20 + row, tuple(range(8 * row, 8 * row + 8)), row, 1)
                          for row in range(rows)))


def prompts(rows: int, tokens: int) -> StepPlan:
    pages = -(-tokens // 16)
    return StepPlan(tuple(PlannedRow(tuple(range(7 + row, 7 + row + tokens)), 0,
                                     tuple(range(pages * row, pages * (row + 1))), row, 1) for row in range(rows)))


def test_where_layers_lie(runtimes: dict[str, ModelRunner]) -> None:
    for name, runtime in runtimes.items():
        served(runtime)
        pools = [layer.dense.pool for layer in runtime.decoder.weights.layers]
        assert tuple(index for index, pool in enumerate(pools) if pool) == (() if name == "whole" else MOVED)
        assert ("a note" in runtime.memory.warnings) == (name != "whole")
    host, card = runtimes["host"].layers, runtimes["card"].layers
    assert host and card and {*host.store.hosted} == {*MOVED} and card.store.host is None
    assert runtimes["card"].decoder.weight_bytes() == runtimes["whole"].decoder.weight_bytes()


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@torch.inference_mode()
def test_decode_has_the_bits_of_the_whole_model(runtimes: dict[str, ModelRunner], rows: int) -> None:
    """Recorded, and replayed."""
    wanted = run(runtimes["whole"], decode(rows))
    for turn in range(3):
        assert torch.equal(run(runtimes["card"], decode(rows)), wanted), turn
    found = run(runtimes["host"], decode(rows))
    assert 0 < error(found, wanted) < 5e-2
    assert torch.equal(run(runtimes["host"], decode(rows)), found)


@pytest.mark.parametrize(("rows", "tokens"), [(1, 5), (3, 90), (1, 700), (2, 1500)])
@torch.inference_mode()
def test_prompts_have_the_bits_of_the_whole_model(runtimes: dict[str, ModelRunner], rows: int, tokens: int) -> None:
    found = [run(runtime, prompts(rows, tokens)) for runtime in runtimes.values()]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("rows", [9, 32])
@torch.inference_mode()
def test_unrecorded_steps(runtimes: dict[str, ModelRunner], rows: int) -> None:
    """Of padded rows. The GPU computes those of more than 16."""
    found = []
    for runtime in runtimes.values():
        fill(runtime)
        for offload in filter(None, [runtime.layers]):
            offload.store.begin_step()
        step = served(runtime)(batch_of([16 * row + row for row in range(rows)], rows - 2))
        assert step
        found.append(step[0][:rows - 2].clone())
    assert torch.equal(found[0], found[1])
    assert 0 < error(found[2], found[0]) < 5e-2 if rows < 17 else torch.equal(found[2], found[0])


@pytest.mark.parametrize("compute", ["card", "host"])
@torch.inference_mode()
def test_token_bits_do_not_depend_on_batch(runtimes: dict[str, ModelRunner], compute: str) -> None:
    offload = runtimes[compute].layers
    assert offload
    offload.store.begin_step()
    check_alone(runtimes[compute])


@pytest.mark.parametrize("rows", [1, 12])
@torch.inference_mode()
def test_replayed_steps(runtimes: dict[str, ModelRunner], rows: int) -> None:
    check_replays(runtimes["host"], rows)


def test_greedy_answers(runtimes: dict[str, ModelRunner]) -> None:
    """With prompts, several sequences and steps behind each other. Rounding decides now and then where the host
    computes: how often is printed."""
    asked = [greedy(numbers(seed, 30 + 41 * seed, 5003), 40, str(seed), ignore_eos=True) for seed in range(6)]
    found = {name: {key: answer.tokens for key, answer in serve(runtime, asked).items()}
             for name, runtime in runtimes.items()}
    assert found["card"] == found["whole"]
    same = sum(one == other for key, tokens in found["host"].items()
               for one, other in zip(tokens, found["whole"][key], strict=True))
    print(f"{same} of {6 * 40} greedy tokens as with all weights on the GPU")
    assert all(tokens[0] == found["whole"][key][0] for key, tokens in found["host"].items()), "the GPU reads prompts"
    host = runtimes["host"].layers
    assert host and host.store.host and host.store.host.computed() > 5 * 40


@pytest.mark.parametrize("quant", QUANTS)
def test_drafts_change_no_answer(quant: str) -> None:
    asked = [greedy(numbers(seed, 50, 5003), 30, str(seed), ignore_eos=True) for seed in range(3)]
    for compute in ("card", "host"):
        found = []
        for speculate in ("off", "mtp:3"):
            runtime = loaded(MOVED, compute, quant, head=True, speculate=speculate, max_batch=4)
            found.append({key: answer.tokens for key, answer in serve(runtime, asked).items()})
            assert runtime.layers
            runtime.layers.close()
        assert found[0] == found[1], compute
    torch.cuda.empty_cache()


def test_warm_up_records_all_steps() -> None:
    runtime = loaded(MOVED, "auto", "q4_k", max_batch=8, max_context=1024)
    runtime.warm_up()
    answers = serve(runtime, [greedy(numbers(1, 600, 5003), 20, ignore_eos=True)])
    assert all(len(answer.tokens) == 20 for answer in answers.values())
    assert runtime.layers
    runtime.layers.close()


def test_layers_cannot_be_looked_at() -> None:
    with moved(MOVED):
        session = Session(RandomModel(shape=CONFIG), device="cuda", dtype="bfloat16", memory="512MiB",
                          max_context=1024, expert_compute="card")
    with pytest.raises(RequestError, match="some lie in host memory"):
        session.hidden_states([1, 2, 3])


def test_silent_host_fails_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_offload, "HOST_TIMEOUT", 0.1)
    runtime = loaded(MOVED, "host")
    engine = Engine(runtime)
    for seed in range(3):
        engine.add(greedy(numbers(seed, 30, 5003), 200, str(seed), ignore_eos=True))
    for _ in range(10):
        engine.step()
    assert runtime.layers
    runtime.layers.store.close()
    answers = drain(engine)
    assert len(answers) == 3 and all(answer.last.error for answer in answers.values())
    torch.cuda.synchronize()


@pytest.mark.parametrize("quant", QUANTS)
def test_a_size_of_gpu_memory_moves_layers(quant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as needed; the answers are those of the whole model, and the size is kept. What other processes take on
    the card does not count here, as it may change."""
    config = replace(ModelConfig.preset("qwen3.5-0.8b", 16), vocab_size=5003, hidden_size=2048, intermediate_size=17408)
    given: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "quant": quant, "speculate": "off", "threads": 3,
                             "max_context": 2048, "token_budget": 1024, "max_batch": 4, "expert_compute": "card",
                             "tp": 1}
    asked = [greedy(numbers(seed, 300, 5003), 20, str(seed), ignore_eos=True) for seed in range(3)]
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (
        total - 600 * MIB - torch.cuda.memory_reserved(), total))
    sizes = weight_sizes(config, "bfloat16", quant)
    inner = sum(size for name, size in sizes.items() if ".mlp." in name)
    options = EngineConfig(**given)
    taken = card_memory(options).taken
    limit = taken + sum(sizes.values()) - inner // 2 + working_bytes(config, 1024) + 896 * MIB
    try:
        runtime = load(RandomModel(shape=config), replace(options, gpu_memory=f"{limit >> 20}MiB"))
        assert runtime.layers and 0 < len(runtime.layers.store.layers) <= 16, runtime.memory.notes
        assert runtime.memory.max_context == 2048 and "lie in host memory" in runtime.memory.warnings[0]
        found = {key: answer.tokens for key, answer in serve(runtime, asked).items()}
        assert card_memory(options).taken <= limit
        runtime.layers.close()
        del runtime
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    whole = load(RandomModel(shape=config), replace(options, memory="512MiB"))
    assert whole.layers is None
    assert {key: answer.tokens for key, answer in serve(whole, asked).items()} == found
