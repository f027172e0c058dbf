"""/openapi.json, made from the routes and the schemas of their bodies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from deltic import __version__
from deltic.server.fields import Fields
from deltic.server.http import dump
from deltic.server.routing import ApiRoute, Check

Json = dict[str, Any]

_OPEN: Final = frozenset(("/", "/health", "/ready"))
"""Paths that need no key."""
_ERROR: Final[Json] = {"type": "object", "required": ["error"], "properties": {"error": {
    "type": "object", "required": ["message", "type"],
    "properties": {"message": {"type": "string"}, "type": {"type": "string"}}}}}


def route(routes: Sequence[BaseRoute], check: Check) -> Route:
    """Returns the route of the document for these routes and itself."""
    async def answer(_: Request) -> Response:
        return Response(page, media_type="application/json")

    own = ApiRoute("/openapi.json", answer, check)
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
                paths.setdefault(path, {})[method.lower()] = _operation(found, path, method, schemas)
    return {"openapi": "3.1.0", "info": {"title": "deltic", "version": __version__}, "paths": paths,
            "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}}


def _operation(route: Route, path: str, method: str, schemas: Json) -> Json:
    operation: Json = {"operationId": f"{method.lower()}{re.sub(r'[^a-z]+', '_', path)}", "responses": {
        "200": {"description": "the answer; a stream of events if the body has `stream: true`"},
        "default": {"description": "an error, in the form of the path's clients",
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}}}
    if path not in _OPEN:
        operation["security"] = [{"key": []}, {}]
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
                  for name in re.findall(r"{(\w+)}", path)]
    if isinstance(route, ApiRoute):
        parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in route.query.items()]
        if route.body:
            schemas |= _schemas(route.body)
            reference = {"$ref": f"#/components/schemas/{route.body.__name__}"}
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
    if parameters:
        operation["parameters"] = parameters
    return operation


def _schemas(body: type[Fields]) -> Json:
    """Returns the schema of a body and those that it refers to. Other servers' fields are accepted, too."""
    whole: Json = body.model_json_schema(ref_template="#/components/schemas/{model}")
    found: Json = whole.pop("$defs", {}) | {body.__name__: whole}
    whole["properties"] |= body.schemas
    for schema in found.values():
        schema.pop("additionalProperties", None)
    return found
