"""`deltic convert`: files that say the same as the model that they were made from, to us and to gguf-py."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from gguf_models import QWEN3, SHAPES, gguf_tensors, metadata_of
from safetensors.torch import save_file
from support import load_directory, load_gguf, odd_shape, tiny_texts
from test_gguf_metadata import CORPUS, TINY, tokenizer_metadata

from deltic import LLM, SamplingParams
from deltic.chat.tokenizer import Tokenizer
from deltic.cli import command_parser, main
from deltic.config import GenerationDefaults, LinearConfig, ModelConfig, RopeConfig
from deltic.errors import DelticError, ModelError
from deltic.loader.dummy import random_weights
from deltic.loader.four_bits import TYPES as FOUR_BITS
from deltic.loader.gguf.blocks import BY_NAME, decode
from deltic.loader.gguf.config import config_from_gguf, generation_from_gguf
from deltic.loader.gguf.convert import FILE_TYPES, Written, convert
from deltic.loader.gguf.file import GgufFile
from deltic.loader.gguf.names import gguf_name
from deltic.loader.gguf.quantize import _ENCODERS, quantize
from deltic.loader.gguf.tokenizer import tokenizer_from_gguf
from deltic.loader.gguf.write import NewTensor, config_to_gguf, tokenizer_to_gguf, write_gguf
from deltic.loader.model_files import ModelFiles, open_model

OURS = [name for name in _ENCODERS if name not in FOUR_BITS]
THEIRS = [name for name in OURS if name not in ("Q4_K", "Q5_K", "Q6_K")]
STEP = {"F32": 0.0, "F16": 2**-11, "BF16": 2**-8, "Q8_0": 0.57 / 127, "Q4_0": 1.01 / 8, "Q4_1": 1.02 / 15,
        "Q5_0": 1.01 / 16, "Q5_1": 1.02 / 31, "Q4_K": 1.4 / 15, "Q5_K": 1.4 / 31, "Q6_K": 1.4 / 31}
"""The largest error of a weight, in units of the block's largest."""


def written(path: Path, config: ModelConfig, kind: str, **weights: torch.Tensor) -> tuple[ModelFiles, Written]:
    """A directory of random weights, and what its conversion to `path` returns."""
    directory = path.parent / "model"
    directory.mkdir(exist_ok=True)
    save_file({**random_weights(config, "float32"), **weights}, directory / "model.safetensors")
    files = ModelFiles(directory, config, GenerationDefaults(temperature=0.6, top_k=20, eos_token_ids=(3065,)))
    return files, convert(files, tiny_texts(), "a model", path, kind)


def assert_same(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    """Equal matrices, and vectors (which files hold as factors and decays) up to rounding."""
    assert list(expected) == list(found)
    for name, tensor in expected.items():
        error = {"rtol": 0.0, "atol": 0.0} if tensor.ndim > 1 else {"rtol": 1e-6, "atol": 2e-7}
        assert torch.allclose(tensor, found[name], **error), name


def left_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.is_file())


# Quantizers


def samples() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    normal = rng.standard_normal((24, 512)).astype(np.float32)
    return {"normal": normal * 0.02, "heavy": rng.standard_t(3, (24, 512)).astype(np.float32), "zero": normal * 0,
            "positive": abs(normal), "negative": -abs(normal), "constant": np.full((2, 256), 0.3, np.float32),
            "minute": normal * np.float32(1e-30), "subnormal": normal * np.float32(1e-41),
            "large": normal * np.float32(6e4 / abs(normal).max()), "sparse": normal * (rng.random((24, 512)) < 0.02)}


def back(raw: np.ndarray, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    return decode(raw.reshape(-1), BY_NAME[kind]).reshape(shape)


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("name", list(samples()))
def test_round_trip_of_every_type(kind: str, name: str) -> None:
    values = samples()[name]
    raw = quantize(values, BY_NAME[kind])
    assert raw.dtype == np.uint8 and raw.shape == (len(values), BY_NAME[kind].size(values.shape[1]))
    found = back(raw, kind, values.shape)
    width = min(256, max(32, BY_NAME[kind].weights))
    limit = STEP[kind] * abs(values).reshape(-1, width).max(axis=1) * (2 if kind[-1] == "1" and "Q" in kind else 1)
    error = abs(values - found).reshape(-1, width).max(axis=1)
    assert (error <= limit + {"F32": 0, "BF16": 1e-30}.get(kind, 1e-5)).all(), (error / limit).max()


@pytest.mark.parametrize("kind", THEIRS)
@pytest.mark.parametrize("name", [name for name in samples() if name != "subnormal"])
def test_simple_types_equal_gguf_py(kind: str, name: str) -> None:
    values = samples()[name] + np.float32(0)  # gguf-py leaves it to numpy whether the least of several zeros is -0
    with np.errstate(all="ignore"):
        expected = quants.quantize(values, GGMLQuantizationType[kind])
    assert np.array_equal(quantize(values, BY_NAME[kind]), expected.view(np.uint8).reshape(len(values), -1))


def error_of(values: np.ndarray, found: np.ndarray) -> float:
    return float(np.sqrt(((values - found) ** 2).mean()))


def plain(values: np.ndarray, group: int, levels: int) -> np.ndarray:
    """Each group's range spread over all codes, with exact scales."""
    groups = values.reshape(-1, group)
    low = groups.min(axis=1, keepdims=True)
    scale = (groups.max(axis=1, keepdims=True) - low) / levels
    return (np.rint((groups - low) / scale) * scale + low).reshape(values.shape)


def plain_symmetric(values: np.ndarray, group: int, most: int) -> np.ndarray:
    groups = values.reshape(-1, group)
    scale = abs(groups).max(axis=1, keepdims=True) / most
    return (np.rint(groups / scale) * scale).reshape(values.shape)


@pytest.mark.parametrize("name", ["normal", "heavy"])
@pytest.mark.parametrize(("kind", "factor"), [("Q4_K", 0.95), ("Q5_K", 0.98), ("Q6_K", 0.97)])
def test_scale_search_beats_plain_rounding(kind: str, factor: float, name: str) -> None:
    """Although the plain one's scales are not rounded to six or eight bits."""
    values = samples()[name]
    naive = (plain_symmetric(values, 16, 31) if kind == "Q6_K"
             else plain(values, 32, 15 if kind == "Q4_K" else 31))
    found = back(quantize(values, BY_NAME[kind]), kind, values.shape)
    assert error_of(values, found) < factor * error_of(values, naive)


def test_unstorable_values_refused() -> None:
    for value in (math.nan, math.inf, 1e6):
        for kind in ("F16", "Q8_0", "Q4_K"):
            with pytest.raises(ModelError, match=f"values that {kind} cannot hold"):
                quantize(np.full((1, 256), value, np.float32), BY_NAME[kind])
        found = back(quantize(np.full((1, 2), value, np.float32), BY_NAME["BF16"]), "BF16", (2,))
        assert np.allclose(found, value, rtol=2**-8, equal_nan=True)
    with pytest.raises(ModelError, match="rows of 100 weights do not fit"):
        quantize(np.zeros((1, 100), np.float32), BY_NAME["Q8_0"])
    with pytest.raises(ModelError, match="Q2_K cannot be written"):
        quantize(np.zeros((1, 256), np.float32), BY_NAME["Q2_K"])


# The embedded model


@pytest.fixture(scope="module")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("convert")
    paths = {kind: directory / f"tiny-{kind}.gguf" for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_K_M")}
    for kind, path in paths.items():
        convert(open_model("tiny"), tiny_texts(), "tiny", path, kind, mtp="none")
    assert left_in(directory) == sorted(path.name for path in paths.values())
    return paths


def tensors_of(path: Path | None) -> dict[str, torch.Tensor]:
    return open_model(path).load("float32", "cpu", None)


@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_embedded_model_tensors(tiny_files: dict[str, Path], kind: str) -> None:
    """Its checkpoint is bfloat16."""
    assert_same(tensors_of(None), tensors_of(tiny_files[kind]))


@pytest.mark.parametrize(("kind", "error"), [("F16", 2**-11), ("Q8_0", 0.006), ("Q4_K_M", 0.1)])
def test_embedded_model_tensors_quantized(tiny_files: dict[str, Path], kind: str, error: float) -> None:
    ours, theirs = tensors_of(None), tensors_of(tiny_files[kind])
    assert_same({name: tensor for name, tensor in ours.items() if tensor.ndim != 2},
                {name: tensor for name, tensor in theirs.items() if tensor.ndim != 2})
    for name, tensor in ours.items():
        assert (tensor - theirs[name]).norm() <= error * tensor.norm(), name


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_K_M"])
def test_embedded_model_answers_from_gguf(tiny_files: dict[str, Path], kind: str) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=20)
    ours, theirs = (LLM(model, dtype="float32", memory="64MiB", max_context=512, threads=1).chat(
        "What is the capital of France?", greedy) for model in (None, str(tiny_files[kind])))
    assert ours.text == theirs.text == "The capital of France is Paris."
    assert ours.choices[0].tokens == theirs.choices[0].tokens


def test_config_sampling_and_tokenizer_survive(tiny_files: dict[str, Path]) -> None:
    ours, theirs = open_model(None), open_model(tiny_files["BF16"])
    assert replace(theirs.config, eos_token_ids=()) == replace(ours.config, eos_token_ids=(), num_mtp_layers=0)
    # the bounds of JSON are deltic's own keys of generation_config.json, and have no place in a GGUF file
    assert theirs.generation == replace(ours.generation, json_max_length=None, json_max_items=None)
    assert theirs.tokenizer() == replace(tiny_texts(), special_tokens=theirs.tokenizer().special_tokens)
    texts = theirs.tokenizer()
    left, right = Tokenizer.from_directory(TINY), Tokenizer.from_files(texts, TINY)  # type: ignore[arg-type]
    assert left.special_tokens == right.special_tokens and left.eos_id == right.eos_id
    assert all(left.encode(text) == right.encode(text) for text in CORPUS)


def test_gguf_keys_suffice_without_tokenizer_json(tiny_files: dict[str, Path]) -> None:
    metadata = dict(GgufFile.open(tiny_files["F32"]).metadata)
    del metadata["tokenizer.huggingface.json"]
    expected = tokenizer_metadata(TINY)
    count = open_model(None).config.vocab_size
    for key, value in expected.items():
        found = metadata[key]
        full = key in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type")
        assert list(found) == value[:count] if full else found == value, key
    texts = tokenizer_from_gguf(metadata)
    tokenizer = Tokenizer.from_files(texts, TINY)  # type: ignore[arg-type]
    assert all(tokenizer.encode(text) == Tokenizer.from_directory(TINY).encode(text) for text in CORPUS)


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q4_K_M"])
def test_gguf_py_reads_the_files(tiny_files: dict[str, Path], kind: str) -> None:
    reader = gguf.GGUFReader(tiny_files[kind])
    config = replace(open_model(None).config, num_mtp_layers=0)
    expected = gguf_tensors(config, tensors_of(None))
    assert {tensor.name for tensor in reader.tensors} == set(expected)
    for tensor in reader.tensors:
        assert tuple(reversed(tensor.shape.tolist())) == expected[tensor.name].shape
        found = quants.dequantize(tensor.data, tensor.tensor_type)
        error = np.linalg.norm(found - expected[tensor.name])
        assert error <= {"F32": 1e-6, "BF16": 1e-6, "Q8_0": 0.01, "Q4_K_M": 0.1}[kind] * np.linalg.norm(found)
        if tensor.name.endswith(("_norm.weight", "ssm_conv1d.weight", "ssm_a", ".bias")):
            assert tensor.tensor_type == GGMLQuantizationType.F32
    fields = {name: field.contents() for name, field in reader.fields.items()}
    metadata = metadata_of(config)
    assert {key: pytest.approx(fields[key]) if isinstance(value, float) else fields[key]
            for key, value in metadata.items()} == metadata
    assert fields["general.file_type"] == FILE_TYPES[kind].id and fields["general.name"] == "tiny"
    assert fields["GGUF.version"] == 3 and len(reader.fields) == len(fields)


def test_a_file_converts_like_its_directory(tiny_files: dict[str, Path], tmp_path: Path) -> None:
    assert main(["convert", str(tiny_files["F32"]), str(tmp_path / "a.gguf"), "--type", "q8_0"]) == 0
    left, right = tensors_of(tmp_path / "a.gguf"), tensors_of(tiny_files["Q8_0"])
    assert all(torch.allclose(left[name], right[name], rtol=1e-5, atol=1e-6) for name in right)


# Shapes


ATTENTION_ALONE = odd_shape(num_hidden_layers=2, layer_types=("full_attention",) * 2, linear=None)


MORE = {**SHAPES, "attention alone": ATTENTION_ALONE, "yarn": odd_shape().with_rope_scaling("yarn:4:256")}


@pytest.mark.parametrize("name", MORE)
def test_odd_shapes(name: str, tmp_path: Path) -> None:
    config = replace(MORE[name], vocab_size=3072)
    files, result = written(tmp_path / "m.gguf", config, "F32")
    file = GgufFile.open(tmp_path / "m.gguf")
    assert replace(config_from_gguf(file), eos_token_ids=(), bos_token_id=None, pad_token_id=None) == config
    assert generation_from_gguf(file, config) == replace(files.generation, eos_token_ids=())
    ours, theirs = load_directory(files.path, config), load_gguf(file, config)
    assert_same(ours, theirs)
    assert result.weights == config.parameter_count
    assert ("output.weight" in file.tensors) != config.tie_word_embeddings
    assert result.nbytes == (tmp_path / "m.gguf").stat().st_size


def test_fallback_types_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = odd_shape(vocab_size=3072, hidden_size=64, intermediate_size=96)
    with caplog.at_level(logging.WARNING, "deltic"):
        _, result = written(tmp_path / "m.gguf", config, "Q4_K_M")
    kinds = {tensor.name: tensor.type.name for tensor in GgufFile.open(tmp_path / "m.gguf").tensors.values()}
    assert kinds["output.weight"] == "Q8_0" and kinds["token_embd.weight"] == "Q5_0"
    assert kinds["blk.0.ssm_out.weight"] == "F16" and kinds["blk.0.attn_norm.weight"] == "F32"
    assert len(caplog.records) == 1 and "do not fit" in caplog.text and sum(result.tensors.values()) == len(kinds)


def test_the_mix_of_q4_k_m(tmp_path: Path) -> None:
    kinds = tuple("full_attention" if block % 4 == 3 else "linear_attention" for block in range(16))
    config = odd_shape(
        vocab_size=3072, hidden_size=256, intermediate_size=256, num_attention_heads=4, head_dim=64,
        rope=RopeConfig(1e4, 6, (1, 1, 1)), linear=LinearConfig(2, 4, 10, 64, 4), num_hidden_layers=16,
        layer_types=kinds, tie_word_embeddings=True)
    written(tmp_path / "m.gguf", config, "Q4_K_M")
    found = {name: tensor.type.name for name, tensor in GgufFile.open(tmp_path / "m.gguf").tensors.items()}
    more = {block for block in range(16) if found[f"blk.{block}.ffn_down.weight"] == "Q6_K"}
    assert more == {0, 1, 4, 7, 10, 13, 14, 15}
    for block, kind in enumerate(kinds):
        name = "attn_v" if kind == "full_attention" else "attn_qkv"
        assert found[f"blk.{block}.{name}.weight"] == ("Q6_K" if block in more else "Q4_K")
        assert found[f"blk.{block}.ffn_up.weight"] == "Q4_K"
    assert found["token_embd.weight"] == "Q6_K"


@pytest.mark.parametrize("name", ["odd", "qwen3 next"])
def test_checkpoints_with_packed_projections(tmp_path: Path, name: str) -> None:
    """The file is the same, whichever way the checkpoint spells its projections."""
    config, path = replace(SHAPES[name], vocab_size=3072), tmp_path / "m.gguf"
    files, _ = written(path, config, "F32")
    plainly, linear = load_directory(files.path, config), config.linear
    assert linear is not None
    packed = dict(plainly)
    for block in config.linear_layers:
        prefix = f"model.layers.{block}.linear_attn."
        qkv, z = packed.pop(prefix + "in_proj_qkv.weight"), packed.pop(prefix + "in_proj_z.weight")
        parts = [*qkv.split([linear.key_dim, linear.key_dim, linear.value_dim]), z]
        groups = [part.reshape(linear.num_key_heads, -1, config.hidden_size) for part in parts]
        packed[prefix + "in_proj_qkvz.weight"] = torch.cat(groups, 1).reshape(-1, config.hidden_size).contiguous()
        heads = [packed.pop(f"{prefix}in_proj_{part}.weight").unflatten(0, (linear.num_key_heads, -1)) for part in "ba"]
        packed[prefix + "in_proj_ba.weight"] = torch.cat(heads, 1).reshape(-1, config.hidden_size).contiguous()
    save_file(packed, files.path / "model.safetensors")
    convert(files, tiny_texts(), "packed", path, "F32")
    assert_same(plainly, load_gguf(path, config))


def test_an_irregular_pattern_has_no_interval() -> None:
    metadata = config_to_gguf(odd_shape())
    assert "qwen35.full_attention_interval" not in metadata
    assert metadata["qwen35.attention.recurrent_layers"] == [True, False, True, True, False, True]
    assert config_to_gguf(ModelConfig.preset("0.8b"))["qwen35.full_attention_interval"] == 4
    assert config_to_gguf(ATTENTION_ALONE)["qwen35.full_attention_interval"] == 1
    assert not {"qwen3.ssm.inner_size", "qwen3.attention.recurrent_layers"} & config_to_gguf(QWEN3).keys()


def test_tokenizers_in_gguf_keys() -> None:
    texts = tiny_texts()
    config = odd_shape(vocab_size=3080)
    named = replace(texts, templates={"default": "d", "tool_use": "t"})
    metadata = tokenizer_to_gguf(named, config, (3065, 3063, 17))
    assert len(metadata["tokenizer.ggml.tokens"]) == 3080 and metadata["tokenizer.ggml.token_type"][-1] == 5
    assert metadata["tokenizer.ggml.eos_token_id"] == 3065 and metadata["tokenizer.ggml.eot_token_id"] == 17
    assert tokenizer_from_gguf({**metadata, "tokenizer.ggml.token_type": np.array(
        metadata["tokenizer.ggml.token_type"])}).templates == named.templates
    for text in ("{", "[]", '{"model": {"type": "Unigram", "vocab": []}}'):
        with pytest.raises(ModelError, match=r"tokenizer\.json"):
            tokenizer_to_gguf(replace(texts, tokenizer=text), config, ())


# The file


def test_values_of_all_kinds(tmp_path: Path) -> None:
    metadata = {"a.bool": True, "a.int": 7, "a.negative": -7, "a.large": 1 << 40, "a.float": 0.5, "a.text": "żółw",
                "a.ints": [1, -2], "a.none": [], "a.flags": [True, False], "a.texts": ["x", "ü"],
                "a.floats": np.array([0.5, 2.0], np.float32)}
    write_gguf(tmp_path / "v.gguf", metadata, [], [])
    reader = gguf.GGUFReader(tmp_path / "v.gguf")
    for key, value in metadata.items():
        assert reader.fields[key].contents() == (value.tolist() if isinstance(value, np.ndarray) else value)


def new_tensor(rows: int) -> NewTensor:
    return NewTensor("t", BY_NAME["F32"], (rows, 4))


def test_errors_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, data = tmp_path / "m.gguf", np.zeros(1 << 16, np.uint8)

    def interrupted() -> object:
        yield data
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_gguf(path, {}, [new_tensor(1 << 13)], [interrupted()])  # type: ignore[list-item]
    with pytest.raises(ModelError, match="65536 bytes, not the 131072"):
        write_gguf(path, {}, [new_tensor(1 << 13)], [[data]])
    monkeypatch.setattr("shutil.disk_usage", lambda place: type("Usage", (), {"free": 1000}))
    with pytest.raises(DelticError, match=r"m\.gguf cannot be written: it needs [0-9.]+ MB, but its disk has"):
        write_gguf(path, {}, [new_tensor(1 << 12)], [[data]])
    assert left_in(tmp_path) == []
    with pytest.raises(DelticError, match=r"nowhere/m\.gguf cannot be written: No such file"):
        write_gguf(tmp_path / "nowhere" / "m.gguf", {}, [], [])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_named_and_the_old_file_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    path.write_text("old")
    monkeypatch.setattr("os.getpid", lambda: 77)
    (tmp_path / ".m.gguf.77.part").symlink_to("/dev/full")
    with pytest.raises(DelticError, match=r"m\.gguf cannot be written: No space left on device"):
        write_gguf(path, {}, [new_tensor(1 << 16)], [[np.zeros(1 << 20, np.uint8)]])
    assert left_in(tmp_path) == ["m.gguf"] and path.read_text() == "old"


def test_nan_weights_named_and_no_file_left(tmp_path: Path) -> None:
    config = odd_shape(vocab_size=3072, hidden_size=64)
    name = "model.layers.1.self_attn.q_proj.weight"
    bad = torch.full((2 * 6 * 14, 64), math.nan)
    with pytest.raises(ModelError, match=r"tensor 'blk\.1\.attn_q\.weight': it has values that Q8_0 cannot hold"):
        written(tmp_path / "m.gguf", config, "Q8_0", **{name: bad})
    assert left_in(tmp_path) == [] and gguf_name(name, "qwen3_5", config.layer_types)[0] == "blk.1.attn_q.weight"


# The command


def test_convert_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tiny.gguf"
    assert main(["convert", "tiny", str(path), "--json", "--name", "Tiny One", "--mtp", "none"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["type"] == "Q8_0" and facts["bytes"] == path.stat().st_size and facts["weights"] == 4548808
    assert facts["tensors"] == {"Q8_0": 63, "F32": 45} and 8.5 < facts["bits_per_weight"] < 10
    assert GgufFile.open(path).metadata["general.name"] == "Tiny One"
    assert main(["convert", "tiny", str(path)]) == 2
    assert "exists; give --force to replace it" in capsys.readouterr().err
    assert main(["convert", "tiny", str(path), "--force", "--type", "F16", "--mtp", "none"]) == 0
    assert "tensors          63 F16, 45 F32" in capsys.readouterr().out
    assert open_model(path).config.dtype == "float16"
    before = path.read_bytes()
    (tmp_path / "link").symlink_to(tmp_path)
    assert main(["convert", str(path), str(tmp_path / "link" / path.name), "--force", "--type", "Q4_0"]) == 2
    assert "is a file of SRC and would be overwritten" in capsys.readouterr().err and path.read_bytes() == before


@pytest.mark.parametrize(("argv", "message"), [
    (["tiny", "m.bin"], "m.bin must end in .gguf"), (["tiny", "/nowhere/m.gguf"], "there is no directory '/nowhere'"),
    (["tiny", "m.gguf", "--type", "Q9"], "--type"), (["/nowhere", "m.gguf"], "/nowhere"), (["tiny"], "DST.gguf")])
def test_convert_command_refusals(argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                  capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["convert", *argv]) == 2
    assert message in capsys.readouterr().err and left_in(tmp_path) == []


def test_convert_command_types() -> None:
    choices = next(action.choices for action in command_parser("convert")._actions if action.dest == "type")
    assert set(choices or ()) == set(FILE_TYPES)
