"""Converts the tokenizer in GGUF metadata to the files of a model directory.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The metadata contains only the name of the
pre-tokenizer; patterns and normalizers are in `config.splitters`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from deltic.config.splitters import SPLITTERS, splitter_of
from deltic.errors import ModelError, show
from deltic.loader.gguf.word_tokenizers import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    added_tokens,
    token_id,
    token_scores,
    token_types,
    unigram,
    wordpiece,
)

_MAX_MERGED: Final = 1024
"""Maximum characters of a merged token, because every split of it is tried. Known ones have some dozens."""
VARIABLES: Final[Mapping[str, str]] = {
    "bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "seperator": "sep_token", "padding": "pad_token",
    "mask": "mask_token"}
"""Special tokens: name in keys -> name in templates."""
ENDS: Final = ("eos", "eot", "eom")
END_TEXTS: Final = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>")
"""Control tokens that end an answer in every model that has them."""


@dataclass(frozen=True, slots=True)
class TokenizerTexts:
    """The tokenizer files of a directory, as in `deltic.chat.tokenizer.TokenizerFiles`.

    tokenizer: text of tokenizer.json.
    special_tokens: template variables (`eos_token` ...) and their text.
    templates: chat templates by name.
    """

    tokenizer: str
    special_tokens: Mapping[str, str]
    templates: Mapping[str, str]


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> TokenizerTexts:
    """Converts the tokenizer of a GGUF file.

    A complete tokenizer.json (tokenizer.huggingface.json) is used unchanged. Padding tokens of converters are left out.
    Raises ModelError naming the key that is absent, of the wrong type or unsupported.
    """
    whole = metadata.get("tokenizer.huggingface.json")
    if whole is not None and not isinstance(whole, str):
        raise ModelError(f"tokenizer.huggingface.json must be a string, not {show(whole)}")
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    return TokenizerTexts(whole or json.dumps(_tokenizer_json(metadata, tokens), ensure_ascii=False),
                          _special_tokens(metadata, tokens), _templates(metadata))


def end_tokens(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the ids of tokens that end an answer: named ones and known control tokens."""
    if "tokenizer.ggml.tokens" not in metadata:
        return ()
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    types = token_types(metadata, len(tokens))
    named = [token_id(metadata, kind, len(tokens)) for kind in ENDS]
    known = [id for id, text in enumerate(tokens) if text in END_TEXTS and types[id] == CONTROL]
    return tuple(dict.fromkeys(id for id in (*named, *known) if id is not None))


def _tokenizer_json(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    """Returns a tokenizer.json."""
    model = metadata.get("tokenizer.ggml.model")
    name = metadata.get("tokenizer.ggml.pre")
    others = {"llama": _sentencepiece, "bert": wordpiece, "t5": unigram}
    if not isinstance(model, str) or model not in ("gpt2", *others):
        raise ModelError(f"tokenizer.ggml.model {show(model)} is not supported, only 'gpt2' (byte-level BPE), 'llama' "
                         "(SentencePiece BPE), 'bert' (WordPiece) and 't5' (Unigram)")
    if model in others:
        return others[model](metadata, tokens)
    splitter = SPLITTERS.get(name) if isinstance(name, str) else None
    if name is None or (isinstance(name, str) and name == "default"):  # older converters
        splitter = splitter_of(str(metadata.get("general.architecture")))
    if splitter is None:
        raise ModelError(f"tokenizer.ggml.pre {show(name)} is not supported, only {', '.join(SPLITTERS)}")
    types = token_types(metadata, len(tokens))
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added_tokens(tokens, types),
        "normalizer": splitter.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splitter.cuts]},
        "post_processor": _post_processor(metadata, tokens, splitter.bos),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": splitter.whole, "vocab": _vocabulary(tokens, types), "merges": _merges(metadata)},
    }


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    """Returns a tokenizer.json of a SentencePiece BPE: spaces become U+2581, unknown characters become bytes. The pair
    whose token has the highest score is merged first."""
    scores = token_scores(metadata, len(tokens))
    types = token_types(metadata, len(tokens))
    bare = metadata.get("tokenizer.ggml.add_space_prefix") is False
    prefix = [] if bare else [{"type": "Prepend", "prepend": SPACE}]
    unknown = next((tokens[id] for id, type in enumerate(types) if type == UNKNOWN), None)
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added_tokens(tokens, types),
        "normalizer": {"type": "Sequence", "normalizers": [
            *prefix, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]},
        "pre_tokenizer": None, "post_processor": _post_processor(metadata, tokens, True),
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, *([] if bare else [{"type": "Strip", "content": " ", "start": 1, "stop": 0}])]},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": unknown, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": BYTE in types, "ignore_merges": False,
            "vocab": _vocabulary(tokens, types), "merges": _merges_by_score(tokens, types, scores)},
    }


def _merges_by_score(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[list[str]]:
    known = {text: id for id, text in enumerate(tokens) if types[id] == NORMAL}
    if long := next((text for text in known if len(text) > _MAX_MERGED), None):
        raise ModelError(f"tokenizer.ggml.tokens has a token of {len(long):,} characters, {show(long)}, more than the "
                         f"{_MAX_MERGED:,} that can be read; is this a complete model?")
    pairs = [(-scores[id], id, cut) for text, id in known.items() for cut in range(1, len(text))
             if text[:cut] in known and text[cut:] in known]
    return [[tokens[id][:cut], tokens[id][cut:]] for _, id, cut in sorted(pairs)]


def _vocabulary(tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    """Returns token -> id, including added tokens, which no merge produces."""
    vocabulary: dict[str, int] = {}
    for id, text in enumerate(tokens):
        if types[id] == UNUSED:
            continue
        if text in vocabulary:
            raise ModelError(f"tokenizer.ggml.tokens has {show(text)} twice, as {vocabulary[text]} and {id}")
        vocabulary[text] = id
    return vocabulary


def _merges(metadata: Mapping[str, Any]) -> list[list[str]]:
    pairs = [merge.split(" ") for merge in _strings(metadata, "tokenizer.ggml.merges")]
    wrong = next((pair for pair in pairs if len(pair) != 2 or not all(pair)), None)
    if wrong is not None:
        raise ModelError(f"tokenizer.ggml.merges must hold pairs of tokens, not {show(' '.join(wrong))}")
    return pairs


def _post_processor(metadata: Mapping[str, Any], tokens: Sequence[str], bos: bool) -> dict[str, Any] | None:
    """Returns the post-processor that adds bos and eos tokens to a raw prompt. bos: default for the bos token."""
    around = [(token_id(metadata, kind, len(tokens)) if metadata.get(f"tokenizer.ggml.add_{kind}_token", default)
               is True else None) for kind, default in (("bos", bos), ("eos", False))]
    if around == [None, None]:
        return None
    before, after = ([] if id is None else [{"SpecialToken": {"id": tokens[id], "type_id": 0}}] for id in around)
    single = [*before, {"Sequence": {"id": "A", "type_id": 0}}, *after]
    pair = [*single, *before, {"Sequence": {"id": "B", "type_id": 1}}, *after]
    named = {tokens[id]: {"id": tokens[id], "ids": [id], "tokens": [tokens[id]]} for id in around if id is not None}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": named}


def _special_tokens(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    ids = {name: token_id(metadata, kind, len(tokens)) for kind, name in VARIABLES.items()}
    return {name: tokens[id] for name, id in ids.items() if id is not None}


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Returns the chat templates; the unnamed one is the default."""
    names = metadata.get("tokenizer.chat_templates", [])
    keys = {"default": "tokenizer.chat_template",
            **{str(name): f"tokenizer.chat_template.{name}" for name in (names if isinstance(names, list) else [])}}
    found = {name: metadata[key] for name, key in keys.items() if key in metadata}
    for name, text in found.items():
        if not isinstance(text, str):
            raise ModelError(f"{keys[name]} must be a string, not {show(text)}")
    return found


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ModelError(f"{key} must be an array of strings, not {show(value)}; is this a complete model?")
    return value


