"""Adapters that peft itself writes, against peft's own logits, each kind of layer alone and all together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lora_cases import SMALL, adapters_of, logits_of
from support import numbers, same_logits, tiny_texts, transformers_model

from deltic.cli import main
from deltic.config import EngineConfig
from deltic.engine.loading import load

peft = pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # of peft and transformers about each other

DENSE = ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj",
         "gate_proj", "up_proj", "down_proj", "lm_head"]
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
EVERYTHING: dict[str, Any] = {"target_modules": "all-linear", "rank_pattern": {"q_proj": 7, "layers.0.mlp.*": 2},
                              "alpha_pattern": {"up_proj": 16}, "use_rslora": True}
CASES: list[tuple[str, dict[str, Any]]] = [
    *(("qwen3_5", {"target_modules": [target]}) for target in DENSE),
    *(("qwen3_5_moe", {"target_modules": [target]}) for target in ("shared_expert_gate", "shared_expert.down_proj")),
    *(("qwen3_5_moe", {"target_modules": [], "target_parameters": [target]}) for target in PARAMETERS),
    ("qwen3_5_moe", {"target_modules": [], "target_parameters": PARAMETERS}),
    ("qwen3_next", {"target_modules": ["in_proj_qkvz", "in_proj_ba", "out_proj"]}),
    ("qwen3_5", EVERYTHING), ("qwen3", EVERYTHING), ("llama", EVERYTHING)]
MIXTURE: dict[str, Any] = {"target_modules": ["out_proj"], "target_parameters": PARAMETERS}
TOKENS = numbers(1, 19, 307)


def adapted(directory: Path, family: str, settings: dict[str, Any]) -> Any:
    """Writes a base model and an adapter with random terms. Returns peft's model."""
    base = transformers_model(directory / "base", family=family)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, **settings))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                tensor.copy_(torch.randn(tensor.shape) * (0.2 if "lora_B" in name or "embedding" in name else 0.3))
            elif "magnitude" in name:
                tensor *= 1 + 0.2 * torch.rand(tensor.shape)
    model.save_pretrained(directory / "adapter")
    return model.eval()


def expected(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([TOKENS])).logits[0]
    return found


@pytest.mark.parametrize(("family", "settings"), CASES, ids=str)
def test_logits_are_those_of_peft(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    wanted = expected(adapted(tmp_path, family, settings))
    runtime = load(str(tmp_path / "base"), EngineConfig(**SMALL))
    adapter = adapters_of(runtime, {"a": tmp_path / "adapter"})["a"]
    same_logits(wanted, logits_of(runtime, [(TOKENS, adapter)])[0], 1e-4)
    assert float((wanted - logits_of(runtime, [(TOKENS, None)])[0]).abs().max()) > 1e-2


@pytest.mark.parametrize(("family", "settings"), [
    ("qwen3_5", {**EVERYTHING, "use_dora": True}), ("qwen3_next", {"target_modules": "all-linear"}),
    ("qwen3_5", {"target_modules": ["embed_tokens", "lm_head"]}),
    ("qwen3_5_moe", MIXTURE),
    ("qwen3_5", {"target_modules": ["up_proj"], "modules_to_save": ["lm_head", "embed_tokens"]})], ids=str)
def test_convert_merges(family: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into F32 weights. Also what is not served per request."""
    monkeypatch.setattr("deltic.cli.convert._read_tokenizer", lambda _: tiny_texts())
    wanted = expected(adapted(tmp_path, family, settings))
    target = tmp_path / "merged.gguf"
    assert main(["convert", str(tmp_path / "base"), str(target), "--type", "F32", "--lora",
                 str(tmp_path / "adapter")]) == 0
    runtime = load(str(target), EngineConfig(**SMALL))
    same_logits(wanted, logits_of(runtime, [(TOKENS, None)])[0], 1e-4)


@pytest.mark.parametrize(("family", "settings", "options"), [
    ("qwen3_5", EVERYTHING, {"packed_weights": "on"}), ("llama", EVERYTHING, {"packed_weights": "on"}),
    ("qwen3_next", {"target_modules": "all-linear"}, {"packed_weights": "on"}),
    ("qwen3_5_moe", MIXTURE, {"packed_weights": "on"}),
    ("qwen3_5_moe", MIXTURE, {"packed_weights": "on", "expert_memory": "120KiB"}),
], ids=str)
def test_bases_in_gguf_files_take_adapters(family: str, settings: dict[str, Any], options: dict[str, Any],
                                           tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their value heads have another order, and experts may lie in the file."""
    monkeypatch.setattr("deltic.cli.convert._read_tokenizer", lambda _: tiny_texts())
    wanted = expected(adapted(tmp_path, family, settings))
    target = tmp_path / "base.gguf"
    assert main(["convert", str(tmp_path / "base"), str(target), "--type", "F32"]) == 0
    runtime = load(str(target), EngineConfig(**SMALL, **options))
    assert (runtime.experts is not None) == ("expert_memory" in options)
    adapter = adapters_of(runtime, {"a": tmp_path / "adapter"})["a"]
    same_logits(wanted, logits_of(runtime, [(TOKENS, adapter)])[0], 1e-4)
