"""/v1/embeddings as OpenAI has it, /v1/rerank as Cohere and Jina have it, /v1/score as vLLM has it."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deltic.encoders.items import Item
from deltic.errors import RequestError
from deltic.server.embeddings.schema import EmbeddingsRequest, RerankRequest, ScoreRequest
from deltic.server.embeddings.service import EmbeddingService, Services
from deltic.server.embeddings.vectors import listed, to_embed
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
        service, body, items = await self._read(request, EmbeddingsRequest, to_embed)
        found = await self.services.run(service, request, items)
        rows = listed(found, body.dimensions, service.encoder.dimension, body.encoding_format == "base64")
        answer = {"object": "list", "data": rows, "model": service.name, "usage": _usage(items)}
        return await written(answer, len(found) * service.encoder.dimension)

    async def rerank(self, request: Request) -> Response:
        service, body, (items, texts) = await self._read(request, RerankRequest, _to_rank)
        scores = service.encoder.scores_of(await self.services.run(service, request, items))
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:body.top_n]
        results = [{"index": index, "relevance_score": scores[index],
                    **({"document": {"text": texts[index]}} if body.return_documents else {})} for index in order]
        tokens = _usage(items)
        answer = {"id": f"rerank-{uuid.uuid4().hex}", "model": service.name, "results": iter(results), "usage": tokens,
                  "meta": {"billed_units": {"search_units": 1}, "tokens": {"input_tokens": tokens["prompt_tokens"]}}}
        return await written(answer, sum(map(len, texts)) if body.return_documents else len(results))

    async def score(self, request: Request) -> Response:
        service, _, parts = await self._read(request, ScoreRequest, _to_score)
        found = await self.services.run(service, request, [item for part in parts for item in part])
        scores, done = list[float](), 0
        for part in parts:
            scores += service.encoder.scores_of(found[done:done + len(part)])
            done += len(part)
        data = ({"index": index, "object": "score", "score": score} for index, score in enumerate(scores))
        answer = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": service.created,
                  "model": service.name, "data": data, "usage": _usage([item for part in parts for item in part])}
        return await written(answer, len(scores))

    async def _read(self, request: Request, schema: type[Body], prepare: Callable[[EmbeddingService, Body], Prepared]
                    ) -> tuple[EmbeddingService, Body, Prepared]:
        async def choose(body: Body) -> EmbeddingService:
            return self.services.find(body.model)

        return await self.services.intake.read(request, schema, choose, prepare)


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


def _usage(items: list[Item]) -> dict[str, int]:
    tokens = sum(map(len, items))
    return {"prompt_tokens": tokens, "total_tokens": tokens}
