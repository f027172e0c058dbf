"""The server: `create_app` for any ASGI host, `serve` to run it."""

from __future__ import annotations

import hmac
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypedDict, Unpack

from fastapi import Depends, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.responses import Response

from deltic.engine.llm import LLM
from deltic.engine.metrics import snapshot
from deltic.server import openai
from deltic.server.bridge import STUCK_AFTER, Bridge
from deltic.server.desk import Desk, public_name
from deltic.server.listen import Server, listen, url_of
from deltic.server.metrics import CONTENT_TYPE, exposition
from deltic.server.wire import MAX_BODY, Problem, ProblemError, json_response, problem_of

__all__ = ["AppOptions", "create_app", "listen", "serve"]


class AppOptions(TypedDict, total=False):
    """What `create_app` can be told."""

    served_name: str | None
    api_key: str | None
    cors_origins: Sequence[str]
    stuck_after: float
    max_body: int


def create_app(llm: LLM, *, served_name: str | None = None, api_key: str | None = None,
               cors_origins: Sequence[str] = (), stuck_after: float = STUCK_AFTER, max_body: int = MAX_BODY) -> FastAPI:
    """An ASGI application that serves a model, which the process may use at the same time.

    served_name: the model's name for clients. api_key: what clients must send, if anything. cors_origins: web
    pages that may use the server ("*": all). stuck_after: seconds without progress that make /health fail.
    max_body: the largest request in bytes.
    """
    bridge = Bridge(llm.worker, stuck_after)
    desk = Desk(llm, bridge, served_name or public_name(llm), max_body)
    app = FastAPI(title="deltic", lifespan=_lifespan(bridge), docs_url=None, redoc_url=None, openapi_url=None,
                  redirect_slashes=False)
    app.state.bridge = bridge
    locks = [Depends(_key_check(api_key))] if api_key else []
    app.include_router(openai.routes(desk), dependencies=locks)
    app.add_api_route("/metrics", _metrics(desk), methods=["GET", "HEAD"], response_model=None, dependencies=locks)
    app.add_api_route("/health", _health(bridge), methods=["GET", "HEAD"], response_model=None)
    for kind in (ProblemError, HTTPException):
        app.add_exception_handler(kind, _on_error)
    if cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(cors_origins), allow_methods=["*"], allow_headers=["*"])
    return app


def _say(line: str) -> None:
    print(line, flush=True)


def serve(llm: LLM, host: str = "127.0.0.1", port: int = 8000, *, listener: socket.socket | None = None,
          grace: float = 5.0, on_ready: Callable[[str], None] = _say, **options: Unpack[AppOptions]) -> None:
    """Serve a model until Ctrl-C or SIGTERM; running requests then have `grace` seconds.

    listener: an address claimed before by `listen`, so that a taken port shows before the model is loaded.
    on_ready: called with a line that names the URL. ConfigError if the address cannot be had.
    """
    listener = listener or listen(host, port)
    app = create_app(llm, **options)
    url = url_of(listener)
    name = options.get("served_name") or public_name(llm)
    ready = (f"{name} is ready: {url}/v1 (OpenAI), {url}/health, {url}/metrics. Context of {llm.engine.max_context:,} "
             "tokens. Ctrl-C ends.")
    try:
        Server(app, app.state.bridge, grace, lambda: on_ready(ready)).run_on(listener)
    finally:
        listener.close()
        llm.close()


def _lifespan(bridge: Bridge) -> Callable[[FastAPI], Any]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        bridge.start()
        try:
            yield
        finally:
            await bridge.stop()
    return lifespan


def _health(bridge: Bridge) -> Callable[[], Awaitable[Response]]:
    async def health() -> Response:
        now = bridge.health()
        if now.fault:
            return json_response({"status": "error", "reason": now.fault, "requests": now.requests}, 503)
        return json_response({"status": "ok", "requests": now.requests})
    return health


def _metrics(desk: Desk) -> Callable[[], Awaitable[Response]]:
    async def metrics() -> Response:
        return Response(exposition(snapshot(desk.llm.engine), desk.name), media_type=CONTENT_TYPE)
    return metrics


def _key_check(api_key: str) -> Callable[[Request], Awaitable[None]]:
    expected = f"Bearer {api_key}".encode()

    async def check(request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(given, expected):
            raise ProblemError(Problem(401, "the API key is missing or wrong: send it as Authorization: Bearer KEY",
                                       code="invalid_api_key"))
    return check


async def _on_error(request: Request, error: Exception) -> Response:
    problem = problem_of(error)
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        problem = Problem(error.status_code, f"{request.method} {request.url.path} is not served here: {error.detail}")
    headers = error.headers if isinstance(error, HTTPException) else None
    return openai.error_response(problem, dict(headers or {}))
