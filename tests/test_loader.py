"""Weights: what transformers saves is loaded exactly; a file that cannot be trusted is refused by name."""

import json
import os
import struct
import time
import tracemalloc
import zipfile
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import examples, load_directory
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from deltic.config import ModelConfig
from deltic.errors import ModelError
from deltic.loader.disk import read_json
from deltic.loader.dummy import random_weights
from deltic.loader.files import find_tensors, read_header
from deltic.loader.names import canonical, expected_tensors, packed_parts, split_packed, tensor_dtype
from deltic.loader.safetensors import TORCH_DTYPES

TEXT = {"vocab_size": 37, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 4, "num_attention_heads": 6,
            "num_key_value_heads": 3, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
            "linear_key_head_dim": 5, "linear_value_head_dim": 7, "linear_conv_kernel_dim": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
VISION = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 12, "patch_size": 2,
              "num_position_embeddings": 4}
DTYPES = ["float32", "bfloat16", "float16"]


def config_of(path):
    return ModelConfig.from_hf(json.loads((path / "config.json").read_text()))


def reference(model):
    """Text tensors of a transformers model by our names."""
    return {name.replace("model.language_model.", "model."): tensor.detach().clone()
            for name, tensor in model.state_dict().items() if "visual" not in name}


def assert_loaded(loaded, expected, config, dtype):
    assert list(loaded) == list(expected_tensors(config))
    for name, tensor in loaded.items():
        kept = TORCH_DTYPES[tensor_dtype(name, dtype)]
        assert tensor.dtype == kept and tensor.is_contiguous(), name
        assert torch.equal(tensor, expected[name].to(kept)), name


@pytest.fixture
def config():
    return ModelConfig.from_hf(Qwen3_5TextConfig(**TEXT).to_dict())


@pytest.fixture
def saved(tmp_path, config):
    """A directory with one file of random tensors, and those tensors."""
    tensors = random_weights(config, "float32", seed=3)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path, tensors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [True, False])
def test_loads_transformers_checkpoint(tmp_path, dtype, tied):
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TEXT, tie_word_embeddings=tied)).to(TORCH_DTYPES[dtype])
    model.save_pretrained(tmp_path)
    config = config_of(tmp_path)
    assert (config.dtype, config.tie_word_embeddings) == (dtype, tied)
    assert_loaded(load_directory(tmp_path, config), reference(model), config, dtype)
    for other in DTYPES:
        assert_loaded(load_directory(tmp_path, config, other), reference(model), config, other)


@pytest.mark.parametrize("tied", [True, False])
def test_loads_transformers_qwen3(tmp_path, tied):
    """Queries have no gate: q_proj has heads * head_dim rows."""
    keys = {key: value for key, value in TEXT.items() if not key.startswith(("linear", "rope"))}
    model = Qwen3ForCausalLM(Qwen3Config(**keys, tie_word_embeddings=tied)).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    config = config_of(tmp_path)
    assert expected_tensors(config)["model.layers.0.self_attn.q_proj.weight"] == (6 * 8, 12)
    assert ("lm_head.weight" in expected_tensors(config)) is not tied
    for dtype in DTYPES:
        assert_loaded(load_directory(tmp_path, config, dtype), reference(model), config, dtype)
    save_file({**random_weights(config), "model.layers.0.linear_attn.A_log": torch.zeros(6)},
              tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.0\.linear_attn\.A_log"):
        load_directory(tmp_path, config)


@pytest.mark.parametrize("tied", [True, False])
def test_text_part_of_a_vision_model_in_shards(tmp_path, tied):
    vision = Qwen3_5Config(text_config=TEXT, vision_config=VISION, tie_word_embeddings=tied)
    model = Qwen3_5ForConditionalGeneration(vision).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    stored = find_tensors(tmp_path)
    assert any("visual" in name for name in stored) and "model.language_model.norm.weight" in stored
    config = config_of(tmp_path)
    assert_loaded(load_directory(tmp_path, config), reference(model), config, "bfloat16")


@pytest.mark.parametrize("change", [
    lambda name: name.replace("model.", "model.language_model.", 1),
    lambda name: f"language_model.{name}",
    lambda name: name.removeprefix("model."),
], ids=["nested", "outer", "bare"])
def test_prefixes(saved, config, change):
    path, tensors = saved
    save_file({change(name): tensor for name, tensor in tensors.items()}, path / "model.safetensors")
    assert_loaded(load_directory(path, config), tensors, config, "float32")


@pytest.mark.parametrize("name", [
    "mtp.fc.weight", "model.mtp.layers.0.mlp.up_proj.weight", "model.visual.blocks.0.attn.qkv.weight",
    "visual.merger.norm.bias", "vision_tower.x", "model.language_model.rotary_emb.inv_freq",
    "model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.0.linear_attn.conv1d.bias"])
def test_unneeded_tensors_skipped(saved, config, name):
    path, tensors = saved
    assert canonical(name) is None
    save_file({**tensors, name: torch.zeros(3, dtype=torch.int64)}, path / "model.safetensors")
    assert_loaded(load_directory(path, config), tensors, config, "float32")


@pytest.mark.parametrize("name", [
    "model.layers.0.mlp.up_proj.bias", "model.layers.00.mlp.up_proj.weight", "model.layers.x.mlp.up_proj.weight",
    "model.layers.1.mlp.experts.0.up_proj.bias", "model.norm.bias", "score.weight", "", "model.", "lm_head.bias",
    "xmtp.fc", "model.layers.0.mlp.up_proj.weight_scale_inv", "transformer.model.norm.weight",
    "model.norm.weight\n"])
def test_unknown_tensor_is_refused_by_name(saved, config, name):
    with pytest.raises(ModelError) as caught:
        canonical(name)
    assert repr(name) in str(caught.value)
    path, tensors = saved
    save_file({**tensors, name: torch.zeros(3)}, path / "model.safetensors")
    with pytest.raises(ModelError, match="unknown"):
        load_directory(path, config)


@pytest.mark.parametrize("name,shape", [("model.layers.4.input_layernorm.weight", (12,)),
                                        ("model.layers.0.self_attn.q_norm.weight", (8,)),
                                        ("model.layers.3.linear_attn.A_log", (6,)),
                                        ("model.layers.3.linear_attn.in_proj_ba.weight", (12, 12))])
def test_tensor_of_unknown_layer(saved, config, name, shape):
    path, tensors = saved
    save_file({**tensors, name: torch.zeros(shape)}, path / "model.safetensors")
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        load_directory(path, config)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.2.linear_attn.dt_bias",
                                  "model.embed_tokens.weight"])
def test_missing_tensor_is_named(saved, config, name):
    path, tensors = saved
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"missing.*{name}"):
        load_directory(path, config)


def test_missing_head_names_tie_word_embeddings(saved, config):
    path, tensors = saved
    del tensors["lm_head.weight"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelError, match="tie_word_embeddings"):
        load_directory(path, config)


def test_stored_tied_head_must_equal_embedding(saved, config):
    path, tensors = saved
    tied = replace(config, tie_word_embeddings=True)
    with pytest.raises(ModelError, match="tie_word_embeddings to false"):
        load_directory(path, tied)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors")
    assert "lm_head.weight" not in load_directory(path, tied)


def test_wrong_shape_and_dtype_name_the_tensor(saved, config):
    path, tensors = saved
    name = "model.layers.1.mlp.up_proj.weight"
    for bad, hint in ((tensors[name].T.contiguous(), r"\[12, 20\].*\[20, 12\]"),
                      (tensors[name].to(torch.float8_e4m3fn), "F8_E4M3.*unquantized"),
                      (tensors[name].double(), "F64")):
        save_file({**tensors, name: bad}, path / "model.safetensors")
        with pytest.raises(ModelError, match=rf"{name}.*{hint}"):
            load_directory(path, config)


def test_one_name_under_two_prefixes_is_refused(saved, config):
    path, tensors = saved
    extra = tensors["model.norm.weight"].clone()
    save_file({**tensors, "model.language_model.norm.weight": extra}, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight.*twice"):
        load_directory(path, config)


def test_float16_overflow_is_refused(saved, config):
    path, tensors = saved
    tensors["lm_head.weight"][3, 2] = -70000.0
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lm_head.*float16.*bfloat16"):
        load_directory(path, config, "float16")
    assert load_directory(path, config, "bfloat16")["lm_head.weight"].isfinite().all()


def test_progress_counts_bytes_to_the_total(saved, config):
    path, tensors = saved
    calls = []
    load_directory(path, config, "bfloat16", progress=lambda done, total: calls.append((done, total)))
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert calls[-1] == (total, total) and len(calls) == len(tensors)
    assert calls == sorted(calls)


def test_conversion_in_pieces(monkeypatch, saved, config):
    path, tensors = saved
    monkeypatch.setattr("deltic.loader.safetensors._CHUNK", 7)
    for dtype in DTYPES:
        assert_loaded(load_directory(path, config, dtype), tensors, config, dtype)


# Packed projections of older exports.


def interleaved(tensors, prefix, linear):
    """Pack as Qwen3-Next does, from the parts of one layer."""
    share = linear.num_value_heads // linear.num_key_heads
    key, value = linear.key_head_dim, linear.value_head_dim
    qkv, z, b, a = (tensors.pop(f"{prefix}in_proj_{part}.weight") for part in ("qkv", "z", "b", "a"))
    q, k, v = qkv.split([linear.key_dim, linear.key_dim, linear.value_dim])
    groups = []
    for head in range(linear.num_key_heads):
        one, many = slice(head * key, (head + 1) * key), slice(head * share * value, (head + 1) * share * value)
        groups += [q[one], k[one], v[many], z[many]]
    heads = [slice(head * share, (head + 1) * share) for head in range(linear.num_key_heads)]
    tensors[f"{prefix}in_proj_qkvz.weight"] = torch.cat(groups)
    tensors[f"{prefix}in_proj_ba.weight"] = torch.cat([part[rows] for rows in heads for part in (b, a)])


def test_packed_projections_are_split(saved, config):
    path, tensors = saved
    packed = dict(tensors)
    for layer in config.linear_layers:
        interleaved(packed, f"model.layers.{layer}.linear_attn.", config.linear)
    save_file(packed, path / "model.safetensors")
    assert_loaded(load_directory(path, config), tensors, config, "float32")
    assert_loaded(load_directory(path, config, "bfloat16"), tensors, config, "bfloat16")


def test_split_equals_transformers_layer(config):
    linear = config.linear
    keys = {key: value for key, value in TEXT.items() if key != "rope_parameters"}
    theirs = Qwen3NextGatedDeltaNet(Qwen3NextConfig(**keys), 0)
    x = torch.randn(1, 5, config.hidden_size)
    q, k, v, z, b, a = theirs.fix_query_key_value_ordering(theirs.in_proj_qkvz(x), theirs.in_proj_ba(x))
    parts = {}
    for name in ("in_proj_qkvz", "in_proj_ba"):
        parts |= split_packed(f"x.{name}.weight", getattr(theirs, name).weight.detach(), config)
    qkv = torch.cat([q.reshape(1, 5, linear.key_dim), k.reshape(1, 5, linear.key_dim),
                     v.reshape(1, 5, linear.value_dim)], dim=-1)
    for name, expected in (("qkv", qkv), ("z", z.reshape(1, 5, -1)), ("b", b), ("a", a)):
        torch.testing.assert_close(x @ parts[f"x.in_proj_{name}.weight"].T, expected)


@pytest.mark.parametrize("name", ["in_proj_qkvz", "in_proj_ba"])
def test_packed_of_wrong_shape_names_key_and_shape(saved, config, name):
    path, tensors = saved
    interleaved(tensors, "model.layers.0.linear_attn.", config.linear)
    key = f"model.layers.0.linear_attn.{name}.weight"
    tensors[key] = tensors[key][:-2].clone()
    with pytest.raises(ModelError, match=rf"{key}.*\[{tensors[key].shape[0]}, 12\]"):
        split_packed(key, tensors[key], config)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{key}.*\[{tensors[key].shape[0]}, 12\]"):
        load_directory(path, config)


def test_packed_and_split_projection_refused(saved, config):
    path, tensors = saved
    packed = dict(tensors)
    interleaved(packed, "model.layers.0.linear_attn.", config.linear)
    save_file({**packed, **tensors}, path / "model.safetensors")
    with pytest.raises(ModelError, match="twice"):
        load_directory(path, config)
    assert packed_parts("model.layers.0.linear_attn.in_proj_z.weight") == ()


# Files that cannot be trusted.


def test_directories_without_safetensors(tmp_path, config):
    with pytest.raises(ModelError, match=r"no weights.*model\.safetensors"):
        load_directory(tmp_path, config)
    (tmp_path / "consolidated.00.pth").write_bytes(b"PK")
    with pytest.raises(ModelError, match=r"pickled.*not called pytorch_model\.bin.*safe_serialization"):
        load_directory(tmp_path, config)


def test_other_file_name_is_found_unless_ambiguous(saved, config):
    path, tensors = saved
    os.rename(path / "model.safetensors", path / "other.safetensors")
    assert_loaded(load_directory(path, config), tensors, config, "float32")
    save_file(tensors, path / "second.safetensors")
    with pytest.raises(ModelError, match=r"2 safetensors files \(.*\) but no model.safetensors.index.json"):
        load_directory(path, config)


# PyTorch's own files.


@pytest.fixture
def pickled(saved):
    """The model in pytorch_model.bin, and its tensors."""
    path, tensors = saved
    (path / "model.safetensors").unlink()
    torch.save(tensors, path / "pytorch_model.bin")
    return path, tensors


@pytest.mark.parametrize("dtype", DTYPES)
def test_pickles_give_the_same_tensors(pickled, config, dtype):
    path, tensors = pickled
    assert_loaded(load_directory(path, config, dtype), tensors, config, dtype)
    kept = {name: tensor.to(TORCH_DTYPES[dtype]) for name, tensor in tensors.items()}
    torch.save(kept, path / "pytorch_model.bin")
    assert_loaded(load_directory(path, config, dtype), kept, config, dtype)


def test_shards_of_pickles(pickled, config):
    path, tensors = pickled
    (path / "pytorch_model.bin").unlink()
    names, weight_map = list(tensors), {}
    for number, part in enumerate((names[:9], names[9:]), 1):
        file = f"pytorch_model-0000{number}-of-00002.bin"
        torch.save({name: tensors[name] for name in part}, path / file)
        weight_map |= dict.fromkeys(part, file)
    index = path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert_loaded(load_directory(path, config), tensors, config, "float32")
    for shard, hint in (("../x.bin", "beside"), ("x.safetensors", "a .bin file beside"), ("absent.bin", "absent"),
                        ("pytorch_model-00001-of-00002.bin", "lacks")):
        index.write_text(json.dumps({"weight_map": {**weight_map, names[-1]: shard}}))
        with pytest.raises(ModelError, match=f"index.json.*{hint}"):
            load_directory(path, config)


def test_safetensors_come_before_pickles(pickled, config):
    path, tensors = pickled
    (path / "pytorch_model.bin").write_bytes(b"not looked at")
    save_file(tensors, path / "anything.safetensors")
    assert_loaded(load_directory(path, config), tensors, config, "float32")


def test_pickled_tensors_sharing_storage(pickled, config):
    """A tied head, and views of something larger."""
    path, tensors = pickled
    tied = replace(config, tie_word_embeddings=True)
    whole = torch.cat([tensors[name].flatten() for name in tensors])
    parts = whole.split([tensor.numel() for tensor in tensors.values()])
    views = {name: part.view(tensor.shape) for (name, tensor), part in zip(tensors.items(), parts, strict=True)}
    views["lm_head.weight"] = views["model.embed_tokens.weight"]
    torch.save(views, path / "pytorch_model.bin")
    assert_loaded(load_directory(path, tied), views, tied, "float32")
    assert_loaded(load_directory(path, config), views, config, "float32")


def rewritten(path, change, compression=zipfile.ZIP_STORED):
    """The zip file at `path` anew, its parts as `change(name, content)` gives them; without what torch counts offsets
    from."""
    with zipfile.ZipFile(path) as archive:
        parts = {entry.filename: archive.read(entry) for entry in archive.infolist()
                 if not entry.filename.endswith(".format_version")}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in parts.items():
            archive.writestr(name, change(name, content))


def test_pickles_saved_on_cuda(pickled, config):
    """Each tensor says where it was; here it comes to the CPU."""
    path, tensors = pickled
    rewritten(path / "pytorch_model.bin", lambda name, content: content.replace(
        b"X\x03\0\0\0cpu", b"X\x06\0\0\0cuda:0") if name.endswith("data.pkl") else content)
    assert_loaded(load_directory(path, config), tensors, config, "float32")


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('opened')",)


NOT_WEIGHTS = {
    "code": (r"without running code", lambda t: {**t, "lm_head.weight": Bomb()}),
    "numbers": (r"must hold tensors by their names", lambda t: {**t, "step": 7}),
    "a list": (r"must hold tensors by their names", lambda t: list(t.values())),
    "within": (r"must hold tensors by their names", lambda t: {"state_dict": t}),
    "turned": (r"'lm_head\.weight' is not contiguous", lambda t: {
        **t, "lm_head.weight": t["lm_head.weight"].T.contiguous().T}),
    "sparse": (r"'lm_head\.weight' is not contiguous|without running", lambda t: {
        **t, "lm_head.weight": t["lm_head.weight"].to_sparse()}),
    "integers": (r"'lm_head\.weight' is stored as I32", lambda t: {**t, "lm_head.weight": t["lm_head.weight"].int()}),
    "complex": (r"'lm_head\.weight' is stored as torch.complex64", lambda t: {
        **t, "lm_head.weight": t["lm_head.weight"].to(torch.complex64)}),
    "another shape": (r"'lm_head\.weight' has shape", lambda t: {**t, "lm_head.weight": t["lm_head.weight"][1:]}),
    "an unknown name": (r"'evil' is unknown", lambda t: {**t, "evil": torch.zeros(2)}),
}


@pytest.mark.parametrize("kind", NOT_WEIGHTS)
def test_pickles_of_other_objects_refused(pickled, config, kind):
    path, tensors = pickled
    message, change = NOT_WEIGHTS[kind]
    torch.save(change(tensors), path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=message):
        load_directory(path, config)


OTHER_PARTS = {
    "a short record": ("does not match its record", lambda name, content: content[:-4 if "/data/" in name else None]),
    "no record": ("pytorch_model.bin", lambda name, content: content if "/data/" not in name else b""),
    "another order": ("another byte order", lambda name, content: b"big" if "byteorder" in name else content),
    "a large pickle": ("data.pkl' is not one of", lambda name, content: content + b"\0" * (17 << 20)
                       if name.endswith("data.pkl") else content)}


@pytest.mark.parametrize("kind", OTHER_PARTS)
def test_inconsistent_pickles_refused(pickled, config, kind):
    path, _ = pickled
    message, change = OTHER_PARTS[kind]
    rewritten(path / "pytorch_model.bin", change)
    with pytest.raises(ModelError, match=message):
        load_directory(path, config)


def test_pickles_in_other_containers(pickled, config):
    path, tensors = pickled
    rewritten(path / "pytorch_model.bin", lambda name, content: content, zipfile.ZIP_DEFLATED)
    with pytest.raises(ModelError, match="is not one of weights"):
        load_directory(path, config)
    torch.save(tensors, path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(ModelError, match=r"older than torch 1\.6"):
        load_directory(path, config)
    (path / "pytorch_model.bin").unlink()
    os.mkfifo(path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin cannot be read: it is not a plain file"):
        load_directory(path, config)


@pytest.fixture
def sharded(saved):
    """Two shards with an index, and a function that rewrites the index."""
    path, tensors = saved
    (path / "model.safetensors").unlink()
    names = list(tensors)
    weight_map = {}
    for number, part in enumerate((names[:9], names[9:])):
        save_file({name: tensors[name] for name in part}, path / f"part-{number}.safetensors")
        weight_map |= dict.fromkeys(part, f"part-{number}.safetensors")

    def write(**changes):
        index = {"metadata": {}, "weight_map": {**weight_map, **changes}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))

    write()
    return path, tensors, write


@pytest.mark.parametrize("shard,hint", [
    ("../part-0.safetensors", "beside"), ("/etc/passwd", "beside"), ("sub/part-0.safetensors", "beside"),
    ("..\\part-0.safetensors", "beside"), ("part-0.bin", "beside"), ("x" * 5000 + ".safetensors", "beside"),
    ("absent.safetensors", "absent"), ("\ud800.safetensors", "absent"), ("\0.safetensors", "absent"),
    ("part-0.safetensors", "lacks"), (7, "beside")])
def test_index_must_name_real_shards_beside_it(sharded, config, shard, hint):
    path, tensors, write = sharded
    assert_loaded(load_directory(path, config), tensors, config, "float32")
    write(**{"lm_head.weight": shard})
    with pytest.raises(ModelError, match=f"index.json.*{hint}") as caught:
        load_directory(path, config)
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 99999,
                                  '{"weight_map": 1e9999}', "\ud800", '{"a":1,"a":2}', "9" * 9999])
def test_broken_index_is_named(sharded, config, text):
    path, _, _ = sharded
    (path / "model.safetensors.index.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ModelError, match=r"index\.json") as caught:
        load_directory(path, config)
    assert len(str(caught.value)) < 800


def test_tensor_in_two_shards_is_refused(sharded, config):
    path, tensors, write = sharded
    save_file({name: tensors[name] for name in ("lm_head.weight", "model.norm.weight")}, path / "more.safetensors")
    write(**{"lm_head.weight": "more.safetensors"})
    with pytest.raises(ModelError, match="is in both"):
        load_directory(path, config)


def test_shard_is_a_directory(sharded, config):
    path, _, _ = sharded
    (path / "part-1.safetensors").unlink()
    (path / "part-1.safetensors").mkdir()
    with pytest.raises(ModelError, match="part-1"):
        load_directory(path, config)
    (path / "model.safetensors").mkdir()
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        load_directory(path, config)


def raw_file(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(begin, end, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("header,size", [
    ({"a": entry(0, 4, [1])}, 3), ({"a": entry(0, 4, [1])}, 5), ({"a": entry(0, 4, [2])}, 4),
    ({"a": entry(4, 8, [1])}, 8), ({"a": entry(0, 4, [1]), "b": entry(2, 6, [1])}, 6),
    ({"a": entry(0, 4, [1]), "b": entry(0, 4, [1])}, 4), ({"a": entry(0, 1 << 62, [1 << 60])}, 4),
    ({"a": entry(4, 0, [1])}, 4), ({"a": entry(-4, 0, [1])}, 4), ({"a": entry(0, 4, [-1])}, 4),
    ({"a": entry(0, 4, [1.0])}, 4), ({"a": entry(0, 4, [True])}, 4), ({"a": entry(0, 4, 1)}, 4),
    ({"a": {"dtype": "F32", "shape": [1]}}, 4), ({"a": []}, 4), ({"a": {**entry(0, 4, [1]), "dtype": 3}}, 4),
    ([], 0), (b"nonsense", 0), (b"\xff\xfe", 0), (b'{"a":' * 9999, 0), (b'{"a":{},"a":{}}', 0),
    ({"a": entry(0, 4, [1 << 4000, 0])}, 4), ({"a": entry(0, 4, [1] * 9)}, 4),
    ({"a": entry(0, 4, [1 << 63, 0])}, 4),
])
def test_header_contradicting_its_file(tmp_path, header, size):
    path = raw_file(tmp_path / "m.safetensors", header, b"\0" * size)
    with pytest.raises(ModelError, match=r"m\.safetensors.*download it again"):
        read_header(path)


@pytest.mark.parametrize("length", [0, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_wrong_header_length(tmp_path, length):
    with pytest.raises(ModelError, match=r"m\.safetensors"):
        read_header(raw_file(tmp_path / "m.safetensors", {"a": entry(0, 4, [1])}, b"\0" * 4, length))


def test_pipes_do_not_block(tmp_path):
    for name, read in (("config.json", read_json), ("model.safetensors", read_header)):
        os.mkfifo(tmp_path / name)
        with pytest.raises(ModelError, match=f"{name} cannot be read: it is not a plain file"):
            read(tmp_path / name)


def test_huge_shapes_not_multiplied(tmp_path):
    path = raw_file(tmp_path / "m.safetensors", {"a": entry(0, 4, [9999] * 200_000)}, b"\0" * 4)
    began = time.process_time()
    with pytest.raises(ModelError, match="malformed"):
        read_header(path)
    assert time.process_time() - began < 1


def test_giant_header_not_read(tmp_path):
    path = raw_file(tmp_path / "m.safetensors", {}, length=1 << 33)
    os.truncate(path, 1 << 34)
    tracemalloc.start()
    with pytest.raises(ModelError, match="announces a header"):
        read_header(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_header_reads_as_the_reference_library_does(saved):
    path, tensors = saved
    header = read_header(path / "model.safetensors")
    assert set(header) == set(load_file(path / "model.safetensors"))
    for name, stored in header.items():
        assert stored.shape == tuple(tensors[name].shape) and stored.nbytes == tensors[name].nbytes


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Config, bytes and directory of a one-layer model."""
    config = ModelConfig.from_hf(Qwen3_5TextConfig(**{**TEXT, "num_hidden_layers": 1, "vocab_size": 5}).to_dict())
    path = tmp_path_factory.mktemp("small")
    save_file(random_weights(config, "float32"), path / "model.safetensors")
    return config, (path / "model.safetensors").read_bytes(), path


@pytest.fixture(scope="module")
def small_pickle(small, tmp_path_factory):
    """The same in PyTorch's own form: config, bytes and file."""
    config, _, _ = small
    path = tmp_path_factory.mktemp("pickle") / "pytorch_model.bin"
    torch.save(random_weights(config, "float32"), path)
    return config, path.read_bytes(), path


def load_or_refuse(path, config):
    """Load; a refusal must be ModelError and stay small, and what we accept the reference library accepts too."""
    tracemalloc.start()
    try:
        load_directory(path, config)
    except ModelError as error:
        assert len(str(error)) < 2000
        return
    finally:
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
        tracemalloc.stop()
    with safe_open(path / "model.safetensors", "pt") as file:
        assert len(file.keys()) == len(expected_tensors(config))


@settings(deadline=None, max_examples=examples(60))
@given(cut=st.integers(0, 1 << 20))
def test_any_truncation_is_refused(small, cut):
    config, content, path = small
    (path / "model.safetensors").write_bytes(content[:cut % len(content)])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_directory(path, config)


@settings(deadline=None, max_examples=examples(150))
@given(data=st.data())
def test_any_corruption_is_loaded_or_refused(small, data):
    config, content, path = small
    header = 8 + struct.unpack("<Q", content[:8])[0]
    at = data.draw(st.integers(0, 8) | st.integers(0, header))
    patch = data.draw(st.binary(max_size=6) | st.sampled_from([b"9", b"-", b"[", b'"', b"e99", b"F16"]))
    removed = data.draw(st.integers(0, 6) | st.just(len(patch)))
    (path / "model.safetensors").write_bytes(content[:at] + patch + content[at + removed:])
    load_or_refuse(path, config)


@settings(deadline=None, max_examples=examples(100))
@given(data=st.data())
def test_any_corruption_of_a_pickle_is_loaded_or_refused(small_pickle, data):
    config, content, path = small_pickle
    at = data.draw(st.integers(0, 3000) | st.integers(len(content) - 3000, len(content)))
    patch = data.draw(st.binary(max_size=6) | st.just(b"\xff" * 8))
    removed = data.draw(st.integers(0, 6) | st.sampled_from([len(patch), len(content)]))
    path.write_bytes(content[:at] + patch + content[at + removed:])
    tracemalloc.start()
    try:
        load_directory(path.parent, config)
    except ModelError as error:
        assert len(str(error)) < 2000
    finally:
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
        tracemalloc.stop()


def test_file_shrinking_while_read(monkeypatch, saved, config):
    path, _ = saved

    def shrink(done, total):
        os.truncate(path / "model.safetensors", 2000)

    with pytest.raises(ModelError, match="ended while"):
        load_directory(path, config, progress=shrink)


# Random weights.


def test_random_weights_have_shape_dtype_and_seed(config):
    weights = random_weights(config, "bfloat16", seed=5)
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == expected_tensors(config)
    for name, tensor in weights.items():
        assert tensor.dtype == TORCH_DTYPES[tensor_dtype(name, "bfloat16")] and tensor.isfinite().all(), name
    again, other = random_weights(config, "bfloat16", seed=5), random_weights(config, "bfloat16", seed=6)
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert not any(torch.equal(weights[name], other[name]) for name in weights)
    shorter = random_weights(replace(config, num_hidden_layers=2, layer_types=config.layer_types[:2]), "bfloat16", 5)
    assert all(torch.equal(weights[name], tensor) for name, tensor in shorter.items())


def test_random_scales():
    config = replace(ModelConfig.preset("0.8b", layers=2), vocab_size=2000)
    weights = random_weights(config, "float32")
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"):
        if name in weights:
            assert weights[name].std() == pytest.approx(weights[name].shape[-1] ** -0.5, rel=0.02)
    assert weights["model.norm.weight"].mean() == pytest.approx(0, abs=0.01)
    assert weights["model.layers.0.linear_attn.norm.weight"].mean() == pytest.approx(1, abs=0.01)
    plain = random_weights(replace(ModelConfig.preset("qwen3-0.6b", layers=1), vocab_size=2000), "float32")
    for name, tensor in plain.items():
        assert not name.endswith("norm.weight") or tensor.mean() == pytest.approx(1, abs=0.01), name
    step = torch.nn.functional.softplus(weights["model.layers.1.linear_attn.dt_bias"])
    assert step.min() > 0.9e-3 and step.max() < 0.11
    assert weights["model.layers.1.linear_attn.A_log"].exp().max() <= 16.01
    narrow = random_weights(config, "float32", initializer_range=0.02)
    assert narrow["model.layers.0.mlp.up_proj.weight"].std() == pytest.approx(0.02, rel=0.02)


def test_random_model_stays_finite_in_transformers():
    keys = {**TEXT, "num_hidden_layers": 32, "hidden_size": 48}
    theirs = Qwen3_5TextConfig(**keys)
    config = ModelConfig.from_hf(theirs.to_dict())
    model = Qwen3_5ForCausalLM(theirs).eval()
    model.load_state_dict(random_weights(config, "float32"), strict=True)
    with torch.no_grad():
        logits = model(torch.arange(30)[None] % 37).logits
    assert logits.isfinite().all() and 0.2 < logits.std() < 5
