"""From requests for vectors to what the encoder runs, and from its vectors to answers."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from deltic.encoders.encoder import check_dimensions, shortened
from deltic.encoders.items import Item, Vectors
from deltic.errors import LongPromptError, RequestError
from deltic.server.embeddings.schema import EmbeddingsRequest
from deltic.server.embeddings.service import EmbeddingService


def to_embed(service: EmbeddingService, body: EmbeddingsRequest) -> list[Item]:
    """What has to be run for a request; RequestError names what is wrong."""
    encoder = service.encoder
    if encoder.scores:
        raise RequestError(f"{service.name} scores documents (/v1/rerank), and gives no vectors", "model")
    check_dimensions(body.dimensions, encoder.dimension)
    inputs = body.inputs()
    texts = [row for row in inputs if isinstance(row, str)]
    if texts:
        return encoder.text_items(texts, body.kind, truncate=bool(body.truncate), start=None if body.single else 0)
    lists = [row for row in inputs if isinstance(row, list)]
    return [_from_ids(service, row, "input" if body.single else f"input[{index}]", bool(body.truncate))
            for index, row in enumerate(lists)]


def _from_ids(service: EmbeddingService, ids: list[int], field: str, truncate: bool) -> Item:
    texts = service.encoder.texts
    try:
        return texts.from_ids(ids, field)
    except LongPromptError:
        if not truncate:
            raise
        return replace(texts.from_ids(ids[:texts.max_length], field), cut=True)


def listed(found: list[Vectors], dimensions: int | None, whole: int, packed: bool) -> Iterator[dict[str, Any]]:
    """The vectors in OpenAI's form. packed: in base64."""
    for index, vectors in enumerate(found):
        vector = shortened(vectors.dense, dimensions, whole)
        shown = base64.b64encode(vector.astype(np.dtype("<f4")).tobytes()).decode() if packed else vector.tolist()
        yield {"object": "embedding", "index": index, "embedding": shown}


def rows_of(found: Sequence[Vectors], dimensions: int | None, service: EmbeddingService) -> Iterator[list[float]]:
    """The numbers of the vectors."""
    return (shortened(vectors.dense, dimensions, service.encoder.dimension).tolist() for vectors in found)
