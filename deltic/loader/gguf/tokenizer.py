"""Converts the tokenizer in GGUF metadata to a tokenizer.json: BPE, and WordPiece and Unigram of encoders.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The metadata contains only the name of the
pre-tokenizer; patterns and normalizers are in `config.families`. Normalisation and splitting of encoders are those of
transformers' BertTokenizer and XLMRobertaTokenizer.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from deltic.config.families import SPLITTERS, splitter_of
from deltic.errors import ModelError, show

_MAX_MERGED: Final = 1024
"""Maximum characters of a merged token, because every split of it is tried. Known tokens have some dozens."""
VARIABLES: Final[Mapping[str, str]] = {
    "bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "seperator": "sep_token", "padding": "pad_token",
    "mask": "mask_token"}
"""Special tokens: name in keys -> name in templates."""
ENDS: Final = ("eos", "eot", "eom")
END_TEXTS: Final = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>")
"""Control tokens that end an answer in every model whose vocabulary contains them."""


@dataclass(frozen=True, slots=True)
class TokenizerTexts:
    """The tokenizer files of a directory, as in `deltic.chat.tokenizer.TokenizerFiles`.

    tokenizer: text of tokenizer.json.
    special_tokens: template variables (`eos_token` ...) and the text of each.
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
    """Returns the ids of tokens that end an answer: end tokens named by the metadata and known control tokens."""
    if "tokenizer.ggml.tokens" not in metadata:
        return ()
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    types = token_types(metadata, len(tokens))
    named = [token_id(metadata, kind, len(tokens)) for kind in ENDS]
    known = [id for id, text in enumerate(tokens) if text in END_TEXTS and types[id] == CONTROL]
    return tuple(dict.fromkeys(id for id in (*named, *known) if id is not None))


def _tokenizer_json(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    """Builds the content of a tokenizer.json."""
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
    """Builds a tokenizer.json for a SentencePiece BPE: spaces become U+2581, unknown characters become bytes. Pairs are
    merged in the order of their token's score, highest first."""
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


def _merges(metadata: Mapping[str, Any]) -> Sequence[str | list[str]]:
    """Returns the merges in the form of older tokenizer.json files, both tokens in one string: lists would take a
    second and 100 MiB more."""
    merges = _strings(metadata, "tokenizer.ggml.merges")
    wrong = next((merge for merge in merges if merge.count(" ") != 1 or merge[0] == " " or merge[-1] == " "), None)
    if wrong is not None:
        raise ModelError(f"tokenizer.ggml.merges must hold pairs of tokens, not {show(wrong)}")
    if any(merge.startswith("#version") for merge in merges):  # would be taken for a header
        return [merge.split(" ") for merge in merges]
    return merges


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
    """Returns the chat templates by name; the unnamed template is the default."""
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


# Encoders


SPACE: Final = "\u2581"
"""Prefix of the first token of a word."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Token types in the metadata."""


def token_types(metadata: Mapping[str, Any], count: int) -> list[int]:
    value = metadata.get("tokenizer.ggml.token_type")
    types = [NORMAL] * count if value is None else value.tolist() if isinstance(value, np.ndarray) else None
    if types is None or len(types) != count:
        raise ModelError(f"tokenizer.ggml.token_type must be an array of {count} integers, as many as there are tokens")
    return types


def token_scores(metadata: Mapping[str, Any], count: int) -> list[float]:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != count:
        raise ModelError(f"tokenizer.ggml.scores must be an array of {count} numbers, one for each token")
    found: list[float] = scores.tolist()
    return found


def token_id(metadata: Mapping[str, Any], kind: str, count: int) -> int | None:
    key = f"tokenizer.ggml.{kind}_token_id"
    value = metadata.get(key)
    if value is not None and (type(value) is not int or not 0 <= value < count):
        raise ModelError(f"{key} must be the id of one of {count} tokens, not {show(value)}")
    return value


def added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the tokens that are matched before splitting. Special tokens are omitted from decoded text."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [{"id": id, "content": text, **flags, "special": types[id] != USER_DEFINED}
            for id, text in enumerate(tokens) if types[id] in (UNKNOWN, CONTROL, USER_DEFINED)]


def wordpiece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    """Converts WordPiece. GGUF marks the tokens that start a word, tokenizer.json marks the others."""
    types, vocabulary = token_types(metadata, len(tokens)), dict[str, int]()
    for id, text in enumerate(tokens):
        if types[id] == NORMAL:
            text = text[1:] if text.startswith(SPACE) else f"##{text}"
        vocabulary.setdefault(text, id)
    unknown = _required_token(metadata, tokens, "unknown", "[UNK]")
    # a vocabulary without capitals belongs to an uncased model
    cased = any(any(letter.isupper() for letter in text) for id, text in enumerate(tokens)
                if types[id] == NORMAL and "[" not in text)
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added_tokens(tokens, types),
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                       "strip_accents": None, "lowercase": not cased},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": _word_post_processor(metadata, tokens, "[CLS]", "[SEP]"),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "unk_token": tokens[unknown], "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": vocabulary}}


def unigram(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    """Converts Unigram, which maximises the sum of scores."""
    types = token_types(metadata, len(tokens))
    scores = token_scores(metadata, len(tokens))
    charsmap = metadata.get("tokenizer.ggml.precompiled_charsmap")
    precompiled = [{"type": "Precompiled", "precompiled_charsmap": base64.b64encode(
        charsmap.astype(np.uint8).tobytes()).decode()}] if isinstance(charsmap, np.ndarray) else []
    prefix = metadata.get("tokenizer.ggml.add_space_prefix") is not False
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added_tokens(tokens, types),
        "normalizer": {"type": "Sequence", "normalizers": precompiled} if precompiled else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "WhitespaceSplit"},
            {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always" if prefix else "never",
             "split": True}]},
        "post_processor": _word_post_processor(metadata, tokens, "<s>", "</s>"),
        "decoder": {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True},
        "model": {"type": "Unigram", "unk_id": _required_token(metadata, tokens, "unknown", "<unk>"),
                  "byte_fallback": False,
                  "vocab": [[text, score] for text, score in zip(tokens, scores, strict=True)]}}


def _required_token(metadata: Mapping[str, Any], tokens: Sequence[str], kind: str, usual: str) -> int:
    named = token_id(metadata, kind, len(tokens))
    if named is None and usual not in tokens:
        raise ModelError(f"tokenizer.ggml.{kind}_token_id is absent, and there is no token {usual!r}")
    return tokens.index(usual) if named is None else named


def _word_post_processor(metadata: Mapping[str, Any], tokens: Sequence[str], start: str, end: str) -> dict[str, Any]:
    """Returns the post-processor that adds the start and end tokens of a text. Between two texts BERT has one end
    token, RoBERTa two. For BERT the second text has type id 1."""
    first = _find_special(metadata, tokens, ("cls", "bos"), start)
    last = _find_special(metadata, tokens, ("seperator", "eos"), end)
    if first is None or last is None:
        raise ModelError(f"tokenizer.ggml.cls_token_id and seperator_token_id are absent, and so are {start} and {end}")
    kind = 1 if start == "[CLS]" else 0
    before, behind = tokens[first], tokens[last]

    def special(text: str, kind: int = 0) -> dict[str, Any]:
        return {"SpecialToken": {"id": text, "type_id": kind}}

    single = [special(before), {"Sequence": {"id": "A", "type_id": 0}}, special(behind)]
    between = [] if kind else [special(behind)]
    return {"type": "TemplateProcessing", "single": single,
            "pair": [*single, *between, {"Sequence": {"id": "B", "type_id": kind}}, special(behind, kind)],
            "special_tokens": {text: {"id": text, "ids": [id], "tokens": [text]}
                               for text, id in ((before, first), (behind, last))}}


def _find_special(metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[str], usual: str) -> int | None:
    """Returns the id of the first special token that the metadata names, or else the id of `usual`."""
    for kind in kinds:
        id = token_id(metadata, kind, len(tokens))
        if id is not None:
            return id
    return tokens.index(usual) if usual in tokens else None
