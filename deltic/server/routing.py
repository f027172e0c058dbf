"""Routes of the APIs: an endpoint with its key check, its error format and the schema of its body.

/openapi.json is generated from the routes and the schemas of their bodies.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from deltic import __version__
from deltic.server.errors import Refuse, openai_error, problem_of
from deltic.server.fields import Fields
from deltic.server.http import EventStream, dump
from deltic.server.records import record_of

IGNORED_HEADER: Final = "x-deltic-ignored"
"""Response header with the names of request fields that had no effect."""

Json = dict[str, Any]

_OPEN: Final = frozenset(("/", "/health", "/ready"))
"""Paths that need no API key."""
_ERROR: Final[Json] = {"type": "object", "required": ["error"], "properties": {"error": {
    "type": "object", "required": ["message", "type"],
    "properties": {"message": {"type": "string"}, "type": {"type": "string"}}}}}

Endpoint = Callable[[Request], Awaitable[Response]]
Check = Callable[[Request], None]
"""Function that raises an exception if the request may not be served."""


class ApiRoute(Route):
    """A route of an API. body, query: schemas of the body and of the query parameters. refuse: makes the response to a
    request that fails."""

    def __init__(self, path: str, endpoint: Endpoint, check: Check, *, body: type[Fields] | None = None,
                 method: str = "", refuse: Refuse = openai_error, query: Mapping[str, Any] = {}) -> None:
        method = method or ("POST" if body else "GET")
        super().__init__(path, answering(endpoint, check, refuse), methods=[method])
        self.body = body
        self.query = query


def answering(endpoint: Endpoint, check: Check, refuse: Refuse) -> Endpoint:
    """Wraps an endpoint: checks the key, turns exceptions into responses, and names ignored fields in a header."""
    async def answer(request: Request) -> Response:
        record = record_of(request)
        record.served = True
        try:
            check(request)
            return _with_ignored(await endpoint(request), record.ignored)
        except Exception as error:
            problem = problem_of(error)
            record.problem = {"param": problem.param, "code": problem.code}
            return refuse(replace(problem, request_id=record.id))
    return answer


def _with_ignored(response: Response, ignored: tuple[str, ...]) -> Response:
    try:
        if ignored:
            response.headers[IGNORED_HEADER] = ", ".join(quote(name, errors="replace") for name in ignored)
    except BaseException:
        if isinstance(response, EventStream):
            response.close()  # otherwise the response's generation would run without a reader
        raise
    return response


def openapi_route(routes: Sequence[BaseRoute], check: Check) -> Route:
    """Returns the route of the OpenAPI document, which describes these routes and itself."""
    async def answer(_: Request) -> Response:
        return Response(page, media_type="application/json")

    own = ApiRoute("/openapi.json", answer, check)
    page = dump(openapi([*routes, own]))
    return own


def openapi(routes: Sequence[BaseRoute]) -> Json:
    """Returns the routes as an OpenAPI 3.1 document, without the files of the chat page."""
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


@cache
def _schemas(body: type[Fields]) -> Json:
    """Returns the schema of a body and the schemas that it refers to. Other servers' fields are also accepted."""
    whole: Json = body.model_json_schema(ref_template="#/components/schemas/{model}")
    found: Json = whole.pop("$defs", {}) | {body.__name__: whole}
    whole["properties"] |= body.schemas
    for schema in found.values():
        schema.pop("additionalProperties", None)
    return found
