"""Builders of small models and engines, the one-token-at-a-time reference, and the rule of the same answer (L6)."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import deltic
from deltic.cache.manager import HybridCache
from deltic.cache.memory_plan import MemoryPlan
from deltic.cache.sharded_pools import allocate_shards
from deltic.cache.tensors import PoolOptions
from deltic.chat.tokenizer import read_tokenizer_files
from deltic.config import EngineConfig, ExpertsConfig, LinearConfig, ModelConfig, RopeConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import RandomModel, load
from deltic.loader.gguf.file import GgufFile
from deltic.loader.gguf.load import read_file
from deltic.loader.gguf.tokenizer import TokenizerTexts
from deltic.loader.names import expected_tensors
from deltic.loader.safetensors import read_directory
from deltic.ops.noise import gumbel, sample_key
from deltic.ops.types import Batch, Sampled, Sampling
from deltic.params import PAGE, EngineRequest, SamplingParams, TokenEvent, TokenLogprobs
from deltic.runner.model_runner import ModelRunner
from deltic.session import Session

DEVICE = os.environ.get("DELTIC_TEST_DEVICE", "cpu")
"""Where the tests' engines run: pytest's option --device."""
TAU = 1e-3
"""Largest difference of logits between two paths of one float32 model (random at range 0.1, or embedded)."""
ROUNDING = 1e-4 if DEVICE == "mlx" else 0.0
"""Largest difference of logits and log probabilities between two paths of a small float32 model, where the kernels of a
CPU give the same bits. MLX adds numbers in another order in batches of other sizes (L6)."""
DECIDED = 0.95
"""Share of positions of a random model at which the reference's best two logits are more than 2 tau apart."""


class Mismatch(AssertionError):
    """Two paths gave different answers."""


# Models


def odd_shape(**changes: Any) -> ModelConfig:
    """A small model in which no two sizes agree: heads, key heads, value heads, their dims, the conv's taps."""
    kinds = ("linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention",
             "linear_attention")
    shape = ModelConfig(
        architecture="qwen3_5", vocab_size=509, hidden_size=40, intermediate_size=52, num_hidden_layers=len(kinds),
        layer_types=kinds, num_attention_heads=6, num_key_value_heads=2, head_dim=14, attention_output_gate=True,
        rope=RopeConfig(1e4, 6, (1, 1, 1)), linear=LinearConfig(2, 6, 10, 12, 4), rms_norm_eps=1e-6,
        tie_word_embeddings=False, max_position_embeddings=1024, dtype="float32")
    return replace(shape, **changes)


def moe_shape(**changes: Any) -> ModelConfig:
    """The odd shape with experts, of which a token passes three, in blocks of no size."""
    moe: dict[str, Any] = {
        "architecture": "qwen3_5_moe", "intermediate_size": 0, "experts": ExpertsConfig(11, 3, 20, 28)}
    return odd_shape(**{**moe, **changes})


def split_shape(**changes: Any) -> ModelConfig:
    """The odd shape with heads that divide over 8 devices, which then share K/V heads, and slices of several sizes."""
    even: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 208, "num_attention_heads": 8, "head_dim": 16,
                            "num_key_value_heads": 2, "linear": LinearConfig(8, 16, 16, 16, 4)}
    return odd_shape(**{**even, **changes})


@lru_cache(maxsize=3)
def split_runtime(tp: int) -> ModelRunner:
    """Random weights of range 0.1 on so many devices, in float32."""
    model = RandomModel(shape=split_shape(), initializer_range=0.1)
    return load(model, EngineConfig(dtype="float32", memory="8MiB", max_batch=8, threads=1, device=DEVICE, tp=tp))


@lru_cache(maxsize=1)
def moe_runtime() -> ModelRunner:
    """The odd shape with experts and random weights of range 0.1, in float32."""
    model = RandomModel(shape=moe_shape(), initializer_range=0.1)
    return load(model, EngineConfig(dtype="float32", memory="8MiB", max_batch=8, threads=1, device=DEVICE))


@lru_cache(maxsize=1)
def odd_runtime() -> ModelRunner:
    """The odd shape with random weights of range 0.1, in float32."""
    model = RandomModel(shape=odd_shape(), initializer_range=0.1)
    return load(model, EngineConfig(dtype="float32", memory="8MiB", max_batch=8, threads=1, device=DEVICE))


def units_apart() -> AbstractContextManager[object]:
    """Models that are loaded meanwhile have pages and slots in memory of their own: for tests that choose units
    themselves instead of asking the cache."""
    return patch("deltic.runner.memory.frame_layout", lambda *_: None)


@lru_cache(maxsize=1)
def embedded_runtime() -> ModelRunner:
    """The model that comes with deltic, in float32, without its draft head."""
    with units_apart():
        return load(None, EngineConfig(dtype="float32", memory="64MiB", max_batch=8, max_context=512, threads=1,
                                       speculate="off", device=DEVICE))


@lru_cache(maxsize=1)
def qwen3_runtime() -> ModelRunner:
    """A Qwen3 of odd shape with random weights, in float32: no layer is recurrent, no output gated. With weights of
    smaller range it would soon repeat itself, as its layers remember less."""
    shape = odd_shape(
        architecture="qwen3", num_hidden_layers=3, layer_types=("full_attention",) * 3, attention_output_gate=False,
        rope=RopeConfig(1e4, 14, ()), linear=None)
    model = RandomModel(shape=shape, initializer_range=0.2, seed=2)
    return load(model, EngineConfig(dtype="float32", memory="8MiB", max_batch=8, threads=1, device=DEVICE))


RUNTIMES = {"odd": odd_runtime, "qwen3": qwen3_runtime, "embedded": embedded_runtime, "moe": moe_runtime}

HF_SHAPE: dict[str, Any] = {
    "vocab_size": 307, "hidden_size": 40, "intermediate_size": 52, "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"], "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 10, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "max_position_embeddings": 1024, "initializer_range": 0.1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                        "mrope_section": [1, 1, 1], "mrope_interleaved": True}}
def qwen2_shape(**changes: Any) -> ModelConfig:
    """A small Qwen2: biases, no norms of queries and keys; with rotary frequencies that are scaled unevenly."""
    bare: dict[str, Any] = {
        "architecture": "qwen2", "num_hidden_layers": 3, "layer_types": ("full_attention",) * 3, "linear": None,
        "attention_output_gate": False, "rope": RopeConfig(1e4, 14, (), (1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 4.0)),
        "qk_norm": False, "qkv_bias": True}
    return odd_shape(**{**bare, **changes})


QWEN3_SHAPE: dict[str, Any] = {
    "vocab_size": 307, "hidden_size": 40, "intermediate_size": 52, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 14, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "max_position_embeddings": 1024, "initializer_range": 0.1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}


BARE_SHAPE = {key: value for key, value in QWEN3_SHAPE.items() if key != "head_dim"} | {"hidden_size": 48}
EXPERTS: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", HF_SHAPE),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", {
        **{key: value for key, value in HF_SHAPE.items() if key != "intermediate_size"}, **EXPERTS,
        "shared_expert_intermediate_size": 28}),
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", {
        **{key: value for key, value in HF_SHAPE.items() if key != "intermediate_size"}, **EXPERTS,
        "shared_expert_intermediate_size": 28, "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**QWEN3_SHAPE, **EXPERTS, "norm_topk_prob": True}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", QWEN3_SHAPE),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", BARE_SHAPE),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**BARE_SHAPE, "head_dim": 14}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**BARE_SHAPE, "sliding_window": None})}
"""Classes of transformers, and the shape of a small model."""


def transformers_model(directory: Path, seed: int = 0, nested: bool = False, family: str = "qwen3_5",
                       **changes: Any) -> Any:
    """A random model of a family (Qwen3_5ForCausalLM ...) in float32, saved to the directory; returns the model.

    nested: rewrite the saved config.json as a ...ForConditionalGeneration's, weights and all.
    """
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(seed)
    kind, settings, shape = FAMILIES[family]
    made: Any = getattr(transformers, settings)(**{**shape, **changes})
    made._experts_implementation = "eager"  # others want sizes that are multiples of something
    model = getattr(transformers, kind)(made).float().eval()
    _scatter_vectors(model, seed)
    model.save_pretrained(directory)
    if nested:
        _nest(directory, kind.replace("ForCausalLM", "ForConditionalGeneration"), family)
    return model


def load_directory(path: str | Path, config: ModelConfig, dtype: Any = "auto", device: Any = "cpu", progress: Any = None
                   ) -> dict[str, Tensor]:
    """All tensors of a safetensors directory, in the order of their shapes."""
    tensors = dict(read_directory(path, config, dtype, device, progress))
    return {name: tensors[name] for name in expected_tensors(config)}


def load_gguf(source: GgufFile | str | Path, config: ModelConfig, dtype: Any = "auto", device: Any = "cpu",
              progress: Any = None) -> dict[str, Tensor]:
    """All tensors of a GGUF file, in the order of their shapes."""
    tensors = dict(read_file(source, config, dtype, device, progress))
    return {name: tensors[name] for name in expected_tensors(config)}


def tiny_texts() -> TokenizerTexts:
    """The embedded model's."""
    files = read_tokenizer_files(Path(deltic.__file__).parent / "models" / "tiny")
    return TokenizerTexts(files.tokenizer, files.special_tokens, files.templates)


def transformers_vision_model(directory: Path, seed: int = 0, vocabulary: int | None = None, family: str = "qwen3_5",
                              text: Mapping[str, Any] | None = None, **changes: Any) -> Any:
    """A random Qwen3_5ForConditionalGeneration, or Qwen3_5Moe..., in float32, saved to the directory; gives the model.
    text: changes of its text_config. changes: of its vision_config, and its tokens' ids."""
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(seed)
    kind, settings, shape = FAMILIES[family]
    inner = getattr(transformers, settings)(
        **{**shape, **({"vocab_size": vocabulary} if vocabulary else {}), **(text or {})})
    vision = {"depth": 2, "hidden_size": 48, "num_heads": 4, "intermediate_size": 100, "patch_size": 4,
              "out_hidden_size": inner.hidden_size, "num_position_embeddings": 36, **changes}
    ids = {name: vision.pop(name, inner.vocab_size - 1 - index) for index, name in enumerate(
        ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"))}
    outer = getattr(transformers, settings.replace("Text", ""))
    made: Any = outer(text_config=inner.to_dict(), vision_config=vision, **ids)
    made._experts_implementation = made.text_config._experts_implementation = "eager"
    model: Any = getattr(transformers, kind.replace("CausalLM", "ConditionalGeneration"))(made).float().eval()
    _scatter_vectors(model, seed)
    with torch.no_grad():  # else attention is nearly the same everywhere
        for block in model.model.visual.blocks:
            block.attn.qkv.weight *= 20
    model.save_pretrained(directory)
    return model


def interleaved(config: ModelConfig, weights: Mapping[str, Tensor], layer: int, names: str) -> Tensor:
    """A packed projection of Qwen3-Next, `qkvz` or `ba`: the rows of each key head in turn, said here head by head."""
    linear, rows = config.linear, list[Tensor]()
    assert linear
    share, prefix = linear.num_value_heads // linear.num_key_heads, f"model.layers.{layer}.linear_attn.in_proj_"
    if names == "ba":
        parts = [(weights[f"{prefix}{part}.weight"], share) for part in names]
    else:
        q, k, v = weights[f"{prefix}qkv.weight"].split([linear.key_dim, linear.key_dim, linear.value_dim])
        wide = share * linear.value_head_dim
        parts = [(q, linear.key_head_dim), (k, linear.key_head_dim), (v, wide), (weights[f"{prefix}z.weight"], wide)]
    for head in range(linear.num_key_heads):
        rows += [part[head * size:(head + 1) * size] for part, size in parts]
    return torch.cat(rows)


def _scatter_vectors(model: Any, seed: int) -> None:
    """A fresh model's norms are all zero or one, which hides a missing or doubled + 1, and its biases are zero."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith(("norm.weight", ".bias")):
                tensor += 0.2 * torch.randn(tensor.shape, generator=generator)


def _nest(directory: Path, kind: str, family: str) -> None:
    from safetensors.torch import load_file, save_file

    text = json.loads((directory / "config.json").read_text())
    outer = {"architectures": [kind], "model_type": family,
             "tie_word_embeddings": text.pop("tie_word_embeddings"), "text_config": text}
    (directory / "config.json").write_text(json.dumps(outer))
    tensors = load_file(directory / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(renamed, directory / "model.safetensors", {"format": "pt"})


# Sessions and engines over a loaded model, with pools of their own


def fresh_pools(runtime: ModelRunner, pages: int, slots: int, rings: int | None = None,
                kv: torch.dtype | None = None, state: torch.dtype | None = None) -> Any:
    """Fresh pools full of NaN: whoever reads what nobody wrote will show it. rings: by default one for everyone. kv,
    state: dtypes of K/V and of states; by default the model's own."""
    like, count = runtime.pools.shards[0], len(runtime.pools.shards)
    extras = PoolOptions(slots if rings is None else rings, runtime.mtp is not None, like.tiled, kv or like.keys.dtype,
                    state or like.recurrent.dtype)
    pools = allocate_shards(runtime.config, pages, slots, like.conv.dtype, [runtime.decoder.ops] * count,
                            [str(shard.device) for shard in runtime.pools.shards], extras)
    for shard in pools.shards:
        for tensor in (*shard.page_tensors, *shard.slot_tensors, *(shard.delta_logs or ())):
            packed = tensor.dtype in (torch.int8, torch.uint8)
            tensor.view(torch.uint8).fill_(0xff) if packed else tensor.fill_(float("nan"))
    return pools


def small_runtime(runtime: ModelRunner, *, batch: int = 8, budget: int = 64, pages: int | None = None,
                  context: int | None = None) -> ModelRunner:
    """The same model with a cache of its own: `pages` K/V pages, slots for the batch and one more."""
    context = context or min(512, runtime.memory.max_context)
    pages = pages or batch * -(-context // PAGE)
    pools = fresh_pools(runtime, pages, batch + 1)
    return replace(
        runtime, options=replace(runtime.options, token_budget=budget, max_batch=batch),
        memory=MemoryPlan(pages, batch + 1, batch, min(context, pages * PAGE)),
        cache=HybridCache(pools))


def session_over(runtime: ModelRunner, **limits: Any) -> Session:
    """A Session over an already loaded model."""
    with patch("deltic.session.load_any", lambda *_: small_runtime(runtime, **limits)):
        return Session()


def with_sample(runtime: ModelRunner, sample: Any) -> ModelRunner:
    """The runtime with another `sample` op."""
    ops = replace(runtime.decoder.ops, sample=sample)
    return replace(runtime, decoder=replace(runtime.decoder, ops=ops))


# The reference: one token at a time


@dataclass(frozen=True, slots=True)
class Reference:
    """What one request answers, computed token by token. logits [n, V]: row i chose token i of the answer."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: Tensor


def stepwise_logits(session: Session, tokens: Iterable[int]) -> Tensor:
    """The logits after each of the tokens, fed one by one: [n, V]."""
    return torch.stack([session.step(token).cpu() for token in tokens])


def reference(runtime: ModelRunner, prompt: Sequence[int], count: int, params: SamplingParams | None = None,
              choice: int = 0) -> Reference:
    """Greedy or keyed-draw answer of `count` tokens, one token at a time through a Session."""
    session = session_over(runtime, batch=1)
    logits = stepwise_logits(session, prompt)[-1]
    rows, tokens = [logits], [drawn(logits, params, choice, len(prompt))]
    while len(tokens) < count:
        logits = session.step(tokens[-1]).cpu()
        tokens.append(drawn(logits, params, choice, len(prompt) + len(tokens)))
        rows.append(logits)
    return Reference(tuple(prompt), tuple(tokens), torch.stack(rows))


def drawn(logits: Tensor, params: SamplingParams | None, choice: int, position: int) -> int:
    """The token that plain temperature sampling takes here."""
    return int(perturbed(logits, params, choice, position).argmax())


def perturbed(logits: Tensor, params: SamplingParams | None, choice: int, position: int) -> Tensor:
    """What the draw takes the maximum of: logits, or logits / temperature + keyed noise."""
    if params is None or params.temperature == 0:
        return logits
    assert params.seed is not None and params.temperature is not None
    key = torch.tensor([sample_key(params.seed, choice, position)])
    return logits.double() / params.temperature + gumbel(key, torch.arange(len(logits)))[0]


# The rule


def margins(logits: Tensor) -> Tensor:
    """Distance of the best two: [n, V] -> [n]."""
    best = logits.topk(2, dim=-1).values
    return best[..., 0] - best[..., 1]


def same_logits(expected: Tensor, found: Tensor, tau: float = TAU, decided: float = 0.0) -> float:
    """Raise Mismatch unless |difference| <= tau everywhere and the best token agrees wherever the reference's margin
    exceeds 2 tau, which must be so at a share `decided` of the positions. Returns the largest difference."""
    if expected.shape != found.shape:
        raise Mismatch(f"logits of shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
    if not bool(found.isfinite().all()):
        raise Mismatch("logits are not finite")
    clear = margins(expected) > 2 * tau
    wrong = (expected.argmax(-1) != found.argmax(-1)) & clear
    if bool(wrong.any()):
        raise Mismatch(f"another best token at positions {wrong.nonzero().flatten().tolist()[:8]}")
    worst = float((expected - found).abs().max())
    if not worst <= tau:
        position = int((expected - found).abs().amax(-1).argmax())
        raise Mismatch(f"logits differ by {worst:.3g} at position {position}, more than {tau:g}")
    share = float(clear.float().mean())
    if share < decided:
        raise Mismatch(f"only {share:.1%} of the reference's positions are decided: the test could not fail")
    return worst


def same_scores(expected: Sequence[TokenLogprobs], found: Sequence[TokenLogprobs]) -> None:
    """Raise Mismatch unless the log probabilities are equal, or agree up to ROUNDING, which decides between tokens that
    are as probable up to that."""
    if not ROUNDING and tuple(expected) != tuple(found):
        raise Mismatch(f"log probabilities are {found} instead of {expected}")
    for index, (wanted, score) in enumerate(zip(expected, found, strict=True)):
        pairs = [*zip(wanted.top, score.top, strict=True)]
        close = all(abs(one - other) <= ROUNDING for (_, one), (_, other) in pairs)
        others = dict(wanted.top)
        known = all(abs(each - others.get(token, wanted.top[-1][1])) <= ROUNDING for token, each in score.top)
        ranks = abs(wanted.rank - score.rank) <= (ROUNDING > 0)
        if not (close and known and ranks and abs(wanted.token - score.token) <= ROUNDING):
            raise Mismatch(f"log probabilities at {index} are {score} instead of {wanted}")


def rounded(value: Any) -> Any:
    """Returns JSON to compare with other JSON, in which floats may differ by ROUNDING."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return pytest.approx(value, rel=0, abs=ROUNDING) if isinstance(value, float) else value


def same_tokens(expected: Reference, found: Sequence[int], params: SamplingParams | None = None, choice: int = 0,
                tau: float = TAU) -> None:
    """Raise Mismatch unless the tokens agree up to the first position that rounding may decide."""
    for index, (token, wanted) in enumerate(zip(found, expected.tokens, strict=False)):
        if token == wanted:
            continue
        scores = perturbed(expected.logits[index], params, choice, len(expected.prompt) + index)
        margin, scale = float(margins(scores)), params.temperature if params and params.temperature else 1.0
        if margin > 2 * tau / scale:
            raise Mismatch(f"token {index} of the answer is {token} instead of {wanted}, by a margin of {margin:.3g}")
        return
    if len(found) != len(expected.tokens):
        raise Mismatch(f"{len(found)} tokens instead of {len(expected.tokens)}")


def lively(tokens: Sequence[int]) -> None:
    """Raise Mismatch if the answer repeats itself so much that a broken path would go unseen."""
    distinct = len(set(tokens))
    if distinct < len(tokens) / 2:
        raise Mismatch(f"only {distinct} distinct tokens in {len(tokens)}: the test could not fail")


# Engines


@dataclass(slots=True)
class Answer:
    """The events of one choice."""

    events: list[TokenEvent] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [event.token for event in self.events if event.token is not None]

    @property
    def last(self) -> TokenEvent:
        return self.events[-1]


Answers = dict[tuple[str, int], Answer]


def take(answers: Answers, events: Iterable[TokenEvent]) -> None:
    for event in events:
        answer = answers.setdefault((event.request, event.choice), Answer())
        assert not answer.events or answer.last.finish is None, "an event after the end"
        answer.events.append(event)


def drain(engine: Engine, answers: Answers | None = None, limit: int = 20_000) -> Answers:
    """Step until nothing is left to do; then nothing may be held either."""
    answers = {} if answers is None else answers
    for _ in range(limit):
        if not engine.has_work:
            break
        take(answers, engine.step())
        engine.check()
    assert not engine.has_work, f"still at work after {limit} steps"
    assert all(answer.last.finish for answer in answers.values()), "an answer without an end"
    engine.check()
    return answers


def serve(runtime: ModelRunner, requests: Iterable[EngineRequest]) -> Answers:
    """The answers of these requests, all added at once."""
    engine = Engine(runtime)
    for request in requests:
        engine.add(request)
    return drain(engine)


@dataclass(slots=True)
class Forcing:
    """A `sample` op that records the logits of every draw and dictates the tokens of known requests.

    Draws are known by their keys, so every forced request needs temperature > 0 and a seed of its own.
    """

    runtime: ModelRunner
    script: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    logits: dict[int, dict[int, Tensor]] = field(default_factory=dict)

    def force(self, seed: int, answer: Reference) -> None:
        """Make the request with this seed give the reference's tokens."""
        self.logits[seed] = {}
        for index, token in enumerate(answer.tokens):
            self.script[sample_key(seed, 0, len(answer.prompt) + index)] = (seed, index, token)

    def recorded(self, seed: int) -> Tensor:
        """The logits [n, V] that the request's tokens were drawn from, each drawn exactly once."""
        rows = self.logits[seed]
        assert sorted(rows) == list(range(len(rows)))
        return torch.stack([rows[index] for index in range(len(rows))])

    def sample(self, logits: Tensor, sampling: Sampling) -> Sampled:
        raw = logits.clone().cpu()
        sampled = self.runtime.decoder.ops.sample(logits, sampling)
        tokens = sampled.tokens.clone()
        for row, key in enumerate(sampling.key.tolist()):
            if key in self.script:
                seed, index, token = self.script[key]
                assert index not in self.logits[seed], f"token {index} of request {seed} is drawn twice"
                self.logits[seed][index] = raw[row]
                tokens[row] = token
        return replace(sampled, tokens=tokens, landed=False)


@dataclass(slots=True)
class Watch:
    """Stands before `ModelRunner.run` and keeps what each step was made of."""

    runtime: ModelRunner
    chunks: list[tuple[int, ...]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runtime, name)

    def run(self, batch: Batch) -> Tensor:
        self.chunks.append(batch.layout.chunks)
        return self.runtime.run(batch)


def numbers(seed: int, count: int, vocabulary: int) -> tuple[int, ...]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, vocabulary, (count,), generator=generator).tolist())


def greedy(prompt: Sequence[int], count: int, name: str = "a", **params: Any) -> EngineRequest:
    """A request for exactly `count` greedy tokens."""
    settings: Mapping[str, Any] = {"temperature": 0.0, "max_tokens": count, "ignore_eos": True, **params}
    return EngineRequest(name, tuple(prompt), SamplingParams(**settings))


T = TypeVar("T")


def every(step: int, values: Iterable[Any]) -> list[Any]:
    """Values of a parameter, of which all but each such are slow."""
    return [pytest.param(value, marks=pytest.mark.slow) if place % step else value
            for place, value in enumerate(values)]


def examples(count: int) -> int:
    """Examples that hypothesis makes: so many in `make test-all`, an eighth of them in the quick suite."""
    return count if os.environ.get("DELTIC_TEST_SLOW") else count // 8


def pairs(values: tuple[object, ...]) -> set[tuple[int, object, int, object]]:
    """All pairs of two axes' values in one case."""
    return {(i, values[i], j, values[j]) for i, j in itertools.combinations(range(len(values)), 2)}


def pairwise(grid: list[T], axes: Callable[[T], tuple[object, ...]], chosen: Sequence[T] = ()) -> Iterator[T]:
    """Few cases that hold, together with those chosen before, every pair of two axes' values that the grid holds."""
    missing = set().union(*(pairs(axes(case)) for case in grid)).difference(*(pairs(axes(case)) for case in chosen))
    while missing:
        best = max(grid, key=lambda case: len(pairs(axes(case)) & missing))
        missing -= pairs(axes(best))
        yield best
