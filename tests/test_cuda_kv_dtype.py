"""The GPU's kernels over float8 and int4 keys and values: against float64 on what the pages hold, byte by byte with
each other, and through the engine.

Engines over them agree with themselves to the bit as they do over bfloat16 (L6); with those over bfloat16 only as far
as the coarser numbers are exact, of which a share is printed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support import drain, greedy, numbers, serve
from test_cuda_kernels import CURSORS, batch_of, error, randn, served
from test_cuda_prompts import RAGGED, mix, prompts_of
from test_cuda_prompts import batch_of as prompt_of
from test_cuda_verify import Known, plain_of
from test_kv_dtype import EVERY, all_kinds
from test_kv_int4 import LEAST, LEAST_BEFORE, equal_greedy_tokens
from torch import Tensor

from deltic.cache.manager import HybridCache
from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import RandomModel, load
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.ops import reference as ref
from deltic.ops.cuda import prefill
from deltic.ops.cuda.driver import KernelArguments, Module, entry, fields, headers
from deltic.ops.kv import FP8, INT4, KEY_BITS, VALUE_BITS, is_finite, pack, rotated, rounded, unpack
from deltic.ops.torch import OPS as TORCH
from deltic.ops.types import PAGE, AttentionWeights, Batch, KvView, Padded, Rope
from deltic.params import SamplingParams
from deltic.runner.input_batch import step_of, verifying
from deltic.runner.model_runner import ModelRunner
from deltic.session import Session
from deltic.spec_decode.draft_length import FixedDraftLength
from deltic.spec_decode.proposers import MtpProposer

UNITS_APART = True
if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)
NAN = float("nan")
MODELS = {"tiny": None, "0.8b": RandomModel("qwen3.5-0.8b", 4, initializer_range=0.05, head=True)}
"""Heads of 64 and of 256."""
KINDS = {"fp8": FP8, "int4": INT4}
MADE = [pytest.param((kv, model), id=f"{kv}-{model}") for kv in KINDS for model in MODELS]


def options(kv: str, **given: Any) -> EngineConfig:
    return EngineConfig(**{"device": "cuda", "dtype": "bfloat16", "kv_dtype": kv, "memory": "2GiB",
                           "max_batch": 64, "max_context": 4096, "speculate": "off", **given})


@pytest.fixture(scope="module", params=MADE)
def runtime(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    kv, model = request.param
    loaded = load(MODELS[model], options(kv))
    assert loaded.pools.keys.dtype == KINDS[kv] and loaded.pools.conv.dtype == torch.bfloat16
    assert loaded.step is not None, f"the kernels do not serve {kv} K/V"
    yield loaded
    torch.cuda.empty_cache()


@pytest.fixture(scope="module", params=KINDS)
def drafting(request: pytest.FixtureRequest) -> ModelRunner:
    """With a draft head."""
    loaded = load(None, options(request.param, memory="256MiB", max_batch=4, max_context=600, speculate="mtp:3",
                                prefix_cache=False))
    assert loaded.capabilities.verifies, "the kernels do not serve this model, or not its head"
    loaded.warm_up()
    return loaded


def is_int4(runtime: ModelRunner) -> bool:
    return runtime.pools.keys.dtype == INT4


def raw(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


# Numbers


class Convert(KernelArguments):
    _fields_ = fields("x narrow soft back wide", "", "count")


CONVERT = """
struct Convert {
    const float *x;
    u8 *narrow, *soft;
    const u8 *back;
    float *wide;
    int count;
};
DEVICE void convert(const Convert &a) {
    const int i = 2 * (blockIdx.x * 256 + threadIdx.x);
    if (i < a.count) {
        const u32 both = narrow2_e4m3(a.x[i], a.x[i + 1]);
        a.narrow[i] = both & 255, a.narrow[i + 1] = both >> 8;
        a.soft[i] = round_e4m3(a.x[i]), a.soft[i + 1] = round_e4m3(a.x[i + 1]);
    }
    if (i < 256) {
        const u32 both = a.back[i] | a.back[i + 1] << 8;
        a.wide[i] = wide_e4m3(both, false), a.wide[i + 1] = wide_e4m3(both, true);
        a.wide[256 + i] = spread_e4m3(a.back[i]), a.wide[256 + i + 1] = spread_e4m3(a.back[i + 1]);
    }
}
"""


def test_rounding_equals_the_cpu() -> None:
    """By the instruction, without it, and by torch on the card."""
    module = Module(headers("kv") + CONVERT + entry("convert", "Convert", "256", "convert"), torch.device("cuda"))
    x = all_kinds()
    x = torch.cat((x, x[:len(x) % 2])).cuda()
    narrow, soft = torch.zeros(2, len(x), dtype=torch.uint8, device="cuda")
    wide = torch.zeros(2, 256, device="cuda")
    every = raw(EVERY).cuda()
    module.launch("k_convert", (-(-len(x) // 512),), 256, Convert(
        x=x, narrow=narrow, soft=soft, back=every, wide=wide, count=len(x)), overlap=False)
    real, wanted = ~x.isnan().cpu(), raw(rounded(x.cpu(), FP8))
    for found in (narrow.cpu(), soft.cpu(), raw(rounded(x, FP8)).cpu()):
        assert torch.equal(found[real], wanted[real])
        assert ((found[~real] & 0x7f) == 0x7f).all()
    for row in wide:
        assert torch.equal(row.cpu().nan_to_num(7), EVERY.float().nan_to_num(7)) and row.isnan().sum() == 2


# Attention


def reference(runtime: ModelRunner, layer: Any, proj: Tensor, batch: Batch, view: KvView) -> Tensor:
    """In float64 on the numbers in the pages, the new tokens' own among them, which it stores as coarsely, too."""
    mixer, width = layer.mixer, proj.shape[1]
    table = ref.rope(batch.positions.cpu(), runtime.decoder.weights.rope)
    wide = AttentionWeights(mixer.spec, torch.eye(width).cuda().double(), mixer.q_norm.double(), mixer.k_norm.double(),
                            torch.eye(mixer.spec.queries).cuda().double())
    return TORCH.attention_mixer(proj.double(), wide, view, replace(batch, memo={}),
                                 Rope(table.cos.cuda(), table.sin.cuda()))


def copied(kv: KvView) -> KvView:
    return KvView(kv.keys.clone(), kv.values.clone())


def scatter(kv: KvView, dim: int) -> None:
    """Numbers of all sizes, with NaN nowhere. Pages repeat, as the numbers are larger than what is kept of them."""
    for seed, (pool, bits) in enumerate(((kv.keys, KEY_BITS), (kv.values, VALUE_BITS))):
        some = randn(64 * PAGE, pool.shape[2], dim, seed=seed)
        some = (pack(rotated(some), bits) if pool.dtype == INT4 else rounded(some, FP8)).view(64, *pool.shape[1:])
        for first in range(0, len(pool), 64):
            raw(pool)[first:first + 64] = raw(some)[:len(pool) - first]


def check_stored(kv: KvView, slow: KvView, before: KvView, batch: Batch, dim: int) -> None:
    """The new tokens' bytes, but for a few where float64 rounds to the neighbour; nothing else was written. With int4 a
    neighbouring scale may be the best one, too."""
    places = batch.store
    others = torch.ones(kv.keys[..., 0, 0].numel(), dtype=torch.bool, device="cuda")
    others[places] = False
    for name in ("keys", "values"):
        mine, theirs, old = (raw(getattr(view, name)).flatten(0, 1) for view in (kv, slow, before))
        assert torch.equal(mine[others], old[others]), f"{name} of no token were written"
        differ = mine[places] != theirs[places]
        if kv.keys.dtype == INT4:
            found, wanted = (unpack(x[places], dim, torch.float64) for x in (mine, theirs))
            apart = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
            assert float(apart.max()) < 0.25, f"{name}: a head is {float(apart.max()):.2f} off"
            assert int((apart > 0.05).sum()) <= max(1, apart.numel() // 100), f"{name}: heads with other numbers"
        else:
            assert int(differ.sum()) <= max(1, differ.numel() // 1000), name
            steps = (mine[places].int() - theirs[places].int()).abs()
            assert steps[differ & (steps < 128)].le(1).all(), name


@pytest.mark.parametrize("done", CURSORS, ids=lambda done: f"{len(done)}-{done[0]}")
@torch.inference_mode()
def test_decode_attention(runtime: ModelRunner, done: list[int]) -> None:
    step, layer = served(runtime), runtime.decoder.weights.layers[3]
    kv, spec, batch, few = runtime.views.kv[0], layer.mixer.spec, batch_of(done, len(done)), len(done) <= 16
    assert int(batch.pages.max()) < len(kv.keys)
    scatter(kv, spec.head_dim)
    slow, before = copied(kv), copied(kv)
    width = spec.queries * 2 + 2 * spec.kv
    # bfloat16 numbers, whose sums of squares round alike
    proj = randn(len(done), width, seed=3, dtype=torch.bfloat16).to(torch.float32 if few else torch.bfloat16)
    work = step.begin(batch, "few" if few else "many")
    for tensor in (work.y, work.mixed, work.mass):
        tensor.fill_(NAN)
    step.mix(layer, work, proj, width)
    output = reference(runtime, layer, proj, batch, slow)
    check_stored(kv, slow, before, batch, spec.head_dim)
    assert error(work.y.view(-1)[:output.numel()].view(output.shape), output) < (1e-2 if is_int4(runtime) else 6e-3)


@pytest.mark.parametrize("large", [False, True], ids=["flash", "cudnn"])
@pytest.mark.parametrize("shape", [[(0, 65)], [(40, 130)], [(300, 200)], RAGGED],
                         ids=lambda shape: f"{len(shape)}-{shape[-1][1]}")
@torch.inference_mode()
def test_prompt_attention(runtime: ModelRunner, shape: list[tuple[int, int]], large: bool,
                          monkeypatch: pytest.MonkeyPatch) -> None:
    """With stale NaN wherever nothing may be read."""
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
        raw(pool)[~known] = 0xff
    slow, before = copied(kv), copied(kv)
    proj = randn(batch.layout.tokens, spec.queries * 2 + 2 * spec.kv, seed=3, dtype=torch.bfloat16)
    y = mix(prompts, layer, proj, batch)
    output = reference(runtime, layer, proj, batch, slow)
    check_stored(kv, slow, before, batch, spec.head_dim)
    assert error(y, output) < (1.5e-2 if is_int4(runtime) else 8e-3)


# The same bytes


@torch.inference_mode()
def test_every_kernel_writes_the_same_bytes(runtime: ModelRunner) -> None:
    """Of the same projections, all of bfloat16 numbers. Values are those of the projection; keys that float32 has
    rounded differently (kernels for many rows are compiled apart, those of prompts multiply in another order) become
    the same float8 numbers but for a few; with int4 a head of them may get another scale."""
    step, layer, kv = served(runtime), runtime.decoder.weights.layers[3], runtime.views.kv[0]
    spec, done, tokens = layer.mixer.spec, 20, 8
    width = spec.queries * 2 + 2 * spec.kv
    proj = randn(tokens, width, seed=7, dtype=torch.bfloat16)
    pages = tuple(range(1, 65))
    scatter(kv, spec.head_dim)
    before, share = copied(kv), 10 if is_int4(runtime) else 1000
    places = torch.tensor([pages[position // PAGE] * PAGE + position % PAGE
                           for position in range(done, done + tokens)], device="cuda")

    def bytes_of(view: KvView) -> list[Tensor]:
        return [raw(pool).flatten(0, 1)[places].clone() for pool in (view.keys, view.values)]

    def reset() -> None:
        kv.keys.copy_(before.keys)
        kv.values.copy_(before.values)

    def one_by_one(kind: str) -> tuple[list[Tensor], Tensor]:
        reset()
        outputs = []
        for index in range(tokens):
            flat = torch.tensor([1, 5, *[done + index] * 3, 0, 1, done + index, int(places[index]), 0, 0, -1, *pages],
                                device="cuda")
            work = step.begin(step_of(Padded(flat, 1, len(pages))), kind)
            dtype = torch.float32 if kind == "few" else torch.bfloat16
            step.mix(layer, work, proj[index:index + 1].to(dtype), width)
            outputs.append(work.y.view(-1)[:spec.queries].clone())
        return bytes_of(kv), torch.stack(outputs)

    few, mixed = one_by_one("few")
    many, _ = one_by_one("many")
    # all at once, as drafts are verified: each block makes what comes before its token itself
    reset()
    row = PlannedRow((5,) * tokens, done, pages[:4], 0, tokens, base=done, delta_log=1, append=True)
    padded = verifying(StepPlan((row,)), torch.device("cuda")).padded
    assert padded
    batch = step_of(padded)
    work = step.begin(replace(batch, base=batch.done), "few")
    assert batch.layout.tokens == tokens
    step.mix(layer, work, proj.float(), width)
    verified = bytes_of(kv)
    assert torch.equal(work.y.view(-1)[:mixed.numel()].view(mixed.shape), mixed), "what new tokens read is rounded, too"
    reset()
    mix(prompts_of(runtime), layer, proj, replace(prompt_of([(done, tokens)]), pages=torch.tensor(
        [pages[:4]], device="cuda"), store=places))
    prompt = bytes_of(kv)
    for name, *written in zip(("keys", "values"), few, many, verified, prompt, strict=True):
        one, by_many, by_verify, by_prompt = written
        assert torch.equal(one, by_verify), name
        for other in (by_many, by_prompt):
            assert int((one != other).sum()) <= (one.numel() // share if name == "keys" else 0), name
        assert not torch.equal(one, raw(getattr(before, name)).flatten(0, 1)[places]), name


@pytest.mark.parametrize("made", MADE)
def test_verified_tokens_have_the_bits_of_single_tokens(made: tuple[str, str]) -> None:
    kv, model = made
    given: dict[str, Any] = {"dtype": "bfloat16", "device": "cuda", "kv_dtype": kv, "memory": "1GiB",
                             "max_context": 1024, "speculate": "off"}
    size = MODELS[model]
    one, many = (Session(size and replace(size, head=False), **given) for _ in range(2))
    assert many.runtime.capabilities.verifies and many.runtime.pools.keys.dtype == KINDS[kv]
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


# Through the engine


def session_over(runtime: ModelRunner) -> Session:
    """A Session with the runtime's pools."""
    with patch("deltic.session.load_any", lambda *_: replace(runtime, cache=HybridCache(runtime.pools))):
        return Session()


def logits_of(runtime: ModelRunner, length: int = 300) -> Tensor:
    """After a prompt of this length, and after each of some tokens that follow it."""
    session = session_over(runtime)
    prompt, tokens = numbers(3, length, session.vocab_size), numbers(4, 8, session.vocab_size)
    return torch.stack([session.prefill(prompt), *(session.step(token) for token in tokens)]).float()


def test_prompts_then_decode(runtime: ModelRunner) -> None:
    """As over bfloat16, up to the coarser numbers."""
    plain = load(MODELS["tiny" if runtime.name == "tiny" else "0.8b"], options("auto"))
    assert plain.pools.keys.dtype == torch.bfloat16
    ratio, int4 = plain.pools.sizes.token_bytes / runtime.pools.sizes.token_bytes, is_int4(runtime)
    assert ratio > (3.3 if runtime.name == "tiny" else 3.5) if int4 else ratio == 2
    difference = error(logits_of(runtime), logits_of(plain))
    print(f"{runtime.name}: logits over coarser K/V are {difference:.1e} from those over bfloat16")
    assert difference < (0.3 if int4 else 0.15) and difference > 1e-4


@pytest.mark.parametrize("made", MADE)
def test_torch_ops_support_it(made: tuple[str, str]) -> None:
    """Where `--ops` says so; what the kernels give is as near to it as roundings of bfloat16 let it be."""
    kv, model = made
    own, theirs = (load(MODELS[model], options(kv, max_batch=4, ops=ops)) for ops in ((), ("torch",)))
    assert own.step is not None and theirs.step is None and theirs.graphs is not None
    difference = error(logits_of(own), logits_of(theirs))
    print(f"{model}: logits of the kernels are {difference:.1e} from those of torch")
    assert difference < (0.15 if kv == "int4" else 8e-2)
    assert len(serve(theirs, [greedy(numbers(1, 100, 500), 20)])["a", 0].tokens) == 20


def test_cached_prefix_gives_the_same_answer(runtime: ModelRunner) -> None:
    """From the card's own pages, by forks of one prompt, and among others."""
    kept, vocabulary = replace(runtime, cache=HybridCache(runtime.pools, True)), runtime.config.vocab_size
    requests = [greedy(numbers(seed, 50 + 60 * seed, vocabulary), 24, f"{seed}") for seed in range(6)]
    wanted = {request.id: serve(kept, [request])[request.id, 0].tokens for request in requests}
    together = serve(kept, requests)  # their prompts' ends are known, so that these steps decode alone
    assert {name: answer.tokens for (name, _), answer in together.items()} == wanted
    for request in requests:
        usage = together[request.id, 0].last.usage
        assert usage and usage.cached_tokens == len(request.prompt)
    forked = replace(requests[5], output=replace(requests[5].output, n=3))
    assert [answer.tokens for answer in serve(kept, [forked]).values()] == [wanted["5"]] * 3


@pytest.mark.parametrize("kv", KINDS)
def test_prefix_from_host_memory_is_identical(kv: str) -> None:
    loaded = load(None, options(kv, memory="256MiB", host_memory="256MiB", max_batch=2))
    prompt = numbers(5, 700, loaded.config.vocab_size)
    told = serve(loaded, [greedy(prompt, 24)])["a", 0]
    longer = (*prompt, *told.tokens, *numbers(6, 40, loaded.config.vocab_size))
    known = serve(loaded, [greedy(longer, 24)])["a", 0]
    pages = loaded.cache.tree.shared(prompt)
    before = [raw(pool)[:, pages].clone() for pool in loaded.pools.page_tensors]
    for tier in loaded.cache.tiers:
        while tier._pending:
            torch.cuda.synchronize()
            tier._settle()
    for pool in loaded.pools.page_tensors:
        raw(pool).fill_(0xff)
    for pool in loaded.pools.slot_tensors:
        pool.fill_(NAN)
    empty = replace(loaded, cache=HybridCache(loaded.pools, True, loaded.cache.tiers))
    found = serve(empty, [greedy(longer, 24)])["a", 0]
    assert found.last.usage and found.last.usage.cached_tokens >= 700 and found.tokens == known.tokens
    pages = empty.cache.tree.shared(prompt)
    assert len(pages) == 700 // PAGE
    for pool, wanted in zip(empty.pools.page_tensors, before, strict=True):
        assert torch.equal(raw(pool)[:, pages], wanted)


PROMPTS, TOKENS, SHARE = 12, 50, 0.93
"""Of greedy tokens so many at least are those over bfloat16. On a CPU, in float32, 97.7 % are those over K/V that are
not rounded at all, and 99.7 % with K/V of bfloat16."""


def test_greedy_tokens_mostly_equal_bfloat16() -> None:
    """Each after bfloat16's own ones: of answers that have parted, nothing more would be learned."""
    plain, small = (load(None, options(kv, max_batch=16, max_context=512)) for kv in ("auto", "fp8"))
    prompts = [numbers(seed, 60 + 20 * seed, 500) for seed in range(PROMPTS)]
    wanted = serve(plain, [greedy(prompt, TOKENS, str(seed)) for seed, prompt in enumerate(prompts)])
    session, same = session_over(small), 0
    for seed, prompt in enumerate(prompts):
        told = wanted[str(seed), 0].tokens
        session.reset()
        logits = [session.prefill(prompt), *(session.step(token) for token in told[:-1])]
        same += sum(int(row.argmax()) == token for row, token in zip(logits, told, strict=True))
    share = same / (PROMPTS * TOKENS)
    print(f"{share:.2%} of {PROMPTS * TOKENS} greedy tokens of the embedded model are the same over float8 K/V")
    assert share >= SHARE


def test_greedy_tokens_over_int4() -> None:
    same, before = equal_greedy_tokens("cuda")
    assert same >= LEAST and before >= LEAST_BEFORE


# Drafts


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


def test_mtp_head_stores_its_own(drafting: ModelRunner) -> None:
    """What it stores after a step of few tokens and after one of many."""
    assert len(drafting.pools.keys) == len(drafting.config.attention_layers) + 1
    for pool in drafting.pools.page_tensors:
        raw(pool).fill_(0xff)
    serve(drafting, [greedy(numbers(1, 40, 500), 20)])
    for pool in drafting.pools.page_tensors:
        written = (raw(pool[-1]) != 0xff).any(-1).any(-1)
        assert 55 <= int(written.sum()) <= 70 and is_finite(pool[-1][written])
