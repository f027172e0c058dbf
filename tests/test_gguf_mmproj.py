"""Vision towers in GGUF files: found find_mmproj the text model's, the same numbers, names as llama.cpp has them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from support import transformers_vision_model
from vision_models import GREEDY, directory, drawing, shows

from deltic import LLM
from deltic.cli import main
from deltic.errors import ConfigError, ModelError, RequestError
from deltic.loader.gguf.blocks import BY_NAME
from deltic.loader.gguf.file import GgufFile
from deltic.loader.gguf.write import NewTensor, write_gguf
from deltic.loader.model_files import open_model
from deltic.loader.vision import expected_tower, find_mmproj, gguf_names, load_mmproj, write_mmproj
from deltic.ops.quantized import QTensor, host_form

__all__ = ["directory"]


@pytest.fixture(scope="module")
def converted(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as two files, in float32."""
    path = tmp_path_factory.mktemp("files") / "it-F32.gguf"
    assert main(["convert", str(directory), str(path), "--type", "f32"]) == 0
    return path


def test_names_equal_gguf_py(directory: Path) -> None:
    vision = open_model(str(directory)).vision
    assert vision
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision.tower.depth)
    rest = dict[str, tuple[str, ...]]()
    for name in expected_tower(vision.tower):
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if "merger" in name or name == "visual.patch_embed.proj.weight":
            rest[name] = gguf_names(name)  # these the converter names itself
        else:
            assert gguf_names(name) == (theirs,)
    norm, fc = (gguf.TENSOR_NAMES[kind] for kind in (gguf.MODEL_TENSOR.V_POST_NORM, gguf.MODEL_TENSOR.V_MMPROJ))
    patch = gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.V_ENC_EMBD_PATCH]
    assert rest == {"visual.patch_embed.proj.weight": (f"{patch}.weight", f"{patch}.weight.1"),
                    **{f"visual.merger.{ours}.{kind}": (f"{theirs}.{kind}",) for kind in ("weight", "bias") for
                       ours, theirs in {"norm": norm, "linear_fc1": fc.format(bid=0), "linear_fc2": fc.format(bid=2)
                                        }.items()}}


def test_gguf_py_reads_written_towers(converted: Path, directory: Path) -> None:
    reader = gguf.GGUFReader(converted.with_name(f"mmproj-{converted.name}"))
    keys = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    shape = json.loads((directory / "config.json").read_text())
    clip, vision = gguf.Keys.ClipVision, shape["vision_config"]
    assert keys["general.architecture"] == gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.MMPROJ]
    assert keys["general.type"] == gguf.GGUFType.MMPROJ and keys[gguf.Keys.Clip.HAS_VISION_ENCODER] is True
    assert keys[gguf.Keys.Clip.PROJECTOR_TYPE] == gguf.VisionProjectorType.QWEN3VL
    assert {clip.BLOCK_COUNT: vision["depth"], clip.EMBEDDING_LENGTH: vision["hidden_size"], clip.PROJECTION_DIM:
            shape["text_config"]["hidden_size"], clip.Attention.HEAD_COUNT: vision["num_heads"], clip.IMAGE_SIZE: 24,
            clip.SPATIAL_MERGE_SIZE: 2, clip.IS_DEEPSTACK_LAYERS: [False, False], clip.USE_GELU: True}.items(
                ) <= keys.items()
    model = open_model(str(directory))
    patch = model.read_tower("visual.patch_embed.proj.weight")
    found = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    for frame, name in enumerate(("v.patch_embd.weight", "v.patch_embd.weight.1")):
        assert torch.equal(found[name].view(patch[:, :, 0].shape), patch[:, :, frame])


def test_same_bits_and_answer(converted: Path, directory: Path) -> None:
    ours, theirs = open_model(str(directory)), open_model(str(converted))
    assert ours.vision and theirs.vision and theirs.mmproj
    assert theirs.vision.tower == ours.vision.tower
    assert theirs.vision.pictures == ours.vision.pictures
    for name in expected_tower(ours.vision.tower):
        assert torch.equal(theirs.read_tower(name), ours.read_tower(name)), name
    texts = set[str]()
    for path in (directory, converted):
        with LLM(str(path), dtype="float32", memory="64MiB", threads=1, packed_weights="off") as llm:
            texts.add(llm.chat([shows(drawing(1))], GREEDY).text)
    assert len(texts) == 1


def test_round_trip(converted: Path, tmp_path: Path) -> None:
    """From a GGUF file to one: the tower comes along, again to the bit."""
    path = tmp_path / "again.gguf"
    assert main(["convert", str(converted), str(path), "--type", "q8_0", "--mmproj", "f32"]) == 0
    first, second = (GgufFile.open(each.with_name(f"mmproj-{each.name}")) for each in (converted, path))
    assert first.tensors.keys() == second.tensors.keys()
    assert all((first.tensors[name].read() == second.tensors[name].read()).all() for name in first.tensors)
    assert main(["convert", str(converted), str(tmp_path / "none.gguf"), "--mmproj", "none"]) == 0
    assert not (tmp_path / "mmproj-none.gguf").exists()
    assert main(["convert", str(converted), str(path), "--type", "q8_0"]) == 2, "there already"


def test_quantized(tmp_path: Path) -> None:
    transformers_vision_model(tmp_path, hidden_size=64, intermediate_size=96, patch_size=8)
    files = open_model(str(tmp_path))
    assert files.vision
    write_mmproj(tmp_path / "tower.gguf", files.vision, "it", "Q8_0", files.read_tower)
    file = GgufFile.open(tmp_path / "tower.gguf")
    plain, packed = (load_mmproj(file, files.vision.tower, "float32", "cpu", form) for form in (None, host_form()))
    kept = {name for name, weight in packed.items() if isinstance(weight, QTensor)}
    assert kept == {name for name in packed if name.endswith(("fc1.weight", "fc2.weight", "qkv.weight",
                                                              "attn.proj.weight"))}
    for name, weight in packed.items():
        right, other = files.read_tower(name), plain[name]
        assert isinstance(other, torch.Tensor)
        found = weight.dequantize() if isinstance(weight, QTensor) else weight
        assert torch.equal(found, other)
        assert (found - right).abs().max() <= (right.abs().max() / 127 if name in kept else 0), name


def test_left_out(converted: Path) -> None:
    with LLM(str(converted), memory="64MiB", threads=1, vision=False) as llm:
        assert llm.runtime.encode is None and llm.runtime.vision is None and llm.engine.pictures is None
        with pytest.raises(RequestError, match="reads text only"):
            llm.chat([shows(drawing(1))], GREEDY)
    with pytest.raises(ConfigError, match="leave out `vision=False`"):
        LLM(str(converted), vision=False, mmproj="x.gguf")


@pytest.mark.parametrize(("text", "others", "found"), [
    ("Q3.5-Q4_K_M.gguf", ["mmproj-Q3.5-F16.gguf", "mmproj-BF16.gguf"], 0),
    ("Q3.5-Q4_K_M.gguf", ["Q3.5.mmproj-Q8_0.gguf"], 0), ("Q3.5.gguf", ["mmproj-BF16.gguf", "mmproj-F16.gguf"], 0),
    ("Q3.5.gguf", ["mmproj-model-f16.gguf"], 0), ("Q3.5.gguf", ["other.gguf", "mmproj-other.gguf"], None),
    ("it-00001-of-00002.gguf", ["it-mmproj.gguf"], 0), ("Q3.5-4B.gguf", ["mmproj-Q3.5-9B.gguf"], None)])
def test_found_by_its_name(tmp_path: Path, text: str, others: list[str], found: int | None) -> None:
    for name in (text, *others):
        (tmp_path / name).touch()
    assert find_mmproj(tmp_path / text) == (None if found is None else tmp_path / others[found])


@pytest.mark.parametrize(("key", "value", "message"), [
    ("clip.projector_type", "mlp", "is no vision tower of Qwen3.5"), ("general.architecture", "llama", "is no vision"),
    ("clip.vision.is_deepstack_layers", [True, False], "a Qwen3-VL model"),
    ("clip.vision.attention.layer_norm_epsilon", 1e-5, "only 1e-06"),
    ("clip.vision.projection_dim", 8, "belongs to another model"),
    ("clip.vision.block_count", 3, "'v.blk.2.ln1.weight' is absent"),
    ("clip.vision.block_count", 1, "has no place in the tower"),
    ("clip.vision.feed_forward_length", 99, "requires"),
    ("clip.vision.image_mean", [0.5, 0.5], "must be three numbers"),
    ("deltic.films", '{"fps": 0}', "deltic.films cannot be used: fps must be"),
    ("deltic.films", "[]", "deltic.films cannot be used"), ("deltic.films", 5, "deltic.films cannot be used"),
    ("clip.vision.patch_size", 0, "patch_size must be an integer")])
def test_unusable_files_named(converted: Path, tmp_path: Path, key: str, value: Any, message: str) -> None:
    """Found by itself: pictures are refused. Asked for: an error names the file."""
    source = GgufFile.open(converted.with_name(f"mmproj-{converted.name}"))
    data = [[tensor.read()] for tensor in source.tensors.values()]
    targets = [NewTensor(each.name, BY_NAME[each.type.name], each.shape) for each in source.tensors.values()]
    bad = tmp_path / "bad.gguf"
    metadata = {name: float(held) if isinstance(held, float) else held for name, held in source.metadata.items()}
    metadata = {name: held.tolist() if hasattr(held, "tolist") else held for name, held in metadata.items()}
    write_gguf(bad, {**metadata, key: value}, targets, data)
    with pytest.raises(ModelError, match=message) as raised:
        open_model(str(converted), mmproj=str(bad))
    assert str(bad) in str(raised.value)
    text = tmp_path / "it.gguf"
    text.symlink_to(converted)
    bad.rename(tmp_path / "mmproj-it.gguf")
    assert open_model(str(text)).vision is None


def test_pipes_do_not_block(converted: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text, find_mmproj = tmp_path / "it.gguf", tmp_path / "mmproj-it.gguf"
    text.symlink_to(converted)
    os.mkfifo(find_mmproj)
    said = "mmproj-it.gguf cannot be read: it is not a plain file"
    assert open_model(str(tmp_path)).vision is None and said in caplog.text
    with pytest.raises(ModelError, match=re.escape(said)):
        open_model(str(text), mmproj=str(find_mmproj))
    text.unlink()
    os.mkfifo(text)
    with pytest.raises(ModelError, match=r"/it\.gguf cannot be read: it is not a plain file"):
        open_model(str(tmp_path))
    with pytest.raises(ModelError, match=r"it\.gguf is neither a file nor a directory"):
        open_model(str(text))


def test_tower_alone_refused_as_model(converted: Path, tmp_path: Path) -> None:
    tower = tmp_path / "mmproj-it.gguf"
    tower.touch()
    with pytest.raises(ModelError, match=r"has a vision tower \(mmproj-it.gguf\) and no model"):
        open_model(str(tmp_path))
    with pytest.raises(ModelError, match=r"mmproj-.*: this is a vision tower: name the GGUF file of the text model"):
        open_model(str(converted.with_name(f"mmproj-{converted.name}")))


@pytest.mark.parametrize(("name", "said"), [
    ("tower.safetensors", "{} announces a header of 0 bytes"), ("preprocessor_config.json", "{} does not hold valid"),
    ("video_preprocessor_config.json", "{} does not hold valid")])
def test_empty_tower_file_named(name: str, said: str, directory: Path, tmp_path: Path,
                                                   caplog: pytest.LogCaptureFixture) -> None:
    for path in directory.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).touch()
    if name == "tower.safetensors":
        (tmp_path / "model.safetensors").rename(tmp_path / "text.safetensors")
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {
            "lm_head.weight": "text.safetensors", "model.visual.patch_embed.proj.weight": name}}))
    assert open_model(tmp_path).vision is None
    assert "pictures are refused: " + said.format(tmp_path / name) in caplog.text


def test_mmproj_refused_for_directories(directory: Path) -> None:
    with pytest.raises(ModelError, match="is no GGUF file"):
        open_model(str(directory), mmproj="x.gguf")
