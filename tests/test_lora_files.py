"""Files of adapters are untrusted: what does not fit is refused with the name of the key or tensor, without harm."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_cases import PREFIX, random_adapter, random_weights, runtime_of, write_adapter
from safetensors.torch import load_file
from support import moe_shape, odd_shape
from torch import Tensor

from deltic.config import Limits, ModelConfig
from deltic.engine.adapters import AdapterError, AdapterSet
from deltic.errors import ConfigError, DelticError, ModelError
from deltic.loader.lora import check_served, matches, open_lora, read_adapter

CONFIG = odd_shape(num_hidden_layers=2, layer_types=("linear_attention", "full_attention"))
EXPERTS = moe_shape(num_hidden_layers=2, layer_types=("linear_attention", "full_attention"))
A, B = f"{PREFIX}model.layers.0.mlp.up_proj.lora_A.weight", f"{PREFIX}model.layers.0.mlp.up_proj.lora_B.weight"


def read(path: Path, config: ModelConfig = CONFIG) -> Any:
    files = open_lora(path, config)
    check_served(files)
    return read_adapter(files, "a", torch.float32, torch.device("cpu"), False)


SAVED = {"modules_to_save": ["lm_head"]}


def changed(tmp_path: Path, tensors: dict[str, Tensor | None], settings: dict[str, Any] | None = None) -> Path:
    """An adapter with some tensors replaced or left out, and other settings."""
    path = random_adapter(tmp_path, CONFIG, only="up_proj")
    found = {**load_file(path / "adapter_model.safetensors"), **tensors}
    kept = {name: tensor for name, tensor in found.items() if tensor is not None}
    return write_adapter(path, kept, {"r": 4, **(settings or {})})


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


@pytest.mark.parametrize(("tensors", "said"), [
    ({A: zeros(4, 39)}, r"up_proj\.lora_A.*\[4, 39\].*\[rank, 40\]"),
    ({B: zeros(51, 4)}, r"up_proj\.lora_B.*\[51, 4\].*\[52, 4\]"),
    ({B: zeros(52, 3)}, r"up_proj\.lora_B.*\[52, 3\].*\[52, 4\]"),
    ({B: None}, r"up_proj\.lora_A.*has no lora_B"),
    ({A: None}, r"up_proj\.lora_B.*has no lora_A"),
    ({A: zeros(40)}, r"up_proj\.lora_A.*1 dimensions"),
    ({A: zeros(4, 40).int()}, r"up_proj\.lora_A.*I32"),
    ({A: zeros(0, 40)}, r"up_proj\.lora_A.*not empty"),
    ({A: torch.full((4, 40), torch.nan)}, r"up_proj\.lora_A.*not finite"),
    ({A: zeros(513, 40), B: zeros(52, 513)}, r"up_proj\.lora_A.*rank 513.*512"),
    ({f"{PREFIX}model.layers.7.mlp.up_proj.lora_A.weight": zeros(4, 40),
      f"{PREFIX}model.layers.7.mlp.up_proj.lora_B.weight": zeros(52, 4)}, r"layers\.7.*has no place"),
    ({f"{PREFIX}model.layers.0.mlp.c_fc.lora_A.weight": zeros(4, 40),
      f"{PREFIX}model.layers.0.mlp.c_fc.lora_B.weight": zeros(52, 4)}, r"c_fc\.lora_A.*no module of this model"),
    ({f"{PREFIX}model.visual.merger.lora_A.weight": zeros(4, 40),
      f"{PREFIX}model.visual.merger.lora_B.weight": zeros(52, 4)}, r"visual.*vision tower"),
    ({f"{PREFIX}model.layers.0.mlp.up_proj.lora_magnitude_vector.weight": zeros(52)}, r"magnitude.*DoRA.*convert"),
    ({f"{PREFIX}lm_head.weight": zeros(510, 40)}, r"lm_head.*\[510, 40\].*\[509, 40\]"),
    ({f"{PREFIX}model.layers.0.input_layernorm.weight": zeros(40)}, r"input_layernorm.*lora_A"),
    ({f"{PREFIX}model.embed_tokens.lora_embedding_A": zeros(4, 509),
      f"{PREFIX}model.embed_tokens.lora_embedding_B": zeros(40, 4)}, r"embedding.*convert"),
    ({f"{PREFIX}model.language_model.layers.0.mlp.up_proj.lora_A.weight": zeros(4, 40),
      f"{PREFIX}model.language_model.layers.0.mlp.up_proj.lora_B.weight": zeros(52, 4)}, r"several adapters.*up_proj"),
])
def test_a_tensor_that_does_not_fit_is_named(tensors: dict[str, Tensor | None], said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said):
        read(changed(tmp_path, tensors))


@pytest.mark.parametrize(("settings", "said"), [
    ({"peft_type": "IA3"}, "peft_type"), ({"bias": "all"}, "bias"), ({"lora_alpha": "8"}, "lora_alpha"),
    ({"lora_alpha": None}, "lora_alpha"), ({"lora_alpha": True}, "lora_alpha"), ({"use_qalora": True}, "use_qalora"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights.*pissa"), ({"lora_bias": True}, "lora_bias"),
    ({"alpha_pattern": {"(a+)+$": 8}}, "alpha_pattern"), ({"alpha_pattern": {"q_proj": "8"}}, "q_proj"),
    ({"alpha_pattern": [1]}, "alpha_pattern"), ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ({"alpha_pattern": {f"m{i}": 1 for i in range(2000)}}, "at most 1000"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
])
def test_a_setting_that_is_not_supported_is_named(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said):
        read(changed(tmp_path, {}, settings))


def test_whole_matrices_are_not_served(tmp_path: Path) -> None:
    """peft stores the base model's lm_head with its terms."""
    path = changed(tmp_path, {f"{PREFIX}lm_head.weight": zeros(509, 40),
                              f"{PREFIX}model.embed_tokens.base_layer.weight": zeros(509, 40)})
    assert read(path).layers
    with pytest.raises(ModelError, match=r"lm_head\.weight.*modules_to_save.*convert"):
        read(changed(tmp_path, {f"{PREFIX}lm_head.weight": zeros(509, 40)}, SAVED))


def test_a_directory_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no directory"):
        read(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"adapter_config\.json is absent"):
        read(tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"adapter_model\.bin.*could run code"):
        read(tmp_path)


def test_experts_of_another_model_are_refused(tmp_path: Path) -> None:
    name = f"{PREFIX}model.layers.0.mlp.experts"
    for a, b, said in (((44, 40), (41, 44), "no module"), ((43, 40), (40, 43), "11 experts"),
                       ((44, 40), (40, 33), "11 experts")):
        pair = {f"{name}.lora_A.weight": zeros(*a), f"{name}.lora_B.weight": zeros(*b)}
        with pytest.raises(ModelError, match=said):
            read(write_adapter(tmp_path, pair, {"r": 4}), EXPERTS)
    one = {f"{name}.11.up_proj.lora_A.weight": zeros(4, 40), f"{name}.11.up_proj.lora_B.weight": zeros(20, 4)}
    with pytest.raises(ModelError, match=r"experts\.11.*experts below 11"):
        read(write_adapter(tmp_path, one, {"r": 4}), EXPERTS)
    with pytest.raises(ModelError, match="no module"):
        read(write_adapter(tmp_path, pair, {"r": 4}))


@pytest.mark.parametrize("seed", range(200))
def test_mutated_files_are_refused_or_read(seed: int, tmp_path: Path) -> None:
    """Some bytes of a file are other ones, or missing. Nothing but an error may come of it."""
    rng, path = random.Random(seed), random_adapter(tmp_path, EXPERTS, rank=1)
    name = rng.choice(["adapter_config.json", "adapter_model.safetensors"])
    content = bytearray((path / name).read_bytes())
    end = len(content) if name.endswith("json") else 9000
    for _ in range(rng.choice([1, 1, 3, 20])):
        content[rng.randrange(min(end, len(content)))] = rng.randrange(256)
    (path / name).write_bytes(content[:rng.randrange(len(content))] if seed % 5 == 0 else content)
    try:
        read(path, EXPERTS)
    except DelticError as error:
        assert str(error)


@pytest.mark.parametrize(("pattern", "name", "found"), [
    ("q_proj", "model.layers.0.self_attn.q_proj", True), ("q_proj", "model.layers.0.self_attn.eq_proj", False),
    ("0.self_attn.q_proj", "model.layers.10.self_attn.q_proj", False), ("self_attn.q_proj", "self_attn.q_proj", True),
    (r".*\\.mlp\\.experts\\.up", "model.layers.0.mlp.experts.up", True), ("^layers.*", "model.layers.0", False),
    ("^model.*0.*up", "model.layers.0.mlp.up", True), ("layers.*down", "model.layers.0.mlp.up", False),
    (".*a.*a.*a.*b", "a" * 5000, False)])
def test_patterns_stand_for_modules(pattern: str, name: str, found: bool) -> None:
    assert matches(pattern.replace("\\\\", "\\"), name) is found


def test_numbers_and_sizes_of_adapters_are_limited(tmp_path: Path) -> None:
    path = random_adapter(tmp_path, CONFIG)
    runtime = runtime_of(CONFIG, random_weights(CONFIG), limits=Limits(max_adapters=2, max_adapters_mib=1))
    adapters = AdapterSet(runtime)
    adapters.load("one", path)
    with pytest.raises(AdapterError, match="already been loaded"):
        adapters.load("one", path)
    adapters.load("one", path, replace=True)
    adapters.load("two", path)
    with pytest.raises(AdapterError, match="max_adapters"):
        adapters.load("three", path)
    adapters.unload("two")
    large = random_adapter(tmp_path / "large", CONFIG, rank=400)
    with pytest.raises(AdapterError, match="max_adapters_mib"):
        adapters.load("three", large)
    for name in ("", "a:b", "-", "a" * 201, 5):
        with pytest.raises(AdapterError, match="no name"):
            adapters.load(name, path)  # type: ignore[arg-type]
    with pytest.raises(AdapterError, match="'two' is not loaded; loaded are: 'one'"):
        adapters.unload("two")
    shutil.rmtree(tmp_path)
    assert [name for name, _ in adapters.entries()] == ["one"]


def test_models_that_take_no_adapters_say_why(tmp_path: Path) -> None:
    path = random_adapter(tmp_path, CONFIG)
    for options, said in (({"debug_layers": True}, "debug_layers"), ({"ops": ("mlp=reference",)}, "mlp"),
                          ({"ops": ("reference",)}, "ops")):
        with pytest.raises(AdapterError, match=said):
            AdapterSet(runtime_of(CONFIG, random_weights(CONFIG), **options)).load("a", path)
    assert json.loads((path / "adapter_config.json").read_text())["r"] == 4
    with pytest.raises(ConfigError, match="max_adapters_mib"):
        Limits(max_adapters_mib=0)
