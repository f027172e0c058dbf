"""Models whose config or weights a caller hands over, in place of what their files have."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import numbers, odd_shape, transformers_model, transformers_vision_model

import deltic
from deltic import LLM, RandomModel, SamplingParams, Session
from deltic.config import ModelConfig
from deltic.errors import ConfigError, ModelError

TOKENS = numbers(0, 40, 250)
TINY = Path(deltic.__file__).parent / "models" / "tiny"
Saved = tuple[Path, dict[str, torch.Tensor]]


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_5_moe"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A directory as transformers writes it, and its tensors."""
    path = tmp_path_factory.mktemp("saved")
    transformers_model(path, family=request.param)
    return path, load_file(path / "model.safetensors")


def logits(*model: Any, **options: Any) -> torch.Tensor:
    return Session(*model, memory="8MiB", **options).prefill(TOKENS, all_logits=True)


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"quant": "q8_0"}], ids=str)
def test_weights_in_memory_are_those_of_the_file(saved: Saved, options: dict[str, Any]) -> None:
    path, weights = saved
    expected = logits(path, **options)
    assert torch.equal(logits(weights=weights, config=path / "config.json", **options), expected)
    assert torch.equal(logits(path, weights=weights, **options), expected)


def test_a_config_may_be_a_file_what_one_holds_or_a_shape(saved: Saved) -> None:
    path, weights = saved
    mapping = json.loads((path / "config.json").read_text())
    expected = logits(path)
    for config in (str(path / "config.json"), mapping, ModelConfig.from_hf(mapping)):
        assert torch.equal(logits(weights=weights, config=config), expected)
        assert torch.equal(logits(path, config=config), expected)


def test_the_given_config_counts_and_not_the_directory_s(saved: Saved, tmp_path: Path) -> None:
    path, _ = saved
    mapping = json.loads((path / "config.json").read_text())
    model = Path(shutil.copytree(path, tmp_path / "model"))
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**mapping, "rms_norm_eps": 0.1}))
    assert not torch.equal(logits(model, config=other), logits(model))
    (model / "config.json").unlink()
    assert torch.equal(logits(model, config=mapping), logits(path))


def test_a_model_keeps_nothing_of_the_tensors_it_was_given(saved: Saved) -> None:
    path, weights = saved
    own = {name: tensor.clone() for name, tensor in weights.items()}
    session = Session(weights=own, config=path / "config.json", memory="8MiB")
    for tensor in own.values():
        tensor.zero_()
    assert torch.equal(session.prefill(TOKENS, all_logits=True), logits(path))


def test_tensors_need_not_be_contiguous_nor_without_gradients(saved: Saved) -> None:
    path, weights = saved
    odd = {name: (tensor.t().contiguous().t() if tensor.dim() == 2 else tensor).requires_grad_()
           for name, tensor in weights.items()}
    assert torch.equal(logits(weights=odd, config=path / "config.json"), logits(path))


def test_a_vision_tower_in_memory_sees(tmp_path: Path) -> None:
    transformers_vision_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    session = Session(weights=weights, config=tmp_path / "config.json", memory="8MiB")
    assert session.has_vision and Session(tmp_path, memory="8MiB").has_vision
    text = {name: tensor for name, tensor in weights.items() if "visual" not in name}
    assert not Session(tmp_path, weights=text, memory="8MiB").has_vision


def test_a_directory_lends_its_tokenizer_to_weights_in_memory() -> None:
    weights = load_file(TINY / "model.safetensors")
    sampling = SamplingParams(temperature=0.0, max_tokens=8)
    with LLM(memory="8MiB") as plain, LLM(TINY, weights=weights, memory="8MiB") as given:
        assert given.chat("Hi", sampling).text == plain.chat("Hi", sampling).text
    with LLM(weights=weights, config=TINY / "config.json", memory="8MiB") as bare:
        assert bare.generate([[1, 2, 3]], sampling)[0].choices[0].tokens
        with pytest.raises(ModelError, match="no tokenizer"):
            bare.chat("Hi")


def test_l8_tensors_that_do_not_fit_are_named(saved: Saved) -> None:
    path, weights = saved
    config = path / "config.json"
    norm = "model.norm.weight"
    for change, words in (({norm: None}, "dense torch.Tensor"), ({norm: torch.zeros(3)}, r"norm.weight.*\[3\]"),
                          ({"what.is.this": torch.zeros(3)}, "what.is.this"), ({5: torch.zeros(3)}, "names must be"),
                          ({norm: weights[norm].long()}, "I64"),
                          ({norm: weights[norm].to(torch.float8_e4m3fn)}, "without scales")):
        with pytest.raises((ConfigError, ModelError), match=words):
            Session(weights={**weights, **change}, config=config)  # type: ignore[dict-item]
    with pytest.raises(ModelError, match=r"1 tensors are missing in `weights`, such as .*norm"):
        Session(weights={name: tensor for name, tensor in weights.items() if name != norm}, config=config)


def test_l8_what_does_not_go_together_is_refused(saved: Saved, tmp_path: Path) -> None:
    path, weights = saved
    for options, words in (({"weights": weights}, "give `config`"),
                           ({"weights": [], "config": path}, "weights must map"),
                           ({"weights": weights, "config": 5}, "config must be"),
                           ({"weights": weights, "config": path / "config.json", "cache_dir": str(tmp_path)},
                            "cache_dir is for weights that lie in files"),
                           ({"model": RandomModel(shape=odd_shape()), "weights": weights}, "RandomModel"),
                           ({"model": RandomModel(shape=odd_shape()), "config": path}, "RandomModel")):
        with pytest.raises(ConfigError, match=words):
            LLM(**options)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"nowhere.json"):
        Session(path, config=tmp_path / "nowhere.json")
