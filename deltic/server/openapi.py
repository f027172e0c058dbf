"""/openapi.json, made from the routes and the schemas of their bodies."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from deltic import __version__
from deltic.server.anthropic import CountRequest, MessagesRequest
from deltic.server.embeddings import EmbeddingsRequest, EmbedRequest, RerankRequest, ScoreRequest
from deltic.server.errors import Check, answering
from deltic.server.fields import Fields
from deltic.server.http import dump
from deltic.server.model_routes import DetokenizeRequest, TokenizeRequest
from deltic.server.ollama_schema import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaModelRequest,
)
from deltic.server.openai_schema import ChatRequest, CompletionRequest
from deltic.server.responses_schema import ResponsesRequest

Json = dict[str, Any]

BODIES: Final[Mapping[str, type[Fields]]] = {
    "/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest, "/v1/responses": ResponsesRequest,
    "/v1/responses/input_tokens": ResponsesRequest, "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest, "/tokenize": TokenizeRequest, "/detokenize": DetokenizeRequest,
    "/v1/embeddings": EmbeddingsRequest, "/embed": EmbedRequest,
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), RerankRequest),
    **dict.fromkeys(("/v1/score", "/score"), ScoreRequest), "/api/chat": OllamaChatRequest,
    "/api/generate": OllamaGenerateRequest, "/api/embed": OllamaEmbedRequest,
    "/api/embeddings": OllamaEmbeddingsRequest, "/api/show": OllamaModelRequest, "/api/pull": OllamaModelRequest}
"""The body of a POST to a path."""
_OPEN: Final = frozenset(("/", "/health", "/ready"))
"""Paths that need no key."""
_QUERIES: Final[Mapping[str, Mapping[str, Json]]] = {
    "/tokenizer_info": {"model": {"type": "string"}},
    "/v1/responses/{id}/input_items": {"limit": {"type": "integer", "minimum": 1, "maximum": 100},
                                       "order": {"enum": ["asc", "desc"]}, "after": {"type": "string"}}}
_TEXT: Final[Json] = {"type": ["string", "array"], "items": {"type": "object", "required": ["type"], "properties": {
    "type": {"type": "string"}, "text": {"type": "string"}}}}
_MESSAGES: Final[Json] = {"type": "array", "items": {
    "type": "object", "required": ["role"],
    "properties": {"content": _TEXT, "role": {
        "enum": ["system", "developer", "user", "assistant", "tool", "function"]}}}}
_TURNS: Final[Json] = {"type": "array", "minItems": 1, "items": {
    "type": "object", "required": ["role", "content"],
    "properties": {"role": {"enum": ["user", "assistant"]}, "content": _TEXT}}}
_FIELDS: Final[Mapping[type[Fields], Mapping[str, Json]]] = {
    ChatRequest: {"messages": _MESSAGES | {"minItems": 1}}, OllamaChatRequest: {"messages": _MESSAGES},
    OllamaEmbedRequest: {"input": {"type": ["string", "array"], "items": {"type": "string"}}},
    TokenizeRequest: {"messages": _MESSAGES},
    CompletionRequest: {"prompt": {"type": ["string", "array"], "items": {"type": ["string", "integer"]}}},
    MessagesRequest: {"messages": _TURNS}, CountRequest: {"messages": _TURNS},
    EmbeddingsRequest: {"input": {"type": ["string", "array"]}},
    EmbedRequest: {"inputs": {"type": ["string", "array"]}},
    RerankRequest: {name: {"type": "array", "items": {"type": ["string", "object"]}} for name in (
        "documents", "texts")},
    ScoreRequest: {name: {"type": ["string", "array"], "items": {"type": "string"}} for name in ("text_1", "text_2")},
    ResponsesRequest: {"input": {"type": ["string", "array"], "items": {"type": "object"}}}}
"""Schemas of fields that endpoints check themselves."""
_ERROR: Final[Json] = {"type": "object", "required": ["error"], "properties": {"error": {
    "type": "object", "required": ["message", "type"],
    "properties": {"message": {"type": "string"}, "type": {"type": "string"}}}}}


def route(routes: Sequence[BaseRoute], check: Check) -> Route:
    """Returns the route of the document for these routes and itself."""
    async def answer(_: Request) -> Response:
        return Response(page, media_type="application/json")

    own = Route("/openapi.json", answering(answer, check))
    page = dump(document([*routes, own]))
    return own


def document(routes: Sequence[BaseRoute]) -> Json:
    """Returns the routes as OpenAPI 3.1, without the files of the chat page."""
    schemas: Json = {"Error": _ERROR}
    paths: Json = {}
    for found in routes:
        if isinstance(found, Route) and not found.path.startswith("/page/"):
            path = re.sub(r":\w+}", "}", found.path)
            for method in sorted((found.methods or set()) - {"HEAD"}):
                paths.setdefault(path, {})[method.lower()] = _operation(path, method, schemas)
    return {"openapi": "3.1.0", "info": {"title": "deltic", "version": __version__}, "paths": paths,
            "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}}


def _operation(path: str, method: str, schemas: Json) -> Json:
    found: Json = {"operationId": f"{method.lower()}{re.sub(r'[^a-z]+', '_', path)}", "responses": {
        "200": {"description": "the answer; a stream of events if the body has `stream: true`"},
        "default": {"description": "an error, in the form of the path's clients",
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}}}
    if path not in _OPEN:
        found["security"] = [{"key": []}, {}]
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
                  for name in re.findall(r"{(\w+)}", path)]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in _QUERIES.get(path, {}).items()]
    if parameters:
        found["parameters"] = parameters
    if method == "POST" and path in BODIES:
        body = BODIES[path]
        schemas |= _schemas(body)
        found["requestBody"] = {"required": True, "content": {"application/json": {
            "schema": {"$ref": f"#/components/schemas/{body.__name__}"}}}}
    return found


def _schemas(body: type[Fields]) -> Json:
    """Returns the schema of a body and those that it refers to. Other servers' fields are accepted, too."""
    whole: Json = body.model_json_schema(ref_template="#/components/schemas/{model}")
    found: Json = whole.pop("$defs", {}) | {body.__name__: whole}
    whole["properties"] |= _FIELDS.get(body, {})
    for schema in found.values():
        schema.pop("additionalProperties", None)
    return found

