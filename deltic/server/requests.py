"""/v1/requests: what runs and waits, and the end of what is not wanted any more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deltic.errors import show
from deltic.server.http import Check, Problem, ProblemError, answering, json_response
from deltic.server.openai.formatting import Json, error_response
from deltic.server.records import ActiveRequests, RequestRecord, record_of

_PREPARING: Json = {"status": "preparing", "prompt_tokens": None, "prompt_tokens_read": 0, "output_tokens": 0}
"""Of one whose body is being received, read and rendered."""


def routes(records: ActiveRequests, check: Check) -> list[Route]:
    """The list, and DELETE for one of it. A key sees its own requests; without keys everybody sees all."""
    endpoints = _RequestEndpoints(records)
    return [Route("/v1/requests", answering(endpoints.all, check, error_response), methods=["GET"]),
            Route("/v1/requests/{id:path}", answering(endpoints.cancel, check, error_response), methods=["DELETE"])]


@dataclass(frozen=True, slots=True)
class _RequestEndpoints:
    records: ActiveRequests

    async def all(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [_shown(record) for record in self._own(request)]})

    async def cancel(self, request: Request) -> Response:
        id = request.path_params["id"]
        meant = [record for record in self._own(request) if record.id == id]
        if not meant:
            raise ProblemError(Problem(404, f"no request {show(id)} runs or waits", "request_id", "request_not_found"))
        for record in meant:
            record.cancelled = True
            if record.run:
                record.run.cut_short()
        return json_response({"id": id, "object": "request", "cancelled": True})

    def _own(self, request: Request) -> Iterator[RequestRecord]:
        owner = record_of(request).owner
        return (record for record in self.records if record.answers and record.owner == owner)


def _shown(record: RequestRecord) -> Json:
    progress = record.run.progress() if record.run else _PREPARING
    return {"id": record.id, "object": "request", "key": record.key, "path": record.path, "model": record.model,
            "stream": record.stream, "created": int(record.arrived), "age_seconds": round(record.age(), 3),
            "answers": record.answers, "cancelled": record.cancelled, **progress}
