"""The front of several replicas: an ASGI application that forwards requests to them through a Ray Serve handle.

The front reads the body only to compute the boundaries for the router, and forwards head and body unchanged: the
application in the replica handles paths, fields, keys and errors. If a replica is lost before its response has begun,
the request goes to another replica; after that the client gets an error that asks it to try again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Mount
from starlette.types import Message, Receive, Scope, Send

from deltic.cluster.boundaries import Boundaries, boundaries_of
from deltic.cluster.gather import first_found, merged_lists, merged_metrics
from deltic.config import Limits
from deltic.errors import BusyError, DelticError
from deltic.server.body import BodyReader, read_json
from deltic.server.errors import ANTHROPIC_PATH, anthropic_event, openai_event, problem_of, refusal
from deltic.server.http import dump, while_connected
from deltic.server.metrics import CONTENT_TYPE
from deltic.server.records import ID_HEADERS, LARGE, ActiveRequests, RequestRecorder, record_of

log = logging.getLogger("deltic")

_ATTEMPTS: Final = 4
"""Number of replicas that a request is sent to before its client has to try again."""
_PAUSE: Final = 0.25
"""Seconds before another attempt, so that the router learns about the lost replica."""
_PATIENCE: Final = 5.0
"""Timeout in seconds of a request that goes to all replicas."""
_GONE: Final = "the replica that answered is gone: send the request again"
LOST: Final = (RayActorError, DeploymentUnavailableError)


@dataclass(slots=True)
class _Response:
    """The progress of a forwarded response."""

    begun: bool = False
    complete: bool = False
    kind: bytes = b""


class Front:
    """The application. handle: for the deployment of `Replica`. prefill: for the prefill replicas, if there are any."""

    def __init__(self, handle: DeploymentHandle, reader: BodyReader, limits: Limits,
                 prefill: DeploymentHandle | None = None) -> None:
        self._reader, self._limits = reader, limits
        self._everyone = [each for each in (handle, prefill) if each is not None]
        self._calls = handle.options(stream=True, method_name="request")
        self._closed = False
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        response = _Response()
        self._running += 1
        try:
            if self._closed:
                raise BusyError("the server is shutting down: try again later, or elsewhere")
            if (everyone := self._of_everyone(request)) is not None:
                await everyone(scope, receive, send)
                return
            async with self._reader.received(request) as body:
                boundaries = await self._boundaries(request, body)
                with suppress(ClientDisconnect):
                    await while_connected(receive, self._pass_on(request, body, boundaries, send, response))
        except Exception as error:
            await self._fail(scope, receive, send, response, error)
        finally:
            self._running -= 1

    async def drain(self, grace: float) -> None:
        """Accepts no more requests, and waits up to `grace` seconds for the running ones."""
        self._closed = True
        with suppress(TimeoutError):
            async with asyncio.timeout(grace):
                while self._running:
                    await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Accepts no more requests."""
        self._closed = True

    async def _boundaries(self, request: Request, body: bytes) -> Boundaries:
        def find() -> Boundaries:
            with suppress(DelticError, RecursionError):
                return boundaries_of(read_json(body, self._limits.max_body_values), headers)
            return Boundaries()

        headers = {name: request.headers[name] for name in ("authorization", "x-api-key") if name in request.headers}
        if not body:
            return Boundaries()
        return await record_of(request).work(find, len(body)) if len(body) > LARGE else find()

    async def _pass_on(self, request: Request, body: bytes, boundaries: Boundaries, send: Send, response: _Response
                       ) -> None:
        """Sends a request to replicas, one after another, until one answers."""
        head = _head(request)
        for attempt in range(_ATTEMPTS):
            answer = self._calls.remote(head, body, boundaries)
            try:
                async for messages in answer:
                    for message in messages:
                        await send(_noted(message, response))
                if not response.complete:
                    raise BusyError(_GONE)
                return
            except asyncio.CancelledError:
                answer.cancel()
                raise
            except LOST as error:
                log.warning("a replica is lost, attempt %d of %d: %s", attempt + 1, _ATTEMPTS, type(error).__name__)
                if response.begun or attempt + 1 == _ATTEMPTS:
                    raise BusyError(_GONE) from error
            except BackPressureError as error:
                raise BusyError("all replicas are full: try again later") from error
            await asyncio.sleep(_PAUSE * attempt)

    async def _fail(self, scope: Scope, receive: Receive, send: Send, response: _Response, error: Exception) -> None:
        """Sends an error in the form of the path's clients: as a response, or as the last event of a stream."""
        if not response.begun:
            await refusal(scope, problem_of(error))(scope, receive, send)
            return
        if response.complete:
            return
        log.warning("an answer is cut: %s", error)
        if response.kind.startswith(b"application/x-ndjson"):
            last = dump({"error": problem_of(error).message}) + b"\n"
        elif response.kind.startswith(b"text/event-stream"):
            last = (anthropic_event if scope["path"].startswith(ANTHROPIC_PATH) else openai_event)(error)
        else:
            raise error  # the connection is closed within the body, which is an error for the client
        await send({"type": "http.response.body", "body": last, "more_body": False})

    # requests that go to all replicas

    def _of_everyone(self, request: Request) -> Callable[..., Any] | None:
        """Returns the endpoint of a request that goes to all replicas; None for other requests."""
        path, method = request.url.path, request.method
        if path == "/metrics" and method == "GET":
            return partial(self._gathered, merged_metrics, CONTENT_TYPE.encode())
        if path == "/v1/requests" and method == "GET":
            return partial(self._gathered, merged_lists, b"application/json")
        if path.startswith("/v1/requests/") and method == "DELETE":
            return partial(self._gathered, first_found, b"application/json")
        return None

    async def _gathered(self, merge: Callable[[Mapping[str, bytes]], bytes], kind: bytes, scope: Scope,
                        receive: Receive, send: Send) -> None:
        head = _head(Request(scope, receive))
        lists = await asyncio.gather(*(_whole(each, head) for each in self._everyone))
        everything = [each for found in lists for each in found]
        found = [each for each in everything if isinstance(each, tuple)]
        if not found:
            raise BusyError("no replica answers: try again later")
        refused = [each for each in found if each[1] >= 400]
        if refused and (len(refused) == len(found) or merge is not first_found):
            status, body = refused[0][1:]
        else:
            status, pages = 200, {name: body for name, status, body in found if status < 400}
            body = await asyncio.to_thread(merge, pages)  # 100 replicas have 25,000 samples
        length = str(len(body)).encode()
        await send({"type": "http.response.start", "status": status, "headers": [
            (b"content-type", kind if status == 200 else b"application/json"), (b"content-length", length)]})
        await send({"type": "http.response.body", "body": body})


async def _whole(handle: DeploymentHandle, head: dict[str, Any]) -> list[Any]:
    """Returns the answers and exceptions of all replicas of a deployment."""
    answers = handle.broadcast("whole", head)
    try:
        return [*await answers.results_async(timeout_s=_PATIENCE, return_exceptions=True)]
    except (TimeoutError, DeploymentUnavailableError) as error:
        return [error]


def _head(request: Request) -> dict[str, Any]:
    """Returns the fields of the ASGI scope that a replica needs. The request keeps its id."""
    scope, id = request.scope, record_of(request).id
    headers = [(name, value) for name, value in scope["headers"] if name.decode("latin-1") not in ID_HEADERS]
    path = scope["path"]
    return {"method": scope["method"], "path": path, "raw_path": scope.get("raw_path", path.encode()),
            "query_string": scope["query_string"], "headers": [*headers, (ID_HEADERS[0].encode(), id.encode())],
            "client": scope.get("client"), "scheme": scope.get("scheme", "http")}


def _noted(message: Message, response: _Response) -> Message:
    """Records a replica's message. Returns it without the id headers, because the front adds these itself."""
    if message["type"] == "http.response.start":
        response.begun = True
        headers = [(name, value) for name, value in message["headers"] if name.decode("latin-1") not in ID_HEADERS]
        response.kind = dict(headers).get(b"content-type", b"")
        return {**message, "headers": headers}
    response.complete = not message.get("more_body", False)
    return message


def front_app(handle: DeploymentHandle, limits: Limits, prefill: DeploymentHandle | None = None) -> Starlette:
    """Returns the front as an application for deltic's server, or for Serve's."""
    records, reader = ActiveRequests(limits), BodyReader(limits)
    front = Front(handle, reader, limits, prefill)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(records.executors.shutdown)

    app = Starlette(routes=[Mount("/", app=front)], lifespan=lifespan, middleware=[
        Middleware(RequestRecorder, records)])
    app.state.records, app.state.work = records, front
    return app


