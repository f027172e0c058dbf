"""How many tokens of a language a draft head can draft that knows the vocabulary's first N tokens, by Qwen3.5's.

    python bench/draft_vocabulary.py      a line of JSON for each language, and one for all added tokens

Counts, no times. `seen` adds the tokens that stand in the text before: what a head could draft whose rows follow the
tokens of prompt and answer. The texts are short, so that its share is a lower bound.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import real_vocabulary

from deltic.text.tokenizer import Tokenizer

SIZES = (32_000, 64_000, 128_000)


def measure(tokenizer: Tokenizer, text: str) -> dict[str, Any]:
    """The share of a text's tokens that each head can draft."""
    ids = tokenizer.encode(text)
    shares = {str(size): round(sum(id < size for id in ids) / len(ids), 3) for size in SIZES}
    return {"tokens": len(ids), **shares, "32000 and seen": round(_with_seen(ids, SIZES[0]) / len(ids), 3)}


def _with_seen(ids: Sequence[int], size: int) -> int:
    return sum(id < size or id in ids[:place] for place, id in enumerate(ids))


def main() -> None:
    with TemporaryDirectory() as directory:
        real_vocabulary.write(Path(directory))
        tokenizer = Tokenizer.from_directory(directory)
    for language, text in real_vocabulary.languages().items():
        print(json.dumps({"language": language, **measure(tokenizer, text)}, ensure_ascii=False))
    added = [*tokenizer.added.values()]
    print(json.dumps({"language": "added tokens", "tokens": len(added), **{
        str(size): sum(id < size for id in added) / len(added) for size in SIZES}}))


if __name__ == "__main__":
    main()
