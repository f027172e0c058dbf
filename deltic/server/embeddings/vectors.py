"""From requests for vectors to what the encoder runs, and from its vectors to answers."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltic.embeddings.encoder import check_dimensions, shortened
from deltic.embeddings.types import Item, Vectors
from deltic.errors import LongPromptError, RequestError
from deltic.server.embeddings.schema import EmbeddingsRequest
from deltic.server.embeddings.service import EmbeddingService


def to_embed(service: EmbeddingService, body: EmbeddingsRequest, kind: str | None = None) -> list[Item]:
    """What has to be run for a request; RequestError names what is wrong. kind: of the texts, if not as the request
    says."""
    encoder = service.encoder
    if encoder.scores:
        raise RequestError(f"{service.name} scores documents (/v1/rerank), and gives no vectors", "model")
    check_dimensions(body.dimensions, encoder.dimension)
    if body.normalize is False and encoder.model.recipe.normalize:
        raise RequestError("normalize cannot be false: this model's vectors have length 1", "normalize")
    inputs, most = body.inputs(), body.most
    texts = [row for row in inputs if isinstance(row, str)]
    if texts:
        return encoder.text_items(texts, kind or body.kind, None, body.cuts, "input", None if body.single else 0, most)
    lists = [row[:most] for row in inputs if isinstance(row, list)]
    return [_from_ids(service, row, "input" if body.single else f"input[{index}]", body.cuts)
            for index, row in enumerate(lists)]


def _from_ids(service: EmbeddingService, ids: list[int], field: str, truncate: bool) -> Item:
    texts = service.encoder.texts
    try:
        return texts.from_ids(ids, field)
    except LongPromptError:
        if not truncate:
            raise
        return replace(texts.from_ids(ids[:texts.max_length], field), cut=True)


def listed(found: Sequence[Vectors], body: EmbeddingsRequest, service: EmbeddingService) -> Iterator[dict[str, Any]]:
    """The vectors in OpenAI's form."""
    packed = body.encoding_format == "base64"
    for index, vector in enumerate(_vectors(found, body, service)):
        shown = base64.b64encode(vector.astype(np.dtype("<f4")).tobytes()).decode() if packed else vector.tolist()
        yield {"object": "embedding", "index": index, "embedding": shown}


def rows_of(found: Sequence[Vectors], body: EmbeddingsRequest, service: EmbeddingService) -> Iterator[list[float]]:
    """The numbers of the vectors."""
    return (vector.tolist() for vector in _vectors(found, body, service))


def _vectors(found: Sequence[Vectors], body: EmbeddingsRequest, service: EmbeddingService) -> Iterator[NDArray[Any]]:
    made_unit = bool(body.normalize) and not service.encoder.model.recipe.normalize
    for vectors in found:
        vector = shortened(vectors.dense, body.dimensions, service.encoder.dimension)
        yield vector / max(float(np.linalg.norm(vector)), 1e-12) if made_unit else vector
