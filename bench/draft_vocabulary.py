"""How many tokens of a language a shortened draft head can draft, with Qwen3.5's vocabulary.

    python bench/draft_vocabulary.py              a line of JSON for each language, and one for all added tokens
    python bench/draft_vocabulary.py 64000        of a head of that many tokens (`--draft-vocab`) instead of 32,000

Counts, no times, of what comes after the first 500 tokens of a text on one subject (bench/essays.json; a module of
Python's library). `lowest ids`: what a head of the vocabulary's first tokens could draft. `base`: the tokens that the
head always has. `adapted`: with the rows that follow the tokens before, as they are at that place.
"""

from __future__ import annotations

import argparse
import inspect
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import real_vocabulary
import torch
from common import record

from deltic.chat.tokenizer import Tokenizer
from deltic.model.draft_vocabulary import DraftVocabulary, Tokens, draftable

CONTEXT: Final = 500
"""Tokens that are read before any is counted."""
SIZE: Final = 248_320


def texts() -> dict[str, str]:
    """By language."""
    found: dict[str, str] = json.loads((Path(__file__).parent / "essays.json").read_text(encoding="utf-8"))
    return {**found, "Python": inspect.getsource(textwrap)[:9000]}


def measure(directory: Path, count: int = 32_000) -> Iterator[dict[str, Any]]:
    """directory: of the tokenizer. count: as of the option."""
    tokenizer = Tokenizer.from_directory(directory)
    tokens = Tokens.of((directory / "tokenizer.json").read_text(encoding="utf-8"))
    rows = draftable(count, SIZE, tokens, tokenizer.ends)
    assert rows, "the head has all tokens"
    base = {*rows[:count]}
    for language, text in texts().items():
        ids = tokenizer.encode(text)
        vocabulary, adapted = DraftVocabulary(torch.zeros(SIZE, 1), rows), 0
        for place, id in enumerate(ids):
            adapted += place >= CONTEXT and id in vocabulary
            vocabulary.see([id])
        later = ids[CONTEXT:]
        shares = {"lowest ids": sum(id < count for id in later), "base": sum(id in base for id in later),
                  "adapted": adapted}
        yield {"language": language, "tokens": len(later),
               **{name: round(number / len(later), 3) for name, number in shares.items()}}
    added = [*tokenizer.added.values()]
    yield {"language": "added tokens", "tokens": len(added), "lowest ids": sum(id < count for id in added) / len(added),
           "base": sum(id in base for id in added) / len(added)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", metavar="N", type=int, nargs="?", default=32_000)
    count = parser.parse_args().count
    with TemporaryDirectory() as directory:
        real_vocabulary.write(Path(directory))
        for line in measure(Path(directory), count):
            record("draft_vocabulary", {"rows": count, **line})


if __name__ == "__main__":
    main()
