"""/v1/embeddings as OpenAI has it, /v1/rerank as Cohere and Jina have it, /v1/score as vLLM has it, /embed and /rerank
as text-embeddings-inference has them."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deltic.embeddings.types import Item
from deltic.server.body import renamed
from deltic.server.embeddings.schema import EmbeddingsRequest, EmbedRequest, RerankRequest, ScoreRequest
from deltic.server.embeddings.service import EmbeddingService, Services
from deltic.server.embeddings.vectors import listed, rows_of, to_embed
from deltic.server.http import Check, answering, written
from deltic.server.openai.formatting import error_response

Body = TypeVar("Body", EmbeddingsRequest, EmbedRequest, RerankRequest, ScoreRequest)
Prepared = TypeVar("Prepared")


def routes(services: Services, check: Check) -> list[Route]:
    """None if there are no services."""
    if not services.services:
        return []
    endpoints = _EmbeddingEndpoints(services)
    paths = {"/v1/embeddings": endpoints.embed, "/embed": endpoints.embed_plainly,
             "/v1/rerank": endpoints.rerank, "/v2/rerank": endpoints.rerank,
             "/rerank": endpoints.rerank, "/v1/score": endpoints.score, "/score": endpoints.score}
    return [Route(path, answering(endpoint, check, error_response), methods=["POST"])
            for path, endpoint in paths.items()]


@dataclass(frozen=True, slots=True)
class _EmbeddingEndpoints:
    services: Services

    async def embed(self, request: Request) -> Response:
        service, body, items = await self._read(request, EmbeddingsRequest, to_embed)
        found = await self.services.run(service, request, items, body.salt)
        answer = {"object": "list", "data": listed(found, body, service), "model": service.name, "usage": _usage(items)}
        return await written(request, answer, len(found) * service.encoder.dimension)

    async def embed_plainly(self, request: Request) -> Response:
        service, body, (items, asked) = await self._read(request, EmbedRequest, _to_embed_plainly)
        found = await self.services.run(service, request, items, body.salt)
        return await written(request, rows_of(found, asked, service), len(found) * service.encoder.dimension)

    async def rerank(self, request: Request) -> Response:
        service, body, (items, texts) = await self._read(request, RerankRequest, _to_rank)
        scores = service.encoder.scores_of(await self.services.run(service, request, items, body.salt))
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:body.top_n]
        if body.texts is not None:
            told = texts if body.return_documents else []
            named = ({"index": index, "score": scores[index]} | ({"text": told[index]} if told else {})
                     for index in order)
            return await written(request, named, sum(map(len, texts)) if body.return_documents else len(order))
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


def _to_rank(service: EmbeddingService, body: RerankRequest) -> tuple[list[Item], list[str]]:
    texts = body.read()
    with renamed({} if body.texts is None else {"documents": "texts"}):
        return service.encoder.pair_items(body.query, texts, body.truncate is not False, body.instruction), texts


def _to_embed_plainly(service: EmbeddingService, body: EmbedRequest) -> tuple[list[Item], EmbeddingsRequest]:
    asked = EmbeddingsRequest(input=body.inputs, truncate=bool(body.truncate), dimensions=body.dimensions,
                              normalize=body.normalize is not False)
    with renamed({"input": "inputs", "kind": "prompt_name"}):
        return to_embed(service, asked, body.prompt_name), asked


def _to_score(service: EmbeddingService, body: ScoreRequest) -> list[list[Item]]:
    items = list[list[Item]]()
    for index, (query, documents) in enumerate(body.pairs()):
        with body.naming(index):
            items.append(service.encoder.pair_items(query, documents, bool(body.truncate), body.instruction))
    return items


def _usage(items: list[Item]) -> dict[str, int]:
    tokens = sum(map(len, items))
    return {"prompt_tokens": tokens, "total_tokens": tokens}
