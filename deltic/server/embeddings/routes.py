"""/v1/embeddings as OpenAI has it, /v1/rerank as Cohere and Jina have it, /v1/score as vLLM has it."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deltic.encoders.encoder import check_dimensions, shortened
from deltic.encoders.items import Item, Vectors
from deltic.errors import LongPromptError, RequestError
from deltic.server.embeddings.schema import EmbeddingsRequest, RerankRequest, ScoreRequest
from deltic.server.embeddings.service import EmbeddingService, Services
from deltic.server.http import Check, answering, written
from deltic.server.openai.shapes import error_response

Body = TypeVar("Body", EmbeddingsRequest, RerankRequest, ScoreRequest)
Prepared = TypeVar("Prepared")


def routes(services: Services, check: Check) -> list[Route]:
    """None if there are no services."""
    if not services.services:
        return []
    endpoints = _Endpoints(services)
    paths = {"/v1/embeddings": endpoints.embed, "/v1/rerank": endpoints.rerank, "/v2/rerank": endpoints.rerank,
             "/rerank": endpoints.rerank, "/v1/score": endpoints.score, "/score": endpoints.score}
    return [Route(path, answering(endpoint, check, error_response), methods=["POST"])
            for path, endpoint in paths.items()]


@dataclass(frozen=True, slots=True)
class _Endpoints:
    services: Services

    async def embed(self, request: Request) -> Response:
        service, body, items = await self._read(request, EmbeddingsRequest, _to_embed)
        found = await self.services.run(service, request, items, body.salt)
        rows = _rows(found, body.dimensions, service.encoder.dimension, body.encoding_format == "base64")
        answer = {"object": "list", "data": rows, "model": service.name, "usage": _usage(items)}
        return await written(request, answer, len(found) * service.encoder.dimension)

    async def rerank(self, request: Request) -> Response:
        service, body, (items, texts) = await self._read(request, RerankRequest, _to_rank)
        scores = service.encoder.scores_of(await self.services.run(service, request, items, body.salt))
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:body.top_n]
        results = [{"index": index, "relevance_score": scores[index],
                    **({"document": {"text": texts[index]}} if body.return_documents else {})} for index in order]
        tokens = _usage(items)
        answer = {"id": f"rerank-{uuid.uuid4().hex}", "model": service.name, "results": iter(results), "usage": tokens,
                  "meta": {"billed_units": {"search_units": 1}, "tokens": {"input_tokens": tokens["prompt_tokens"]}}}
        return await written(request, answer, sum(map(len, texts)) if body.return_documents else len(results))

    async def score(self, request: Request) -> Response:
        service, body, parts = await self._read(request, ScoreRequest, _to_score)
        found = await self.services.run(service, request, [item for part in parts for item in part], body.salt)
        scores, done = list[float](), 0
        for part in parts:
            scores += service.encoder.scores_of(found[done:done + len(part)])
            done += len(part)
        data = ({"index": index, "object": "score", "score": score} for index, score in enumerate(scores))
        answer = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": service.created,
                  "model": service.name, "data": data, "usage": _usage([item for part in parts for item in part])}
        return await written(request, answer, len(scores))

    async def _read(self, request: Request, schema: type[Body], prepare: Callable[[EmbeddingService, Body], Prepared]
                    ) -> tuple[EmbeddingService, Body, Prepared]:
        async def choose(body: Body) -> EmbeddingService:
            return self.services.find(body.model)

        return await self.services.intake.read(request, schema, choose, prepare)


def _to_embed(service: EmbeddingService, body: EmbeddingsRequest) -> list[Item]:
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


def _to_rank(service: EmbeddingService, body: RerankRequest) -> tuple[list[Item], list[str]]:
    texts = body.texts()
    if not texts:
        raise RequestError("documents is empty: give at least one", "documents")
    return service.encoder.pair_items(body.query, texts, body.truncate is not False), texts


def _to_score(service: EmbeddingService, body: ScoreRequest) -> list[list[Item]]:
    items = list[list[Item]]()
    for index, (query, documents) in enumerate(body.pairs()):
        with body.naming(index):
            items.append(service.encoder.pair_items(query, documents, bool(body.truncate)))
    return items


def _rows(found: list[Vectors], dimensions: int | None, whole: int, packed: bool) -> Iterator[dict[str, Any]]:
    for index, vectors in enumerate(found):
        vector = shortened(vectors.dense, dimensions, whole)
        shown = base64.b64encode(vector.astype(np.dtype("<f4")).tobytes()).decode() if packed else vector.tolist()
        yield {"object": "embedding", "index": index, "embedding": shown}


def _usage(items: list[Item]) -> dict[str, int]:
    tokens = sum(map(len, items))
    return {"prompt_tokens": tokens, "total_tokens": tokens}
