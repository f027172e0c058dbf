"""Routes for operators: health, metrics, the version, and running requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deltic import __version__
from deltic.engine.stats import snapshot
from deltic.errors import show
from deltic.server.embeddings import ENDING, Services
from deltic.server.errors import ProblemError
from deltic.server.http import json_response
from deltic.server.metrics import CONTENT_TYPE, ended_early, exposition
from deltic.server.models import ModelRegistry
from deltic.server.records import ActiveRequests, RequestLog, RequestRecord, record_of
from deltic.server.routing import ApiRoute, Check

Json = dict[str, Any]

_PREPARING: Final[Json] = {"status": "preparing", "prompt_tokens": None, "prompt_tokens_read": 0, "output_tokens": 0}
"""Progress of a request before its prompt is encoded."""


def routes(models: ModelRegistry | None, services: Services, records: ActiveRequests, log: RequestLog | None,
           check: Check) -> list[Route]:
    """Returns the routes for operators. models: None for a server that has encoders only."""
    endpoints = _OperationEndpoints(models, services, records, log)
    return [Route("/health", endpoints.health), Route("/ready", endpoints.ready),
            ApiRoute("/metrics", endpoints.metrics, check), ApiRoute("/version", endpoints.version, check),
            ApiRoute("/v1/requests", endpoints.requests, check),
            ApiRoute("/v1/requests/{id:path}", endpoints.cancel, check, method="DELETE")]


@dataclass(frozen=True, slots=True)
class _OperationEndpoints:
    models: ModelRegistry | None
    services: Services
    records: ActiveRequests
    log: RequestLog | None

    async def health(self, _: Request) -> Response:
        if self.models is None:
            return json_response({"status": "ok", "waiting_tokens": self.services.waiting()})
        now = self.models.health()
        if now.fault:
            return json_response({"status": "error", "reason": now.fault, "requests": now.requests}, 503)
        return json_response({"status": "ok", "requests": now.requests})

    async def ready(self, _: Request) -> Response:
        reason, more = ENDING if self.services.draining else None, Json()
        if self.models is not None:
            now = self.models.health()
            reason = now.fault or (ENDING if now.draining else None)
            more = {"requests": now.requests}
        if reason:
            return json_response({"status": "not ready", "reason": reason, **more}, 503)
        return json_response({"status": "ready", **more})

    async def metrics(self, _: Request) -> Response:
        loaded = self.models.loaded if self.models else []
        engines = {served.name: snapshot(served.llm.engine) for served in loaded}
        page = exposition(engines, self.records.responses, self.log.lost if self.log else 0)
        page += ended_early({served.name: served.engine for served in loaded}) + self.services.metrics()
        return Response(page, media_type=CONTENT_TYPE)

    async def version(self, _: Request) -> Response:
        return json_response({"version": __version__})

    async def requests(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [_shown(record) for record in self._own(request)]})

    async def cancel(self, request: Request) -> Response:
        id = request.path_params["id"]
        meant = [record for record in self._own(request) if record.id == id]
        if not meant:
            raise ProblemError(404, f"no request {show(id)} runs or waits", "request_id", "request_not_found")
        for record in meant:
            record.cancelled = True
            if record.run:
                record.run.cut_short()
        return json_response({"id": id, "object": "request", "cancelled": True})

    def _own(self, request: Request) -> Iterator[RequestRecord]:
        """Yields the requests of the key's owner, or all requests if there are no keys."""
        owner = record_of(request).owner
        return (record for record in self.records if record.answers and record.owner == owner)


def _shown(record: RequestRecord) -> Json:
    progress = record.run.progress() if record.run else _PREPARING
    return {"id": record.id, "object": "request", "key": record.key, "path": record.path, "model": record.model,
            "stream": record.stream, "created": int(record.arrived), "age_seconds": round(record.age(), 3),
            "answers": record.answers, "cancelled": record.cancelled, **progress}
