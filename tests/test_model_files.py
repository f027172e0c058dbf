"""Models as people have them: files of other converters, several forms in one directory, and what is no model at all,
which is refused with its cause and the fix."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from gguf_models import SHAPES, gguf_tensors, metadata_of, write
from safetensors.torch import load_file, save_file
from support import load_directory, load_gguf, odd_shape, transformers_model
from test_gguf_metadata import TINY, tokenizer_metadata

from deltic.chat.tokenizer import read_tokenizer_files
from deltic.errors import ModelError
from deltic.loader.dummy import random_weights
from deltic.loader.gguf.config import config_from_gguf
from deltic.loader.gguf.file import GgufFile
from deltic.loader.gguf.load import load_packed
from deltic.loader.gguf.tokenizer import tokenizer_from_gguf
from deltic.loader.model_files import open_model
from deltic.loader.vision import find_mmproj

ODD = odd_shape()
ZEROS = np.zeros((8, 8), np.float32)


@pytest.fixture(scope="module")
def tensors():
    return gguf_tensors(ODD, random_weights(ODD, "float32"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory as transformers writes it."""
    path = tmp_path_factory.mktemp("saved")
    transformers_model(path)
    return path


@pytest.fixture
def copy(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "model"))


def same(found, expected):
    assert list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in expected)


# GGUF files of other converters


def ollama(tensors):
    """The names that Ollama gives: no suffix behind ssm_dt; a vision tower and a draft head in the same file."""
    renamed = {name.removesuffix(".bias") if name.endswith("ssm_dt.bias") else name: data
               for name, data in tensors.items()}
    return {**renamed, "v.patch_embed.weight": ZEROS, "v.blk.0.attn_q.weight": ZEROS, "mtp.fc.weight": ZEROS}


def test_a_file_of_ollama_has_the_same_numbers(tensors, tmp_path, caplog):
    plain = load_gguf(write(tmp_path / "plain.gguf", metadata_of(ODD), tensors), ODD)
    heads = [ODD.num_key_value_heads if kind == "full_attention" else 0 for kind in ODD.layer_types]
    changed = {"qwen35.attention.head_count_kv": heads, "qwen35.rope.dimension_sections": [*ODD.rope.mrope_section],
               "qwen35.ssm.v_head_reordered": True, "qwen35.rope.mrope_interleaved": True}
    path = write(tmp_path / "sha256-0123abcd.gguf", {**metadata_of(ODD), **tokenizer_metadata(TINY), **changed},
                 ollama(tensors))
    blob = path.rename(tmp_path / "sha256-0123abcd")
    with caplog.at_level(logging.WARNING):
        opened = open_model(str(blob))
    assert opened.config.layer_types == ODD.layer_types and opened.vision is None
    assert "the vision tower cannot be used, so that pictures are refused" in caplog.text
    with pytest.raises(ModelError, match=r"mtp\.fc\.weight"):
        opened.gguf_head()
    same(opened.load("float32", "cpu", None), plain)
    assert set(load_packed(opened.gguf, opened.config)) == set(plain)


def test_other_value_head_order_refused(tensors, tmp_path):
    path = write(tmp_path / "m.gguf", {**metadata_of(ODD), "qwen35.ssm.v_head_reordered": False}, tensors)
    with pytest.raises(ModelError, match=r"v_head_reordered false is not supported: convert"):
        open_model(str(path))


def test_unnormalised_expert_weights_respected(tmp_path):
    """Ollama has another key for them."""
    config = SHAPES["qwen3, experts"]
    weights = gguf_tensors(config, random_weights(config, "float32"))
    for given in (True, False):
        path = write(tmp_path / "m.gguf", {**metadata_of(config), "qwen3moe.norm_top_k_prob": given}, weights)
        experts = config_from_gguf(GgufFile.open(path)).experts
        assert experts is not None and experts.normalised == given


@pytest.mark.parametrize("pre", [None, "default"])
def test_pre_tokenizer_defaults_to_architecture(pre, tmp_path):
    whole = GgufFile.open(write(tmp_path / "m.gguf", {**metadata_of(ODD), **tokenizer_metadata(TINY)}, {"t": ZEROS})
                          ).metadata
    expected, metadata = tokenizer_from_gguf(whole), {**whole, "tokenizer.ggml.pre": pre}
    assert tokenizer_from_gguf(metadata) == expected
    with pytest.raises(ModelError, match=r"tokenizer.ggml.pre"):
        tokenizer_from_gguf({**metadata, "general.architecture": "llama"})


@pytest.mark.parametrize(("text", "tower", "found"), [
    ("Q4_K_M/m-00001-of-00002.gguf", "mmproj-F16.gguf", True), ("gguf/Q8_0/m.gguf", "mmproj-BF16.gguf", True),
    ("a/b/c/m.gguf", "mmproj-F16.gguf", False), ("Q4/m.gguf", "other/mmproj-F16.gguf", False),
    ("Q4/m.gguf", "mmproj-other.gguf", False)])
def test_tower_in_parent_folder(text, tower, found, tmp_path):
    for name in (text, tower):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert find_mmproj(tmp_path / text) == (tmp_path / tower if found else None)


# Several forms in one directory


@pytest.mark.parametrize("others", [["config.json"], ["imatrix_unsloth.gguf"], ["mtp.safetensors"],
                                    ["mmproj-F16.gguf", "imatrix.dat", "config.json"]])
def test_gguf_file_beside_config_files(others, tensors, tmp_path):
    write(tmp_path / "m.gguf", metadata_of(ODD), tensors)
    for name in others:
        (tmp_path / name).write_bytes(b"{}")
    assert open_model(tmp_path).path == tmp_path / "m.gguf"


def test_duplicate_weight_formats_read_once(copy):
    expected = load_directory(copy, open_model(copy).config)
    shutil.copy(copy / "model.safetensors", copy / "consolidated.safetensors")
    (copy / "model.safetensors").rename(copy / "weights.safetensors")
    (copy / "checkpoint-100").mkdir()
    shutil.copy(copy / "weights.safetensors", copy / "checkpoint-100" / "model.safetensors")
    same(load_directory(copy, open_model(copy).config), expected)


def shards(directory, count):
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = list(tensors)
    for number in range(count):
        save_file({name: tensors[name] for name in names[number::count]},
                  directory / f"model-{number + 1:05d}-of-{count:05d}.safetensors")


def test_all_shards_without_their_index_are_the_model(copy):
    expected = load_directory(copy, open_model(copy).config)
    shards(copy, 3)
    same(load_directory(copy, open_model(copy).config), expected)
    (copy / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has 2 of 3 shards: model-00002-of-00003.safetensors is absent; download it"):
        load_directory(copy, open_model(copy).config)


def test_files_of_two_models_are_named(copy):
    shutil.copy(copy / "model.safetensors", copy / "a.safetensors")
    (copy / "model.safetensors").rename(copy / "b.safetensors")
    with pytest.raises(ModelError, match=r"2 safetensors files \(a.safetensors, b.safetensors\) but no model"):
        load_directory(copy, open_model(copy).config)


# A vocabulary and merges instead of a tokenizer.json


TEXTS = ["Hello, world!", " It's 12345 o'clock\n\n\tnow ",
         "Grüße, 你好 🙂", "<|im_start|>user\nHi<|im_end|>", "e\u0301"]


def test_a_vocabulary_with_merges_is_a_tokenizer(tmp_path):
    """transformers reads the same files."""
    whole = json.loads((TINY / "tokenizer.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(whole["model"]["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in whole["model"]["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    added = {token["id"]: {**token} for token in whole["added_tokens"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>",
        "added_tokens_decoder": {str(id): {key: value for key, value in token.items() if key != "id"}
                                 for id, token in added.items()}}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    from tokenizers import Tokenizer

    ours = Tokenizer.from_str(read_tokenizer_files(tmp_path).tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == theirs.decode(theirs.encode(text))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"has no tokenizer.json: copy it"):
        read_tokenizer_files(tmp_path)


# What is no model


def adapter(path):
    (path / "config.json").unlink()
    (path / "model.safetensors").unlink()
    (path / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3.5-0.8B"}')
    (path / "adapter_model.safetensors").write_bytes(b"")


def pointer(name):
    def change(path):
        (path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    return change


def config(**more):
    def change(path):
        said = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**said, **more}))
    return change


def instead(name):
    def change(path):
        for other in ("config.json", "model.safetensors"):
            (path / other).unlink()
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(b"")
    return change


def inside(path):
    (path / "checkpoint-9").mkdir()
    for name in ("config.json", "model.safetensors"):
        (path / name).rename(path / "checkpoint-9" / name)


def packed(path):
    tensors = load_file(path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("up_proj.weight"))
    save_file({**tensors, name.removesuffix("weight") + "qweight": tensors[name].clone()}, path / "model.safetensors")


def without_config(path):
    (path / "config.json").unlink()


def emptied(path):
    (path / "model.safetensors").unlink()


REFUSALS = {
    "adapter": (adapter, r"is an adapter \(LoRA\) and no model: serve it with its base model 'Qwen/Qwen3.5-0.8B'"),
    "git-lfs weights": (pointer("model.safetensors"), "is a git-lfs pointer and not the file itself: run `git"),
    "git-lfs config": (pointer("config.json"), "config.json is a git-lfs pointer"),
    **{method: (config(quantization_config={"quant_method": method, "bits": 4}),
                f"quant_method '{method}' is not supported, .*; take the unquantized checkpoint .*or a GGUF file")
       for method in ("mxfp4", "hqq", "quark", "exl3")},
    "tensors of a quantization": (packed, r"qweight' is part of an unsupported quantization: take the unquantized"),
    "the authors' form": (instead("params.json"), "in the original format of its authors"),
    "ONNX": (instead("onnx/model.onnx"), "has only ONNX weights"),
    "diffusers": (instead("model_index.json"), "is a diffusers pipeline"),
    "a training": (inside, r"holds no model itself, but its folders do: name .*/checkpoint-9"),
    "no config": (without_config, "config.json is absent"),
    "no weights": (emptied, "has no weights: model.safetensors"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_foreign_formats_refused_with_cause(case, copy):
    change, message = REFUSALS[case]
    change(copy)
    with pytest.raises(ModelError, match=message):
        opened = open_model(copy)
        load_directory(opened.path, opened.config)


def test_git_lfs_pointer_refused(tmp_path):
    for name in ("m.gguf", "m.bin"):
        pointer(name)(tmp_path)
        with pytest.raises(ModelError, match=f"{name} is a git-lfs pointer"):
            open_model(tmp_path / name)
