"""The server: `create_app` returns an ASGI application, `serve` runs it."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
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

from deltic.cache.offload.state_stores import StateDirectory
from deltic.config import Limits
from deltic.errors import ConfigError
from deltic.llm import LLM
from deltic.server import (
    adapters,
    anthropic,
    embeddings,
    model_routes,
    ollama,
    openai,
    operations,
    page,
    responses,
    states,
)
from deltic.server.async_engine import STUCK_AFTER
from deltic.server.body import BodyReader
from deltic.server.embeddings import EmbeddingService, Services
from deltic.server.errors import Problem, problem_of, refusal
from deltic.server.generation import names_of, public_name
from deltic.server.middleware import ApiKeyAuth, HostCheck
from deltic.server.models import ModelRegistry, ModelSet, ModelSource, only
from deltic.server.records import ID_HEADERS, ActiveRequests, RequestLog, RequestRecorder
from deltic.server.response_store import ResponseStore
from deltic.server.routing import IGNORED_HEADER, Check, openapi_route
from deltic.server.run import Draining, Server, hosts_of, listen, listen_unix, tls_context, url_of

__all__ = ["AppOptions", "ModelSet", "ModelSource", "RequestLog", "create_app", "create_encoder_app", "listen",
           "listen_unix", "serve", "serve_encoders", "tls_context"]

DRAIN_SECONDS: Final = 30.0
"""Seconds that running requests get to finish when the server shuts down."""
_MOST_PARTS: Final = 8
"""Number of segments of an unknown path that are compared with known paths."""


class AppOptions(TypedDict, total=False):
    """Options of `create_app`."""

    served_name: str | None
    api_keys: Mapping[str, str | None]
    share_prefix_cache: bool
    cors_origins: Sequence[str]
    allowed_hosts: Sequence[str]
    stuck_after: float
    lenient: bool
    request_log: RequestLog | None
    encoders: Sequence[EmbeddingService]
    state_dir: str | Path | None
    lora_dir: str | Path | None


_DEFAULTS: Final[AppOptions] = {
    "served_name": None, "api_keys": MappingProxyType({}), "share_prefix_cache": False, "cors_origins": (),
    "allowed_hosts": ("*",), "stuck_after": STUCK_AFTER, "lenient": False, "request_log": None, "encoders": (),
    "state_dir": None, "lora_dir": None}


def create_app(llm: LLM | ModelSet, **options: Unpack[AppOptions]) -> Starlette:
    """Returns an ASGI application that serves a model, or a set of models that are loaded on demand.

    served_name: the model's name for clients. api_keys: keys that clients must send, mapped to their owners' names;
    each key without a name (None) is its own owner. share_prefix_cache: owners share cached prefixes. cors_origins:
    origins of web pages that may use the server ("*": all). allowed_hosts: accepted host names ("*": all). stuck_after:
    seconds without progress after which /health fails. lenient: ignore fields that would be refused. request_log: gets
    a line for each request, and is closed at the end. encoders: models for embeddings and reranking scores. state_dir:
    directory for prefixes that clients save and load. lora_dir: directory below which clients may name adapters to
    load.
    Limits on connections are enforced by `serve`. Raises ConfigError if the options contradict each other.
    """
    given = _with_defaults(options)
    models = llm if isinstance(llm, ModelSet) else only(llm, given["served_name"] or public_name(llm), names_of(llm))
    check = _check_of(given)
    log = given["request_log"]
    limits = models.limits
    if limits.max_running_per_key is not None and not given["api_keys"]:
        raise ConfigError("max_running_per_key needs API keys: without them all clients are one", "max_running_per_key")
    records, reader = _records(limits, log), BodyReader(limits, given["lenient"])
    registry = ModelRegistry(models, reader, records, given["stuck_after"])
    services = Services(tuple(given["encoders"]), reader)
    store, engine = ResponseStore(limits, None), None
    if not isinstance(llm, ModelSet):
        engine, store = registry.keep(llm).engine, ResponseStore(limits, llm.runtime.notes)
    routes = [*openai.routes(registry, check), *responses.routes(registry, store, check),
              *states.routes(registry, store, _state_directory(given), check),
              *adapters.routes(registry, _adapter_directory(given), check),
              *anthropic.routes(registry, check), *ollama.routes(registry, services, reader, check),
              *model_routes.routes(registry, services, check), *embeddings.routes(services, check),
              *operations.routes(registry, services, records, log, check), *page.routes()]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            registry.start()
        except Exception as error:
            app.state.startup_error = error
            raise
        try:
            yield
        finally:
            await registry.stop()
            await asyncio.to_thread(_close, records, store, log)

    app = _application(routes, records, given, check, lifespan)
    app.state.models = registry
    app.state.reader = reader
    app.state.engine = engine
    app.state.work = _Work((registry, services))
    return app


def create_encoder_app(services: Sequence[EmbeddingService], limits: Limits, **options: Unpack[AppOptions]
                       ) -> Starlette:
    """Returns an ASGI application that serves embedding and reranking models only. options: as in `create_app`."""
    given = _with_defaults(options)
    check, log = _check_of(given), given["request_log"]
    records, reader = _records(limits, log), BodyReader(limits, given["lenient"])
    served = Services(tuple(services), reader)
    routes = [*embeddings.routes(served, check), *ollama.routes(None, served, reader, check),
              *model_routes.encoder_routes(served, check), *operations.routes(None, served, records, log, check)]

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(_close, records, None, log)

    app = _application(routes, records, given, check, lifespan)
    app.state.work = served
    return app


def _with_defaults(options: AppOptions) -> AppOptions:
    if unknown := options.keys() - _DEFAULTS.keys():
        raise TypeError(f"create_app has no option {', '.join(sorted(unknown))}")
    return {**_DEFAULTS, **options}


def _state_directory(options: AppOptions) -> Path | None:
    """Returns the directory of saved states. Raises ConfigError if it cannot be used."""
    if options["state_dir"] is None:
        return None
    found = StateDirectory(Path(options["state_dir"]).absolute())
    found.create()
    return found.root


def _adapter_directory(options: AppOptions) -> Path | None:
    """Returns the directory of adapters. Raises ConfigError if there is none."""
    if options["lora_dir"] is None:
        return None
    found = Path(options["lora_dir"]).resolve()
    if not found.is_dir():
        raise ConfigError(f"lora_dir: {found} is no directory", "lora_dir")
    return found


def _check_of(options: AppOptions) -> Check:
    keys = options["api_keys"]
    return ApiKeyAuth(keys, options["share_prefix_cache"]).check if keys else lambda _: None


def _records(limits: Limits, log: RequestLog | None) -> ActiveRequests:
    return ActiveRequests(limits, log.write, log.texts) if log else ActiveRequests(limits)


def _close(records: ActiveRequests, store: ResponseStore | None, log: RequestLog | None) -> None:
    records.executors.shutdown()
    if store:
        store.close()
    if log:
        log.close()


def _application(routes: list[Route], records: ActiveRequests, options: AppOptions, check: Check,
                 lifespan: Callable[[Starlette], Any]) -> Starlette:
    origins = [origin.rstrip("/") for origin in options["cors_origins"]]
    middleware = [Middleware(RequestRecorder, records), Middleware(HostCheck, options["allowed_hosts"], origins)]
    if origins:
        exposed = [*ID_HEADERS, "retry-after", IGNORED_HEADER]
        middleware.append(Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"],
                                     expose_headers=exposed))
    app = Starlette(routes=[*routes, openapi_route(routes, check)], lifespan=lifespan, middleware=middleware,
                    exception_handlers={HTTPException: _on_error})
    app.router.redirect_slashes = False
    app.state.records = records
    return app


@dataclass(frozen=True, slots=True)
class _Work:
    """Groups several kinds of requests so that they are drained together."""

    parts: tuple[Draining, ...]

    async def drain(self, grace: float) -> None:
        await asyncio.gather(*(part.drain(grace) for part in self.parts))

    async def stop(self) -> None:
        await asyncio.gather(*(part.stop() for part in self.parts))


async def _on_error(request: Request, error: Exception) -> Response:
    problem = problem_of(error)
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        known = _known_path(request) if error.status_code == 404 else None
        hint = f"do you mean {known}?" if known else error.detail
        problem = Problem(error.status_code, f"{request.method} {request.url.path} is not served here: {hint}")
    headers = error.headers if isinstance(error, HTTPException) else None
    return refusal(request.scope, problem, headers)


def _known_path(request: Request) -> str | None:
    """Returns the known path that a client with a wrong base URL probably meant. Handles a trailing slash, a missing or
    doubled /v1, and another server's path prefix."""
    parts = [part for part in request.url.path.split("/") if part][:_MOST_PARTS]
    for start in range(len(parts)):
        for prefix in ("/v1/", "/"):
            path = prefix + "/".join(parts[start:])
            if any(route.matches({**request.scope, "path": path})[0] is Match.FULL for route in request.app.routes):
                return path
    return None


def _print(line: str) -> None:
    print(line, flush=True)


def serve(llm: LLM | ModelSet, host: str = "127.0.0.1", port: int = 8000, *, listener: socket.socket | None = None,
          tls: SSLContext | None = None, drain_seconds: float = DRAIN_SECONDS, on_ready: Callable[[str], None] = _print,
          **options: Unpack[AppOptions]) -> None:
    """Serves one or several models until Ctrl-C or SIGTERM.

    listener: from `listen` or `listen_unix`, which claim an address before the model is loaded. tls: from
    `tls_context`. drain_seconds: time for running requests at shutdown. on_ready: gets a line with the URL.
    allowed_hosts: as in `create_app`; by default localhost if only this machine can reach the server, else all names.
    Raises ConfigError if the address cannot be used.
    """
    listener = listener or listen(host, port)
    try:
        options["allowed_hosts"] = hosts_of(listener, options.get("allowed_hosts", ()), host)
        app = create_app(llm, **options)
        limits = llm.limits if isinstance(llm, ModelSet) else llm.runtime.options.limits
        ready = _ready_line(llm, listener, tls is not None, options.get("served_name"))
        if not isinstance(llm, ModelSet):
            llm.warm_up()
        gc.collect()  # garbage would otherwise stay until the end
        Server(app, app.state.work, drain_seconds, lambda: on_ready(ready), limits, tls).run_on(listener)
    finally:
        listener.close()
        if not isinstance(llm, ModelSet):
            llm.close()
        if log := options.get("request_log"):  # a second signal skips the end of the lifespan
            log.close()


def serve_encoders(services: Sequence[EmbeddingService], limits: Limits, host: str, listener: socket.socket, *,
                   tls: SSLContext | None, drain_seconds: float, on_ready: Callable[[str], None],
                   **options: Unpack[AppOptions]) -> None:
    """Serves embedding and reranking models only. Arguments as in `serve`."""
    try:
        options["allowed_hosts"] = hosts_of(listener, options.get("allowed_hosts", ()), host)
        app, url = create_encoder_app(services, limits, **options), url_of(listener, tls is not None)
        models = "; ".join(map(_described, services))
        ready = f"{models}. Ready: {url}/v1, {url}/health, {url}/metrics. Ctrl-C ends."
        gc.collect()
        Server(app, app.state.work, drain_seconds, lambda: on_ready(ready), limits, tls).run_on(listener)
    finally:
        listener.close()


def _described(service: EmbeddingService) -> str:
    encoder = service.encoder
    kind = f"gives vectors of {encoder.dimension:,} numbers (/v1/embeddings)"
    if encoder.scores:
        kind = "scores documents (/v1/rerank, /v1/score)"
    return f"{service.name} {kind}, of up to {encoder.max_length:,} tokens"


def _ready_line(llm: LLM | ModelSet, listener: socket.socket, tls: bool, name: str | None) -> str:
    url = url_of(listener, tls)
    places = f"{url}/v1 (OpenAI), {url}/ (chat page), {url}/health, {url}/metrics"
    where = f" on the Unix socket {listener.getsockname()}" if listener.family == socket.AF_UNIX else ""
    if isinstance(llm, ModelSet):
        names = ", ".join(source.name for source in llm.sources)
        return f"{names}: the server is ready{where}: {places}. Models are loaded when asked for. Ctrl-C ends."
    context = f"Context of {llm.engine.max_context:,} tokens"
    return f"{name or public_name(llm)} is ready{where}: {places}. {context}. Ctrl-C ends."
