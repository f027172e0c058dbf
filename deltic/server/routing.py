"""Routes of the APIs: an endpoint with its key check, the form of its errors and the schema of its body."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Final
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deltic.server.errors import Refuse, openai_error, problem_of
from deltic.server.fields import Fields
from deltic.server.http import EventStream
from deltic.server.records import record_of

IGNORED_HEADER: Final = "x-deltic-ignored"
"""Names the fields of a request that had no effect."""

Endpoint = Callable[[Request], Awaitable[Response]]
Check = Callable[[Request], None]
"""Raises an exception if the request may not be served."""


class ApiRoute(Route):
    """A route of an API. body, query: schemas of its body and of its query parameters. refuse: makes the response to a
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
            response.close()  # otherwise its generation would run without a reader
        raise
    return response
