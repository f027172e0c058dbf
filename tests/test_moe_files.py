"""Files of mixtures of experts: whole tensors, one by one, or GGUF, it is the same model to the bit; what is missing is
named; draft heads with experts; what `inspect` says of a token."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_models import gguf_tensors, metadata_of, write
from safetensors.torch import load_file, save_file
from support import load_directory, load_gguf, moe_shape, numbers, session_over, tiny_texts
from test_gguf_metadata import TINY, tokenizer_metadata
from test_mtp_weights import save_shards
from torch import Tensor

from deltic.cli import main
from deltic.config import EngineConfig, ExpertsConfig, GenerationDefaults, LinearConfig, ModelConfig, RopeConfig
from deltic.engine.loading import RandomModel, load
from deltic.errors import ModelError
from deltic.loader.checkpoint import directory_checkpoint
from deltic.loader.dummy import random_head, random_weights
from deltic.loader.gguf.config import config_from_gguf
from deltic.loader.gguf.convert import convert
from deltic.loader.gguf.file import GgufFile
from deltic.loader.gguf.load import load_packed
from deltic.loader.model_files import ModelFiles, open_model
from deltic.loader.mtp_head import extract_head
from deltic.loader.names import expected_tensors
from deltic.loader.quantize import quantize_parts, quantize_tensors
from deltic.ops.cpu import missing
from deltic.ops.parts import one_device
from deltic.ops.quantized import QTensor, host_form
from deltic.ops.types import MoeWeights

STACK = ".mlp.experts."
needs_kernels = pytest.mark.skipif(bool(missing()), reason=str(missing()))
TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text", "vocab_size": 29, "hidden_size": 12, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_key_head_dim": 5, "linear_value_head_dim": 7, "linear_conv_kernel_dim": 3,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 99, "eos_token_id": 3, "tie_word_embeddings": True,
    "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 10, "shared_expert_intermediate_size": 6,
    "mtp_num_hidden_layers": 1, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}
CONFIG = ModelConfig.from_hf(TEXT)


def split(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """With a tensor for each expert."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        front, stack, part = name.partition(STACK)
        found |= ({f"{front}{STACK}{expert}.{part}": one.clone() for expert, one in enumerate(tensor)} if stack
                  else {name: tensor})
    return found


def fused(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """With gates and ups of all experts in one tensor, and names as transformers writes them."""
    found = dict(weights)
    for name in weights:
        if name.endswith(f"{STACK}gate_proj.weight"):
            up = name.replace("gate_proj", "up_proj")
            found[name.replace("gate_proj.weight", "gate_up_proj")] = torch.cat([found.pop(name), found.pop(up)], 1)
        elif name.endswith(f"{STACK}down_proj.weight"):
            found[name.removesuffix(".weight")] = found.pop(name)
    return found


def saved(directory: Path, tensors: dict[str, Tensor], text: dict[str, Any] = TEXT) -> Path:
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(text))
    return directory


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], config: ModelConfig = CONFIG) -> None:
    assert list(found) == list(expected_tensors(config))
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor) and found[name].is_contiguous(), name


# The same model, however it is spelled


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stacked_and_single_experts_equal(tmp_path: Path, dtype: Any) -> None:
    weights = random_weights(CONFIG, dtype)
    for name, tensors in (("ours", weights), ("split", split(weights)), ("fused", fused(weights))):
        assert_same(load_directory(saved(tmp_path / name, tensors), CONFIG, dtype), weights)


def test_same_answer_from_every_format(tmp_path: Path) -> None:
    """Tensor by tensor, fused, and GGUF with and without fused gates and ups, as numbers and packed: equal logits.

    The decays are numbers that come through a logarithm unharmed, and the value heads are in one order everywhere."""
    text = {**TEXT, "vocab_size": 3072, "linear_num_value_heads": 2, "mtp_num_hidden_layers": 0, "dtype": "float32"}
    config = ModelConfig.from_hf(text)
    weights = random_weights(config, "float32", initializer_range=0.3)
    for name in weights:
        if name.endswith("A_log"):
            weights[name].zero_()
    places = [saved(tmp_path / "split", split(weights), text), saved(tmp_path / "fused", fused(weights), text)]
    tokenizer = tokenizer_metadata(TINY)
    tensors = gguf_tensors(config, weights)
    both = {name: array for name, array in tensors.items() if "_gate_exps" not in name and "_up_exps" not in name}
    for block in range(config.num_hidden_layers):
        parts = [tensors[f"blk.{block}.ffn_{part}_exps.weight"] for part in ("gate", "up")]
        both[f"blk.{block}.ffn_gate_up_exps.weight"] = np.concatenate(parts, 1)
    for name, arrays in (("m.gguf", tensors), ("both.gguf", both)):
        places.append(write(tmp_path / name, {**metadata_of(config), **tokenizer}, arrays))
    tokens = numbers(0, 40, config.vocab_size)

    def logits(place: Path, kept: str) -> Tensor:
        runtime = load(str(place), EngineConfig(dtype="float32", memory="8MiB", threads=1, packed_weights=kept))
        return session_over(runtime, budget=64).prefill(tokens, all_logits=True)

    expected = logits(places[0], "off")
    assert len(set(expected.argmax(-1).tolist())) > 20
    for place in places[1:]:
        for kept in ("off", "on") if place.suffix == ".gguf" and not missing() else ("off",):
            assert torch.equal(logits(place, kept), expected), (place.name, kept)


BLOCKY = moe_shape(hidden_size=256, experts=ExpertsConfig(4, 2, 256, 512), num_attention_heads=4, head_dim=64,
                   rope=RopeConfig(1e4, 6, (1, 1, 1)), linear=LinearConfig(2, 4, 10, 64, 4), vocab_size=3072)


def converted(tmp_path: Path, config: ModelConfig, kind: str) -> GgufFile:
    directory = saved(tmp_path / "model", split(random_weights(config, "float32")))
    files = ModelFiles(directory, config, GenerationDefaults(eos_token_ids=(3065,)))
    convert(files, tiny_texts(), "a mixture", tmp_path / f"{kind}.gguf", kind)
    return GgufFile.open(tmp_path / f"{kind}.gguf")


@needs_kernels
@pytest.mark.parametrize("kind", [pytest.param("F32", marks=pytest.mark.slow), "BF16",
                                  pytest.param("Q8_0", marks=pytest.mark.slow), "Q4_K_M"])
def test_converted_files_stay_packed(tmp_path: Path, kind: str) -> None:
    file = converted(tmp_path, BLOCKY, kind)
    assert replace(config_from_gguf(file), eos_token_ids=(), bos_token_id=None, pad_token_id=None, dtype="float32"
                   ) == BLOCKY
    kinds = {name: stored.type.name for name, stored in file.tensors.items()}
    assert kinds["blk.0.ffn_gate_inp.weight"] == kinds["blk.0.ffn_gate_inp_shexp.weight"] == "F32"
    assert file.tensors["blk.0.ffn_gate_inp_shexp.weight"].shape == (256,)
    assert file.tensors["blk.0.ffn_down_exps.weight"].shape == (4, 256, 256)
    if kind == "Q4_K_M":
        assert kinds["blk.0.ffn_gate_exps.weight"] == "Q4_K" and kinds["blk.2.ffn_down_exps.weight"] == "Q6_K"
    plain, packed = load_gguf(file, BLOCKY, "float32"), load_packed(file, BLOCKY)
    for part in ("gate", "up", "down"):
        name = f"model.layers.0.mlp.experts.{part}_proj.weight"
        stack = packed[name]
        assert isinstance(stack, tuple) and len(stack) == 4
        for expert, matrix in enumerate(stack):
            assert isinstance(matrix, QTensor)
            assert torch.allclose(matrix.dequantize(), plain[name][expert], rtol=1e-6, atol=1e-7)


@needs_kernels
def test_quantized_as_it_is_loaded_like_the_file(tmp_path: Path) -> None:
    file = converted(tmp_path, BLOCKY, "Q4_K_M")
    wanted = load_packed(file, BLOCKY)
    found = quantize_tensors(iter(random_weights(BLOCKY, "float32").items()), "q4_k", BLOCKY)
    for name in (f"model.layers.1.mlp.experts.{part}_proj.weight" for part in ("gate", "up", "down")):
        ours, theirs = found[name], wanted[name]
        assert isinstance(ours, tuple) and isinstance(theirs, tuple)
        for one, other in zip(ours, theirs, strict=True):
            assert isinstance(one, QTensor) and isinstance(other, QTensor)
            assert one.type == other.type and torch.equal(one.data, other.data)
    assert isinstance(found["model.layers.0.mlp.gate.weight"], Tensor)
    runtime = load(RandomModel(shape=BLOCKY), EngineConfig(dtype="float32", memory="8MiB", threads=1, quant="q4_k"))
    mlp = runtime.decoder.weights.layers[0].mlp
    assert isinstance(mlp, MoeWeights) and isinstance(mlp.experts[3].gate_up, tuple)
    assert runtime.step is not None


@needs_kernels
@pytest.mark.parametrize("spelling", ["split", "fused"])
def test_quantizing_holds_one_tensor_at_a_time(tmp_path: Path, spelling: str) -> None:
    """The model in its files' dtype is never in memory as a whole."""
    weights = random_weights(BLOCKY, "bfloat16")
    form = {"split": split, "fused": fused}[spelling]
    directory = saved(tmp_path / "model", form(weights))
    files = ModelFiles(directory, BLOCKY, GenerationDefaults())
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def watched() -> Iterator[Any]:
        nonlocal most
        source = files.parts("bfloat16", one_device("cpu"))
        while (item := next(source, None)) is not None:
            alive.append(weakref.ref(item[2]))
            most = max(most, sum(tensor.nbytes for ref in alive if (tensor := ref()) is not None))
            yield item
            del item

    found, = quantize_parts(watched(), "q8_0", BLOCKY, [host_form()])
    assert set(found) == set(weights)
    plain = sum(tensor.nbytes for tensor in found.values() if isinstance(tensor, Tensor))
    largest = max(tensor.nbytes for tensor in weights.values())
    assert most <= 2 * largest + plain < sum(tensor.nbytes for tensor in weights.values())


# What is missing


MISSING = {
    "an expert": ("split", "model.layers.2.mlp.experts.1.up_proj.weight", r"up_proj.*1 of 3 experts.*expert 1"),
    "the last expert": ("split", "model.layers.0.mlp.experts.2.down_proj.weight", r"1 of 3 experts.*expert 2"),
    "a fused tensor": ("fused", "model.layers.1.mlp.experts.gate_up_proj", r"2 tensors are missing.*gate_proj"),
    "the router": ("fused", "model.layers.1.mlp.gate.weight", r"1 tensors are missing.*mlp\.gate"),
    "the shared gate": ("split", "model.layers.3.mlp.shared_expert_gate.weight", r"shared_expert_gate"),
}


@pytest.mark.parametrize("case", MISSING)
def test_missing_tensors_named(tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    form, name, message = MISSING[case]
    tensors = {"split": split, "fused": fused}[form](random_weights(CONFIG, "float32"))
    del tensors[name]
    directory = saved(tmp_path / "model", tensors)
    with pytest.raises(ModelError, match=message):
        load_directory(directory, CONFIG)
    assert main(["run", str(directory), "hello"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_surplus_and_contradicting_tensors(tmp_path: Path) -> None:
    whole = random_weights(CONFIG, "float32")
    layer = "model.layers.0.mlp.experts."
    cases: dict[str, dict[str, Tensor]] = {
        "4 experts, but 3 in config.json": {f"{layer}3.up_proj.weight": torch.zeros(10, 12)},
        r"expert 1 is F32 \[9, 12\], others are F32 \[10, 12\]": {f"{layer}1.up_proj.weight": torch.zeros(9, 12)},
        "expert 1 is BF16": {f"{layer}1.up_proj.weight": torch.zeros(10, 12, dtype=torch.bfloat16)},
        "given twice, as a whole and expert by expert": {f"{layer}up_proj.weight": torch.zeros(3, 10, 12)},
        "given twice": {f"{layer}gate_up_proj": torch.zeros(3, 20, 12)},
    }
    for message, more in cases.items():
        with pytest.raises(ModelError, match=message):
            load_directory(saved(tmp_path / "model", {**split(whole), **more}), CONFIG)
    dense = ModelConfig.from_hf({**TEXT, "model_type": "qwen3_5_text", "intermediate_size": 10, "num_experts": 0})
    with pytest.raises(ModelError, match=r"config\.json"):
        load_directory(saved(tmp_path / "model", split(whole)), dense)


def test_missing_shard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = split(random_weights(CONFIG, "float32"))
    names = list(weights)
    directory = tmp_path / "model"
    directory.mkdir()
    save_shards(directory, {f"model-{start}.safetensors": {name: weights[name] for name in names[start::2]}
                            for start in (0, 1)})
    (directory / "config.json").write_text(json.dumps(TEXT))
    load_directory(directory, CONFIG)
    sorted(directory.glob("*.safetensors"))[1].unlink()
    assert main(["run", str(directory), "hello"]) == 2
    assert "names the shard" in capsys.readouterr().err


def test_experts_per_token_within_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = saved(tmp_path / "model", split(random_weights(CONFIG, "float32")), {**TEXT, "num_experts_per_tok": 4})
    assert main(["inspect", str(directory)]) == 2
    assert "num_experts_per_tok (4) must be between 1 and num_experts (3)" in capsys.readouterr().err


def test_gguf_files_without_experts(tmp_path: Path) -> None:
    weights, config = random_weights(CONFIG, "float32"), replace(CONFIG, num_mtp_layers=0)
    tensors = gguf_tensors(config, weights)
    del tensors["blk.2.ffn_up_exps.weight"]
    with pytest.raises(ModelError, match=r"1 tensors are missing.*blk\.2\.ffn_up_exps\.weight"):
        load_gguf(write(tmp_path / "m.gguf", metadata_of(config), tensors), config)
    metadata = {**metadata_of(config), "qwen35moe.expert_used_count": 9}
    with pytest.raises(ModelError, match=r"num_experts_per_tok \(9\)"):
        config_from_gguf(GgufFile.open(write(tmp_path / "k.gguf", metadata, tensors)))


# Draft heads


@pytest.fixture(params=["ours", "split", "fused"])
def with_head(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    form = {"ours": dict, "split": split, "fused": fused}[request.param]
    yield saved(tmp_path / "model", {**form(random_weights(CONFIG, "float32")), **form(random_head(CONFIG, "float32"))})


def test_a_head_is_loaded_and_extracted(with_head: Path, tmp_path: Path) -> None:
    wanted = random_head(CONFIG, "float32")
    found = open_model(with_head).load_head("float32", "cpu")
    assert found is not None and found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name  # type: ignore[arg-type]
    extract_head(directory_checkpoint(with_head), tmp_path / "mtp.safetensors", "a model")
    stored = load_file(tmp_path / "mtp.safetensors")
    assert not any(f"{STACK}0." in name for name in stored)
    other = saved(tmp_path / "other", random_weights(CONFIG, "float32"))
    (tmp_path / "mtp.safetensors").rename(other / "mtp.safetensors")
    again = open_model(other).load_head("float32", "cpu")
    assert again is not None
    for name, tensor in wanted.items():
        assert torch.equal(again[name], tensor), name  # type: ignore[arg-type]


def test_extracting_needs_little_memory(with_head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read and written piece by piece, whatever the size of a projection."""
    checkpoint, counts = directory_checkpoint(with_head), []
    monkeypatch.setattr("deltic.loader.mtp_head._PIECE", 100)

    def read(name: str, offset: int, count: int) -> bytes:
        counts.append(count)
        return checkpoint.read(name, offset, count)

    header = max(len(json.dumps({name: [] for name in load_file(with_head / "model.safetensors")})) * 4, 1 << 14)
    extract_head(replace(checkpoint, read=read), tmp_path / "mtp.safetensors", "a model")
    assert sum(count == 100 for count in counts) > 50 and max(counts) < header


@pytest.mark.parametrize("gates", [("gate",), ("shared_expert_gate",), ("gate", "shared_expert_gate")])
def test_head_without_gates_uses_last_attention_layer(
        tmp_path: Path, gates: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    text = {**TEXT, "vocab_size": 3072, "num_hidden_layers": 8}
    config = ModelConfig.from_hf(text)
    trunk, head = random_weights(config, "float32"), random_head(config, "float32")
    whole = {**head, **{f"mtp.layers.0.mlp.{gate}.weight": trunk[f"model.layers.7.mlp.{gate}.weight"].clone()
                        for gate in gates}}
    lacking = {name: tensor for name, tensor in whole.items() if not any(f"mlp.{gate}." in name for gate in gates)}
    routers = []
    for name, tensors in (("whole", whole), ("lacking", lacking)):
        directory = saved(tmp_path / name, {**trunk, **tensors}, text)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (directory / file).write_bytes((TINY / file).read_bytes())
        caplog.clear()
        runtime = load(str(directory), EngineConfig(dtype="float32", memory="8MiB", threads=1, speculate="mtp:2"))
        assert runtime.mtp is not None and isinstance(runtime.mtp.layer.mlp, MoeWeights)
        router = runtime.mtp.layer.mlp.router
        assert not isinstance(router, tuple)
        routers.append(router.dequantize() if isinstance(router, QTensor) else router)
    assert torch.equal(routers[0], routers[1]) and "the draft head lacks" in caplog.text


def test_an_expert_of_a_head_that_is_missing(tmp_path: Path) -> None:
    head = split(random_head(CONFIG, "float32"))
    del head["mtp.layers.0.mlp.experts.1.up_proj.weight"]
    directory = saved(tmp_path / "model", {**random_weights(CONFIG, "float32"), **head})
    with pytest.raises(ModelError, match=r"mtp\.layers\.0\.mlp\.experts\.up_proj.*1 of 3 experts"):
        open_model(directory).load_head("float32", "cpu")


# What a token reads


def test_inspect_counts_bytes_per_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--random", "qwen3.5-35b-a3b", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["config"]["experts"] == "8 of 256 a token, 512 wide, and a shared one of 512"
    weights = facts["weights"]
    assert weights["parameters"] == 34_660_610_688 and weights["active_parameters"] == 3_454_988_928
    # all active parameters in two bytes, but for the embedding, of which it is a row
    read = (3_454_988_928 - 248320 * 2048) * 2 / (1 << 20)
    assert weights["mib_read_per_token"] == pytest.approx(read, rel=2e-3)
    directory = saved(tmp_path / "model", split(random_weights(CONFIG, "float32")), {**TEXT, "dtype": "float32"})
    runtime = load(str(directory), EngineConfig(memory="8MiB", threads=1, speculate="off", ops=("torch",)))
    sizes = {name: tensor.nbytes for name, tensor in random_weights(CONFIG, "float32").items()}
    idle = sum(size for name, size in sizes.items() if STACK in name) // 3
    assert runtime.decoder.token_bytes() == sum(sizes.values()) - idle
