"""Tokens and bytes agree, and broken files are named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import examples
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from deltic.chat import tokenizer as tokenizer_module
from deltic.chat.tokenizer import Tokenizer, TokenizerFiles
from deltic.errors import ModelError, RequestError

TINY = Path(__file__).parents[1] / "deltic" / "models" / "tiny"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(TINY)


def test_ids_and_sizes(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == json.loads((TINY / "config.json").read_text())["vocab_size"]
    assert tokenizer.token_to_id("<|im_end|>") == tokenizer.eos_id
    assert tokenizer.eos_id in tokenizer.special and tokenizer.token_to_id("<think>") not in tokenizer.special
    assert tokenizer.bos_id is None and tokenizer.token_to_id("no such token") is None
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"


@given(st.text(max_size=60))
@settings(deadline=None, max_examples=examples(300))
def test_token_bytes_spell_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.decode(ids, skip_special=False) == text


def test_token_bytes_agree_with_backend(tokenizer: Tokenizer) -> None:
    backend = Backend.from_file(str(TINY / "tokenizer.json"))
    for id in range(tokenizer.vocab_size):
        assert tokenizer.token_bytes(id).decode("utf-8", "replace") == backend.decode(
            [id], skip_special_tokens=False
        )
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""


def test_special_tokens_in_a_text(tokenizer: Tokenizer) -> None:
    text = "<|im_start|>user\n<think><|im_end|>"
    ids = tokenizer.encode(text)
    assert {tokenizer.token_to_id(name) for name in ("<|im_start|>", "<think>", "<|im_end|>")} <= set(ids)
    assert tokenizer.decode(ids) == "user\n<think>"
    assert tokenizer.decode(ids, skip_special=False) == text
    plain = tokenizer.encode(text, parse_special=False)
    assert (
        not set(plain) & {*tokenizer.special, tokenizer.token_to_id("<think>")}
        and tokenizer.decode(plain) == text
    )


def test_special_tokens_are_found_in_a_text(tokenizer: Tokenizer) -> None:
    text = "<|im_start|>user\nhé<think><|im_end|>"
    assert [(tokenizer.decode([id], skip_special=False), start, end) for id, start, end in tokenizer.special_in(text)
            ] == [("<|im_start|>", 0, 12), ("<|im_end|>", 26, 36)]


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_lone_surrogates_are_refused(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(RequestError, match="lone surrogate at position"):
        tokenizer.encode(text)


def test_missing_and_corrupt_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json: copy it"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a valid tokenizer .* download"):
        Tokenizer.from_directory(tmp_path)
    long = json.loads((TINY / "tokenizer.json").read_text()) | {"added_tokens": ["a" * 4000]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(long))
    with pytest.raises(ModelError, match=r"is not a valid tokenizer") as found:
        Tokenizer.from_directory(tmp_path)
    assert len(str(found.value)) < 300 + len(str(tmp_path))
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"cannot read .*tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    assert Tokenizer.from_directory(tmp_path).chat_template is None
    for content, reason in (("{", "not valid JSON"), ("[]", "must hold a JSON object")):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(ModelError, match=rf"tokenizer_config\.json .*{reason}"):
            Tokenizer.from_directory(tmp_path)


def test_truncation_and_padding_of_file_are_ignored(tmp_path: Path, tokenizer: Tokenizer) -> None:
    left = json.loads((TINY / "tokenizer.json").read_text()) | {
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 12}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0,
                    "pad_type_id": 0, "pad_token": "<|endoftext|>"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(left))
    found = Tokenizer.from_directory(tmp_path)
    for text in ("a", "hello there my friend how are you"):
        assert found.encode(text) == tokenizer.encode(text) and found.decode(found.encode(text)) == text


def test_warning_names_missing_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    config = json.loads((TINY / "tokenizer_config.json").read_text())

    def warned(**changes: object) -> str:
        caplog.clear()
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, **changes}))
        Tokenizer.from_directory(tmp_path)
        return caplog.text

    assert not warned(extra_special_tokens=["<|im_end|>", {"content": "<think>"}, 5], additional_special_tokens={})
    assert "no tokens for '<|new|>', which" in warned(added_tokens_decoder={"3072": {"content": "<|new|>"}})
    assert "no tokens for '<|b|>', '<|a|>', which" in warned(additional_special_tokens=["<|b|>", "<|a|>", "<|b|>"])


def test_endless_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "_MAX_BYTES", 1 << 20)
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    for name in ("tokenizer_config.json", "chat_template.jinja", "tokenizer.json"):
        before = (tmp_path / name).read_bytes() if (tmp_path / name).exists() else b"{}"
        (tmp_path / name).write_bytes(before + b" " * (1 << 20))
        with pytest.raises(ModelError, match=rf"cannot read .*{name}: it has more than 1 MiB"):
            Tokenizer.from_directory(tmp_path)
        (tmp_path / name).write_bytes(before)


def test_backend_panic_is_a_model_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """As pyo3 makes it: no Exception, and in no module."""

    def raising(error: BaseException) -> SimpleNamespace:
        def from_str(text: str) -> Backend:
            raise error
        return SimpleNamespace(from_str=from_str)

    source, texts = Path("some/tokenizer.json"), TokenizerFiles("{}", {}, {})
    monkeypatch.setattr(tokenizer_module, "Backend", raising(PanicException("index out of bounds")))
    with pytest.raises(ModelError, match=r"some/tokenizer\.json is not a valid tokenizer .*index out of bounds"):
        Tokenizer.from_files(texts, source)
    monkeypatch.setattr(tokenizer_module, "Backend", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        Tokenizer.from_files(texts, source)


def test_template_sources(tmp_path: Path) -> None:
    shutil.copy(TINY / "tokenizer.json", tmp_path)

    def load(name: str, content: object) -> Tokenizer:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return Tokenizer.from_directory(tmp_path)

    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}, {"name": 1}]
    config = {
        "chat_template": named,
        "eos_token": {"content": "<|im_end|>"},
        "add_bos_token": False,
        "extra_special_tokens": {"image_token": "<|image|>"},
    }
    found = load("tokenizer_config.json", config)
    assert (found.chat_template, found.template_for(["tool"])) == ("A", "B")
    assert found.special_tokens == {"eos_token": "<|im_end|>", "image_token": "<|image|>"}
    assert load("tokenizer_config.json", {"chat_template": {"only": "C"}}).chat_template == "C"
    assert load("tokenizer_config.json", {"chat_template": "D"}).template_for(["tool"]) == "D"
    assert load("chat_template.json", {"chat_template": "E"}).chat_template == "E"
    assert load("chat_template.jinja", "F").chat_template == "F"
    assert load("additional_chat_templates/tool_use.jinja", "G").template_for(["tool"]) == "G"


def test_byte_fallback_tokens() -> None:
    vocabulary = {"<unk>": 0, "<0xE6>": 1, "<0xBC>": 2, "<0xA2>": 3, "\u2581hi": 4, "x": 5}
    backend = Backend(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode([1, 2, 3, 4, 5]) == "漢 hix"
    assert tokenizer.token_bytes(1) == b"\xe6" and tokenizer.token_bytes(99) == b""


def test_added_tokens_keep_their_spaces() -> None:
    """A normaliser as Llama 2 has it puts a space before the text of an added token that it may change."""
    backend = Backend(models.BPE({"<unk>": 0, "\u2581": 1, "a": 2, "b": 3}, [], unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_tokens([AddedToken("ab", normalized=True), AddedToken("ba", normalized=False)])
    backend.add_special_tokens([AddedToken("<s>", normalized=False)])
    tokenizer = Tokenizer(backend)
    for text in ("a ab a", "ab", "b ba ab", "a b", "<s> ab", "a<s>ab"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special=False) == backend.decode(ids, skip_special_tokens=False)
    assert tokenizer.decode(tokenizer.encode("a ab a")) == " a ab a"


def test_bytes_of_other_decoders() -> None:
    backend = Backend(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(backend)
    assert (tokenizer.token_bytes(1), tokenizer.token_bytes(2), tokenizer.token_bytes(9)) == (
        b" play",
        b"ing",
        b"",
    )


def test_added_tokens_outside_the_byte_alphabet() -> None:
    backend = Backend(models.BPE({"a": 0}, []))
    backend.pre_tokenizer, backend.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    backend.add_tokens([AddedToken("<é 漢>", special=False)])
    assert Tokenizer(backend).token_bytes(1) == "<é 漢>".encode()
