"""The server: `create_app` for any ASGI host, `serve` to run it."""

from __future__ import annotations

import asyncio
import gc
import hmac
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any, TypedDict, Unpack

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from deltic.engine.llm import LLM
from deltic.engine.metrics import snapshot
from deltic.server import models, page
from deltic.server.anthropic import routes as anthropic
from deltic.server.anthropic import shapes as anthropic_shapes
from deltic.server.body import Intake
from deltic.server.bridge import STUCK_AFTER, Bridge, Room
from deltic.server.http import Check, Endpoint, Problem, ProblemError, answering, json_response, problem_of
from deltic.server.listen import Server, listen, url_of
from deltic.server.metrics import CONTENT_TYPE, exposition
from deltic.server.openai import routes as openai
from deltic.server.openai.shapes import error_response
from deltic.server.responses import routes as responses
from deltic.server.responses.store import ResponseStore
from deltic.server.served_model import ServedModel, public_name

__all__ = ["AppOptions", "create_app", "listen", "serve"]


class AppOptions(TypedDict, total=False):
    """What `create_app` can be told."""

    served_name: str | None
    api_key: str | None
    cors_origins: Sequence[str]
    stuck_after: float
    lenient: bool


def create_app(llm: LLM, *, served_name: str | None = None, api_key: str | None = None,
               cors_origins: Sequence[str] = (), stuck_after: float = STUCK_AFTER,
               lenient: bool = False) -> Starlette:
    """An ASGI application that serves a model within its options' limits; the process may use it at the same time.
    Limits of connections are kept by `serve`, not here.

    served_name: the model's name for clients. api_key: what clients must send, if anything. cors_origins: web
    pages that may use the server ("*": all). stuck_after: seconds without progress that make /health fail. lenient:
    fields that nobody knows are ignored.
    """
    limits, memory = llm.runtime.options.limits, ThreadPoolExecutor(1, "deltic-memory")
    room = Room(llm.runtime.memory.max_batch, limits.max_waiting, limits.max_live_tokens, limits.max_unread_tokens)
    bridge = Bridge(llm.worker, room, stuck_after)
    served = ServedModel(llm, bridge, served_name or public_name(llm), Intake(limits, lenient), memory)
    check = _key_check(api_key) if api_key else lambda _: None
    store = ResponseStore(limits, llm.runtime.notes)
    routes = [*openai.routes(served, check), *responses.routes(served, store, check),
              *anthropic.routes(served, check), *models.routes(served, check),
              Route("/metrics", answering(_metrics(served), check, error_response)),
              Route("/health", _health(bridge)), *page.routes()]
    cors = Middleware(CORSMiddleware, allow_origins=list(cors_origins), allow_methods=["*"], allow_headers=["*"])
    app = Starlette(routes=routes, lifespan=_lifespan(bridge, memory, store),
                    exception_handlers={HTTPException: _on_error},
                    middleware=[*([cors] if cors_origins else []), Middleware(_OneLength)])
    app.router.redirect_slashes = False
    app.state.bridge, app.state.intake = bridge, served.intake
    return app


class _OneLength:
    """Refuses requests that say in two ways where they end: a proxy before the server may have believed the other."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope.get("headers", ())}
        if names.issuperset({b"content-length", b"transfer-encoding"}):
            problem = Problem(400, "the request has both Content-Length and Transfer-Encoding: send one of them")
            await error_response(problem, {"connection": "close"})(scope, receive, send)
        else:
            await self._app(scope, receive, send)


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
    ready = (f"{name} is ready: {url}/v1 (OpenAI), {url}/ (chat page), {url}/health, {url}/metrics. Context of "
             f"{llm.engine.max_context:,} tokens. Ctrl-C ends.")
    with llm.worker.hold():
        llm.runtime.warm_up()
    gc.collect()  # what is garbage now would stay for as long as the server runs
    try:
        Server(app, app.state.bridge, grace, lambda: on_ready(ready), llm.runtime.options.limits).run_on(listener)
    finally:
        listener.close()
        llm.close()


def _lifespan(bridge: Bridge, memory: Executor, store: ResponseStore) -> Callable[[Starlette], Any]:
    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        bridge.start()
        try:
            yield
        finally:
            await bridge.stop()
            await asyncio.to_thread(memory.shutdown)
            await asyncio.to_thread(store.close)
    return lifespan


def _health(bridge: Bridge) -> Endpoint:
    async def health(_: Request) -> Response:
        now = bridge.health()
        if now.fault:
            return json_response({"status": "error", "reason": now.fault, "requests": now.requests}, 503)
        return json_response({"status": "ok", "requests": now.requests})
    return health


def _metrics(served: ServedModel) -> Endpoint:
    async def metrics(_: Request) -> Response:
        return Response(exposition(snapshot(served.llm.engine), served.name), media_type=CONTENT_TYPE)
    return metrics


def _key_check(api_key: str) -> Check:
    """Of what the two kinds of clients send: as a bearer's, or as x-api-key."""
    # beyond ASCII most clients send UTF-8, some Latin-1; a key from the environment may be neither
    expected = [api_key.encode("utf-8", "surrogateescape")]
    with suppress(UnicodeEncodeError):
        expected.append(api_key.encode("latin-1"))

    def check(request: Request) -> None:
        sent = dict(reversed(request.headers.raw))
        bearer = sent.get(b"authorization", b"")
        given = sent.get(b"x-api-key"), bearer[7:] if bearer.startswith(b"Bearer ") else None
        # of all, to take the same time
        if True not in [hmac.compare_digest(value or b"", key) for value in given for key in expected]:
            raise ProblemError(Problem(401, "the API key is missing or wrong: send it as Authorization: Bearer KEY",
                                       code="invalid_api_key"))
    return check


async def _on_error(request: Request, error: Exception) -> Response:
    problem = problem_of(error)
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        problem = Problem(error.status_code, f"{request.method} {request.url.path} is not served here: {error.detail}")
    if request.url.path.startswith("/v1/messages"):
        return anthropic_shapes.error_response(problem)
    headers = error.headers if isinstance(error, HTTPException) else None
    return error_response(problem, dict(headers or {}))
