"""The tensors of a multi-token-prediction head: found where they may lie, loaded exactly, refused by name, and carried
from file to file."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_models import QWEN3, gguf_tensors, metadata_of, write, write_model
from safetensors.torch import save_file
from support import greedy, load_directory, moe_shape, odd_shape, serve, tiny_texts

from deltic.cli import main
from deltic.config import EngineConfig, GenerationDefaults, ModelConfig, RopeConfig
from deltic.engine.loading import load
from deltic.errors import ModelError
from deltic.export.program import hf_config
from deltic.loader.dummy import random_head, random_weights
from deltic.loader.gguf.config import config_from_gguf
from deltic.loader.gguf.convert import FILE_TYPES, convert
from deltic.loader.gguf.file import GgufFile
from deltic.loader.gguf.write import config_to_gguf
from deltic.loader.model_files import ModelFiles, open_model
from deltic.loader.names import canonical, canonical_head, expected_head, expected_tensors, is_norm, optional_head
from deltic.ops.cpu import missing
from deltic.ops.quantized import QTensor

CONFIG = odd_shape(num_mtp_layers=1)
BLOCKY = odd_shape(vocab_size=3072, hidden_size=256, intermediate_size=256, num_attention_heads=4, head_dim=64,
                   num_mtp_layers=1)
Tensors = dict[str, torch.Tensor]


def files_of(directory: Path, config: ModelConfig = CONFIG) -> ModelFiles:
    return ModelFiles(directory, config, GenerationDefaults(eos_token_ids=(3065,)))


def head_in(files: ModelFiles, dtype: str = "float32", packed: bool = False) -> Any:
    return files.load_head(dtype, "cpu", packed)  # type: ignore[arg-type]


def assert_same(expected: Tensors, found: Any, error: float = 0.0) -> None:
    assert found is not None and set(expected) == set(found)
    for name, tensor in expected.items():
        assert torch.allclose(tensor, found[name].float(), rtol=max(error, 1e-6), atol=max(error, 1e-6) * is_norm(name)
                              + error), name


@pytest.fixture(scope="module")
def trunk() -> Tensors:
    return random_weights(CONFIG)


@pytest.fixture(scope="module")
def head() -> Tensors:
    return random_head(CONFIG)


# Names and shapes


def test_config_counts_mtp_layers() -> None:
    plain = {"model_type": "qwen3_5_text", "vocab_size": 11, "hidden_size": 8, "intermediate_size": 8,
             "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
             "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 4,
             "linear_value_head_dim": 4, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6,
             "max_position_embeddings": 99, "rope_parameters": {"rope_theta": 1e4}}
    assert ModelConfig.from_hf(plain).num_mtp_layers == 0
    assert ModelConfig.from_hf({**plain, "mtp_num_hidden_layers": None}).num_mtp_layers == 0
    assert ModelConfig.from_hf({**plain, "mtp_num_hidden_layers": 1}).num_mtp_layers == 1
    nested = {"model_type": "qwen3_5", "text_config": {**plain, "mtp_num_hidden_layers": 1}}
    assert ModelConfig.from_hf(nested).num_mtp_layers == 1
    for value in (-1, 65, "1", 1.0):
        with pytest.raises(ModelError, match="mtp_num_hidden_layers must be an integer from 0 to 64"):
            ModelConfig.from_hf({**plain, "mtp_num_hidden_layers": value})
    assert ModelConfig.preset("0.8b").num_mtp_layers == 1 and ModelConfig.preset("qwen3-0.6b").num_mtp_layers == 0


def test_shapes_of_a_public_checkpoint() -> None:
    """Qwen3.5-27B's, as its index and headers say."""
    shapes = expected_head(ModelConfig.preset("27b"))
    layer = "mtp.layers.0."
    assert shapes == {
        "mtp.fc.weight": (5120, 10240), "mtp.norm.weight": (5120,), "mtp.pre_fc_norm_embedding.weight": (5120,),
        "mtp.pre_fc_norm_hidden.weight": (5120,), layer + "input_layernorm.weight": (5120,),
        layer + "post_attention_layernorm.weight": (5120,), layer + "mlp.down_proj.weight": (5120, 17408),
        layer + "mlp.gate_proj.weight": (17408, 5120), layer + "mlp.up_proj.weight": (17408, 5120),
        layer + "self_attn.k_norm.weight": (256,), layer + "self_attn.k_proj.weight": (1024, 5120),
        layer + "self_attn.o_proj.weight": (5120, 6144), layer + "self_attn.q_norm.weight": (256,),
        layer + "self_attn.q_proj.weight": (12288, 5120), layer + "self_attn.v_proj.weight": (1024, 5120)}


def test_names() -> None:
    for name in (*expected_head(CONFIG), *optional_head(CONFIG)):
        for prefix in ("", "model.", "language_model.", "model.language_model."):
            assert canonical_head(prefix + name) == name and canonical(prefix + name) is None
    for name in ("model.norm.weight", "lm_head.weight", "xmtp.fc.weight", "mtp"):
        assert canonical_head(name) is None
    for name in ("mtp.layers.1.mlp.up_proj.weight", "mtp.layers.10.input_layernorm.weight"):
        with pytest.raises(ModelError, match=r"several layers.*use the model without its head"):
            canonical_head(name)
    for part in ("gate.weight", "experts.0.up_proj.weight", "experts.up_proj.weight", "shared_expert_gate.weight"):
        assert canonical_head(f"mtp.layers.0.mlp.{part}") == f"mtp.layers.0.mlp.{part}"
    for stack in ("mtp.layers.0.mlp.experts.gate_up_proj", "mtp.layers.0.mlp.experts.down_proj"):
        assert canonical_head(f"model.{stack}") == f"{stack}.weight"


def test_random_heads() -> None:
    head = random_head(CONFIG, "bfloat16", 3)
    assert {name: tuple(tensor.shape) for name, tensor in head.items()} == expected_head(CONFIG)
    for name, tensor in head.items():
        assert tensor.dtype == (torch.float32 if tensor.ndim == 1 else torch.bfloat16), name
        if tensor.ndim == 1:
            assert abs(float(tensor.mean())) < 0.02 and 0.005 < float(tensor.std()) < 0.05
    assert all(torch.equal(random_head(CONFIG, "bfloat16", 3)[name], tensor) for name, tensor in head.items())
    assert not torch.equal(random_head(CONFIG, "bfloat16", 4)["mtp.fc.weight"], head["mtp.fc.weight"])


# Safetensors


def save_shards(directory: Path, shards: dict[str, Tensors]) -> None:
    weight_map = {}
    for name, tensors in shards.items():
        save_file(tensors, directory / name)
        weight_map |= dict.fromkeys(tensors, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def split(trunk: Tensors, head: Tensors) -> dict[str, Tensors]:
    """Three shards, the head in two of them."""
    names = list(head)
    first, second = ({name: head[name] for name in part} for part in (names[:5], names[5:]))
    return {"model-00001-of-00003.safetensors": trunk, "model-00002-of-00003.safetensors": first,
            "model-00003-of-00003.safetensors": second}


def save_in_a_folder(directory: Path, trunk: Tensors, head: Tensors) -> None:
    (directory / "mtp").mkdir()
    save_file(trunk, directory / "model.safetensors")
    save_file({f"language_model.{name}": tensor for name, tensor in head.items()},
              directory / "mtp" / "weights.safetensors")


PLACES: dict[str, Any] = {
    "in a folder of its own": save_in_a_folder,
    "one file": lambda d, trunk, head: save_file({**trunk, **head}, d / "model.safetensors"),
    "one file, other names": lambda d, trunk, head: save_file(
        {**trunk, **{f"model.{name}": tensor for name, tensor in head.items()}}, d / "model.safetensors"),
    "shards": lambda d, trunk, head: save_shards(d, split(trunk, head)),
    "a shard of its own": lambda d, trunk, head: save_shards(d, {"model-1.safetensors": trunk,
                                                                 "model_mtp.safetensors": head}),
    "beside one file": lambda d, trunk, head: [save_file(trunk, d / "model.safetensors"),
                                               save_file(head, d / "mtp.safetensors")],
    "beside a pickle": lambda d, trunk, head: [torch.save(trunk, d / "pytorch_model.bin"),
                                               save_file(head, d / "mtp.safetensors")],
    "beside a file of any name": lambda d, trunk, head: [save_file(trunk, d / "weights.safetensors"),
                                                         save_file(head, d / "a-head.safetensors")],
    "beside shards": lambda d, trunk, head: [save_shards(d, {"model-1.safetensors": trunk}),
                                             save_file(head, d / "model-mtp.safetensors")],
    "among others": lambda d, trunk, head: [save_file(trunk, d / "model.safetensors"),
                                            save_file({"lora": torch.zeros(2)}, d / "adapter.safetensors"),
                                            save_file({**head, "visual.x": torch.zeros(2)}, d / "rest.safetensors")],
}


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("layers", [0, 1])
def test_the_head_is_found(tmp_path: Path, trunk: Tensors, head: Tensors, name: str, layers: int) -> None:
    """Whatever the config announces; and the trunk loads as ever."""
    config = replace(CONFIG, num_mtp_layers=layers)
    PLACES[name](tmp_path, trunk, head)
    files = files_of(tmp_path, config)
    assert_same(head, head_in(files))
    assert list(load_directory(tmp_path, config)) == list(expected_tensors(config))
    assert files.head_kinds() == {"F32": sum(tensor.nbytes for tensor in head.values())}


def test_no_head(tmp_path: Path, trunk: Tensors, head: Tensors) -> None:
    save_file(trunk, tmp_path / "model.safetensors")
    assert head_in(files_of(tmp_path)) is None and files_of(tmp_path).head_kinds() == {}


def test_own_head_takes_precedence(tmp_path: Path, trunk: Tensors, head: Tensors) -> None:
    save_file({**trunk, **head}, tmp_path / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in head.items()}, tmp_path / "mtp.safetensors")
    assert_same(head, head_in(files_of(tmp_path)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "auto"])
def test_matrices_get_the_dtype_and_norms_stay_float32(tmp_path: Path, dtype: str) -> None:
    stored = {name: tensor.to(torch.bfloat16) for name, tensor in random_head(CONFIG).items()}
    save_file(stored, tmp_path / "mtp.safetensors")
    config = replace(CONFIG, dtype="bfloat16")
    kept = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
    for name, tensor in head_in(files_of(tmp_path, config), dtype).items():
        assert tensor.dtype == (torch.float32 if stored[name].ndim == 1 else kept), name
        assert torch.equal(tensor, stored[name].to(tensor.dtype)) and tensor.is_contiguous()


def test_own_embedding_and_logits(tmp_path: Path, head: Tensors) -> None:
    own = {name: torch.randn(shape) for name, shape in optional_head(CONFIG).items()}
    save_file({**head, **own}, tmp_path / "mtp.safetensors")
    assert_same({**head, **own}, head_in(files_of(tmp_path)))


FC, UP = "mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"
WRONG: dict[str, Any] = {
    rf"tensors of the multi-token-prediction head are missing in .*such as '{FC}'.*deltic mtp extract":
        lambda t: t.pop(FC),
    rf"1 tensors .*such as '{UP}'": lambda t: t.pop(UP),
    rf"mtp\.safetensors: tensor '{FC}' has shape \[40, 79\].*requires \[40, 80\]":
        lambda t: t.update({FC: t[FC][:, :79].clone()}),
    r"tensor 'mtp\.norm\.weight' is stored as I32": lambda t: t.update(
        {"mtp.norm.weight": torch.zeros(40, dtype=torch.int32)}),
    r"tensor 'mtp\.fc\.weight_scale_inv' has no place in a multi-token-prediction head": lambda t: t.update(
        {"mtp.fc.weight_scale_inv": torch.zeros(2)}),
    r"tensor 'mtp\.layers\.1\.input_layernorm\.weight'.*several layers": lambda t: t.update(
        {"mtp.layers.1.input_layernorm.weight": torch.zeros(40)}),
    r"tensor 'mtp\.layers\.0\.mlp\.experts\.gate_up_proj\.weight' has no place in a multi": lambda t: t.update(
        {"mtp.layers.0.mlp.experts.gate_up_proj": torch.zeros(2)}),
    r"tensor 'mtp.norm.weight' is in both mtp\.safetensors and mtp\.safetensors": lambda t: t.update(
        {"model.mtp.norm.weight": t["mtp.norm.weight"].clone()}),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_tensors_named(tmp_path: Path, trunk: Tensors, head: Tensors, message: str) -> None:
    """Only to those who ask for the head."""
    tensors = dict(head)
    WRONG[message](tensors)
    save_file(trunk, tmp_path / "model.safetensors")
    save_file(tensors, tmp_path / "mtp.safetensors")
    with pytest.raises(ModelError, match=message):
        head_in(files_of(tmp_path))
    load_directory(tmp_path, CONFIG)


def test_wrong_files_are_named(tmp_path: Path, trunk: Tensors, head: Tensors) -> None:
    save_file(trunk, tmp_path / "model.safetensors")
    save_file(head, tmp_path / "a.safetensors")
    save_file(head, tmp_path / "b.safetensors")
    with pytest.raises(ModelError, match=r"several files with a .*head: a\.safetensors, b\.safetensors; rename"):
        head_in(files_of(tmp_path))
    (tmp_path / "b.safetensors").unlink()
    (tmp_path / "mtp.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ModelError, match=r"mtp\.safetensors announces a header"):
        head_in(files_of(tmp_path))
    (tmp_path / "mtp.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has 2 layers .*heads of one are supported"):
        head_in(files_of(tmp_path, replace(CONFIG, num_mtp_layers=2)))
    save_shards(tmp_path, split(trunk, head))
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"names the shard 'model-00003-of-00003\.safetensors', which is absent"):
        head_in(files_of(tmp_path))


def test_usual_file_name_takes_precedence(tmp_path: Path, trunk: Tensors, head: Tensors) -> None:
    save_file(trunk, tmp_path / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in head.items()}, tmp_path / "a.safetensors")
    save_file(head, tmp_path / "mtp.safetensors")
    assert_same(head, head_in(files_of(tmp_path)))
    (tmp_path / "mtp").mkdir()
    (tmp_path / "mtp.safetensors").rename(tmp_path / "mtp" / "weights.safetensors")
    assert_same(head, head_in(files_of(tmp_path)))


def test_unreadable_other_files_skipped(tmp_path: Path, trunk: Tensors, head: Tensors,
                                                         caplog: pytest.LogCaptureFixture) -> None:
    save_file(trunk, tmp_path / "model.safetensors")
    save_file(head, tmp_path / "z.safetensors")
    (tmp_path / "adapter.safetensors").write_bytes(b"\xff" * 20)
    assert_same(head, head_in(files_of(tmp_path)))
    assert "skipped in the search for a draft head" in caplog.text and "adapter.safetensors" in caplog.text


# GGUF


def gguf_files(path: Path) -> ModelFiles:
    file = GgufFile.open(path)
    return ModelFiles(path, config_from_gguf(file), GenerationDefaults(), file)


def test_a_head_in_a_gguf_file(tmp_path: Path, trunk: Tensors, head: Tensors) -> None:
    own = {name: torch.randn(shape) for name, shape in optional_head(CONFIG).items()}
    for tensors in (head, {**head, **own}):
        path = write(tmp_path / "m.gguf", metadata_of(CONFIG), gguf_tensors(CONFIG, {**trunk, **tensors}))
        files = gguf_files(path)
        assert files.config == CONFIG
        assert_same(tensors, head_in(files))
        assert files.head_kinds() == {"F32": sum(tensor.nbytes for tensor in tensors.values())}


def test_a_head_with_fused_projections(tmp_path: Path, trunk: Tensors, head: Tensors) -> None:
    tensors = gguf_tensors(CONFIG, {**trunk, **head})
    parts = [tensors.pop(f"blk.6.attn_{part}.weight") for part in "qkv"]
    path = write(tmp_path / "m.gguf", metadata_of(CONFIG), {**tensors, "blk.6.attn_qkv.weight": np.concatenate(parts)})
    assert_same(head, head_in(gguf_files(path)))


def test_a_gguf_file_without_a_head_may_have_one_beside_it(tmp_path: Path, trunk: Tensors, head: Tensors) -> None:
    path = write_model(tmp_path / "m.gguf", replace(CONFIG, num_mtp_layers=0), trunk)
    assert head_in(gguf_files(path)) is None
    save_file(head, tmp_path / "mtp.safetensors")
    assert_same(head, head_in(gguf_files(path)))


def test_a_truncated_head_of_a_gguf_file_is_named(tmp_path: Path, trunk: Tensors, head: Tensors) -> None:
    tensors = gguf_tensors(CONFIG, {**trunk, **head})
    del tensors["blk.6.nextn.hnorm.weight"]
    path = write(tmp_path / "m.gguf", metadata_of(CONFIG), tensors)
    with pytest.raises(ModelError, match=r"1 tensors are missing in .*such as 'blk\.6\.nextn\.hnorm\.weight'"):
        head_in(gguf_files(path))
    gguf_files(path).load("float32", "cpu", None)
    tensors["blk.6.nextn.hnorm.weight"] = np.zeros(39, np.float32)
    with pytest.raises(ModelError, match=r"'blk\.6\.nextn\.hnorm\.weight' has shape \[39\]"):
        head_in(gguf_files(write(tmp_path / "m.gguf", metadata_of(CONFIG), tensors)))
    two = metadata_of(replace(CONFIG, num_mtp_layers=2))
    with pytest.raises(ModelError, match="has 2 layers"):
        head_in(gguf_files(write(tmp_path / "m.gguf", two, tensors)))


# Converting


def converted(directory: Path, config: ModelConfig, tensors: Tensors, kind: str, **options: Any) -> ModelFiles:
    """The GGUF file of a directory of random weights and this head, which lies beside them."""
    directory.mkdir(exist_ok=True)
    save_file(random_weights(config), directory / "model.safetensors")
    if tensors:
        save_file(tensors, directory / "mtp.safetensors")
    convert(files_of(directory, config), tiny_texts(), "a model", directory.parent / "m.gguf", kind, **options)
    return gguf_files(directory.parent / "m.gguf")


def test_the_head_is_carried_over(tmp_path: Path) -> None:
    config = replace(CONFIG, vocab_size=3072)
    head = random_head(config)
    files = converted(tmp_path / "model", config, head, "F32")
    assert_same(head, head_in(files))
    assert replace(files.config, eos_token_ids=(), bos_token_id=None, pad_token_id=None) == config
    convert(files, tiny_texts(), "again", tmp_path / "again.gguf", "F32")
    assert_same(head, head_in(gguf_files(tmp_path / "again.gguf")))


def test_metadata_equals_llama_cpp(tmp_path: Path) -> None:
    config = replace(CONFIG, vocab_size=3072)
    path = converted(tmp_path / "model", config, random_head(config), "Q8_0").path
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    for key, value in metadata_of(config).items():
        if key != "qwen35.full_attention_interval":
            assert fields[key] == (pytest.approx(value) if isinstance(value, float) else value), key
    assert reader.fields["qwen35.nextn_predict_layers"].types == [gguf.GGUFValueType.UINT32]
    names = {tensor.name for tensor in reader.tensors if tensor.name.startswith("blk.6.")}
    assert names == {f"blk.6.{part}.weight" for part in (
        "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm", "attn_norm", "post_attention_norm",
        "ffn_gate", "ffn_up", "ffn_down", "nextn.eh_proj", "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm")}
    preset = config_to_gguf(ModelConfig.preset("0.8b"))
    assert (preset["qwen35.block_count"], preset["qwen35.nextn_predict_layers"]) == (25, 1)
    assert preset["qwen35.full_attention_interval"] == 4 and len(preset["qwen35.attention.recurrent_layers"]) == 25
    assert "qwen3.nextn_predict_layers" not in config_to_gguf(QWEN3)


def test_head_can_be_omitted(tmp_path: Path) -> None:
    """Whatever its config announces: readers would look for the blocks."""
    config = replace(CONFIG, vocab_size=3072)
    files = converted(tmp_path / "model", config, {}, "F32")
    assert files.config.num_mtp_layers == 0 and head_in(files) is None
    assert files.gguf is not None and files.gguf.metadata["qwen35.block_count"] == 6
    files = converted(tmp_path / "model", config, random_head(config), "F32", mtp="none")
    assert files.config.num_mtp_layers == 0 and head_in(files) is None


def types_in(files: ModelFiles) -> set[str]:
    assert files.gguf is not None
    return {tensor.type.name for name, tensor in files.gguf.tensors.items()
            if name.startswith("blk.6.") and len(tensor.shape) == 2}


@pytest.mark.parametrize("kind", ["BF16", "Q4_K_M", *(
    pytest.param(kind, marks=pytest.mark.slow) for kind in FILE_TYPES if kind not in ("F32", "F16", "BF16", "Q4_K_M"))])
def test_head_keeps_eight_bits_by_default(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    head = random_head(BLOCKY)
    files = converted(tmp_path / "model", BLOCKY, head, kind)
    assert types_in(files) == {"BF16" if kind == "BF16" else "Q8_0"}
    caplog.clear()
    with caplog.at_level(logging.WARNING, "deltic"):
        assert_same(head, head_in(files), error=2e-3)
    assert not caplog.records
    if kind in ("Q4_K_M", "Q4_0", "Q5_0"):
        files = converted(tmp_path / "model", BLOCKY, head, kind, mtp="same")
        assert FILE_TYPES[kind].most in types_in(files) <= {FILE_TYPES[kind].most, FILE_TYPES[kind].sensitive}
        caplog.clear()
        with caplog.at_level(logging.WARNING, "deltic"):
            assert_same(head, head_in(files), error=0.05)
        expected = "have four bits or fewer (such as blk.6." if kind[1] == "4" else ""
        assert expected in caplog.text and len(caplog.records) == (kind[1] == "4")


@pytest.mark.skipif(bool(missing()), reason="needs the compiled kernels")
@pytest.mark.parametrize("kind", ["Q4_K_M", "BF16", "F32"])
def test_packed_heads_hold_the_same_numbers(tmp_path: Path, kind: str) -> None:
    files = converted(tmp_path / "model", BLOCKY, random_head(BLOCKY), kind)
    plain, packed = head_in(files), head_in(files, packed=True)
    assert set(plain) == set(packed)
    for name, tensor in plain.items():
        found = packed[name]
        assert isinstance(found, QTensor) == (tensor.ndim == 2)
        assert torch.equal(found.dequantize() if isinstance(found, QTensor) else found, tensor), name


# Showing


def test_inspect_shows_the_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*argv: str) -> Any:
        assert main(["inspect", *argv, "--json", "--memory", "64MiB"]) == 0
        return json.loads(capsys.readouterr().out)

    config = replace(CONFIG, vocab_size=3072)
    path = converted(tmp_path / "model", config, random_head(config), "F32").path
    facts = shown(str(path))
    assert facts["config"]["mtp_layers"] == 1 and facts["weights"]["mtp_head"] == "F32 0.1"
    assert open_model(path).config.num_mtp_layers == 1
    converted(tmp_path / "model", config, {}, "F32", mtp="none")
    (tmp_path / "mtp.safetensors").write_bytes(b"")
    facts = shown(str(path))
    assert facts["config"]["mtp_layers"] == 0 and facts["weights"]["mtp_head"].startswith("unusable: ")
    facts = shown("--random", "0.8b", "--memory", "4GiB")
    assert facts["config"]["mtp_layers"] == 1


def test_qwen3_next_drafts_with_its_head(tmp_path: Path) -> None:
    """Its configs do not count the head, whose experts are stored one by one; a GGUF file of it has the head, too."""
    config = moe_shape(architecture="qwen3_next", rope=RopeConfig(1e4, 6, ()), vocab_size=3072)
    stored = Tensors()
    for name, tensor in {**random_weights(config, "float32", initializer_range=0.1),
                         **random_head(config, "float32")}.items():
        before, experts, after = name.partition(".mlp.experts.")
        stored |= ({f"{before}{experts}{place}.{after}": one.clone() for place, one in enumerate(tensor)} if experts
                   else {name: tensor})
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(hf_config(config)))
    files = open_model(tmp_path, progress=False)
    convert(files, tiny_texts(), "next", tmp_path / "m.gguf", "F32")
    request = greedy([5, 6, 7, 5, 6, 7, 5, 6], 24)
    answers = []
    for source, speculate in ((tmp_path, "off"), (tmp_path, "mtp:3"), (tmp_path / "m.gguf", "mtp:3")):
        runner = load(str(source), EngineConfig(dtype="float32", memory="8MiB", threads=1, speculate=speculate))
        assert runner.config.num_mtp_layers == (source.suffix == ".gguf") and bool(runner.mtp) == (speculate != "off")
        answers.append(serve(runner, [request])["a", 0].tokens)
    assert answers[0] == answers[1] == answers[2] and len(answers[0]) == 24
