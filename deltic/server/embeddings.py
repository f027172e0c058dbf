"""Embeddings of texts and reranking scores of documents.

/v1/embeddings follows OpenAI, /v1/rerank Cohere and Jina, /v1/score vLLM; /embed and /rerank follow
text-embeddings-inference.
"""

from __future__ import annotations

import asyncio
import base64
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deltic.embeddings.batcher import EncodeJob
from deltic.embeddings.encoder import Encoder, check_dimensions, shortened, sound
from deltic.embeddings.types import Item, Vectors
from deltic.errors import BusyError, LongPromptError, RequestError, UnavailableError, show
from deltic.server.body import BodyReader
from deltic.server.errors import ProblemError
from deltic.server.fields import SaltedFields, renamed
from deltic.server.http import while_connected, written
from deltic.server.metrics import Metric, page
from deltic.server.records import record_of, salt_of
from deltic.server.routing import ApiRoute, Check

ENDING: Final = "the server is shutting down"
_POLL: Final = 0.02
"""Seconds between two checks for running requests at shutdown."""
_KINDS: Final[Mapping[str | None, str | None]] = {
    None: None, "query": "query", "search_query": "query", "passage": "passage", "document": "passage",
    "search_document": "passage", "retrieval.query": "query", "retrieval.passage": "passage"}
_METRICS: Final = (
    Metric("texts_total", "counter", "Texts that were encoded.", lambda batcher: batcher.texts),
    Metric("text_tokens_total", "counter", "Their tokens.", lambda batcher: batcher.tokens),
    Metric("text_batches_total", "counter", "Batches of these texts.", lambda batcher: batcher.batches),
    Metric("text_requests_displaced_total", "counter", "Requests that gave their places to those of clients with fewer "
           "tokens.", lambda batcher: batcher.displaced),
    Metric("text_tokens_waiting", "gauge", "Tokens of unfinished texts.", lambda batcher: batcher.waiting),
)

Json = dict[str, Any]
Prepared = TypeVar("Prepared")


# Models


@dataclass(frozen=True, slots=True)
class EmbeddingService:
    """An encoder and its name for clients."""

    name: str
    encoder: Encoder
    created: int = field(default_factory=lambda: int(time.time()))

    def fields(self) -> dict[str, object]:
        """Returns the model as /v1/models lists it."""
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "deltic",
                "max_model_len": self.encoder.max_length}


@dataclass(slots=True)
class Services:
    """The encoders of a server. draining: no more requests are accepted."""

    services: tuple[EmbeddingService, ...]
    reader: BodyReader
    draining: bool = False
    _jobs: set[EncodeJob] = field(default_factory=set)
    _running: int = 0

    def __iter__(self) -> Iterator[EmbeddingService]:
        return iter(self.services)

    def find(self, model: str | None) -> EmbeddingService:
        """Returns the model of this name, or the first one if no name is given. Raises status 404 if there is none."""
        found = self.services[0] if model in (None, "default") else self.named(model)
        if found is not None:
            return found
        names = ", ".join(repr(service.name) for service in self.services)
        raise ProblemError(404, f"the model {show(model)} does not exist, or gives no vectors: this server has {names}",
                           "model", "model_not_found")

    def named(self, model: str | None) -> EmbeddingService | None:
        names = (model, (model or "").removesuffix(":latest"))  # Ollama's clients append ":latest"
        return next((service for name in names for service in self.services
                     if name in (service.name, service.encoder.name)), None)

    async def run(self, service: EmbeddingService, request: Request, items: Sequence[Item], salt: str
                  ) -> list[Vectors]:
        """Returns the vectors of the items, unless the client disconnects first. salt: the salt of the request body."""
        if self.draining:
            raise BusyError(f"{ENDING}: try again later, or elsewhere")
        record, job = record_of(request), None
        salt = salt_of(record.prefix_owner, salt)
        if salt:
            items = [replace(item, cache_salt=salt) for item in items]
        self._running += 1
        try:
            job = await record.work(lambda: service.encoder.submit(items, client=record.client_id))
            self._jobs.add(job)
            return sound(await while_connected(request.receive, _done(asyncio.wrap_future(job.future))))
        finally:
            self._running -= 1
            if job is not None:
                self._jobs.discard(job)
                job.future.cancel()

    async def drain(self, grace: float) -> None:
        """Stops accepting requests, and ends the running ones after `grace` seconds."""
        self.draining = True
        end = time.monotonic() + grace
        while self._running and time.monotonic() < end:
            await asyncio.sleep(_POLL)
        await self.stop()

    async def stop(self) -> None:
        """Ends all requests now."""
        self.draining = True
        for job in tuple(self._jobs):
            job.fail(UnavailableError(ENDING))

    def waiting(self) -> int:
        """Returns the number of tokens in unfinished texts."""
        return sum(service.encoder.batcher.waiting for service in self.services)

    def metrics(self) -> str:
        """Returns the samples for /metrics."""
        return page(_METRICS, {service.name: service.encoder.batcher for service in self.services})


async def _done(future: asyncio.Future[list[Vectors]]) -> list[Vectors]:
    return await future


# Requests


class EmbeddingsRequest(SaltedFields):
    """The body of /v1/embeddings. input_type, task: kind of text, for models with prompts. truncate: cut long texts.
    truncate_prompt_tokens: cut texts to this many tokens; -1: to the model's maximum."""

    counted: ClassVar[Mapping[str, str]] = {"input": "max_texts"}
    schemas: ClassVar[Mapping[str, Any]] = {"input": {"type": ["string", "array"]}}
    elsewhere: ClassVar[Mapping[str, str]] = dict.fromkeys(("messages", "inputs", "texts", "prompt"), "input")

    model: str | None = None
    input: Any
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    input_type: str | None = None
    task: str | None = None
    truncate: bool | None = None
    truncate_prompt_tokens: int | None = None
    normalize: bool | None = None

    @property
    def kind(self) -> str | None:
        """Returns the kind of text: `query`, `passage` or None."""
        for name, value in (("input_type", self.input_type), ("task", self.task)):
            if value not in _KINDS:
                raise RequestError(f"{name} must be query or passage, not {show(value)}", name)
        return _KINDS[self.input_type if self.task is None else self.task]

    @property
    def most(self) -> int | None:
        """Returns the number of tokens of a text to read, if it is lower than the model's maximum."""
        most = self.truncate_prompt_tokens
        if most is not None and most < 1 and most != -1:
            raise RequestError(f"truncate_prompt_tokens must be at least 1, or -1 for what the model reads, not {most}",
                               "truncate_prompt_tokens")
        return None if most == -1 else most

    @property
    def cuts(self) -> bool:
        """True if long texts are cut."""
        return bool(self.truncate) or self.truncate_prompt_tokens is not None

    @property
    def single(self) -> bool:
        """Returns True if the input is one text, not a list."""
        given = self.input
        return not isinstance(given, list) or (bool(given) and type(given[0]) is int)

    def inputs(self) -> list[str] | list[list[int]]:
        """Returns the inputs as texts or as lists of token ids."""
        rows = [self.input] if self.single else self.input
        if not rows or (self.single and rows == [""]):
            raise RequestError("input is empty: give at least one text", "input")
        if all(isinstance(row, str) for row in rows):
            if "" in rows:
                raise RequestError(f"input[{rows.index('')}] is empty: leave it out", f"input[{rows.index('')}]")
            return [str(row) for row in rows]
        if all(isinstance(row, list) and all(type(id) is int for id in row) for row in rows):
            return rows
        raise RequestError("input must be text, a list of texts, a list of token ids or a list of such lists, not "
                           f"{show(self.input)}", "input")


class EmbedRequest(SaltedFields):
    """The body of /embed. prompt_name: the kind of text, as the name of its prompt in the model's files."""

    counted: ClassVar[Mapping[str, str]] = {"inputs": "max_texts"}
    schemas: ClassVar[Mapping[str, Any]] = {"inputs": {"type": ["string", "array"]}}

    model: str | None = None
    inputs: Any
    normalize: bool | None = None
    truncate: bool | None = None
    dimensions: int | None = None
    prompt_name: str | None = None


class RerankRequest(SaltedFields):
    """The body of /v1/rerank. truncate: cut long documents (default). texts: the documents in the format of
    text-embeddings-inference, which also changes the format of the answer. instruction: the task description for a
    decoder model. The model's maximum length applies, not max_tokens_per_doc."""

    counted: ClassVar[Mapping[str, str]] = {"documents": "max_texts", "texts": "max_texts"}
    schemas: ClassVar[Mapping[str, Any]] = {
        name: {"type": "array", "items": {"type": ["string", "object"]}} for name in ("documents", "texts")}

    model: str | None = None
    query: str
    documents: list[Any] | None = None
    texts: list[Any] | None = None
    instruction: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    truncate: bool | None = None
    max_tokens_per_doc: int | None = None

    def document_texts(self) -> list[str]:
        """Returns the documents, which may be texts or objects with a `text`."""
        name, given = ("documents", self.documents) if self.texts is None else ("texts", self.texts)
        if given is None:
            raise RequestError("documents is missing", "documents")
        if not given:
            raise RequestError(f"{name} is empty: give at least one", name)
        found: list[Any] = [document.get("text") if isinstance(document, dict) else document for document in given]
        for index, text in enumerate(found):
            if not isinstance(text, str):
                raise RequestError(f"{name}[{index}] must be text, or an object with one as `text`, not "
                                   f"{show(given[index])}", f"{name}[{index}]")
        if self.top_n is not None and self.top_n < 1:
            raise RequestError(f"top_n must be at least 1, not {self.top_n}", "top_n")
        return found


class ScoreRequest(SaltedFields):
    """The body of /v1/score: one text against many, or pairs of texts."""

    counted: ClassVar[Mapping[str, str]] = {"text_1": "max_texts", "text_2": "max_texts"}
    schemas: ClassVar[Mapping[str, Any]] = {
        name: {"type": ["string", "array"], "items": {"type": "string"}} for name in ("text_1", "text_2")}

    model: str | None = None
    text_1: Any
    text_2: Any
    truncate: bool | None = None
    instruction: str | None = None

    def pairs(self) -> list[tuple[str, list[str]]]:
        """Returns the queries, each with its documents."""
        first, second = _texts(self.text_1, "text_1"), _texts(self.text_2, "text_2")
        if len(first) == 1:
            return [(first[0], second)]
        if len(first) != len(second):
            raise RequestError(f"text_1 has {len(first)} texts and text_2 has {len(second)}: give one, or equally many",
                               "text_1")
        return [(query, [document]) for query, document in zip(first, second, strict=True)]

    @contextmanager
    def naming(self, index: int) -> Iterator[None]:
        """Makes errors about a pair's query or document name the request field that contains it."""
        try:
            yield
        except RequestError as error:
            found = re.fullmatch(r"query|documents\[(\d+)\]", error.field or "")
            if not found:
                raise
            name, given = ("text_2", self.text_2) if found[1] else ("text_1", self.text_1)
            if isinstance(given, list):
                paired = isinstance(self.text_1, list) and len(self.text_1) > 1
                name += f"[{int(found[1]) if found[1] and not paired else index}]"
            raise type(error)(str(error).replace(found[0], name, 1), name) from error


def _texts(given: Any, field: str) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise RequestError(f"{field} must be text or a list with at least one, not {show(given)}", field)
    return texts


Body = TypeVar("Body", EmbeddingsRequest, EmbedRequest, RerankRequest, ScoreRequest)


# Endpoints


def routes(services: Services, check: Check) -> list[Route]:
    """Returns the routes for embeddings and scores, or no routes if there are no encoders."""
    if not services.services:
        return []
    endpoints = _EmbeddingEndpoints(services)
    return [ApiRoute("/v1/embeddings", endpoints.embeddings, check, body=EmbeddingsRequest),
            ApiRoute("/embed", endpoints.embed, check, body=EmbedRequest),
            *(ApiRoute(path, endpoints.rerank, check, body=RerankRequest)
              for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
            *(ApiRoute(path, endpoints.score, check, body=ScoreRequest) for path in ("/v1/score", "/score"))]


@dataclass(frozen=True, slots=True)
class _EmbeddingEndpoints:
    services: Services

    async def embeddings(self, request: Request) -> Response:
        service, body, items = await self._read(request, EmbeddingsRequest, to_embed)
        found = await self.services.run(service, request, items, body.salt)
        answer = {"object": "list", "data": _listed(found, body, service), "model": service.name,
                  "usage": _usage(items)}
        return await written(request, answer, len(found) * service.encoder.dimension)

    async def embed(self, request: Request) -> Response:
        service, body, (items, asked) = await self._read(request, EmbedRequest, _translated)
        found = await self.services.run(service, request, items, body.salt)
        return await written(request, rows_of(found, asked, service), len(found) * service.encoder.dimension)

    async def rerank(self, request: Request) -> Response:
        service, body, (items, texts) = await self._read(request, RerankRequest, _to_rank)
        scores = service.encoder.scores_of(await self.services.run(service, request, items, body.salt))
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:body.top_n]
        size = sum(map(len, texts)) if body.return_documents else len(order)
        if body.texts is not None:
            return await written(request, (
                {"index": index, "score": scores[index], **({"text": texts[index]} if body.return_documents else {})}
                for index in order), size)
        results = ({"index": index, "relevance_score": scores[index],
                    **({"document": {"text": texts[index]}} if body.return_documents else {})} for index in order)
        usage = _usage(items)
        meta = {"billed_units": {"search_units": 1}, "tokens": {"input_tokens": usage["prompt_tokens"]}}
        answer = {"id": f"rerank-{uuid.uuid4().hex}", "model": service.name, "results": results, "usage": usage,
                  "meta": meta}
        return await written(request, answer, size)

    async def score(self, request: Request) -> Response:
        service, body, groups = await self._read(request, ScoreRequest, _to_score)
        items = [item for group in groups for item in group]
        found = await self.services.run(service, request, items, body.salt)
        scores = list[float]()
        for group in groups:
            scores += service.encoder.scores_of(found[len(scores):len(scores) + len(group)])
        data = ({"index": index, "object": "score", "score": score} for index, score in enumerate(scores))
        answer = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": service.created,
                  "model": service.name, "data": data, "usage": _usage(items)}
        return await written(request, answer, len(scores))

    async def _read(self, request: Request, schema: type[Body], prepare: Callable[[EmbeddingService, Body], Prepared]
                    ) -> tuple[EmbeddingService, Body, Prepared]:
        async def choose(body: Body) -> EmbeddingService:
            return self.services.find(body.model)

        return await self.services.reader.read(request, schema, choose, prepare)


def to_embed(service: EmbeddingService, body: EmbeddingsRequest, kind: str | None = None) -> list[Item]:
    """Returns the items to encode. kind: the kind of text, which overrides the body's."""
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


def _translated(service: EmbeddingService, body: EmbedRequest) -> tuple[list[Item], EmbeddingsRequest]:
    asked = EmbeddingsRequest(input=body.inputs, truncate=bool(body.truncate), dimensions=body.dimensions,
                              normalize=body.normalize is not False)
    with renamed({"input": "inputs", "kind": "prompt_name"}):
        return to_embed(service, asked, body.prompt_name), asked


def _to_rank(service: EmbeddingService, body: RerankRequest) -> tuple[list[Item], list[str]]:
    texts = body.document_texts()
    with renamed({} if body.texts is None else {"documents": "texts"}):
        return service.encoder.pair_items(body.query, texts, body.truncate is not False, body.instruction), texts


def _to_score(service: EmbeddingService, body: ScoreRequest) -> list[list[Item]]:
    items = list[list[Item]]()
    for index, (query, documents) in enumerate(body.pairs()):
        with body.naming(index):
            items.append(service.encoder.pair_items(query, documents, bool(body.truncate), body.instruction))
    return items


def _usage(items: list[Item]) -> dict[str, int]:
    tokens = sum(map(len, items))
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _listed(found: Sequence[Vectors], body: EmbeddingsRequest, service: EmbeddingService) -> Iterator[Json]:
    """Yields the vectors in OpenAI's form."""
    packed = body.encoding_format == "base64"
    for index, vector in enumerate(_vectors(found, body, service)):
        shown = base64.b64encode(vector.astype(np.dtype("<f4")).tobytes()).decode() if packed else vector.tolist()
        yield {"object": "embedding", "index": index, "embedding": shown}


def rows_of(found: Sequence[Vectors], body: EmbeddingsRequest, service: EmbeddingService) -> Iterator[list[float]]:
    """Yields the components of each vector."""
    return (vector.tolist() for vector in _vectors(found, body, service))


def _vectors(found: Sequence[Vectors], body: EmbeddingsRequest, service: EmbeddingService) -> Iterator[NDArray[Any]]:
    normalizes = bool(body.normalize) and not service.encoder.model.recipe.normalize
    for vectors in found:
        vector = shortened(vectors.dense, body.dimensions, service.encoder.dimension)
        yield vector / max(float(np.linalg.norm(vector)), 1e-12) if normalizes else vector
