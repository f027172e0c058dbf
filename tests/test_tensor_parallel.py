"""A model that is split over N devices gives the answers of one device.

With the compiled kernels and the reference ops bit by bit, with torch ops up to rounding.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from support import (
    DEVICE,
    HF_SHAPE,
    TAU,
    Answers,
    drain,
    every,
    greedy,
    lively,
    numbers,
    odd_shape,
    qwen2_shape,
    session_over,
    small_runtime,
    split_shape,
    take,
    tiny_texts,
    transformers_vision_model,
)
from test_constraint import Quarter
from torch import Tensor
from vision_models import picture

from deltic import LLM, SamplingParams
from deltic.cli import main
from deltic.config import (
    DType,
    EngineConfig,
    ExpertsConfig,
    GenerationDefaults,
    LinearConfig,
    ModelConfig,
    RopeConfig,
)
from deltic.config.vision import ImageConfig
from deltic.embeddings.encoder import Encoder
from deltic.engine.engine import Engine
from deltic.engine.loading import RandomModel, load
from deltic.errors import ConfigError
from deltic.loader.dummy import random_weights
from deltic.loader.gguf.blocks import BY_NAME
from deltic.loader.gguf.convert import convert
from deltic.loader.model_files import ModelFiles, open_model
from deltic.loader.quantize import quantized
from deltic.model.tensor_parallel import check_degree
from deltic.ops.capabilities import check_devices
from deltic.ops.cpu import missing
from deltic.ops.cuda.quantized import tiles_of
from deltic.ops.memory import Arena
from deltic.ops.quantized import QTensor, host_form, pack_tensor
from deltic.params import EngineRequest
from deltic.runner.model_runner import ModelRunner
from deltic.runner.weights import check_gpus
from deltic.session import Session
from deltic.vision.prompt import with_pictures

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the devices are virtual ones of a CPU")
needs_kernels = pytest.mark.skipif(bool(missing()), reason=str(missing()))
BACKENDS = [pytest.param((), id="kernels", marks=needs_kernels), pytest.param(("torch",), id="torch")]
OPTIONS: dict[str, Any] = {"dtype": "float32", "memory": "16MiB", "max_batch": 4, "threads": 1, "device": "cpu"}


def wide_shape(**changes: Any) -> ModelConfig:
    """A shape whose quantized matrices divide over 4 devices."""
    return split_shape(**{"num_hidden_layers": 4, "layer_types": odd_shape().layer_types[:4], "hidden_size": 256,
                          "intermediate_size": 1280, "head_dim": 128, "rope": RopeConfig(1e4, 32, (6, 5, 5)),
                          "linear": LinearConfig(4, 8, 32, 128, 4), **changes})


BARE = {"num_hidden_layers": 3, "layer_types": ("full_attention",) * 3, "attention_output_gate": False, "linear": None}
SHAPES = {
    "hybrid": split_shape(),
    "six heads": split_shape(num_attention_heads=6, linear=LinearConfig(2, 6, 10, 16, 4)),
    "experts": split_shape(architecture="qwen3_5_moe", intermediate_size=0, experts=ExpertsConfig(11, 3, 20, 80)),
    "qwen3": split_shape(**BARE, architecture="qwen3", rope=RopeConfig(1e4, 14, ()), tie_word_embeddings=True),
    "qwen3, experts": split_shape(**BARE, architecture="qwen3_moe", intermediate_size=0, rope=RopeConfig(1e4, 14, ()),
                                  experts=ExpertsConfig(9, 2, 24, normalised=False)),
    "qwen2": qwen2_shape(hidden_size=64, intermediate_size=208, head_dim=16, num_attention_heads=8,
                         num_key_value_heads=4)}
QUANTIZED = {"hybrid": wide_shape(), "experts": wide_shape(
    architecture="qwen3_5_moe", intermediate_size=0, experts=ExpertsConfig(9, 2, 256, 512))}
Found = dict[tuple[str, int], tuple[list[int], list[float]]]


@cache
def runtime_of(kind: str, tp: int, **options: Any) -> ModelRunner:
    """A split model with random weights. A draft head is there for options that speculate."""
    shape = QUANTIZED[kind] if "quant" in options else SHAPES[kind]
    model = RandomModel(shape=shape, initializer_range=0.1, head="speculate" in options)
    return load(model, EngineConfig(**{**OPTIONS, "speculate": "off", "tp": tp, **options}))


def found(answers: Answers) -> Found:
    return {key: (answer.tokens, [event.logprobs.token for event in answer.events if event.logprobs])
            for key, answer in answers.items()}


def story(runtime: ModelRunner) -> Found:
    """Prompts of several lengths beside each other, one of them aborted; several choices of a prompt; then a prompt
    that goes on after an answer, and one with a constraint. The pool is full of NaN, and small."""
    engine, answers = Engine(small_runtime(runtime, budget=24, pages=60)), Answers()
    vocabulary = runtime.config.vocab_size
    prompts = {name: numbers(seed, 9 + 14 * seed, vocabulary) for seed, name in enumerate(("a", "b", "c", "stopped"))}
    for seed, (name, prompt) in enumerate(prompts.items()):
        engine.add(greedy(prompt, 24, name, logprobs=2, temperature=float(seed > 0), seed=seed))
    engine.add(greedy(numbers(9, 20, vocabulary), 12, "choices", logprobs=0, n=2, temperature=1.0, seed=3))
    while engine.has_work:
        take(answers, engine.step())
        engine.check()
        if ("stopped", 0) in answers and len(answers["stopped", 0].tokens) >= 5:
            engine.abort("stopped")
    again = (*prompts["b"], *answers["b", 0].tokens, 7, 8, 9)
    engine.add(greedy(again, 12, "again", logprobs=0))
    engine.add(replace(greedy(prompts["a"], 12, "constrained", logprobs=0), constraint=Quarter))
    drain(engine, answers)
    usage = answers["again", 0].last.usage
    assert usage and usage.cached_tokens >= 40, "nothing of the first answer was reused"
    assert answers["stopped", 0].last.finish == "abort"
    lively(answers["b", 0].tokens)
    return found(answers)


def same(one: Found, other: Found, exact: bool = True) -> None:
    """Tokens, and log-probabilities to the last bit if `exact`."""
    assert one.keys() == other.keys()
    for key in one:
        assert one[key][0] == other[key][0], key
        assert other[key][1] == (one[key][1] if exact else pytest.approx(one[key][1], rel=0, abs=TAU)), key


@cache
def on_one_device(kind: str, **options: Any) -> Found:
    return story(runtime_of(kind, 1, **options))


def degrees() -> Iterator[Any]:
    for kind, shape in SHAPES.items():
        for tp in (2, 4, 8):
            try:
                check_degree(shape, tp)
            except ConfigError:
                continue
            slow = tp == 8 or (kind not in ("hybrid", "experts") and tp == 4)
            yield pytest.param(kind, tp, marks=pytest.mark.slow if slow else ())


@pytest.mark.covering
@pytest.mark.parametrize("ops", BACKENDS)
@pytest.mark.parametrize(("kind", "tp"), list(degrees()))
def test_answers_are_those_of_one_device(kind: str, tp: int, ops: tuple[str, ...]) -> None:
    same(on_one_device(kind, ops=ops), story(runtime_of(kind, tp, ops=ops)), exact=not ops)


@pytest.mark.parametrize("kind", ["hybrid", "experts"])
def test_reference_ops_split_a_model_too(kind: str) -> None:
    """They are slow: a short prompt alone."""
    tokens, ops = numbers(1, 21, 509), ("reference",)
    one, two = (session_over(runtime_of(kind, tp, ops=ops), batch=1).prefill(tokens, all_logits=True) for tp in (1, 2))
    assert torch.equal(one, two)
    assert len({*one.argmax(-1).tolist()}) > 10


@needs_kernels
@pytest.mark.covering
@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"dtype": "float16"}, {"kv_dtype": "int4"},
                                     {"kv_dtype": "int8"}, {"quant": "q8_0"},
                                     {"quant": "q4_k", "dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("kind", ["hybrid", "experts"])
@pytest.mark.parametrize("tp", [2, 4])
def test_bits_do_not_depend_on_the_devices_in_any_format(kind: str, tp: int, options: dict[str, Any]) -> None:
    same(on_one_device(kind, **options), story(runtime_of(kind, tp, **options)))


@needs_kernels
@pytest.mark.parametrize("file_type", every(2, ["F32", "Q8_0", "Q4_K_M"]))
def test_a_gguf_file_is_split(file_type: str, tmp_path: Path) -> None:
    """Its value heads are in another order: those of a device lie apart."""
    shape = wide_shape(linear=LinearConfig(4, 8, 32, 256, 4), vocab_size=3072)
    save_file(random_weights(shape, "float32", initializer_range=0.1), tmp_path / "model.safetensors")
    files, path = ModelFiles(tmp_path, shape, GenerationDefaults(eos_token_ids=(3065,))), tmp_path / "model.gguf"
    convert(files, tiny_texts(), "model", path, file_type)
    one, two, four = (load(str(path), EngineConfig(**OPTIONS, packed_weights="on", tp=tp)) for tp in (1, 2, 4))
    assert four.pools.shards[0].tiled and len(four.decoder.shards) == 4
    answers = story(one)
    same(answers, story(two))
    same(answers, story(four))


@pytest.mark.covering
@pytest.mark.parametrize("ops", BACKENDS)
@pytest.mark.parametrize(("kind", "tokens_drafted"), [("hybrid", 0), ("hybrid", 256), ("experts", 0)])
def test_a_draft_head_is_split(kind: str, tokens_drafted: int, ops: tuple[str, ...]) -> None:
    """Drafts are those of one device, and change no answer. A shortened head has rows of all devices."""
    options: dict[str, Any] = {"speculate": "mtp:3", "ops": ops, "draft_vocab": tokens_drafted}
    one, two = runtime_of(kind, 1, **options), runtime_of(kind, 2, **options)
    assert two.mtp and len(two.mtp.shards) == 2 and (two.mtp.vocabulary is not None) == (tokens_drafted > 0)
    tokens = numbers(2, 40, 509)
    drafts = []  # before the drafting threads give rows to other tokens, sooner or later
    for runtime in (one, two):
        session = session_over(runtime, batch=1)
        session.commit(tokens)
        drafts.append(session.draft(7, 4, logits=True))
    assert drafts[0][0] == drafts[1][0]
    torch.testing.assert_close(drafts[1][1], drafts[0][1], rtol=0, atol=TAU)
    same(story(one), story(two), exact=not ops)


@needs_kernels
@pytest.mark.parametrize("tp", [2, 4])
def test_drafts_of_n_grams_change_no_answer(tp: int) -> None:
    same(on_one_device("hybrid"), story(runtime_of("hybrid", tp, speculate="ngram:3")))


def test_pictures_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rope = {**HF_SHAPE["rope_parameters"], "partial_rotary_factor": 6 / 16}
    for key, value in (("head_dim", 16), ("linear_value_head_dim", 16), ("rope_parameters", rope)):
        monkeypatch.setitem(HF_SHAPE, key, value)
    transformers_vision_model(tmp_path)
    tower = open_model(str(tmp_path)).vision
    assert tower
    pixels = picture([Image.fromarray(np.random.default_rng(1).integers(0, 256, (40, 24, 3), dtype=np.uint8))],
                     ImageConfig(min_pixels=256, max_pixels=2560), tower.tower)
    ids = [*range(9), tower.tower.image_token_id, *range(20, 30)]
    prompt = with_pictures(ids, [pixels], tower.tower)[0]
    answers = []
    for tp in (1, 2):
        engine = Engine(load(str(tmp_path), EngineConfig(**{**OPTIONS, "tp": tp})))
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0,
                                logit_bias=dict.fromkeys(range(250, 307), -100.0))
        engine.add(EngineRequest("a", prompt, params))
        answers.append(found(drain(engine)))
    same(answers[0], answers[1])


# Sessions and tiers


@needs_kernels
@pytest.mark.parametrize("kind", ["hybrid", "qwen3"])
def test_sessions_return_to_snapshots(kind: str) -> None:
    tokens, logits = numbers(4, 50, 509), []
    for tp in (1, 2, 4):
        session = session_over(runtime_of(kind, tp), batch=3)
        session.commit(tokens[:37])
        snapshot = session.snapshot()
        rows = [session.prefill(tokens[37:], all_logits=True)]
        session.restore(snapshot)
        rows.append(session.step(tokens[3])[None])
        session.restore(snapshot)
        rows.append(session.prefill(tokens[37:], all_logits=True))
        assert torch.equal(rows[0], rows[2])
        logits.append(torch.cat(rows))
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


@needs_kernels
def test_sessions_show_states_and_layers_of_all_devices() -> None:
    sessions = [session_over(runtime_of("hybrid", tp), batch=1) for tp in (1, 2)]
    layers: list[Tensor] = []
    for session in sessions:
        layers.append(session.hidden_states(numbers(4, 30, 509)))
    assert torch.equal(*layers)
    one, two = (session.recurrent_states() for session in sessions)
    assert one.keys() == two.keys() and all(torch.equal(one[layer], two[layer]) for layer in one)
    assert float(one[0].abs().max()) > 0


@needs_kernels
@pytest.mark.parametrize(("written", "read"), [(1, 2), (2, 1), (2, 4), (4, 1)])
def test_prefixes_on_disk_are_read_by_any_number_of_devices(written: int, read: int, tmp_path: Path) -> None:
    shape, prompt = split_shape(vocab_size=300), numbers(5, 70, 300)
    answers = list[Found]()
    for tp in (written, read):
        options = {**OPTIONS, "tp": tp, "cache_dir": str(tmp_path)}
        engine = Engine(load(RandomModel(shape=shape, initializer_range=0.1), EngineConfig(**options)))
        given = prompt if tp == written else (*prompt, *answers[0]["a", 0][0], 7, 8)
        engine.add(greedy(given, 16, "a", logprobs=0))
        events = drain(engine)
        usage = events["a", 0].last.usage
        assert usage and (usage.cached_tokens >= 70) == (tp == read and len(answers) > 0)
        answers.append(found(events))
        engine.close()
    plain = Engine(load(RandomModel(shape=shape, initializer_range=0.1), EngineConfig(**OPTIONS)))
    plain.add(greedy((*prompt, *answers[0]["a", 0][0], 7, 8), 16, "a", logprobs=0))
    same(found(drain(plain)), answers[1])


def test_python_api_takes_tp() -> None:
    """With a schema: the answer is a grammar's, whatever the weights."""
    config = open_model(None).config
    shape = replace(config, linear=LinearConfig(4, 8, 32, 32, 4))
    weights, texts = random_weights(shape, "float32", initializer_range=0.05), []
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"],
              "additionalProperties": False}
    options = {**OPTIONS, "max_context": 512, "speculate": "off"}
    for tp in (1, 2):
        with LLM("tiny", config=shape, weights=weights, **{**options, "tp": tp}) as llm:
            assert len(llm.runtime.decoder.shards) == tp
            texts.append(llm.chat("Is it on?", SamplingParams(temperature=0.0, max_tokens=40),
                                  response_format={"type": "json_schema",
                                                   "json_schema": {"name": "a", "schema": schema}}).text)
    assert texts[0] == texts[1] and "on" in texts[0]


def test_inspect_shows_the_parts_of_each_device(capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for tp in ("1", "2", "4"):
        assert main(["inspect", "--random", "35b-a3b", "--layers", "4", "--memory", "1GiB", "--json", "--tp", tp]) == 0
        found[tp] = json.loads(capsys.readouterr().out)
    assert "devices" not in found["1"]
    assert found["2"]["devices"].keys() == {"embedding_of_all_mib", "device 0", "device 1"}
    two, four = found["2"]["devices"]["device 0"], found["4"]["devices"]["device 3"]
    for part in ("attention", "gated_deltanet", "feed_forward", "head"):
        # norms, routers and replicated K/V heads are on every device
        assert two[f"{part}_mib"] / 2 - 0.1 <= four[f"{part}_mib"] < 0.6 * two[f"{part}_mib"]
    parts = sum(size for name, size in two.items() if name != "cache_mib")
    whole = found["1"]["weights"]["mib"] - found["2"]["devices"]["embedding_of_all_mib"]
    assert whole < 2 * parts < 1.01 * whole
    assert found["2"]["memory"]["page_bytes"] == found["1"]["memory"]["page_bytes"]
    assert found["4"]["memory"]["page_bytes"] == 2 * found["1"]["memory"]["page_bytes"], "it has two K/V heads"


# Bad input


@pytest.mark.parametrize(("options", "words"), [
    ({"tp": 3}, "tp must be one of auto, 1, 2, 4, 8, not 3"), ({"tp": "two"}, "tp must be one of"),
    ({"tp": True}, "tp must be one of"), ({"tp": 2.0}, "tp must be one of"),
    ({"tp": 2, "device": "cuda", "debug_layers": True}, "not possible on GPUs with debug_layers or ops"),
    ({"tp": 2, "device": "cuda", "ops": ("reference",)}, "not possible on GPUs with debug_layers or ops"),
    ({"tp": 2, "expert_memory": "1GiB", "device": "cpu"}, "not possible with expert_memory")])
def test_bad_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        EngineConfig(**options)
    assert caught.value.option == "tp"


@pytest.mark.parametrize(("device", "devices"), [("cuda:0,1", ["cuda:0", "cuda:1"]),
                                                 ("cuda:2,3,4,5", ["cuda:2", "cuda:3", "cuda:4", "cuda:5"])])
def test_a_list_of_gpus_sets_the_degree(device: str, devices: list[str]) -> None:
    options = EngineConfig(device=device)
    assert options.devices == devices and options.shards == len(devices)
    assert replace(options, max_batch=3).devices == EngineConfig(device=device, tp=len(devices)).devices == devices


@pytest.mark.parametrize(("given", "option", "message"), [
    ({"device": "cuda:0,2"}, "device", "device=cuda:0,2 must have neighbouring numbers.* CUDA_VISIBLE_DEVICES"),
    ({"device": "cuda:1,0"}, "device", "neighbouring numbers in their order"),
    ({"device": "cuda:0,1,2"}, "device", "has 3 GPUs: a model is split over 2, 4 or 8"),
    ({"device": "cuda:0,1", "tp": 4}, "tp", "tp=4 is not the number of GPUs of device=cuda:0,1"),
    ({"device": "cuda:0,"}, "device", "or a list such as cuda:0,1, not 'cuda:0,'")], ids=str)
def test_lists_of_gpus_that_are_refused(given: dict[str, Any], option: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        EngineConfig(**given)
    assert caught.value.option == option


def test_a_step_over_gpus_has_at_most_1024_rows() -> None:
    with pytest.raises(ConfigError, match="max_batch=1025 is not possible with tp=2 on GPUs: use at most 1024"):
        EngineConfig(tp=2, device="cuda", max_batch=1025)


def test_gpus_have_to_exist_and_to_be_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["H100", "H100", "H200"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[torch.device(device).index])
    check_devices(EngineConfig(tp=2, device="cuda").devices)
    for device, words in (("cuda:2", "needs the GPUs cuda:2 to cuda:3, and this machine has 3"),
                          ("cuda:1", "of one kind, .*cuda:1 is H100, cuda:2 is H200")):
        with pytest.raises(ConfigError, match=words) as caught:
            check_devices(EngineConfig(tp=2, device=device).devices)
        assert caught.value.option == "tp"


@pytest.mark.parametrize(("dtype", "packed", "words"), [
    ("float32", False, "with dtype float32"), ("bfloat16", True, "with quantized experts")])
def test_what_gpus_do_not_split_is_refused(dtype: DType, packed: bool, words: str) -> None:
    config, options = ModelConfig.preset("qwen3.5-35b-a3b"), EngineConfig(tp=2, device="cuda")
    check_gpus(config, options, "bfloat16", False)
    with pytest.raises(ConfigError, match=words) as caught:
        check_gpus(config, options, dtype, packed)
    assert caught.value.option == "tp"


REFUSED = {
    "query heads": (split_shape(num_attention_heads=6), 4, "6 query heads and 2 K/V heads .*use tp=1 or 2"),
    "K/V heads": (split_shape(num_attention_heads=6, num_key_value_heads=3), 2, "3 K/V heads .*use tp=1$"),
    "key heads": (split_shape(linear=LinearConfig(3, 6, 16, 16, 4)), 2, "3 key heads"),
    "query columns": (split_shape(head_dim=14, num_attention_heads=6), 2, "84 query columns"),
    "value columns": (split_shape(linear=LinearConfig(2, 6, 10, 12, 4)), 2, "72 value columns"),
    "inner columns": (split_shape(intermediate_size=16), 2, "16 inner columns"),
    "experts": (split_shape(architecture="qwen3_5_moe", intermediate_size=0, experts=ExpertsConfig(3, 1, 20)), 4,
                "has 3 experts; use tp=1 or 2")}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_cannot_be_split_are_refused_before_they_are_read(case: str,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any, **__: Any) -> Any:
        raise AssertionError("weights were read")

    shape, tp, words = REFUSED[case]
    monkeypatch.setattr(RandomModel, "tensors", read)
    with pytest.raises(ConfigError, match=words) as caught:
        load(RandomModel(shape=shape), EngineConfig(**{**OPTIONS, "tp": tp}))
    assert caught.value.option == "tp"


def test_the_model_that_comes_with_deltic_has_three_key_heads() -> None:
    with pytest.raises(ConfigError, match="tp=2 is not possible with this model: its 3 key heads"):
        Session(None, tp=2)


def test_models_of_vectors_are_not_split(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tp=2 is for answers"):
        Encoder(tmp_path, tp=2)


# Views of packed matrices


def packed(type: str, columns: int) -> QTensor:
    matrix = torch.randn(70, columns, generator=torch.Generator().manual_seed(columns))
    plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    if type in plain:
        return pack_tensor(matrix.to(plain[type]), Arena())
    with ThreadPoolExecutor(1) as pool:
        return quantized("x", matrix, BY_NAME[type], pool, host_form())


@needs_kernels
@pytest.mark.parametrize("type", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"])
def test_rows_of_packed_matrices_are_views(type: str) -> None:
    """A device's rows of the logits, if the embedding gives them."""
    whole = packed(type, 1024)
    numbers = whole.dequantize()
    assert torch.equal(whole.row_view(16, 48).dequantize(), numbers[16:48])
    assert torch.equal(whole.row_view(48, 70).dequantize(), numbers[48:])
    assert whole.row_view(16, 48).data.untyped_storage().data_ptr() == whole.data.untyped_storage().data_ptr()


def test_rows_of_tiles_are_views() -> None:
    """As they are on GPUs."""
    numbers = torch.randn(70, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole = tiles_of(numbers)
    assert torch.equal(whole.row_view(16, 48).dequantize(), numbers[16:48].float())
    assert torch.equal(whole.row_view(48, 70).dequantize(), numbers[48:].float())
    assert whole.row_view(16, 48).data.untyped_storage().data_ptr() == whole.data.untyped_storage().data_ptr()
