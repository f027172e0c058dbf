"""A server that has models of vectors and scores alone."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from ssl import SSLContext
from typing import TypedDict, Unpack

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deltic.config import Limits
from deltic.server import openapi, requests
from deltic.server.app import application, check_of
from deltic.server.body import BodyReader
from deltic.server.embeddings.routes import routes
from deltic.server.embeddings.service import ENDING, EmbeddingService, Services
from deltic.server.http import Check, answering, json_response
from deltic.server.metrics import CONTENT_TYPE, exposition
from deltic.server.ollama import routes as ollama
from deltic.server.openai.formatting import error_response
from deltic.server.records import ActiveRequests
from deltic.server.request_log import RequestLog
from deltic.server.run import Server, hosts_of, url_of


class EncoderAppOptions(TypedDict, total=False):
    """As of `create_app`."""

    api_keys: Mapping[str, str | None]
    share_prefix_cache: bool
    cors_origins: Sequence[str]
    allowed_hosts: Sequence[str]
    lenient: bool
    request_log: RequestLog | None


def create_encoder_app(services: Sequence[EmbeddingService], limits: Limits, **options: Unpack[EncoderAppOptions]
                       ) -> Starlette:
    """An ASGI application for these models."""
    log = options.get("request_log")
    served = Services(tuple(services), BodyReader(limits, options.get("lenient", False)))
    records = ActiveRequests(limits, log.write if log else None)
    check = check_of(options.get("api_keys", {}), options.get("share_prefix_cache", False))
    paths = [*routes(served, check), *requests.routes(records, check), *_about(served, records, log, check),
             *ollama.routes(None, served, served.intake, check)]
    paths.append(openapi.route(paths, check))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(records.executors.shutdown)
        if log:
            await asyncio.to_thread(log.close)

    app = application(paths, records, options.get("cors_origins", ()), options.get("allowed_hosts", ("*",)), lifespan)
    app.state.work = served
    return app


def serve_encoders(services: Sequence[EmbeddingService], limits: Limits, host: str, listener: socket.socket, *,
                   tls: SSLContext | None, drain_seconds: float, on_ready: Callable[[str], None],
                   **options: Unpack[EncoderAppOptions]) -> None:
    """Serve until Ctrl-C or SIGTERM; running requests then have `drain_seconds`. Arguments as of `serve`."""
    options["allowed_hosts"] = hosts_of(listener, options.get("allowed_hosts", ()), host)
    app, url = create_encoder_app(services, limits, **options), url_of(listener, tls is not None)
    lines = "; ".join(map(_describe, services))
    gc.collect()  # what is garbage now would stay for as long as the server runs
    try:
        Server(app, app.state.work, drain_seconds, lambda: on_ready(
            f"{lines}. Ready: {url}/v1, {url}/health, {url}/metrics. Ctrl-C ends."), limits, tls).run_on(listener)
    finally:
        listener.close()


def _describe(service: EmbeddingService) -> str:
    encoder = service.encoder
    kind = "scores documents (/v1/rerank, /v1/score)" if encoder.scores else (
        f"gives vectors of {encoder.dimension:,} numbers (/v1/embeddings)")
    return f"{service.name} {kind}, of up to {encoder.max_length:,} tokens"


def _about(served: Services, records: ActiveRequests, log: RequestLog | None, check: Check) -> list[Route]:
    async def models(_: Request) -> Response:
        return json_response({"object": "list", "data": [service.fields() for service in served]})

    async def model(request: Request) -> Response:
        return json_response(served.find(request.path_params["model"]).fields())

    async def health(_: Request) -> Response:
        return json_response({"status": "ok", "waiting_tokens": served.waiting()})

    async def metrics(_: Request) -> Response:
        own = exposition({}, records.responses, log.lost if log else 0)
        return Response(own + served.metrics(), media_type=CONTENT_TYPE)

    async def ready(_: Request) -> Response:
        if served.draining:
            return json_response({"status": "not ready", "reason": ENDING}, 503)
        return json_response({"status": "ready"})

    guarded = {"/v1/models": models, "/v1/models/{model:path}": model, "/metrics": metrics}
    return [*(Route(path, answering(endpoint, check, error_response)) for path, endpoint in guarded.items()),
            Route("/health", health), Route("/ready", ready)]
