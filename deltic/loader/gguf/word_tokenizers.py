"""Converts the tokenizers of encoders in GGUF metadata (WordPiece and Unigram) to a tokenizer.json.

The metadata has tokens and their types. Normalisation and splitting are those of transformers' BertTokenizer and
XLMRobertaTokenizer.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from deltic.errors import ModelError, show

SPACE: Final = "\u2581"
"""Prefix of the first token of a word."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Token types."""


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
    """Returns the tokens that are matched before splitting; special ones are omitted from decoded text."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [{"id": id, "content": text, **flags, "special": types[id] != USER_DEFINED}
            for id, text in enumerate(tokens) if types[id] in (UNKNOWN, CONTROL, USER_DEFINED)]


def wordpiece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    """Converts WordPiece. GGUF marks tokens at the start of words, tokenizer.json the others."""
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
        "post_processor": _post_processor(metadata, tokens, "[CLS]", "[SEP]"),
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
        "post_processor": _post_processor(metadata, tokens, "<s>", "</s>"),
        "decoder": {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True},
        "model": {"type": "Unigram", "unk_id": _required_token(metadata, tokens, "unknown", "<unk>"),
                  "byte_fallback": False,
                  "vocab": [[text, score] for text, score in zip(tokens, scores, strict=True)]}}


def _required_token(metadata: Mapping[str, Any], tokens: Sequence[str], kind: str, usual: str) -> int:
    named = token_id(metadata, kind, len(tokens))
    if named is None and usual not in tokens:
        raise ModelError(f"tokenizer.ggml.{kind}_token_id is absent, and there is no token {usual!r}")
    return tokens.index(usual) if named is None else named


def _post_processor(metadata: Mapping[str, Any], tokens: Sequence[str], start: str, end: str) -> dict[str, Any]:
    """Returns the post-processor that adds the tokens around a text. Between two texts BERT has one, RoBERTa two. For
    BERT the second text has type id 1."""
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
    """Returns the id of the first special token that the metadata names, else of the usual one."""
    for kind in kinds:
        id = token_id(metadata, kind, len(tokens))
        if id is not None:
            return id
    return tokens.index(usual) if usual in tokens else None
