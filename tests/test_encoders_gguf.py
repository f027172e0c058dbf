"""Encoders in GGUF files: gguf-py reads ours, and deltic reads those of llama.cpp's converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from encoder_models import TEXTS, WORDS, save_encoder, save_m3, save_recipe
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from tokenizers.decoders import WordPiece as WordPieceDecoder

from deltic import Encoder
from deltic.cli import main
from deltic.embeddings import bert
from deltic.embeddings.weights import read_weights
from deltic.errors import ModelError

FAMILIES = ("bert", "xlm-roberta")
PIECES = [*WORDS[:120], *(f"##{letter}" for letter in "abcdefgh0123456789"), "un", "like", "##ly", "##é", ","]
SAID = [*TEXTS, "unlikely, w1w2", "W3 ünlike", "  w5   w6  ", "一w7"]


def wordpiece() -> Tokenizer:
    """The tokenizer of all-MiniLM-L6-v2 with few words."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *PIECES]
    made = Tokenizer(models.WordPiece({name: id for id, name in enumerate(names)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(names[:5])
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1",
                                                        [("[CLS]", 2), ("[SEP]", 3)])
    made.decoder = WordPieceDecoder()
    return made


def unigram() -> Tokenizer:
    """The tokenizer of bge-m3 without the character table."""
    names = ["<s>", "<pad>", "</s>", "<unk>", "▁", *(f"▁{word}" for word in WORDS[:100]), "w", "un", "▁un", "like",
             *"0123456789abcdefgh,", "ly"]
    made = Tokenizer(models.Unigram([(name, 0.0 if id < 4 else -2.0 - 0.01 * id) for id, name in enumerate(names)], 3,
                                    False))
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")])
    made.add_special_tokens(names[:4])
    made.post_processor = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> </s> $B </s>",
                                                        [("<s>", 0), ("</s>", 2)])
    return made


TOKENIZERS = {"bert": wordpiece, "xlm-roberta": unigram}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories by family, each with a tokenizer of the family's kind."""
    place = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        save_encoder(place / family, family)
        TOKENIZERS[family]().save(str(place / family / "tokenizer.json"))
        save_recipe(place / family, "cls_token", max_seq_length=40)
    return place


def written(directory: Path, target: Path, type: str = "F32") -> Path:
    assert main(["convert", str(directory), str(target), "--type", type, "--json"]) == 0
    return target


@pytest.mark.parametrize("family", FAMILIES)
def test_converted_file_equals_directory(place: Path, tmp_path: Path, family: str) -> None:
    path = written(place / family, tmp_path / "model.gguf")
    with Encoder(place / family) as directory, Encoder(path) as file:
        for kind in (None, "query"):
            assert (file.encode(SAID, kind=kind) == directory.encode(SAID, kind=kind)).all()
        assert file.max_length == directory.max_length == 40


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_py_reads_converted_file(place: Path, tmp_path: Path, family: str) -> None:
    from safetensors.numpy import load_file

    reader = gguf.GGUFReader(written(place / family, tmp_path / "model.gguf"))
    weights, names = load_file(place / family / "model.safetensors"), gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, 3)
    found = {tensor.name: tensor for tensor in reader.tensors}
    known = [name for name in weights if not name.startswith("pooler") and "_ids" not in name]
    assert len(found) == len(known)
    for name in known:
        tensor = found[str(names.get_name(name, (".weight", ".bias")))]
        wanted = weights[name]
        if "position_embeddings" in name and family == "xlm-roberta":
            wanted = wanted[2:]
        np.testing.assert_array_equal(np.asarray(tensor.data).reshape(wanted.shape), wanted)
    keys = gguf.Keys
    read = {key: reader.fields[key].contents() for key in (
        keys.General.ARCHITECTURE, keys.LLM.BLOCK_COUNT.format(arch="bert"), keys.LLM.POOLING_TYPE.format(arch="bert"),
        keys.LLM.CONTEXT_LENGTH.format(arch="bert"), keys.Attention.CAUSAL.format(arch="bert"),
        keys.Tokenizer.MODEL, keys.Tokenizer.LIST, keys.Tokenizer.TOKEN_TYPE_COUNT, keys.Tokenizer.SEP_ID)}
    assert list(read.values())[:6] == ["bert", 3 if family == "bert" else 2, gguf.PoolingType.CLS,
                                       61 if family == "bert" else 71, False, "bert" if family == "bert" else "t5"]
    tokens = read[keys.Tokenizer.LIST]
    assert tokens[5:7] == ["▁w0", "▁w1"] and ("un" in tokens) == (family != "bert")
    assert read[keys.Tokenizer.SEP_ID] == (3 if family == "bert" else 2)


def theirs(path: Path, directory: Path, family: str, pooling: gguf.PoolingType = gguf.PoolingType.MEAN) -> Path:
    """Writes a file like llama.cpp's converter: no tokenizer.json inside, words marked, positions cut."""
    import json

    from safetensors.numpy import load_file

    config, weights = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config["num_hidden_layers"])
    made = gguf.GGUFWriter(path, "bert")
    made.add_block_count(config["num_hidden_layers"])
    made.add_context_length(config["max_position_embeddings"] - (0 if family == "bert" else 2))
    made.add_embedding_length(config["hidden_size"])
    made.add_feed_forward_length(config["intermediate_size"])
    made.add_head_count(config["num_attention_heads"])
    made.add_layer_norm_eps(config["layer_norm_eps"])
    made.add_causal_attention(False)
    made.add_pooling_type(pooling)
    tokenizer = TOKENIZERS[family]()
    count, special = tokenizer.get_vocab_size(), {token.content for token in
                                                  tokenizer.get_added_tokens_decoder().values()}
    texts = [tokenizer.id_to_token(id) for id in range(count)]
    types = [gguf.TokenType.CONTROL if text in special else gguf.TokenType.NORMAL for text in texts]
    if family == "bert":
        made.add_tokenizer_model("bert")
        made.add_token_list([text if type == gguf.TokenType.CONTROL else text.removeprefix("##")
                             if text.startswith("##") else f"▁{text}" for text, type in zip(texts, types, strict=True)])
        ids = {"unk": 1, "sep": 3, "pad": 0, "mask": 4, "cls": 2}
    else:
        made.add_tokenizer_model("t5")
        made.add_token_list(texts)
        made.add_token_scores([score for _, score in json.loads(tokenizer.to_str())["model"]["vocab"]])
        types[3] = gguf.TokenType.UNKNOWN
        made.add_add_space_prefix(True)
        made.add_remove_extra_whitespaces(True)
        ids = {"bos": 0, "eos": 2, "unk": 3, "sep": 2, "pad": 1}
    made.add_token_types(types)
    made.add_token_type_count(config["type_vocab_size"])
    for kind, id in ids.items():
        key = {"unk": "unknown", "sep": "seperator", "pad": "padding"}.get(kind, kind)
        made.add_uint32(f"tokenizer.ggml.{key}_token_id", id)
    for name, tensor in weights.items():
        if name.startswith("pooler"):
            continue
        if "position_embeddings" in name and family != "bert":
            tensor = tensor[2:]
        made.add_tensor(str(names.get_name(name, (".weight", ".bias"))), tensor)
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_file_equals_directory(place: Path, tmp_path: Path, family: str) -> None:
    path = theirs(tmp_path / "model.gguf", place / family, family)
    save_encoder(tmp_path / "plain", family)
    TOKENIZERS[family]().save(str(tmp_path / "plain" / "tokenizer.json"))
    with Encoder(tmp_path / "plain") as directory, Encoder(path) as file:
        for text in SAID:
            assert list(file.text_items([text])[0].ids) == list(directory.text_items([text])[0].ids), text
        assert (file.encode(SAID) == directory.encode(SAID)).all()
        pair, other = (encoder.texts.pairs("w1 w2", ["w3"])[0] for encoder in (file, directory))
        assert (list(pair.ids), list(pair.token_types)) == (list(other.ids), list(other.token_types))


@pytest.mark.parametrize("type", ["Q8_0", "Q4_K_M", "F16"])
def test_quantized_matrices_stay_quantized(tmp_path: Path, type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = list[Any]()
    monkeypatch.setattr(bert, "read_weights", lambda *given: loaded.append(read_weights(*given)) or loaded[-1])
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 256}
    save_encoder(tmp_path / "model", "bert", **sizes)
    wordpiece().save(str(tmp_path / "model" / "tokenizer.json"))
    path = written(tmp_path / "model", tmp_path / "model.gguf", type)
    with Encoder(tmp_path / "model") as directory, Encoder(path) as file, Encoder(path, ops=("torch",)) as plain:
        wanted, found = directory.encode(SAID), file.encode(SAID)
        least = 0.96 if type == "Q4_K_M" else 0.999
        assert least < (wanted * found).sum(1).min() and (found * plain.encode(SAID)).sum(1).min() > 0.9985
        kept = {block.type for layer in loaded[1].layers for block in (layer.up.weight, layer.down.weight)}
        assert kept == {"Q8_0": {"Q8_0"}, "Q4_K_M": {"Q5_0", "Q4_K"}, "F16": {"F32"}}[type]


@pytest.mark.parametrize("family", FAMILIES)
def test_converted_reranker_equals_directory(tmp_path: Path, family: str) -> None:
    save_encoder(tmp_path / "model", family, labels=1)
    TOKENIZERS[family]().save(str(tmp_path / "model" / "tokenizer.json"))
    path = written(tmp_path / "model", tmp_path / "model.gguf")
    with Encoder(tmp_path / "model") as directory, Encoder(path) as file:
        assert file.scores and file.score("w1 w2", SAID) == directory.score("w1 w2", SAID)
    assert gguf.GGUFReader(path).fields["bert.pooling_type"].contents() == gguf.PoolingType.RANK


def test_unsupported_models_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: Any) -> None:
    save_m3(tmp_path / "m3")
    unigram().save(str(tmp_path / "m3" / "tokenizer.json"))
    path = written(tmp_path / "m3", tmp_path / "m3.gguf")
    assert "no place for sparse weights" in caplog.text
    with Encoder(path) as encoder:
        assert encoder.model.outputs == {"dense"}
    save_encoder(tmp_path / "bert", "bert")
    assert main(["convert", str(tmp_path / "bert"), str(tmp_path / "words.gguf")]) == 2
    assert "WordLevel tokenizer" in capsys.readouterr().err
    assert main(["convert", str(path), str(tmp_path / "again.gguf")]) == 2
    assert "is a GGUF file already" in capsys.readouterr().err


def test_broken_file_is_refused(place: Path, tmp_path: Path) -> None:
    good = written(place / "bert", tmp_path / "good.gguf")
    raw = good.read_bytes()
    for old, new, message in ((b"bert.block_count", b"bert.block_cound", "bert.block_count"),
                              (b"blk.1.ffn_up.bias", b"blk.1.ffn_xx.bias", "'blk.1.ffn_xx.bias' has no place"),
                              (b"token_types.weight", b"token_typos.weight", "'token_types.weight' is missing"),
                              (b'"pooling"', b'"poolinq"', "deltic.recipe cannot be used")):
        bad = tmp_path / "bad.gguf"
        assert raw.count(old) == 1 and len(old) == len(new)
        bad.write_bytes(raw.replace(old, new))
        with pytest.raises(ModelError, match=message):
            Encoder(bad)
