"""GGUF files as Ollama's converter writes them: the vision tower and the draft head inside the text model's file give
the numbers, pictures and answers of the model's safetensors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_models import write
from safetensors.torch import save_file
from support import tiny_texts, transformers_vision_model
from vision_models import GREEDY, directory, drawing, picture, shows

from deltic import LLM
from deltic.cli import main
from deltic.errors import ModelError
from deltic.loader.dummy import random_head
from deltic.loader.gguf.file import GgufFile
from deltic.loader.model_files import ModelFiles, open_model
from deltic.loader.names import is_norm
from deltic.loader.vision import expected_tower

__all__ = ["directory"]
Arrays = dict[str, Any]
_HEAD = {"nextn.eh_proj": "mtp.fc", "nextn.enorm": "mtp.pre_fc_norm_embedding", "nextn.hnorm": "mtp.pre_fc_norm_hidden",
         "nextn.shared_head_norm": "mtp.norm"}
_TOWER = {"v.position_embd": "v.pos_embed", "v.patch_embd": "v.patch_embed", "v.post_ln": "v.merger.norm",
          "mm.0": "v.merger.linear_fc1", "mm.2": "v.merger.linear_fc2", "ffn_up": "mlp.linear_fc1",
          "ffn_down": "mlp.linear_fc2", "ln1": "norm1", "ln2": "norm2"}


def arrays(path: Path) -> Arrays:
    tensors = GgufFile.open(path).tensors
    return {name: each.read().view(np.float32).reshape(each.shape) for name, each in tensors.items()}


def as_ollama_has_the_text(tensors: Arrays, layers: int) -> Arrays:
    """The draft head is no block; the norms beside its layer are stored without the one that others have in them."""
    found: Arrays = {}
    for name, data in tensors.items():
        block = re.fullmatch(rf"blk\.{layers}\.(.+?)(\.weight)", name)
        if block is None:
            found[name.removesuffix(".bias") if name.endswith("ssm_dt.bias") else name] = data
        elif block[1] in _HEAD:
            found[_HEAD[block[1]] + block[2]] = data - (1 if "norm" in block[1] else 0)
        else:
            found[f"mtp.layers.0.{block[1]}{block[2]}"] = data
    gate = "ffn_gate_inp_shexp.weight"
    return {name: data[None] if name.endswith(gate) else data for name, data in found.items()}


def one_by_one(tensors: Arrays) -> Arrays:
    """The experts of the head as many checkpoints have them, which Ollama leaves so."""
    found: Arrays = {}
    for name, data in tensors.items():
        stack = re.fullmatch(r"(mtp\.layers\.0\.)ffn_(gate|up|down)_exps\.weight", name)
        found |= {f"{stack[1]}mlp.experts.{index}.{stack[2]}_proj.weight": expert for index, expert in enumerate(data)
                  } if stack else {name: data}
    return found


def as_ollama_has_the_tower(tensors: Arrays) -> Arrays:
    """One patch embedding for both frames, three matrices for what attention takes, names of checkpoints."""
    found, patches = Arrays(), [tensors[f"v.patch_embd.weight{end}"] for end in ("", ".1")]
    both = np.stack(patches, 2)
    found["v.patch_embed.weight"] = both.reshape(-1, *both.shape[2:])
    for name, data in tensors.items():
        for ours, theirs in _TOWER.items():
            name = re.sub(rf"(^|\.){re.escape(ours.removeprefix('v.'))}\.", rf"\1{theirs.removeprefix('v.')}.", name)
        if ".attn_qkv." in name:
            found |= {name.replace("qkv", part): data[index * len(data) // 3:(index + 1) * len(data) // 3]
                      for index, part in enumerate("qkv")}
        elif not name.startswith("v.patch_embed.weight"):
            found[name if name.startswith("v.") else f"v.{name}"] = data
    return found


def as_ollama_has_the_keys(text: GgufFile, tower: GgufFile) -> dict[str, Any]:
    arch = text.metadata["general.architecture"]
    keys = {name: value.tolist() if isinstance(value, np.ndarray) else float(value) if isinstance(value, float)
            else value for name, value in text.metadata.items() if not name.startswith("deltic.")}
    layers = keys.pop(f"{arch}.block_count") - keys.pop(f"{arch}.nextn_predict_layers")
    recurrent = keys.pop(f"{arch}.attention.recurrent_layers")[:layers]
    heads = keys[f"{arch}.attention.head_count_kv"]
    clip = {name.removeprefix("clip.vision."): value for name, value in tower.metadata.items()}
    return {**keys, f"{arch}.block_count": layers,
            f"{arch}.attention.head_count_kv": [0 if linear else heads for linear in recurrent],
            f"{arch}.rope.dimension_sections": keys[f"{arch}.rope.dimension_sections"][:3],
            f"{arch}.ssm.v_head_reordered": True, f"{arch}.rope.mrope_interleaved": True,
            **{f"{arch}.vision.{key}": clip[key] for key in (
                "block_count", "embedding_length", "attention.head_count", "patch_size", "spatial_merge_size")},
            f"{arch}.vision.num_channels": 3, f"{arch}.vision.temporal_patch_size": 2,
            f"{arch}.vision.shortest_edge": clip["image_min_pixels"],
            f"{arch}.vision.longest_edge": clip["image_max_pixels"],
            f"{arch}.vision.image_mean": clip["image_mean"].tolist(),
            f"{arch}.vision.image_std": clip["image_std"].tolist(), f"{arch}.image_token_id": 7}


def with_head(directory: Path, place: Path) -> Path:
    """The model with a random draft head beside it."""
    for path in directory.iterdir():
        (place / path.name).symlink_to(path)
    config = json.loads((place / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (place / "config.json").unlink()
    (place / "config.json").write_text(json.dumps(config))
    save_file(random_head(open_model(str(place)).config, "float32"), place / "mtp.safetensors")
    return place


def bundle(model: Path, path: Path, change: Callable[[Arrays], Arrays] = lambda tensors: tensors) -> Path:
    """The model as one file of Ollama's; by way of llama.cpp's two, which other tests compare with the model."""
    plain = path.with_name("plain.gguf")
    assert main(["convert", str(model), str(plain), "--type", "f32"]) == 0
    beside = plain.with_name("mmproj-plain.gguf")
    text, tower = GgufFile.open(plain), GgufFile.open(beside)
    metadata = as_ollama_has_the_keys(text, tower)
    layers = metadata[f"{metadata['general.architecture']}.block_count"]
    tensors = {**as_ollama_has_the_text(arrays(plain), layers), **as_ollama_has_the_tower(arrays(beside))}
    write(path, metadata, change(tensors))
    plain.unlink()
    beside.unlink()
    return path


def result(work: Generator[None, None, torch.Tensor]) -> torch.Tensor:
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]


def same_numbers(ours: ModelFiles, theirs: ModelFiles) -> None:
    assert ours.vision and theirs.vision
    ids = dict.fromkeys(("image_token_id", "video_token_id"), 0)  # the vocabulary's, which the chat needs to be right
    assert replace(theirs.vision.tower, **ids) == replace(ours.vision.tower, **ids)
    assert (theirs.vision.pictures.min_pixels, theirs.vision.pictures.max_pixels, theirs.vision.pictures.mean) == (
        ours.vision.pictures.min_pixels, ours.vision.pictures.max_pixels, ours.vision.pictures.mean)
    for name in expected_tower(ours.vision.tower):
        assert torch.equal(theirs.read_tower(name), ours.read_tower(name)), name
    for found, right in ((theirs.load("float32", "cpu", None), ours.load("float32", "cpu", None)),
                         (theirs.load_head("float32", "cpu"), ours.load_head("float32", "cpu"))):
        assert found and right and found.keys() == right.keys()
        for name in right:
            error = 1e-6 if is_norm(name) or name.endswith("A_log") else 0
            assert torch.allclose(found[name], right[name], rtol=error, atol=error), name  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_head(directory, tmp_path_factory.mktemp("with-head"))


@pytest.fixture(scope="module")
def bundled(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundle(model, tmp_path_factory.mktemp("bundled") / "sha256-0123abcd.gguf")


def test_the_same_numbers_and_answers(model: Path, bundled: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = open_model(str(model)), open_model(str(bundled))
    same_numbers(ours, theirs)
    answers, features = list[Any](), list[torch.Tensor]()
    for path in (model, bundled):
        with LLM(str(path), dtype="float32", memory="64MiB", threads=1, packed_weights="off", speculate="mtp") as llm:
            answers.append(llm.chat([shows(drawing(1))], replace(GREEDY, logprobs=1)).choices[0])
            runtime = llm.runtime
            assert runtime.mtp is not None and runtime.encode is not None and runtime.vision is not None
            shown = picture([drawing(1)], runtime.vision.pictures, runtime.vision.tower)
            features.append(result(runtime.encode(shown)))
    assert torch.equal(*features)
    assert answers[0].tokens == answers[1].tokens
    assert np.allclose(*([entry.token for entry in answer.logprobs] for answer in answers), atol=1e-4)
    assert "not read" not in caplog.text and "cannot be used" not in caplog.text


@pytest.mark.parametrize("change", [lambda tensors: tensors, one_by_one], ids=["stacked", "one by one"])
def test_experts(change: Callable[[Arrays], Arrays], tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    transformers_vision_model(plain, family="qwen3_5_moe", vocabulary=open_model("tiny").config.vocab_size)
    (plain / "tokenizer.json").write_text(tiny_texts().tokenizer)
    model = with_head(plain, tmp_path)
    ours, theirs = open_model(str(model)), open_model(str(bundle(model, tmp_path / "it.gguf", change)))
    same_numbers(ours, theirs)


@pytest.mark.parametrize(("left_out", "said"), [
    ("v.blk.1.attn_k.weight", "'v.blk.1.attn_q.weight' has no keys or values"),
    ("v.blk.1.norm1.bias", "tensor 'v.blk.1.ln1.bias' is absent"), ("v.pos_embed.weight", "is absent")])
def test_incomplete_tower_named(left_out: str, said: str, model: Path, tmp_path: Path,
                                            caplog: pytest.LogCaptureFixture) -> None:
    path = bundle(model, tmp_path / "it.gguf", lambda tensors: {
        name: data for name, data in tensors.items() if name != left_out})
    assert open_model(str(path)).vision is None
    assert "pictures are refused" in caplog.text and said in caplog.text


def test_missing_experts_are_named(tmp_path: Path) -> None:
    names = ["mtp.layers.0.mlp.experts.0.gate_proj.weight", "mtp.layers.0.mlp.experts.2.gate_proj.weight"]
    path = write(tmp_path / "m.gguf", {"general.architecture": "qwen35moe"}, {
        name: np.zeros((2, 2), np.float32) for name in names})
    with pytest.raises(ModelError, match=r"experts are missing among those of 'mtp.layers.0.ffn_gate_exps.weight'"):
        GgufFile.open(path)
