"""GGUF metadata: it says what config.json, generation_config.json and tokenizer.json say."""

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf_models import QWEN3, SHAPES, metadata_of, write
from hypothesis import given, settings
from hypothesis import strategies as st
from support import examples, odd_shape
from tokenizers import Tokenizer as Backend
from transformers.models.qwen2 import tokenization_qwen2
from transformers.models.qwen3_5 import tokenization_qwen3_5

import deltic
from deltic.chat.tokenizer import Tokenizer
from deltic.config import GenerationDefaults, ModelConfig
from deltic.errors import ModelError
from deltic.loader.gguf.blocks import BY_NAME
from deltic.loader.gguf.config import config_from_gguf, generation_from_gguf, model_name
from deltic.loader.gguf.file import GgufFile, GgufTensor
from deltic.loader.gguf.tokenizer import tokenizer_from_gguf

TINY = Path(deltic.__file__).parent / "models" / "tiny"

# Metadata


def stub(config, metadata=None, tied=None):
    """A file that exists in memory only."""
    tied = config.tie_word_embeddings if tied is None else tied
    kind = {"float32": "F32", "bfloat16": "Q4_K", "float16": "F16"}[config.dtype]
    embedding = GgufTensor("token_embd.weight", BY_NAME[kind], (config.vocab_size, config.hidden_size), Path("x"), 0, 0)
    tensors = {"token_embd.weight": embedding} | ({} if tied else {"output.weight": embedding})
    values = {key: np.array(value) if isinstance(value, list) and [type(one) for one in value[:1]] == [int] else value
              for key, value in (metadata or metadata_of(config)).items()}
    return GgufFile((Path("m.gguf"),), values, tensors)


@pytest.mark.parametrize("config", [
    *SHAPES.values(), *(replace(ModelConfig.preset(name), eos_token_ids=()) for name in (
        "0.8b", "9b", "27b", "35b-a3b", "qwen3-0.6b", "qwen3-8b",
        "qwen3-30b-a3b"))])
def test_metadata_equals_config_json(config):
    metadata = {key: np.float32(value).item() if isinstance(value, float) else value
                for key, value in metadata_of(config).items()}
    assert config_from_gguf(stub(config, metadata)) == config


def test_alternative_metadata_keys():
    config = replace(ModelConfig.preset("0.8b"), eos_token_ids=(), num_mtp_layers=0)
    metadata = metadata_of(config)
    del metadata["qwen35.attention.recurrent_layers"]
    metadata["qwen35.attention.head_count_kv"] = [0, 0, 0, 2] * 6
    assert config_from_gguf(stub(config, metadata)) == config
    metadata |= {"qwen35.block_count": 25, "qwen35.nextn_predict_layers": 1, "qwen35.rope.scaling.type": "none"}
    assert config_from_gguf(stub(config, metadata)) == replace(config, num_mtp_layers=1)
    old = {key: value for key, value in metadata_of(QWEN3).items() if "key_length" not in key and "value" not in key}
    assert config_from_gguf(stub(QWEN3, old)).head_dim == QWEN3.hidden_size // QWEN3.num_attention_heads


NEEDED = [key for key in metadata_of(odd_shape()) if not key.endswith((
    "recurrent_layers", "full_attention_interval", "key_length", "value_length"))]


@pytest.mark.parametrize("key", NEEDED)
@pytest.mark.parametrize("value", [None, "text", [1.5], -1, 1 << 40, True])
def test_absent_or_wrong_keys_named(key, value):
    metadata = {**metadata_of(odd_shape()), key: value}
    if value is None:
        del metadata[key]
    with pytest.raises(ModelError, match=key.replace(".", r"\.") if key != "general.architecture" or value != "text"
                       else "architecture 'text' is not supported"):
        config_from_gguf(stub(odd_shape(), metadata))


@pytest.mark.parametrize(("change", "message"), [
    ({"general.architecture": "mamba"}, "architecture 'mamba' is not supported"),
    ({"general.architecture": "qwen2moe"}, "not supported, only qwen35moe"),
    ({"general.architecture": "qwen35moe"}, r"qwen35moe\."),
    ({"qwen35.expert_count": 8}, "not supported, only qwen35moe"),
    ({"qwen35.rope.scaling.type": "longrope"}, "rope_type 'longrope' is not supported"),
    ({"qwen35.rope.scaling.type": "yarn"}, r"qwen35\.rope\.scaling\.factor is absent"),
    ({"qwen35.rope.scaling.type": "yarn", "qwen35.rope.scaling.factor": 4.0,
      "qwen35.rope.scaling.yarn_ext_factor": 0.5}, r"yarn_ext_factor 0\.5 is not supported"),
    ({"qwen35.rope.scaling.type": "yarn", "qwen35.rope.scaling.factor": 4.0,
      "qwen35.rope.scaling.original_context_length": 0}, r"original_context_length must be an integer from 1"),
    ({"qwen35.attention.value_length": 15}, r"qwen35\.attention\.value_length must be 14"),
    ({"qwen35.attention.recurrent_layers": [True] * 5}, "recurrent_layers must be 6 booleans"),
    ({"qwen35.attention.head_count_kv": [2, 3]}, "head_count_kv differs between layers"),
    ({"qwen35.ssm.inner_size": 71}, r"ssm\.inner_size \(71\) must be a multiple"),
    ({"qwen35.ssm.group_count": 4}, "must be a multiple of linear_num_key_heads"),
    ({"qwen35.nextn_predict_layers": 6}, r"qwen35\.nextn_predict_layers"),
    ({"qwen35.rope.dimension_sections": [1, 1, 1, 1]}, r"qwen35\.rope\.dimension_sections"),
    ({"qwen35.rope.dimension_count": 16}, r"qwen35\.rope\.dimension_count"),
])
def test_metadata_that_describes_another_model(change, message):
    with pytest.raises(ModelError, match=rf"m\.gguf.*{message}"):
        config_from_gguf(stub(odd_shape(), {**metadata_of(odd_shape()), **change}))


def test_a_file_without_an_embedding():
    file = replace(stub(odd_shape()), tensors={})
    with pytest.raises(ModelError, match=r"token_embd\.weight"):
        config_from_gguf(file)


def test_name_and_sampling_defaults():
    sampling = {"general.sampling.temp": float(np.float32(0.7)), "general.sampling.top_k": 20}
    file = stub(odd_shape(), {**metadata_of(odd_shape()), **sampling})
    assert model_name(file) == "m"
    assert model_name(replace(file, metadata={"general.name": "Qwen3.5 0.8B"})) == "Qwen3.5 0.8B"
    config = replace(odd_shape(), eos_token_ids=(5,))
    assert generation_from_gguf(file, config) == GenerationDefaults(temperature=0.7, top_k=20, eos_token_ids=(5,))
    with pytest.raises(ModelError, match=r"m\.gguf: general\.sampling: temperature"):
        generation_from_gguf(replace(file, metadata={"general.sampling.temp": -1.0}), config)


# The tokenizer


def token_type(id, tokens, added):
    if id in added:
        return 3 if added[id]["special"] else 4
    return 1 if id in tokens else 5


def tokenizer_metadata(directory):
    """What the converter writes about a tokenizer of a model directory."""
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    config = json.loads((directory / "tokenizer_config.json").read_text())
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    tokens = {id: text for text, id in tokenizer["model"]["vocab"].items()}
    tokens |= {id: token["content"] for id, token in added.items()}
    size = json.loads((directory / "config.json").read_text())["vocab_size"] + 3
    merges = tokenizer["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": [tokens.get(id, f"[PAD{id}]") for id in range(size)],
        "tokenizer.ggml.token_type": [token_type(id, tokens, added) for id in range(size)],
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        "tokenizer.ggml.eos_token_id": next(id for id in added if added[id]["content"] == config["eos_token"]),
        "tokenizer.ggml.padding_token_id": next(id for id in added if added[id]["content"] == config["pad_token"]),
        "tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": config["chat_template"]}


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    """The embedded model's tokenizer after a journey through a file."""
    path = tmp_path_factory.mktemp("tokenizer") / "m.gguf"
    write(path, {**metadata_of(odd_shape()), **tokenizer_metadata(TINY)}, {"t": np.zeros(1, np.float32)})
    return GgufFile.open(path).metadata


def tokenizer_of(metadata):
    texts = tokenizer_from_gguf(metadata)
    return Tokenizer(Backend.from_str(texts.tokenizer), texts.special_tokens, texts.templates)


CORPUS = [
    "", " ", "Hello, world!", "I'll say: it's 12345 + 67.89?!\n\n  def f(x):\r\n\treturn x  \n",
    "naïve café — żółw 日本語 한국어", "🚀👩‍👩‍👧 क्षत्रिय नमस्ते مرحبا",
    "<|im_start|>user\nhi<|im_end|>\n<think>\n</think><tool_call>{}</tool_call>", "a\u00a0b\u3000c\u2028d",
    "'S 'T we'Re", "\x00\x01\x7f", "[PAD3072] <|unknown|>", "the quick brown fox " * 20]


def test_the_embedded_tokenizer_survives_a_file(described):
    ours, theirs = tokenizer_of(described), Tokenizer.from_directory(TINY)
    assert ours.vocab_size == theirs.vocab_size and ours.special == theirs.special
    assert (ours.eos_id, ours.bos_id) == (theirs.eos_id, theirs.bos_id)
    assert ours.chat_template == theirs.chat_template and ours.special_tokens == theirs.special_tokens
    for text in [*CORPUS, theirs.chat_template, (TINY / "README.md").read_text()]:
        for parse_special in (True, False):
            ids = theirs.encode(text, parse_special=parse_special)
            assert ours.encode(text, parse_special=parse_special) == ids, text[:50]
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids, skip_special=False) == text
    assert all(ours.token_bytes(id) == theirs.token_bytes(id) for id in range(theirs.vocab_size + 5))


def test_unicode_normalisation_by_family(described):
    ours = tokenizer_of(described)
    assert ours.encode("cafe\u0301") == ours.encode("caf\u00e9")


def test_end_tokens_and_special_ids(described):
    file = replace(stub(odd_shape()), metadata={**stub(odd_shape()).metadata, **described})
    config = config_from_gguf(file)
    theirs = Tokenizer.from_directory(TINY)
    assert config.eos_token_ids == (theirs.token_to_id("<|im_end|>"), theirs.token_to_id("<|endoftext|>"))
    assert config.pad_token_id == theirs.token_to_id("<|endoftext|>") and config.bos_token_id is None


@pytest.mark.parametrize(("pre", "pieces"), [
    ("qwen2", ["I", "'LL", " see", " ", "1", "2", "3", "4", " x", "\u0301y", ".\n"]),
    ("qwen35", ["I", "'LL", " see", " ", "1", "2", "3", "4", " x\u0301y", ".\n"]),
    ("llama-bpe", ["I", "'LL", " see", " ", "123", "4", " x", "\u0301y", ".\n"]),
    ("tekken", ["I", "'LL", " see", " ", "1", "2", "3", "4", " x\u0301y", ".\n"]),
    ("gpt-2", ["I", "'", "LL", " see", " 1234", " x", "\u0301", "y", ".", "\n"]),
    ("smollm", ["I", "'", "LL", " see", " ", "1", "2", "3", "4", " x", "\u0301", "y", ".", "\n"])])
def test_pre_tokenizers(described, pre, pieces):
    texts = tokenizer_from_gguf({**described, "tokenizer.ggml.pre": pre})
    text = "I'LL see 1234 x\u0301y.\n"
    found = Backend.from_str(texts.tokenizer).pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in found] == pieces


@pytest.mark.parametrize(("pre", "source"), [("qwen2", tokenization_qwen2), ("qwen35", tokenization_qwen3_5)])
def test_split_patterns_by_family(described, pre, source):
    tokenizer = json.loads(tokenizer_from_gguf({**described, "tokenizer.ggml.pre": pre}).tokenizer)
    assert tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] == source.PRETOKENIZE_REGEX
    assert tokenizer["normalizer"] == {"type": "NFC"}


def test_embedded_tokenizer_json_unchanged(described):
    whole = (TINY / "tokenizer.json").read_text()
    assert tokenizer_from_gguf({**described, "tokenizer.huggingface.json": whole}).tokenizer == whole


def test_tokens_around_a_raw_prompt_and_named_templates(described):
    metadata = {**described, "tokenizer.ggml.bos_token_id": 3064, "tokenizer.ggml.add_bos_token": True,
                "tokenizer.ggml.add_eos_token": True, "tokenizer.chat_templates": ["tool_use"],
                "tokenizer.chat_template.tool_use": "{{ tools }}"}
    tokenizer = tokenizer_of(metadata)
    assert tokenizer.encode("hi", add_special=True) == [3064, *tokenizer.encode("hi"), 3065]
    assert tokenizer.special_tokens["bos_token"] == "<|im_start|>"
    assert tokenizer.template_for([1]) == "{{ tools }}" and tokenizer.template_for(None) == tokenizer.chat_template


@pytest.mark.parametrize(("change", "message"), [
    ({"tokenizer.ggml.model": "rwkv"}, r"tokenizer\.ggml\.model 'rwkv' is not supported"),
    ({"tokenizer.ggml.model": "llama"}, r"tokenizer\.ggml\.scores must be an array"),
    ({"tokenizer.ggml.pre": "gpt-4o"}, r"tokenizer\.ggml\.pre 'gpt-4o' is not supported"),
    ({"tokenizer.ggml.pre": 7}, r"tokenizer\.ggml\.pre 7"),
    ({"tokenizer.ggml.tokens": None}, r"tokenizer\.ggml\.tokens must be an array"),
    ({"tokenizer.ggml.tokens": ["a", 1]}, r"tokenizer\.ggml\.tokens must be an array"),
    ({"tokenizer.ggml.tokens": ["a"]}, r"tokenizer\.ggml\.token_type must be an array of 1"),
    ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": np.array([1, 1])}, "has 'a' twice, as 0 and 1"),
    ({"tokenizer.ggml.token_type": "x"}, r"tokenizer\.ggml\.token_type"),
    ({"tokenizer.ggml.merges": ["a b c"]}, r"tokenizer\.ggml\.merges must hold pairs"),
    ({"tokenizer.ggml.merges": ["ab"]}, r"tokenizer\.ggml\.merges must hold pairs"),
    ({"tokenizer.ggml.merges": None}, r"tokenizer\.ggml\.merges must be an array"),
    ({"tokenizer.ggml.eos_token_id": 1 << 20}, r"tokenizer\.ggml\.eos_token_id must be the id"),
    ({"tokenizer.ggml.padding_token_id": "x"}, r"tokenizer\.ggml\.padding_token_id must be the id"),
    ({"tokenizer.chat_template": 5}, r"tokenizer\.chat_template must be a string"),
    ({"tokenizer.huggingface.json": 5}, r"tokenizer\.huggingface\.json must be a string"),
])
def test_unsupported_tokenizers_named(described, change, message):
    with pytest.raises(ModelError, match=message):
        tokenizer_from_gguf({**described, **change})


def test_long_tokens_are_not_split_everywhere(described):
    change = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a", "a" * 200_000],
              "tokenizer.ggml.token_type": np.array([1, 1]), "tokenizer.ggml.scores": np.zeros(2, np.float32)}
    began = time.process_time()
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.tokens has a token of 200,000 characters"):
        tokenizer_from_gguf({**described, **change})
    assert time.process_time() - began < 1


# Whatever the values are


STRANGE = [None, True, False, 0, -1, 1 << 63, 0.5, float("nan"), float("inf"), 1e300, "", "text", [], ["a"], [True],
           np.array([], np.int32), np.array([1, 2], np.int32), np.array([0.5]), np.zeros(300, np.uint64)]
SOME = {**metadata_of(odd_shape()), "qwen35.nextn_predict_layers": 0, "qwen35.rope.scaling.type": "none",
        "qwen35.expert_count": 0, "general.sampling.temp": 1.0, "general.sampling.top_k": 5, "general.name": "x",
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.token_type": np.array([1, 1, 3]), "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.eot_token_id": 2, "tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": "{{ x }}",
        "tokenizer.chat_templates": ["y"], "tokenizer.chat_template.y": "z", "tokenizer.huggingface.json": None}


@settings(max_examples=examples(400))
@given(st.dictionaries(st.sampled_from(sorted(SOME)), st.sampled_from(STRANGE), min_size=1, max_size=3))
def test_strange_values_are_read_or_refused(changes):
    file = stub(odd_shape(), {key: value for key, value in {**SOME, **changes}.items() if value is not None})
    for read in (config_from_gguf, model_name, lambda file: generation_from_gguf(file, odd_shape()),
                 lambda file: tokenizer_from_gguf(file.metadata)):
        try:
            read(file)
        except ModelError as error:
            assert len(str(error)) < 1000
