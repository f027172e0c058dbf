"""Device mlx against transformers: random models of odd shapes have equal logits, however their tokens are fed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_moe_parity as mixtures
import torch
from PIL import Image
from safetensors.torch import save_file
from support import (
    Forcing,
    Reference,
    drain,
    numbers,
    same_logits,
    session_over,
    small_runtime,
    stepwise_logits,
    transformers_model,
    transformers_vision_model,
    with_sample,
)
from test_mlx_engine import some
from test_model_parity import VARIANTS
from test_mtp_model import DEPTH, PROMPT, TOLERANCE, Theirs, error
from torch import Tensor
from vision_models import picture

from deltic import Session
from deltic.config import EngineConfig
from deltic.config.vision import ImageConfig, VisionConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import load
from deltic.loader.model_files import open_model
from deltic.ops.mlx import missing
from deltic.params import EngineRequest, Prompt, SamplingParams
from deltic.runner.model_runner import ModelRunner
from deltic.vision.images import patches_of
from deltic.vision.prompt import with_pictures

if why := missing():
    pytest.skip(why, allow_module_level=True)

MODELS: dict[str, dict[str, Any]] = {
    "qwen3.5": {},
    "qwen3.5, tied": {"tie_word_embeddings": True, "vocab_size": 311, "num_key_value_heads": 1},
    "qwen3.5, odd": VARIANTS["odd"],
    "qwen3.5, eight layers": VARIANTS["eight layers"],
    "qwen3.5, yarn": VARIANTS["yarn"],
    "qwen3.5, a value head for each key head": {
        "linear_num_key_heads": 5, "linear_num_value_heads": 5, "linear_key_head_dim": 7, "linear_value_head_dim": 3,
        "linear_conv_kernel_dim": 2, "hidden_size": 36, "vocab_size": 257},
    "qwen3.5, head": {"head": True},
    "qwen3.5, vision": {"vision": True},
    "qwen3.5 moe, sixty experts": {"family": "qwen3_5_moe", **mixtures.VARIANTS["sixty experts"]},
    "qwen3.5 moe, tied, one expert a token": {
        "family": "qwen3_5_moe", **mixtures.VARIANTS["tied, one expert a token"], "vocab_size": 331},
    "qwen3.5 moe, head": {"family": "qwen3_5_moe", "num_experts": 7, "num_experts_per_tok": 3, "head": True},
    "qwen3.5 moe, vision": {"family": "qwen3_5_moe", "vision": True},
    "qwen3 next": {"family": "qwen3_next"},
    "qwen3 next, tied, yarn": mixtures.VARIANTS["qwen3 next, tied, not normalised"],
    "qwen3, seven heads": {"family": "qwen3", "num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": 18,
                           "hidden_size": 42, "vocab_size": 293},
    "qwen3, tied, yarn": {**VARIANTS["qwen3, yarn"], "tie_word_embeddings": True, "num_key_value_heads": 3},
    "qwen3 moe": {"family": "qwen3_moe", "num_experts": 9, "num_experts_per_tok": 4, "num_key_value_heads": 3},
    "qwen3 moe, not normalised": {**mixtures.VARIANTS["qwen3, not normalised"], "tie_word_embeddings": True},
    "qwen2, one K/V head": VARIANTS["qwen2, tied"],
    "llama, llama3 scaling": VARIANTS["llama, llama3 scaling, tied"],
    "llama, linear scaling": {**VARIANTS["llama, linear scaling"], "vocab_size": 263},
    "mistral": VARIANTS["mistral"],
}
FAST = ("qwen3.5, odd", "qwen3.5 moe, vision", "qwen3 next, tied, yarn", "qwen2, one K/V head")
"""Together they have all kinds of layers, tied and untied heads, scaled positions and pictures."""
BFLOAT16, MIXTURE = 0.15, 0.2
"""Largest RMS error of logits in bfloat16, as a part of their spread: rounding changes some of a token's experts."""
PICTURES = ImageConfig(min_pixels=8 * 8 * 4, max_pixels=8 * 8 * 40)


@dataclass(frozen=True)
class Pair:
    """One model in both libraries. vision: of a model with a tower. Its prompts have a picture."""

    theirs: Any
    directory: Path
    vision: VisionConfig | None = None

    @classmethod
    def of(cls, directory: Path, vision: bool = False, head: bool = False, **changes: Any) -> Pair:
        """Saves a random model of the test's families. head: with a draft head of random weights."""
        if vision:
            theirs = transformers_vision_model(directory, **changes)
            files = open_model(str(directory))
            assert files.vision
            return cls(theirs, directory, files.vision.tower)
        theirs = transformers_model(directory, **changes)
        if head:
            weights = {f"mtp.{name}": each.detach() for name, each in Theirs(theirs).named_parameters()}
            save_file(weights, directory / "mtp.safetensors")
        return cls(theirs, directory)

    def load(self, dtype: str = "float32") -> ModelRunner:
        return load(str(self.directory), EngineConfig(dtype=dtype, memory="16MiB", max_batch=4, max_context=512,
                                                      threads=1, device="mlx", speculate="off"))

    def prompt(self, seed: int, count: int) -> Prompt:
        """Returns so many random tokens; after some of them there is the picture."""
        ids = numbers(seed, count, 250)
        if self.vision is None:
            return Prompt(ids)
        image = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (24, 40, 3), dtype=np.uint8))
        text = [*ids[:5], self.vision.image_token_id, *ids[5:]]
        return with_pictures(text, [picture([image], PICTURES, self.vision)], self.vision)[0]

    def expected(self, prompt: Prompt, answer: Sequence[int] = ()) -> Tensor:
        """Returns the logits of transformers after all tokens, [n, V] float32."""
        shown = dict[str, Any]()
        if self.vision is not None:
            content = prompt.pictures[0].content
            kinds = [*(int(key < 0) for key in prompt.keys or ()), *[0] * len(answer)]
            patches = torch.from_numpy(patches_of(content, PICTURES, self.vision)).to(self.theirs.dtype)
            shown = {"mm_token_type_ids": torch.tensor([kinds]), "pixel_values": patches,
                     "image_grid_thw": torch.tensor([[1, *content.grid]])}
        with torch.no_grad():
            logits = self.theirs(torch.tensor([[*prompt.ids, *answer]]), use_cache=False, **shown).logits[0]
        found: Tensor = logits.float()
        return found


@pytest.fixture(scope="module", params=[
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MODELS])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair.of(tmp_path_factory.mktemp("model"), **MODELS[request.param])


@pytest.fixture(scope="module")
def ours(pair: Pair) -> ModelRunner:
    return pair.load()


def test_there_are_many_models() -> None:
    assert len(MODELS) >= 20


@pytest.mark.parametrize("budget", [512, 64, 7])
def test_logits_are_transformers_whole_and_chunked(pair: Pair, ours: ModelRunner, budget: int) -> None:
    prompt = pair.prompt(1, 133)
    found = session_over(ours, batch=2, budget=budget).prefill(prompt, all_logits=True)
    same_logits(pair.expected(prompt), found)


def test_logits_are_transformers_stepwise(pair: Pair, ours: ModelRunner) -> None:
    """After a short prompt, which may have a picture."""
    prompt, session = pair.prompt(2, 9), session_over(ours, batch=1)
    answer = numbers(3, 40, 250)
    found = [session.prefill(prompt), *stepwise_logits(session, answer)]
    same_logits(pair.expected(prompt, answer)[len(prompt.ids) - 1:], torch.stack(found))


def test_logits_are_transformers_batched(pair: Pair, ours: ModelRunner) -> None:
    """Of requests with prompts and answers of several lengths, in common steps of 33 tokens."""
    forcing, engine_over = Forcing(ours), {"batch": 4, "budget": 33, "context": 256}
    engine, expected = Engine(small_runtime(with_sample(ours, forcing.sample), **engine_over)), list[Tensor]()
    for seed, (length, count) in enumerate(((30, 25), (8, 40), (71, 9), (101, 14))):
        prompt, answer = pair.prompt(10 + seed, length), numbers(20 + seed, count, 250)
        expected.append(pair.expected(prompt, answer[:-1])[len(prompt.ids) - 1:])
        forcing.force(seed, Reference(prompt.ids, answer, expected[-1]))
        engine.add(EngineRequest(str(seed), prompt, SamplingParams(
            temperature=1.0, max_tokens=count, ignore_eos=True, seed=seed)))
    drain(engine)
    for seed, logits in enumerate(expected):
        same_logits(logits, forcing.recorded(seed))


@pytest.mark.parametrize("name", some([name for name, changes in MODELS.items() if "head" in changes], "qwen3.5, head"))
def test_drafts_are_those_of_a_head_of_transformers(name: str, tmp_path: Path) -> None:
    pair = Pair.of(tmp_path, **MODELS[name])
    theirs = Theirs(pair.theirs).eval()
    session = Session(tmp_path, speculate="mtp", memory="8MiB", threads=1, device="mlx", dtype="float32")
    tokens = numbers(4, PROMPT + 1, 250)
    session.prefill(tokens[:PROMPT])
    drafts, logits = session.draft(tokens[PROMPT], DEPTH, logits=True)
    with torch.no_grad():
        expected = theirs.drafts((*tokens, *drafts[:-1]))
    assert error(expected, logits) < TOLERANCE and drafts == expected.argmax(-1).tolist()


@pytest.mark.parametrize("name", some(MODELS, *FAST))
def test_bfloat16_is_within_its_bounds(name: str, tmp_path: Path) -> None:
    pair = Pair.of(tmp_path, **MODELS[name])
    pair.theirs.bfloat16().save_pretrained(tmp_path)
    half, prompt = pair.load("bfloat16"), pair.prompt(5, 120)
    assert half.pools.shards[0].keys.dtype == torch.bfloat16
    others = pair.expected(prompt)
    pair.theirs.float()
    exact = pair.expected(prompt)
    found = session_over(half, batch=2, budget=33).prefill(prompt, all_logits=True)
    error, other = (float((logits - exact).square().mean().sqrt() / exact.std()) for logits in (found, others))
    mixture = half.config.experts is not None
    assert 0 < error < (MIXTURE if mixture else BFLOAT16) and error < (2 if mixture else 1.5) * other, (error, other)
