"""Files of MLX: device mlx multiplies their codes as they are, with the logits and the greedy tokens of mlx-lm."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import FAMILIES, drain, greedy, numbers, same_logits, session_over, small_runtime

from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import load
from deltic.loader.dummy import random_head
from deltic.loader.model_files import open_model
from deltic.ops.mlx import missing
from deltic.spec_decode.draft_length import FixedDraftLength

pytest.importorskip("mlx_lm")
if why := missing():
    pytest.skip(why, allow_module_level=True)

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models import qwen3_5, qwen3_5_moe

from deltic.ops.mlx.linear import MlxMatrix

SIZES: dict[str, Any] = {
    "vocab_size": 384, "hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
FORMS: dict[str, dict[str, Any]] = {
    "4 bits": {"group_size": 64, "bits": 4}, "8 bits": {"group_size": 32, "bits": 8},
    "3 bits": {"group_size": 32, "bits": 3}, "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}


def written(folder: Path, family: str, form: dict[str, Any], dtype: Any = mx.float32) -> Any:
    """Writes a random model as mlx-lm does; returns it."""
    shape = {**FAMILIES[family][2], **SIZES, "model_type": f"{family}_text", "full_attention_interval": 4}
    if family == "qwen3_5_moe":
        shape["num_experts"] = 8
    config = {"model_type": family, "architectures": [FAMILIES[family][0].replace("CausalLM", "ConditionalGeneration")],
              "text_config": shape, "tie_word_embeddings": False}
    module = qwen3_5_moe if family == "qwen3_5_moe" else qwen3_5
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(dtype)
    model.update_modules(model.leaf_modules())
    nn.quantize(model, **form, class_predicate=lambda path, each: hasattr(each, "to_quantized") and not path.endswith(
        ("in_proj_a", "in_proj_b")))
    mx.eval(model.parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps({**config, "quantization": form}))
    return model


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_logits_and_tokens_are_mlx_lms(family: str, form: str, tmp_path: Path) -> None:
    theirs = written(tmp_path, family, FORMS[form])
    ours = load(str(tmp_path), EngineConfig(dtype="float32", memory="16MiB", threads=1, device="mlx"))
    layer = ours.decoder.weights.layers[0]
    assert isinstance(layer.mixer.out_proj, MlxMatrix) and isinstance(ours.decoder.weights.embedding, MlxMatrix)
    tokens = numbers(2, 50, ours.config.vocab_size)
    expected = torch.tensor(theirs(mx.array([list(tokens)]))[0].tolist())
    session = session_over(ours, batch=1)
    found = session.prefill(tokens, all_logits=True)
    same_logits(expected, found)
    answer = [int(token) for token, _ in generate_step(mx.array(tokens), theirs, max_tokens=12)]
    logits, own = found[-1], list[int]()
    while len(own) < 12:
        own.append(int(logits.argmax()))
        logits = session.step(own[-1])
    assert own == answer


def test_packed_weights_off_dequantizes(tmp_path: Path) -> None:
    written(tmp_path, "qwen3_5", FORMS["4 bits"])
    packed, plain = (load(str(tmp_path), EngineConfig(
        dtype="float32", memory="16MiB", threads=1, device="mlx", packed_weights=option)) for option in ("auto", "off"))
    assert isinstance(plain.decoder.weights.layers[0].mixer.out_proj, torch.Tensor)
    assert packed.decoder.weight_bytes() < plain.decoder.weight_bytes() / 4
    tokens = numbers(2, 50, packed.config.vocab_size)
    same_logits(*(session_over(each, batch=1).prefill(tokens, all_logits=True) for each in (plain, packed)))


def test_a_draft_head_beside_a_packed_trunk(tmp_path: Path) -> None:
    """mlx-lm drops heads; a file in the model's folder has one."""
    written(tmp_path, "qwen3_5", FORMS["4 bits"])
    options = EngineConfig(dtype="float32", memory="16MiB", threads=1, device="mlx", speculate="mtp:3")
    config = replace(open_model(str(tmp_path)).config, num_mtp_layers=1)
    save_file(random_head(config), tmp_path / "mtp.safetensors")
    runtime = load(str(tmp_path), options)
    assert runtime.mtp_runner and isinstance(runtime.decoder.weights.layers[0].mixer.out_proj, MlxMatrix)
    prompt = numbers(2, 50, runtime.config.vocab_size)
    answers = list[list[int]]()
    for drafts in (0, 3):
        engine = Engine(small_runtime(runtime), None, FixedDraftLength(drafts) if drafts else None)
        engine.add(replace(greedy(prompt, 30, "a"), speculate=bool(drafts)))
        answers.append(drain(engine)[("a", 0)].tokens)
        assert (engine.speculator.stats.drafted_at[0] > 0) == bool(drafts)
    assert answers[0] == answers[1]
