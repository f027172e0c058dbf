"""GGUF models: tensors arrive as a directory of safetensors would have them, under our names."""

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from gguf_models import BLOCKY, GGUF_NAMES, QWEN3, SHAPES, add_value, gguf_tensors, metadata_of, write, write_model
from support import interleaved, load_gguf, odd_shape

from deltic.config import LinearConfig
from deltic.errors import ModelError
from deltic.loader.dummy import random_weights
from deltic.loader.gguf.blocks import BY_NAME, LAYOUTS
from deltic.loader.gguf.config import config_from_gguf
from deltic.loader.gguf.file import GgufFile
from deltic.loader.gguf.load import load_packed
from deltic.loader.gguf.names import gguf_name, tensor_target
from deltic.loader.names import expected_head, expected_tensors, tensor_dtype
from deltic.loader.safetensors import TORCH_DTYPES


def assert_same(found, expected, config):
    """Equal; where numbers are stored in another form, the form's value is equal."""
    assert list(found) == list(expected_tensors(config))
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].is_contiguous(), name
        if name.endswith("A_log"):
            assert torch.allclose(found[name], tensor, rtol=1e-6, atol=1e-6), name
        elif name.endswith("norm.weight") and "linear_attn" not in name and config.norm_offset:
            assert torch.equal(found[name] + 1, tensor + 1), name
        else:
            assert torch.equal(found[name], tensor), name


# Weights


@pytest.mark.parametrize("shape", SHAPES)
def test_float32_file_has_the_same_tensors(tmp_path, shape):
    config = SHAPES[shape]
    weights = random_weights(config, "float32")
    file = GgufFile.open(write_model(tmp_path / "m.gguf", config, weights))
    progress = []
    found = load_gguf(file, config_from_gguf(file), progress=lambda done, total: progress.append((done, total)))
    assert config_from_gguf(file) == config
    assert_same(found, weights, config)
    total = sum(stored.nbytes for stored in file.tensors.values())
    assert progress[-1] == (total, total) and progress == sorted(progress)


@pytest.mark.parametrize(("kind", "dtype"), [("F16", "float16"), ("BF16", "bfloat16"), ("F32", "bfloat16")])
def test_float16_rounded_once(tmp_path, kind, dtype):
    config = odd_shape()
    weights = random_weights(config, "float32")
    found = load_gguf(write_model(tmp_path / "m.gguf", config, weights, kind), config, dtype)
    kept = {name: TORCH_DTYPES[tensor_dtype(name, dtype)] for name in weights}
    assert_same(found, {name: tensor.to(kept[name]) for name, tensor in weights.items()}, config)


def quantized_model(path, config, kind):
    """A file whose matrices are random blocks; returns what gguf-py makes of them, by our names."""
    type, rng = GGMLQuantizationType[kind], np.random.default_rng(0)
    tensors = gguf_tensors(config, random_weights(config, "float32"))
    expected, kinds = {}, {}
    for name, array in tensors.items():
        where = tensor_target(name, config.architecture, config.layer_types)
        if array.ndim == 2 and "conv1d" not in name:
            rows = rng.integers(0, 256, (len(array), BY_NAME[kind].size(array.shape[1])), dtype=np.uint8)
            blocks = rows.reshape(-1).view(LAYOUTS[kind])
            for field in {"d", "dmin", "m"} & set(blocks.dtype.names):
                blocks[field] = rng.standard_normal(blocks.shape) * 1e-3
            if "e" in blocks.dtype.names:
                blocks["e"] = 120
            tensors[name], kinds[name] = rows, type
            array = quants.dequantize(rows, type)
        expected[where.names[0]] = where.form.to_ours(torch.from_numpy(array.copy()), config)
    write(path, metadata_of(config), tensors, kinds)
    return expected


QUICK_TYPES = ("Q4_K", "Q8_0", "IQ4_NL")


@pytest.mark.parametrize("kind", [pytest.param(name, marks=() if name in QUICK_TYPES else pytest.mark.slow)
                                  for name in LAYOUTS if name not in ("F32", "F16", "BF16")])
def test_models_of_every_type_are_dequantized(tmp_path, kind):
    expected = quantized_model(tmp_path / "m.gguf", BLOCKY, kind)
    found = load_gguf(tmp_path / "m.gguf", BLOCKY, "float32")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_a_split_model_loads_as_one(tmp_path):
    weights = random_weights(QWEN3, "float32")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3", split_max_tensors=9)
    for key, value in metadata_of(QWEN3).items():
        if key != "general.architecture":
            add_value(writer, key, value)
    for name, array in gguf_tensors(QWEN3, weights).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 2
    assert_same(load_gguf(parts[-1], QWEN3), weights, QWEN3)


def test_fused_projections_are_split(tmp_path):
    config = odd_shape()
    weights = random_weights(config, "float32")
    tensors = gguf_tensors(config, weights)
    parts = [tensors.pop(f"blk.1.attn_{part}.weight") for part in "qkv"]
    path = write(tmp_path / "m.gguf", metadata_of(config), {**tensors, "blk.1.attn_qkv.weight": np.concatenate(parts)})
    assert_same(load_gguf(path, config), weights, config)


def draft_head(config):
    """Tensors of a draft head, under our names."""
    return {name: torch.randn(shape) for name, shape in expected_head(config).items()}


def test_the_draft_head_stays_apart(tmp_path):
    config = odd_shape()
    weights, draft = random_weights(config, "float32"), draft_head(config)
    announced = replace(config, num_mtp_layers=1)
    path = write(tmp_path / "m.gguf", metadata_of(announced), gguf_tensors(config, {**weights, **draft}))
    file = GgufFile.open(path)
    assert config_from_gguf(file) == announced
    assert_same(load_gguf(file, config), weights, config)
    for name, tensor in draft.items():
        theirs, form = gguf_name(name, config.architecture, config.layer_types)
        assert tensor_target(theirs, config.architecture, config.layer_types).names == (name,)
        assert tensor_target(theirs, config.architecture, config.layer_types).mtp
        stored = torch.from_numpy(file.tensors[theirs].read().view(np.float32).reshape(file.tensors[theirs].shape))
        assert torch.allclose(form.to_ours(stored, config), tensor, atol=1e-6), name


def changed(config, change):
    tensors = gguf_tensors(config, random_weights(config, "float32"))
    change(tensors)
    return tensors


WRONG = {
    "tensor 'blk.0.bogus.weight' has no place in a qwen3_5 model": lambda t: t.update(
        {"blk.0.bogus.weight": np.zeros(3, np.float32)}),
    "tensor 'blk.1.ssm_a' has no place": lambda t: t.update({"blk.1.ssm_a": t["blk.0.ssm_a"]}),
    "tensor 'a.patch_embd.weight' has no place": lambda t: t.update({"a.patch_embd.weight": np.zeros(3, np.float32)}),
    "1 tensors are missing in": lambda t: t.pop("blk.2.ssm_dt.bias"),
    "such as 'blk.0.attn_norm.weight'": lambda t: [t.pop(f"blk.{i}.attn_norm.weight") for i in range(6)],
    "tensor 'output.weight' is missing": lambda t: t.pop("output.weight"),
    "tensor 'model.layers.1.self_attn.q_proj.weight' is given twice": lambda t: t.update(
        {"blk.1.attn_qkv.weight": np.concatenate([t[f"blk.1.attn_{part}.weight"] for part in "qkv"])}),
    "tensor 'blk.0.ssm_conv1d.weight' has shape [112, 5], but the metadata requires [112, 4]": lambda t: t.update(
        {"blk.0.ssm_conv1d.weight": np.zeros((112, 5), np.float32)}),
    "tensor 'blk.0.ssm_a': decays (ssm_a) must be negative": lambda t: t.update({"blk.0.ssm_a": -t["blk.0.ssm_a"]}),
    "tensor 'blk.0.ssm_a' is of type I32, which is not supported": lambda t: t.update(
        {"blk.0.ssm_a": np.zeros(6, np.int32)}),
}


@pytest.mark.parametrize("message", WRONG)
def test_files_that_are_not_the_model_are_refused(tmp_path, message):
    config = odd_shape()
    path = write(tmp_path / "m.gguf", metadata_of(config), changed(config, WRONG[message]))
    with pytest.raises(ModelError) as caught:
        load_gguf(path, config)
    assert message in str(caught.value)


def test_untied_head_and_float16_overflow_refused(tmp_path):
    config = odd_shape()
    weights = random_weights(config, "float32")
    path = write_model(tmp_path / "m.gguf", config, weights)
    with pytest.raises(ModelError, match=r"tensor 'output\.weight' has no place"):
        load_gguf(path, replace(config, tie_word_embeddings=True))
    weights["lm_head.weight"][3, 4] = 1e6
    with pytest.raises(ModelError, match=r"tensor 'output\.weight': it has values beyond float16"):
        load_gguf(write_model(tmp_path / "n.gguf", config, weights), config, "float16")


# Names and forms


def table_of(architecture, blocks):
    name = GGUF_NAMES[architecture]
    arch = next(arch for arch, found in gguf.MODEL_ARCH_NAMES.items() if found == name)
    return gguf.get_tensor_name_map(arch, blocks)


@pytest.mark.parametrize("shape", ["odd", "qwen3"])
def test_names_equal_gguf_py(shape):
    config = SHAPES[shape]
    table = table_of(config.architecture, config.num_hidden_layers)
    found = {name: gguf_name(name, config.architecture, config.layer_types)[0] for name in expected_tensors(config)}
    for name, theirs in found.items():
        asked = name.replace("dt_bias", "dt_proj.bias")  # so renamed before the table is asked
        assert table.get_name(asked, (".weight", ".bias")) == theirs, name
        assert tensor_target(theirs, config.architecture, config.layer_types).names == (name,)
    assert len(set(found.values())) == len(found)


def test_projections_of_qwen3_next_have_gguf_pys_names():
    config = SHAPES["qwen3 next"]
    table, kinds = table_of("qwen3_next", 6), config.layer_types
    packed = "model.layers.0.linear_attn.in_proj_ba"
    parts = tuple(f"model.layers.0.linear_attn.in_proj_{part}.weight" for part in "ba")
    stored = f"{table.get_name(packed)}.weight"
    assert tensor_target(stored, "qwen3_next", kinds).names == parts
    assert {gguf_name(part, "qwen3_next", kinds)[0] for part in parts} == {stored}
    for name in set(expected_tensors(config)) - set(parts):
        asked = name.replace("dt_bias", "dt_proj.bias")
        if "linear_attn" in name and not name.endswith(("_qkv.weight", "_z.weight", "_a.weight", "_b.weight")):
            assert table.get_name(asked, (".weight", ".bias")) == gguf_name(name, "qwen3_next", kinds)[0]


@pytest.mark.parametrize("linear", [LinearConfig(2, 6, 10, 12, 4), LinearConfig(3, 3, 10, 12, 4),
                                    LinearConfig(1, 5, 6, 7, 3)])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_qwen3_next_of_older_converters(tmp_path, linear, kind):
    """ssm_in in place of attn_qkv and attn_gate: dequantized and packed."""
    config, type = replace(SHAPES["qwen3 next"], linear=linear, hidden_size=64), GGMLQuantizationType[kind]
    weights = random_weights(config, "float32")
    tensors, kinds = gguf_tensors(config, weights), {}
    for layer in config.linear_layers:
        for part in ("attn_qkv", "attn_gate"):
            del tensors[f"blk.{layer}.{part}.weight"]
        for name, key in (("qkvz", "ssm_in"), ("ba", "ssm_ba")):
            stored = f"blk.{layer}.{key}.weight"
            tensors[stored] = quants.quantize(interleaved(config, weights, layer, name).numpy(), type)
            kinds[stored] = type
    file = GgufFile.open(write(tmp_path / "m.gguf", metadata_of(config), tensors, kinds if kind != "F32" else None))
    plain, packed = load_gguf(file, config, "float32"), load_packed(file, config)
    for name in expected_tensors(config):
        if ".in_proj_" in name:
            wanted = torch.from_numpy(quants.dequantize(quants.quantize(weights[name].numpy(), type), type))
            assert torch.equal(plain[name], wanted), name
            assert packed[name].type == kind and torch.equal(packed[name].dequantize(), wanted), name
    with pytest.raises(ModelError, match="is given twice"):
        twice = {"blk.0.attn_gate.weight": weights["model.layers.0.linear_attn.in_proj_z.weight"].numpy()}
        again = write(tmp_path / "n.gguf", metadata_of(config), {**tensors, **twice}, kinds if kind != "F32" else None)
        load_gguf(GgufFile.open(again), config)


def test_draft_head_names_equal_gguf_py():
    config, kinds = odd_shape(), gguf.MODEL_TENSOR
    table = table_of(config.architecture, 7)
    special = {"mtp.fc": kinds.NEXTN_EH_PROJ, "mtp.pre_fc_norm_embedding": kinds.NEXTN_ENORM,
               "mtp.pre_fc_norm_hidden": kinds.NEXTN_HNORM, "mtp.norm": kinds.NEXTN_SHARED_HEAD_NORM}
    for name in draft_head(config):
        known = special.get(name.removesuffix(".weight"))
        wanted = (f"{gguf.TENSOR_NAMES[known].format(bid=6)}.weight" if known else
                  table.get_name(name.replace("mtp.layers.0", "model.layers.6"), (".weight",)))
        assert gguf_name(name, config.architecture, config.layer_types)[0] == wanted
        assert tensor_target(wanted, config.architecture, config.layer_types).names == (name,)


@pytest.mark.parametrize("architecture", ["qwen3_5_moe", "qwen3_next", "qwen3_moe"])
def test_names_of_experts(architecture):
    kinds = ("full_attention", "full_attention")
    table = table_of(architecture, 2)
    parts = ["gate", "experts.gate_proj", "experts.up_proj", "experts.down_proj"]
    if architecture != "qwen3_moe":
        parts += ["shared_expert_gate", *(f"shared_expert.{part}_proj" for part in ("gate", "up", "down"))]
    for part in parts:
        name = f"model.layers.1.mlp.{part}.weight"
        theirs, form = gguf_name(name, architecture, kinds)
        assert theirs == table.get_name(name, (".weight",))
        assert tensor_target(theirs, architecture, kinds).names == (name,) and form.heads is None


@pytest.mark.parametrize("name", [
    "blk.0.attn_q.weight.x", "blk.00.attn_q.weight", "blk.0.attn_q.bias", "blk.-1.attn_q.weight", "blk.99999999.ssm_a",
    "blk.0.ffn_norm.weight", "blk.7.nextn.eh_proj.weight", "blk.5.nextn.eh_proj.weight", "", "token_embd", "blk.0."])
def test_unknown_names_are_refused(name):
    config = odd_shape()
    with pytest.raises(ModelError, match="has no place"):
        tensor_target(name, config.architecture, config.layer_types)


def test_names_without_gguf_equivalent():
    config = odd_shape()
    for name in ("model.bogus", "model.layers.0.self_attn.q_proj.weight", "mtp.bogus.weight", "lm_head.bias"):
        with pytest.raises(ModelError, match="has no name in GGUF files"):
            gguf_name(name, config.architecture, config.layer_types)


LINEARS = [LinearConfig(2, 6, 10, 12, 4), LinearConfig(3, 3, 4, 5, 3), LinearConfig(1, 5, 6, 7, 2),
           LinearConfig(5, 10, 3, 2, 4)]


@pytest.mark.parametrize("linear", LINEARS)
def test_tensor_forms_round_trip(linear):
    config = odd_shape(linear=linear)
    for name, tensor in random_weights(config, "float32").items():
        theirs, form = gguf_name(name, config.architecture, config.layer_types)
        stored = form.from_ours(tensor, config)
        assert tuple(stored.shape) == form.shape(tuple(tensor.shape), config)
        back = form.to_ours(stored, config)
        assert back.shape == tensor.shape and torch.allclose(back, tensor, rtol=1e-5, atol=1e-6), theirs
        if form.heads is not None and not theirs.endswith("ssm_a"):
            assert torch.equal(back, tensor), theirs


@pytest.mark.parametrize("linear", LINEARS)
def test_value_head_order_of_llama_cpp(linear):
    """Value head i of a file belongs to key head i modulo the number of key heads: said here head by head."""
    config, keys = odd_shape(linear=linear), linear.num_key_heads
    share, width = linear.num_value_heads // keys, linear.value_head_dim
    grouped = [[key * share + j for key in range(keys)] for j in range(share)]
    order = [head for row in grouped for head in row]

    def stored(name, tensor):
        return gguf_name(f"model.layers.0.linear_attn.{name}", config.architecture, config.layer_types)[1].from_ours(
            tensor, config)

    heads = torch.arange(1.0, linear.num_value_heads + 1)
    places = heads.repeat_interleave(width)
    wanted, wide = heads[order], heads[order].repeat_interleave(width)
    behind = torch.arange(-2.0 * linear.key_dim, 0)
    assert torch.equal(stored("dt_bias", heads), wanted)
    assert torch.allclose(stored("A_log", heads.log()), -wanted)
    assert torch.equal(stored("in_proj_a.weight", heads[:, None].expand(-1, 3)), wanted[:, None].expand(-1, 3))
    assert torch.equal(stored("in_proj_b.weight", heads[:, None]), wanted[:, None])
    assert torch.equal(stored("in_proj_z.weight", places[:, None]), wide[:, None])
    assert torch.equal(stored("out_proj.weight", places[None].expand(3, -1)), wide[None].expand(3, -1))
    assert torch.equal(stored("in_proj_qkv.weight", torch.cat([behind, places])[:, None]),
                       torch.cat([behind, wide])[:, None])
    assert torch.equal(stored("conv1d.weight", torch.cat([behind, places])[:, None, None].expand(-1, 1, 4)),
                       torch.cat([behind, wide])[:, None].expand(-1, 4))
