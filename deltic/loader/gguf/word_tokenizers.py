"""The tokenizers of encoders in a GGUF file's metadata (WordPiece and Unigram), as a tokenizer.json.

The metadata has tokens and their kinds; how text is cleaned and cut is that of transformers' BertTokenizer and
XLMRobertaTokenizer.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from deltic.errors import ModelError, show

SPACE: Final = "\u2581"
"""Stands before the first token of a word."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of tokens."""


def token_types(metadata: Mapping[str, Any], count: int) -> list[int]:
    """The kind of each token."""
    value = metadata.get("tokenizer.ggml.token_type")
    types = [NORMAL] * count if value is None else value.tolist() if isinstance(value, np.ndarray) else None
    if types is None or len(types) != count:
        raise ModelError(f"tokenizer.ggml.token_type must be an array of {count} integers, as many as there are tokens")
    return types


def token_scores(metadata: Mapping[str, Any], count: int) -> list[float]:
    """The score of each token."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != count:
        raise ModelError(f"tokenizer.ggml.scores must be an array of {count} numbers, one for each token")
    found: list[float] = scores.tolist()
    return found


def token_id(metadata: Mapping[str, Any], kind: str, count: int) -> int | None:
    """The id of a special token."""
    key = f"tokenizer.ggml.{kind}_token_id"
    value = metadata.get(key)
    if value is not None and (type(value) is not int or not 0 <= value < count):
        raise ModelError(f"{key} must be the id of one of {count} tokens, not {show(value)}")
    return value


def added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[dict[str, Any]]:
    """Tokens that are found in a text before it is cut; the special ones are not shown to readers."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [{"id": id, "content": text, **flags, "special": types[id] != USER_DEFINED}
            for id, text in enumerate(tokens) if types[id] in (UNKNOWN, CONTROL, USER_DEFINED)]


def wordpiece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    """Tokens that begin a word are marked in the file, those that go on in a tokenizer.json."""
    types, vocabulary = token_types(metadata, len(tokens)), dict[str, int]()
    for id, text in enumerate(tokens):
        if types[id] == NORMAL:
            text = text[1:] if text.startswith(SPACE) else f"##{text}"
        vocabulary.setdefault(text, id)
    unknown = _special(metadata, tokens, "unknown", "[UNK]")
    # a vocabulary without capitals is of a model that was trained on text without them
    cased = any(any(letter.isupper() for letter in text) for id, text in enumerate(tokens)
                if types[id] == NORMAL and "[" not in text)
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added_tokens(tokens, types),
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                       "strip_accents": None, "lowercase": not cased},
        "pre_tokenizer": {"type": "BertPreTokenizer"}, "post_processor": _around(metadata, tokens, "[CLS]", "[SEP]"),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "unk_token": tokens[unknown], "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": vocabulary}}


def unigram(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    """Of a text, the tokens that have the highest scores together."""
    types, scores = token_types(metadata, len(tokens)), token_scores(metadata, len(tokens))
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
        "post_processor": _around(metadata, tokens, "<s>", "</s>"),
        "decoder": {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True},
        "model": {"type": "Unigram", "unk_id": _special(metadata, tokens, "unknown", "<unk>"), "byte_fallback": False,
                  "vocab": [[text, score] for text, score in zip(tokens, scores, strict=True)]}}


def _special(metadata: Mapping[str, Any], tokens: Sequence[str], kind: str, usual: str) -> int:
    named = token_id(metadata, kind, len(tokens))
    if named is None and usual not in tokens:
        raise ModelError(f"tokenizer.ggml.{kind}_token_id is absent, and there is no token {usual!r}")
    return tokens.index(usual) if named is None else named


def _around(metadata: Mapping[str, Any], tokens: Sequence[str], start: str, end: str) -> dict[str, Any]:
    """The tokens before and behind a text. BERT puts one between two texts, and counts the second as another kind;
    RoBERTa puts two."""
    first = next((id for id in (token_id(metadata, kind, len(tokens)) for kind in ("cls", "bos")) if id is not None),
                 None)
    last = next((id for id in (token_id(metadata, kind, len(tokens)) for kind in ("seperator", "eos"))
                 if id is not None), None)
    ids = [tokens.index(usual) if id is None and usual in tokens else id
           for id, usual in ((first, start), (last, end))]
    if None in ids:
        raise ModelError(f"tokenizer.ggml.cls_token_id and seperator_token_id are absent, and so are {start} and {end}")
    before, behind = (tokens[id] for id in ids if id is not None)
    kind = 1 if start == "[CLS]" else 0

    def special(text: str, kind: int = 0) -> dict[str, Any]:
        return {"SpecialToken": {"id": text, "type_id": kind}}

    single = [special(before), {"Sequence": {"id": "A", "type_id": 0}}, special(behind)]
    between = [] if kind else [special(behind)]
    return {"type": "TemplateProcessing", "single": single,
            "pair": [*single, *between, {"Sequence": {"id": "B", "type_id": kind}}, special(behind, kind)],
            "special_tokens": {text: {"id": text, "ids": [id], "tokens": [text]}
                               for text, id in zip((before, behind), ids, strict=True)}}
