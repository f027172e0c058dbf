"""The server: `create_app` for any ASGI host, `serve` to run it."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ssl import SSLContext
from types import MappingProxyType
from typing import Any, Final, TypedDict, Unpack

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from deltic.engine.fair_executor import FairExecutor
from deltic.engine.stats import snapshot
from deltic.errors import ConfigError
from deltic.llm import LLM
from deltic.server import openapi, page, requests
from deltic.server.anthropic import routes as anthropic
from deltic.server.api_keys import ApiKeyAuth
from deltic.server.async_engine import STUCK_AFTER, AsyncEngine, QueueLimits
from deltic.server.body import BodyReader
from deltic.server.embeddings import routes as embeddings
from deltic.server.embeddings.service import EmbeddingService, Services
from deltic.server.executors import Executors
from deltic.server.fields import IGNORED_HEADER
from deltic.server.host_check import HostCheck, refusal
from deltic.server.http import Check, Endpoint, Problem, answering, json_response, problem_of
from deltic.server.metrics import CONTENT_TYPE, ended_early, exposition
from deltic.server.model_registry import ModelRegistry, ModelSet, ModelSource, only
from deltic.server.models import routes as model_routes
from deltic.server.ollama import routes as ollama
from deltic.server.openai import routes as openai
from deltic.server.openai.formatting import error_response
from deltic.server.records import ID_HEADERS, ActiveRequests, RequestRecorder
from deltic.server.request_log import RequestLog
from deltic.server.responses import routes as responses
from deltic.server.responses.store import ResponseStore
from deltic.server.run import Draining, Server, hosts_of, listen, listen_unix, tls_context, url_of
from deltic.server.served_model import ServedModel, names_of, public_name

__all__ = ["AppOptions", "ModelSet", "ModelSource", "RequestLog", "create_app", "listen", "listen_unix", "serve",
           "tls_context"]

DRAIN_SECONDS: Final = 30.0
"""Seconds that running requests have when the server is asked to end."""

_MOST_PARTS = 8  # of an unknown path, of which one is looked for that is known


class AppOptions(TypedDict, total=False):
    """What `create_app` can be told."""

    served_name: str | None
    api_keys: Mapping[str, str | None]
    share_prefix_cache: bool
    cors_origins: Sequence[str]
    allowed_hosts: Sequence[str]
    stuck_after: float
    lenient: bool
    request_log: RequestLog | None
    encoders: Sequence[EmbeddingService]


_DEFAULTS: Final[AppOptions] = {
    "served_name": None, "api_keys": MappingProxyType({}), "share_prefix_cache": False, "cors_origins": (),
    "allowed_hosts": ("*",), "stuck_after": STUCK_AFTER, "lenient": False, "request_log": None, "encoders": ()}


def create_app(llm: LLM | ModelSet, **options: Unpack[AppOptions]) -> Starlette:
    """An ASGI application that serves a model within its options' limits; the process may use it at the same time. Or
    several models, which are loaded when they are asked for. Limits of connections are kept by `serve`, not here.

    served_name: the model's name for clients. api_keys: what clients must send, if anything, and the names of those to
    whom the keys belong; without a name (None) a key has an owner of its own. share_prefix_cache: owners of keys share
    what is kept of prompts. cors_origins: web pages that may use the server ("*": all). allowed_hosts: names by which
    it may be asked ("*": all). stuck_after: seconds without progress that make /health fail. lenient: fields that
    nobody knows are ignored, and those of other servers that would change the answer. request_log: gets a line for each
    request, and is closed at the end. encoders: models of vectors and scores beside it. ConfigError if they do not fit
    together.
    """
    if unknown := options.keys() - _DEFAULTS.keys():
        raise TypeError(f"create_app has no option {', '.join(sorted(unknown))}")
    told: AppOptions = {**_DEFAULTS, **options}
    api_keys, request_log = told["api_keys"], told["request_log"]
    models = llm if isinstance(llm, ModelSet) else only(llm, told["served_name"] or public_name(llm), names_of(llm))
    limits = models.limits
    if limits.max_running_per_key is not None and not api_keys:
        raise ConfigError("max_running_per_key needs API keys: without them all clients are one", "max_running_per_key")
    records = ActiveRequests(limits, request_log.write, request_log.texts) if request_log else ActiveRequests(limits)

    def served(llm: LLM, name: str) -> ServedModel:
        room = QueueLimits(
            llm.runtime.memory.max_batch,
            limits.max_waiting,
            limits.max_live_tokens,
            limits.max_unread_tokens,
            limits.unread_seconds,
            limits.max_wait_seconds,
        )
        return ServedModel(llm, AsyncEngine(llm.worker, room, told["stuck_after"]), name,
                           FairExecutor(1, "deltic-memory"), records)

    intake = BodyReader(limits, told["lenient"])
    registry = ModelRegistry(models, served, intake, records)
    services = Services(tuple(told["encoders"]), intake)
    app_state: dict[str, Any] = {"models": registry, "intake": intake, "work": _WorkKinds((registry, services))}
    store = ResponseStore(limits, None)
    if not isinstance(llm, ModelSet):
        app_state["bridge"], store = registry.keep(llm).bridge, ResponseStore(limits, llm.runtime.notes)
    check = check_of(api_keys, told["share_prefix_cache"])
    routes = [*openai.routes(registry, check), *responses.routes(registry, store, check),
              *anthropic.routes(registry, check), *model_routes(registry, services, check),
              *requests.routes(records, check), *embeddings.routes(services, check),
              *ollama.routes(registry, services, intake, check),
              Route("/metrics", answering(_metrics(registry, services, records, request_log), check, error_response)),
              Route("/health", _health(registry)), Route("/ready", _ready(registry)), *page.routes()]
    routes.append(openapi.route(routes, check))
    app = application(routes, records, told["cors_origins"], told["allowed_hosts"],
                      _lifespan(registry, store, records.executors, request_log))
    for name, value in app_state.items():
        setattr(app.state, name, value)
    return app


def application(
    routes: Sequence[Route],
    records: ActiveRequests,
    cors_origins: Sequence[str],
    allowed_hosts: Sequence[str],
    lifespan: Callable[[Starlette], Any],
) -> Starlette:
    """What every server has around its routes."""
    origins = [origin.rstrip("/") for origin in cors_origins]
    cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"],
                      expose_headers=[*ID_HEADERS, "retry-after", IGNORED_HEADER])
    middleware = [Middleware(RequestRecorder, records), Middleware(HostCheck, allowed_hosts, origins),
                  *([cors] if origins else [])]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _on_error},
                    middleware=middleware)
    app.router.redirect_slashes = False
    app.state.records = records
    return app


def check_of(api_keys: Mapping[str, str | None], share_prefix_cache: bool = False) -> Check:
    """Refuses requests without one of the keys; without keys none."""
    return ApiKeyAuth(api_keys, share_prefix_cache).check if api_keys else lambda _: None


def _say(line: str) -> None:
    print(line, flush=True)


def serve(llm: LLM | ModelSet, host: str = "127.0.0.1", port: int = 8000, *, listener: socket.socket | None = None,
          tls: SSLContext | None = None, drain_seconds: float = DRAIN_SECONDS, on_ready: Callable[[str], None] = _say,
          **options: Unpack[AppOptions]) -> None:
    """Serve a model, or several, until Ctrl-C or SIGTERM; running requests then have `drain_seconds`.

    listener: an address claimed before by `listen` or `listen_unix`, so that a taken one shows before the model is
    loaded. tls: from `tls_context`, for https. on_ready: called with a line that names the URL. allowed_hosts: as in
    `create_app`; without, `localhost` if only this machine can reach the server, else all names. ConfigError if the
    address cannot be had.
    """
    listener = listener or listen(host, port)
    try:
        options["allowed_hosts"] = hosts_of(listener, options.get("allowed_hosts", ()), host)
        app = create_app(llm, **options)
        limits = llm.limits if isinstance(llm, ModelSet) else llm.runtime.options.limits
        ready = _ready_line(llm, listener, tls is not None, options.get("served_name"))
        if not isinstance(llm, ModelSet):
            with llm.worker.hold():
                for tier in llm.runtime.cache.tiers:
                    tier.prepare()
                llm.runtime.warm_up()
        gc.collect()  # what is garbage now would stay for as long as the server runs
        Server(app, app.state.work, drain_seconds, lambda: on_ready(ready), limits, tls).run_on(listener)
    finally:
        listener.close()
        if not isinstance(llm, ModelSet):
            llm.close()
        if log := options.get("request_log"):  # after a second signal nobody else did
            log.close()


def _ready_line(llm: LLM | ModelSet, listener: socket.socket, tls: bool, name: str | None) -> str:
    url = url_of(listener, tls)
    places = f"{url}/v1 (OpenAI), {url}/ (chat page), {url}/health, {url}/metrics"
    where = f" on the Unix socket {listener.getsockname()}" if listener.family == socket.AF_UNIX else ""
    if isinstance(llm, ModelSet):
        names = ", ".join(source.name for source in llm.sources)
        return f"{names}: the server is ready{where}: {places}. Models are loaded when asked for. Ctrl-C ends."
    context = f"Context of {llm.engine.max_context:,} tokens"
    return f"{name or public_name(llm)} is ready{where}: {places}. {context}. Ctrl-C ends."


@dataclass(frozen=True, slots=True)
class _WorkKinds:
    """What runs requests of several kinds, as one."""

    parts: tuple[Draining, ...]

    async def drain(self, grace: float) -> None:
        await asyncio.gather(*(part.drain(grace) for part in self.parts))

    async def stop(self) -> None:
        await asyncio.gather(*(part.stop() for part in self.parts))


def _lifespan(models: ModelRegistry, store: ResponseStore, executors: Executors,
              request_log: RequestLog | None) -> Callable[[Starlette], Any]:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            models.start()
        except Exception as error:
            app.state.startup_error = error
            raise
        try:
            yield
        finally:
            await models.stop()
            await asyncio.to_thread(executors.shutdown)
            await asyncio.to_thread(store.close)
            if request_log:
                await asyncio.to_thread(request_log.close)
    return lifespan


def _health(models: ModelRegistry) -> Endpoint:
    async def health(_: Request) -> Response:
        now = models.health()
        if now.fault:
            return json_response({"status": "error", "reason": now.fault, "requests": now.requests}, 503)
        return json_response({"status": "ok", "requests": now.requests})
    return health


def _ready(models: ModelRegistry) -> Endpoint:
    async def ready(_: Request) -> Response:
        now = models.health()
        reason = now.fault or ("the server is shutting down" if now.draining else None)
        if reason:
            return json_response({"status": "not ready", "reason": reason, "requests": now.requests}, 503)
        return json_response({"status": "ready", "requests": now.requests})
    return ready


def _metrics(
    models: ModelRegistry, encoders: Services, records: ActiveRequests, request_log: RequestLog | None
) -> Endpoint:
    async def metrics(_: Request) -> Response:
        found = {served.name: snapshot(served.llm.engine) for served in models.loaded}
        lost = request_log.lost if request_log else 0
        ended = ended_early({served.name: served.bridge for served in models.loaded})
        return Response(exposition(found, records.responses, lost) + ended + encoders.metrics(),
                        media_type=CONTENT_TYPE)
    return metrics


async def _on_error(request: Request, error: Exception) -> Response:
    problem = problem_of(error)
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        meant = _meant(request) if error.status_code == 404 else None
        problem = Problem(error.status_code, f"{request.method} {request.url.path} is not served here: "
                                             f"{f'do you mean {meant}?' if meant else error.detail}")
    headers = error.headers if isinstance(error, HTTPException) else None
    return refusal(request.scope, problem, dict(headers or {}))


def _meant(request: Request) -> str | None:
    """The path that a client seems to mean whose base URL is wrong: a slash too many at its end, /v1 left out or there
    twice, the path of another server before it."""
    parts = [part for part in request.url.path.split("/") if part][:_MOST_PARTS]
    for start in range(len(parts)):
        for prefix in ("/v1/", "/"):
            path = prefix + "/".join(parts[start:])
            if any(route.matches({**request.scope, "path": path})[0] is Match.FULL for route in request.app.routes):
                return path
    return None
