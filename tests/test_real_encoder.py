"""A real embedding model: all-MiniLM-L6-v2 against transformers with a pooling of its own."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from real_models import ROOT, minilm

from deltic import Encoder

pytestmark = pytest.mark.slow


@cache
def sentences() -> tuple[str, ...]:
    """Returns English sentences from this repository."""
    files = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", *sorted((ROOT / "deltic").rglob("*.py"))]
    found: dict[str, None] = {}
    for file in files:
        text = file.read_text(encoding="utf-8")
        parts = re.findall(r'"""(.*?)"""', text, re.DOTALL) if file.suffix == ".py" else [text]
        for part in parts:
            for sentence in re.split(r"(?<=[.!?:])\s+|\n\n", part):
                plain = " ".join(sentence.split())
                if 20 <= len(plain) <= 1200 and plain.count(" ") >= 3:
                    found[plain] = None
    chosen = tuple(found)[:1500]
    assert len(chosen) >= 1000
    return chosen


@cache
def expected() -> Any:
    """Returns the mean of the last states, of length 1."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(minilm()), AutoModel.from_pretrained(minilm()).eval()
    rows, texts = [], list(sentences())
    with torch.inference_mode():
        for start in range(0, len(texts), 50):
            batch = tokenizer(texts[start:start + 50], padding=True, truncation=True, max_length=256,
                              return_tensors="pt")
            states, mask = model(**batch).last_hidden_state, batch["attention_mask"][:, :, None]
            rows.append(torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1)))
    return torch.cat(rows).numpy()


def nearest(vectors: Any) -> Any:
    """Returns the index of each vector's nearest neighbour."""
    likeness = vectors @ vectors.T
    np.fill_diagonal(likeness, -1)
    return likeness.argmax(1)


def found(**options: Any) -> Any:
    with Encoder(minilm(), **options) as encoder:
        assert encoder.dimension == 384 and encoder.max_length == 256
        return encoder.encode(sentences())


@pytest.mark.parametrize("ops", [(), ("torch",)])
def test_vectors_equal_transformers(ops: tuple[str, ...]) -> None:
    vectors = found(ops=ops)
    assert (vectors * expected()).sum(1).min() >= 0.99999
    assert (nearest(vectors) == nearest(expected())).all()
    assert np.abs(np.linalg.norm(vectors, axis=1) - 1).max() < 1e-6


def test_q8_0_keeps_neighbours() -> None:
    vectors = found(quant="q8_0")
    likeness = (vectors * expected()).sum(1)
    assert likeness.min() >= 0.999 and likeness.mean() >= 0.9998, (likeness.min(), likeness.mean())
    assert (nearest(vectors) == nearest(expected())).mean() >= 0.98
