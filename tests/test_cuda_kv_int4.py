"""The GPU's kernels over int4 keys and values: against float64 on what the pages hold, with each other, and through the
engine, where answers agree to the bit as they do over bfloat16 (L6)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import drain, greedy, numbers, serve
from test_cuda_kernels import CURSORS, batch_of, error, randn, served
from test_cuda_kv_dtype import MODELS, copied, logits_of, raw, reference
from test_cuda_prompts import RAGGED, mix, prompts_of
from test_cuda_prompts import batch_of as prompt_of
from test_cuda_verify import Known, plain_of
from test_kv_int4 import LEAST, PROMPTS

from deltic import LLM
from deltic.cache.manager import HybridCache
from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import load
from deltic.ops.cuda import kernel_config, prefill
from deltic.ops.kv import INT4, KEY_BITS, VALUE_BITS, is_finite, pack, rotated, unpack
from deltic.ops.types import PAGE, Batch, KvView
from deltic.params import SamplingParams
from deltic.runner.model_runner import ModelRunner
from deltic.session import Session
from deltic.spec_decode.draft_length import FixedDraftLength
from deltic.spec_decode.proposers import MtpProposer

UNITS_APART = True
if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)
NAN = float("nan")


def options(**given: Any) -> EngineConfig:
    return EngineConfig(**{"device": "cuda", "dtype": "bfloat16", "kv_dtype": "int4", "memory": "2GiB",
                           "max_batch": 64, "max_context": 4096, "speculate": "off", **given})


@pytest.fixture(scope="module", autouse=True)
def _tried() -> Iterator[None]:
    """Own kernels serve int4."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_config, "UNTRIED_KV", frozenset())
        yield


@pytest.fixture(scope="module", params=MODELS)
def runtime(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    loaded = load(MODELS[request.param], options())
    assert loaded.pools.keys.dtype == INT4 and loaded.step is not None, "the kernels do not serve int4 K/V"
    yield loaded
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def drafting() -> ModelRunner:
    """With a draft head."""
    loaded = load(None, options(memory="256MiB", max_batch=4, max_context=600, speculate="mtp:3", prefix_cache=False))
    assert loaded.capabilities.verifies, "the kernels do not serve this model, or not its head"
    loaded.warm_up()
    return loaded


# Attention


def scatter(kv: KvView, dim: int) -> None:
    """Numbers of all sizes, with NaN nowhere. A page at a time, as the numbers are larger than what is kept of them."""
    for seed, (pool, bits) in enumerate(((kv.keys, KEY_BITS), (kv.values, VALUE_BITS))):
        some = pack(rotated(randn(64 * PAGE, pool.shape[2], dim, seed=seed)), bits).view(64, *pool.shape[1:])
        for first in range(0, len(pool), 64):
            pool[first:first + 64] = some[:len(pool) - first]


def check_stored(kv: KvView, slow: KvView, before: KvView, batch: Batch, dim: int) -> None:
    """The new tokens' numbers, but for a few where float64 rounds to the neighbour; nothing else was written."""
    others = torch.ones(kv.keys[..., 0, 0].numel(), dtype=torch.bool, device="cuda")
    others[batch.store] = False
    for name in ("keys", "values"):
        mine, theirs, old = (getattr(view, name).flatten(0, 1) for view in (kv, slow, before))
        assert torch.equal(mine[others], old[others]), f"{name} of no token were written"
        found, wanted = (unpack(x[batch.store], dim, torch.float64) for x in (mine, theirs))
        assert error(found, wanted) < 1e-2, f"{name}: other numbers"
        share = float((mine[batch.store] != theirs[batch.store]).float().mean())
        assert share < 0.02, f"{name}: {share:.1%} of the bytes differ"


@pytest.mark.parametrize("done", CURSORS, ids=lambda done: f"{len(done)}-{done[0]}")
@torch.inference_mode()
def test_decode_attention(runtime: ModelRunner, done: list[int]) -> None:
    step, layer = served(runtime), runtime.decoder.weights.layers[3]
    kv, spec, batch, few = runtime.views.kv[0], layer.mixer.spec, batch_of(done, len(done)), len(done) <= 16
    scatter(kv, spec.head_dim)
    slow, before = copied(kv), copied(kv)
    width = spec.queries * 2 + 2 * spec.kv
    proj = randn(len(done), width, seed=3, dtype=torch.bfloat16).to(torch.float32 if few else torch.bfloat16)
    work = step.begin(batch, "few" if few else "many")
    for tensor in (work.y, work.mixed, work.mass):
        tensor.fill_(NAN)
    step.mix(layer, work, proj, width)
    output = reference(runtime, layer, proj, batch, slow)
    check_stored(kv, slow, before, batch, spec.head_dim)
    assert error(work.y.view(-1)[:output.numel()].view(output.shape), output) < 1e-2


@pytest.mark.parametrize("large", [False, True], ids=["flash", "cudnn"])
@pytest.mark.parametrize("shape", [[(0, 65)], [(40, 130)], [(300, 200)], RAGGED],
                         ids=lambda shape: f"{len(shape)}-{shape[-1][1]}")
@torch.inference_mode()
def test_prompt_attention(runtime: ModelRunner, shape: list[tuple[int, int]], large: bool,
                          monkeypatch: pytest.MonkeyPatch) -> None:
    """With scales that are NaN wherever nothing may be read."""
    if large:
        monkeypatch.setattr(prefill, "_LARGE", 60 * 60)
        monkeypatch.setattr(prefill, "_LONG", 60)
        monkeypatch.setattr(prefill, "PREFIX_GRAIN", 128)
    prompts, layer, batch = prompts_of(runtime), runtime.decoder.weights.layers[3], prompt_of(shape)
    kv, spec = runtime.views.kv[0], layer.mixer.spec
    scatter(kv, spec.head_dim)
    known = torch.zeros(kv.keys.shape[:2], dtype=torch.bool, device="cuda")
    for row, done in enumerate(batch.done.tolist()):
        for position in range(done):
            known[batch.pages[row, position // PAGE], position % PAGE] = True
    for pool in (kv.keys, kv.values):
        pool[~known] = 0xff
    slow, before = copied(kv), copied(kv)
    proj = randn(batch.layout.tokens, spec.queries * 2 + 2 * spec.kv, seed=3, dtype=torch.bfloat16)
    y = mix(prompts, layer, proj, batch)
    check_stored(kv, slow, before, batch, spec.head_dim)
    assert error(y, reference(runtime, layer, proj, batch, slow)) < 1.5e-2


# Through the engine


@pytest.mark.parametrize("model", MODELS)
def test_verified_tokens_have_the_bits_of_single_tokens(model: str) -> None:
    given: dict[str, Any] = {"dtype": "bfloat16", "device": "cuda", "kv_dtype": "int4", "memory": "1GiB",
                             "max_context": 1024, "speculate": "off"}
    size = MODELS[model]
    one, many = (Session(size and replace(size, head=False), **given) for _ in range(2))
    assert many.runtime.capabilities.verifies and many.runtime.pools.keys.dtype == INT4
    prompt, tokens = numbers(1, 20, one.vocab_size), numbers(2, 60, one.vocab_size)
    for session in (one, many):
        session.prefill(prompt)
    wanted, place = [one.step(token) for token in tokens], 0
    for count in (4, 1, 3, 8, 13, 2, 5, 4, 7):
        right = max(1, count - 1)  # the last one is wrong
        drafts = [*tokens[place:place + right], *[(tokens[place + right] + 1) % one.vocab_size] * (count - right)]
        logits = many.verify(drafts)
        for index in range(right):
            assert torch.equal(logits[index], wanted[place + index]), (place, index, count)
        many.accept(right)
        place += right


def test_prompts_then_decode(runtime: ModelRunner) -> None:
    """As over bfloat16, up to the coarser numbers."""
    plain = load(MODELS["tiny" if runtime.name == "tiny" else "0.8b"], options(kv_dtype="auto"))
    ratio = plain.pools.sizes.token_bytes / runtime.pools.sizes.token_bytes
    assert ratio > (3.3 if runtime.name == "tiny" else 3.5)
    difference = error(logits_of(runtime), logits_of(plain))
    print(f"{runtime.name}: logits over int4 K/V are {difference:.1e} from those over bfloat16")
    assert 1e-3 < difference < 0.4


@pytest.mark.parametrize("model", MODELS)
def test_torch_ops_support_it(model: str) -> None:
    own, theirs = (load(MODELS[model], options(max_batch=4, ops=ops)) for ops in ((), ("torch",)))
    assert own.step is not None and theirs.step is None and theirs.graphs is not None
    difference = error(logits_of(own), logits_of(theirs))
    print(f"{model}: logits of the kernels are {difference:.1e} from those of torch")
    assert difference < 0.15
    assert len(serve(theirs, [greedy(numbers(1, 100, 500), 20)])["a", 0].tokens) == 20


def test_cached_prefix_gives_the_same_answer(runtime: ModelRunner) -> None:
    kept, vocabulary = replace(runtime, cache=HybridCache(runtime.pools, True)), runtime.config.vocab_size
    requests = [greedy(numbers(seed, 50 + 60 * seed, vocabulary), 24, f"{seed}") for seed in range(6)]
    wanted = {request.id: serve(kept, [request])[request.id, 0].tokens for request in requests}
    together = serve(kept, requests)  # their prompts' ends are known, so that these steps decode alone
    assert {name: answer.tokens for (name, _), answer in together.items()} == wanted
    forked = replace(requests[5], output=replace(requests[5].output, n=3))
    assert [answer.tokens for answer in serve(kept, [forked]).values()] == [wanted["5"]] * 3


def test_prefix_from_host_memory_is_identical() -> None:
    loaded = load(None, options(memory="256MiB", host_memory="256MiB", max_batch=2))
    prompt = numbers(5, 700, loaded.config.vocab_size)
    told = serve(loaded, [greedy(prompt, 24)])["a", 0]
    longer = (*prompt, *told.tokens, *numbers(6, 40, loaded.config.vocab_size))
    known = serve(loaded, [greedy(longer, 24)])["a", 0]
    for tier in loaded.cache.tiers:
        while tier._pending:
            torch.cuda.synchronize()
            tier._settle()
    for pool in loaded.pools.page_tensors:
        pool.fill_(0xff)
    for pool in loaded.pools.slot_tensors:
        pool.fill_(NAN)
    empty = replace(loaded, cache=HybridCache(loaded.pools, True, loaded.cache.tiers))
    found = serve(empty, [greedy(longer, 24)])["a", 0]
    assert found.last.usage and found.last.usage.cached_tokens >= 700 and found.tokens == known.tokens


@pytest.mark.parametrize("drafter", ["known", "head"])
def test_same_answers_with_drafts(drafting: ModelRunner, drafter: str) -> None:
    """To the bit, with up to 16 tokens in a step."""
    requests = [replace(greedy(numbers(seed, 30 + seed, 500), 50, str(seed)), output=SamplingParams(
        temperature=0.8 * (seed % 2), seed=seed, max_tokens=50, ignore_eos=True)) for seed in range(3)]
    wanted = {name: answer.tokens for (name, _), answer in serve(plain_of(drafting), requests).items()}
    head = drafting.mtp_runner
    assert head
    drafts = Known(wanted, 0.6) if drafter == "known" else MtpProposer(drafting, head, 3)
    engine = Engine(drafting, drafts, FixedDraftLength(3))
    for request in requests:
        engine.add(request)
    answers = drain(engine)
    assert {name: answer.tokens for (name, _), answer in answers.items()} == wanted
    stats = engine.speculator.stats
    assert sum(stats.drafted_at) > 50 and sum(stats.accepted_at) > 10


def test_mtp_head_stores_int4(drafting: ModelRunner) -> None:
    """What it stores after a step of few tokens and after one of many."""
    for pool in drafting.pools.page_tensors:
        pool.fill_(0xff)
    serve(drafting, [greedy(numbers(1, 40, 500), 20)])
    for pool in drafting.pools.page_tensors:
        written = (raw(pool[-1]) != 0xff).any(-1).any(-1)
        assert 55 <= int(written.sum()) <= 70 and is_finite(pool[-1][written])


def test_greedy_tokens_mostly_equal_bfloat16() -> None:
    """Of the embedded model, on questions like those it was trained on."""
    answers = []
    for kv in ("auto", "int4"):
        with LLM("tiny", device="cuda", dtype="bfloat16", kv_dtype=kv, memory="1GiB", speculate="off") as llm:
            prompts = [llm.chat_processor.chat([{"role": "user", "content": text}]).request.prompt for text in PROMPTS]
            outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=48))
        answers.append([output.choices[0].tokens for output in outputs])
    tokens = sum(map(len, answers[0]))
    same = sum(a == b for one, two in zip(*answers, strict=True) for a, b in zip(one, two, strict=False))
    print(f"{same / tokens:.2%} of {tokens} greedy tokens are the same over int4 K/V")
    assert same / tokens >= LEAST
